"""The settings that both clusters of a link have: each sends its own, and the later write counts on both sides.

That is the mode and the configuration. Addresses are not sent: where one cluster reaches the other is its own to know.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from isthmus_control.apply import apply
from isthmus_control.clock import ZERO, Register
from isthmus_control.commands import Command, MergeLink
from isthmus_control.model import Link, LinkMode, LinkSettings
from isthmus_control.outcome import Outcome, Rejected
from isthmus_plugins.cluster import BrokerUnavailable
from isthmus_plugins.process import PluginContext
from isthmus_plugins.rarely import rare_lines
from isthmus_plugins.replication.link import calls, reasons
from isthmus_plugins.replication.link.call_codec import Answering
from isthmus_plugins.replication.link.connection import LinkConnection, LinkLost, LinkRejected
from isthmus_plugins.replication.link.part import Part
from isthmus_plugins.tasks import Tasks

log = logging.getLogger("isthmus_plugins.replication")

RETRY_S: Final = 1.0


class SharedSettings(Part):
    """``connections``: those of a link, the same first one until it goes."""

    def __init__(self, context: PluginContext, connections: Callable[[str], list[LinkConnection]]) -> None:
        self._context = context
        self._connections = connections
        self._tasks = Tasks("shared-settings", context.supervision)
        self._work = asyncio.Event()
        self._said_refused = rare_lines(log, "link settings refused")
        self._theirs: dict[str, tuple[LinkConnection, LinkSettings]] = {}
        """By link: what the other cluster is known to have, and over which connection it said so."""
        self._agreed: dict[str, Register[LinkMode]] = {}
        """By link id: the last mode that both control logs were seen to have."""
        self._under_way: set[str] = set()
        self.refused: dict[str, str] = {}
        """By link: why a cluster does not take the other one's settings."""

    def start(self) -> None:
        self._tasks.keep("share", self._share_for_ever)

    async def stop(self) -> None:
        await self._tasks.close()

    def answers(self) -> Sequence[Answering]:
        return calls.MergeSettings.by(self.on_merge_settings), calls.TryMergeSettings.by(self.on_try_merge_settings)

    def wake(self) -> None:
        """A connection or a setting may have come."""
        self._work.set()

    def agreed(self, link_name: str) -> bool:
        """Whether the other cluster's control log has the mode that this one's has now."""
        link = self._context.control.state.links.get(link_name)
        return link is not None and self._agreed.get(link.link_id) == link.settings.mode

    async def check(self, link: Link, wanted: LinkSettings) -> None:
        """Ask the other cluster whether it would take these settings. Raises LinkRejected, LinkLost, TimeoutError."""
        connections = self._connections(link.name)
        if not connections:
            raise LinkLost(f"link {link.name!r} is not connected")
        await connections[0].call(calls.TryMergeSettings(_shared(wanted)))

    async def on_merge_settings(
        self, connection: LinkConnection, question: calls.MergeSettings
    ) -> calls.MergeSettingsAnswer:
        """Merge what the other cluster has; the answer is what this one has then. Raises LinkRejected."""
        await self._take(connection, question.settings)
        return calls.MergeSettingsAnswer(_shared(self._link(connection.link_name).settings))

    async def on_try_merge_settings(self, connection: LinkConnection, question: calls.TryMergeSettings) -> calls.Done:
        """What the other cluster would have. Raises LinkRejected."""
        link = self._link(connection.link_name)
        self._check(link.name, _would_be(self._context, MergeLink(link.name, link.link_id, question.settings)))
        return calls.Done()

    async def _share_for_ever(self) -> None:
        while True:
            self._work.clear()
            due = self._due()
            for link in due:
                if link.name not in self._under_way:
                    self._under_way.add(link.name)
                    self._tasks.start(f"share-{link.name}", self._share(link.name))
            try:
                async with asyncio.timeout(RETRY_S if due else None):
                    await self._work.wait()
            except TimeoutError:
                pass

    def _due(self) -> list[Link]:
        links = self._context.control.state.links
        self._theirs = {name: known for name, known in self._theirs.items() if name in links}
        due = []
        for link in links.values():
            connections = self._connections(link.name) if _was_set(link.settings) else []
            if connections and self._theirs.get(link.name) != (connections[0], _shared(link.settings)):
                due.append(link)
        return due

    async def _share(self, link_name: str) -> None:
        """Send what is here, and take what comes back."""
        try:
            link, connections = self._context.control.state.links.get(link_name), self._connections(link_name)
            if link is None or not connections:
                return
            answer = await connections[0].call(calls.MergeSettings(_shared(link.settings)))
            await self._take(connections[0], answer.settings)
            self.refused.pop(link_name, None)
        except LinkRejected as error:
            if self.refused.get(link_name) != error.message:
                self._said_refused.one(link_name, {"link": link_name, "detail": error.message})
            self.refused[link_name] = error.message
        except (LinkLost, TimeoutError):
            pass  # then again, over the connection that there is
        finally:
            self._under_way.discard(link_name)

    async def _take(self, connection: LinkConnection, theirs: LinkSettings) -> None:
        """Merge what the other cluster has. Raises LinkRejected."""
        name = connection.link_name
        link = self._link(name)
        if link.settings.merge(theirs) != link.settings:
            merge = MergeLink(name, link.link_id, theirs)
            self._check(name, _would_be(self._context, merge))  # what is refused again and again is not recorded
            try:
                self._check(name, await self._context.control.append(merge))
            except BrokerUnavailable as error:
                raise LinkRejected(reasons.BROKER_UNAVAILABLE, str(error)) from error
        link = self._link(name)
        self._theirs[name] = connection, theirs
        if theirs.mode == link.settings.mode:
            self._agreed[link.link_id] = theirs.mode

    def _link(self, name: str) -> Link:
        link = self._context.control.state.links.get(name)
        if link is None:
            raise LinkRejected("LINK_NOT_FOUND", f"there is no link {name!r}: it was deleted just now")
        return link

    def _check(self, link_name: str, outcome: Outcome) -> None:
        if isinstance(outcome, Rejected):
            raise LinkRejected(
                outcome.code.told,
                f"cluster {self._context.cluster_id} does not take the settings of link {link_name!r}: "
                f"{outcome.message}",
            )


def _was_set(settings: LinkSettings) -> bool:
    """Whether there is anything to send; else all is as it was when the link was created."""
    return settings.mode.written != ZERO or bool(settings.config)


def _shared(settings: LinkSettings) -> LinkSettings:
    return replace(settings, addresses={})


def _would_be(context: PluginContext, body: MergeLink) -> Outcome:
    state = context.control.state
    command = Command(
        str(uuid.uuid4()), int(context.clock.time() * 1000), context.proxy_name, state.applied_offset, body
    )
    return apply(state, state.applied_offset + 1, command)[1]
