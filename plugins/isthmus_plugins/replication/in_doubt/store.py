"""What the source's transactions have come to, kept in the target cluster for a failover: ``__isthmus_transactions``.

Of each decision to commit there is a record for each partition that it touches, all in one batch: what of that producer
is open there below ``end`` is committed. So a later decision replaces no more of an earlier one than it resolves.
Nobody reads them until a failover; the topic is compacted by key.

    key     [kind, link id, the source's producer id, ..., sending proxy, storing proxy]
            kind "d" (a decision): ..., the topic as it is called here, partition
    value   JSON; of a decision {"id": transactional id, "epoch": of the markers, "data_epoch": of the records,
            "at": [partition, offset, leader epoch] of it in the source's transaction log, "end": ...,
            "earlier": [[epoch, data_epoch, end]] of those before it whose marker the follower may not have yet}

No key is written by two processes: the storing proxy's name is in it, a process that has just come waits until no
request of the one before it can land, and an append whose fate is unknown is made again only when it can land no more.
"""

from __future__ import annotations

import asyncio
import json
import logging
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, Final, NamedTuple

from isthmus_control.model import TRANSACTIONS_TOPIC as TOPIC
from isthmus_control.model import ResourceType, Role
from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused, ProduceConnection, TopicInfo, TopicPartition
from isthmus_plugins.links import OperationError
from isthmus_plugins.process import PluginContext, check_lease
from isthmus_plugins.replication.link import calls, reasons
from isthmus_plugins.replication.link.call_codec import Answering
from isthmus_plugins.replication.link.connection import LinkConnection, LinkRejected, Peer
from isthmus_plugins.replication.link.features import DECISIONS_IN_PART
from isthmus_plugins.replication.link.part import Part
from isthmus_plugins.replication.logs.reading import read_batches
from isthmus_plugins.tasks import Tasks
from isthmus_protocol.error_codes import INVALID_REPLICATION_FACTOR, TOPIC_ALREADY_EXISTS
from isthmus_protocol.offsets_log import OFFSETS_TOPIC
from isthmus_protocol.record_codec import Record, decode_records, encode_batch
from isthmus_protocol.records import PLAIN_HEADER, whole_header

log = logging.getLogger("isthmus_plugins.replication")

PLACE: Final = (TOPIC, 0)
LANE: Final = "transactions"
DECISION: Final = "d"
AGAIN: Final = " (again)"
"""Behind the name of a proxy that sends a decision from before its start, or one of a partition of which the follower
lacks what was there then: ends may be later ones, decisions before it unknown. It replaces nothing that is stored."""
REPLICATION_FACTOR: Final = 3
RECORD_BYTES_MAX: Final = 16 * 1024 * 1024
BATCH_BYTES_MAX: Final = 1024 * 1024
"""What waits goes together, up to this size; one entry that is larger goes alone."""
PRODUCE_TIMEOUT_MS: Final = 10_000
LOST_REQUEST_MARGIN_S: Final = 2.0
"""After its connection broke, a request may still be taken up by the broker; no longer than this after it answers."""
WHOLE_TIMEOUT_S: Final = 15.0
RECENT_S: Final = 60.0
"""How long a broker may take to have on its disk what it confirmed: twice what Linux waits before it writes."""
RETRY_S: Final = 0.2
NO_EPOCH: Final = -1
"""In the place of the leader epoch of a decision that a peer of before has sent."""
CREATE_TIMEOUT_S: Final = 30.0


class Entry(NamedTuple):
    """One record of the store. ``value`` None: there is none any more."""

    key: tuple[Any, ...]
    """Strings and integers; kind, link id and the source's producer id first."""
    value: Mapping[str, Any] | None


class PlaceDecision(NamedTuple):
    """A decision to commit, for one partition."""

    transactional_id: str
    identity: tuple[int, int, int]
    """See :attr:`~isthmus_plugins.replication.link.calls.LogPlace.identity`."""
    producer_epoch: int
    """Of its markers."""
    data_epoch: int
    """Of its records."""
    end: int
    """Its records stand below, those of the producer's next transaction do not."""
    earlier: tuple[tuple[int, int, int], ...] = ()
    """Decisions before it that are not known to be carried out: (epoch of the markers, of the records, end)."""


@dataclass(frozen=True, slots=True)
class Stored:
    """All that the store has of one link, copies that several proxies made put together."""

    decisions: Mapping[tuple[int, str, int], PlaceDecision]
    """By the source's producer id, the topic as it is called here, and partition: the latest one."""
    others: Mapping[tuple[Any, ...], Mapping[str, Any]]
    """Entries of other kinds, by key."""

    def commits(self, producer_id: int, producer_epoch: int, place: TopicPartition, start: int) -> PlaceDecision | None:
        """The decision by which what is open since ``start`` commits; None: it was not decided.

        ``producer_id`` as the source has it; its markers have an epoch of their own.
        """
        found = self.decisions.get((producer_id, *place))
        if found is None:
            return None
        for epoch, data_epoch, end in ((found.producer_epoch, found.data_epoch, found.end), *found.earlier):
            if data_epoch == producer_epoch and start < end:
                return found._replace(producer_epoch=epoch, data_epoch=data_epoch, end=end)
        return None


@dataclass(slots=True, eq=False)
class _Waiting:
    entries: Sequence[Entry]
    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class TransactionStore(Part):
    """This proxy's writer of the store, and the way to read it."""

    def __init__(self, context: PluginContext, on_durable: Callable[[LinkConnection], None]) -> None:
        """``on_durable``: called when decisions that came over a connection are durable."""
        self._context = context
        self._clock = context.clock
        self._tasks = Tasks("transaction-store", context.supervision)
        self._waiting: list[_Waiting] = []
        self._work = asyncio.Event()
        self._opened: TopicInfo | None = None
        self._leader: int | None = None
        """The broker that took the last append; None: to be looked for."""
        self._latest: dict[tuple[Any, ...], tuple[int, int, int]] = {}
        """By key of a decision: its identity."""
        self._under_way: dict[Peer, Counter[int]] = {}
        """By connection and the source's producer id: how many decisions came and are not durable yet.

        One that is refused stays: who sent it ends the connection.
        """
        self._uncertain_until: float | None = context.clock.monotonic() + LOST_REQUEST_MARGIN_S
        """Until then a request of ours, or of a process before this one, may still land. None: of unknown fate."""
        self._recent: deque[tuple[float, int, bytes]] = deque()
        """What was appended lately: when, where the log ended after it, and the batch. A power loss takes what was not
        flushed."""
        self._epoch = -1
        """A leader epoch of the topic in which, or before which, all of that was appended; or it is stored again."""
        self._again: list[bytes] = []
        """What is to be appended again, since it was lost."""
        self._known_at = context.clock.monotonic()
        """The log had all of that then."""
        self._on_durable = on_durable

    def start(self) -> None:
        self._tasks.keep("append", self._append_for_ever)
        self._tasks.keep("find", partial(self._prepare_early, create=False))

    def needed(self) -> None:
        """A link is synchronous: decisions will come."""
        self._tasks.keep("prepare", partial(self._prepare_early, create=True))

    async def _prepare_early(self, create: bool) -> None:
        """Have the topic ready, and clients kept from it."""
        try:
            if create or await self._context.cluster.topic(TOPIC) is not None:
                await self.prepare()
        except (BrokerUnavailable, KafkaRefused, OperationError) as error:
            log.warning("transactions topic not ready", extra={"detail": str(error)})

    async def stop(self) -> None:
        await self._tasks.close()

    # ---- decisions, from the leader end ----

    def announced(self, connection: LinkConnection, question: calls.Decide) -> None:
        """Decisions came in, and nothing that came behind them over the connection was looked at yet."""
        self._under_way.setdefault(connection, Counter()).update(_producers(question))

    def awaits(self, connection: Peer, producer_id: int) -> bool:
        """Whether a decision of the source's producer that came over the connection is not durable yet."""
        return self._under_way.get(connection, Counter())[producer_id] > 0

    def answers(self) -> Sequence[Answering]:
        return (calls.Decide.by(self.on_decide),)

    def connection_lost(self, connection: LinkConnection) -> None:
        """What came over it is sent again over another one."""
        self._under_way.pop(connection, None)

    async def on_decide(self, connection: LinkConnection, question: calls.Decide) -> calls.DecideAnswer:
        """Store decisions to commit; the answer says that they are durable here. They were :meth:`announced`."""
        link = self._context.control.state.links.get(connection.link_name)
        if link is None:
            raise LinkRejected("LINK_NOT_FOUND", "the link was deleted")
        unfollowed = self._unfollowed(connection, question)
        sender = str(connection.peer.get("proxy"))
        entries: list[Entry] = []
        for each in question.decisions:
            entries += self._entries(link.link_id, sender, each, unfollowed)
        await self.put(entries)
        unfollowed |= self._unfollowed(connection, question)
        if connection in self._under_way:
            self._under_way[connection] -= Counter(_producers(question))
        self._on_durable(connection)
        return calls.DecideAnswer(tuple(sorted(unfollowed)) or None)

    def _unfollowed(self, connection: LinkConnection, question: calls.Decide) -> set[str]:
        """Topics of decisions that follow no more: a failover may have read all that it will of them.

        It reads when every proxy knows that, so it reads what was answered to be durable before. Raises LinkRejected.
        """
        if self._clock.monotonic() > self._context.lease_deadline:
            raise LinkRejected(reasons.NO_LEASE, "this proxy has no lease now")
        state, link_name = self._context.control.state, connection.link_name
        link = state.links.get(link_name)
        groups = link is not None and link.pairs(Role.FOLLOWER, ResourceType.CONSUMER_GROUP)
        found = set()
        for topic in {place.topic for each in question.decisions for place in each.places}:
            counterpart = state.lookup.following(ResourceType.TOPIC, topic)
            follows = counterpart is not None and counterpart.link.name == link_name
            if not (groups if topic == OFFSETS_TOPIC else follows):
                found.add(topic)
        if found and DECISIONS_IN_PART not in connection.peer_features:
            raise LinkRejected(reasons.NOT_FOLLOWING, f"{min(found)} does not follow over this link")
        return found

    def _entries(self, link_id: str, sender: str, said: calls.Decision, unfollowed: Collection[str]) -> Iterator[Entry]:
        """The entries of one decision, but those that a later one has replaced, and of topics that follow no more."""
        identity = said.at.identity
        common = {
            "id": said.transactional_id,
            "epoch": said.epoch,
            "data_epoch": said.data_epoch,
            "at": list(said.at),
        }
        sent_by = sender + AGAIN if said.again else sender
        for topic, partition, end, earlier in said.places:
            if topic in unfollowed:
                continue
            key = (DECISION, link_id, said.producer_id, topic, partition, sent_by, self._context.proxy_name)
            known, this = self._latest.get(key, identity), identity
            if this[1] == NO_EPOCH and known[2] <= this[2]:
                this = this[0], known[1], this[2]
            if known <= this:
                self._latest[key] = this
                carried = [list(each) for each in earlier]
                yield Entry(key, {**common, "end": end, **({"earlier": carried} if carried else {})})

    async def take_out(self, entries: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]]) -> None:
        """Put tombstones for entries of this proxy, but for decisions that a later one has replaced since."""
        gone: list[Entry] = []
        for key, value in entries:
            if key[0] != DECISION or self._latest.get(key, identity_of(value)) <= identity_of(value):
                self._latest.pop(key, None)
                gone.append(Entry(key, None))
        await self.put(gone)

    # ---- appending ----

    async def put(self, entries: Sequence[Entry]) -> None:
        """Append entries in one batch, and return when the topic's in-sync replicas have them.

        Tried for as long as the caller waits; what was put earlier is appended earlier.
        """
        if entries:
            waiting = _Waiting(entries)
            self._waiting.append(waiting)
            self._work.set()
            await waiting.done

    def is_whole(self) -> bool:
        """Whether all that was stored here is there, as far as this process knows; if not, have that looked at."""
        if not self._recent or self._context.cluster.brokers_changed_at < self._known_at:
            return True
        if not self._waiting:
            self._waiting.append(_Waiting(()))
            self._work.set()
        return False

    async def _be_whole(self) -> None:
        """Have stored again what was lost. Raises BrokerUnavailable."""
        while not self.is_whole():
            try:
                async with asyncio.timeout(WHOLE_TIMEOUT_S):
                    await asyncio.shield(self._waiting[-1].done)
            except TimeoutError:
                raise BrokerUnavailable(f"whether {TOPIC} has all that was stored is not known") from None

    async def _lost(self) -> list[bytes]:
        """The batches of which the log has lost what it had. Raises BrokerUnavailable, KafkaRefused."""
        looked_at, epoch = self._clock.monotonic(), await self._leader_epoch()
        # Not by where the log ends: other proxies may have appended since.
        _, kept = await self._context.cluster.epoch_end(*PLACE, self._epoch)
        lost = [batch for _, end, batch in self._recent if end > kept]
        if lost:
            log.error("stored decisions lost", extra={"batches": len(lost), "detail": f"{TOPIC} has them up to {kept}"})
            self._recent = deque(each for each in self._recent if each[1] <= kept)
        else:
            self._known_at = looked_at
        self._epoch = epoch
        return lost

    async def _leader_epoch(self) -> int:
        topic = await self._context.cluster.topic(TOPIC)
        if topic is None:
            raise BrokerUnavailable(f"there is no {TOPIC}")
        return topic.partitions[0].leader_epoch

    async def _append_for_ever(self) -> None:
        while True:
            if not self._waiting:
                await self._work.wait()
            self._work.clear()
            while self._waiting:
                taken, durable = self._take(), False
                try:
                    durable = await self._appended(taken)
                finally:
                    if not durable:
                        self._waiting[:0] = taken
                if not durable:
                    await asyncio.sleep(RETRY_S)
                    continue
                for each in taken:
                    if not each.done.done():
                        each.done.set_result(None)

    def _take(self) -> list[_Waiting]:
        """What goes into the next batch."""
        taken: list[_Waiting] = []
        size = 0
        while self._waiting and (not taken or size < BATCH_BYTES_MAX):
            each = self._waiting.pop(0)
            taken.append(each)
            size += sum(100 + len(str(entry)) for entry in each.entries)
        return taken

    async def _appended(self, taken: Sequence[_Waiting]) -> bool:
        """Append once; whether all of it is durable."""
        durable = await self._append(taken)
        if not durable:
            self._leader = None
        return durable

    async def _append(self, taken: Sequence[_Waiting]) -> bool:
        entries = [entry for each in taken for entry in each.entries]
        batches = [_batch(entries)] if entries else []
        try:
            await self.prepare()
            await self._certain()
            check_lease(self._context)
            if self._leader is None:
                self._leader = await self._context.cluster.leader_of(*PLACE)
                if not self._recent:
                    self._epoch = await self._leader_epoch()
            leader = -1 if self._leader is None else self._leader
            connection = await self._context.cluster.produce_connection(leader, LANE)
            if self._recent and max(connection.opened_at, self._context.cluster.brokers_changed_at) >= self._known_at:
                self._again = [*await self._lost(), *self._again]
        except (BrokerUnavailable, KafkaRefused, OperationError) as error:
            log.warning("decisions not stored", extra={"detail": str(error)})
            return False
        try:
            while self._again or batches:
                # What was lost first: later ones may replace it.
                await self._produce(connection, (self._again or batches)[0])
                (self._again or batches).pop(0)
        except (BrokerUnavailable, KafkaRefused) as error:
            log.warning("decisions not stored", extra={"detail": str(error)})
            connection.close()
            return False
        return True

    async def _produce(self, connection: ProduceConnection, batch: bytes) -> None:
        began = self._clock.monotonic()
        self._uncertain_until = None
        result = (await connection.produce([{PLACE: batch}], PRODUCE_TIMEOUT_MS))[0][PLACE]
        if result.error_code:
            raise BrokerUnavailable(f"{result.error_name} {result.message}".rstrip())
        self._uncertain_until = 0.0
        self._known_at = began
        end = result.base_offset + whole_header(batch).last_offset_delta + 1
        self._recent.append((began, end, batch))
        while self._recent[0][0] < began - RECENT_S:
            self._recent.popleft()

    async def _certain(self) -> None:
        """Wait until no request of which we do not know the fate can land any more. Raises BrokerUnavailable."""
        if self._uncertain_until is None:
            await self._context.cluster.log_end(*PLACE)  # the broker answers: it has what was on the way by now
            self._uncertain_until = self._clock.monotonic() + LOST_REQUEST_MARGIN_S
        if (wait := self._uncertain_until - self._clock.monotonic()) > 0:
            await asyncio.sleep(wait)

    # ---- the topic ----

    async def prepare(self) -> TopicInfo:
        """Make the topic if need be. Raises BrokerUnavailable, KafkaRefused, OperationError (it is not fit for it)."""
        if self._opened is not None:
            return self._opened
        cluster = self._context.cluster
        deadline = self._clock.monotonic() + CREATE_TIMEOUT_S
        while (topic := await cluster.topic(TOPIC)) is None or topic.partitions[0].leader < 0:
            if topic is None:
                await self._create()
            if self._clock.monotonic() > deadline:
                raise BrokerUnavailable(f"{TOPIC} does not appear, or has no leader")
            await asyncio.sleep(RETRY_S)
        configs = await cluster.topic_configs(TOPIC)
        policy = configs["cleanup.policy"][0]
        if len(topic.partitions) != 1 or policy != "compact":
            raise OperationError(
                "INVALID_TOPIC", f"{TOPIC} has {len(topic.partitions)} partitions and cleanup.policy={policy}", 500
            )
        self._context.hide_topic(topic.topic_id)
        self._opened = topic
        return topic

    async def _create(self) -> None:
        try:
            await self._create_replicated(REPLICATION_FACTOR)
        except KafkaRefused as error:
            alive = len(await self._context.cluster.broker_racks())
            if error.error_code != INVALID_REPLICATION_FACTOR or alive >= REPLICATION_FACTOR:
                raise
            await self._create_replicated(alive)

    async def _create_replicated(self, factor: int) -> None:
        configs = {
            "cleanup.policy": "compact",
            "segment.bytes": str(64 * 1024 * 1024),  # what stands in the newest one is not compacted
            "unclean.leader.election.enable": "false",
            "min.insync.replicas": "2" if factor >= REPLICATION_FACTOR else "1",
            "max.message.bytes": str(RECORD_BYTES_MAX),
            "message.timestamp.type": "LogAppendTime",
        }
        try:
            await self._context.cluster.create_topic(TOPIC, 1, factor, configs)
            log.info("transactions topic created", extra={"topic": TOPIC, "replication_factor": factor})
        except KafkaRefused as error:
            if error.error_code != TOPIC_ALREADY_EXISTS:
                raise
        except BrokerUnavailable:
            pass  # it may exist now: look

    # ---- reading ----

    async def read(self, link_id: str) -> Stored:
        """All that is stored of a link, by whichever proxies. Raises BrokerUnavailable, OperationError, BatchError."""
        return merged((key, value) for key, value in (await self.entries()).items() if key[1] == link_id)

    async def entries(self) -> Mapping[tuple[Any, ...], Mapping[str, Any]]:
        """All that is stored, by key. Raises BrokerUnavailable, OperationError, BatchError."""
        await self._be_whole()
        topic = await self._context.cluster.topic(TOPIC)
        if topic is None:
            return {}
        # Whatever was durable once is below the log's end, also where a new leader does not know that yet.
        start, end = await self._context.cluster.log_start(*PLACE), await self._context.cluster.log_end(*PLACE)
        latest: dict[tuple[Any, ...], Mapping[str, Any]] = {}
        async for batch, _, _ in read_batches(self._context, topic, 0, start, end, lane=LANE):
            for record in decode_records(batch):
                key = tuple(json.loads(record.key or b"[]"))
                if len(key) < 3:
                    continue
                if record.value is None:
                    latest.pop(key, None)
                else:
                    latest[key] = json.loads(record.value)
        return _with_epochs(latest)


def identity_of(decision: Mapping[str, Any]) -> tuple[int, int, int]:
    """Of a decision's entry; what was stored before there were epochs has none."""
    return calls.LogPlace(*map(int, decision["at"][:3])).identity


def _with_epochs(
    entries: Mapping[tuple[Any, ...], Mapping[str, Any]],
) -> Mapping[tuple[Any, ...], Mapping[str, Any]]:
    """Decisions that a peer of before sent, which said no leader epoch, with that of what stands before them.

    Also after a downgrade they are later than what their source decided before.
    """
    known: dict[tuple[str, int], list[tuple[int, int]]] = {}
    """By link and partition of the source's transaction log: where (offset) it had which epoch."""
    without: list[tuple[Any, ...]] = []
    for key, value in entries.items():
        if key[0] == DECISION:
            partition, epoch, offset = identity_of(value)
            if epoch == NO_EPOCH:
                without.append(key)
            else:
                known.setdefault((key[1], partition), []).append((offset, epoch))
    reached: dict[tuple[str, int], tuple[list[int], list[int]]] = {}
    """The same in their order: offsets, and the latest epoch up to each of them."""
    for place, some in known.items():
        some.sort()
        reached[place] = [at for at, _ in some], list(accumulate((epoch for _, epoch in some), max))
    found = dict(entries)
    for key in without:
        partition, _, offset = identity_of(entries[key])
        offsets, epochs = reached.get((key[1], partition), ((), ()))
        before = bisect_right(offsets, offset)
        epoch = epochs[before - 1] if before else NO_EPOCH
        found[key] = {**entries[key], "at": [partition, offset, epoch]}
    return found


def merged(entries: Iterable[tuple[tuple[Any, ...], Mapping[str, Any]]]) -> Stored:
    """What copies of several proxies come to: of a partition's decisions the latest; of its copies the smallest end.

    Older ones are kept as ``earlier``: whoever sent the latest one may not have known them.
    """
    found: dict[tuple[int, str, int], dict[tuple[int, int, int], PlaceDecision]] = {}
    others: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for key, value in entries:
        if key[0] != DECISION:
            others[key] = value
            continue
        identity = identity_of(value)
        epochs = int(value["epoch"]), int(value["data_epoch"])
        earlier = {(int(epoch), int(data_epoch), int(end)) for epoch, data_epoch, end in value.get("earlier", ())}
        copy = PlaceDecision(str(value["id"]), identity, *epochs, int(value["end"]))
        copies = found.setdefault((int(key[2]), str(key[3]), int(key[4])), {})
        known = copies.get(identity)
        if known is not None:
            earlier |= set(known.earlier)
            copy = min(known, copy, key=lambda copy: copy.end)
        copies[identity] = copy._replace(earlier=tuple(sorted(earlier)))
    return Stored({place: _latest(list(copies.values())) for place, copies in found.items()}, others)


def _latest(decisions: Sequence[PlaceDecision]) -> PlaceDecision:
    """The latest of a partition's decisions, with those before it."""
    latest = max(decisions, key=lambda each: each.identity)
    earlier = {known for each in decisions for known in each.earlier}
    earlier |= {(each.producer_epoch, each.data_epoch, each.end) for each in decisions if each is not latest}
    return latest._replace(earlier=tuple(sorted(each for each in earlier if each[1] != latest.data_epoch)))


def _producers(question: calls.Decide) -> list[int]:
    """Whose decisions a call has."""
    return [each.producer_id for each in question.decisions]


def _batch(entries: Sequence[Entry]) -> bytes:
    records = [
        Record(offset, 0, _json(entry.key), None if entry.value is None else _json(entry.value))
        for offset, entry in enumerate(entries)
    ]
    return encode_batch(records, PLAIN_HEADER)


def _json(content: object) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()
