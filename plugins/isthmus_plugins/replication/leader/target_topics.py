"""Has the target of a link make the topics that it lacks, and learns where it leads their partitions."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from typing import Final, NamedTuple, TypeAlias

from isthmus_control.model import NamespaceMapping
from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused, TopicInfo
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.leader.source_settings import SourceConfigs
from isthmus_plugins.replication.leader.stream import REOPEN_DELAY_S
from isthmus_plugins.replication.link import calls
from isthmus_plugins.replication.link.connection import LinkConnection, LinkLost, LinkRejected
from isthmus_plugins.replication.link.peers import LinkPeers
from isthmus_plugins.replication.logs.topic_settings import copied, is_compacted
from isthmus_plugins.tasks import Tasks

log = logging.getLogger("isthmus_plugins.replication")

PREPARE_INTERVAL_S: Final = 3.0
"""How often all topics are sent to the target although nothing changed here: it may have lost or moved some."""
PREPARE_TIMEOUT_S: Final = 60.0
HoldsFromFirst: TypeAlias = Callable[[str, TopicInfo | None], bool]
"""Whether acks of some partitions of a topic, or (None) of topics to come, wait for a link from their first record on,
and are not known to be level yet."""
NOT_READY: Final = calls.PreparedTopic(False)
"""Of a topic that the target says nothing of."""


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
    """What is known of the target's topics of one link, and the call that asks."""

    __slots__ = ("configured", "due_at", "ends", "fingerprint", "running")

    def __init__(self) -> None:
        self.running = False
        self.ends: dict[str, tuple[int, tuple[int, ...]]] = {}
        """By compacted topic that the target does not compact yet: since when, and the ends of its partitions then.

        Beyond them all records have keys. Whoever starts again reads them again: they may be any later ones, too.
        """
        self.fingerprint: object = None
        self.due_at = 0.0
        self.configured: dict[str, Mapping[str, str]] = {}
        """By topic: the settings that the target has taken over from this proxy."""


class TargetTopics:
    """Of all links: what the follower ends said last of the topics that this cluster leads."""

    def __init__(
        self,
        context: PluginContext,
        peers: LinkPeers,
        configs: SourceConfigs,
        tasks: Tasks,
        wake: Callable[[], None],
        holds_from_first: HoldsFromFirst,
    ) -> None:
        """``wake`` is called when a target has answered."""
        self._context = context
        self._clock = context.clock
        self._peers = peers
        self._configs = configs
        self._tasks = tasks
        self._wake = wake
        self._holds_from_first = holds_from_first
        self._preparing: dict[str, _Preparing] = {}
        self.prepared: dict[tuple[str, str], PreparedTopic] = {}
        """By link and topic."""
        self.sends: Set[str] = frozenset()
        """Topics whose settings are this proxy's to send."""

    def prepare(
        self, link_name: str, wanted: Mapping[str, tuple[NamespaceMapping, TopicInfo]], every: list[str]
    ) -> None:
        """Have the target make the topics that it lacks, and learn where its partitions are led. Does not wait.

        ``every``: all led topics of the link, also those whose partitions other proxies push.
        """
        connections = self._peers.connections(link_name)
        preparing = self._preparing.setdefault(link_name, _Preparing())
        if not connections or preparing.running:
            return
        fingerprint = (
            connections[0],
            every,
            {(name, mapping, info.topic_id, len(info.partitions)) for name, (mapping, info) in wanted.items()},
            [name for name, (_, info) in wanted.items() if self._unconfigured(preparing, info) is not None],
            [name for name, (_, info) in wanted.items() if self._holds_from_first(link_name, info)],
            self._holds_from_first(link_name, None),
        )
        now = self._clock.monotonic()
        if fingerprint == preparing.fingerprint and now < preparing.due_at:
            return
        preparing.fingerprint = fingerprint
        preparing.running = True
        self._tasks.start(
            f"prepare-{link_name}", self._prepare_topics(link_name, preparing, connections[0], wanted, every)
        )

    async def _prepare_topics(
        self,
        link_name: str,
        preparing: _Preparing,
        connection: LinkConnection,
        wanted: Mapping[str, tuple[NamespaceMapping, TopicInfo]],
        every: list[str],
    ) -> None:
        ready = False
        try:
            requests = [await self._request(link_name, preparing, mapping, info) for mapping, info in wanted.values()]
            requests = await self._with_ends(link_name, preparing, wanted, requests)
            truncating = self._context.control.state.truncations
            question = calls.PrepareTopics(
                tuple(request for request in requests if request.topic not in truncating),
                tuple(every),
                tuple(name for name in every if name in truncating),
                self._holds_from_first(link_name, None) or None,
                None if (anchor := self._context.control.anchors.own()) is None else anchor.log,
            )
            answer = await connection.call(question, PREPARE_TIMEOUT_S)
            for name in wanted:
                said = answer.topics.get(name, NOT_READY)
                made = said.made or calls.ReadyTopic("")
                self.prepared[link_name, name] = PreparedTopic(
                    made.remote_topic, said.ready, said.code, said.message, said.leaders or (), made.filling
                )
            links, led = self._context.control.state.links, frozenset(every)
            for link, topic in list(self.prepared):
                if link not in links or (link == link_name and topic not in led):
                    del self.prepared[link, topic]
            configured = {name: configs for name, configs in preparing.configured.items() if name in wanted}
            for request in requests:
                if request.configs is not None and self.prepared[link_name, request.topic].code is None:
                    configured[request.topic] = request.configs
            preparing.configured = configured
            ready = all(self.prepared[link_name, name].ready for name in wanted)
        except (LinkRejected, LinkLost, TimeoutError, BrokerUnavailable, KafkaRefused) as error:
            log.warning("target topics not prepared", extra={"link": link_name, "detail": str(error)})
        finally:
            preparing.running = False
            preparing.due_at = self._clock.monotonic() + (PREPARE_INTERVAL_S if ready else REOPEN_DELAY_S)
            self._wake()

    async def _with_ends(
        self,
        link_name: str,
        preparing: _Preparing,
        wanted: Mapping[str, tuple[NamespaceMapping, TopicInfo]],
        requests: Sequence[calls.WantedTopic],
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
        before, preparing.ends = preparing.ends, {}
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

    def _unconfigured(self, preparing: _Preparing, info: TopicInfo) -> Mapping[str, str] | None:
        """The settings of a topic, if the target has not taken them over yet."""
        configs = self._configs.of(info) if info.name in self.sends else None
        return None if configs is preparing.configured.get(info.name) else configs

    async def _request(
        self, link_name: str, preparing: _Preparing, mapping: NamespaceMapping, info: TopicInfo
    ) -> calls.WantedTopic:
        """What is sent to the target of one topic; with its settings where they changed, or it may have to make it."""
        prepared = self.prepared.get((link_name, info.name))
        configs = self._unconfigured(preparing, info)
        if configs is None and (prepared is None or not prepared.ready):
            configs = self._configs.of(info)
            if configs is None:
                _, effective = await self._context.cluster.effective_configs([info.name])
                configs = copied((effective or {}).get(info.name, {}))
        read = self._configs.of(info) or configs or {}
        in_sync_min = read.get("min.insync.replicas")
        return calls.WantedTopic(
            info.name,
            str(uuid.UUID(bytes=info.topic_id)),
            mapping.remote_name(info.name),
            len(info.partitions),
            info.replication_factor,
            predecessors(self._context, info) or None,
            configs,
            from_first=self._holds_from_first(link_name, info) or None,
            in_sync_min=None if in_sync_min is None else int(in_sync_min),
        )

    def prepare_again(self, link_name: str) -> None:
        """The target's topics are not as it said."""
        preparing = self._preparing.get(link_name)
        if preparing is not None:
            preparing.due_at = 0.0


def predecessors(context: PluginContext, info: TopicInfo) -> tuple[calls.Predecessor, ...]:
    """Which topics one of this cluster's succeeded, as this cluster's control log states it: oldest first."""
    chain = context.control.state.predecessors(info.name, str(uuid.UUID(bytes=info.topic_id)))
    return tuple(calls.Predecessor(each.former, each.successor, each.offsets) for each in chain)
