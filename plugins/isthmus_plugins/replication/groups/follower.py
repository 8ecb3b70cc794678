"""The follower end of group offsets: makes what this cluster's coordinators have what the source's have.

A leader end pushes what groups have committed (:class:`~isthmus_plugins.replication.groups.feed.Feed`): that is what is
*wanted*. What the coordinator *has* is read from it when a group is first pushed, every while after, and whenever a
request's fate is unknown. The difference is what there is to do (:meth:`FollowedGroup.plan`), and most of it is done at
once; what has to wait is pending, with its reason. Committed offsets of the group in other topics are its own, and
stay."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import Final

from isthmus_control.control_state import ControlState
from isthmus_control.model import TRANSACTION_VERIFICATION, Reason, ResourceType, Role, TopicState
from isthmus_control.states import ReasonCode
from isthmus_control.truncations import Truncation
from isthmus_plugins.cluster import BrokerUnavailable, CommittedOffset, KafkaRefused, Refused, TopicPartition
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.follower.own_transactions import OwnTransactions, Scope
from isthmus_plugins.replication.groups.confirmations import Confirmations
from isthmus_plugins.replication.groups.followed_group import (
    BEYOND_FOLLOWER_END,
    COORDINATOR_NOT_AVAILABLE,
    MEMBERS_SUBSCRIBED,
    TARGET_REFUSES_OFFSETS,
    FollowedGroup,
    Pending,
    Plan,
    text_of,
)
from isthmus_plugins.replication.groups.intake import LOST_REQUEST_MARGIN_S, Intake
from isthmus_plugins.replication.groups.open_losses import OpenLosses
from isthmus_plugins.replication.groups.own_commits import OwnCommits
from isthmus_plugins.replication.groups.source_ends import SourceEnds
from isthmus_plugins.replication.groups.source_losses import GroupLosses
from isthmus_plugins.replication.in_doubt.store import TransactionStore
from isthmus_plugins.replication.link import calls, reasons
from isthmus_plugins.replication.link.call_codec import Answering
from isthmus_plugins.replication.link.connection import LinkConnection, LinkRejected
from isthmus_plugins.replication.link.part import Part
from isthmus_plugins.tasks import Tasks
from isthmus_protocol import error_codes

log = logging.getLogger("isthmus_plugins.replication")

SCAN_INTERVAL_S: Final = 1.0
"""How often groups that have all they want are looked for that are to be read or renewed."""
DATA_POLL_S: Final = 0.2
"""How often the ends of logs are read that commits wait for."""
DATA_WAIT_S: Final = 1.0
"""Commits that have waited longer for their data may be beyond the source's own: it is asked."""
RETRY_MIN_S: Final = 0.1
RETRY_MAX_S: Final = 2.0
REFUSED_RETRY_S: Final = 10.0
ANSWERED_AFTER_S: Final = 0.002
"""A call's answer goes out so late: clients wait for the commits that it began, and those need the same core."""
GROUPS_AT_ONCE: Final = 32
"""Coordinator requests under way."""
PENDING_REPORTED_MAX: Final = 1000
"""Groups in the answer to a leader end that asks what is pending."""
RETENTION: Final = "offsets.retention.minutes"
DEFAULT_RETENTION_MINUTES: Final = 7 * 24 * 60
RENEWALS: Final = 4
"""Committed offsets are renewed so often within the time after which the coordinator drops them."""

_COORDINATOR: Final = frozenset(
    {
        error_codes.COORDINATOR_LOAD_IN_PROGRESS,
        error_codes.COORDINATOR_NOT_AVAILABLE,
        error_codes.NOT_COORDINATOR,
    }
)
_MEMBERS: Final = frozenset(
    {error_codes.ILLEGAL_GENERATION, error_codes.UNKNOWN_MEMBER_ID, error_codes.STALE_MEMBER_EPOCH}
)
"""The group has members."""


class GroupFollower(Part):
    """All groups that follow and are pushed to this proxy. It commits at whichever broker coordinates them."""

    def __init__(self, context: PluginContext, store: TransactionStore, own_transactions: OwnTransactions) -> None:
        self._context = context
        self._clock = context.clock
        self._tasks = Tasks("group-follower", context.supervision)
        self._changed = asyncio.Event()
        self._own_commits = OwnCommits(context, own_transactions, self._tasks, self._changed.set)
        self.losses = OpenLosses(context)
        self.confirmations = Confirmations(context, store, self._tasks, self.losses)
        self._intake = Intake(context, self.confirmations, self.losses, self._touched, self._changed.set)
        self._source_ends = SourceEnds(context, self._intake, self._tasks, self._answered)
        self._source_losses = GroupLosses(context, self._intake, self.losses)
        self._settling: asyncio.Task[None] | None = None
        self._ends: dict[TopicPartition, int] = {}
        """By partition: where its data ended when some was appended last, since topics were what they are."""
        self._followed: object = None
        self._awaited: set[TopicPartition] = set()
        """Partitions whose data somebody's committed offset is ahead of."""
        self._active: dict[FollowedGroup, None] = {}
        """Groups for which there may be something to do; the others are looked at once in a while."""
        self._scan_at = 0.0
        self._running: dict[tuple[str, str], asyncio.Task[None]] = {}
        """What is under way for groups, also for those that follow no more."""
        self._in_doubt_until = 0.0
        """Until then a request whose connection broke may still be carried out."""
        self._read_again_at = float("-inf")
        """When coordinators were last asked again for all that they have."""
        self._own_waits: set[tuple[str, str]] = set()
        """By link and prefix: namespaces in which this cluster's own transactions may still commit offsets."""
        self._unread: set[FollowedGroup] = set()
        """Groups of which coordinators may have lost commits, or have."""
        self._limit = asyncio.Semaphore(GROUPS_AT_ONCE)
        self._renewal_s: float | None = None
        self._lookup: object = None
        self._truncations: Mapping[str, Truncation] = {}
        self.commits = 0
        """Offsets that were committed here."""
        self.error: str | None = None

    def start(self) -> None:
        self._tasks.keep("apply", self._apply_for_ever)

    async def stop(self) -> None:
        await self._tasks.close()

    def groups(self, link_name: str) -> Iterator[FollowedGroup]:
        """The groups that follow over a link and are pushed to this proxy."""
        return self._intake.groups_of(link_name)

    def _touched(self, group: FollowedGroup) -> None:
        """There may be something to do for a group."""
        self._active[group] = None

    def _answered(self, group: FollowedGroup) -> None:
        """The source has said whether more is to come of what a group waits for."""
        self._touched(group)
        self._changed.set()

    # ---- the leader end's calls ----

    async def group_offsets(self, connection: LinkConnection, question: calls.GroupOffsets) -> calls.GroupOffsetsAnswer:
        """Take what groups have committed at the source, and begin to commit it: calls count in the order they come."""
        if self._clock.monotonic() > self._context.lease_deadline:
            raise LinkRejected(reasons.NO_LEASE, "this proxy has no lease now: another one may front its brokers")
        now = self._clock.monotonic()
        topics = None if question.topics is None else frozenset(question.topics)
        for part in question.parts:
            for group in self._intake.take(connection, question.partitions, topics, part):
                self._begin_if_known(group, now)
                if not group.busy:  # else it is looked at when that is done
                    self._changed.set()
        self.confirmations.report((connection.link_name, part.partition) for part in question.parts)
        await asyncio.sleep(ANSWERED_AFTER_S)
        return calls.GroupOffsetsAnswer(holds_back=True)

    def data_came(self, place: TopicPartition, end: int) -> None:
        """A partition of this cluster has more than it had, up to ``end``."""
        self._ends[place] = end
        if place in self._awaited:
            self._awaited.discard(place)
            self._changed.set()

    async def group_pending(self, connection: LinkConnection, question: calls.GroupPending) -> calls.GroupPendingAnswer:
        """What this leader end pushed and is not there yet, by group."""
        now = self._clock.monotonic()
        open_groups = (group for group in self._intake.fed_over(connection) if not group.idle)
        reported = islice(open_groups, PENDING_REPORTED_MAX)
        return calls.GroupPendingAnswer({group.group: group.waiting(now) for group in reported})

    async def confirmed_commits(
        self, connection: LinkConnection, question: calls.ConfirmedCommits
    ) -> calls.ConfirmedCommitsAnswer:
        """How far a partition of the source's offsets topic was confirmed, whoever pushed it."""
        link = self._context.control.state.links.get(connection.link_name)
        if link is None or not link.pairs(Role.FOLLOWER, ResourceType.CONSUMER_GROUP):
            raise LinkRejected(reasons.NOT_FOLLOWING, "no groups follow over this link")
        return calls.ConfirmedCommitsAnswer(*self.losses.furthest((connection.link_name, question.partition)))

    async def end_group_offsets(self, connection: LinkConnection, question: calls.EndGroupOffsets) -> calls.Done:
        """The leader end pushes no more of these partitions (None: of any). What was done stays."""
        self._intake.end(connection, None if question.partitions is None else set(question.partitions))
        return calls.Done()

    def answers(self) -> Sequence[Answering]:
        return (
            calls.GroupOffsets.by(self.group_offsets),
            calls.GroupPending.by(self.group_pending),
            calls.ConfirmedCommits.by(self.confirmed_commits),
            calls.EndGroupOffsets.by(self.end_group_offsets),
        )

    def connection_lost(self, connection: LinkConnection) -> None:
        """Whoever pushed is gone: nothing is done for those groups until somebody pushes them again."""
        self._intake.end(connection, None)

    def control_changed(self, state: ControlState) -> None:
        """Forget groups that follow no more; look again where a topic is truncated, or was."""
        if state.truncations is not self._truncations or state.follower_topics is not self._followed:
            self._followed = state.follower_topics
            self._ends.clear()
        if state.truncations is not self._truncations:
            changed = state.truncations.keys() ^ self._truncations.keys()
            self._truncations = state.truncations
            for group in self._intake.groups():
                if any(place[0] in changed for place in {*group.wanted, *(group.has or ())}):
                    group.in_doubt(0.0)
                    self._touched(group)
                    self._changed.set()
        if state.lookup is self._lookup:
            return
        self._lookup = state.lookup
        self._intake.lookup_changed(state.lookup)
        self.losses.forget_others(state.links.keys())
        self._changed.set()

    async def left(self) -> None:
        """Return when nothing is under way for groups that follow no more: from then on clients' commits are theirs."""
        ending = [work for key, work in self._running.items() if self._intake.group(*key) is None]
        await asyncio.gather(*ending, return_exceptions=True)
        if ending and (margin_s := self._in_doubt_until - self._clock.monotonic()) > 0:
            await asyncio.sleep(margin_s)

    # ---- what coordinators may have lost ----

    def knows(self, link_name: str, partition: int) -> bool:
        """Whether coordinators have what was confirmed of a partition of a source's offsets topic: that it was read
        since brokers may have been restarted, and that nothing was missing or is missing still."""
        self._read_again_after_restarts()
        return not any(group.source == (link_name, partition) for group in self._unread)

    def committed(self, link_name: str) -> Iterator[str]:
        """Groups whose coordinators had something, as far as this process knows."""
        return (group.group for group in self._intake.every_latest() if group.link == link_name and group.had_any)

    def lost(self, link_name: str, group: str, has: Mapping[TopicPartition, CommittedOffset]) -> bool:
        """Whether a group's coordinator, which has this, has lost what was confirmed, as far as this process knows."""
        known = self._intake.latest(link_name, group)
        missing = known.missing_from(has) if known is not None else {}
        if known is None or known is self._intake.group(link_name, group):
            return bool(missing)
        # Whoever is pushed to since may have gone on.
        return any(place not in has or has[place].offset < lost.offset for place, lost in missing.items())

    def _read_again_after_restarts(self) -> None:
        """A power loss takes the last commits of a coordinator: what all have is read after any broker was away."""
        if self._context.cluster.brokers_changed_at < self._read_again_at:
            return
        now = self._read_again_at = self._clock.monotonic()
        for group in self._intake.groups():
            group.read_again(now)
            self._unread.add(group)
            self._touched(group)
        self._changed.set()

    def _note_read(self) -> None:
        """See which groups have all again."""
        self._unread = {
            group
            for group in self._unread
            if self._intake.group(group.link, group.group) is group and (group.has is None or group.lacks)
        }

    # ---- doing it ----

    async def _apply_for_ever(self) -> None:
        while True:
            self._changed.clear()
            try:
                await self._apply()
                self.error = None
            except (BrokerUnavailable, KafkaRefused) as error:
                if self.error is None:
                    log.warning("group offsets not applied", extra={"detail": str(error)})
                self.error = str(error)
                await asyncio.sleep(RETRY_MIN_S)
            try:
                async with asyncio.timeout(self._idle_s()):
                    await self._changed.wait()
            except TimeoutError:
                pass

    def _idle_s(self) -> float | None:
        """How long nothing is to be done unless something changes; None: for ever."""
        now = self._clock.monotonic()
        due = [max(group.retry_at, now + DATA_POLL_S) for group in self._active if not group.busy]
        if self._intake.has_feeds:
            due += [self._intake.strays_at, self._scan_at]
            if (look_at := self._source_losses.due_at) is not None:
                due.append(look_at)
        return max(RETRY_MIN_S, min(due) - now) if due else None

    async def _apply(self) -> None:
        if not self._intake.has_feeds or self._clock.monotonic() > self._context.lease_deadline:
            return
        if self._renewal_s is None:
            found = await self._context.cluster.broker_configs(RETENTION)
            retention = min((int(each) for each in found.values() if each), default=DEFAULT_RETENTION_MINUTES)
            self._renewal_s = retention * 60 / RENEWALS
        if self._clock.monotonic() >= self._intake.strays_at:
            await self._intake.find_strays()
        self._look_at_own_commits()
        self._read_again_after_restarts()
        self._activate()
        await self._read()
        if self._unread:
            self._note_read()
        now, look_at = self._clock.monotonic(), self._source_losses.due_at
        if look_at is not None and look_at <= now and (self._settling is None or self._settling.done()):
            self._settling = self._tasks.start("losses", self._settle_losses())
        ready = [group for group in self._active if self._is_ready(group, now)]
        for group in ready:
            self._intake.note_silence(group)
        unsure = {place for group in ready for place in group.to_check if self._objection(place[0]) is None}
        log_ends = await self._context.cluster.log_ends(unsure) if unsure else {}
        wanted = [(group, place) for group in ready for place in group.to_commit if self._objection(place[0]) is None]
        ends = {place: self._ends[place] for _, place in wanted if place in self._ends}
        beyond = {place for group, place in wanted if group.wanted[place].offset > ends.get(place, -1)} | unsure
        self._awaited |= beyond  # what comes while the ends are read is looked at again
        ends |= await self._context.cluster.high_watermarks(beyond) if beyond else {}
        waits_since = now - DATA_WAIT_S
        asked = [(group, place) for group in ready for place in group.awaits_data(ends, waits_since)]
        self._source_ends.ask(asked + [(group, place) for group in ready for place in group.ahead_of_source(log_ends)])
        for group in ready:
            if self._is_ready(group, now):
                self._intake.note_silence(group)  # as it is now
                self._begin(group, now, ends, log_ends)

    async def open_commits(self, scope: Scope) -> Reason | None:
        """What this cluster's own transactions have committed in groups of a namespace, after it was begun to be ended;
        None: nothing."""
        return await self._own_commits.open_in(scope)

    def _look_at_own_commits(self) -> None:
        """Have nothing count as certain of groups in which this cluster's own transactions may still commit offsets."""
        for link_name in {link_name for link_name, _ in self._intake.sources()}:
            link = self._context.control.state.links.get(link_name)
            for mapping in () if link is None else link.pairs(Role.FOLLOWER, ResourceType.CONSUMER_GROUP):
                why = self._own_commits.wait(link_name, mapping)
                if why is None and (link_name, mapping.local_prefix) not in self._own_waits:
                    continue
                for group in self._intake.groups_of(link_name):
                    if mapping.holds(group.group):
                        self._note_own_commits(group, why)
                if why is None:
                    self._own_waits.discard((link_name, mapping.local_prefix))
                else:
                    self._own_waits.add((link_name, mapping.local_prefix))

    def _note_own_commits(self, group: FollowedGroup, why: Reason | None) -> None:
        if why is not None:
            group.await_own(Pending(why.code, why.message))
        elif group.awaits_own:  # coordinators may take a moment to count what the markers say
            group.own_ended(self._clock.monotonic() + LOST_REQUEST_MARGIN_S)
        self._touched(group)

    async def _settle_losses(self) -> None:
        """Salvage and record what the source lost; what was done may be put back then."""
        said = list(self.losses.said)
        if await self._source_losses.settle():
            self.confirmations.report(said)
            self._changed.set()

    def _begin_if_known(self, group: FollowedGroup, now: float) -> None:
        """Begin what there is to do for a group if nothing need be read for it; if not, :meth:`_apply` does."""
        if self._renewal_s is None or group.read_at <= now or not self._is_ready(group, now):
            return
        self._intake.note_silence(group)
        wanted = [place for place in group.to_commit if self._objection(place[0]) is None]
        if not group.to_check and all(group.wanted[place].offset <= self._ends.get(place, -1) for place in wanted):
            self._begin(group, now, self._ends)

    def _begin(
        self,
        group: FollowedGroup,
        now: float,
        ends: Mapping[TopicPartition, int],
        log_ends: Mapping[TopicPartition, int] = MappingProxyType({}),
    ) -> None:
        """Begin what there is to do for a group. ``ends``, ``log_ends``: see :meth:`FollowedGroup.plan`."""
        topics = {topic for topic, _ in group.to_plan(now)}
        objections = {topic: why for topic in topics if (why := self._objection(topic))}
        plan = group.plan(ends, objections, now, log_ends, self._intake.is_whole(group))
        self._awaited -= plan.commit.keys()
        if plan:
            group.busy = True
            work = self._tasks.start(f"group-{group.group}", self._carry_out(group, plan))
            self._running[group.link, group.group] = work

    def _activate(self) -> None:
        """Leave groups alone that have what they want; look after those that are to be read or renewed again."""
        now = self._clock.monotonic()
        for group in list(self._active):
            gone = self._intake.group(group.link, group.group) is not group
            if gone or (group.settled and group.due_at > now):
                del self._active[group]
        if now >= self._scan_at:
            self._scan_at = now + SCAN_INTERVAL_S
            self._active |= dict.fromkeys(group for group in self._intake.groups() if group.due_at <= now)

    def _is_free(self, group: FollowedGroup) -> bool:
        """Whether nothing is under way for a group, not even from before it was pushed anew."""
        return not group.busy and (group.link, group.group) not in self._running

    def _is_ready(self, group: FollowedGroup, now: float) -> bool:
        """Whether something may be done for a group now."""
        return self._is_free(group) and group.has is not None and group.retry_at <= now

    def _objection(self, topic: str) -> Pending | None:
        """Why committed offsets in a topic wait: it does not follow (yet), or not as it is."""
        record = self._context.control.state.follower_topics.get(topic)
        if record is None:
            return Pending(BEYOND_FOLLOWER_END, f"{topic} does not follow yet")
        if record.state is not TopicState.FOLLOWING:
            why = record.reason.message if record.reason else record.state.value
            return Pending(BEYOND_FOLLOWER_END, f"{topic} does not follow: {why}")
        truncation = self._context.control.state.truncations.get(topic)
        if truncation is not None:  # it has records that go, and then it has less than it had
            return Pending(ReasonCode.TRUNCATING, truncation.describe())
        return None

    async def _read(self) -> None:
        """Read what coordinators have where that is due."""
        now = self._clock.monotonic()
        asked_at = now
        due = [group for group in self._active if group.read_at <= now and self._is_free(group)]
        if not due:
            return
        found = await self._context.cluster.committed_offsets([group.group for group in due])
        lookup, now = self._context.control.state.lookup, self._clock.monotonic()
        for group in due:
            if self._intake.group(group.link, group.group) is not group:
                continue  # pushed anew meanwhile, as another one, to which what was read says nothing
            offsets = found.get(group.group)
            if offsets is None:
                group.is_not_answered()
                message = f"the coordinator of {group.group} does not answer now"
                group.pending[None] = Pending(COORDINATOR_NOT_AVAILABLE, message)
                continue
            mapped = {
                place: committed
                for place, committed in offsets.items()
                if (counterpart := lookup.following(ResourceType.TOPIC, place[0])) is not None
                and counterpart.link.name == group.link
            }
            known = group.pending.get(None)
            if known is not None and known.code == COORDINATOR_NOT_AVAILABLE:
                del group.pending[None]
            group.found(mapped, len(mapped) < len(offsets), now, self._renewal_s or 0.0, asked_at)
            self.confirmations.resolve(group)
            if not group.wanted and not group.unknown:
                group.deleting = bool(mapped) or (group.deleting and not group.has_others)
                if not group.deleting:  # nothing of it is the link's
                    self._intake.forget(group)
        self.confirmations.report({group.source for group in due})

    async def _carry_out(self, group: FollowedGroup, plan: Plan) -> None:
        try:
            async with self._limit:
                if any(self._objection(topic) for topic, _ in {*plan.commit, *plan.renew}):
                    return  # since it was planned: it is planned again
                refused = await self._requests(group, plan)
            # A coordinator that verifies answers commits in a group's place as if it were not there.
            unavailable = any(answer.error_code == error_codes.COORDINATOR_NOT_AVAILABLE for answer in refused.values())
            verifies = (
                unavailable
                and "true" in (await self._context.cluster.broker_configs(TRANSACTION_VERIFICATION)).values()
            )
            self._note(group, list(refused.items()), verifies)
        except BrokerUnavailable as error:
            self._in_doubt_until = self._clock.monotonic() + LOST_REQUEST_MARGIN_S
            group.in_doubt(self._in_doubt_until, plan.changes)
            group_now = self._intake.group(group.link, group.group)
            if group_now is not None:
                group_now.in_doubt(self._in_doubt_until, plan.changes)
            group.pending[None] = Pending(COORDINATOR_NOT_AVAILABLE, str(error))
        except KafkaRefused as error:
            self._note(group, [(None, Refused(error.error_code, error.error_name))])
        finally:
            group.busy = False
            self._running.pop((group.link, group.group), None)
            self._changed.set()

    async def _requests(self, group: FollowedGroup, plan: Plan) -> dict[TopicPartition, Refused]:
        """Carry out a plan; what was refused. Raises BrokerUnavailable: fate unknown, KafkaRefused."""
        cluster, renewal_s = self._context.cluster, self._renewal_s or 0.0
        refused: dict[TopicPartition, Refused] = {}
        answers: Mapping[TopicPartition, Refused]
        if plan.commit:
            so_far = self.confirmations.received_so_far(group.source)
            wanted = {place for place, committed in plan.commit.items() if group.wanted.get(place) == committed}
            answers = await cluster.commit_offsets(group.group, plan.commit)
            done = {place: committed for place, committed in plan.commit.items() if place not in answers}
            if so_far is not None and group.certain:  # reported first: clients wait for it
                self.confirmations.has(so_far, group, wanted & done.keys())
            group.committed(done, self._clock.monotonic(), renewal_s)
            self.commits += len(done)
            refused.update(answers)
        if plan.renew:
            # Without members what counts is when the last of them left, unless the commit itself says how long.
            answers = await cluster.commit_offsets(group.group, plan.renew, int(renewal_s * RENEWALS * 1000))
            if any(answer.error_code in _MEMBERS for answer in answers.values()):
                answers = await cluster.commit_offsets(group.group, plan.renew)
            done = {place: committed for place, committed in plan.renew.items() if place not in answers}
            group.committed(done, self._clock.monotonic(), renewal_s)
            refused.update(answers)
        if plan.delete:
            answers = await cluster.delete_offsets(group.group, plan.delete)
            group.deleted(plan.delete - answers.keys())
            refused.update(answers)
        if plan.delete_group:
            try:
                await cluster.delete_group(group.group)
            except KafkaRefused as error:
                if error.error_code != error_codes.GROUP_ID_NOT_FOUND:
                    raise
            if not group.wanted:
                self._intake.forget(group)
        return refused

    def _note(
        self, group: FollowedGroup, refused: Sequence[tuple[TopicPartition | None, Refused]], verifies: bool = False
    ) -> None:
        """What was refused waits, each for its reason; when the group's turn is next."""
        now = self._clock.monotonic()
        group.pending.pop(None, None)
        if not refused:
            group.failures = 0
            return
        delays = []
        for place, (code, name) in refused:
            where = group.group if place is None else text_of(place)
            if code in (error_codes.GROUP_SUBSCRIBED_TO_TOPIC, error_codes.NON_EMPTY_GROUP):
                message = f"{where}: the source has deleted it, and the group has members here: {name}"
                pending, delay = Pending(MEMBERS_SUBSCRIBED, message), RETRY_MAX_S
            elif code == error_codes.COORDINATOR_NOT_AVAILABLE and verifies:
                why = f"the brokers verify transactions (KIP-890: {TRANSACTION_VERIFICATION})"
                message = f"{where}: the coordinator answers {name}, as {why}"
                pending, delay = Pending(ReasonCode.TRANSACTION_VERIFICATION_ENABLED, message), RETRY_MAX_S
            elif code in _COORDINATOR or code == error_codes.UNKNOWN_TOPIC_OR_PARTITION:
                delay = min(RETRY_MAX_S, RETRY_MIN_S * 2.0 ** min(group.failures, 8))
                pending = Pending(COORDINATOR_NOT_AVAILABLE, f"{where}: the coordinator answers {name}")
            else:
                pending, delay = (
                    Pending(TARGET_REFUSES_OFFSETS, f"{where}: the coordinator answers {name}"),
                    REFUSED_RETRY_S,
                )
                log.warning("group offset refused", extra={"group": group.group, "code": name, "detail": where})
            group.pending[place] = pending
            delays.append(delay)
        group.failures += 1
        group.retry_at = now + min(delays)
