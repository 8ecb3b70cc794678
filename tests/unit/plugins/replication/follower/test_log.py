"""One follower partition's log: what may be appended next, and what an answer means."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from support.partition_log import batch, control_batch
from support.records import MIB, large_inside

from isthmus_control.states import ReasonCode
from isthmus_plugins.cluster import ProducerState
from isthmus_plugins.replication.follower.log import (
    BURST_BATCHES_MAX,
    BURST_BYTES_MAX,
    FILLER_KEY,
    FILLER_TOMBSTONES_MAX,
    GAP_OF_MARKERS_MAX,
    MARKERS_AT_ONCE,
    RUNS_AT_ONCE,
    Append,
    FollowerLog,
    LogState,
    Mark,
    Numbering,
    Step,
    StopReason,
)
from isthmus_plugins.replication.link import reasons
from isthmus_protocol.producer_ids import IDS_PER_CLUSTER, translate
from isthmus_protocol.record_codec import Record, decode_records, encode_batch
from isthmus_protocol.record_division import STEP_RECORDS
from isthmus_protocol.records import (
    CONTROL_BIT,
    HEADER_SIZE,
    LOG_APPEND_TIME_BIT,
    SEQUENCE_MAX,
    TRANSACTIONAL_BIT,
    BatchHeader,
    Compression,
    MalformedBatch,
    seal,
    whole_header,
)

NUMBERING = Numbering(source_index=3, target_index=5, link_number=1)


def states(last_sequence: int | None) -> dict[int, ProducerState]:
    """The link's stamp, if the target knows it."""
    return {} if last_sequence is None else {NUMBERING.stamp_id: ProducerState(0, last_sequence, -1, -1)}


def opened(end: int = 0, last_sequence: int | None = None) -> FollowerLog:
    log = FollowerLog(NUMBERING)
    log.epoch = 0
    log.resume(0, end, states(last_sequence))
    return log


def taken(log: FollowerLog) -> Append:
    operation = log.take()
    assert isinstance(operation, Append)
    return operation


def header_of(log: FollowerLog) -> BatchHeader:
    """Of the batch that is taken now."""
    return whole_header(taken(log).data)


def three(*base_offsets: int, **more: int) -> memoryview:
    """Batches of three records each."""
    return memoryview(b"".join(batch(offset, [b"a", b"b", b"c"], **more) for offset in base_offsets))


def stopped_for(log: FollowerLog) -> str:
    """The reason code of a log that has stopped, with nothing left to be written."""
    assert (log.state, log.queued, log.next_step()) == (LogState.STOPPED, 0, Step.REPORT_END)
    assert log.reason is not None
    return log.reason.code


def append_all(log: FollowerLog) -> list[int]:
    """Have everything written where it belongs; the offsets at which operations began."""
    offsets = []
    while log.state is LogState.WRITING:
        while log.next_step() is Step.DIVIDE:
            log.divide()
        if (operation := log.take()) is None:
            break
        offsets.append(log.end)
        if isinstance(operation, Append):
            log.appended(log.end)
        else:
            log.marked()
        if log.state is LogState.RESUMING:
            log.resume(log.start, log.end, {})
    return offsets


LARGE_RECORDS = 3 * STEP_RECORDS


def divided_log() -> FollowerLog:
    """A log that is taking a batch of many records apart; another batch waits behind."""
    header = whole_header(three(0))._replace(attributes=LOG_APPEND_TIME_BIT)
    records = [Record(offset, header.base_timestamp, None, b"v") for offset in range(LARGE_RECORDS)]
    plain = encode_batch(records, header)
    log = opened()
    log.offer(
        memoryview(seal(whole_header(plain)._replace(attributes=LOG_APPEND_TIME_BIT), plain[HEADER_SIZE:])),
    )
    log.offer(three(LARGE_RECORDS))
    assert log.next_step() is Step.DIVIDE
    return log


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
    assert header_of(log).base_offset == 0  # as brokers want it
    assert log.take() is None
    log.appended(0)
    assert log.end == 3
    assert append_all(log) == [3, 6]
    assert (log.end, log.queued, log.queued_bytes, log.state) == (9, 0, 0, LogState.WRITING)


def burst(log: FollowerLog, recent: int = 0) -> list[Append]:
    """What is sent without waiting: the batch that is taken, and those right after it."""
    return [taken(log), *log.take_more(recent)]


def confirmed(*base_offsets: int, **more: int) -> FollowerLog:
    """A log whose first batch is confirmed, with the others waiting."""
    log = opened()
    log.offer(three(*base_offsets, **more))
    assert len(burst(log)) == 1  # the target may not know the producer
    log.appended(0)
    return log


def test_batches_that_go_on_the_confirmed_sequence_follow_each_other_without_waiting() -> None:
    log = confirmed(0, 3, 6, 9)
    operations = burst(log)
    assert [operation.first_offset for operation in operations] == [3, 6, 9]
    assert [whole_header(operation.data).base_sequence for operation in operations] == [3, 6, 9]
    assert (log.take(), log.end) == (None, 3)
    log.appended(3, 6, 9)
    assert (log.end, log.queued, log.stamp_sequence, log.state) == (12, 0, 12, LogState.WRITING)


def test_an_idempotent_producers_batches_follow_each_other_while_they_are_its_own() -> None:
    log = opened()
    for offset, producer_id, sequence in ((0, 7, 40), (3, 7, 43), (6, 7, 46), (9, 8, 49), (12, 8, 52)):
        log.offer(three(offset, producer_id=producer_id, producer_epoch=2, base_sequence=sequence))
    assert len(burst(log)) == 1
    log.appended(0)
    assert [operation.first_offset for operation in burst(log)] == [3, 6]
    log.appended(3, 6)
    assert [operation.first_offset for operation in burst(log)] == [9]  # the target may not know this one
    log.appended(9)
    assert [operation.first_offset for operation in burst(log)] == [12]


@pytest.mark.parametrize(
    "header",
    [
        {"base_sequence": 7},  # the cleaner took one
        {"producer_epoch": 3, "base_sequence": 0},
        {"attributes": TRANSACTIONAL_BIT},
        {"attributes": LOG_APPEND_TIME_BIT},
        {"leader_epoch": 1},
        {"base_offset": 7},
        {"producer_id": -1, "producer_epoch": -1, "base_sequence": -1},
    ],
)
def test_what_does_not_go_on_the_sequence_waits(header: dict[str, int]) -> None:
    usual = {"base_offset": 6, "producer_id": 7, "producer_epoch": 2, "base_sequence": 6}
    log = opened()
    for offset in (0, 3):
        log.offer(memoryview(batch(**usual | {"base_offset": offset, "base_sequence": offset}, values=[b"x"] * 3)))
    data = batch(**usual | header | {"attributes": 0}, values=[b"x"] * 3)
    attributes = header.get("attributes", 0)
    log.offer(memoryview(seal(whole_header(data)._replace(attributes=attributes), data[HEADER_SIZE:])))
    assert len(burst(log)) == 1
    log.appended(0)
    assert [operation.first_offset for operation in burst(log)] == [3]


def test_brokers_may_forget_producers_with_old_records_between_two_batches() -> None:
    assert len(burst(confirmed(0, 3, 6, timestamp=1000), recent=1000)) == 2
    assert len(burst(confirmed(0, 3, 6, timestamp=1000), recent=1001)) == 1
    log = confirmed(0, 3, timestamp=1000)
    log.offer(three(6, timestamp=999))
    log.offer(three(9, timestamp=1000))
    assert [operation.first_offset for operation in burst(log, recent=1000)] == [3, 6]


def test_a_producer_whose_records_are_deleted_may_be_forgotten() -> None:
    log = confirmed(0, 3, 6)
    log.trimmed(3)
    assert len(burst(log)) == 1


def test_bursts_are_small() -> None:
    many = range(0, 3 * (BURST_BATCHES_MAX + 5), 3)
    assert len(burst(confirmed(*many))) == BURST_BATCHES_MAX
    log = confirmed(0)
    log.offer(memoryview(b"".join(batch(offset, [b"x" * (BURST_BYTES_MAX // 3)]) for offset in range(3, 9))))
    assert len(burst(log)) == 2


def test_a_burst_of_which_one_batch_was_refused_goes_on_from_the_log_end_one_at_a_time() -> None:
    log = confirmed(0, 3, 6, 9, 12)
    assert len(burst(log)) == 4
    log.partly_appended([3, None, None, None])
    assert (log.state, log.uncertain, log.end, log.take()) == (LogState.RESUMING, True, 3, None)
    log.resume(0, 6, states(5))
    assert (log.state, log.end) == (LogState.WRITING, 6)
    assert [operation.first_offset for operation in burst(log)] == [6]
    log.appended(6)
    assert [operation.first_offset for operation in burst(log)] == [9, 12]


@pytest.mark.parametrize("offsets", [(3, 7, None), (4, None, None), (3, 6, 10)])
def test_a_burst_at_another_offset_is_a_divergence(offsets: tuple[int | None, ...]) -> None:
    log = confirmed(0, 3, 6, 9)
    assert len(burst(log)) == 3
    log.partly_appended(offsets)
    assert log.state is LogState.DIVERGED


@pytest.mark.parametrize(
    ("end", "last_sequence", "state"),
    [
        (12, 11, LogState.WRITING),
        (9, 8, LogState.WRITING),
        (3, 2, LogState.WRITING),
        (10, 8, LogState.DIVERGED),  # no batch ends there
        (12, 8, LogState.DIVERGED),  # as long as ours, but somebody else's
        (15, 11, LogState.DIVERGED),
        (12, None, LogState.STOPPED),  # nobody knows whose
        (2, None, LogState.STOPPED),  # cut
    ],
)
def test_a_burst_of_unknown_fate(end: int, last_sequence: int | None, state: LogState) -> None:
    log = confirmed(0, 3, 6, 9)
    assert len(burst(log)) == 3
    log.unknown()
    log.resume(0, end, states(last_sequence))
    assert log.state is state
    if state is LogState.WRITING:
        assert log.end == end
        assert append_all(log) == list(range(end, 12, 3))


@pytest.mark.parametrize("answer", [FollowerLog.out_of_sequence, FollowerLog.fenced, FollowerLog.unknown])
def test_a_stopped_log_is_not_woken_by_the_answer_to_what_was_under_way(answer: Callable[[FollowerLog], None]) -> None:
    log = opened()
    log.offer(three(0))
    assert log.take() is not None
    log.stop(StopReason(reasons.DISCONNECTED, "the peer is gone"))
    answer(log)
    assert (log.state, log.reason) == (LogState.STOPPED, StopReason(reasons.DISCONNECTED, "the peer is gone"))


def test_what_the_log_has_already_is_left_out() -> None:
    log = opened(6)
    log.offer(three(0, 3, 6, 9))
    assert append_all(log) == [6, 9]


def test_plain_batches_are_stamped_with_a_sequence_that_goes_on() -> None:
    log = opened(0, last_sequence=41)
    log.offer(three(0, 3))
    sequences = []
    for offset in (0, 3):
        header = header_of(log)
        assert header.producer_id == NUMBERING.stamp_id
        sequences.append(header.base_sequence)
        log.appended(offset)
    assert sequences == [42, 45]


def test_stamped_sequences_wrap() -> None:
    log = opened(0, last_sequence=SEQUENCE_MAX - 1)
    log.offer(three(0, 3))
    assert header_of(log).base_sequence == SEQUENCE_MAX
    log.appended(0)
    assert header_of(log).base_sequence == 2


def test_a_refused_batch_keeps_its_sequence() -> None:
    log = opened()
    log.offer(three(0))
    first = log.take()
    log.not_written()
    assert log.take() == first


def test_idempotent_batches_keep_epoch_and_sequence_under_a_translated_id() -> None:
    log = opened()
    log.offer(three(0, producer_id=7, producer_epoch=2, base_sequence=30))
    header = header_of(log)
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (translate(7, 3), 2, 30)


def test_a_producer_id_that_comes_home_is_what_it_was() -> None:
    log = opened()
    log.offer(three(0, producer_id=translate(7, 5), producer_epoch=0, base_sequence=0))
    assert header_of(log).producer_id == 7


def test_an_answer_at_another_offset_is_a_divergence() -> None:
    log = opened(0)
    log.offer(three(0, 3))
    log.take()
    log.appended(100)
    assert log.state is LogState.DIVERGED
    assert log.reason is not None
    assert log.reason.code == ReasonCode.TARGET_WRITTEN_BY_OTHERS
    assert log.take() is None
    log.resume(0, 103, {})
    assert log.state is LogState.DIVERGED


class TestABatchThatTheSourceHasTwice:
    """The source had forgotten its producer in between, and the target has not."""

    ID = translate(7, 3)

    def again(self, **more: int) -> FollowerLog:
        log = opened()
        log.offer(three(0, 3, 6, producer_id=7, producer_epoch=2, base_sequence=30, **more))
        assert header_of(log).base_sequence == 30
        log.appended(0)
        assert header_of(log).base_sequence == 30
        log.appended(0)  # the target takes it for the one that it has
        assert log.state is LogState.RESUMING, "nothing was appended"
        assert log.end == 3
        return log

    def test_it_gets_the_sequence_that_the_target_takes(self) -> None:
        log = self.again()
        log.resume(0, 3, {self.ID: ProducerState(2, 32, -1, -1)})
        header = header_of(log)
        assert (header.producer_id, header.producer_epoch, header.base_sequence) == (self.ID, 2, 33)
        log.appended(3)
        assert header_of(log).base_sequence == 36, "and so does what comes after it"
        log.appended(6)
        assert (log.end, log.state) == (9, LogState.WRITING)

    def test_once_it_has_that_an_earlier_offset_is_a_divergence(self) -> None:
        log = self.again()
        log.resume(0, 3, {self.ID: ProducerState(2, 32, -1, -1)})
        log.take()
        log.appended(0)
        assert log.state is LogState.DIVERGED

    def test_the_links_own_stamp_never_goes_back(self) -> None:
        log = opened(3, last_sequence=2)
        log.offer(three(3))
        log.take()
        log.appended(0)
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
        log.resume(0, 3, states(2))
        assert (log.state, log.end, log.uncertain) == (LogState.WRITING, 3, False)
        header = header_of(log)
        assert header.base_sequence == 3
        log.appended(3)
        assert log.end == 6

    def test_it_had_not(self) -> None:
        log = self.lost()
        log.resume(0, 0, {})
        assert append_all(log) == [0, 3]

    def test_the_log_ends_inside_it(self) -> None:
        log = self.lost()
        log.resume(0, 1, {})
        assert log.state is LogState.DIVERGED

    def test_the_log_goes_beyond_what_the_source_sent(self) -> None:
        log = self.lost()
        log.resume(0, 7, {})
        assert log.state is LogState.DIVERGED

    def test_the_log_was_cut(self) -> None:
        log = opened()
        log.offer(three(0, 3))
        append_all(log)
        log.unknown()
        log.resume(0, 3, {})
        assert log.state is LogState.STOPPED
        assert log.reason is not None
        assert log.reason.code == reasons.MOVED  # a new stream goes on from there


def failing(*_: object) -> None:
    raise RuntimeError("a bug of ours")


@pytest.mark.parametrize("name", ["_written", "_held_before"])
def test_what_fails_while_an_answer_is_taken_in_is_of_unknown_fate(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And never a stranger's write, for which the topic would be cut."""
    log = opened()
    log.offer(three(0, 3))
    log.take()
    monkeypatch.setattr(FollowerLog, name, failing)
    with pytest.raises(RuntimeError):
        log.appended(0)
    monkeypatch.undo()
    log.unknown()
    log.resume(0, 3, states(2))
    assert (log.state, log.end, log.uncertain) == (LogState.WRITING, 3, False)
    assert append_all(log) == [3]


def test_a_fate_stays_unknown_when_its_reading_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    log = opened()
    log.offer(three(0, 3))
    log.take()
    log.unknown()
    monkeypatch.setattr(FollowerLog, "_take_states", failing)
    with pytest.raises(RuntimeError):
        log.resume(0, 3, states(2))
    assert log.uncertain
    monkeypatch.undo()
    log.resume(0, 3, states(2))
    assert (log.state, log.end, log.uncertain) == (LogState.WRITING, 3, False)


def test_a_marker_whose_answer_fails_to_be_taken_in_is_of_unknown_fate(monkeypatch: pytest.MonkeyPatch) -> None:
    log = opened()
    log.offer(memoryview(control_batch(0, True, producer_id=5, producer_epoch=0)))
    assert isinstance(log.take(), Mark)
    monkeypatch.setattr(FollowerLog, "_written", failing)
    with pytest.raises(RuntimeError):
        log.marked()
    monkeypatch.undo()
    log.unknown()
    log.resume(0, 1, {})
    assert (log.state, log.end) == (LogState.WRITING, 1)


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


class TestNextStep:
    """One place decides what comes next; what is taken agrees with it."""

    def check(self, log: FollowerLog, step: Step) -> None:
        assert log.next_step() is step
        taken = log.take()
        assert (taken is not None) == (step is Step.WRITE)

    def test_the_log_end_is_read_first(self) -> None:
        log = FollowerLog(NUMBERING)
        log.offer(three(0, leader_epoch=3))
        self.check(log, Step.RESUME)

    def test_nothing_is_left_to_do(self) -> None:
        self.check(opened(), Step.WAIT)

    def test_a_batch_is_written_and_its_answer_awaited(self) -> None:
        log = opened()
        log.offer(three(0, 3))
        self.check(log, Step.WRITE)
        self.check(log, Step.WAIT)
        log.appended(0)
        self.check(log, Step.WRITE)

    def test_an_unknown_fate_comes_before_everything_that_is_due(self) -> None:
        log = opened()
        log.offer(three(0))
        log.take()
        log.offer(three(3, leader_epoch=9), source_start=3)
        log.unknown()
        self.check(log, Step.RESUME)
        log.resume(0, 3, states(2))
        self.check(log, Step.RECORD_EPOCH)
        log.epoch = 9
        self.check(log, Step.TRIM)
        log.trimmed(3)
        self.check(log, Step.WRITE)

    def test_a_record_without_a_key_waits_for_the_topic_that_refused_it(self) -> None:
        log = opened()
        log.offer(three(0))
        log.take()
        log.refused_keyless()
        self.check(log, Step.TAKE_KEYLESS)
        log.takes_keyless()
        self.check(log, Step.WRITE)

    def test_what_the_source_expired_is_trimmed(self) -> None:
        log = opened(3)
        log.offer(three(3), source_start=2)
        self.check(log, Step.TRIM)

    def test_open_transactions_are_asked_about_before_a_gap(self) -> None:
        log = opened()
        log.offer(three(0, producer_id=7, producer_epoch=0, base_sequence=0, attributes=TRANSACTIONAL_BIT))
        log.take()
        log.appended(0)
        log.offer(three(9))
        self.check(log, Step.ASK_ENDED)
        log.resolve(tuple(log.doubtful), ())
        self.check(log, Step.WRITE)

    def test_a_marker_waits_for_its_decision(self) -> None:
        awaited = {7}
        log = FollowerLog(NUMBERING, awaits=awaited.__contains__)
        log.epoch = 0
        log.resume(0, 0, {})
        log.offer(memoryview(control_batch(0, True, producer_id=7, producer_epoch=0)))
        self.check(log, Step.AWAIT_DECISION)
        awaited.clear()
        self.check(log, Step.WRITE)

    @pytest.mark.parametrize("end", [lambda log: log.stop(StopReason("ONE", "")), lambda log: log.diverge("")])
    def test_what_has_ended_is_reported_whatever_was_due(self, end: Callable[[FollowerLog], None]) -> None:
        log = opened()
        log.offer(three(0, leader_epoch=3))
        end(log)
        self.check(log, Step.REPORT_END)


class TestEpochs:
    def test_a_new_epoch_is_recorded_before_its_first_append(self) -> None:
        log = opened()
        log.offer(three(0, leader_epoch=0))
        log.offer(three(3, leader_epoch=4))
        assert log.due_epoch is None
        assert append_all(log) == [0]
        assert log.due_epoch == (4, 3)
        assert log.take() is None
        log.epoch = 4
        assert append_all(log) == [3]

    def test_not_while_something_is_under_way(self) -> None:
        log = opened()
        log.offer(three(0, leader_epoch=0))
        log.take()
        log.offer(three(3, leader_epoch=1))
        assert log.due_epoch is None


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
        assert log.state is LogState.WRITING


class TestTransactions:
    def test_transactional_batches_keep_what_they_are(self) -> None:
        log = opened()
        log.offer(three(0, producer_id=7, producer_epoch=2, base_sequence=30, attributes=TRANSACTIONAL_BIT))
        assert log.transaction_of == translate(7, 3)
        operation = taken(log)
        header = whole_header(operation.data)
        assert operation.transactional
        assert header.is_transactional
        assert (header.producer_id, header.producer_epoch, header.base_sequence) == (translate(7, 3), 2, 30)

    def marker(self, log: FollowerLog, offset: int, coordinator_epoch: int = 4, committed: bool = True) -> Mark:
        log.offer(
            memoryview(
                control_batch(offset, committed, producer_id=7, producer_epoch=2, coordinator_epoch=coordinator_epoch)
            )
        )
        assert log.transaction_of is None
        operation = log.take()
        assert isinstance(operation, Mark)
        return operation

    def test_a_marker_is_the_sources(self) -> None:
        for committed in (True, False):
            assert self.marker(opened(), 0, 4, committed) == Mark(0, 1, translate(7, 3), 2, committed, 4)

    def test_the_log_end_is_read_after_the_first_marker(self) -> None:
        log = opened()
        self.marker(log, 0)
        log.marked()
        assert (log.end, log.state, log.uncertain) == (1, LogState.RESUMING, False)
        log.resume(0, 1, {})
        self.marker(log, 1)
        log.marked()
        assert (log.end, log.state) == (2, LogState.WRITING)

    def test_a_marker_of_an_owner_before_that_landed_late_shows(self) -> None:
        log = opened()
        self.marker(log, 0)
        log.marked()
        log.resume(0, 2, {})
        assert log.state is LogState.DIVERGED

    def test_a_marker_that_is_sent_again_outranks_the_one_whose_fate_is_unknown(self) -> None:
        log = opened()
        self.marker(log, 0, 4)
        log.unknown()
        log.resume(0, 0, {})
        again = log.take()
        assert isinstance(again, Mark)
        assert again.coordinator_epoch == 5
        log.marked()
        log.resume(0, 1, {translate(7, 3): ProducerState(2, -1, 5, -1)})
        assert self.marker(log, 1, 4).coordinator_epoch >= 5
        log.marked()
        assert self.marker(log, 2, 9).coordinator_epoch >= 9

    def test_a_marker_that_is_fenced_is_sent_again_with_a_higher_epoch(self) -> None:
        log = opened()
        self.marker(log, 0, 4)
        log.fenced()
        assert (log.state, log.uncertain) == (LogState.RESUMING, False)
        log.resume(0, 0, {translate(7, 3): ProducerState(2, -1, 11, -1)})
        again = log.take()
        assert isinstance(again, Mark)
        assert again.coordinator_epoch == 12

    def test_a_marker_that_had_landed(self) -> None:
        log = opened()
        self.marker(log, 0)
        log.unknown()
        log.resume(0, 1, {})
        assert (log.end, log.queued) == (1, 0)


class TestGaps:
    def test_a_gap_is_filled_with_aborts_of_nobody(self) -> None:
        log = opened()
        log.offer(three(5))
        assert log.take() == Mark(0, 5, NUMBERING.filler_id, 0, False, 0, True)
        log.marked()
        log.resume(0, 5, {NUMBERING.filler_id: ProducerState(0, -1, 0, -1)})
        assert append_all(log) == [5]
        assert (log.end, log.filled) == (8, 5)

    def test_part_of_a_gap_was_filled(self) -> None:
        log = opened()
        log.offer(three(5))
        log.take()
        log.unknown()
        log.resume(0, 2, {NUMBERING.filler_id: ProducerState(0, -1, 3, -1)})
        assert log.take() == Mark(2, 5, NUMBERING.filler_id, 0, False, 4, True)

    def test_a_gap_is_filled_in_portions(self) -> None:
        log = opened()
        log.offer(three(GAP_OF_MARKERS_MAX))
        offsets = append_all(log)
        assert offsets == [*range(0, GAP_OF_MARKERS_MAX, MARKERS_AT_ONCE), GAP_OF_MARKERS_MAX]

    def test_a_long_gap_is_filled_with_an_aborted_transaction(self) -> None:
        log = opened()
        gap = 10**9
        log.offer(three(gap))
        assert log.transaction_of == NUMBERING.filler_id
        operations: list[Append | Mark] = []
        while (operation := log.take()) is not None and log.end < gap:
            operations.append(operation)
            if isinstance(operation, Append):
                log.appended(operation.first_offset)
            else:
                log.marked()
        assert len(operations) == 2001
        assert all(isinstance(each, Append) and each.transactional for each in operations[:-1])
        assert [each.first_offset for each in operations[1:]] == [each.next_offset for each in operations[:-1]]
        sequences = [whole_header(each.data).base_sequence for each in operations[:3] if isinstance(each, Append)]
        assert sequences == [0, 500_000, 1_000_000]
        assert operations[-1] == Mark(gap - 1, gap, NUMBERING.filler_id, 0, False, 0, True)

    def test_a_topic_that_the_target_compacts_needs_no_transaction_for_a_long_gap(self) -> None:
        log = FollowerLog(NUMBERING, compacted=True)
        log.epoch = 0
        log.resume(0, 0, {})
        gap = FILLER_TOMBSTONES_MAX + GAP_OF_MARKERS_MAX + 1
        log.offer(three(gap + 5))
        assert log.transaction_of is None
        found = []
        while log.end < gap + 5:
            operation = log.take()
            assert operation is not None
            assert operation.filler
            if isinstance(operation, Append):
                header = whole_header(operation.data)
                found.append((operation.first_offset, operation.next_offset, header.base_sequence))
                assert not operation.transactional
                assert not header.is_transactional
                assert header.producer_id == NUMBERING.filler_id
                log.appended(operation.first_offset)
            else:
                log.marked()
                log.resume(0, log.end, {})
        assert found == [(0, FILLER_TOMBSTONES_MAX, 0), (FILLER_TOMBSTONES_MAX, gap + 5, FILLER_TOMBSTONES_MAX)]

    def test_what_is_before_the_sources_start_has_a_key_since_the_target_may_compact(self) -> None:
        log = opened()
        log.offer(three(10), source_start=10)
        operation = taken(log)
        assert (operation.first_offset, operation.next_offset, operation.filler) == (0, 10, True)
        assert {record.key for record in decode_records(operation.data)} == {FILLER_KEY}

    def test_an_open_transaction_of_tombstones_is_aborted_by_whoever_goes_on(self) -> None:
        log = FollowerLog(NUMBERING)
        log.epoch = 0
        log.resume(0, 500_000, {NUMBERING.filler_id: ProducerState(0, 499_999, -1, 0)})
        log.offer(three(1_000_000))
        assert header_of(log).base_sequence == 500_000
        log.appended(500_000)
        assert log.take() == Mark(999_999, 1_000_000, NUMBERING.filler_id, 0, False, 0, True)

    def test_holes_are_filled_between_runs_of_records(self) -> None:
        like = whole_header(three(0))._replace(last_offset_delta=9)
        data = encode_batch([Record(offset, 1, None, b"v") for offset in (2, 3, 7)], like, last_offset=9)
        log = opened(2)
        log.offer(memoryview(data))
        assert append_all(log) == [2, 4, 7, 8]
        assert (log.end, log.filled, log.queued, log.queued_bytes) == (10, 5, 0, 0)

    def test_an_emptied_batch_is_a_gap(self) -> None:
        header = whole_header(three(0))._replace(record_count=0)
        log = opened()
        log.offer(memoryview(seal(header, b"")))
        assert log.take() == Mark(0, 3, NUMBERING.filler_id, 0, False, 0, True)

    def test_what_the_follower_has_of_a_batch_is_cut_off(self) -> None:
        log = opened(1)
        log.offer(three(0))
        operation = taken(log)
        assert (operation.first_offset, operation.next_offset) == (1, 3)
        assert [record.value for record in decode_records(operation.data)] == [b"b", b"c"]

    def test_append_time_becomes_the_records_own_time(self) -> None:
        header = whole_header(three(0))
        data = seal(
            header._replace(attributes=LOG_APPEND_TIME_BIT, max_timestamp=header.base_timestamp + 5),
            bytes(three(0))[HEADER_SIZE:],
        )
        log = opened()
        log.offer(memoryview(data))
        operation = taken(log)
        assert not whole_header(operation.data).is_log_append_time
        assert {record.timestamp for record in decode_records(operation.data)} == {header.base_timestamp + 5}

    def test_a_large_batch_is_taken_apart_step_by_step_and_nothing_goes_before_that(self) -> None:
        log = divided_log()
        assert log.take() is None
        steps = 0
        while log.next_step() is Step.DIVIDE:
            log.divide()
            steps += 1
        assert steps >= LARGE_RECORDS // STEP_RECORDS - 1
        operation = taken(log)
        assert (operation.first_offset, operation.next_offset) == (0, LARGE_RECORDS)
        log.appended(0)
        assert append_all(log) == [LARGE_RECORDS]

    def test_a_large_batch_holds_nothing_while_it_waits_its_turn(self) -> None:
        """Of many partitions some are taken apart at a time."""
        threads = threading.active_count()
        log = opened()
        log.offer(memoryview(large_inside(Compression.ZSTD, size=4 * MIB)))
        assert log.next_step() is Step.DIVIDE
        assert threading.active_count() == threads
        log.divide()
        assert threading.active_count() == threads + 1
        log.stop(StopReason(reasons.CLOSED, "over"))
        assert threading.active_count() == threads

    def test_a_log_that_ends_while_a_batch_is_taken_apart(self) -> None:
        log = divided_log()
        log.stop(StopReason(reasons.CLOSED, "over"))
        log.divide()
        assert stopped_for(log) == reasons.CLOSED

    def test_a_log_whose_end_is_read_again_while_a_batch_is_taken_apart(self) -> None:
        log = divided_log()
        log.doubt_end()
        assert log.next_step() is Step.RESUME
        log.resume(0, 0, {})
        assert append_all(log) == [0, LARGE_RECORDS]

    def test_of_very_many_runs_some_wait_at_a_time(self) -> None:
        offsets = [2 * number for number in range(2 * RUNS_AT_ONCE)]
        like = whole_header(three(0))
        data = encode_batch([Record(offset, 1, None, b"v") for offset in offsets], like)
        log = opened()
        log.offer(memoryview(data))
        written = []
        while log.queued:
            assert len(log._runs) <= RUNS_AT_ONCE
            while log.next_step() is Step.DIVIDE:
                log.divide()
            written.append(log.end)
            if isinstance(log.take(), Append):
                log.appended(log.end)
            else:
                log.marked()
            if log.state is LogState.RESUMING:
                log.resume(log.start, log.end, {})
        assert written == list(range(offsets[-1] + 1))

    def test_what_is_made_here_is_sent_in_smaller_parts_if_it_is_too_large(self) -> None:
        log = opened(1)
        log.offer(three(0))
        assert taken(log).divisible
        log.too_large()
        first = taken(log)
        assert (first.first_offset, first.next_offset, first.divisible) == (1, 2, False)
        log.appended(1)
        assert append_all(log) == [2]

    def test_a_hole_where_a_marker_may_have_been_is_asked_about(self) -> None:
        log = opened()
        log.offer(three(0, producer_id=7, producer_epoch=0, base_sequence=0, attributes=TRANSACTIONAL_BIT))
        taken(log)
        log.appended(0)
        emptied = whole_header(control_batch(3, False, producer_id=7, producer_epoch=0))._replace(record_count=0)
        log.offer(memoryview(seal(emptied, b"")))
        assert log.take() is None
        assert log.doubtful == {translate(7, 3): 0}
        log.resolve([translate(7, 3)], [translate(7, 3)])
        assert log.take() == Mark(3, 4, translate(7, 3), 0, False, 0, True)

    def test_a_producer_that_begins_again_has_not_ended(self) -> None:
        log = opened()
        header = {"producer_id": 7, "producer_epoch": 0, "attributes": TRANSACTIONAL_BIT}
        log.offer(three(0, base_sequence=0, **header))
        taken(log)
        log.appended(0)
        log.offer(three(4, base_sequence=3, **header))
        log.resolve(log.doubtful, [translate(7, 3)])
        assert log.take() == Mark(3, 4, translate(7, 3), 0, False, 0, True)
        log.marked()
        log.resume(0, 4, {translate(7, 3): ProducerState(0, 2, 0, -1)})
        taken(log)
        log.appended(4)
        log.offer(three(8, base_sequence=6, **header))
        assert log.doubtful == {translate(7, 3): 4}


class TestAnswersAfterTheEnd:
    """What is under way is still answered when the stream has ended, and nothing goes on."""

    @pytest.mark.parametrize("answer", ["out_of_sequence", "unknown", "not_written"])
    def test_of_a_batch(self, answer: str) -> None:
        log = opened()
        log.offer(three(0, producer_id=7, producer_epoch=0, base_sequence=3))
        taken(log)
        log.stop(StopReason("CODE", "the connection was lost"))
        getattr(log, answer)()
        assert log.state is LogState.STOPPED

    @pytest.mark.parametrize("answer", ["fenced", "unknown", "marked"])
    def test_of_a_marker(self, answer: str) -> None:
        log = opened()
        log.offer(memoryview(control_batch(0, True, producer_id=7, producer_epoch=0)))
        assert isinstance(log.take(), Mark)
        log.stop(StopReason("CODE", "the connection was lost"))
        getattr(log, answer)()
        assert log.state is LogState.STOPPED


class TestLogStart:
    def test_offsets_before_the_sources_start_are_filled_and_deleted(self) -> None:
        log = opened()
        log.offer(three(2_500_000), 2_500_000)
        assert append_all(log) == list(range(0, 2_500_000, FILLER_TOMBSTONES_MAX))
        assert (log.end, log.trim_to) == (2_500_000, 2_500_000)
        assert log.take() is None  # not before that is done
        log.trimmed(2_500_000)
        assert log.trim_to is None
        assert header_of(log).base_sequence == 2_500_000

    def test_a_source_that_is_empty_but_for_its_start(self) -> None:
        log = opened()
        log.offer(memoryview(b""), 10)
        assert (log.queued, log.accepted_end) == (1, 10)
        assert append_all(log) == [0]
        assert (log.end, log.trim_to, log.queued) == (10, 10, 0)

    def test_retention_that_overtook(self) -> None:
        log = opened(3)
        log.offer(three(12), 10)
        assert append_all(log) == [3]
        assert (log.end, log.trim_to) == (10, 10)
        log.trimmed(10)
        assert append_all(log) == [10, 12]
        assert log.filled == 9

    def test_what_expires_later_is_deleted(self) -> None:
        log = opened()
        log.offer(three(0, 3))
        append_all(log)
        log.offer(memoryview(b""), 4)
        assert log.trim_to == 4
        log.trimmed(4)
        assert log.trim_to is None


class TestSequencesWithHoles:
    def refused(self) -> FollowerLog:
        log = opened()
        log.offer(three(0, 3, producer_id=7, producer_epoch=2, base_sequence=30))
        log.take()
        log.out_of_sequence()
        assert (log.state, log.uncertain) == (LogState.RESUMING, False)
        return log

    def test_they_go_on_from_what_the_target_knows(self) -> None:
        log = self.refused()
        log.resume(0, 0, {translate(7, 3): ProducerState(2, 11, -1, -1)})
        assert header_of(log).base_sequence == 12
        log.appended(0)
        assert header_of(log).base_sequence == 15

    def test_a_new_epoch_begins_at_0(self) -> None:
        log = self.refused()
        log.resume(0, 0, {translate(7, 3): ProducerState(1, 11, -1, -1)})
        assert header_of(log).base_sequence == 0

    def test_a_marker_may_be_the_first_that_the_target_knows_of_a_producer(self) -> None:
        """The cleaner took what was before the marker: for the target, what comes after it begins at 0."""
        log = self.refused()
        log.resume(0, 0, {})
        known = {"producer_id": 9, "producer_epoch": 4}
        log.offer(memoryview(control_batch(6, True, producer_id=8, producer_epoch=0)))
        log.offer(memoryview(control_batch(7, True, **known)))
        log.offer(three(8, 11, base_sequence=20, attributes=TRANSACTIONAL_BIT, **known))
        for offset in (0, 3):
            taken(log)
            log.appended(offset)
        for _ in range(2):
            assert isinstance(log.take(), Mark)
            log.marked()
            if log.state is LogState.RESUMING:  # after the first one it is looked at what markers do
                log.resume(0, log.end, {})
        assert log.end == 8
        assert header_of(log).base_sequence == 0
        log.appended(8)
        assert header_of(log).base_sequence == 3

    def test_a_producer_that_is_unknown_keeps_its_own(self) -> None:
        log = self.refused()
        log.resume(0, 0, {})
        assert header_of(log).base_sequence == 30


def test_control_records_of_another_kind_are_not_copied() -> None:
    header = whole_header(three(0))._replace(attributes=CONTROL_BIT, last_offset_delta=0)
    data = encode_batch([Record(0, 1, bytes((0, 0, 0, 5)), b"value")], header)
    log = opened()
    log.offer(memoryview(data))
    assert log.take() is None
    assert stopped_for(log) == ReasonCode.UNSUPPORTED_MESSAGE_FORMAT


def test_damaged_batches_are_not_blessed_with_a_new_crc() -> None:
    data = bytearray(three(0))
    data[-1] ^= 1
    log = opened()
    log.offer(memoryview(data))
    assert log.take() is None
    assert stopped_for(log) == ReasonCode.UNSUPPORTED_MESSAGE_FORMAT


def test_bytes_that_are_no_batches() -> None:
    with pytest.raises(MalformedBatch):
        opened().offer(memoryview(b"\7" * 80))


def test_a_producer_id_beyond_the_scheme() -> None:
    log = opened()
    log.offer(three(0, producer_id=IDS_PER_CLUSTER, producer_epoch=0, base_sequence=0))
    assert log.take() is None
    assert stopped_for(log) == ReasonCode.UNSUPPORTED_MESSAGE_FORMAT


def test_what_comes_behind_a_batch_that_cannot_be_copied_is_copied_once_the_source_has_deleted_it() -> None:
    header = whole_header(three(0))._replace(attributes=LOG_APPEND_TIME_BIT)
    log = opened()
    log.offer(memoryview(seal(header, b"no records")))
    assert log.next_step() is Step.REPORT_END
    assert log.reason is not None
    assert "the batch at offset 0 cannot be copied" in log.reason.message
    assert "kafka-delete-records" in log.reason.message
    again = opened()
    again.offer(three(3), source_start=3)
    assert append_all(again) == [0]
    again.trimmed(3)
    assert append_all(again) == [3]
