"""Salvage files on a real disk, of a model cluster's log: whole and on the disk, or not there at all."""

from __future__ import annotations

import asyncio
import contextlib
import random
import resource
import stat
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.descriptors import few_left
from support.fake_cluster import FakeCluster
from support.partition_log import batch

from isthmus_plugins.cluster import TopicInfo
from isthmus_plugins.links import OperationError
from isthmus_plugins.replication.truncation.salvage import (
    SalvageFailed,
    remove_unfinished,
    write_offsets,
    write_salvage,
)
from isthmus_protocol.offsets_salvage import OffsetsSalvageHead, SalvagedOffset, read_offsets_salvage
from isthmus_protocol.salvage import SalvageHead, read_salvage

TOPIC = "t" * 249
BATCHES = 12
VALUE = bytes(range(256)) * 40
HEAD = SalvageHead("B", "link", TOPIC, "9aa253d4-0000-4000-8000-000000000000", "s", 0, 5, BATCHES, "WHY", "so", 1, "p")


class Scene:
    """A log of which the end is to be cut, and where that is kept."""

    def __init__(self, directory: Path) -> None:
        self.cluster = FakeCluster(random.Random(3))
        (partition,) = self.cluster.add_topic(TOPIC, 1).partitions
        for offset in range(BATCHES):
            partition.write(batch(offset, [VALUE]))
        self.context: Any = SimpleNamespace(data_directory=directory / "new" / "data", cluster=self.cluster)
        self.files = directory / "new" / "data" / "salvage"

    async def write(self) -> Path:
        found: TopicInfo = (await self.cluster.topics())[TOPIC]
        return await write_salvage(self.context, found, HEAD)


@contextlib.contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """As on a full disk: a write is taken in part, then refused."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_what_is_cut_is_kept_for_its_owner_alone(tmp_path: Path) -> None:
    async def main() -> None:
        scene = Scene(tmp_path)
        path = await scene.write()
        assert list(scene.files.iterdir()) == [path]
        salvage = read_salvage(path.read_bytes())
        assert salvage.head == HEAD
        assert [header.base_offset for _, header in salvage.batches()] == list(range(5, BATCHES))
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        for directory in (scene.files, scene.files.parent, scene.files.parent.parent):
            assert stat.S_IMODE(directory.stat().st_mode) == 0o700

    asyncio.run(main())


@pytest.mark.parametrize("size", [100, len(VALUE) * 3 + 7])
def test_a_disk_that_is_full_in_the_middle_holds_nothing_of_it(tmp_path: Path, size: int) -> None:
    async def main() -> None:
        scene = Scene(tmp_path)
        with files_of_at_most(size), pytest.raises(SalvageFailed, match="cannot be written: File too large: make room"):
            await scene.write()
        assert not list(scene.files.iterdir())
        read_salvage((await scene.write()).read_bytes())

    asyncio.run(main())


def test_without_descriptors_it_is_said_and_done_later(tmp_path: Path) -> None:
    async def main() -> None:
        scene = Scene(tmp_path)
        with few_left(0), pytest.raises(SalvageFailed, match="Too many open files"):
            await scene.write()
        read_salvage((await scene.write()).read_bytes())

    asyncio.run(main())


def test_a_log_that_cannot_be_read_on_leaves_nothing_behind(tmp_path: Path) -> None:
    async def main() -> None:
        scene = Scene(tmp_path)
        moved = (await scene.cluster.topics())[TOPIC]
        epochs = [each._replace(leader_epoch=each.leader_epoch + 5) for each in moved.partitions]
        moved = moved._replace(pinned=True, partitions=tuple(epochs))
        with pytest.raises(OperationError):
            await write_salvage(scene.context, moved, HEAD)
        assert not list(scene.files.iterdir())

    asyncio.run(main())


def test_two_who_write_the_same_do_not_mix(tmp_path: Path) -> None:
    """One proxy has taken a truncation over from another that still writes, in the same directory."""

    async def main() -> None:
        scene = Scene(tmp_path)
        one, other = await asyncio.gather(scene.write(), scene.write())
        assert one == other
        read_salvage(one.read_bytes())
        assert list(scene.files.iterdir()) == [one]

    asyncio.run(main())


def test_what_a_kill_left_half_written_is_deleted_and_nothing_else(tmp_path: Path) -> None:
    async def main() -> None:
        scene = Scene(tmp_path)
        remove_unfinished(scene.context.data_directory)  # nothing is there yet
        kept = await scene.write()
        (scene.files / "x-0-5-12-id.salvage.part").write_bytes(b"isthmus-salvage 1\n")
        remove_unfinished(scene.context.data_directory)
        assert list(scene.files.iterdir()) == [kept]

    asyncio.run(main())


def test_groups_may_be_called_anything(tmp_path: Path) -> None:
    """Also so that a file could not: too long, with slashes, alike at their beginnings."""

    async def main() -> None:
        scene = Scene(tmp_path)
        namespaces = ["a/b", "a_b", "\x00", "\u20ac" * 249, "n" * 249, "n" * 248 + "m", ".", ""]
        for number, namespace in enumerate(namespaces):
            head = OffsetsSalvageHead("B", "l" * 100, namespace, 10_000, 3, 2**62, 2**62 + 1, "WHY", "so", 2**42, "p")
            path = await write_offsets(scene.context, head, [SalvagedOffset("g", "t", 0, number, "", -1)])
            assert read_offsets_salvage(path.read_bytes()).head.namespace == namespace
        assert len(list(scene.files.iterdir())) == len(namespaces)

    asyncio.run(main())
