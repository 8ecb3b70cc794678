"""The load generator of ``isthmus bench sync``: raw sockets, frames that are built before, one process, little CPU.

Runs as a child (:mod:`isthmus_bench.children`): each line of JSON on standard input is a command, each answered with
one line. ``closed`` keeps a number of Produce requests in flight on one connection. ``open`` sends Produce requests
when they are due, whether those before are answered or not, over several connections, and counts a latency from when
its request was *due*: who is slow for a while is slow for all that were to be sent meanwhile (no coordinated omission).
``commit`` commits positions one after the other, ``transaction`` whole transactions; ``warm`` has several clients do
one of these at once, which is not measured.

Every answer is looked at: an error code ends the load.
"""

from __future__ import annotations

import ctypes
import json
import select
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Final

from isthmus_bench.children import cpu_seconds
from isthmus_bench.load import LoadError, RawClient, Target, batch, newest_versions, topic_id
from isthmus_bench.percentiles import percentile
from isthmus_bench.raw_writes import ADD_PARTITIONS_VERSION, END_TXN_VERSION, patiently, produce
from isthmus_bench.replication_load import produce_frame
from isthmus_protocol import peeks
from isthmus_protocol.records import TRANSACTIONAL_BIT, whole_header
from isthmus_protocol.schema import ApiKey

DRAIN_TIMEOUT_S: Final = 60.0
"""How long after the last request everything may take to be answered."""
OFFSET_COMMIT_VERSION: Final = 8
INIT_PRODUCER_ID_VERSION: Final = 4
ADD_OFFSETS_VERSION: Final = 3
TXN_OFFSET_COMMIT_VERSION: Final = 3
COORDINATOR: Final = 1
"""The broker whose groups and transactional ids are used: it is in the clients' site everywhere."""
POSITIONS: Final = 100
TRANSACTIONAL_IDS: Final = 8
"""Used in turn, so that a transaction does not wait for the markers of the one before."""
RETRY_S: Final = 0.002
RECEIVE_BYTES: Final = 1 << 16
SHARES: Final[Mapping[str, float]] = {"p50_ms": 50, "p90_ms": 90, "p99_ms": 99, "p999_ms": 99.9, "max_ms": 100}
_PR_SET_TIMERSLACK: Final = 29

Pids = Mapping[str, Sequence[int]]
"""What processes do, such as ``brokers``, to their ids."""


@dataclass(frozen=True, slots=True)
class Shape:
    """How Produce requests are sent."""

    depth: int = 1
    """In flight, where the loop is closed."""
    rate: int = 0
    """Requests a second, where it is open."""
    connections: int = 1
    partitions: int = 1
    record_bytes: int = 1024
    warmup_s: float = 1.0
    seconds: float = 5.0


@dataclass(frozen=True, slots=True)
class Schedule:
    """When requests of an open loop are due: evenly, from ``begin_ns`` of the monotonic clock."""

    begin_ns: int
    rate: int
    warmup: int
    """So many requests go before those that count."""
    total: int

    @classmethod
    def of(cls, begin_ns: int, shape: Shape) -> Schedule:
        warmup = round(shape.rate * shape.warmup_s)
        return cls(begin_ns, shape.rate, warmup, warmup + max(1, round(shape.rate * shape.seconds)))

    def due_ns(self, number: int) -> int:
        """When a request is due; they count from 0."""
        return self.begin_ns + number * 1_000_000_000 // self.rate


class Meter:
    """CPU that processes, and this one, use from ``begin`` to ``end``."""

    def __init__(self, pids: Pids) -> None:
        self._pids = pids
        self._begun: tuple[float, float, dict[str, float]] | None = None

    def begin(self) -> None:
        self._begun = (time.monotonic(), time.process_time(), self._used())

    def end(self) -> dict[str, float]:
        """Shares of one core by what the processes do; ``load`` is this one."""
        assert self._begun is not None
        at, own, before = self._begun
        took = max(time.monotonic() - at, 1e-9)
        shares = {name: (used - before[name]) / took for name, used in self._used().items()}
        return {**shares, "load": (time.process_time() - own) / took}

    def _used(self) -> dict[str, float]:
        return {name: sum(map(cpu_seconds, pids)) for name, pids in self._pids.items()}


def said_of(latencies_ns: Sequence[int], seconds: float, cpu: Mapping[str, float], **more: Any) -> dict[str, Any]:
    """What a load says. Raises LoadError where nothing was measured."""
    if not latencies_ns:
        raise LoadError("not one answer in time")
    ordered = sorted(latencies_ns)
    return {
        "requests": len(ordered),
        "per_s": len(ordered) / seconds,
        **{name: percentile(ordered, share) / 1e6 for name, share in SHARES.items()},
        "cpu": dict(cpu),
        **more,
    }


# ---- Produce ----


class Connection:
    """One connection that requests are sent on without waiting, and answered in order."""

    def __init__(self, connected: socket.socket, version: int, poll: select.epoll) -> None:
        self.socket = connected
        self.socket.setblocking(False)
        self.waiting: deque[tuple[int, bool]] = deque()
        """Of each request under way: since when it counts, and whether it does."""
        self._version = version
        self._poll = poll
        self._unsent = bytearray()
        self._received = bytearray()
        poll.register(self.socket.fileno(), select.EPOLLIN)

    def send(self, frame: bytes, since_ns: int, counts: bool) -> None:
        """Send a request, or what the socket takes of it now."""
        self.waiting.append((since_ns, counts))
        if self._unsent:
            self._unsent += frame
            return
        sent = 0
        with suppress(BlockingIOError):
            sent = self.socket.send(frame)
        if sent < len(frame):
            self._unsent += frame[sent:]
            self._poll.modify(self.socket.fileno(), select.EPOLLIN | select.EPOLLOUT)

    def send_rest(self) -> None:
        """Send what the socket did not take before."""
        with suppress(BlockingIOError):
            del self._unsent[: self.socket.send(self._unsent)]
        if not self._unsent:
            self._poll.modify(self.socket.fileno(), select.EPOLLIN)

    def answered(self) -> Iterator[tuple[int, bool]]:
        """The requests that were answered by what has come. Raises LoadError."""
        try:
            received = self.socket.recv(RECEIVE_BYTES)
        except BlockingIOError:
            return
        if not received:
            raise LoadError("the connection was closed")
        buffer = self._received
        buffer += received
        while len(buffer) >= 4 and len(buffer) >= (size := 4 + int.from_bytes(buffer[:4], "big")):
            ((_, ((_, error_code, _),)),) = peeks.produce_response(self._version, bytes(buffer[:size]))
            if error_code:
                raise LoadError(f"a Produce was answered with error code {error_code}")
            del buffer[:size]
            yield self.waiting.popleft()


def greeted(target: Target) -> socket.socket:
    """A connection that was used once, as clients begin with ApiVersions: it is whole, also behind a proxy."""
    client = RawClient(target)
    client.ask_frame(ApiKey.API_VERSIONS, 3, {"client_software_name": "bench", "client_software_version": "1"})
    return client.socket


class Producing:
    """Connections to a topic, and requests for each of its partitions. To be closed."""

    def __init__(self, target: Target, shape: Shape) -> None:
        self.shape = shape
        client = RawClient(target)
        try:
            versions = newest_versions(client)
            identity = topic_id(client, versions, target.topic)
        finally:
            client.close()
        version, data = versions[ApiKey.PRODUCE], batch(1, shape.record_bytes)
        self.frames = [
            produce_frame(target.topic, identity, version, [index], data) for index in range(shape.partitions)
        ]
        self._poll = select.epoll()
        self.connections = [Connection(greeted(target), version, self._poll) for _ in range(shape.connections)]
        self._by_fd = {each.socket.fileno(): each for each in self.connections}

    def close(self) -> None:
        for each in self.connections:
            each.socket.close()
        self._poll.close()

    @property
    def in_flight(self) -> int:
        return sum(len(each.waiting) for each in self.connections)

    def wait(self, seconds: float) -> Iterator[tuple[Connection, int, bool]]:
        """What is answered within a time: on which connection, since when it counts, and whether. Raises LoadError."""
        select.select((self._poll,), (), (), seconds)  # takes microseconds, where epoll takes milliseconds
        for number, event in self._poll.poll(0):
            connection = self._by_fd[number]
            if event & select.EPOLLOUT:
                connection.send_rest()
            if event & ~select.EPOLLOUT:
                for since_ns, counts in connection.answered():
                    yield connection, since_ns, counts


def closed(target: Target, shape: Shape, pids: Pids) -> dict[str, Any]:
    """Keep requests in flight on each connection. Raises LoadError."""
    producing, meter, clock = Producing(target, shape), Meter(pids), time.monotonic_ns
    turn = count()
    latencies: list[int] = []

    def send(connection: Connection) -> None:
        frame = producing.frames[next(turn) % shape.partitions]
        connection.send(frame, clock(), counts=False)

    try:
        measured_ns = clock() + round(shape.warmup_s * 1e9)
        end_ns = measured_ns + round(shape.seconds * 1e9)
        begun = False
        for connection in producing.connections:
            for _ in range(shape.depth):
                send(connection)
        answered_ns = clock()
        while (now := clock()) < end_ns:
            if not begun and now >= measured_ns:
                begun = True
                meter.begin()
            for connection, since_ns, _ in producing.wait(0.1):
                answered_ns = clock()
                if since_ns >= measured_ns:
                    latencies.append(answered_ns - since_ns)
                send(connection)
            if now - answered_ns > DRAIN_TIMEOUT_S * 1e9:
                raise LoadError(f"no answer in {DRAIN_TIMEOUT_S:.0f} s")
        cpu = meter.end()
    finally:
        producing.close()
    return said_of(latencies, shape.seconds, cpu)


def open_loop(target: Target, shape: Shape, pids: Pids) -> dict[str, Any]:
    """Send requests when they are due. Raises LoadError."""
    producing, meter, clock = Producing(target, shape), Meter(pids), time.monotonic_ns
    latencies: list[int] = []
    late: list[int] = []
    frames, connections = producing.frames, producing.connections
    try:
        schedule = Schedule.of(clock() + 10_000_000, shape)
        number = 0
        cpu: dict[str, float] = {}
        last_ns = schedule.due_ns(schedule.total - 1)
        while True:
            while number < schedule.total and (due_ns := schedule.due_ns(number)) <= (now := clock()):
                if number == schedule.warmup:
                    meter.begin()
                counts = number >= schedule.warmup
                if counts:
                    late.append(now - due_ns)
                connections[number % shape.connections].send(frames[number % shape.partitions], due_ns, counts)
                number += 1
                if number == schedule.total:
                    cpu = meter.end()
            if number < schedule.total:
                wait_ns = max(0, schedule.due_ns(number) - clock())
            elif producing.in_flight:
                wait_ns = round(last_ns + DRAIN_TIMEOUT_S * 1e9) - clock()
                if wait_ns <= 0:
                    raise LoadError(f"{producing.in_flight} requests unanswered {DRAIN_TIMEOUT_S:.0f} s after the last")
            else:
                break
            for _, since_ns, counts in producing.wait(wait_ns / 1e9):
                if counts:
                    latencies.append(clock() - since_ns)
        # until the last was answered, but for the time that an answer takes anyway: longer where a backlog grew
        took = max(shape.seconds, (clock() - schedule.due_ns(schedule.warmup) - min(latencies, default=0)) / 1e9)
    finally:
        producing.close()
    return said_of(
        latencies,
        took,
        cpu,
        late_p99_ms=percentile(sorted(late), 99) / 1e6,
        p999_each_s_ms=[
            percentile(sorted(latencies[at : at + shape.rate]), 99.9) / 1e6
            for at in range(0, max(1, len(latencies) + 1 - shape.rate), shape.rate)
        ],
    )


# ---- coordinators ----


def coordinated(target: Target, key_type: int, prefix: str, wanted: int) -> tuple[list[str], Target]:
    """Names of groups (0) or transactional ids (1) that broker 1 coordinates, and where it is. Raises LoadError."""
    client = RawClient(target)
    try:
        version = newest_versions(client)[ApiKey.FIND_COORDINATOR]
        names: list[str] = []
        for number in range(1000):
            name = f"{prefix}{number}"
            values = {"key_type": key_type, "key": name, "coordinator_keys": [name]}
            answer, _ = patiently(client, ApiKey.FIND_COORDINATOR, version, values, RETRY_S)
            found = answer.coordinators[0]
            if found.node_id == COORDINATOR:
                names.append(name)
                if len(names) == wanted:
                    return names, replace(target, host=found.host, port=found.port)
    finally:
        client.close()
    raise LoadError(f"broker {COORDINATOR} coordinates none of 1,000 names")


def repeated(once: Callable[[], None], shape: Shape, pids: Pids) -> dict[str, Any]:
    """Do something again and again, for a time."""
    meter, clock = Meter(pids), time.monotonic_ns
    warm_ns = clock() + round(shape.warmup_s * 1e9)
    while clock() < warm_ns:
        once()
    meter.begin()
    latencies: list[int] = []
    begin_ns = clock()
    end_ns = begin_ns + round(shape.seconds * 1e9)
    while (before := clock()) < end_ns:
        once()
        latencies.append(clock() - before)
    return said_of(latencies, (clock() - begin_ns) / 1e9, meter.end())


def committed(topic: str, number: int) -> list[dict[str, Any]]:
    """The topics of a commit."""
    partition = {
        "partition_index": 0,
        "committed_offset": number % POSITIONS,
        "committed_leader_epoch": -1,
        "committed_metadata": "",
    }
    return [{"name": topic, "partitions": [partition]}]


def commit(target: Target, shape: Shape, pids: Pids, prefix: str) -> dict[str, Any]:
    """Commit positions of a group without members, whose name begins with ``prefix``. Raises LoadError."""
    (group,), where = coordinated(target, 0, prefix, 1)
    client, positions = RawClient(where), count()

    def once() -> None:
        values = {
            "group_id": group,
            "generation_id_or_member_epoch": -1,
            "member_id": "",
            "topics": committed(target.topic, next(positions)),
        }
        patiently(client, ApiKey.OFFSET_COMMIT, OFFSET_COMMIT_VERSION, values, RETRY_S)

    try:
        return repeated(once, shape, pids)
    finally:
        client.close()


class Transactions:
    """Whole transactions, each with a record and a group's position, from InitProducerId to EndTxn. To be closed."""

    def __init__(self, target: Target, prefix: str, record_bytes: int) -> None:
        (self._group,), of_group = coordinated(target, 0, prefix, 1)
        self._names, where = coordinated(target, 1, prefix, TRANSACTIONAL_IDS)
        assert where == of_group
        self._leader, self._coordinator = RawClient(target), RawClient(where)
        self._topic = target.topic
        data = batch(1, record_bytes)
        self._header, self._payload = whole_header(data), data[len(whole_header(data).pack()) :]
        self._turn = count()
        self.retries = 0

    def close(self) -> None:
        self._leader.close()
        self._coordinator.close()

    def once(self) -> None:
        """One transaction. Raises LoadError."""
        number = next(self._turn)
        name = self._names[number % len(self._names)]
        who = self._ask(ApiKey.INIT_PRODUCER_ID, INIT_PRODUCER_ID_VERSION, {
            "transactional_id": name, "transaction_timeout": 60_000, "producer_id": -1, "producer_epoch": -1,
        })  # fmt: skip
        self._ask(ApiKey.ADD_PARTITIONS_TO_TXN, ADD_PARTITIONS_VERSION, {
            "v3_and_below_transactional_id": name, "v3_and_below_producer_id": who.producer_id,
            "v3_and_below_producer_epoch": who.producer_epoch,
            "v3_and_below_topics": [{"name": self._topic, "partitions": [0]}],
        })  # fmt: skip
        self._produce(name, who.producer_id, who.producer_epoch)
        producer = {
            "transactional_id": name, "producer_id": who.producer_id, "producer_epoch": who.producer_epoch,
            "group_id": self._group,
        }  # fmt: skip
        self._ask(ApiKey.ADD_OFFSETS_TO_TXN, ADD_OFFSETS_VERSION, producer)
        self._ask(ApiKey.TXN_OFFSET_COMMIT, TXN_OFFSET_COMMIT_VERSION, {
            **producer, "generation_id": -1, "member_id": "", "topics": committed(self._topic, number),
        })  # fmt: skip
        self._ask(ApiKey.END_TXN, END_TXN_VERSION, {
            "transactional_id": name, "producer_id": who.producer_id, "producer_epoch": who.producer_epoch,
            "committed": True,
        })  # fmt: skip

    def _ask(self, api_key: int, version: int, values: dict[str, Any]) -> Any:
        answer, retries = patiently(self._coordinator, api_key, version, values, RETRY_S)
        self.retries += retries
        return answer

    def _produce(self, name: str, producer_id: int, epoch: int) -> None:
        header = self._header._replace(
            producer_id=producer_id, producer_epoch=epoch, base_sequence=0, attributes=TRANSACTIONAL_BIT
        )
        produce(self._leader, self._topic, header, self._payload, name)


def transaction(target: Target, shape: Shape, pids: Pids, prefix: str) -> dict[str, Any]:
    """Transactions of ids that begin with ``prefix``, one after the other. Raises LoadError."""
    transactions = Transactions(target, prefix, shape.record_bytes)
    try:
        said = repeated(transactions.once, shape, pids)
    finally:
        transactions.close()
    return {**said, "retries": transactions.retries}


COORDINATED: Final[Mapping[str, Callable[[Target, Shape, Pids, str], dict[str, Any]]]] = {
    "commit": commit,
    "transaction": transaction,
}
"""Loads that use a group."""


def warm(kind: str, target: Target, shape: Shape, prefix: str) -> None:
    """Have ``shape.connections`` clients, each with names of its own, use coordinators at once. Raises LoadError."""
    with ThreadPoolExecutor(shape.connections) as pool:
        clients = [
            pool.submit(COORDINATED[kind], target, shape, {}, f"{prefix}warm-{number}-")
            for number in range(shape.connections)
        ]
        for client in clients:
            client.result()


def main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)  # wake up when a request is due, not up to 50 us later
    socket.setdefaulttimeout(DRAIN_TIMEOUT_S)
    print("{}", flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            target, shape, pids = Target(**command["target"]), Shape(**command["shape"]), command["pids"]
            match command["do"]:
                case "closed":
                    said = closed(target, shape, pids)
                case "open":
                    said = open_loop(target, shape, pids)
                case "commit" | "transaction" as kind:
                    said = COORDINATED[kind](target, shape, pids, command["prefix"])
                case "warm":
                    warm(command["kind"], target, shape, command["prefix"])
                    said = {}
                case other:
                    raise LoadError(f"no such command: {other}")
        except (OSError, LoadError) as error:
            said = {"error": str(error) or type(error).__name__}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
