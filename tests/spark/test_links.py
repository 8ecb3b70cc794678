"""Lag and states, by hand on few events: how long a state counts, what is an incident, and what is not known."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from support.captured import START, event, frame, link_event, link_frame, links_file, run, told

from isthmus_spark.jobs import incidents as i
from isthmus_spark.jobs import link_states as s
from isthmus_spark.source import FORMAT

pytestmark = pytest.mark.brokers  # a JVM as well


LOCAL = START.astimezone().replace(tzinfo=None)
"""Spark hands out local times."""


def at(second: float) -> datetime:
    return LOCAL + timedelta(seconds=second)


def rows(found: DataFrame) -> list[dict[str, Any]]:
    return [row.asDict() for row in found.collect()]


def second(moment: datetime | None) -> float | None:
    return None if moment is None else (moment - LOCAL).total_seconds()


def stretches(of: DataFrame, *names: str) -> list[tuple[Any, ...]]:
    found = rows(s.timeline(of).orderBy("role", "topic", "partition", "begun"))
    return [(*(row[name] for name in names), row["state"], second(row["begun"]), second(row["ended"])) for row in found]


def lagging(state: str, begin: int, end: int, lag: int, **known: Any) -> list[dict[str, Any]]:
    """Told once a second from one second up to, not including, another one: so much more is lacked each second."""
    return [
        told(state, now, lag=lag * (now - begin), lag_ms=1000 * (now - begin), **known) for now in range(begin, end)
    ]


def alive(begin: int, end: int, **known: Any) -> list[dict[str, Any]]:
    return [link_event("confirmed", now, topic="pay-busy", **known) for now in range(begin, end)]


def only(found: list[dict[str, Any]]) -> dict[str, Any]:
    (row,) = found
    return row


def test_catching_up_for_a_moment_is_no_incident(spark: SparkSession) -> None:
    events = [
        told("Following", 0),
        *(told("Catching Up", 1 + n / 10, lag=3, lag_ms=4) for n in range(5)),
        told("Following", 1.55),
        told("Following", 7),
        *alive(0, 10),
    ]
    of = s.pieces(link_frame(spark, *events)).cache()
    assert stretches(of) == [("Following", 0, 1), ("Catching Up", 1, 1.55), ("Following", 1.55, 9)]
    caught = rows(s.timeline(of).where("state = 'Catching Up'"))[0]
    assert (caught["seconds"], caught["lag"], caught["lag_ms"], caught["proxy"]) == (pytest.approx(0.55), 3, 4, "pa")
    assert rows(i.incidents(of)) == []


def test_a_cut_is_an_incident_with_rto_and_rpo(spark: SparkSession) -> None:
    cut = {"reason": "CONNECTION_LOST"}
    events = [
        *(told("Following", 0, partition=p) for p in (0, 1, 2)),
        *lagging("Disconnected", 10, 20, 7, **cut),
        *lagging("Disconnected", 12, 20, 5, partition=1, **cut),
        *(told("Catching Up", second, lag=1, lag_ms=900) for second in (20, 21)),
        told("Catching Up", 20, lag=1, lag_ms=900, partition=1),
        told("Following", 20.5, partition=1),
        told("Following", 22),
        *alive(0, 30),
    ]
    found = only(rows(i.incidents(s.pieces(link_frame(spark, *events)))))
    assert found == {
        "link": "a-to-b",
        "source_cluster": "a",
        "target_cluster": "b",
        "seen_by": "leader",
        "begun": at(10),
        "ended": at(22),
        "rto_s": 12.0,
        "seconds": 12.0,
        "unseen_s": 0.0,
        "worst": "Disconnected",
        "reasons": "CONNECTION_LOST",
        "partitions": 2,
        "topics": "pay-t-0, pay-t-1",
        "rpo_offsets": 63 + 35,
        "rpo_ms": 9000,
        "rpo_is": i.ALL,
        "at_risk_offsets": 98,
        "at_risk_ms": 9000,
    }


@pytest.mark.one_in_ci("stories", of="incidents of links")
def test_limits_decide_what_counts(spark: SparkSession) -> None:
    events = [
        told("Following", 0),
        told("Disconnected", 1, reason="CONNECTION_LOST"),
        told("Following", 1.5),
        *lagging("Catching Up", 10, 19, 2, topic="pay-slow"),
        told("Following", 19, topic="pay-slow"),
        *alive(0, 30),
    ]
    of = s.pieces(link_frame(spark, *events)).cache()
    assert rows(i.incidents(of)) == []
    for limits, begun, ended in (
        (i.Limits(bad_s=0.5), 1, 1.5),
        (i.Limits(lag_ms=8000), 10, 19),
        (i.Limits(lag=16), 10, 19),
        (i.Limits(slow_s=9), 10, 19),
    ):
        found = only(rows(i.incidents(of, limits)))
        assert (second(found["begun"]), second(found["ended"])) == (begun, ended), limits


@pytest.mark.one_in_ci("stories", of="incidents of links")
def test_while_in_sync_nothing_acked_is_at_risk(spark: SparkSession) -> None:
    # The link is cut at 10: acks are held for 10 s, then Out-Of-Sync is recorded and they go.
    events = [
        told("In-Sync", 0),
        *lagging("In-Sync", 10, 20, 4),
        *(told("Out-Of-Sync", now, lag=4 * (now - 10), lag_ms=1000 * (now - 10), reason="X") for now in range(20, 25)),
        told("In-Sync", 25),
        *alive(0, 30),
    ]
    found = only(rows(i.incidents(s.pieces(link_frame(spark, *events)))))
    assert (second(found["begun"]), second(found["ended"]), found["worst"]) == (11, 25, "Out-Of-Sync")
    assert (found["rpo_offsets"], found["at_risk_offsets"], found["at_risk_ms"]) == (56, 56, 14_000)
    held = only(rows(i.incidents(s.pieces(link_frame(spark, *events[:11], *alive(0, 40))), i.Limits(lag_ms=9000))))
    assert (held["worst"], held["rpo_offsets"], held["at_risk_offsets"], held["at_risk_ms"]) == ("In-Sync", 36, 0, 0)


@pytest.mark.one_in_ci("stories", of="incidents of links")
def test_a_proxy_that_falls_silent_is_no_incident_and_no_proof_of_health(spark: SparkSession) -> None:
    events = [told("Following", 0), *alive(0, 11), *alive(0, 61, proxy="pz")]
    of = s.pieces(link_frame(spark, *events)).cache()
    assert stretches(of, "proxy") == [("pa", "Following", 0, 10), ("pa", "unknown", 10, 60)]
    assert rows(i.incidents(of)) == []
    seen = frame(spark, *(event(1, cluster="a", proxy="pa", time=START + timedelta(seconds=n)) for n in range(61)))
    assert stretches(s.pieces(link_frame(spark, *events), seen)) == [("Following", 0, 60)]


def test_a_new_process_does_not_vouch_for_the_time_before_it(spark: SparkSession) -> None:
    new = {"reason": "NOT_CONNECTED_YET: the link has not connected yet"}
    events = [
        told("Following", 0),
        *alive(0, 11),
        told("Disconnected", 40, **new),
        told("Disconnected", 41, **new),
        told("Following", 41.5),
        *alive(40, 45),
    ]
    of = s.pieces(link_frame(spark, *events)).cache()
    told_of = [("Following", 0, 10), ("unknown", 10, 40), ("Disconnected", 40, 41.5), ("Following", 41.5, 44)]
    assert stretches(of) == told_of
    found = only(rows(i.incidents(of)))
    assert (second(found["begun"]), found["rto_s"], found["unseen_s"]) == (40, 1.5, 30)
    assert found["rpo_is"] == i.AT_LEAST


def test_another_proxy_goes_on_telling(spark: SparkSession) -> None:
    events = [
        told("Following", 0),
        *alive(0, 11),
        told("Catching Up", 13, proxy="pz", lag=5, lag_ms=30),
        told("Following", 13.2, proxy="pz"),
        *alive(13, 20, proxy="pz"),
    ]
    of = s.pieces(link_frame(spark, *events))
    assert stretches(of, "proxy") == [
        ("pa", "Following", 0, 13),  # 3 s without a word are usual
        ("pz", "Catching Up", 13, 13.2),
        ("pz", "Following", 13.2, 19),
    ]


def test_a_bad_state_and_then_silence(spark: SparkSession) -> None:
    lost = {"reason": "PEER_SILENT", "lag": -1, "lag_ms": -1}
    events = [told("Following", 0), told("Disconnected", 10, **lost), *alive(0, 31)]
    of = s.pieces(link_frame(spark, *events)).cache()
    assert stretches(of) == [("Following", 0, 10), ("Disconnected", 10, 10), ("unknown", 10, 30)]
    found = only(rows(i.incidents(of)))
    assert (found["ended"], found["rto_s"], found["seconds"], found["unseen_s"]) == (None, None, 20, 20)
    assert (found["rpo_offsets"], found["rpo_ms"], found["rpo_is"]) == (None, None, i.NOT_KNOWN)
    assert (found["at_risk_offsets"], found["at_risk_ms"]) == (None, None)


def test_one_that_lags_and_is_told_no_more_lags_no_more(spark: SparkSession) -> None:
    events = [told("Following", 0), told("Following", 5, lag=9, lag_ms=2000), *alive(0, 60)]
    of = s.pieces(link_frame(spark, *events)).cache()
    assert stretches(of) == [("Following", 0, 59)]
    assert rows(of.where("begun >= '2026-01-01 00:00:06'").select("lag", "lag_ms")) == [{"lag": 0, "lag_ms": 0}]
    assert rows(i.incidents(of)) == []


def test_the_followers_view_counts_where_the_leader_is_blind(spark: SparkSession) -> None:
    lost = {"reason": "PEER_SILENT", "role": "follower", "topic": "copy-t"}
    follower = [
        told("Following", 0, role="follower", topic="copy-t"),
        *(told("Disconnected", now, lag=-1, lag_ms=-1, **lost) for now in range(10, 15)),  # the leader sees this, too
        told("Following", 15, role="follower", topic="copy-t"),
        *(told("Disconnected", now, lag=2, lag_ms=5, **lost) for now in range(40, 51)),
    ]
    leader = [
        told("Following", 0),
        *lagging("Disconnected", 10, 15, 10, reason="CONNECTION_LOST"),
        told("Following", 15),
        *alive(0, 40),  # the source is lost then
    ]
    found = rows(i.incidents(s.pieces(link_frame(spark, *follower, *leader))))
    names = ("seen_by", "reasons", "rpo_offsets", "rpo_is", "rto_s", "partitions")
    assert [tuple(row[name] for name in names) for row in found] == [
        ("leader", "CONNECTION_LOST", 40, i.ALL, 5, 1),
        ("follower", "PEER_SILENT", 2, i.AT_LEAST, None, 1),
    ]
    alone = rows(i.incidents(s.pieces(link_frame(spark, *follower))))
    assert [(row["seen_by"], row["rpo_offsets"], row["rpo_is"]) for row in alone] == [
        ("follower", None, i.NOT_KNOWN),
        ("follower", 2, i.AT_LEAST),
    ]


def test_slices_have_the_worst_state_of_any_partition(spark: SparkSession) -> None:
    cut = lagging("Disconnected", 100, 200, 2, reason="X", partition=1)
    events = [told("Following", 0), told("Following", 0, partition=1), *cut, told("Following", 200, partition=1)]
    found = rows(s.slices(s.pieces(link_frame(spark, *events, *alive(0, 401)))).orderBy("slice"))
    assert [row["state"] for row in found] == ["Following"] * 100 + ["Disconnected"] * 100 + ["Following"] * 200
    assert [row["lag"] for row in found[100:200]] == [2 * n for n in range(100)]
    assert (second(found[0]["begun"]), second(found[-1]["ended"])) == (0, 400)


@pytest.mark.one_in_ci("stories", of="commands of jobs")
def test_the_command_reads_files_and_writes_a_report(spark: SparkSession, tmp_path: Path) -> None:
    events = [
        told("Following", 0),
        *lagging("Disconnected", 10, 20, 7, reason="CONNECTION_LOST"),
        told("Following", 20),
        told("Following", 0, topic=None, partition=-1),
        *alive(0, 31),
        *alive(0, 31, role="follower"),
    ]
    links_file(tmp_path / "capture" / "links" / "1.links", *events)
    read = spark.read.format(FORMAT).option("events", "links").load(str(tmp_path / "capture"))
    written = link_frame(spark, *events)
    assert read.schema == written.schema
    assert rows(read.exceptAll(written)) == rows(written.exceptAll(read)) == []
    report = tmp_path / "lag.html"
    found = run(
        "spark", "lag-and-states", tmp_path / "capture", "--report", str(report), "-o", "json", "--check", code=1
    )
    (incident,) = json.loads(found)
    assert (incident["rto_s"], incident["rpo_offsets"], incident["reasons"]) == (10, 63, "CONNECTION_LOST")
    page = report.read_text()
    for part in ("<svg", "<polyline", "2026-01-01 00:00:10.000", "the other proxy ended", "63"):
        assert part in page, part
    assert "http" not in page
    assert spark.read.parquet(str(tmp_path / "lag.parquet")).count() == 1
    assert spark.read.parquet(str(tmp_path / "lag-timeline.parquet")).count() == 4


def test_nothing_was_captured(spark: SparkSession) -> None:
    of = s.pieces(link_frame(spark))
    assert rows(s.timeline(of)) == rows(i.incidents(of)) == rows(s.slices(of)) == []


def test_results_have_their_schemas(spark: SparkSession) -> None:
    of = s.pieces(link_frame(spark, told("Following", 0)))
    for found, schema in (
        (of, s.PIECES),
        (s.timeline(of), s.SCHEMA),
        (s.slices(of), s.SLICE_SCHEMA),
        (i.incidents(of), i.SCHEMA),
    ):
        assert ", ".join(f"{field.name} {field.dataType.simpleString()}" for field in found.schema) == schema


def test_what_is_gone_is_in_trouble_no_more(spark: SparkSession) -> None:
    events = [
        told("Following", 0),
        *lagging("Stopped", 1, 8, 2),
        told("Gone", 8),
        *alive(0, 20),
    ]
    of = s.pieces(link_frame(spark, *events)).cache()
    assert stretches(of) == [("Following", 0, 1), ("Stopped", 1, 8)]
    incident = only(rows(i.incidents(of)))
    assert (second(incident["begun"]), second(incident["ended"])) == (1, 8)


def test_what_another_proxy_has_is_not_gone(spark: SparkSession) -> None:
    events = [
        told("Following", 0),
        told("Following", 3, proxy="pa2"),
        told("Gone", 3.5),
        *(link_event("confirmed", now, topic="pay-busy", proxy=proxy) for now in range(10) for proxy in ("pa", "pa2")),
    ]
    of = s.pieces(link_frame(spark, *events)).cache()
    assert stretches(of, "proxy") == [("pa", "Following", 0, 3), ("pa2", "Following", 3, 9)]
