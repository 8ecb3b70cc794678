"""Percentiles of what was measured, by nearest rank: always a value that was seen."""

from __future__ import annotations

import math
from collections.abc import Sequence


def percentile(ordered: Sequence[float], share: float) -> float:
    """The least value that ``share`` percent of them do not exceed; ``ordered`` ascends and is not empty."""
    return ordered[max(0, math.ceil(len(ordered) * share / 100) - 1)]
