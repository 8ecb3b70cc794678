"""Records in Confluent's wire format: a zero, the schema's id in four bytes, and what the schema describes.

As much of each encoding as the story of schemas needs, so that a record is read by nothing but what a registry says of
its id: records of strings, longs and other records in Avro, objects in JSON, one message of varints in Protobuf.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

MAGIC = 0


class Known(NamedTuple):
    """What a registry says of an id."""

    kind: str
    text: str
    references: list[str]
    """Texts of what it refers to."""


def encode(id_: int, schema: Known, value: dict[str, Any]) -> bytes:
    return bytes([MAGIC]) + id_.to_bytes(4, "big") + _encoders[schema.kind](schema, value)


def decode(record: bytes, ask: Callable[[int], Known]) -> Any:
    assert record[0] == MAGIC
    schema = ask(int.from_bytes(record[1:5], "big"))
    body = iter(record[5:])
    value = _decoders[schema.kind](schema, body)
    assert next(body, None) is None, "bytes are left over: it was another schema"
    return value


# ---- Avro ----


def _types(schema: Known) -> dict[str, Any]:
    found = [json.loads(each) for each in (*schema.references, schema.text)]
    return {f"{each['namespace']}.{each['name']}": each for each in found}


def _avro(schema: Known, value: Any) -> bytes:
    return _avro_of(json.loads(schema.text), _types(schema), value)


def _avro_of(kind: Any, types: dict[str, Any], value: Any) -> bytes:
    kind = types.get(kind, kind) if isinstance(kind, str) else kind
    if isinstance(kind, dict):
        return b"".join(_avro_of(field["type"], types, value[field["name"]]) for field in kind["fields"])
    if kind == "string":
        return _varint(len(value.encode()) << 1) + value.encode()
    assert kind in ("int", "long")
    return _varint(value << 1 if value >= 0 else (-value << 1) - 1)


def _from_avro(schema: Known, body: Iterator[int]) -> Any:
    return _from_avro_of(json.loads(schema.text), _types(schema), body)


def _from_avro_of(kind: Any, types: dict[str, Any], body: Iterator[int]) -> Any:
    kind = types.get(kind, kind) if isinstance(kind, str) else kind
    if isinstance(kind, dict):
        return {field["name"]: _from_avro_of(field["type"], types, body) for field in kind["fields"]}
    number = _from_varint(body)
    if kind == "string":
        return bytes(next(body) for _ in range(number >> 1)).decode()
    assert kind in ("int", "long")
    return (number >> 1) ^ -(number & 1)


# ---- JSON and Protobuf ----


def _from_json(schema: Known, body: Iterator[int]) -> Any:
    value = json.loads(bytes(body))
    assert value.keys() <= json.loads(schema.text)["properties"].keys()
    return value


def _fields(schema: Known) -> dict[str, int]:
    """Of the first message: numbers of its fields, which are all integers."""
    message = schema.text[schema.text.index("message ") :]
    return {name: int(number) for name, number in re.findall(r"int64 (\w+) = (\d+);", message)}


def _protobuf(schema: Known, value: dict[str, int]) -> bytes:
    fields = _fields(schema)
    # The path to the message in its file: the first one is a single zero.
    return b"\0" + b"".join(_varint(fields[name] << 3) + _varint(number) for name, number in value.items())


def _from_protobuf(schema: Known, body: Iterator[int]) -> Any:
    assert next(body) == 0
    names = {number: name for name, number in _fields(schema).items()}
    value = {}
    for first in body:
        value[names[first >> 3]] = _from_varint(body)
    return value


def _varint(number: int) -> bytes:
    made = bytearray()
    while number > 0x7F:
        made.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*made, number])


def _from_varint(body: Iterator[int]) -> int:
    number = shift = 0
    while (byte := next(body)) & 0x80:
        number |= (byte & 0x7F) << shift
        shift += 7
    return number | byte << shift


_encoders: dict[str, Callable[[Known, Any], bytes]] = {
    "AVRO": _avro,
    "JSON": lambda _, value: json.dumps(value).encode(),
    "PROTOBUF": _protobuf,
}
_decoders: dict[str, Callable[[Known, Iterator[int]], Any]] = {
    "AVRO": _from_avro,
    "JSON": _from_json,
    "PROTOBUF": _from_protobuf,
}
