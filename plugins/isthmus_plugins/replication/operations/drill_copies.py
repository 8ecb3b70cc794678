"""Copies of what follows over a link, on which a failover is tried: made, and deleted again whatever was killed.

    recorded   a link that leads nowhere, with its owner; to it, a pair for each that is copied
    made       topics as those that follow here are (partitions, replicas, settings), without their records
    written    one record in each partition, and one in the transaction of each producer that has one open
    recorded   that they follow
    stored     what the source had decided of these transactions, and what they have committed in groups
    committed  what groups have committed

What is copied bears numbers below ``__isthmus_drill_``, so it is the proxies' own to clients, and no namespace of
anybody's holds it. Offsets are other ones: a copy begins empty. Deleting goes the other way round, and can be done
again from the beginning by any proxy: topics, groups, then what is recorded, the link before its namespaces.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, NamedTuple

from isthmus_control.commands import (
    AttachNamespace,
    Body,
    CreateLink,
    DeleteLink,
    DeleteNamespace,
    OpenProvenance,
    PartitionOffset,
    SetFollowerTopic,
)
from isthmus_control.control_state import ControlState
from isthmus_control.model import (
    DRILL_PREFIX,
    Drill,
    Link,
    NamespaceKey,
    NamespaceMapping,
    ResourceType,
    Role,
    TopicState,
)
from isthmus_control.outcome import Rejected, Rejection
from isthmus_plugins.cluster import (
    BrokerUnavailable,
    CommittedOffset,
    KafkaRefused,
    ProducerState,
    TopicInfo,
    TopicPartition,
)
from isthmus_plugins.process import PluginContext, check_lease
from isthmus_plugins.replication.in_doubt.pending_offsets import OFFSETS, committed_offsets, of_groups
from isthmus_plugins.replication.in_doubt.store import DECISION, Entry, Stored, TransactionStore
from isthmus_plugins.replication.logs.topic_settings import NOT_COPIED
from isthmus_plugins.tasks import some_at_once
from isthmus_protocol.error_codes import GROUP_ID_NOT_FOUND
from isthmus_protocol.offsets_log import OFFSETS_TOPIC
from isthmus_protocol.producer_ids import IDS_PER_CLUSTER, ProducerIdRange, is_links_own
from isthmus_protocol.record_codec import Record, encode_batch
from isthmus_protocol.records import PLAIN_HEADER, TRANSACTIONAL_BIT

log = logging.getLogger("isthmus_plugins.replication")

AT_ONCE: Final = 50
"""Topics, partitions or groups that are looked at, or made, at the same time."""
WRITTEN_AT_ONCE: Final = 500
"""Partitions in one Produce."""
WRITE_S: Final = 60.0
"""How long brokers may take until each partition of a copy has taken its records: many are new."""
DELETE_S: Final = 30.0
"""How long brokers may take until none shows what was deleted."""
RETRY_S: Final = 0.1
PRODUCE_TIMEOUT_MS: Final = 10_000
LANE: Final = "drill"
OFFSETS_KEPT_MS: Final = 86_400_000
"""Should nobody delete the copy of a group, it has nothing any more after this time."""
AFTER_ALL: Final = 2**60
"""Where a stored decision ends that is of all that is open in a copy."""
NOBODY: Final = 0
"""The producer of the source in whose name the copy of what is pending in groups is stored."""


class Copied(NamedTuple):
    """A pair of namespaces that follows here, and the namespace that is a copy of it."""

    pair: NamespaceMapping
    prefix: str


class TopicCopy(NamedTuple):
    """A topic that follows here, and what its copy is called, here and at a source that there is not."""

    topic: TopicInfo
    name: str
    source: str


class Plan(NamedTuple):
    """What is copied."""

    name: str
    """Of the link that leads nowhere."""
    pairs: tuple[Copied, ...]
    topics: tuple[TopicCopy, ...]
    groups: Mapping[str, str]
    """By the name of a group: what its copy is called."""

    @property
    def partitions(self) -> int:
        return sum(len(each.topic.partitions) for each in self.topics)


class Made(NamedTuple):
    """A copy that there is now."""

    link: Link
    positions: int
    """Committed offsets."""


def plan(
    state: ControlState,
    link: Link,
    pairs: Sequence[NamespaceMapping],
    number: str,
    topics: Mapping[str, TopicInfo],
    groups: Collection[str],
) -> Plan:
    """What is copied of pairs that follow over a link. ``number``: of the copy. ``topics``, ``groups``: of the cluster.

    Principals are not: of them a failover has records alone.
    """
    name = DRILL_PREFIX + number
    copied = [each for each in pairs if each.type is not ResourceType.PRINCIPAL]
    of_pairs = tuple(Copied(pair, f"{name}_{index}_") for index, pair in enumerate(copied))
    found, named = list[TopicCopy](), dict[str, str]()
    for pair, prefix in of_pairs:
        if pair.type is ResourceType.TOPIC:
            followed = (
                each for _, each in sorted(topics.items()) if pair.holds(each.name) and _follows(state, link, each)
            )
            found += (
                TopicCopy(topic, f"{prefix}{index}", f"{pair.remote_prefix}{index}")
                for index, topic in enumerate(followed)
            )
        else:
            held = (each for each in sorted(groups) if pair.holds(each))
            named |= {group: f"{prefix}{index}" for index, group in enumerate(held)}
    return Plan(name, of_pairs, tuple(found), named)


def _follows(state: ControlState, link: Link, topic: TopicInfo) -> bool:
    record = state.follower_topics.get(topic.name)
    return record is not None and record.link == link.name and record.state is TopicState.FOLLOWING


def is_of(link_name: str, name: str) -> bool:
    """Whether a topic, a group or a namespace is a copy's, by the name of its link."""
    return name.startswith(f"{link_name}_")


class DrillCopies:
    """Copies in this cluster. Everything raises BrokerUnavailable, KafkaRefused, DrillRefused."""

    def __init__(self, context: PluginContext, store: TransactionStore) -> None:
        self._context = context
        self._cluster = context.cluster
        self._clock = context.clock
        self._store = store

    # ---- making one ----

    async def make(self, real: Link, wanted: Plan, stored: Stored) -> Made:
        """Make a copy. ``stored``: what the source of ``real`` has decided, as it is known here."""
        drill = Drill(real.name, self._context.incarnation)
        await self._append(
            CreateLink(wanted.name, str(uuid.uuid4()), real.remote_cluster_id, dials=False, drill=drill),
            *(
                AttachNamespace(wanted.name, pair.type, prefix, pair.remote_prefix, Role.FOLLOWER, create_missing=True)
                for pair, prefix in wanted.pairs
            ),
        )
        link = self._context.control.state.links[wanted.name]
        await some_at_once(AT_ONCE, self._create, wanted.topics)
        producers = await self._open(real, wanted)
        made = await self._write(wanted, producers)
        await self._append(*self._records(wanted, made))
        await self._store.put(self._decisions(link, wanted, stored, producers))
        return Made(link, await self._commit(wanted))

    async def _create(self, copy: TopicCopy) -> None:
        check_lease(self._context)
        topic = copy.topic
        configs = await self._cluster.topic_configs(topic.name)
        own = {
            name: value
            for name, (value, inherited) in configs.items()
            if value is not None and value != inherited and name not in NOT_COPIED
        }
        replicas = min(topic.replication_factor, len(await self._cluster.broker_racks()))
        await self._cluster.create_topic(copy.name, len(topic.partitions), replicas, own)

    async def _open(self, real: Link, wanted: Plan) -> dict[TopicPartition, dict[int, ProducerState]]:
        """By partition that follows: the producers of the source that have a transaction open there."""
        index = self._context.control.state.producer_id_ranges.get(real.remote_cluster_id)
        ids = None if index is None else ProducerIdRange(index)
        places = [
            (each.topic.name, partition) for each in wanted.topics for partition in range(len(each.topic.partitions))
        ]

        async def of(place: TopicPartition) -> tuple[TopicPartition, dict[int, ProducerState]]:
            known = await self._cluster.producers(*place)
            is_open = {each: producer for each, producer in known.items() if producer.transaction_start >= 0}
            return place, {
                each: producer
                for each, producer in is_open.items()
                if ids is not None and each in ids and not is_links_own(each)
            }

        return {place: found for place, found in await some_at_once(AT_ONCE, of, places) if found}

    async def _write(
        self, wanted: Plan, producers: Mapping[TopicPartition, Mapping[int, ProducerState]]
    ) -> Mapping[str, TopicInfo]:
        """Give each partition of the copy a record, and one in each transaction; the topics as they are now."""
        now_ms = int(self._clock.time() * 1000)
        plain = encode_batch([Record(0, now_ms, b"drill", b"")], PLAIN_HEADER)
        left: dict[int | None, dict[TopicPartition, bytes]] = {None: {}}
        """By producer: what is to be written."""
        for copy in wanted.topics:
            for partition in range(len(copy.topic.partitions)):
                left[None][copy.name, partition] = plain
                for producer_id, producer in producers.get((copy.topic.name, partition), {}).items():
                    header = PLAIN_HEADER._replace(
                        attributes=TRANSACTIONAL_BIT,
                        producer_id=producer_id,
                        producer_epoch=producer.epoch,
                        base_sequence=0,
                    )
                    batch = encode_batch([Record(0, now_ms, b"drill", b"")], header)
                    left.setdefault(producer_id, {})[copy.name, partition] = batch
        for batches in left.values():
            await self._written(batches, wanted.name)
        return await self._cluster.topics_named([each.name for each in wanted.topics])

    async def write(self, wanted: Plan) -> None:
        """Have each partition of the copy take one more record, as of any client."""
        now_ms = int(self._clock.time() * 1000)
        plain = encode_batch([Record(0, now_ms, b"drill", b"")], PLAIN_HEADER)
        places = ((each.name, partition) for each in wanted.topics for partition in range(len(each.topic.partitions)))
        await self._written(dict.fromkeys(places, plain), wanted.name)

    async def _written(self, batches: Mapping[TopicPartition, bytes], transactional_id: str) -> None:
        """Append these, again and again where brokers do not know yet that they lead a new partition. Once more than
        once does no harm."""
        left, deadline = dict(batches), self._clock.monotonic() + WRITE_S
        while left:
            topics = await self._cluster.topics_named({topic for topic, _ in left})
            by_leader: dict[int, list[TopicPartition]] = {}
            for topic, partition in left:
                leader = topics[topic].partitions[partition].leader if topic in topics else -1
                by_leader.setdefault(leader, []).append((topic, partition))
            why = "it has no leader"
            for leader, places in by_leader.items():
                for first in range(0, len(places) if leader >= 0 else 0, WRITTEN_AT_ONCE):
                    some = {place: left[place] for place in places[first : first + WRITTEN_AT_ONCE]}
                    connection = await self._cluster.produce_connection(leader, LANE)
                    (results,) = await connection.produce([some], PRODUCE_TIMEOUT_MS, transactional_id)
                    for place, result in results.items():
                        if result.error_code:
                            why = f"{result.error_name} {result.message}".rstrip()
                        else:
                            del left[place]
            if left and self._clock.monotonic() > deadline:
                topic, partition = min(left)
                raise BrokerUnavailable(f"{topic}-{partition} of the copy takes no records: {why}")
            if left:
                await asyncio.sleep(RETRY_S)

    def _records(self, wanted: Plan, made: Mapping[str, TopicInfo]) -> list[Body]:
        """That the topics of the copy follow, from their beginning, with what is to be given back to them."""
        records = self._context.control.state.follower_topics
        found: list[Body] = []
        for topic, name, source in wanted.topics:
            topic_id = made[name].id_text
            found += (
                SetFollowerTopic(
                    wanted.name,
                    name,
                    source,
                    str(uuid.uuid4()),
                    TopicState.FOLLOWING,
                    topic_id,
                    None,
                    dict(records[topic.name].settings) if topic.name in records else {},
                ),
                OpenProvenance(
                    wanted.name,
                    tuple(PartitionOffset(name, topic_id, each, 0) for each in range(len(topic.partitions))),
                ),
            )
        return found

    def _decisions(
        self,
        link: Link,
        wanted: Plan,
        stored: Stored,
        producers: Mapping[TopicPartition, Mapping[int, ProducerState]],
    ) -> list[Entry]:
        """What the source had decided, of what is open in the copy, and what is pending in copies of groups."""
        names = {each.topic.name: each.name for each in wanted.topics}
        by = link.name, self._context.proxy_name
        found = []
        for (topic, partition), some in producers.items():
            for producer_id, producer in some.items():
                own_id, place = producer_id % IDS_PER_CLUSTER, (topic, partition)
                decision = stored.commits(own_id, producer.epoch, place, producer.transaction_start)
                if decision is not None:
                    key = (DECISION, link.link_id, own_id, names[topic], partition, *by)
                    found.append(Entry(key, _decided(decision.producer_epoch, producer.epoch)))
        pending = {
            group: offsets
            for pair, _ in wanted.pairs
            if pair.type is ResourceType.CONSUMER_GROUP
            for group, offsets in committed_offsets(of_groups(stored, pair.local_prefix)).items()
            if group in wanted.groups
        }
        for number, (group, offsets) in enumerate(sorted(pending.items())):
            positions = [
                [names[topic], partition, 1, committed.metadata, 0]
                for (topic, partition), committed in offsets.items()
                if topic in names
            ]
            if positions:
                of_group = (OFFSETS, link.link_id, NOBODY, wanted.groups[group], number, 0, *by)
                decided = (DECISION, link.link_id, NOBODY, OFFSETS_TOPIC, number, *by)
                found.append(Entry(of_group, {"epoch": 0, "positions": positions}))
                found.append(Entry(decided, _decided(0, 0)))
        return found

    async def _commit(self, wanted: Plan) -> int:
        """Commit in copies of groups what these have in copied topics, at the copies' beginnings; how many offsets."""
        names = {each.topic.name: each.name for each in wanted.topics}
        has = await self._cluster.committed_offsets(sorted(wanted.groups)) if wanted.groups else {}
        if missing := wanted.groups.keys() - has.keys():
            raise BrokerUnavailable(f"the coordinator of {min(missing)} does not answer now")

        async def commit(group: str) -> int:
            offsets = {
                (names[topic], partition): CommittedOffset(0, committed.metadata)
                for (topic, partition), committed in has[group].items()
                if topic in names
            }
            if not offsets:
                return 0
            copy = wanted.groups[group]
            refused = await self._cluster.commit_offsets(copy, offsets, OFFSETS_KEPT_MS)
            if refused:
                raise BrokerUnavailable(f"{copy}: a commit is answered {next(iter(refused.values())).error_name}")
            return len(offsets)

        return sum(await some_at_once(AT_ONCE, commit, wanted.groups))

    # ---- deleting ----

    async def delete(self, link: Link) -> bool:
        """Delete a copy, and what is recorded of it; False: a failover of it has to end before."""
        state = self._context.control.state
        if any(is_of(link.name, key.prefix) for key in state.promotions):
            return False
        await self._delete_named(lambda name: is_of(link.name, name))
        await self._forget_stored(link)
        await self._append(DeleteLink(link.name), gone_is_no_error=True)
        await self.delete_unclaimed()
        log.info("copy of a drill deleted", extra={"link": link.name})
        return True

    async def delete_unclaimed(self, looked_for: bool = False) -> None:
        """Delete namespaces of copies that have no link any more, and (``looked_for``) topics and groups of such.

        A link is recorded before anything of its copy is made.
        """
        if looked_for:
            seen = [*await self._cluster.topics(), *await self._cluster.groups()]
            copies = {name for name in seen if name.startswith(DRILL_PREFIX)}
            if copies:
                await self._context.control.caught_up()
                links = [link.name for link in self._context.control.state.links.values() if link.drill is not None]
                unclaimed = {name for name in copies if not any(is_of(each, name) for each in links)}
                await self._delete_named(unclaimed.__contains__)
        state = self._context.control.state
        keys = [key for key in state.namespaces if _is_unclaimed(state, key)]
        await self._append(*(DeleteNamespace(*key) for key in keys), gone_is_no_error=True)

    async def _delete_named(self, chosen: Callable[[str], bool]) -> None:
        check_lease(self._context)

        async def delete_topic(topic: TopicInfo) -> None:
            await self._cluster.delete_topic_id(topic.topic_id)

        async def delete_group(group: str) -> None:
            try:
                await self._cluster.delete_group(group)
            except KafkaRefused as error:
                if error.error_code != GROUP_ID_NOT_FOUND:
                    raise

        deadline = self._clock.monotonic() + DELETE_S
        while True:  # a broker that is asked may not know yet what was made, or deleted, just now
            topics = [each for name, each in (await self._cluster.topics()).items() if chosen(name)]
            groups = [each for each in await self._cluster.groups() if chosen(each)]
            if not topics and not groups:
                return
            if self._clock.monotonic() > deadline:
                raise BrokerUnavailable(f"{len(topics)} topics and {len(groups)} groups of the copy are there still")
            await some_at_once(AT_ONCE, delete_topic, topics)
            await some_at_once(AT_ONCE, delete_group, groups)
            await asyncio.sleep(RETRY_S)

    async def _forget_stored(self, link: Link) -> None:
        """Take out of the store what this proxy put there; what others did they sweep, since the link is gone."""
        mine = [
            Entry(key, None)
            for key in await self._store.entries()
            if key[1] == link.link_id and key[-1] == self._context.proxy_name
        ]
        await self._store.put(mine)

    async def _append(self, *bodies: Body, gone_is_no_error: bool = False) -> None:
        """Record these, in this order. Raises DrillRefused for the first that is refused."""
        for outcome in await self._context.control.append_all(bodies):
            if isinstance(outcome, Rejected) and not (gone_is_no_error and outcome.code is Rejection.NOT_FOUND):
                raise DrillRefused(outcome.code.told, outcome.message)


class DrillRefused(Exception):
    """The control log refuses something. ``code``: a constant."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def _is_unclaimed(state: ControlState, key: NamespaceKey) -> bool:
    """Whether a namespace is a copy's whose link is gone."""
    links = (link.name for link in state.links.values() if link.drill is not None)
    return key.prefix.startswith(DRILL_PREFIX) and not any(is_of(name, key.prefix) for name in links)


def _decided(producer_epoch: int, data_epoch: int) -> Mapping[str, object]:
    """A decision to commit, of all that a producer has open in a copy."""
    return {"id": "drill", "epoch": producer_epoch, "data_epoch": data_epoch, "at": [0, 0, 0], "end": AFTER_ALL}
