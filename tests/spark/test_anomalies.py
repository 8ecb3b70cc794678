"""Rules on small frames, answers by hand: what was planted is found once, and what is well is not found."""

from __future__ import annotations

import json
from datetime import timedelta
from itertools import permutations
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from support.captured import START, event, frame, produced

from isthmus_spark.anomalies.job import anomalies
from isthmus_spark.anomalies.limits import BadLimit, Limits
from isthmus_spark.anomalies.rules import Acked, Finding, State, bucket, judge_sequences

pytestmark = pytest.mark.brokers  # a JVM as well

ANSWERED = {"response_bytes": 60, "acks": -1}


def found(events: DataFrame, limits: Limits = Limits()) -> list[dict[str, Any]]:
    rows = [row.asDict() for row in anomalies(events, limits).collect()]
    for row in rows:
        row["subject"], row["facts"] = json.loads(row["subject"]), json.loads(row["facts"])
    return sorted(rows, key=lambda row: (row["rule"], str(row["subject"]), row["first"]))


def told(rows: list[dict[str, Any]], *names: str) -> list[tuple[Any, ...]]:
    return [tuple((row | row["subject"] | row["facts"])[name] for name in names) for row in rows]


def at(seconds: float) -> Any:
    return START + timedelta(seconds=seconds)


def asked(broker_us: int, at_s: float, broker_id: int = 1, **known: Any) -> dict[str, Any]:
    return event(broker_us, time=at(at_s), broker_id=broker_id, **{**ANSWERED, **known})


# ---- slow brokers ----


def test_a_slow_broker_is_told_from_the_others(spark: SparkSession) -> None:
    events = [
        *(asked(5_000, number / 10, broker) for number in range(20) for broker in (1, 2)),
        *(asked(400_000, number / 10, 3) for number in range(20)),
        *(asked(400_000, number / 10, 4) for number in range(19)),  # too few
        *(asked(600_000, number / 10, 5, api_key=1) for number in range(40)),  # a Fetch waits by intention
        *(asked(300_000, number / 10, 6, acks=1) for number in range(40)),  # nothing to compare it with
    ]
    (row,) = found(frame(spark, *events))
    assert told([row], "rule", "cluster", "api", "broker_id", "unit", "requests", "compared_with") == [
        ("slow broker", "c", "Produce", 3, "ms", 20, "the others")
    ]
    assert row["measured"] == pytest.approx(400, rel=0.05)
    assert row["limit"] == 100  # four times 5 ms is less than what anybody calls slow
    # The twentieth of them is over at 1.9 + 0.4 s, and the window ends with that second.
    assert (row["window_from"], row["window_to"]) == (at(-7).replace(tzinfo=None), at(3).replace(tzinfo=None))
    assert row["first"] == at(0.4).replace(tzinfo=None)
    assert row["last"] == at(2.3).replace(tzinfo=None)


def test_one_broker_is_compared_with_what_is_usual_for_it(spark: SparkSession) -> None:
    usual = [asked(30_000, second + number / 10) for second in range(30) for number in range(10)]
    slow = [asked(700_000, 40 + number / 10) for number in range(20)]
    (row,) = found(frame(spark, *usual, *slow))
    assert told([row], "rule", "broker_id", "compared_with") == [("slow broker", 1, "its usual")]
    assert row["measured"] == pytest.approx(700, rel=0.05)
    assert row["limit"] == pytest.approx(120, rel=0.05)
    assert found(frame(spark, *usual)) == []
    assert found(frame(spark, *slow)) == []  # always so
    assert found(frame(spark, *usual, *slow), Limits(slow_times=30.0)) == []


# ---- gates ----


def test_a_gate_that_takes_far_longer_than_usual(spark: SparkSession) -> None:
    usual = [asked(1000, second / 2, gate_us=80_000) for second in range(120)]
    stalled = [asked(1000, 70 + number / 10, gate_us=9_000_000) for number in range(10)]
    rows = found(frame(spark, *usual, *stalled))
    assert told(rows, "rule", "namespace", "api", "requests") == [("gate stall", "pay-", "Produce", 10)]
    assert rows[0]["measured"] == pytest.approx(9000, rel=0.05)
    assert rows[0]["limit"] == 1000
    assert found(frame(spark, *usual, *stalled[:9])) == []


# ---- errors ----


def test_a_burst_of_errors_is_told_once_in_a_while(spark: SparkSession) -> None:
    def failing(code: int, count: int, at_s: float, **known: Any) -> list[dict[str, Any]]:
        return [asked(900, at_s + number / 100, error_code=code, **known) for number in range(count)]

    events = [
        *failing(0, 60, 0.0, client_id="a"),
        *failing(19, 15, 1.0, client_id="a"),
        *failing(7, 10, 1.5, client_id="a"),  # 25 of 85
        *failing(7, 30, 5.0, client_id="a"),  # goes on
        *failing(7, 30, 62.0, client_id="a"),  # after the time of repetition
        *failing(0, 200, 0.0, client_id="b"),
        *failing(7, 30, 1.0, client_id="b"),  # 30 of 230
        *failing(7, 19, 0.0, client_id="c"),
        *failing(79, 50, 0.0, client_id="d", api_key=11),  # each new member is told so
        *failing(35, 50, 0.0, client_id="e", api_key=18),
        *failing(-1, 50, 0.0, client_id="f"),  # not known
    ]
    rows = found(frame(spark, *events))
    assert told(rows, "rule", "client_id", "api", "error_code", "errors", "requests") == [
        ("error burst", "a", "Produce", 19, 25, 85),
        ("error burst", "a", "Produce", 7, 30, 30),
    ]
    assert [row["measured"] for row in rows] == pytest.approx([25 / 85, 1.0], abs=0.001)


# ---- writes that are refused ----


def test_a_refused_write_is_told_at_once_and_then_rarely(spark: SparkSession) -> None:
    refused = {"broker_us": -1, "response_bytes": 60, "error_code": 42, "topic": "pay-t", "client_id": "stray"}
    events = [
        event(0, **refused, client_address="10.0.0.1:1", time=at(0)),
        *(event(0, **refused, client_address=f"10.0.0.1:{port}", time=at(port)) for port in range(2, 7)),
        event(0, **refused, client_address="10.0.0.1:1", time=at(61)),
        event(0, **{**refused, "topic": "pay-u"}, client_address="10.0.0.2:9", time=at(1)),
        event(900, **{**refused, "broker_us": 5, "topic": "by-broker"}),
        event(0, **{**refused, "response_bytes": -1, "topic": "no-answer"}),
    ]
    rows = found(frame(spark, *events))
    assert told(rows, "rule", "topic", "client_id", "client_address", "measured") == [
        ("refused write", "pay-t", "stray", "10.0.0.1", 1.0),
        ("refused write", "pay-t", "stray", "10.0.0.1", 6.0),
        ("refused write", "pay-u", "stray", "10.0.0.2", 1.0),
    ]
    assert "point it at the source" in rows[0]["advice"]


# ---- sequences ----


def test_what_producers_do_is_well(spark: SparkSession) -> None:
    events = [
        *(produced(5 * number, 100 + 5 * number, 5) for number in range(20)),
        produced(0, 100, 5, at_s=1),  # sent again: the broker told where it stands
        produced(95, 195, 5, at_s=1),
        *(produced(number, 300 + number, producer_id=10) for number in range(5)),
        produced(0, 400, producer_epoch=1),  # a new epoch begins anew
        produced(2**31 - 2, 500, 2, producer_id=11),
        produced(0, 502, producer_id=11),  # sequences wrap
        produced(7, 501, error_code=46),  # a duplicate that the broker recognised
        produced(100, 700),
        produced(150, 760),  # not captured between them, with room for it
        event(900, topic="pay-t", partition=0, producer_id=-1, base_sequence=-1, base_offset=3, records=1),
        produced(50, 50, partition=1),
        produced(50, 90, partition=1, cluster="d"),  # another cluster
        produced(3, 5, cluster=None),
        produced(3, 9, cluster=None),  # which one is not known
    ]
    assert found(frame(spark, *events)) == []


def test_what_was_planted_in_sequences_is_found(spark: SparkSession) -> None:
    events = [
        *(produced(number, 10 + number) for number in range(4)),
        produced(2, 40, at_s=2),  # stored twice
        produced(20, 60),
        produced(21, 55),  # before the one that comes before it
        produced(30, 170, 5, partition=3),
        produced(40, 177, partition=3),  # five are missing, and there is room for two
    ]
    rows = found(frame(spark, *events))
    assert sorted(told(rows, "finding", "partition", "base_sequence", "base_offset", "other_offset", "measured")) == [
        ("out of order", 0, 21, 55, 60, 1.0),
        ("sequence gap", 3, 40, 177, 170, 3.0),
        ("stored twice", 0, 2, 40, 12, 1.0),
    ]
    assert {row["rule"] for row in rows} == {"sequences"}
    assert told(rows[:1], "producer_id", "producer_epoch", "client_id", "topic") == [(9, 0, "app", "pay-t")]


def sequences(state: State, *batches: tuple[int, int, int], limits: Limits = Limits()) -> list[Finding]:
    """(Sequence, records, offset), one batch of events each."""
    found: list[Finding] = []
    for number, (sequence, records, offset) in enumerate(batches):
        found += judge_sequences(state, [Acked("{}", 9, 0, sequence, records, offset, number, "app")], limits)
    return found


def test_no_order_of_arrival_makes_a_finding() -> None:
    well = [(0, 5, 100), (5, 5, 105), (10, 1, 112), (11, 1, 113)]
    for order in permutations(well):
        assert sequences({}, *order) == []


def test_a_batch_that_is_stored_twice_is_found_in_each_order_and_told_once() -> None:
    batches = [(0, 5, 100), (5, 5, 105), (0, 5, 110)]
    for order in permutations(batches):
        findings = [each.facts["finding"] for each in sequences({}, *order, *order)]
        assert findings.count("stored twice") == 1
    assert [each.facts["finding"] for each in sequences({}, *batches, *batches)] == ["stored twice"]


def test_what_is_kept_of_sequences_is_bounded() -> None:
    state: State = {}
    limits = Limits(batches_kept=3, producers_kept=2)
    assert sequences(state, *((number, 1, number) for number in range(50)), limits=limits) == []
    assert [each[0] for each in state["producers"]["9 0"]] == [47, 48, 49]
    for producer in (1, 2, 3):
        list(judge_sequences(state, [Acked("{}", producer, 0, 0, 1, 100, 100 + producer, "app")], limits))
    assert set(state["producers"]) == {"2 0", "3 0"}
    # One of which only what came later is known is found all the same.
    assert [each.facts["finding"] for each in sequences({"producers": {"9 0": [[47, 47, 1, 0]]}}, (3, 1, 90))] == [
        "out of order"
    ]


# ---- limits ----


def test_limits_are_set_by_name() -> None:
    assert Limits.chosen(["slow_times=8", "window_s=5"]) == Limits(slow_times=8.0, window_s=5)
    for setting, text in (
        ("slow=1", "there is no limit"),
        ("window_s=x", "a whole number"),
        ("slow_ms=0", "more than 0"),
    ):
        with pytest.raises(BadLimit, match=text):
            Limits.chosen([setting])


def test_buckets_are_those_of_the_frames() -> None:
    assert [bucket(us) for us in (0, 1, 1000, 1_000_000)] == [0, 0, 72, 144]
