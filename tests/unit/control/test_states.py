"""The transition tables, edge by edge."""

from __future__ import annotations

import pytest

from isthmus_control.model import LinkMode, Reason
from isthmus_control.states import (
    LINK_TRANSITIONS,
    PARTITION_TRANSITIONS,
    ImpossibleTransition,
    LinkEvent,
    LinkState,
    LinkStatus,
    PartitionEvent,
    PartitionState,
    PartitionStatus,
    ReasonCode,
    advance_link,
    advance_partition,
    combine,
    new_link,
    new_partition,
)

WHY = Reason(ReasonCode.CONNECTION_LOST, "gone")

# Rows are states, columns events; the letters are the states below, a dot is what cannot happen.
LINK_TABLE = """
     connected lost caught_up fell_behind mode_sync mode_async synced unsynced
D        C      D      .          .           .         .        .       .
C        .      D      F          C           .         .        .       .
F        .      D      F          C           S         .        .       .
S        S      S      .          .           .         C        I       .
I        .      O      .          .           .         F        .       O
O        O      O      .          .           .         C        I       .
"""
PARTITION_TABLE = """
     connected lost caught_up fell_behind mode_sync mode_async synced unsynced diverged refused stopped resumed
D        C      D      .          .           .         .        .       .        V        R       T       .
C        .      D      F          C           .         .        .       .        V        R       T       .
F        .      D      F          C           S         .        .       .        V        R       T       .
S        S      S      .          .           .         C        I       .        V        R       T       .
I        .      O      .          .           .         F        .       O        V        R       T       .
O        O      O      .          .           .         C        I       .        V        R       T       .
V        V      V      .          .           V         V        .       .        V        R       .       D
R        R      R      .          .           R         R        .       .        V        R       .       D
T        T      T      .          .           T         T        .       .        V        R       T       D
"""
LETTERS = "DCFSIOVRT"


def cells(table: str) -> list[tuple[str, int, str]]:
    rows = [line.split() for line in table.strip().splitlines()[1:]]
    return [(row[0], column, cell) for row in rows for column, cell in enumerate(row[1:])]


@pytest.mark.parametrize(("state", "column", "target"), cells(LINK_TABLE))
def test_each_edge_of_a_link(state: str, column: int, target: str) -> None:
    before = LinkStatus(list(LinkState)[LETTERS.index(state)], 5, WHY, 3)
    event = list(LinkEvent)[column]
    if target == ".":
        with pytest.raises(ImpossibleTransition, match=str(before.state.value)):
            advance_link(before, event, 9, WHY)
        return
    after = advance_link(before, event, 9, WHY)
    assert after.state is list(LinkState)[LETTERS.index(target)]
    assert after.since_ms == (5 if target == state else 9)
    assert after.heard_ms == 3


@pytest.mark.parametrize(("state", "column", "target"), cells(PARTITION_TABLE))
def test_each_edge_of_a_partition(state: str, column: int, target: str) -> None:
    before = PartitionStatus(list(PartitionState)[LETTERS.index(state)], 5, WHY, 3)
    event = list(PartitionEvent)[column]
    if target == ".":
        with pytest.raises(ImpossibleTransition, match=str(before.state.value)):
            advance_partition(before, event, 9, WHY)
        return
    after = advance_partition(before, event, 9, WHY)
    assert after.state is list(PartitionState)[LETTERS.index(target)]
    assert after.since_ms == (5 if target == state else 9)


def test_the_tables_hold_nothing_else() -> None:
    assert len(LINK_TRANSITIONS) == sum(cell != "." for _, _, cell in cells(LINK_TABLE))
    assert len(PARTITION_TRANSITIONS) == sum(cell != "." for _, _, cell in cells(PARTITION_TABLE))


def test_names_are_those_of_the_specification() -> None:
    assert [str(state) for state in LinkState] == [
        "Disconnected",
        "Catching Up",
        "Following",
        "Syncing",
        "In-Sync",
        "Out-Of-Sync",
    ]


def test_reasons() -> None:
    link = new_link(1)
    assert link.reason is not None
    assert link.reason.code == "NOT_CONNECTED_YET"
    link = advance_link(link, LinkEvent.CONNECTED, 2)
    assert link.reason is None
    with pytest.raises(ValueError, match="reason"):
        advance_link(link, LinkEvent.LOST, 3)
    assert advance_link(link, LinkEvent.LOST, 3, WHY).reason == WHY


def test_a_waiting_partition_keeps_its_reason_while_the_connection_comes_and_goes() -> None:
    diverged = Reason(ReasonCode.TARGET_WRITTEN_BY_OTHERS, "offset 7")
    status = advance_partition(new_partition(1), PartitionEvent.CONNECTED, 2)
    with pytest.raises(ValueError, match="reason"):
        advance_partition(status, PartitionEvent.DIVERGED, 3)
    status = advance_partition(status, PartitionEvent.DIVERGED, 3, diverged)
    status = advance_partition(status, PartitionEvent.LOST, 4, WHY)
    status = advance_partition(status, PartitionEvent.CONNECTED, 5)
    status = advance_partition(status, PartitionEvent.MODE_ASYNCHRONOUS, 5)
    assert (status.state, status.reason, status.since_ms) == (PartitionState.DIVERGED, diverged, 3)
    status = advance_partition(status, PartitionEvent.RESUMED, 6)
    assert (status.state, status.since_ms) == (PartitionState.DISCONNECTED, 6)
    assert status.reason is not None
    assert advance_partition(status, PartitionEvent.CONNECTED, 7).reason is None


def test_out_of_sync_says_why_until_it_is_over() -> None:
    status = LinkStatus(LinkState.IN_SYNC, 1, None)
    status = advance_link(status, LinkEvent.LOST, 2, WHY)
    status = advance_link(status, LinkEvent.CONNECTED, 3)
    assert (status.state, status.reason) == (LinkState.OUT_OF_SYNC, WHY)
    assert advance_link(status, LinkEvent.SYNCED, 4).reason is None


P = PartitionState


@pytest.mark.parametrize(
    ("mode", "connected", "partitions", "expected"),
    [
        ("asynchronous", True, [], LinkState.FOLLOWING),
        ("asynchronous", False, [P.FOLLOWING], LinkState.DISCONNECTED),
        ("asynchronous", True, [P.FOLLOWING, P.CATCHING_UP], LinkState.CATCHING_UP),
        ("asynchronous", True, [P.FOLLOWING, P.DISCONNECTED], LinkState.CATCHING_UP),
        ("asynchronous", True, [P.FOLLOWING, P.REFUSED], LinkState.FOLLOWING),
        ("synchronous", True, [], LinkState.SYNCING),
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
