"""What synchronous mode costs and would: by hand on few requests; and a simulated link that the model reproduces."""

from __future__ import annotations

import json
import random
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from support.captured import START, event, frame, link_event, link_frame, links_file, requests_file, run

from isthmus_spark.jobs import sync as s

pytestmark = pytest.mark.brokers  # a JVM as well

WAY = s.TAIL_US + s.FOLLOWER_US
APPEND = 500


def request(at_us: int, broker_us: int = 1000, **known: Any) -> dict[str, Any]:
    """A Produce request, acked."""
    place = {"topic": "pay-t", "partition": 0, "session": 1, "correlation_id": at_us, "acks": -1, "response_bytes": 60}
    return event(broker_us, **{**place, "time": START + timedelta(microseconds=at_us), **known})


def link(*rtts_ms: int, confirm: int | None = None) -> s.Scenario:
    return s.Scenario("x", tuple(1000 * each for each in rtts_ms), confirm or len(rtts_ms))


def replayed(spark: SparkSession, scenarios: list[s.Scenario], *events: dict[str, Any]) -> list[dict[str, Any]]:
    stats = s.replay(frame(spark, *events), scenarios, s.constant_append(spark, APPEND), 20_000)
    return [row.asDict() for row in s.what_if(stats, scenarios).collect()]


def most(spark: SparkSession, scenario: s.Scenario, *events: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """By client: the longest whole time, now and then."""
    found = replayed(spark, [scenario], *events)
    return {row["value"]: (row["now_max_us"], row["then_max_us"]) for row in found if row["dimension"] == "client_id"}


def test_an_answer_takes_a_round_trip_and_an_append_longer(spark: SparkSession) -> None:
    (row,) = (each for each in replayed(spark, [link(20)], request(0, proxy_us=30)) if each["dimension"] == "all")
    then = 30 + 1000 + 20_000 + APPEND + WAY
    assert (row["scenario"], row["api"], row["requests"]) == ("x", "Produce", 1)
    assert (row["now_max_us"], row["then_max_us"], row["added_us"]) == (1030, then, then - 1030)
    assert row["then_p50_us"] == row["least_p99_us"] == pytest.approx(then, rel=0.011)
    assert row["in_flight_now"] is None  # of one request there is no rate


def test_what_does_not_wait(spark: SparkSession) -> None:
    events = [
        request(0, acks=0, response_bytes=-1, broker_us=-1, client_id="acks=0", session=1),
        request(0, error_code=10, client_id="refused", session=2),
        request(0, api_key=1, client_id="reader", session=3),
        request(0, api_key=8, gate_us=700, client_id="commits", session=4),
        event(-1, error_code=42, response_bytes=60, client_id="by the proxy", session=5),
    ]
    assert most(spark, link(5), *events) == {
        "refused": (1000, 1000),
        "reader": (1000, 1000),
        "commits": (1700, 1700),  # what was measured stays
    }


def test_answers_of_a_connection_keep_their_order(spark: SparkSession) -> None:
    events = [
        request(0, client_id="producer"),
        request(100, 2000, api_key=1, client_id="behind it"),
        request(150, 10, api_key=18, client_id="behind both", part=0),
        request(100, 2000, api_key=1, client_id="another connection", session=2),
        request(9000, 2000, api_key=1, client_id="later"),
    ]
    out = 1000 + 5000 + APPEND + WAY
    assert most(spark, link(5), *events) == {
        "producer": (1000, out),
        "behind it": (2000, out - 100),
        "behind both": (1950, out - 150),  # behind the fetch that is answered at 2100
        "another connection": (2000, 2000),
        "later": (2000, 2000),
    }
    rows = {row["value"]: row for row in replayed(spark, [link(5)], *events) if row["dimension"] == "client_id"}
    assert rows["behind it"]["least_p50_us"] == pytest.approx(2000, rel=0.011)


def test_pipelined_requests_do_not_add_up(spark: SparkSession) -> None:
    events = [request(100 * number, client_id=str(number)) for number in range(5)]
    then = 1000 + 20_000 + APPEND + WAY
    assert most(spark, link(20), *events) == {str(number): (1000, then) for number in range(5)}
    # If appends wait for each other: the first one is appended, and what comes meanwhile is in the next one.
    rows = {row["value"]: row for row in replayed(spark, [link(20)], *events) if row["dimension"] == "client_id"}
    assert [rows[str(number)]["most_p50_us"] for number in (0, 1)] == pytest.approx([then, then + 400], rel=0.011)


def test_a_request_waits_for_the_slowest_of_its_partitions(spark: SparkSession) -> None:
    events = [
        # What partition 1 got before is confirmed later than what this request brings.
        request(0, 9000, partition=1, session=2, client_id="before"),
        request(100, 8900, part=0, parts=2, client_id="both"),
        request(100, 8900, part=1, parts=2, partition=1, client_id="both"),
        request(5000, 10, part=0, parts=2, session=3, client_id="half", error_code=10),
        request(5000, 10, part=1, parts=2, session=3, client_id="half", partition=2),
    ]
    found = most(spark, link(5), *events)
    assert found["both"] == (8900, 8900 + 5000 + APPEND + WAY)
    assert found["half"] == (10, 10 + 5000 + APPEND + WAY)
    (row,) = (each for each in replayed(spark, [link(5)], *events) if each["dimension"] == "all")
    assert row["requests"] == 3


@pytest.mark.parametrize(("scenario", "rtt_ms"), [(link(80, 5), 80), (link(80, 5, confirm=1), 5)])
def test_quorums(spark: SparkSession, scenario: s.Scenario, rtt_ms: int) -> None:
    found = most(spark, scenario, request(0))
    assert found == {"app": (1000, 1000 + 1000 * rtt_ms + APPEND + WAY)}


def test_what_was_synchronous_is_replayed_without_its_gate(spark: SparkSession) -> None:
    found = most(spark, link(5), request(0, gate_us=21_000))
    assert found == {"app": (22_000, 1000 + 5000 + APPEND + WAY)}


def test_at_a_rate_so_many_are_in_flight(spark: SparkSession) -> None:
    rows = replayed(spark, [link(20)], *(request(10_000 * n) for n in range(201)))
    (row,) = (each for each in rows if each["dimension"] == "namespace")
    assert row["value"] == "pay-"
    assert row["in_flight_now"] == pytest.approx(201 * 0.001 / 2)
    assert row["in_flight_then"] == pytest.approx(201 * (0.021 + (APPEND + WAY) / 1e6) / 2)


def test_scenarios_are_written_like_the_setting_of_namespaces() -> None:
    assert s.quorum("any 1 (5, 20.5)") == s.Scenario("any 1 (5, 20.5) ms", (5000, 20_500), 1)
    assert s.quorum("ALL (5,20)").confirm == 2
    for wrong, message in (("ANY 3 (5, 20)", "3 of 2"), ("ANY (5)", "is not like"), ("5", "is not like")):
        with pytest.raises(ValueError, match=message):
            s.quorum(wrong)


def test_append_times_are_distributed_as_measured(spark: SparkSession) -> None:
    took = [100] * 90 + [10_000] * 9 + [50_000]
    events = [link_event("appended", 1, role="follower", took_us=each) for each in (*took, -1)]
    rows = s.append_times(link_frame(spark, *events)).orderBy("slot").collect()
    assert [row.slot for row in rows] == list(range(s.APPENDS))
    for slot, us in ((0, 100), (899, 100), (900, 10_000), (989, 10_000), (990, 50_000), (999, 50_000)):
        assert rows[slot].append_us == pytest.approx(us, rel=0.011), slot
    assert s.append_times(link_frame(spark, events[-1])).collect() == []


def test_what_waiting_took(spark: SparkSession) -> None:
    events = [
        request(0, 1000, gate_us=3000),
        request(1, 1000, gate_us=3000),
        request(2, 1000, gate_us=0),
        request(3, 1000, api_key=1, client_id="reader"),
    ]
    rows = [row.asDict() for row in s.measured(frame(spark, *events)).collect()]
    assert [(row["dimension"], row["value"], row["api"]) for row in rows] == [
        ("all", "all", "Produce"),
        ("client_id", "app", "Produce"),
        ("namespace", "pay-", "Produce"),
    ]
    (row, *_) = rows
    assert (row["requests"], row["waited"], row["gate_max_us"], row["whole_max_us"]) == (3, 2, 3000, 4000)
    assert row["gate_share"] == pytest.approx(6 / 9)
    assert row["gate_p50_us"] == pytest.approx(3000, rel=0.011)


def simulated(rate: int, rtt_us: int, seconds: int = 5) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Requests and link events of a link with one append under way in each partition, as it would have them."""
    rng = random.Random(rate)
    requests: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    now, number = 0.0, 0
    waiting: dict[int, list[tuple[float, dict[str, Any]]]] = {0: [], 1: []}
    while now < seconds * 1e6:
        now += rng.expovariate(rate / 1e6)
        number += 1
        known = {"partition": number % 2, "session": number % 7, "correlation_id": number}
        made = request(int(now), 300 + int(rng.expovariate(1 / 200)), **known)
        requests.append(made)
        waiting[number % 2].append((now + made["broker_us"], made))
    for arrived in waiting.values():
        arrived.sort(key=lambda each: each[0])
        free_at, position = 0.0, 0
        while position < len(arrived):
            came = arrived[position][0] + s.TAIL_US + rtt_us / 2 + s.FOLLOWER_US
            begins = max(came, free_at)
            end = position
            while end < len(arrived) and arrived[end][0] + s.TAIL_US + rtt_us / 2 + s.FOLLOWER_US <= begins:
                end += 1
            took = 300 + rng.expovariate(1 / 200) + (rng.random() < 0.03) * 8000
            free_at = begins + took
            oldest = free_at + rtt_us / 2 - arrived[position][0] - s.TAIL_US
            events.append(link_event("appended", 1, role="follower", took_us=int(took)))
            events.append(link_event("confirmed", 1, cluster="c", took_us=int(oldest)))
            for free, made in arrived[position:end]:
                made["gate_us"] = int(free_at + rtt_us / 2 - free)
            position = end
    return requests, events


@pytest.mark.one_in_ci("stories", of="the model of acks")
@pytest.mark.parametrize("rate", [50, 500, 2000])
def test_the_model_reproduces_what_was_measured_and_foretells_what_was_not(spark: SparkSession, rate: int) -> None:
    seconds = 20 if rate < 100 else 3
    requests, events = simulated(rate, 20_000, seconds)
    nearer, _ = simulated(rate, 5000, seconds)
    links = link_frame(spark, *events).cache()
    appends, real = s.append_times(links).cache(), s.real_links(links).cache()
    stats = s.replay(frame(spark, *requests), [link(20), link(5)], appends, real).cache()
    (row,) = (each.asDict() for each in s.calibration(stats).where("dimension = 'all'").collect())
    assert row["requests"] == len(requests)
    assert abs(row["error_p50"]) < 0.03
    assert abs(row["error_p99"]) < 0.1
    same, near = (each.asDict() for each in s.what_if(stats, [link(20), link(5)]).where("dimension = 'all'").collect())
    (really,) = (
        each.asDict()
        for each in s.what_if(s.replay(frame(spark, *nearer), [link(5)], appends, 5000), [link(5)])
        .where("dimension = 'all'")
        .collect()
    )
    for then, now in ((same, same), (near, really)):
        assert then["then_p50_us"] == pytest.approx(now["now_p50_us"], rel=0.03)
        assert then["then_p99_us"] == pytest.approx(now["now_p99_us"], rel=0.1)
        for name in ("p50", "p99"):
            assert 0.96 * then[f"least_{name}_us"] <= now[f"now_{name}_us"] <= 1.04 * then[f"most_{name}_us"], name


@pytest.mark.one_in_ci("stories", of="commands of jobs")
def test_the_command_replays_files_and_writes_a_report(spark: SparkSession, tmp_path: Path) -> None:
    requests, events = simulated(200, 20_000, 2)
    requests_file(tmp_path / "capture" / "topic=pay-" / "1.capture", *requests)
    links_file(tmp_path / "capture" / "links" / "1.links", *events)
    report = tmp_path / "sync.html"
    options = ("--rtt-ms", "5", "--quorum", "ANY 1 (5, 80)", "--report", str(report), "-o", "json")
    found = json.loads(run("spark", "sync", tmp_path / "capture", *options))
    (measured,) = (row for row in found["measured"] if row["dimension"] == "all")
    assert (measured["requests"], measured["waited"]) == (len(requests), len(requests))
    told = {row["scenario"]: row for row in found["what_if"] if row["dimension"] == "all"}
    assert told.keys() == {"5 ms", "ANY 1 (5, 80) ms"}
    assert 5000 < told["5 ms"]["then_p50_us"] < 7500 < 20_000 < told["5 ms"]["now_p50_us"]
    assert abs(found["calibration"][0]["error_p50"]) < 0.03
    page = report.read_text()
    for part in ("<svg", "ANY 1 (5, 80) ms", "What the model does not know", "p50 is"):
        assert part in page, part
    assert "http" not in page
    assert spark.read.parquet(str(tmp_path / "sync.parquet")).count() == len(found["what_if"])


@pytest.mark.one_in_ci("stories", of="commands of jobs")
def test_all_reports_of_a_capture_without_link_events(tmp_path: Path) -> None:
    requests_file(tmp_path / "capture" / "topic=pay-" / "1.capture", request(0), request(1))
    told = run("report", tmp_path / "capture", "--to", tmp_path / "reports")
    assert "lag-and-states.html  no link events captured" in told
    assert "sync.html  What other links would cost is unknown: no appended batches were captured" in told
    assert "No link events were captured" in (tmp_path / "reports" / "lag-and-states.html").read_text()
    page = (tmp_path / "reports" / "sync.html").read_text()
    for part in ("No answer waited at a gate", "give --append-ms"):
        assert part in page, part


def test_nothing_was_captured(spark: SparkSession) -> None:
    stats = s.replay(frame(spark), [link(5)], s.append_times(link_frame(spark)), s.real_links(link_frame(spark)))
    found: list[DataFrame] = [s.what_if(stats, [link(5)]), s.calibration(stats), s.measured(frame(spark))]
    schemas = (s.SCHEMA, s.CALIBRATION_SCHEMA, s.MEASURED_SCHEMA)
    for each, schema in zip(found, schemas, strict=True):
        assert each.collect() == []
        assert ", ".join(f"{field.name} {field.dataType.simpleString()}" for field in each.schema) == schema
