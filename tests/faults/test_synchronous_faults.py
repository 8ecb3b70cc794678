"""A synchronous link under random faults, for as long as one likes: ``make test-faults``.

ISTHMUS_SYNC_FAULTS_S is for how many seconds (15 in ``make test``, 600 in ``make test-faults``), ISTHMUS_FAULTS_SEED
what happens, ISTHMUS_LONG_CUT_S how long the link is cut at last (0: not). The seed also says whether the clocks of
the source's brokers and proxy are an hour ahead, or behind, or right.
"""

from __future__ import annotations

import os
import time
from typing import Final

import pytest
from support.clocks import HOUR_S
from support.storm import scene
from support.sync_storm import SynchronousStorm

SECONDS: Final = float(os.environ.get("ISTHMUS_SYNC_FAULTS_S", "15"))
LONG_CUT_S: Final = float(os.environ.get("ISTHMUS_LONG_CUT_S", "0"))
SEED: Final = int(os.environ.get("ISTHMUS_FAULTS_SEED", "1"))
LONG_S: Final = 120.0
"""From this time on the link is cut for half a minute, too."""

pytestmark = [
    pytest.mark.one_in_ci("faults", of="faults of records"),
    pytest.mark.brokers,
    pytest.mark.timeout(SECONDS + LONG_CUT_S + 600),
]


def test_what_was_acked_in_sync_is_at_the_other_side_whatever_happens() -> None:
    clock_s = (0, HOUR_S, -HOUR_S)[SEED % 3]
    with (
        scene(3 if LONG_CUT_S else 1, 1, clock_s) as stage,
        SynchronousStorm(stage, SEED, long=SECONDS >= LONG_S) as storm,
    ):
        storm.cut(5.0)(stage, storm.random)
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            storm.round()
        if LONG_CUT_S:
            storm.cut(LONG_CUT_S)(stage, storm.random)
        storm.finish()
        assert storm.looked > 0
        print(f"seed {SEED}, clock {clock_s:+d} s, {storm.looked} acked records looked for", *storm.log, sep="\n")
