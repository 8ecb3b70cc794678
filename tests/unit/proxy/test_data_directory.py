"""What the files of the data directory take."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from isthmus.data_directory import DataDirectory
from isthmus_plugins.tasks import Supervision, Tasks


def look(data: DataDirectory) -> None:
    async def main() -> None:
        tasks = Tasks("test", Supervision())
        tasks.keep("data", data.watch)
        await asyncio.sleep(0.1)
        await tasks.close()

    asyncio.run(main())


def test_it_is_measured_and_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = DataDirectory(tmp_path / "data", 5000)
    look(data)
    assert (dict(data.sizes), data.free, data.warning()) == ({}, None, None)
    (tmp_path / "data" / "salvage").mkdir(parents=True)
    (tmp_path / "data" / "capture" / "a").mkdir(parents=True)
    (tmp_path / "data" / "salvage" / "x").write_bytes(bytes(4000))
    (tmp_path / "data" / "capture" / "a" / "y").write_bytes(bytes(1000))
    look(data)
    assert dict(data.sizes) == {"salvage": 4000, "capture": 1000}
    assert data.free is not None
    assert data.warning() is None
    (tmp_path / "data" / "salvage" / "z").write_bytes(bytes(2**20))
    look(data)
    assert "capture 0 MiB, salvage 1 MiB" in (data.warning() or "")
    assert [record.getMessage() for record in caplog.records] == ["data directory is large"]
