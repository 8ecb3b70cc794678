"""Both ends of a link in memory: the replication plugin's own parts on fake clusters, over a connection that breaks.

What runs is the plugin's code, from the link's handshake to the writers. What is made up: the clusters (see
``support.fake_cluster``), the wire, and the clock.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, cast

from isthmus_control.commands import AttachNamespace, CreateLink, PartitionSync, RecordSync, RegisterProducerIds
from isthmus_control.grants import EVERYTHING
from isthmus_control.model import Reason, ResourceType, Role, SyncState
from isthmus_control.outcome import Accepted
from isthmus_control.sealing import Sealer, Secret
from isthmus_control.states import ReasonCode
from isthmus_plugins.cluster import TopicPartition
from isthmus_plugins.confirmation import AckGate
from isthmus_plugins.replication.assembly import assemble
from isthmus_plugins.replication.follower.log import FILLER_KEY
from isthmus_plugins.replication.link.call_codec import A, Answering, Question
from isthmus_plugins.replication.link.connection import Credential, LinkConnection, Receiver
from isthmus_plugins.replication.link.features import FEATURES
from isthmus_plugins.replication.link.part import Part
from isthmus_plugins.replication.link.peers import PeerState, Watched
from isthmus_protocol.producer_ids import is_links_own
from isthmus_protocol.record_codec import decode_control
from isthmus_protocol.record_equality import batch_digest
from support.fake_cluster import FakeCluster, FakeContext, FakeControl, Partition, run_simulated
from support.loopback import ShownSocket
from support.partition_log import decoded

LINK: Final = "a-to-b"
LINK_ID: Final = str(uuid.UUID(int=7, version=4))
SECRET: Final = b"secret"
INDEX: Final = {"A": 11, "B": 22}
HOUR_MS: Final = 3_600_000
NARROW_BYTES: Final = 500


def records_of(partition: Partition, start: int, end: int) -> list[tuple[Any, ...]]:
    """What consumers find in a range of offsets: records, without the links' fillers, and markers as such."""
    found: list[tuple[Any, ...]] = []
    for header, data in zip(partition.headers, partition.log, strict=True):
        if is_links_own(header.producer_id) and (header.is_control or header.is_transactional):
            continue
        if header.is_control:
            marker = decode_control(data)
            found.append((header.base_offset, marker.marker, marker.producer_epoch))
        else:
            found += [tuple(record) for record in decoded(data)]
    return [each for each in found if start <= each[0] < end]


def _superfluous(history: Partition, end: int) -> set[int]:
    """Offsets before ``end`` of records that a cleaner may take: what comes later makes them so, or they count not."""
    committed = {offset: record for offset, record in history.records(committed=True).items() if offset < end}
    latest = {record.key: offset for offset, record in committed.items()}
    count = {offset for offset, record in committed.items() if record.key is not None and record.value is not None}
    return history.records().keys() - {offset for offset in count if latest[committed[offset].key] == offset}


def falsely_out_of_sync(control: FakeControl, link: str, topic: str, partition: int) -> None:
    """What a proxy records that believes to lead a partition, and does not any more; nothing if it is not In-Sync."""
    record = control.state.sync_records.get(link, {}).get((topic, partition))
    if record is not None and record.state is SyncState.IN_SYNC:
        entry = PartitionSync(topic, record.topic_id, partition, 0)
        reason = Reason(ReasonCode.TIMEOUT_ERROR, "nothing was confirmed")
        link_id = control.state.links[link].link_id
        assert isinstance(control.apply(RecordSync(link, link_id, SyncState.OUT_OF_SYNC, (entry,), reason)), Accepted)


class Wire:
    """Two transports, and what is on the way between them."""

    def __init__(self, rng: random.Random, one: LinkConnection, other: LinkConnection) -> None:
        self.open = True
        ends = [_Transport(self, rng, one), _Transport(self, rng, other)]
        ends[0].peer, ends[1].peer = ends[1], ends[0]
        self.ends = ends
        for end in reversed(ends):  # the acceptor first: the dialler speaks at once
            end.protocol.connection_made(end)

    def cut(self) -> None:
        """Both ends lose the connection, and what is on the way is gone, in the middle of a frame or not."""
        if self.open:
            self.open = False
            for end in self.ends:
                end.protocol.connection_lost(None)


class _Transport(asyncio.Transport):
    peer: _Transport

    def __init__(self, wire: Wire, rng: random.Random, protocol: LinkConnection) -> None:
        super().__init__()
        self.wire = wire
        self.protocol = protocol
        self._random = rng
        self._due = 0.0
        self._chunks: deque[bytes] = deque()
        self._most_bytes = 0
        """More on its way pauses the protocol."""
        self._on_way_bytes = 0
        self._paused = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        loop = asyncio.get_running_loop()
        left = bytes(data)
        while left and self.wire.open:
            size = self._random.choice((len(left), self._random.randint(1, len(left))))
            chunk, left = left[:size], left[size:]
            self._due = max(self._due, loop.time() + self._random.uniform(0.0005, 0.01))
            self._chunks.append(chunk)
            self._on_way_bytes += len(chunk)
            loop.call_at(self._due, self._deliver)
        if self._on_way_bytes > self._most_bytes and not self._paused and self.wire.open:
            self._paused = True
            self.protocol.pause_writing()

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.write(b"".join(list_of_data))

    def _deliver(self) -> None:
        chunk = self._chunks.popleft()  # timers of one moment come in any order, bytes do not
        self._on_way_bytes -= len(chunk)
        if not self.wire.open:
            return
        self.peer.protocol.data_received(chunk)
        if self._paused and self._on_way_bytes <= self._most_bytes // 4:
            self._paused = False
            self.protocol.resume_writing()

    def close(self) -> None:
        asyncio.get_running_loop().call_later(0.01, self.wire.cut)

    def abort(self) -> None:
        self.wire.cut()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """A narrow line has frames wait, and overtake each other, that are small, as simulated ones are."""
        assert high is not None
        self._most_bytes = self._random.choice((high, NARROW_BYTES))

    def get_write_buffer_size(self) -> int:
        return self._on_way_bytes

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ShownSocket() if name == "socket" else default


class Peers(Part):
    """The connections of one proxy, over simulated wires: in the place of ``LinkPeers``."""

    def __init__(self, context: Any) -> None:
        self.live: list[LinkConnection] = []
        self.handlers: dict[str, Answering] = {}
        self.receiver = Receiver()
        self.on_change: Callable[[], None] = lambda: None

    def serve(
        self,
        answers: Mapping[str, Answering],
        create_answers: Mapping[str, Answering],
        receiver: Receiver,
        on_change: Callable[[], None],
    ) -> None:
        self.handlers.update(answers)
        self.receiver, self.on_change = receiver, on_change

    def connections(self, link_name: str) -> list[LinkConnection]:
        return [connection for connection in self.live if connection.link_name == link_name]

    def fronting(self, link_name: str, broker_id: int) -> LinkConnection | None:
        return next(iter(self.connections(link_name)), None)

    def state(self, link_name: str) -> PeerState:
        connections = self.connections(link_name)
        return PeerState(connections={str(each.peer.get("proxy")): each for each in connections})

    def behind(self, link_name: str) -> str | None:
        return None

    def take(self, connection: LinkConnection, link_name: str) -> None:
        """Use a connection whose handshake is over."""
        connection.link_name = link_name
        connection.handlers = self.handlers
        connection.receiver = Watched(self.receiver, lambda: self._gone(connection))
        self.live.append(connection)
        self.on_change()

    def _gone(self, connection: LinkConnection) -> None:
        if connection in self.live:
            self.live.remove(connection)
        self.on_change()

    async def stop(self) -> None:
        for connection in list(self.live):
            await connection.stopped()


class End:
    """One proxy's replication, until it is killed: the parts as the plugin has them, and the gate for acks."""

    def __init__(self, cluster: FakeCluster, control: FakeControl, name: str = "p", **context: Any) -> None:
        """``context``: fields of the process as the plugin sees it."""
        self.context: Any = FakeContext(cluster, control, name)
        for field, value in context.items():
            assert hasattr(self.context, field)
            setattr(self.context, field, value)
        self.parts = assemble(self.context, cast(Any, Peers))
        self.peers: Any = self.parts.peers
        self.follower, self.leader = self.parts.follower_end, self.parts.leader_end
        self.group_follower, self.group_leader = self.parts.group_follower, self.parts.group_leader
        self.store, self.decisions = self.parts.store, self.parts.decisions
        self.sync_confirmer, self.sync_leases = self.parts.sync, self.parts.sync_leases
        self.acks = AckGate(self.context, self.sync_confirmer)
        self.parts.start()
        self.acks.start()

    def instead(self, question: type[Question[A]], handler: Callable[[Any, Any], Awaitable[A]]) -> Answering:
        """Have another one answer a call of peers; who does else."""
        before: Answering = self.peers.handlers[question.METHOD]
        self.peers.handlers[question.METHOD] = question.by(handler)
        return before

    async def stop(self) -> None:
        await self.acks.stop()
        await self.parts.stop()


def connected(rng: random.Random, one: End, other: End, link_name: str = LINK) -> Wire:
    """A connection between two proxies, dialled by the first."""
    dialler = LinkConnection(
        clock=one.context.clock,
        supervision=one.context.supervision,
        hello={"purpose": "link", "link_id": LINK_ID},
        secret=SECRET,
        identity={"cluster_id": one.context.cluster_id, "proxy": "a", "brokers": "all", "features": list(FEATURES)},
        on_ready=lambda connection: one.peers.take(connection, link_name),
    )
    acceptor = LinkConnection(
        clock=other.context.clock,
        supervision=other.context.supervision,
        accept=lambda hello, connection: Credential(SECRET),
        identity={"cluster_id": other.context.cluster_id, "proxy": "b", "brokers": "all", "features": list(FEATURES)},
        on_ready=lambda connection: other.peers.take(connection, link_name),
    )
    return Wire(rng, dialler, acceptor)


class Replicas:
    """Clusters A and B, link and namespaces in place: A's ``local-*`` leads, B's ``remote-*`` follows."""

    def __init__(self, rng: random.Random, brokers: int = 2) -> None:
        self.random = rng
        self._digest = lru_cache(maxsize=None)(batch_digest)  # logs are compared anew with each batch
        self.histories: dict[TopicPartition, Partition] = {}
        """All that A's partitions ever had, whatever was cleaned or deleted since."""
        self.a = FakeCluster(rng, range(1, brokers + 1))
        self.b = FakeCluster(rng, range(1, brokers + 1))
        self.controls = {name: FakeControl(name, rng) for name in "AB"}
        self.wire: Wire | None = None
        self.keyring_file: Path | None = None
        for cluster in (self.a, self.b):
            cluster.add_topic("__isthmus_control")
        for name, remote in (("A", "B"), ("B", "A")):
            control = self.controls[name]
            for cluster_id, index in INDEX.items():
                control.apply(RegisterProducerIds(cluster_id, index))
            secret = Sealer(None).seal(Secret(SECRET), LINK_ID)
            control.apply(
                CreateLink(LINK, LINK_ID, remote, name == "A", ("127.0.0.1:1",), (), secret, grants=EVERYTHING)
            )
        self.attach()
        self.ends: dict[str, End] = {}
        self.a.on_new_partition = self._remember
        self.b.on_new_partition = self._watch

    def attach(self, **more: Any) -> None:
        topic = ResourceType.TOPIC
        self.controls["A"].apply(AttachNamespace(LINK, topic, "local-", "remote-", Role.LEADER, create_missing=True))
        self.controls["B"].apply(
            AttachNamespace(LINK, topic, "remote-", "local-", Role.FOLLOWER, create_missing=True, **more)
        )

    def attach_groups(self) -> None:
        """Groups, too: A's ``app-*`` lead, B's ``far-app-*`` follow."""
        group = ResourceType.CONSUMER_GROUP
        for name, local, remote, role in (
            ("A", "app-", "far-app-", Role.LEADER),
            ("B", "far-app-", "app-", Role.FOLLOWER),
        ):
            self.controls[name].apply(AttachNamespace(LINK, group, local, remote, role, create_missing=True))

    def clocks_apart(self) -> None:
        """From now on A's proxies may be an hour behind, or ahead, of B's and of when the link was made."""
        self.controls["A"].wall_ms += self.random.choice((-HOUR_MS, 0, HOUR_MS))

    def start(self, which: str = "AB") -> None:
        for name in which:
            assert name not in self.ends, "leases keep a second one from being there"
            self.ends[name] = End(
                self.a if name == "A" else self.b, self.controls[name], offsets_keyring_file=self.keyring_file
            )

    async def stop(self, which: str = "AB") -> None:
        self.cut()
        for name in which:
            end = self.ends.pop(name, None)
            if end is not None:
                self.controls[name].unsubscribe_all()
                await end.stop()

    def cut(self) -> None:
        if self.wire is not None:
            self.wire.cut()

    async def connect(self) -> None:
        """One connection, dialled by A."""
        self.cut()
        self.wire = connected(self.random, self.ends["A"], self.ends["B"])

    # -- what must hold

    def _watch(self, topic: str, index: int, partition: Partition) -> None:
        partition.on_append = lambda target: self.check(topic, index)

    def _remember(self, topic: str, index: int, partition: Partition) -> None:
        history = self.histories[topic, index] = Partition(partition.leader)

        def appended(source: Partition) -> None:
            if source.headers[-1].base_offset < history.end:  # it lost records before
                history.cut(source.headers[-1].base_offset)
            history.write(source.log[-1])

        partition.on_append = appended

    def check(self, topic: str, index: int) -> None:
        """The follower's log is a prefix of the source's: nothing twice, no gap. Copies of offsets are other tests'.

        Batch by batch; and where the source's could not be stored as it is, record by record. What the source's cleaner
        has taken may be there or not: it depends on what was faster.
        """
        if not topic.startswith("remote-"):
            return
        name = "local-" + topic.removeprefix("remote-")
        source, target = self.a.partition(name, index), self.b.partition(topic, index)
        history = self.histories[name, index]
        history.compacted = history.compacted or source.compacted
        if history.compacted:
            self._check_compacted(f"{topic}-{index}", source, history, target)
            return
        for theirs, ours in zip(source.log, target.log, strict=False):
            if self._digest(ours, INDEX["B"]) != self._digest(theirs, INDEX["A"]):
                break
        else:
            assert len(target.log) <= len(source.log), f"{topic}-{index}: more than the source has"
            return
        start = max(source.start, target.start)
        expected = records_of(source, start, target.end)
        assert records_of(target, start, target.end) == expected, (
            f"{topic}-{index}: not the source's records, ends {target.end} and {source.end}"
        )

    @staticmethod
    def _check_compacted(place: str, source: Partition, history: Partition, target: Partition) -> None:
        assert target.end <= source.end, f"{place}: more than the source has"
        start = max(source.start, target.start)
        superfluous = _superfluous(history, target.end) if target.cleaned else set()
        for committed in (False, True):
            # The follower's end of what is stable may be behind the source's, and its aborted transactions still open.
            # And where the source deleted an open transaction whole, what it ever had is stable only up to that.
            stable = min(target.last_stable_offset, history.last_stable_offset)
            end = min(target.end, stable if committed else target.end)
            ours, ever, theirs = (
                {offset: record for offset, record in log.records(committed).items() if start <= offset < end}
                for log in (target, history, source)
            )
            ours = {offset: record for offset, record in ours.items() if record.key != FILLER_KEY}
            made_up = [offset for offset in ours if ever.get(offset) != ours[offset]]
            assert not made_up, (
                f"{place}: at {made_up} is what the source never had ({committed=})\n"
                f"{history.describe()}\n{source.describe()}\n{target.describe()}"
            )
            missing = theirs.keys() - ours.keys() - superfluous
            assert not missing, (
                f"{place}: {sorted(missing)} are not there ({committed=})\n"
                f"{history.describe()}\n{source.describe()}\n{target.describe()}"
            )

    def equal(self) -> bool:
        """Whether the follower has everything."""
        for name, topic in self.a.found.items():
            if name.startswith("local-"):
                target = self.b.found.get("remote-" + name.removeprefix("local-"))
                if target is None or len(target.partitions) != len(topic.partitions):
                    return False
                if any(t.end != s.end for t, s in zip(target.partitions, topic.partitions, strict=True)):
                    return False
        return True

    def trimmed(self) -> bool:
        """Whether the follower's logs start where the source's do; heads of compacted logs are not deleted here."""
        return all(
            self.b.partition("remote-" + name.removeprefix("local-"), index).start == source.start
            for name, topic in self.a.found.items()
            if name.startswith("local-")
            for index, source in enumerate(topic.partitions)
            if not source.compacted
        )

    async def until(self, what: str, ready: Callable[[], Any], timeout_s: float = 120.0) -> None:
        """Wait on the simulated clock. Raises AssertionError."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while not ready():
            assert loop.time() < deadline, f"{what}: not within {timeout_s:.0f} s\n{self.describe()}"
            await asyncio.sleep(0.02)

    def describe(self) -> str:
        lines = [f"connections: {[len(end.peers.live) for end in self.ends.values()]}"]
        for name, topic in self.b.found.items():
            for index, partition in enumerate(topic.partitions):
                if name.startswith("remote-"):
                    source = self.a.partition("local-" + name.removeprefix("remote-"), index)
                    lines.append(f"{name}-{index}: {partition.end} of {source.end}, leader {partition.leader}")
                    if partition.end < source.end:
                        lines += [source.describe(), partition.describe()]
        if "B" in self.ends:
            lines += [
                f"follower {s.place}: {s.follower_log.state} {s.reason}, {s.follower_log.queued} queued, {s.closed=}"
                for s in self.ends["B"].follower.streams()
            ]
        if "A" in self.ends:
            lines += [f"leader {key}: {prepared}" for key, prepared in self.ends["A"].leader.discovery.led.items()]
            lines += [f"stopped {key}: {why}" for key, why in self.ends["A"].leader.stopped.items()]
        return "\n".join(lines)


def on_replicas(monkeypatch: Any, work: Callable[[Replicas], Awaitable[None]], brokers: int = 1) -> None:
    """Run ``work`` on two connected clusters and the simulated clock."""

    async def run() -> None:
        replicas = Replicas(random.Random(1), brokers)
        replicas.start()
        await replicas.connect()
        await work(replicas)
        await replicas.stop()

    run_simulated(run())
