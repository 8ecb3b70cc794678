"""The passes over one partition: what is equal, what is compared next, what is recorded; and how fast."""

from __future__ import annotations

import random

import pytest
from support.seeds import seeds

from isthmus_control.proofs import FoundDifference, Proof
from isthmus_plugins.replication.proof.passes import CHECKPOINT_MS, Pace, PartitionPasses

DAY_MS = 86_400_000
WEEK_MS = 7 * DAY_MS


def test_a_pass_goes_over_all_and_then_on_with_what_comes_until_the_next_one_is_due() -> None:
    passes = PartitionPasses(None, 1_000)
    assert not passes.is_whole
    passes.equal(50)
    passes.equal(80)
    assert (passes.at, passes.equal_until, passes.passed_ms) == (80, 80, 0)
    passes.reached_end()
    assert passes.is_whole
    passes.equal(95)
    assert not passes.is_due(WEEK_MS, 1_000 + WEEK_MS // 2)
    assert passes.is_due(WEEK_MS, 1_000 + WEEK_MS * 3 // 4)
    passes.begin(WEEK_MS)
    assert (passes.at, passes.equal_until, passes.passed_ms) == (0, 95, 1_000), "it was equal, and still counts"
    assert not passes.is_due(WEEK_MS, 10 * WEEK_MS), "it goes on"
    passes.equal(60)
    assert passes.equal_until == 95
    passes.equal(120)
    assert passes.equal_until == 120
    passes.reached_end()
    assert passes.passed_ms == WEEK_MS


def test_a_wall_clock_that_was_set_back_puts_no_pass_off() -> None:
    passes = PartitionPasses(None, 5_000_000)
    passes.reached_end()
    assert passes.is_due(WEEK_MS, 4_000_000)


def test_what_differs_is_compared_again_until_it_is_equal() -> None:
    passes = PartitionPasses(Proof(100, 7, 8, 40), 9)
    assert passes.differs(42, 50, "words", 10)
    assert (passes.at, passes.equal_until) == (40, 42)
    assert passes.difference == FoundDifference(42, 50, 10, "words")
    assert not passes.differs(42, 50, "words", 20), "known"
    passes.equal(50)
    assert (passes.at, passes.equal_until, passes.difference) == (50, 50, None)


def test_a_pass_does_not_end_before_what_differs_is_acknowledged() -> None:
    passes = PartitionPasses(None, 1)
    passes.reached_end()
    passes.begin(2)
    passes.differs(10, 20, "words", 3)
    assert not passes.is_due(1, WEEK_MS)
    passes.acknowledged()
    assert (passes.at, passes.equal_until, passes.difference) == (20, 10, None)
    passes.equal(30)
    assert passes.equal_until == 10, "what differs is before it"
    passes.reached_end()
    assert passes.is_whole
    passes.begin(4)
    passes.equal(30)
    assert passes.equal_until == 30, "found equal again"


def test_records_that_grew_old_differ_no_more() -> None:
    passes = PartitionPasses(Proof(0, 0, 1, 0), 1)
    passes.starts(5)
    assert (passes.at, passes.equal_until) == (5, 5)
    passes.equal(10)
    passes.differs(12, 20, "words", 2)
    passes.starts(11)
    assert passes.difference is not None, "it is still there"
    passes.starts(30)
    assert (passes.at, passes.equal_until, passes.difference) == (30, 30, None)


def test_a_log_that_lost_its_end_is_equal_no_further() -> None:
    passes = PartitionPasses(Proof(100, 1, 1, 100), 1)
    passes.ends(100)
    assert (passes.at, passes.equal_until) == (100, 100)
    passes.ends(70)
    assert (passes.at, passes.equal_until) == (70, 70)
    passes.differs(70, 80, "words", 2)
    passes.ends(70)
    assert passes.difference is None


def test_recorded_is_what_ended_what_differs_and_now_and_then_where_a_pass_stands() -> None:
    passes = PartitionPasses(None, 0)
    passes.equal(10)
    assert passes.to_record(None, 1_000) is None
    found = passes.to_record(None, CHECKPOINT_MS)
    assert found == Proof(10, 0, 0, 10)
    passes.equal(20)
    assert passes.to_record(found, CHECKPOINT_MS + 1_000) is None
    passes.begin(CHECKPOINT_MS + 1_500)
    passes.reached_end()
    found = passes.to_record(found, CHECKPOINT_MS + 2_000)
    assert found is not None
    assert found.passed_ms == CHECKPOINT_MS + 1_500
    assert passes.to_record(found, 9 * CHECKPOINT_MS) is None, "nothing is new"
    passes.differs(5, 9, "words", 3)
    assert passes.to_record(found, CHECKPOINT_MS + 3_000) == passes.proof
    again = PartitionPasses(passes.proof, 4)
    assert again.proof == passes.proof


@pytest.mark.parametrize("seed", seeds(20))
def test_no_order_of_events_says_that_more_is_equal_than_was_compared(seed: int) -> None:
    """By the model: which offsets were equal when they were compared last, and which were there."""
    rng = random.Random(seed)
    passes, now_ms, start, end = PartitionPasses(None, 0), 0, 0, 100
    differing: set[int] = set()
    equal: set[int] = set()
    for _ in range(400):
        now_ms += rng.randrange(3)
        match rng.randrange(8):
            case 0:
                end += rng.randrange(20)
            case 1:
                start = min(end, start + rng.randrange(10))
                passes.starts(start)
            case 2:
                end = max(start, end - rng.randrange(5))
                passes.ends(end)
                equal = {offset for offset in equal if offset < end}
            case 3:
                differing ^= {rng.randrange(start, end + 1)}
            case 4 if passes.difference is not None:
                passes.acknowledged()
            case 5:
                if passes.is_due(20, now_ms):
                    passes.begin(now_ms)
            case _:
                passes.ends(end)
                passes.starts(start)
                if passes.at == end:
                    passes.reached_end()
                    continue
                to = min(end, passes.at + rng.randrange(1, 30))
                found = min((each for each in differing if passes.at <= each < to), default=None)
                if found is None:
                    equal |= set(range(passes.at, to))
                    passes.equal(to)
                else:
                    equal = (equal | set(range(passes.at, found))) - set(range(found, to))
                    passes.differs(found, to, "words", now_ms)
        assert set(range(start, passes.equal_until)) <= equal
        assert passes.at <= end


def test_what_was_read_is_waited_for_and_idle_time_is_not_saved_up() -> None:
    pace = Pace(1_000)
    assert pace.wait_s(5.0) == 0
    pace.spend(500, 5.0)
    assert pace.wait_s(5.0) == pytest.approx(0.5)
    pace.spend(500, 5.5)
    assert pace.wait_s(5.5) == pytest.approx(0.5)
    assert pace.wait_s(100.0) == 0
    pace.spend(2_000, 100.0)
    assert pace.wait_s(100.0) == pytest.approx(2)
