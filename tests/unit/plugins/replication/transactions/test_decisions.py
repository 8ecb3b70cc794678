"""Decisions to commit: sent before their markers, answered to clients when the other side has them."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import pytest
from support.api_requests import request
from support.fake_cluster import simulated_now
from support.partition_log import batch, control_batch
from support.pushing import KEY, PLACE, Connection, Source, Stream, on_source
from support.replicas import LINK, LINK_ID
from support.transaction_state import state_batch, state_key, state_value

from isthmus_control.commands import AlterDemands, DegradeSync, PartitionSync, RecordSync
from isthmus_control.model import LinkMode, Reason, ResourceType, SyncState
from isthmus_control.states import ReasonCode
from isthmus_plugins.api import Gate, Replace
from isthmus_plugins.cluster import TopicPartition
from isthmus_plugins.replication.link import calls
from isthmus_plugins.replication.link.connection import LinkRejected
from isthmus_plugins.replication.transactions.end_txn_gate import HELD_S
from isthmus_plugins.replication.transactions.marker_gate import UNDECIDED_S
from isthmus_protocol import schema
from isthmus_protocol.bodies import build
from isthmus_protocol.messages import decode_response, encode_response
from isthmus_protocol.offsets_log import OFFSETS_TOPIC
from isthmus_protocol.records import TRANSACTIONAL_BIT, whole_header
from isthmus_protocol.schema import ApiKey
from isthmus_protocol.transaction_log import TRANSACTION_TOPIC, Transaction, TransactionState

APP, PRODUCER, EPOCH = "app", 7, 3
VERSION = 4
TRY_AGAIN = 14
"""COORDINATOR_LOAD_IN_PROGRESS."""


def record(source: Source, state: TransactionState, *places: TopicPartition, app: str = APP) -> None:
    """The coordinator writes a state of a transaction."""
    value = state_value(Transaction(PRODUCER, EPOCH, state, places, 1))
    log = source.state[0]
    log.write(state_batch(log.end, [(state_key(app), value)]))


def write_unseen(source: Source, sequence: int = 0) -> bytes:
    """One record of a transaction, that nobody looks at yet."""
    data = batch(
        source.log.end,
        [b"v"],
        producer_id=PRODUCER,
        producer_epoch=EPOCH,
        base_sequence=sequence,
        attributes=TRANSACTIONAL_BIT,
    )
    source.log.write(data)
    return data


def write(source: Source) -> None:
    """One record of the transaction."""
    assert passes(source, write_unseen(source))


def mark(source: Source, committed: bool = True) -> bytes:
    """The marker that the coordinator writes into the partition."""
    data = control_batch(source.log.end, committed, producer_id=PRODUCER, producer_epoch=EPOCH)
    source.log.write(data)
    return data


def passes(source: Source, data: bytes) -> bool:
    """Whether the partition's stream may send a batch."""
    stream: Any = source.stream
    return source.decisions.markers.may_pass(stream, whole_header(data), data, False)


def late_marker(source: Source) -> int | None:
    """Where the marker stands that the partition's stream waits at for long."""
    stream: Any = source.stream
    found: int | None = stream.late_marker
    return found


def end_txn(source: Source, error_code: int = 0, committed: bool = True) -> bytes | Gate:
    """A client's request that the broker has answered: what goes out, or what waits."""
    asked = {"transactional_id": APP, "producer_id": PRODUCER, "producer_epoch": EPOCH, "committed": committed}
    asking = request(ApiKey.END_TXN, VERSION, asked)
    (hook,) = source.decisions.hooks()
    verdict = hook.on_request(asking)
    frame = encode_response(build(schema.response_type(ApiKey.END_TXN, VERSION), {"error_code": error_code}), 1)
    if verdict is None:
        return frame
    assert isinstance(verdict, Replace)
    assert verdict.on_response is not None
    found: bytes | Gate = verdict.on_response(frame)  # type: ignore[assignment]
    return found


def ended(sent: bytes | Gate) -> int | None:
    """The error code that the client got; None: it waits."""
    frame = sent._frame if isinstance(sent, Gate) else sent
    if frame is None:
        return None
    _, answer = decode_response(ApiKey.END_TXN, VERSION, frame)
    found: Any = answer
    return int(found.error_code)


async def committing(source: Source, *places: TopicPartition) -> None:
    """In-Sync, and a transaction is decided."""
    await source.synchronous()
    write(source)
    source.confirm()
    record(source, TransactionState.PREPARE_COMMIT, *(places or (PLACE,)))


def test_a_commit_is_answered_when_the_other_side_has_its_decision() -> None:
    async def work(source: Source) -> None:
        await committing(source)
        answer = end_txn(source)
        await source.until("it is sent", lambda: source.connection.decided)
        (decision,) = source.connection.decided
        assert (decision.transactional_id, decision.producer_id, decision.epoch) == (APP, PRODUCER, EPOCH)
        assert [(place.topic, place.partition, place.end) for place in decision.places] == [("remote-t", 0, 1)]
        assert not decision.again
        await asyncio.sleep(1.0)
        assert ended(answer) is None
        source.connection.answer()
        await source.until("it is answered", lambda: ended(answer) is not None, 1.0)
        assert ended(answer) == 0

    on_source(work)


@pytest.mark.parametrize(("error_code", "committed"), [(48, True), (0, False)])
def test_an_abort_and_a_commit_that_was_refused_wait_for_nobody(error_code: int, committed: bool) -> None:
    async def work(source: Source) -> None:
        await committing(source)
        assert ended(end_txn(source, error_code, committed)) == error_code

    on_source(work)


def test_no_commit_waits_while_no_link_is_synchronous() -> None:
    async def work(source: Source) -> None:
        record(source, TransactionState.PREPARE_COMMIT, PLACE)
        assert ended(end_txn(source)) == 0
        await asyncio.sleep(1.0)
        assert not source.connection.asked

    on_source(work)


def test_a_commit_that_touches_no_synchronous_link_is_answered_once_that_is_known() -> None:
    async def work(source: Source) -> None:
        source.cluster.add_topic("other")
        await committing(source, ("other", 0))
        answer = end_txn(source)
        assert ended(answer) is None, "the log is read up to where it ends now"
        await source.until("it is answered", lambda: ended(answer) is not None, 1.0)
        assert ended(answer) == 0
        assert not source.connection.asked

    on_source(work)


def test_a_commit_is_not_answered_before_the_log_is_read_that_far() -> None:
    async def work(source: Source) -> None:
        await source.synchronous()
        await source.until("it is read", lambda: source.decisions.tail.loaded)
        await source.decisions.tail.stop()
        record(source, TransactionState.PREPARE_COMMIT, PLACE)
        answer = end_txn(source)
        await source.until("it is answered", lambda: ended(answer) is not None)
        assert ended(answer) == TRY_AGAIN

    on_source(work)


def test_thousands_of_commits_that_wait_go_when_they_may_or_are_late() -> None:
    async def work(source: Source) -> None:
        def committed(number: int, transactional_id: str) -> bytes | Gate:
            producer = {"producer_id": number, "producer_epoch": 0}
            asked = {"transactional_id": transactional_id, **producer, "committed": True}
            frame = request(ApiKey.END_TXN, VERSION, asked).frame
            said = encode_response(build(schema.response_type(ApiKey.END_TXN, VERSION), {"error_code": 0}), 1)
            return source.decisions.end_txn.answered(VERSION, transactional_id, frame, said)

        await committing(source)
        began = simulated_now()
        # Of half of them nothing is outstanding, as the log says when it was read.
        answers = [committed(number, APP if number % 2 else f"t{number}") for number in range(1_000)]
        assert {ended(answer) for answer in answers} == {None}
        await source.until("what may go has", lambda: all(ended(answer) == 0 for answer in answers[::2]), 1.0)
        assert {ended(answer) for answer in answers[1::2]} == {None}
        await source.until("all are answered", lambda: all(ended(answer) is not None for answer in answers))
        assert {ended(answer) for answer in answers[1::2]} == {TRY_AGAIN}
        assert HELD_S <= simulated_now() - began < HELD_S + 0.5

    on_source(work)


def test_a_commit_that_is_not_confirmed_in_time_is_asked_for_again() -> None:
    async def work(source: Source) -> None:
        await committing(source)
        began = simulated_now()
        answer = end_txn(source)
        await source.until("it is answered", lambda: ended(answer) is not None)
        assert ended(answer) == TRY_AGAIN
        assert HELD_S <= simulated_now() - began < HELD_S + 0.5
        again = end_txn(source)
        source.connection.answer()
        await source.until("it is answered", lambda: ended(again) is not None, 1.0)
        assert ended(again) == 0

    on_source(work)


def test_a_marker_goes_behind_its_decision() -> None:
    async def work(source: Source) -> None:
        await committing(source)
        marker = mark(source)
        passed_at: list[float] = []
        source.ends.on_resume = lambda: passes(source, marker) and passed_at.append(simulated_now())
        assert not passes(source, marker), "the decision is not read yet"
        await source.until("it is sent", lambda: source.connection.decided)
        assert passed_at[0] == source.connection.asked_at, "as soon as the decision is ahead of it"
        assert not source.connection.asked[0][1].done()

    on_source(work)


def test_a_marker_that_goes_over_another_connection_waits_for_its_decision_there() -> None:
    async def work(source: Source) -> None:
        await committing(source)
        await source.until("it is sent", lambda: source.connection.decided)
        source.connection = source.stream.connection = Connection()
        marker = mark(source)
        assert not passes(source, marker), "what was sent before may come later"
        await source.until("it is sent again", lambda: source.connection.decided, 0.1)
        assert passes(source, marker)

    on_source(work)


def test_a_marker_whose_decision_the_other_side_has_goes_over_any_connection() -> None:
    async def work(source: Source) -> None:
        await committing(source)
        await source.until("it is sent", lambda: source.connection.decided)
        source.connection.answer()
        await asyncio.sleep(0.1)
        source.connection = source.stream.connection = Connection()
        assert passes(source, mark(source))
        await asyncio.sleep(1.0)
        assert not source.connection.decided

    on_source(work)


def test_markers_of_aborts_wait_for_nothing() -> None:
    async def work(source: Source) -> None:
        await source.synchronous()
        write(source)
        assert passes(source, mark(source, committed=False))

    on_source(work)


def test_a_decision_that_is_refused_ends_the_connection_and_goes_over_the_next_one() -> None:
    async def work(source: Source) -> None:
        await committing(source)
        answer = end_txn(source)
        await source.until("it is sent", lambda: source.connection.decided)
        refusing = source.connection
        refusing.answer(LinkRejected("STORE_UNAVAILABLE", "the store has no leader"))
        await source.until("it is closed", lambda: refusing.lost, 1.0)
        assert refusing.closed == "decisions not stored: the store has no leader"
        assert ended(answer) is None
        source.connection = source.stream.connection = Connection()
        await source.until("it is sent again", lambda: source.connection.decided, 1.0)
        source.connection.answer()
        await source.until("it is answered", lambda: ended(answer) is not None, 1.0)
        assert ended(answer) == 0

    on_source(work)


def test_a_commit_of_offsets_over_a_link_without_groups_is_acked_when_its_records_are_there() -> None:
    """An exactly-once application whose groups are not replicated."""

    async def work(source: Source) -> None:
        source.cluster.add_topic(OFFSETS_TOPIC)
        await begun(source, PLACE, (OFFSETS_TOPIC, 0))
        record(source, TransactionState.PREPARE_COMMIT, PLACE, (OFFSETS_TOPIC, 0))
        answer = end_txn(source)
        await source.until("it is sent", lambda: source.connection.decided, 1.0)
        assert set(ends_of(source.connection.decided[0])) == {"remote-t"}
        source.connection.answer()
        await source.until("it is answered", lambda: ended(answer) is not None, 0.5)
        assert ended(answer) == 0

    on_source(work)


def test_what_follows_no_more_keeps_no_marker_elsewhere_and_is_not_acked() -> None:
    """A failover of some topics of a transaction, say; the connection is others', too."""

    async def work(source: Source) -> None:
        source.cluster.add_topic("local-u").partitions[0].write_values(b"x")
        await begun(source, PLACE, ("local-u", 0))
        record(source, TransactionState.PREPARE_COMMIT, PLACE, ("local-u", 0))
        answer = end_txn(source)
        await source.until("it is sent", lambda: source.connection.decided, 1.0)
        source.connection.answer(calls.DecideAnswer(("remote-u",)))
        await source.until("it is answered", lambda: ended(answer) is not None)
        assert ended(answer) == TRY_AGAIN
        assert source.connection.closed is None
        assert passes(source, mark(source))
        assert len(source.connection.decided) == 1, "it is not sent again"

    on_source(work)


def test_a_proxy_that_pushes_none_of_its_partitions_sends_a_decision_where_it_fronts_the_coordinator() -> None:
    async def work(source: Source) -> None:
        await committing(source)
        source.ends.pushed, source.ends.discovery.led = None, {}
        await source.until("it is sent", lambda: source.connection.decided)
        source.context.fronted_brokers = frozenset((99,))
        record(source, TransactionState.COMPLETE_COMMIT)
        record(source, TransactionState.ONGOING, PLACE)
        record(source, TransactionState.PREPARE_COMMIT, PLACE)
        await asyncio.sleep(2.0)
        assert len(source.connection.decided) == 1, "another proxy fronts it by now"

    on_source(work)


def test_what_another_proxy_sends_is_forgotten_when_the_next_transaction_begins() -> None:
    """Until then this one may come to front the coordinator, and be asked."""

    async def work(source: Source) -> None:
        await committing(source)
        source.ends.pushed, source.context.fronted_brokers = None, frozenset((99,))
        record(source, TransactionState.COMPLETE_COMMIT)
        early = end_txn(source)
        await asyncio.sleep(1.0)
        assert ended(early) is None
        assert not source.connection.decided
        record(source, TransactionState.ONGOING, PLACE)
        await source.until("it is answered", lambda: ended(early) is not None, 1.0)
        assert ended(early) == 0, "who began the next one had the answer"

    on_source(work)


def test_a_decision_waits_until_the_other_side_has_what_the_same_epoch_aborted_before() -> None:
    """Else the other side would take the aborted records for those of the commit."""

    async def work(source: Source) -> None:
        await source.synchronous()
        write(source)
        record(source, TransactionState.PREPARE_ABORT, PLACE)
        mark(source, committed=False)
        record(source, TransactionState.COMPLETE_ABORT)
        record(source, TransactionState.ONGOING, PLACE)
        record(source, TransactionState.PREPARE_COMMIT, PLACE)
        source.confirm(0)
        await asyncio.sleep(0.7)
        assert not source.connection.decided
        source.confirm()
        await source.until("it is sent", lambda: source.connection.decided, 0.05)

    on_source(work)


def test_a_marker_of_what_is_pushed_anew_waits_while_the_other_side_lacks_what_was_aborted_elsewhere() -> None:
    """Its brokers are away, say, and the source's may die before it goes on: the marker would be there alone."""

    async def work(source: Source) -> None:
        there = dict.fromkeys(("remote-u",), 0)

        async def call(question: calls.HighWatermarks) -> calls.HighWatermarksAnswer:
            ends = (calls.PartitionEnd(*each, there[each.topic]) for each in question.partitions)
            return calls.HighWatermarksAnswer(tuple(ends))

        topic = source.cluster.add_topic("local-u")
        topic.partitions[0].write_values(b"x")
        in_sync = (PartitionSync("local-u", str(uuid.UUID(bytes=topic.topic_id)), 0, 0),)
        await begun(source, PLACE, ("local-u", 0))
        source.control.apply(RecordSync(LINK, LINK_ID, SyncState.IN_SYNC, in_sync))
        source.connection.call = call
        source.ends.pushed, led, source.ends.discovery.led = None, source.ends.discovery.led, {}
        await asyncio.sleep(3.0)
        source.stream = source.ends.pushed = Stream(source.stream.topic_id, source.connection, stream_id=2)
        source.ends.discovery.led = led
        assert source.sync.partitions.floor(KEY) is None
        record(source, TransactionState.PREPARE_COMMIT, PLACE, ("local-u", 0))
        marker = mark(source)
        source.confirm(1)
        for _ in range(50):
            assert not passes(source, marker)
            await asyncio.sleep(0.1)
        assert not source.connection.decided
        there["remote-u"] = 1
        await source.until("it may go", lambda: passes(source, marker), 1.0)
        assert source.connection.decided

    on_source(work)


def test_what_was_decided_before_the_start_is_sent_as_such() -> None:
    """The process before may have sent it, or not: its ends may be those of later transactions."""

    async def work(source: Source) -> None:
        write(source)
        record(source, TransactionState.PREPARE_COMMIT, PLACE)
        source.mode(LinkMode.SYNCHRONOUS)
        await source.until("it joins", lambda: source.recorded() is not None)
        marker = mark(source)
        assert not passes(source, marker)
        await source.until("it is sent", lambda: source.connection.decided)
        (decision,) = source.connection.decided
        assert decision.again
        assert passes(source, marker)

    on_source(work)


def aborted_and_decided(source: Source, *places: TopicPartition) -> None:
    """Of two transactions in one epoch the first one is aborted, and the second one has no record."""
    write_unseen(source)
    record(source, TransactionState.PREPARE_ABORT, PLACE)
    mark(source, committed=False)
    record(source, TransactionState.COMPLETE_ABORT)
    record(source, TransactionState.ONGOING, *places)
    record(source, TransactionState.PREPARE_COMMIT, *places)


def recorded_as(source: Source, state: SyncState, topic: str) -> None:
    """It is recorded of a topic's partition that it was In-Sync, and is this now."""
    partitions = (PartitionSync(topic, str(uuid.UUID(bytes=source.cluster.found[topic].topic_id)), 0, 0),)
    source.control.apply(RecordSync(LINK, LINK_ID, SyncState.IN_SYNC, partitions))
    source.control.apply(RecordSync(LINK, LINK_ID, SyncState.IN_SYNC, partitions, reached=True))
    if state is SyncState.OUT_OF_SYNC:
        reason = Reason(ReasonCode.TIMEOUT_ERROR, "it is away")
        source.control.apply(RecordSync(LINK, LINK_ID, state, partitions, reason))


def test_what_was_decided_before_the_start_goes_to_what_is_out_of_sync_behind_what_was_aborted() -> None:
    """For as long the markers go without it: a commit that is torn there, and no record that was aborted counts."""

    async def work(source: Source) -> None:
        aborted_and_decided(source, PLACE)
        marker = mark(source)
        source.mode(LinkMode.SYNCHRONOUS)
        source.stream.close = False
        recorded_as(source, SyncState.OUT_OF_SYNC, PLACE[0])
        assert not passes(source, marker)
        await source.until("it is not waited for", lambda: passes(source, marker), 1.0)
        await asyncio.sleep(30.0)
        answer = end_txn(source)
        await asyncio.sleep(1.0)
        assert not source.connection.decided
        assert ended(answer) is None
        source.confirm()
        await source.until("it is sent", lambda: source.connection.decided, 0.5)
        source.connection.answer()
        await source.until("it is answered", lambda: ended(answer) == 0, 1.0)

    on_source(work)


def test_a_commit_whose_decision_the_log_has_no_more_waits_for_what_other_proxies_push() -> None:
    """It may list any of that: with its own partitions In-Sync, or none, this proxy had it acked."""

    async def work(source: Source) -> None:
        source.cluster.add_topic("local-u")
        record(source, TransactionState.COMPLETE_COMMIT)  # what was before that is compacted away
        await source.synchronous()
        recorded_as(source, SyncState.OUT_OF_SYNC, "local-u")
        answer = end_txn(source)
        await asyncio.sleep(1.0)
        assert ended(answer) is None
        recorded_as(source, SyncState.IN_SYNC, "local-u")
        await source.until("it is answered", lambda: ended(answer) == 0, 1.0)

    on_source(work)


def test_where_a_commit_does_not_wait_for_what_is_out_of_sync_its_decision_leaves_that_out() -> None:
    """As long as the other side lacks what was aborted there."""

    async def work(source: Source) -> None:
        source.cluster.add_topic("local-u")
        source.control.apply(AlterDemands(ResourceType.TOPIC, "local-", degrade_after_ms=1000))
        source.mode(LinkMode.SYNCHRONOUS)
        source.stream.close = False
        recorded_as(source, SyncState.IN_SYNC, "local-u")
        recorded_as(source, SyncState.OUT_OF_SYNC, PLACE[0])
        partitions = (PartitionSync(PLACE[0], str(uuid.UUID(bytes=source.stream.topic_id)), 0, 0),)
        source.control.apply(DegradeSync(LINK, LINK_ID, partitions, 1000))
        await source.until("the log is read", lambda: source.decisions.tail.loaded)
        for number, expected in enumerate(({"remote-u"}, {"remote-t", "remote-u"})):
            aborted_and_decided(source, PLACE, ("local-u", 0))
            if number:
                source.confirm()
            answer = end_txn(source)
            await source.until("it is sent", lambda number=number: len(source.connection.decided) > number)
            assert ends_of(source.connection.decided[number]).keys() == expected
            source.connection.answer()
            await source.until("it is answered", lambda answer=answer: ended(answer) == 0, 1.0)
            record(source, TransactionState.COMPLETE_COMMIT)
        await asyncio.sleep(1.0)
        assert len(source.connection.decided) == 2

    on_source(work)


def test_what_was_decided_before_the_start_goes_behind_what_was_aborted() -> None:
    async def work(source: Source) -> None:
        aborted_and_decided(source, PLACE)
        source.mode(LinkMode.SYNCHRONOUS)
        await source.until("it joins", lambda: source.recorded() is not None)
        answer = end_txn(source)
        await asyncio.sleep(2.0)
        assert not source.connection.decided
        source.confirm()
        await source.until("it is sent", lambda: source.connection.decided, 0.5)
        source.connection.answer()
        await source.until("it is answered", lambda: ended(answer) == 0, 1.0)

    on_source(work)


def test_a_marker_waits_for_a_moment_while_what_is_sent_again_waits_for_other_partitions() -> None:
    """Another proxy pushes these, whose markers may wait for this one's."""

    async def work(source: Source) -> None:
        async def call(question: calls.HighWatermarks) -> calls.HighWatermarksAnswer:
            return calls.HighWatermarksAnswer(tuple(calls.PartitionEnd(*each, 0) for each in question.partitions))

        source.connection.call = call
        source.cluster.add_topic("local-u").partitions[0].write_values(b"x")
        write_unseen(source)
        record(source, TransactionState.PREPARE_COMMIT, PLACE, ("local-u", 0))
        marker = mark(source)
        source.mode(LinkMode.SYNCHRONOUS)
        for topic in (PLACE[0], "local-u"):
            recorded_as(source, SyncState.IN_SYNC, topic)
        source.confirm(1)
        assert not passes(source, marker)
        assert await source.until("it may go", lambda: passes(source, marker), 2.0) > UNDECIDED_S
        (decision,) = source.connection.decided
        assert decision.again
        state_now = source.recorded()
        assert state_now is not None
        assert state_now.state is SyncState.IN_SYNC

    on_source(work)


@pytest.mark.parametrize("when", ["before the start", "before its ends are read", "after"])
def test_what_a_producer_went_on_behind_in_the_same_epoch_is_not_sent_again(when: str) -> None:
    """The answer to EndTxn was out then, so the other side had it; and an end that is read now is above records that
    nobody has decided on. A failover would commit them."""

    async def work(source: Source) -> None:
        write(source)
        for state in (TransactionState.ONGOING, TransactionState.PREPARE_COMMIT, TransactionState.COMPLETE_COMMIT):
            record(source, state, PLACE)
        marker = mark(source)

        def goes_on() -> None:
            record(source, TransactionState.ONGOING, PLACE)
            write_unseen(source, sequence=1)

        def goes_on_now(*args: Any) -> Any:
            goes_on()
            source.cluster.log_ends = log_ends  # type: ignore[method-assign]
            return log_ends(*args)

        log_ends = source.cluster.log_ends
        if when == "before the start":
            goes_on()
        source.mode(LinkMode.SYNCHRONOUS)
        await source.until("it joins", lambda: source.recorded() is not None)
        await source.until("the log is read", lambda: source.decisions.tail.loaded)
        if when == "before its ends are read":
            source.cluster.log_ends = goes_on_now  # type: ignore[method-assign]
        assert not passes(source, marker)
        await source.until("it is not waited for", lambda: passes(source, marker))
        if when == "after":
            goes_on()
        await asyncio.sleep(2.0)
        assert [ends_of(each) for each in source.connection.decided] == ([{"remote-t": 2}] if when == "after" else [])

    on_source(work)


def test_a_partition_whose_decision_nobody_knows_is_in_sync_no_more_and_its_marker_goes_then() -> None:
    async def work(source: Source) -> None:
        await source.synchronous()
        await asyncio.sleep(5.0)
        write(source)
        source.confirm()
        marker = mark(source)
        assert not passes(source, marker)
        assert await source.until("it leaves", lambda: not source.in_sync(), 3.0) >= UNDECIDED_S
        await source.until("it may go", lambda: passes(source, marker), 10.0)
        assert not source.in_sync()
        recorded = source.recorded()
        assert recorded is not None
        assert recorded.reason is not None
        assert recorded.reason.message.endswith("the decision that the marker at offset 1 carries out is not known")
        assert KEY not in source.sync.links.holding(PLACE)

    on_source(work)


def without_leader(source: Source, place: TopicPartition) -> None:
    """From now on the partition has no leader."""
    source.cluster.partition(*place).move(-1)


def with_leader(source: Source, place: TopicPartition) -> None:
    source.cluster.partition(*place).move(source.cluster.brokers[0])


async def begun(source: Source, *places: TopicPartition) -> None:
    """A transaction that lists these partitions has a record in the first."""
    await source.synchronous()
    record(source, TransactionState.ONGOING, *places)
    write(source)
    source.confirm()
    await asyncio.sleep(0.5)


def ends_of(decision: calls.Decision) -> dict[str, int]:
    return {place.topic: place.end for place in decision.places}


def test_a_decision_goes_without_the_end_of_a_partition_that_has_no_leader_and_again_with_it() -> None:
    """Else the marker in the other partition would have to wait, or go ahead of it; and were the source lost then, the
    transaction would be committed in the one and aborted in the other."""

    async def work(source: Source) -> None:
        source.cluster.add_topic("local-u").partitions[0].write_values(b"x")
        await begun(source, PLACE, ("local-u", 0))
        without_leader(source, ("local-u", 0))
        record(source, TransactionState.PREPARE_COMMIT, PLACE, ("local-u", 0))
        marker = mark(source)
        answer = end_txn(source)
        assert not passes(source, marker)
        await source.until("it is sent", lambda: source.connection.decided, 1.0)
        assert ends_of(source.connection.decided[0]) == {"remote-t": 2, "remote-u": calls.OPEN_END}
        assert passes(source, marker)
        source.connection.answer()
        await source.until("it is answered", lambda: ended(answer) is not None)
        assert ended(answer) == TRY_AGAIN, "the next transaction could be taken for this one"
        with_leader(source, ("local-u", 0))
        await source.until("it is sent again", lambda: len(source.connection.decided) == 2, 1.0)
        assert ends_of(source.connection.decided[1]) == {"remote-t": 2, "remote-u": 1}
        assert source.connection.decided[1].at == source.connection.decided[0].at
        again = end_txn(source)
        source.connection.answer()
        await source.until("it is answered", lambda: ended(again) is not None, 1.0)
        assert ended(again) == 0

    on_source(work)


def test_a_partition_waits_for_its_own_end_and_for_no_longer_than_its_decision() -> None:
    """Above its end another transaction of the producer may begin, behind the marker."""

    async def work(source: Source) -> None:
        await begun(source, PLACE)
        without_leader(source, PLACE)
        record(source, TransactionState.PREPARE_COMMIT, PLACE)
        await source.until("it is sent", lambda: source.connection.decided, 1.0)
        assert ends_of(source.connection.decided[0]) == {"remote-t": calls.OPEN_END}
        source.connection.answer()
        marker = mark(source)
        await asyncio.sleep(5.0)
        assert not passes(source, marker)
        assert source.in_sync()
        with_leader(source, PLACE)
        await source.until("it may go", lambda: passes(source, marker), 1.0)
        assert ends_of(source.connection.decided[1]) == {"remote-t": 2}

    on_source(work)


def test_a_marker_waits_for_as_long_as_its_decision_cannot_be_read() -> None:
    """The coordinator died with its broker just when it had written the marker."""

    async def work(source: Source) -> None:
        await begun(source, PLACE)
        await asyncio.sleep(5.0)
        without_leader(source, (TRANSACTION_TOPIC, 0))
        record(source, TransactionState.PREPARE_COMMIT, PLACE)
        marker = mark(source)
        assert not passes(source, marker)
        assert late_marker(source) is None
        await asyncio.sleep(60.0)
        assert not passes(source, marker)
        assert late_marker(source) == whole_header(marker).base_offset
        with_leader(source, (TRANSACTION_TOPIC, 0))
        await source.until("it may go", lambda: passes(source, marker), 3.0)
        assert source.connection.decided
        assert late_marker(source) is None

    on_source(work)


@pytest.mark.parametrize("goes_on", [False, True])
def test_a_partition_that_is_led_anew_sends_what_was_decided_before_its_marker(goes_on: bool) -> None:
    """Who led it may have died before it could, and who coordinates the transaction may, too. The application goes on
    when it was started again."""

    async def work(source: Source) -> None:
        await begun(source, PLACE)
        source.ends.pushed, led, source.ends.discovery.led = None, source.ends.discovery.led, {}
        source.context.fronted_brokers = frozenset((99,))
        record(source, TransactionState.PREPARE_COMMIT, PLACE)
        await asyncio.sleep(3.0)
        assert not source.connection.decided, "another proxy's"
        if goes_on:
            record(source, TransactionState.ONGOING, PLACE)
            await asyncio.sleep(1.0)
        source.context.fronted_brokers = None
        source.decisions._sender._coordinates = lambda decision: False  # type: ignore[method-assign]
        source.ends.pushed, source.ends.discovery.led = source.stream, led
        marker = mark(source)
        assert not passes(source, marker)
        await source.until("it may go", lambda: passes(source, marker), 3.0)
        assert [decision.again for decision in source.connection.decided] == [True]

    on_source(work)


def test_all_answers_go_when_no_link_is_synchronous_any_more() -> None:
    async def work(source: Source) -> None:
        await committing(source)
        answer = end_txn(source)
        await asyncio.sleep(0.5)
        assert ended(answer) is None
        source.mode(LinkMode.ASYNCHRONOUS)
        marker = mark(source)
        await source.until("it is answered", lambda: ended(answer) is not None, 2.9)
        assert ended(answer) == 0
        assert passes(source, marker)

    on_source(work)
