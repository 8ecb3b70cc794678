"""Members of another cluster's groups (KIP-848) where brokers of each version have what links copy: offsets."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
from confluent_kafka.admin import AdminClient, NewTopic
from support.groups import COORDINATOR_MOVES
from support.kafka import unique
from support.links import until, whole
from support.wire import Wire

from isthmus_bench.kafka import KafkaCluster
from isthmus_protocol.error_codes import GROUP_ID_NOT_FOUND, UNKNOWN_MEMBER_ID
from isthmus_protocol.schema import ApiKey

pytestmark = [pytest.mark.brokers, pytest.mark.suite("clients")]

THERE = 5
"""The member epoch that it has at the cluster from which it comes."""
COPIED, READ_THERE = 3, 7
"""What is committed here, and how far it has read at that cluster."""


class Member(NamedTuple):
    """One, over a connection to its coordinator."""

    wire: Wire
    group: str
    topic: str
    member_id: str

    def has_coordinator(self) -> bool:
        """Asking has the brokers make what it keeps groups in."""
        asked = {"key_type": 0, "coordinator_keys": [self.group]}
        (found,) = self.wire.request(ApiKey.FIND_COORDINATOR, 4, asked).coordinators
        return not found.error_code and self.heartbeat(THERE).error_code not in COORDINATOR_MOVES

    def heartbeat(self, epoch: int) -> Any:
        values: dict[str, Any] = {"group_id": self.group, "member_id": self.member_id, "member_epoch": epoch}
        if not epoch:
            values |= {"rebalance_timeout": 60_000, "subscribed_topic_names": [self.topic], "topic_partitions": []}
        return self.wire.request(ApiKey.CONSUMER_GROUP_HEARTBEAT, 0, values)

    def commit(self, offset: int, epoch: int = -1, member_id: str | None = None) -> int:
        """The error of a commit; without an epoch as Java's does where it is not in the group."""
        who = self.member_id if member_id is None else member_id
        partitions = [{"partition_index": 0, "committed_offset": offset}]
        values = {"group_id": self.group, "generation_id_or_member_epoch": epoch, "member_id": who}
        (topic,) = self.wire.request(
            ApiKey.OFFSET_COMMIT, 9, {**values, "topics": [{"name": self.topic, "partitions": partitions}]}
        ).topics
        return int(topic.partitions[0].error_code)

    def committed(self) -> int:
        wanted = {"groups": [{"group_id": self.group, "topics": None}], "require_stable": False}
        (answer,) = self.wire.request(ApiKey.OFFSET_FETCH, 8, wanted).groups
        return int(answer.topics[0].partitions[0].committed_offset)


@contextmanager
def member(bootstrap: str, group: str, topic: str) -> Iterator[Member]:
    with Wire(bootstrap) as wire:
        yield Member(wire, group, topic, str(uuid.uuid4()))


def test_they_join_and_begin_at_what_is_committed_here(kafka_of_each_version: KafkaCluster) -> None:
    kafka = kafka_of_each_version
    if kafka.version < "4":
        pytest.skip("brokers of 3.9 have this protocol as a preview")
    server = kafka.bootstrap_servers.split(",")[0]
    topic, prefix = unique("t"), unique("moved-") + "-"
    admin = AdminClient({"bootstrap.servers": server})
    admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(30)
    with whole(kafka) as proxy:
        proxy.cli("namespace", "create", prefix, "--type", "consumer-group")
        for number, bootstrap in enumerate((server, proxy.bootstrap)):
            through_proxy = bootstrap != server
            with member(bootstrap, f"{prefix}{number}", topic) as moved:
                until("it has a coordinator", moved.has_coordinator)
                assert moved.heartbeat(THERE).error_code == GROUP_ID_NOT_FOUND, "nothing is here"
                assert moved.commit(COPIED, member_id="") == 0
                told = UNKNOWN_MEMBER_ID if through_proxy else GROUP_ID_NOT_FOUND
                assert moved.heartbeat(THERE).error_code == told
                assert moved.commit(READ_THERE, THERE) == UNKNOWN_MEMBER_ID
                assert moved.commit(READ_THERE) == (UNKNOWN_MEMBER_ID if through_proxy else 0)
                assert moved.committed() == (COPIED if through_proxy else READ_THERE)
                joined = moved.heartbeat(0)
                assert joined.error_code == 0, joined
                assert moved.heartbeat(joined.member_epoch).error_code == 0
                assert moved.commit(COPIED + 1, joined.member_epoch) == 0
                assert moved.committed() == COPIED + 1
            with member(bootstrap, f"{prefix}{number}", topic) as another:
                assert another.heartbeat(THERE).error_code == UNKNOWN_MEMBER_ID, "as brokers answer others"
