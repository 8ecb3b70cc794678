"""Covering arrays: few cases in which every pair of values comes up that a full product has."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

TRIES: Final = 30
"""Random rows of which the one is taken that covers most: more make the array shorter, and take longer."""

Row = dict[str, Any]


def product(dimensions: Mapping[str, Sequence[Any]], possible: Callable[[Row], bool] = lambda row: True) -> list[Row]:
    """Every possible combination of one value of each dimension."""
    rows = (dict(zip(dimensions, values, strict=True)) for values in itertools.product(*dimensions.values()))
    return [row for row in rows if possible(row)]


def pairwise(
    dimensions: Mapping[str, Sequence[Any]], possible: Callable[[Row], bool] = lambda row: True, seed: int = 0
) -> list[Row]:
    """Rows of the product that hold every pair of values of two dimensions that any possible row holds.

    Greedy, and the same for the same ``seed``: each row is the best of some that begin with a pair still to be covered.
    """
    rng = random.Random(seed)
    names = list(dimensions)
    wanted = dict.fromkeys(pair for row in product(dimensions, possible) for pair in _pairs(row, names))
    rows: list[Row] = []
    while wanted:
        best: Row = {}
        best_covers = 0
        for (one, value), (other, other_value) in rng.choices(list(wanted), k=TRIES):
            row = {name: rng.choice(list(values)) for name, values in dimensions.items()}
            row[one], row[other] = value, other_value
            for name in rng.sample(names, len(names)):  # each value as good as it can be, given the others
                if name not in (one, other):
                    choices = [{**row, name: each} for each in dimensions[name]]
                    row = max(choices, key=lambda each: (possible(each), _covers(each, names, wanted), rng.random()))
            if possible(row) and (covers := _covers(row, names, wanted)) > best_covers:
                best, best_covers = row, covers
        if best:
            rows.append(best)
            for pair in _pairs(best, names):
                wanted.pop(pair, None)
    return rows


Pair = tuple[tuple[str, Any], tuple[str, Any]]


def _pairs(row: Row, names: Sequence[str]) -> list[Pair]:
    return list(itertools.combinations([(name, row[name]) for name in names], 2))


def _covers(row: Row, names: Sequence[str], wanted: Mapping[Pair, None]) -> int:
    return sum(pair in wanted for pair in _pairs(row, names))
