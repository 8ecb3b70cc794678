"""Log lines of what may happen thousands of times at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

RARELY_S: Final = 1.0


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
