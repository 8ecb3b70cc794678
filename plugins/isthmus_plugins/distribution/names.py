"""What a topic of a tree is called at each of its clusters (document 000).

Each cluster has a pattern, such as ``{tenant}-prod-{environment}-{topic}``. All have the same fields, and differ in
constants and order. A field's value has letters and digits, the one of ``{topic}`` whatever a name may have; behind
each field stands one of ``.``, ``_`` and ``-``, or nothing. So a name is read in one way, and what is written of what
was read is read as the same: between names that fit, clusters translate one to one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Final, TypeAlias

TOPIC: Final = "topic"
"""The field that every pattern has, and whose value may have anything."""
NAME_MAX: Final = 249
"""Characters of a topic's name, as brokers have it."""
_FIELD: Final = re.compile(r"\{([a-z][a-z0-9_]*)\}")
_CONSTANT: Final = re.compile(r"[A-Za-z0-9._-]*")
_PUNCTUATION: Final = (".", "_", "-")
_VALUE: Final = re.compile(r"[A-Za-z0-9]*")

Values: TypeAlias = Mapping[str, str]
"""By field."""
_Meaning: TypeAlias = frozenset[tuple[str, ...]]
"""What a prefix says of the fields of a name."""


def is_name(text: str) -> bool:
    """Whether a topic of a tree may be called so: what begins with ``__`` is Kafka's own, or the proxies'."""
    return 0 < len(text) <= NAME_MAX and text not in (".", "..") and not text.startswith("__")


@dataclass(frozen=True)
class Pattern:
    """What topics are called at one cluster."""

    text: str

    @cached_property
    def fields(self) -> list[str]:
        return _FIELD.findall(self.text)

    @cached_property
    def _parts(self) -> list[str]:
        """Constants and names of fields in turn, a constant first and last."""
        return _FIELD.split(self.text)

    @cached_property
    def _expression(self) -> re.Pattern[str]:
        constants, made = self._parts[::2], re.escape(self._parts[0])
        for field, constant in zip(self.fields, constants[1:], strict=True):
            value = r"[A-Za-z0-9._-]+" if field == TOPIC else r"[A-Za-z0-9]+"
            made += f"(?P<{field}>{value}){re.escape(constant)}"
        return re.compile(made)

    def problems(self) -> Iterator[str]:
        """Why names cannot be read by it."""
        if not all(map(_CONSTANT.fullmatch, self._parts[::2])):
            yield (
                "names have letters, digits, '.', '_' and '-', and fields are lower-case words in braces, such as "
                "{topic}"
            )
        if TOPIC not in self.fields:
            yield "it has no {topic}: that field takes what a name has of its own"
        if twice := {each for each in self.fields if self.fields.count(each) > 1}:
            yield f"{{{min(twice)}}} stands twice: a name is to say it once"
        behind = self._parts[2::2]
        for field, constant in zip(self.fields, behind, strict=True):
            is_last = field == self.fields[-1] and not constant
            if not is_last and not constant.startswith(_PUNCTUATION):
                yield f"nothing tells where {{{field}}} ends: write '.', '_' or '-' behind it"
        if self.text.startswith("__"):
            yield "names that begin with __ are Kafka's own, or the proxies': begin it otherwise"

    def read(self, name: str) -> Values | None:
        """The fields' values; None: it is not such a name."""
        found = self._expression.fullmatch(name) if is_name(name) else None
        return None if found is None else found.groupdict()

    def write(self, values: Values) -> str | None:
        """None: that is no name of a topic, as it would be too long for instance."""
        constants = self._parts[::2]
        name = constants[0] + "".join(
            values[field] + constant for field, constant in zip(self.fields, constants[1:], strict=True)
        )
        return name if is_name(name) else None

    def meaning(self, prefix: str) -> _Meaning | None:
        """What names that fit and begin with a prefix have in common; None: there are none.

        Where two patterns say the same of a prefix, a name begins with it exactly where its translation does.
        """
        rest, said = prefix, set[tuple[str, ...]]()
        for at, part in enumerate(self._parts):
            if at % 2 == 0:
                if part.startswith(rest):
                    return frozenset(said)  # also where nothing is left
                if not rest.startswith(part):
                    return None
                rest = rest[len(part) :]
            elif part == TOPIC:
                behind = self._parts[at + 1 :]
                # What has a place where the value may end, and goes on behind it, says something of both.
                more = () if behind == [""] or _VALUE.fullmatch(rest) else tuple(behind)
                return frozenset({*said, ("begins", part, rest, *more)})
            else:
                value = _VALUE.match(rest)
                assert value is not None  # it may be empty
                if value[0] == rest:
                    return frozenset({*said, ("begins", part, rest)})
                if not value[0]:
                    return None
                said.add(("is", part, value[0]))
                rest = rest[value.end() :]
        return None if rest else frozenset(said)


@dataclass(frozen=True)
class Names:
    """Of a version of a tree, by cluster."""

    patterns: Mapping[str, Pattern]

    def fits(self, leaf: str, name: str) -> bool:
        """Whether a topic of a cluster has a name that others can translate."""
        return self.patterns[leaf].read(name) is not None

    def translated(self, name: str, here: str, there: str) -> str | None:
        """What the topic that one cluster calls so is called at another one; None: nothing, as it does not fit."""
        values = self.patterns[here].read(name)
        return None if values is None else self.patterns[there].write(values)

    def shared(self, name: str, leaf: str) -> str | None:
        """What all clusters write for a topic of a cluster: its fields. No topic is called so, as it has ``/``."""
        values = self.patterns[leaf].read(name)
        return None if values is None else "/".join(f"{field}={value}" for field, value in sorted(values.items()))

    def own(self, shared: str, leaf: str) -> str | None:
        """What a cluster calls the topic for which all write that; None: nothing."""
        values = dict(each.partition("=")[::2] for each in shared.split("/"))
        pattern = self.patterns[leaf]
        if values.keys() != {*pattern.fields}:
            return None
        name = pattern.write(values)
        return name if name is not None and self.shared(name, leaf) == shared else None


def problems(names: Names, clusters: Collection[str], prefixes: Collection[str]) -> Iterator[str]:
    """Why names cannot be translated between clusters. ``prefixes``: of the topics that are distributed.

    Those are to mean the same topics at each cluster: what one distributes the others are to take as the tree's, too.
    """
    patterns = names.patterns
    for leaf in sorted(patterns.keys() - {*clusters}):
        yield f"names.{leaf}: there is no such cluster: correct it, or take it out"
    for leaf in (each for each in clusters if each not in patterns):
        yield f"names has none of {leaf}: write what topics are called there, as for the other clusters"
    wrong = [f"names.{leaf}: {each}" for leaf, pattern in patterns.items() for each in pattern.problems()]
    yield from wrong
    if wrong:
        return
    for (one, first), (other, second) in pairwise(patterns.items()):
        if differing := {*first.fields} ^ {*second.fields}:
            field = min(differing)
            has, lacks = (one, other) if field in first.fields else (other, one)
            yield (
                f"names.{lacks}: it has no {{{field}}}, which {has} has, so names could not be translated back: write "
                f"the field there, or its value in the place of the field at {has}"
            )
            return
    said = {leaf: {each: pattern.meaning(each) for each in prefixes} for leaf, pattern in patterns.items()}
    for prefix in prefixes:
        if all(of[prefix] is None for of in said.values()):
            yield f"topics: {prefix!r}: no name that fits begins so at any cluster: correct it, or take it out"
    for (one, of_one), (other, of_other) in pairwise(said.items()):
        if {*of_one.values()} - {None} != {*of_other.values()} - {None}:
            yield (
                f"topics: names that begin so are of other topics at {other} than at {one}: have prefixes end behind "
                f"the value of a field with which both begin, or write '' for all names that fit"
            )
            return
