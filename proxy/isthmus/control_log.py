"""The command log of a cluster's proxies, as a topic: made, read, appended to, and this proxy's lease in it.

What the records mean is decided in :mod:`isthmus_control`, which does no I/O and reads no clock; this is its shell:

    append(command) ──> pending ──writer──> Produce, acks=all ──> __isthmus_control-0
                            ^                                            │ long poll
        what came of it ────┴──── Replica.feed <────────tail─────────────┘
                                      └──> LeaseView, subscribers

- **A command counts once.** It is sent again until the tail has seen it, however often its append fails or its answer
  is lost; its id makes the copies duplicates. An append's own answer decides nothing but when to stop sending.
- **The answer comes from the log.** What :meth:`ControlLog.append` returns is what every proxy came to, and ``state``
  has it by then.
- **Where this proxy may not guess, it halts** (a record of a newer version, another state than a snapshot says, a
  subscriber that failed, a log that is not the one any more that it read): it keeps its last state for reading, and
  vouches for nothing any more.
- **Enforcement.** A reservation is enforced here once subscribers know it and ``fence`` has returned: no write that was
  forwarded before can land after. Then it is reported with the next renewal, sent at once where somebody waits.

Moments are those of ``isthmus_plugins.clock``.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NoReturn

from isthmus import control_start, lease_clocks
from isthmus.anchor_keeper import AnchorKeeper
from isthmus.anchor_places import AnchorPlace
from isthmus.control_start import LOST
from isthmus.control_topic import RECORD_BYTES_MAX, TOPIC, ControlTopic, command_of
from isthmus.errors import ConfigurationError, ConnectionLost, KafkaError, PeerFault, RequestTimedOut
from isthmus.kafka.client import Backoff, ClusterClient, is_stale_metadata
from isthmus.lease_clocks import Clocks
from isthmus_control import exports
from isthmus_control import replica as replicas
from isthmus_control.anchors import LogRecord, RecentRecords
from isthmus_control.commands import Body, ClaimBrokers, Command, ReleaseLease, RenewLease, Snapshot
from isthmus_control.control_state import ControlState
from isthmus_control.exports import Export
from isthmus_control.leases import LeaseView, margin_ms
from isthmus_control.levels import with_known_level
from isthmus_control.model import BrokerClaim, ResourceType, TopicState
from isthmus_control.outcome import (
    Accepted,
    Change,
    Duplicate,
    NamespaceChanged,
    NotUnderstood,
    Outcome,
    PromotionChanged,
    ProvenanceChanged,
    Refuse,
    Rejected,
    Rejection,
    SyncChanged,
)
from isthmus_control.prefixes import why_forked
from isthmus_control.replica import Applied, Halted, Replica, Unsigned
from isthmus_control.rules.levels import check_writable
from isthmus_control.signing import Signer
from isthmus_plugins.clock import monotonic
from isthmus_plugins.tasks import Supervision, Tasks

log = logging.getLogger("isthmus.control_log")

BATCH_BYTES_MAX: Final = 1024 * 1024
"""Commands that wait together go together, up to this size; a larger one goes alone."""
APPEND_TIMEOUT_S: Final = 30.0
CATCH_UP_TIMEOUT_S: Final = 30.0
RELEASE_TIMEOUT_S: Final = 5.0
RENEWALS_PER_LEASE: Final = 3
SNAPSHOT_DELAY_S_MAX: Final = 2.0
"""Proxies wait a random time before they write a due snapshot, so that mostly one does."""
OUTCOMES_MAX: Final = 1024
RECORDS_KEPT: Final = 50_000
"""Below the newest snapshot: hours or days of renewals, so that anchors of proxies that were away can be compared."""
INTERNAL_ERROR: Final = "internal-error"


class ControlLogHalted(PeerFault):
    """This proxy may not follow the log any further. ``reason`` as in :mod:`isthmus_control.replica`."""

    def __init__(self, halted: Halted) -> None:
        super().__init__(str(halted))
        self.reason = halted.reason


class ControlLogLost(ControlLogHalted):
    """The log is not the one that it was, or not all of it: nothing is vouched for until an operator has decided."""


class AppendUnresolved(PeerFault):
    """What came of the command is not known in time. Appending the same ``command`` again is exact."""

    def __init__(self, command: Command) -> None:
        super().__init__(f"the control log did not answer {command.body.KIND} in time: it may still count")
        self.command = command


@dataclass(slots=True, eq=False)
class _Pending:
    """A command without an answer. ``written``: it is in the log for certain, only not read yet."""

    command: Command
    value: bytes
    outcome: asyncio.Future[Outcome]
    written: bool = False


@dataclass(frozen=True, slots=True)
class LeaseSpec:
    """What this proxy claims. ``lease_ms`` is how long the others wait for it when it falls silent."""

    brokers: tuple[BrokerClaim, ...]
    all_brokers: bool = False
    link_address: str | None = None
    lease_ms: int = 10_000
    version: str = field(default="0")


class ControlLog:
    """One proxy's end of the log. :meth:`start` reads it; :meth:`claim` takes the lease and keeps it; :meth:`close`."""

    def __init__(
        self,
        client: ClusterClient,
        name: str,
        *,
        supervision: Supervision,
        incarnation: str | None = None,
        fence: Callable[[], Awaitable[None]] | None = None,
        on_failure: Callable[[Exception], None] | None = None,
        clocks: Callable[[], Clocks] = lease_clocks.now,
        places: Sequence[AnchorPlace] = (),
        signer: Signer | None = None,
    ) -> None:
        """``client`` is the caller's and stays open. ``incarnation``: a UUID, new for each process. ``places``: where
        anchors of the log are kept outside of it. ``signer``: has the control key, if there is one.

        ``fence`` returns when no client's write that was forwarded before the call can still land. ``on_failure`` is
        called once, when this proxy must stop: with :class:`ControlLogHalted`, because a newer process took over, or
        because a log that was lost is whole again, and is to be read from anew.
        """
        self.name = name
        self.incarnation = incarnation or str(uuid.uuid4())
        self.halted: ControlLogHalted | None = None
        self.trouble = ""
        """Why the log cannot be read now."""
        self._client = client
        self._fence = fence
        self._on_failure = on_failure
        self._tasks = Tasks(f"control log of {name}", supervision, self._task_failed)
        self._view = LeaseView(self.incarnation)
        self._replica: Replica | None = None
        self._topic = ControlTopic(client, signer)
        self._recent = RecentRecords()
        self._keeper = AnchorKeeper(places, client, self._topic, self)
        self._pending: dict[str, _Pending] = {}
        self._unwritten = asyncio.Event()
        self._outcomes: OrderedDict[str, Outcome] = OrderedDict()
        self._changed: asyncio.Future[None] | None = None
        self._subscribers: list[Callable[[ControlState], None]] = []
        self._watchers: list[Callable[[ControlState, tuple[Change, ...], int], None]] = []
        self._lease: LeaseSpec | None = None
        self._renew_now = asyncio.Event()
        self._clocks = clocks
        self._sent_at: dict[str, Clocks] = {}
        """By claim or renewal that is not answered yet."""
        self._renewed_at: Clocks | None = None
        """When the latest that was accepted was sent."""
        self._enforced = -1
        self._awaited = -1
        """The newest offset that somebody waits for until all proxies have it: see ``_is_waited_for``."""
        self._fencing = False
        self._snapshotting = False
        self._expiring = False
        self._superseded_logged = False

    # --- What is known

    @property
    def state(self) -> ControlState:
        """The state as far as this proxy has read the log."""
        if self._replica is None:
            raise RuntimeError("the control log is not started")
        return self._replica.state

    @property
    def leases(self) -> LeaseView:
        """This proxy's view of all leases: who may vouch, and how far a reservation is."""
        return self._view

    @property
    def topic_id(self) -> uuid.UUID:
        """The control topic's. Known once the log is started."""
        return self._topic.topic_id

    @property
    def recent(self) -> RecentRecords:
        """The records that were applied last."""
        return self._recent

    @property
    def key_id(self) -> str:
        """The id of this proxy's control key; empty: it has none."""
        return self._topic.signer.key_id if self._topic.signer is not None else ""

    @property
    def unsigned(self) -> Unsigned:
        """The records that did not count since they were not written with the control key, of those read here."""
        return self._replica.unsigned if self._replica is not None else Unsigned()

    @property
    def anchors(self) -> AnchorKeeper:
        """What is known of this log and of those of linked clusters, outside of them."""
        return self._keeper

    @property
    def lease_deadline(self) -> float:
        """Until when this proxy may let writes through that a reservation could forbid. Past: it may not."""
        if self.halted is not None:
            return float("-inf")
        until = self._view.vouches_until()
        return float("-inf") if until is None or self._stood_still() else until

    def _stood_still(self) -> bool:
        """Whether time passed since the lease was renewed that its clock does not know of: others may see it
        run out already."""
        if self._renewed_at is None or self._lease is None:
            return False
        ahead_s = lease_clocks.ran_ahead_s(self._renewed_at, self._clocks())
        if ahead_s <= margin_ms(self._lease.lease_ms) / 1000:
            return False
        # Another thread has a large request decided. The loop asks often enough to say so, and to renew.
        if not self._renew_now.is_set() and threading.current_thread() is threading.main_thread():
            why = f"the wall clock ran ahead by {ahead_s:.1f} s"
            log.warning("lease lost", extra={"proxy": self.name, "detail": why})
            self._renew_now.set()
        return True

    @property
    def vouching(self) -> bool:
        return monotonic() < self.lease_deadline

    def subscribe(self, changed: Callable[[ControlState], None]) -> None:
        """Call ``changed`` after each applied command that changed more than the bookkeeping. It must not fail."""
        self._subscribers.append(changed)

    def watch(self, applied: Callable[[ControlState, tuple[Change, ...], int], None]) -> None:
        """Call ``applied(state, changes, offset)`` after each accepted command with changes. It must not fail."""
        self._watchers.append(applied)

    # --- Life

    async def start(self, *, accept_loss: bool = False) -> None:
        """Make the topic if there never was one, read the log up to its end, and compare it with its anchors.

        May be called again after ControlLogLost, which says that the log is not the one that it was, or not all of it.
        ``accept_loss``: then go on with what is there, as an operator decided.

        Raises ConfigurationError (the topic is not fit for it, or nothing is lost that could be accepted),
        ControlLogLost, ControlLogHalted, PeerFault.
        """
        known = await self._keeper.known()
        try:
            loaded = await control_start.loaded(self._topic, known)
        except Halted as halted:
            if halted.reason not in LOST:
                self._halt(halted)
            if not accept_loss:
                if isinstance(halted, control_start.Lost):
                    await self._keeper.insist(halted.anchor)
                raise ControlLogLost(halted) from None
            log.error("loss of the control log accepted", extra={"reason": halted.reason, "error": str(halted)})
            try:
                loaded = await control_start.accept(self._topic, known, self.name)
            except Halted as unreadable:
                fix = f"Delete {TOPIC}, and start the proxy with this option again"
                raise ConfigurationError("--new-control-log", str(unreadable), fix) from None
        else:
            if accept_loss:
                raise ConfigurationError(
                    "--new-control-log", f"nothing is lost of {TOPIC}", "Start the proxy without this option"
                )
        self._replica, self._recent = loaded.replica, loaded.recent
        self._enforced = self.state.applied_offset
        self._view.applied(self.state, monotonic())
        log.info("control log found", extra={"topic": TOPIC, "end_offset": loaded.end})
        self._tasks.start("tail", self._tail())
        self._tasks.start("writer", self._write())
        self._tasks.keep("anchors", self._keeper.keep)

    async def close(self, *, release: bool = True) -> None:
        """Stop. With ``release`` the lease is given back first: the caller has no write without an answer any more."""
        own = self._view.own
        if release and own is not None and self.halted is None:
            self._lease = None  # no renewal may follow it
            try:
                await self.append(ReleaseLease(self.name, self.incarnation), timeout_s=RELEASE_TIMEOUT_S)
            except PeerFault as error:
                log.warning("lease not released", extra={"proxy": self.name, "error": str(error)})
        await self._tasks.close()
        self._fail_pending(lambda: ConnectionLost("the control log is closed"))

    def _halt(self, halted: Halted) -> NoReturn:
        """Stop following the log, for good.

        Where it is the log that is lost, the process goes on: reads need no log, and it remembers what was in it.
        """
        if self.halted is None:
            self.halted = ControlLogHalted(halted)
            log.error("control log halted", extra={"reason": halted.reason, "error": str(halted)})
            self._fail_pending(lambda: ControlLogHalted(halted))
            self._wake()
            if halted.reason in LOST:
                self._keeper.wake()
            elif self._on_failure is not None:
                self._on_failure(self.halted)
        raise ControlLogHalted(halted)

    @property
    def lost(self) -> bool:
        """Whether this proxy halted because the log is lost."""
        return self.halted is not None and self.halted.reason in LOST

    def lose(self, halted: Halted) -> None:
        """Something outside of the log says that it is not the one that it was."""
        try:
            self._halt(halted)
        except ControlLogHalted:
            pass

    def whole_again(self) -> None:
        """The log that was lost has what this proxy knew, or an operator accepted it: to be read by a new process."""
        log.warning("control log whole again", extra={"topic": TOPIC})
        if self._on_failure is not None:
            self._on_failure(PeerFault(f"{TOPIC} may be read again: this proxy starts anew"))

    def export(self) -> Export | None:
        """What this proxy remembers of the log, to write it again; None: it has no record yet."""
        return exports.export(self._replica, self._recent, str(self.topic_id)) if self._replica is not None else None

    def _fail_pending(self, error: Callable[[], PeerFault]) -> None:
        for pending in self._pending.values():
            _fail(pending, error())
        self._pending.clear()

    def _task_failed(self, name: str, error: BaseException) -> None:
        # Without any one of its tasks this proxy would go on with a state that grows old.
        try:
            self._halt(Halted(INTERNAL_ERROR, f"{name} failed: {error!r}"))
        except ControlLogHalted:
            pass

    # --- Reading

    async def _tail(self) -> None:
        assert self._replica is not None
        backoff = Backoff()
        while True:
            try:
                records = await self._fetch_next()
            except ControlLogHalted:
                return
            except PeerFault as error:
                if self.trouble != str(error):
                    self.trouble = str(error)
                    log.warning("control log not readable", extra={"topic": TOPIC, "error": self.trouble})
                await self._topic.look_again(backoff)
                continue
            if self.trouble:
                log.info("control log readable again", extra={"topic": TOPIC})
                self.trouble = ""
                backoff.reset()
            try:
                for record in records:
                    self._apply(record)
            except ControlLogHalted:
                return
            if records:
                self._after_records()

    async def _fetch_next(self) -> list[LogRecord]:
        """What comes after what was applied, from a log that has that still. Raises PeerFault, ControlLogHalted."""
        assert self._replica is not None
        last = self._recent.last
        try:
            return await self._topic.fetch(self._replica.next_offset, last.leader_epoch if last is not None else -1)
        except Halted as halted:
            self._halt(halted)

    def _apply(self, record: LogRecord) -> None:
        assert self._replica is not None
        offset, before = record.offset, self.state

        def forked(command: Command) -> Halted | None:
            return why_forked(command, offset, before.generation, self._recent)

        try:
            applied = self._replica.feed(offset, record.value, forked)
        except Halted as halted:
            self._halt(halted)
        last = self._recent.last
        self._recent.add(record)
        if applied.command is not None and not isinstance(applied.command.body, RenewLease | Snapshot):
            self._keeper.changed(offset)
        elif last is not None and last.leader_epoch != record.leader_epoch:
            self._keeper.wake()  # what others know of the log tells whether the new leader has all of it
        # Read anew for each record: what was applied later must not look as if it had been known before.
        self._view.applied(self.state, monotonic())
        changes = applied.outcome.changes if isinstance(applied.outcome, Accepted) else ()
        if any(_is_waited_for(self.state, each) for each in changes):
            self._awaited = offset
        if changes or self.state.beyond is not before.beyond:
            try:
                for changed in self._subscribers:
                    changed(self.state)
                for watcher in self._watchers:
                    watcher(self.state, changes, offset)
            except Exception as error:
                # What does not know the state cannot enforce it.
                log.exception("control log subscriber failed", extra={"offset": offset})
                self._halt(Halted(INTERNAL_ERROR, f"a subscriber failed at offset {offset}: {error!r}"))
        if isinstance(applied.outcome, NotUnderstood):
            detail = applied.outcome.message
            log.warning("control log record not understood", extra={"offset": offset, "detail": detail})
        elif applied.command is None:
            log.warning("control log record rejected", extra={"offset": offset, "error": str(applied.outcome)})
        self._resolve(applied)
        if self.state.key_id != before.key_id:
            self._sign_pending()

    def _sign_pending(self) -> None:
        """From here on what is not signed does not count: what is on its way is written again. Of what is in the log
        already below, nothing is pending any more."""
        for pending in self._pending.values():
            pending.value = self._topic.encode(pending.command, self.state)
            pending.written = False
        self._unwritten.set()

    def _resolve(self, applied: Applied) -> None:
        command, outcome = applied.command, applied.outcome
        if command is None or isinstance(outcome, NotUnderstood):
            return
        if command.by != self.name and command.id not in self._pending:
            return
        if isinstance(outcome, Duplicate):
            outcome = self._outcomes.get(command.id, outcome)
        else:
            self._outcomes[command.id] = outcome
            while len(self._outcomes) > OUTCOMES_MAX:
                self._outcomes.popitem(last=False)
        pending = self._pending.pop(command.id, None)
        if isinstance(command.body, ClaimBrokers | RenewLease):
            self._view.resolved(command.id, isinstance(outcome, Accepted))
            sent_at = self._sent_at.pop(command.id, None)
            if isinstance(outcome, Accepted) and sent_at is not None:
                self._renewed_at = max(sent_at, self._renewed_at or sent_at)
        if pending is not None and not pending.outcome.done():
            pending.outcome.set_result(outcome)

    def _after_records(self) -> None:
        assert self._replica is not None
        self._advance_enforced()
        if self._view.superseded and not self._superseded_logged:
            self._superseded_logged = True
            log.error("proxy superseded", extra={"proxy": self.name, "incarnation": self.incarnation})
            if self._on_failure is not None:
                self._on_failure(PeerFault(f"a newer process took over the name {self.name!r}: this one must stop"))
        if self._replica.due_state is not None and self._lease is not None and not self._snapshotting:
            self._snapshotting = True
            self._tasks.start("snapshot", self._snapshot())
        self._wake()

    # --- Waiting for the state

    def _wake(self) -> None:
        waiting, self._changed = self._changed, None
        if waiting is not None and not waiting.done():
            waiting.set_result(None)

    async def _change(self, timeout_s: float | None = None) -> None:
        """Return when more was applied, or after ``timeout_s``. Raises ControlLogHalted."""
        self._check_running()
        if self._changed is None:
            self._changed = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(self._changed)
        except TimeoutError:
            return
        self._check_running()

    async def caught_up(self) -> None:
        """Return when all is applied that stood in the log at the call. Raises ControlLogHalted, PeerFault."""
        self._check_running()
        await self.applied(await self._topic.end())

    async def applied(self, end: int) -> None:
        """Return when all below ``end`` is applied. Raises ControlLogHalted, PeerFault where that takes too long."""
        try:
            async with asyncio.timeout(CATCH_UP_TIMEOUT_S):
                while self.state.applied_offset < end - 1:
                    await self._change()
        except TimeoutError:
            raise RequestTimedOut(f"{TOPIC} ends at {end}, and is not read up to there in time") from None

    def _check_running(self) -> None:
        if self.halted is not None:
            raise ControlLogHalted(Halted(self.halted.reason, str(self.halted)))

    async def enforced(self, offset: int) -> None:
        """Return when every proxy that may still let writes through enforces the log up to ``offset``.

        At the latest when the leases of those that do not answer have run out. Raises ControlLogHalted.
        """
        while not self._view.enforced_by_all(offset, now := monotonic()):
            expiry = self._view.next_expiry(now)
            # The own lease may run out, too, without a command: then it is not waited for either.
            own = self.lease_deadline
            moments = [moment for moment in (expiry, own) if moment is not None and moment > now]
            await self._change(min(moments) - now if moments else None)

    # --- Appending

    async def append(self, what: Body | Command, *, timeout_s: float = APPEND_TIMEOUT_S) -> Outcome:
        """Append a command and return what came of it; ``state`` has it then.

        Sent again until that is known. Raises AppendUnresolved after ``timeout_s`` (its ``command`` may be appended
        again), ControlLogHalted, KafkaError where the broker refuses the append itself, ValueError if it is too large.
        """
        if isinstance(what, Command):
            return await self._append(what, timeout_s)
        deadline = monotonic() + timeout_s
        while True:
            outcome = await self._append(self._command(what), deadline - monotonic())
            if not (isinstance(outcome, Rejected) and outcome.code is Rejection.STALE):
                return outcome

    def _command(self, body: Body) -> Command:
        return command_of(body, self.name, self.state, self._recent)

    async def _append(self, command: Command, timeout_s: float) -> Outcome:
        self._check_running()
        known = self._outcomes.get(command.id)
        if known is not None:
            return known
        try:
            check_writable(self.state, command.body)
        except Refuse as refused:
            return Rejected(refused.code, str(refused))
        value = self._topic.encode(command, self.state)
        if len(value) > RECORD_BYTES_MAX - 1024:
            raise ValueError(f"{command.body.KIND} takes {len(value)} bytes, a record may have {RECORD_BYTES_MAX}")
        if isinstance(command.body, ClaimBrokers | RenewLease):
            self._view.sending(command.id, monotonic())
            self._sent_at.setdefault(command.id, self._clocks())
        pending = self._pending.get(command.id)
        if pending is None:
            pending = _Pending(command, value, asyncio.get_running_loop().create_future())
            self._pending[command.id] = pending
            self._unwritten.set()
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(pending.outcome)
        except TimeoutError:
            raise AppendUnresolved(command) from None
        finally:
            if not pending.outcome.done():
                self._pending.pop(command.id, None)

    async def _write(self) -> None:
        """Send what is not written yet, one request at a time, until it is."""
        backoff = Backoff()
        trouble: str | None = None
        while True:
            await self._unwritten.wait()
            sending = self._next_batch()
            if not sending:
                self._unwritten.clear()
                continue
            values = [pending.value for pending in sending]
            error = await self._topic.produce(values)
            if error is None:
                for pending, value in zip(sending, values, strict=True):
                    pending.written = pending.value is value  # it may be another one by now
                backoff.reset()
                if trouble is not None:
                    log.info("control log writable again", extra={"topic": TOPIC})
                    trouble = None
                continue
            if isinstance(error, KafkaError) and not (error.retriable or is_stale_metadata(error)):
                for pending in sending:
                    self._pending.pop(pending.command.id, None)
                    _fail(pending, KafkaError(error.code, error.message))
                continue
            if trouble != str(error):
                trouble = str(error)
                log.warning("control log not writable", extra={"topic": TOPIC, "error": trouble})
            # It may have been appended nevertheless: what the tail finds meanwhile is not sent again.
            await self._topic.look_again(backoff)

    def _next_batch(self) -> list[_Pending]:
        sending: list[_Pending] = []
        size = 0
        for pending in self._pending.values():
            if pending.written:
                continue
            size += len(pending.value)
            if sending and size > BATCH_BYTES_MAX:
                break
            sending.append(pending)
        return sending

    # --- The lease

    async def claim(self, lease: LeaseSpec) -> Outcome:
        """Claim brokers, and keep the lease from then on.

        Where another proxy holds one of them, it is watched: if it renews, it lives, and the claim stays rejected with
        its name; if its lease runs out, it is taken out of the log and the claim is made again. So this takes up to
        a lease and its margin. A later call changes what is claimed. Raises as :meth:`append`.
        """
        while True:
            holders = {
                holder.incarnation: holder.renewed_at_offset
                for holder in self.state.proxies.values()
                if holder.name != self.name
            }
            outcome = await self.append(self._claim_of(lease))
            if isinstance(outcome, Accepted):
                if self._lease is None:
                    self._tasks.start("lease", self._keep_lease())
                self._lease = lease
                return outcome
            if not isinstance(outcome, Rejected) or outcome.code is not Rejection.CONFLICT:
                return outcome
            if not await self._holder_is_gone(lease, holders):
                return outcome

    def _claim_of(self, lease: LeaseSpec) -> ClaimBrokers:
        return ClaimBrokers(
            name=self.name,
            incarnation=self.incarnation,
            brokers=lease.brokers,
            all_brokers=lease.all_brokers,
            link_address=lease.link_address,
            lease_ms=lease.lease_ms,
            version=with_known_level(lease.version, self.key_id),
            enforced_offset=self._enforced,
        )

    async def _holder_is_gone(self, lease: LeaseSpec, renewed: dict[str, int]) -> bool:
        """Whether what stands in the way of ``lease`` has gone. False: one of them lives."""
        wanted = {claim.broker_id for claim in lease.brokers}
        while True:
            now = monotonic()
            holders = [
                holder
                for holder in self.state.proxies.values()
                if holder.name != self.name
                and (lease.all_brokers or holder.all_brokers or not wanted.isdisjoint(holder.broker_ids))
            ]
            if not holders:
                return True
            if any(holder.renewed_at_offset > renewed.setdefault(holder.incarnation, -1) for holder in holders):
                return False
            if any(self._view.expired(holder.incarnation, now) for holder in holders):
                await self._expire_others()
                continue
            expiry = self._view.next_expiry(now)
            await self._change(None if expiry is None else expiry - now)

    async def _expire_others(self) -> None:
        for expire in self._view.expirable(monotonic()):
            outcome = await self.append(expire)
            if isinstance(outcome, Accepted) and outcome.changes:
                log.warning("lease expired", extra={"proxy": expire.name, "incarnation": expire.incarnation})

    async def _expire_in_passing(self) -> None:
        """Take expired leases out of the log, beside the renewal of our own and never before it."""
        try:
            await self._expire_others()
        except PeerFault as error:
            log.warning("leases not expired", extra={"proxy": self.name, "error": str(error)})
        finally:
            self._expiring = False

    def _relieved(self, by: str) -> None:
        """This proxy was away for longer than its lease, and another one took its place: two would take turns."""
        log.error("proxy relieved", extra={"proxy": self.name, "detail": by})
        if self._on_failure is not None:
            self._on_failure(
                PeerFault(f"this proxy lost its lease, and another one took its place ({by}): it must stop")
            )

    async def _keep_lease(self) -> None:
        """Renew in time, and at once where somebody waits for what this proxy enforces now."""
        while not self._view.superseded:
            lease = self._lease
            if lease is None:
                return
            interval_s = lease.lease_ms / 1000 / RENEWALS_PER_LEASE
            if not self._expiring and self._view.expirable(monotonic()):
                self._expiring = True
                self._tasks.start("expire", self._expire_in_passing())
            try:
                async with asyncio.timeout(interval_s):
                    await self._renew_now.wait()
            except TimeoutError:
                pass
            self._renew_now.clear()
            lease = self._lease
            if lease is None:
                return
            try:
                # A renewal that takes longer than this is given up for a newer one; it may still arrive, and harms
                # nothing then.
                if self._view.own is None:
                    outcome = await self.append(self._claim_of(lease), timeout_s=interval_s)
                else:
                    renewal = RenewLease(self.name, self.incarnation, self._enforced)
                    outcome = await self.append(renewal, timeout_s=interval_s)
                if isinstance(outcome, Rejected):
                    log.warning("lease not renewed", extra={"proxy": self.name, "error": outcome.message})
                    if self._view.own is None and outcome.code is Rejection.CONFLICT:
                        self._relieved(outcome.message)
                        return
            except ControlLogHalted:
                return
            except PeerFault as error:
                log.warning("lease not renewed", extra={"proxy": self.name, "error": str(error)})

    # --- Enforcement

    def _advance_enforced(self) -> None:
        """After records were applied: what is reserved or enabled needs the fence first, all else holds at once."""
        if self._needed() > self._enforced and self._fence is not None:
            if not self._fencing:
                self._fencing = True
                self._tasks.start("fence", self._pass_fence(self._fence))
        elif not self._fencing:
            self._now_enforces(self.state.applied_offset)

    def _needed(self) -> int:
        """The offset of the newest reservation, change of a namespace's plugins, or record that is not understood."""
        offsets = (
            offset
            for namespace in self.state.namespaces.values()
            for offset in (namespace.reserved_at_offset, namespace.plugins_at_offset)
            if offset is not None
        )
        beyond = (each.offset for each in self.state.beyond)
        return max((*offsets, *beyond), default=-1)

    async def _pass_fence(self, fence: Callable[[], Awaitable[None]]) -> None:
        try:
            while self._needed() > self._enforced:
                applied = self.state.applied_offset
                await fence()
                self._now_enforces(applied)
        finally:
            self._fencing = False

    def _now_enforces(self, offset: int) -> None:
        self._enforced = offset
        own = self._view.own
        waited_for = self._needed(), self._awaited
        if own is not None and any(own.enforced_offset < each <= offset for each in waited_for):
            self._renew_now.set()

    # --- Snapshots

    async def _snapshot(self) -> None:
        """Write the snapshot that is due, unless another proxy does it first."""
        assert self._replica is not None
        try:
            await asyncio.sleep(random.uniform(0, SNAPSHOT_DELAY_S_MAX))
            due = self._replica.due_state
            if due is not None:
                # Packing a large state takes a while, and states are values: a thread may read them.
                snapshot = await asyncio.to_thread(replicas.take, due)
                await self.append(snapshot)
                log.info("control log snapshot", extra={"as_of": snapshot.as_of, "bytes": len(snapshot.state)})
                if (before := snapshot.as_of - RECORDS_KEPT) > 0:
                    await self._topic.trim(before)
        except (PeerFault, ValueError) as error:
            log.warning("control log snapshot or trimming failed", extra={"error": str(error)})
        finally:
            self._snapshotting = False


def _is_waited_for(state: ControlState, change: Change) -> bool:
    """Whether somebody waits until all proxies know.

    Acks in new partitions, operators who alter a namespace or promote it, records of a topic that is followed and
    pushed on.
    """
    if isinstance(change, SyncChanged):
        return change.after is not None and change.after.from_first
    if isinstance(change, ProvenanceChanged):
        record = state.follower_topics.get(change.topic)
        if record is None or not (record.state is TopicState.FOLLOWING or state.is_promoted(change.topic)):
            return False
        return bool(state.lookup.leading(ResourceType.TOPIC, change.topic))
    return isinstance(change, NamespaceChanged | PromotionChanged)


def _fail(pending: _Pending, error: PeerFault) -> None:
    if not pending.outcome.done():
        pending.outcome.set_exception(error)
        pending.outcome.exception()  # whoever has given up on it misses nothing
