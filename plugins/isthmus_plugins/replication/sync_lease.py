"""The follower end's leases of what is In-Sync: what it may say of the source without hearing from it.

The follower asks, and counts a lease from when it asked: so it ends no later than the leader end takes it to end, which
counts from when it answered, whatever happens on the way.
"""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import Any, Final

from isthmus_plugins.replication.connection import LinkConnection, LinkLost, LinkRejected
from isthmus_plugins.replication.follower import FollowerEnd
from isthmus_plugins.replication.transaction_store import TransactionStore
from isthmus_plugins.tasks import Tasks

ASK_INTERVAL_S: Final = 0.4
ASK_TIMEOUT_S: Final = 1.5


class SyncLeases:
    """Until when each partition that follows here is known to be In-Sync."""

    def __init__(self, follower_end: FollowerEnd, store: TransactionStore) -> None:
        self._follower_end = follower_end
        self._store = store
        self._tasks = Tasks("sync-leases")
        self._offered: set[LinkConnection] = set()
        self._offer = asyncio.Event()
        self._asking: set[LinkConnection] = set()
        self.until: dict[tuple[str, int], float] = {}
        """By (topic, partition): monotonic seconds. What is over is kept: until then it was In-Sync."""

    def start(self) -> None:
        self._tasks.start("ask", self._ask_for_ever())

    async def stop(self) -> None:
        await self._tasks.close()

    def in_sync(self, topic: str, partition: int) -> bool:
        return monotonic() < self.until.get((topic, partition), float("-inf"))

    async def on_offer(self, connection: LinkConnection, params: dict[str, Any]) -> dict[str, Any]:
        """The leader end of a synchronous link will grant leases over this connection."""
        self._offered.add(connection)
        self._offer.set()
        self._store.needed()
        return {}

    async def _ask_for_ever(self) -> None:
        while True:
            self._offered = {connection for connection in self._offered if not connection.lost}
            if not self._offered:
                self._offer.clear()
                await self._offer.wait()
            streams: dict[LinkConnection, dict[int, tuple[str, int]]] = {}
            for stream in self._follower_end.streams():
                if stream.connection in self._offered and not stream.closed:
                    streams.setdefault(stream.connection, {})[stream.stream_id] = stream.place
            for connection, places in streams.items():
                if connection not in self._asking:
                    self._tasks.start("lease", self._ask(connection, places))
            await asyncio.sleep(ASK_INTERVAL_S)

    async def _ask(self, connection: LinkConnection, places: dict[int, tuple[str, int]]) -> None:
        self._asking.add(connection)
        asked_at = monotonic()
        try:
            answer = await connection.call("sync_lease", {"streams": list(places)}, ASK_TIMEOUT_S)
            until = asked_at + int(answer["lease_ms"]) / 1000
            for stream_id in answer["in_sync"]:
                place = places.get(int(stream_id))
                if place is not None:
                    self.until[place] = max(until, self.until.get(place, until))
            if not answer["synchronous"]:
                self._offered.discard(connection)
        except (LinkRejected, LinkLost, TimeoutError):
            pass  # then it is not known to be In-Sync any longer
        finally:
            self._asking.discard(connection)
