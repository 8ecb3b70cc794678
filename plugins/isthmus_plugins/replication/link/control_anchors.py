"""Linked clusters keep each other's anchors: how far the control log of each was (``docs/adr/0015-control-topic.md``).

Told as soon as a connection is up, and again while it stands: how far this cluster's log is, and how far the other's
was when it said that last. So a cluster whose control topic is lost learns of it, also where nothing of its own knows.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from isthmus_control.anchors import Anchor, MalformedAnchor
from isthmus_plugins.process import PluginContext
from isthmus_plugins.rarely import RarelyEach
from isthmus_plugins.replication.link import calls
from isthmus_plugins.replication.link.call_codec import Answering
from isthmus_plugins.replication.link.connection import LinkConnection, LinkLost, LinkRejected
from isthmus_plugins.replication.link.features import CONTROL_ANCHORS
from isthmus_plugins.replication.link.part import Part
from isthmus_plugins.replication.link.peers import LinkPeers
from isthmus_plugins.tasks import Tasks

log = logging.getLogger("isthmus_plugins.replication")

INTERVAL_S: Final = 5.0
CALL_TIMEOUT_S: Final = 5.0


class ControlAnchors(Part):
    """Tells peers what this proxy knows, and hands on what they tell."""

    def __init__(self, context: PluginContext, peers: LinkPeers) -> None:
        self._context = context
        self._peers = peers
        self._tasks = Tasks("control-anchors", context.supervision)
        self._told_at: dict[LinkConnection, float] = {}
        self._woken = asyncio.Event()
        self._untold = RarelyEach(_log_untold)
        """By link: its peers may come and go as often as they like, and say what they like."""
        self._odd = RarelyEach(_log_odd)

    def start(self) -> None:
        self._tasks.keep("tell", self._tell_for_ever)

    async def stop(self) -> None:
        await self._tasks.close()

    def wake(self) -> None:
        if any(connection not in self._told_at for connection in self._connections()):
            self._woken.set()

    def connection_lost(self, connection: LinkConnection) -> None:
        self._told_at.pop(connection, None)

    def answers(self) -> Sequence[Answering]:
        return (calls.TellAnchors.by(self._told),)

    async def _tell_for_ever(self) -> None:
        while True:
            self._woken.clear()
            now = self._context.clock.monotonic()
            due = [
                connection
                for connection in self._connections()
                if CONTROL_ANCHORS in connection.peer_features
                and now - self._told_at.get(connection, -INTERVAL_S) >= INTERVAL_S
            ]
            for connection in due:
                self._told_at[connection] = now
            await asyncio.gather(*map(self._tell, due))
            try:
                async with asyncio.timeout(INTERVAL_S):
                    await self._woken.wait()
            except TimeoutError:
                pass

    def _connections(self) -> list[LinkConnection]:
        names = self._context.control.state.links
        return [connection for name in names for connection in self._peers.connections(name)]

    async def _tell(self, connection: LinkConnection) -> None:
        anchors = self._context.control.anchors
        own, heard = anchors.own(), anchors.heard_of(str(connection.peer.get("cluster_id")))
        proof = None if own is None else anchors.proof(own)
        question = calls.TellAnchors(
            None if own is None else own.encode(), None if heard is None else heard.encode(), proof
        )
        try:
            await connection.call(question, CALL_TIMEOUT_S)
        except (LinkRejected, LinkLost, TimeoutError) as error:
            self._untold.one(connection.link_name, (connection.link_name, str(error)))

    async def _told(self, connection: LinkConnection, question: calls.TellAnchors) -> calls.Done:
        anchors = self._context.control.anchors
        cluster_id = str(connection.peer.get("cluster_id"))
        own, heard = self._read(connection, question.own), self._read(connection, question.heard)
        if own is not None and own.cluster_id == cluster_id:
            anchors.hear(own, question.proof)
        if heard is not None:
            anchors.told(heard, f"cluster {cluster_id} over link {connection.link_name}")
        return calls.Done()

    def _read(self, connection: LinkConnection, text: str | None) -> Anchor | None:
        if text is None:
            return None
        try:
            return Anchor.decode(text)
        except MalformedAnchor as error:
            self._odd.one(connection.link_name, (connection.link_name, str(error)))
            return None


def _log_untold(times: int, last: tuple[str, str]) -> None:
    link_name, detail = last
    log.warning("control anchors not told", extra={"link": link_name, "detail": detail, "times": times})


def _log_odd(times: int, last: tuple[str, str]) -> None:
    link_name, detail = last
    log.warning("control anchor not understood", extra={"link": link_name, "detail": detail, "times": times})
