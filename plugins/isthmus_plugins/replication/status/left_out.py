"""What links leave out of the namespaces that they have attached, as both sides show it.

The source knows what it has. The follower's end asks it now and then, and keeps the answer for a failover.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Final

from isthmus_control.control_state import ControlState
from isthmus_control.grants import missing, needed, not_granted
from isthmus_control.left_out import LeftOut, left_out
from isthmus_control.levels import CONSENT
from isthmus_control.model import Link, NamespaceMapping, ResourceType, Role
from isthmus_control.states import ReasonCode
from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused
from isthmus_plugins.links import LeftOutName
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.link import calls
from isthmus_plugins.replication.link.call_codec import Answering
from isthmus_plugins.replication.link.connection import LinkConnection, LinkLost, LinkRejected
from isthmus_plugins.replication.link.features import LEFT_OUT_NAMES
from isthmus_plugins.replication.link.part import Part
from isthmus_plugins.replication.link.peers import LinkPeers
from isthmus_plugins.tasks import Tasks

log = logging.getLogger("isthmus_plugins.replication")

LOOK_S: Final = 10.0
"""How often topics and groups are looked at; it is shown, and nothing depends on it."""
NAMES_MAX: Final = 200
"""So many are named of a link."""
_NOTHING: Final = calls.LeftOutAnswer()


class LeftOutNames(Part):
    """Knows of each link what it leaves out, of this cluster and of the other one."""

    def __init__(self, context: PluginContext, peers: LinkPeers) -> None:
        self._context = context
        self._peers = peers
        self._tasks = Tasks("left-out", context.supervision)
        self._changed = asyncio.Event()
        self._links: Mapping[str, Link] = {}
        self._here: dict[str, calls.LeftOutAnswer] = {}
        self._there: dict[str, calls.LeftOutAnswer] = {}

    def start(self) -> None:
        self._tasks.keep("look", self._look_for_ever)

    async def stop(self) -> None:
        await self._tasks.close()

    def control_changed(self, state: ControlState) -> None:
        if state.links != self._links:
            self._links = state.links
            for known in (self._here, self._there):
                for name in known.keys() - state.links.keys():
                    del known[name]
            self._changed.set()

    def answers(self) -> Sequence[Answering]:
        return (calls.LeftOut.by(self.on_left_out),)

    # ---- looking ----

    async def _look_for_ever(self) -> None:
        while True:
            self._changed.clear()
            for link in list(self._links.values()):
                try:
                    await self._look(link)
                except (LinkRejected, LinkLost, TimeoutError, BrokerUnavailable, KafkaRefused) as error:
                    log.debug("what is left out is not known", extra={"link": link.name, "detail": str(error)})
            try:
                async with asyncio.timeout(LOOK_S):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def _look(self, link: Link) -> None:
        self._here[link.name] = await self._of_this_cluster(link.pairs(Role.LEADER))
        if link.pairs(Role.FOLLOWER):
            connection = next(iter(self._peers.connections(link.name)), None)
            if connection is not None and LEFT_OUT_NAMES in connection.peer_features:
                self._there[link.name] = await connection.call(calls.LeftOut())
        else:
            self._there.pop(link.name, None)

    async def _of_this_cluster(self, mappings: Sequence[NamespaceMapping]) -> calls.LeftOutAnswer:
        """Raises BrokerUnavailable, KafkaRefused."""
        kinds = {mapping.type for mapping in mappings}
        found: list[LeftOut] = []
        if ResourceType.TOPIC in kinds:
            topics = await self._context.cluster.topics()
            found += left_out(mappings, ResourceType.TOPIC, (t.name for t in topics.values() if not t.internal))
        if ResourceType.CONSUMER_GROUP in kinds:
            found += left_out(mappings, ResourceType.CONSUMER_GROUP, await self._context.cluster.groups())
        names = tuple(calls.LeftOutName(*each) for each in found[:NAMES_MAX])
        return calls.LeftOutAnswer(names, len(found) - len(names))

    async def on_left_out(self, connection: LinkConnection, question: calls.LeftOut) -> calls.LeftOutAnswer:
        """The follower's end asks."""
        link = self._context.control.state.links.get(connection.link_name)
        mappings = link.pairs(Role.LEADER) if link is not None else ()
        if question.type is not None and question.local is not None and question.remote is not None:
            if link is not None and self._context.control.state.level >= CONSENT:
                lacking = missing(link, needed(question.type, question.local, Role.LEADER))
                if lacking:
                    raise LinkRejected(ReasonCode.NOT_GRANTED, not_granted(link.name, lacking))
            mappings = (*mappings, _led(question.type, question.local, question.remote))
        try:
            return await self._of_this_cluster(mappings)
        except (BrokerUnavailable, KafkaRefused) as error:
            raise LinkRejected("READ_FAILED", str(error)) from error

    # ---- what is shown ----

    async def attached(self, link: Link, type_: ResourceType, local: str, remote: str, role: Role) -> list[LeftOutName]:
        """What is left out of a pair of namespaces once it is attached. Raises what calls and brokers do.

        Nothing where the other cluster's proxies are older, and do not say.
        """
        if role is Role.LEADER:
            return _shown(await self._of_this_cluster((*link.pairs(role), _led(type_, local, remote))), type_, local)
        for connection in self._peers.connections(link.name):
            if LEFT_OUT_NAMES in connection.peer_features:
                return _shown(await connection.call(calls.LeftOut(type_, remote, local)), type_, remote)
        return []

    def of_follower(self, link_name: str, type_: ResourceType, remote: str) -> list[LeftOutName]:
        """What the source's namespace held that does not follow, as it said last."""
        return _shown(self._there.get(link_name, _NOTHING), type_, remote)

    def of(self, link_name: str) -> list[LeftOutName]:
        """All that a link leaves out, of both clusters, that is named."""
        return [name for known in (self._here, self._there) for name in _shown(known.get(link_name, _NOTHING))]

    def more(self, link_name: str) -> int:
        """So many more there are."""
        return sum(known.get(link_name, _NOTHING).more for known in (self._here, self._there))


def _led(type_: ResourceType, local: str, remote: str) -> NamespaceMapping:
    return NamespaceMapping(type_, local, remote, Role.LEADER, 0, 0)


def _shown(answer: calls.LeftOutAnswer, type_: ResourceType | None = None, prefix: str = "") -> list[LeftOutName]:
    """Of one namespace of the source, or of all."""
    return [
        LeftOutName.model_validate({"type": each.type.value, "name": each.name, "reason": each.reason})
        for each in answer.names
        if type_ is None or (each.type is type_ and each.name.startswith(prefix))
    ]
