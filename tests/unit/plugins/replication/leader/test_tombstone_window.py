"""Whether a hole may have been a tombstone: the times that count."""

from __future__ import annotations

import pytest
from support.partition_log import batch

from isthmus_plugins.replication.leader.tombstone_window import DELETE_RETENTION, TombstoneWindow, hole_end
from isthmus_protocol.records import CONTROL_BIT

DAY_S = 86_400.0


def window(retention_s: float = DAY_S) -> TombstoneWindow:
    found = TombstoneWindow()
    found.learn({DELETE_RETENTION: str(int(retention_s * 1000))})
    return found


def caught_up(at: float = 100.0, retention_s: float = DAY_S) -> TombstoneWindow:
    found = window(retention_s)
    found.opened(10, empty=False, leader_epoch=1, now=at)
    found.saw_end(10, at, acked=10)
    return found


def test_nothing_is_known_of_a_follower_that_never_had_all() -> None:
    found = window()
    assert found.late(0.0)
    found.opened(10, empty=False, leader_epoch=1, now=0.0)
    assert found.late(0.0)
    found.saw_end(50, 100.0, acked=10)
    found.confirmed(49)
    assert found.late(101.0)
    found.confirmed(50)
    assert not found.late(101.0)


def test_half_the_retention_since_the_follower_had_all() -> None:
    found = caught_up()
    assert not found.late(100 + DAY_S / 2)
    assert found.late(101 + DAY_S / 2)
    # It is behind all the time, and never long.
    for number in range(10):
        at = 100 + number * DAY_S / 4
        found.saw_end(20 + 10 * number, at, acked=10 + 10 * number)
        found.confirmed(20 + 10 * number)
        assert not found.late(at + DAY_S / 4)
    # The end that was seen first counts, and not those that come before the follower is there.
    found.saw_end(200, 1000.0, acked=110)
    found.saw_end(300, 2000.0, acked=110)
    found.confirmed(200)
    assert found.late(1001 + DAY_S / 2)


def test_the_least_retention_since_then_counts() -> None:
    found = caught_up()
    found.learn({DELETE_RETENTION: "10000"})
    found.learn({DELETE_RETENTION: "86400000"})
    assert found.late(106.0)
    found.saw_end(10, 110.0, acked=10)
    assert not found.late(116.0)
    found.learn({})  # a broker that does not tell
    assert found.late(116.0)


def test_a_copy_that_is_begun_has_an_hour_less() -> None:
    found = window()
    found.opened(0, empty=True, leader_epoch=1, now=100.0)
    assert not found.late(100 + DAY_S / 2)
    assert found.late(101 + DAY_S / 2)
    found = window(2 * 3600)
    found.opened(0, empty=True, leader_epoch=1, now=100.0)
    assert not found.late(100 + 3600)
    found = window(3600)
    found.opened(0, empty=True, leader_epoch=1, now=100.0)
    assert found.late(101.0)
    found.saw_end(7, 102.0, acked=7)
    assert not found.late(103.0)


@pytest.mark.parametrize(
    ("end_offset", "leader_epoch", "late"), [(0, 1, False), (5, 1, False), (5, 2, True), (0, 2, False)]
)
def test_a_copy_goes_on_from_the_replica_that_it_began_with(end_offset: int, leader_epoch: int, late: bool) -> None:
    found = window()
    found.opened(0, empty=True, leader_epoch=1, now=100.0)
    found.opened(end_offset, empty=end_offset == 0, leader_epoch=leader_epoch, now=200.0)
    assert found.late(300.0) is late


@pytest.mark.parametrize(("end_offset", "late"), [(10, False), (12, False), (9, True)])
def test_another_stream_knows_where_the_log_ended(end_offset: int, late: bool) -> None:
    found = caught_up()
    found.opened(end_offset, empty=False, leader_epoch=7, now=200.0)
    assert found.late(300.0) is late


def test_what_a_stream_before_was_sent_says_nothing_about_the_next_one() -> None:
    found = caught_up()
    found.saw_end(50, 200.0, acked=10)
    found.opened(10, empty=False, leader_epoch=1, now=300.0)
    found.confirmed(50)
    assert found.late(101 + DAY_S / 2)


def log(*parts: bytes) -> bytes:
    return b"".join(parts)


def test_holes() -> None:
    whole = batch(5, [b"a", b"b"])
    assert hole_end(b"", 5, 0) is None
    assert hole_end(whole, 5, 0) is None
    assert hole_end(whole, 6, 0) is None
    assert hole_end(whole, 4, 0) == 7
    assert hole_end(log(whole, batch(7, [b"c"])), 5, 0) is None
    assert hole_end(log(whole, batch(8, [b"c"]), batch(9, [b"d"])), 5, 0) == 9
    assert hole_end(log(whole, batch(8, [b"c"]), batch(9, [b"d"])), 5, 9) is None
    assert hole_end(log(batch(1, [b"x"]), whole), 5, 0) is None
    assert hole_end(log(whole, batch(7, [b"c"], attributes=CONTROL_BIT)), 5, 0) is None
    assert hole_end(log(whole, b"torn"), 3, 0) == 7
