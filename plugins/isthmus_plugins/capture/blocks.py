"""The files of captured traffic: blocks of events, one behind the other.

    file      block ...                     named *.open while it is written, when it is sealed *.capture (requests
                                            with their answers) or *.links (what links do)
    block     magic "ISTHMCAP" | major, minor (2 bytes each) | size of the description (4) | size of the rows (4)
              | description (JSON, UTF-8) | rows | CRC-32C (4) of all before it

All numbers are big-endian. The description says what a row is: ``fields``, a list of ``[name, type]`` with types of
numpy (``>i8``, ``>i4``, ``>i2``, ``>f4``); ``rows``, how many; ``tables``, by field the texts that its numbers stand
for (-1: none); ``source``, what is the same for all rows (proxy, cluster). So a block can be read alone, and by
readers that do not know the fields: a new field is a new *minor* version. Readers refuse a newer *major* version.

A block is written at once. A crash leaves at most half of one at the end of an ``*.open`` file.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from crc32c import crc32c

MAGIC: Final = b"ISTHMCAP"
MAJOR: Final = 1
MINOR: Final = 1
_HEAD: Final = struct.Struct(">8sHHII")
_CRC: Final = struct.Struct(">I")

FIELDS: Final = (
    ("time_us", "q"),  # when the request came, wall clock
    ("correlation_id", "i"),
    ("request_bytes", "i"),
    ("response_bytes", "i"),
    ("records", "i"),  # in its batches; -1: not known
    ("batches", "i"),
    ("batch_bytes", "i"),
    ("base_sequence", "i"),
    ("base_offset", "q"),
    ("proxy_us", "i"),  # from the request's arrival to when it was forwarded
    ("broker_us", "i"),  # from there to the first bytes of the broker's answer; -1: the proxy answered
    ("gate_us", "i"),  # from there to when the answer could go out
)
"""What differs from one request to the next."""
COMMON_FIELDS: Final = (
    ("session", "q"),
    ("api_key", "h"),
    ("api_version", "h"),
    ("broker_id", "i"),  # behind the connection; -1: a bootstrap connection
    ("listener", "i"),  # the proxy's own address that the client came to
    ("client_address", "i"),
    ("client_id", "i"),
    ("software", "i"),
    ("principal", "i"),
    ("part", "i"),  # which partition of the request this is; requests without any have one row
    ("parts", "i"),  # how many there are
    ("topic", "i"),
    ("partition", "i"),
    ("group_id", "i"),
    ("transactional_id", "i"),
    ("acks", "h"),
    ("error_code", "h"),
    ("compression", "h"),
    ("producer_id", "q"),
    ("producer_epoch", "h"),
    ("partial", "h"),  # 1: not all of it was seen
)
"""What many requests of a connection have in common."""
TEXTS: Final = frozenset(
    ("listener", "client_address", "client_id", "software", "principal", "topic", "group_id", "transactional_id")
)
"""Fields that stand for texts."""

LINK_FIELDS: Final = (
    ("time_us", "q"),
    ("base_offset", "q"),  # appended, confirmed: from here
    ("end_offset", "q"),  # to here, exclusive
    ("source_end", "q"),  # state: where both logs end
    ("follower_end", "q"),
    ("batches", "i"),  # appended
    ("bytes", "q"),
    ("took_us", "q"),  # appended: the request; confirmed: since the oldest batch of it was sent
    ("lag", "q"),  # state: offsets that the follower lacks
    ("lag_ms", "q"),  # age of the oldest of them
)
LINK_COMMON_FIELDS: Final = (
    ("kind", "i"),  # appended, confirmed, state
    ("link", "i"),
    ("role", "i"),  # of the partition here; none: the link as a whole
    ("remote_cluster", "i"),
    ("topic", "i"),
    ("state", "i"),
    ("reason", "i"),
    ("partition", "i"),
)
LINK_TEXTS: Final = frozenset(("kind", "link", "role", "remote_cluster", "topic", "state", "reason"))
_NUMPY: Final = {"q": ">i8", "i": ">i4", "h": ">i2"}
Fields = Sequence[tuple[str, str]]


class Layout:
    """What a row is: numbers of its own, and behind them what it has in common with others, which is packed once."""

    def __init__(self, own: Fields, common: Fields, texts: frozenset[str]) -> None:
        self.fields = (*own, *common)
        self.own = _packed_as(own)
        self.common = _packed_as(common)
        self.row = _packed_as(self.fields)
        self.described = [[name, _NUMPY[kind]] for name, kind in self.fields]
        self.texts = tuple((name, at) for at, (name, _) in enumerate(common) if name in texts)
        """Fields that stand for texts, and where they are in what is common."""


def _packed_as(fields: Fields) -> struct.Struct:
    return struct.Struct(">" + "".join(kind for _, kind in fields))


REQUESTS: Final = Layout(FIELDS, COMMON_FIELDS, TEXTS)
LINKS: Final = Layout(LINK_FIELDS, LINK_COMMON_FIELDS, LINK_TEXTS)


class NewerFormat(Exception):
    """A file was written by a newer version."""


class Block:
    """A block that is being filled."""

    def __init__(self, source: Mapping[str, Any], layout: Layout = REQUESTS) -> None:
        self._source = source
        self._layout = layout
        self._pack_own = layout.own.pack
        self._rows: list[bytes] = []
        self._tables: dict[str, dict[str, int]] = {name: {} for name, _ in layout.texts}
        self._packed: dict[tuple[Any, ...], bytes] = {}
        """What rows have in common, as it stands in them."""

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, own: Iterable[int], common: tuple[Any, ...]) -> int:
        """Add a row: the values of the layout's fields, in their order, texts as they are (None: none).

        Returns how many there are now."""
        packed = self._packed.get(common)
        if packed is None:
            packed = self._packed[common] = self._layout.common.pack(*self._numbered(common))
        rows = self._rows
        rows.append(self._pack_own(*own) + packed)
        return len(rows)

    def _numbered(self, common: Iterable[Any]) -> list[Any]:
        values = list(common)
        for name, at in self._layout.texts:
            table, text = self._tables[name], values[at]
            values[at] = -1 if text is None else table.setdefault(text, len(table))
        return values

    def sealed(self) -> bytes:
        """The block as it is written."""
        tables = {name: list(table) for name, table in self._tables.items()}
        return sealed_block(self._layout, self._source, tables, len(self._rows), b"".join(self._rows))


def sealed_block(
    layout: Layout, source: Mapping[str, Any], tables: Mapping[str, Sequence[str]], rows: int, data: bytes
) -> bytes:
    """A block of so many rows, packed as the layout's ``row`` does, whose texts stand in tables by field."""
    described = {"fields": layout.described, "rows": rows, "tables": tables, "source": source}
    description = json.dumps(described, separators=(",", ":")).encode()
    block = _HEAD.pack(MAGIC, MAJOR, MINOR, len(description), len(data)) + description + data
    return block + _CRC.pack(crc32c(block))


def whole_blocks(data: bytes) -> Iterator[tuple[int, dict[str, Any], bytes]]:
    """(Where it ends, description, rows) of each block up to the first that is not whole. Raises NewerFormat."""
    position = 0
    while position + _HEAD.size <= len(data):
        magic, major, _, described, size = _HEAD.unpack_from(data, position)
        if magic != MAGIC:
            return
        if major > MAJOR:
            raise NewerFormat(f"captured traffic in format {major}, this version reads {MAJOR}: upgrade Isthmus")
        rows_at = position + _HEAD.size + described
        end = rows_at + size
        if end + _CRC.size > len(data) or _CRC.unpack_from(data, end)[0] != crc32c(data[position:end]):
            return
        description = json.loads(data[position + _HEAD.size : rows_at])
        position = end + _CRC.size
        yield position, description, data[rows_at:end]
