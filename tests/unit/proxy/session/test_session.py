"""Sessions on real sockets: a scripted broker on one side, a raw client on the other, frames made by hand."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hashlib
import itertools
import logging
import os
import random
import socket
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import product
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from support.descriptors import few_left
from support.sessions import (
    OPAQUE,
    PRODUCE_VERSION,
    Front,
    Wire,
    answer,
    fetch,
    fetched,
    fronted,
    hook,
    hooked,
    id_of,
    produce,
    request,
    resident_bytes,
    run,
    say_whether_sasl,
    settled,
    stalled,
    tls_contexts,
    until,
)

from isthmus import memory
from isthmus.session.dispatch import compile_routes
from isthmus.session.downstream import KNOWN_HEADS_MAX, Downstream
from isthmus.session.endpoint import Endpoint
from isthmus.session.listener import Limits
from isthmus.session.session import TRANSITIONS, Session, SessionEvent, SessionState
from isthmus.session.upstream import Upstream
from isthmus_plugins import dialling
from isthmus_plugins.api import (
    ASKED_ID,
    NEED_MORE,
    Answer,
    Ask,
    Client,
    Close,
    Hold,
    Leave,
    Replace,
    Request,
    RequestHook,
    ResponseHook,
    Verdict,
)
from isthmus_protocol import schema
from isthmus_protocol.bodies import build
from isthmus_protocol.messages import build_request, decode_response, encode_request, encode_response
from isthmus_protocol.schema import ApiKey
from isthmus_protocol.wire import MalformedFrame

# ---- answers in order ----


def test_requests_and_answers_pass_unchanged_and_in_order() -> None:
    async def main() -> None:
        async with fronted() as front:
            client, upstream, session = await front.connect()
            frames = [request(number, body=os.urandom(number % 300)) for number in range(900)]
            client.send(*frames[:500])
            for frame in frames[500:]:
                client.send(frame)
            received = [await upstream.take() for _ in frames]
            assert received == frames
            answers = [answer(number, os.urandom(number % 300)) for number in range(900)]
            upstream.send(*answers[:500])
            for frame in answers[500:]:
                upstream.send(frame)
            assert [await client.take() for _ in answers] == answers
            assert not session.pending

    run(main())


def test_what_a_client_sends_before_the_broker_is_connected_is_kept() -> None:
    async def main() -> None:
        async with fronted() as front:
            connect = front.listener._connect
            proceed = asyncio.Event()

            async def late(session: Session) -> None:
                await proceed.wait()
                await connect(session)

            front.listener._connect = late  # type: ignore[method-assign]
            client = await front.dial()
            early = [request(number) for number in range(10)]
            client.send(*early[:5])
            await until(lambda: front.gateway.bytes_from_clients > 0)
            client.send(*early[5:])
            proceed.set()
            upstream = await front.broker.accept()
            assert [await upstream.take() for _ in early] == early

    run(main())


def test_the_proxys_own_answers_take_their_turn() -> None:
    async def main() -> None:
        own = hook(lambda request: Answer(answer(request.correlation_id, b"own"), "test"))
        async with fronted(own) as front:
            client, upstream, session = await front.connect()
            client.send(hooked(0), request(1), hooked(2), hooked(3), request(4), hooked(5))
            assert await client.take() == answer(0, b"own")
            assert [id_of(await upstream.take()) for _ in range(2)] == [1, 4]
            upstream.send(answer(1), answer(4))
            assert [id_of(await client.take(), False) for _ in range(5)] == [1, 2, 3, 4, 5]
            assert not session.pending
            assert front.gateway.refused_by_cause == {"test": 4}

    run(main())


def test_an_own_answer_waits_for_the_end_of_a_streamed_one() -> None:
    async def main() -> None:
        own = hook(lambda request: Answer(answer(request.correlation_id, b"own"), "test"))
        async with fronted(own) as front:
            client, upstream, session = await front.connect()
            client.send(request(1), hooked(2))
            await upstream.take()
            whole = answer(1, os.urandom(100_000))
            upstream.send(whole[:50_000])
            assert await client.reader.readexactly(50_000) == whole[:50_000]
            client.send(hooked(3))  # its answer is there while that to 1 is half through
            await until(lambda: len(session.pending) == 2)
            upstream.send(whole[50_000:])
            assert await client.reader.readexactly(len(whole) - 50_000) == whole[50_000:]
            assert [await client.take() for _ in range(2)] == [answer(2, b"own"), answer(3, b"own")]

    run(main())


# ---- verdicts ----


def test_a_replaced_request_has_its_answer_rewritten() -> None:
    def replace(request: Request) -> Verdict:
        other = hooked(request.correlation_id, b"other")
        return Replace(other, lambda frame: answer(id_of(frame, False), frame[8:] + b"+"), "partly")

    async def main() -> None:
        async with fronted(hook(replace)) as front:
            client, upstream, _ = await front.connect()
            client.send(request(1), hooked(2, b"one"), request(3))
            assert [await upstream.take() for _ in range(3)] == [request(1), hooked(2, b"other"), request(3)]
            upstream.send(answer(1, b"a"), answer(2, b"b"), answer(3, b"c"))
            assert [await client.take() for _ in range(3)] == [answer(1, b"a"), answer(2, b"b+"), answer(3, b"c")]
            assert front.gateway.refused_by_cause == {"partly": 1}

    run(main())


@pytest.mark.parametrize("outcome", ["forward", "answer", "replace", "hold again"])
def test_a_held_request_holds_those_behind_it(outcome: str) -> None:
    proceed = asyncio.Event()

    async def verdict(request: Request) -> Verdict:
        await proceed.wait()
        match outcome:
            case "answer":
                return Answer(answer(request.correlation_id, b"own"), "test")
            case "replace":
                return Replace(hooked(request.correlation_id, b"other"))
            case "hold again":
                return Hold(asyncio.sleep(0, None))
        return None

    async def main() -> None:
        async with fronted(hook(lambda request: Hold(verdict(request)))) as front:
            client, upstream, _ = await front.connect()
            client.send(request(1), hooked(2), request(3), hooked(4), request(5))
            assert await upstream.take() == request(1)
            upstream.send(answer(1))
            assert await client.take() == answer(1)  # what went before is not held
            client.send(request(6))
            await settled(front)  # neither are other connections
            proceed.set()
            expected = {
                "answer": [request(3), request(5), request(6)],
                "replace": [request(3), request(5), request(6), hooked(2, b"other"), hooked(4, b"other")],
            }.get(outcome, [hooked(2), request(3), hooked(4), request(5), request(6)])
            arrived = [await upstream.take() for _ in expected]
            assert sorted(map(id_of, arrived)) == list(map(id_of, arrived))
            assert sorted(arrived) == sorted(expected)
            upstream.send(*(answer(id_of(frame)) for frame in arrived))
            assert [id_of(await client.take(), False) for _ in range(5)] == [2, 3, 4, 5, 6]

    run(main())


QUESTION = request(ASKED_ID, body=b"may it?")


@pytest.mark.parametrize("outcome", ["forward", "answer", "replace", "ask again", "hold"])
def test_what_a_hook_asks_is_asked_on_the_clients_connection_and_answered_to_the_hook_alone(outcome: str) -> None:
    asked: list[bytes] = []

    def on_request(request: Request) -> Verdict:
        def then(told: bytes) -> Verdict:
            asked.append(told)
            match outcome:
                case "answer":
                    return Answer(answer(request.correlation_id, b"own"), "test")
                case "replace":
                    return Replace(hooked(request.correlation_id, b"other"))
                case "hold":
                    return Hold(asyncio.sleep(0, None))
                case "ask again" if len(asked) < 2:
                    return Ask(QUESTION, then)
            return None

        return Ask(QUESTION, then)

    async def main() -> None:
        async with fronted(hook(on_request)) as front:
            client, upstream, session = await front.connect()
            client.send(request(1), hooked(2), request(3))
            assert [await upstream.take() for _ in range(2)] == [request(1), QUESTION]
            assert session.downstream.busy
            told = answer(ASKED_ID, b"yes")
            upstream.send(answer(1) + told[:5])
            assert await client.take() == answer(1), "what went before is not held"
            client.send(request(4))
            upstream.send(told[5:])
            if outcome == "ask again":
                assert await upstream.take() == QUESTION
                upstream.send(told)
            expected = {
                "answer": [request(3), request(4)],
                "replace": [hooked(2, b"other"), request(3), request(4)],
            }.get(outcome, [hooked(2), request(3), request(4)])
            arrived = [await upstream.take() for _ in expected]
            assert arrived == expected
            upstream.send(*(answer(id_of(frame)) for frame in arrived))
            assert [id_of(await client.take(), False) for _ in range(3)] == [2, 3, 4]
            assert set(asked) == {told}
            assert not session.downstream.busy
            await settled(front)

    run(main())


@pytest.mark.parametrize("end", ["client", "broker", "fails", "drain"])
def test_what_is_asked_when_a_session_ends(end: str) -> None:
    def then(told: bytes) -> Verdict:
        if end == "fails":
            raise LookupError("no verdict")
        return Answer(answer(2, b"own"), "test")

    async def main() -> None:
        async with fronted(hook(lambda request: Ask(QUESTION, then))) as front:
            client, upstream, session = await front.connect()
            client.send(hooked(2))
            assert await upstream.take() == QUESTION
            if end == "client":
                await client.close()
                upstream.send(answer(ASKED_ID, b"yes"))
            elif end == "broker":
                await upstream.close()
                assert await client.closed() == b""
            else:
                if end == "drain":
                    session.drain()
                upstream.send(answer(ASKED_ID, b"yes"))
                assert await client.closed() == (answer(2, b"own") if end == "drain" else b"")
            if end == "drain":
                await client.close()
            await until(lambda: session.state is SessionState.CLOSED)
            cause = {"client": "client closed", "broker": "broker closed", "fails": "hook failed", "drain": "drained"}
            assert session.close_cause == cause[end]
            await settled(front)

    run(main())


async def _failing() -> Verdict:
    raise LookupError("no verdict")


def _raising(request: Request) -> Verdict:
    raise LookupError("no verdict")


def _bad_answer(frame: bytes) -> bytes:
    raise LookupError("no answer")


@pytest.mark.parametrize(
    ("on_request", "cause"),
    [
        (lambda request: Close("because"), "refused"),
        (_raising, "hook failed"),
        (lambda request: Hold(_failing()), "hook failed"),
        (lambda request: NEED_MORE, "hook failed"),
        (lambda request: Replace(request.frame, _bad_answer), "hook failed"),
    ],
    ids=["close", "raises", "raises later", "insatiable", "answer raises"],
)
def test_a_refused_connection_closes_and_others_go_on(on_request: Callable[[Request], Verdict], cause: str) -> None:
    async def main() -> None:
        async with fronted(hook(on_request)) as front:
            client, upstream, session = await front.connect()
            client.send(request(1))
            await upstream.take()
            upstream.send(answer(1))
            assert await client.take() == answer(1)
            client.send(hooked(2))
            with contextlib.suppress(asyncio.IncompleteReadError):
                upstream.send(answer(id_of(await upstream.take())))
            assert await client.closed() == b""
            assert session.close_cause == cause
            assert front.gateway.closed_by_cause == {cause: 1}
            await settled(front)

    run(main())


def test_hooks_see_a_prefix_first_and_the_whole_frame_if_they_ask() -> None:
    seen: list[tuple[int, bool, int]] = []

    def on_produce(request: Request) -> Verdict:
        seen.append((request.correlation_id, request.whole, len(request.frame)))
        if request.correlation_id == 1 or request.whole:
            return None
        return (
            NEED_MORE if request.correlation_id == 2 else Hold(_failing())
        )  # for 3: nothing counts before all is there

    async def main() -> None:
        async with fronted(hook(on_produce, whole=False, api_key=ApiKey.PRODUCE)) as front:
            client, upstream, session = await front.connect()
            frames = [produce(number, records=os.urandom(100_000)) for number in (1, 2, 3)]
            for frame in frames:
                sent = len(seen)
                client.send(frame[:1000])
                await until(lambda sent=sent: len(seen) > sent)  # type: ignore[misc]
                forwarded = front.gateway.bytes_from_clients
                if id_of(frame) == 1:
                    assert await upstream.reader.readexactly(1000) == frame[:1000]
                    client.send(frame[1000:])
                    assert await upstream.reader.readexactly(len(frame) - 1000) == frame[1000:]
                else:
                    assert session.downstream._partial == frame[:1000]
                    client.send(frame[1000:])
                    assert await upstream.take() == frame
                assert front.gateway.bytes_from_clients == forwarded + len(frame) - 1000
            assert seen[0] == (1, False, 1000)
            assert [each for each in seen if each[1]] == [(n, True, len(frames[n - 1])) for n in (2, 3)]

    run(main())


# ---- acks=0 ----


def test_a_produce_with_acks_0_has_no_answer() -> None:
    async def main() -> None:
        async with fronted() as front:
            client, upstream, session = await front.connect()
            frames = [request(1), produce(2, acks=0), produce(3, acks=1), produce(4, acks=0), request(5)]
            client.send(*frames)
            assert [await upstream.take() for _ in frames] == frames
            assert session.acks0_behind == 2
            for number, left in ((1, 1), (3, 0), (5, -1)):
                upstream.send(answer(number))
                assert await client.take() == answer(number)
                assert session.acks0_behind == left
            assert not session.has_unanswered_write()

    run(main())


@pytest.mark.parametrize("acks", [0, 1])
def test_acks_are_found_however_little_of_a_frame_is_there(acks: int) -> None:
    async def main() -> None:
        async with fronted() as front:
            _, upstream, session = await front.connect()
            frame = produce(7, acks=acks, records=b"r" * 50)
            for split in range(1, len(frame)):
                session.downstream.data_received(frame[:split])
                session.downstream.data_received(frame[split:])
                assert await upstream.take() == frame
                assert len(session.pending) == acks
                session.pending.clear()
                session.acks0_behind = -1

    run(main())


# ---- any split ----


@pytest.mark.parametrize("api_versions", [1, 3])
def test_frames_split_at_every_byte(api_versions: int) -> None:
    def decide(request: Request) -> Verdict:
        return Answer(answer(request.correlation_id, b"own"), "test") if request.correlation_id % 2 else None

    ask = encode_request(build_request(ApiKey.API_VERSIONS, api_versions, {}), 3, "client")
    told = build(
        schema.response_type(ApiKey.API_VERSIONS, api_versions),
        {"api_keys": [{"api_key": 0, "min_version": 0, "max_version": 12}]},
    )
    requests = [
        request(1, body=b"x" * 9),
        hooked(2, b"y" * 5),
        ask,
        produce(4, acks=0),
        produce(5),
        hooked(7),
        fetch(6),
    ]
    forwarded = [frame for frame in requests if id_of(frame) != 7]
    answers = [
        answer(1, b"a" * 9),
        answer(2),
        encode_response(told, 3),
        answer(5, b"p" * 30),
        answer(7, b"own"),
        fetched(6, b"r" * 50),
    ]
    answers_in = [frame for frame in answers if id_of(frame, False) != 7]

    async def main() -> None:
        async with fronted(hook(decide)) as front:
            client, upstream, session = await front.connect()
            there, back = b"".join(requests), b"".join(answers_in)
            cuts = [[cut] for cut in range(1, len(there))] + [list(range(1, len(there)))]
            for cut in cuts:
                for start, end in zip([0, *cut], [*cut, len(there)], strict=True):
                    session.downstream.data_received(there[start:end])
                assert [await upstream.take() for _ in forwarded] == forwarded
                assert session.upstream is not None
                where = [each for each in cut if each < len(back)]
                for start, end in zip([0, *where], [*where, len(back)], strict=True):
                    session.upstream.data_received(back[start:end])
                got = [await client.take() for _ in answers]
                assert got[:2] + got[3:5] == answers[:2] + answers[3:5]
                assert id_of(got[2], False) == 3
                assert got[5][4:-60] == answers[5][4 : len(got[5]) - 60]
                assert b"broker.internal" not in got[5]
                assert not session.pending
                assert session.acks0_behind == -1
            for cut in range(1, len(back)):
                session.downstream.data_received(there)
                for frame in forwarded:
                    assert await upstream.take() == frame
                assert session.upstream is not None
                session.upstream.data_received(back[:cut])
                session.upstream.data_received(back[cut:])
                for expected in answers:
                    assert id_of(await client.take(), False) == id_of(expected, False)

    run(main())


# ---- what no peer may send ----


@pytest.mark.parametrize(
    ("bytes_sent", "cause"),
    [
        (struct.pack(">ihhih", 9, *OPAQUE, 1, -1), "malformed request"),
        (struct.pack(">ihhih", 0, *OPAQUE, 1, -1), "malformed request"),
        (struct.pack(">ihhih", -1, *OPAQUE, 1, -1), "malformed request"),
        (struct.pack(">ihhih", 5_000, *OPAQUE, 1, -1), "oversized request"),
        (struct.pack(">ihhih", 10, 999, 0, 1, -1), "malformed request"),
        (struct.pack(">ihhih", 10, -1, 0, 1, -1), "malformed request"),
        (struct.pack(">ihhih", 10, ApiKey.FETCH, 99, 1, -1), "malformed request"),
        (b"GET / HTTP/1.1\r\nHost: broker\r\n\r\n", "malformed request"),
        (bytes(64), "malformed request"),
        (request(1, (ApiKey.PRODUCE, PRODUCE_VERSION), b"\xff"), "malformed request"),
    ],
    ids=["short", "empty", "negative", "oversized", "api", "negative api", "version", "http", "zeros", "body"],
)
def test_malformed_requests_close_their_connection_alone(bytes_sent: bytes, cause: str) -> None:
    async def main() -> None:
        async with fronted(limits=Limits(frame_bytes_max=4_000)) as front:
            other_client, other_upstream, _ = await front.connect()
            client, _, session = await front.connect()
            client.send(bytes_sent)
            assert await client.closed() == b""
            assert session.close_cause == cause
            other_client.send(request(1))
            assert await other_upstream.take() == request(1)

    run(main())


def test_faults_are_logged_with_their_reason_and_session_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with fronted() as front:
            client, _, session = await front.connect()
            client.send(request(1, (999, 0)))
            await client.closed()
            (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
            assert record.message == "connection refused by protocol"
            fields = vars(record)
            assert fields["cause"] == "malformed request"
            assert fields["session"] == session.client.session_id
            assert "API key 999 version 0" in fields["detail"]
            for number in range(200):
                client, _, _ = await front.connect()
                client.send(b"GET / HTTP/1.1\r\n\r\n" if number % 2 else request(1, (999, 0)))
                await client.closed()
            assert [record for record in caplog.records if record.levelno == logging.WARNING] == [record]

    run(main())


@pytest.mark.parametrize(
    ("bytes_sent", "cause"),
    [
        (answer(2), "answer out of order"),
        (answer(1) + answer(1), "answer out of order"),
        (struct.pack(">ii", 3, 1), "oversized answer"),
        (struct.pack(">ii", -1, 1), "oversized answer"),
    ],
)
def test_malformed_answers_close_the_connection(bytes_sent: bytes, cause: str) -> None:
    async def main() -> None:
        async with fronted(limits=Limits(frame_bytes_max=4_000)) as front:
            client, upstream, session = await front.connect()
            client.send(request(1))
            await upstream.take()
            upstream.send(bytes_sent)
            await client.closed()
            assert session.close_cause == cause
            assert await upstream.closed() == b""

    run(main())


def test_answers_are_bounded_where_they_are_kept_and_not_where_they_stream() -> None:
    async def main() -> None:
        async with fronted(limits=Limits(frame_bytes_max=4_000)) as front:
            client, upstream, session = await front.connect()
            client.send(request(1), encode_request(build_request(ApiKey.METADATA, 12, {}), 2, None))
            for _ in range(2):
                await upstream.take()
            large = answer(1, b"x" * 5_000)
            upstream.send(large)
            assert await client.take() == large
            upstream.send(struct.pack(">ii", 5_000, 2))
            await client.closed()
            assert session.close_cause == "oversized answer"

    run(main())


def test_an_answer_that_cannot_be_rewritten_closes_the_connection() -> None:
    async def main() -> None:
        async with fronted() as front:
            client, upstream, session = await front.connect()
            client.send(encode_request(build_request(ApiKey.METADATA, 12, {}), 1, None))
            await upstream.take()
            upstream.send(answer(1, b"\xff" * 20))
            assert await client.closed() == b""
            assert session.close_cause == "malformed answer"

    run(main())


def test_api_versions_newer_than_the_proxy_is_answered_as_kip_511_says() -> None:
    async def main() -> None:
        async with fronted() as front:
            client, upstream, _ = await front.connect()
            for version in (99, 0x7FFF):
                client.send(request(5, (ApiKey.API_VERSIONS, version), b"\x00whatever"))
                number, payload = decode_response(ApiKey.API_VERSIONS, 0, await client.take())
                assert (number, payload.error_code) == (5, 35)  # type: ignore[attr-defined]
                assert ApiKey.API_VERSIONS in {each.api_key for each in payload.api_keys}  # type: ignore[attr-defined]
            client.send(request(6))
            assert await upstream.take() == request(6)
            assert front.gateway.refused_by_cause == {"unsupported_api_versions": 2}
            assert len(front.gateway.routes) == len(compile_routes((), lambda *_: None))

    run(main())


# ---- memory and back-pressure ----

GROWTH_BYTES_MAX = 6 * 1024 * 1024
"""Of the process that holds client, proxy and broker, with their socket buffers' user side."""


def test_a_slow_consumer_of_a_large_fetch_does_not_grow_the_process() -> None:
    async def main() -> None:
        async with fronted() as front:
            client, upstream, session = await front.connect()
            records = os.urandom(1 << 20) * 50
            frame = fetched(1, records)
            del records
            for _ in range(2):  # what the first one leaves behind, it leaves once
                client.send(fetch(1))
                await upstream.take()
                before = resident_bytes()
                start = front.gateway.bytes_from_brokers
                sending = asyncio.ensure_future(_send_slowly(upstream, frame))  # noqa: TID251
                await until(lambda start=start: front.gateway.bytes_from_brokers > start + (1 << 20))  # type: ignore[misc]
                await stalled(front)
                taken = front.gateway.bytes_from_brokers - start
                assert taken < 20 << 20, "socket buffers are smaller than that"
                assert session.upstream is not None
                assert resident_bytes() - before < GROWTH_BYTES_MAX
                digest = hashlib.sha256()
                tail = b""
                left = len(frame)
                while left:
                    chunk = await client.reader.read(1 << 16)
                    left -= len(chunk)
                    digest.update(tail[:-100] if left > 100 else b"")
                    tail = chunk
                await sending
                assert b"broker.internal" not in tail
                assert resident_bytes() - before < GROWTH_BYTES_MAX
                assert not session.pending

    run(main())


async def _send_slowly(wire: Wire, data: bytes) -> None:
    view = memoryview(data)
    for start in range(0, len(data), 1 << 16):
        wire.writer.write(view[start : start + (1 << 16)])
        await wire.writer.drain()


def test_a_slow_broker_stops_the_reading_of_its_client() -> None:
    async def main() -> None:
        async with fronted() as front:
            client, upstream, session = await front.connect()
            frame = produce(1, records=os.urandom(1 << 20) * 50)
            before = resident_bytes()
            sending = asyncio.ensure_future(_send_slowly(client, frame))  # noqa: TID251
            await until(lambda: front.gateway.bytes_from_clients > 1 << 20)
            await stalled(front)
            assert front.gateway.bytes_from_clients < 20 << 20
            assert resident_bytes() - before < GROWTH_BYTES_MAX
            digest, left = hashlib.sha256(), len(frame)
            while left:
                chunk = await upstream.reader.read(1 << 16)
                digest.update(chunk)
                left -= len(chunk)
            await sending
            assert digest.digest() == hashlib.sha256(frame).digest()
            upstream.send(answer(1))
            assert await client.take() == answer(1)
            assert len(session.pending) == 0

    run(main())


def test_too_many_requests_in_flight_pause_the_client() -> None:
    async def main() -> None:
        async with fronted(limits=Limits(in_flight_max=4)) as front:
            client, upstream, session = await front.connect()
            sent = 0
            while not session.downstream.throttled:
                sent += 1
                client.send(request(sent))
                assert await upstream.take() == request(sent)
            assert sent == 5
            client.send(request(6))
            await settled(front)
            assert len(session.pending) == 5
            upstream.send(answer(1), answer(2))
            await client.take()
            await settled(front)
            assert len(session.pending) == 3
            upstream.send(answer(3))  # half of them are answered
            assert await upstream.take() == request(6)
            upstream.send(*(answer(number) for number in (4, 5, 6)))
            assert [id_of(await client.take(), False) for _ in range(5)] == [2, 3, 4, 5, 6]

    run(main())


def test_own_answers_release_a_paused_client() -> None:
    async def main() -> None:
        own = hook(lambda request: Answer(answer(request.correlation_id), "test"))
        async with fronted(own, limits=Limits(in_flight_max=4)) as front:
            client, upstream, session = await front.connect()
            client.send(request(1), *map(hooked, range(2, 12)))
            await upstream.take()
            await until(lambda: session.downstream.throttled)
            whole = answer(1, bytes(50))
            upstream.send(whole[:30])  # streams: the rest comes as the end of a frame, with no head behind it
            await client.reader.readexactly(30)
            upstream.send(whole[30:])
            await client.reader.readexactly(len(whole) - 30)
            assert [id_of(await client.take(), False) for _ in range(2, 12)] == list(range(2, 12))
            client.send(hooked(12))
            assert await client.take() == answer(12)

    run(main())


# ---- states, edge by edge ----

Outcome = tuple[SessionState, str, str]
"""A session's state and the cause of its end, and the cause that is expected: "" if it goes on."""
Scenario = Callable[[], Awaitable[Outcome]]
"""Drives a session over one edge."""

_S, _E = SessionState, SessionEvent


async def _connected() -> Outcome:
    async with fronted() as front:
        _, _, session = await front.connect()
        return now(session, "")


def now(session: Session, cause: str) -> Outcome:
    """What the edge's test looks at, before the test's end closes the session."""
    return session.state, session.close_cause, cause


@contextlib.asynccontextmanager
async def _connecting() -> AsyncIterator[tuple[Front, Wire, Session]]:
    """A session whose broker does not take the call."""
    async with fronted() as front:

        async def never(session: Session) -> None:
            await asyncio.Event().wait()

        front.listener._connect = never  # type: ignore[method-assign]
        client = await front.dial()
        await until(lambda: bool(front.gateway.sessions))
        (session,) = front.gateway.sessions
        assert session.state is SessionState.CONNECTING
        yield front, client, session


async def _drained_while_connecting() -> Outcome:
    async with _connecting() as (front, client, session):
        await front.gateway.drain(1)
        assert await client.closed() == b""
        return now(session, "drained")


async def _gone_while_connecting() -> Outcome:
    async with _connecting() as (_, client, session):
        client.reset()
        await until(lambda: session.state is not SessionState.CONNECTING)
        return now(session, "client closed")


@contextlib.asynccontextmanager
async def _authenticating() -> AsyncIterator[tuple[Front, Wire, Wire, Session]]:
    """A session whose broker has SASL."""
    async with fronted(asks_for_sasl=True) as front:
        assert front.gateway.broker_sasl is not None
        front.gateway.broker_sasl.required(front.target)
        await say_whether_sasl(front.broker, True)
        client, upstream, session = await front.connect(SessionState.AUTHENTICATING)
        yield front, client, upstream, session


async def _connected_to_sasl() -> Outcome:
    async with _authenticating() as (_, _, _, session):
        return now(session, "")


async def _drained_while_authenticating() -> Outcome:
    async with _authenticating() as (front, client, upstream, session):
        await front.gateway.drain(1)
        assert await client.closed() == b""
        assert await upstream.closed() == b""
        return now(session, "drained")


async def _gone_while_authenticating() -> Outcome:
    async with _authenticating() as (_, client, upstream, session):
        client.reset()
        assert await upstream.closed() == b""
        return now(session, "client closed")


async def _draining() -> Outcome:
    async with fronted() as front:
        client, upstream, session = await front.connect()
        client.send(request(1))
        await upstream.take()
        session.drain()
        return now(session, "")


async def _gone_with_a_write() -> Outcome:
    async with fronted() as front:
        client, upstream, session = await front.connect()
        client.send(produce(1))
        await upstream.take()
        client.reset()
        await until(lambda: session.state is not SessionState.SERVING)
        return now(session, "")


async def _gone() -> Outcome:
    async with fronted() as front:
        client, upstream, session = await front.connect()
        client.send(request(1))
        await upstream.take()
        await client.close()
        assert await upstream.closed() == b""
        return now(session, "client closed")


async def _gone_with_a_write_while_draining() -> Outcome:
    async with fronted() as front:
        client, upstream, session = await front.connect()
        client.send(produce(1))
        await upstream.take()
        session.drain()
        client.reset()
        await until(lambda: session.state is not SessionState.DRAINING)
        return now(session, "")


async def _drained() -> Outcome:
    async with fronted() as front:
        client, upstream, session = await front.connect()
        client.send(request(1), request(2))
        for _ in range(2):
            await upstream.take()
        session.drain()
        client.send(request(3))
        upstream.send(answer(1))
        assert await client.take() == answer(1)
        assert session.state is SessionState.DRAINING
        upstream.send(answer(2))
        assert await client.reader.read() == answer(2)
        assert await upstream.closed() == b"", "what comes after the drain is not forwarded"
        return now(session, "")


async def _drained_and_closed() -> Outcome:
    async with fronted() as front:
        client, upstream, session = await front.connect()
        session.drain()
        assert await client.reader.read() == b""
        assert await upstream.closed() == b""
        assert session.state is SessionState.LINGERING
        assert not session.close_cause
        client.send(request(1))
        await client.close()
        await until(lambda: session.state is not SessionState.LINGERING)
        return now(session, "drained")


async def _lost_while_draining() -> Outcome:
    async with fronted() as front:
        client, upstream, session = await front.connect()
        client.send(request(1))
        await upstream.take()
        session.drain()
        upstream.reset()
        assert await client.closed() == b""
        return now(session, "broker closed")


async def _settled() -> Outcome:
    async with fronted() as front:
        client, upstream, session = await front.connect()
        client.send(request(1), produce(2))
        for _ in range(2):
            await upstream.take()
        client.reset()
        await until(lambda: session.state is SessionState.SETTLING)
        upstream.send(answer(1))
        await settled(front)
        assert session.state is SessionState.SETTLING
        upstream.send(answer(2))
        assert await upstream.closed() == b""
        assert front.gateway.write_lost_at == float("-inf")
        return now(session, "client closed")


async def _lost_while_settling() -> Outcome:
    async with fronted() as front:
        client, upstream, session = await front.connect()
        client.send(produce(1))
        await upstream.take()
        client.reset()
        await until(lambda: session.state is SessionState.SETTLING)
        upstream.reset()
        await until(lambda: session.state is not SessionState.SETTLING)
        assert front.gateway.write_lost_at > 0
        return now(session, "broker closed")


EDGES: dict[tuple[SessionState, SessionEvent], Scenario] = {
    (_S.CONNECTING, _E.UPSTREAM_CONNECTED): _connected_to_sasl,
    (_S.CONNECTING, _E.DRAIN): _drained_while_connecting,
    (_S.CONNECTING, _E.CLOSE): _gone_while_connecting,
    (_S.AUTHENTICATING, _E.AUTHENTICATED): _connected,
    (_S.AUTHENTICATING, _E.DRAIN): _drained_while_authenticating,
    (_S.AUTHENTICATING, _E.CLOSE): _gone_while_authenticating,
    (_S.SERVING, _E.DRAIN): _draining,
    (_S.SERVING, _E.CLIENT_GONE_WRITES_PENDING): _gone_with_a_write,
    (_S.SERVING, _E.CLOSE): _gone,
    (_S.DRAINING, _E.CLIENT_GONE_WRITES_PENDING): _gone_with_a_write_while_draining,
    (_S.DRAINING, _E.LAST_ANSWER): _drained,
    (_S.DRAINING, _E.CLOSE): _lost_while_draining,
    (_S.SETTLING, _E.LAST_ANSWER): _settled,
    (_S.SETTLING, _E.CLOSE): _lost_while_settling,
    (_S.LINGERING, _E.CLOSE): _drained_and_closed,
}


@pytest.mark.parametrize("edge", TRANSITIONS, ids=lambda edge: f"{edge[0].value}, {edge[1].value}")
def test_edge(edge: tuple[SessionState, SessionEvent], monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[SessionState, SessionEvent]] = []
    on = Session._on

    def recorded(session: Session, event: SessionEvent) -> None:
        taken.append((session.state, event))
        on(session, event)

    monkeypatch.setattr(Session, "_on", recorded)

    async def main() -> None:
        state, cause, expected = await EDGES[edge]()
        assert edge in taken
        assert state is TRANSITIONS[edge]
        assert cause == expected

    run(main())


def test_there_are_no_other_edges() -> None:
    assert TRANSITIONS.keys() == EDGES.keys()
    assert {edge for edge in product(SessionState, SessionEvent) if edge[0] is SessionState.CLOSED}.isdisjoint(EDGES)


# ---- ends ----


def test_drain_answers_what_was_asked_and_takes_in_a_frame_that_is_half_there() -> None:
    proceed = asyncio.Event()

    async def verdict(request: Request) -> Verdict:
        await proceed.wait()
        return Answer(answer(request.correlation_id, b"held"), "test")

    async def main() -> None:
        async with fronted(hook(lambda request: Hold(verdict(request)))) as front:
            half_client, half_upstream, _ = await front.connect()
            frame = produce(1, records=bytes(1000))
            half_client.send(frame[:600])
            await half_upstream.reader.readexactly(600)
            held_client, _, held = await front.connect()
            held_client.send(hooked(2))
            await until(lambda: held.downstream.busy)
            idle_client, _, _ = await front.connect()
            acks0_client, acks0_upstream, _ = await front.connect()
            acks0_client.send(produce(3, acks=0))
            assert await acks0_upstream.take() == produce(3, acks=0)
            both_client, both_upstream, _ = await front.connect()
            half_acks0 = produce(4, acks=0, records=bytes(1000))
            both_client.send(half_acks0[:600])
            await both_upstream.reader.readexactly(600)

            draining = asyncio.ensure_future(front.gateway.drain(10))  # noqa: TID251
            assert await idle_client.closed() == b""
            asked = await acks0_upstream.take()  # has the broker taken it up?
            acks0_upstream.send(answer(id_of(asked), bytes(6)))
            assert await acks0_client.closed() == b""
            both_client.send(half_acks0[600:])
            await both_upstream.reader.readexactly(len(half_acks0) - 600)
            asked = await both_upstream.take()  # and this one, which was not whole before?
            both_upstream.send(answer(id_of(asked), bytes(6)))
            assert await both_client.closed() == b""
            proceed.set()
            assert await held_client.closed() == answer(2, b"held")
            half_client.send(frame[600:])
            assert await half_upstream.reader.readexactly(len(frame) - 600) == frame[600:]
            assert not draining.done()
            half_upstream.send(answer(1))
            assert await half_client.closed() == answer(1)
            await draining
            assert front.gateway.closed_by_cause == {"drained": 5}

    run(main())


@pytest.mark.parametrize("client_leg_tls", [False, True], ids=["plain", "TLS"])
def test_last_answers_reach_a_client_that_goes_on_sending(client_leg_tls: bool, tmp_path: Path) -> None:
    """A socket that is closed while bytes of the other side are unread is reset, and what waits in it is gone."""
    server, trusting = tls_contexts(tmp_path) if client_leg_tls else (None, None)

    async def main() -> None:
        async with fronted(client_ssl=server) as front:
            client = await front.dial(trusting)
            client.send(request(1))
            upstream = await front.broker.accept()
            await upstream.take()
            draining = asyncio.ensure_future(front.gateway.drain(10))  # noqa: TID251
            last = answer(1, os.urandom(6 << 20))
            upstream.send(last)
            await stalled(front)  # the client does not read
            client.send(*(request(number, body=bytes(1 << 20)) for number in range(2, 10)))
            assert await client.take() == last
            await client.close()
            assert await draining
            assert front.gateway.closed_by_cause == {"drained": 1}

    run(main())


def test_drain_gives_up_after_its_time() -> None:
    async def main() -> None:
        async with fronted() as front:
            client, upstream, session = await front.connect()
            client.send(request(1))
            await upstream.take()
            await front.gateway.drain(0.05)
            assert await client.closed() == b""
            assert session.close_cause == "drain timed out"

    run(main())


def test_a_client_that_vanished_in_the_middle_of_a_write_is_not_waited_for() -> None:
    async def main() -> None:
        async with fronted() as front:
            client, upstream, session = await front.connect()
            frame = produce(2, records=bytes(1000))
            client.send(produce(1), frame[:600])
            await upstream.take()
            await upstream.reader.readexactly(600)
            passed: list[str] = []
            assert not session.fence(lambda: passed.append("fence"))
            client.reset()
            await until(lambda: session.state is SessionState.SETTLING)
            assert passed == ["fence"], "half a frame never lands"
            upstream.send(answer(1))
            assert await upstream.closed() == b""
            assert front.gateway.write_lost_at == float("-inf")

    run(main())


def test_a_client_that_stopped_reading_and_vanished_has_its_writes_settled() -> None:
    async def main() -> None:
        async with fronted() as front:
            client, upstream, session = await front.connect()
            client.send(fetch(1), produce(2))
            for _ in range(2):
                await upstream.take()
            frame = fetched(1, bytes(30 << 20))
            sending = asyncio.ensure_future(_send_slowly(upstream, frame + answer(2)))  # noqa: TID251
            await until(lambda: front.gateway.bytes_from_brokers > 1 << 20)
            await stalled(front)
            client.reset()
            await sending
            assert await upstream.closed() == b""
            assert session.close_cause == "client closed"
            assert front.gateway.write_lost_at == float("-inf")

    run(main())


@pytest.mark.parametrize("half_more", [False, True])
def test_acks_0_writes_of_a_client_that_is_gone_are_settled(half_more: bool) -> None:
    async def main() -> None:
        async with fronted() as front:
            client, upstream, session = await front.connect()
            client.send(produce(1, acks=0))
            await upstream.take()
            if half_more:
                client.send(produce(2, records=bytes(1000))[:600])
                await upstream.reader.readexactly(600)
            client.reset()
            if half_more:  # nothing can be asked behind half a frame
                assert await upstream.closed() == b""
                assert front.gateway.write_lost_at > 0
                return
            asked = await upstream.take()
            assert session.state is SessionState.SETTLING
            upstream.send(answer(id_of(asked), bytes(6)))
            assert await upstream.closed() == b""
            assert front.gateway.write_lost_at == float("-inf")

    run(main())


def test_what_was_not_refused_of_acks_0_is_forwarded_before_the_connection_closes() -> None:
    async def main() -> None:
        allowed = produce(1, acks=0, topic="allowed")
        async with fronted(hook(lambda request: Close("the rest", allowed), api_key=ApiKey.PRODUCE)) as front:
            client, upstream, session = await front.connect()
            client.send(produce(1, acks=0) + produce(2, acks=0))
            assert await client.closed() == b""
            assert await upstream.take() == allowed
            asked = await upstream.take()
            assert session.state is SessionState.SETTLING
            upstream.send(answer(id_of(asked), bytes(6)))
            assert await upstream.closed() == b""

    run(main())


@pytest.mark.parametrize("in_flight", [False, True])
def test_a_lost_broker_closes_the_client(in_flight: bool) -> None:
    async def main() -> None:
        async with fronted() as front:
            client, upstream, session = await front.connect()
            if in_flight:
                client.send(produce(1), request(2))
                await upstream.take()
            await upstream.close()
            assert await client.closed() == b""
            assert session.close_cause == "broker closed"
            assert (front.gateway.write_lost_at > 0) == in_flight
            assert not front.gateway.sessions

    run(main())


def test_an_unreachable_broker_closes_the_client() -> None:
    async def main() -> None:
        async with fronted() as front:
            front.broker.server.close()
            await front.broker.server.wait_closed()
            client = await front.dial()
            assert await client.closed() == b""
            assert front.gateway.closed_by_cause == {"broker unreachable": 1}

    run(main())


def test_a_broker_that_takes_no_connections_for_a_moment_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its queue of new connections is full."""

    async def main() -> None:
        monkeypatch.setattr("isthmus.session.connecting.ATTEMPTS_S", (0.1,) * 100)
        async with fronted() as front:
            port = front.broker.server.sockets[0].getsockname()[1]
            front.broker.server.close()
            await front.broker.server.wait_closed()
            with socket.create_server(("127.0.0.1", port), backlog=0) as full, socket.socket() as other:
                other.connect(("127.0.0.1", port))
                client = await front.dial()
                await asyncio.sleep(0.5)  # several attempts
                (session,) = front.gateway.sessions
                assert session.state is SessionState.CONNECTING
                full.accept()[0].close()
                await until(lambda: session.state is SessionState.SERVING)
                await client.close()
            assert not front.gateway.closed_by_cause["broker unreachable"]

    run(main())


def test_a_broker_that_takes_no_connections_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        monkeypatch.setattr("isthmus.session.connecting.ATTEMPTS_S", (0.1, 0.1))
        async with fronted() as front:
            port = front.broker.server.sockets[0].getsockname()[1]
            front.broker.server.close()
            await front.broker.server.wait_closed()
            with socket.create_server(("127.0.0.1", port), backlog=0), socket.socket() as other:
                other.connect(("127.0.0.1", port))
                clients = [await front.dial() for _ in range(3)]
                for client in clients:
                    assert await client.closed() == b""
                assert front.gateway.closed_by_cause == {"broker unreachable": 3}
                await until(lambda: sum(each.connections for each in caplog.records) == 3)

    caplog.set_level("WARNING", "isthmus.listener")
    run(main())


def test_a_connection_that_is_made_in_the_moment_that_it_is_given_up_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a machine that is busy: uvloop ends such a connection, and tells nobody."""
    made = Upstream.connection_made
    times = itertools.count()

    def connection_made(upstream: Upstream, transport: asyncio.BaseTransport) -> None:
        made(upstream, transport)
        if not next(times):
            time.sleep(0.2)

    async def main() -> None:
        monkeypatch.setattr("isthmus.session.connecting.ATTEMPTS_S", (0.1, 20.0))
        monkeypatch.setattr(Upstream, "connection_made", connection_made)
        async with fronted() as front:
            client = await front.dial()
            await front.broker.accept()
            upstream = await front.broker.accept()
            client.send(request(1))
            assert await upstream.take() == request(1)
            upstream.send(answer(1))
            assert await client.take() == answer(1)

    run(main())


def test_a_broker_that_goes_at_once_closes_the_client() -> None:
    async def main() -> None:
        async with fronted() as front:
            connected = Session.upstream_connected

            def late(session: Session, upstream: Upstream) -> None:
                upstream.connection_lost(None)
                connected(session, upstream)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Session, "upstream_connected", late)
                client = await front.dial()
                assert await client.closed() == b""
            assert front.gateway.closed_by_cause == {"broker closed": 1}

    run(main())


def test_a_client_may_go_while_the_name_of_its_broker_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up = asyncio.Event()

    async def resolved(host: str, port: int) -> list[dialling.Address]:
        await looked_up.wait()
        return [(socket.AF_INET, ("127.0.0.1", port))]

    async def main() -> None:
        monkeypatch.setattr(dialling, "resolved", resolved)
        async with fronted() as front:
            target = Endpoint("localhost", front.target.port)
            monkeypatch.setattr(front.listener._connector, "_targets", lambda: [target])
            client = await front.dial()
            await until(lambda: bool(front.gateway.sessions))
            await client.close()
            await until(lambda: not front.gateway.sessions)
            looked_up.set()
            await (await front.broker.accept()).closed()

    run(main())


def test_connections_beyond_the_limit_are_closed_and_room_is_given_back() -> None:
    async def main() -> None:
        async with fronted(limits=Limits(connections_max=2)) as front:
            first, _, first_session = await front.connect()
            await front.connect()
            third = await front.dial()
            assert await third.closed() == b""
            assert front.gateway.closed_by_cause == {"connection limit": 1}
            await first.close()
            await until(lambda: first_session.state is SessionState.CLOSED)
            await front.connect()

    run(main())


def test_connections_that_never_shake_hands_count_to_the_limit(tmp_path: Path) -> None:
    server, trusting = tls_contexts(tmp_path)

    async def main() -> None:
        async with fronted(client_ssl=server, limits=Limits(connections_max=2)) as front:
            strangers = [await front.dial() for _ in range(2)]
            third = await front.dial()
            assert await third.closed() == b""
            assert front.gateway.closed_by_cause == {"connection limit": 1}
            await strangers.pop().close()
            await until(lambda: len(front.gateway.arriving) == 1)
            assert front.gateway.closed_by_cause["TLS handshake failed"] == 1
            client = await front.dial(trusting)
            upstream = await front.broker.accept()
            client.send(request(1))
            assert await upstream.take() == request(1)

    run(main())


def test_the_last_file_descriptors_are_not_for_clients(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with fronted() as front:
            await front.connect()
            with few_left(20):
                client = await front.dial()
                assert await client.closed() == b""
            assert front.gateway.closed_by_cause == {"file descriptors": 1}
            await front.connect()

    run(main())
    (said,) = [record.detail for record in caplog.records if record.getMessage() == "connections turned away"]
    assert said.endswith(": file descriptors")


def test_who_is_turned_away_again_and_again_has_a_line_a_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("isthmus_plugins.rarely.RARELY_S", 0.0)

    async def main() -> None:
        async with fronted(limits=Limits(connections_max=1)) as front:
            await front.connect()
            for _ in range(5):
                assert await (await front.dial()).closed() == b""
                await asyncio.sleep(0.01)
            assert front.gateway.closed_by_cause == {"connection limit": 5}

    run(main())
    assert len([each for each in caplog.records if each.getMessage() == "connections turned away"]) == 1


def test_requests_for_which_a_broker_closes_have_a_line_a_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As it does for what it does not understand, and anybody may send it that."""
    monkeypatch.setattr("isthmus_plugins.rarely.RARELY_S", 0.0)

    async def main() -> None:
        async with fronted() as front:
            for _ in range(5):
                client, upstream, _ = await front.connect()
                client.send(request(1))
                await upstream.take()
                await upstream.close()
                assert await client.closed() == b""
                await asyncio.sleep(0.01)
            assert front.gateway.closed_by_cause == {"broker closed": 5}

    run(main())
    (said,) = [each for each in caplog.records if each.getMessage().startswith("broker closed connections")]
    assert said.of.startswith("broker 1, the last of 127.0.0.1:")


def test_clients_that_plugins_send_away_have_a_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    class Refusing:
        def opened(self, client: Client) -> Close:
            return Close("not from there")

        def authenticated(self, client: Client) -> None:
            raise AssertionError

        def closed(self, client: Client) -> None:
            pass

    async def main() -> None:
        async with fronted() as front:
            front.gateway.connection_observers = (Refusing(),)
            for _ in range(5):
                assert await (await front.dial()).closed() == b""
            assert front.gateway.closed_by_cause == {"refused": 5}

    run(main())
    (said,) = [each for each in caplog.records if each.levelname == "WARNING"]
    assert (said.getMessage(), said.detail) == ("connection refused by protocol", "not from there")


# ---- fences ----


async def _fence(front: Front) -> asyncio.Future[None]:
    waiting = asyncio.ensure_future(front.gateway.fence())  # noqa: TID251
    await asyncio.sleep(0)
    return waiting


def test_a_fence_passes_at_once_where_nothing_is_written() -> None:
    async def main() -> None:
        async with fronted() as front:
            client, upstream, _ = await front.connect()
            client.send(request(1))
            await upstream.take()
            await front.gateway.fence()

    run(main())


def test_a_session_that_holds_up_a_fence_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isthmus.session.listener.FENCE_TIMEOUT_S", 0.05)

    async def main() -> None:
        async with fronted() as front:
            idle, _, bystander = await front.connect()
            client, upstream, session = await front.connect()
            client.send(produce(1, records=b"r" * 5_000)[:4_000])  # and the rest never comes
            await upstream.reader.readexactly(4_000)
            started = asyncio.get_running_loop().time()
            await front.gateway.fence()
            waited = asyncio.get_running_loop().time() - started  # that clock ticks in milliseconds
            assert waited >= 0.095, "the margin for lost writes was not waited for"
            assert session.close_cause == "held up a reservation"
            await client.closed()
            assert bystander.state is SessionState.SERVING
            idle.send(request(1))

    run(main())


def test_a_write_does_not_go_on_when_the_lease_has_run_out() -> None:
    async def main() -> None:
        async with fronted() as front:
            client, upstream, session = await front.connect()
            frame = produce(1, records=b"r" * 5_000)
            client.send(frame[:2_000])
            assert await upstream.reader.readexactly(2_000) == frame[:2_000]
            front.gateway.vouches_until = lambda: float("-inf")
            client.send(frame[2_000:])
            assert await upstream.closed() == b""
            assert session.close_cause == "lease lost in mid-write"

    run(main())


@pytest.mark.parametrize("gone", [True, False])
def test_without_a_lease_a_write_goes_on_only_if_its_client_is_still_there(gone: bool) -> None:
    """Another proxy may have served that client since, while this process stood still."""

    async def main() -> None:
        async with fronted() as front:
            client, upstream, session = await front.connect()
            front.gateway.vouches_until = lambda: float("-inf")
            end = encode_request(build_request(ApiKey.END_TXN, 3, {"transactional_id": "t"}), 1, "client")
            with socket.socket(fileno=os.dup(client.writer.get_extra_info("socket").fileno())) as its:
                its.send(end)  # in one step of the loop
                if gone:
                    its.shutdown(socket.SHUT_WR)
            if gone:
                assert await upstream.closed() == b""
                assert session.close_cause == "client gone, lease lost"
            else:
                assert await upstream.take() == end

    run(main())


def test_without_a_lease_a_write_that_was_held_goes_on_only_if_its_client_is_still_there() -> None:
    async def main() -> None:
        go_on = asyncio.Event()

        async def later() -> None:
            await go_on.wait()
            its.shutdown(socket.SHUT_WR)  # the loop does not know it yet

        async with fronted(hook(lambda request: Hold(later()), api_key=ApiKey.END_TXN)) as front:
            client, upstream, session = await front.connect()
            its = socket.socket(fileno=os.dup(client.writer.get_extra_info("socket").fileno()))
            with its:
                client.send(encode_request(build_request(ApiKey.END_TXN, 3, {"transactional_id": "t"}), 1, "client"))
                front.gateway.vouches_until = lambda: float("-inf")
                go_on.set()
                assert await upstream.closed() == b""
                assert session.close_cause == "client gone, lease lost"

    run(main())


def test_what_is_no_write_goes_on_without_a_lease() -> None:
    async def main() -> None:
        async with fronted() as front:
            client, upstream, _ = await front.connect()
            front.gateway.vouches_until = lambda: float("-inf")
            frame = request(1, body=b"b" * 5_000)
            client.send(frame[:2_000])
            assert await upstream.reader.readexactly(2_000) == frame[:2_000]
            client.send(frame[2_000:])
            assert await upstream.reader.readexactly(len(frame) - 2_000) == frame[2_000:]

    run(main())


def test_own_answers_that_a_client_does_not_read_pause_it() -> None:
    """Or anybody could make the proxy hold any number of them."""

    async def main() -> None:
        own = hook(lambda request: Answer(answer(request.correlation_id, b"a" * 1_000), "test"))
        async with fronted(own) as front:
            client, _, _ = await front.connect()
            flood = hooked(1, b"q" * 20) * 100_000
            before = resident_bytes()
            sending = asyncio.ensure_future(_send_slowly(client, flood))  # noqa: TID251
            await stalled(front)
            assert front.gateway.bytes_from_clients < len(flood) / 2
            assert resident_bytes() - before < 3 * GROWTH_BYTES_MAX, "what was read at once is answered at once"
            left = 100_000 * len(answer(1, b"a" * 1_000))
            while left:
                left -= len(await client.reader.read(1 << 20))
            await sending

    run(main())


def test_a_request_that_hooks_see_whole_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isthmus.session.downstream.WHOLE_FRAME_BYTES_MAX", 1_000)

    async def main() -> None:
        async with fronted(hook(lambda request: None)) as front:
            client, upstream, _ = await front.connect()
            client.send(hooked(1, b"x" * 900))
            assert await upstream.take() == hooked(1, b"x" * 900)
            client.send(hooked(2, b"x" * 2_000)[:500])
            await client.closed()
            assert front.gateway.closed_by_cause["oversized request"] == 1

    run(main())


def test_a_client_that_leaves_before_the_broker_answers_the_door_is_no_trouble(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        failures: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: failures.append(context))
        async with fronted() as front:
            for _ in range(50):
                (await front.dial()).reset()
            await until(lambda: front.gateway.connections_opened == 50 and not front.gateway.sessions)
            await until(lambda: not len(front.gateway.tasks))
            for wire in front.broker.wires:
                assert await wire.closed() == b""
        assert not failures

    run(main())
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_a_fence_waits_for_the_writes_before_it_and_no_others() -> None:
    async def main() -> None:
        async with fronted() as front:
            client, upstream, _ = await front.connect()
            client.send(produce(1), produce(2), request(3))
            for _ in range(3):
                await upstream.take()
            fence = await _fence(front)
            client.send(produce(4))
            await upstream.take()
            upstream.send(answer(1))
            assert await client.take() == answer(1)
            second = await _fence(front)
            assert not fence.done()
            upstream.send(answer(2))
            assert await client.take() == answer(2)
            await fence
            assert not second.done()
            upstream.send(answer(3), answer(4, b"x"))
            assert [await client.take() for _ in range(2)] == [answer(3), answer(4, b"x")]
            await second

    run(main())


def test_two_fences_wait_for_the_same_write() -> None:
    async def main() -> None:
        async with fronted() as front:
            client, upstream, _ = await front.connect()
            client.send(produce(1))
            await upstream.take()
            fences = [await _fence(front), await _fence(front)]
            upstream.send(answer(1, b"x"))
            assert await client.take() == answer(1, b"x")
            await asyncio.gather(*fences)

    run(main())


def test_a_fence_asks_behind_acks_0_writes() -> None:
    async def main() -> None:
        async with fronted() as front:
            client, upstream, session = await front.connect()
            frame = produce(1, acks=0, records=bytes(1000))
            client.send(frame[:600])
            await upstream.reader.readexactly(600)
            fence = await _fence(front)
            await settled(front)
            client.send(frame[600:], request(2))  # the question must not fall into the frame
            assert await upstream.reader.readexactly(len(frame) - 600) == frame[600:]
            asked = await upstream.take()
            assert int.from_bytes(asked[4:6], "big") == ApiKey.API_VERSIONS
            assert await upstream.take() == request(2)
            assert not fence.done()
            upstream.send(answer(id_of(asked), bytes(6)), answer(2))
            assert await client.take() == answer(2), "the client sees no answer that it did not ask for"
            await fence
            assert session.acks0_behind == -1

    run(main())


@pytest.mark.parametrize("acks", [0, 1])
def test_a_fence_passes_after_a_margin_where_the_broker_is_lost(acks: int) -> None:
    async def main() -> None:
        async with fronted() as front:
            client, upstream, _ = await front.connect()
            client.send(produce(1, acks=acks))
            await upstream.take()
            fence = await _fence(front)
            upstream.reset()
            await client.closed()
            assert not fence.done()
            await fence
            since = monotonic() - front.gateway.write_lost_at
            assert since >= front.gateway.lost_write_margin_s - 0.002  # the loop's clock ticks in milliseconds

    run(main())


def test_a_fence_waits_for_writes_of_clients_that_are_gone() -> None:
    async def main() -> None:
        async with fronted() as front:
            client, upstream, session = await front.connect()
            client.send(produce(1))
            await upstream.take()
            client.reset()
            await until(lambda: session.state is SessionState.SETTLING)
            fence = await _fence(front)
            upstream.send(answer(1))
            await fence
            assert session.state is SessionState.CLOSED

    run(main())


# ---- TLS ----


def test_tls_on_the_client_leg(tmp_path: Path) -> None:
    server, trusting = tls_contexts(tmp_path)

    async def main() -> None:
        async with fronted(client_ssl=server) as front:
            client = await front.dial(trusting)
            client.send(request(1))
            upstream = await front.broker.accept()
            assert await upstream.take() == request(1)
            large = answer(1, os.urandom(3 << 20))
            sending = asyncio.ensure_future(_send_slowly(upstream, large))  # noqa: TID251
            assert await client.take() == large
            await sending
            frame = produce(2, records=os.urandom(3 << 20))
            sending = asyncio.ensure_future(_send_slowly(client, frame))  # noqa: TID251
            assert await upstream.take() == frame
            await sending
            plain = await front.dial()
            plain.send(request(1))
            await plain.closed()
            assert len(front.gateway.sessions) == 1

    run(main())


# ---- large answers in any pieces ----


def test_a_streamed_fetch_is_the_same_however_it_is_split() -> None:
    async def main() -> None:
        async with fronted() as front:
            client, upstream, session = await front.connect()
            frame = fetched(1, os.urandom(5_000))
            rng = random.Random(7)
            seen = set()
            for _ in range(300):
                session.downstream.data_received(fetch(1))
                await upstream.take()
                pieces = rng.randint(2, 12)
                cuts = sorted(rng.sample(range(1, len(frame)), pieces - 1))
                assert session.upstream is not None
                for start, end in zip([0, *cuts], [*cuts, len(frame)], strict=True):
                    session.upstream.data_received(frame[start:end])
                got = await client.take()
                assert got[:5_000] == frame[:5_000]
                seen.add(got)
            assert {len(got) for got in seen} == {len(frame)}
            assert len(seen) == 1
            assert b"broker.internal" not in seen.pop()

    run(main())


# ---- leave ----


class Gate:
    """A hook that counts what it is asked, and gives leave for topics that it has seen."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.leave = Leave(float("inf"))
        self.verdict: Verdict = None

    def __call__(self, request: Request) -> Verdict:
        self.asked.append(request.correlation_id)
        request.leave = self.leave
        return self.verdict

    def hook(self) -> RequestHook:
        return RequestHook(ApiKey.PRODUCE, self)


async def _produced(client: Wire, upstream: Wire, *frames: bytes) -> None:
    for frame in frames:
        client.send(frame)
        assert await upstream.take() == frame
        upstream.send(answer(id_of(frame), b"x"))
        assert await client.take() == answer(id_of(frame), b"x")


def test_leave_covers_requests_with_the_same_head_alone() -> None:
    async def main() -> None:
        gate = Gate()
        async with fronted(gate.hook()) as front:
            client, upstream, session = await front.connect()
            await _produced(client, upstream, produce(1), produce(2), produce(3, records=bytes(500_000)))
            assert gate.asked == [1]
            await _produced(client, upstream, produce(4, topic="u"), produce(5, topic="tt"), produce(6, acks=1))
            assert gate.asked == [1, 4, 5, 6]
            await _produced(client, upstream, produce(7, version=8), produce(8), produce(9, topic="u"))
            assert gate.asked == [1, 4, 5, 6, 7, 8, 9]  # those of another version are forgotten
            await _produced(client, upstream, produce(10), produce(11, topic="u"))
            assert gate.asked == [1, 4, 5, 6, 7, 8, 9]
            for _ in range(2):
                client.send(produce(12, acks=0))
                await upstream.take()
            assert gate.asked[7:] == [12, 12]  # acks=0 needs to be looked at
            assert session.has_unanswered_write()
            other_client, other_upstream, _ = await front.connect()
            await _produced(other_client, other_upstream, produce(13))
            assert gate.asked[9:] == [13]

    run(main())


def test_leave_does_not_cover_several_topics() -> None:
    async def main() -> None:
        gate = Gate()
        topics = [{"name": name, "partition_data": [{"index": 0, "records": b"r"}]} for name in "tu"]
        values = {"acks": -1, "timeout": 30_000, "topic_data": topics}
        frame = encode_request(build_request(ApiKey.PRODUCE, PRODUCE_VERSION, values), 1, "client")
        async with fronted(gate.hook()) as front:
            client, upstream, _ = await front.connect()
            await _produced(client, upstream, frame, frame, produce(2), frame, produce(3))
            assert gate.asked == [1, 1, 2, 1]

    run(main())


@pytest.mark.parametrize("end", ["revoked", "expired", "routes"])
def test_leave_ends(end: str) -> None:
    async def main() -> None:
        gate = Gate()
        async with fronted(gate.hook()) as front:
            client, upstream, session = await front.connect()
            if end == "expired":
                gate.leave = Leave(monotonic() + 0.2)
            await _produced(client, upstream, produce(1), produce(2))
            assert gate.asked == [1]
            gate.verdict = Close("not any more")
            if end == "revoked":
                gate.leave.until = float("-inf")
            elif end == "expired":
                await asyncio.sleep(0.25)
            else:
                other = Gate()
                other.verdict = Close("another table")
                front.gateway.set_routes(compile_routes([other.hook()], lambda *_: None))
                gate.leave.until = float("-inf")
            client.send(produce(3))
            assert await client.closed() == b""
            assert session.close_cause == "refused"

    run(main())


@pytest.mark.parametrize("ended", [0, 1])
def test_leave_of_several_hooks_stands_while_that_of_each_does(ended: int) -> None:
    async def main() -> None:
        gates = Gate(), Gate()
        async with fronted(*(gate.hook() for gate in gates)) as front:
            client, upstream, _ = await front.connect()
            await _produced(client, upstream, produce(1), produce(2))
            assert gates[0].asked == gates[1].asked == [1]
            gates[ended].leave.until = float("-inf")
            await _produced(client, upstream, produce(3), produce(4))
            assert gates[0].asked == gates[1].asked == [1, 3, 4]
            gates[ended].leave = Leave(float("inf"))
            await _produced(client, upstream, produce(5), produce(6))
            assert gates[0].asked == gates[1].asked == [1, 3, 4, 5]

    run(main())


def test_leave_of_one_hook_is_not_that_of_another() -> None:
    async def main() -> None:
        gate, other = Gate(), Gate()
        other.leave = None  # type: ignore[assignment]
        async with fronted(gate.hook(), other.hook()) as front:
            client, upstream, _ = await front.connect()
            await _produced(client, upstream, produce(1), produce(2))
            assert gate.asked == other.asked == [1, 2]

    run(main())


class Looker(Gate):
    """A hook that looks at answers: it puts which request it was behind them. Its leave covers that."""

    def __init__(self) -> None:
        super().__init__()
        self.looked: list[int] = []
        self.leave = Leave(float("inf"), self.answers)
        self.unsure = False
        self.error: Exception | None = None

    def __call__(self, request: Request) -> Verdict:
        super().__call__(request)
        return Replace(request.frame, self.look(request.correlation_id))

    def answers(self, frame: bytes, now: float) -> ResponseHook | None:
        assert len(frame) == 4 + int.from_bytes(frame[:4], "big")
        if self.error is not None:
            raise self.error
        self.looked.append(id_of(frame))
        return None if self.unsure else self.look(id_of(frame))

    @staticmethod
    def look(number: int) -> ResponseHook:
        return lambda frame: answer(id_of(frame, False), frame[8:] + b"%d" % number)


async def _looked_at(client: Wire, upstream: Wire, *frames: bytes) -> None:
    """Requests that come together."""
    client.send(*frames)
    for frame in frames:
        assert await upstream.take() == frame
        upstream.send(answer(id_of(frame), b"x"))
    for frame in frames:
        number = id_of(frame)
        assert await client.take() == answer(number, b"x%d" % number)


def test_leave_of_a_hook_that_looks_at_answers_has_it_see_all_of_them() -> None:
    async def main() -> None:
        looker = Looker()
        async with fronted(looker.hook()) as front:
            client, upstream, _ = await front.connect()
            await _looked_at(client, upstream, produce(1))
            await _looked_at(client, upstream, produce(2))
            await _looked_at(client, upstream, produce(3), produce(4), produce(5))
            assert (looker.asked, looker.looked) == ([1], [2, 3, 4, 5])
            large = produce(6, records=bytes(500_000))  # comes in parts
            await _looked_at(client, upstream, large, produce(7))
            assert set(looker.asked[1:]) <= {6}  # about its first part
            assert looker.looked[4:] == [6, 7]
            await _looked_at(client, upstream, produce(8, topic="other"), produce(9), produce(10, topic="other"))
            assert looker.asked[-1] == 8
            assert looker.looked[6:] == [9, 10]
            looker.unsure = True
            await _looked_at(client, upstream, produce(11), produce(12))
            assert looker.asked[-2:] == [11, 12]
            looker.leave.until = float("-inf")
            await _looked_at(client, upstream, produce(13))
            assert looker.looked[8:] == [11, 12]

    run(main())


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize(("error", "cause"), [(MalformedFrame, "malformed request"), (RuntimeError, "hook failed")])
def test_what_raises_about_a_request_that_leave_covers_ends_the_connection(
    error: type[Exception], cause: str, together: bool
) -> None:
    async def main() -> None:
        looker = Looker()
        async with fronted(looker.hook()) as front:
            client, upstream, session = await front.connect()
            await _looked_at(client, upstream, produce(1))
            looker.error = error("a bug")
            client.send(*([produce(2), produce(3)] if together else [produce(2)]))
            assert await client.closed() == b""
            assert session.close_cause == cause
            assert looker.asked == [1]

    run(main())


def test_leave_without_answers_to_look_at_comes_first() -> None:
    async def main() -> None:
        looker, gate = Looker(), Gate()

        def ask(request: Request) -> Verdict:
            return looker(request) if b"watched" in request.frame else gate(request)

        async with fronted(RequestHook(ApiKey.PRODUCE, ask)) as front:
            client, upstream, _ = await front.connect()
            await _looked_at(client, upstream, produce(1, topic="watched"), produce(2, topic="watched"))
            await _produced(client, upstream, produce(3), produce(4))
            await _looked_at(client, upstream, produce(5, topic="watched"), produce(6, topic="watched"))
            await _produced(client, upstream, produce(7))
            assert (looker.asked, looker.looked, gate.asked) == ([1, 5, 6], [2], [3])
            gate.leave.until = float("-inf")
            await _looked_at(client, upstream, produce(8, topic="watched"), produce(9, topic="watched"))
            assert (looker.asked[3:], looker.looked) == ([8], [2, 9])

    run(main())


def test_without_hooks_the_sessions_own_leave_ends_with_the_table() -> None:
    async def main() -> None:
        gate = Gate()
        async with fronted() as front:
            client, upstream, _ = await front.connect()
            await _produced(client, upstream, produce(1), produce(2))
            front.gateway.set_routes(compile_routes([gate.hook()], lambda *_: None))
            await _produced(client, upstream, produce(3))
            assert gate.asked == [3]

    run(main())


def test_topics_that_leave_is_remembered_for_are_bounded() -> None:
    async def main() -> None:
        gate = Gate()
        async with fronted(gate.hook()) as front:
            client, upstream, session = await front.connect()
            for _ in range(2):
                await _produced(client, upstream, *(produce(n, topic=f"t{n}") for n in range(20)))
            assert len(gate.asked) == 20 + 20 - KNOWN_HEADS_MAX
            assert sum(map(len, session.downstream._known[2])) < KNOWN_HEADS_MAX * 100

    run(main())


# ---- memory ----


def test_a_closed_session_leaves_no_cycle_behind() -> None:
    async def main() -> None:
        async with fronted() as front:
            gc.collect()
            gc.disable()
            try:
                client, upstream, session = await front.connect()
                await _produced(client, upstream, produce(1))
                await client.close()
                await upstream.closed()
                del session
                parts = (Session, Upstream, Downstream)
                await until(lambda: not any(isinstance(each, parts) for each in gc.get_objects()))
            finally:
                gc.enable()

    run(main())


def test_what_is_there_after_the_start_is_left_out_of_collections() -> None:
    before, thresholds = gc.get_freeze_count(), gc.get_threshold()
    try:
        memory.leave_out_what_is_there()
        assert gc.get_freeze_count() > before + 10_000
        assert gc.get_threshold()[0] == memory.YOUNG_OBJECTS_MAX
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)


def test_memory_is_given_back_after_many_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    trimmed: list[int] = []

    async def main() -> None:
        monkeypatch.setattr(memory, "DELAY_S", 0.01)
        trimmer = memory.Trimmer()
        trimmer._trim = trimmed.append  # type: ignore[assignment]
        for _ in range(memory.CLOSED_MIN - 1):
            trimmer.closed()
        await asyncio.sleep(0.05)
        assert not trimmed
        for _ in range(10):
            trimmer.closed()
        await until(lambda: bool(trimmed))
        await asyncio.sleep(0.05)
        assert trimmed == [0]

    run(main())
