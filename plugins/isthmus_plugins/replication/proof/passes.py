"""How far one partition was compared, what of it is compared next, and how fast: no I/O, no clock.

| what happens | what follows |
|---|---|
| nothing is known, or the last pass is old enough | a pass begins, at the logs' start |
| a piece is equal | the pass stands behind it, and what is equal ends there, unless something before it is not |
| all is compared that was stable | the pass was whole; it goes on with what comes, until the next one begins |
| a piece differs | what is equal ends there; the pass stands before the piece, which is compared again and again |
| that is acknowledged | the pass goes on behind the piece; what is equal still ends there, until the next pass |
| the logs start later, as records grew old | what differed before that is gone |
| the log lost its end | what is equal ends there, and so does what was compared |
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from isthmus_control.proofs import FoundDifference, Proof

AGAIN: Final = 0.75
"""After this part of the time in which there is to be a whole pass the next one begins: it takes its time."""
CHECKPOINT_MS: Final = 3_600_000
"""Where a pass stands is recorded so often at most, but for its end."""


class PartitionPasses:
    """The passes over one partition. Times are Unix ms of the wall clock."""

    __slots__ = ("_recorded_ms", "at", "begun_ms", "difference", "equal_until", "passed_ms")

    def __init__(self, recorded: Proof | None, now_ms: int) -> None:
        known = Proof(begun_ms=now_ms) if recorded is None else recorded
        self.equal_until = known.equal_until
        self.passed_ms = known.passed_ms
        self.begun_ms = known.begun_ms
        self.at = known.at
        self.difference = known.difference
        self._recorded_ms = now_ms

    @property
    def proof(self) -> Proof:
        """As it may be recorded."""
        return Proof(self.equal_until, self.passed_ms, self.begun_ms, self.at, self.difference)

    @property
    def is_whole(self) -> bool:
        """Whether the present pass has been over all that there was."""
        return self.passed_ms == self.begun_ms

    def is_due(self, every_ms: int, now_ms: int) -> bool:
        """Whether the next pass is to begin; a wall clock that was set back is no reason to wait for longer."""
        recent = self.begun_ms <= now_ms < self.begun_ms + AGAIN * every_ms
        return self.is_whole and not recent and self.difference is None

    def begin(self, now_ms: int) -> None:
        """The next pass."""
        self.begun_ms, self.at = now_ms, 0

    def equal(self, to: int) -> None:
        """A piece that began where the pass stands is equal up to an offset."""
        if self.at <= self.equal_until:
            self.equal_until = max(self.equal_until, to)
        self.at = to
        self.difference = None

    def reached_end(self) -> None:
        """All is compared that was stable: the pass was whole, whatever differs and was acknowledged."""
        self.passed_ms = self.begun_ms

    def differs(self, offset: int, to: int, message: str, now_ms: int) -> bool:
        """The piece from where the pass stands up to an offset differs first at another one; False if that is known."""
        self.equal_until = offset if self.at <= self.equal_until else min(self.equal_until, offset)
        if self.difference is not None and self.difference.offset == offset:
            return False
        self.difference = FoundDifference(offset, to, now_ms, message)
        return True

    def acknowledged(self) -> None:
        """An operator knows what differs."""
        if self.difference is not None:
            self.at = max(self.at, self.difference.to)
            self.difference = None

    def starts(self, offset: int) -> None:
        """Either log starts here now; before it there is nothing to compare."""
        if self.difference is not None and self.difference.offset < offset:
            self.difference = None
            self.equal_until = max(self.equal_until, offset)
        if self.at < offset:
            if self.at <= self.equal_until:
                self.equal_until = max(self.equal_until, offset)
            self.at = offset

    def ends(self, offset: int) -> None:
        """The follower's log ends here now."""
        self.at, self.equal_until = min(self.at, offset), min(self.equal_until, offset)
        found = self.difference
        if found is not None and found.to > offset:
            self.difference = replace(found, to=offset) if found.offset < offset else None

    def to_record(self, recorded: Proof | None, now_ms: int) -> Proof | None:
        """What is to be recorded now, of what is recorded; None: nothing."""
        found = self.proof
        was = Proof() if recorded is None else recorded
        moved = (found.at, found.equal_until, found.begun_ms) != (was.at, was.equal_until, was.begun_ms)
        if (
            found.passed_ms != was.passed_ms
            or found.difference != was.difference
            or (moved and not self._recorded_ms <= now_ms < self._recorded_ms + CHECKPOINT_MS)
        ):
            self._recorded_ms = now_ms
            return found
        return None


class Pace:
    """How fast logs are read on the average: what was spent is waited for afterwards."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = float("-inf")
        """Monotonic seconds."""

    def spend(self, size: float, now: float) -> None:
        """So much was read, or what costs as much."""
        self._free_at = max(self._free_at, now) + size / self._bytes_per_s

    def wait_s(self, now: float) -> float:
        """In how many seconds more may be read."""
        return max(0.0, self._free_at - now)
