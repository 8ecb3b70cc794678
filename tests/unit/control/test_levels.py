"""Feature levels: what a value needs, and how a proxy says which one it knows."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar, get_args, get_type_hints

import pytest

from isthmus_control import commands as c
from isthmus_control import levels
from isthmus_control.codec import canonical, from_json, parse, since
from isthmus_control.control_state import ControlState
from isthmus_control.model import ResourceType


@dataclass(frozen=True)
class Part:
    old: int
    new: int = field(default=0, metadata=since(2))


@dataclass(frozen=True)
class Newer(c.Body):
    SINCE: ClassVar[int] = 3
    name: str


@dataclass(frozen=True)
class Whole:
    parts: tuple[Part, ...] = ()
    named: Mapping[str, Part] = field(default_factory=dict)


def test_a_proxy_says_which_level_it_knows_behind_its_version() -> None:
    for version in ("1.2.3", "1.2.3+local"):
        said = levels.with_known_level(version)
        assert levels.known_level(said) == levels.KNOWN_LEVEL
        assert levels.plain_version(said) == version
        with_key = levels.with_known_level(version, "ab12cd34")
        assert levels.known_level(with_key) == levels.KNOWN_LEVEL
        assert (levels.key_id_of(with_key), levels.key_id_of(said)) == ("ab12cd34", "")
        assert levels.plain_version(with_key) == version
        # What the version before control keys read of it.
        before = re.search(r"[+.]level\.([0-9]{1,9})\Z", with_key)
        assert before is not None
        assert int(before[1]) == levels.KNOWN_LEVEL
    for older in ("0.1.0", "0.1.0+level", "level.3", ""):
        assert levels.known_level(older) == 0
        assert levels.plain_version(older) == older


@pytest.mark.parametrize(
    ("value", "level"),
    [
        (Part(1), 0),
        (Part(1, 5), 2),
        (Whole((Part(1), Part(1, 5))), 2),
        (Whole(named={"a": Part(1, 5)}), 2),
        (Whole((Part(1),)), 0),
        (Newer("x"), 3),
        (c.CreateNamespace(ResourceType.TOPIC, "a-"), 0),
        (c.RaiseLevel(7), 0),
    ],
)
def test_the_level_that_a_value_needs(value: object, level: int) -> None:
    assert levels.level_of(value) == level


def test_what_a_level_brings_is_left_out_where_it_has_its_default() -> None:
    assert canonical(Part(1)) == b'{"old":1}'
    assert canonical(Part(1, 5)) == b'{"new":5,"old":1}'
    for part in (Part(1), Part(1, 5)):
        assert from_json(Part, parse(canonical(part))) == part


def test_every_level_is_described() -> None:
    assert sorted(levels.LEVELS) == list(range(1, levels.KNOWN_LEVEL + 1))


def shapes() -> dict[str, Any]:
    """What a log of level 0 may hold: by class, its fields with their types, or its values."""
    found: dict[str, Any] = {}

    def note(shape: Any) -> None:
        for part in get_args(shape):
            note(part)
        if not isinstance(shape, type) or shape.__name__ in found or not shape.__module__.startswith("isthmus_"):
            return
        if issubclass(shape, Enum):
            found[shape.__name__] = [each.value for each in shape]
            return
        hints = get_type_hints(shape)
        kept = getattr(shape, "_fields", None) or [
            each.name for each in fields(shape) if not each.metadata.keys() & {"derived", "left_out"}
        ]
        found[shape.__name__] = [f"{name}: {hints[name]}" for name in kept]
        for name in kept:
            note(hints[name])

    note(ControlState)
    for kind, body in c.KINDS.items():
        if body.SINCE == 0:
            note(body)
            found[body.__name__] = [f"{kind} {body.VERSION}", *found[body.__name__]]
    return found


def test_a_log_of_level_0_holds_what_the_first_version_with_levels_wrote() -> None:
    """Whoever adds something gives it a level: proxies of a version before would stop at it.

    But for what an operator alone writes, to raise the level, or to accept a log that was lost.
    """
    assert shapes() == json.loads((Path(__file__).parent / "level_0.json").read_text())
