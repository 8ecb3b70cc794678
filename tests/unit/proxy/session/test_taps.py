"""What a tap is told of Produce requests and of answers to Fetch, as capture pairs its notes.

On real sockets, with a broker that the test plays.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.flat_events import flat
from support.sessions import Front, Wire, answer, fetched, fronted, hook, request, run, until

from isthmus.session.downstream import Downstream
from isthmus.session.listener import Limits
from isthmus.session.session import SessionState
from isthmus.session.tapped_produce import UNITS_AT_ONCE
from isthmus.session.upstream import Upstream
from isthmus_plugins.api import Answer, Gate, Replace, Request, RequestHook
from isthmus_plugins.capture.notes import Kind, Note, pack, unpack
from isthmus_plugins.capture.pairing import Pairing
from isthmus_plugins.capture.recorder import Recorder
from isthmus_plugins.tasks import Supervision
from isthmus_protocol import peeks, schema
from isthmus_protocol.bodies import build
from isthmus_protocol.fetch_scan import FetchScan
from isthmus_protocol.messages import build_request, encode_request, encode_response
from isthmus_protocol.partition_scan import PartitionScan
from isthmus_protocol.produce_scan import ProduceScan
from isthmus_protocol.record_codec import Record, encode_batch
from isthmus_protocol.records import BatchHeader, walk
from isthmus_protocol.schema import ApiKey

VERSIONS = [4, 11, 12, 15, 17]
Counts = tuple[int, int, int, int]
"""Partition, batches, records, bytes."""


def fetch(correlation_id: int, version: int) -> bytes:
    return encode_request(build_request(ApiKey.FETCH, version, {}), correlation_id, "client")


def batch(base_offset: int, count: int, size: int) -> bytes:
    records = [Record(base_offset + number, 1, None, bytes(size)) for number in range(count)]
    return encode_batch(records, BatchHeader(base_offset, 0, 0, 2, 0, 0, 0, 1, 1, -1, -1, -1, count))


def random_fetched(source: random.Random, correlation_id: int, version: int) -> tuple[bytes, list[Counts]]:
    parts, counts = [], []
    for partition in range(source.randint(1, 6)):
        batches = [batch(10 * number, source.randint(1, 4), source.choice((0, 100, 9000))) for number in range(3)]
        batches = batches[: source.randint(0, 3)]
        parts.append({"partition_index": partition, "records": b"".join(batches)})
        records = sum(int.from_bytes(each[57:61], "big") for each in batches)
        counts.append((partition, len(batches), records, sum(map(len, batches))))
    topic: dict[str, Any] = {} if peeks.topics_are_ids(ApiKey.FETCH, version) else {"topic": "t"}
    said = build(schema.response_type(ApiKey.FETCH, version), {"responses": [{**topic, "partitions": parts}]})
    return encode_response(said, correlation_id), counts


class Tapped:
    """A front whose traffic is noted."""

    def __init__(self, front: Front, sampling: float = 1.0) -> None:
        context: Any = SimpleNamespace(proxy_name="p", cluster_id="c", supervision=Supervision())
        self.front = front
        self.recorder = Recorder(context, Path("nowhere"))
        self.recorder.configure([{"sampling": sampling}])
        front.gateway.observe(self.recorder)

    @property
    def notes(self) -> list[Note]:
        return [note for _, notes in unpack(pack(self.recorder._values)) for note in notes]

    def events(self) -> list[SimpleNamespace]:
        pairing = Pairing({}.get)
        return [flat(event) for note in self.notes for event in pairing.take(note)]

    def counts(self) -> list[Counts]:
        assert {each.partial for each in self.events()} <= {0}
        return [(each.partition, each.batches, each.records, each.batch_bytes) for each in self.events()]

    async def send(self, upstream: Wire, *pieces: bytes) -> None:
        """Each piece arrives on its own."""
        for piece in pieces:
            before = self.front.gateway.bytes_from_brokers
            upstream.send(piece)
            await until(lambda before=before, piece=piece: self._came(before + len(piece)))  # type: ignore[misc]

    def _came(self, count: int) -> bool:
        return self.front.gateway.bytes_from_brokers >= count


@pytest.mark.parametrize("version", VERSIONS)
def test_all_partitions_are_told_in_whatever_pieces_answers_come(version: int) -> None:
    async def main() -> None:
        source = random.Random(version)
        async with fronted() as front:
            tapped = Tapped(front)
            client, upstream, _ = await front.connect()
            said, wanted = b"", []
            for number in range(30):
                client.send(fetch(number, version))
                await upstream.take()
                frame, counts = random_fetched(source, number, version)
                said += frame
                wanted += counts
            cuts = sorted(source.randrange(len(said)) for _ in range(200))
            pieces = [said[start:end] for start, end in zip([0, *cuts], [*cuts, len(said)], strict=True)]
            received = client.reader.readexactly(len(said))
            assert (await asyncio.gather(received, tapped.send(upstream, *filter(None, pieces))))[0] == said
            assert tapped.counts() == wanted

    run(main())


@pytest.mark.parametrize("how", ["at a gate", "by the proxy"])
def test_answers_that_are_held_whole_are_told_alike(how: str) -> None:
    async def main() -> None:
        frame, counts = random_fetched(random.Random(5), 1, 12)
        gate = Gate()

        def asked(_: Request) -> Replace | Answer:
            return Replace(fetch(1, 12), lambda _: gate) if how == "at a gate" else Answer(frame, "test")

        async with fronted(hook(asked, api_key=ApiKey.FETCH)) as front:
            tapped = Tapped(front)
            client, upstream, _ = await front.connect()
            client.send(fetch(1, 12))
            if how == "at a gate":
                await upstream.take()
                upstream.send(frame)
                await until(lambda: any(note.kind == Kind.GATED for note in tapped.notes))
                gate.open(frame)
            assert await client.take() == frame
            assert tapped.counts() == counts

    run(main())


def test_a_produce_to_thousands_of_topics_that_was_held_is_scanned_in_the_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads, feed = set[int](), ProduceScan.feed

    def noted(scan: ProduceScan, data: bytes, *units_max: int) -> int:
        if scan.units:  # the rest of many
            threads.add(threading.get_ident())
        return feed(scan, data, *units_max)

    monkeypatch.setattr(ProduceScan, "feed", noted)
    topics = [f"topic-{number}" for number in range(2_000)]
    data = [{"name": each, "partition_data": [{"index": 3, "records": batch(0, 2, 1)}]} for each in topics]
    values = {"acks": -1, "timeout": 1, "topic_data": data}

    async def main() -> None:
        def asked(request: Request) -> None:
            peeks.produce_batches(request.version, request.frame)

        async with fronted(RequestHook(ApiKey.PRODUCE, asked, whole=True, pure=True)) as front:
            tapped = Tapped(front)
            client, upstream, _ = await front.connect()
            for number in (1, 2):
                client.send(encode_request(build_request(ApiKey.PRODUCE, 9, values), number, "client"))
                await upstream.take()
                said = build(schema.response_type(ApiKey.PRODUCE, 9), {"responses": []})
                upstream.send(encode_response(said, number))
                await client.take()
            assert threads
            assert threading.get_ident() not in threads
            events = tapped.events()
            assert [(each.topic, each.partition, each.records) for each in events] == [(t, 3, 2) for t in topics * 2]
            assert not any(each.partial for each in events)

    run(main())


class Steps:
    """What is read of Produce requests, or of answers to Fetch, in each step of the loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: type[PartitionScan] = ProduceScan) -> None:
        self.units: list[int] = []
        feed = kind.feed

        def noted(scan: PartitionScan, data: bytes, *units_max: int) -> int:
            if not units_max:  # not of the traffic path
                return feed(scan, data)
            if not self.units or (self.units[-1] and not self._same_step):
                self.units.append(0)
                self._same_step = True
                asyncio.get_running_loop().call_soon(self._next)
            before = scan.units
            try:
                return feed(scan, data, *units_max)
            finally:
                self.units[-1] += scan.units - before

        self._same_step = False
        monkeypatch.setattr(kind, "feed", noted)

    def _next(self) -> None:
        self._same_step = False


def produced(number: int, topics: dict[str, list[bytes | None]], acks: int = -1) -> bytes:
    """A Produce of partitions with these records."""
    data = [
        {"name": name, "partition_data": [{"index": index, "records": each} for index, each in enumerate(records)]}
        for name, records in topics.items()
    ]
    values = {"acks": acks, "timeout": 1, "topic_data": data}
    return encode_request(build_request(ApiKey.PRODUCE, 9, values), number, "client")


MANY = 2_500
TOPICS_OF_ONE: dict[str, list[bytes | None]] = {f"topic-{number}": [batch(0, 2, 1)] for number in range(MANY)}


@pytest.mark.parametrize(
    "topics",
    [{"t": [None] * MANY}, TOPICS_OF_ONE, {f"t{number}": [] for number in range(MANY)} | {"t": [b"", None]}],
    ids=["partitions without records", "topics", "topics without partitions"],
)
def test_a_produce_of_thousands_that_streams_through_is_read_in_steps(
    topics: dict[str, list[bytes | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is forwarded as it came, told of as a whole, and what the client sends behind it goes behind it."""

    async def main() -> None:
        steps = Steps(monkeypatch)
        async with fronted() as front:
            tapped = Tapped(front)
            client, upstream, session = await front.connect()
            streamed, at_once = produced(0, topics), produced(1, topics)
            behind = [produced(2, {"u": [batch(0, 3, 300), batch(0, 4, 300)]}), produced(3, {"u": [batch(0, 5, 900)]})]
            client.send(streamed)
            assert await upstream.take() == streamed
            session.downstream.data_received(at_once)  # all of one that is like others before
            client.send(*behind)
            assert [await upstream.take() for _ in range(3)] == [at_once, *behind]
            for number in range(4):
                said = build(schema.response_type(ApiKey.PRODUCE, 9), {"responses": []})
                upstream.send(encode_response(said, number))
                await client.take()
            *events, first, second, last = tapped.events()
            wanted = [(name, index, each) for name, parts in topics.items() for index, each in enumerate(parts)] * 2
            found = [(each.topic, each.partition, each.batch_bytes) for each in events]
            assert found == [(name, index, len(each or b"")) for name, index, each in wanted]
            assert not any(each.partial for each in events)
            assert [each.records for each in (first, second, last)] == [3, 4, 5]
            assert max(steps.units) <= 2 * UNITS_AT_ONCE, "the end of one, and the beginning of others"
            assert sum(steps.units) > 2 * MANY

    run(main())


def test_many_requests_that_come_at_once_are_read_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        steps = Steps(monkeypatch)
        async with fronted() as front:
            tapped = Tapped(front)
            client, upstream, _ = await front.connect()
            frames = [produced(number, {"t": [None] * 100, "u": [None]}, acks=0) for number in range(200)]
            client.send(*frames)
            assert [await upstream.take() for _ in frames] == frames
            client.send(request(200))
            await upstream.take()
            counts = Counter(each.correlation_id for each in tapped.events() if each.api_key == ApiKey.PRODUCE)
            assert counts == dict.fromkeys(range(200), 101)
            assert max(steps.units) <= 2 * UNITS_AT_ONCE, "the end of one, and the beginning of others"

    run(main())


@pytest.mark.parametrize("topics", [{"t": [None] * 1_500}, {"t" * 300: [None] * 900}], ids=["many", "a long name"])
def test_what_no_broker_takes_is_told_by_its_first_bytes(topics: dict[str, list[bytes | None]]) -> None:
    async def main() -> None:
        async with fronted(limits=Limits(request_elements_max=1_000)) as front:
            tapped = Tapped(front)
            client, upstream, _ = await front.connect()
            frame = produced(1, topics)
            client.send(frame, request(2))
            assert await upstream.take() == frame
            await upstream.take()
            said = build(schema.response_type(ApiKey.PRODUCE, 9), {"responses": []})
            upstream.send(encode_response(said, 1), answer(2))
            for _ in range(2):
                await client.take()
            events = [each for each in tapped.events() if each.api_key == ApiKey.PRODUCE]
            assert events
            assert all(each.partial for each in events)
            assert sum(len(note.first) for note in tapped.notes) < 10 * len(frame)

    run(main())


def test_a_client_that_is_gone_between_two_steps_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with fronted() as front:
            Tapped(front)
            client, upstream, session = await front.connect()
            taken: list[bytes] = []
            take_later = session.downstream._take_later
            monkeypatch.setattr(
                Downstream, "_take_later", lambda self, data: (taken.append(data), take_later(data), self.abort())
            )
            client.send(produced(1, {"t": [None] * MANY}))
            await until(lambda: session not in front.gateway.sessions)
            assert len(taken) < 5, "of seven"
            await upstream.closed()
            assert session.state is SessionState.CLOSED

    run(main())


def test_a_drain_takes_in_what_is_read_in_steps_and_nothing_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with fronted() as front:
            Tapped(front)
            client, upstream, session = await front.connect()
            take_later = Downstream._take_later

            def drained(self: Downstream, data: bytes) -> None:
                take_later(self, data)
                session.drain()

            monkeypatch.setattr(Downstream, "_take_later", drained)
            frame = produced(1, {"t": [None] * MANY})
            client.send(frame, request(2))
            assert await upstream.take() == frame
            upstream.send(answer(1))
            assert await client.take() == answer(1)
            assert await upstream.closed() == b""

    run(main())


def many_fetched(correlation_id: int, version: int, parts: list[bytes], topics: int = 1) -> bytes:
    """An answer to Fetch of partitions with these records, in so many topics each."""
    data = [{"partition_index": index, "records": records} for index, records in enumerate(parts)]
    topic: dict[str, Any] = {} if peeks.topics_are_ids(ApiKey.FETCH, version) else {"topic": "t"}
    values = {"responses": [{**topic, "partitions": data}] * topics}
    return encode_response(build(schema.response_type(ApiKey.FETCH, version), values), correlation_id)


def again(frame: bytes, correlation_id: int) -> bytes:
    """The same answer to another request: to encode thousands of partitions takes longer than to read them."""
    return frame[:4] + correlation_id.to_bytes(4, "big") + frame[8:]


EMPTY_PARTS = [b""] * MANY
SMALL_BATCHES = [b"".join(batch(number, 1, 0) for number in range(8 * MANY)), batch(0, 2, 9), b""]
ANSWERS: list[tuple[list[bytes], int]] = [(EMPTY_PARTS, 1), ([batch(0, 1, 0)], MANY), (SMALL_BATCHES, 1)]


@pytest.mark.parametrize("how", ["streams", "seen by a hook", "at a gate", "by the proxy"])
@pytest.mark.parametrize("version", [12, 17])
@pytest.mark.parametrize(("parts", "topics"), ANSWERS, ids=["without records", "topics", "small batches"])
def test_an_answer_of_thousands_is_read_in_steps(
    parts: list[bytes], topics: int, version: int, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes out as it came, is told of as a whole, and what comes behind it goes out behind it."""
    gates = list[Gate]()
    first = many_fetched(1, version, parts, topics)
    frames = [first, again(first, 2)]

    def gated(_: bytes) -> Gate:
        gates.append(Gate())
        return gates[-1]

    def asked(request: Request) -> Replace | Answer | None:
        if how == "by the proxy":
            return Answer(again(first, request.correlation_id), "test")
        if how == "streams":
            return None
        return Replace(request.frame, gated if how == "at a gate" else lambda frame: frame)

    async def main() -> None:
        steps = Steps(monkeypatch, FetchScan)
        async with fronted(hook(asked, api_key=ApiKey.FETCH)) as front:
            tapped = Tapped(front)
            client, upstream, _ = await front.connect()
            client.send(fetch(1, version), request(3), fetch(2, version), request(4))
            if how == "by the proxy":
                await upstream.take()
                await upstream.take()
                upstream.send(answer(3), answer(4))
            else:
                for _ in range(4):
                    await upstream.take()
                upstream.send(frames[0], answer(3), frames[1], answer(4))
            if how == "at a gate":
                for number, frame in enumerate(frames):
                    await until(lambda number=number: len(gates) > number)  # type: ignore[misc]
                    gates[number].open(frame)
            assert [await client.take() for _ in range(4)] == [frames[0], answer(3), frames[1], answer(4)]
            events = [each for each in tapped.events() if each.api_key == ApiKey.FETCH]
            found = [(each.partition, each.batch_bytes, each.batches) for each in events]
            assert found == [
                (index, len(records), sum(1 for _ in walk(records))) for index, records in enumerate(parts)
            ] * (2 * topics)
            assert not any(each.partial for each in events)
            assert max(steps.units) <= 2 * UNITS_AT_ONCE + 25, "the end of one, and the beginning of others"
            assert sum(steps.units) > MANY

    run(main())


def test_many_answers_that_come_at_once_are_read_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        steps = Steps(monkeypatch, FetchScan)
        async with fronted() as front:
            tapped = Tapped(front)
            client, upstream, _ = await front.connect()
            client.send(*(fetch(number, 12) for number in range(200)))
            for _ in range(200):
                await upstream.take()
            first = many_fetched(0, 12, [b""] * 100)
            frames = [again(first, number) for number in range(200)]
            upstream.send(*frames)
            assert [await client.take() for _ in frames] == frames
            assert Counter(each.correlation_id for each in tapped.events()) == dict.fromkeys(range(200), 100)
            assert max(steps.units) <= 2 * UNITS_AT_ONCE, "the end of one, and the beginning of others"

    run(main())


def test_a_drain_takes_in_answers_that_are_read_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with fronted() as front:
            tapped = Tapped(front)
            client, upstream, session = await front.connect()
            take_later = Upstream._take_later

            def drained(self: Upstream, data: bytes) -> None:
                take_later(self, data)
                session.drain()

            monkeypatch.setattr(Upstream, "_take_later", drained)
            client.send(fetch(1, 12))
            await upstream.take()
            frame = many_fetched(1, 12, EMPTY_PARTS)
            upstream.send(frame)
            assert await client.take() == frame
            assert await upstream.closed() == b""
            assert len(tapped.counts()) == MANY

    run(main())


@pytest.mark.parametrize("who", ["client", "broker"])
def test_who_is_gone_between_two_steps_of_an_answer_leaves_nothing(who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with fronted() as front:
            tapped = Tapped(front)
            client, upstream, session = await front.connect()
            taken: list[bytes] = []
            take_later = Upstream._take_later

            def gone(self: Upstream, data: bytes) -> None:
                take_later(self, data)
                taken.append(data)
                if who == "broker":
                    self.abort()
                else:
                    session.downstream.abort()

            monkeypatch.setattr(Upstream, "_take_later", gone)
            client.send(fetch(1, 12))
            await upstream.take()
            upstream.send(many_fetched(1, 12, EMPTY_PARTS))
            await until(lambda: session not in front.gateway.sessions)
            assert len(taken) < 5, "of a dozen"
            assert session.state is SessionState.CLOSED
            await (upstream if who == "client" else client).closed()
            assert not tapped.events(), "nothing was told of it as a whole"

    run(main())


def test_a_client_that_reads_again_between_two_steps_has_its_answers_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """That has the broker read again, too."""

    async def main() -> None:
        async with fronted() as front:
            tapped = Tapped(front)
            client, upstream, session = await front.connect()
            take_later = Upstream._take_later

            def full(self: Upstream, data: bytes) -> None:
                take_later(self, data)
                session.downstream.pause_writing()
                session.downstream.resume_writing()

            monkeypatch.setattr(Upstream, "_take_later", full)
            client.send(*(fetch(number, 12) for number in range(3)))
            first = many_fetched(0, 12, EMPTY_PARTS)
            frames = [again(first, number) for number in range(3)]
            for _ in frames:
                await upstream.take()
            upstream.send(*frames)
            assert [await client.take() for _ in frames] == frames
            assert len(tapped.counts()) == 3 * MANY

    run(main())


def test_bytes_that_are_no_answer_pass_and_the_next_one_is_told() -> None:
    async def main() -> None:
        async with fronted() as front:
            tapped = Tapped(front)
            client, upstream, _ = await front.connect()
            for number in (1, 2):
                client.send(fetch(number, 4))
                await upstream.take()
            nonsense = answer(1, bytes(4) + b"\x00\x00\x00\x05\xff\xf0" + b"\x7f" * 5000)
            frame, counts = random_fetched(random.Random(4), 2, 4)
            await tapped.send(upstream, nonsense[:300], nonsense[300:] + frame)
            assert [await client.take() for _ in range(2)] == [nonsense, frame]
            first, *others = tapped.events()
            assert (first.partial, first.topic, first.response_bytes) == (1, None, len(nonsense))
            assert [(each.partition, each.batches, each.records, each.batch_bytes) for each in others] == counts

    run(main())


def test_nothing_is_told_when_the_tap_goes_while_an_answer_streams() -> None:
    async def main() -> None:
        async with fronted() as front:
            tapped = Tapped(front)
            client, upstream, _ = await front.connect()
            client.send(fetch(1, 17), request(2))
            frame = fetched(1, batch(0, 1, 5000) + batch(1, 1, 5000))
            for _ in range(2):
                await upstream.take()
            await tapped.send(upstream, frame[:100])
            front.gateway.observe(None)
            before = len(tapped.notes)
            await tapped.send(upstream, frame[100:], answer(2))
            assert len(await client.take()) == len(frame)
            assert await client.take() == answer(2)
            assert len(tapped.notes) == before

    run(main())


def test_partitions_of_what_is_not_recorded_are_not_looked_for() -> None:
    async def main() -> None:
        async with fronted() as front:
            tapped = Tapped(front, sampling=1e-9)
            client, upstream, _ = await front.connect()
            client.send(fetch(1, 17))
            await upstream.take()
            upstream.send(fetched(1, batch(0, 1, 5000)))
            await client.take()
            assert [note.kind for note in tapped.notes] == [Kind.REQUEST, Kind.ANSWER]

    run(main())
