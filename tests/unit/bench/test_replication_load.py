"""What writes to a source and watches a target: matching acks with sights, frames, MirrorMaker's settings."""

from __future__ import annotations

from uuid import UUID

import pytest

from isthmus_bench import mirror_maker
from isthmus_bench.load import LoadError, batch
from isthmus_bench.replication_load import Arrivals, Pace, fetch_frame, lag_said, produce_frame
from isthmus_protocol import peeks

IDENTITY = UUID(int=7)


def test_a_sight_is_of_every_batch_before_it() -> None:
    arrivals = Arrivals()
    arrivals.acked(5, 1.0)
    arrivals.acked(10, 2.0)
    arrivals.acked(15, 3.0)
    arrivals.seen(10, 4.0)
    assert arrivals.lags == [(1.0, 3.0), (2.0, 2.0)]
    assert arrivals.waiting == 1
    arrivals.seen(15, 5.0)
    assert arrivals.lags[-1] == (3.0, 2.0)
    assert arrivals.waiting == 0


def test_what_is_seen_before_its_ack_lags_negatively() -> None:
    arrivals = Arrivals()
    arrivals.seen(5, 1.0)
    arrivals.seen(7, 2.0)  # a batch that MirrorMaker joined with the next one would be seen so
    arrivals.acked(6, 2.5)
    assert arrivals.lags == [(2.5, -0.5)]
    arrivals.acked(7, 3.0)
    assert arrivals.lags[-1] == (3.0, -1.0)


def test_percentiles_of_lags() -> None:
    said = lag_said([value / 1000 for value in range(200)], 2.5, [0.001, 0.003, 0.002], 0.25)
    assert said == {
        "records_per_s": 500.0,
        "p50_ms": 100.0,
        "p99_ms": 198.0,
        "max_ms": 199.0,
        "ack_p50_ms": 2.0,
        "cpu_share": 0.25,
    }
    with pytest.raises(LoadError):
        lag_said([], 1.0, [], 0.0)


@pytest.mark.parametrize(("rate", "batches", "records"), [(500, 500, 1), (5_000, 1000, 5), (50_000, 1000, 50)])
def test_a_rate_is_reached_by_larger_batches(rate: int, batches: int, records: int) -> None:
    assert Pace(rate, batches).records == records


def test_frames_hold_what_is_asked_for() -> None:
    data = batch(2, 10)
    acks, transactional_id, _, topics = peeks.produce_batches(11, produce_frame("t", IDENTITY, 11, [0, 2], data))
    assert (acks, transactional_id) == (-1, None)
    ((topic, partitions),) = topics
    assert topic == b"t"
    assert [(index, bytes(records or b"")) for index, records in partitions] == [(0, data), (2, data)]
    found = peeks.fetch_partitions(16, fetch_frame("t", IDENTITY, 16, [5, 6]))
    assert found[4] == [(IDENTITY.bytes, [(0, 5), (1, 6)])]


def test_mirror_maker_is_told_what_to_copy_and_nothing_of_acks() -> None:
    text = mirror_maker.settings_text("h:1", "h:2", "turn-1", mirror_maker.TUNED)
    lines = dict(line.split("=", 1) for line in text.splitlines())
    assert lines["a->b.topics"] == "turn-1"
    assert (lines["a.bootstrap.servers"], lines["b.bootstrap.servers"]) == ("h:1", "h:2")
    assert lines["tasks.max"] == "4"
    assert not [name for name in lines if "acks" in name or "idempotence" in name]
    default = mirror_maker.settings_text("h:1", "h:2", "turn-1", mirror_maker.DEFAULT)
    assert "tasks.max" not in default
    assert mirror_maker.target_topic("turn-1") == "a.turn-1"
