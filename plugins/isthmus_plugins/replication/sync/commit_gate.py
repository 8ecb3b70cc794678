"""Answers to commits of offsets that wait until the other side's coordinators have what they ack.

Where a commit stands in the offsets topic, the coordinator does not say: by then the end of the log is enough. It is
asked for once the commit has been pushed to the other side, whose answer takes longer. Answers wait :data:`WAIT_S` at
most, since the group's heartbeats wait behind them, and are COORDINATOR_LOAD_IN_PROGRESS then: clients commit again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Final, Protocol

from isthmus_control.model import NamespaceMapping, ResourceType
from isthmus_plugins.api import Gate, Hold, Replace, Request, RequestHook, Verdict, passed_on
from isthmus_plugins.aside import answered_as_asked, answered_on_loop, on_loop
from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused, TopicPartition
from isthmus_plugins.held_answers import HeldAnswers, Wait
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.partitions import GroupPlaces, LinkPartition
from isthmus_plugins.replication.sync.expiring_leases import LEASE_MARGIN_S, LEASE_S
from isthmus_plugins.replication.sync.lease_grants import granted_no_more
from isthmus_plugins.replication.sync.quorums import GroupScope
from isthmus_plugins.tasks import Tasks
from isthmus_protocol import peeks
from isthmus_protocol.error_answers import Cause, error_answer
from isthmus_protocol.messages import decode_request
from isthmus_protocol.offsets_log import OFFSETS_TOPIC, partition_of
from isthmus_protocol.refusals import refuse_all
from isthmus_protocol.schema import ApiKey

log = logging.getLogger("isthmus_plugins.replication")

WAIT_S: Final = 3.0
STEP_S: Final = 0.1
"""How exactly it is kept, and how soon a log's end is asked for again that was not answered."""
PUSH_S: Final = 0.002
"""So long what was committed may take to leave for the other side; it may be another proxy's to push."""
COMMITS: Final = (ApiKey.OFFSET_COMMIT, ApiKey.TXN_OFFSET_COMMIT)
"""Those of transactions wait while the partition is Out-Of-Sync, too."""
_NOT_CONFIRMED: Final = b""
"""Says that an answer is to be made of a large request, in the thread."""
SCOPES_MAX: Final = 10_000
"""Groups whose scopes are remembered."""


class GroupNeeds(Protocol):
    """What an ack to groups needs: the leader end of synchronous links."""

    def confirmed_end(
        self, place: TopicPartition, epoch: int, transactional: bool, scope: GroupScope | None = None
    ) -> int | None: ...

    def leader_epoch(self, place: TopicPartition) -> int: ...

    def has_led(self, place: TopicPartition, broker_id: int, since: float) -> bool: ...


class _OfScope:
    """What an ack to the groups of one scope needs."""

    def __init__(self, needs: GroupNeeds, scope: GroupScope) -> None:
        self._needs = needs
        self._scope = scope

    def confirmed_end(self, place: TopicPartition, epoch: int, transactional: bool) -> int | None:
        return self._needs.confirmed_end(place, epoch, transactional, self._scope)

    def leader_epoch(self, place: TopicPartition) -> int:
        return self._needs.leader_epoch(place)

    def has_led(self, place: TopicPartition, broker_id: int, since: float) -> bool:
        return self._needs.has_led(place, broker_id, since)


class CommitGate:
    """All commits of this proxy's clients that wait for synchronous links."""

    def __init__(
        self, context: PluginContext, needs: GroupNeeds, groups: GroupPlaces, clock: Callable[[], float]
    ) -> None:
        self._context = context
        self._needs = needs
        self._groups = groups
        self._clock = clock
        self._tasks = Tasks("commit-gate", context.supervision)
        self._held: dict[GroupScope, HeldAnswers] = {}
        self._links: frozenset[str] = frozenset()
        """That may hold commits."""
        self._scopes: dict[str, GroupScope] = {}
        """By group."""
        self._detached: dict[NamespaceMapping, None] = {}
        """Namespaces of groups of which a link that led them may still be said to be In-Sync."""
        self._work = asyncio.Event()
        self._due = asyncio.Event()
        """Something may be confirmed that was not looked at."""

    def start(self) -> None:
        self._tasks.keep("watch", self._watch_for_ever)
        self._tasks.keep("look", self._look_for_ever)

    async def stop(self) -> None:
        await self._tasks.close()

    def hooks(self) -> list[RequestHook]:
        return [RequestHook(api, self.on_commit, whole=True, pure=True) for api in COMMITS]

    def control_changed(self, links: Iterable[str]) -> None:
        """Hold commits for these links, or let go, as the control log says now."""
        self._links = frozenset(links)
        self._scopes.clear()
        self._confirmed_all()

    def detached(self, link_name: str, mappings: Iterable[NamespaceMapping], offset: int) -> None:
        """A synchronous link leads groups no more, from an offset of the control log on.

        What they commit now is not pushed. Until the other side says In-Sync no more, their commits are refused: this
        proxy grants no leases of before, others grant them until they have applied that, too.
        """
        # Which group an answer is for is not known any more: clients commit again.
        if lapsing := [held.lapse() for held in self._over(link_name)]:
            self._tasks.start("lapse", self._lapsed(lapsing))
        for mapping in mappings:
            self._detached[mapping] = None
            self._tasks.keep(f"detached-{offset}-{mapping.local_prefix}", partial(self._leases_over, mapping, offset))

    @staticmethod
    async def _lapsed(lapsing: Iterable[Iterator[None]]) -> None:
        for steps in lapsing:
            for _ in steps:
                await asyncio.sleep(0)

    async def _leases_over(self, mapping: NamespaceMapping, offset: int) -> None:
        await granted_no_more(self._context, offset)
        await asyncio.sleep(LEASE_S + LEASE_MARGIN_S)
        self._detached.pop(mapping, None)

    def confirmed(self, key: LinkPartition) -> None:
        """The other side has more of a partition."""
        for held in self._over(key.link):
            if held.confirmed(key.place):
                self._due.set()

    def _confirmed_all(self) -> None:
        """Any partition may be confirmed further, or need less."""
        for held in self._held.values():
            held.any_confirmed()
        self._due.set()

    def oldest(self, key: LinkPartition, beyond: int) -> float | None:
        """Since when the first commit at ``beyond`` or later in a partition waits, or waited in vain; None: none does.

        ``beyond``: what the key's link has confirmed; a commit before it waits for another one.
        """
        since = (held.oldest(key.place, beyond) for held in self._over(key.link))
        return min((each for each in since if each is not None), default=None)

    def _over(self, link_name: str) -> list[HeldAnswers]:
        return [held for scope, held in self._held.items() if link_name in scope.links]

    # ---- requests ----

    def on_commit(self, request: Request) -> Verdict:
        """Have the answer wait, if it acks committed offsets of a group that a synchronous link leads."""
        if not self._links and not self._detached:
            return None
        group = str(peeks.group_id(request.api_key, request.version, request.frame), "utf-8", "replace")
        if self._is_detached(group):
            return Replace(request.frame, answered_on_loop(partial(self._answer, request, group, None, None)))
        scope = self.scope_of(group)
        if not scope.links:
            return None
        if not self._groups.partitions:
            return Hold(self._found(request, group))
        return self._waits(request, group, scope, self._groups.partitions)

    def scope_of(self, group: str) -> GroupScope:
        """With which others its commits wait alike."""
        found = self._scopes.get(group)
        if found is None:
            links = self._links
            kind, lookup = ResourceType.CONSUMER_GROUP, self._context.control.state.lookup
            leading = (each.link.name for each in lookup.leading(kind, group))
            found = GroupScope(lookup.demanding(kind, group), tuple(each for each in leading if each in links))
            on_loop(self._remember, links, group, found)
        return found

    def _remember(self, links: frozenset[str], group: str, scope: GroupScope) -> None:
        """What was found while these were the links; in the thread the control log may have gone on meanwhile."""
        if links is not self._links:
            return
        if len(self._scopes) >= SCOPES_MAX:
            self._scopes.clear()
        self._scopes[group] = scope

    async def _found(self, request: Request, group: str) -> Verdict:
        """Go on when it is known how many partitions the offsets topic has."""
        api_key, frame = request.api_key, request.frame
        try:
            topic = await self._context.cluster.topic(OFFSETS_TOPIC)
        except (BrokerUnavailable, KafkaRefused) as error:
            log.warning("offsets topic not found", extra={"detail": str(error)})
            return Replace(frame, answered_as_asked(request, lambda answer: _refused(api_key, frame, group)))
        if topic is None:  # it is made now: nothing of it was ever In-Sync
            return None
        return self._waits(request, group, self.scope_of(group), len(topic.partitions))

    def _waits(self, request: Request, group: str, scope: GroupScope, partitions: int) -> Verdict:
        if not scope.links:
            return None
        place = OFFSETS_TOPIC, partition_of(group, partitions)
        self._groups.pushed.clear()
        return Replace(request.frame, answered_on_loop(partial(self._answer, request, group, scope, place)))

    def _is_detached(self, group: str) -> bool:
        return any(mapping.holds(group) for mapping in self._detached)

    def _answer(
        self, request: Request, group: str, scope: GroupScope | None, place: TopicPartition | None, frame: bytes
    ) -> bytes | Gate:
        """The answer as it goes out: at once, when it may, or refused, if its group has been detached meanwhile."""
        if 0 not in peeks.error_codes(request.api_key, request.version, frame):
            return frame
        refusal = partial(_refused, request.api_key, request.frame, group)
        refused = answered_as_asked(request, lambda _: refusal())
        if scope is None or place is None or self._is_detached(group):
            return refused(frame)
        held = self._held.get(scope)
        if held is None:
            held = self._held[scope] = HeldAnswers(_OfScope(self._needs, scope), self._clock)
        transactional = request.api_key == ApiKey.TXN_OFFSET_COMMIT
        self._work.set()
        if not request.aside:
            return held.hold_commit(place, transactional, WAIT_S, frame, refusal)
        answer = held.hold_commit(place, transactional, WAIT_S, frame, lambda: _NOT_CONFIRMED)
        return passed_on(lambda said: refused(said) if said is _NOT_CONFIRMED else said, answer)

    # ---- what time changes ----

    async def _watch_for_ever(self) -> None:
        while True:
            self._work.clear()
            taken = {scope: held.take_unknown_ends() for scope, held in self._held.items() if held.has_unknown_ends}
            if taken:
                self._tasks.start("log-ends", self._look(taken))
            now = self._clock()
            for held in list(self._held.values()):
                for _ in held.expire_some(now):
                    await asyncio.sleep(0)
            self._confirmed_all()  # leaders may have moved, leases run out
            waits = any(held.waits for held in self._held.values())
            try:
                async with asyncio.timeout(STEP_S if waits else None):
                    await self._work.wait()
            except TimeoutError:
                pass

    async def _look_for_ever(self) -> None:
        """Go on with what may be confirmed, some answers at a time."""
        while True:
            await self._due.wait()
            self._due.clear()
            for held in list(self._held.values()):
                while held.is_due:
                    held.look_at_some()
                    await asyncio.sleep(0)

    async def _look(self, taken: Mapping[GroupScope, Mapping[TopicPartition, list[Wait]]]) -> None:
        """Find where logs end that have commits."""
        ends: Mapping[TopicPartition, int] = {}
        with suppress(TimeoutError):
            async with asyncio.timeout(PUSH_S):
                await self._groups.pushed.wait()
        try:
            async with asyncio.timeout(WAIT_S / 2):
                ends = await self._context.cluster.log_ends({place for waits in taken.values() for place in waits})
        except (BrokerUnavailable, KafkaRefused, TimeoutError) as error:
            log.warning("log ends not read", extra={"detail": str(error)})
            await asyncio.sleep(STEP_S)
        for scope, waits in taken.items():
            held = self._held[scope]
            for place, each in waits.items():
                for _ in held.ends_read(place, each, ends.get(place)):
                    await asyncio.sleep(0)
            if held.look_at_some():
                self._due.set()
                await asyncio.sleep(0)
        if not ends:  # they are asked for again
            self._work.set()


def _refused(api_key: int, frame: bytes, group: str) -> bytes:
    """The answer to a commit that is stored here and not confirmed."""
    head, payload = decode_request(frame)
    reason = "a synchronous link has not confirmed it"
    refused = refuse_all(head, payload, error_answer(Cause.NOT_CONFIRMED, api_key, f"group {group}", reason))
    assert refused is not None
    assert refused.answer is not None
    return refused.answer
