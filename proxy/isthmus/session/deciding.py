"""Asks hooks about large requests aside (``aside``), so that no client's request keeps the others waiting.

Requests of up to :data:`ELEMENTS_AT_ONCE` elements are decided on the loop, as nearly all are. One with more is begun
there, which costs no more than that, and begun again in the thread, where all hooks of its API may be asked there
(``RequestHook.pure``). Others wait for their turn.

What was decided may have become wrong meanwhile. So a write is decided anew if a fence has begun since, which is how
reservations and roles come into force, or if the proxy's lease has ended: what passes both is forwarded in one step of
the loop with this look, as what the loop decides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from isthmus_plugins.api import Hold, Request, Verdict
from isthmus_plugins.aside import aside
from isthmus_plugins.clock import monotonic
from isthmus_protocol.elements import TooManyElements, at_most

if TYPE_CHECKING:
    from isthmus.session.dispatch import Route

ELEMENTS_AT_ONCE: Final = 1_000
"""Of a request that the loop decides: some 3 ms."""
BYTES_AT_ONCE: Final = 64 * 1024
"""A request with more is not begun on the loop: one name of megabytes is few elements, and takes as long."""


class Deciding:
    """What decides about requests of many elements."""

    def __init__(self, elements_max: int, vouches_until: Callable[[], float]) -> None:
        """``elements_max``: of one request. ``vouches_until``: the end of the proxy's lease, in monotonic seconds."""
        self.elements_max = elements_max
        self._vouches_until = vouches_until
        self._fences = 0

    def fence_begins(self) -> None:
        """What was not forwarded before now is decided by the state of now."""
        self._fences += 1

    def ask(self, route: Route, request: Request) -> Verdict:
        """What hooks say of a request of ``elements_max`` at most. Raises what they raise, and TooManyElements."""
        assert route.on_request is not None
        try:
            with at_most(self.elements_max, each=True):
                return route.on_request(request)
        except TooManyElements as error:
            raise TooManyElements(f"{route.api} with {error}") from error

    async def verdict(self, route: Route, request: Request) -> Verdict:
        """The same, from the thread."""
        request.aside = True
        while True:
            fences, request.now = self._fences, monotonic()
            vouched = request.now <= self._vouches_until()
            verdict = await aside(self.ask, route, request)
            while isinstance(verdict, Hold):
                verdict = await verdict.verdict
            outdated = self._fences != fences or (vouched and monotonic() > self._vouches_until())
            if not (route.is_write and outdated):
                return verdict
