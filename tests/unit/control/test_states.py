"""The transition tables, edge by edge."""

from __future__ import annotations

import pytest

from isthmus_control.model import LinkMode
from isthmus_control.states import (
    LinkState,
    PartitionState,
    combine,
)


def test_names_are_those_of_the_specification() -> None:
    assert [str(state) for state in LinkState] == [
        "Disconnected",
        "Catching Up",
        "Following",
        "Syncing",
        "In-Sync",
        "Out-Of-Sync",
    ]


P = PartitionState


@pytest.mark.parametrize(
    ("mode", "connected", "partitions", "expected"),
    [
        ("asynchronous", True, [], LinkState.FOLLOWING),
        ("asynchronous", False, [P.FOLLOWING], LinkState.DISCONNECTED),
        ("asynchronous", True, [P.FOLLOWING, P.CATCHING_UP], LinkState.CATCHING_UP),
        ("asynchronous", True, [P.FOLLOWING, P.DISCONNECTED], LinkState.CATCHING_UP),
        ("asynchronous", True, [P.FOLLOWING, P.REFUSED], LinkState.CATCHING_UP),
        ("asynchronous", True, [P.FOLLOWING, P.STOPPED], LinkState.CATCHING_UP),
        ("synchronous", True, [], LinkState.IN_SYNC),
        ("synchronous", False, [], LinkState.OUT_OF_SYNC),
        ("synchronous", True, [P.IN_SYNC], LinkState.IN_SYNC),
        ("synchronous", True, [P.IN_SYNC, P.SYNCING], LinkState.SYNCING),
        ("synchronous", True, [P.IN_SYNC, P.OUT_OF_SYNC], LinkState.OUT_OF_SYNC),
        ("synchronous", True, [P.IN_SYNC, P.STOPPED], LinkState.OUT_OF_SYNC),
        ("synchronous", False, [P.IN_SYNC], LinkState.OUT_OF_SYNC),
    ],
)
def test_a_link_is_as_good_as_its_partitions(
    mode: str, connected: bool, partitions: list[PartitionState], expected: LinkState
) -> None:
    assert combine(LinkMode(mode), connected, partitions) is expected
    assert combine(LinkMode(mode), connected, partitions, all_else_is_in_sync=False) is (
        LinkState.SYNCING if expected is LinkState.IN_SYNC else expected
    )
