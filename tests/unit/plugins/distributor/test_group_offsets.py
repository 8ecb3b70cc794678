"""All that one proxy does for groups' committed offsets: what it makes, and what keeps it."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

from support.fake_cluster import FakeContext, FakeControl, run_simulated
from support.fake_transactions import TransactingCluster

from isthmus_control.model import DistributionTree
from isthmus_plugins.cluster import BrokerUnavailable
from isthmus_plugins.distribution.document import read_document
from isthmus_plugins.distribution.kept import TIMES_TOPIC
from isthmus_plugins.distributor.group_offsets import GroupOffsets
from isthmus_plugins.distributor.reasons import TIMES_TOPIC_UNFIT
from isthmus_protocol.offsets_log import OFFSETS_TOPIC

CLUSTERS = {name: {"cluster_id": f"id-{name}", "bootstrap_servers": "h:1"} for name in ("a", "b")}
DOCUMENT = {"version": 1, "topics": ["t-"], "clusters": CLUSTERS, "tree": ["a", "b"], "groups": ["g-"]}


def test_the_topic_of_times_is_made_anew_where_it_is_deleted() -> None:
    cluster = TransactingCluster("id-a", random.Random(1))
    for name in (OFFSETS_TOPIC, "t-1"):
        cluster.add_topic(name)
    context: Any = FakeContext(cluster, FakeControl("id-a", random.Random(1)))
    hidden: list[bytes] = []
    context.hide_topic = hidden.append

    async def other_cluster(name: str, servers: object) -> TransactingCluster:
        raise BrokerUnavailable("no broker answers")

    context.other_cluster = other_cluster
    tree = DistributionTree(1, "a", ("t-",), (4,), "")

    async def made(offsets: GroupOffsets) -> None:
        async with asyncio.timeout(20):
            while offsets.waits is not None:  # noqa: ASYNC110 - a simulated clock
                await asyncio.sleep(0.5)
        topic = cluster.found[TIMES_TOPIC]
        assert (len(topic.partitions), topic.configs["cleanup.policy"]) == (1, "compact")
        assert hidden[-1] == topic.topic_id

    async def test() -> None:
        offsets = GroupOffsets(context, read_document(json.dumps(DOCUMENT)), "a", lambda: tree)
        task = asyncio.get_running_loop().create_task(offsets.run(), name="offsets")
        await made(offsets)
        await cluster.delete_topic(TIMES_TOPIC)
        await asyncio.sleep(10)
        await made(offsets)
        # Somebody was faster, and it is not fit for it.
        await cluster.delete_topic(TIMES_TOPIC)
        cluster.add_topic(TIMES_TOPIC, 2)
        await asyncio.sleep(10)
        assert offsets.waits is not None
        assert offsets.waits.code == TIMES_TOPIC_UNFIT
        await cluster.delete_topic(TIMES_TOPIC)
        await asyncio.sleep(10)
        await made(offsets)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    run_simulated(test())
