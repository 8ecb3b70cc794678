"""One proxy that pushes one partition over a link, whose other side is the test: it says what it has, and is asked.

The control log, its rules and the cluster's logs are those of ``support.replicas``; what a synchronous link needs of
the source is the plugin's own. Made up: the leader end's stream, and the connection.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Final

from isthmus_control.commands import AlterLink
from isthmus_control.model import LinkMode, SyncRecord
from isthmus_plugins.api import Gate
from isthmus_plugins.cluster import TopicInfo, TopicPartition
from isthmus_plugins.confirmation import AckGate
from isthmus_plugins.replication.groups.leader import GroupLeader
from isthmus_plugins.replication.link import calls
from isthmus_plugins.replication.link.call_codec import Question
from isthmus_plugins.replication.partitions import LinkPartition
from isthmus_plugins.replication.sync.confirmer import SyncConfirmer
from isthmus_plugins.replication.transactions.decisions import Decisions
from isthmus_protocol import schema
from isthmus_protocol.bodies import build
from isthmus_protocol.messages import decode_response, encode_response
from isthmus_protocol.produce_answers import Writes
from isthmus_protocol.schema import ApiKey
from isthmus_protocol.transaction_log import TRANSACTION_TOPIC
from support.fake_cluster import FakeContext, run_simulated, simulated_now
from support.replicas import LINK, Replicas

TOPIC: Final = "local-t"
PLACE: Final = (TOPIC, 0)
KEY: Final = LinkPartition(LINK, *PLACE)
PRODUCE_VERSION: Final = 9
ALL_THERE: Final = 1_000_000
PRODUCER_TIMEOUT_MS: Final = 60_000


class Connection:
    """To the other side: calls wait until the test answers them."""

    link_name = LINK

    def __init__(self) -> None:
        self.lost = False
        self.closed: str | None = None
        self.asked: list[tuple[Question[Any], asyncio.Future[Any]]] = []
        self.asked_at = 0.0
        """When it was asked last."""

    def begin_call(self, question: Question[Any]) -> Callable[[float], Coroutine[Any, Any, Any]]:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.asked.append((question, answer))
        self.asked_at = simulated_now()

        async def wait(timeout_s: float) -> Any:
            async with asyncio.timeout(timeout_s):
                return await answer

        return wait

    async def call(self, question: calls.HighWatermarks) -> calls.HighWatermarksAnswer:
        """All is there that is asked for."""
        return calls.HighWatermarksAnswer(tuple(calls.PartitionEnd(*each, ALL_THERE) for each in question.partitions))

    def close(self, reason: str) -> None:
        self.closed, self.lost = reason, True

    @property
    def decided(self) -> list[calls.Decision]:
        """All that it was sent."""
        asked = [question for question, _ in self.asked if isinstance(question, calls.Decide)]
        return [decision for question in asked for decision in question.decisions]

    def answer(self, with_what: Any = None) -> None:
        """Answer all calls, decisions by default; an exception refuses them."""
        for _, answer in self.asked:
            if not answer.done() and isinstance(with_what, Exception):
                answer.set_exception(with_what)
            elif not answer.done():
                answer.set_result(with_what or calls.DecideAnswer())


@dataclass(eq=False)
class Stream:
    """The partition as it is pushed: the other side has all before ``acked``."""

    topic_id: bytes
    connection: Any
    key: LinkPartition = KEY
    leader_epoch: int = 0
    acked: int = 0
    stable: int = 0
    source_end: int = 0
    close: bool = True
    stream_id: int = 1
    undecided: bool = False
    late_marker: int | None = None
    copy: None = None

    def is_close(self, now: float) -> bool:
        return self.close


@dataclass
class Discovery:
    """Of what a leader end is to push what others ask."""

    topic_ids: dict[str, bytes]
    led: dict[LinkPartition, None] = field(default_factory=lambda: {KEY: None})
    leader_epochs: dict[TopicPartition, int] = field(default_factory=lambda: {PLACE: 0})
    leaders: dict[TopicPartition, int] = field(default_factory=dict)
    leads_since: dict[TopicPartition, float] = field(default_factory=dict)
    topics: dict[str, TopicInfo] = field(default_factory=dict)
    looks: int = 0

    def unsettle(self) -> None: ...


@dataclass
class LeaderEnd:
    """Of the leader end what others ask."""

    discovery: Discovery
    pushed: Stream | None = None
    on_resume: Callable[[], Any] = lambda: None
    """Called when streams that wait are to look again."""

    def stream(self, key: LinkPartition) -> Stream | None:
        return self.pushed if key == KEY else None

    def stream_of(self, connection: Any, stream_id: int) -> Stream | None:
        return self.pushed if self.pushed is not None and self.pushed.connection is connection else None

    def resume_tails(self, link_name: str) -> None:
        self.on_resume()


class Source:
    """The proxy."""

    def __init__(self, state_partitions: int = 1) -> None:
        self.replicas = Replicas(random.Random(1), 1)
        self.control, self.cluster = self.replicas.controls["A"], self.replicas.a
        topic = self.cluster.add_topic(TOPIC)
        self.log = topic.partitions[0]
        self.state = self.cluster.add_topic(TRANSACTION_TOPIC, state_partitions).partitions
        self.context: Any = FakeContext(self.cluster, self.control)
        self.agrees = True
        """Whether the other cluster knows of the mode of the link."""
        self.connection: Any = Connection()
        self.ends: Any = LeaderEnd(Discovery({TOPIC: topic.topic_id}))
        self.stream = self.ends.pushed = Stream(topic.topic_id, self.connection)
        peers: Any = self
        self.groups = GroupLeader(self.context, peers)
        self.sync = SyncConfirmer(self.context, self.ends, self.groups, lambda link_name: self.agrees)
        of_sync = self.sync.links, self.sync.partitions, self.sync.requirements
        self.decisions = Decisions(self.context, self.ends, self.groups, peers, *of_sync)
        self.sync.drain, self.sync.on_more = self.decisions.tail.drain, self.decisions.on_more
        self.acks = AckGate(self.context, self.sync)

    def connections(self, link_name: str) -> list[Any]:
        return [] if self.connection.lost else [self.connection]

    def start(self) -> None:
        for part in (self.sync, self.decisions):
            self.control.subscribe(part.control_changed)
            part.control_changed(self.control.state)
            part.start()
        self.acks.start()

    async def stop(self) -> None:
        await self.acks.stop()
        await self.decisions.stop()
        await self.sync.stop()

    # ---- what happens ----

    def mode(self, mode: LinkMode) -> None:
        self.control.apply(AlterLink(LINK, mode=mode))

    def confirm(self, acked: int | None = None) -> None:
        """The other side has all before this; without an argument all that there is."""
        self.stream.acked = self.stream.stable = self.log.end if acked is None else acked
        self.sync.on_stream(self.stream)  # type: ignore[arg-type]

    def produce(self, transactional: bool = False) -> bytes | Gate:
        """A client's request that the broker has answered: what goes out, or what waits."""
        base = self.log.end
        self.log.write_values(b"v")
        entry = {"index": 0, "error_code": 0, "base_offset": base}
        answer = {"responses": [{"name": TOPIC, "partition_responses": [entry]}]}
        frame = encode_response(build(schema.response_type(ApiKey.PRODUCE, PRODUCE_VERSION), answer), 1)
        written = Writes(-1, transactional, PRODUCER_TIMEOUT_MS, {(TOPIC.encode(), 0): 1})
        return self.acks.hold(-1, PRODUCE_VERSION, written, {TOPIC.encode(): TOPIC}, simulated_now(), frame)

    async def lease(self) -> bool:
        """The other side asks for one; whether it got it."""
        asked = calls.SyncLease((self.stream.stream_id,))
        return (await self.sync.grants.on_sync_lease(self.connection, asked)).in_sync == asked.streams

    async def synchronous(self) -> None:
        """The link is, and the partition is In-Sync."""
        self.mode(LinkMode.SYNCHRONOUS)
        self.confirm()
        await self.until("In-Sync", self.in_sync)

    # ---- what is so ----

    def in_sync(self) -> bool:
        return self.sync.partitions.in_sync(KEY)

    def recorded(self) -> SyncRecord | None:
        return self.sync.links.record(LINK, PLACE)

    async def until(self, what: str, ready: Callable[[], Any], timeout_s: float = 60.0) -> float:
        """Wait on the simulated clock; how long it took, in seconds. Raises AssertionError."""
        began = simulated_now()
        while not ready():
            assert simulated_now() < began + timeout_s, f"{what}: not within {timeout_s:.0f} s"
            await asyncio.sleep(0.02)
        return simulated_now() - began


def produced(sent: bytes | Gate) -> int | None:
    """The error code that a producer got; None: it waits."""
    frame = sent._frame if isinstance(sent, Gate) else sent
    if frame is None:
        return None
    _, answer = decode_response(ApiKey.PRODUCE, PRODUCE_VERSION, frame)
    found: Any = answer
    return int(found.responses[0].partition_responses[0].error_code)


def on_source(work: Callable[[Source], Awaitable[None]]) -> None:
    """Run ``work`` with a proxy, on the simulated clock."""

    async def run() -> None:
        source = Source()
        source.start()
        await work(source)
        await source.stop()

    run_simulated(run())
