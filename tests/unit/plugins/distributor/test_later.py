"""The first message later than a time: markers of transactions are none, and what was read is not read again."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.partition_log import control_batch
from support.records import PLAIN

from isthmus_plugins.cluster import BrokerUnavailable, Fetched, FetchPartition
from isthmus_plugins.distributor import later
from isthmus_plugins.distributor.followed import TimedLog
from isthmus_plugins.distributor.later import Found, Later, Searched
from isthmus_protocol.record_codec import Record, encode_batch
from isthmus_protocol.records import read_header

PLACE, TOPIC_ID = ("t", 0), bytes(16)


class Log:
    """Batches, one of which a read returns."""

    def __init__(self, *batches: bytes) -> None:
        self.batches = batches
        self.asked: list[int] = []
        self.asked_bytes: list[int] = []
        self.error_code = 0
        self.leader_epoch = 0
        self.end = 0
        """If it is behind the last batch."""

    async def leader_of(self, topic: str, partition: int) -> int:
        return 1

    async def fetch_connection(self, broker_id: int, lane: str) -> Any:
        return SimpleNamespace(fetch=self.fetch)

    async def fetch(self, partitions: list[FetchPartition], wait_max_ms: int, bytes_max: int) -> list[Fetched]:
        (asked,) = partitions
        self.asked.append(asked.offset)
        self.asked_bytes.append(bytes_max)
        assert asked.leader_epoch == self.leader_epoch
        end = self.end or read_header(self.batches[-1]).next_offset
        found = next((each for each in self.batches if read_header(each).next_offset > asked.offset), b"")
        return [Fetched(TOPIC_ID, 0, self.error_code, end, 0, memoryview(found))]


def batch(offset: int, *timestamps: int) -> bytes:
    return encode_batch([Record(offset + number, each, None, b"v") for number, each in enumerate(timestamps)], PLAIN)


def marker(offset: int, timestamp: int) -> bytes:
    return control_batch(offset, True, producer_id=1, producer_epoch=0, timestamp=timestamp)


def look(found: Later, time: int, offset: int = 0, leader_epoch: int = 0) -> Found:
    return asyncio.run(found.first(PLACE, TimedLog(TOPIC_ID, leader_epoch, 0, 0), time, offset))


def first(found: Later, time: int, offset: int = 0, leader_epoch: int = 0) -> int | None:
    there = look(found, time, offset, leader_epoch)
    assert not there.is_far
    return there.offset


def test_markers_are_no_messages() -> None:
    log: Any = Log(batch(0, 10, 20), marker(2, 10_000), batch(3, 30, 15, 40), marker(6, 10_000))
    assert [first(Later(log), time) for time in (9, 10, 19, 20, 29, 30, 39)] == [0, 1, 1, 3, 3, 5, 5]
    assert first(Later(log), 40) is None
    assert first(Later(log), 20, 4) == 5


def test_what_was_read_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    log: Any = Log(*(batch(offset, offset) for offset in range(10)))
    found = Later(log)
    assert first(found, 5) == 6
    log.asked.clear()
    assert first(found, 7) == 8
    assert log.asked == [6, 7, 8]
    assert first(found, 2) == 3  # of an earlier time nothing is known
    # Where it is far, it is somewhere before.
    monkeypatch.setattr(later, "LOOK_BYTES_MAX", 1)
    found = Later(log)
    far = [look(found, 8) for _ in range(9)]
    assert far == [Found(offset, is_far=True) for offset in range(1, 10)]
    assert first(found, 8) == 9


def test_groups_at_different_times_hold_none_another_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each goes on from where it was, whoever was looked for in between."""
    monkeypatch.setattr(later, "LOOK_BYTES_MAX", 1)
    log: Any = Log(*(batch(offset, offset) for offset in range(30)))
    found = Later(log)
    for _ in range(20):
        late, early = look(found, 18), look(found, 9)
    assert (late, early) == (Found(19), Found(10))


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=40), st.integers(0, 20), st.integers(1, 5))
def test_what_is_known_of_earlier_times_is_known_of_later_ones(
    known: list[tuple[int, int]], time: int, times_max: int
) -> None:
    exact, some = Searched(TOPIC_ID, 0), Searched(TOPIC_ID, 0)
    for each in known:
        exact.add(*each)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(later, "TIMES_MAX", times_max)
            some.add(*each)
    assert exact.offset(time) == max((offset for each, offset in known if each <= time), default=0)
    assert some.offset(time) <= exact.offset(time)
    assert len(some._known) <= times_max


def test_a_batch_is_read_first_and_much_only_behind_it() -> None:
    log: Any = Log(*(batch(offset, offset) for offset in range(3)))
    assert first(Later(log), 1) == 2
    assert log.asked_bytes == [later.FIRST_BYTES, later.READ_BYTES, later.READ_BYTES]


def test_what_was_read_of_a_log_that_has_lost_its_end_since_counts_for_nothing() -> None:
    log: Any = Log(*(batch(offset, 1) for offset in range(10)))
    found = Later(log)
    assert first(found, 5) is None
    log.leader_epoch = 1
    log.batches = (*log.batches[:5], batch(5, 8), *(batch(offset, 9) for offset in range(6, 12)))
    assert first(found, 5, leader_epoch=1) == 5


def test_a_hole_at_the_end_of_a_log_is_waited_at() -> None:
    log: Any = Log(batch(0, 1), batch(1, 2))
    log.end = 5
    assert look(Later(log), 3) == Found(2, is_far=True)
    assert log.asked == [0, 1, 2]


def test_a_log_that_cannot_be_read() -> None:
    log: Any = Log(batch(0, 1))
    log.error_code = 6
    with pytest.raises(BrokerUnavailable, match="t-0: error 6 at offset 0"):
        first(Later(log), 0)
