"""What a registry holds."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, NamedTuple

PROTOBUF: Final = "PROTOBUF"


class Reference(NamedTuple):
    """What a schema takes from another one."""

    name: str
    """As the text has it: a type of Avro, a URL of JSON Schema, a file of Protobuf."""
    subject: str
    version: int


Meaning = tuple[str, str, tuple[Reference, ...]]


@dataclass(frozen=True)
class Schema:
    kind: str
    text: str
    references: tuple[Reference, ...] = ()

    @cached_property
    def meaning(self) -> Meaning:
        """Equal for two schemas that differ in nothing but spaces and the order of keys: registries write them anew."""
        text = self.text
        if self.kind != PROTOBUF:
            try:
                text = json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"))
            except ValueError:
                pass  # a name of Avro without quotes; whatever it is, it means itself
        return self.kind, text.strip(), tuple(sorted(self.references))


@dataclass(frozen=True, slots=True)
class Version:
    id: int
    """What records have in front of them."""
    schema: Schema
    deleted: bool = False
    """Softly: it has its number and its id, and is not offered to anybody."""

    def is_like(self, other: Version) -> bool:
        return self.id == other.id and self.schema.meaning == other.schema.meaning


Place = tuple[str, int]
"""A subject and the number of a version."""


@dataclass(frozen=True)
class Contents:
    subjects: Mapping[str, Mapping[int, Version]] = field(default_factory=dict)
    levels: Mapping[str, str] = field(default_factory=dict)
    """Compatibility levels, of the subjects that have one of their own."""
    default_level: str | None = None
    """That of the others; None: the registry's own default."""

    def places(self) -> Iterator[tuple[Place, Version]]:
        for subject, versions in self.subjects.items():
            for number, version in versions.items():
                yield (subject, number), version

    def at(self, place: Place) -> Version | None:
        return self.subjects.get(place[0], {}).get(place[1])
