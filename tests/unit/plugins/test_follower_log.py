"""One follower partition's log: what may be appended next, and what an answer means."""

from __future__ import annotations

import pytest
from support.fake_cluster import batch

from isthmus_control.states import ReasonCode
from isthmus_plugins.replication import reasons
from isthmus_plugins.replication.follower_log import FollowerLog, LogState, Numbering, StopReason, not_copyable
from isthmus_protocol.producer_ids import IDS_PER_CLUSTER, ProducerIdOverflow, translate
from isthmus_protocol.records import (
    CONTROL_BIT,
    DELETE_HORIZON_BIT,
    LOG_APPEND_TIME_BIT,
    SEQUENCE_MAX,
    TRANSACTIONAL_BIT,
    CorruptBatch,
    MalformedBatch,
    whole_header,
)

NUMBERING = Numbering(source_index=3, target_index=5, link_number=1)


def opened(end: int = 0, last_sequence: int | None = None) -> FollowerLog:
    log = FollowerLog(NUMBERING)
    log.epoch = 0
    log.resume(end, last_sequence)
    return log


def three(*base_offsets: int, **more: int) -> memoryview:
    """Batches of three records each."""
    return memoryview(b"".join(batch(offset, [b"a", b"b", b"c"], **more) for offset in base_offsets))


def append_all(log: FollowerLog) -> list[int]:
    """Have everything appended where it belongs; the base offsets."""
    offsets = []
    while log.take() is not None:
        offsets.append(log.end)
        log.appended(log.end)
    return offsets


def test_nothing_is_sent_before_the_log_end_is_read() -> None:
    log = FollowerLog(NUMBERING)
    log.epoch = 0
    log.offer(three(0))
    assert log.state is LogState.RESUMING
    assert log.take() is None


def test_batches_are_appended_one_at_a_time_in_order() -> None:
    log = opened()
    log.offer(three(0, 3, 6))
    assert (log.queued, log.accepted_end) == (3, 9)
    first = log.take()
    assert first is not None
    assert whole_header(first).base_offset == 0  # as brokers want it
    assert log.take() is None
    log.appended(0)
    assert log.end == 3
    assert append_all(log) == [3, 6]
    assert (log.end, log.queued, log.queued_bytes, log.state) == (9, 0, 0, LogState.APPENDING)


def test_what_the_log_has_already_is_left_out() -> None:
    log = opened(6)
    log.offer(three(0, 3, 6, 9))
    assert append_all(log) == [6, 9]


def test_plain_batches_are_stamped_with_a_sequence_that_goes_on() -> None:
    log = opened(0, last_sequence=41)
    log.offer(three(0, 3))
    sequences = []
    for offset in (0, 3):
        header = whole_header(log.take() or b"")
        assert header.producer_id == NUMBERING.stamp_id
        sequences.append(header.base_sequence)
        log.appended(offset)
    assert sequences == [42, 45]


def test_stamped_sequences_wrap() -> None:
    log = opened(0, last_sequence=SEQUENCE_MAX - 1)
    log.offer(three(0, 3))
    assert whole_header(log.take() or b"").base_sequence == SEQUENCE_MAX
    log.appended(0)
    assert whole_header(log.take() or b"").base_sequence == 2


def test_a_refused_batch_keeps_its_sequence() -> None:
    log = opened()
    log.offer(three(0))
    first = log.take()
    log.not_appended()
    assert log.take() == first


def test_idempotent_batches_keep_epoch_and_sequence_under_a_translated_id() -> None:
    log = opened()
    log.offer(three(0, producer_id=7, producer_epoch=2, base_sequence=30))
    header = whole_header(log.take() or b"")
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (translate(7, 3), 2, 30)


def test_a_producer_id_that_comes_home_is_what_it_was() -> None:
    log = opened()
    log.offer(three(0, producer_id=translate(7, 5), producer_epoch=0, base_sequence=0))
    assert whole_header(log.take() or b"").producer_id == 7


def test_an_answer_at_another_offset_is_a_divergence() -> None:
    log = opened(0)
    log.offer(three(0, 3))
    log.take()
    log.appended(100)
    assert log.state is LogState.DIVERGED
    assert log.reason is not None
    assert log.reason.code == ReasonCode.TARGET_WRITTEN_BY_OTHERS
    assert log.take() is None
    log.resume(103, None)
    assert log.state is LogState.DIVERGED


class TestUnknownFate:
    def lost(self) -> FollowerLog:
        log = opened()
        log.offer(three(0, 3))
        log.take()
        log.unknown()
        assert log.state is LogState.RESUMING
        assert log.uncertain
        assert log.take() is None
        return log

    def test_it_had_landed(self) -> None:
        log = self.lost()
        log.resume(3, 2)
        assert (log.state, log.end, log.uncertain) == (LogState.APPENDING, 3, False)
        header = whole_header(log.take() or b"")
        assert header.base_sequence == 3
        log.appended(3)
        assert log.end == 6

    def test_it_had_not(self) -> None:
        log = self.lost()
        log.resume(0, None)
        assert append_all(log) == [0, 3]

    def test_the_log_ends_inside_it(self) -> None:
        log = self.lost()
        log.resume(1, None)
        assert log.state is LogState.DIVERGED

    def test_the_log_goes_beyond_what_the_source_sent(self) -> None:
        log = self.lost()
        log.resume(7, None)
        assert log.state is LogState.DIVERGED

    def test_the_log_was_cut(self) -> None:
        log = opened()
        log.offer(three(0, 3))
        append_all(log)
        log.unknown()
        log.resume(3, None)
        assert log.state is LogState.STOPPED
        assert log.reason is not None
        assert log.reason.code == reasons.MOVED  # a new stream goes on from there

    def test_a_reason_to_stop_takes_effect_when_what_was_under_way_is_found(self) -> None:
        log = opened()
        log.offer(memoryview(bytes(three(0)) + batch(3, [b"x"], attributes=TRANSACTIONAL_BIT)))
        log.take()
        log.unknown()
        log.resume(3, 2)
        assert (log.state, log.end) == (LogState.STOPPED, 3)


def test_an_uncertain_end_stays_uncertain() -> None:
    log = opened()
    log.offer(three(0))
    log.take()
    log.stop(StopReason(reasons.DISCONNECTED, "gone"))
    log.unknown()
    assert log.uncertain
    assert log.state is LogState.STOPPED


def test_the_answer_to_what_was_under_way_counts_after_the_stop() -> None:
    log = opened()
    log.offer(three(0, 3))
    log.take()
    log.stop(StopReason(reasons.DISCONNECTED, "gone"))
    log.appended(0)
    assert (log.end, log.queued, log.queued_bytes, log.uncertain) == (3, 0, 0, False)


def test_the_first_reason_stays() -> None:
    log = opened()
    log.stop(StopReason("ONE", ""))
    log.stop(StopReason("OTHER", ""))
    assert log.reason == StopReason("ONE", "")


class TestEpochs:
    def test_a_new_epoch_is_recorded_before_its_first_append(self) -> None:
        log = opened()
        log.offer(three(0, leader_epoch=0))
        log.offer(three(3, leader_epoch=4))
        assert log.next_epoch() is None
        assert append_all(log) == [0]
        assert log.next_epoch() == (4, 3)
        assert log.take() is None
        log.epoch = 4
        assert append_all(log) == [3]

    def test_not_while_something_is_under_way(self) -> None:
        log = opened()
        log.offer(three(0, leader_epoch=0))
        log.take()
        log.offer(three(3, leader_epoch=1))
        assert log.next_epoch() is None


class TestNobodyElseWrites:
    def test_more_than_ours(self) -> None:
        log = opened(3)
        log.checked(4)
        assert log.state is LogState.DIVERGED

    def test_less(self) -> None:
        log = opened(3)
        log.checked(2)
        assert log.state is LogState.STOPPED

    def test_not_while_something_is_under_way(self) -> None:
        log = opened(0)
        log.offer(three(0))
        log.take()
        log.checked(3)
        assert log.state is LogState.APPENDING


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (batch(2, [b"x"]), ReasonCode.COMPACTION_NOT_SUPPORTED),
        (batch(0, [b"x"], attributes=TRANSACTIONAL_BIT, producer_id=1), ReasonCode.TRANSACTIONS_NOT_SUPPORTED),
        (batch(0, [b"x"], attributes=CONTROL_BIT | TRANSACTIONAL_BIT), ReasonCode.TRANSACTIONS_NOT_SUPPORTED),
    ],
)
def test_what_cannot_be_copied_exactly_is_not_copied(data: bytes, code: str) -> None:
    log = opened()
    log.offer(memoryview(data))
    assert log.state is LogState.STOPPED
    assert log.reason is not None
    assert log.reason.code == code
    assert log.take() is None
    assert reasons.waiting_state(code) is not None


def test_batches_before_a_bad_one_are_copied() -> None:
    log = opened()
    bad = batch(3, [b"x"], attributes=TRANSACTIONAL_BIT)
    log.offer(memoryview(bytes(three(0)) + bad + batch(4, [b"after"])))
    assert log.state is LogState.APPENDING
    log.offer(three(5))  # nothing after it is taken
    assert append_all(log) == [0]
    assert (log.state, log.end) == (LogState.STOPPED, 3)


def test_headers_that_cannot_be_copied() -> None:
    header = whole_header(batch(10, [b"x", b"y"]))
    assert not_copyable(header, 10) is None
    for changed, expected in (
        (header, 11),  # the follower ends inside it
        (header._replace(record_count=1), 10),
        (header._replace(attributes=LOG_APPEND_TIME_BIT), 10),
        (header._replace(attributes=DELETE_HORIZON_BIT), 10),
    ):
        reason = not_copyable(changed, expected)
        assert reason is not None
        assert str(header.base_offset) in reason.message


def test_damaged_batches_are_not_blessed_with_a_new_crc() -> None:
    data = bytearray(three(0))
    data[-1] ^= 1
    log = opened()
    log.offer(memoryview(data))
    with pytest.raises(CorruptBatch):
        log.take()
    assert log.queued == 1


def test_bytes_that_are_no_batches() -> None:
    with pytest.raises(MalformedBatch):
        opened().offer(memoryview(b"\7" * 80))


def test_a_producer_id_beyond_the_scheme() -> None:
    log = opened()
    log.offer(three(0, producer_id=IDS_PER_CLUSTER, producer_epoch=0, base_sequence=0))
    with pytest.raises(ProducerIdOverflow):
        log.take()
