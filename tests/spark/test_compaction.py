"""Compaction: each event is taken over once, whenever it is killed; jobs read block files and Parquet together."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from support.block_files import HOUR_US, START_US, write_files
from support.captured import links_file, run, told
from support.compaction_kills import SCENES, sessions, write

from isthmus_bench.captured import generate
from isthmus_spark.blocks import LINK_SCHEMA, SCHEMA
from isthmus_spark.compacted import Batch, batches_below
from isthmus_spark.compaction import CompactionError, Result, compact
from isthmus_spark.events import events
from isthmus_spark.parquet import write_parquet
from isthmus_spark.retention import Expired, Keep, expire

DAY = timedelta(days=1)


def compacted(root: Path, delete: bool = False, keep: Keep | None = None) -> Result:
    return compact(root / "capture", root / "compacted", write, lambda _: None, delete=delete, keep=keep)


@pytest.mark.one_in_ci("stories", of="kills of compactions")
@pytest.mark.parametrize("scene", SCENES)
def test_no_kill_loses_or_doubles_an_event(scene: str, tmp_path: Path) -> None:
    script = Path(__file__).parents[1] / "support" / "compaction_kills.py"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, script, tmp_path, scene], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 30


def test_what_is_new_is_taken_over(tmp_path: Path) -> None:
    directory = tmp_path / "capture" / "topic=pay-"
    write_files(directory, files=2, rows=5)
    first = compacted(tmp_path)
    assert (first.files, first.events, first.batches, first.already, first.deleted) == (2, 10, 1, 0, 0)
    again = compacted(tmp_path)
    assert (again.files, again.batches, again.already) == (0, 0, 2)
    write_files(directory, files=1, rows=5, first=10)
    (directory / "1-p-00000000.open").write_bytes(b"being written")
    assert sessions(tmp_path) == list(range(15))
    last = compacted(tmp_path, delete=True)
    assert (last.files, last.batches, last.already, last.deleted) == (1, 1, 2, 3)
    assert [batch.number for batch in batches_below(tmp_path)] == [1, 2]
    assert [file.name for file in directory.iterdir()] == ["1-p-00000000.open"]
    assert sessions(tmp_path) == list(range(15))


def test_retention_deletes_files_while_they_are_read(tmp_path: Path) -> None:
    oldest, *_ = write_files(tmp_path / "capture" / "topic=pay-", files=3, rows=5)

    def late(kind: str, files: Sequence[Path], directory: Path) -> None:
        oldest.unlink(missing_ok=True)
        write(kind, files, directory)

    result = compact(tmp_path / "capture", tmp_path / "compacted", late, lambda _: None)
    assert (result.files, result.events, result.gone) == (2, 10, 1)
    assert sessions(tmp_path) == list(range(5, 15))


def test_a_file_that_comes_late_is_not_read(tmp_path: Path) -> None:
    write_files(tmp_path / "capture" / "topic=pay-", files=2, rows=5)
    compacted(tmp_path, delete=True)
    file, *_ = (tmp_path / "compacted").rglob("*.parquet")
    shutil.copy(file, file.with_name("late.parquet"))
    assert sessions(tmp_path) == list(range(10))


def test_what_is_not_right_is_an_error(tmp_path: Path) -> None:
    [path] = write_files(tmp_path / "capture" / "a" / "topic=pay-", files=1)

    def half(kind: str, files: Sequence[Path], directory: Path) -> None:
        directory.mkdir()

    with pytest.raises(CompactionError, match="0 rows"):
        compact(tmp_path / "capture", tmp_path / "compacted", half, lambda _: None, delete=True)
    assert sessions(tmp_path) == list(range(10))
    with (tmp_path / "compacted" / "_lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(CompactionError, match="another process"):
            compacted(tmp_path)
    [copy] = write_files(tmp_path / "capture" / "b" / "topic=pay-", files=1)
    with pytest.raises(CompactionError, match="one name"):
        compacted(tmp_path)
    copy.unlink()
    compacted(tmp_path)
    path.write_bytes(path.read_bytes() * 2)
    with pytest.raises(CompactionError, match="do not change"):
        compacted(tmp_path, delete=True)
    assert path.exists()


def hours(first: int, count: int) -> list[int]:
    """The sessions of events of these hours."""
    return list(range(5 * first, 5 * (first + count)))


def test_the_oldest_hours_go_until_so_many_bytes_are_left(tmp_path: Path) -> None:
    directory = tmp_path / "capture" / "topic=pay-"
    write_files(directory, files=4, rows=5)
    compacted(tmp_path, delete=True)
    sizes = [file.stat().st_size for file in sorted((tmp_path / "compacted").rglob("*.parquet"), key=hour_of_path)]
    write_files(directory, files=2, rows=5, first=20, start_us=START_US + 4 * HOUR_US)
    same = compacted(tmp_path, delete=True, keep=Keep(bytes=sum(sizes)))
    assert (same.expired, same.files) == (Expired(), 2)
    assert sessions(tmp_path) == hours(0, 6), "what a run takes over does not count for it"
    less = compacted(tmp_path, keep=Keep(bytes=sum(sizes)))
    assert less.expired == Expired(2, sum(sizes[:2]))
    assert sessions(tmp_path) == hours(2, 4)
    write_files(directory, files=1, rows=5, first=30, start_us=START_US + 6 * HOUR_US)
    compacted(tmp_path, delete=True, keep=Keep(bytes=1))
    assert sessions(tmp_path) == hours(6, 1), "all from before, and nothing of what it takes over"
    assert [batch.number for batch in batches_below(tmp_path)] == [3]


def hour_of_path(file: Path) -> str:
    return f"{file.parents[2].name} {file.parents[1].name}"


def test_an_hour_is_kept_for_so_many_days_after_its_end(tmp_path: Path) -> None:
    write_files(tmp_path / "capture" / "topic=pay-", files=3, rows=5)
    write_files(tmp_path / "capture" / "topic=", files=3, rows=5, first=15, namespace="")
    compacted(tmp_path)
    [batch] = batches_below(tmp_path)
    end = datetime(2026, 1, 1, 1, tzinfo=UTC)
    second = timedelta(seconds=1)
    for now, left in ((end + 30 * DAY - second, 3), (end + 30 * DAY, 2), (end + 31 * DAY, 0)):
        expire([Batch(batch.path)], batch.sources, Keep(days=30), now)
        assert sessions(tmp_path) == [*hours(3 - left, left), *hours(6 - left, left)]
    again = compacted(tmp_path)
    assert (again.already, again.files, again.batches) == (6, 0, 0), (
        "its block files are there, and not taken over again"
    )
    shutil.rmtree(tmp_path / "capture")
    (tmp_path / "capture").mkdir()
    compacted(tmp_path, keep=Keep(days=30))
    assert batches_below(tmp_path) == []


def test_what_killed_writers_left_goes(tmp_path: Path) -> None:
    write_files(tmp_path / "capture" / "topic=pay-", files=1, rows=5)
    compacted(tmp_path, delete=True)
    [batch] = batches_below(tmp_path)
    [file] = batch.files()
    late = [file.with_name("late.parquet"), file.with_name("_late.parquet.unfinished"), batch.path / "_batch.json.new"]
    for each in late:
        shutil.copy(file, each)
    mine = batch.path / "README"
    mine.touch()
    compacted(tmp_path, keep=Keep(bytes=10**9))
    assert not any(each.exists() for each in late)
    assert sessions(tmp_path) == hours(0, 1)
    assert mine.exists()


@pytest.mark.brokers
@pytest.mark.one_in_ci("stories", of="Spark at work")
def test_the_command_keeps_what_it_is_told_to(tmp_path: Path) -> None:
    capture, to = tmp_path / "capture", tmp_path / "compacted"
    write_files(capture / "topic=pay-", files=2, rows=5)
    command = ["spark", "compact", capture, "--to", to, "--delete", "--keep-days", "1", "-o", "json"]
    assert json.loads(run(*command))["expired"] == {"files": 0, "bytes": 0}
    assert sessions(tmp_path) == hours(0, 2)
    assert json.loads(run(*command))["expired"]["files"] == 2
    assert not list(to.glob("batch=*"))


@pytest.mark.brokers
def test_jobs_read_the_same_from_parquet(spark: SparkSession, tmp_path: Path) -> None:
    capture = tmp_path / "capture"
    generate(capture, 3000, 1, True, lambda _: None)
    write_files(capture / "topic=pay-", files=3)  # an hour each
    links_file(capture / "topic=pay-" / "5-p-00000001.links", told("Following", 0), told("Disconnected", 5))
    links = events(spark, tmp_path, LINK_SCHEMA.names, "links").collect()
    frame = events(spark, tmp_path, SCHEMA.names)
    before = Counter(map(tuple, frame.collect()))
    assert before.total() == 3030

    def with_spark(kind: str, files: Sequence[Path], directory: Path) -> None:
        write_parquet(spark, kind, files, directory)

    result = compact(capture, tmp_path / "compacted", with_spark, lambda _: None, delete=True)
    assert (result.events, result.files) == (3032, result.deleted)
    assert not list(tmp_path.rglob("*.links"))
    assert len(links) == 2
    assert sorted(events(spark, tmp_path, LINK_SCHEMA.names, "links").collect()) == sorted(links)
    hours = {path.parent.name for path in (tmp_path / "compacted").rglob("prefix=pay-")}
    assert hours == {"hour=00", "hour=01", "hour=02"}
    write_files(capture / "topic=", files=1, namespace="", first=7000)
    after = events(spark, tmp_path, SCHEMA.names)
    assert after.schema == frame.schema
    found = Counter(map(tuple, after.collect()))
    assert (found - before).total() == 10
    assert not before - found
    some = events(spark, tmp_path, ("session", "namespace"))
    assert some.columns == ["session", "namespace"]
    assert some.where("namespace = ''").count() > 10
