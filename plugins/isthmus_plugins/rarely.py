"""Log lines of what may happen thousands of times at once."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Final, Generic, TypeAlias, TypeVar

RARELY_S: Final = 1.0
EACH_S: Final = 60.0
NAMES_MAX: Final = 1000
"""Names that :class:`RarelyEach` tells apart at a time; what happens to others is one name's."""
OTHERS: Final = ""

T = TypeVar("T")


Fields: TypeAlias = Mapping[str, object]
"""What a log line has beside its message."""


class Rarely:
    """Of what may happen to thousands of connections at once: a line for the first, then one a second for others."""

    def __init__(self, say: Callable[[int, str], None]) -> None:
        """``say`` writes the line: for how many, and the detail of the last."""
        self._say = say
        self._count = 0
        self._detail = ""
        self._timer: asyncio.TimerHandle | None = None

    def one(self, detail: str) -> None:
        """It has happened once more."""
        self._count += 1
        self._detail = detail
        if self._timer is None:
            self._write()

    def _write(self) -> None:
        self._timer = None
        if self._count:
            count, self._count = self._count, 0
            self._say(count, self._detail)
            self._timer = asyncio.get_running_loop().call_later(RARELY_S, self._write)


class RarelyEach(Generic[T]):
    """Of what anybody may have happen, as often as they like: for each name a line, then one a minute for others."""

    def __init__(self, say: Callable[[int, T], None]) -> None:
        """``say`` writes the line: for how many, and the detail of the last."""
        self._say = say
        self._waiting: dict[str, tuple[int, T | None]] = {}
        """By name, how often since its last line, and the last of them. A name is here for as long as it has lines."""

    def one(self, name: str, detail: T) -> None:
        """It has happened once more, to this name."""
        if name not in self._waiting and len(self._waiting) >= NAMES_MAX:
            name = OTHERS
        if name in self._waiting:
            count, _ = self._waiting[name]
            self._waiting[name] = count + 1, detail
        else:
            self._write(name, 1, detail)

    def _write(self, name: str, count: int, detail: T) -> None:
        self._waiting[name] = 0, None
        asyncio.get_running_loop().call_later(EACH_S, self._again, name)
        self._say(count, detail)

    def _again(self, name: str) -> None:
        count, detail = self._waiting.pop(name)
        if detail is not None:
            self._write(name, count, detail)


def rare_lines(logger: logging.Logger, message: str, level: int = logging.WARNING) -> RarelyEach[Fields]:
    """Lines with this message and the fields of the last that it was about, and how many ``times``."""
    return RarelyEach(lambda times, fields: logger.log(level, message, extra={**fields, "times": times}))
