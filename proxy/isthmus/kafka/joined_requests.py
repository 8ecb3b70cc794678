"""Questions that come together, or while one like them is under way, go out together, as one request.

Who asks alone waits for nobody. A broker answers a connection's requests one after the other anyway, so of many who
ask one thing each nobody waits for longer than if all had gone at once, and all go on at the same time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Generic, TypeAlias, TypeVar

from isthmus.errors import RequestTimedOut

K = TypeVar("K")
A = TypeVar("A")
V = TypeVar("V")
Send: TypeAlias = Callable[[Mapping[K, A]], Awaitable[Mapping[K, V]]]


class _Batch(Generic[K, A, V]):
    """What goes out together: what is asked, by what it is of, and what came of it."""

    __slots__ = ("asked", "ended", "error", "found", "sent")

    def __init__(self) -> None:
        self.asked: dict[K, A] = {}
        self.sent = False
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when it was answered, or whoever was to send it was cancelled."""
        self.found: Mapping[K, V] | None = None
        self.error: Exception | None = None

    def takes(self, asked: Mapping[K, A], at_most: int | None) -> bool:
        """Whether this can be asked in the same request: no key of it is there with another question."""
        if self.sent or (at_most is not None and len(self.asked.keys() | asked.keys()) > max(at_most, len(asked))):
            return False
        return all(self.asked[key] == what for key, what in asked.items() if key in self.asked)


class JoinedRequests(Generic[K, A, V]):
    """Questions of one kind to one peer."""

    __slots__ = ("_last", "_turn")

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._last: _Batch[K, A, V] | None = None
        """The last of those that are, or were, to be sent."""

    async def ask(
        self, asked: Mapping[K, A], send: Send[K, A, V], *, at_most: int | None = None, once: bool = False
    ) -> Mapping[K, V]:
        """What the peer says of all of these, by a request that is sent after this call, and maybe of others.

        ``send`` is called with them and with what others ask, unless another one's is. ``at_most``: keys in a request,
        but for what one call asks. ``once``: what may have been done is not asked again. Raises what ``send`` raises,
        and RequestTimedOut where whoever sent it was cancelled.
        """
        while True:
            batch = self._last
            if batch is not None and batch.takes(asked, at_most):
                batch.asked.update(asked)
                await asyncio.shield(batch.ended)
            else:
                batch = self._last = _Batch()
                batch.asked.update(asked)
                await self._send(batch, send)
            if batch.error is not None:
                raise batch.error
            if batch.found is not None:
                return batch.found
            if batch.sent and once:
                raise RequestTimedOut("who sent it for several was cancelled: it may have been carried out")

    async def _send(self, batch: _Batch[K, A, V], send: Send[K, A, V]) -> None:
        try:
            await asyncio.sleep(0)  # whoever is ready to ask asks now
            async with self._turn:
                batch.sent = True
                batch.found = await send(batch.asked)
        except Exception as error:
            batch.error = error
        finally:
            if self._last is batch:
                self._last = None
            batch.ended.set_result(None)
