"""The bytes of requests that the process keeps until they are whole: for all connections, as a broker's memory pool.

A frame is paid for as a whole when it begins to be kept, as long as anything is left: so the largest one comes in, too,
and at most one frame more is kept than there is room for. The others wait in their order, and are not read meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Final

UNCOUNTED_BYTES: Final = 16 * 1024
"""A frame of no more is kept without asking whether there is room."""


class QueuedBytes:
    """What is left of them."""

    __slots__ = ("_most", "_waiting", "left")

    def __init__(self, most: int) -> None:
        self._most = self.left = most
        """May be below zero."""
        self._waiting: dict[Hashable, tuple[int, Callable[[], None]]] = {}
        """In their order."""

    def ask(self, owner: Hashable, size: int, granted: Callable[[], None]) -> bool:
        """Whether ``owner`` may keep so many bytes; if not, ``granted`` is called when it may."""
        if self.left > 0 and not self._waiting:
            self.left -= size
            return True
        self._waiting[owner] = size, granted
        return False

    def take(self, size: int) -> None:
        """Count what is there already."""
        self.left -= size

    def give_back(self, size: int) -> None:
        """So many bytes are kept no more."""
        self.left += size
        self._grant()

    def forget(self, owner: Hashable) -> bool:
        """Whether ``owner`` was waiting. It does so no more."""
        return self._waiting.pop(owner, None) is not None

    def _grant(self) -> None:
        while self._waiting and self.left > 0:
            owner = next(iter(self._waiting))
            size, granted = self._waiting.pop(owner)
            self.left -= size
            granted()

    @property
    def kept(self) -> int:
        """How many are kept."""
        return self._most - self.left

    @property
    def waiting(self) -> int:
        """How many wait."""
        return len(self._waiting)
