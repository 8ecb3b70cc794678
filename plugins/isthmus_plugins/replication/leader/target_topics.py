"""Has the target of a link make the topics that it lacks, and learns where it leads their partitions."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Final, NamedTuple, TypeAlias

from isthmus_control.commands import TermStart
from isthmus_control.model import NamespaceMapping
from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused, TopicInfo
from isthmus_plugins.process import PluginContext
from isthmus_plugins.rarely import RarelyEach
from isthmus_plugins.replication.leader.recent_ends import RecentEnds
from isthmus_plugins.replication.leader.source_settings import SourceConfigs
from isthmus_plugins.replication.leader.stream import REOPEN_DELAY_S
from isthmus_plugins.replication.link import calls
from isthmus_plugins.replication.link.connection import LinkConnection, LinkLost, LinkRejected
from isthmus_plugins.replication.link.own_logs import Begun
from isthmus_plugins.replication.link.peers import LinkPeers
from isthmus_plugins.replication.logs.topic_settings import IN_SYNC_MIN, is_compacted
from isthmus_plugins.tasks import Tasks

log = logging.getLogger("isthmus_plugins.replication")

PREPARE_INTERVAL_S: Final = 3.0
"""How often all topics are sent to the target although nothing changed here: it may have lost or moved some."""
PREPARE_TOPIC_S: Final = 0.002
"""So much later for each of them: it costs both sides some 0.2 ms."""
PREPARE_INTERVAL_MAX_S: Final = 6.0
"""Less than the target's ``NEW_SAID_S``."""
PREPARE_TIMEOUT_S: Final = 60.0
MADE_AT_ONCE: Final = 100
"""Topics in one call that the target may have to make."""
CALLS_AT_ONCE: Final = 3
"""The next ones are being made while the target waits for the leaders of those before."""
HoldsFromFirst: TypeAlias = Callable[[str, TopicInfo | None], bool]
"""Whether acks of some partitions of a topic, or (None) of topics to come, wait for a link from their first record on,
and no lease has told its other side yet that it has what was acked."""
Begins: TypeAlias = Callable[[LinkConnection, Sequence[Begun]], None]
"""Over a connection partitions are about to be pushed, whose logs end there now. Does not wait."""
NOT_READY: Final = calls.PreparedTopic(False)
"""Of a topic that the target says nothing of."""


Wanted: TypeAlias = Mapping[str, tuple[NamespaceMapping, TopicInfo]]
"""Topics that are to be on the target."""


class PreparedTopic(NamedTuple):
    """The follower end's answer for one topic."""

    remote_topic: str
    ready: bool
    code: str | None
    """Why it is not ready, or what is amiss all the same."""
    message: str | None
    leaders: tuple[int, ...]
    """By partition: the target broker that leads it, -1 where there is none."""
    filling: int | None = None
    """What stands for the time since when the target does not compact it; None: it does, or never will."""


class _Preparing:
    """What is known of the target's topics of one link, and the calls that ask."""

    __slots__ = (
        "all_due_at",
        "asked",
        "configured",
        "connection",
        "due_at",
        "ends",
        "looking",
        "more",
        "running",
        "sent",
        "told",
    )

    def __init__(self) -> None:
        self.running = False
        """Topics that are new, changed or not ready are being asked for."""
        self.looking = False
        """All others are, which may take a while: what is new does not wait for it."""
        self.more = False
        """There is more to ask when these are answered."""
        self.connection: LinkConnection | None = None
        self.asked: dict[str, object] = {}
        """By topic: as what the target was asked for it last."""
        self.told: tuple[list[str], bool] = [], False
        """All led topics, and whether acks of topics to come wait for it, as it was told last."""
        self.due_at = 0.0
        """When it is asked again for those that are not ready, or not led, although nothing changed here."""
        self.all_due_at = 0.0
        """Likewise for all."""
        self.ends: dict[str, tuple[int, tuple[int, ...]]] = {}
        """By compacted topic that the target does not compact yet: since when, and the ends of its partitions then.

        Beyond them all records have keys. Whoever starts again reads them again: they may be any later ones, too.
        """
        self.configured: dict[str, Mapping[str, str]] = {}
        """By topic: the settings that the target has taken over from this proxy."""
        self.sent: dict[str, Mapping[str, str]] = {}
        """By topic: those that it was sent last."""


class TargetTopics:
    """Of all links: what the follower ends said last of the topics that this cluster leads."""

    def __init__(
        self,
        context: PluginContext,
        peers: LinkPeers,
        configs: SourceConfigs,
        tasks: Tasks,
        wake: Callable[[], None],
        answered: Callable[[str, Collection[str]], None],
        holds_from_first: HoldsFromFirst,
        begins: Begins,
    ) -> None:
        """``wake`` is called when there is more to ask. ``answered`` is called with a link and topics when its target
        has said something of these. ``begins`` is called as a target is asked for topics that it may lack."""
        self._context = context
        self._clock = context.clock
        self._peers = peers
        self._configs = configs
        self._tasks = tasks
        self._wake = wake
        self._answered = answered
        self._holds_from_first = holds_from_first
        self._begins = begins
        self._preparing: dict[str, _Preparing] = {}
        self._unprepared = RarelyEach(_log_unprepared)
        """By link: over each connection all are asked for anew."""
        self.prepared: dict[tuple[str, str], PreparedTopic] = {}
        """By link and topic."""
        self.sends: Set[str] = frozenset()
        """Topics whose settings are this proxy's to send."""
        self.recent_ends = RecentEnds(context)
        """Of topics that the target may have to make, or to give partitions."""

    def prepare(self, link_name: str, wanted: Wanted, every: list[str]) -> None:
        """Have the target make the topics that it lacks, and learn where its partitions are led. Does not wait.

        ``every``: all led topics of the link, also those whose partitions other proxies push.
        """
        preparing = self._preparing.setdefault(link_name, _Preparing())
        due = self._ask_due(link_name, preparing, wanted, every, self._clock.monotonic() >= preparing.due_at)
        if due is None or preparing.looking or self._clock.monotonic() < preparing.all_due_at:
            return
        rest = {name: wanted[name] for name in wanted if name not in due}
        if preparing.connection is not None and (rest or not due):
            preparing.looking = True
            looking = self._look_at_all(link_name, preparing, preparing.connection, rest)
            self._tasks.start(f"look-{link_name}", looking)

    def prepare_some(self, link_name: str, wanted: Wanted, every: list[str]) -> None:
        """The same of some topics, as they come: all others are asked for in their time."""
        self._ask_due(link_name, self._preparing.setdefault(link_name, _Preparing()), wanted, every, False)

    def _ask_due(
        self, link_name: str, preparing: _Preparing, wanted: Wanted, every: list[str], again: bool
    ) -> Collection[str] | None:
        """Ask for topics that are new, or changed, or (``again``) not ready; which these are. None: not now."""
        connections = self._peers.connections(link_name)
        if not connections:
            return None
        if preparing.running and preparing.looking:
            preparing.more = True
            return None
        if connections[0] is not preparing.connection:
            preparing.connection, preparing.all_due_at = connections[0], 0.0
        told = every, self._holds_from_first(link_name, None)
        changed: dict[str, object] = {}
        left: dict[str, object] = {}
        for name, (mapping, info) in wanted.items():
            asked = mapping, info.topic_id, len(info.partitions), self._holds_from_first(link_name, info)
            if asked != preparing.asked.get(name) or self._others_than(preparing.sent, info) is not None:
                changed[name] = asked
            elif again and not self._is_led(link_name, name):
                left[name] = asked
        due = changed | left
        if preparing.running:
            preparing.more = preparing.more or bool(changed) or told != preparing.told
        elif due or told != preparing.told:
            preparing.running, preparing.told = True, told
            preparing.asked |= due
            first = {name: wanted[name] for name in wanted if name in due}
            asking = self._prepare_due(link_name, preparing, connections[0], first, again)
            self._tasks.start(f"prepare-{link_name}", asking)
        return due.keys()

    def _is_ready(self, link_name: str, topic: str) -> bool:
        known = self.prepared.get((link_name, topic))
        return known is not None and known.ready

    def _is_led(self, link_name: str, topic: str) -> bool:
        """Whether a topic is ready, and the target has found the leaders of all its partitions."""
        return self._is_ready(link_name, topic) and -1 not in self.prepared[link_name, topic].leaders

    async def _prepare_due(
        self, link_name: str, preparing: _Preparing, connection: LinkConnection, wanted: Wanted, again: bool
    ) -> None:
        """Ask for some topics, a few of them in a call; ``again``: all that are not ready are among them."""
        try:
            names = list(wanted)
            parts = [names[start : start + MADE_AT_ONCE] for start in range(0, len(names), MADE_AT_ONCE)]
            limit = asyncio.Semaphore(CALLS_AT_ONCE)

            async def prepare(some: Sequence[str]) -> None:
                async with limit:
                    await self._prepare_some(link_name, preparing, connection, {name: wanted[name] for name in some})

            await self._asked(link_name, preparing, *map(prepare, parts or [[]]))
        finally:
            preparing.running = False
            if again:
                preparing.due_at = self._clock.monotonic() + REOPEN_DELAY_S
            self._ask_more(preparing)

    async def _look_at_all(
        self, link_name: str, preparing: _Preparing, connection: LinkConnection, wanted: Wanted
    ) -> None:
        """Ask for all other topics in one call: the target may have lost or moved some."""
        links, led = self._context.control.state.links, frozenset(preparing.told[0])
        for link, topic in list(self.prepared):
            if link not in links or (link == link_name and topic not in led):
                del self.prepared[link, topic]
        for known in (preparing.configured, preparing.sent, preparing.ends, preparing.asked):
            for name in known.keys() - led:
                del known[name]
        interval_s = min(PREPARE_INTERVAL_MAX_S, PREPARE_INTERVAL_S + len(wanted) * PREPARE_TOPIC_S)
        preparing.all_due_at = self._clock.monotonic() + interval_s
        try:
            await self._asked(link_name, preparing, self._prepare_some(link_name, preparing, connection, wanted))
        finally:
            preparing.looking = False
            self._ask_more(preparing)

    def _ask_more(self, preparing: _Preparing) -> None:
        if preparing.more:
            preparing.more = False
            self._wake()

    async def _asked(self, link_name: str, preparing: _Preparing, *asking: Awaitable[None]) -> None:
        """Wait for what is asked; where some of it fails, all topics are asked for again soon."""
        for error in await asyncio.gather(*asking, return_exceptions=True):
            if isinstance(error, LinkRejected | LinkLost | TimeoutError | BrokerUnavailable | KafkaRefused):
                self._unprepared.one(link_name, (link_name, str(error)))
                preparing.all_due_at = min(preparing.all_due_at, self._clock.monotonic() + REOPEN_DELAY_S)
            elif error is not None:
                raise error

    async def _prepare_some(
        self, link_name: str, preparing: _Preparing, connection: LinkConnection, wanted: Wanted
    ) -> None:
        """Raises LinkRejected, LinkLost, TimeoutError, BrokerUnavailable, KafkaRefused."""
        asked = {name: preparing.asked.get(name) for name in wanted}
        requests = await self._with_ends(
            link_name, preparing, wanted, await self._requests(link_name, preparing, wanted)
        )
        self._begins(connection, list(self._begun(link_name, wanted)))
        preparing.sent |= {each.topic: each.configs for each in requests if each.configs is not None}
        truncating = self._context.control.state.truncations
        every, _ = preparing.told  # as of now: the target forgets what is in no list, and may have had a later one
        question = calls.PrepareTopics(
            tuple(request for request in requests if request.topic not in truncating),
            tuple(every),
            tuple(name for name in every if name in truncating),
            self._holds_from_first(link_name, None) or None,
            None if (anchor := self._context.control.anchors.own()) is None else anchor.log,
        )
        answer = await connection.call(question, PREPARE_TIMEOUT_S)
        known = []
        for request in requests:
            name = request.topic
            if preparing.asked.get(name) != asked[name]:
                continue  # it was asked for as something else since, or is to be
            known.append(name)
            said = answer.topics.get(name, NOT_READY)
            made = said.made or calls.ReadyTopic("")
            self.prepared[link_name, name] = PreparedTopic(
                made.remote_topic, said.ready, said.code, said.message, said.leaders or (), made.filling
            )
            if request.configs is not None and said.code is None:
                preparing.configured[name] = request.configs
        self._answered(link_name, known)

    async def _with_ends(
        self, link_name: str, preparing: _Preparing, wanted: Wanted, requests: Sequence[calls.WantedTopic]
    ) -> list[calls.WantedTopic]:
        """Say up to where the target is to fill compacted topics before it compacts them. Raises BrokerUnavailable.

        That is where the source's logs ended once, when the target did not compact them already; where a log was cut
        since then, it is where it ends now.
        """
        filling: dict[str, tuple[int, int, Mapping[str, str]]] = {}
        for request in requests:
            name = request.topic
            prepared, (_, info) = self.prepared.get((link_name, name)), wanted[name]
            configs = self._configs.of(info) if name in self.sends else None
            if configs is not None and prepared is not None and prepared.filling is not None and is_compacted(configs):
                filling[name] = prepared.filling, len(info.partitions), configs
        places = [(name, partition) for name, (_, count, _) in filling.items() for partition in range(count)]
        now = await self._context.cluster.log_ends(places) if places else {}
        before = {name: preparing.ends.pop(name) for name in wanted if name in preparing.ends}
        asked = {request.topic: request for request in requests}
        for name, (since, count, configs) in filling.items():
            ends = tuple(now.get((name, partition), -1) for partition in range(count))
            known_since, known = before.get(name, (since, ends))
            if -1 in ends:
                continue
            if known_since == since:
                ends = tuple(map(min, ends, (*known, *ends[len(known) :])))
            preparing.ends[name] = since, ends
            asked[name] = replace(asked[name], configs=configs, to_fill=calls.ToFill(since, ends))
        return list(asked.values())

    def _others_than(self, known: dict[str, Mapping[str, str]], info: TopicInfo) -> Mapping[str, str] | None:
        """The settings of a topic, if they are read, and this proxy's to send, and not those that are known."""
        configs = self._configs.of(info) if info.name in self.sends else None
        before = known.get(info.name)
        if configs is None or configs is before:
            return None
        if configs == before:
            known[info.name] = configs  # so that they need not be compared again
            return None
        return configs

    async def _requests(self, link_name: str, preparing: _Preparing, wanted: Wanted) -> list[calls.WantedTopic]:
        """What is sent to the target of topics; with their settings where they changed, or it may have to make them.

        Raises BrokerUnavailable, KafkaRefused.
        """
        may_be_made = {name for name in wanted if not self._is_ready(link_name, name)}
        grown = {name for name, (_, info) in wanted.items() if self._lacks_partitions(link_name, info)}
        await asyncio.gather(
            self.recent_ends.read([wanted[name][1] for name in grown]),
            self._configs.read([wanted[name][1] for name in may_be_made if self._configs.of(wanted[name][1]) is None]),
        )
        sent = {
            name: (self._configs.of(info) or {})
            if name in may_be_made
            else self._others_than(preparing.configured, info)
            for name, (_, info) in wanted.items()
        }
        return [
            calls.WantedTopic(
                name,
                info.id_text,
                mapping.remote_name(name),
                len(info.partitions),
                info.replication_factor,
                predecessors(self._context, info) or None,
                sent[name],
                from_first=self._holds_from_first(link_name, info) or None,
                in_sync_min=_in_sync_min(self._configs.of(info) or {}),
                empty=self._empty(info) if name in grown else None,
            )
            for name, (mapping, info) in wanted.items()
        ]

    def _lacks_partitions(self, link_name: str, info: TopicInfo) -> bool:
        """Whether the target has not said that it has all partitions of a topic."""
        known = self.prepared.get((link_name, info.name))
        return known is None or not known.ready or len(known.leaders) < len(info.partitions)

    def _begun(self, link_name: str, wanted: Wanted) -> Iterator[Begun]:
        """The partitions that are this proxy's to push, of those that the target may have to make."""
        for mapping, info in wanted.values():
            if mapping.offsets is None and self._lacks_partitions(link_name, info):
                topic_id = info.id_text
                for partition, (leader, epoch, *_) in enumerate(info.partitions):
                    end = self.recent_ends.end(info.topic_id, partition)
                    if end is not None and self._context.fronts(leader):
                        yield Begun(info.name, topic_id, partition, TermStart(end, epoch), only_if_new=True)

    def _empty(self, info: TopicInfo) -> tuple[int, ...] | None:
        found = (each for each in range(len(info.partitions)) if self.recent_ends.is_empty(info.topic_id, each))
        return tuple(found) or None

    def prepare_again(self, link_name: str, topic: str) -> None:
        """The target's topic is not as it said."""
        preparing = self._preparing.get(link_name)
        if preparing is not None:
            preparing.asked.pop(topic, None)


def predecessors(context: PluginContext, info: TopicInfo) -> tuple[calls.Predecessor, ...]:
    """Which topics one of this cluster's succeeded, as this cluster's control log states it: oldest first."""
    chain = context.control.state.predecessors(info.name, info.id_text)
    return tuple(calls.Predecessor(each.former, each.successor, each.offsets) for each in chain)


def _in_sync_min(configs: Mapping[str, str]) -> int | None:
    value = configs.get(IN_SYNC_MIN)
    return None if value is None else int(value)


def _log_unprepared(times: int, last: tuple[str, str]) -> None:
    link_name, detail = last
    log.warning("target topics not prepared", extra={"link": link_name, "detail": detail, "times": times})
