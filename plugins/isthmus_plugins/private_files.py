"""Files that hold what is the cluster's: for the owner of the process alone, whatever the umask is."""

from __future__ import annotations

import os
from pathlib import Path


def for_owner(path: str, flags: int) -> int:
    """An ``opener`` for :func:`open`: what is made is 0600."""
    return os.open(path, flags, 0o600)


def write_file(path: Path, content: bytes) -> None:
    """Write a file, which is on the disk as a whole when this returns, or not there at all. Raises OSError.

    What was there before is replaced. The directory is made if it is missing.
    """
    make_directory(path.parent)
    # Another process may write the same file: each writes one of its own, and renames it.
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        with open(new, "wb", opener=for_owner) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)  # a full disk has no room for halves
        raise
    sync_directory(path.parent)


def make_directory(path: Path) -> None:
    """Make a directory with those above it: what is made is 0700; what is there already stays as it is.

    When this returns, a loss of power takes none of them. Raises OSError.
    """
    missing = [each for each in (path, *path.parents) if not each.exists()]
    for each in reversed(missing):
        each.mkdir(mode=0o700, exist_ok=True)
        sync_directory(each.parent)


def sync_directory(path: Path) -> None:
    """Have the names of what is in a directory on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
