"""File descriptors that run short: the last ones are kept, and it is told."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os

import pytest
from support.descriptors import LIMIT, few_left, limited, open_now

from isthmus_plugins import descriptors
from isthmus_plugins.descriptors import RESERVED_MAX
from isthmus_plugins.tasks import Supervision, Tasks


def test_half_of_few_are_reserved_and_so_many_of_many() -> None:
    with limited(LIMIT):
        assert descriptors.clients_max() == LIMIT // 4
        assert not descriptors.is_kept(LIMIT * 3 // 4 - 1)
        assert descriptors.is_kept(LIMIT * 3 // 4)
    hard = descriptors.raise_limit()
    if hard >= 2 * RESERVED_MAX:
        assert descriptors.clients_max() == (hard - RESERVED_MAX) // 2


def test_a_shortage_is_told_before_and_when_none_are_left() -> None:
    with few_left(LIMIT // 2) as held:
        assert descriptors.shortage() is None
        with contextlib.suppress(OSError):
            while True:
                held.append(os.open("/", os.O_RDONLY))
        said = descriptors.shortage()
        assert (said or "").startswith("there are no file descriptors left (Too many open files; this")
        os.close(held.pop())
        said = descriptors.shortage()
        assert (said or "").startswith(f"at least {LIMIT - 1} of {LIMIT} file descriptors are in use")
        assert "LimitNOFILE" in (said or "")


def test_room_is_required_and_nothing_is_kept_of_it() -> None:
    with few_left(5):
        before = len(os.listdir("/proc/self/fd"))
        descriptors.require(5)
        with pytest.raises(OSError, match="Too many open files") as raised:
            descriptors.require(6)
        assert raised.value.errno == errno.EMFILE
        assert len(os.listdir("/proc/self/fd")) == before == open_now()


def test_a_shortage_is_logged_once_and_its_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(descriptors, "LOOK_S", 0.01)

    async def main() -> None:
        tasks = Tasks("test", Supervision())
        tasks.keep("descriptors", descriptors.watch)
        with few_left(0):
            await asyncio.sleep(0.1)
        await asyncio.sleep(0.1)
        await tasks.close()

    caplog.set_level("INFO", "isthmus.descriptors")
    asyncio.run(main())
    assert [record.getMessage() for record in caplog.records] == [
        "file descriptors run short",
        "file descriptors suffice again",
    ]
