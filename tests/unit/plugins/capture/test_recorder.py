"""The proxy's side of captured traffic, without the process that reads it."""

from __future__ import annotations

import asyncio
import json
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop
from support.descriptors import few_left, open_now
from support.sessions import until

from isthmus_plugins.capture import recorder as module
from isthmus_plugins.capture.notes import Kind, pack, unpack
from isthmus_plugins.capture.recorder import BEHIND_BYTES_MAX, Recorder
from isthmus_plugins.capture.sampling import is_chosen
from isthmus_plugins.tasks import Supervision


class Pipe:
    """Takes what is written."""

    def __init__(self) -> None:
        self.data = b""
        self.behind = 0
        self.transport = SimpleNamespace(get_write_buffer_size=lambda: self.behind)

    def write(self, data: bytes) -> None:
        self.data += data


def recorder() -> Recorder:
    context: Any = SimpleNamespace(proxy_name="p", cluster_id="c", supervision=Supervision())
    return Recorder(context, Path("nowhere"))


def wanted(count: int) -> list[dict[str, Any]]:
    return [{"type": "topic", "prefix": f"namespace-{number:060}-", "sampling": 1.0} for number in range(count)]


def test_settings_of_many_namespaces_are_told() -> None:
    async def run() -> None:
        pipe, told = Pipe(), recorder()
        told._process = SimpleNamespace(stdin=pipe)  # type: ignore[assignment]
        told.configure(wanted(2000))
        ((_, (note,)),) = unpack(pipe.data)
        assert note.kind == Kind.SETTINGS
        assert len(json.loads(note.said)["namespaces"]) == 2000

    asyncio.run(run())


def test_what_the_writer_is_behind_with_is_dropped_and_settings_never_are() -> None:
    async def run() -> None:
        pipe, told = Pipe(), recorder()
        told._process = SimpleNamespace(stdin=pipe)  # type: ignore[assignment]
        pipe.behind = BEHIND_BYTES_MAX + 1
        told.note((int(Kind.REQUEST), 1, 0.0, 0.0, 0, bytes(14)))
        told._flush()
        assert (told.dropped, pipe.data) == (1, b"")
        told.configure(wanted(1))
        assert told.dropped == 1
        assert [note.kind for _, notes in unpack(pipe.data) for note in notes] == [Kind.SETTINGS]

    asyncio.run(run())


def test_partitions_are_wanted_of_requests_that_are_recorded() -> None:
    async def run() -> None:
        told = recorder()
        requests = [(session, at / 7, number) for session in (1, 2) for at in range(50) for number in range(9)]
        assert not any(told.wants_parts(*each) for each in requests)
        told.configure([{**each, "sampling": part} for each, part in zip(wanted(2), (0.1, 0.3), strict=True)])
        chosen = [each for each in requests if told.wants_parts(*each)]
        assert 0.2 < len(chosen) / len(requests) < 0.4
        assert chosen == [each for each in requests if is_written(0.3, *each)]
        told.configure(wanted(1))
        assert all(told.wants_parts(*each) for each in requests)

    asyncio.run(run())


def is_written(sampling: float, session: int, at: float, number: int) -> bool:
    """As the writer sees it, which has the time of the note."""
    ((_, (note,)),) = unpack(pack([int(Kind.REQUEST), session, at, at, 0, struct.pack(">iii", 8, 0, number)]))
    return is_chosen(sampling, session, number, note.at)


def test_settings_before_there_is_a_process_are_not_counted_as_dropped() -> None:
    async def run() -> None:
        told = recorder()
        told.configure(wanted(1))
        assert told.dropped == 0

    asyncio.run(run())


def test_many_notes_are_packed_some_at_a_time_and_stay_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FLUSH_S", 0.001)
    monkeypatch.setattr(module, "FLUSH_NOTES", 10)

    async def run() -> None:
        told, all_there = recorder(), asyncio.Event()

        class Noted(Pipe):
            def write(self, data: bytes) -> None:
                if not self.data:
                    note(range(95, 100))  # while the others are handed over
                super().write(data)
                if not told._values:
                    all_there.set()

        def note(sessions: range) -> None:
            for session in sessions:
                told.note((int(Kind.REQUEST), session, 0.0, 0.0, 0, bytes(14)))

        pipe = Noted()
        told._process = SimpleNamespace(stdin=pipe)  # type: ignore[assignment]
        note(range(95))
        told._tasks.start("flush", told._flush_for_ever())
        await all_there.wait()
        await told._tasks.close()
        packed = [[note.session for note in notes] for _, notes in unpack(pipe.data)]
        assert [session for each in packed for session in each] == list(range(100))
        assert max(map(len, packed)) == 10

    asyncio.run(run())


@pytest.mark.fails_on_purpose
def test_a_writer_that_cannot_be_started_takes_no_descriptors(tmp_path: Path) -> None:
    async def run() -> None:
        context: Any = SimpleNamespace(proxy_name="p", cluster_id="c", supervision=Supervision())
        told = Recorder(context, tmp_path)
        with few_left(7):
            before = open_now()
            told.start()
            await until(lambda: context.supervision.failures["capture/run"] == 2)
            assert open_now() == before
            (failing,) = context.supervision.failing
            assert "Too many open files" in failing.error
        await until(lambda: told._process is not None)
        await told.stop()

    uvloop.run(asyncio.wait_for(run(), 30))
