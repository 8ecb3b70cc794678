"""Copy flags: the worked example of document 000 as it prints it, both of its pictures, and random trees."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.trees import BALANCED, UNBALANCED, trees

from isthmus_plugins.distribution.copy_flags import (
    ALL_LEVELS,
    FlagsError,
    bit,
    digits,
    mask,
    passed_on,
    read_flags,
    write_flags,
)
from isthmus_plugins.distribution.plan import plan
from isthmus_plugins.distribution.tree import Tree


def copies(tree: Tree, origin: str, targets: dict[tuple[str, int], str] | None = None) -> list[tuple[str, int]]:
    """Where a message that is produced at ``origin`` gets to, with which flags, in the order of its copies."""
    distributors = plan(tree, targets or {})
    arrived = [(origin, 0)]
    for leaf, flags in arrived:
        assert len(arrived) < 100, "a loop"
        for distributor in distributors:
            if distributor.leaf == leaf and (produced := passed_on(flags, distributor.level)) is not None:
                arrived.append((distributor.target, produced))
    return arrived


def test_the_worked_example() -> None:
    """Four clusters, levels 3 and 1, a message that arrives at cluster 1."""
    flags = dict.fromkeys(BALANCED.leaves, 0)
    masks = {each.level: each.mask for each in plan(BALANCED, {})}
    assert {level: digits(value, 4) for level, value in masks.items()} == {1: "0001", 3: "0111"}
    # Both distributors of cluster 1 mask all zeroes, and have work to do.
    for level in (1, 3):
        assert flags["cluster-1"] & masks[level] == 0
    flags["cluster-2"] = passed_on(flags["cluster-1"], 1) or 0
    flags["cluster-3"] = passed_on(flags["cluster-1"], 3) or 0
    # On cluster 2 neither has: 0001 masked with 0001, and with 0111, is not zero.
    assert passed_on(flags["cluster-2"], 1) is None
    assert passed_on(flags["cluster-2"], 3) is None
    # On cluster 3 the one of level 3 has not, the one of level 1 copies to cluster 4.
    assert passed_on(flags["cluster-3"], 3) is None
    flags["cluster-4"] = passed_on(flags["cluster-3"], 1) or 0
    # On cluster 4 neither has. The document masks with 0100 here, a misprint of 0111; the result is the same.
    assert flags["cluster-4"] & 0b0100
    assert passed_on(flags["cluster-4"], 3) is None
    assert passed_on(flags["cluster-4"], 1) is None
    printed = {leaf: digits(value, 4) for leaf, value in flags.items()}
    assert printed == {"cluster-1": "0000", "cluster-2": "0001", "cluster-3": "0100", "cluster-4": "0101"}
    # The plan's own targets are the document's.
    assert dict(copies(BALANCED, "cluster-1")) == flags


def test_every_origin_of_the_balanced_picture() -> None:
    for origin, way in {
        "cluster-2": {"cluster-1": "0001", "cluster-4": "0100", "cluster-3": "0101"},
        "cluster-3": {"cluster-4": "0001", "cluster-1": "0100", "cluster-2": "0101"},
        "cluster-4": {"cluster-3": "0001", "cluster-2": "0100", "cluster-1": "0101"},
    }.items():
        assert {leaf: digits(flags, 4) for leaf, flags in copies(BALANCED, origin)} == {origin: "0000", **way}


def test_the_unbalanced_picture() -> None:
    levels = {leaf: [above.level for above in UNBALANCED.above(leaf)] for leaf in UNBALANCED.leaves}
    assert levels == {
        "cluster-1": [2, 3],
        "cluster-2": [1, 2, 3],
        "cluster-3": [1, 2, 3],
        "cluster-4": [1, 3],
        "cluster-5": [1, 3],
    }
    masks = {each.level: digits(each.mask, 4) for each in plan(UNBALANCED, {})}
    assert masks == {1: "0001", 2: "0011", 3: "0111"}
    for origin, way in {
        "cluster-1": {"cluster-2": "0010", "cluster-3": "0011", "cluster-4": "0100", "cluster-5": "0101"},
        "cluster-2": {"cluster-3": "0001", "cluster-1": "0010", "cluster-5": "0100", "cluster-4": "0101"},
        "cluster-4": {"cluster-5": "0001", "cluster-1": "0100", "cluster-2": "0110", "cluster-3": "0111"},
    }.items():
        assert {leaf: digits(flags, 4) for leaf, flags in copies(UNBALANCED, origin)} == {origin: "0000", **way}


@settings(deadline=None)
@given(trees(), st.data())
def test_every_message_gets_to_every_leaf_once_whatever_the_targets(tree: Tree, data: st.DataObject) -> None:
    targets = {
        (leaf, above.level): data.draw(st.sampled_from(above.beside))
        for leaf in tree.leaves
        for above in tree.above(leaf)
    }
    for origin in tree.leaves:
        arrived = Counter(leaf for leaf, _ in copies(tree, origin, targets))
        assert arrived == dict.fromkeys(tree.leaves, 1)


@settings(deadline=None)
@given(trees())
def test_what_a_leaf_is_filled_with_goes_no_further(tree: Tree) -> None:
    assert all(passed_on(ALL_LEVELS, each.level) is None for each in plan(tree, {}))


@settings(deadline=None)
@given(trees())
def test_bits_and_masks(tree: Tree) -> None:
    for leaf in tree.leaves:
        levels = [above.level for above in tree.above(leaf)]
        assert levels == sorted(set(levels))  # no two above one leaf have the same bit
        for level in levels:
            assert mask(level) == sum(bit(lower) for lower in range(1, level + 1))
            assert mask(level) <= ALL_LEVELS < 2**63


def test_the_header_is_eight_bytes_big_endian() -> None:
    assert write_flags(0b0101) == bytes((0, 0, 0, 0, 0, 0, 0, 5))
    assert write_flags(ALL_LEVELS) == b"\x7f" + b"\xff" * 7
    assert read_flags(write_flags(0x0102030405060708)) == 0x0102030405060708


@pytest.mark.parametrize(
    ("content", "said"), [(None, "null"), (b"", "0 bytes"), (b"\1" * 4, "4 bytes"), (b"\0" * 9, "9 bytes")]
)
def test_a_header_of_another_length_is_an_error(content: bytes | None, said: str) -> None:
    with pytest.raises(FlagsError, match=f"copy flags are 8 bytes, there are {said}"):
        read_flags(content)
