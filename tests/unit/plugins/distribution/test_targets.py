"""Which leaf a distributor writes to."""

from __future__ import annotations

import pytest
from support.trees import UNBALANCED

from isthmus_plugins.distribution.targets import Targets, target_of

HERE = ("cluster-5", 3)


@pytest.mark.parametrize(
    ("chosen", "current", "unusable", "expected"),
    [
        ({}, None, (), "cluster-2"),  # the second of its side goes to the second of the other
        ({}, "cluster-3", (), "cluster-3"),
        ({HERE: "cluster-1"}, "cluster-3", (), "cluster-1"),
        ({HERE: "cluster-1"}, "cluster-3", ("cluster-1",), "cluster-3"),
        ({}, "cluster-3", ("cluster-3",), "cluster-2"),
        ({}, "cluster-4", (), "cluster-2"),  # of another side by now
        ({}, None, ("cluster-1", "cluster-2"), "cluster-3"),
        ({}, "cluster-1", ("cluster-1", "cluster-2", "cluster-3"), None),
    ],
)
def test_chosen_then_as_it_is_then_by_turns(
    chosen: Targets, current: str | None, unusable: tuple[str, ...], expected: str | None
) -> None:
    assert target_of(UNBALANCED, *HERE, chosen, current=current, unusable=unusable) == expected


def test_a_leaf_alone_on_its_side_is_the_target_while_it_is_filled() -> None:
    assert target_of(UNBALANCED, "cluster-5", 1, {}, unusable=("cluster-4",)) == "cluster-4"
