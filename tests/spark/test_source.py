"""Reading block files: each block once, however files are put together or cut; damage is not passed over."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from support.block_files import write_files

from isthmus_spark import source
from isthmus_spark.blocks import DamagedFile, count_rows, read_file
from isthmus_spark.command import ours
from isthmus_spark.events import events
from isthmus_spark.source import CaptureReader


@pytest.mark.parametrize("partition_bytes", [1, 1000, 5000, 10**9])
def test_each_block_is_read_once(partition_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "PARTITION_BYTES", partition_bytes)
    reader = CaptureReader(write_files(tmp_path, files=3, blocks=4, rows=5), ["session"])
    batches = [batch for each in reader.partitions() for batch in reader.read(each)]
    assert len(batches) == 12
    assert sorted(value for batch in batches for value in batch["session"].to_pylist()) == list(range(60))


def test_damage_is_an_error(tmp_path: Path) -> None:
    [path] = write_files(tmp_path, files=1, blocks=2, rows=5)
    assert count_rows(path) == 10
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole + b"x", whole[:-9] + b"?" + whole[-8:], b"?" + whole[1:]):
        path.write_bytes(damaged)
        with pytest.raises(DamagedFile):
            list(read_file(path))


@pytest.mark.brokers  # a JVM as well
def test_what_is_wrong_with_a_file_is_told_without_spark(spark: SparkSession, tmp_path: Path) -> None:
    [path] = write_files(tmp_path, files=1)
    frame = events(spark, tmp_path, ["session"])
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(PySparkException) as damaged:
        frame.count()
    assert ours(damaged.value) == f"{path}: the block at byte 0 does not have its checksum"
    path.unlink()
    with pytest.raises(PySparkException) as gone:
        frame.count()
    assert str(path) in str(ours(gone.value))
    assert ours(ValueError("else")) is None
