"""A synchronous link whose source has one proxy for each broker: several of them push parts of one transaction."""

from __future__ import annotations

import pytest
from confluent_kafka import TopicPartition
from support.groups import group_status, member, offsets
from support.kafka import unique
from support.links import linked, sidecars, until

from isthmus_bench.kafka import KafkaCluster

pytestmark = [pytest.mark.brokers, pytest.mark.timeout(300)]

GROUPS = 8
"""So many that coordinators of groups, and of the transactions that commit for them, are on several brokers."""
TRANSACTIONS = 3


@pytest.mark.one_in_ci("stories", of="faults of committed offsets")
def test_committed_offsets_in_transactions_are_confirmed_whoever_fronts_which_coordinator(
    kafka_three: KafkaCluster, kafka: KafkaCluster
) -> None:
    with linked(kafka_three, kafka, a_proxies=sidecars(kafka_three)) as pair:
        prefix = unique("app-") + "-"
        pair.attach()
        pair.attach(prefix, prefix, "--type", "consumer-group", "--disable-transaction-verification")
        topic, far_topic = pair.names("t")
        pair.a.create_topic(topic)
        pair.a.produce(topic, [b"x"] * 100)
        pair.wait_end(far_topic, 100)
        pair.wait_following()
        until("synchronous", lambda: pair.a.proxy.cli("link", "set-mode", pair.name, "synchronous"))
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
                    producer.commit_transaction(30)
                assert since() == began, "it was Out-Of-Sync"
                # The other side's store has it when it is acked, with its decision; coordinators a moment later.
                until("applied", lambda g=group: offsets(pair.b, g)[far_topic, 0] == TRANSACTIONS)
