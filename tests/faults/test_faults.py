"""A link under random faults, for as long as one likes: ``make test-faults``.

ISTHMUS_FAULTS_S is for how many seconds (20 in ``make test``, 600 in ``make test-faults``), ISTHMUS_FAULTS_SEED what
happens (``make test-faults`` takes the time). A failure prints the seed and what was done.
"""

from __future__ import annotations

import os
import time
from typing import Final

import pytest
from support.storm import Storm, scene

SECONDS: Final = float(os.environ.get("ISTHMUS_FAULTS_S", "20"))
SEED: Final = int(os.environ.get("ISTHMUS_FAULTS_SEED", "1"))
LONG_S: Final = 120.0
"""From this time on the target has three brokers, too: its partitions move."""

pytestmark = [
    pytest.mark.one_in_ci("faults", of="faults of records"),
    pytest.mark.brokers,
    pytest.mark.timeout(SECONDS + 600),
]


def test_nothing_is_lost_doubled_or_shifted_whatever_dies() -> None:
    with scene(3, 3 if SECONDS >= LONG_S else 1) as stage, Storm(stage, SEED) as storm:
        deadline = time.monotonic() + SECONDS
        rounds = 0
        while time.monotonic() < deadline:
            storm.round()
            rounds += 1
        storm.finish()
        assert rounds > 0
        print(f"seed {SEED}, {rounds} rounds", *storm.log, sep="\n")
