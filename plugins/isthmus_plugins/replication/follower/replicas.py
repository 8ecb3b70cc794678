"""Has topics get the replicas that they are wished to have, whenever there are brokers for them.

A topic that is made while a broker is away gets as many replicas as there are brokers then, and the others later: the
brokers are looked at again and again, and nothing is remembered. So it is with follower topics and with the proxies'
own. Until a topic has all of them that is told. What somebody reassigns is left alone until that is over.

A topic that was filled by somebody else before it followed has the replicas that its owner gave it; it gets others only
where the link says how many (``follower.replication.factor``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from isthmus_control.model import AUDIT_TOPIC, CONTROL_TOPIC, TRANSACTIONS_TOPIC, FollowerTopic, Reason, TopicState
from isthmus_control.states import ReasonCode
from isthmus_plugins import setting_changes
from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused, TopicInfo, TopicPartition
from isthmus_plugins.process import PluginContext, check_lease
from isthmus_plugins.replication.follower import replica_plans, topic_plans
from isthmus_plugins.replication.follower.replica_plans import Wish
from isthmus_plugins.replication.link import reasons
from isthmus_plugins.replication.link.part import Part
from isthmus_plugins.replication.logs import topic_settings
from isthmus_plugins.replication.logs.topic_settings import IN_SYNC_MIN
from isthmus_plugins.tasks import Tasks

log = logging.getLogger("isthmus_plugins.replication")

LOOK_INTERVAL_S: Final = 5.0
SETTINGS_INTERVAL_S: Final = 60.0
"""How often settings are read although all fitted: 1,000 topics cost the brokers 0.1 s of a core."""
REFUSED_S: Final = 60.0
"""How long brokers that refuse something are not asked for the same again."""
SAID_S: Final = 30.0
"""Who is asked by the source is told again more often than that what it asks for of replicas in sync."""
LOGGED_MAX: Final = 10
AT_ONCE: Final = 100
"""Partitions of the cluster whose replicas are changed at the same time, by us and others."""
OWN_TOPICS: Final = (CONTROL_TOPIC, TRANSACTIONS_TOPIC, AUDIT_TOPIC)
OWN_FACTOR: Final = 3
OWN_IN_SYNC_MIN: Final = 2
"""Of the proxies' own topics, once they have all replicas."""


class FollowerReplicas(Part):
    """The replicas of this cluster's follower topics, and of the proxies' own."""

    def __init__(self, context: PluginContext) -> None:
        self._context = context
        self._tasks = Tasks("replicas", context.supervision)
        self._said: dict[str, Wish] = {}
        """By local topic: what its source has, as it said last."""
        self._said_at: dict[str, float] = {}
        """When that was (monotonic seconds)."""
        self._placed: dict[str, tuple[tuple[int, ...], ...]] = {}
        """By topic: the replicas of its partitions, as of the look before."""
        self._found_min: dict[str, int] = {}
        """By topic: the ``min.insync.replicas`` that it was last found to have."""
        self._filled: dict[str, int] = {}
        """By topic whose replicas are being changed: how many have all records. As of the latest look."""
        self._lacking: dict[str, Reason] = {}
        """By topic: why it has fewer replicas than it is to have."""
        self._refused: dict[tuple[str, int | None], tuple[KafkaRefused, float]] = {}
        """By topic and ``min.insync.replicas`` (None: of replicas): what brokers said, and until when that counts."""
        self._digests: dict[tuple[tuple[str, int], ...], bytes] = {}
        """By topics and what they are to have: what their brokers said of their settings when they had that."""
        self._in_sync_min: dict[str, int] = {}
        """By topic that had the ``min.insync.replicas`` which it is to have when it was last looked at: that."""
        self._in_sync_min_due = 0.0
        self._known_brokers: frozenset[int] = frozenset()
        """Those that are there, and those that are away and have replicas. As of the latest look; empty before."""
        self._elsewhere: dict[str, int] = {}
        """By id of a follower topic: how many partitions it has, none of whose leaders this proxy fronts. As of the
        latest look."""

    def start(self) -> None:
        self._tasks.keep("look", self._look_for_ever)

    async def stop(self) -> None:
        await self._tasks.close()

    def said(self, local: str, factor: int, in_sync_min: int | None = None) -> None:
        """The source has so many replicas of the topic that a local one follows; ``in_sync_min``: and asks for so many
        in sync, if it said that."""
        known = self._said.get(local)
        self._said[local] = Wish(
            factor, known.in_sync_min if in_sync_min is None and known is not None else in_sync_min
        )
        self._said_at[local] = self._context.clock.monotonic()

    async def brokers(self) -> int:
        """How many brokers this cluster has, those that are away and have replicas too. Raises BrokerUnavailable."""
        racks = await self._context.cluster.broker_racks()
        if not self._known_brokers:
            self._known_brokers = replica_plans.known_brokers(racks, await self._context.cluster.topics())
        return len(self._known_brokers | racks.keys())

    def reason(self, topic: str) -> Reason | None:
        """Why a topic has fewer replicas than it is to have, if it is known to."""
        return self._lacking.get(topic)

    def of_own_topics(self) -> Reason | None:
        """The same of the proxies' own topics."""
        return next((reason for name in OWN_TOPICS if (reason := self._lacking.get(name)) is not None), None)

    def elsewhere(self, topic_id: str) -> int | None:
        """How many partitions a follower topic has, if other proxies front all of their leaders; None: not so."""
        return self._elsewhere.get(topic_id)

    def in_place(self, topic: TopicInfo) -> TopicInfo:
        """A topic without those of its replicas that are being filled."""
        has = replica_plans.fewest(topic) or topic.replication_factor
        filled = self._filled.get(topic.name)
        if filled is not None:  # brokers that are lost meanwhile lower nothing
            has = min(has, max(filled, self._found_min.get(topic.name, 1)))
        return topic._replace(replication_factor=has)

    async def look(self) -> None:
        """See what topics have, and have them get what they lack. Raises BrokerUnavailable, KafkaRefused."""
        cluster = self._context.cluster
        topics = await cluster.topics()
        racks = await cluster.broker_racks()
        self._known_brokers = replica_plans.known_brokers(racks, topics)
        self._elsewhere = self._led_elsewhere(topics)
        wishes = self._wishes(topics, len(self._known_brokers))
        lacking = {
            name: wish.factor for name, wish in wishes.items() if replica_plans.fewest(topics[name]) < wish.factor
        }
        changed, refused = set[str](), dict[str, KafkaRefused]()
        if lacking or any(replica_plans.is_behind(topics[name]) for name in wishes):
            try:
                under_way = await cluster.reassigned()
                changed = {topic for topic, _ in under_way}
                # What somebody else was reassigning may be done by now: it is given nothing that it had before.
                topics = {**topics, **await cluster.topics()}
                left = {
                    name: factor
                    for name, factor in lacking.items()
                    if name not in changed and _placed(topics[name]) == self._placed.get(name)
                }
                refused = {name: error for name in left if (error := self._refused_lately(name, None)) is not None}
                left = {name: factor for name, factor in left.items() if name not in refused}
                wanted = replica_plans.grown(left, topics, racks, AT_ONCE - len(under_way))
                refused |= await self._reassign(wanted)
                changed |= {topic for topic, _ in wanted} - refused.keys()
            except KafkaRefused as error:
                refused = dict.fromkeys(lacking, error)
        self._filled = {name: replica_plans.filled(topics[name]) for name in wishes if name in changed}
        has = {name: self._filled.get(name, replica_plans.fewest(topics[name])) for name in wishes}
        self._lacking = {
            name: _reason(name, has[name], wish.factor, len(racks), name in changed, refused.get(name))
            for name, wish in wishes.items()
            if has[name] < wish.factor
        }
        self._placed = {name: _placed(topics[name]) for name in wishes}
        self._forget(topics)
        await self._follow_in_sync_min(topics, wishes)

    def _led_elsewhere(self, topics: Mapping[str, TopicInfo]) -> dict[str, int]:
        followed = (topics[name] for name in self._context.control.state.follower_topics if name in topics)
        return {
            info.id_text: len(info.partitions)
            for info in followed
            if not any(self._context.fronts(partition.leader) for partition in info.partitions)
        }

    def _forget(self, topics: Collection[str]) -> None:
        """Forget topics that are no more."""
        now = self._context.clock.monotonic()
        self._said = {name: wish for name, wish in self._said.items() if name in topics}
        self._said_at = {name: at for name, at in self._said_at.items() if name in topics}
        self._found_min = {name: value for name, value in self._found_min.items() if name in topics}
        self._refused = {asked: said for asked, said in self._refused.items() if asked[0] in topics and now < said[1]}

    async def _reassign(self, wanted: Mapping[TopicPartition, Sequence[int]]) -> dict[str, KafkaRefused]:
        """Begin to give partitions these replicas; by topic of which some are refused: why."""
        if not wanted:
            return {}
        check_lease(self._context)
        refused = await self._context.cluster.reassign(wanted)
        if begun := wanted.keys() - refused.keys():
            names = sorted({topic for topic, _ in begun})
            log.info("topics get replicas", extra={"partitions": len(begun), "topics": names[:LOGGED_MAX]})
        return {topic: self._note_refused(topic, None, error) for (topic, _), error in refused.items()}

    def _note_refused(self, topic: str, in_sync_min: int | None, error: KafkaRefused) -> KafkaRefused:
        self._refused[topic, in_sync_min] = error, self._context.clock.monotonic() + REFUSED_S
        return error

    def _refused_lately(self, topic: str, in_sync_min: int | None) -> KafkaRefused | None:
        """What the brokers said not long ago, who need not be asked for the same again."""
        error, until = self._refused.get((topic, in_sync_min), (None, 0.0))
        if self._context.clock.monotonic() < until:
            return error
        self._refused.pop((topic, in_sync_min), None)
        return None

    def _wishes(self, topics: Mapping[str, TopicInfo], brokers: int) -> dict[str, Wish]:
        """What the topics are to have that are ours to give replicas."""
        own_factor = min(OWN_FACTOR, brokers)
        wishes = {name: Wish(own_factor, None) for name in OWN_TOPICS if self._is_ours(topics.get(name))}
        for name, record in self._context.control.state.follower_topics.items():
            if (info := topics.get(name)) is not None and (wish := self._wish(record, info, brokers)) is not None:
                wishes[name] = wish
        return wishes

    def _is_ours(self, topic: TopicInfo | None) -> bool:
        """Whether it is this proxy that looks after one of the proxies' own topics: who fronts its leader."""
        return topic is not None and self._context.fronts(topic.partitions[0].leader)

    def _wish(self, record: FollowerTopic, info: TopicInfo, brokers: int) -> Wish | None:
        """What a follower topic is to have; None: what it has."""
        state = self._context.control.state
        link, said = state.links.get(record.link), self._said.get(record.topic)
        followed = record.state is TopicState.FOLLOWING and topic_plans.is_recorded(record, info)
        if link is None or not followed or record.topic in state.truncations:
            return None
        # Only who was told lately knows what the source has now: another proxy may be the one that is told.
        lately = self._context.clock.monotonic() - self._said_at.get(record.topic, float("-inf")) < SAID_S
        in_sync_min = link.follower_in_sync_min or (said.in_sync_min if said is not None and lately else None)
        factor = link.follower_replication_factor
        if factor is None and said is not None and replica_plans.came_empty(state.histories.get(record.topic)):
            factor = min(said.factor, brokers)
        return Wish(factor or 0, in_sync_min)

    async def _follow_in_sync_min(self, topics: Mapping[str, TopicInfo], wishes: Mapping[str, Wish]) -> None:
        """Have ``min.insync.replicas`` be what it is to be, as far as there are replicas, whatever brokers are away.

        Raises BrokerUnavailable, KafkaRefused.
        """
        wanted: dict[str, int] = {}
        for name, wish in wishes.items():
            there = replica_plans.fewest(topics[name])
            if name in OWN_TOPICS:
                wanted |= {name: OWN_IN_SYNC_MIN} if there >= OWN_FACTOR else {}
            elif wish.in_sync_min is not None:
                wanted[name] = min(wish.in_sync_min, there)
        for name, value in list(wanted.items()):
            if (error := self._refused_lately(name, value)) is not None:
                self._lacking.setdefault(name, reasons.settings_refused(name, {IN_SYNC_MIN: error}))
                del wanted[name]
        now = self._context.clock.monotonic()
        whole = now >= self._in_sync_min_due
        # In between only what is new, or was not as it is to be: of thousands of topics that come one after the other
        # each would have all others read again.
        asked = [name for name, value in wanted.items() if whole or self._in_sync_min.get(name) != value]
        names, digests, unfit = sorted(asked), {}, set[str]()
        for start in range(0, len(names), topic_settings.DESCRIBED_AT_ONCE):
            some = names[start : start + topic_settings.DESCRIBED_AT_ONCE]
            key = tuple((name, wanted[name]) for name in some)
            digest, described = await self._context.cluster.effective_configs(some, self._digests.get(key))
            if described is not None:
                unfit |= set(some) - described.keys()  # not known yet
            for name, effective in (described or {}).items():
                has = self._found_min[name] = int(effective.get(IN_SYNC_MIN) or 1)
                if has < wanted[name] or (has > wanted[name] and name not in OWN_TOPICS):
                    unfit.add(name)
                    # More than are in sync would stop who writes now.
                    if has > wanted[name] or replica_plans.filled(topics[name]) >= wanted[name]:
                        await self._set_in_sync_min(name, wanted[name])
            if unfit.isdisjoint(some):
                digests[key] = digest
        # What was set, or refused, is looked at once more.
        self._in_sync_min = {name: value for name, value in wanted.items() if name not in unfit}
        if whole:
            self._digests, self._in_sync_min_due = digests, now + SETTINGS_INTERVAL_S

    async def _set_in_sync_min(self, topic: str, value: int) -> None:
        check_lease(self._context)
        refused = await setting_changes.change(self._context.cluster, topic, {IN_SYNC_MIN: str(value)})
        if refused:
            self._lacking.setdefault(topic, reasons.settings_refused(topic, refused))
            self._note_refused(topic, value, refused[IN_SYNC_MIN])
        else:
            log.info("topic configured", extra={"topic": topic, "settings": [f"{IN_SYNC_MIN}={value}"]})

    async def _look_for_ever(self) -> None:
        while True:
            try:
                await self.look()
            except (BrokerUnavailable, KafkaRefused) as error:
                log.warning("replicas of topics not read", extra={"detail": str(error)})
            await asyncio.sleep(LOOK_INTERVAL_S)


def _placed(topic: TopicInfo) -> tuple[tuple[int, ...], ...]:
    return tuple(partition.replicas for partition in topic.partitions)


def _reason(topic: str, has: int, factor: int, alive: int, changed: bool, refused: KafkaRefused | None) -> Reason:
    """Why a topic has fewer replicas than ``factor``. ``alive``: so many brokers are there."""
    if refused is not None:
        why = f"the brokers refuse to add some: {reasons.refused(refused, 'Alter and Describe', 'the cluster')}"
    elif changed:
        why = "the others are being filled"
    elif alive < factor:
        why = f"{alive} brokers of this cluster are there; it gets the others when more are"
    else:
        why = "it gets the others soon"
    return Reason(ReasonCode.TARGET_LACKS_REPLICAS, f"{topic} has {has} of {factor} replicas: {why}")
