"""What simulations of truncations share: clusters whose topics are made anew, proxies that do it, their salvage."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from isthmus_protocol.record_codec import decode_records
from isthmus_protocol.salvage import read_salvage
from support.fake_cluster import FakeCluster


class TruncatedCluster(FakeCluster):
    """A cluster whose topics can be deleted by id, with the positions that groups have in them."""

    async def delete_topic_id(self, topic_id: bytes) -> None:
        await self._request()
        for name in [name for name, topic in self.found.items() if topic.topic_id == topic_id]:
            del self.found[name]
            for positions in self.offsets.values():
                for place in [place for place in positions if place[0] == name]:
                    del positions[place]

    async def epoch_end(self, topic: str, partition: int, epoch: int) -> tuple[int, int]:
        await self._request()
        found = self._found(topic, partition)
        known = [header.leader_epoch for header in found.headers if header.leader_epoch <= epoch]
        if not known:
            return -1, -1
        later = [header.base_offset for header in found.headers if header.leader_epoch > epoch]
        return max(known), min(later, default=found.end)


def salvaged(directory: Path) -> list[bytes | None]:
    """The values in a proxy's salvage files."""
    found = []
    for path in sorted(directory.glob("salvage/*.salvage")):
        salvage = read_salvage(path.read_bytes())
        found += [record.value for batch, _ in salvage.batches() for record in decode_records(batch)]
    return found


async def _inline(function: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
    """In the place of ``asyncio.to_thread``: threads know nothing of simulated time."""
    return function(*arguments, **more)


def simulate_truncations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have truncations run on the simulated loop's clock."""
    monkeypatch.setattr(asyncio, "to_thread", _inline)
