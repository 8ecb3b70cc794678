"""What the distributor of groups' offsets says nothing of."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from isthmus_plugins.distribution.document import read_document
from isthmus_plugins.distributor.offset_distributor import OffsetDistributor
from isthmus_plugins.distributor.reasons import Waits

CLUSTERS = {name: {"cluster_id": f"id-{name}", "bootstrap_servers": "h:1"} for name in ("c1", "c2")}
DOCUMENT = {"version": 1, "topics": ["t-"], "groups": ["g-"], "clusters": CLUSTERS, "tree": ["c1", "c2"]}


@pytest.mark.parametrize(("theirs", "said"), [(2, True), (1, False), (3, False)])
def test_groups_of_a_topic_with_other_partitions_elsewhere_are_told_of_by_nobody(theirs: int, said: bool) -> None:
    """Messages go there by their keys: of one partition of theirs, unread ones may stand in any of ours."""
    reached = {("t-1", number): 1_000 + number for number in range(theirs)}
    context: Any = SimpleNamespace(
        cluster=SimpleNamespace(transactions=lambda _: SimpleNamespace()), clock=SimpleNamespace(monotonic=lambda: 5.0)
    )
    timestamps: Any = SimpleNamespace(logs={("t-1", 0): None, ("t-1", 1): None})
    nothing: Any = None
    document = read_document(json.dumps(DOCUMENT))
    distributor = OffsetDistributor(context, document, "c1", nothing, nothing, timestamps, nothing)

    async def asked(other: str) -> dict[tuple[str, int], int]:
        return reached

    distributor._asked = asked  # type: ignore[method-assign]
    asyncio.run(distributor.ask("c2"))
    distributor.count_partitions()
    if said:
        assert distributor._on_the_way(("t-1", 0), read_at=6.0) == [1_000]
    else:
        with pytest.raises(Waits, match=f"something of {theirs} partitions of t-1, of which this cluster has 2"):
            distributor._on_the_way(("t-1", 0), read_at=6.0)
