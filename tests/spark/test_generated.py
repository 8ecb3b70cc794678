"""Generated traffic: the same for a seed, as many events as asked for; jobs find what was planted, and nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
from pyspark.sql import SparkSession
from typer.testing import CliRunner

from isthmus_bench import captured
from isthmus_bench.bench_cli import bench_app
from isthmus_bench.captured import GeneratorError, Written, generate
from isthmus_spark.blocks import read_file
from isthmus_spark.jobs.exactly_once import DUPLICATE, exactly_once
from isthmus_spark.jobs.hot import hot
from isthmus_spark.jobs.rejections import rejections
from isthmus_spark.source import FORMAT


def written(to: Path, events: int, seed: int = 1, plant: bool = False) -> Written:
    return generate(to, events, seed, plant, lambda _: None, file_bytes=1_000_000)


def contents(directory: Path) -> dict[str, bytes]:
    return {str(file.relative_to(directory)): file.read_bytes() for file in directory.rglob("*.capture")}


def test_a_seed_makes_the_same_files(tmp_path: Path) -> None:
    first = written(tmp_path / "a", 40_001)
    assert first.events == 40_001
    assert first.files == len(contents(tmp_path / "a"))
    assert first.bytes <= captured.bytes_of(40_001)
    assert sum(b.num_rows for file in (tmp_path / "a").rglob("*.capture") for b in read_file(file)) == 40_001
    written(tmp_path / "b", 40_001)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    written(tmp_path / "c", 40_001, seed=2)
    assert contents(tmp_path / "a") != contents(tmp_path / "c")


def test_nothing_is_written_over_or_onto_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").touch()
    with pytest.raises(GeneratorError, match="not empty"):
        written(tmp_path, 10)

    class Usage(NamedTuple):
        free: int = 1000

    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage())
    done = CliRunner().invoke(bench_app, ["captured", "--events", "10000", "--to", str(tmp_path / "new")])
    assert "GB free" in str(done.exception)
    assert not contents(tmp_path)


@pytest.mark.brokers
def test_jobs_find_what_was_planted(spark: SparkSession, tmp_path: Path) -> None:
    planted = {each["what"]: each for each in written(tmp_path / "bad", 12_000, plant=True).planted}
    assert set(planted) == {"slow broker", "duplicate", "gap", "writes to a follower topic"}
    events = spark.read.format(FORMAT).load(str(tmp_path / "bad"))
    [twice] = exactly_once(events).collect()
    assert twice.finding == DUPLICATE
    names = ("topic", "partition", "producer_id", "base_sequence", "base_offset", "other_offset")
    assert {name: twice[name] for name in names} == {name: planted["duplicate"][name] for name in names}
    [refused] = rejections(events).collect()
    assert (refused.topic, refused.client_id, refused.requests) == ("log-mirrored", "stray-writer", 25)
    times = {
        row.broker_id: row.us
        for row in events.groupBy("broker_id").agg({"broker_us": "avg"}).toDF("broker_id", "us").collect()
    }
    assert times[2] > 5 * max(times[1], times[3])


@pytest.mark.brokers
def test_jobs_find_nothing_else(spark: SparkSession, tmp_path: Path) -> None:
    assert written(tmp_path / "good", 12_000).planted == []
    events = spark.read.format(FORMAT).load(str(tmp_path / "good"))
    assert exactly_once(events).collect() == []
    assert rejections(events).collect() == []
    assert hot(events).collect() == []
    retried = events.where("error_code > 0")
    assert 0 < retried.count() < 100
