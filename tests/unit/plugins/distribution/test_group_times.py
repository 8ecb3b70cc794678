"""What goes from cluster to cluster of a group: it reads as it was written, and the application's metadata is kept."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus_plugins.distribution.group_times import (
    GroupTime,
    MalformedTime,
    Spread,
    counts,
    is_news,
    key_of,
    knows,
    read_key,
    unmarked,
    was_last_here,
)
from isthmus_protocol.offsets_log import OffsetKey

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
NUMBERS = st.integers(-(2**63), 2**63 - 2)
FLAGS = st.integers(1, 2**63 - 1)


@settings(deadline=None)
@given(TEXTS, st.from_regex(r"[A-Za-z0-9._-]{1,20}", fullmatch=True), st.integers(0, 2**31 - 1))
def test_a_key_reads_as_it_was_written(group: str, topic: str, partition: int) -> None:
    key = OffsetKey(group, topic, partition)
    assert read_key(key_of(key)) == key


def test_a_key_is_as_document_000_has_it() -> None:
    assert key_of(OffsetKey("a|b", "orders", 3)) == b"a|b|orders|3"


@settings(deadline=None)
@given(NUMBERS, NUMBERS, TEXTS, TEXTS, FLAGS, st.integers(1, 10_000), st.integers(0, 2**63 - 2))
def test_a_time_reads_as_it_was_written(
    time: int, committed_ms: int, origin: str, metadata: str, flags: int, partitions: int, spread_ms: int
) -> None:
    said = GroupTime(time, committed_ms, origin, metadata, flags, partitions, spread_ms)
    assert GroupTime.of(said.value(), flags) == said
    assert unmarked(said.marked()) == (flags, metadata)


def test_one_of_an_earlier_version_does_not_say_what_it_knew() -> None:
    value = b'{"time":5,"committed_ms":100,"origin":"c1","metadata":"m"}'
    assert GroupTime.of(value, 8) == GroupTime(5, 100, "c1", "m", 8, partitions=0, spread_ms=0)


def test_earlier_versions_read_what_is_written() -> None:
    """They look for four fields."""
    found = json.loads(GroupTime(5, 100, "c1", "m", 8, 3, 7).value())
    assert [found[name] for name in ("time", "committed_ms", "origin", "metadata")] == [5, 100, "c1", "m"]
    assert found.keys() - {"time", "committed_ms", "origin", "metadata"} == {"partitions", "spread_ms"}


@settings(deadline=None)
@given(TEXTS)
def test_a_commit_of_an_application_has_no_flags(metadata: str) -> None:
    assert unmarked(metadata) == (0, metadata)


@pytest.mark.parametrize("key", [None, b"", b"g", b"t|1", b"g|t|x", b"\xff|t|1"])
def test_nothing_else_is_a_key(key: bytes | None) -> None:
    with pytest.raises(MalformedTime, match=r"is not group\|topic\|partition"):
        read_key(key)


NO_TIMES = [
    b"",
    b"\xff",
    b"[]",
    b"1",
    b"{}",
    b'{"time":"x","committed_ms":1,"origin":"c"}',
    b'{"time":1e999,"committed_ms":1,"origin":"c","metadata":""}',
    b'{"time":9223372036854775807,"committed_ms":1,"origin":"c","metadata":""}',
    b'{"time":1,"committed_ms":1,"origin":"c","metadata":null}',
    b'{"time":1,"committed_ms":1,"origin":"c","metadata":"","partitions":"2"}',
    b'{"time":1,"committed_ms":1,"origin":"c","metadata":"","partitions":-1}',
    b'{"time":1,"committed_ms":1,"origin":"c","metadata":"","partitions":2,"spread_ms":null}',
    b'{"time":1,"committed_ms":1,"origin":"c","metadata":"","partitions":2,"spread_ms":1e999}',
    b"[" * 100_000,
]
"""Text, numbers that are none or that no broker is to be asked for, what is too deep."""


@pytest.mark.parametrize("value", NO_TIMES, ids=lambda value: value[:40].decode("latin1"))
def test_nothing_else_is_a_time(value: bytes) -> None:
    with pytest.raises(MalformedTime, match="is no time of a group"):
        GroupTime.of(value, 0)


def test_the_last_commit_anywhere_counts() -> None:
    own, others = GroupTime(5, 100, "c1", ""), GroupTime(5, 100, "c2", "", 8)
    assert was_last_here(1, None)
    assert was_last_here(1, own)
    assert [was_last_here(committed_ms, others) for committed_ms in (99, 100, 101)] == [False, False, True]


def test_of_two_clusters_the_one_counts_at_which_the_group_committed_later() -> None:
    known = GroupTime(5, 100, "c1", "", 4)
    assert counts(known, None)
    assert counts(known._replace(time=1, committed_ms=50), known)
    others = [known._replace(origin="c2", committed_ms=committed_ms) for committed_ms in (99, 100, 101)]
    assert [counts(each, known) for each in others] == [False, False, True]


def test_a_time_is_told_again_where_it_is_earlier_or_has_gone_on_far_enough() -> None:
    known = GroupTime(1000, 100, "c1", "m")
    later = [known._replace(time=time) for time in (999, 1000, 1009, 1010)]
    assert [is_news(each, known, 100) for each in later] == [True, False, False, True]
    assert is_news(known._replace(metadata="other"), known, 100)
    assert is_news(known, None, 100)
    assert is_news(known, known._replace(flags=8), 100)
    assert not is_news(known._replace(committed_ms=200), known, 100)
    assert is_news(known._replace(partitions=3), known, 100)
    assert is_news(known._replace(spread_ms=3), known, 100)


KNOWN = [
    ((2, 0), (2, 2), 0, True),
    ((2, 0), (1, 2), 0, True),  # what the other cluster has said before it had more
    ((2, 0), (3, 2), 0, False),
    ((2, 0), (2, 3), 0, False),
    ((2, 0), (2, 2), 1, False),
    ((2, 5), (2, 2), 5, True),
    ((2, 5), (2, 2), 6, False),
    # Of an earlier version: not known.
    ((0, 0), (2, 2), 0, True),
    ((0, 0), (2, 3), 0, False),
    ((0, 0), (3, 2), 0, False),
    ((0, 0), (2, 2), 1, False),
]


@pytest.mark.parametrize(("told_of", "partitions", "spread_ms", "known"), KNOWN)
def test_who_has_told_a_time_knew_of_what_went_by_its_key_or_did_not(
    told_of: tuple[int, int], partitions: tuple[int, ...], spread_ms: int, known: bool
) -> None:
    said = GroupTime(1000, 100, "c1", "m", 8, *told_of)
    assert knows(said, Spread(partitions, spread_ms)) == known
