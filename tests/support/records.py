"""Records and batches of all kinds, for tests that take batches apart and put them together."""

from __future__ import annotations

from hypothesis import strategies as st

from isthmus_protocol.record_codec import Record, encode_batch
from isthmus_protocol.record_compression import compress
from isthmus_protocol.records import (
    HEADER_SIZE,
    LOG_APPEND_TIME_BIT,
    BatchHeader,
    Compression,
    seal,
    whole_header,
)
from isthmus_protocol.varints import varint

MIB = 1 << 20
NOW = 1_700_000_000_000
PLAIN = BatchHeader(0, 49, -1, 2, 0, 0, 0, 0, 0, -1, -1, -1, 1)

contents = st.none() | st.binary(max_size=300)
header_lists = st.lists(st.tuples(st.text(max_size=20), contents), max_size=4).map(tuple)
# Half of what a timestamp could be, so that the difference of any two fits a varlong.
timestamps = st.integers(-(2**62), 2**62 - 1) | st.integers(NOW - 1000, NOW + 1000)


@st.composite
def record_lists(draw: st.DrawFn, holes: bool = True, size_max: int = 12) -> list[Record]:
    offset = draw(st.integers(0, 2**40))
    records = []
    for _ in range(draw(st.integers(1, size_max))):
        records.append(
            Record(
                offset,
                draw(timestamps),
                draw(contents),
                draw(contents),
                draw(header_lists),
                draw(st.integers(0, 255)),
            )
        )
        offset += draw(st.integers(1, 70)) if holes else 1
    return records


def batch_of(records: list[Record], attributes: int = 0, **changes: int) -> bytes:
    """Encodes `records`, then sets what encode_batch never sets (timestamp type, control, delete horizon)."""
    batch = encode_batch(records, PLAIN._replace(attributes=attributes))
    header = whole_header(batch)
    return seal(
        header._replace(attributes=header.attributes | attributes)._replace(**changes),
        batch[HEADER_SIZE:],
    )


def minimal(offset_delta: int, value: bytes) -> bytes:
    """A record without a key, at the batch's base timestamp."""
    body = b"".join((b"\0\0", varint(offset_delta), b"\x01", varint(len(value)), value, b"\0"))
    return varint(len(body)) + body


def large_inside(compression: Compression, values: int = 1, size: int = 140 * MIB) -> bytes:
    """A batch with append time, some kilobytes long, whose records are of ``size`` in all: more than is ever decoded at
    once, by default."""
    payload = b"".join(minimal(number, bytes(size // values)) for number in range(values))
    header = PLAIN._replace(
        last_offset_delta=values - 1,
        record_count=values,
        base_timestamp=NOW,
        max_timestamp=NOW + 9,
        attributes=LOG_APPEND_TIME_BIT | compression,
    )
    return seal(header, compress(payload, compression))
