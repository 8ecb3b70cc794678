"""How long leases may run of what is led over a synchronous link no more."""

from __future__ import annotations

from isthmus_plugins.replication.partitions import LinkPartition
from isthmus_plugins.replication.sync.expiring_leases import LEASE_MARGIN_S, LEASE_S, ExpiringLeases

ONE, TWO = (LinkPartition("link", "t", partition) for partition in range(2))
RUNS_S = LEASE_S + LEASE_MARGIN_S


def runs(expiring: ExpiringLeases, key: LinkPartition, now: float) -> bool:
    return key in expiring.running(key.place, now)


def sure() -> ExpiringLeases:
    """Of a process that has run for long enough."""
    expiring = ExpiringLeases(0.0)
    assert expiring.expire(RUNS_S + 0.01)
    return expiring


def test_those_of_the_process_before_may_run_for_as_long_as_one_does() -> None:
    expiring = ExpiringLeases(10.0)
    assert expiring.unsure
    assert not expiring.expire(10.0 + RUNS_S)
    assert expiring.unsure
    assert expiring.expire(10.0 + RUNS_S + 0.01), "others are to know"
    assert not expiring.unsure
    assert not expiring.expire(100.0)


def test_what_this_proxy_granted_runs_from_then() -> None:
    expiring = sure()
    expiring.granted_here(ONE, 10.0)
    assert expiring.has_link("link")
    assert expiring.has_topic("t")
    assert runs(expiring, ONE, 10.0 + RUNS_S - 0.01)
    assert not runs(expiring, TWO, 10.0)
    assert not runs(expiring, ONE, 10.0 + RUNS_S)
    assert not expiring.expire(10.0)
    assert expiring.expire(10.0 + RUNS_S)
    assert not expiring
    assert not expiring.expire(100.0)


def test_what_others_granted_runs_from_when_all_of_them_have_applied_the_change() -> None:
    expiring = sure()
    expiring.granted_elsewhere([ONE, TWO], 5)
    expiring.granted_elsewhere([TWO], 7)
    assert not expiring.expire(1e9)
    assert expiring.changed_at == 7
    expiring.enforced(5, 20.0)
    assert not expiring.expire(20.0 + RUNS_S)
    assert not runs(expiring, ONE, 20.0 + RUNS_S)
    assert runs(expiring, TWO, 1e9), "it was synchronous again in between"
    expiring.enforced(7, 30.0)
    assert expiring.changed_at is None
    assert expiring.expire(30.0 + RUNS_S)
