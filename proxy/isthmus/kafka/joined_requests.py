"""Questions that come while one like them is under way go out together, as the next request.

Who asks alone waits for nobody. Of many who ask one thing each, the first one's request goes, and the next one asks for
all that the others want: a broker answers a connection's requests one after the other anyway.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Generic, TypeVar

from isthmus.errors import RequestTimedOut

K = TypeVar("K")
A = TypeVar("A")
V = TypeVar("V")


class _Batch(Generic[K, A, V]):
    """What goes out together: what is asked, by what it is of, and what came of it."""

    __slots__ = ("asked", "error", "found", "sent")

    def __init__(self) -> None:
        self.asked: dict[K, A] = {}
        self.sent = False
        self.found: Mapping[K, V] | None = None
        self.error: Exception | None = None

    def takes(self, asked: Mapping[K, A], at_most: int | None) -> bool:
        """Whether this can be asked in the same request: no key of it is there with another question."""
        if at_most is not None and len(self.asked.keys() | asked.keys()) > max(at_most, len(asked)):
            return False
        return all(self.asked.get(key, what) == what for key, what in asked.items() if key in self.asked)


class JoinedRequests(Generic[K, A, V]):
    """Questions of one kind to one peer."""

    __slots__ = ("_next", "_turn")

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._next: _Batch[K, A, V] = _Batch()
        """What the last of the requests asks that are to come."""

    async def ask(
        self,
        asked: Mapping[K, A],
        send: Callable[[Mapping[K, A]], Awaitable[Mapping[K, V]]],
        *,
        at_most: int | None = None,
        once: bool = False,
    ) -> Mapping[K, V]:
        """What the peer says of all of these, by a request that is sent after this call, and maybe of others.

        ``send`` is called with them and with what others ask, unless another one's is. ``at_most``: keys in a request,
        but for what one call asks. ``once``: what may have been done is not asked again. Raises what ``send`` raises,
        and RequestTimedOut where whoever sent it was cancelled.
        """
        if not self._next.takes(asked, at_most):
            self._next = _Batch()
        batch = self._next
        batch.asked.update(asked)
        async with self._turn:
            if self._next is batch:
                self._next = _Batch()
            if batch.found is None and batch.error is None:
                await self._send(batch, send, once)
        if batch.error is not None:
            raise batch.error
        assert batch.found is not None
        return batch.found

    @staticmethod
    async def _send(
        batch: _Batch[K, A, V], send: Callable[[Mapping[K, A]], Awaitable[Mapping[K, V]]], once: bool
    ) -> None:
        if batch.sent and once:
            batch.error = RequestTimedOut("who sent it for several was cancelled: it may have been carried out")
            return
        batch.sent = True
        try:
            batch.found = await send(batch.asked)
        except Exception as error:
            batch.error = error
