"""Compiles "where are these fields in this message" into Python functions, from the message schemas.

    wants = ("acks", "transactional_id", ("topic_data", ("name|topic_id",)))
    locate = locator(ApiKey.PRODUCE, 9, "request", wants)
    acks, transactional_id, topics = locate(frame)

A function is compiled once for each (API, version, wants), on first use. It walks a frame from its size prefix on and
stops behind the last thing wanted. What is not wanted is skipped by arithmetic and never decoded: a run of fixed-size
fields is one addition, an array of them one multiplication. No field's position is written down anywhere: all follow
from the schema.

What may be wanted of a struct:

=====================  ===============================================================================================
``"name"``             the value: int, bool, float, 16 bytes of a UUID, bytes of a string, a memoryview of bytes or
                       records, a list of these for an array; None for null, and for a tag that is absent
``"name@"``            ``(start, end)`` of the field in the frame, its length or count included; None for an absent tag
``("name", (...))``    the same of each struct: a list for an array, one result for a single struct, None for null
``"a|b"``              the first of these fields that the version has (also ``("a|b", (...))`` and ``"a|b@"``)
``"@"``                ``(start, end)`` of the struct itself
``"@tags"``            ``(start, end)`` of the struct's section of tagged fields, None in versions that have none
=====================  ===============================================================================================

A struct of which one thing is wanted yields that thing, one of which several are wanted yields a tuple of them, in the
order of ``wants``. A field that the version does not have is None.

Errors of the functions: NeedMore where the bytes at hand end before the answer while the frame goes on by its size
prefix, MalformedFrame where a length, count or varint does not fit into the frame, or where null is what may not be, or
where there are more elements than the caller takes on (``elements``). Nothing else. What is skipped is not looked at
more closely than skipping it takes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator
from functools import cache
from itertools import count
from typing import Any, Protocol

from isthmus_protocol.elements import bound_here
from isthmus_protocol.schema import (
    EntitySpec,
    FieldSpec,
    MessageKind,
    WireType,
    message_spec,
    request_flexible,
    response_header_flexible,
)
from isthmus_protocol.wire import VARINT_BYTES_MAX, Frame, MalformedFrame, NeedMore, check_tags, read_uvarint, skip_tags

Want = str | tuple[str, tuple["Want", ...]]


class Locator(Protocol):
    """Finds what was wanted in a frame, or a prefix of one, that starts at a position in some bytes."""

    def __call__(self, frame: Frame, start: int = 0, /) -> Any: ...


EntityLocator = Callable[[Frame, int, int], Any]
"""``(bytes, position of the struct, end of what the struct may take) -> what was wanted``"""

Position = tuple[Frame, int, int]
"""A chunk, a position in it (or behind it), and the chunk's length."""

Skimmer = Generator[int, Position, int]
"""Walks a message in chunks: yields a position at or behind the chunk's end when it needs the byte there, is sent the
chunk that has it, and returns the position that was looked for (which may be behind the chunk's end)."""


@cache
def locator(api_key: int, version: int, kind: MessageKind, wants: tuple[Want, ...]) -> Locator:
    """The function that finds ``wants`` in a message. Raises LookupError for an API or version without a schema."""
    compiler = _LocatorCompiler()
    text = compiler.frame_function(api_key, version, kind, wants)
    function: Locator = _execute(text, compiler.names, f"<locate {wants} in {kind} {api_key} v{version}>")
    return function


@cache
def entity_locator(spec: EntitySpec, wants: tuple[Want, ...]) -> EntityLocator:
    """As ``locator``, for a struct anywhere."""
    compiler = _LocatorCompiler()
    text = compiler.entity_function(spec, wants)
    function: EntityLocator = _execute(text, compiler.names, f"<locate {wants} in {spec.name}>")
    return function


def locator_source(api_key: int, version: int, kind: MessageKind, wants: tuple[Want, ...]) -> str:
    """The Python text that ``locator`` compiles, for people and tests to read."""
    return _LocatorCompiler().frame_function(api_key, version, kind, wants)


def _execute(text: str, names: dict[str, Any], title: str) -> Any:
    namespace = dict(names)
    exec(compile(text, title, "exec"), namespace)
    return namespace["locate"]


@cache
def response_skimmer(api_key: int, version: int, until: str) -> Callable[[Frame, int, int], Skimmer]:
    """A generator function that walks a flexible response, from its frame's first byte, to where ``until`` starts.

    ``until`` is an untagged top-level field's name, or "@tags" for the section of top-level tagged fields.
    """
    compiler = _SkimmerCompiler()
    header_flexible = response_header_flexible(api_key, version)
    text = compiler.function(message_spec(api_key, version, "response"), until, header_flexible)
    title = f"<skim response {api_key} v{version} until {until}>"
    function: Callable[[Frame, int, int], Skimmer] = _execute(text, {"varint_rest": _varint_rest}, title)
    return function


# What the compiled functions call.


def _ended(position: int, at_hand: int, end: int) -> MalformedFrame | NeedMore:
    if position > end or at_hand >= end:
        return MalformedFrame(f"A field at {position} does not fit into a frame of {end} bytes")
    return NeedMore(f"{at_hand} of {end} bytes at hand")


def _frame_ended(frame: Frame, start: int, position: int) -> MalformedFrame | NeedMore:
    if len(frame) < start + 4:
        return NeedMore(f"{len(frame) - start} bytes of a size prefix at hand")
    return _ended(position, len(frame), start + 4 + int.from_bytes(frame[start : start + 4], "big", signed=True))


def _bad_length(length: int, position: int) -> MalformedFrame:
    return MalformedFrame(f"Length or count {length} before position {position} cannot be")


def _misfit(position: int) -> MalformedFrame:
    return MalformedFrame(f"A tagged field's value ends at {position}, and not where its size says")


def _varint_rest(value: int, chunk: Frame, position: int, end: int) -> Generator[int, Position, tuple[int, Position]]:
    """The rest of a varint whose first byte, ``value``, has more bytes behind it, in chunks."""
    value &= 0x7F
    for shift in range(7, 7 * VARINT_BYTES_MAX, 7):
        if position >= end:
            chunk, position, end = yield position
        byte = chunk[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, (chunk, position, end)
    raise MalformedFrame(f"A varint is longer than {VARINT_BYTES_MAX} bytes")


def _bytes_min(field: FieldSpec, flexible: bool) -> int:
    """The fewest bytes that an untagged field can take."""
    if field.is_array:
        return 1 if flexible else 4
    if field.nullable and field.wire is WireType.ENTITY:
        return 1
    return _element_bytes_min(field, flexible)


def _element_bytes_min(field: FieldSpec, flexible: bool) -> int:
    if field.wire is WireType.FIXED:
        return field.size
    if field.wire is WireType.STRING:
        return 1 if flexible else 2
    if field.wire is WireType.BYTES:
        return 1 if flexible else 4
    return _entity_bytes_min(_entity_of(field))


def _entity_bytes_min(spec: EntitySpec) -> int:
    return sum(_bytes_min(field, spec.flexible) for field in spec.fields) + spec.flexible


def _fixed_size(field: FieldSpec) -> int | None:
    """The size of a field's one element where it is always the same, else None."""
    if field.wire is WireType.FIXED:
        return field.size
    if field.wire is WireType.ENTITY:
        spec = _entity_of(field)
        sizes = [None if inner.is_array or inner.nullable else _fixed_size(inner) for inner in spec.fields]
        if not spec.flexible and None not in sizes:
            return sum(size for size in sizes if size is not None)
    return None


def _entity_of(field: FieldSpec) -> EntitySpec:
    assert field.entity is not None
    return field.entity


class _Lines:
    """Python text under construction."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._depth = 0
        self._fresh = count()

    def line(self, text: str) -> None:
        self._lines.append("    " * self._depth + text)

    def variable(self) -> str:
        return f"v{next(self._fresh)}"

    def text(self) -> str:
        return "\n".join(self._lines) + "\n"


_Rest = Callable[[], None]
"""Emits the code that skips what is left of a struct."""


class _LocatorCompiler(_Lines):
    """Emits a locator. In its text ``b`` is the frame, ``m`` a memoryview of it, ``p`` the position, ``end`` its end.

    ``p`` never goes back, whatever the bytes say. So it is enough to compare it with the end once, before the result is
    returned; until then a read behind the frame gives garbage at worst, and one behind the bytes at hand IndexError.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[str, Any] = {
            "struct_error": struct.error,
            "unpack_from": struct.unpack_from,
            "uvarint": read_uvarint,
            "bound_here": bound_here,
            "check_tags": check_tags,
            "skip_tags": skip_tags,
            "ended": _ended,
            "frame_ended": _frame_ended,
            "bad_length": _bad_length,
            "misfit": _misfit,
        }
        # Fixed-size fields that no code was emitted for yet: (struct code, size, variable or None where it is skipped).
        self._run: list[tuple[str, int, str | None]] = []
        self._views_wanted = False
        self._is_bounded = False

    def frame_function(self, api_key: int, version: int, kind: MessageKind, wants: tuple[Want, ...]) -> str:
        """The text of a function that starts at a frame's size prefix."""
        self._depth = 2
        size = self.variable()
        self._run.append(("i", 4, size))
        if kind == "request":
            self._run.append(("8x", 8, None))  # API key, version, correlation id.
            client_id = self._length(WireType.STRING, flexible=False)  # In the classic form in header v2, too.
            self.line(f"if {client_id} > 0:")
            self.line(f"    p += {client_id}")
            self._refuse_below_null(client_id, flexible=False)
            if request_flexible(api_key, version):
                self._skip_tags()
        else:
            self._run.append(("4x", 4, None))  # Correlation id.
            self._flush()
            if response_header_flexible(api_key, version):
                self._skip_tags()
        self.line(f"end = start + 4 + {size}")
        return self._function(
            message_spec(api_key, version, kind),
            wants,
            ["def locate(b, start=0):", "    p = start"],
            "frame_ended(b, start, p)",
            begins=True,
        )

    def entity_function(self, spec: EntitySpec, wants: tuple[Want, ...]) -> str:
        """The text of a function that starts at a struct, and gets where that must end at the latest."""
        self._depth = 2
        return self._function(spec, wants, ["def locate(b, p, end):"], "ended(p, len(b), end)", begins=False)

    def _function(self, spec: EntitySpec, wants: tuple[Want, ...], head: list[str], ended: str, begins: bool) -> str:
        result, _ = self._entity(spec, wants, behind=[])
        self._flush()
        body, self._lines, self._depth = self._lines, head, 1
        if self._views_wanted:
            self.line("m = memoryview(b)")
        if self._is_bounded:
            self.line("bound = bound_here()")
            if begins:
                self.line("if bound is not None:")
                self.line("    bound.begin()")
        self.line("try:")
        self._lines += body or ["        pass"]
        self.line("except (IndexError, struct_error):")
        self.line(f"    raise {ended} from None")
        self.line("if p > end or p > len(b):")
        self.line(f"    raise {ended}")
        self.line(f"return {result}")
        return self.text()

    # Structs. ``behind`` says what is wanted behind the place that code is emitted for: None means something is, so all
    # must be walked; a list means that nothing is unless one of these loop counters is above zero.

    def _entity(self, spec: EntitySpec, wants: tuple[Want, ...], behind: list[str] | None) -> tuple[str, _Rest]:
        """Emit the walk up to the last thing wanted. Returns the result's expression, and what skips the rest."""
        results: list[str] = []
        whole_start: str | None = None
        tags_span: tuple[str, str] | None = None
        wanted: dict[str, list[tuple[Want, int]]] = {}
        for index, want in enumerate(wants):
            results.append("None")
            if want == "@":
                self._flush()
                whole_start = self.variable()
                self.line(f"{whole_start} = p")
            elif want == "@tags":
                if spec.flexible:
                    tags_span = self.variable(), self.variable()
                    results[index] = f"({tags_span[0]}, {tags_span[1]})"
            else:
                field = _resolve(spec, want)
                if field is not None:
                    wanted.setdefault(field.name, []).append((want, index))

        untagged = [index for index, field in enumerate(spec.fields) if field.name in wanted]
        tags_wanted = tags_span is not None or any(field.name in wanted for field in spec.tagged)
        to_the_end = whole_start is not None or tags_wanted
        walked = len(spec.fields) if to_the_end else max(untagged, default=-1) + 1
        rests: list[_Rest] = []
        for position, field in enumerate(spec.fields[:walked]):
            if field.name not in wanted:
                self._skip(field, spec.flexible)
                continue
            is_last = position == walked - 1 and not to_the_end
            rest = self._wanted_field(field, spec.flexible, wanted[field.name], results, behind if is_last else None)
            if rest is not None and is_last:
                rests.append(rest)
            elif rest is not None:
                rest()
        if to_the_end and spec.flexible:
            if tags_span is not None:
                self._flush()
                self.line(f"{tags_span[0]} = p")
            if any(field.name in wanted for field in spec.tagged):
                self._tags(spec, wanted, results)
            else:
                self._skip_tags()
            if tags_span is not None:
                self.line(f"{tags_span[1]} = p")
        if whole_start is not None:
            self._flush()
            whole_end = self.variable()
            self.line(f"{whole_end} = p")
            results[wants.index("@")] = f"({whole_start}, {whole_end})"

        def skip_rest() -> None:
            for rest in rests:
                rest()
            for field in spec.fields[walked:]:
                self._skip(field, spec.flexible)
            if spec.flexible and not to_the_end:
                self._skip_tags()

        return results[0] if len(results) == 1 else f"({', '.join(results)},)", skip_rest

    def _wanted_field(
        self,
        field: FieldSpec,
        flexible: bool,
        wanted: list[tuple[Want, int]],
        results: list[str],
        behind: list[str] | None,
    ) -> _Rest | None:
        """Emit the reading of one field, into ``results``. Returns what skips a struct's rest where that was left."""
        spans = [index for want, index in wanted if isinstance(want, str) and want.endswith("@")]
        values = [(want, index) for want, index in wanted if not (isinstance(want, str) and want.endswith("@"))]
        assert len(values) <= 1, f"{field.name} is wanted twice"
        if spans:
            self._flush()
            start, end = self.variable(), self.variable()
            self.line(f"{start} = p")
            behind = None  # The span's end is wanted behind everything inside.
        rest: _Rest | None = None
        if values:
            want, index = values[0]
            results[index], rest = self._value(field, flexible, want, behind)
        else:
            self._skip(field, flexible)
        if spans:
            if rest is not None:
                rest()
                rest = None
            self._flush()
            self.line(f"{end} = p")
            for index in spans:
                results[index] = f"({start}, {end})"
        return rest

    def _value(
        self, field: FieldSpec, flexible: bool, want: Want, behind: list[str] | None
    ) -> tuple[str, _Rest | None]:
        if field.wire is not WireType.ENTITY:
            assert isinstance(want, str), f"{field.name} is no struct: want its value or its span"
            if field.is_array:
                return self._primitive_array(field, flexible), None
            return self._primitive(field, flexible, field.nullable), None
        assert isinstance(want, tuple), f"{field.name} is a struct: want fields of it or its span"
        spec, wants = _entity_of(field), want[1]
        if field.is_array:
            return self._entity_array(field, flexible, spec, wants, behind), None
        if not field.nullable:
            return self._entity(spec, wants, behind)
        result = self.variable()
        self._flush()
        self.line(f"{result} = None")
        self.line("p += 1")
        self.line("if b[p - 1] < 128:")  # The marker is an INT8, null is negative (KIP-893).
        self._depth += 1
        expression, rest = self._entity(spec, wants, None)
        rest()
        self._flush()
        self.line(f"{result} = {expression}")
        self._depth -= 1
        return result, None

    def _entity_array(
        self, field: FieldSpec, flexible: bool, spec: EntitySpec, wants: tuple[Want, ...], behind: list[str] | None
    ) -> str:
        length, result = self._count(flexible), self.variable()
        self.line(f"{result} = []" if not field.nullable else f"{result} = [] if {length} >= 0 else None")
        self.line(f"if {length} > 0:")
        self._depth += 1
        self._check_count(length, _entity_bytes_min(spec))
        self._charge("charge", length)
        self.line("while True:")
        self._depth += 1
        self.line(f"{length} -= 1")
        expression, rest = self._entity(spec, wants, None if behind is None else [length, *behind])
        self._flush()
        self.line(f"{result}.append({expression})")
        if behind is not None:
            self.line("if not (" + " or ".join([length, *behind]) + "):")
            self.line("    break")
        rest()
        self._flush()
        self.line(f"if not {length}:")
        self.line("    break")
        self._depth -= 2
        self._refuse_negative_count(length, field, flexible)
        return result

    def _tags(self, spec: EntitySpec, wanted: dict[str, list[tuple[Want, int]]], results: list[str]) -> None:
        self._flush()
        left, tag, end = self.variable(), self.variable(), self.variable()
        fields = [field for field in spec.tagged if field.name in wanted]
        found: dict[int, str] = {}
        for field in fields:
            for _, index in wanted[field.name]:
                found[index] = results[index] = self.variable()
                self.line(f"{found[index]} = None")
        self.line(f"{left}, p = uvarint(b, p)")
        self.line(f"check_tags({left})")
        self.line(f"while {left}:")
        self._depth += 1
        self.line(f"{left} -= 1")
        self.line(f"{tag}, p = uvarint(b, p)")
        self.line(f"{end}, p = uvarint(b, p)")
        self.line(f"{end} += p")
        for field in fields:
            self.line(f"if {tag} == {field.tag}:")
            self._depth += 1
            inside = ["None"] * len(results)
            rest = self._wanted_field(field, spec.flexible, wanted[field.name], inside, None)
            if rest is not None:
                rest()
            self._flush()
            for _, index in wanted[field.name]:
                self.line(f"{found[index]} = {inside[index]}")
            self.line(f"if p != {end}:")
            self.line("    raise misfit(p)")
            self._depth -= 1
        self.line(f"p = {end}")
        self._depth -= 1

    # Values that are no structs.

    def _primitive(self, field: FieldSpec, flexible: bool, nullable: bool) -> str:
        if field.wire is WireType.FIXED:
            value = self.variable()
            self._run.append((field.code, field.size, value))
            return value
        length = self._length(field.wire, flexible)
        value = self.variable()
        self.line(f"if {length} >= 0:")
        if field.wire is WireType.STRING:
            self.line(f"    {value} = bytes(b[p:p + {length}])")
        else:
            self._views_wanted = True
            self.line(f"    {value} = m[p:p + {length}]")
        self.line(f"    p += {length}")
        if nullable:
            self._refuse_below_null(length, flexible)
            self.line("else:")
            self.line(f"    {value} = None")
        else:
            self._refuse_negative(length)
        return value

    def _primitive_array(self, field: FieldSpec, flexible: bool) -> str:
        length, result = self._count(flexible), self.variable()
        self.line(f"{result} = []" if not field.nullable else f"{result} = [] if {length} >= 0 else None")
        self.line(f"if {length} > 0:")
        self._depth += 1
        self._check_count(length, _element_bytes_min(field, flexible))
        if field.wire is WireType.FIXED:
            self._charge("charge_numbers", length)
            self.line(f'{result} = list(unpack_from(">" + {field.code!r} * {length}, b, p))')
            self.line(f"p += {length} * {field.size}")
        else:
            self._charge("charge", length)
            self.line(f"for _ in range({length}):")
            self._depth += 1
            value = self._primitive(field, flexible, nullable=False)  # A nullable array is meant, not its elements.
            self._flush()
            self.line(f"{result}.append({value})")
            self._depth -= 1
        self._depth -= 1
        self._refuse_negative_count(length, field, flexible)
        return result

    # Skipping.

    def _skip(self, field: FieldSpec, flexible: bool) -> None:
        if field.is_array:
            self._skip_array(field, flexible)
        elif field.wire is WireType.FIXED:
            self._run.append((f"{field.size}x", field.size, None))
        elif field.wire is not WireType.ENTITY:
            self._skip_blob(field.wire, flexible)
        elif field.nullable:
            self._flush()
            self.line("p += 1")
            self.line("if b[p - 1] < 128:")
            self._depth += 1
            self._skip_entity(_entity_of(field))
            self._flush()
            self._depth -= 1
        else:
            self._skip_entity(_entity_of(field))

    def _skip_entity(self, spec: EntitySpec) -> None:
        for field in spec.fields:
            self._skip(field, spec.flexible)
        if spec.flexible:
            self._skip_tags()

    def _skip_blob(self, wire: WireType, flexible: bool) -> None:
        if not flexible:
            length = self._length(wire, flexible)
            self.line(f"if {length} > 0:")
            self.line(f"    p += {length}")
            self._refuse_below_null(length, flexible)
            return
        self._flush()
        length = self.variable()
        self.line(f"{length} = b[p]")
        self.line(f"if {length} < 128:")
        self.line(f"    p += {length} or 1")  # A byte of varint, and one byte less than it says.
        if wire is WireType.BYTES:
            self.line("elif b[p + 1] < 128:")
            self.line(f"    p += ({length} & 127 | b[p + 1] << 7) + 1")
        self.line("else:")
        self.line(f"    {length}, p = uvarint(b, p)")
        self.line(f"    if {length}:")
        self.line(f"        p += {length} - 1")

    def _skip_array(self, field: FieldSpec, flexible: bool) -> None:
        length, size = self._count(flexible), _fixed_size(field)
        self.line(f"if {length} > 0:")
        self._depth += 1
        if size is not None:
            self.line(f"p += {length} * {size}")
        else:
            self._check_count(length, _element_bytes_min(field, flexible))
            self._charge("charge", length)
            self.line(f"for _ in range({length}):")
            self._depth += 1
            if field.wire is WireType.ENTITY:
                self._skip_entity(_entity_of(field))
            else:
                self._skip_blob(field.wire, flexible)
            self._flush()
            self._depth -= 1
        self._depth -= 1
        self._refuse_below_null(length, flexible)

    def _charge(self, charge: str, length: str) -> None:
        self._is_bounded = True
        self.line("if bound is not None:")
        self.line(f"    bound.{charge}({length})")

    def _skip_tags(self) -> None:
        self._flush()
        self.line("if b[p]:")
        self.line("    p = skip_tags(b, p)")
        self.line("else:")
        self.line("    p += 1")

    # Lengths and fixed-size runs.

    def _count(self, flexible: bool) -> str:
        return self._prefix(None, flexible)

    def _length(self, wire: WireType, flexible: bool) -> str:
        return self._prefix(wire, flexible)

    def _prefix(self, wire: WireType | None, flexible: bool) -> str:
        """Emit the reading of a length or count into a variable, -1 for null. Leaves ``p`` behind it.

        A classic one may be any negative number: to be refused by the code behind it.
        """
        length = self.variable()
        if flexible:
            self._flush()
            self.line(f"{length} = b[p]")
            self.line(f"if {length} < 128:")
            self.line("    p += 1")
            if wire is WireType.BYTES:  # Often two bytes: not worth a call.
                self.line("elif b[p + 1] < 128:")
                self.line(f"    {length} = {length} & 127 | b[p + 1] << 7")
                self.line("    p += 2")
            self.line("else:")
            self.line(f"    {length}, p = uvarint(b, p)")
            self.line(f"{length} -= 1")
        else:
            self._run.append(("h", 2, length) if wire is WireType.STRING else ("i", 4, length))
            self._flush()
        return length

    def _refuse_negative(self, length: str) -> None:
        self.line("else:")
        self.line(f"    raise bad_length({length}, p)")

    def _refuse_negative_count(self, count: str, field: FieldSpec, flexible: bool) -> None:
        if field.nullable:
            self._refuse_below_null(count, flexible)
        else:
            self.line(f"elif {count} < 0:")
            self.line(f"    raise bad_length({count}, p)")

    def _refuse_below_null(self, length: str, flexible: bool) -> None:
        """Emit the branch behind "if the length is not negative" that refuses what cannot be; a varint always can."""
        if not flexible:
            self.line(f"elif {length} < -1:")
            self.line(f"    raise bad_length({length}, p)")

    def _check_count(self, length: str, bytes_min: int) -> None:
        # A count that cannot be true would be a long loop or a huge list.
        assert bytes_min > 0
        self.line(f"if {length} * {bytes_min} > end - p:")
        self.line(f"    raise bad_length({length}, p)")

    def _flush(self) -> None:
        run, self._run = self._run, []
        size = sum(size for _, size, _ in run)
        while run and run[-1][2] is None:
            run.pop()
        if run:
            unpack = f"unpack{next(self._fresh)}"
            self.names[unpack] = struct.Struct(">" + "".join(code for code, _, _ in run)).unpack_from
            variables = ", ".join(variable for _, _, variable in run if variable is not None)
            self.line(f"({variables},) = {unpack}(b, p)")
        if size:
            self.line(f"p += {size}")


def _resolve(spec: EntitySpec, want: Want) -> FieldSpec | None:
    """The field that a want means in this version."""
    names = (want if isinstance(want, str) else want[0]).removesuffix("@").split("|")
    fields = {field.name: field for field in (*spec.fields, *spec.tagged)}
    return next((fields[name] for name in names if name in fields), None)


class _SkimmerCompiler(_Lines):
    """Emits a skimmer. Flexible messages only: all that must be read to skip a field is varints and marker bytes, one
    byte at a time, so no bytes of a chunk need to be kept for the next one.
    """

    def function(self, spec: EntitySpec, until: str, header_flexible: bool) -> str:
        assert spec.flexible
        assert header_flexible
        self.line("def locate(b, p, e):")
        self._depth = 1
        self._forward(8)  # Size and correlation id.
        self._tags()
        for field in spec.fields:
            if field.name == until:
                break
            self._field(field)
        else:
            assert until == "@tags", f"{spec.name} has no field {until}"
        self.line("return p")
        return self.text()

    def _forward(self, size: int) -> None:
        self.line(f"p += {size}")

    def _byte(self) -> str:
        value = self.variable()
        self.line("if p >= e:")
        self.line("    b, p, e = yield p")
        self.line(f"{value} = b[p]")
        self.line("p += 1")
        return value

    def _varint(self) -> str:
        value = self._byte()
        self.line(f"if {value} > 127:")
        self.line(f"    {value}, (b, p, e) = yield from varint_rest({value}, b, p, e)")
        return value

    def _field(self, field: FieldSpec) -> None:
        if field.is_array:
            length = self._varint()
            if field.wire is WireType.FIXED:
                self.line(f"if {length}:")
                self.line(f"    p += ({length} - 1) * {field.size}")
                return
            # No check of the count is needed: every element takes a byte of the frame at least.
            self.line(f"for _ in range({length} - 1):")
            self._depth += 1
            if field.wire is WireType.ENTITY:
                self._entity(_entity_of(field))
            else:
                self._blob()
            self._depth -= 1
        elif field.wire is WireType.FIXED:
            self._forward(field.size)
        elif field.wire is not WireType.ENTITY:
            self._blob()
        elif field.nullable:
            marker = self._byte()
            self.line(f"if {marker} < 128:")
            self._depth += 1
            self._entity(_entity_of(field))
            self._depth -= 1
        else:
            self._entity(_entity_of(field))

    def _entity(self, spec: EntitySpec) -> None:
        for field in spec.fields:
            self._field(field)
        self._tags()

    def _blob(self) -> None:
        length = self._varint()
        self.line(f"if {length}:")
        self.line(f"    p += {length} - 1")

    def _tags(self) -> None:
        left = self._varint()
        self.line(f"for _ in range({left}):")
        self._depth += 1
        self._varint()
        size = self._varint()
        self.line(f"p += {size}")
        self._depth -= 1
