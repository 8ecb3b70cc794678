"""One proxy's replica of the control state: records in, outcomes out.

A replica starts empty or from a snapshot, takes the log's records in order, and stops for good (*halts*) where it may
not guess: a record of a newer version that says not what it concerns, a gap in the log, a snapshot that differs from
its own state. A halted replica keeps its last state for reading, and its proxy must not vouch for anything any more.

**Snapshots.** One is due after every ``SNAPSHOT_INTERVAL`` records, of a large state after as many as it has entries:
all of its snapshots cost no more than a part of its records then. States are values, so the replica keeps the state of
that very offset at no cost until a snapshot of it appears in the log, then compares: two proxies that applied the same
commands and differ have a bug (or one has bad memory), and neither can say which is right. A fresh replica loads the
newest snapshot and applies what comes after its ``as_of``, which stands before the snapshot itself.
"""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from isthmus_control.apply import SNAPSHOT_INTERVAL, apply, keep_beyond, reject, unknown
from isthmus_control.codec import MalformedValue, UnknownField, canonical, from_json, parse
from isthmus_control.commands import BadRecord, Body, Command, NewerRecord, Snapshot, UnsignedRecord, decode
from isthmus_control.concerns import Beyond, concerns_of
from isthmus_control.control_state import ControlState
from isthmus_control.levels import KNOWN_LEVEL
from isthmus_control.outcome import NotUnderstood, Outcome, Rejection
from isthmus_control.rules.levels import met
from isthmus_control.signing import Signer, key_needed

SNAPSHOT_BYTES_MAX = 256 * 1024 * 1024
"""No state is that big. A bound, so that a damaged record cannot fill the memory."""
BOUNDARIES_MAX = 4
"""How many states of due snapshots are kept. Snapshots that come later than that are not compared."""


class Halted(Exception):
    """The replica may not go on. ``reason`` is one of the constants below, the message is for people."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


NEWER_VERSION = "newer-version"
STATE_DIFFERS = "state-differs"
RECORDS_MISSING = "records-missing"
SNAPSHOT_DAMAGED = "snapshot-damaged"
OTHER_CLUSTER = "other-cluster"
CONTROL_KEY = "control-key"


@dataclass(frozen=True, slots=True)
class Applied:
    """One record and what came of it. ``command`` is None for a record that is none, or that is not understood."""

    offset: int
    command: Command | None
    outcome: Outcome | NotUnderstood


@dataclass(frozen=True, slots=True)
class Unsigned:
    """Records that did not count for want of a MAC: ``count``, and what is said of the last one."""

    count: int = 0
    last: str = ""


class Replica:
    """Feed it records with :meth:`feed`; read ``state``; ``halted`` says why it stopped, if it did."""

    __slots__ = ("_beginning", "_boundaries", "_signed_from", "_signer", "halted", "state", "unsigned")

    def __init__(self, state: ControlState, signer: Signer | None = None) -> None:
        """``state``: ``ControlState(cluster_id)`` for a log read from its beginning, or :func:`load`'s. ``signer``: has
        this proxy's control key, if there is one."""
        self.state = self._beginning = state
        self.halted: Halted | None = None
        self.unsigned = Unsigned()
        self._signer = signer
        self._signed_from = -1
        """The record from which on the log is signed, if it was fed."""
        self._boundaries: dict[int, ControlState] = {}
        # A loaded snapshot is compared with the record that it came from, which is still ahead.
        self._keep_boundary()

    @property
    def next_offset(self) -> int:
        """The offset of the record that comes next."""
        return self.state.applied_offset + 1

    def feed(
        self,
        offset: int,
        value: bytes | bytearray | memoryview | None,
        check: Callable[[Command], Halted | None] = lambda command: None,
    ) -> Applied:
        """Apply the record at ``offset``. Raises :class:`Halted`, from then on at each call.

        ``offset`` must be :attr:`next_offset`: this log is never cleaned, so a gap is a loss. ``check`` says why a
        command must not be applied here, whatever others do: nothing of it is then.
        """
        if self.halted is not None:
            raise self.halted
        if offset < self.next_offset:
            raise ValueError(f"offset {offset} was applied already")
        if offset > self.next_offset:
            self._halt(RECORDS_MISSING, f"records {self.next_offset} to {offset - 1} are missing from the log")
        try:
            command = decode(value if value is not None else b"", self._signer and self._signer.of(self.state.key_id))
        except NewerRecord as error:
            return self._newer(offset, error)
        except UnsignedRecord as error:
            self._note_unsigned(offset, error)
            return self._rejected(offset, Rejection.UNSIGNED, error)
        except BadRecord as error:
            return self._rejected(offset, Rejection.MALFORMED, error)
        if (why := check(command)) is not None:
            self._halt(why.reason, str(why))
        if isinstance(command.body, Snapshot):
            self._compare(offset, command.body)
        before = self.state
        self.state, result = apply(before, offset, command)
        if before.beyond:
            self._spread(offset, before, command.body)
        if self.state.level > KNOWN_LEVEL:
            self._halt(NEWER_VERSION, f"{_unknown_level(self.state.level)} (offset {offset})")
        if self.state.key_id != before.key_id:
            self._signed_from = offset
            if (why_not := key_needed(self.state.key_id, self._signer)) is not None:
                self._halt(CONTROL_KEY, f"{why_not} (offset {offset})")
        self._keep_boundary()
        return Applied(offset, command, result)

    def _rejected(self, offset: int, code: Rejection, error: BadRecord) -> Applied:
        self.state, outcome = reject(self.state, offset, code, str(error))
        self._keep_boundary()
        return Applied(offset, None, outcome)

    def _note_unsigned(self, offset: int, why: UnsignedRecord) -> None:
        # What was on its way when the level was raised is nobody's fault: it is written again, signed.
        if why.seen >= self._signed_from or offset - self._signed_from > SNAPSHOT_INTERVAL:
            self.unsigned = Unsigned(self.unsigned.count + 1, f"the record at offset {offset} does not count: {why}")

    def _newer(self, offset: int, record: NewerRecord) -> Applied:
        message = f"{record} (offset {offset}): upgrade this proxy"
        if record.ignorable:
            self.state = self.state.evolve(applied_offset=offset)
            self._keep_boundary()
        elif record.concerns is not None:
            self.state = unknown(self.state, Beyond(offset, record.concerns, message), record.id)
        else:
            self._halt(NEWER_VERSION, message)
        return Applied(offset, None, NotUnderstood(message))

    def _spread(self, offset: int, before: ControlState, body: Body) -> None:
        """What touches something beyond this version is beyond it: others may have come to another answer."""
        concerns, unknown = concerns_of(body), met(before, body)
        if unknown is not None and concerns is not None:
            self.state = keep_beyond(self.state, Beyond(offset, concerns, unknown.message))

    @property
    def due_state(self) -> ControlState | None:
        """The newest state of which a snapshot is due and not in the log yet. :func:`take` makes it one."""
        if self.halted is not None or not self._boundaries:
            return None
        newest = max(self._boundaries)
        return self._boundaries[newest] if newest > self.state.snapshot_offset else None

    def bases(self) -> list[ControlState]:
        """States that snapshots are of, or would be, oldest first: from each of them records lead to this one."""
        return [self._beginning, *(self._boundaries[as_of] for as_of in sorted(self._boundaries))]

    def _keep_boundary(self) -> None:
        as_of = self.state.applied_offset
        if self.state.beyond:
            return  # it is not what others have
        if (as_of + 1) % SNAPSHOT_INTERVAL == 0 and as_of - self.state.snapshot_offset >= self.state.entries:
            self._boundaries[as_of] = self.state
            while len(self._boundaries) > BOUNDARIES_MAX:
                del self._boundaries[min(self._boundaries)]

    def _compare(self, offset: int, snapshot: Snapshot) -> None:
        own = self._boundaries.get(snapshot.as_of)
        if own is not None and digest(canonical(own)) != snapshot.digest:
            self._halt(
                STATE_DIFFERS,
                f"the snapshot at offset {offset} differs from the state that this proxy has for offset "
                f"{snapshot.as_of}: one of them is wrong, and nothing says which",
            )

    def _halt(self, reason: str, message: str) -> NoReturn:
        self.halted = Halted(reason, message)
        raise self.halted


def _unknown_level(level: int) -> str:
    return (
        f"an operator has raised the control log to feature level {level}, and this version knows {KNOWN_LEVEL} at "
        f"most: upgrade this proxy"
    )


def digest(state: bytes) -> str:
    return hashlib.sha256(state).hexdigest()


def take(state: ControlState) -> Snapshot:
    """The snapshot of ``state``."""
    data = canonical(state)
    packed = base64.b64encode(zlib.compress(data, 6)).decode()
    return Snapshot(state.applied_offset, digest(data), packed)


def load(snapshot: Snapshot, cluster_id: str, signer: Signer | None = None) -> ControlState:
    """The state in a snapshot.

    Raises :class:`Halted` where it is damaged, newer, another cluster's, or of a log that needs another control key.
    """
    try:
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(base64.b64decode(snapshot.state, validate=True), SNAPSHOT_BYTES_MAX)
        if not unpacker.eof or digest(data) != snapshot.digest:
            raise MalformedValue("its digest is another")
        raw = parse(data)
        level = raw.get("level") if type(raw) is dict else None
        if type(level) is int and level > KNOWN_LEVEL:
            raise Halted(NEWER_VERSION, _unknown_level(level))
        state = from_json(ControlState, raw, "snapshot")
    except UnknownField as error:
        raise Halted(NEWER_VERSION, f"{error}: upgrade this proxy") from None
    except (MalformedValue, ValueError, zlib.error) as error:
        raise Halted(SNAPSHOT_DAMAGED, f"the snapshot of offset {snapshot.as_of} is damaged: {error}") from None
    if state.cluster_id != cluster_id:
        raise Halted(OTHER_CLUSTER, f"the log is of cluster {state.cluster_id}, this is {cluster_id}")
    if state.applied_offset != snapshot.as_of:
        raise Halted(SNAPSHOT_DAMAGED, f"the snapshot of offset {snapshot.as_of} holds {state.applied_offset}")
    if (why_not := key_needed(state.key_id, signer)) is not None:
        raise Halted(CONTROL_KEY, why_not)
    return state


def snapshot_in(offset: int, value: bytes | None, signer: Signer | None = None) -> Snapshot | None:
    """The snapshot in a record of the log, if it is one, for a reader that starts near the end; with a ``signer`` one
    that has its MAC, or another of its keys'. Whether it counts, its place in the order decides, not this search."""
    # Cheap test first: snapshots are few, and decoding all to find one would cost as much as applying them.
    if value is None or b'"snapshot"' not in value:
        return None
    try:
        body = decode(value, signer and _signer_of(value, signer)).body
    except (BadRecord, NewerRecord):
        return None
    if not isinstance(body, Snapshot) or (body.as_of + 1) % SNAPSHOT_INTERVAL != 0:
        return None
    return body if 0 <= body.as_of < offset else None


def is_signed(value: bytes | None, signer: Signer) -> bool:
    """Whether the record was written with the control key, or another of the proxy's keys."""
    if value is None or b'"mac"' not in value:
        return False
    try:
        decode(value, _signer_of(value, signer))
    except NewerRecord:
        return True
    except BadRecord:
        return False
    return True


def _signer_of(value: bytes, signer: Signer) -> Signer:
    """Whose MAC a record has, of those that a proxy has the keys of; the first one's if nobody's."""
    if len(signer.all()) == 1:
        return signer
    try:
        raw = parse(value)
    except MalformedValue:
        return signer
    return next((each for each in signer.all() if type(raw) is dict and each.signed(raw)), signer)
