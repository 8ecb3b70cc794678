"""Sends decisions to the other side of links, over each connection that has to have them before its markers.

A decision goes over the connections on which this proxy pushes a partition of it, and where it pushes none and fronts
the coordinator over one of them. What is sent over a connection after a decision comes behind it.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

from isthmus_control.model import Link
from isthmus_plugins.cluster import TopicPartition
from isthmus_plugins.process import PluginContext
from isthmus_plugins.rarely import rare_lines
from isthmus_plugins.replication.link import calls
from isthmus_plugins.replication.link.connection import LinkConnection, LinkLost, LinkRejected
from isthmus_plugins.replication.partitions import LinkPartition
from isthmus_plugins.replication.sync.pushed import PushedPartitions
from isthmus_plugins.replication.transactions.abort_coverage import AbortCoverage, Connections
from isthmus_plugins.replication.transactions.decision import Decision, remote_topic, said
from isthmus_plugins.replication.transactions.groups_of_decisions import GroupsOfDecisions
from isthmus_plugins.replication.transactions.marker_gate import MarkerGate
from isthmus_plugins.tasks import Tasks

log = logging.getLogger("isthmus_plugins.replication")

CALL_TIMEOUT_S: Final = 10.0
CALL_MAX: Final = 500
"""How many decisions go in one call: each is answered in time, and none keeps the loop from other work."""


class _Without(NamedTuple):
    """What a decision was sent without."""

    ends: frozenset[TopicPartition]
    """Of these partitions, which are not known yet."""
    places: frozenset[TopicPartition]
    """These partitions."""


class DecisionSender:
    """Which connections a decision has to go over, and what is on its way."""

    def __init__(
        self,
        context: PluginContext,
        peers: Connections,
        pushed: PushedPartitions,
        groups_of: GroupsOfDecisions,
        aborts: AbortCoverage,
        markers: MarkerGate,
        coordinator: Callable[[int], int],
        on_stored: Callable[[Sequence[Decision]], None],
        on_lost: Callable[[], None],
    ) -> None:
        """``coordinator``: the broker that leads a partition of the transaction log. ``on_stored``: called when the
        other side of a link has these. ``on_lost``: called when some have to be sent again."""
        self._context = context
        self._peers = peers
        self._pushed = pushed
        self._groups_of = groups_of
        self._aborts = aborts
        self._markers = markers
        self._coordinator = coordinator
        self._on_stored = on_stored
        self._on_lost = on_lost
        self._tasks = Tasks("decision-sender", context.supervision)
        self._not_stored = rare_lines(log, "decisions not stored")
        self.held_back = False
        """Whether a decision waits for what is aborted before it, as of the last time that all were to be sent."""

    async def stop(self) -> None:
        await self._tasks.close()

    def is_ours(self, decision: Decision) -> bool:
        """Whether this proxy sends a decision."""
        return self._coordinates(decision) or any(
            self._connections_for(decision, link_name) for link_name in decision.links
        )

    def send_all(self, decisions: Sequence[Decision]) -> None:
        """The same as :meth:`send`, of all that have to be sent."""
        self.held_back = False
        self.send(decisions)

    def send(self, decisions: Sequence[Decision]) -> None:
        """Send decisions over every connection that is to have them and was not sent them, many in one call."""
        unsent: dict[LinkConnection, list[Decision]] = {}
        for decision in decisions:
            for link_name in self._groups_of.missing(decision):
                for connection in self._unsent_on(decision, link_name):
                    unsent.setdefault(connection, []).append(decision)
        for connection, those in unsent.items():
            link = self._context.control.state.links.get(connection.link_name)
            for start in range(0, len(those), CALL_MAX):
                if link is not None and not connection.lost:
                    self._call(connection, link, those[start : start + CALL_MAX])

    def _unsent_on(self, decision: Decision, link_name: str) -> list[LinkConnection]:
        """Over which connections of a link a decision is to be sent now."""
        was_withheld = link_name in decision.withheld
        decision.held_back.pop(link_name, None)
        decision.withheld.discard(link_name)
        connections = self._connections_for(decision, link_name) if self._carries(link_name, decision) else []
        left_out = self._aborts.left_out(decision, link_name) if connections else frozenset()
        unsent = [connection for connection in connections if decision.is_to_go(connection, left_out)]
        held = partial(self._markers.is_held_for, decision)
        if not unsent or not (missing := self._aborts.missing(decision, link_name, held)):
            return unsent
        if decision.again and any(self._aborts.is_out(LinkPartition(link_name, *place)) for place in missing):
            decision.withheld.add(link_name)
            if not was_withheld:
                self._markers.go_on()
        else:
            decision.held_back[link_name] = missing
            self.held_back = True
        return []

    def _carries(self, link_name: str, decision: Decision) -> bool:
        """Whether a link leads all of a decision's places that go over it: an answer says nothing of others."""
        link = self._context.control.state.links.get(link_name)
        places = [
            place
            for place in decision.places
            if LinkPartition(link_name, *place) in self._groups_of.sent_to(decision, place)
        ]
        return link is not None and all(remote_topic(link, topic) is not None for topic, _ in places)

    def _connections_for(self, decision: Decision, link_name: str) -> list[LinkConnection]:
        pushed = (self._pushed.get(LinkPartition(link_name, *place)) for place in decision.places)
        pushing = {place.connection for place in pushed if place is not None}
        if not pushing and (self._coordinates(decision) or any(map(self._pushed.waits, decision.places))):
            return self._peers.connections(link_name)[:1]
        return list(pushing)

    def _coordinates(self, decision: Decision) -> bool:
        return self._context.fronts(self._coordinator(decision.at.partition))

    def _call(self, connection: LinkConnection, link: Link, decisions: Sequence[Decision]) -> None:
        """Put decisions on the way: what is sent over the connection after this comes behind them."""
        sent, without = [], dict[Decision, _Without]()
        for decision in decisions:
            again = decision.again or not self._markers.are_level(decision.places)
            each = without[decision] = _Without(frozenset(decision.unread), self._aborts.left_out(decision, link.name))
            sent.append(said(link, decision, again, each.places, self._markers.earlier))
        answer = connection.begin_call(calls.Decide(tuple(sent)))(CALL_TIMEOUT_S)
        for decision, each in without.items():
            decision.sent_on[connection] = each.ends | each.places
        self._markers.go_on()
        self._tasks.start("decide", self._answered(connection, link, without, answer))

    async def _answered(
        self,
        connection: LinkConnection,
        link: Link,
        sent: Mapping[Decision, _Without],
        answer: Awaitable[calls.DecideAnswer],
    ) -> None:
        try:
            unfollowed = frozenset((await answer).unfollowed or ())
        except (LinkRejected, LinkLost, TimeoutError) as error:
            self._not_stored.one(link.name, {"link": link.name, "detail": str(error)})
            # Markers wait there for what came over this connection: over another one they do not.
            connection.close(f"decisions not stored: {error}")
            for decision in sent:
                decision.sent_on.pop(connection, None)
            self._on_lost()
            return
        if unfollowed:
            why = f"{', '.join(sorted(unfollowed))}: not followed over this link"
            self._not_stored.one(link.name, {"link": link.name, "detail": why})
        for decision, without in sent.items():
            # What follows no more has none: whoever waits for that waits until it is not In-Sync.
            ended = {place for place in decision.places if remote_topic(link, place[0]) in unfollowed}
            decision.was_stored(connection.link_name, without.ends | ended, without.places)
        self._on_stored(list(sent))
