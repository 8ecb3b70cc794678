"""Has what was written be on the disk."""

from __future__ import annotations

import os
from pathlib import Path


def sync_tree(directory: Path) -> None:
    """All that is in it, and its names."""
    for name, _, files in os.walk(directory, topdown=False):
        for file in files:
            sync_one(Path(name, file))
        sync_one(Path(name))


def sync_one(path: Path) -> None:
    """A file, or the names in a directory."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
