"""A topic stops to follow while requests are lost: nothing lands behind where that is recorded to have been."""

from __future__ import annotations

import asyncio
from random import Random

import pytest
from support.fake_cluster import LATE_MAX_S
from support.plugins import Two, on_two
from support.seeds import seeds

from isthmus_control.model import NamespaceKey, ResourceType
from isthmus_plugins import links
from isthmus_plugins.failover_report import Failover

TO_B = links.Attach(local="a-", remote="b-", role="leader")
KEY = NamespaceKey(ResourceType.TOPIC, "b-")


@pytest.mark.parametrize("seed", seeds(20))
def test_nothing_lands_behind_the_end_that_is_recorded(seed: int) -> None:
    async def work(two: Two) -> None:
        rng, (a, b) = Random(seed), two.clusters.values()
        b.random.seed(f"ends {seed}")  # not as the clusters were made: topics would have the ids of others
        source = a.add_topic("a-t").partitions[0]
        await two.create()
        await two.connected()
        await two.a.links.attach("a-to-b", TO_B)
        source.write_values(b"x")
        await two.until("it follows", lambda: "b-t" in b.found and b.partition("b-t").end)
        b.trouble = 0.3
        follower = two.b.plugin.parts.follower_end
        while not any(stream.follower_log.uncertain for stream in follower.streams()):
            source.write_values(b"x")
            await asyncio.sleep(rng.uniform(0.001, 0.05))
        b.trouble = 0.0
        if seed % 2:
            await two.b.links.detach("a-to-b", "b-", local_only=True)
        else:
            request = Failover(although_reachable=True)
            await two.b.links.fail_over("a-to-b", request, lambda done, total: None)
            assert not two.controls["B"].state.namespaces[KEY].reserved
        ended = two.controls["B"].state.histories["b-t"].partitions[0][-1].end_offset
        assert ended == b.partition("b-t").end
        await asyncio.sleep(LATE_MAX_S)
        assert ended == b.partition("b-t").end, "what the source wrote landed behind"

    on_two(work, 120)
