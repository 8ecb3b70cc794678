"""How long leases may run of what is led over a synchronous link no more."""

from __future__ import annotations

from isthmus_plugins.replication.partitions import LinkPartition
from isthmus_plugins.replication.sync.expiring_leases import LEASE_MARGIN_S, LEASE_S, FormerLeases

ONE, TWO = (LinkPartition("link", "t", partition) for partition in range(2))
RUNS_S = LEASE_S + LEASE_MARGIN_S


def runs(former: FormerLeases, key: LinkPartition, now: float) -> bool:
    return key in former.running(key.place, now)


def sure() -> FormerLeases:
    """Of a process that has run for long enough."""
    former = FormerLeases(0.0)
    assert former.expire(RUNS_S + 0.01)
    return former


def test_those_of_the_process_before_may_run_for_as_long_as_one_does() -> None:
    former = FormerLeases(10.0)
    assert former.unsure
    assert not former.expire(10.0 + RUNS_S)
    assert former.unsure
    assert former.expire(10.0 + RUNS_S + 0.01), "others are to know"
    assert not former.unsure
    assert not former.expire(100.0)


def test_what_this_proxy_granted_runs_from_then() -> None:
    former = sure()
    former.granted_here(ONE, 10.0)
    assert former.has_link("link")
    assert former.has_topic("t")
    assert runs(former, ONE, 10.0 + RUNS_S - 0.01)
    assert not runs(former, TWO, 10.0)
    assert not runs(former, ONE, 10.0 + RUNS_S)
    assert not former.expire(10.0)
    assert former.expire(10.0 + RUNS_S)
    assert not former
    assert not former.expire(100.0)


def test_what_others_granted_runs_from_when_all_of_them_have_applied_the_change() -> None:
    former = sure()
    former.granted_elsewhere([ONE, TWO], 5)
    former.granted_elsewhere([TWO], 7)
    assert not former.expire(1e9)
    assert former.changed_at == 7
    former.enforced(5, 20.0)
    assert not former.expire(20.0 + RUNS_S)
    assert not runs(former, ONE, 20.0 + RUNS_S)
    assert runs(former, TWO, 1e9), "it was synchronous again in between"
    former.enforced(7, 30.0)
    assert former.changed_at is None
    assert former.expire(30.0 + RUNS_S)
