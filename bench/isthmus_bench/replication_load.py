"""What writes to a source and watches a target: raw sockets, one process, little CPU.

Runs as a child (:mod:`isthmus_bench.children`): each line of JSON on standard input is a command, each answered with
one line. ``fill`` appends a backlog, ``follow`` looks again and again how much of it is on the target, ``pace``
writes at a steady rate and measures how long after its ack at the source each batch is visible on the target, and
``small`` has several producers write small batches to one partition (:mod:`isthmus_bench.small_load`).

Both clusters are used directly and not through proxies, so that every way of copying is measured alike. Times are of
CLOCK_MONOTONIC, which all processes of a machine share.
"""

from __future__ import annotations

import json
import select
import sys
import time
from array import array
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any, Final
from uuid import UUID

from isthmus_bench import small_load
from isthmus_bench.children import cpu_seconds
from isthmus_bench.load import CLIENT_ID, Flow, LoadError, RawClient, Target, batch, newest_versions, topic_id
from isthmus_protocol import peeks
from isthmus_protocol.error_codes import LEADER_NOT_AVAILABLE, NOT_LEADER_OR_FOLLOWER, UNKNOWN_TOPIC_OR_PARTITION
from isthmus_protocol.messages import build_request, decode_response, encode_request
from isthmus_protocol.records import walk
from isthmus_protocol.schema import ApiKey

FILL_DEPTH: Final = 5
ANSWER_TIMEOUT_S: Final = 30.0
DRAIN_TIMEOUT_S: Final = 30.0
"""How long after the last write everything may take to arrive."""
IN_FLIGHT_MAX: Final = 5
"""As many as an idempotent Java producer allows itself."""
FETCH_WAIT_MS: Final = 500
FETCH_BYTES_MAX: Final = 8 << 20
READ_COMMITTED: Final = 1
NOT_THERE: Final = frozenset({UNKNOWN_TOPIC_OR_PARTITION, LEADER_NOT_AVAILABLE, NOT_LEADER_OR_FOLLOWER})
"""The target's topic is not made yet, or has no leader yet."""


def produce_frame(
    topic: str, identity: UUID, version: int, partitions: Sequence[int], records: bytes, correlation_id: int = 0
) -> bytes:
    """An acks=all Produce of the same batch to each of the partitions."""
    data = [{"index": partition, "records": records} for partition in partitions]
    values = {
        "acks": -1,
        "timeout": 30_000,
        "topic_data": [{"name": topic, "topic_id": identity, "partition_data": data}],
    }
    return encode_request(build_request(ApiKey.PRODUCE, version, values), correlation_id, CLIENT_ID)


def fetch_frame(topic: str, identity: UUID, version: int, offsets: Sequence[int]) -> bytes:
    """A Fetch of all partitions, each from its offset, that waits for a byte of what is committed."""
    partitions = [
        {
            "partition": partition,
            "fetch_offset": offset,
            "partition_max_bytes": FETCH_BYTES_MAX,
            "current_leader_epoch": -1,
        }
        for partition, offset in enumerate(offsets)
    ]
    values = {
        "replica_id": -1,
        "max_wait": FETCH_WAIT_MS,
        "min_bytes": 1,
        "max_bytes": FETCH_BYTES_MAX,
        "isolation_level": READ_COMMITTED,
        "session_epoch": -1,
        "topics": [{"topic": topic, "topic_id": identity, "partitions": partitions}],
    }
    return encode_request(build_request(ApiKey.FETCH, version, values), 0, CLIENT_ID)


def ends(client: RawClient, versions: Mapping[int, int], topic: str, partitions: int) -> list[int | None]:
    """The high watermarks of a topic's partitions; None where there is no such partition yet. Raises LoadError."""
    version = versions[ApiKey.LIST_OFFSETS]
    wanted = [{"partition_index": index, "timestamp": -1, "current_leader_epoch": -1} for index in range(partitions)]
    values = {"replica_id": -1, "topics": [{"name": topic, "partitions": wanted}]}
    frame = client.ask_frame(ApiKey.LIST_OFFSETS, version, values)
    answer: Any = decode_response(ApiKey.LIST_OFFSETS, version, frame)[1]
    found: list[int | None] = [None] * partitions
    for each in answer.topics[0].partitions:
        code = int(each.error_code)
        if code and code not in NOT_THERE:
            raise LoadError(f"{topic}-{each.partition_index}: ListOffsets was answered with error code {code}")
        found[each.partition_index] = None if code else each.offset
    return found


# ---- a backlog ----


def fill(
    target: Target, partitions: int, batches: int, records: int, record_bytes: int, now_ms: int | None = None
) -> dict[str, Any]:
    """Append ``batches`` batches of ``records``, all of that time, to each of the partitions. Raises LoadError."""
    client = RawClient(target)
    try:
        versions = newest_versions(client)
        identity = topic_id(client, versions, target.topic)
        version, data = versions[ApiKey.PRODUCE], batch(records, record_bytes, now_ms)
        every = range(partitions)
        values = [{"index": index, "records": data} for index in every]
        topic = {"name": target.topic, "topic_id": identity, "partition_data": values}
        _wait_until_led(client, versions, target.topic, partitions)
        answer = client.ask_frame(ApiKey.PRODUCE, version, {"acks": -1, "timeout": 30_000, "topic_data": [topic]})
        errors = peeks.error_codes(ApiKey.PRODUCE, version, answer) - {0}
        if errors:
            raise LoadError(f"a Produce was answered with error codes {sorted(errors)}")
    finally:
        client.close()
    left = batches - 1
    if left:
        frames = [produce_frame(target.topic, identity, version, every, data, number) for number in range(FILL_DEPTH)]
        connection = target.connect()
        try:
            _repeat(Flow(connection, frames, len(answer), min(left, FILL_DEPTH)), left)
        finally:
            connection.close()
    return {"records": partitions * batches * records}


def _wait_until_led(client: RawClient, versions: Mapping[int, int], topic: str, partitions: int) -> None:
    """A broker takes up the partitions of a new topic a moment after it has shown them."""
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
    while None in ends(client, versions, topic, partitions):
        if time.monotonic() > deadline:
            raise LoadError(f"{topic} has partitions without a leader")
        time.sleep(0.02)


def _repeat(flow: Flow, count: int) -> None:
    """Send requests until ``count`` are answered."""
    view = memoryview(bytearray(1 << 16))
    latencies = array("q")
    left, answered = count - flow.in_flight, 0
    while answered < count:
        size = flow.connection.recv_into(view)
        if not size:
            raise LoadError("the connection was closed")
        complete = flow.received(view[:size], latencies)
        answered += complete
        flow.send(min(complete, left))
        left -= min(complete, left)


def follow(
    target: Target, partitions: int, records: int, interval_s: float, timeout_s: float, pids: Sequence[int]
) -> dict[str, Any]:
    """Look how many records there are until there are ``records``. Raises LoadError.

    Samples are [time, records, CPU time of the processes], from the first look on.
    """
    client = RawClient(target)
    samples: list[tuple[float, int, float]] = []
    try:
        versions = newest_versions(client)
        deadline = time.monotonic() + timeout_s
        while True:
            found = sum(end or 0 for end in ends(client, versions, target.topic, partitions))
            now = time.monotonic()
            samples.append((now, found, sum(map(cpu_seconds, pids))))
            if found >= records:
                return {"samples": samples}
            if now > deadline:
                raise LoadError(f"{target.topic}: {found} of {records} records were there after {timeout_s:.0f} s")
            time.sleep(interval_s)
    finally:
        client.close()


# ---- a steady rate ----


@dataclass(frozen=True)
class Pace:
    """What to write: batches of equal size, to the partitions in turn, evenly spread over the time."""

    records_per_s: int
    batches_per_s: int
    record_bytes: int = 100
    partitions: int = 4
    warmup_s: float = 0.5
    seconds: float = 4.0

    @property
    def records(self) -> int:
        """Of a batch."""
        return max(1, self.records_per_s // self.batches_per_s)


class Arrivals:
    """When the batches of one partition were acked at the source, and seen on the target: both in offset order.

    They are told apart by how many records there are up to their ends.
    """

    __slots__ = ("_acked", "_seen", "lags")

    def __init__(self) -> None:
        self._acked: deque[tuple[int, float]] = deque()
        self._seen: deque[tuple[int, float]] = deque()
        self.lags: list[tuple[float, float]] = []
        """(time of the ack, seconds from there to the sight of it; negative where the target was first)."""

    def acked(self, records: int, now: float) -> None:
        """The source has acked a batch, with which it has so many records."""
        self._acked.append((records, now))
        self._match()

    def seen(self, records: int, now: float) -> None:
        """The target has the first ``records`` of them."""
        self._seen.append((records, now))
        self._match()

    def _match(self) -> None:
        while self._acked and self._seen:
            wanted, acked_at = self._acked[0]
            there, seen_at = self._seen[0]
            if there < wanted:
                self._seen.popleft()
            else:
                self._acked.popleft()
                self.lags.append((acked_at, seen_at - acked_at))

    @property
    def waiting(self) -> int:
        """Batches that were acked and not seen."""
        return len(self._acked)


class _Frames:
    """The answers that come over one connection, whole."""

    def __init__(self, client: RawClient) -> None:
        self.socket = client.socket
        self._bytes = bytearray()

    def read(self) -> Iterator[bytes]:
        """What has come, in whole frames. Raises LoadError."""
        received = self.socket.recv(1 << 20)
        if not received:
            raise LoadError("the connection was closed")
        self._bytes += received
        while len(self._bytes) >= 4:
            size = 4 + int.from_bytes(self._bytes[:4], "big")
            if len(self._bytes) < size:
                return
            frame = bytes(self._bytes[:size])
            del self._bytes[:size]
            yield frame


class Pacer:
    """One run of :func:`pace`."""

    def __init__(self, pace: Pace, source: Target, sink: Target, *, equal_offsets: bool) -> None:
        self._pace = pace
        self._writer, self._reader = RawClient(source), RawClient(sink)
        self._answers, self._fetched = _Frames(self._writer), _Frames(self._reader)
        write, read = newest_versions(self._writer), newest_versions(self._reader)
        at_target = ends(self._reader, read, sink.topic, pace.partitions)
        at_source = ends(self._writer, write, source.topic, pace.partitions)
        if equal_offsets and at_target != at_source:
            raise LoadError(f"{sink.topic} ends at {at_target}, its source at {at_source}")
        self._offsets = [end or 0 for end in at_target]
        self._starts = [end or 0 for end in at_source]
        self._seen = [0] * pace.partitions
        self._arrivals = [Arrivals() for _ in range(pace.partitions)]
        self._produce_version, self._fetch_version = write[ApiKey.PRODUCE], read[ApiKey.FETCH]
        self._sink_topic, self._sink_id = sink.topic, topic_id(self._reader, read, sink.topic)
        source_id = topic_id(self._writer, write, source.topic)
        data = batch(pace.records, pace.record_bytes)
        self._requests = cycle(
            [
                (each, produce_frame(source.topic, source_id, self._produce_version, [each], data))
                for each in range(pace.partitions)
            ]
        )
        self._sent: deque[tuple[int, float]] = deque()
        self._ack_s: list[float] = []

    def close(self) -> None:
        self._writer.close()
        self._reader.close()

    def run(self, pids: Sequence[int]) -> dict[str, Any]:
        """Write at the pace, then wait for what is under way. Raises LoadError."""
        pace, clock = self._pace, time.monotonic
        poll = select.epoll()
        try:
            for each in (self._answers, self._fetched):
                poll.register(each.socket.fileno(), select.EPOLLIN)
            self._fetch()
            begin = clock()
            measured, end = begin + pace.warmup_s, begin + pace.warmup_s + pace.seconds
            cpu_started: float | None = None
            sent = 0
            while True:
                now = clock()
                if cpu_started is None and now >= measured:
                    cpu_started = sum(map(cpu_seconds, pids))
                if now >= end:
                    break
                due = int((now - begin) * pace.batches_per_s) + 1 - sent
                for partition, frame in islice(self._requests, max(0, min(due, IN_FLIGHT_MAX - len(self._sent)))):
                    self._sent.append((partition, clock()))
                    self._answers.socket.sendall(frame)
                    sent += 1
                next_due = begin + sent / pace.batches_per_s
                self._wait(poll, max(0.0, min(next_due, end) - clock()))
            cpu = sum(map(cpu_seconds, pids)) - (cpu_started or 0.0)
            while self._sent or any(each.waiting for each in self._arrivals):
                if clock() > end + DRAIN_TIMEOUT_S:
                    left = sum(each.waiting for each in self._arrivals)
                    raise LoadError(f"{left} batches were not on the target {DRAIN_TIMEOUT_S:.0f} s after the last")
                self._wait(poll, 1.0)
        finally:
            poll.close()
        return lag_said(
            [lag for each in self._arrivals for acked_at, lag in each.lags if acked_at >= measured],
            pace.records / pace.seconds,
            self._ack_s,
            cpu / pace.seconds,
        )

    def _wait(self, poll: select.epoll, seconds: float) -> None:
        for number, _ in poll.poll(seconds):
            if number == self._answers.socket.fileno():
                self._take_acks()
            else:
                self._take_fetched()

    def _take_acks(self) -> None:
        for frame in self._answers.read():
            now = time.monotonic()
            partition, sent_at = self._sent.popleft()
            self._ack_s.append(now - sent_at)
            ((_, ((_, error_code, base_offset),)),) = peeks.produce_response(self._produce_version, frame)
            if error_code:
                raise LoadError(f"a Produce was answered with error code {error_code}")
            self._arrivals[partition].acked(base_offset - self._starts[partition] + self._pace.records, now)

    def _fetch(self) -> None:
        self._fetched.socket.sendall(fetch_frame(self._sink_topic, self._sink_id, self._fetch_version, self._offsets))

    def _take_fetched(self) -> None:
        for frame in self._fetched.read():
            now = time.monotonic()
            error_code, _, topics = peeks.fetch_response(self._fetch_version, frame)
            if error_code:
                raise LoadError(f"a Fetch was answered with error code {error_code}")
            for _, partitions in topics:
                for index, code, _, _, _, _, records in partitions:
                    if code:
                        raise LoadError(f"a Fetch of partition {index} was answered with error code {code}")
                    for _, _, header in walk(records or b""):
                        self._offsets[index] = header.next_offset
                        if not header.is_control:
                            self._seen[index] += header.record_count
                            self._arrivals[index].seen(self._seen[index], now)
            self._fetch()


def lag_said(lags: Sequence[float], records_each_per_s: float, acks: Sequence[float], cpu: float) -> dict[str, Any]:
    """What a run says of its lags and acks (seconds). Raises LoadError where there are none."""
    if not lags:
        raise LoadError("not one batch in time")
    ordered, acked = sorted(lags), sorted(acks)
    return {
        "records_per_s": len(ordered) * records_each_per_s,
        "p50_ms": ordered[len(ordered) // 2] * 1000,
        "p99_ms": ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)] * 1000,
        "max_ms": ordered[-1] * 1000,
        "ack_p50_ms": acked[len(acked) // 2] * 1000,
        "cpu_share": cpu,
    }


def pace(what: Pace, source: Target, sink: Target, pids: Sequence[int], *, equal_offsets: bool) -> dict[str, Any]:
    """Write to ``source`` and watch ``sink``, which has the same records. Raises LoadError.

    That is raised as well where their offsets are to be equal and differ.
    """
    pacer = Pacer(what, source, sink, equal_offsets=equal_offsets)
    try:
        return pacer.run(pids)
    finally:
        pacer.close()


def main() -> None:
    print("{}", flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        verb = command.pop("do")
        try:
            match verb:
                case "fill":
                    said = fill(Target(**command.pop("target")), **command)
                case "follow":
                    said = follow(Target(**command.pop("target")), **command)
                case "small":
                    said = small_load.write(Target(**command.pop("target")), **command)
                case "pace":
                    source, sink = Target(**command["source"]), Target(**command["sink"])
                    equal = command["equal_offsets"]
                    said = pace(Pace(**command["pace"]), source, sink, command["pids"], equal_offsets=equal)
                case other:
                    raise LoadError(f"no such command: {other}")
        except (OSError, LoadError) as error:
            said = {"error": str(error) or type(error).__name__}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
