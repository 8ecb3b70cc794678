"""Kills a compaction before each change of a file or directory, one after the other; a script (see test_compaction).

After each kill, and once more when it has gone on, all events must be there, each once, in what a reader finds; but for
those that retention deletes, which may be there until it has gone on.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import pyarrow.parquet as pq

from isthmus_spark.blocks import read_file
from isthmus_spark.compacted import batches_below, captured_below
from isthmus_spark.compaction import compact
from isthmus_spark.parquet import write_spans
from isthmus_spark.retention import Keep
from isthmus_spark.source import together
from support.block_files import START_US, write_files

EVENTS: Final = 60
BATCH_BYTES: Final = 5000
"""Two block files of 10 events, or one of 15."""
DAY_US: Final = 86_400_000_000
NEW_US: Final = START_US + 10 * DAY_US
CHANGES: Final = frozenset(("os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "fcntl.flock"))


def keep_new() -> Keep:
    """What began at NEW_US, and not what began at START_US."""
    return Keep(days=int((time.time() * 1e6 - NEW_US) // DAY_US) + 5)


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


def in_child(root: Path, kill_at: int | None, keep: Keep | None = None, delete: bool = True) -> bool:
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
            to = root / "compacted"
            compact(root / "capture", to, write, lambda _: None, delete=delete, keep=keep, batch_bytes=BATCH_BYTES)
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


def taken_over(root: Path, kill_at: int) -> bool:
    """False: it was killed."""
    write_files(root / "capture" / "topic=pay-", files=2, rows=15)
    write_files(root / "capture" / "topic=", files=2, rows=15, first=30, namespace="")
    ended = in_child(root, kill_at)
    assert sessions(root) == list(range(EVENTS)), f"killed before change {kill_at}"
    assert in_child(root, None)
    assert sessions(root) == list(range(EVENTS)), f"gone on after change {kill_at}"
    assert not list(root.rglob("*.capture"))
    return ended


def expired(root: Path, kill_at: int, delete: bool) -> bool:
    """False: it was killed. There are batches of what goes alone, of what stays alone, and of both."""
    capture = root / "capture" / "topic=pay-"
    for first, of_batch in enumerate(((START_US,), (NEW_US,), (START_US, NEW_US))):
        for number, start_us in enumerate(of_batch):
            write_files(capture, files=1, rows=10, first=20 * first + 10 * number, start_us=start_us)
        assert in_child(root, None, delete=delete)
    assert len(batches_below(root)) == 3
    kept = {*range(20, 30), *range(50, 70)}
    write_files(capture, files=1, rows=10, first=60, start_us=NEW_US)
    ended = in_child(root, kill_at, keep_new(), delete)
    found = sessions(root)
    assert len(set(found)) == len(found), f"killed before change {kill_at}"
    assert kept <= set(found) <= {*range(10), *kept, *range(40, 50)}, f"killed before change {kill_at}"
    assert in_child(root, None, keep_new(), delete)
    assert sessions(root) == sorted(kept), f"gone on after change {kill_at}"
    batches = batches_below(root)
    assert len(batches) == (3 if delete else 4), "one whose block files are there has to stay: it says so of them"
    listed = {file for batch in batches for file in batch.files()}
    assert set(root.rglob("*.parquet")) == listed
    assert {each for each in (root / "compacted").rglob("date=*") if each.is_dir()} == {
        file.parents[2] for file in listed
    }
    return ended


SCENES: Final[dict[str, Callable[[Path, int], bool]]] = {
    "taking over": taken_over,
    "retention": partial(expired, delete=True),
    "retention, block files stay": partial(expired, delete=False),
}


def main(scratch: Path, what: str) -> int:
    """The number of moments at which it was killed."""
    kill_at = 0
    while True:
        root = scratch / str(kill_at)
        ended = SCENES[what](root, kill_at)
        assert not list(root.rglob("_staging-*"))
        shutil.rmtree(root)
        if ended:
            return kill_at
        kill_at += 1


if __name__ == "__main__":
    print(main(Path(sys.argv[1]), sys.argv[2]))
