"""Leases as one proxy sees them, with the time given."""

from __future__ import annotations

import uuid

from isthmus_control import commands as c
from isthmus_control.apply import apply
from isthmus_control.control_state import ControlState
from isthmus_control.leases import LeaseView, ReservationState, margin_ms
from isthmus_control.model import BrokerClaim, ResourceType
from isthmus_control.outcome import Accepted

LEASE_MS = 10_000
OWN, PEER, OLD = (str(uuid.UUID(int=number)) for number in (1, 2, 3))


class World:
    """The log, and the view of the proxy ``own``."""

    def __init__(self) -> None:
        self.state = ControlState("A")
        self.view = LeaseView(OWN)

    def do(self, body: c.Body, now: float, sent: float | None = None) -> None:
        """Append and apply. With ``sent`` it is a lease command of our own, sent then."""
        command = c.Command(str(uuid.uuid4()), 0, "p", self.state.applied_offset, body)
        if sent is not None:
            self.view.sending(command.id, sent)
        self.state, outcome = apply(self.state, self.state.applied_offset + 1, command)
        assert isinstance(outcome, Accepted), outcome
        self.view.applied(self.state, now)
        if sent is not None:
            self.view.resolved(command.id, True)

    def claim(self, name: str, broker: int, incarnation: str, now: float, sent: float | None = None) -> None:
        enforced = self.state.applied_offset
        claims = (BrokerClaim(broker, "h", 1),)
        self.do(c.ClaimBrokers(name, incarnation, claims, False, None, LEASE_MS, "1", enforced), now, sent)

    def renew(self, name: str, incarnation: str, enforced: int, now: float, sent: float | None = None) -> None:
        self.do(c.RenewLease(name, incarnation, enforced), now, sent)


def test_margin() -> None:
    assert margin_ms(2_000) == 1_000
    assert margin_ms(60_000) == 6_000


def test_the_own_lease_runs_from_before_it_was_sent() -> None:
    world = World()
    assert not world.view.vouching(0)
    world.claim("own", 1, OWN, now=104, sent=100)
    assert world.view.vouching(109.9)
    assert not world.view.vouching(110)
    world.renew("own", OWN, 0, now=108, sent=105)
    assert world.view.vouches_until() == 115
    # A renewal sent earlier that is seen later takes nothing away.
    world.renew("own", OWN, 0, now=109, sent=101)
    assert world.view.vouches_until() == 115


def test_a_retry_counts_from_its_first_sending() -> None:
    world = World()
    command = c.Command(str(uuid.uuid4()), 0, "p", -1, c.ClaimBrokers("own", OWN, (), True, None, LEASE_MS, "1", -1))
    world.view.sending(command.id, 100)
    world.view.sending(command.id, 107)
    world.state, _ = apply(world.state, 0, command)
    world.view.applied(world.state, 108)
    world.view.resolved(command.id, True)
    assert world.view.vouches_until() == 110


def test_a_lease_that_is_gone_from_the_log_vouches_for_nothing() -> None:
    world = World()
    world.claim("own", 1, OWN, now=0, sent=0)
    world.do(c.ExpireLease("own", OWN, 0), now=1)
    assert not world.view.vouching(1)
    assert not world.view.superseded


def test_a_rejected_renewal_extends_nothing() -> None:
    world = World()
    world.claim("own", 1, OWN, now=0, sent=0)
    world.view.sending("x", 5)
    world.view.resolved("x", False)
    assert world.view.vouches_until() == 10


def test_others_are_waited_for_lease_and_margin_from_when_it_was_applied() -> None:
    world = World()
    world.claim("peer", 2, PEER, now=100)
    assert not world.view.expired(PEER, 110.9)
    assert world.view.expired(PEER, 111)
    assert world.view.next_expiry(100) == 111
    world.renew("peer", PEER, 0, now=105)
    assert not world.view.expired(PEER, 115)
    assert world.view.expirable(115) == ()
    (expire,) = world.view.expirable(116)
    assert expire == c.ExpireLease("peer", PEER, 1)
    world.do(expire, now=116)
    assert world.view.expired(PEER, 116)
    assert world.view.next_expiry(116) is None
    assert world.view.expirable(200) == ()


def test_a_reservation_waits_for_everyone_who_may_still_write() -> None:
    world = World()
    world.claim("own", 1, OWN, now=0, sent=0)
    world.claim("peer", 2, PEER, now=0)
    world.do(c.CreateNamespace(ResourceType.TOPIC, "x", True), now=1)
    namespace = world.state.namespace(ResourceType.TOPIC, "x")
    assert namespace is not None
    at = namespace.reserved_at_offset
    assert at is not None

    assert world.view.waiting_for(at, 1) == ("own", "peer")
    assert world.view.reservation_state(namespace, 1) is ReservationState.RESERVING
    world.renew("own", OWN, at, now=2, sent=2)
    assert world.view.waiting_for(at, 2) == ("peer",)
    world.renew("peer", PEER, at - 1, now=2)
    assert world.view.waiting_for(at, 2) == ("peer",)
    world.renew("peer", PEER, at, now=3)
    assert world.view.enforced_by_all(at, 3)
    assert world.view.reservation_state(namespace, 3) is ReservationState.RESERVED
    assert not world.view.enforced_by_all(world.state.applied_offset + 1, 3)  # not applied here yet

    world.do(c.AlterNamespace(ResourceType.TOPIC, "x", False), now=4)
    cleared = world.state.namespace(ResourceType.TOPIC, "x")
    assert cleared is not None
    assert world.view.reservation_state(cleared, 4) is ReservationState.NONE


def test_a_silent_proxy_is_waited_for_until_its_lease_is_out() -> None:
    world = World()
    world.claim("peer", 2, PEER, now=0)
    world.do(c.CreateNamespace(ResourceType.TOPIC, "x", True), now=1)
    assert world.view.waiting_for(1, 10.9) == ("peer",)
    assert world.view.enforced_by_all(1, 11)


def test_the_old_process_of_a_name_is_waited_for_too() -> None:
    world = World()
    world.claim("own", 1, OLD, now=0)
    world.claim("own", 1, OWN, now=3, sent=3)
    world.do(c.CreateNamespace(ResourceType.TOPIC, "x", True), now=4)
    world.renew("own", OWN, 2, now=5, sent=5)
    assert world.view.waiting_for(2, 5) == ("own",)
    assert world.view.enforced_by_all(2, 11)
    (expire,) = world.view.expirable(11)
    assert expire == c.ExpireLease("own", OLD, 0)
    # The old process itself sees that it was replaced.
    old = LeaseView(OLD)
    old.applied(world.state, 5)
    assert old.superseded
    assert not old.vouching(5)


def test_a_process_that_reads_of_its_end_at_once_knows_that_it_was_replaced() -> None:
    """It stood still until its lease was gone from the log, too; a view that held none has not been replaced."""
    world, old, fresh = World(), LeaseView(OLD), LeaseView(PEER)
    world.claim("own", 1, OLD, now=0)
    old.applied(world.state, 0)
    world.claim("own", 1, OWN, now=20, sent=20)
    world.do(c.ExpireLease("own", OLD, 0), now=31)
    for view in (old, fresh):
        view.applied(world.state, 40)
    assert old.superseded
    assert not fresh.superseded
    world.do(c.ReleaseLease("own", OWN), now=41)
    old.applied(world.state, 41)
    assert not old.superseded, "nobody is in its place any more"


def test_a_view_that_starts_late_waits_longer_not_shorter() -> None:
    world = World()
    world.claim("peer", 2, PEER, now=0)
    late = LeaseView(OWN)
    late.applied(world.state, 9)
    assert not late.expired(PEER, 19.9)
    assert late.expired(PEER, 20)
