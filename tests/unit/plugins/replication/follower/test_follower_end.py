"""The follower end against a model cluster, on a simulated clock: what it does about trouble at the target."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping, Sequence

import pytest
from support.fake_cluster import FakeProduceConnection
from support.partition_log import Partition, batch, control_batch
from support.replicas import LINK, Replicas, on_replicas

from isthmus_control.commands import (
    Body,
    ClaimBrokers,
    DetachNamespace,
    ExpireLease,
    RecordSourceEpochs,
    ReleaseLease,
)
from isthmus_control.levels import with_known_level
from isthmus_control.model import TRANSACTION_VERIFICATION, BrokerClaim, ResourceType
from isthmus_control.outcome import Accepted, Outcome, Rejected, Rejection
from isthmus_control.rules.proxies import LEASE_MS_MAX
from isthmus_control.states import ReasonCode
from isthmus_plugins.cluster import (
    BrokerUnavailable,
    KafkaRefused,
    ProduceResult,
    ProducerState,
    TopicPartition,
    TransactionMarkers,
)
from isthmus_plugins.replication.follower import follower_end as module
from isthmus_plugins.replication.follower import writers
from isthmus_plugins.replication.follower.log import LogState
from isthmus_plugins.replication.follower.position import LOST_REQUEST_MARGIN_S
from isthmus_plugins.replication.follower.stream import DECISION_LATE_S, FollowerStream
from isthmus_plugins.replication.link import calls, reasons
from isthmus_protocol.records import TRANSACTIONAL_BIT, BatchHeader, whole_header


async def one_record(replicas: Replicas) -> tuple[Partition, Partition]:
    """A topic with one record, copied."""
    source = replicas.a.add_topic("local-t").partitions[0]
    source.write_values(b"first")
    await replicas.until("copied", replicas.equal)
    return source, replicas.b.partition("remote-t")


def stream(replicas: Replicas) -> FollowerStream:
    return replicas.ends["B"].follower.streams()[0]


def answering(monkeypatch: pytest.MonkeyPatch, code: int, name: str, times: int) -> list[BatchHeader]:
    """The target answers so many requests with an error, and stores nothing; their batches."""
    asked: list[BatchHeader] = []
    produce = FakeProduceConnection.produce

    async def refuse(
        self: FakeProduceConnection,
        requests: Sequence[Mapping[TopicPartition, bytes]],
        timeout_ms: int,
        transactional_id: str | None = None,
    ) -> list[dict[TopicPartition, ProduceResult]]:
        if len(asked) >= times:
            return await produce(self, requests, timeout_ms, transactional_id)
        asked.extend(whole_header(data) for batches in requests for data in batches.values())
        return [{place: ProduceResult(code, name, -1, "no") for place in batches} for batches in requests]

    monkeypatch.setattr(FakeProduceConnection, "produce", refuse)
    return asked


@pytest.mark.parametrize(("code", "name"), [(19, "NOT_ENOUGH_REPLICAS"), (7, "REQUEST_TIMED_OUT"), (56, "STORAGE")])
def test_trouble_that_passes_is_told_and_waited_for(code: int, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(replicas: Replicas) -> None:
        source, _ = await one_record(replicas)
        asked = answering(monkeypatch, code, name, 8)
        source.write_values(b"second")
        await replicas.until("it is refused", lambda: stream(replicas).trouble is not None)
        assert name in stream(replicas).trouble.message  # type: ignore[union-attr]
        await replicas.until("it passes", lambda: replicas.equal() and stream(replicas).reason is None)
        assert len(asked) == 8

    on_replicas(monkeypatch, work)


def test_a_marker_that_waits_for_its_decision_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    undecided = [True]

    async def work(replicas: Replicas) -> None:
        source, _ = await one_record(replicas)
        monkeypatch.setattr(replicas.ends["B"].follower, "awaits", lambda *_: undecided[0])
        source.write(
            batch(
                source.end,
                [b"second"],
                producer_id=7,
                producer_epoch=0,
                base_sequence=0,
                attributes=TRANSACTIONAL_BIT,
            )
        )
        source.write(control_batch(source.end, True, producer_id=7, producer_epoch=0))
        await replicas.until("it waits", lambda: stream(replicas).follower_log.end == source.end - 1)
        assert stream(replicas).reason is None, "it waits for a moment, as a rule"
        await asyncio.sleep(DECISION_LATE_S)
        (status,) = replicas.ends["B"].parts.service.status(LINK).partitions
        assert (status.state, status.reason) == ("Catching Up", ReasonCode.DECISION_NOT_STORED)
        assert f"offset {source.end - 1} " in (status.message or "")
        undecided[0] = False
        replicas.ends["B"].follower.proceed(stream(replicas))
        await replicas.until("it passes", replicas.equal)
        assert stream(replicas).reason is None

    on_replicas(monkeypatch, work)


@pytest.mark.parametrize(
    ("code", "times"),
    [(10, writers.REFUSALS_MAX + 1), (87, 1), (45, writers.REFUSALS_MAX + 1)],
    ids=["large whatever the limits", "invalid", "out of order"],
)
def test_a_batch_that_the_target_does_not_want_stops_the_partition(
    code: int, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(replicas: Replicas) -> None:
        source, target = await one_record(replicas)
        asked = answering(monkeypatch, code, "SOME_ERROR", 1000)
        source.write_values(b"second", keys=[b"key"])
        await replicas.until("it stops", lambda: stream(replicas).follower_log.state is LogState.STOPPED)
        reason = stream(replicas).reason
        assert reason is not None
        assert reason.code == ReasonCode.TARGET_REFUSES_RECORDS
        assert "SOME_ERROR" in reason.message
        assert len(asked) == times
        assert target.end == 1

    on_replicas(monkeypatch, work)


def test_a_target_that_hears_late_of_its_larger_limits_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(replicas: Replicas) -> None:
        source, _ = await one_record(replicas)
        asked = answering(monkeypatch, 10, "MESSAGE_TOO_LARGE", writers.REFUSALS_MAX)
        began = asyncio.get_running_loop().time()
        source.write_values(b"second")
        await replicas.until("it is copied", replicas.equal)
        assert asyncio.get_running_loop().time() - began > 6, "a broker may take some seconds"
        assert len(asked) == writers.REFUSALS_MAX
        assert stream(replicas).reason is None

    on_replicas(monkeypatch, work)


def lose_first(monkeypatch: pytest.MonkeyPatch, lost: Callable[[bytes], None]) -> None:
    """The next request gets no answer; ``lost`` gets its first batch, and says what becomes of it."""
    produce = FakeProduceConnection.produce
    first = True

    async def lose(
        self: FakeProduceConnection,
        requests: Sequence[Mapping[TopicPartition, bytes]],
        timeout_ms: int,
        transactional_id: str | None = None,
    ) -> list[dict[TopicPartition, ProduceResult]]:
        nonlocal first
        if not first:
            return await produce(self, requests, timeout_ms, transactional_id)
        first = False
        lost(next(iter(requests[0].values())))
        raise BrokerUnavailable("no answer")

    monkeypatch.setattr(FakeProduceConnection, "produce", lose)


def test_a_lost_request_is_not_sent_again_before_it_must_have_landed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker slept with the request in its hands; where producer states are gone, nothing else tells duplicates."""

    async def work(replicas: Replicas) -> None:
        source, target = await one_record(replicas)
        target.producers.clear()
        loop = asyncio.get_running_loop()

        def lost(batch: bytes) -> None:
            replicas.b.down.add(1)  # for a minute it answers nothing; then all at once

            def awake() -> None:
                replicas.b.down.clear()
                loop.call_later(1.5, target.produce, batch)

            loop.call_later(60, awake)

        lose_first(monkeypatch, lost)
        source.write_values(b"second")
        await replicas.until("it is there", replicas.equal)
        await asyncio.sleep(10)
        assert len(target.log) == 2
        assert stream(replicas).reason is None

    on_replicas(monkeypatch, work)


def test_a_stream_waits_for_what_the_one_before_a_detach_may_have_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(replicas: Replicas) -> None:
        source, target = await one_record(replicas)
        await asyncio.sleep(5)  # what an older process may have sent is not waited for any more
        target.producers.clear()
        loop = asyncio.get_running_loop()
        batches: list[bytes] = []

        def lost(batch: bytes) -> None:
            batches.append(batch)
            loop.call_later(1.8, target.produce, batch)

        lose_first(monkeypatch, lost)
        source.write_values(b"second")
        await replicas.until("it is sent", lambda: bool(batches))
        await asyncio.sleep(0.05)
        replicas.controls["B"].apply(DetachNamespace(LINK, ResourceType.TOPIC, "remote-"))
        await asyncio.sleep(0.05)
        assert replicas.ends["B"].follower.streams() == []
        replicas.attach()
        await replicas.until("it is there", replicas.equal)
        await asyncio.sleep(10)
        assert len(target.log) == 2
        assert stream(replicas).reason is None

    on_replicas(monkeypatch, work)


@pytest.mark.parametrize("code", [19, 48])
@pytest.mark.parametrize("verifies", [True, False])
def test_whether_transactions_are_verified_is_asked_and_not_guessed(
    code: int, verifies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(replicas: Replicas) -> None:
        source, target = await one_record(replicas)
        replicas.b.cluster_configs[TRANSACTION_VERIFICATION] = str(verifies).lower()
        asked = answering(monkeypatch, code, "SOME_ERROR", 10)
        source.write_values(b"open", producer_id=7, producer_epoch=0, base_sequence=0, attributes=0x10)
        if code == 19 and not verifies:
            await replicas.until("it passes", replicas.equal)
            await replicas.until("nothing is told of it any more", lambda: stream(replicas).reason is None)
            assert len(asked) == 10
            return
        await replicas.until("it stops", lambda: stream(replicas).follower_log.state is LogState.STOPPED)
        reason = stream(replicas).reason
        assert reason is not None
        expected = ReasonCode.TRANSACTION_VERIFICATION_ENABLED if verifies else ReasonCode.TARGET_REFUSES_RECORDS
        assert reason.code == expected
        assert len(asked) == writers.UNVERIFIED_MAX + 1
        assert target.end == 1

    on_replicas(monkeypatch, work)


def test_a_new_process_waits_for_what_the_old_one_may_have_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(replicas: Replicas) -> None:
        source, target = await one_record(replicas)
        target.producers.clear()
        await replicas.stop("B")
        source.write_values(b"second")
        # Of the old process, in the broker's hands.
        asyncio.get_running_loop().call_later(1.8, target.produce, batch(0, [b"second"]))
        replicas.start("B")
        await replicas.connect()
        await replicas.until("it is there", replicas.equal)
        await asyncio.sleep(10)
        assert len(target.log) == 2

    # What lands is not stamped here, so it is not compared whole.
    monkeypatch.setattr(Replicas, "check", lambda self, topic, index: None)
    on_replicas(monkeypatch, work)


def test_of_streams_that_are_opened_at_once_the_last_one_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(replicas: Replicas) -> None:
        await one_record(replicas)
        follower = replicas.ends["B"].follower
        connection = replicas.ends["B"].peers.live[0]
        record = replicas.controls["B"].state.follower_topics["remote-t"]
        questions = (calls.OpenStream(number, "remote-t", record.source_topic_id, 0) for number in (901, 902, 903))
        opened = await asyncio.gather(*(follower.open_stream(connection, question) for question in questions))
        assert [each.end_offset for each in opened] == [1, 1, 1]
        assert stream(replicas).stream_id == 903
        assert [key[1] for key in follower._streams] == [903]

    on_replicas(monkeypatch, work)


def test_uncommitted_records_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(replicas: Replicas) -> None:
        source, target = await one_record(replicas)
        await replicas.stop("B")
        source.write_values(b"second")
        target.lag = 1
        replicas.start("B")
        asked: list[int] = []

        async def high_watermark(topic: str, partition: int) -> int:
            asked.append(1)
            target.lag = 0 if len(asked) > 20 else 1
            await asyncio.sleep(0.01)
            return target.high_watermark

        replicas.b.high_watermark = high_watermark  # type: ignore[method-assign]
        await replicas.connect()
        await replicas.until("it goes on when they are", replicas.equal)
        assert len(asked) > 20

    on_replicas(monkeypatch, work)


def test_an_epoch_that_is_refused_stops_its_partition_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(replicas: Replicas) -> None:
        control = replicas.controls["B"]
        append = control.append

        async def refuse(body: Body) -> Outcome:
            if isinstance(body, RecordSourceEpochs) and any(epoch.partition == 1 for epoch in body.entries):
                await asyncio.sleep(0.05)
                return Rejected(Rejection.CONFLICT, "no such epoch")
            return await append(body)

        control.append = refuse  # type: ignore[method-assign]
        topic = replicas.a.add_topic("local-t", 3)
        for partition in topic.partitions:
            partition.write_values(b"x")
        await replicas.until(
            "the others go on",
            lambda: (
                "remote-t" in replicas.b.found
                and [each.end for each in replicas.b.found["remote-t"].partitions] == [1, 0, 1]
            ),
        )
        await replicas.until(
            "it is told",
            lambda: any(
                each.partition == 1 and each.reason is not None and each.reason.code == ReasonCode.INTERNAL_ERROR
                for each in replicas.ends["B"].follower.streams()
            ),
        )

    on_replicas(monkeypatch, work)


def test_a_position_that_cannot_be_read_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(replicas: Replicas) -> None:
        source, _ = await one_record(replicas)
        answering(monkeypatch, 7, "REQUEST_TIMED_OUT", 1)

        async def forbidden(topic: str, partition: int) -> Mapping[int, ProducerState]:
            raise KafkaRefused(29, "TOPIC_AUTHORIZATION_FAILED", "not yours")

        replicas.b.producers = forbidden  # type: ignore[method-assign]
        source.write_values(b"second")
        await replicas.until("it is told", lambda: stream(replicas).follower_log.state is LogState.STOPPED)
        assert stream(replicas).follower_log.reason.code == ReasonCode.TARGET_REFUSES_RECORDS  # type: ignore[union-attr]

    on_replicas(monkeypatch, work)


def test_what_others_write_to_an_idle_follower_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(replicas: Replicas) -> None:
        _, target = await one_record(replicas)
        await replicas.ends["B"].parts.truncations.stop()  # which would cut it
        target.on_append = lambda partition: None
        target.write_values(b"not the source's")
        await replicas.until("found", lambda: stream(replicas).follower_log.state is LogState.DIVERGED, 20)
        await asyncio.sleep(60)  # and stays, however often it is tried again
        reason = stream(replicas).reason
        assert reason is not None
        assert reason.code == ReasonCode.TARGET_WRITTEN_BY_OTHERS
        target.cut(1)
        await replicas.until("mended", lambda: stream(replicas).reason is None, 30)

    on_replicas(monkeypatch, work)


def test_streams_end_with_their_mapping_whichever_proxy_detached_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(replicas: Replicas) -> None:
        source, target = await one_record(replicas)
        replicas.controls["B"].apply(DetachNamespace(LINK, ResourceType.TOPIC, "remote-"))
        source.write_values(b"second")
        await asyncio.sleep(5)
        assert target.end == 1
        assert replicas.ends["B"].follower.streams() == []
        replicas.attach()
        await replicas.until("it goes on", replicas.equal)

    on_replicas(monkeypatch, work)


def test_a_leader_end_that_sends_without_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(replicas: Replicas) -> None:
        source, _ = await one_record(replicas)
        monkeypatch.setattr(module, "QUEUED_BYTES_MAX", 100)
        answering(monkeypatch, 19, "NOT_ENOUGH_REPLICAS", 1000)
        connection = replicas.ends["B"].peers.live[0]
        for _ in range(10):
            source.write_values(b"x" * 100)
            await asyncio.sleep(0.5)
        assert connection.lost
        assert "more is sent" in connection.lost_reason

    on_replicas(monkeypatch, work)


def test_states_of_reasons() -> None:
    assert reasons.waiting_state(reasons.MOVED) is None
    assert reasons.waiting_state("") is None
    for code in (*reasons.DIVERGED, *reasons.REFUSED, *reasons.STOPPED):
        assert reasons.waiting_state(code) is not None


def test_markers_of_which_some_were_written_are_no_divergence(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(replicas: Replicas) -> None:
        write_markers = FakeProduceConnection.write_markers
        asked: list[int] = []

        async def part(
            self: FakeProduceConnection, markers: Sequence[TransactionMarkers], timeout_ms: int
        ) -> dict[TopicPartition, ProduceResult]:
            asked.append(markers[0].times)
            if len(asked) == 1:  # the in-sync replicas become too few meanwhile
                await write_markers(self, [markers[0]._replace(times=4)], timeout_ms)
                return {(markers[0].topic, markers[0].partition): ProduceResult(19, "NOT_ENOUGH_REPLICAS", -1, "")}
            return await write_markers(self, markers, timeout_ms)

        monkeypatch.setattr(FakeProduceConnection, "write_markers", part)
        source, _ = await one_record(replicas)
        source.write(batch(source.end + 10, [b"behind a gap"]))
        await replicas.until("it goes on", replicas.equal)
        assert asked == [10, 6]
        assert stream(replicas).follower_log.state is LogState.WRITING

    on_replicas(monkeypatch, work)


@pytest.mark.parametrize(("expiration_ms", "bursts"), [("21600000", 1), ("21599999", 0), (None, 0), ("?", 0)])
def test_bursts_need_brokers_that_remember_producers(
    expiration_ms: str | None, bursts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(replicas: Replicas) -> None:
        source, target = await one_record(replicas)
        if expiration_ms is None:
            del replicas.b.broker_defaults[module.PRODUCER_EXPIRATION]
        else:
            replicas.b.broker_defaults[module.PRODUCER_EXPIRATION] = expiration_ms
        await asyncio.sleep(2 * module.EXPIRATION_INTERVAL_S)
        for _ in range(3):
            source.write_values(b"more")
        await replicas.until("it is copied", replicas.equal)
        assert (target.end, replicas.b.bursts) == (4, bursts)

    on_replicas(monkeypatch, work)


def test_a_leader_epoch_that_both_sides_lost_the_begin_of_begins_somewhere_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work(replicas: Replicas) -> None:
        source, target = await one_record(replicas)
        for _ in range(3):
            source.write_values(b"of the first epoch")
        source.move(1)
        source.write_values(b"of the second")
        await replicas.until("copied", replicas.equal)
        replicas.cut()
        for cluster, log in ((replicas.a, source), (replicas.b, target)):
            cluster.lose_ends(1, lambda each, log=log: 3 if each is log else 0)  # type: ignore[misc]
        source.write_values(b"of the third, where the first went on")
        await replicas.connect()
        await replicas.until("it goes on", replicas.equal)
        replicas.check("remote-t", 0)
        epochs = replicas.controls["B"].state.source_epochs("remote-t", 0)
        assert [(each.epoch, each.start_offset) for each in epochs] == [(0, 0), (2, 2)]

    on_replicas(monkeypatch, work)


def test_something_may_land_while_another_process_may_have_sent_it_and_a_while_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work(replicas: Replicas) -> None:
        end, control = replicas.ends["B"].follower, replicas.controls["B"]
        place = "remote-other", 0
        assert end.may_land(place), "a process that was here before may have sent something"
        await asyncio.sleep(LOST_REQUEST_MARGIN_S)
        assert not end.may_land(place)
        for name in ("another", "another"):  # the second takes the first one's name over
            incarnation = str(uuid.uuid4())
            brokers = (BrokerClaim(2, "127.0.0.1", 9),)
            version = with_known_level("0")
            body = ClaimBrokers(name, incarnation, brokers, False, "127.0.0.1:9", LEASE_MS_MAX, version, -1)
            assert isinstance(control.apply(body), Accepted)
            await asyncio.sleep(2 * LOST_REQUEST_MARGIN_S)
            assert end.may_land(place)
        (superseded,) = control.state.superseded.values()
        gone = ExpireLease("another", superseded.incarnation, superseded.renewed_at_offset)
        for body in (ReleaseLease("another", incarnation), gone):
            assert end.may_land(place)
            assert isinstance(control.apply(body), Accepted)
        await asyncio.sleep(LOST_REQUEST_MARGIN_S / 2)
        assert end.may_land(place)
        await asyncio.sleep(LOST_REQUEST_MARGIN_S / 2)
        assert not end.may_land(place)

    on_replicas(monkeypatch, work)


def test_something_may_land_while_a_request_of_its_own_is_under_way_or_of_unknown_fate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work(replicas: Replicas) -> None:
        source, _ = await one_record(replicas)
        end, place = replicas.ends["B"].follower, ("remote-t", 0)
        await asyncio.sleep(LOST_REQUEST_MARGIN_S)
        assert end.may_land(place), "it follows"
        answering(monkeypatch, 7, "REQUEST_TIMED_OUT", 1000)
        source.write_values(b"second")
        await replicas.until("its fate is unknown", lambda: stream(replicas).follower_log.uncertain)
        replicas.controls["B"].apply(DetachNamespace(LINK, ResourceType.TOPIC, "remote-"))
        await asyncio.sleep(2 * LOST_REQUEST_MARGIN_S)
        assert end.may_land(place), "nobody has looked"

    on_replicas(monkeypatch, work)
