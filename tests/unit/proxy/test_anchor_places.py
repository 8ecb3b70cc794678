"""Anchors in a directory of this machine."""

from __future__ import annotations

import asyncio
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from isthmus.anchor_places import AnchorFiles, PlaceUnavailable
from isthmus_control.anchors import Anchor

ANCHOR = Anchor("A", "11111111-1111-4111-8111-111111111111", 3, 10, 7, "ab")


def files(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


def test_a_directory_keeps_an_anchor_of_each_cluster(tmp_path: Path) -> None:
    async def run() -> None:
        directory = tmp_path / "data"
        place = AnchorFiles(directory)
        assert await place.read("A") is None
        other = replace(ANCHOR, cluster_id="b/../c")
        later = replace(ANCHOR, offset=11)
        for anchor in (ANCHOR, other, later):
            await place.write(anchor)
        assert await place.read("A") == later
        assert await AnchorFiles(directory).read(other.cluster_id) == other
        assert files(directory) == ["control-anchor-A.json", "control-anchor-b%2F..%2Fc.json"]
        for name in files(directory):
            assert stat.S_IMODE((directory / name).stat().st_mode) == 0o600
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700

    asyncio.run(run())


def test_clusters_whose_ids_are_longer_than_names_of_files_have_one_each(tmp_path: Path) -> None:
    async def run() -> None:
        place = AnchorFiles(tmp_path)
        anchors = [replace(ANCHOR, cluster_id=cluster_id) for cluster_id in ("x" * 300, "x" * 301, "/" * 100)]
        for anchor in anchors:
            await place.write(anchor)
        assert [await place.read(anchor.cluster_id) for anchor in anchors] == anchors

    asyncio.run(run())


def test_what_cannot_be_read_or_written_is_not_taken_for_nothing(tmp_path: Path) -> None:
    async def run() -> None:
        place = AnchorFiles(tmp_path)
        await place.write(ANCHOR)
        (file,) = tmp_path.iterdir()
        for text in (b"", b"{}", b"\xff", ANCHOR.encode()[:-3].encode()):
            file.write_bytes(text)
            with pytest.raises(PlaceUnavailable, match="control-anchor-A"):
                await place.read("A")
        taken = tmp_path / "file"
        taken.write_text("")
        with pytest.raises(PlaceUnavailable, match="cannot be written"):
            await AnchorFiles(taken).write(ANCHOR)

    asyncio.run(run())


def test_a_write_that_did_not_end_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(number: int) -> None:
        raise OSError(28, "No space left on device")

    async def run() -> None:
        place = AnchorFiles(tmp_path)
        await place.write(ANCHOR)
        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", full)
            with pytest.raises(PlaceUnavailable, match="No space left"):
                await place.write(replace(ANCHOR, offset=11))
        assert await place.read("A") == ANCHOR
        await place.write(replace(ANCHOR, offset=12))
        assert files(tmp_path) == ["control-anchor-A.json"]

    asyncio.run(run())
