"""Files of the process's owner alone, whole or not at all."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from isthmus_plugins.private_files import write_file


def test_a_file_that_cannot_be_written_takes_no_room_and_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    write_file(path, b"before")
    assert path.stat().st_mode & 0o777 == 0o600
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # as on a full disk: a write is taken in part, then refused
    try:
        with pytest.raises(OSError, match="too large"):
            write_file(path, b"x" * 100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [each.name for each in path.parent.iterdir()] == ["file"]
    assert path.read_bytes() == b"before"
