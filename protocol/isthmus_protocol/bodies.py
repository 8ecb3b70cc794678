"""Decodes message bodies into kio's classes.

kio's own native decoder is not used on bytes that came over a network, for what it does with them (0.6.5, measured):

- an array count larger than memory *aborts the process*: six bytes from anybody end the proxy;
- an unknown tagged field is an error, although KIP-482 has receivers skip it, so one newer peer breaks decoding;
- so is an error code that it does not list, a boolean other than 0 and 1, and a point in time that Python has no
  datetime for (-1 in a delegation token's or a transaction's answer, which brokers do send).

This decoder is compiled from the same dataclasses (the message schemas as kio generates them), and a test compares it
with kio's for every API, version and direction. It refuses a count that exceeds the bytes left, or what its caller
takes on (``elements``), skips unknown tags, and never raises anything but :class:`MalformedFrame`. What is decoded and
encoded again loses unknown tagged fields; whoever must keep them edits the frame instead (``locate``).
"""

from __future__ import annotations

import datetime
import struct
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from functools import cache
from typing import Any, cast, get_args
from uuid import UUID

from kio.index import load_entity_module
from kio.schema.errors import ErrorCode
from kio.schema.index import api_key_map, schema_name_map
from kio.serial._implicit_defaults import get_tagged_field_default
from kio.serial._introspect import (
    EntityField,
    EntityTupleField,
    classify_field,
    get_field_tag,
    get_schema_field_type,
    is_optional,
)
from kio.static.constants import EntityType

from isthmus_protocol.elements import bound_here
from isthmus_protocol.wire import MalformedFrame, check_tags, read_uvarint

Read = Callable[[bytes, int], tuple[Any, int]]
"""Reads one value: (bytes, position) -> (value, position after it)."""

EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_LAST_DATETIME = datetime.datetime.max.replace(microsecond=999_000, tzinfo=datetime.UTC)
_FIRST_DATETIME = datetime.datetime.min.replace(tzinfo=datetime.UTC)
_LONGEST_TIMEDELTA = datetime.timedelta.max - datetime.timedelta(days=1)
_MILLISECOND = datetime.timedelta(milliseconds=1)


class UnknownErrorCode(int):
    """An error code that a newer peer sent. Looks like a member of kio's ``ErrorCode`` where code reads one."""

    retriable = False

    @property
    def value(self) -> int:
        return int(self)

    @property
    def name(self) -> str:
        return f"unknown_error_code_{int(self)}"

    def __repr__(self) -> str:
        return f"<UnknownErrorCode {int(self)}>"


_ERROR_CODES = {int(code): code for code in ErrorCode}


def error_code(code: int) -> ErrorCode:
    """The ``ErrorCode`` of a number. Numbers that kio does not list keep their value (:class:`UnknownErrorCode`)."""
    known = _ERROR_CODES.get(code)
    return known if known is not None else cast(ErrorCode, UnknownErrorCode(code))


def decode_body(entity_type: type[Any], data: bytes, position: int, rest_ignored: bool = False) -> Any:
    """The message of ``entity_type`` (a kio class) that fills ``data`` from ``position`` to the end.

    Raises MalformedFrame, also for bytes left over where they are not ignored.
    """
    bound = bound_here()
    if bound is not None:
        bound.begin()
    try:
        value, end = _entity_reader(cast(Any, entity_type))(data, position)
    # struct: the bytes end early; index: a varint or boolean does; unicode: a string is no UTF-8.
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise MalformedFrame(f"{_name(entity_type)}: {error}") from error
    if end != len(data) and not rest_ignored:
        raise MalformedFrame(f"{_name(entity_type)}: {len(data) - end} bytes left over")
    return value


def _name(entity_type: type[Any]) -> str:
    return f"{entity_type.__name__} v{entity_type.__version__}"


# --- Numbers ---


def _fixed(format_: str) -> Read:
    layout = struct.Struct(">" + format_)
    unpack, size = layout.unpack_from, layout.size

    def read(data: bytes, position: int) -> tuple[Any, int]:
        return unpack(data, position)[0], position + size

    return read


def _read_bool(data: bytes, position: int) -> tuple[bool, int]:
    return data[position] != 0, position + 1


_read_int16 = _fixed("h")
_read_int32 = _fixed("i")
_read_int64 = _fixed("q")


def _read_error_code(data: bytes, position: int) -> tuple[ErrorCode, int]:
    code, end = _read_int16(data, position)
    return error_code(code), end


def _read_uuid(data: bytes, position: int) -> tuple[UUID | None, int]:
    end = _end(data, position, 16)
    raw = data[position:end]
    return (UUID(bytes=raw) if raw != _NO_UUID else None), end


_NO_UUID = bytes(16)


# --- Times: out of Python's range they are clamped, as what they say ("never") stays true. ---


def _read_timedelta_i32(data: bytes, position: int) -> tuple[datetime.timedelta, int]:
    value, end = _read_int32(data, position)
    return datetime.timedelta(milliseconds=value), end


def _read_timedelta_i64(data: bytes, position: int) -> tuple[datetime.timedelta, int]:
    value, end = _read_int64(data, position)
    try:
        return value * _MILLISECOND, end
    except OverflowError:
        return (_LONGEST_TIMEDELTA if value > 0 else datetime.timedelta.min), end


def _read_datetime_i64(data: bytes, position: int) -> tuple[datetime.datetime, int]:
    value, end = _read_int64(data, position)
    try:
        return EPOCH + value * _MILLISECOND, end
    except OverflowError:
        return (_LAST_DATETIME if value > 0 else _FIRST_DATETIME), end


def _read_nullable_datetime_i64(data: bytes, position: int) -> tuple[datetime.datetime | None, int]:
    if data[position : position + 8] == b"\xff" * 8:
        return None, position + 8
    return _read_datetime_i64(data, position)


# --- Strings, bytes, arrays ---


def _end(data: bytes, position: int, size: int) -> int:
    end = position + size
    if end > len(data):
        raise MalformedFrame(f"{size} bytes announced at {position}, {len(data) - position} are left")
    return end


def _compact_length(data: bytes, position: int) -> tuple[int, int]:
    length, position = read_uvarint(data, position)
    return length - 1, position


def _sized(length: Read, nullable: bool, take: Callable[[bytes], Any]) -> Read:
    """A string or bytes: its length as ``length`` reads it (-1 for null), then the bytes."""

    def read(data: bytes, position: int) -> tuple[Any, int]:
        size, position = length(data, position)
        if size < 0:
            if size != -1 or not nullable:
                raise MalformedFrame(f"length {size} of a {'nullable' if nullable else 'non-nullable'} value")
            return None, position
        end = _end(data, position, size)
        return take(data[position:end]), end

    return read


def _decode_text(raw: bytes) -> str:
    return raw.decode()


def _array(length: Read, nullable: bool, item: Read) -> Read:
    def read(data: bytes, position: int) -> tuple[Any, int]:
        count, position = length(data, position)
        if count < 0:
            if count != -1 or not nullable:
                raise MalformedFrame(f"count {count} of a {'nullable' if nullable else 'non-nullable'} array")
            return None, position
        _check_count(data, position, count)
        bound = bound_here()
        if bound is not None:
            bound.charge(count)
        items = []
        for _ in range(count):
            value, position = item(data, position)
            items.append(value)
        return tuple(items), position

    return read


def _number_array(length: Read, nullable: bool, code: str) -> Read:
    """An array of plain numbers (replicas, partitions), unpacked in one go."""
    size = struct.calcsize(">" + code)

    def read(data: bytes, position: int) -> tuple[Any, int]:
        count, position = length(data, position)
        if count < 0:
            if count != -1 or not nullable:
                raise MalformedFrame(f"count {count} of a {'nullable' if nullable else 'non-nullable'} array")
            return None, position
        if count == 0:
            return (), position
        _check_count(data, position, count)
        bound = bound_here()
        if bound is not None:
            bound.charge_numbers(count)
        return struct.unpack_from(f">{count}{code}", data, position), position + count * size

    return read


def _check_count(data: bytes, position: int, count: int) -> None:
    # Every item takes at least a byte (a test checks the schemas), so a larger count is a lie.
    if count > len(data) - position:
        raise MalformedFrame(f"{count} items announced at {position}, {len(data) - position} bytes are left")


def _primitive_reader(kafka_type: str, flexible: bool, nullable: bool) -> Read:
    match kafka_type:
        case "string":
            return _sized(_compact_length if flexible else _read_int16, nullable, _decode_text)
        case "bytes" | "records":
            return _sized(_compact_length if flexible else _read_int32, nullable, bytes)
        case "datetime_i64":
            return _read_nullable_datetime_i64 if nullable else _read_datetime_i64
    return _FIXED_SIZE[kafka_type]


_NUMBER_CODES = {
    "int8": "b",
    "int16": "h",
    "int32": "i",
    "int64": "q",
    "uint8": "B",
    "uint16": "H",
    "uint32": "I",
    "uint64": "Q",
    "float64": "d",
}

_FIXED_SIZE: dict[str, Read] = {
    **{name: _fixed(code) for name, code in _NUMBER_CODES.items()},
    "bool": _read_bool,
    "uuid": _read_uuid,
    "error_code": _read_error_code,
    "timedelta_i32": _read_timedelta_i32,
    "timedelta_i64": _read_timedelta_i64,
}


# --- Entities ---


def _field_reader(field: Any, flexible: bool, tagged: bool) -> Read:
    kind = classify_field(field)
    # Of an array, kio's is_optional says whether its items may be null (a UUID of zeros), not the array itself.
    nullable = type(None) in get_args(field.type) if kind.is_array else is_optional(field)
    # A tagged value is left out when it is null, so on the wire it never is (KIP-482); strings and arrays may still
    # say so.
    match kind:
        case EntityField(type_):
            item = _entity_reader(type_)
            return _nullable_entity(item) if nullable and not tagged else item
        case EntityTupleField(type_):
            item = _entity_reader(type_)
        case _:
            item_nullable = nullable and not kind.is_array
            item = _primitive_reader(get_schema_field_type(field), flexible, item_nullable)
    if kind.is_array:
        length = _compact_length if flexible else _read_int32
        code = None if isinstance(kind, EntityTupleField) else _NUMBER_CODES.get(get_schema_field_type(field))
        return _array(length, nullable, item) if code is None else _number_array(length, nullable, code)
    return item


def _nullable_entity(item: Read) -> Read:
    """A struct that may be null: a marker byte, negative for null (KIP-893)."""

    def read(data: bytes, position: int) -> tuple[Any, int]:
        if data[position] >= 0x80:
            return None, position + 1
        return item(data, position + 1)

    return read


@cache
def _entity_reader(entity_type: Any) -> Read:
    flexible = entity_type.__flexible__
    plain: list[tuple[Callable[[Any, Any], None], Read]] = []
    tagged: dict[int, tuple[Callable[[Any, Any], None], Read]] = {}
    defaults: list[tuple[Callable[[Any, Any], None], Any]] = []
    for field in fields(entity_type):
        # The classes are frozen and slotted; their slots' descriptors fill them without a call of __init__.
        store = getattr(entity_type, field.name).__set__
        tag = get_field_tag(field)
        read = _field_reader(field, flexible, tag is not None)
        if tag is None:
            plain.append((store, read))
        else:
            tagged[tag] = (store, read)
            defaults.append((store, get_tagged_field_default(field)))
    new = object.__new__

    def read_entity(data: bytes, position: int) -> tuple[Any, int]:
        entity = new(entity_type)
        for store, read in plain:
            value, position = read(data, position)
            store(entity, value)
        if flexible:
            for store, default in defaults:
                store(entity, default)
            count, position = read_uvarint(data, position)
            check_tags(count)
            for _ in range(count):
                tag, position = read_uvarint(data, position)
                size, position = read_uvarint(data, position)
                end = _end(data, position, size)
                known = tagged.get(tag)
                if known is not None:
                    value, read_to = known[1](data, position)
                    if read_to != end:
                        raise MalformedFrame(f"{_name(entity_type)}: tag {tag} announces {size} bytes")
                    known[0](entity, value)
                position = end
        return entity, position

    return read_entity


# --- Building messages without naming every field ---


def blank(entity_type: Any, values: Mapping[str, Any]) -> Any:
    """A kio object with ``values``, and elsewhere the schema's defaults: zero, empty, null."""
    return entity_type(**{**_defaults(entity_type), **values})


@cache
def _defaults(entity_type: Any) -> Mapping[str, Any]:
    """Of the fields that have to be given. They never change, so messages share them."""
    return {each.name: _implicit_default(each) for each in fields(entity_type) if each.default is MISSING}


def _implicit_default(entity_field: Any) -> Any:
    kind = classify_field(entity_field)
    if kind.is_array:
        return ()
    if is_optional(entity_field):
        return None
    if isinstance(kind, EntityField):
        return blank(kind.type_, {})
    match get_schema_field_type(entity_field):
        case "string":
            return ""
        case "bytes" | "records":
            return b""
        case "bool":
            return False
        case "error_code":
            return error_code(0)
        case "timedelta_i32" | "timedelta_i64":
            return datetime.timedelta(0)
        case "datetime_i64":
            return EPOCH
        case _:
            return 0


def build(entity_type: Any, values: Mapping[str, Any]) -> Any:
    """A message from plain values: mappings for structs, sequences for arrays, milliseconds for times and durations.

    What is not given takes the schema's default. A field that another version of the message has, and this one does
    not, is left out; a name that no version has raises TypeError.
    """
    ways = _ways(entity_type)
    complete: dict[str, Any] = {}
    for name, value in values.items():
        if name in ways:
            complete[name] = None if value is None else ways[name](value)
        elif name not in _names_in_all_versions(entity_type):
            raise TypeError(f"no version of {entity_type.__name__} has a field {name!r}")
    return blank(entity_type, complete)


@cache
def _ways(entity_type: Any) -> Mapping[str, Callable[[Any], Any]]:
    """By field: what makes its value of a plain one."""
    return {entity_field.name: _way(entity_field) for entity_field in fields(entity_type)}


def _way(entity_field: Any) -> Callable[[Any], Any]:
    kind = classify_field(entity_field)
    if isinstance(kind, EntityField | EntityTupleField):
        type_ = kind.type_

        def entity(value: Any) -> Any:
            return build(type_, value) if isinstance(value, Mapping) else value

        return entity if isinstance(kind, EntityField) else lambda values: tuple(map(entity, values))
    if kind.is_array:
        return tuple
    match get_schema_field_type(entity_field):
        case "timedelta_i32" | "timedelta_i64":
            return lambda value: value * _MILLISECOND if _is_number(value) else value
        case "datetime_i64":
            return lambda value: EPOCH + value * _MILLISECOND if _is_number(value) else value
        case "error_code":
            return lambda value: error_code(value) if _is_number(value) else value
        case _:
            return lambda value: value


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@cache
def _names_in_all_versions(entity_type: Any) -> frozenset[str]:
    """The fields of the struct of this name in every version of its message."""
    name = api_key_map[entity_type.__api_key__]
    kind = entity_type.__module__.rsplit(".", 1)[-1]  # request or response
    versions = (
        getattr(load_entity_module(name, version, cast(Any, EntityType[kind])), entity_type.__name__, None)
        for version in schema_name_map[name]
    )
    return frozenset(field.name for type_ in versions if type_ is not None for field in fields(type_))
