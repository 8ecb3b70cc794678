"""What open transactions of the source have committed, in the store: what of it a failover commits."""

from __future__ import annotations

from typing import Any

from isthmus_plugins.cluster import CommittedOffset
from isthmus_plugins.replication.in_doubt.pending_offsets import committed_offsets
from isthmus_plugins.replication.in_doubt.store import PlaceDecision, Stored
from isthmus_protocol.offsets_log import OFFSETS_TOPIC

X, Y, EPOCH, PARTITION = 7, 8, 3, 4
T = ("t", 0)


def prepared(at: int, offset: int | None, producer_id: int = X, epoch: int = EPOCH, **more: Any) -> tuple[Any, Any]:
    key = "o", "link", producer_id, "g", PARTITION, at, "a", more.get("stored_by", "b")
    return key, {"epoch": epoch, "positions": [[*T, offset, "m", at]]}


def settled(offset: int, stored_by: str = "b") -> tuple[Any, Any]:
    return ("f", "link", -1, PARTITION, "a", stored_by), {"settled": offset}


def decided(end: int, producer_id: int = X, epoch: int = EPOCH) -> tuple[Any, PlaceDecision]:
    return (producer_id, OFFSETS_TOPIC, PARTITION), PlaceDecision("app", (0, 100), epoch, epoch, end)


def committed(*entries: tuple[Any, Any], decisions: tuple[tuple[Any, PlaceDecision], ...] = ()) -> int | None:
    found = committed_offsets(Stored(dict(decisions), dict(entries)))
    assert found in ({}, {"g": found.get("g", {})})
    position = found.get("g", {}).get(T)
    assert position is None or position == CommittedOffset(position.offset, "m")
    return None if position is None else position.offset


def test_what_was_decided_is_committed_and_nothing_else() -> None:
    assert committed(prepared(10, 5)) is None
    assert committed(prepared(10, 5), decisions=(decided(11),)) == 5
    assert committed(prepared(10, 5), decisions=(decided(10),)) is None, "it belongs to the next transaction"
    assert committed(prepared(10, 5), decisions=(decided(11, epoch=EPOCH + 1),)) is None
    assert committed(prepared(10, 5), decisions=(decided(11, producer_id=Y),)) is None


def test_the_next_transaction_hides_nothing_of_the_one_before_it() -> None:
    assert committed(prepared(10, 5), prepared(20, 6), decisions=(decided(11),)) == 5


def test_of_two_commits_the_later_one_wins() -> None:
    both = decided(30), decided(30, producer_id=Y)
    assert committed(prepared(20, 6), prepared(10, 5), decisions=both) == 6
    assert committed(prepared(10, 9), prepared(20, 6, producer_id=Y), decisions=both) == 6


def test_what_is_settled_is_void_whoever_knows_it() -> None:
    assert committed(prepared(10, 5), settled(10), decisions=(decided(30),)) == 5
    assert committed(prepared(10, 5), settled(11), decisions=(decided(30),)) is None
    assert committed(prepared(10, 5), settled(3), settled(11, "c"), decisions=(decided(30),)) is None


def still_open(upto: int, **since: int) -> tuple[Any, Any]:
    open_since = [[int(name[1:]), begin] for name, begin in since.items()]
    return ("v", "link", -1, PARTITION, "a", "b"), {"upto": upto, "open": open_since}


def test_what_was_aborted_is_void_although_another_transaction_is_open() -> None:
    next_one = prepared(20, 6, epoch=EPOCH)
    assert committed(prepared(10, 5), still_open(15, x8=9), decisions=(decided(30),)) is None
    assert committed(prepared(10, 5), still_open(15, x7=10), decisions=(decided(30),)) == 5
    assert committed(prepared(10, 5), still_open(10), decisions=(decided(30),)) == 5
    assert committed(prepared(10, 5), next_one, still_open(15), decisions=(decided(30),)) == 6
    assert committed(prepared(10, 5), still_open(25, x7=20), decisions=(decided(30),)) is None


def test_what_was_deleted_is_not_committed() -> None:
    assert committed(prepared(10, 5), prepared(12, None), decisions=(decided(30),)) is None
    assert committed(prepared(10, 5), prepared(12, None), prepared(15, 7), decisions=(decided(30),)) == 7
    assert committed(prepared(10, 5), prepared(12, None, producer_id=Y), decisions=(decided(30),)) == 5
