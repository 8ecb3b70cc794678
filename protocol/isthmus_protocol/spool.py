"""The spool: what is put back into a topic that is truncated, as records of a topic of its own.

Batches stand in it as they were in the log, wrapped: one record's value is whole batches, one after the other. So
nothing of them is looked at or changed on the way in, whatever they are (transactions, markers, holes), and a record
that was written twice does no harm: who reads goes by the offsets inside. The spool topic has a partition for each of
the topic's, and one more for the manifest.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from isthmus_protocol.record_codec import Record, decode_records, encode_batch
from isthmus_protocol.records import PLAIN_HEADER, Frame, MalformedBatch


@dataclass(frozen=True, slots=True)
class Manifest:
    """What else is needed to make the topic anew.

    ``configs``: the topic's own settings. ``digests``: by partition, of the records that are put back. ``positions``:
    by group and partition, (offset, metadata) as committed before.
    """

    partitions: int
    replication_factor: int
    configs: Mapping[str, str]
    digests: tuple[str, ...]
    positions: Mapping[str, Mapping[int, tuple[int, str]]]


def spool_batch(value: bytes) -> bytes:
    """A batch at base offset 0 with one record of this value."""
    return encode_batch([Record(0, 0, None, value)], PLAIN_HEADER)


def spooled(batch: Frame) -> Iterator[memoryview]:
    """The values of the records of a spool's batch. Raises BatchError."""
    for record in decode_records(batch):
        if record.value is None:
            raise MalformedBatch("a record of the spool has no value")
        yield memoryview(record.value)


def encode_manifest(manifest: Manifest, manifest_id: str) -> list[bytes]:
    """The manifest as values of records, each numbered: some may be written twice, or later than others.

    ``manifest_id`` distinguishes it from one that somebody else began to write.
    """
    parts: list[dict[str, Any]] = [
        {
            "partitions": manifest.partitions,
            "replication_factor": manifest.replication_factor,
            "configs": dict(manifest.configs),
            "digests": list(manifest.digests),
        }
    ]
    parts += [
        {"group": group, "positions": [[partition, *position] for partition, position in sorted(positions.items())]}
        for group, positions in sorted(manifest.positions.items())
    ]
    return [
        json.dumps({"manifest": manifest_id, "part": number, "parts": len(parts), **part}).encode()
        for number, part in enumerate(parts)
    ]


def decode_manifest(values: Sequence[Frame]) -> Manifest:
    """The manifest of which all parts are there. Raises ValueError: there is none."""
    found: dict[str, dict[int, Any]] = {}
    for value in values:
        part: Any = json.loads(bytes(value))
        parts = found.setdefault(str(part["manifest"]), {})
        parts[int(part["part"])] = part
    whole = [parts for parts in found.values() if len(parts) == parts[min(parts)]["parts"]]
    if not whole:
        raise ValueError("the spool's manifest is not whole")
    first, *groups = (part for _, part in sorted(whole[-1].items()))
    return Manifest(
        int(first["partitions"]),
        int(first["replication_factor"]),
        {str(name): str(value) for name, value in first["configs"].items()},
        tuple(str(digest) for digest in first["digests"]),
        {
            str(group["group"]): {
                int(partition): (int(offset), str(metadata)) for partition, offset, metadata in group["positions"]
            }
            for group in groups
        },
    )
