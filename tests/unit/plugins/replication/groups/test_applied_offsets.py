"""How far coordinators have what they were told: in the order of the log, whatever the order in which it is done."""

from __future__ import annotations

import random

import pytest
from support.seeds import seeds

from isthmus_plugins.replication.groups.applied_offsets import AppliedOffsets

P, Q = ("t", 0), ("t", 1)


def test_a_part_is_applied_when_all_of_it_is_there() -> None:
    applied = AppliedOffsets()
    assert applied.upto == -1
    applied.received([("g", P), ("g", Q)], 10)
    assert not applied.advance()
    applied.has("g", P)
    assert not applied.advance()
    applied.has("g", Q)
    assert applied.advance()
    assert applied.upto == 10
    applied.received([], 12)
    assert applied.advance()
    assert applied.upto == 12


def test_what_is_there_first_waits_for_what_was_told_before() -> None:
    applied = AppliedOffsets()
    applied.received([("g", P)], 10)
    applied.received([("h", P)], 11)
    applied.has("h", P)
    assert not applied.advance()
    applied.has("g", P)
    assert applied.advance()
    assert applied.upto == 11


def test_a_newer_committed_offset_stands_for_those_before_it() -> None:
    applied = AppliedOffsets()
    for upto in (10, 11, 12):
        applied.received([("g", P)], upto)
    applied.has("g", P, 2)  # it was asked for when two parts had been told
    assert applied.advance()
    assert applied.upto == 11
    applied.resolve("g", lambda what: what == P)
    assert applied.advance()
    assert applied.upto == 12


def test_what_was_still_open_is_stored_before_a_part_counts() -> None:
    applied = AppliedOffsets()
    applied.received([("g", "p")], 10)
    applied.received([("g", "q")], 20, 15, {7: 15})
    applied.received([], 30)
    assert applied.to_store() is None
    applied.has("g", "q")
    assert applied.to_store() is None
    applied.has("g", "p")
    assert (applied.advance(), applied.upto) == (True, 10)
    assert applied.to_store() == (20, {7: 15})
    assert applied.to_store() is None, "it is under way"
    assert not applied.advance()
    applied.stored()
    assert (applied.advance(), applied.upto, applied.stable_offset) == (True, 30, -1)


def test_a_part_that_is_not_the_last_to_its_offset_confirms_nothing() -> None:
    applied = AppliedOffsets()
    applied.received([], None)
    assert not applied.advance()
    applied.received([("g", P)], 10)
    applied.resolve("g", lambda what: False)
    assert not applied.advance()
    applied.resolve("g", lambda what: True)
    assert applied.advance()
    assert applied.upto == 10


@pytest.mark.parametrize("seed", seeds(20))
def test_nothing_is_applied_before_it_is_there(seed: int) -> None:
    chance = random.Random(seed)
    applied, keys = AppliedOffsets(), [("g", P), ("g", Q), ("h", P)]
    wanted: dict[tuple[str, object], int] = {}
    has: dict[tuple[str, object], int] = {}
    by_upto: dict[int, dict[tuple[str, object], int]] = {}
    for upto in range(60):
        received = chance.sample(keys, chance.randint(0, 3))
        wanted |= dict.fromkeys(received, applied.number + 1)
        applied.received(received, upto)
        by_upto[upto] = dict(wanted)
        for key in chance.sample(keys, chance.randint(0, 3)):
            number = chance.randint(has.get(key, 0), applied.number)
            has[key] = number
            applied.has(*key, number)
        applied.advance()
        if applied.upto >= 0:
            assert all(has.get(key, 0) >= number for key, number in by_upto[applied.upto].items())
    for key in keys:
        applied.has(*key)
    applied.advance()
    assert applied.upto == 59
