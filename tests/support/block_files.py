"""Sealed files of captured events, as a proxy's writer makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from isthmus_plugins.capture.blocks import COMMON_FIELDS, FIELDS, TEXTS, Block

HOUR_US = 3_600_000_000
START_US = 1_767_225_600_000_000
"""2026-01-01."""


def row(known: dict[str, Any]) -> tuple[list[int], tuple[Any, ...]]:
    """What a block takes for an event of which this is known."""
    own = [known.get(name, -1) for name, _ in FIELDS]
    return own, tuple(known.get(name, None if name in TEXTS else -1) for name, _ in COMMON_FIELDS)


def write_files(
    directory: Path,
    files: int,
    blocks: int = 1,
    rows: int = 10,
    *,
    first: int = 0,
    namespace: str = "pay-",
    start_us: int = START_US,
) -> list[Path]:
    """Their events have the sessions ``first``, ``first`` + 1, ...; each file begins an hour after the one before."""
    directory.mkdir(parents=True, exist_ok=True)
    paths, session = [], first
    for file in range(files):
        data = b""
        for _ in range(blocks):
            block = Block({"proxy": "p", "cluster": "c", "namespace": namespace, "namespace_type": "topic"})
            for _ in range(rows):
                values = {"time_us": start_us + file * HOUR_US + session, "session": session, "part": 0, "parts": 1}
                values |= {"api_key": 0, "error_code": 0, "proxy_us": 10, "broker_us": 990, "gate_us": 0}
                block.add(*row({**values, "client_id": "app", "topic": "pay-t"}))
                session += 1
            data += block.sealed()
        path = directory / f"{first:06d}-{file:03d}-p.capture"
        path.write_bytes(data)
        paths.append(path)
    return paths
