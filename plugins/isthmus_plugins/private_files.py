"""Files that hold what is the cluster's: for the owner of the process alone, whatever the umask is."""

from __future__ import annotations

import os
from pathlib import Path


def for_owner(path: str, flags: int) -> int:
    """An ``opener`` for :func:`open`: what is made is 0600."""
    return os.open(path, flags, 0o600)


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
