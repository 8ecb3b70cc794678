"""Acks of Produce that wait for a confirmer, from the request on."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
import tracemalloc
import uuid
from collections.abc import Callable, Collection
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from support.loop_time import LOOP_S_MAX, longest, went_out

from isthmus_plugins.api import Client, Gate, Hold, Leave, Replace, Request, ResponseHook, Verdict
from isthmus_plugins.aside import ANSWER_ELEMENTS_AT_ONCE, decided_aside
from isthmus_plugins.cluster import TopicPartition
from isthmus_plugins.confirmation import TOPICS_AT_ONCE, AckGate, Confirmer
from isthmus_plugins.tasks import Supervision
from isthmus_protocol import schema
from isthmus_protocol.bodies import build
from isthmus_protocol.messages import build_request, decode_response, encode_request, encode_response
from isthmus_protocol.produce_answers import Writes
from isthmus_protocol.schema import ApiKey
from isthmus_protocol.wire import MalformedFrame

VERSION = 9
UNKNOWN_TOPIC_ID = 100
REQUEST_TIMED_OUT = 7


class Archive(Confirmer):
    name = "the archive"

    def __init__(self) -> None:
        self.ends: dict[TopicPartition, int] = {}
        self.wanted = {"a"}

    def concerns(self, topic: str) -> bool:
        return topic in self.wanted

    def confirmed_end(self, place: TopicPartition, epoch: int, transactional: bool) -> int | None:
        return self.ends.get(place, 0)


def records(count: int) -> bytes:
    """As much of a batch as is looked at."""
    return bytes(23) + (count - 1).to_bytes(4, "big") + bytes(40)


def produced(topics: dict[str, dict[int, int]], correlation_id: int = 1, acks: int = -1) -> Request:
    """``topics``: by partition, how many records."""
    data = [
        {"name": name, "partition_data": [{"index": at, "records": records(count)} for at, count in parts.items()]}
        for name, parts in topics.items()
    ]
    values = {"acks": acks, "timeout": 30_000, "topic_data": data}
    frame = encode_request(build_request(ApiKey.PRODUCE, VERSION, values), correlation_id, "client")
    return Request(frame, True, ApiKey.PRODUCE, VERSION, correlation_id, 0.0, Client(1, "c", 1))


def appended(topics: dict[str, dict[int, int]], correlation_id: int = 1) -> bytes:
    """``topics``: by partition, the base offset."""
    responses = [
        {"name": name, "partition_responses": [{"index": at, "base_offset": base} for at, base in parts.items()]}
        for name, parts in topics.items()
    ]
    return encode_response(
        build(schema.response_type(ApiKey.PRODUCE, VERSION), {"responses": responses}), correlation_id
    )


class Acks:
    """A gate, and what it makes of requests: those of ``known`` leave without being asked about."""

    def __init__(self) -> None:
        self.archive = Archive()
        context: Any = SimpleNamespace(clock=time, supervision=Supervision())
        self.gate = AckGate(context, self.archive)

    def asked(self, request: Request) -> tuple[ResponseHook | None, Leave | None]:
        verdict = self.gate.on_produce(request)
        assert verdict is None or isinstance(verdict, Replace)
        return (None if verdict is None else verdict.on_response), request.leave

    def confirm(self, topic: str, partition: int, end: int) -> None:
        self.archive.ends[topic, partition] = end
        self.gate.confirmed((topic, partition))


@pytest.fixture
def acks() -> Acks:
    return Acks()


def is_open(answer: bytes | Gate) -> bool:
    return not isinstance(answer, Gate) or answer._frame is not None


def test_requests_like_one_that_waited_wait_without_being_asked_about(acks: Acks) -> None:
    looks, leave = acks.asked(produced({"a": {0: 1}}))
    assert looks is not None
    assert leave is not None
    assert leave.answers is not None
    first = looks(appended({"a": {0: 7}}))
    like = produced({"a": {0: 3, 1: 2}}, 2)
    looks = leave.answers(like.frame, 0.0)
    assert looks is not None
    second = looks(appended({"a": {0: 8, 1: 40}}, 2))
    acks.confirm("a", 0, 8)
    assert (is_open(first), is_open(second)) == (True, False)
    acks.confirm("a", 1, 42)
    acks.confirm("a", 0, 10)
    assert not is_open(second), "it ends at 11"
    acks.confirm("a", 0, 11)
    assert isinstance(second, Gate)
    assert second._frame == appended({"a": {0: 8, 1: 40}}, 2)


def test_a_request_of_thousands_of_partitions_is_asked_about_whatever_came_before(acks: Acks) -> None:
    """It is read in the thread then."""
    _, leave = acks.asked(produced({"a": {0: 1}}))
    assert leave is not None
    assert leave.answers is not None
    few, many = ANSWER_ELEMENTS_AT_ONCE // 2, ANSWER_ELEMENTS_AT_ONCE
    assert leave.answers(produced({"a": dict.fromkeys(range(few), 1)}).frame, 0.0) is not None
    assert leave.answers(produced({"a": dict.fromkeys(range(many), 1)}).frame, 0.0) is None


def test_leave_to_wait_ends_when_other_topics_count_and_what_was_let_through_waits_still(acks: Acks) -> None:
    _, leave = acks.asked(produced({"a": {0: 1}}))
    assert leave is not None
    assert leave.answers is not None
    on_its_way = leave.answers(produced({"a": {0: 1}}, 2).frame, 0.0)
    assert on_its_way is not None
    acks.archive.wanted = {"b"}
    acks.gate.changed()
    assert leave.until == float("-inf")
    assert not is_open(on_its_way(appended({"a": {0: 7}}, 2))), "nobody said that it need not"
    for _ in range(2):  # the first look says that the topic is free
        looks, leave = acks.asked(produced({"a": {0: 1}}, 3))
        assert looks is None
    assert leave is not None
    assert leave.answers is None


def test_names_that_no_topic_can_have_are_not_kept(acks: Acks) -> None:
    tracemalloc.start()
    try:
        for number in range(50):
            acks.asked(produced({f"{number}{'x' * 100_000}": {0: 1}}))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 1_000_000


def test_leave_is_given_for_one_topic_alone(acks: Acks) -> None:
    looks, leave = acks.asked(produced({"a": {0: 1}, "free": {0: 1}}))
    assert looks is not None
    assert leave is None
    assert not is_open(looks(appended({"a": {0: 7}, "free": {0: 1}})))
    assert acks.asked(produced({"a": {0: 1}}, acks=0)) == (None, None)


def test_an_ack_waits_whatever_else_the_request_names(acks: Acks) -> None:
    """A topic that was deleted meanwhile has an id that nobody knows."""
    known, deleted = uuid.uuid4(), uuid.uuid4()

    async def topic_names(topic_ids: Collection[bytes]) -> dict[bytes, str]:
        return {each: "a" for each in topic_ids if each == known.bytes}

    context: Any = acks.gate._context
    context.topic_names = topic_names
    context.known_topic_name = {known.bytes: "a"}.get
    data = [{"topic_id": each, "partition_data": [{"index": 0, "records": records(1)}]} for each in (deleted, known)]
    values = {"acks": -1, "timeout": 30_000, "topic_data": data}
    frame = encode_request(build_request(ApiKey.PRODUCE, 13, values), 1, "client")
    hold = acks.gate.on_produce(Request(frame, True, ApiKey.PRODUCE, 13, 1, 0.0, Client(1, "c", 1)))
    assert isinstance(hold, Hold)

    async def awaited() -> Verdict:
        return await hold.verdict

    verdict = asyncio.run(awaited())
    assert isinstance(verdict, Replace)
    assert verdict.on_response is not None
    responses = [
        {"topic_id": deleted, "partition_responses": [{"index": 0, "error_code": UNKNOWN_TOPIC_ID, "base_offset": -1}]},
        {"topic_id": known, "partition_responses": [{"index": 0, "base_offset": 7}]},
    ]
    answer = encode_response(build(schema.response_type(ApiKey.PRODUCE, 13), {"responses": responses}), 1)
    waiting = verdict.on_response(answer)
    assert not is_open(waiting)
    acks.confirm("a", 0, 8)
    assert isinstance(waiting, Gate)
    assert waiting._frame == answer


def test_of_many_topics_the_confirmer_is_asked_on_the_loop_some_at_a_time(acks: Acks) -> None:
    names = [f"free-{number}" for number in range(3 * TOPICS_AT_ONCE)]
    asked = produced({**{name: {0: 1} for name in names}, "a": {0: 2}})
    asked.aside = True
    threads, turns = set[int](), 0
    concerns = acks.archive.concerns

    def noted(topic: str) -> bool:
        threads.add(threading.get_ident())
        return concerns(topic)

    acks.archive.concerns = noted  # type: ignore[method-assign]

    async def turn() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def main() -> None:
        turning = asyncio.ensure_future(turn())  # noqa: TID251
        verdict = await decided_aside(partial(acks.gate.on_produce, asked))
        turning.cancel()
        assert threads == {threading.get_ident()}
        assert turns > 3
        assert isinstance(verdict, Replace)
        assert verdict.on_response is not None
        answer = verdict.on_response(appended({"free-0": {0: 3}, "a": {0: 7}}))
        await taken(acks)
        assert not is_open(answer)
        acks.confirm("a", 0, 9)
        assert is_open(answer)

    asyncio.run(main())


async def until(reached: Callable[[], bool]) -> None:
    """Let the loop go on."""
    while True:
        if reached():
            return
        await asyncio.sleep(0)


async def taken(acks: Acks) -> None:
    """All that has come is waited for."""
    await until(lambda: not acks.gate.held._taking)


MANY = 10_000
TOPICS = {f"t{number:05}".encode(): f"t{number:05}" for number in range(MANY)}
WRITTEN = Writes(-1, False, 30_000, {(topic, 0): 1 for topic in TOPICS})
APPENDED = appended({name: {0: 7} for name in TOPICS.values()})
"""Each has one record at offset 7."""


def answered(acks: Acks) -> Gate:
    """An answer about one partition of many topics."""
    answer = acks.gate.hold(1, VERSION, WRITTEN, TOPICS, time.monotonic(), APPENDED)
    assert isinstance(answer, Gate)
    return answer


def codes(frame: bytes) -> list[int]:
    found: Any = decode_response(ApiKey.PRODUCE, VERSION, frame)[1]
    return [int(each.error_code) for topic in found.responses for each in topic.partition_responses]


async def confirmed(acks: Acks, count: int) -> None:
    """So many partitions are confirmed further, and it is said of all at once."""
    acks.archive.ends = {(f"t{number:05}", 0): 8 for number in range(count)}
    await asyncio.sleep(0)
    acks.gate.confirmed_all()
    await until(lambda: not acks.gate.held._due)


def test_an_ack_of_thousands_of_partitions_does_not_keep_the_loop(acks: Acks) -> None:
    async def goes_out() -> bytes:
        acks.gate.start()
        answer = answered(acks)
        await taken(acks)
        await confirmed(acks, MANY - 1)
        assert not is_open(answer)
        await confirmed(acks, MANY)
        return await went_out(answer)

    async def main() -> None:
        frame, spent = await longest(goes_out())
        print(f"\n{MANY} partitions confirmed: {spent * 1000:.1f} ms")
        assert frame == APPENDED
        assert spent < LOOP_S_MAX
        await acks.gate.idle()
        assert not acks.gate.held._waiting
        await acks.gate.stop()

    asyncio.run(main())


def test_a_late_ack_of_thousands_of_partitions_does_not_keep_the_loop(acks: Acks) -> None:
    async def goes_out() -> bytes:
        answer = answered(acks)
        await taken(acks)
        await confirmed(acks, 1)
        acks.gate._clock = SimpleNamespace(monotonic=lambda: float("inf"))  # type: ignore[assignment]
        await acks.gate.look()
        return await went_out(answer)

    async def main() -> None:
        acks.gate._tasks.keep("look", acks.gate._look_for_ever)
        frame, spent = await longest(goes_out())
        print(f"\n{MANY} partitions late: {spent * 1000:.1f} ms")
        assert codes(frame) == [0] + [REQUEST_TIMED_OUT] * (MANY - 1)
        assert spent < LOOP_S_MAX
        assert acks.gate.oldest(("t00000", 0)) is None
        assert acks.gate.oldest(("t00001", 0)) is not None, "it is still not confirmed"
        await acks.gate.stop()

    asyncio.run(main())


def test_what_is_confirmed_while_an_answer_is_taken_does_not_let_it_go(acks: Acks) -> None:
    """Neither what was taken, nor what comes, nor the time."""

    async def main() -> None:
        answer = answered(acks)
        await until(lambda: bool(acks.gate.held._waiting))
        there = list(acks.gate.held._waiting)
        assert 0 < len(there) < MANY
        for topic, partition in there:
            acks.confirm(topic, partition, 8)
        acks.confirm(f"t{MANY - 1:05}", 0, 8)
        for _ in acks.gate.held.expire_some(float("inf")):
            pass
        assert not is_open(answer)
        assert acks.gate.held.waits
        await taken(acks)
        assert not is_open(answer)
        await confirmed(acks, MANY)
        assert is_open(answer)
        await acks.gate.stop()

    async def kept() -> None:
        acks.gate._tasks.keep("look", acks.gate._look_for_ever)
        await main()

    asyncio.run(kept())


def test_an_answer_of_thousands_that_cannot_be_read_ends_its_connection_and_holds_nothing(acks: Acks) -> None:
    async def main() -> None:
        written = Writes(-1, False, 30_000, {(b"a", number): 1 for number in range(MANY)})
        cut = (4_996).to_bytes(4, "big") + APPENDED[4:5_000]
        answer = acks.gate.hold(1, VERSION, written, {b"a": "a"}, time.monotonic(), cut)
        assert isinstance(answer, Gate)
        with pytest.raises(MalformedFrame):
            await went_out(answer)
        assert not acks.gate.held.waits

    asyncio.run(main())


def test_of_an_answer_of_thousands_what_was_taken_waits_for_nothing_when_the_confirmer_fails(acks: Acks) -> None:
    async def main() -> None:
        confirmed_end, asked = acks.archive.confirmed_end, itertools.count()

        def fails(place: TopicPartition, epoch: int, transactional: bool) -> int | None:
            if next(asked) == MANY // 2:
                raise LookupError("of the archive")
            return confirmed_end(place, epoch, transactional)

        acks.archive.confirmed_end = fails  # type: ignore[method-assign]
        answer = answered(acks)
        with pytest.raises(LookupError):
            await went_out(answer)
        assert acks.gate.oldest(("t00000", 0)) is None
        assert not acks.gate.held.waits

    asyncio.run(main())


def test_an_answer_of_thousands_whose_client_is_gone_counts_as_one_that_waits(acks: Acks) -> None:
    async def main() -> None:
        answer = answered(acks)
        answer.drop()
        await taken(acks)
        assert acks.gate.held.waits
        assert acks.gate.oldest((f"t{MANY - 1:05}", 0)) is not None
        await confirmed(acks, MANY)
        for _ in acks.gate.held.expire_some(time.monotonic()):
            pass
        assert not acks.gate.held.waits
        await acks.gate.stop()

    async def kept() -> None:
        acks.gate._tasks.keep("look", acks.gate._look_for_ever)
        await main()

    asyncio.run(kept())


def test_many_topics_that_are_free_are_decided_in_the_thread_once_they_are_known(acks: Acks) -> None:
    asked = produced({f"free-{number}": {0: 1} for number in range(1_000)})
    asked.aside = True
    first = acks.gate.on_produce(asked)
    assert isinstance(first, Hold)
    assert asyncio.run(_awaited(first)) is None
    assert acks.gate.on_produce(asked) is None


async def _awaited(hold: Hold) -> Verdict:
    return await hold.verdict
