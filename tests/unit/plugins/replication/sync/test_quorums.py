"""What an ack needs of several synchronous links."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from isthmus_control.demands import ALL, NEVER, NONE, Confirm, Consistency, Demands
from isthmus_control.model import Degraded, Reason, ResourceType, SyncRecord, SyncState
from isthmus_plugins.replication.partitions import LinkPartition
from isthmus_plugins.replication.sync.degrading import due_after_ms
from isthmus_plugins.replication.sync.progress import Progress
from isthmus_plugins.replication.sync.quorums import GroupScope, Quorum, Quorums
from isthmus_protocol.offsets_log import OFFSETS_TOPIC

PLACE = ("t", 0)
B, C, D = (LinkPartition(name, *PLACE) for name in "bcd")
IN, OUT = SyncState.IN_SYNC, SyncState.OUT_OF_SYNC
MINUTE_MS = 60_000


def quorums(confirm: Confirm = ALL, after_ms: int = NEVER, strict: bool = False) -> Quorums:
    consistency = Consistency.STRICT if strict else Consistency.AVAILABLE
    demands = Demands(consistency, degrade_after_ms=after_ms, confirm=confirm)
    state: Any = SimpleNamespace(lookup=SimpleNamespace(demands=lambda kind, name: demands))
    return Quorums(lambda: state)


def records(degraded_ms: int = 0, **states: SyncState) -> dict[str, SyncRecord]:
    degraded = Degraded(degraded_ms, 0, 0, "p", 1) if degraded_ms else None
    return {
        name: SyncRecord("id", state, 0, 0, None if state is IN else Reason("c", "m"), 1, True, degraded)
        for name, state in states.items()
    }


def needed(of: Quorums, known: dict[str, SyncRecord], transactional: bool = False, able: str = "bcd") -> set[Quorum]:
    return set(of.of_acks(PLACE, known, transactional, lambda key: key.link in able, 0.0))


def any_of(count: int, *keys: LinkPartition) -> Quorum:
    return Quorum(count, keys)


def test_by_default_each_must_have_it_that_is_in_sync_and_of_transactions_the_others_too() -> None:
    known = records(b=IN, c=OUT)
    assert needed(quorums(), known) == {any_of(1, B)}
    assert needed(quorums(), known, True) == {any_of(1, B), any_of(1, C)}
    assert needed(quorums(strict=True), known) == {any_of(1, B), any_of(1, C)}


def test_of_a_set_so_many_must_have_it_and_every_other_link() -> None:
    of = quorums(Confirm(1, ("b", "c")))
    assert needed(of, records(b=IN, c=IN)) == {any_of(1, B, C)}
    assert needed(of, records(b=IN, c=IN, d=IN)) == {any_of(1, B, C), any_of(1, D)}
    assert needed(of, records(b=IN)) == {any_of(1, B)}
    assert needed(of, {}) == set()


def test_one_that_may_leave_is_not_counted_on_while_there_are_enough() -> None:
    of = quorums(Confirm(1, ("b", "c")))
    assert needed(of, records(b=IN, c=IN), able="c") == {any_of(1, C)}
    assert needed(of, records(b=IN, c=IN), able="") == {any_of(1, B, C)}
    two = quorums(Confirm(2, ("b", "c", "d")))
    assert needed(two, records(b=IN, c=IN, d=IN), able="bc") == {any_of(2, B, C)}
    assert needed(two, records(b=IN, c=IN, d=IN), able="b") == {any_of(2, B, C, D)}, "before it is recorded"


def test_with_fewer_in_sync_plain_producers_wait_for_those_and_others_for_as_many_as_are_asked_for() -> None:
    of = quorums(Confirm(2, ("b", "c", "d")))
    known = records(b=IN, c=OUT, d=OUT)
    assert needed(of, known) == {any_of(1, B)}
    assert needed(of, known, True) == {any_of(1, B), any_of(2, B, C, D)}


def test_acks_go_without_what_is_degraded_as_long_as_its_namespaces_say_so() -> None:
    known = records(degraded_ms=MINUTE_MS, b=OUT)
    assert needed(quorums(after_ms=MINUTE_MS), known, True) == set()
    assert needed(quorums(after_ms=MINUTE_MS, strict=True), known) == set()
    assert needed(quorums(after_ms=2 * MINUTE_MS), known, True) == {any_of(1, B)}
    assert needed(quorums(), known, True) == {any_of(1, B)}
    assert needed(quorums(after_ms=MINUTE_MS), records(degraded_ms=MINUTE_MS, b=IN), True) == {any_of(1, B)}
    assert needed(quorums(after_ms=MINUTE_MS), records(b=OUT), True) == {any_of(1, B)}


def test_a_decision_is_with_all_of_a_set_that_are_in_sync() -> None:
    of = quorums(Confirm(1, ("b", "c")))
    assert set(of.of_decisions(PLACE, records(b=IN, c=IN))) == {any_of(1, B), any_of(1, C)}
    assert set(of.of_decisions(PLACE, records(b=IN, c=OUT))) == {any_of(1, B), any_of(1, B, C)}
    assert set(of.of_decisions(PLACE, records(b=OUT, c=OUT))) == {any_of(1, B, C)}
    assert set(quorums().of_decisions(PLACE, records(b=IN, c=OUT))) == {any_of(1, B), any_of(1, C)}


def test_transactions_go_on_without_one_of_a_set_while_enough_others_are_in_sync() -> None:
    of = quorums(Confirm(1, ("b", "c")), MINUTE_MS)
    assert of.goes_without(C, records(b=IN, c=OUT))
    assert not of.goes_without(C, records(b=OUT, c=OUT))
    assert not of.goes_without(C, records(b=IN, c=IN))
    assert not of.goes_without(D, records(b=IN, c=IN, d=OUT))
    assert of.goes_without(D, records(degraded_ms=MINUTE_MS, b=IN, c=IN, d=OUT))


def test_the_end_of_a_quorum() -> None:
    known = {B: (1, 10), C: (1, 7), D: (0, 99)}
    assert [any_of(count, B, C, D).end(known, 1) for count in (1, 2, 3)] == [10, 7, -1]
    assert any_of(1, B).end(known, 1) == 10
    assert any_of(1, B).end({}, 1) == -1


def test_what_was_promised_is_waited_for_until_the_lease_is_over() -> None:
    of = quorums(Confirm(1, ("b", "c")))
    of.promise(PLACE, {"": any_of(1, B)}, 5.0, 3.0)
    of.promise(PLACE, {"": any_of(1, B)}, 4.0, 3.5)

    def promised(now: float) -> set[Quorum]:
        return set(of.of_acks(PLACE, records(b=IN, c=IN), False, lambda key: True, now))

    assert promised(4.9) == {any_of(1, B, C), any_of(1, B)}
    assert promised(5.0) == {any_of(1, B, C)}


def test_what_may_have_been_acked_is_known_where_it_was_chosen() -> None:
    of = quorums(Confirm(1, ("b", "c")))
    of.may_be_acked(PLACE, b"1", 3, 10)
    of.may_be_acked(PLACE, b"1", 4, 7)
    of.may_be_acked(PLACE, None, 4, 8)
    assert of.acked(PLACE, b"1") == (4, 10)
    assert of.acked(PLACE, b"2") == (-1, -1), "another topic"
    of.may_be_acked(PLACE, b"2", 0, 1)
    assert of.acked(PLACE, b"2") == (0, 1)
    other = quorums()
    other.may_be_acked(PLACE, b"1", 3, 10)
    assert other.acked(PLACE, b"1") == (-1, -1)


def test_groups_of_one_partition_are_asked_for_apart() -> None:
    asked = {"any-": Demands(confirm=Confirm(1, ("b", "c"))), "all-": Demands(degrade_after_ms=MINUTE_MS)}
    lookup = SimpleNamespace(
        demands=lambda kind, name: asked[name] if kind is ResourceType.CONSUMER_GROUP else NONE,
        led_groups=lambda link: tuple(asked),
    )
    state: Any = SimpleNamespace(lookup=lookup)
    of, place = Quorums(lambda: state), (OFFSETS_TOPIC, 0)
    b, c = (LinkPartition(name, *place) for name in "bc")
    any_scope, all_scope = (GroupScope(prefix, ("b", "c")) for prefix in asked)

    def of_scope(scope: GroupScope, known: dict[str, SyncRecord], transactional: bool = False) -> set[Quorum]:
        return set(of.of_acks(place, known, transactional, lambda key: True, 0.0, scope))

    assert of_scope(any_scope, records(b=IN, c=IN)) == {any_of(1, b, c)}
    assert of_scope(all_scope, records(b=IN, c=IN)) == {any_of(1, b), any_of(1, c)}
    assert of_scope(any_scope, records(b=IN, c=OUT), True) == {any_of(1, b), any_of(1, b, c)}
    degraded = {**records(b=IN), **records(degraded_ms=MINUTE_MS, c=OUT)}
    assert of_scope(all_scope, degraded, True) == {any_of(1, b)}
    assert of.is_chosen(b)
    assert not of.goes_without(c, degraded), "of decisions the records alone say"
    of.promise(place, {"any-": any_of(1, c), "all-": any_of(1, b)}, 1.0, 0.0)
    assert of_scope(any_scope, records(b=IN, c=IN)) == {any_of(1, b, c), any_of(1, c)}
    assert any_of(1, c) in of_scope(GroupScope("any-", ("b", "c", "d")), records(b=IN, c=IN))
    of.may_be_acked(place, b"1", 0, 7, any_scope)
    of.may_be_acked(place, b"1", 0, 9, all_scope)
    assert [of.acked(place, b"1", prefix) for prefix in ("any-", "any-x", "all-", "")] == [
        *[(0, 7)] * 2,
        (-1, -1),
        (0, 7),
    ]


def test_of_several_times_the_longest_that_is_over_is_recorded() -> None:
    asked = {"slow-": Demands(degrade_after_ms=9_000), "fast-": Demands(degrade_after_ms=2_000), "x-": NONE}
    lookup = SimpleNamespace(demands=lambda kind, name: asked[name], led_groups=lambda link: tuple(asked))
    state: Any = SimpleNamespace(lookup=lookup)
    of, key, progress = Quorums(lambda: state), LinkPartition("b", OFFSETS_TOPIC, 0), Progress(0.0, 0)
    (record,) = records(b=OUT).values()

    def due(now: float, recorded_ms: int = 0) -> int | None:
        known = replace(record, degraded=Degraded(recorded_ms, 0, 0, "p", 1)) if recorded_ms else record
        return due_after_ms(of, key, known, progress, now)

    assert (due(10.0), due(11.9), due(12.0)) == (None, None, 2_000)
    assert (due(12.5, 2_000), due(19.0, 2_000), due(30.0, 9_000)) == (None, 9_000, None)
    assert due(19.5) == 9_000
