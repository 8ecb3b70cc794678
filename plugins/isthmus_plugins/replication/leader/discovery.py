"""Finds what this proxy is to push: partitions of led namespaces on its brokers, and what the targets say of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import is_
from typing import Final, NamedTuple, TypeAlias

from isthmus_control.control_state import ControlState
from isthmus_control.directions import pushed_topics
from isthmus_control.model import Link, NamespaceMapping
from isthmus_control.states import ReasonCode
from isthmus_plugins.api import Replace, Request, RequestHook, Verdict
from isthmus_plugins.aside import answered_on_loop
from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused, TopicInfo, TopicPartition
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.leader.source_settings import SourceConfigs
from isthmus_plugins.replication.leader.target_topics import Begins, HoldsFromFirst, PreparedTopic, TargetTopics, Wanted
from isthmus_plugins.replication.link import reasons
from isthmus_plugins.replication.link.peers import LinkPeers
from isthmus_plugins.replication.partitions import LinkPartition
from isthmus_plugins.tasks import Tasks
from isthmus_protocol.schema import ApiKey

log = logging.getLogger("isthmus_plugins.replication")

DISCOVERY_INTERVAL_S: Final = 0.4
"""How often topics are read: one that is new is found, made on the target and followed within a second."""
MADE_S: Final = 0.05
"""From the answer to a client that makes topics, or partitions, to the next reading: brokers know them by then."""
SETTLED_S: Final = 2.0
"""How long what was found holds where neither topics nor what it goes by have changed, nor any stream has ended; longer
among many topics, of which whole looks take ``SETTLED_SHARE`` of the time then."""
SETTLED_SHARE: Final = 0.005
SETTLED_MAX_S: Final = 10.0
NEW_S: Final = 60.0
"""How long a partition is new after it was found: by then the target has it, or why it has not is to be seen."""
LOOKS_SHARE: Final = 0.05
"""Of the time that passes: what looks at all topics take where there are many, however much happens."""
REST_MAX_S: Final = 1.0
"""What waits for such a look waits no longer than this, though. Topics that are new do not wait for it, where no other
one has changed, and the same namespaces are led."""
WAIT_MIN_S: Final = 0.001
"""Timers come a little before their time: what waits for less would be looked at again and again until it is."""

Topics: TypeAlias = Mapping[str, TopicInfo]
Leading: TypeAlias = Sequence[tuple[Link, NamespaceMapping]]
"""Namespaces that are led, each over a link."""


class _GoesBy(NamedTuple):
    """What a look goes by of the control state, in which something else changes many times a minute."""

    links: object
    truncations: object
    successions: object
    sync_records: object
    level: int

    @classmethod
    def of(cls, state: ControlState) -> _GoesBy:
        return cls(state.links, state.truncations, state.successions, state.sync_records, state.level)

    def is_as(self, other: _GoesBy | None) -> bool:
        """Whether nothing was changed: not what is in the tables, of which there are thousands, is compared."""
        return other is not None and all(map(is_, self, other))


class _Settled(NamedTuple):
    """What was found holds, for now."""

    goes_by: _GoesBy
    until: float
    """Monotonic seconds."""
    all_pushed: bool
    took_s: float
    """How long the process was busy with finding it."""


class _Share(NamedTuple):
    """What a look finds of a topic that a link leads: most looks find most topics as they were."""

    topic: TopicInfo
    mapping: NamespaceMapping
    remote_topic: str
    keys: tuple[LinkPartition, ...]
    """The partitions that are this proxy's to push, or to report where they have no leader."""
    epochs: Mapping[TopicPartition, int]
    """Leader epochs, of all partitions."""
    leaders: Mapping[TopicPartition, int]
    sends: bool
    """Whether the topic's settings are this proxy's to send."""


class _Found(NamedTuple):
    """What is to be pushed, of some topics."""

    led: dict[LinkPartition, PreparedTopic | None]
    wanted: dict[str, dict[str, tuple[NamespaceMapping, TopicInfo]]]
    """By link: the topics of which this proxy pushes partitions, by name."""
    every: dict[str, list[str]]
    """By link: all led topics."""
    sends: set[str]
    """Topics whose settings are this proxy's to send."""
    epochs: dict[TopicPartition, int]
    leaders: dict[TopicPartition, int]
    moved: list[TopicPartition]
    """Partitions that had another leader epoch before."""
    new: list[LinkPartition]
    """Partitions that were not there before, in namespaces that were led then."""
    shares: dict[tuple[str, str], _Share]
    """By link and topic."""


class Discovery:
    """What of this cluster is to be pushed over links, as of the latest look at its topics."""

    def __init__(
        self,
        context: PluginContext,
        peers: LinkPeers,
        found: Callable[[Topics], bool],
        prepared: Callable[[Collection[LinkPartition]], None],
        holds_from_first: HoldsFromFirst,
        begins: Begins,
    ) -> None:
        """``found`` is called after each whole look, with the topics of the cluster, none where this proxy leads
        nothing; it says whether all that is led is pushed. ``prepared`` is called in between with led partitions that
        may be pushed by now: a target has said something of them, or some time has passed. ``begins``: see
        :class:`TargetTopics`."""
        self._context = context
        self._found = found
        self._prepared = prepared
        self._tasks = Tasks("discovery", context.supervision)
        self._woken, self._looked = asyncio.Event(), asyncio.Event()
        self._unsettled = False
        """The next look at all topics is to be a whole one, and to come as soon as it may."""
        self._made = False
        """Topics may be new: they are to be read now."""
        self._made_at: asyncio.TimerHandle | None = None
        """When what a client makes is there, as of the last one."""
        self._rests_until = float("-inf")
        """Nothing but what is new is looked at before (monotonic seconds)."""
        self._configs = SourceConfigs(context, self.wake)
        self._targets = TargetTopics(
            context, peers, self._configs, self._tasks, self.wake, self._answered, holds_from_first, begins
        )
        self._error: str | None = None
        self._shares: dict[tuple[str, str], _Share] = {}
        """By link and topic."""
        self._seen: _GoesBy | None = None
        """As of the last change of the control state."""
        self._pairs: frozenset[tuple[str, str]] = frozenset()
        """Led namespaces as of the last whole look, by link and prefix."""
        self._new: dict[LinkPartition, float] = {}
        """Partitions that came to be between two looks: when they were found (monotonic seconds)."""
        self._settled: _Settled | None = None
        """As of the last whole look; None: the next one is to be whole."""
        self._asked_at = float("-inf")
        """When targets were last asked for what is due."""
        self._wanted: dict[str, tuple[Wanted, list[str]]] = {}
        """By link: what its target is asked for, and all led topics."""
        self.led: dict[LinkPartition, PreparedTopic | None] = {}
        """Every partition that this proxy is to push, with what the target said of its topic."""
        self.topic_ids: dict[str, bytes] = {}
        """Of the topics of those."""
        self.topics: Topics = {}
        """All of the cluster, as of the last look."""
        self.looks = 0
        """How often they were read: what is led is of these."""
        self._whole = 0
        """How often all else that it goes by was looked at as well."""
        self.leader_epochs: dict[TopicPartition, int] = {}
        """By partition of a led topic, whoever fronts its leader: the leader epoch, as the cluster said last."""
        self.leaders: dict[TopicPartition, int] = {}
        """Likewise the leader, -1 for none."""
        self.leads_since: dict[TopicPartition, float] = {}
        """Likewise when that epoch was found, in monotonic seconds, where another one was known before."""

    def start(self) -> None:
        self._tasks.keep("look", self._look_for_ever)
        self._configs.start()

    async def stop(self) -> None:
        if self._made_at is not None:
            self._made_at.cancel()
        await self._tasks.close()
        await self._configs.stop()

    def control_changed(self, state: ControlState) -> None:
        """Look again now if a look may find something else."""
        seen = _GoesBy.of(state)
        if not seen.is_as(self._seen):
            self._seen = seen
            self.wake()

    def wake(self) -> None:
        """Look again now."""
        self._unsettled = True
        self._woken.set()

    def hooks(self) -> Sequence[RequestHook]:
        """Requests that make topics or partitions: what they have made is looked for at once."""
        made_by = ApiKey.CREATE_TOPICS, ApiKey.CREATE_PARTITIONS
        return [RequestHook(each, self._making, whole=True, pure=True) for each in made_by]

    def _making(self, request: Request) -> Verdict:
        return Replace(request.frame, answered_on_loop(self._answered_to_client)) if self._leading() else None

    def _answered_to_client(self, frame: bytes) -> bytes:
        loop = asyncio.get_running_loop()
        # So soon after another one the next look is due anyhow: clients may ask for what is refused without end.
        if self._made_at is None or loop.time() > self._made_at.when() + DISCOVERY_INTERVAL_S:
            self._made_at = loop.call_later(MADE_S, self._read_now)
        return frame

    def _read_now(self) -> None:
        self._made = True
        self._woken.set()

    async def look_again(self) -> None:
        """Return when a look has ended that began later, at topics that this proxy leads."""
        under_way = self._whole + 1  # it may have begun before
        while self._whole <= under_way:
            self.wake()
            await self._looked.wait()

    def unsettle(self) -> None:
        """Something is not pushed any more: the next look is a whole one, when its time has come."""
        self._settled = None

    def configs_of(self, topic: TopicInfo) -> Mapping[str, str] | None:
        """The settings of a led topic as last read; None if they were not."""
        return self._configs.of(topic)

    def configs_lately(self, topic: str, topic_id: bytes, within_s: float) -> Mapping[str, str] | None:
        """The settings of a led topic, if they were read within this time."""
        return self._configs.lately(topic, topic_id, within_s)

    def knows_gone(self, link: Link) -> bool:
        """Whether the last whole look had namespaces that a link leads no more: the next one will not."""
        led = {mapping.local_prefix for mapping in pushed_topics(link)}
        return any(name == link.name and prefix not in led for name, prefix in self._pairs)

    def is_empty(self, key: LinkPartition) -> bool | None:
        """Whether nothing was in a led partition just now; None: that is not known."""
        return self._targets.recent_ends.is_empty(self.topic_ids[key.topic], key.partition)

    def new_for_s(self, key: LinkPartition) -> float | None:
        """Since when there is a led partition, in a namespace that was led before; None: it is not new, or that old."""
        found = self._new.get(key)
        return None if found is None else self._context.clock.monotonic() - found

    def prepare_again(self, link_name: str, topic: str) -> None:
        """The target's topic is not as it said: ask it again with the next look."""
        self._targets.prepare_again(link_name, topic)

    async def _look_for_ever(self) -> None:
        while True:
            try:
                await self._look()
                self._error = None
            except (BrokerUnavailable, KafkaRefused) as error:
                if self._error is None:
                    log.warning("topics not read", extra={"detail": str(error)})
                self._error = str(error)
                failed_at = self._context.clock.monotonic()
                self._rests_until = max(self._rests_until, failed_at + DISCOVERY_INTERVAL_S)  # whoever wakes
            self._looked.set()  # who waits goes on
            self._looked.clear()
            await self._until_due()

    async def _until_due(self) -> None:
        """Return when topics are to be read again."""
        clock = self._context.clock
        due_at = clock.monotonic() + DISCOVERY_INTERVAL_S
        while not self._made:
            until = min(due_at, self._rests_until) if self._unsettled else due_at
            if (rest_s := until - clock.monotonic()) <= 0:
                return
            self._woken.clear()
            try:
                async with asyncio.timeout(max(rest_s, WAIT_MIN_S)):
                    await self._woken.wait()
            except TimeoutError:
                pass

    async def _look(self) -> None:
        """Read all topics, and look at what has to be looked at.

        A look at all topics, which among many takes a while, comes where something that it goes by has changed, and
        not before the process has done other things. Where topics came, no other one has changed, and the same
        namespaces are led, these are taken in meanwhile.
        """
        self._made = False
        rests = self._context.clock.monotonic() < self._rests_until
        if self._unsettled and not rests:
            self._unsettled = False
            self.unsettle()
        settled = None if self._unsettled else self._settled
        goes_by = _GoesBy.of(self._context.control.state)
        # Without a lease another proxy may front these brokers, and push the same partitions.
        leading = self._leading() if self._context.clock.monotonic() < self._context.lease_deadline else []
        topics = await self._context.cluster.topics() if leading else {}
        began = self._context.clock.monotonic()
        if not leading:
            self._forget()
            self._configs.watch(())
            self._found(topics)
            self._rest(self._context.clock.monotonic() - began)
            return
        if settled is not None and not (goes_by.is_as(settled.goes_by) and began < settled.until):
            settled = None
        new = {name: topic for name, topic in topics.items() if name not in self.topics}
        if {**self.topics, **new} != topics:
            self._unsettled, settled = self._unsettled or rests, None
        elif _pairs(leading) == self._pairs and (rests or settled is not None):
            self._take_in(leading, new)
            self.topics, self.looks = topics, self.looks + 1
        self._whole += settled is not None
        if rests:
            return
        if settled is None:
            self._look_at_all(leading, topics, goes_by)
        elif not settled.all_pushed:
            self._ask_targets()
            self._prepared(self.led)
            self._rest(settled.took_s)  # to read all topics is dear by itself
        elif began - self._asked_at >= SETTLED_S:  # they are to hear of what they have from time to time
            self._ask_targets()

    def _look_at_all(self, leading: Leading, topics: Topics, goes_by: _GoesBy) -> None:
        began = self._context.clock.monotonic()
        found = self._find(leading, topics.values())
        for link, mapping in leading:
            names = self._context.control.state.truncations
            found.every[link.name] += [name for name in names if mapping.remote_name(name) is not None]
        self._forget()
        self._pairs = _pairs(leading)
        self._new = {key: at for key, at in self._new.items() if began - at < NEW_S}
        self.leads_since = {place: since for place, since in self.leads_since.items() if place in found.epochs}
        self.leader_epochs, self.leaders, self._wanted = {}, {}, {}
        self._note(found)
        self._ask_targets()
        self.topics, self.looks, self._whole = topics, self.looks + 1, self._whole + 1
        all_pushed = self._found(topics)
        took_s = self._context.clock.monotonic() - began
        settled_s = min(SETTLED_MAX_S, max(SETTLED_S, took_s / SETTLED_SHARE))
        self._settled = _Settled(goes_by, began + settled_s, all_pushed, took_s)
        self._rest(took_s)

    def _forget(self) -> None:
        self._targets.sends = frozenset()
        self.led, self.topic_ids, self._shares, self._pairs = {}, {}, {}, frozenset()
        self._settled = None

    def _rest(self, took_s: float) -> None:
        rest_s = max(WAIT_MIN_S, min(REST_MAX_S, took_s / LOOKS_SHARE))
        self._rests_until = self._context.clock.monotonic() + rest_s

    def _take_in(self, leading: Leading, new: Topics) -> None:
        """Have topics pushed that came, where all else is as it was."""
        found = self._find(leading, new.values())
        if not found.shares:
            return
        self._note(found)
        for link_name, wanted in found.wanted.items():
            self._targets.prepare_some(link_name, wanted, self._wanted[link_name][1])
        if self._settled is not None:
            self._settled = self._settled._replace(all_pushed=False)

    def _ask_targets(self) -> None:
        self._asked_at = self._context.clock.monotonic()
        for link_name, (wanted, every) in self._wanted.items():
            self._targets.prepare(link_name, wanted, every)

    def _answered(self, link_name: str, names: Collection[str]) -> None:
        """A target has said something of some topics: streams go by it without another look at all there is."""
        if self._context.clock.monotonic() >= self._context.lease_deadline:
            self.unsettle()
            return
        state = self._context.control.state
        mappings = [mapping for link, mapping in self._leading() if link.name == link_name]
        keys = [
            key
            for name in names
            if name in self.topics and name not in state.truncations
            if any(mapping.remote_name(name) is not None for mapping in mappings)
            for index in range(len(self.topics[name].partitions))
            if (key := LinkPartition(link_name, name, index)) in self.led
        ]
        self.led |= {key: self._targets.prepared.get((link_name, key.topic)) for key in keys}
        self._prepared(keys)

    def _leading(self) -> list[tuple[Link, NamespaceMapping]]:
        return [
            (link, mapping) for link in self._context.control.state.links.values() for mapping in pushed_topics(link)
        ]

    def _find(self, leading: Leading, topics: Collection[TopicInfo]) -> _Found:
        """What is to be pushed of these topics."""
        truncating = self._context.control.state.truncations
        found = _Found({}, {}, {}, set(), {}, {}, [], [], {})
        for link, mapping in leading:
            wanted = found.wanted.setdefault(link.name, {})
            every = found.every.setdefault(link.name, [])
            for topic in topics:
                share = self._shares.get((link.name, topic.name))
                if share is None or share.topic is not topic or share.mapping is not mapping:
                    remote_topic = mapping.remote_name(topic.name)
                    if (topic.internal and mapping.offsets is None) or remote_topic is None:
                        continue
                    share = self._share(link.name, mapping, topic, remote_topic)
                    known = self.leader_epochs
                    if (link.name, mapping.local_prefix) in self._pairs:
                        found.new.extend(key for key in share.keys if key.place not in known)
                    epochs = share.epochs.items()
                    found.moved.extend(place for place, epoch in epochs if known.get(place, epoch) != epoch)
                found.shares[link.name, topic.name] = share
                if topic.name in truncating:
                    prepared: PreparedTopic | None = self._wait_for_truncation(
                        link.name, topic.name, share.remote_topic
                    )
                else:
                    every.append(topic.name)
                    found.epochs.update(share.epochs)
                    found.leaders.update(share.leaders)
                    if share.keys:
                        wanted[topic.name] = mapping, topic
                    if share.sends:
                        found.sends.add(topic.name)
                    prepared = self._targets.prepared.get((link.name, topic.name))
                found.led.update(dict.fromkeys(share.keys, prepared))
        return found

    def _note(self, found: _Found) -> None:
        """Have what was found pushed, too, and its settings read."""
        now = self._context.clock.monotonic()
        self.led |= found.led
        self.leader_epochs |= found.epochs
        self.leaders |= found.leaders
        self.leads_since |= dict.fromkeys((place for place in found.moved if place in found.epochs), now)
        self.topic_ids |= {share.topic.name: share.topic.topic_id for share in found.shares.values() if share.keys}
        self._shares |= found.shares
        self._new |= dict.fromkeys(found.new, now)
        # Of a topic that several proxies push, one sends the settings: that of its first partition.
        self._targets.sends |= found.sends
        for link_name, names in found.every.items():
            wanted, every = self._wanted.get(link_name, ({}, []))
            self._wanted[link_name] = {**wanted, **found.wanted[link_name]}, sorted([*every, *names])
        self._configs.watch([topic for wanted, _ in self._wanted.values() for _, topic in wanted.values()])

    def _share(self, link_name: str, mapping: NamespaceMapping, topic: TopicInfo, remote_topic: str) -> _Share:
        places = [(topic.name, index) for index in range(len(topic.partitions))]
        first = next((info.leader for info in topic.partitions if info.leader >= 0), -1)
        fronted = [place for place, info in zip(places, topic.partitions, strict=True) if self._fronts(info.leader)]
        return _Share(
            topic,
            mapping,
            remote_topic,
            tuple(LinkPartition(link_name, *place) for place in fronted),
            dict(zip(places, (info.leader_epoch for info in topic.partitions), strict=True)),
            dict(zip(places, (info.leader for info in topic.partitions), strict=True)),
            bool(fronted) and self._fronts(first),
        )

    def _wait_for_truncation(self, link_name: str, topic: str, remote_topic: str) -> PreparedTopic:
        """Push nothing of a topic that is truncated itself: it is frozen, or not whole, or will be another one."""
        self._targets.prepared.pop((link_name, topic), None)
        message = reasons.source_truncating(topic, remote_topic)
        return PreparedTopic(remote_topic, False, ReasonCode.SOURCE_TRUNCATING, message, ())

    def _fronts(self, leader: int) -> bool:
        """Whether a partition with this leader is this proxy's to push, or to report where it has none."""
        return self._context.fronts(leader) if leader >= 0 else self._context.fronted_brokers is None


def _pairs(leading: Leading) -> frozenset[tuple[str, str]]:
    """By link and prefix."""
    return frozenset((link.name, mapping.local_prefix) for link, mapping in leading)
