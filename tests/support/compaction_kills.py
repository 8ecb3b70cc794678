"""Kills a compaction before each change of a file or directory, one after the other; a script (see test_compaction).

After each kill, and once more when it has gone on, all events must be there, each once, in what a reader finds.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from isthmus_spark.blocks import read_file
from isthmus_spark.compacted import captured_below
from isthmus_spark.compaction import compact
from isthmus_spark.parquet import write_spans
from isthmus_spark.source import together
from support.block_files import write_files

EVENTS = 60
CHANGES = frozenset(("os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "fcntl.flock"))


def write(kind: str, files: Sequence[Path], directory: Path) -> None:
    for number, file in enumerate(files):
        os.mkdir(directory / f"part-{number}") if directory.exists() else directory.mkdir()
        write_spans(kind, together([(file, file.stat().st_size)])[0], directory)


def sessions(root: Path) -> list[int]:
    """Of all events that a reader finds below a directory."""
    found = captured_below(root, "requests")
    tables = [*found.files, *(file for batch in found.batches for file in batch.files("requests"))]
    read: list[int] = []
    for each in tables:
        if each.suffix == ".parquet":
            read += pq.ParquetFile(each).read(["session"])["session"].to_pylist()
        else:
            read += [value for batch in read_file(each, ["session"]) for value in batch["session"].to_pylist()]
    return sorted(read)


def in_child(root: Path, kill_at: int | None) -> bool:
    """Compact in a process of its own. False: it was killed."""
    child = os.fork()
    if not child:
        left = kill_at

        def audit(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal left
            changes = event in CHANGES or (
                event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_WRONLY
            )
            if left is not None and changes:
                if not left:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1

        sys.addaudithook(audit)
        try:
            compact(root / "capture", root / "compacted", write, lambda _: None, delete=True, batch_bytes=3000)
        except BaseException as error:
            print(repr(error), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return False
    assert os.waitstatus_to_exitcode(status) == 0
    return True


def main(scratch: Path) -> int:
    """The number of moments at which it was killed."""
    kill_at = 0
    while True:
        root = scratch / str(kill_at)
        write_files(root / "capture" / "topic=pay-", files=2, rows=15)
        write_files(root / "capture" / "topic=", files=2, rows=15, first=30, namespace="")
        ended = in_child(root, kill_at)
        assert sessions(root) == list(range(EVENTS)), f"killed before change {kill_at}"
        assert in_child(root, None)
        assert sessions(root) == list(range(EVENTS)), f"gone on after change {kill_at}"
        assert not list(root.rglob("*.capture"))
        assert not list(root.rglob("_staging-*"))
        shutil.rmtree(root)
        if ended:
            return kill_at
        kill_at += 1


if __name__ == "__main__":
    print(main(Path(sys.argv[1])))
