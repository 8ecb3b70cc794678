"""Writes what is cut from a follower to salvage files, so that nothing is deleted before it is safe on a disk."""

from __future__ import annotations

import asyncio
import logging
import os
import urllib.parse
import uuid
import zlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Final

from isthmus_plugins.cluster import TopicInfo
from isthmus_plugins.private_files import for_owner, make_directory, sync_directory
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.logs.reading import read_batches
from isthmus_protocol.offsets_salvage import OffsetsSalvageHead, SalvagedOffset, encode_offsets_salvage
from isthmus_protocol.salvage import SUFFIX, SalvageHead, SalvageWriter

log = logging.getLogger("isthmus_plugins.replication")

DIRECTORY: Final = "salvage"
"""In the proxy's data directory."""
UNFINISHED: Final = ".part"
TOPIC_MAX: Final = 150
NAMESPACE_MAX: Final = 60


class SalvageFailed(Exception):
    """A file cannot be written: there is no directory, no room, no permission."""


async def write_salvage(context: PluginContext, topic: TopicInfo, head: SalvageHead) -> Path:
    """Write the batches of ``[head.from_offset, head.to_offset)``; when this returns, the file is on the disk.

    A file of the same name, from an attempt before, is replaced; what is not finished takes no room. Raises
    SalvageFailed, OperationError.
    """
    # A topic's name may be 249 characters long, a file's 255; the id tells apart those that begin alike.
    name = f"{head.topic[:TOPIC_MAX]}-{head.partition}-{head.from_offset}-{head.to_offset}-{head.topic_id}{SUFFIX}"

    async def parts() -> AsyncIterator[bytes | memoryview]:
        writer = SalvageWriter(head)
        yield writer.head()
        async for batch, header, _ in read_batches(context, topic, head.partition, head.from_offset, head.to_offset):
            writer.add(batch, header)
            yield batch
        yield writer.tail()

    return await write_file(context, name, parts())


async def write_offsets(context: PluginContext, head: OffsetsSalvageHead, offsets: Sequence[SalvagedOffset]) -> Path:
    """The same for committed offsets of groups. Raises SalvageFailed."""
    # Groups may be called anything, and at any length; the hash tells apart those that begin alike.
    begins = urllib.parse.quote(head.namespace, safe="")[:NAMESPACE_MAX]
    namespace = f"{begins}-{zlib.crc32(head.namespace.encode()):08x}"
    span = f"{head.partition}-{head.from_offset}-{head.to_offset}"
    name = f"offsets-{head.link}-{namespace}-{span}-{head.at_ms}{SUFFIX}"

    async def parts() -> AsyncIterator[bytes]:
        yield encode_offsets_salvage(head, offsets)

    return await write_file(context, name, parts())


async def write_file(context: PluginContext, name: str, parts: AsyncIterator[bytes | memoryview]) -> Path:
    """Write a salvage file; when this returns, it is on the disk. Raises SalvageFailed, and what ``parts`` raises."""
    if context.data_directory is None:
        raise SalvageFailed(
            "there is nowhere to keep what would be cut: set [data] directory in this proxy's configuration and start "
            "it again"
        )
    directory = context.data_directory / DIRECTORY
    path = directory / name
    # Its own: another proxy, which took the truncation over, may have the same directory.
    unfinished = directory / f"{uuid.uuid4()}{UNFINISHED}"
    try:
        await asyncio.to_thread(make_directory, directory)
        try:
            await _write(parts, unfinished)
            await asyncio.to_thread(os.replace, unfinished, path)
        except BaseException:
            unfinished.unlink(missing_ok=True)
            raise
        await asyncio.to_thread(sync_directory, directory)
    except OSError as error:
        raise SalvageFailed(f"{path} cannot be written: {error.strerror or error}: make room, or correct it") from error
    return path


async def _write(parts: AsyncIterator[bytes | memoryview], path: Path) -> None:
    file = await asyncio.to_thread(open, path, "xb", opener=for_owner)
    try:
        async for part in parts:
            await asyncio.to_thread(file.write, part)
        await asyncio.to_thread(file.flush)
        await asyncio.to_thread(os.fsync, file.fileno())
    finally:
        await asyncio.to_thread(file.close)


def remove_unfinished(data_directory: Path) -> None:
    """Delete what processes that were killed have left half written: it was begun anew. Raises OSError."""
    for path in (data_directory / DIRECTORY).glob(f"*{UNFINISHED}"):
        path.unlink(missing_ok=True)
        log.info("unfinished salvage file deleted", extra={"file": str(path)})
