"""What consumers see where a namespace shows them what is confirmed alone."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
import tracemalloc
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from support.fake_cluster import FakeCluster, FakeContext, FakeControl
from support.loop_time import LOOP_S_MAX, longest, overtaken, went_out
from support.partition_log import batch
from support.sessions import until

from isthmus_control.commands import CreateNamespace
from isthmus_control.demands import Demands, Visibility
from isthmus_control.model import ResourceType
from isthmus_plugins.api import Answer, Client, Gate, Hold, Replace, Request
from isthmus_plugins.aside import aside
from isthmus_plugins.replication.client_views.confirmed_reads import READS_AT_ONCE, ConfirmedReads, confirmed_bytes
from isthmus_protocol.error_codes import OFFSET_NOT_AVAILABLE
from isthmus_protocol.messages import (
    build_request,
    build_response,
    decode_request,
    decode_response,
    encode_request,
    encode_response,
)
from isthmus_protocol.refusals import offset_not_available
from isthmus_protocol.schema import ApiKey

FETCH_VERSIONS = (4, 6, 7, 11, 12, 13, 17)
END = 10


class Scene:
    """Topics ``c-t`` (confirmed) and ``t`` (not), with records of one batch each at offsets 0 to 9."""

    def __init__(self) -> None:
        rng = random.Random(1)
        self.cluster = FakeCluster(rng, [1])
        control = FakeControl("A", rng)
        self.context: Any = FakeContext(self.cluster, control)
        self.limits: dict[bool, int | None] = {False: 4, True: 4}
        self.ids = {name: self.cluster.add_topic(name).topic_id for name in ("c-t", "t")}
        self.reads = ConfirmedReads(
            self.context, lambda topic: topic.startswith("c-"), lambda place, committed: self.limits[committed]
        )
        self.control = control
        control.subscribe(self.reads.control_changed)
        control.apply(CreateNamespace(ResourceType.TOPIC, "c-", demands=Demands(visibility=Visibility.CONFIRMED)))

    def fetch(self, version: int, *topics: str, epoch: int = 0, committed: bool = False, wait_ms: int = 5_000) -> Any:
        values: dict[str, Any] = {
            "max_wait": wait_ms,
            "isolation_level": int(committed),
            "topics": [{**self._named(version, topic), "partitions": [{"partition": 0}]} for topic in topics],
        }
        if version >= 7:
            values |= {"session_id": 5 if epoch > 0 else 0, "session_epoch": epoch}
        if version >= 11:
            values["rack_id"] = "rack"
        return self.reads.on_fetch(self.request(ApiKey.FETCH, version, values))

    def request(self, api: ApiKey, version: int, values: dict[str, Any]) -> Request:
        frame = encode_request(build_request(api, version, values), 7, "client")
        return Request(frame, True, api, version, 7, time.monotonic(), Client(3, "1.2.3.4", 1))

    def _named(self, version: int, topic: str) -> dict[str, Any]:
        return {"topic": topic} if version < 13 else {"topic_id": uuid.UUID(bytes=self.ids[topic])}

    def answer(self, version: int, *topics: str, stable: int = END, start: int = 0) -> bytes:
        records = b"".join(batch(offset, [b"v"]) for offset in range(start, END))
        part = {
            "partition_index": 0,
            "error_code": 0,
            "high_watermark": END,
            "last_stable_offset": stable,
            "records": records,
        }
        values = {"responses": [{**self._named(version, topic), "partitions": [part]} for topic in topics]}
        return encode_response(build_response(ApiKey.FETCH, version, values), 7)


def parts(version: int, frame: bytes | Gate) -> list[tuple[int, int, int, int]]:
    """(error code, high watermark, last stable offset, records) of each partition."""
    assert isinstance(frame, bytes)
    _, answered = decode_response(ApiKey.FETCH, version, frame)
    found: Any = answered
    return [
        (
            int(part.error_code),
            part.high_watermark,
            part.last_stable_offset,
            len(part.records or b"") // len(batch(0, [b"v"])),
        )
        for topic in found.responses
        for part in topic.partitions
    ]


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await work()

    asyncio.run(main())


def replaced(verdict: Any) -> Replace:
    assert isinstance(verdict, Replace), verdict
    assert verdict.on_response is not None
    return verdict


@pytest.mark.parametrize("version", FETCH_VERSIONS)
def test_an_answer_is_cut_before_what_is_not_confirmed(version: int) -> None:
    async def work() -> None:
        scene = Scene()
        verdict = replaced(scene.fetch(version, "c-t", "t"))
        _, payload = decode_request(verdict.frame)
        sent: Any = payload
        assert getattr(sent, "session_epoch", -1) == -1
        assert getattr(sent, "rack_id", "") == ""
        cut = verdict.on_response(scene.answer(version, "c-t", "t"))  # type: ignore[misc]
        assert parts(version, cut) == [(0, 4, 4, 4), (0, END, END, 10)]

    run(work)


@pytest.mark.parametrize("version", FETCH_VERSIONS)
def test_what_no_namespace_asks_for_is_not_looked_at(version: int) -> None:
    async def work() -> None:
        scene = Scene()
        assert scene.fetch(version, "t") is None

    run(work)


def test_names_that_no_topic_can_have_are_not_kept() -> None:
    async def work() -> None:
        scene = Scene()
        tracemalloc.start()
        try:
            for number in range(50):
                assert scene.fetch(12, f"{number}{'x' * 100_000}") is None
            held, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert held < 1_000_000

    run(work)


def test_nothing_is_done_without_such_a_namespace_or_where_plain_acks_do_not_wait() -> None:
    async def work() -> None:
        scene = Scene()
        scene.limits = {False: None, True: None}
        on_response = replaced(scene.fetch(17, "c-t")).on_response
        assert on_response is not None
        frame = scene.answer(17, "c-t")
        assert on_response(frame) == frame
        idle = ConfirmedReads(scene.context, lambda topic: True, lambda place, committed: 0)
        assert idle.on_fetch(scene.request(ApiKey.FETCH, 17, {})) is None

    run(work)


def test_read_committed_consumers_see_what_is_stable_and_confirmed() -> None:
    async def work() -> None:
        scene = Scene()
        scene.limits = {False: 8, True: 5}
        on_response = replaced(scene.fetch(17, "c-t", committed=True)).on_response
        assert on_response is not None
        assert parts(17, on_response(scene.answer(17, "c-t"))) == [(0, 8, 5, 5)]
        assert parts(17, on_response(scene.answer(17, "c-t", stable=3))) == [(0, 8, 3, 3)]

    run(work)


def test_an_answer_of_which_nothing_is_left_waits_for_confirmations() -> None:
    async def work() -> None:
        scene = Scene()
        on_response = replaced(scene.fetch(17, "c-t")).on_response
        assert on_response is not None
        gate = on_response(scene.answer(17, "c-t", start=4))
        assert isinstance(gate, Gate)
        opened = asyncio.Event()
        assert not gate.take(opened.set)
        scene.reads.confirmed(("c-t", 1))
        scene.limits[False] = 4
        scene.reads.confirmed(("c-t", 0))
        assert not opened.is_set()
        scene.limits[False] = 6
        scene.reads.confirmed(("c-t", 0))
        assert opened.is_set()
        assert parts(17, gate.answer()) == [(0, 6, 6, 2)]
        assert not scene.reads._waiting

    run(work)


@pytest.mark.parametrize("limit", [-1, 4])
def test_it_waits_as_long_as_the_consumer_does(limit: int) -> None:
    async def work() -> None:
        scene = Scene()
        scene.limits[False] = limit
        on_response = replaced(scene.fetch(17, "c-t", wait_ms=200)).on_response
        assert on_response is not None
        gate = on_response(scene.answer(17, "c-t", start=4))
        assert isinstance(gate, Gate)
        opened = asyncio.Event()
        assert not gate.take(opened.set)
        async with asyncio.timeout(10):
            await opened.wait()
        assert parts(17, gate.answer()) == [(0, 4, 4, 0) if limit == 4 else (78, END, END, 0)]
        # Once it is out of sync all is shown.
        scene.limits[False] = None
        assert parts(17, on_response(scene.answer(17, "c-t", start=4))) == [(0, END, END, 6)]

    run(work)


def test_a_reader_that_is_gone_is_forgotten() -> None:
    async def work() -> None:
        scene = Scene()
        on_response = replaced(scene.fetch(17, "c-t")).on_response
        assert on_response is not None
        gate = on_response(scene.answer(17, "c-t", start=4))
        assert isinstance(gate, Gate)
        gate.drop()
        scene.reads.confirmed_all()
        await until(lambda: not scene.reads._waiting)

    run(work)


READS = 2_000


@dataclasses.dataclass
class Looks:
    """What is looked at of answers that wait, and which of them go, by turn of the loop."""

    now: int = 0
    looks: Counter[int] = dataclasses.field(default_factory=Counter)
    gone: Counter[int] = dataclasses.field(default_factory=Counter)

    def of(self, scene: Scene) -> list[Gate]:
        """Answers that wait, all for one partition."""
        shows = scene.reads._shows

        def noted(read: Any, place: Any) -> bool:
            self.looks[self.now] += 1
            return shows(read, place)

        scene.reads._shows = noted  # type: ignore[method-assign]
        gates = []
        for _ in range(READS):
            on_response = replaced(scene.fetch(17, "c-t")).on_response
            assert on_response is not None
            gate = on_response(scene.answer(17, "c-t", start=END - 1))
            assert isinstance(gate, Gate)
            assert not gate.take(lambda: self.gone.update([self.now]))
            gates.append(gate)
        return gates

    async def turn(self) -> None:
        while True:
            self.now += 1
            await asyncio.sleep(0)


def test_thousands_of_answers_that_wait_are_looked_at_some_at_a_time_and_only_if_something_has_changed() -> None:
    async def work() -> None:
        scene, looks = Scene(), Looks()
        looks.of(scene)
        turning = asyncio.get_running_loop().create_task(looks.turn())
        await asyncio.sleep(0)
        for limit, seen in ((4, READS), (4, READS), (5, 2 * READS), (5, 2 * READS)):
            scene.limits[False] = limit
            scene.reads.confirmed_all()
            await until(lambda: not scene.reads._looking)
            assert looks.looks.total() == seen
        assert not looks.gone
        scene.limits[False] = END
        scene.reads.confirmed(("c-t", 0))
        await until(lambda: not scene.reads._looking)
        assert looks.gone.total() == READS
        assert max(looks.looks.values()) <= READS_AT_ONCE
        assert not scene.reads._waiting
        assert not scene.reads._seen
        turning.cancel()

    run(work)


def test_what_is_confirmed_while_an_answer_is_cut_lets_it_go() -> None:
    """Although all that waited before for its partition was looked at since."""

    async def work() -> None:
        scene, gone = Scene(), asyncio.Event()
        verdict = replaced(scene.fetch(17, "c-t", wait_ms=600_000))
        assert verdict.on_response is not None
        first = verdict.on_response(scene.answer(17, "c-t", start=END - 1))
        cut = scene.reads._or_waits

        def late(read: Any, found: Any, waits: bool) -> Any:
            scene.limits[False] = END - 1
            scene.reads.confirmed(("c-t", 0))
            return cut(read, found, waits)

        scene.reads._or_waits = late  # type: ignore[method-assign]
        gate = verdict.on_response(scene.answer(17, "c-t", start=END - 2))
        assert isinstance(first, Gate)
        assert isinstance(gate, Gate)
        assert not gate.take(gone.set)
        scene.reads.confirmed_all()
        await gone.wait()
        first.drop()

    run(work)


def test_a_fetch_session_holds_no_topic_that_is_cut() -> None:
    async def work() -> None:
        scene = Scene()
        assert scene.fetch(17, "t", epoch=0) is None  # begins one with another topic
        assert scene.fetch(17, epoch=1) is None
        ended = scene.fetch(17, "c-t", epoch=2)
        assert isinstance(ended, Answer)
        _, answered = decode_response(ApiKey.FETCH, 17, ended.frame)
        found: Any = answered
        assert int(found.error_code) == 70
        scene.control.apply(CreateNamespace(ResourceType.TOPIC, "more-"))  # any session may hold one now
        assert isinstance(scene.fetch(17, epoch=3), Answer)
        assert scene.fetch(17, epoch=3) is None

    run(work)


def test_a_topic_id_that_is_not_known_is_looked_up() -> None:
    async def work() -> None:
        scene = Scene()
        known = scene.context.known_topic_name
        scene.context.known_topic_name = lambda topic_id: None
        verdict = scene.fetch(17, "c-t")
        assert isinstance(verdict, Hold)
        scene.context.known_topic_name = known
        replaced(await verdict.verdict)

    run(work)


@pytest.mark.parametrize("version", [1, 4, 10])
@pytest.mark.parametrize(
    ("limit", "timestamp", "offset", "expected"),
    [
        (4, -1, 10, (0, 4)),
        (4, -1, 3, (0, 3)),
        (4, 1_000, 7, (0, -1)),
        (4, 1_000, 2, (0, 2)),
        (4, -2, 10, (0, 10)),
        (None, -1, 10, (0, 10)),
        (-1, -1, 10, (OFFSET_NOT_AVAILABLE, -1)),
    ],
)
def test_list_offsets_tells_what_is_confirmed_as_the_end(
    version: int, limit: int | None, timestamp: int, offset: int, expected: tuple[int, int]
) -> None:
    async def work() -> None:
        scene = Scene()
        scene.limits = {False: limit, True: limit}
        asked = {"topics": [{"name": "c-t", "partitions": [{"partition_index": 0, "timestamp": timestamp}]}]}
        verdict = scene.reads.on_list_offsets(scene.request(ApiKey.LIST_OFFSETS, version, asked))
        part = {"partition_index": 0, "error_code": 0, "timestamp": 5, "offset": offset}
        values = {"topics": [{"name": "c-t", "partitions": [part]}]}
        frame = encode_response(build_response(ApiKey.LIST_OFFSETS, version, values), 7)
        if verdict is not None:
            assert isinstance(verdict, Replace)
            assert verdict.on_response is not None
            frame = verdict.on_response(frame)  # type: ignore[assignment]
        _, answered = decode_response(ApiKey.LIST_OFFSETS, version, frame)
        found: Any = answered
        entry = found.topics[0].partitions[0]
        code, shown = expected
        told = offset_not_available(version) if code == OFFSET_NOT_AVAILABLE else code
        assert (int(entry.error_code), entry.offset) == (told, shown)

    run(work)


def test_batches_are_cut_whole() -> None:
    records = b"".join(batch(offset, [b"v"] * 3) for offset in (0, 3, 6))
    size = len(batch(0, [b"v"] * 3))
    assert [confirmed_bytes(records, end) // size for end in (0, 2, 3, 5, 6, 9, 100)] == [0, 0, 1, 1, 2, 3, 3]
    assert confirmed_bytes(records[:-1], 9) == 2 * size  # the broker cut the last one


PARTITIONS = 5_000


async def _answered(hook: Any, frame: bytes) -> bytes:
    return await went_out(hook(frame))


@pytest.mark.parametrize("records", [b"", batch(0, [b"v"]) + batch(1, [b"v"])])
def test_an_answer_of_thousands_of_partitions_keeps_the_loop_no_longer_than_a_small_one(records: bytes) -> None:
    async def work() -> None:
        scene = Scene()
        scene.limits[False] = 1
        part = {"error_code": 0, "high_watermark": 2, "last_stable_offset": 2, "records": records}
        parts_of = [{"partition_index": each, **part} for each in range(PARTITIONS)]
        values = {"responses": [{**scene._named(17, "c-t"), "partitions": parts_of}]}
        frame = encode_response(build_response(ApiKey.FETCH, 17, values), 7)
        on_response = replaced(scene.fetch(17, "c-t")).on_response
        answer, spent = await longest(_answered(on_response, frame))
        assert parts(17, answer) == [(0, 1, 1, bool(records))] * PARTITIONS
        assert spent < LOOP_S_MAX, f"{spent * 1000:.1f} ms"
        await scene.reads.stop()

    run(work)


def test_one_of_which_nothing_is_left_waits_too() -> None:
    async def work() -> None:
        scene = Scene()
        scene.limits[False] = 0
        part = {"error_code": 0, "high_watermark": 1, "last_stable_offset": 1, "records": batch(0, [b"v"])}
        parts_of = [{"partition_index": each, **part} for each in range(1_000)]
        values = {"responses": [{**scene._named(17, "c-t"), "partitions": parts_of}]}
        frame = encode_response(build_response(ApiKey.FETCH, 17, values), 7)
        on_response = replaced(scene.fetch(17, "c-t", wait_ms=600_000)).on_response
        assert on_response is not None
        gate = on_response(frame)
        assert isinstance(gate, Gate)
        cut = asyncio.Event()
        assert not gate.take(cut.set)
        async with asyncio.timeout(60):
            await cut.wait()
        waiting = gate.answer()
        assert isinstance(waiting, Gate)
        assert not waiting.take(lambda: None)
        scene.limits[False] = 1
        scene.reads.confirmed(("c-t", 999))
        assert parts(17, await went_out(waiting.answer())) == [(0, 1, 1, 1)] * 1_000
        assert not scene.reads._waiting
        await scene.reads.stop()

    run(work)


def test_so_do_offsets_of_thousands_of_partitions() -> None:
    async def work() -> None:
        scene = Scene()
        asked = {"partitions": [{"partition_index": each, "timestamp": -1} for each in range(PARTITIONS)]}
        values: dict[str, Any] = {"topics": [{"name": "c-t", **asked}]}
        verdict = replaced(scene.reads.on_list_offsets(scene.request(ApiKey.LIST_OFFSETS, 10, values)))
        told = [{"partition_index": each, "error_code": 0, "timestamp": 5, "offset": 10} for each in range(PARTITIONS)]
        values = {"topics": [{"name": "c-t", "partitions": told}]}
        frame = encode_response(build_response(ApiKey.LIST_OFFSETS, 10, values), 7)
        answer, spent = await longest(_answered(verdict.on_response, frame))
        found: Any = decode_response(ApiKey.LIST_OFFSETS, 10, answer)[1]
        assert {each.offset for each in found.topics[0].partitions} == {4}
        assert spent < LOOP_S_MAX, f"{spent * 1000:.1f} ms"
        await scene.reads.stop()

    run(work)


def test_what_a_hook_behind_answers_in_the_thread_is_looked_at_on_the_loop() -> None:
    async def work() -> None:
        scene = Scene()
        on_response = replaced(scene.fetch(17, "c-t")).on_response
        assert on_response is not None
        answer = await aside(on_response, scene.answer(17, "c-t"))
        assert parts(17, await went_out(answer)) == [(0, 4, 4, 4)]

    run(work)


@pytest.mark.parametrize("epoch", [0, 3])
def test_what_the_thread_found_is_not_remembered_when_more_is_to_be_confirmed_by_then(epoch: int) -> None:
    """Neither that a topic is shown as it is, nor that a fetch session holds no other one."""

    async def main() -> None:
        scene = Scene()
        scene.reads = ConfirmedReads(scene.context, lambda topic: True, lambda place, committed: 4)
        scene.reads.control_changed(scene.control.state)
        scene.control.subscribe(scene.reads.control_changed)
        confirmed = CreateNamespace(ResourceType.TOPIC, "t", demands=Demands(visibility=Visibility.CONFIRMED))
        await overtaken(lambda: scene.fetch(12, "t"), lambda: scene.control.apply(confirmed))
        again = scene.fetch(12, "t", epoch=epoch) if not epoch else scene.fetch(12, epoch=epoch)
        assert isinstance(again, Answer if epoch else Replace)

    asyncio.run(main())
