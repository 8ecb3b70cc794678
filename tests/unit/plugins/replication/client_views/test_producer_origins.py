"""Where a producer comes from whose epoch does not say it."""

from __future__ import annotations

import random
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import pytest
from support.fake_cluster import FakeCluster, FakeContext, FakeControl, run_simulated
from support.partition_log import Partition

from isthmus_control.control_state import ControlState
from isthmus_control.model import ProvenanceRange, TopicHistory
from isthmus_plugins.cluster import BrokerUnavailable, ProducerState
from isthmus_plugins.replication.client_views.producer_origins import (
    SEARCHED_MAX,
    Claim,
    Doubtful,
    ProducedBatch,
    ProducerOrigins,
    chosen,
    claims,
)
from isthmus_protocol.producer_ids import carry
from isthmus_protocol.record_codec import Record, encode_batch
from isthmus_protocol.records import HEADER_SIZE, LOG_APPEND_TIME_BIT, BatchHeader, rebase, seal, whole_header

RANGES = {"B": 0, "A": 1, "C": 2}
FROM_A, FROM_C = carry(0, 1, 0), carry(0, 2, 0)
"""Producer 0 of these, as B knows it."""


def state(last_sequence: int, epoch: int = 0) -> ProducerState:
    return ProducerState(epoch, last_sequence, -1, -1)


@pytest.mark.parametrize(
    ("states", "sequence", "expected"),
    [
        ({}, 0, {}),
        ({"A": state(4)}, 5, {"A": "goes on"}),
        ({"A": state(2**31 - 1)}, 0, {"A": "goes on"}),
        ({"A": state(4), "B": state(7)}, 5, {"A": "goes on", "B": "repeats"}),
        ({"A": state(4), "B": state(7)}, 8, {"A": "after a gap", "B": "goes on"}),
        ({"A": state(4), "B": state(4)}, 5, {"A": "goes on", "B": "goes on"}),
        ({"A": state(4)}, 0, {"A": "repeats"}),
        ({"A": state(4, epoch=1)}, 5, {}),
        ({"A": state(4, epoch=-1), "C": state(9, epoch=2)}, 0, {"A": "begins anew"}),
        ({"A": state(4, epoch=-1)}, 5, {}),
        ({"A": state(-1)}, 0, {}),
    ],
)
def test_whose_a_batch_may_be(states: dict[str, ProducerState], sequence: int, expected: dict[str, str]) -> None:
    assert {each: claim.value for each, claim in claims(states, 0, sequence).items()} == expected


ON, AGAIN, GAP, ANEW = Claim.GOES_ON, Claim.REPEATS, Claim.AFTER_A_GAP, Claim.BEGINS_ANEW


@pytest.mark.parametrize(
    ("claimed", "sequence", "expected"),
    [
        ({"A": ON}, 5, "A"),
        ({"A": GAP}, 5, "A"),
        ({"A": ON, "B": AGAIN}, 5, "A"),
        ({"A": AGAIN, "B": ON}, 5, "B"),
        ({"A": ON, "B": ON}, 5, None),
        ({"A": GAP, "B": ON}, 5, None),
        ({"A": AGAIN, "B": AGAIN}, 5, None),
        ({"A": AGAIN}, 0, "B"),
        ({"A": AGAIN, "C": AGAIN}, 0, "B"),
        ({"A": AGAIN, "B": AGAIN}, 0, None),
        ({"A": ANEW}, 0, None),
        ({"A": ANEW, "B": AGAIN}, 0, "A"),
        ({"B": ANEW}, 0, "B"),
        ({"A": ANEW, "B": ANEW}, 0, None),
        ({"A": ON}, 0, "A"),
    ],
)
def test_who_is_chosen_where_it_repeats_nothing(claimed: dict[str, Claim], sequence: int, expected: str | None) -> None:
    assert chosen("B", claimed, sequence) == expected


def batch(producer_id: int, sequence: int, value: bytes = b"v", at: int = 1000, epoch: int = 0) -> bytes:
    header = BatchHeader(0, 0, -1, 2, 0, 0, 0, at, at, producer_id, epoch, sequence, 1)
    return encode_batch([Record(0, at, b"k", value, (("h", b"1"),))], header)


class Log:
    """What B has of topic ``t``, which followed A, and ``u``, which did not."""

    def __init__(self) -> None:
        rng = random.Random(1)
        control = FakeControl("B", rng)
        came = ProvenanceRange("A", "id", 0, 6, 0)
        local = ProvenanceRange("B", "", 0, 6, 0)
        histories = {name: TopicHistory(name, "id", {0: (each,)}) for name, each in (("t", came), ("u", local))}
        control.state = ControlState("B", producer_id_ranges=RANGES, histories=histories)
        self.cluster = FakeCluster(rng)
        self.partitions = {name: self.cluster.add_topic(name).partitions[0] for name in "tu"}
        self.context: Any = FakeContext(self.cluster, control)
        self.origins = ProducerOrigins(self.context)

    @property
    def log(self) -> Partition:
        return self.partitions["t"]

    def write(self, *batches: bytes) -> None:
        for each in batches:
            self.log.write(rebase(each, self.log.end))

    async def origin(self, sent: bytes, *more: bytes, clusters: str = "AB") -> str | None:
        batches = [ProducedBatch(("t", 0), whole_header(each), memoryview(each)) for each in (sent, *more)]
        await self.origins.find(1, batches, clusters)
        return self.origins.known(1, batches[0].header)


def on_log(test: Callable[[Log], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        await test(Log())

    run_simulated(run())


def test_a_partition_that_never_followed_says_nothing() -> None:
    async def test(on: Log) -> None:
        assert on.origins.may_have_moved(("t", 0))
        assert not on.origins.may_have_moved(("u", 0))
        assert not on.origins.may_have_moved(("t", 1))

    on_log(test)


def test_who_goes_on_is_known_from_then_on_for_its_connection() -> None:
    async def test(on: Log) -> None:
        on.write(batch(FROM_A, 3))
        sent = batch(0, 4)
        assert on.origins.known(1, whole_header(sent)) is None
        assert await on.origin(sent) == "A"
        assert on.origins.known(2, whole_header(sent)) is None
        assert on.origins.known(1, whole_header(batch(0, 4, epoch=1))) is None
        assert await on.origin(batch(5, 0)) == "B", "of which the log knows nothing"

    on_log(test)


def test_a_first_batch_that_is_sent_again_is_told_from_one_that_begins() -> None:
    async def test(on: Log) -> None:
        first = batch(FROM_A, 0, b"a0")
        on.write(batch(-1, -1), first, batch(FROM_A, 1, b"a1"))
        assert await on.origin(batch(0, 0, b"a0")) == "A"
        assert await on.origin(batch(0, 0, b"b0")) == "B"
        assert await on.origin(batch(0, 0, b"a0", at=1001)) == "B", "at another time"

    on_log(test)


def test_with_the_brokers_times_the_records_say_it() -> None:
    async def test(on: Log) -> None:
        header = whole_header(stored := batch(FROM_A, 0, b"a0"))
        on.log.write(seal(header._replace(attributes=LOG_APPEND_TIME_BIT, max_timestamp=2000), stored[HEADER_SIZE:]))
        assert await on.origin(batch(0, 0, b"a0")) == "A"
        assert await on.origin(batch(0, 0, b"b0")) == "B"

    on_log(test)


def test_of_two_that_may_have_sent_it_nobody_is_chosen() -> None:
    async def test(on: Log) -> None:
        on.write(batch(FROM_A, 0, b"a0"), batch(0, 0, b"b0"))
        for sent in (batch(0, 1), batch(0, 0, b"other")):
            with pytest.raises(Doubtful):
                await on.origin(sent)
        assert await on.origin(batch(0, 0, b"b0")) == "B"
        on.write(batch(0, 1, b"b1"))
        assert await on.origin(batch(0, 1, b"b1")) == "B"
        assert await on.origin(batch(0, 1, b"a1")) == "A"
        with pytest.raises(Doubtful, match="A or B"):
            await on.origin(batch(0, 2))
        with pytest.raises(Doubtful, match="A and B"):
            await on.origin(batch(0, 1, b"b1"), batch(0, 1, b"a1"))

    on_log(test)


def test_an_epoch_that_was_raised_may_be_of_either() -> None:
    async def test(on: Log) -> None:
        on.write(batch(FROM_A, 3))
        with pytest.raises(Doubtful):
            await on.origin(batch(0, 0, epoch=1))

    on_log(test)


def test_too_much_to_be_looked_through_is_a_doubt() -> None:
    async def test(on: Log) -> None:
        on.write(batch(FROM_A, 0, b"a0"), *(batch(-1, -1) for _ in range(SEARCHED_MAX)))
        with pytest.raises(Doubtful, match="too much"):
            await on.origin(batch(0, 0, b"b0"))

    on_log(test)


def test_what_the_clusters_hand_out_alike_is_told_apart_by_the_log_too() -> None:
    async def test(on: Log) -> None:
        on.write(batch(FROM_A, 12), batch(FROM_C, 8))
        assert await on.origin(batch(0, 9), clusters="AC") == "C"

    on_log(test)


def test_a_batch_that_is_younger_than_a_log_whose_beginning_is_gone() -> None:
    async def test(on: Log) -> None:
        on.write(batch(FROM_A, 0, b"a0"), batch(FROM_A, 1, b"a1"))
        on.log.delete_records(1)
        assert await on.origin(batch(0, 0, b"b0", at=2000)) == "B"

    on_log(test)


def test_a_log_that_cannot_be_read_now_is_no_doubt() -> None:
    """The client asks again; in doubt it would give its producer up."""

    async def test(on: Log) -> None:
        on.write(batch(FROM_A, 0, b"a0"))

        async def no_leader(asked: Any) -> Mapping[Any, Any]:
            return {}

        on.cluster.offsets_for_times = no_leader  # type: ignore[method-assign]
        with pytest.raises(BrokerUnavailable):
            await on.origin(batch(0, 0, b"b0"))

    on_log(test)
