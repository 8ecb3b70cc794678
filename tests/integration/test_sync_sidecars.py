"""A synchronous link whose source has one proxy for each broker: several of them push parts of one transaction."""

from __future__ import annotations

import json
from typing import Any

import pytest
from confluent_kafka import TopicPartition
from support.groups import group_status, member, offsets
from support.kafka import unique
from support.links import Linked, linked, sidecars, until
from support.raw_log import read_log
from support.wire import Wire

from isthmus_bench.kafka import KafkaCluster
from isthmus_control.model import TRANSACTIONS_TOPIC as STORE
from isthmus_plugins.replication.in_doubt.pending_offsets import OFFSETS, committed_offsets
from isthmus_plugins.replication.in_doubt.store import DECISION, merged
from isthmus_protocol.record_codec import decode_records

pytestmark = [pytest.mark.brokers, pytest.mark.timeout(300)]

GROUPS = 8
"""So many that coordinators of groups, and of the transactions that commit for them, are on several brokers."""
TRANSACTIONS = 3


class Store:
    """What B has ever stored of a link's transactions, also what is void since its coordinators have it."""

    def __init__(self, pair: Linked, wire: Wire) -> None:
        """``wire``: to B's broker, asked at once: what is there was there when the source answered."""
        self._wire = wire
        self._link_id = pair.b.link(pair.name)["link_id"]

    def pending(self, group: str) -> list[tuple[str, int, int | None]]:
        """Topic, partition and offset of what transactions have committed in a group, the last one at the end."""
        return [
            (topic, partition, offset)
            for key, value in self._entries()
            if key[0] == OFFSETS and key[3] == group
            for topic, partition, offset, *_ in value["positions"]
        ]

    def committed(self, group: str) -> dict[tuple[str, int], int]:
        """What a failover would have a group commit, by pending offsets and decisions alone."""
        found = committed_offsets(merged(self._entries())).get(group, {})
        return {place: each.offset for place, each in found.items()}

    def _entries(self) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        records = [each for _, data in read_log(self._wire, STORE) for each in decode_records(data) if each.value]
        entries = [(tuple(json.loads(each.key or b"")), json.loads(each.value or b"")) for each in records]
        return [each for each in entries if each[0][0] in (OFFSETS, DECISION) and each[0][1] == self._link_id]


@pytest.mark.one_in_ci("stories", of="faults of committed offsets")
def test_committed_offsets_in_transactions_are_confirmed_whoever_fronts_which_coordinator(
    kafka_three: KafkaCluster, kafka: KafkaCluster
) -> None:
    with (
        linked(kafka_three, kafka, a_proxies=sidecars(kafka_three)) as pair,
        Wire(kafka.bootstrap_servers) as wire,
    ):
        store = Store(pair, wire)
        prefix = unique("app-") + "-"
        pair.attach()
        pair.attach(prefix, prefix, "--type", "consumer-group", "--disable-transaction-verification")
        topic, far_topic = pair.names("t")
        pair.a.create_topic(topic)
        pair.a.produce(topic, [b"x"] * 100)
        pair.wait_end(far_topic, 100)
        pair.wait_following()
        # What is never confirmed fails after the 30 s that its client waits, and nothing leaves before: then acks would
        # say nothing of B.
        synchronous = "link", "set-mode", pair.name, "synchronous", "--confirm-timeout-ms", "60000"
        until("synchronous", lambda: pair.a.proxy.cli(*synchronous))
        producer = pair.a.producer(transactional_id=unique("txn-"))
        producer.init_transactions(30)
        for number in range(GROUPS):
            group = f"{prefix}{number}"

            def since(group: str = group) -> int | None:
                """Since when what the group commits is on both sides when it is acked."""
                sync = (group_status(pair.a, pair.name, group) or {}).get("sync") or {}
                return sync["since_ms"] if sync.get("state") == "In-Sync" else None

            with member(pair.a, group, topic) as joined:
                joined.commit({(topic, 0): 0})
                began = until("In-Sync", since)
                for offset in range(1, TRANSACTIONS + 1):
                    producer.begin_transaction()  # there is nothing in it but a position
                    position = TopicPartition(topic, 0, offset)
                    producer.send_offsets_to_transaction([position], joined.group_metadata, 30)
                    assert store.pending(group)[-1:] == [(far_topic, 0, offset)], "acked, and B has not stored it"
                    producer.commit_transaction(30)
                    assert store.committed(group) == {(far_topic, 0): offset}, "acked, and B has no decision of it"
                assert since() == began, "it was Out-Of-Sync"
                # Its coordinators have it a moment after the ack.
                until("applied", lambda g=group: offsets(pair.b, g)[far_topic, 0] == TRANSACTIONS)
