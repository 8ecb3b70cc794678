"""Frozen dataclasses to canonical JSON and back.

The command log and its snapshots must have one form on every proxy, and a reader must know the difference between
"this is wrong" (:class:`MalformedValue`: rejected, by every proxy alike) and "this was written by something newer"
(:class:`UnknownField`: nobody may guess). General validators blur the two, and word their messages differently from
version to version, so this small one is the project's own.

Shapes: dataclasses become objects (fields with metadata ``DERIVED`` stay out, those with ``LEFT_OUT`` while they have
their default), enums their values, tuples arrays, mappings with text keys objects, other mappings sorted arrays of
``[key, value]``.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

T = TypeVar("T")
Decoder = Callable[[Any, str], Any]

DERIVED = {"derived": True}
"""Metadata of fields that are computed from others and never written."""
LEFT_OUT = {"left_out": True}
"""Metadata of fields that are written only where they have not their default: older versions read all else."""


def since(level: int) -> dict[str, Any]:
    """Metadata of a field that a feature level brings (:mod:`isthmus_control.levels`), left out at its default."""
    return {**LEFT_OUT, "since": level}


def since_of(field: dataclasses.Field[Any]) -> int:
    """The feature level that brings a field."""
    return int(field.metadata.get("since", 0))


def default_of(field: dataclasses.Field[Any]) -> Any:
    """The value of a field that nobody gave one; ``dataclasses.MISSING`` if it needs one."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


class MalformedValue(ValueError):
    """The value does not have the declared shape. The message names where."""


class UnknownField(ValueError):
    """An object has a field that this version does not know, so its writer was newer."""


def canonical(value: Any) -> bytes:
    """The one JSON form of ``value``: sorted keys, no spaces, UTF-8."""
    return canonical_json(to_json(value))


def canonical_json(value: Any) -> bytes:
    """The same of what is JSON types already."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def parse(data: bytes | bytearray | memoryview) -> Any:
    """JSON as Python values. Raises :class:`MalformedValue`; duplicate keys and non-numbers (NaN) are malformed."""
    try:
        text = str(data, "utf-8")
        value = json.loads(text, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
        if "\\u" in text:
            # An escaped lone surrogate would be text that no snapshot can write.
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        # The library's words differ between Python versions; a rejection reads the same on every proxy.
        raise MalformedValue("not JSON") from None
    return value


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key occurs twice")
    return result


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number")


def to_json(value: Any) -> Any:
    """``value`` as JSON types."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, str):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            name: to_json(getattr(value, name))
            for name, left_out in _written(type(value))
            if left_out is _NEVER or getattr(value, name) != left_out
        }
    if isinstance(value, Mapping):
        if all(type(key) is str for key in value) and value:
            return {key: to_json(item) for key, item in value.items()}
        pairs = [[to_json(key), to_json(item)] for key, item in value.items()]
        return sorted(pairs, key=lambda pair: json.dumps(pair[0])) if pairs else {}
    if isinstance(value, tuple | list):
        return [to_json(item) for item in value]
    raise TypeError(f"{type(value).__name__} has no JSON form here")


_NEVER: Any = object()


@cache
def _written(cls: type) -> tuple[tuple[str, Any], ...]:
    """The names of what is written, each with the value with which it is not."""
    return tuple(
        (field.name, default_of(field) if field.metadata.get("left_out") else _NEVER)
        for field in dataclasses.fields(cls)
        if not field.metadata.get("derived")
    )


def from_json(shape: type[T], value: Any, where: str = "") -> T:
    """``value`` as an instance of ``shape``. Raises :class:`MalformedValue` and :class:`UnknownField`."""
    return typing.cast(T, _decoder(typing.cast(Any, shape))(value, where or shape.__name__))


@cache
def _decoder(shape: Any) -> Decoder:
    """The function that checks and converts values of this type, built once."""
    if shape is None or shape is type(None):
        return _exactly(type(None), "null")
    if shape in (str, int, bool):
        return _exactly(shape, {str: "text", int: "a whole number", bool: "true or false"}[shape])
    origin, args = get_origin(shape), get_args(shape)
    if origin in (Union, types.UnionType):
        return _optional(shape, args)
    if origin is tuple:
        return _tuple(args)
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping(*args)
    if isinstance(shape, type) and issubclass(shape, Enum):
        return _enum(shape)
    if isinstance(shape, type) and issubclass(shape, tuple) and hasattr(shape, "_fields"):
        return _named_tuple(shape)
    target = origin if origin is not None else shape
    if dataclasses.is_dataclass(target) and isinstance(target, type):
        return _dataclass(target, args)
    raise TypeError(f"{shape!r} cannot be read")


def _exactly(kind: type, words: str) -> Decoder:
    def decode(value: Any, where: str) -> Any:
        if type(value) is not kind:
            raise MalformedValue(f"{where} is not {words}")
        return value

    return decode


def _optional(shape: Any, args: tuple[Any, ...]) -> Decoder:
    others = [arg for arg in args if arg is not type(None)]
    if len(others) != 1 or len(args) != 2:
        raise TypeError(f"{shape!r} cannot be read: only X | None")
    inner = _decoder(others[0])
    return lambda value, where: None if value is None else inner(value, where)


def _tuple(args: tuple[Any, ...]) -> Decoder:
    if len(args) == 2 and args[1] is ...:
        inner = _decoder(args[0])

        def decode_many(value: Any, where: str) -> Any:
            if type(value) is not list:
                raise MalformedValue(f"{where} is not a list")
            return tuple(inner(item, f"{where}[{index}]") for index, item in enumerate(value))

        return decode_many
    inners = [_decoder(arg) for arg in args]

    def decode(value: Any, where: str) -> Any:
        if type(value) is not list or len(value) != len(inners):
            raise MalformedValue(f"{where} is not a list of {len(inners)}")
        return tuple(
            inner(item, f"{where}[{index}]") for index, (inner, item) in enumerate(zip(inners, value, strict=True))
        )

    return decode


def _named_tuple(shape: Any) -> Decoder:
    hints = get_type_hints(shape)
    plain = _tuple(tuple(hints[name] for name in shape._fields))
    return lambda value, where: shape(*plain(value, where))


def _mapping(key_type: Any, value_type: Any) -> Decoder:
    key, item = _decoder(key_type), _decoder(value_type)
    as_object = key_type is str

    def decode(value: Any, where: str) -> Any:
        if type(value) is dict and (as_object or not value):
            return {name: item(inner, f"{where}.{name}") for name, inner in value.items()}
        if as_object or type(value) is not list:
            raise MalformedValue(f"{where} is not a mapping")
        result = {}
        for index, pair in enumerate(value):
            if type(pair) is not list or len(pair) != 2:
                raise MalformedValue(f"{where}[{index}] is not a pair")
            result[key(pair[0], f"{where}[{index}]")] = item(pair[1], f"{where}[{index}]")
        if len(result) != len(value):
            raise MalformedValue(f"{where} has a key twice")
        return result

    return decode


def _enum(shape: type[Enum]) -> Decoder:
    values = {member.value: member for member in shape}

    def decode(value: Any, where: str) -> Any:
        if type(value) is not str:
            raise MalformedValue(f"{where} is not text")
        try:
            return values[value]
        except KeyError:
            # A newer writer knows more values: the reader must not guess what they mean.
            raise UnknownField(f"{where} has the value {value!r}, which this version does not know") from None

    return decode


def _dataclass(shape: type, args: tuple[Any, ...]) -> Decoder:
    hints = get_type_hints(shape)
    parameters = dict(zip(getattr(shape, "__parameters__", ()), args, strict=False))
    fields: dict[str, Decoder] = {}
    optional: set[str] = set()
    for field in dataclasses.fields(shape):
        if field.metadata.get("derived"):
            continue
        fields[field.name] = _decoder(_substitute(hints[field.name], parameters))
        if field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING:
            optional.add(field.name)

    def decode(value: Any, where: str) -> Any:
        if type(value) is not dict:
            raise MalformedValue(f"{where} is not an object")
        if unknown := sorted(value.keys() - fields.keys()):
            raise UnknownField(f"{where} has the field {unknown[0]!r}, which this version does not know")
        if missing := sorted(fields.keys() - value.keys() - optional):
            raise MalformedValue(f"{where} has no field {missing[0]!r}")
        arguments = {name: fields[name](item, f"{where}.{name}") for name, item in value.items()}
        try:
            return shape(**arguments)
        except ValueError as error:
            raise MalformedValue(f"{where}: {error}") from None

    return decode


def _substitute(hint: Any, parameters: Mapping[Any, Any]) -> Any:
    if hint in parameters:
        return parameters[hint]
    return hint
