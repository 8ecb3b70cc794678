"""In which groups the transactions of decisions have committed offsets, and who needs the decisions therefore.

A decision lists a partition of the offsets topic and not the groups. Those of transactions that run while this process
does are read as they come (``groups_as_read``), those of earlier ones when a decision needs them (``groups_in_log``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Final

from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused, TopicPartition
from isthmus_plugins.links import OperationError
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.partitions import LinkPartition
from isthmus_plugins.replication.sync.links import SynchronousLinks
from isthmus_plugins.replication.sync.requirements import Requirements
from isthmus_plugins.replication.transactions.decision import Decision
from isthmus_plugins.replication.transactions.groups_as_read import ASKED_WITHIN_S, NOT_KNOWN, GroupsAsRead
from isthmus_plugins.replication.transactions.groups_in_log import PastTransaction, read_groups_in_log
from isthmus_plugins.tasks import Tasks
from isthmus_protocol.offsets_log import OFFSETS_TOPIC

log = logging.getLogger("isthmus_plugins.replication")

RETRY_S: Final = 1.0


class GroupsOfDecisions:
    """The groups of decisions that may be needed because of them."""

    def __init__(
        self,
        context: PluginContext,
        links: SynchronousLinks,
        requirements: Requirements,
        pending: Callable[[], Iterable[Decision]],
        on_found: Callable[[list[Decision]], None],
    ) -> None:
        """``pending``: all decisions that are not done with. ``on_found``: called when it is known of some, or that it
        will not be."""
        self._context = context
        self._clock = context.clock
        self._links = links
        self._requirements = requirements
        self._pending = pending
        self._on_found = on_found
        self._seen = GroupsAsRead(context, self._look)
        self._past: set[Decision] = set()
        """Those whose transactions are being read from the log as it was."""
        self._looks_back = False
        self._tasks = Tasks("decision-groups", context.supervision)

    def start(self) -> None:
        self._seen.start()

    async def stop(self) -> None:
        await self._seen.stop()
        await self._tasks.close()

    def follow(self, active: bool) -> None:
        """Whether any groups are led over a synchronous link."""
        self._seen.follow(active)
        if not active:
            self._past.clear()

    # ---- who needs a decision ----

    def sent_to(self, decision: Decision, place: TopicPartition) -> set[LinkPartition]:
        """Over which links a decision goes that lists a partition, as far as it is known what it is about."""
        return self._requirements.sent_to(place, decision.groups.get(place))

    def missing(self, decision: Decision) -> set[str]:
        """Links that are to have a decision and do not."""
        over = (key for place in decision.places for key in self.sent_to(decision, place))
        return {key.link for key in over if key.link in decision.links and not decision.is_confirmed(key)}

    def may_be_needed(self, decision: Decision) -> bool:
        """Whether a link that is not In-Sync, and hence gets no decision without a reason, may need this one."""
        unknown = decision.looks_for_groups or decision.groups_unknown
        return unknown and any(map(self.may_lead, decision.places))

    def may_lead(self, place: TopicPartition) -> bool:
        """Whether a partition of the offsets topic is Out-Of-Sync over a link, which may lead any of its groups."""
        return place[0] == OFFSETS_TOPIC and len(self._links.records(place)) > len(self._links.holding(place))

    # ---- what is known ----

    def expect(self) -> None:
        """A decision has come that will be looked for."""
        self._seen.read_on()

    def look_for(self, decision: Decision) -> bool:
        """See in which groups a transaction has committed offsets, when the ends of its partitions are known; whether
        that is known now."""
        if not decision.looks_for_groups or any(topic == OFFSETS_TOPIC for topic, _ in decision.unread):
            return False
        offsets = {place: end for place, end in decision.ends.items() if place[0] == OFFSETS_TOPIC}
        if decision.again or self._clock.monotonic() > decision.seen_at + ASKED_WITHIN_S:
            self._look_back_for(decision)
            return False
        if not all(self._seen.has_read(place[1], end) for place, end in offsets.items()):
            self._seen.read_on()
            return False
        found = {place: self._seen.groups_of(place[1], decision.producer) for place in offsets}
        unseen = [place for place, groups in found.items() if not groups]
        if any(self._seen.may_have_missed(place[1], decision.seen_at) for place in unseen):
            self._look_back_for(decision)
            return False
        self._resolve(decision, found, unknown=False)  # what was not seen has committed nothing there
        return True

    def let_go(self, decision: Decision) -> None:
        """Nobody waits for an ack of it any more."""
        if decision.looks_for_groups:
            self._resolve(decision, {}, unknown=False)
        decision.groups_unknown = False

    def _resolve(
        self, decision: Decision, found: Mapping[TopicPartition, AbstractSet[str | None]], unknown: bool
    ) -> None:
        """No more will be known of which groups a decision is about. ``unknown``: it would have to be."""
        for place, groups in found.items():
            readable = frozenset(group for group in groups if group is not None)
            if readable and len(readable) == len(groups):
                decision.groups[place] = readable
        decision.looks_for_groups = False
        decision.groups_unknown = unknown or any(NOT_KNOWN in groups for groups in found.values())
        for place in decision.places:
            if place[0] == OFFSETS_TOPIC:
                keys = {LinkPartition(link_name, *place) for link_name in decision.links}
                decision.free |= keys - self.sent_to(decision, place)

    def _look(self) -> None:
        """More of the offsets topic was read."""
        found = [decision for decision in self._pending() if self.look_for(decision)]
        if found:
            self._on_found(found)

    # ---- earlier transactions ----

    def _look_back_for(self, decision: Decision) -> None:
        self._past.add(decision)
        if not self._looks_back:
            self._looks_back = True
            self._tasks.start("look-back", self._look_back())

    async def _look_back(self) -> None:
        try:
            while self._past:
                asked = list(self._past)
                resolved = await self._read(asked)
                self._past.difference_update([decision for decision in asked if not decision.looks_for_groups])
                if resolved:
                    self._on_found(resolved)
                if not self._past.isdisjoint(asked):
                    await asyncio.sleep(RETRY_S)
        finally:
            self._looks_back = False

    async def _read(self, decisions: Sequence[Decision]) -> list[Decision]:
        """Read for all at once; those of which all is read now."""
        concerned: dict[TopicPartition, list[Decision]] = {}
        for decision in decisions:
            for place in decision.ends:
                if place[0] == OFFSETS_TOPIC:
                    concerned.setdefault(place, []).append(decision)
        found: dict[Decision, dict[TopicPartition, set[str | None]]] = {decision: {} for decision in decisions}
        unread: set[Decision] = set()
        for place, those in concerned.items():
            asked = [PastTransaction(each.producer, each.started_ms, each.ends[place]) for each in those]
            try:
                groups = await read_groups_in_log(self._context, place[1], asked)
                for decision in those:
                    found[decision][place] = groups[decision.producer]
            except (BrokerUnavailable, KafkaRefused, OperationError) as error:
                log.warning("offsets topic not read", extra={"partition": place[1], "detail": str(error)})
                unread.update(those)
        resolved = [decision for decision in decisions if decision.looks_for_groups and decision not in unread]
        for decision in resolved:
            self._resolve(decision, found[decision], unknown=not all(found[decision].values()))
        return resolved
