"""How many elements of arrays a reader of messages goes through: bounded by who decodes what anybody may send.

Each costs microseconds and a hundred bytes of objects, and may be one byte of a frame. Counts stand before what they
count, so too many are refused before any of them is read.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Final, TypeVar

from isthmus_protocol.wire import MalformedFrame

T = TypeVar("T")

_NUMBERS_EACH: Final = 16
"""Numbers that are unpacked at once cost as much as one element."""


class TooManyElements(MalformedFrame):
    """A message has more elements than its reader takes on."""


class Bound:
    """So many, and so many of them are left; ``each``, ``aside``: see :class:`at_most`."""

    __slots__ = ("aside", "each", "elements", "left")

    def __init__(self, elements: int, each: bool, aside: int) -> None:
        self.elements = self.left = elements
        self.each = each
        self.aside = aside

    def begin(self) -> None:
        """A message is read from its beginning."""
        if self.each:
            self.left = self.elements

    def charge(self, count: int) -> None:
        """So many come. Raises TooManyElements."""
        self.left -= count
        if self.left < 0:
            raise TooManyElements(f"more than {self.elements} elements")

    def charge_numbers(self, count: int) -> None:
        """The same of plain numbers."""
        self.charge(count // _NUMBERS_EACH)


_bound: Final[ContextVar[Bound | None]] = ContextVar("elements", default=None)
bound_here: Final = _bound.get
"""Of whoever reads here; None: there is none. Asked once for a message where that is on the hot path."""


class at_most:
    """``with at_most(elements)``: whoever reads more raises TooManyElements; in all, or ``each`` time that a message is
    read. Other threads are not bounded, but by what is :func:`carried` there: to ``aside``, if given, each time."""

    __slots__ = ("_before", "_inside")

    def __init__(self, elements: int, *, each: bool = False, aside: int | None = None) -> None:
        self._inside = Bound(elements, each, elements if aside is None else aside)

    def __enter__(self) -> None:
        self._before = _bound.set(self._inside)

    def __exit__(self, *raised: object) -> None:
        _bound.reset(self._before)


def carried(work: Callable[[], T]) -> Callable[[], T]:
    """Work for another thread, or for later, with the bound that is for it here."""
    bound = _bound.get()
    if bound is None:
        return work
    elements = bound.aside

    def bounded() -> T:
        with at_most(elements, each=True):
            return work()

    return bounded
