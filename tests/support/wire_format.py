"""Records in Confluent's wire format: a zero, the schema's id in four bytes, and what the schema describes.

As much of each encoding as the stories of schemas need, so that a record is read by nothing but what a registry says of
its id: records of strings, longs and other records in Avro, objects in JSON, messages of varints and other messages in
Protobuf. By hand, since Confluent's own serializers want packages that nothing else here does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

MAGIC = 0


class Known(NamedTuple):
    """What a registry says of an id."""

    kind: str
    text: str
    references: Mapping[str, Known] = MappingProxyType({})
    """What it refers to, by the names in its text."""


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
    own = json.loads(schema.text)
    found = {f"{own['namespace']}.{own['name']}": own}
    for each in schema.references.values():
        found |= _types(each)
    return found


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
    _check(schema, value)
    return value


def _check(schema: Known, value: Any) -> None:
    properties = json.loads(schema.text)["properties"]
    assert value.keys() <= properties.keys()
    for name, each in value.items():
        if (referred := properties[name].get("$ref")) is not None:
            _check(schema.references[referred], each)
        else:
            assert (properties[name]["type"], type(each)) == ("string", str)


Messages = dict[str, dict[int, tuple[str, str]]]
"""By name: the type and name of each field, by its number."""


def _messages(schema: Known) -> Messages:
    """Of a file, in its order, and of those that it imports."""
    found: Messages = {}
    for name, body in re.findall(r"message (\w+) \{([^}]*)\}", schema.text):
        found[name] = {int(number): (kind, field) for kind, field, number in re.findall(r"(\w+) (\w+) = (\d+);", body)}
    for name in re.findall(r'import "(.+)";', schema.text):
        found = _messages(schema.references[name]) | found
    return found


def _first(schema: Known) -> str:
    found = re.search(r"message (\w+)", schema.text)
    assert found is not None
    return found[1]


def _protobuf(schema: Known, value: dict[str, Any]) -> bytes:
    # The path to the message in its file: the first one is a single zero.
    return b"\0" + _protobuf_of(_first(schema), _messages(schema), value)


def _protobuf_of(message: str, messages: Messages, value: dict[str, Any]) -> bytes:
    made = b""
    for number, (kind, name) in messages[message].items():
        if kind in messages:
            inner = _protobuf_of(kind, messages, value[name])
            made += _varint(number << 3 | 2) + _varint(len(inner)) + inner
        else:
            assert kind == "int64"
            made += _varint(number << 3) + _varint(value[name])
    return made


def _from_protobuf(schema: Known, body: Iterator[int]) -> Any:
    assert next(body) == 0
    return _from_protobuf_of(_first(schema), _messages(schema), body)


def _from_protobuf_of(message: str, messages: Messages, body: Iterator[int]) -> Any:
    value = {}
    for first in body:
        kind, name = messages[message][first >> 3]
        number = _from_varint(body)
        if kind in messages:
            assert first & 7 == 2
            value[name] = _from_protobuf_of(kind, messages, iter(bytes(next(body) for _ in range(number))))
        else:
            assert (first & 7, kind) == (0, "int64")
            value[name] = number
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
