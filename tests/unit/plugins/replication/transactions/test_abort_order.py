"""A decision waits for what was aborted before it, as long as the producer's epoch does not tell them apart."""

from __future__ import annotations

from isthmus_plugins.cluster import TopicPartition
from isthmus_plugins.replication.transactions import abort_order
from isthmus_plugins.replication.transactions.abort_order import AbortOrder
from isthmus_protocol.transaction_log import Change, Transaction, TransactionState

X, Y = 7, 8
P, Q = ("t", 0), ("t", 1)
ONGOING, PREPARE_ABORT = TransactionState.ONGOING, TransactionState.PREPARE_ABORT
COMPLETE_ABORT = TransactionState.COMPLETE_ABORT


class Scene:
    def __init__(self) -> None:
        self.order = AbortOrder()

    def take(self, state: TransactionState, *places: TopicPartition, client: int = 1, producer_id: int = X) -> None:
        transaction = Transaction(producer_id, 0, state, places, client)
        self.order.take(Change(f"app-{producer_id}", transaction, 0), lambda place: place[0] == "t")

    def read(self, **ends: int) -> None:
        self.order.read(self.order.begin_reading(), {P: ends.get("p0"), Q: ends.get("p1")})


def test_a_decision_waits_for_the_end_of_what_its_producer_aborted() -> None:
    scene = Scene()
    scene.take(ONGOING, P, Q)
    assert scene.order.unread
    assert scene.order.before(X, P) is None
    scene.read(p0=3, p1=4)
    assert (scene.order.before(X, P), scene.order.before(X, Q), scene.order.unread) == (3, 4, [])
    scene.take(PREPARE_ABORT, P)
    assert scene.order.before(X, P) == 3
    scene.take(COMPLETE_ABORT)
    assert scene.order.before(X, P) is None
    scene.read(p0=9)
    assert (scene.order.before(X, P), scene.order.before(X, Q), scene.order.before(Y, P)) == (9, 4, 3)


def test_an_end_that_was_being_read_does_not_count_for_what_was_aborted_since() -> None:
    scene = Scene()
    scene.take(PREPARE_ABORT, P)
    scene.take(COMPLETE_ABORT)
    reading = scene.order.begin_reading()
    scene.take(PREPARE_ABORT, P)
    scene.take(COMPLETE_ABORT)
    scene.order.read(reading, {P: 5})
    assert scene.order.before(X, P) is None
    scene.read(p0=6)
    assert scene.order.before(X, P) == 6


def test_epochs_of_their_own_and_other_partitions_need_nothing() -> None:
    scene = Scene()
    for place, client in ((P, 2), (("other", 0), 1)):
        for state in (ONGOING, PREPARE_ABORT, COMPLETE_ABORT):
            scene.take(state, place, client=client)
    assert not scene.order.unread


def test_what_was_aborted_while_the_log_was_not_read_counts() -> None:
    scene = Scene()
    scene.take(ONGOING, P)
    scene.read(p0=3)
    scene.order.begin_anew()
    assert scene.order.before(X, P) is None
    scene.read(p0=5)
    assert scene.order.before(X, P) == 5
    assert scene.order.before(X, Q) is None, "it was never listed"
    scene.read()
    assert scene.order.before(X, Q) == 0, "it is gone"


def test_of_too_many_the_last_end_counts_for_all() -> None:
    scene = Scene()
    scene.take(ONGOING, P)
    scene.read(p0=2)
    for producer_id in range(abort_order.ENDS_MAX + 2):
        scene.take(PREPARE_ABORT, P, producer_id=producer_id)
        scene.take(COMPLETE_ABORT, producer_id=producer_id)
        if producer_id == 0:
            scene.read(p0=5)
            assert (scene.order.before(0, P), scene.order.before(1, P)) == (5, 2)
    assert len(scene.order._last) <= abort_order.ENDS_MAX
    assert scene.order.before(0, P) is None, "the second was forgotten before its end was read"
    scene.read(p0=7)
    assert scene.order.before(0, P) == 7
    scene.take(PREPARE_ABORT, P, producer_id=X)
    scene.take(COMPLETE_ABORT, producer_id=X)
    assert scene.order.before(0, P) == 7


def test_an_abort_that_concerns_nobody_is_covered_by_an_end_of_later() -> None:
    scene = Scene()
    scene.take(ONGOING, P)
    scene.read(p0=2)
    scene.take(PREPARE_ABORT, P)
    transaction = Transaction(X, 0, COMPLETE_ABORT, (), 1)
    scene.order.take(Change(f"app-{X}", transaction, 0), lambda place: False)
    assert scene.order.before(X, P) is None
    scene.read(p0=6)
    assert scene.order.before(X, P) == 6


def test_of_a_log_that_was_made_anew_the_new_end_counts() -> None:
    scene = Scene()
    scene.take(PREPARE_ABORT, P)
    scene.take(COMPLETE_ABORT)
    assert scene.order.before(X, P) is None
    scene.read(p0=1000)
    scene.order.ended(X, {P: 900}, scene.order.readings - 1)
    assert scene.order.before(X, P) == 1000, "it may have been read before"
    scene.order.ended(X, {P: 4}, scene.order.readings)
    assert scene.order.before(X, P) is None
    scene.read(p0=5)
    assert scene.order.before(X, P) == 5
    scene.order.ended(X, {P: 6}, scene.order.readings)
    assert scene.order.before(X, P) == 5
