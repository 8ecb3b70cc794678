"""Seeds of simulations: CI tries a quarter of a simulation's, chosen by the tree, ``make test-fuzz`` all and more."""

from __future__ import annotations

import os
from typing import Any

import pytest


def seeds(count: int) -> list[Any]:
    """Parameters. ``count``: unless ISTHMUS_SIM_SEEDS says how many; ISTHMUS_SIM_FIRST_SEED is the first one.

    Quarters are of seeds that follow each other: what is simulated often goes by a seed's remainders.
    """
    count = int(os.environ.get("ISTHMUS_SIM_SEEDS", count))
    first = int(os.environ.get("ISTHMUS_SIM_FIRST_SEED", "0"))
    quarters = [pytest.mark.one_in_ci("fuzz", case=f"quarter {number}") for number in range(1, 5)]
    return [pytest.param(first + number, marks=quarters[4 * number // count]) for number in range(count)]
