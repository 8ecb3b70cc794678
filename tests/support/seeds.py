"""Seeds of simulations: CI tries one half of a simulation's, chosen by the tree, ``make test-fuzz`` all and more."""

from __future__ import annotations

import os
from typing import Any

import pytest


def seeds(count: int) -> list[Any]:
    """Parameters. ``count``: unless ISTHMUS_SIM_SEEDS says how many; ISTHMUS_SIM_FIRST_SEED is the first one.

    The halves are the lower and the higher ones: what is simulated often goes by a seed's remainders.
    """
    count = int(os.environ.get("ISTHMUS_SIM_SEEDS", count))
    first = int(os.environ.get("ISTHMUS_SIM_FIRST_SEED", "0"))
    halves = [pytest.mark.one_in_ci("fuzz", case=half) for half in ("lower", "higher")]
    return [pytest.param(first + number, marks=halves[2 * number // count]) for number in range(count)]
