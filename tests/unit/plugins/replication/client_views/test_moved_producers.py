"""Producers that move here from another cluster are written under the ids that they have in this cluster's logs."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Mapping
from typing import Any

import pytest
from support.api_requests import request, versions
from support.fake_cluster import FakeCluster, FakeContext, FakeControl, run_simulated

from isthmus_control.control_state import ControlState
from isthmus_control.model import ProvenanceRange, TopicHistory
from isthmus_plugins.api import NEED_MORE, Answer, Hold, Replace, Request, Verdict
from isthmus_plugins.aside import aside
from isthmus_plugins.replication.client_views.moved_producers import MovedProducers
from isthmus_protocol import peeks
from isthmus_protocol.error_codes import INVALID_PRODUCER_ID_MAPPING, OUT_OF_ORDER_SEQUENCE_NUMBER
from isthmus_protocol.messages import build_response, decode_response, encode_response
from isthmus_protocol.producer_epochs import EPOCHS, first_epoch, marked
from isthmus_protocol.producer_ids import IDS_PER_CLUSTER, carry
from isthmus_protocol.record_codec import Record, encode_batch
from isthmus_protocol.records import TRANSACTIONAL_BIT, BatchHeader, rebase, verify_crc, whole_header
from isthmus_protocol.schema import ApiKey

RANGES = {"B": 5, "A": 9}
FROM_A, OWN = first_epoch("A"), first_epoch("B")
TOPIC = {"topic_id": uuid.UUID(int=1, version=4)}


def hooks_of(cluster_id: str, ranges: Mapping[str, int], *histories: TopicHistory) -> MovedProducers:
    rng = random.Random(1)
    control = FakeControl(cluster_id, rng)
    made = MovedProducers(FakeContext(FakeCluster(rng), control))  # type: ignore[arg-type]
    found = {each.topic: each for each in histories}
    control.state = ControlState(cluster_id, producer_id_ranges=ranges, histories=found)
    made.control_changed(control.state)
    return made


@pytest.fixture
def hooks() -> MovedProducers:
    return hooks_of("B", RANGES)


def batch(producer_id: int, epoch: int, sequence: int, attributes: int = 0, value: bytes = b"v" * 100) -> bytes:
    header = BatchHeader(0, 0, -1, 2, 0, attributes, 1, 7, 7, producer_id, epoch, sequence, 2)
    return encode_batch([Record(0, 7, b"k", value), Record(1, 7, None, b"w")], header)


def produce(version: int, *batches: bytes | None, topics: int = 1, acks: int = -1) -> Request:
    partitions = [{"index": index, "records": records} for index, records in enumerate(batches)]
    data = [TOPIC | {"name": f"t{number}", "partition_data": partitions} for number in range(topics)]
    return request(ApiKey.PRODUCE, version, {"acks": acks, "timeout": 1000, "topic_data": data})


def written(frame: bytes, version: int) -> list[bytes]:
    *_, topics = peeks.produce_batches(version, frame)
    return [bytes(records) for _, partitions in topics for _, records in partitions if records is not None]


PRODUCE = versions(ApiKey.PRODUCE, 3)


@pytest.mark.parametrize("version", PRODUCE)
def test_a_producer_that_moved_goes_on_under_its_translated_id(hooks: MovedProducers, version: int) -> None:
    own, moved = batch(0, OWN, 3), batch(0, FROM_A + 1, 17)
    asked = produce(version, own, moved, None, batch(-1, -1, -1), topics=2)
    verdict = hooks.on_produce(asked)
    assert isinstance(verdict, Replace)
    assert verdict.on_response is None
    assert len(verdict.frame) == len(asked.frame)
    assert asked.leave is None
    first, second, plain = written(verdict.frame, version)[:3]
    assert (first, plain) == (own, batch(-1, -1, -1))
    header = whole_header(second)
    verify_crc(second)
    assert header[9:12] == (carry(0, 9, 5), FROM_A + 1, 17)
    assert second[61:] == moved[61:]


@pytest.mark.parametrize("version", PRODUCE)
def test_its_own_producers_are_left_as_they_are_and_asked_about_once(hooks: MovedProducers, version: int) -> None:
    for records in (batch(0, OWN, 0), batch(-1, -1, -1), batch(0, FROM_A, 0, TRANSACTIONAL_BIT)):
        asked = produce(version, records)
        assert hooks.on_produce(asked) is None
        assert asked.leave is not None
        assert asked.leave.until == float("inf")
    several = produce(version, batch(0, OWN, 0), topics=2)
    assert hooks.on_produce(several) is None
    assert several.leave is None


def test_a_producer_that_comes_home_is_its_own_again(hooks: MovedProducers) -> None:
    at_home = hooks_of("A", RANGES)
    assert at_home.on_produce(produce(9, batch(0, FROM_A, 20))) is None
    guest = at_home.on_produce(produce(9, batch(0, OWN, 4)))
    assert isinstance(guest, Replace)
    assert whole_header(written(guest.frame, 9)[0]).producer_id == carry(0, 5, 9)


def test_a_producer_that_counted_its_epochs_up_is_known_by_its_id() -> None:
    """As one does that is refused again and again; the log has both clusters' producers of the broker's number."""
    came = ProvenanceRange("A", "id", 0, 6, 0)
    hooks = hooks_of("B", RANGES, TopicHistory("t0", "id", {0: (came,)}))
    cluster: Any = hooks._context.cluster
    log = cluster.add_topic("t0").partitions[0]
    own, theirs = marked(0, "B"), marked(0, "A")
    log.write(batch(carry(theirs, 9, 5), FROM_A, 0))
    log.write(rebase(batch(own, OWN, 0), log.end))
    for epoch in (OWN + EPOCHS, FROM_A, FROM_A + EPOCHS, 32767, 0):
        assert hooks.on_produce(produce(9, batch(own, epoch, 0))) is None
        moved = hooks.on_produce(produce(9, batch(theirs, epoch, 0)))
        assert isinstance(moved, Replace)
        assert whole_header(written(moved.frame, 9)[0])[9:12] == (carry(theirs, 9, 5), epoch, 0)


def test_what_is_decided_in_the_thread_is_counted_on_the_loop(hooks: MovedProducers) -> None:
    async def main() -> None:
        asked = produce(9, batch(0, FROM_A, 17), topics=3)
        verdict = await aside(hooks.on_produce, asked)
        assert isinstance(verdict, Replace)
        assert {whole_header(each).producer_id for each in written(verdict.frame, 9)} == {carry(0, 9, 5)}
        await asyncio.sleep(0)

    asyncio.run(main())
    written_metric, _ = hooks.metrics()
    assert [(each.labels["from_cluster_id"], each.value) for each in written_metric.samples] == [("A", 3)]


def test_a_prefix_is_not_enough(hooks: MovedProducers) -> None:
    asked = produce(9, batch(0, FROM_A, 17))
    prefix = Request(asked.frame[:-50], False, ApiKey.PRODUCE, 9, 5, 0.0, asked.client)
    assert hooks.on_produce(prefix) is NEED_MORE


def test_nothing_is_looked_at_without_a_link() -> None:
    hooks = hooks_of("B", {})
    asked = produce(9, batch(0, FROM_A, 17))
    assert hooks.on_produce(asked) is None
    leave = asked.leave
    assert leave is not None
    hooks.control_changed(ControlState("B", producer_id_ranges={"B": 5}))
    assert leave.until == float("inf")
    hooks.control_changed(ControlState("B", producer_id_ranges=RANGES))
    assert leave.until == float("-inf"), "connections of before are asked about again"
    assert isinstance(hooks.on_produce(asked), Replace)


def test_what_a_broker_refuses_is_the_brokers_to_refuse(hooks: MovedProducers) -> None:
    good = batch(0, FROM_A, 17)
    for records in (b"", b"\0" * 80, good[:-1], good + good, good[:-1] + b"x"):
        assert hooks.on_produce(produce(9, records)) is None


def test_where_the_epoch_says_nothing_the_log_is_asked(hooks: MovedProducers) -> None:
    """Of a topic that followed; and a producer of nobody knows whom is to begin anew."""
    came = ProvenanceRange("A", "id", 0, 6, 0)
    hooks = hooks_of("B", RANGES, TopicHistory("t0", "id", {0: (came,)}))
    elsewhere = produce(9, None, batch(0, 0, 17))
    assert hooks.on_produce(elsewhere) is None
    assert elsewhere.leave is not None
    cluster: Any = hooks._context.cluster
    log = cluster.add_topic("t0").partitions[0]
    here = carry(0, 9, 5)
    log.write(batch(here, 0, 16))

    def verdict_of(asked: Request) -> Any:
        verdict = hooks.on_produce(asked)
        assert isinstance(verdict, Hold)
        return run_simulated(verdict.verdict)  # type: ignore[arg-type]

    moved = verdict_of(produce(9, batch(0, 0, 18), topics=2))
    assert isinstance(moved, Replace)
    assert {whole_header(each).producer_id for each in written(moved.frame, 9)} == {here}, "in all topics"
    again = hooks.on_produce(produce(9, batch(0, 0, 20)))
    assert isinstance(again, Replace), "the connection's producer is known"

    log.write(rebase(batch(7, 0, 3), log.end))
    log.write(rebase(batch(carry(7, 9, 5), 0, 3), log.end))
    refused = verdict_of(produce(9, batch(7, 0, 5)))
    assert isinstance(refused, Answer)
    assert isinstance(refused.frame, bytes)
    answer: Any = decode_response(ApiKey.PRODUCE, 9, refused.frame)[1]
    told = answer.responses[0].partition_responses[0]
    assert (told.error_code, told.base_offset) == (INVALID_PRODUCER_ID_MAPPING, -1)
    assert told.error_message == "it is in doubt where this producer comes from: begin with a new producer"
    samples = {sample.name: sample.value for family in hooks.metrics() for sample in family.samples}
    assert samples["isthmus_moved_producer_requests_refused_total"] == 1


def test_a_transaction_is_not_taken_for_another_one_of_the_same_number_epoch_and_sequence() -> None:
    """Its transactional id is in use at both clusters, which both count from 0."""
    came = ProvenanceRange("B", "id", 0, 6, 0)
    hooks = hooks_of("A", RANGES, TopicHistory("t0", "id", {0: (came,)}))
    cluster: Any = hooks._context.cluster
    log = cluster.add_topic("t0", 2).partitions[0]
    for sequence in (0, 2, 4):
        log.write(rebase(batch(0, 0, sequence, TRANSACTIONAL_BIT), log.end))

    def verdict_of(session_id: int, *batches: bytes | None) -> Any:
        asked = produce(9, *batches)
        asked.client.session_id = session_id
        verdict = hooks.on_produce(asked)
        assert asked.leave is None, "what it writes to other partitions is looked at, too"
        return run_simulated(verdict.verdict) if isinstance(verdict, Hold) else verdict  # type: ignore[arg-type]

    moved = batch(0, 0, 2, TRANSACTIONAL_BIT, value=b"another")
    refused = verdict_of(1, moved)
    assert isinstance(refused, Answer)
    assert isinstance(refused.frame, bytes)
    answer: Any = decode_response(ApiKey.PRODUCE, 9, refused.frame)[1]
    assert answer.responses[0].partition_responses[0].error_code == OUT_OF_ORDER_SEQUENCE_NUMBER
    assert verdict_of(2, batch(0, 0, 2, TRANSACTIONAL_BIT)) is None, "it is the one that is there"
    assert verdict_of(3, batch(0, 0, 6, TRANSACTIONAL_BIT)) is None, "it goes on"
    assert verdict_of(4, batch(0, 1, 0, TRANSACTIONAL_BIT)) is None, "it begins anew"
    assert verdict_of(5, None, moved) is None, "the partition knows nothing of it"
    assert isinstance(verdict_of(5, moved, moved), Answer), "of that one it does"


def test_an_id_that_no_cluster_hands_out_is_refused(hooks: MovedProducers) -> None:

    async def refused() -> Verdict:
        return hooks.on_produce(produce(9, batch(IDS_PER_CLUSTER, FROM_A, 0)))

    assert isinstance(run_simulated(refused()), Answer)


def test_those_that_moved_are_counted(hooks: MovedProducers) -> None:
    for _ in range(3):
        hooks.on_produce(produce(9, batch(0, FROM_A, 17)))
    samples = [sample for family in hooks.metrics() for sample in family.samples if sample.labels]
    assert [(each.name, each.labels, each.value) for each in samples] == [
        ("isthmus_moved_producer_batches_total", {"from_cluster_id": "A"}, 3)
    ]


INIT = versions(ApiKey.INIT_PRODUCER_ID)


def numbered(hooks: MovedProducers, version: int, transactional_id: str | None, code: int = 0) -> tuple[int, int]:
    values = {"transactional_id": transactional_id, "transaction_timeout": 1000}
    verdict = hooks.on_init(request(ApiKey.INIT_PRODUCER_ID, version, values))
    answered = {"error_code": code, "producer_id": -1 if code else 4711, "producer_epoch": -1 if code else 0}
    frame = encode_response(build_response(ApiKey.INIT_PRODUCER_ID, version, answered), 5)
    if verdict is not None:
        assert isinstance(verdict, Replace)
        assert verdict.on_response is not None
        changed = verdict.on_response(frame)
        assert isinstance(changed, bytes)
        frame = changed
    answer: Any = decode_response(ApiKey.INIT_PRODUCER_ID, version, frame)[1]
    return answer.producer_id, answer.producer_epoch


@pytest.mark.parametrize("version", INIT)
def test_a_new_idempotent_producer_gets_an_epoch_of_this_cluster(hooks: MovedProducers, version: int) -> None:
    assert numbered(hooks, version, None) == (marked(4711, "B"), OWN)
    assert numbered(hooks_of("C", {}), version, None) == (marked(4711, "C"), first_epoch("C")), "without a link, too"
    assert numbered(hooks, version, "app") == (4711, 0), "a transactional one has its coordinator's"
    assert numbered(hooks, version, None, code=14) == (-1, -1)
