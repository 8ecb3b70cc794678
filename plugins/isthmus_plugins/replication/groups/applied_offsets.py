"""How far the coordinators here have what a partition of a source's offsets topic adds up to. Without I/O.

The leader end pushes the partition part by part, each *up to* an offset of the log. A part is applied when everything
in it is there, or something newer in its place. What is applied is confirmed in the order of the log.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from typing import Any

from isthmus_plugins.replication.in_doubt.pending_offsets import StillOpen


class _Part:
    __slots__ = ("number", "open", "stable_offset", "still_open", "upto")

    def __init__(self, number: int, upto: int | None, stable_offset: int, still_open: StillOpen | None) -> None:
        self.number = number
        self.upto = upto
        self.stable_offset = stable_offset
        self.still_open = still_open
        """To be stored before this part counts."""
        self.open = 0
        """How much of it is not there yet."""


class AppliedOffsets:
    """One partition, as received over one connection."""

    def __init__(self) -> None:
        self.number = 0
        """Of the latest part."""
        self.upto = -1
        """What the log adds up to at this offset is there; -1: the partition has not been received whole."""
        self.stable_offset = -1
        """All transactions with commits before this offset have ended, and what they committed is there."""
        self._storing = False
        self._parts: deque[_Part] = deque()
        self._open: dict[str, dict[Hashable, deque[_Part]]] = {}
        """By group, and committed offset (or whatever else is pushed of it): the parts that have it and wait for it."""

    def received(
        self,
        keys: Iterable[tuple[str, Hashable]],
        upto: int | None,
        stable_offset: int = -1,
        still_open: StillOpen | None = None,
    ) -> None:
        """A part has come. ``keys``: what is in it, each a group and a committed offset of it. ``upto`` None: there is
        more to that offset.

        ``stable_offset``: where the first commit of a transaction stands that was open then. ``still_open``: see
        :meth:`to_store`.
        """
        self.number += 1
        part = _Part(self.number, upto, stable_offset, still_open if upto is not None else None)
        self._parts.append(part)
        for group, what in keys:
            waiting = self._open.setdefault(group, {}).setdefault(what, deque())
            if not waiting or waiting[-1] is not part:
                waiting.append(part)
                part.open += 1

    def has(self, group: str, what: Hashable, number: int | None = None) -> None:
        """What part ``number`` and those before it had of a committed offset is there; None: whatever came so far."""
        of_group = self._open.get(group)
        waiting = None if of_group is None else of_group.get(what)
        if of_group is None or waiting is None:
            return
        while waiting and (number is None or waiting[0].number <= number):
            waiting.popleft().open -= 1
        if not waiting:
            del of_group[what]
            if not of_group:
                del self._open[group]

    def resolve(self, group: str, is_there: Callable[[Any], bool]) -> None:
        """Look at all of a group that is waited for: what came of it last may be there."""
        for what in [what for what in self._open.get(group, ()) if is_there(what)]:
            self.has(group, what)

    def to_store(self) -> tuple[int, StillOpen] | None:
        """What is to be stored before more is applied: transactions that were open at an offset. Returned once.

        To be followed by :meth:`stored`.
        """
        if not self._parts or self._parts[0].open or self._storing:
            return None
        part = self._parts[0]
        if part.still_open is None or part.upto is None:
            return None
        self._storing = True
        return part.upto, part.still_open

    def stored(self) -> None:
        """What :meth:`to_store` said is."""
        self._storing, self._parts[0].still_open = False, None

    def advance(self) -> bool:
        """Whether :attr:`upto` is another one now."""
        before = self.upto
        while self._parts and not self._parts[0].open and self._parts[0].still_open is None:
            part = self._parts.popleft()
            if part.upto is not None:
                self.upto, self.stable_offset = part.upto, part.stable_offset
        return self.upto != before
