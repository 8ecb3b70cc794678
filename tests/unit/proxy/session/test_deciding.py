"""Requests of many elements: decided in a thread, in their turn, by the state that counts, or not at all."""

from __future__ import annotations

import asyncio
import logging
import struct
import threading
import time
from typing import Any, Final

import pytest
from support.reservations import Process, asked, started
from support.sessions import Front, answer, fronted, id_of, request, run, until

from isthmus.session.deciding import BYTES_AT_ONCE, ELEMENTS_AT_ONCE, PRODUCE_ELEMENTS_AT_ONCE
from isthmus.session.listener import Limits
from isthmus_plugins.api import ASKED_ID, NEED_MORE, Answer, Ask, Hold, Replace, Request, RequestHook, Verdict
from isthmus_plugins.aside import ANSWER_BYTES_AT_ONCE, answered_as_asked, on_loop
from isthmus_protocol import peeks
from isthmus_protocol.error_codes import INVALID_REQUEST, POLICY_VIOLATION, TOPIC_AUTHORIZATION_FAILED
from isthmus_protocol.messages import build_request, decode_request, decode_response, encode_request
from isthmus_protocol.schema import ApiKey
from isthmus_protocol.wire import MalformedFrame, NeedMore, write_uvarint

VERSION = 5
QUESTION: Final = request(ASKED_ID, body=b"may it?")


def deletion(correlation_id: int, topics: int) -> bytes:
    """A DeleteTopics of so many names of no bytes."""
    body = b"\x00" + write_uvarint(topics + 1) + b"\x01" * topics + struct.pack(">i", 30_000) + b"\x00"
    return request(correlation_id, (ApiKey.DELETE_TOPICS, VERSION), body)


class Decoding:
    """A hook that decodes, and notes where."""

    def __init__(self) -> None:
        self.on_loop: list[bool] = []
        self.asked: list[int] = []
        self.verdict: Verdict = None
        self.may_end = threading.Event()
        self.may_end.set()

    def hook(self, pure: bool = True) -> RequestHook:
        return RequestHook(ApiKey.DELETE_TOPICS, self.on_request, whole=True, pure=pure)

    def on_request(self, request: Request) -> Verdict:
        decode_request(request.frame)
        self.on_loop.append(threading.current_thread() is threading.main_thread())
        self.asked.append(request.correlation_id)
        verdict = self.verdict
        self.may_end.wait(10)
        return verdict


def refused_by(front: Front) -> dict[str, int]:
    return dict(front.gateway.closed_by_cause)


def test_few_elements_are_decided_on_the_loop_and_many_in_a_thread() -> None:
    async def main() -> None:
        decoding = Decoding()
        async with fronted(decoding.hook()) as front:
            client, upstream, _ = await front.connect()
            for correlation_id, topics in enumerate((1, ELEMENTS_AT_ONCE, ELEMENTS_AT_ONCE + 1)):
                client.send(frame := deletion(correlation_id, topics))
                assert await upstream.take() == frame
        assert decoding.on_loop == [True, True, False]

    run(main())


def test_few_elements_of_many_bytes_are_decided_in_the_thread() -> None:
    async def main() -> None:
        decoding = Decoding()
        async with fronted(decoding.hook()) as front:
            client, upstream, _ = await front.connect()
            name = b"\x00\x02" + write_uvarint(BYTES_AT_ONCE + 1) + b"n" * BYTES_AT_ONCE + bytes(5)
            client.send(frame := request(1, (ApiKey.DELETE_TOPICS, VERSION), name))
            assert await upstream.take() == frame
        assert decoding.on_loop == [False]

    run(main())


class Reading(Decoding):
    """A hook that reads the topics of a Produce as soon as it can."""

    def hook(self, pure: bool = True) -> RequestHook:
        return RequestHook(ApiKey.PRODUCE, self.on_request, pure=pure)

    def on_request(self, request: Request) -> Verdict:
        self.on_loop.append(threading.current_thread() is threading.main_thread())
        try:
            peeks.produce_topics(request.version, request.frame)
        except NeedMore:
            return NEED_MORE
        return self.verdict


def written(correlation_id: int, topics: int, records: bytes = b"") -> bytes:
    """A Produce to so many topics, of one partition each."""
    partition = b"\x02" + bytes(4) + write_uvarint(len(records) + 1) + records + b"\x00"
    body = b"\x00\x00" + struct.pack(">hi", -1, 30_000) + write_uvarint(topics + 1)
    return request(correlation_id, (ApiKey.PRODUCE, 9), body + (b"\x02t" + partition + b"\x00") * topics + b"\x00")


def test_a_produce_is_decided_in_the_thread_where_it_has_many_topics_not_many_bytes() -> None:
    async def main() -> None:
        for pure in (True, False):
            reading = Reading()
            async with fronted(reading.hook(pure), RequestHook(ApiKey.PRODUCE, lambda _: None, pure=True)) as front:
                client, upstream, _ = await front.connect()
                client.send(frame := written(1, PRODUCE_ELEMENTS_AT_ONCE // 2, records=bytes(BYTES_AT_ONCE // 16)))
                assert len(frame) > BYTES_AT_ONCE
                assert await upstream.take() == frame
                assert set(reading.on_loop) == {True}
                reading.on_loop.clear()
                client.send(frame := written(2, PRODUCE_ELEMENTS_AT_ONCE // 2 + 1), request(3))
                assert [await upstream.take() for _ in range(2)] == [frame, request(3)]
                assert reading.on_loop[-1] is not pure

    run(main())


def test_of_a_produce_to_many_topics_that_has_not_come_as_a_whole_nothing_is_read() -> None:
    async def main() -> None:
        reading = Reading()
        async with fronted(reading.hook()) as front:
            client, upstream, session = await front.connect()
            frame = written(1, 5_000)
            client.send(frame[: len(frame) // 2])
            await until(lambda: reading.on_loop == [True])
            assert not session.pending
            client.send(frame[len(frame) // 2 :])
            assert await upstream.take() == frame
            assert reading.on_loop == [True, True, False]

    run(main())


def test_requests_behind_one_that_is_decided_wait_and_other_clients_do_not() -> None:
    async def main() -> None:
        decoding = Decoding()
        async with fronted(decoding.hook()) as front:
            client, upstream, _ = await front.connect()
            other, others, _ = await front.connect()
            decoding.may_end.clear()
            client.send(deletion(1, 5_000), request(2))
            other.send(request(3))
            assert id_of(await others.take()) == 3
            await until(lambda: decoding.asked == [1])
            decoding.may_end.set()
            assert [id_of(await upstream.take()) for _ in range(2)] == [1, 2]
            upstream.send(answer(1), answer(2))
            assert [id_of(await client.take(), request_frame=False) for _ in range(2)] == [1, 2]

    run(main())


def test_a_verdict_from_the_thread_counts() -> None:
    async def main() -> None:
        decoding = Decoding()
        async with fronted(decoding.hook()) as front:
            client, upstream, _ = await front.connect()
            decoding.verdict = Answer(answer(1, b"no"), "test")
            client.send(deletion(1, 5_000))
            assert await client.take() == answer(1, b"no")

            async def awaited() -> Verdict:
                assert threading.current_thread() is threading.main_thread()
                return Replace(deletion(2, 1))

            decoding.verdict = Hold(awaited())
            client.send(deletion(2, 5_000))
            assert await upstream.take() == deletion(2, 1)

    run(main())


def test_more_elements_than_the_limit_end_the_connection() -> None:
    async def main() -> None:
        for pure in (True, False):
            decoding = Decoding()
            async with fronted(decoding.hook(pure), limits=Limits(request_elements_max=2_000)) as front:
                client, upstream, session = await front.connect()
                client.send(deletion(1, 2_000))
                await upstream.take()
                client.send(deletion(2, 2_001))
                assert await client.closed() == b""
                assert session.close_cause == "oversized request"
                assert refused_by(front) == {"oversized request": 1}
            assert decoding.on_loop == [not pure]

    run(main())


@pytest.mark.parametrize("pure", [True, False])
def test_more_elements_are_answered_where_one_error_says_all(pure: bool) -> None:
    def on_request(request: Request) -> Verdict:
        decode_request(request.frame)
        return None

    async def main() -> None:
        values = {"group_id": "g", "topics": [{"name": str(each), "partition_indexes": []} for each in range(2_001)]}
        frame = encode_request(build_request(ApiKey.OFFSET_FETCH, 7, values), 1, None)
        offset_fetch = RequestHook(ApiKey.OFFSET_FETCH, on_request, whole=True, pure=pure)
        async with fronted(offset_fetch, limits=Limits(request_elements_max=2_000)) as front:
            client, upstream, _ = await front.connect()
            client.send(frame, request(2))
            answered: Any = decode_response(ApiKey.OFFSET_FETCH, 7, await client.take())[1]
            assert (int(answered.error_code), answered.topics) == (INVALID_REQUEST, ())
            assert await upstream.take() == request(2)
            assert front.gateway.refused_by_cause["too_many_elements"] == 1

    run(main())


def test_a_million_elements_cost_the_loop_nothing() -> None:
    async def main() -> None:
        async with fronted(Decoding().hook()) as front:
            client, _, _ = await front.connect()
            frame = deletion(1, 1_000_000)
            began = time.process_time()
            client.send(frame)
            assert await client.closed() == b""
            assert time.process_time() - began < 0.2  # 2.5 s were it decoded

    run(main())


def test_a_hook_that_is_not_pure_is_asked_on_the_loop() -> None:
    async def main() -> None:
        decoding, beside = Decoding(), Decoding()
        async with fronted(decoding.hook(), beside.hook(pure=False)) as front:
            client, upstream, _ = await front.connect()
            client.send(deletion(1, 5_000))
            await upstream.take()
        assert decoding.on_loop == beside.on_loop == [True]

    run(main())


def test_what_a_fence_or_the_end_of_a_lease_overtakes_is_decided_anew() -> None:
    async def main() -> None:
        decoding = Decoding()
        async with fronted(decoding.hook()) as front:
            client, upstream, _ = await front.connect()
            decoding.may_end.clear()
            client.send(deletion(1, 5_000))
            await until(lambda: decoding.asked == [1])
            await front.gateway.fence()  # no write has been forwarded that it must wait for
            decoding.verdict = Answer(answer(1, b"reserved"), "test")
            decoding.may_end.set()
            assert await client.take() == answer(1, b"reserved")
            assert decoding.asked == [1, 1]

            decoding.asked.clear()
            decoding.verdict = None
            decoding.may_end.clear()
            client.send(deletion(2, 5_000))
            await until(lambda: decoding.asked == [2])
            front.gateway.vouches_until = lambda: float("-inf")
            decoding.may_end.set()
            await upstream.take()
            assert decoding.asked == [2, 2]

    run(main())


@pytest.mark.parametrize("waits_for", ["what a hook awaits", "the broker"])
@pytest.mark.parametrize("overtaken_by", ["a fence", "the end of the lease"])
def test_so_is_a_small_write_that_waited_whatever_for_by_all_hooks(waits_for: str, overtaken_by: str) -> None:
    async def main() -> None:
        decoding, waiting = Decoding(), asyncio.Event()

        async def awaited() -> Verdict:
            await waiting.wait()
            return None

        def behind(request: Request) -> Verdict:
            return Hold(awaited()) if waits_for == "what a hook awaits" else Ask(QUESTION, lambda told: None)

        async with fronted(decoding.hook(), RequestHook(ApiKey.DELETE_TOPICS, behind, whole=True)) as front:
            client, upstream, _ = await front.connect()

            async def goes_on() -> None:
                if waits_for == "the broker":
                    assert await upstream.take() == QUESTION
                    upstream.send(answer(ASKED_ID))
                waiting.set()

            client.send(first := deletion(1, 1))
            await goes_on()
            assert await upstream.take() == first
            upstream.send(answer(1))
            await client.take()
            assert decoding.asked == [1]

            waiting.clear()
            client.send(deletion(2, 1))
            await until(lambda: decoding.asked == [1, 2])
            decoding.verdict = Answer(answer(2, b"reserved"), "test")
            if overtaken_by == "a fence":
                await front.gateway.fence()
            else:
                front.gateway.vouches_until = lambda: float("-inf")
            await goes_on()
            assert await client.take() == answer(2, b"reserved")
            assert decoding.asked == [1, 2, 2]

    run(main())


def test_what_a_hook_asks_the_broker_about_a_large_request_it_goes_on_with_in_the_thread() -> None:
    async def main() -> None:
        threads: list[tuple[str, bool]] = []

        def note(what: str) -> None:
            threads.append((what, threading.current_thread() is threading.main_thread()))

        def on_request(request: Request) -> Verdict:
            decode_request(request.frame)

            def read(told: bytes) -> bytes:
                note("read")
                return told[8:]

            def then(told: bytes) -> Verdict:
                note("then")
                on_loop(note, "told")
                return Answer(answer(request.correlation_id, told[:3]), "test")

            return Ask(QUESTION, then, read)

        async with fronted(RequestHook(ApiKey.DELETE_TOPICS, on_request, whole=True, pure=True)) as front:
            client, upstream, _ = await front.connect()
            for correlation_id, topics, told in ((1, 1, b"yes"), (2, 1, b"yes" * 10_000), (3, 5_000, b"yes")):
                client.send(deletion(correlation_id, topics))
                assert await upstream.take() == QUESTION
                upstream.send(answer(ASKED_ID, told))
                assert await client.take() == answer(correlation_id, b"yes")
                await until(lambda: len(threads) == 3)
                small, little = topics == 1, len(told) == 3
                assert threads == [("read", little), ("then", small), ("told", True)]
                threads.clear()
            assert front.gateway.queued_bytes.left == front.gateway.limits.queued_bytes_max

    run(main())


def test_an_answer_of_the_proxys_own_is_seen_in_the_thread_by_a_hook_that_refused_a_part() -> None:
    async def main() -> None:
        def in_part(request: Request) -> Verdict:
            decode_request(request.frame)
            return Replace(bytes(request.frame), answered_as_asked(request, seen))

        def seen(frame: bytes) -> bytes:
            return answer(id_of(frame, request_frame=False), b"seen")

        def whole(request: Request) -> Verdict:
            return Answer(answer(request.correlation_id, b"no"), "test")

        hooks = (RequestHook(ApiKey.DELETE_TOPICS, each, whole=True, pure=True) for each in (in_part, whole))
        async with fronted(*hooks) as front:
            client, _, session = await front.connect()
            client.send(deletion(1, 5_000))
            assert await client.take() == answer(1, b"seen")
            assert not session.close_cause

    run(main())


def test_what_large_requests_are_refused_without_a_word_is_logged_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        process = Process()
        hooks = started(process).isthmus_request_hooks()
        process.reserve("closed-")
        names = [f"closed-{number}" for number in range(5_000)]
        values = {"topics": [{"name": name} for name in names], "timeout": 1}
        frame = encode_request(build_request(ApiKey.DELETE_TOPICS, 6, values), 7, None)
        async with fronted(*hooks) as front:
            client, upstream, session = await front.connect()
            client.send(frame)
            upstream.send(asked(await upstream.take(), describes=names[1:]))
            _, payload = decode_response(ApiKey.DELETE_TOPICS, 6, await client.take())
            codes = {topic.name: int(topic.error_code) for topic in payload.responses}  # type: ignore[attr-defined]
            assert codes == {names[0]: TOPIC_AUTHORIZATION_FAILED, **dict.fromkeys(names[1:], POLICY_VIOLATION)}
            await until(lambda: "refused without saying why, to who may not describe it" in caplog.messages)
            assert not session.close_cause

    with caplog.at_level(logging.INFO):
        run(main())


def test_a_produce_of_many_topics_that_are_reserved_is_refused_in_the_thread() -> None:
    async def main() -> None:
        process = Process()
        hooks = started(process).isthmus_request_hooks()
        process.reserve("closed-")
        (on_produce,) = (each.on_request for each in hooks if each.api_key == ApiKey.PRODUCE)
        names = [f"closed-{number}" for number in range(200)]
        topics = [{"name": name, "partition_data": [{"index": 0, "records": b"r"}]} for name in names]

        def written(some: list[dict[str, Any]]) -> bytes:
            values = {"acks": -1, "timeout": 1, "topic_data": some}
            return encode_request(build_request(ApiKey.PRODUCE, 9, values), 7, None)

        async with fronted(*hooks) as front:
            client, upstream, session = await front.connect()
            for some in (topics[:2], topics):
                frame = written(some)
                verdict = on_produce(Request(frame, True, ApiKey.PRODUCE, 9, 7, time.monotonic(), session.client))
                assert isinstance(verdict, Ask if len(some) == 2 else Hold)
                if isinstance(verdict, Hold):
                    assert isinstance(await verdict.verdict, Ask)
                client.send(frame)
                upstream.send(asked(await upstream.take(), describes=names))
                _, payload = decode_response(ApiKey.PRODUCE, 9, await client.take())
                codes = [topic.partition_responses[0].error_code for topic in payload.responses]  # type: ignore[attr-defined]
                assert codes == [INVALID_REQUEST] * len(some)

    run(main())


def test_a_client_that_leaves_meanwhile_leaves_nothing_behind() -> None:
    async def main() -> None:
        decoding = Decoding()
        async with fronted(decoding.hook()) as front:
            client, upstream, session = await front.connect()
            decoding.may_end.clear()
            client.send(deletion(1, 5_000))
            await until(lambda: decoding.asked == [1])
            session.close("test")
            decoding.may_end.set()
            assert await upstream.closed() == b""
            await until(lambda: not front.gateway.sessions)

    run(main())


def test_the_answer_to_a_large_request_is_read_in_the_thread_and_keeps_its_turn() -> None:
    async def main() -> None:
        threads: list[bool] = []

        def on_request(request: Request) -> Verdict:
            decode_request(request.frame)

            def seen(frame: bytes) -> bytes:
                threads.append(threading.current_thread() is threading.main_thread())
                if frame[8:] == b"bad":
                    raise MalformedFrame("bad")
                return answer(id_of(frame, request_frame=False), b"seen")

            return Replace(request.frame, answered_as_asked(request, seen))

        async with fronted(RequestHook(ApiKey.DELETE_TOPICS, on_request, whole=True, pure=True)) as front:
            client, upstream, session = await front.connect()
            client.send(deletion(1, 1), deletion(2, 5_000), request(3))
            for _ in range(3):
                await upstream.take()
            upstream.send(answer(1), answer(2), answer(3))
            assert [await client.take() for _ in range(3)] == [answer(1, b"seen"), answer(2, b"seen"), answer(3)]
            assert threads == [True, False]
            client.send(deletion(5, 1))
            await upstream.take()
            upstream.send(answer(5, b"large" * ANSWER_BYTES_AT_ONCE))
            assert await client.take() == answer(5, b"seen")
            assert threads == [True, False, False]
            client.send(deletion(4, 5_000))
            await upstream.take()
            upstream.send(answer(4, b"bad"))
            assert await client.closed() == b""
            assert session.close_cause == "malformed answer"

    run(main())
