"""The load generator: raw sockets, frames that are built before, one process, little CPU.

Runs as a child (:mod:`isthmus_bench.children`): each line of JSON on standard input is a command, each answered with
one line. ``drive`` keeps ``depth`` requests in flight on each connection for a time and says how many were answered,
how long each took, and how much CPU the process in between used meanwhile; ``idle`` opens connections that exchange
ApiVersions and then rest; ``close_idle`` closes them.
"""

from __future__ import annotations

import json
import select
import socket
import ssl
import struct
import sys
import time
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any, Final
from uuid import UUID

from isthmus_bench.children import cpu_seconds
from isthmus_protocol import api_versions, peeks
from isthmus_protocol.messages import ResponsePayload, build_request, decode_response, encode_request
from isthmus_protocol.record_codec import Record, encode_batch
from isthmus_protocol.records import PLAIN_HEADER
from isthmus_protocol.schema import ApiKey

CLIENT_ID: Final = "bench"
ANSWER_TIMEOUT_S: Final = 30.0
FRAMES: Final = 32
"""Prebuilt requests of a connection, sent in turn; their correlation ids count through them."""
_HEAD: Final = struct.Struct(">ii")


class LoadError(Exception):
    """An answer that is none, or an error."""


@dataclass(frozen=True)
class Target:
    """Where to send, and what the topic there is called."""

    host: str
    port: int
    topic: str
    ca_file: str | None = None

    def connect(self) -> socket.socket:
        """A connection, with TLS where there is a certificate authority."""
        plain = socket.create_connection((self.host, self.port), ANSWER_TIMEOUT_S)
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self.ca_file is None:
            return plain
        context = ssl.create_default_context(cafile=self.ca_file)
        return context.wrap_socket(plain, server_hostname=self.host)


class RawClient:
    """One request at a time."""

    def __init__(self, target: Target) -> None:
        self.socket = target.connect()
        self._correlation_id = 0

    def ask(self, api_key: int, version: int, values: Mapping[str, Any]) -> ResponsePayload:
        """Send a request and wait for the answer. Raises LoadError where any error code in it is not 0."""
        frame = self.ask_frame(api_key, version, values)
        errors = peeks.error_codes(api_key, version, frame) - {0}
        if errors:
            raise LoadError(f"{ApiKey(api_key).name} was answered with error codes {sorted(errors)}")
        return decode_response(api_key, version, frame)[1]

    def ask_frame(self, api_key: int, version: int, values: Mapping[str, Any]) -> bytes:
        """The same, for the answer's frame."""
        self._correlation_id += 1
        return self.exchange(encode_request(build_request(api_key, version, values), self._correlation_id, CLIENT_ID))

    def exchange(self, frame: bytes) -> bytes:
        """Send a request that is encoded, and wait for the answer's frame. Raises LoadError."""
        self.socket.sendall(frame)
        size = self._exactly(4)
        return size + self._exactly(int.from_bytes(size, "big"))

    def _exactly(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            part = self.socket.recv(count - len(parts))
            if not part:
                raise LoadError("the connection was closed")
            parts += part
        return bytes(parts)

    def close(self) -> None:
        self.socket.close()


def newest_versions(client: RawClient) -> dict[int, int]:
    """The newest version of each API that both sides know, as a client chooses it."""
    answer: Any = client.ask(ApiKey.API_VERSIONS, 3, {"client_software_name": "bench", "client_software_version": "1"})
    proxied = api_versions.proxied()
    return {
        each.api_key: min(each.max_version, proxied[each.api_key][1])
        for each in answer.api_keys
        if each.api_key in proxied
    }


def topic_id(client: RawClient, versions: Mapping[int, int], topic: str) -> UUID:
    """A topic's id, which stands for its name in new versions."""
    values = {"topics": [{"name": topic}], "allow_auto_topic_creation": False}
    answer: Any = client.ask(ApiKey.METADATA, versions[ApiKey.METADATA], values)
    found: UUID = answer.topics[0].topic_id
    return found


def batch(records: int, record_bytes: int, now_ms: int | None = None) -> bytes:
    """A batch of records with values of that many bytes, of that time."""
    now_ms = int(time.time() * 1000) if now_ms is None else now_ms
    return encode_batch([Record(offset, now_ms, None, b"v" * record_bytes) for offset in range(records)], PLAIN_HEADER)


def produce_values(topic: str, identity: UUID, records: bytes) -> dict[str, Any]:
    """An acks=all Produce to partition 0."""
    partition = {"index": 0, "records": records}
    topics = [{"name": topic, "topic_id": identity, "partition_data": [partition]}]
    return {"acks": -1, "timeout": 30_000, "topic_data": topics}


def fetch_values(topic: str, identity: UUID, bytes_max: int) -> dict[str, Any]:
    """A Fetch of partition 0 from its start, without a fetch session."""
    partition = {"partition": 0, "fetch_offset": 0, "partition_max_bytes": bytes_max, "current_leader_epoch": -1}
    return {
        "replica_id": -1,
        "max_wait": 500,
        "min_bytes": 1,
        "max_bytes": bytes_max,
        "session_epoch": -1,
        "topics": [{"topic": topic, "topic_id": identity, "partitions": [partition]}],
    }


def wait_for_topic(target: Target) -> None:
    """Wait until the broker leads the topic: it hears of a new one a moment after it was made. Raises LoadError."""
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
    client = RawClient(target)
    try:
        version = newest_versions(client)[ApiKey.METADATA]
        while True:
            try:
                client.ask(ApiKey.METADATA, version, {"topics": [{"name": target.topic}]})
                return
            except LoadError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
    finally:
        client.close()


def wait_for_topics(target: Target, count: int) -> None:
    """Wait until a list of all topics has so many at least, and all their leaders. Raises LoadError."""
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
    client = RawClient(target)
    try:
        version = newest_versions(client)[ApiKey.METADATA]
        while True:
            frame = client.ask_frame(ApiKey.METADATA, version, {"topics": None})
            if len(peeks.topics(ApiKey.METADATA, version, "response", frame)) >= count and not (
                peeks.error_codes(ApiKey.METADATA, version, frame) - {0}
            ):
                return
            if time.monotonic() > deadline:
                raise LoadError(f"{target.host}:{target.port} does not list {count} topics with leaders")
            time.sleep(0.5)
    finally:
        client.close()


def fill(target: Target, records: int, record_bytes: int, batches: int = 2) -> None:
    """Append batches to a topic. Raises LoadError."""
    client = RawClient(target)
    try:
        versions = newest_versions(client)
        identity = topic_id(client, versions, target.topic)
        values = produce_values(target.topic, identity, batch(records, record_bytes))
        for _ in range(batches):
            client.ask(ApiKey.PRODUCE, versions[ApiKey.PRODUCE], values)
    finally:
        client.close()


class Flow:
    """One connection with requests in flight."""

    def __init__(self, connection: socket.socket, frames: Sequence[bytes], answer_bytes: int, depth: int) -> None:
        self.connection = connection
        self._frames = cycle(frames)
        self._ids = cycle(range(len(frames)))
        self._answer_bytes = answer_bytes
        self._head = b""
        self._left = 0
        self._sent: deque[int] = deque()
        self.send(depth)

    def send(self, count: int) -> None:
        """Send requests, each in a write of its own, as clients do: joined ones would stay joined for ever."""
        for _ in range(count):
            self._sent.append(time.perf_counter_ns())
            self.connection.sendall(next(self._frames))

    @property
    def in_flight(self) -> int:
        return len(self._sent)

    def received(self, view: memoryview, latencies: array[int]) -> int:
        """Take bytes in. Returns how many answers are complete with them. Raises LoadError."""
        complete = 0
        position, available = 0, len(view)
        while position < available:
            if not self._left:
                taken = 8 - len(self._head)
                self._head += view[position : position + taken]
                if len(self._head) < 8:
                    break
                position += taken
                self._left = self._answer_begins()
            step = min(self._left, available - position)
            self._left -= step
            position += step
            if not self._left:
                complete += 1
                latencies.append(time.perf_counter_ns() - self._sent.popleft())
        return complete

    def _answer_begins(self) -> int:
        size, correlation_id = _HEAD.unpack(self._head)
        self._head = b""
        if size + 4 != self._answer_bytes:
            raise LoadError(f"an answer of {size + 4} bytes where the first one had {self._answer_bytes}")
        if correlation_id != next(self._ids):
            raise LoadError(f"an answer out of order: correlation id {correlation_id}")
        return int(size) - 4


@dataclass(frozen=True)
class Load:
    """What to send, how much of it at once, and for how long."""

    api: str
    """``produce``, ``fetch``, or ``metadata`` of all topics."""
    records: int = 1
    record_bytes: int = 100
    depth: int = 1
    connections: int = 1
    warmup_s: float = 0.1
    seconds: float = 1.0


def _frames(load: Load, target: Target) -> tuple[list[bytes], int]:
    """The requests, and how long each answer is. Asks once and looks at the answer."""
    client = RawClient(target)
    try:
        versions = newest_versions(client)
        identity = topic_id(client, versions, target.topic)
        if load.api == "produce":
            api_key, values = (
                ApiKey.PRODUCE,
                produce_values(target.topic, identity, batch(load.records, load.record_bytes)),
            )
        elif load.api == "metadata":
            api_key, values = ApiKey.METADATA, {"topics": None, "allow_auto_topic_creation": False}
        else:
            api_key, values = ApiKey.FETCH, fetch_values(target.topic, identity, load.record_bytes)
        version = versions[api_key]
        answer = client.ask_frame(api_key, version, values)
        errors = peeks.error_codes(api_key, version, answer) - {0}
        if errors:
            raise LoadError(f"{api_key.name} version {version} was answered with error codes {sorted(errors)}")
    finally:
        client.close()
    request = build_request(api_key, version, values)
    return [encode_request(request, number, CLIENT_ID) for number in range(FRAMES)], len(answer)


def drive(load: Load, target: Target, pid: int | None) -> dict[str, Any]:
    """Run a load. ``pid``: whose CPU time to report. Raises LoadError."""
    frames, answer_bytes = _frames(load, target)
    latencies = array("q")
    flows = {}
    poll = select.epoll()
    for _ in range(load.connections):
        connection = target.connect()
        poll.register(connection.fileno(), select.EPOLLIN)
        flows[connection.fileno()] = Flow(connection, frames, answer_bytes, load.depth)
    buffer = bytearray(1 << 18)
    view = memoryview(buffer)
    alone = next(iter(flows.values())) if load.connections == 1 else None
    clock = time.perf_counter
    started, cpu_started, own_started = 0.0, 0.0, 0.0
    edge = clock() + load.warmup_s
    now = 0.0
    try:
        while True:
            ready = [alone] if alone is not None else [flows[number] for number, _ in poll.poll(ANSWER_TIMEOUT_S)]
            if not ready:
                raise LoadError(f"no answer in {ANSWER_TIMEOUT_S} s")
            for flow in ready:
                connection = flow.connection
                while True:
                    count = connection.recv_into(buffer)
                    if not count:
                        raise LoadError("the connection was closed")
                    complete = flow.received(view[:count], latencies)
                    if complete:
                        flow.send(complete)
                    if not (isinstance(connection, ssl.SSLSocket) and connection.pending()):
                        break
            now = clock()
            if now >= edge:
                if started:
                    break
                started, edge = now, now + load.seconds
                cpu_started = cpu_seconds(pid) if pid is not None else 0.0
                own_started = time.process_time()
                del latencies[:]
        cpu = cpu_seconds(pid) - cpu_started if pid is not None else None
        own = time.process_time() - own_started
    finally:
        poll.close()
        for flow in flows.values():
            flow.connection.close()
    taken = sorted(latencies)
    if not taken:
        raise LoadError("not one answer in time")
    return {
        "requests": len(taken),
        "seconds": now - started,
        "cpu_seconds": cpu,
        "load_cpu_seconds": own,
        "request_bytes": len(frames[0]),
        "answer_bytes": answer_bytes,
        "p50_us": taken[len(taken) // 2] / 1000,
        "p99_us": taken[min(len(taken) - 1, len(taken) * 99 // 100)] / 1000,
        "p999_us": taken[min(len(taken) - 1, len(taken) * 999 // 1000)] / 1000,
    }


class Idle:
    """Connections that rest after they have exchanged ApiVersions, as every client begins."""

    def __init__(self) -> None:
        self._clients: list[RawClient] = []

    def open(self, target: Target, count: int) -> dict[str, Any]:
        """Open more of them, until one is refused. Says how many are open."""
        refused = ""
        for _ in range(count):
            try:
                client = RawClient(target)
                self._clients.append(client)
                newest_versions(client)
            except (OSError, LoadError) as error:
                refused = str(error)
                self._clients.pop().close()
                break
        return {"open": len(self._clients), "refused": refused}

    def close(self) -> dict[str, Any]:
        """Close all."""
        for client in self._clients:
            client.close()
        self._clients.clear()
        return {"open": 0}


def main() -> None:
    idle = Idle()
    print("{}", flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            match command.pop("do"):
                case "drive":
                    said = drive(Load(**command["load"]), Target(**command["target"]), command["pid"])
                case "idle":
                    said = idle.open(Target(**command["target"]), command["count"])
                case "close_idle":
                    said = idle.close()
                case other:
                    raise LoadError(f"no such command: {other}")
        except (OSError, LoadError) as error:
            said = {"error": str(error) or type(error).__name__}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
