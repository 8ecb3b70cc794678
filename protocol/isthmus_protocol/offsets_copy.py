"""What of the source's offsets topic leaves it: records that are chosen, or encrypted, under their offsets.

What does not leave still takes its offset. A batch of which nothing is left goes as one without records, as the cleaner
leaves them, and the follower fills its offsets; several in a row go as one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Final

from isthmus_protocol.cluster_ids import escaped
from isthmus_protocol.offsets_log import OFFSETS_TOPIC, UnknownRecord, decode_key
from isthmus_protocol.record_codec import Record, decode_records, encode_batch
from isthmus_protocol.records import NO_SEQUENCE, BatchHeader, Compression, Frame, seal, verify_crc
from isthmus_protocol.wire import MalformedFrame

COPY_PREFIX: Final = OFFSETS_TOPIC + "_"
"""Of the names that copies have; the source's cluster id follows."""
OMITTED_MAX: Final = 5000
"""Offsets of one batch without records: a longer gap would be filled inside a transaction (follower_log)."""

Treatment = Callable[[str, Record], Record | None]
"""A group and a record of it: the record that leaves the source, None where none does."""


_ID_CHARS_MAX: Final = 249 - len(COPY_PREFIX)
"""A topic's name has 249 characters at most."""
_IN_NAMES: Final = re.compile(rf"[a-zA-Z0-9._-]{{1,{_ID_CHARS_MAX}}}")


def needs_escape(source_cluster_id: str) -> bool:
    """Whether no topic can have the id in its name as it is."""
    return _IN_NAMES.fullmatch(source_cluster_id) is None


def copy_name(source_cluster_id: str) -> str:
    """The name that a source's offsets topic has on the target (KIP-986). An id that topics cannot have in their names
    is escaped."""
    if not needs_escape(source_cluster_id):
        return COPY_PREFIX + source_cluster_id
    return COPY_PREFIX + escaped(source_cluster_id, _ID_CHARS_MAX, ".")


def treated(batches: Iterable[tuple[Frame, BatchHeader, bool]], treatment: Treatment | None) -> list[Frame]:
    """The batches that leave the source. ``batches``: (batch, header, whether its transaction was aborted), in order.

    An aborted commit never counted: nothing of it leaves. ``treatment`` None: all else does, as it is. A record of a
    kind that is not known belongs to nobody knows whom, and does not leave under a treatment. Raises BatchError.
    """
    found: list[Frame] = []
    omitted: BatchHeader | None = None
    for batch, header, aborted in batches:
        leaving = None if aborted and not header.is_control else _left(batch, header, treatment)
        if leaving is not None:
            if omitted is not None:
                found.append(_without_records(omitted))
                omitted = None
            found.append(leaving)
        elif (
            omitted is not None
            and header.leader_epoch == omitted.leader_epoch
            and header.next_offset - omitted.base_offset <= OMITTED_MAX
        ):
            omitted = omitted._replace(
                last_offset_delta=header.last_offset - omitted.base_offset, max_timestamp=header.max_timestamp
            )
        else:
            if omitted is not None:
                found.append(_without_records(omitted))
            omitted = header
    if omitted is not None:
        found.append(_without_records(omitted))
    return found


def group_of(record: Record) -> str | None:
    """The group that a record of the offsets topic belongs to; None where that is not known."""
    try:
        return decode_key(record.key or b"").group
    except (UnknownRecord, MalformedFrame):
        return None


def _left(batch: Frame, header: BatchHeader, treatment: Treatment | None) -> Frame | None:
    if treatment is None or header.is_control or not header.record_count:
        return batch
    verify_crc(batch)  # a new CRC would bless bytes that were damaged on the way
    records = []
    for record in decode_records(batch):
        group = group_of(record)
        left = None if group is None else treatment(group, record)
        if left is not None:
            records.append(left)
    if not records:
        return None
    return encode_batch(records, header, compression=Compression.NONE, last_offset=header.last_offset)


def _without_records(header: BatchHeader) -> bytes:
    return seal(
        header._replace(
            attributes=0,
            base_timestamp=header.max_timestamp,
            producer_id=-1,
            producer_epoch=-1,
            base_sequence=NO_SEQUENCE,
            record_count=0,
        ),
        b"",
    )
