"""Writes what a proxy remembers of the control log to a file of its machine: it may hold secrets of links."""

from __future__ import annotations

import tempfile
from pathlib import Path

from isthmus_control.exports import Export
from isthmus_plugins.private_files import write_file


def write_export(export: Export, directory: Path | None) -> Path:
    """The file, which is there as a whole or not at all. ``directory``: None makes a temporary one. Raises OSError."""
    directory = directory or Path(tempfile.mkdtemp(prefix="isthmus-"))
    path = directory / f"control-log-{export.topic_id}-{export.end}.json"
    write_file(path, export.encode())
    return path
