"""Which partition a message goes to where a topic has another number of them at the target.

By its key, as producers of Java choose by default, so that messages of one key stay in one partition there, in their
order. One without a key goes to the partition of its own partition's number, modulo.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Final

from isthmus_protocol.record_codec import Record, decode_records, encode_batch
from isthmus_protocol.records import read_header

_SEED: Final = 0x9747B28C
_M: Final = 0x5BD1E995
_BITS: Final = 0xFFFFFFFF


@lru_cache(maxsize=16 * 1024)
def murmur2(key: bytes) -> int:
    """The hash that Kafka's default partitioner takes of a key, as 32 bits without a sign."""
    length = len(key)
    hashed = _SEED ^ length
    whole = length & ~3
    for at in range(0, whole, 4):
        word = int.from_bytes(key[at : at + 4], "little") * _M & _BITS
        word ^= word >> 24
        hashed = hashed * _M & _BITS ^ word * _M & _BITS
    if whole < length:
        hashed = (hashed ^ int.from_bytes(key[whole:], "little")) * _M & _BITS
    hashed ^= hashed >> 13
    hashed = hashed * _M & _BITS
    return hashed ^ hashed >> 15


def partition_of(key: bytes | None, partition: int, partitions: int) -> int:
    """``partition``: where the message is at the source; ``partitions``: how many there are at the target."""
    return partition % partitions if key is None else (murmur2(key) & 0x7FFFFFFF) % partitions


def by_key(batches: Iterable[bytes], partition: int, partitions: int) -> dict[int, list[bytes]]:
    """Batches of no producer at base offset 0, divided into such by the target's partitions. Raises BatchError."""
    divided: dict[int, list[bytes]] = {}
    for batch in batches:
        header = read_header(batch)
        found: dict[int, list[Record]] = {}
        for record in decode_records(batch):
            records = found.setdefault(partition_of(record.key, partition, partitions), [])
            records.append(record._replace(offset=len(records)))
        for number, records in found.items():
            divided.setdefault(number, []).append(encode_batch(records, header))
    return divided
