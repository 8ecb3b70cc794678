"""Rings: clusters of which each follows the next one, and the last one the first. Nobody leads what goes round.

A cluster knows whom it follows, and no further. So who is about to follow asks the other cluster whether what it leads
comes from here, which asks the one that it follows itself, and so on. Each of them knows what it calls the topics, so
a ring is one of names: what comes back under another prefix is a copy, and none.

An attach that would close a ring is refused. Two that close it together both find none, and so does one while a cluster
in between cannot be asked: then all that follow find it, as they ask again and again, and say so.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from isthmus_control.model import Link, NamespaceMapping, Role, overlap
from isthmus_plugins.links import OperationError
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.link import calls
from isthmus_plugins.replication.link.calls import NamespaceAt
from isthmus_plugins.replication.link.connection import LinkConnection, LinkLost, LinkRejected
from isthmus_plugins.replication.link.features import RINGS
from isthmus_plugins.replication.link.peers import LinkPeers
from isthmus_plugins.tasks import Tasks

log = logging.getLogger("isthmus_plugins.replication")

LOOK_S: Final = 30.0
"""How often it is asked whether what follows comes from here."""
HOPS_MAX: Final = 8
"""So many clusters are asked, one after the other."""
HOP_S: Final = 0.5
"""Who asks waits so much longer than who is asked, for each cluster that may be asked still."""


class Rings:
    """Finds rings of which this cluster is part."""

    def __init__(self, context: PluginContext, peers: LinkPeers) -> None:
        self._context = context
        self._peers = peers
        self._tasks = Tasks("rings", context.supervision)
        self._found: dict[tuple[str, NamespaceMapping], str] = {}
        """What is wrong with pairs that are attached, by their links."""

    def start(self) -> None:
        self._tasks.keep("look", self._look_for_ever)

    async def stop(self) -> None:
        await self._tasks.close()

    def found(self, link_name: str, mapping: NamespaceMapping) -> str | None:
        """What is wrong with a pair that follows in a ring; None: it is in none, as far as is known."""
        return self._found.get((link_name, mapping))

    async def check(self, link: Link, mapping: NamespaceMapping) -> None:
        """Refuse what would follow itself. Raises OperationError."""
        path = await self._path(link, mapping)
        if path:
            raise OperationError(
                "CONFLICT",
                f"{_described(mapping, path)}: a ring, in which nobody leads. Detach one of its other pairs first",
                409,
            )

    async def _path(self, link: Link, mapping: NamespaceMapping) -> Sequence[NamespaceAt]:
        """The clusters from which what follows over a pair comes, up to this one; none: it does not come from here."""
        if mapping.role is not Role.FOLLOWER or mapping.offsets is not None:
            return ()
        here = NamespaceAt(link.local_cluster_id, mapping.local_prefix)
        return await self._asked(link, calls.ComesFrom(mapping.type, mapping.remote_prefix, here, HOPS_MAX))

    async def _asked(self, link: Link, question: calls.ComesFrom) -> Sequence[NamespaceAt]:
        """The answer of the other cluster of a link, with that one in front; none where nobody answers."""
        knows = [each for each in self._peers.connections(link.name) if RINGS in each.peer_features]
        if not knows:
            return ()
        try:
            answer = await knows[0].call(question, HOP_S * (question.hops + 1))
        except (LinkLost, LinkRejected, TimeoutError) as error:
            log.info("rings not looked for", extra={"link": link.name, "detail": str(error)})
            return ()
        return (NamespaceAt(link.remote_cluster_id, question.prefix), *answer.path) if answer.path else ()

    async def on_comes_from(self, connection: LinkConnection, question: calls.ComesFrom) -> calls.ComesFromAnswer:
        """Whether what is led here comes from some cluster's namespace."""
        for link in self._context.control.state.links.values():
            for mapping in link.pairs(Role.FOLLOWER, question.type):
                prefix = _counterpart(mapping, question.prefix)
                if prefix is None:
                    continue
                if link.remote_cluster_id == question.origin.cluster_id and overlap(prefix, question.origin.prefix):
                    return calls.ComesFromAnswer((NamespaceAt(link.remote_cluster_id, prefix),))
                if question.hops > 1:
                    further = calls.ComesFrom(question.type, prefix, question.origin, question.hops - 1)
                    if path := await self._asked(link, further):
                        return calls.ComesFromAnswer(tuple(path))
        return calls.ComesFromAnswer(())

    async def _look_for_ever(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            found: dict[tuple[str, NamespaceMapping], str] = {}
            for link in self._context.control.state.links.values():
                for mapping in link.mappings:
                    if path := await self._path(link, mapping):
                        found[link.name, mapping] = _described(mapping, path)
            for link_name, mapping in found.keys() - self._found.keys():
                detail = found[link_name, mapping]
                log.warning("namespace follows itself", extra={"link": link_name, "detail": detail})
            self._found = found


def _counterpart(mapping: NamespaceMapping, prefix: str) -> str | None:
    """What the other cluster of a pair calls what is in a namespace here; None: the pair has nothing of it."""
    if not overlap(mapping.local_prefix, prefix):
        return None
    return mapping.remote_prefix + prefix[len(mapping.local_prefix) :]  # the pair's own, if that is the narrower one


def _described(mapping: NamespaceMapping, path: Sequence[NamespaceAt]) -> str:
    follows = ", which follows ".join(f"{each.prefix!r} of cluster {each.cluster_id}" for each in path[:-1])
    return f"the {mapping.local} follows {follows}, which follows this one"
