"""What a subject is called in another registry.

A registry has formats, such as ``{tenant}-{instance}-{environment}-{topic}``; the n-th of one registry and the n-th of
another belong together, and a subject goes by the first format that it has. A variable's value does not contain what
stands behind the variable in the format, except for the last one's, which takes the rest: so a name is read in one way.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Final

_VARIABLE: Final = re.compile(r"\{([a-z][a-z0-9_]*)\}")
UNCHANGED: Final = "{subject}"
"""The format of every name."""


class FormatError(Exception):
    """A format cannot be read, or does not go with another one."""


@dataclass(frozen=True)
class Format:
    """One format. Raises FormatError."""

    text: str

    def __post_init__(self) -> None:
        if not self.variables:
            raise FormatError(f"{self.text!r} has no variable: write one such as {{topic}}")
        if twice := {name for name in self.variables if self.variables.count(name) > 1}:
            raise FormatError(f"{self.text!r} has {{{min(twice)}}} twice")
        if any("{" in each or "}" in each for each in self._parts[::2]):
            raise FormatError(f"{self.text!r}: variables are lower-case words in braces, such as {{topic}}")
        if any(not between for between in self._parts[2:-1:2]):
            raise FormatError(f"{self.text!r}: nothing tells where one variable ends and the next one begins")

    @cached_property
    def variables(self) -> list[str]:
        return _VARIABLE.findall(self.text)

    @cached_property
    def _parts(self) -> list[str]:
        """Literal texts and names of variables in turn, a literal first and last."""
        return _VARIABLE.split(self.text)

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        literals, names = self._parts[::2], self._parts[1::2]
        made = re.escape(literals[0])
        for name, (_, behind) in zip(names, pairwise(literals), strict=True):
            last = name == names[-1]
            value = ".+" if last or not behind else f"(?:(?!{re.escape(behind)}).)+"
            made += f"(?P<{name}>{value}){re.escape(behind)}"
        return re.compile(made, re.DOTALL)

    def read(self, subject: str) -> dict[str, str] | None:
        """The variables' values; None: it is not such a name."""
        found = self._pattern.fullmatch(subject)
        return None if found is None else found.groupdict()

    def write(self, values: dict[str, str]) -> str:
        literals, names = self._parts[::2], self._parts[1::2]
        return literals[0] + "".join(values[name] + literal for name, literal in zip(names, literals[1:], strict=True))


@dataclass(frozen=True)
class Translation:
    """From the primary's names to a target's. Raises FormatError."""

    source: Sequence[Format]
    target: Sequence[Format]

    def __post_init__(self) -> None:
        if len(self.source) != len(self.target):
            raise FormatError(
                f"{len(self.target)} formats, and the primary has {len(self.source)}: the n-th of both belong together"
            )
        for source, target in zip(self.source, self.target, strict=True):
            if unknown := [name for name in target.variables if name not in source.variables]:
                raise FormatError(
                    f"{target.text!r} has {{{unknown[0]}}}, which {source.text!r} of the primary does not have: write "
                    "its value in its place"
                )

    def to_target(self, subject: str) -> str | None:
        """None: the subject is not distributed."""
        for source, target in zip(self.source, self.target, strict=True):
            values = source.read(subject)
            if values is not None:
                return target.write(values)
        return None

    def is_targets(self, subject: str) -> bool:
        """Whether a name at the target is such as the primary's subjects have there."""
        return any(each.read(subject) is not None for each in self.target)


def as_they_are() -> Translation:
    return Translation((Format(UNCHANGED),), (Format(UNCHANGED),))
