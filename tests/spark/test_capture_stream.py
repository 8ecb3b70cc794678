"""Sealed files as a stream: each one once, over restarts, whoever seals late, whatever was deleted."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxFiles
from support.block_files import row

from isthmus_plugins.capture.blocks import Block
from isthmus_spark.blocks import EVENTS
from isthmus_spark.source import FORMAT, REMEMBERED_MS, CaptureStream, Spans

pytestmark = pytest.mark.brokers  # a JVM as well

NOW_MS = 1_767_225_600_000


def sealed(directory: Path, begun_ms: int, proxy: str = "p", namespace: str = "topic=pay-") -> Path:
    """A file with one event, whose broker id tells when it was begun."""
    block = Block({"proxy": proxy, "cluster": "c", "namespace": "pay-", "namespace_type": "topic"})
    block.add(*row({"time_us": begun_ms * 1000, "broker_id": begun_ms - NOW_MS}))
    path = directory / namespace / f"{begun_ms}-{proxy}-0000abcd.capture"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(block.sealed())
    return path


def stream(directory: Path, latest: bool = False) -> CaptureStream:
    return CaptureStream(directory, EVENTS["requests"].sealed, ["time"], latest)


def test_files_are_read_by_when_they_were_sealed_and_the_oldest_first(tmp_path: Path) -> None:
    source = stream(tmp_path)
    for number in (3, 1, 2):
        sealed(tmp_path, NOW_MS + number)
    first = source.latestOffset(source.initialOffset(), ReadMaxFiles(2))
    names = [f"topic=pay-/{NOW_MS + number}-p-0000abcd.capture" for number in (1, 2, 3)]
    assert first["files"] == names[:2]
    second = source.latestOffset(first, ReadAllAvailable())
    assert second["files"] == names
    late = sealed(tmp_path, NOW_MS, "q", "group=pay-")  # begun first, sealed last
    third = source.latestOffset(second, ReadMaxFiles(2))
    (partition,) = source.partitions(second, third)
    assert isinstance(partition, Spans)
    assert partition.spans == [(str(late), 0, late.stat().st_size)]
    assert source.latestOffset(third, ReadMaxFiles(2)) == third
    late.unlink()
    (partition,) = source.partitions(second, third)
    assert isinstance(partition, Spans)
    assert partition.spans == [], "retention was faster"
    assert list(source.read(partition)) == []


def test_names_are_forgotten_after_a_day(tmp_path: Path) -> None:
    source = stream(tmp_path)
    old = sealed(tmp_path, NOW_MS)
    first = source.latestOffset(source.initialOffset(), ReadMaxFiles(9))
    new = sealed(tmp_path, NOW_MS + REMEMBERED_MS + 1)
    second = source.latestOffset(first, ReadMaxFiles(9))
    assert second["files"] == [str(new.relative_to(tmp_path))]
    assert old.exists()
    assert source.latestOffset(second, ReadMaxFiles(9)) == second


def test_the_files_that_are_there_at_first_can_be_left_out(tmp_path: Path) -> None:
    sealed(tmp_path, NOW_MS)
    source = stream(tmp_path, latest=True)
    begin = source.initialOffset()
    assert source.latestOffset(begin, ReadMaxFiles(9)) == begin
    sealed(tmp_path, NOW_MS + 1)
    assert len(source.latestOffset(begin, ReadMaxFiles(9))["files"]) == 2


@pytest.mark.one_in_ci("stories", of="Spark at work")
def test_a_query_has_each_event_once_over_restarts(spark: SparkSession, tmp_path: Path) -> None:
    capture, found = tmp_path / "capture", []
    capture.mkdir()

    def run() -> list[int]:
        del found[:]

        def batch(frame: DataFrame, _: int) -> None:
            found.extend(row.broker_id for row in frame.collect())

        events = spark.readStream.format(FORMAT).option("columns", "time,broker_id").load(str(capture))
        writer = events.writeStream.option("checkpointLocation", str(tmp_path / "checkpoint"))
        query = writer.foreachBatch(batch).trigger(availableNow=True).start()
        query.awaitTermination()
        return sorted(found)

    for number in range(3):
        sealed(capture, NOW_MS + number)
    assert run() == [0, 1, 2]
    assert run() == []
    sealed(capture, NOW_MS + 4)
    sealed(capture, NOW_MS + 3, "q")
    next(capture.rglob(f"{NOW_MS}-*")).unlink()
    assert run() == [3, 4]
