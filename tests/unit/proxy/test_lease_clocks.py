"""What the wall clock says of time that a proxy's clock does not know of."""

from __future__ import annotations

import time

import pytest

from isthmus.lease_clocks import Clocks, now, ran_ahead_s

SINCE = Clocks(100.0, 1_700_000_000.0)


@pytest.mark.parametrize(("passed", "wall", "ahead"), [(10, 10, 0), (10, 70, 60), (10, -3600, 0), (10, 14, 4)])
def test_time_that_only_the_wall_clock_knows_of(passed: float, wall: float, ahead: float) -> None:
    moment = Clocks(SINCE.monotonic + passed, SINCE.wall + wall)
    assert ran_ahead_s(SINCE, moment) == pytest.approx(ahead)


def test_the_clock_goes_on_while_the_machine_is_suspended() -> None:
    before, moment, after = time.clock_gettime(time.CLOCK_BOOTTIME), now(), time.clock_gettime(time.CLOCK_BOOTTIME)
    assert before <= moment.monotonic <= after


def test_the_clocks_of_this_machine_run_together() -> None:
    since = now()
    moments = [now() for _ in range(100)]
    assert max(ran_ahead_s(since, each) for each in moments) < 0.1
    assert moments[-1].monotonic >= since.monotonic
