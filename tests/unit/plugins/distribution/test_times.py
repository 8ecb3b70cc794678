"""Committed offsets by time: the least timestamp, the margin, and what lies before the position that comes of it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus_plugins.distribution.times import (
    ENTRIES_MAX,
    MARGIN_MS,
    LeastTimestamps,
    NotSet,
    moves_on,
    position_at,
    reached,
    time_to_send,
)

TIMES = st.integers(0, 50)


def least_of(timestamps: list[int], entries_max: int = 1000) -> LeastTimestamps:
    least = LeastTimestamps(entries_max)
    for offset, timestamp in enumerate(timestamps):
        least.appended(offset, timestamp)
    return least


@settings(deadline=None)
@given(st.lists(TIMES, max_size=30), st.integers(0, 31))
def test_the_least_timestamp_from_an_offset_on(timestamps: list[int], offset: int) -> None:
    unread = timestamps[offset:]
    expected = min(unread) if unread else timestamps[-1] + 1 if timestamps else None
    assert least_of(timestamps).since(offset) == expected


@settings(deadline=None)
@given(st.lists(TIMES, max_size=60), st.integers(0, 61), st.integers(2, 5))
def test_it_is_never_too_late_in_bounded_memory(timestamps: list[int], offset: int, entries_max: int) -> None:
    least = least_of(timestamps, entries_max)
    found, exact = least.since(offset), least_of(timestamps).since(offset)
    assert (found is None) == (exact is None)
    assert found is None or exact is None or found <= exact
    assert len(least._entries) <= entries_max


def test_many_groups_are_looked_up_in_a_log_once_a_second() -> None:
    class Counted(int):
        compared = 0

        def __gt__(self, other: int) -> bool:
            Counted.compared += 1
            return int(self) > other

        def __le__(self, other: int) -> bool:
            return not self > other

    least = LeastTimestamps()
    for offset in range(ENTRIES_MAX):
        least.appended(offset, offset)
    assert least.from_offset(Counted(ENTRIES_MAX - 1)) == ENTRIES_MAX - 1
    assert Counted.compared < 20


def test_an_hour_late_message_holds_the_time_back() -> None:
    hour = 3_600_000
    least = least_of([10 * hour, 10 * hour + 1, 9 * hour, 10 * hour + 2])
    assert [least.since(offset) for offset in range(5)] == [9 * hour] * 3 + [10 * hour + 2, 10 * hour + 3]


def test_the_document_has_an_example() -> None:
    """Messages 1 to 24 were deleted, 25 and 30 read, 35 is next: its time less a minute is sent."""
    least = LeastTimestamps()
    for offset, minute in ((25, 5), (30, 6), (35, 7)):
        least.appended(offset, minute * 60_000)
    assert time_to_send(least.since(35), []) == 6 * 60_000
    # On the new cluster they have offsets 0, 1 and 2: the last one is later, so the group goes on at the one before.
    assert position_at(2, 0, None) == 1
    # A group that stopped at what is deleted goes on at the log's start.
    assert time_to_send(least.since(3), []) == 4 * 60_000
    assert position_at(0, 0, None) == 0


@st.composite
def merged_logs(draw: st.DrawFn) -> tuple[list[list[int]], list[int], int, list[int]]:
    """Of three clusters what each wrote (timestamps by message), what has come to the first one, how much of that a
    group has read there, and what has come to the second, each in any order."""
    written = draw(st.lists(st.lists(TIMES, max_size=8), min_size=3, max_size=3))
    messages = range(sum(map(len, written)))
    some = st.permutations(messages)
    here = draw(some)[: draw(st.integers(0, len(messages)))]
    there = draw(some)[: draw(st.integers(0, len(messages)))]
    return written, here, draw(st.integers(0, len(here))), there


@settings(deadline=None)
@given(merged_logs(), st.integers(1, 5))
def test_nothing_unread_lies_before_the_position(
    merged: tuple[list[list[int]], list[int], int, list[int]], margin_ms: int
) -> None:
    written, here, committed, there = merged
    times = [timestamp for of_cluster in written for timestamp in of_cluster]
    origins = [cluster for cluster, of_cluster in enumerate(written) for _ in of_cluster]
    on_the_way = [
        min(
            (times[message] for message in range(len(times)) if origins[message] == cluster and message not in here),
            default=60,
        )
        for cluster in range(3)
    ]
    sent = time_to_send(least_of([times[message] for message in here]).since(committed), on_the_way, margin_ms)
    if sent is None:
        assert not here
        return
    first_later = next((offset for offset, message in enumerate(there) if times[message] > sent), None)
    position = position_at(first_later, 0, None)
    if isinstance(position, int):
        read = set(here[:committed])
        assert set(there[:position]) <= read


def test_a_batch_counts_as_its_earliest_record() -> None:
    least = LeastTimestamps()
    least.appended(4, 10, last=30)
    least.appended(9, 40, last=35)
    assert [least.since(offset) for offset in (0, 4, 5, 9, 10)] == [10, 10, 40, 40, 36]
    assert [least.from_offset(offset) for offset in (0, 9, 10)] == [10, 40, None]


def test_what_a_cluster_has_reached() -> None:
    assert reached(100, None) == 100
    assert (reached(100, 90), reached(100, 110)) == (90, 100)


def test_a_time_moves_on_by_a_tenth_of_the_margin() -> None:
    assert moves_on(None, 5, 100)
    assert [moves_on(50, now, 100) for now in (49, 50, 59, 60)] == [True, False, False, True]
    assert [moves_on(50, now, 1) for now in (50, 51)] == [False, True]


def test_what_is_not_known_is_not_sent() -> None:
    assert time_to_send(100_000, [200_000, 90_000]) == 90_000 - MARGIN_MS
    assert time_to_send(100_000, [200_000, None]) is None
    assert time_to_send(None, [200_000]) is None
    with pytest.raises(ValueError, match="at least 1 ms"):
        time_to_send(1, [], 0)


@pytest.mark.parametrize(
    ("first_later", "committed", "may_go_back", "expected"),
    [
        (7, None, False, 6),
        (7, 5, False, 6),
        (7, 9, False, NotSet.WENT_ON),
        (7, 9, True, 6),
        (None, None, False, NotSet.NOT_REACHED),
        (3, None, False, 3),
    ],
)
def test_what_is_committed_at_the_receiver(
    first_later: int | None, committed: int | None, may_go_back: bool, expected: int | NotSet
) -> None:
    assert position_at(first_later, 3, committed, may_go_back=may_go_back) == expected
