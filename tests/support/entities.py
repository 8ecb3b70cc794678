"""Random messages of any API and version as kio's classes, their bytes with unknown tagged fields, and the values of
their fields as ``isthmus_protocol.locate`` gives them.
"""

from __future__ import annotations

import datetime
import random
import struct
import uuid
from dataclasses import MISSING, Field, fields, is_dataclass
from types import UnionType
from typing import Any, get_args, get_origin

from kio.schema.errors import ErrorCode
from kio.serial._implicit_defaults import get_tagged_field_default

from isthmus_protocol.locate import Want
from isthmus_protocol.schema import EntitySpec, request_flexible, response_header_flexible
from isthmus_protocol.wire import write_uvarint

EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
MILLISECOND = datetime.timedelta(milliseconds=1)

_INTEGERS = {
    "int8": "b",
    "int16": "h",
    "int32": "i",
    "int64": "q",
    "uint8": "B",
    "uint16": "H",
    "uint32": "I",
    "uint64": "Q",
}


def is_array(field: Field[Any]) -> bool:
    return get_origin(_without_none(field.type)[0]) is tuple


def element_type(field: Field[Any]) -> Any:
    inner, _ = _without_none(field.type)
    return _without_none(get_args(inner)[0])[0] if get_origin(inner) is tuple else inner


def _without_none(annotation: Any) -> tuple[Any, bool]:
    if get_origin(annotation) is not UnionType:
        return annotation, False
    return next(arg for arg in get_args(annotation) if arg is not type(None)), True


class RandomEntities:
    """Makes entities from a seeded generator: nulls, empty ones, defaults and large values come up often."""

    def __init__(self, seed: int | str, array_max: int = 3, array_min: int = 0) -> None:
        self.rng = random.Random(seed)
        self.array_min = array_min
        """With at least one element arrays are never null, and tagged ones never absent."""
        self.array_max = max(array_max, array_min)

    def entity(self, entity_type: Any) -> Any:
        return entity_type(**{field.name: self._field(field) for field in fields(entity_type)})

    def _field(self, field: Field[Any]) -> Any:
        rng = self.rng
        tagged = "tag" in field.metadata
        if is_array(field) and self.array_min:
            return self._array(field)
        if tagged and rng.random() < 0.4:
            return tagged_default(field)
        _, nullable = _without_none(field.type)
        kafka_type = field.metadata.get("kafka_type", "")
        if nullable and not tagged and kafka_type not in ("uuid", "datetime_i64") and rng.random() < 0.25:
            return None
        return self._array(field) if is_array(field) else self._element(field, kafka_type)

    def _array(self, field: Field[Any]) -> Any:
        kafka_type = field.metadata.get("kafka_type", "")
        count = self.rng.randint(self.array_min, self.array_max)
        return tuple(self._element(field, kafka_type) for _ in range(count))

    def _element(self, field: Field[Any], kafka_type: str) -> Any:
        rng, inner = self.rng, element_type(field)
        if is_dataclass(inner):
            return self.entity(inner)
        if kafka_type in _INTEGERS:
            bits = 8 * struct.calcsize(_INTEGERS[kafka_type])
            signed = kafka_type.startswith("int")
            low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
            return rng.choice((low, high, 0, 1, rng.randint(low, high)))
        match kafka_type:
            case "bool":
                return rng.random() < 0.5
            case "float64":
                return rng.uniform(-1e9, 1e9)
            case "uuid":
                return None if rng.random() < 0.2 and not is_array(field) else uuid.UUID(int=rng.getrandbits(128) | 1)
            case "error_code":
                return rng.choice(list(ErrorCode))
            case "timedelta_i32" | "timedelta_i64":
                return rng.randint(-(1 << 31), (1 << 31) - 1) * MILLISECOND
            case "datetime_i64":
                return EPOCH + rng.randint(0, 1 << 40) * MILLISECOND
            case "string":
                return self.text()
            case "bytes" | "records":
                return rng.randbytes(rng.choice((0, 1, 61, 127, 128, 300, 20_000 if rng.random() < 0.05 else 2)))
        raise NotImplementedError(kafka_type)

    def text(self) -> str:
        rng = self.rng
        return rng.choice(("", "a", "orders-", "ä€𝄞")) + "x" * rng.choice((0, 3, 126, 127, 128, 200))


def tagged_default(field: Field[Any]) -> Any:
    return field.default if field.default is not MISSING else get_tagged_field_default(field)


class Encoder:
    """Encodes kio's entities, with unknown tagged fields in every struct where a generator for them is given."""

    def __init__(self, unknown_tags: random.Random | None = None) -> None:
        self._unknown_tags = unknown_tags

    def request(self, entity: Any, correlation_id: int = 7, client_id: str | None = "client") -> bytes:
        api_key, version = int(entity.__api_key__), int(entity.__version__)
        raw = None if client_id is None else client_id.encode()
        head = struct.pack(">hhih", api_key, version, correlation_id, -1 if raw is None else len(raw)) + (raw or b"")
        if request_flexible(api_key, version):
            head += self._section([])
        return self._frame(head + self.body(entity))

    def response(self, entity: Any, correlation_id: int = 7) -> bytes:
        head = struct.pack(">i", correlation_id)
        if response_header_flexible(int(entity.__api_key__), int(entity.__version__)):
            head += self._section([])
        return self._frame(head + self.body(entity))

    def message(self, entity: Any, kind: str) -> bytes:
        return self.request(entity) if kind == "request" else self.response(entity)

    @staticmethod
    def _frame(content: bytes) -> bytes:
        return struct.pack(">i", len(content)) + content

    def body(self, entity: Any) -> bytes:
        flexible = entity.__flexible__
        untagged, tagged = [], []
        for field in fields(entity):
            value = getattr(entity, field.name)
            if "tag" not in field.metadata:
                untagged.append(self._field(field, value, flexible))
            elif value != tagged_default(field):
                tagged.append((field.metadata["tag"], self._field(field, value, flexible, tagged=True)))
        return b"".join(untagged) + (self._section(tagged) if flexible else b"")

    def _section(self, tagged: list[tuple[int, bytes]]) -> bytes:
        rng = self._unknown_tags
        if rng is not None and rng.random() < 0.5:
            tagged = tagged + [(tag, rng.randbytes(rng.choice((0, 1, 130)))) for tag in rng.sample((50, 99, 300), 2)]
        parts = [write_uvarint(len(tagged))]
        for tag, data in sorted(tagged):
            parts += (write_uvarint(tag), write_uvarint(len(data)), data)
        return b"".join(parts)

    def _field(self, field: Field[Any], value: Any, flexible: bool, tagged: bool = False) -> bytes:
        if is_array(field):
            count = -1 if value is None else len(value)
            prefix = write_uvarint(count + 1) if flexible else struct.pack(">i", count)
            return prefix + b"".join(self._element(field, element, flexible) for element in value or ())
        inner, nullable = _without_none(field.type)
        if is_dataclass(inner) and nullable and not tagged:
            return b"\xff" if value is None else b"\x01" + self.body(value)
        return self._element(field, value, flexible)

    def _element(self, field: Field[Any], value: Any, flexible: bool) -> bytes:
        if is_dataclass(element_type(field)):
            return self.body(value)
        kafka_type = field.metadata["kafka_type"]
        plain = plain_value(kafka_type, value)
        if kafka_type in ("string", "bytes", "records"):
            length = -1 if plain is None else len(plain)
            if flexible:
                return write_uvarint(length + 1) + (plain or b"")
            return struct.pack(">h" if kafka_type == "string" else ">i", length) + (plain or b"")
        if kafka_type == "uuid":
            return bytes(plain)
        code = {"bool": "?", "float64": "d", "error_code": "h", "timedelta_i32": "i"}.get(kafka_type)
        return struct.pack(">" + (code or _INTEGERS.get(kafka_type, "q")), plain)


def plain_value(kafka_type: str, value: Any) -> Any:
    """A single value of kio's as ``locate`` gives it."""
    match kafka_type:
        case "string":
            return None if value is None else value.encode()
        case "uuid":
            return bytes(16) if value is None else value.bytes
        case "error_code":
            return int(value)
        case "timedelta_i32" | "timedelta_i64":
            return round(value / MILLISECOND)
        case "datetime_i64":
            return -1 if value is None else round((value - EPOCH) / MILLISECOND)
    return value


def located(entity: Any, wants: tuple[Want, ...]) -> Any:
    """What ``locate`` must find of ``wants`` (values, no spans) in an entity's message."""
    found = []
    known = {field.name: field for field in fields(entity)}
    for want in wants:
        names, inside = (want, ()) if isinstance(want, str) else want
        field = next((known[name] for name in names.split("|") if name in known), None)
        found.append(None if field is None else _located_field(field, getattr(entity, field.name), inside))
    return found[0] if len(found) == 1 else tuple(found)


def _located_field(field: Field[Any], value: Any, wants: tuple[Want, ...]) -> Any:
    if "tag" in field.metadata and value == tagged_default(field):
        return None  # Not on the wire.
    if is_array(field):
        return None if value is None else [_located_element(field, element, wants) for element in value]
    return _located_element(field, value, wants)


def _located_element(field: Field[Any], value: Any, wants: tuple[Want, ...]) -> Any:
    if wants:
        return None if value is None else located(value, wants)
    return plain_value(field.metadata["kafka_type"], value)


def readable(found: Any) -> Any:
    """What ``locate`` found with bytes in the place of memoryviews, to be compared."""
    if isinstance(found, memoryview):
        return bytes(found)
    if isinstance(found, tuple):
        return tuple(readable(inside) for inside in found)
    if isinstance(found, list):
        return [readable(inside) for inside in found]
    return found


def all_wants(spec: EntitySpec) -> tuple[Want, ...]:
    """Every field of a message, structs inside it included."""
    return tuple(
        field.name if field.entity is None else (field.name, all_wants(field.entity))
        for field in (*spec.fields, *spec.tagged)
        if field.entity is None or all_wants(field.entity)
    )


def random_wants(spec: EntitySpec, rng: random.Random) -> tuple[Want, ...]:
    """Some fields of a message, in any order."""
    wants: list[Want] = []
    for field in rng.sample(candidates := (*spec.fields, *spec.tagged), len(candidates)):
        if rng.random() < 0.5:
            continue
        if field.entity is None:
            wants.append(field.name)
        elif inside := random_wants(field.entity, rng):
            wants.append((field.name, inside))
    return tuple(wants)
