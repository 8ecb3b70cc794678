"""The offsets topic's records, compared with what Kafka's own classes wrote, and what they add up to."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.offsets import (
    KeyValue,
    commit,
    commit_key,
    deleted,
    group_gone,
    group_made,
    marker_batch,
    offsets_batch,
)

from isthmus_protocol.offsets_log import (
    Commit,
    GroupKey,
    GroupKind,
    OffsetKey,
    OffsetsLog,
    UnknownRecord,
    decode_commit,
    decode_key,
    partition_of,
)
from isthmus_protocol.record_codec import Marker
from isthmus_protocol.records import whole_header
from isthmus_protocol.wire import MalformedFrame

# Written by the generated classes of kafka-group-coordinator 4.3.0.
KEYS = [
    ("000000066170702dc3b600096f72646572732d657500000007", OffsetKey("app-ö", "orders-eu", 7)),
    ("000100066170702dc3b600096f72646572732d657500000007", OffsetKey("app-ö", "orders-eu", 7)),
    ("000200056170702d31", GroupKey("app-1", GroupKind.CLASSIC)),
    ("000300056170702d31", GroupKey("app-1", GroupKind.CONSUMER)),
    ("000500056170702d3100016d", GroupKey("app-1", None)),
    ("000800056170702d3100016d", GroupKey("app-1", None)),
    ("000b00056170702d31", GroupKey("app-1", GroupKind.SHARE)),
    ("001000056170702d310003612e2a", GroupKey("app-1", None)),
    ("001100056170702d31", GroupKey("app-1", GroupKind.STREAMS)),
]
COMMITS = [
    "00000000001cbe991a14000668c3a96c6c6f0000018bcfe5687b",
    "00010000001cbe991a14000668c3a96c6c6f0000018bcfe5687b000001a3185c5000",
    "00020000001cbe991a14000668c3a96c6c6f0000018bcfe5687b",
    "00030000001cbe991a1400000005000668c3a96c6c6f0000018bcfe5687b",
    "00040000001cbe991a14000000050768c3a96c6c6f0000018bcfe5687b01001000000000000000010000000000000002",
]


@pytest.mark.parametrize(("raw", "key"), KEYS)
def test_keys(raw: str, key: OffsetKey | GroupKey) -> None:
    assert decode_key(bytes.fromhex(raw)) == key


@pytest.mark.parametrize("raw", COMMITS)
def test_commits_of_every_version(raw: str) -> None:
    assert decode_commit(bytes.fromhex(raw), 42) == Commit(123456789012, "héllo", 1_700_000_000_123, 42)


def test_a_commit_without_metadata_and_tags() -> None:
    raw = bytes.fromhex("00040000000000000000ffffffff01000000000000000100")
    assert decode_commit(raw, 0) == Commit(0, "", 1, 0)


@pytest.mark.parametrize(
    ("group", "partition"), [("app-1", 5), ("", 0), ("polygenelubricants", 0), ("grüße-😀", 27), ("my-group", 12)]
)
def test_the_partition_of_a_group_is_javas(group: str, partition: int) -> None:
    assert partition_of(group, 50) == partition


def test_what_is_newer_is_not_guessed() -> None:
    with pytest.raises(UnknownRecord, match="type 24"):
        decode_key(struct.pack(">h", 24) + b"\x00\x01g")
    with pytest.raises(UnknownRecord, match="version 5"):
        decode_commit(struct.pack(">hq", 5, 1) + bytes(20), 0)


@given(st.sampled_from([raw for raw, _ in KEYS] + COMMITS), st.data())
def test_cut_bytes_are_malformed(raw: str, data: st.DataObject) -> None:
    whole = bytes.fromhex(raw)
    cut = whole[: data.draw(st.integers(0, len(whole) - 1))]
    decode = decode_key if any(raw == key for key, _ in KEYS) else lambda value: decode_commit(value, 0)
    try:
        decode(cut)
    except MalformedFrame:
        return
    # What stands behind the group of a key that is no commit is not read.
    assert decode is decode_key
    assert isinstance(decode_key(cut), GroupKey)


class Log:
    """An offsets log that grows."""

    def __init__(self, wanted: str = "app-") -> None:
        self.log = OffsetsLog(lambda group: group.startswith(wanted))
        self.end = 0

    def write(self, *records: KeyValue, producer_id: int = -1) -> set[OffsetKey]:
        return self._take(offsets_batch(self.end, records, producer_id))

    def end_transaction(self, producer_id: int, marker: Marker) -> set[OffsetKey]:
        return self._take(marker_batch(self.end, producer_id, marker))

    def _take(self, batch: bytes) -> set[OffsetKey]:
        header = whole_header(batch)
        self.end = header.next_offset
        return self.log.take(batch, header)

    def offsets(self, group: str = "app-1") -> dict[tuple[str, int], int]:
        found = self.log.groups.get(group)
        return {} if found is None else {place: each.offset for place, each in found.offsets.items()}


def test_the_newest_commit_of_wanted_groups_counts() -> None:
    log = Log()
    changed = log.write(commit("app-1", "t", 5), commit("app-1", "t", 7, partition=1), commit("other", "t", 9))
    assert changed == {OffsetKey("app-1", "t", 0), OffsetKey("app-1", "t", 1)}
    assert log.write(commit("app-1", "t", 4, metadata="rewound")) == {OffsetKey("app-1", "t", 0)}
    assert log.offsets() == {("t", 0): 4, ("t", 1): 7}
    assert log.log.groups["app-1"].offsets["t", 0] == Commit(4, "rewound", 1_700_000_000_000, 3)
    assert "other" not in log.log.groups


def test_a_transaction_counts_from_its_marker_on() -> None:
    log = Log()
    log.write(commit("app-1", "t", 1))
    assert log.write(commit("app-1", "t", 5), producer_id=9) == set()
    assert log.write(commit("app-1", "t", 6), producer_id=10) == set()
    assert log.offsets() == {("t", 0): 1}
    assert log.end_transaction(9, Marker.COMMIT) == {OffsetKey("app-1", "t", 0)}
    assert log.offsets() == {("t", 0): 5}
    assert log.log.groups["app-1"].counts_from == {("t", 0): 3}
    assert log.end_transaction(10, Marker.ABORT) == set()
    assert log.offsets() == {("t", 0): 5}
    assert log.end_transaction(10, Marker.COMMIT) == set()


def test_a_plain_commit_during_a_transaction_stays() -> None:
    log = Log()
    log.write(commit("app-1", "t", 5), producer_id=9)
    log.write(commit("app-1", "t", 8))
    assert log.end_transaction(9, Marker.COMMIT) == set()
    assert log.offsets() == {("t", 0): 8}


def test_deletions_and_what_they_leave() -> None:
    log = Log()
    log.write(group_made("app-1"), commit("app-1", "t", 5), commit("app-1", "u", 6))
    log.write(commit("app-1", "t", 9), producer_id=9)
    assert log.write(deleted("app-1", "t")) == {OffsetKey("app-1", "t", 0)}
    assert log.end_transaction(9, Marker.COMMIT) == set()
    assert log.offsets() == {("u", 0): 6}
    assert log.write(deleted("app-1", "t")) == set()
    log.write(deleted("app-1", "u"))
    assert log.log.groups["app-1"].kind is GroupKind.CLASSIC
    log.write(group_gone("app-1"))
    assert log.log.groups == {}


def test_a_group_that_changes_its_protocol() -> None:
    log = Log()
    log.write(group_made("app-1"), commit("app-1", "t", 5))
    log.write(group_made("app-1", type_=3), group_gone("app-1"))
    assert log.log.groups["app-1"].kind is GroupKind.CONSUMER
    log.write(group_gone("app-1", type_=3))
    assert log.log.groups["app-1"].kind is None
    assert log.offsets() == {("t", 0): 5}


def test_unknown_records_are_shown_and_the_committed_offset_is_not_guessed() -> None:
    log = Log()
    log.write(commit("app-1", "t", 5), commit("app-1", "u", 6))
    assert log.write((commit_key("app-1", "t"), struct.pack(">hq", 5, 1) + bytes(20))) == {OffsetKey("app-1", "t", 0)}
    group = log.log.groups["app-1"]
    assert group.unreadable == {("t", 0): "offset commit of version 5, at offset 2"}
    assert log.offsets() == {("t", 0): 5, ("u", 0): 6}
    log.write((struct.pack(">h", 99), b"?"))
    assert log.log.unknown == {"type 99": 3}
    log.write(commit("app-1", "t", 7))
    assert group.unreadable == {}


def test_what_open_transactions_have_committed_is_told() -> None:
    log = Log()
    log.write(commit("app-1", "t", 1), producer_id=7)
    log.write(commit("other", "t", 1), producer_id=8)
    log.write(commit("app-1", "t", 2, partition=1), producer_id=7)
    known = log.log
    first, second = OffsetKey("app-1", "t", 0), OffsetKey("app-1", "t", 1)
    assert list(known.take_pending_news()) == [(7, first), (7, second)]
    assert not known.take_pending_news()
    assert set(known.pending()) == {(7, first), (7, second)}
    found = known.pending_commit(7, second)
    assert found is not None
    assert isinstance(found[1], Commit)
    assert (found[1].offset, found[1].log_offset) == (2, 2)
    assert known.first_open(log.end) == 0
    log.write(deleted("app-1", "t"))
    assert list(known.take_pending_news()) == [(7, first)]
    found = known.pending_commit(7, first)
    assert found is not None
    assert found[1] is None
    assert log.end_transaction(7, Marker.COMMIT) == {second}
    assert known.pending_commit(7, second) is None
    assert known.first_open(log.end) == log.end


def test_what_takes_something_back_is_told() -> None:
    log = Log()
    undone = log.log.take_undone
    log.write(commit("app-1", "t", 5))
    log.write(commit("app-1", "t", 7))
    assert not undone(), "positions go on"
    log.write(commit("app-1", "t", 6))
    assert undone()
    assert not undone()
    log.write(commit("app-1", "t", 2), producer_id=7)
    assert not undone()
    log.end_transaction(7, Marker.COMMIT)
    assert undone()
    log.write(commit("app-1", "t", 9), producer_id=7)
    log.end_transaction(7, Marker.ABORT)
    assert undone()
    log.write(deleted("app-1", "t"))
    assert undone()
    log.write(deleted("app-1", "t"))
    assert not undone()
