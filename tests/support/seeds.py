"""Many seeds, examples and cases: CI tries a quarter, chosen by the tree, and ``make test-fuzz`` all and more."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Final

import pytest
from hypothesis import settings

THE_SAME: Final = "the same"
"""The profile of CI's properties, whose examples are always the same ones."""
EXAMPLES: Final = 100
"""Of a property that does not say how many."""


def quarters(cases: Sequence[Any]) -> list[Any]:
    """Parameters, of which CI tries a quarter: of cases that follow each other."""
    marks = [pytest.mark.one_in_ci("fuzz", case=f"quarter {number}") for number in range(1, 5)]
    return [
        pytest.param(*case, marks=marks[4 * number // len(cases)])
        for number, case in enumerate(each if isinstance(each, tuple) else (each,) for each in cases)
    ]


def seeds(count: int) -> list[Any]:
    """Parameters. ``count``: unless ISTHMUS_SIM_SEEDS says how many; ISTHMUS_SIM_FIRST_SEED is the first one.

    Quarters are of seeds that follow each other: what is simulated often goes by a seed's remainders.
    """
    count = int(os.environ.get("ISTHMUS_SIM_SEEDS", count))
    first = int(os.environ.get("ISTHMUS_SIM_FIRST_SEED", "0"))
    return quarters(range(first, first + count))


def examples(count: int = EXAMPLES) -> int:
    """How many examples of a property are tried, of so many."""
    return max(1, count // 4) if settings.get_current_profile_name() == THE_SAME else count
