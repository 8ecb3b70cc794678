"""Asks hooks about large requests aside (``aside``), so that no client's request keeps the others waiting.

Requests of up to :data:`ELEMENTS_AT_ONCE` elements are decided on the loop, as nearly all are. One with more is begun
there, which costs no more than that, and begun again in the thread, where all hooks of its API may be asked there
(``RequestHook.pure``). Others wait for their turn.

What was decided may have become wrong while a request was held, whatever it waited for: the thread, the broker that a
hook had asked (``Ask``), or what else a hook awaits (``Hold``). So a write is decided anew, by all hooks, if a fence
has begun since, which is how reservations and roles come into force, or if the proxy's lease has ended: what passes
both is forwarded in one step of the loop with this look, as what the loop decides at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from isthmus_plugins.api import Answer, Ask, Request, Verdict
from isthmus_plugins.aside import aside, decided_aside
from isthmus_plugins.clock import monotonic
from isthmus_protocol.elements import TooManyElements, at_most
from isthmus_protocol.error_answers import refused_as_a_whole
from isthmus_protocol.error_codes import INVALID_REQUEST

if TYPE_CHECKING:
    from isthmus.session.dispatch import Route

CAUSE: Final = "too_many_elements"
ELEMENTS_AT_ONCE: Final = 1_000
"""Of a request that the loop decides: some 3 ms."""
PRODUCE_ELEMENTS_AT_ONCE: Final = 400
"""Of a Produce, each time that one of its hooks reads it: 200 topics, of whose batches each may be looked into."""
BYTES_AT_ONCE: Final = 64 * 1024
"""A request with more is not begun on the loop: one name of megabytes is few elements, and takes as long."""


class Since(NamedTuple):
    """When a decision was begun."""

    fences: int
    """That had begun by then."""
    vouched: bool
    """Whether the lease ran."""


NOT_BEGUN: Final = Since(0, vouched=False)


class Deciding:
    """What decides about requests of many elements, and which decisions still count."""

    def __init__(self, elements_max: int, vouches_until: Callable[[], float]) -> None:
        """``elements_max``: of one request. ``vouches_until``: the end of the proxy's lease, in monotonic seconds."""
        self.elements_max = elements_max
        self._vouches_until = vouches_until
        self._fences = 0

    def fence_begins(self) -> None:
        """What was not forwarded before now is decided by the state of now."""
        self._fences += 1

    def since(self) -> Since:
        """For what is decided now."""
        return Since(self._fences, monotonic() <= self._vouches_until())

    def overtaken(self, since: Since) -> bool:
        """Whether what was decided then may not count any more."""
        return self._fences != since.fences or (since.vouched and monotonic() > self._vouches_until())

    def ask(self, route: Route, request: Request) -> Verdict:
        """What hooks say of a request of ``elements_max`` at most. One with more is answered with an error where one
        says all; else TooManyElements. Raises what they raise, too."""
        assert route.on_request is not None
        try:
            with at_most(self.elements_max, each=True):
                return route.on_request(request)
        except TooManyElements as error:
            answer = refused_as_a_whole(route.api_key, route.version, request.correlation_id, INVALID_REQUEST)
            if answer is not None and request.whole:
                return Answer(answer, CAUSE)
            raise TooManyElements(f"{route.api} with {error}") from error

    async def verdict(self, route: Route, request: Request) -> Verdict:
        """The same, from the thread."""
        request.aside = True
        return await decided_aside(partial(self.ask, route, request))


async def told_aside(ask: Ask, answer: bytes) -> Verdict:
    """What a large answer leads to: it is read in the thread."""
    told: Any = await aside(ask.read, answer)
    return ask.then(told)
