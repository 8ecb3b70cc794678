"""Names of consumer groups, and patterns for them: ``billing`` is one group, ``app-*`` all that begin with ``app-``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, Generic, TypeVar

ANY: Final = "*"
PATTERN_CHARS_MAX: Final = 1000

T = TypeVar("T")


def pattern_problem(pattern: str) -> str | None:
    """What is wrong with a pattern, None for a good one."""
    if not pattern:
        return "an empty pattern matches no group: a name, a prefix with '*' behind it, or '*' alone"
    if len(pattern) > PATTERN_CHARS_MAX:
        return f"a pattern is longer than {PATTERN_CHARS_MAX}"
    if ANY in pattern[:-1] or "," in pattern:
        return f"{pattern!r} is no pattern: '*' stands at the end only, and there is no ','"
    return None


class ByPattern(Generic[T]):
    """What belongs to the pattern that fits a group best: its own name, else the longest prefix."""

    __slots__ = ("_exact", "_prefixes")

    def __init__(self, entries: Mapping[str, T]) -> None:
        self._exact = {pattern: value for pattern, value in entries.items() if not pattern.endswith(ANY)}
        prefixes = ((pattern[:-1], value) for pattern, value in entries.items() if pattern.endswith(ANY))
        self._prefixes = sorted(prefixes, key=lambda entry: -len(entry[0]))

    def get(self, group: str) -> T | None:
        if group in self._exact:
            return self._exact[group]
        return next((value for prefix, value in self._prefixes if group.startswith(prefix)), None)


class GroupPatterns:
    """A set of patterns."""

    __slots__ = ("_patterns",)

    def __init__(self, patterns: Iterable[str]) -> None:
        self._patterns = ByPattern(dict.fromkeys(patterns, True))

    def __contains__(self, group: object) -> bool:
        return isinstance(group, str) and self._patterns.get(group) is not None
