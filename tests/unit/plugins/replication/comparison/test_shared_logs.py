"""What a cluster says of where a topic's records come from that follows no more."""

from __future__ import annotations

import asyncio

import pytest
from support.fake_cluster import run_simulated
from support.replicas import LINK
from support.truncating import SOURCE_ID, TOPIC, FollowedTopic

from isthmus_control.commands import (
    AlterNamespace,
    Body,
    CreateNamespace,
    DeleteNamespace,
    DetachNamespace,
    RecordOrigins,
    ToldPartition,
    ToldTopic,
)
from isthmus_control.model import ResourceType
from isthmus_control.origins import Ended, Origin, OriginEpoch, OriginRange
from isthmus_plugins.replication.comparison.shared_logs import SharedLogs

KEY = ResourceType.TOPIC, "remote-"
CLEARED = (AlterNamespace(*KEY, reserved=False),)
MADE_ANEW = (DeleteNamespace(*KEY), CreateNamespace(*KEY, reserved=True))
SOURCES = ("A", 0, FollowedTopic.END, Ended.DETACHED)
OWN = ("B", FollowedTopic.END, None, None)


@pytest.mark.parametrize(
    ("since", "expected"),
    [((), [SOURCES, OWN]), (CLEARED, []), (MADE_ANEW, [])],
    ids=["reserved", "cleared", "another reservation"],
)
def test_what_a_killed_proxy_left_open_ends_with_the_log_as_long_as_nobody_could_write(
    since: tuple[Body, ...], expected: list[tuple[str, int, int | None, Ended | None]]
) -> None:
    """It detached the topic, and did not come to record where it ended."""

    async def run() -> None:
        followed = FollowedTopic()
        written = OriginRange(Origin("A", SOURCE_ID, "a1"), 0, None, 5, (OriginEpoch(0, 0),))
        told = ToldTopic(TOPIC, followed.topic_id, (ToldPartition(0, 0, (written,)),))
        for body in (RecordOrigins(LINK, (told,)), DetachNamespace(LINK, *KEY), *since):
            followed.apply(body)
        recorded = followed.control.state
        async with asyncio.timeout(10):
            answer = await SharedLogs(followed.context()).origins_of(TOPIC)
        (said,) = answer.partitions
        ranges = said.said.ranges
        assert [(each.origin.cluster_id, each.start_offset, each.end_offset, each.ended) for each in ranges] == expected
        assert followed.control.state is recorded, "that is recorded when the topic is to follow again"

    run_simulated(run())
