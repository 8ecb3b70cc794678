"""The latency job: by hand, on few events; and from files that were captured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from support.block_files import row
from support.captured import event, frame

from isthmus_plugins.capture.blocks import Block
from isthmus_spark.jobs.latency import latency
from isthmus_spark.source import FORMAT

pytestmark = pytest.mark.brokers  # a JVM as well


def results(events: DataFrame) -> dict[tuple[str, str, str], dict[str, Any]]:
    return {(row.dimension, row.value, row.api): row.asDict() for row in latency(events).collect()}


def test_percentiles_are_within_one_percent(spark: SparkSession) -> None:
    found = results(frame(spark, *(event(total) for total in range(1000, 101_000, 100))))
    row = found["api", "all", "Produce"]
    assert (row["requests"], row["errors"], row["max_us"]) == (1000, 0, 100_900)
    expected = {"p50_us": 50_900, "p90_us": 90_900, "p95_us": 95_900, "p99_us": 99_900, "p999_us": 100_800}
    for name, value in expected.items():
        assert row[name] == pytest.approx(value, rel=0.011), name


def test_shares_errors_and_dimensions_by_hand(spark: SparkSession) -> None:
    events = [
        event(800, proxy_us=100, gate_us=100, client_id="a"),
        event(200, proxy_us=100, gate_us=700, client_id="a", error_code=7, namespace="log-"),
        event(1000, client_id="b", api_key=1, proxy="q"),
        event(5000, part=1),  # another partition of a request that is counted already
        event(-1, error_code=42),  # the proxy answered
    ]
    found = results(frame(spark, *events))
    produced = found["api", "all", "Produce"]
    assert (produced["requests"], produced["errors"]) == (2, 1)
    shares = produced["proxy_share"], produced["broker_share"], produced["gate_share"]
    assert shares == pytest.approx((0.1, 0.5, 0.4))
    assert {key: row["requests"] for key, row in found.items()} == {
        ("api", "all", "Produce"): 2,
        ("api", "all", "Fetch"): 1,
        ("client_id", "a", "Produce"): 2,
        ("client_id", "b", "Fetch"): 1,
        ("namespace", "pay-", "Produce"): 1,
        ("namespace", "log-", "Produce"): 1,
        ("namespace", "pay-", "Fetch"): 1,
        ("proxy", "p", "Produce"): 2,
        ("proxy", "q", "Fetch"): 1,
    }


def test_traffic_is_read_once(spark: SparkSession, tmp_path: Path) -> None:
    events = spark.read.format(FORMAT).load(str(tmp_path))
    plan = latency(events)._jdf.queryExecution().executedPlan().toString()
    assert plan.count("BatchScan") == 1


def test_nothing_was_captured(spark: SparkSession, tmp_path: Path) -> None:
    assert results(spark.read.format(FORMAT).load(str(tmp_path))) == {}


def captured(directory: Path, blocks: int, rows: int) -> None:
    """Sealed files as a proxy's writer makes them: the same time for each request of a block."""
    for number in range(blocks):
        block = Block({"proxy": "p", "cluster": "c", "namespace": "pay-", "namespace_type": "topic"})
        for request in range(rows):
            values = {"time_us": 1_700_000_000_000_000 + request, "part": 0, "parts": 1, "api_key": 0, "error_code": 0}
            values |= {"proxy_us": 10, "broker_us": 990 + 1000 * number, "gate_us": 0}
            block.add(*row({**values, "client_id": f"app-{request % 3}", "topic": "pay-t"}))
        (directory / f"{number}.capture").write_bytes(block.sealed())


@pytest.mark.one_in_ci("stories", of="commands of jobs")
def test_files_are_read_whole_and_the_command_writes_a_report(spark: SparkSession, tmp_path: Path) -> None:
    captured(tmp_path, 4, 300)
    events = spark.read.format(FORMAT).load(str(tmp_path))
    assert events.count() == 1200
    assert {row.client_id for row in events.select("client_id").distinct().collect()} == {"app-0", "app-1", "app-2"}
    row = results(events)["client_id", "app-1", "Produce"]
    assert (row["requests"], row["max_us"]) == (400, 4000)
    report = tmp_path / "latency.html"
    command = [
        sys.executable,
        "-m",
        "isthmus",
        "spark",
        "latency",
        str(tmp_path),
        "--report",
        str(report),
        "-o",
        "json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    told = {(each["dimension"], each["value"], each["api"]): each for each in json.loads(done.stdout)}
    assert told["api", "all", "Produce"]["requests"] == 1200
    page = report.read_text()
    assert "<svg" in page
    assert "app-1" in page
    assert "http" not in page.replace("http-equiv", "")
    assert spark.read.parquet(str(report.with_suffix(".parquet"))).count() == len(told)
