"""Questions and answers of link calls as dataclasses, and as what their JSON has.

Both ends of a link may be of different versions: a field that this version does not know is ignored, one that it needs
and does not find is refused by name. So unlike the control log's codec this one is not strict. What the control log
has (dataclasses of ``isthmus_control``) goes over the link as that codec writes it, and is read as strictly.

Shapes: dataclasses are objects, named tuples lists by position (fields with defaults may be missing at the end), enums
their values, mappings objects. Each class is looked at once.
"""

from __future__ import annotations

import dataclasses
import itertools
import types
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass
from enum import Enum
from functools import cache, partial
from operator import attrgetter
from typing import Any, ClassVar, Final, Generic, Self, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from isthmus_control import codec

A = TypeVar("A")
T = TypeVar("T")
Encoder = Callable[[Any], Any]
Decoder = Callable[[Any], Any]

_WORDS: Final = {str: "text", int: "a whole number", bool: "true or false", type(None): "null"}
_PLAIN: Final = frozenset(_WORDS)


LEFT_OUT: Final = {"left_out": True}
"""Metadata of a field that may be None, and stands on the wire only where it is not."""
MERGED: Final = {"merged": True}
"""Metadata of a field that is a dataclass or None: its fields stand among those of the one that it is in, or none."""


def named(wire_name: str) -> dict[str, str]:
    """Metadata of a field that is called otherwise on the wire."""
    return {"name": wire_name}


class MalformedCall(ValueError):
    """A question or an answer does not have its shape. The message names the call and the field."""


class Question(Generic[A]):
    """What one end of a link asks the other: a frozen dataclass, whose answer is an ``A``."""

    __slots__ = ()

    METHOD: ClassVar[str]
    """The name on the wire."""
    SINCE: ClassVar[int] = 1
    """The version of the link protocol that knows it first."""
    WITH: ClassVar[str | None] = None
    """The field by which it differs from another question of the same method, which has another answer."""
    IN_ORDER: ClassVar[bool] = False
    """What comes behind it over the connection counts on it: it must not be malformed."""
    ANSWER: ClassVar[type[Any]]
    """The class of the answer."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        (cls.ANSWER,) = get_args(cls.__dict__["__orig_bases__"][0])

    @classmethod
    def by(cls, handler: Callable[[Any, Self], Awaitable[A]]) -> Answering:
        """Have ``handler`` answer the question; it takes the connection, and the question."""
        return Answering(cls, handler)


@dataclass(frozen=True, slots=True)
class Answering:
    """Who answers a question."""

    question: type[Question[Any]]
    handler: Callable[[Any, Any], Awaitable[Any]]
    otherwise: Answering | None = None
    """Who answers the question of that method without the field that makes it this one."""

    def read(self, params: object) -> tuple[Answering, Any]:
        """Who answers what was asked, and the question. Raises MalformedCall."""
        said = params.get(self.question.WITH) if isinstance(params, dict) else None
        if self.otherwise is not None and (said is None or said is False):
            return self.otherwise.read(params)
        return self, question_of(self.question, params)


def by_methods(answering: Iterable[Answering]) -> dict[str, Answering]:
    """By method: who answers it. Raises ValueError where a question is answered twice."""
    found: dict[str, Answering] = {}
    for each in answering:
        method = each.question.METHOD
        there = found.get(method)
        if there is None:
            found[method] = each
        else:
            first, last = (each, there) if each.question.WITH is not None else (there, each)
            if first.question.WITH is None or last.question.WITH is not None or first.otherwise is not None:
                raise ValueError(f"two parts answer {method}")
            found[method] = dataclasses.replace(first, otherwise=last)
    return found


def to_wire(value: Any) -> dict[str, Any]:
    """A question or an answer as the JSON of a call has it."""
    encode = _encoder(cast(Any, type(value)))
    return cast(dict[str, Any], value if encode is None else encode(value))


def question_of(question: type[T], value: object) -> T:
    """What was asked. Raises MalformedCall."""
    try:
        return cast(T, _decoder(cast(Any, question))(value))
    except _Wrong as error:
        method = cast(type[Question[Any]], question).METHOD
        raise MalformedCall(f"{method}{''.join(error.path)} {error.what}") from None


def answer_to(question: Question[A], value: object) -> A:
    """What was answered. Raises MalformedCall."""
    try:
        return cast(A, _decoder(cast(Any, question.ANSWER))(value))
    except _Wrong as error:
        where = "".join(error.path).removeprefix(".") or "it"
        raise MalformedCall(f"the answer to {question.METHOD}: {where} {error.what}") from None


class _Wrong(Exception):
    """Something does not have its shape. ``path``: where, from the outside to the inside."""

    def __init__(self, what: str, *path: str) -> None:
        super().__init__(what)
        self.what = what
        self.path = list(path)

    def inside(self, where: str) -> _Wrong:
        self.path.insert(0, where)
        return self


# ---- writing ----


@cache
def _encoder(shape: Any) -> Encoder | None:
    """What makes JSON's types of a value; None: the encoder of JSON takes it as it is."""
    origin, args = get_origin(shape), get_args(shape)
    if shape in _PLAIN:
        return None
    if origin in (Union, types.UnionType):
        return _encoder_of_union(args)
    if origin is tuple:
        return _encoder_of_list(args[0]) if args[-1] is ... else _encoder_of_places(args)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _encoder_of_mapping(*args)
    if issubclass(shape, Enum):
        return attrgetter("value")
    if issubclass(shape, tuple):
        return _encoder_of_places(tuple(_hints(shape).values()))
    return codec.to_json if _is_control(shape) else _encoder_of_object(shape)


def _encoder_of_union(args: tuple[Any, ...]) -> Encoder | None:
    inners = [inner for arg in args if (inner := _encoder(arg)) is not None]
    if not inners:
        return None
    (inner,) = inners
    assert len(args) == 2
    assert type(None) in args
    return lambda value: None if value is None else inner(value)


def _encoder_of_list(arg: Any) -> Encoder | None:
    inner = _encoder(arg)
    return None if inner is None else lambda value: [inner(each) for each in value]


def _encoder_of_places(args: tuple[Any, ...]) -> Encoder | None:
    inners = [_encoder(arg) for arg in args]
    if not any(inners):
        return None
    return lambda value: [each if inner is None else inner(each) for inner, each in zip(inners, value, strict=True)]


def _encoder_of_mapping(key: Any, arg: Any) -> Encoder:
    inner = _encoder(arg)
    if key is int:
        return lambda value: {str(name): each if inner is None else inner(each) for name, each in value.items()}
    return dict if inner is None else lambda value: {name: inner(each) for name, each in value.items()}


def _encoder_of_object(shape: Any) -> Encoder:
    """Compiled: an ack may wait for it."""
    names: dict[str, Any] = {}
    lines: list[str] = []
    first: list[str] = []
    """Those that stand before all that may be left out."""
    for field in dataclasses.fields(shape):
        inner, said = _encoder(_hints(shape)[field.name]), f"value.{field.name}"
        may_lack = field.metadata.get("left_out") or field.metadata.get("merged")
        if may_lack:
            lines.append(f"if (said := {said}) is not None:")
            said = "said"
        if inner is not None:
            names[f"encode_{field.name}"] = inner
            said = f"encode_{field.name}({said})"
        if field.metadata.get("merged"):
            lines.append(f"    wire |= {said}")
        elif may_lack or lines:
            lines.append(f"{'    ' if may_lack else ''}wire[{_key(field)!r}] = {said}")
        else:
            first.append(f"{_key(field)!r}: {said}")
    return _compiled(shape, ["wire = {" + ", ".join(first) + "}", *lines, "return wire"], names)


def _compiled(shape: type[Any], lines: list[str], names: dict[str, Any]) -> Callable[[Any], Any]:
    """A function of a value. ``names``: what its lines use."""
    text = "\n    ".join(["def compiled(value):", *lines])
    exec(compile(text, f"<{shape.__name__} of the link>", "exec"), names)
    return cast(Callable[[Any], Any], names["compiled"])


# ---- reading ----


@cache
def _decoder(shape: Any) -> Decoder:
    """What checks and converts values of this shape."""
    origin, args = get_origin(shape), get_args(shape)
    if shape in _PLAIN:
        return _decoder_of_plain(shape)
    if origin in (Union, types.UnionType):
        return _decoder_of_union(args)
    if origin is tuple:
        return _decoder_of_list(args[0]) if args[-1] is ... else _decoder_of_places(tuple, args, len(args))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _decoder_of_mapping(*args)
    if issubclass(shape, Enum):
        return _decoder_of_enum(shape)
    if issubclass(shape, tuple):
        shapes = tuple(_hints(shape).values())
        make = partial(tuple.__new__, shape)
        return _decoder_of_places(make, shapes, len(shapes) - len(shape._field_defaults), shape)
    return _decoder_of_control(shape) if _is_control(shape) else _decoder_of_object(shape)


def _decoder_of_plain(kind: type) -> Decoder:
    words = f"is not {_WORDS[kind]}"

    def decode(value: Any) -> Any:
        if type(value) is not kind:
            raise _Wrong(words)
        return value

    return decode


def _json_type(shape: Any) -> type:
    """As what a shape stands in JSON."""
    origin = get_origin(shape) or shape
    if origin in _PLAIN:
        return cast(type, origin)
    if issubclass(origin, tuple):
        return list
    return str if issubclass(origin, Enum) else dict


def _decoder_of_union(args: tuple[Any, ...]) -> Decoder:
    by_type = {_json_type(arg): _decoder(arg) for arg in args}
    assert len(by_type) == len(args), "which of them it is shows in JSON"
    default = next(decoder for kind, decoder in by_type.items() if kind is not type(None))
    return lambda value: by_type.get(type(value), default)(value)


def _decoder_of_list(arg: Any) -> Decoder:
    inner = _decoder(arg)
    plain = {arg} if arg in _PLAIN else None

    def decode(value: Any) -> Any:
        if type(value) is not list:
            raise _Wrong("is not a list")
        if plain is not None and plain.issuperset(map(type, value)):
            return tuple(value)
        try:
            return tuple([inner(each) for each in value])
        except _Wrong:
            for index, each in enumerate(value):
                _decoded(inner, each, f"[{index}]")
            raise

    return decode


def _decoded(decoder: Decoder, value: Any, where: str) -> Any:
    try:
        return decoder(value)
    except _Wrong as error:
        raise error.inside(where) from None


def _decoder_of_places(make: Callable[[Any], Any], shapes: tuple[Any, ...], required: int, kind: Any = None) -> Decoder:
    """A list by position. What a newer version has behind the last place that this one knows is ignored."""
    inners = [_decoder(shape) for shape in shapes]
    places = [
        (_kinds(shape), inner, f"[{index}]") for index, (shape, inner) in enumerate(zip(shapes, inners, strict=True))
    ]
    known = _plain_types(shapes)

    def decode(value: Any) -> Any:
        if type(value) is not list or len(value) < required:
            raise _Wrong(f"is not a list of {required}")
        if tuple(map(type, value)) in known:
            return make(value)
        found = [
            each if type(each) in kinds else _decoded(inner, each, where)
            for (kinds, inner, where), each in zip(places, value, strict=False)
        ]
        return make(found) if len(found) == len(places) else kind(*found)

    return decode


def _kinds(shape: Any) -> frozenset[type]:
    """The types of what is right as it is."""
    arms = get_args(shape) if get_origin(shape) in (Union, types.UnionType) else (shape,)
    return frozenset(arm for arm in arms if arm in _PLAIN)


def _plain_types(shapes: tuple[Any, ...]) -> frozenset[tuple[type, ...]]:
    """Which types a list may have, if nothing in it is to be converted."""
    choices = [get_args(shape) if get_origin(shape) in (Union, types.UnionType) else (shape,) for shape in shapes]
    if not all(each in _PLAIN for choice in choices for each in choice):
        return frozenset()
    return frozenset(itertools.product(*choices))


def _decoder_of_mapping(key: Any, arg: Any) -> Decoder:
    inner = _decoder(arg)

    def decode(value: Any) -> Any:
        if type(value) is not dict:
            raise _Wrong("is not an object")
        return {
            name if key is str else _decoded(_number, name, f".{name}"): _decoded(inner, each, f".{name}")
            for name, each in value.items()
        }

    return decode


def _number(name: str) -> int:
    if not name.isdecimal():
        raise _Wrong("is not named by a number")
    return int(name)


def _decoder_of_enum(shape: type[Enum]) -> Decoder:
    values = {each.value: each for each in shape}
    words = f"is none of {', '.join(map(str, values))}"

    def decode(value: Any) -> Any:
        found = values.get(value) if isinstance(value, str | int) else None
        if found is None:
            raise _Wrong(words)
        return found

    return decode


def _decoder_of_control(shape: type[Any]) -> Decoder:
    def decode(value: Any) -> Any:
        try:
            return codec.from_json(shape, value)
        except (codec.MalformedValue, codec.UnknownField) as error:
            raise _Wrong(f"is not understood: {error}") from None

    return decode


def _decoder_of_object(shape: Any) -> Decoder:
    """Compiled: an ack may wait for it."""
    names: dict[str, Any] = {"shape": shape, "lacks": _LACKS, "wrong": _Wrong}
    lines = ["if type(value) is not dict:", "    raise wrong('is not an object')"]
    by_position = [f"field_{field.name}" for field in dataclasses.fields(shape) if not field.kw_only]
    by_name = [f"{field.name}=field_{field.name}" for field in dataclasses.fields(shape) if field.kw_only]
    for field in dataclasses.fields(shape):
        name, hint = field.name, _hints(shape)[field.name]
        if field.metadata.get("merged"):
            names[f"read_{name}"] = _merged_decoder(hint)
            lines.append(f"field_{name} = read_{name}(value)")
        else:
            names[f"read_{name}"], names[f"kinds_{name}"] = _field_decoder(field, hint), _kinds(hint)
            lines.append(f"field_{name} = value.get({_key(field)!r}, lacks)")
            lines += [f"if type(field_{name}) not in kinds_{name}:", f"    field_{name} = read_{name}(field_{name})"]
    return _compiled(shape, [*lines, f"return shape({', '.join(by_position + by_name)})"], names)


class _Lacks:
    """In the place of a field that is missing."""


_LACKS: Final = _Lacks()


def _field_decoder(field: dataclasses.Field[Any], hint: Any) -> Decoder:
    inner, where = _decoder(hint), f".{_key(field)}"

    def decode(value: Any) -> Any:
        if value is not _LACKS:
            return _decoded(inner, value, where)
        if field.default_factory is not MISSING:
            return field.default_factory()
        if field.default is MISSING:
            raise _Wrong("is missing", where)
        return field.default

    return decode


def _merged_decoder(hint: Any) -> Decoder:
    """All that is merged is there, or nothing of it: its first field says which."""
    (inner,) = (each for each in get_args(hint) if each is not type(None))
    decode, first = _decoder(inner), _key(dataclasses.fields(inner)[0])
    return lambda value: decode(value) if first in value else None


# ---- what is known of classes ----


def _key(field: dataclasses.Field[Any]) -> str:
    return str(field.metadata.get("name", field.name))


@cache
def _hints(shape: Any) -> dict[str, Any]:
    hints = get_type_hints(shape)
    names = shape._fields if issubclass(shape, tuple) else [field.name for field in dataclasses.fields(shape)]
    return {name: hints[name] for name in names}


def _is_control(shape: type[Any]) -> bool:
    return shape.__module__.startswith("isthmus_control.")
