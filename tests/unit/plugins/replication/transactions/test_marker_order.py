"""Commit markers wait for the decision that they carry out, and for nothing else."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
from support.partition_log import batch, control_batch

from isthmus_plugins.replication.partitions import LinkPartition
from isthmus_plugins.replication.transactions import marker_order
from isthmus_plugins.replication.transactions.marker_order import MarkerOrder
from isthmus_protocol.records import TRANSACTIONAL_BIT, BatchHeader, whole_header

KEY = LinkPartition("link", "t", 0)
X = 7
_numbers = count()


class _Stream:
    key = KEY
    acked = 0


class _Decision:
    producer_id = X
    again = False
    is_of_another = False
    """Epoch than all that is written."""

    def __init__(self, end: int | None = None, sent: bool = True, there: bool = False, epoch: int = 0) -> None:
        self.producer_epoch, self.data_epoch = epoch + 1, epoch
        self.identity = 0, 0, next(_numbers)
        self.end = end
        self.sent = sent
        self.there = there

    def has_epoch(self, header: BatchHeader) -> bool:
        return not self.is_of_another

    def ends_after(self, key: LinkPartition, offset: int) -> bool:
        return self.end is None or self.end > offset

    def end_of(self, key: LinkPartition) -> int | None:
        return self.end

    def is_sent(self, stream: Any) -> bool:
        return self.sent or self.there

    def is_there(self, key: LinkPartition) -> bool:
        return self.there


class Scene:
    def __init__(self, floor: int | None = 0) -> None:
        self.recalled: _Decision | None = None
        """Decided before this process, and not told by it."""
        self.read_upto = floor or 0
        """Markers below this carry out nothing that is not known."""
        self.in_sync, self.given_up = True, 0
        self.order = MarkerOrder[_Decision](lambda key: floor, self.recall, self.may_go_unknown, self.give_up)
        self.stream: Any = _Stream()

    def recall(self, key: LinkPartition, producer_id: int, epoch: int) -> bool:
        found, self.recalled = self.recalled, None
        if found is not None:
            found.again = True
            self.order.decided(key, found)
        return found is not None

    def may_go_unknown(self, stream: Any, producer_id: int, offset: int, below: bool) -> bool:
        assert producer_id == X
        return offset < self.read_upto

    def give_up(self, key: LinkPartition) -> bool:
        self.given_up += 1
        return not self.in_sync

    def data(self, offset: int, plain: bool = False) -> bool:
        made = batch(offset, [b"x"], producer_id=X, producer_epoch=0, base_sequence=0, attributes=TRANSACTIONAL_BIT)
        return self.order.may_pass(self.stream, whole_header(made), made, plain)

    def marker(self, offset: int, committed: bool = True, plain: bool = False) -> bool:
        made = control_batch(offset, committed, producer_id=X, producer_epoch=0)
        return self.order.may_pass(self.stream, whole_header(made), made, plain)


def test_a_commit_waits_until_its_decision_was_sent() -> None:
    scene = Scene()
    assert scene.data(0)
    assert not scene.marker(1)
    decision = _Decision(sent=False)
    scene.order.decided(KEY, decision)
    assert not scene.marker(1)
    decision.sent = True
    assert scene.marker(1)
    assert scene.data(2)
    assert not scene.marker(3), "that was the one before"


@pytest.mark.parametrize("floor", [None, 2])
def test_what_stands_below_the_floor_does_not_wait(floor: int | None) -> None:
    scene = Scene(floor)
    assert scene.data(0)
    assert scene.marker(1)


def test_below_the_floor_what_was_decided_before_this_process_is_told_first() -> None:
    scene = Scene(10)
    assert scene.data(0)
    scene.recalled = _Decision(sent=False)
    decision = scene.recalled
    assert not scene.marker(1)
    assert not scene.marker(1)
    decision.sent = True
    assert scene.marker(1)
    assert scene.data(2)
    assert scene.marker(3), "of one that nobody knows"
    assert scene.data(10)
    assert not scene.marker(11)


def test_below_the_floor_a_marker_waits_until_all_is_read_that_may_be_its_decision() -> None:
    scene = Scene(10)
    scene.read_upto = 0
    assert scene.data(0)
    assert not scene.marker(1)
    scene.read_upto = 2
    assert scene.marker(1)


def test_below_the_floor_a_marker_waits_for_what_was_decided_since_and_not_told() -> None:
    """The proxy that was to tell it died, and this one pushes the partition now."""
    scene = Scene(10)
    decision = _Decision(sent=False)
    scene.order.decided(KEY, decision)
    assert scene.data(0)
    assert not scene.marker(1)
    assert scene.order.missing(KEY, X) == [decision]
    decision.sent = True
    assert scene.marker(1)


def test_a_decision_of_another_epoch_or_from_before_is_not_taken_for_that_of_a_later_marker() -> None:
    scene = Scene()
    before, another = _Decision(end=10), _Decision(end=10)
    before.again, another.is_of_another = True, True
    for decision in (before, another):
        scene.order.decided(KEY, decision)
    assert scene.data(3)
    assert not scene.marker(4), "its decision is not read yet"
    scene.order.decided(KEY, _Decision(end=5))
    assert scene.marker(4)


def test_one_of_which_nothing_is_known_passes_when_all_is_known_that_has_to_be_told() -> None:
    scene = Scene()
    scene.data(0)
    assert not scene.marker(1)
    scene.read_upto = 4
    assert scene.marker(1)
    assert scene.data(2)
    told = _Decision(sent=False)
    scene.order.decided(KEY, told)
    assert not scene.marker(3), "what another partition needs is waited for"
    told.sent = True
    assert scene.marker(3)
    assert scene.data(4)
    assert not scene.marker(5)


def test_aborts_and_markers_without_records_pass() -> None:
    scene = Scene()
    assert scene.data(0)
    assert scene.marker(1, committed=False)
    assert scene.marker(2), "nothing came since"
    assert scene.data(3)
    assert not scene.marker(4)


def test_a_marker_of_which_the_beginning_was_not_seen_waits() -> None:
    scene = Scene()
    assert not scene.marker(9)
    scene.order.decided(KEY, _Decision(end=9))
    assert scene.marker(9)


def test_a_stream_that_begins_again_may_send_a_marker_again() -> None:
    scene = Scene()
    scene.order.decided(KEY, _Decision())
    assert scene.marker(1)
    scene.stream = _Stream()
    assert scene.marker(1)
    assert scene.data(2)
    assert not scene.marker(3)


def test_a_decision_that_had_nothing_in_the_partition_is_not_taken_for_another() -> None:
    scene = Scene()
    scene.order.decided(KEY, _Decision(end=0))
    assert scene.data(0)
    assert not scene.marker(1)
    scene.order.decided(KEY, _Decision(end=1, sent=False))
    assert not scene.marker(1)


def test_records_that_go_as_plain_ones_wait_until_the_other_side_has_the_decision() -> None:
    scene = Scene()
    decision = _Decision()
    scene.order.decided(KEY, decision)
    assert not scene.data(0, plain=True)
    decision.there = True
    assert scene.data(0, plain=True)
    assert scene.data(1, plain=True)
    assert scene.marker(2, plain=True)


def test_it_may_go_without_where_the_partition_is_in_sync_no_more() -> None:
    scene = Scene()
    assert not scene.marker(4)
    scene.order.waive(KEY, 4)
    assert scene.marker(4)
    assert scene.data(5)
    assert not scene.marker(6)


def test_what_is_carried_out_is_forgotten() -> None:
    scene = Scene()
    scene.order.decided(KEY, _Decision())
    assert scene.marker(1)
    scene.order.forget(lambda stream: True, lambda key: True)
    assert scene.order._known
    scene.stream.acked = 2
    scene.order.forget(lambda stream: True, lambda key: True)
    assert not scene.order._known
    scene.order.decided(KEY, _Decision())
    scene.order.forget(lambda stream: False, lambda key: False)
    assert not scene.order._known


def test_what_the_follower_may_lack_is_told_with_the_next_decision() -> None:
    scene = Scene()
    decisions = [_Decision(end=end, epoch=epoch) for epoch, end in ((3, 10), (5, 20), (7, 30), (7, 40))]
    for decision in decisions:
        scene.order.decided(KEY, decision)
    assert scene.order.earlier(KEY, decisions[0]) == []
    assert scene.order.earlier(KEY, decisions[2]) == [(4, 3, 10), (6, 5, 20)]
    assert scene.order.earlier(KEY, decisions[3]) == [(4, 3, 10), (6, 5, 20)], "of one epoch, the end is enough"
    assert scene.data(8)
    assert scene.marker(9)
    scene.stream.acked = 10
    scene.order.forget(lambda stream: True, lambda key: True)
    assert scene.order.earlier(KEY, decisions[3]) == [(6, 5, 20)]


def test_all_that_the_follower_lacks_is_told_however_far_it_is_behind() -> None:
    """It was in memory for eight of them alone: what was left out was torn at a failover."""
    scene = Scene()
    decisions = [_Decision(end=10 * each, epoch=each, there=True) for each in range(1, 101)]
    for decision in decisions:
        scene.order.decided(KEY, decision)
    assert scene.order.earlier(KEY, decisions[-1]) == [(each + 1, each, 10 * each) for each in range(1, 100)]
    assert scene.data(8)
    assert scene.marker(9), "of the first one"
    assert not scene.given_up


def test_none_is_forgotten_before_a_partition_that_is_too_far_behind_is_in_sync_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(marker_order, "UNUSED_MAX", 3)
    scene = Scene()
    decisions = [_Decision(end=10 * each, epoch=each, there=True) for each in range(6)]
    for decision in decisions[:5]:
        scene.order.decided(KEY, decision)
    assert scene.given_up == 2
    assert len(scene.order.earlier(KEY, decisions[4])) == 4
    scene.in_sync = False
    scene.order.decided(KEY, decisions[5])
    assert [end for *_, end in scene.order.earlier(KEY, decisions[5])] == [10, 20, 30, 40]


def test_those_that_had_nothing_in_the_partition_are_not_remembered() -> None:
    scene = Scene()
    scene.order.decided(KEY, _Decision(epoch=0))
    assert scene.data(0)
    assert scene.marker(1)
    decisions = [_Decision(end=offset, epoch=offset) for offset in range(2, 9)]
    for offset, decision in enumerate(decisions, 2):
        scene.order.decided(KEY, decision)
        assert scene.marker(offset)
    still_open = _Decision(end=11, epoch=11)
    scene.order.decided(KEY, still_open)
    assert scene.marker(9), "again, of the one before"
    scene.stream.acked = 10
    scene.order.forget(lambda stream: True, lambda key: True)
    assert scene.order.missing(KEY, X) == [still_open]
    assert scene.data(10)
    assert scene.marker(11)
