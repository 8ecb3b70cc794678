"""A tree of three clusters under random faults, for as long as one likes: ``make test-faults``.

ISTHMUS_TREE_FAULTS_S is for how many seconds in each mode (20 in ``make test``, 600 in ``make test-faults``),
ISTHMUS_FAULTS_SEED what happens, and which cluster has two brokers and proxies. A failure prints the seed and what was
done.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

import pytest
from support.tree_storm import NAMES, TreeStorm, scene

SECONDS: Final = float(os.environ.get("ISTHMUS_TREE_FAULTS_S", "20"))
SEED: Final = int(os.environ.get("ISTHMUS_FAULTS_SEED", "1"))
LONG_S: Final = 120.0
"""From this time on a cluster is lost for ever at last."""

pytestmark = [
    pytest.mark.one_in_ci("faults", of="faults of records"),
    pytest.mark.brokers,
    pytest.mark.timeout(SECONDS + 600),
]


@pytest.mark.parametrize("exactly_once", [True, False], ids=["exactly-once", "at-least-once"])
def test_every_message_gets_to_every_cluster_whatever_dies(tmp_path: Path, exactly_once: bool) -> None:
    of_two = NAMES[SEED % len(NAMES)]
    with scene(of_two, tmp_path) as stage, TreeStorm(stage, SEED, exactly_once) as storm:
        deadline = time.monotonic() + SECONDS
        rounds = 0
        while time.monotonic() < deadline:
            storm.round()
            rounds += 1
        if SECONDS >= LONG_S:
            storm.lose_the_target()
        storm.finish()
        assert rounds > 0
        told = f"{rounds} rounds, {storm.messages} messages, there more than once: {dict(storm.doubled)}"
        print(f"\nseed {SEED}, {of_two} has two proxies, {told}", *storm.log, sep="\n")
