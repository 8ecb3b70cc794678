"""The proxy's side of captured traffic, without the process that reads it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from isthmus_plugins.capture.notes import Kind, unpack
from isthmus_plugins.capture.recorder import BEHIND_BYTES_MAX, Recorder


class Pipe:
    """Takes what is written."""

    def __init__(self) -> None:
        self.data = b""
        self.behind = 0
        self.transport = SimpleNamespace(get_write_buffer_size=lambda: self.behind)

    def write(self, data: bytes) -> None:
        self.data += data


def recorder() -> Recorder:
    context: Any = SimpleNamespace(proxy_name="p", cluster_id="c")
    return Recorder(context, Path("nowhere"))


def wanted(count: int) -> list[dict[str, Any]]:
    return [{"type": "topic", "prefix": f"namespace-{number:060}-"} for number in range(count)]


def test_settings_of_many_namespaces_are_told() -> None:
    async def run() -> None:
        pipe, told = Pipe(), recorder()
        told._process = SimpleNamespace(stdin=pipe)  # type: ignore[assignment]
        told.configure(wanted(2000))
        ((_, note),) = unpack(pipe.data)
        assert note.kind == Kind.SETTINGS
        assert len(json.loads(note.first)["namespaces"]) == 2000

    asyncio.run(run())


def test_what_the_writer_is_behind_with_is_dropped_and_settings_never_are() -> None:
    async def run() -> None:
        pipe, told = Pipe(), recorder()
        told._process = SimpleNamespace(stdin=pipe)  # type: ignore[assignment]
        pipe.behind = BEHIND_BYTES_MAX + 1
        told.request(1, 0.0, 0, 5, 10, bytes(14))
        told._flush()
        assert (told.dropped, pipe.data) == (1, b"")
        told.configure(wanted(1))
        assert told.dropped == 1
        assert [note.kind for _, note in unpack(pipe.data)] == [Kind.SETTINGS]

    asyncio.run(run())


def test_settings_before_there_is_a_process_are_not_counted_as_dropped() -> None:
    async def run() -> None:
        told = recorder()
        told.configure(wanted(1))
        assert told.dropped == 0

    asyncio.run(run())
