"""Writes what is cut from a follower's log to salvage files, so that nothing is deleted before it is safe on a disk."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Final

from isthmus_plugins.cluster import TopicInfo
from isthmus_plugins.private_files import for_owner, make_directory
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.logs.reading import read_batches
from isthmus_protocol.salvage import SUFFIX, SalvageHead, SalvageWriter

DIRECTORY: Final = "salvage"
"""In the proxy's data directory."""
UNFINISHED: Final = ".part"
TOPIC_MAX: Final = 150


class SalvageFailed(Exception):
    """A file cannot be written: there is no directory, no room, no permission."""


async def write_salvage(context: PluginContext, topic: TopicInfo, head: SalvageHead) -> Path:
    """Write the batches of ``[head.from_offset, head.to_offset)``; when this returns, the file is on the disk.

    A file of the same name, from an attempt before, is replaced. Raises SalvageFailed, OperationError.
    """
    if context.data_directory is None:
        raise SalvageFailed(
            "there is nowhere to keep what would be cut: set [data] directory in this proxy's configuration and start "
            "it again"
        )
    directory = context.data_directory / DIRECTORY
    # A topic's name may be 249 characters long, a file's 255; the id tells apart those that begin alike.
    name = f"{head.topic[:TOPIC_MAX]}-{head.partition}-{head.from_offset}-{head.to_offset}-{head.topic_id}{SUFFIX}"
    path = directory / name
    unfinished = directory / (name + UNFINISHED)
    writer = SalvageWriter(head)
    try:
        await asyncio.to_thread(make_directory, directory)
        file = await asyncio.to_thread(open, unfinished, "wb", opener=for_owner)
        try:
            await asyncio.to_thread(file.write, writer.head())
            async for batch, header, _ in read_batches(
                context, topic, head.partition, head.from_offset, head.to_offset
            ):
                writer.add(batch, header)
                await asyncio.to_thread(file.write, batch)
            await asyncio.to_thread(file.write, writer.tail())
            await asyncio.to_thread(file.flush)
            await asyncio.to_thread(os.fsync, file.fileno())
        finally:
            await asyncio.to_thread(file.close)
        await asyncio.to_thread(os.replace, unfinished, path)
        await asyncio.to_thread(_sync_directory, directory)
    except OSError as error:
        raise SalvageFailed(f"{path} cannot be written: {error.strerror or error}: make room, or correct it") from error
    return path


def _sync_directory(directory: Path) -> None:
    """Have the new name of a file on the disk, too."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
