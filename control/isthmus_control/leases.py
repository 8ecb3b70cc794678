"""Who may vouch, judged by one proxy on its own monotonic clock.

The log orders claims, renewals and expiries; it has no time. Time is added here, so that no two clocks are compared:

- A proxy counts its *own* lease from the moment **before it sent** the renewal that it then saw in the log.
- It counts *another's* from the moment it **applied** that renewal, plus a margin for clocks that run at other speeds.

The sender's moment is never later than anybody's applying, so when an observer says "expired" the holder knows for a
margin already that it may not vouch. A renewal that the holder saw at offset O also means that it applied everything
before O: a vouching proxy enforces whatever was in the log a lease ago.

A reservation at offset R is made when every proxy whose lease may still run says that it enforces the log up to R. A
proxy that does not answer is waited for until its lease is out, and so is the old process of a name taken over.
Times are seconds on the caller's monotonic clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from isthmus_control.commands import ExpireLease
from isthmus_control.control_state import ControlState
from isthmus_control.model import Namespace, ProxyLease

MARGIN_MS_MIN = 1_000
MARGIN_SHARE = 10
"""A tenth of the lease: far more than clocks drift, and than an event loop of a live proxy is late."""


def margin_ms(lease_ms: int) -> int:
    """How much longer others wait than the holder vouches."""
    return max(MARGIN_MS_MIN, lease_ms // MARGIN_SHARE)


class ReservationState(StrEnum):
    """``reserving`` until every proxy that may still let writes through enforces it."""

    NONE = "none"
    RESERVING = "reserving"
    RESERVED = "reserved"


@dataclass(slots=True)
class _Seen:
    renewed_at_offset: int
    deadline: float


class LeaseView:
    """One proxy's view of all leases. Feed it every state (:meth:`applied`), ask it with the time."""

    __slots__ = ("_accepted", "_held", "_incarnation", "_others", "_sent", "_state")

    def __init__(self, incarnation: str) -> None:
        """``incarnation``: of the proxy whose view this is. It need not hold a lease."""
        self._incarnation = incarnation
        self._others: dict[str, _Seen] = {}
        self._sent: dict[str, float] = {}
        self._accepted: float | None = None
        self._held: ProxyLease | None = None
        """The lease of ours that was seen last, whatever became of it."""
        self._state: ControlState | None = None

    def sending(self, command_id: str, now: float) -> None:
        """A claim or renewal is about to be sent for the first time. Retries keep the first time."""
        self._sent.setdefault(command_id, now)

    def resolved(self, command_id: str, accepted: bool) -> None:
        """The log has answered a claim or renewal of ours."""
        sent = self._sent.pop(command_id, None)
        if accepted and sent is not None and (self._accepted is None or sent > self._accepted):
            self._accepted = sent

    def applied(self, state: ControlState, now: float) -> None:
        """The log was applied up to this state. One call may stand for many commands: that only waits longer."""
        self._state = state
        self._held = self.own or self._held
        current: set[str] = set()
        for lease in _leases(state):
            current.add(lease.incarnation)
            seen = self._others.get(lease.incarnation)
            if seen is None or seen.renewed_at_offset != lease.renewed_at_offset:
                seconds = (lease.lease_ms + margin_ms(lease.lease_ms)) / 1000
                self._others[lease.incarnation] = _Seen(lease.renewed_at_offset, now + seconds)
        for gone in self._others.keys() - current:
            del self._others[gone]

    @property
    def own(self) -> ProxyLease | None:
        """This proxy's lease as it stands in the log."""
        if self._state is None:
            return None
        for lease in self._state.proxies.values():
            if lease.incarnation == self._incarnation:
                return lease
        return None

    @property
    def superseded(self) -> bool:
        """Whether a newer process of the same name took over: this one must stop, not claim again.

        A process that stood still may read all at once that it was replaced and that its lease is gone for good.
        """
        if self._state is None:
            return False
        if self._incarnation in self._state.superseded:
            return True
        holder = None if self._held is None else self._state.proxies.get(self._held.name)
        return holder is not None and holder.incarnation != self._incarnation

    def vouches_until(self) -> float | None:
        """When this proxy's own lease runs out. None: it holds none."""
        own = self.own
        if own is None or self._accepted is None:
            return None
        return self._accepted + own.lease_ms / 1000

    def vouching(self, now: float) -> bool:
        """Whether this proxy may let through writes that a reservation could forbid."""
        until = self.vouches_until()
        return until is not None and now < until

    def expired(self, incarnation: str, now: float) -> bool:
        """Whether that process cannot vouch any more: its lease is gone from the log, or its time is out."""
        if incarnation == self._incarnation:
            return not self.vouching(now)
        seen = self._others.get(incarnation)
        return seen is None or now >= seen.deadline

    def expirable(self, now: float) -> tuple[ExpireLease, ...]:
        """The commands that take expired leases out of the log. Any proxy may send them, several may."""
        if self._state is None:
            return ()
        return tuple(
            ExpireLease(lease.name, lease.incarnation, lease.renewed_at_offset)
            for lease in _leases(self._state)
            if lease.incarnation != self._incarnation and self.expired(lease.incarnation, now)
        )

    def waiting_for(self, offset: int, now: float) -> tuple[str, ...]:
        """The names of the proxies that do not enforce the log up to ``offset`` yet and may still let writes through.

        An old process of a name that was taken over counts under that name.
        """
        if self._state is None:
            raise RuntimeError("no state was applied yet")
        return tuple(
            dict.fromkeys(
                lease.name
                for lease in _leases(self._state)
                if lease.enforced_offset < offset and not self.expired(lease.incarnation, now)
            )
        )

    def enforced_by_all(self, offset: int, now: float) -> bool:
        """Whether every proxy that may still let writes through enforces the log up to ``offset``."""
        return self._state is not None and self._state.applied_offset >= offset and not self.waiting_for(offset, now)

    def next_expiry(self, now: float) -> float | None:
        """When the next lease of another runs out, for whoever waits: then the answers may change without a command."""
        deadlines = [
            seen.deadline
            for incarnation, seen in self._others.items()
            if incarnation != self._incarnation and seen.deadline > now
        ]
        return min(deadlines, default=None)

    def reservation_state(self, namespace: Namespace, now: float) -> ReservationState:
        """How far the reservation of a namespace of the applied state is."""
        if not namespace.reserved or namespace.reserved_at_offset is None:
            return ReservationState.NONE
        done = self.enforced_by_all(namespace.reserved_at_offset, now)
        return ReservationState.RESERVED if done else ReservationState.RESERVING


def _leases(state: ControlState) -> Iterator[ProxyLease]:
    for name in sorted(state.proxies):
        yield state.proxies[name]
    for incarnation in sorted(state.superseded):
        yield state.superseded[incarnation]
