"""What is recorded of new partitions while the target makes their topics."""

from __future__ import annotations

import asyncio
import random
import uuid
from typing import Any

import pytest
from support.fake_cluster import FakeCluster, FakeContext, FakeControl, run_simulated
from support.peers import CalledAtOnce
from support.replicas import LINK, LINK_ID

from isthmus_control.commands import AttachNamespace, CreateLink, RecordLogEpochs, SetFollowerTopic, TermStart
from isthmus_control.model import ResourceType, Role, TopicState
from isthmus_control.origins import OriginEpoch
from isthmus_control.outcome import Accepted
from isthmus_plugins.replication.leader.origins import LeaderOrigins
from isthmus_plugins.replication.link.features import ORIGINS
from isthmus_plugins.replication.link.own_logs import Begun
from isthmus_plugins.tasks import Tasks

TOPIC = "remote-t"


@pytest.mark.parametrize("is_led", [True, False], ids=["it is led", "it came to follow meanwhile"])
def test_records_that_came_since_its_end_was_read_are_in_the_same_go(is_led: bool) -> None:
    """Of a partition that is still empty nothing is to be said."""

    async def run() -> None:
        rng = random.Random(1)
        cluster, control = FakeCluster(rng), FakeControl("A", rng)
        context: Any = FakeContext(cluster, control)
        assert isinstance(control.apply(CreateLink(LINK, LINK_ID, "B", False)), Accepted)
        topic = cluster.add_topic(TOPIC, 2)
        topic_id = str(uuid.UUID(bytes=topic.topic_id))
        connection: Any = CalledAtOnce(LINK, ())
        connection.peer_features = frozenset({ORIGINS})
        tasks = Tasks("test", context.supervision)
        epochs = [each.leader_epoch for each in topic.partitions]
        begun = [Begun(TOPIC, topic_id, each, TermStart(0, epochs[each]), only_if_new=True) for each in (0, 1)]
        origins = LeaderOrigins(context, tasks)
        topic.partitions[0].write_values(b"first", b"second")
        origins.begin(connection, begun)
        if not is_led:
            follower = AttachNamespace(LINK, ResourceType.TOPIC, TOPIC, "t", Role.FOLLOWER, create_missing=True)
            record = SetFollowerTopic(LINK, TOPIC, "t", topic_id, TopicState.CREATING)
            assert all(isinstance(control.apply(each), Accepted) for each in (follower, record))
        await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()})
        found = [
            [each.epochs for each in control.state.origins_of(TOPIC, topic_id, partition).ranges]
            for partition in (0, 1)
        ]
        assert found == ([[(OriginEpoch(epochs[0], 0),)], [()]] if is_led else [[], []])
        assert sum(isinstance(each, RecordLogEpochs) for each in control.commands) == is_led
        await tasks.close()

    run_simulated(run())
