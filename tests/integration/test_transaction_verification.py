"""The target brokers' check of transactions: switched off as agreed, and restored, on real brokers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import pytest
from confluent_kafka import Producer
from support.kafka import unique
from support.links import Linked, linked, until

from isthmus.cluster_access import ClusterAccess
from isthmus.kafka.client import ClusterClient
from isthmus_bench.kafka import KafkaCluster
from isthmus_control.model import TRANSACTION_VERIFICATION

pytestmark = pytest.mark.brokers


@pytest.fixture(scope="module")
def link(kafka_pair: tuple[KafkaCluster, KafkaCluster]) -> Iterator[Linked]:
    with linked(*kafka_pair) as pair:
        yield pair


def ask(kafka: KafkaCluster, question: Callable[[ClusterAccess], Awaitable[Any]]) -> Any:
    async def work() -> Any:
        async with ClusterClient([kafka.bootstrap_servers]) as client:
            return await question(ClusterAccess(client))

    return asyncio.run(work())


def setting(kafka: KafkaCluster) -> str | None:
    """What is set cluster-wide."""
    found: str | None = ask(kafka, lambda cluster: cluster.cluster_config(TRANSACTION_VERIFICATION))
    return found


def wait_for_setting(kafka: KafkaCluster, value: str | None) -> None:
    """A broker tells what it has heard of, a moment after the controller has it."""
    until(f"the setting is {value}", lambda: setting(kafka) == value)


def change(kafka: KafkaCluster, value: str | None, validate_only: bool = False) -> None:
    ask(kafka, lambda cluster: cluster.alter_cluster_config(TRANSACTION_VERIFICATION, value, validate_only))


def test_brokers_of_each_version_have_the_setting_and_act_on_it(kafka_of_each_version: KafkaCluster) -> None:
    kafka = kafka_of_each_version
    former = setting(kafka)
    for chosen, effective in (("false", "false"), ("true", "true"), (None, "true"), (former, former or "true")):
        change(kafka, chosen)
        wait_for_setting(kafka, chosen)
        until(
            f"the brokers act on {chosen}",
            lambda effective=effective: (
                set(ask(kafka, lambda cluster: cluster.broker_configs(TRANSACTION_VERIFICATION)).values())
                == {effective}
            ),
        )
    change(kafka, "false", validate_only=True)
    assert setting(kafka) == former


@pytest.mark.suite("stories")
def test_off_while_attached_with_consent_also_over_kill_9(link: Linked) -> None:
    former = setting(link.b.kafka)
    plan = link.attach(None, None, "--disable-transaction-verification", "--dry-run")
    assert plan["transaction_verification"]["action"] in ("disable", "none")
    assert setting(link.b.kafka) == former
    link.attach(None, None, "--disable-transaction-verification")
    assert setting(link.b.kafka) == "false"
    status = link.b.link(link.name)["transaction_verification"]
    assert (status["enabled"], status["disabled_by_link"], status["former"]) == (False, True, former)
    link.b.proxy.kill()
    link.b.proxy.start()
    assert link.b.proxy.get("/v1/status")["held_configs"] == [
        {"name": TRANSACTION_VERIFICATION, "value": "false", "former": former}
    ]
    until("the link is back", lambda: link.a.link(link.name)["state"] == "Following")
    other = unique("other-") + "-"
    link.attach(other, other, "--disable-transaction-verification")
    link.detach(other)
    assert setting(link.b.kafka) == "false"
    link.detach()
    assert setting(link.b.kafka) == former
    assert link.b.proxy.get("/v1/status")["held_configs"] == []


def test_a_transaction_waits_for_the_consent(link: Linked) -> None:
    former = setting(link.b.kafka)
    link.b.verify_transactions(True)
    local, remote = unique("consent-") + "-", unique("consent-") + "-"
    try:
        link.attach(local, remote)
        link.a.create_topic(local + "t")
        producer = Producer({"bootstrap.servers": link.a.bootstrap, "transactional.id": unique("consent")})
        producer.init_transactions(30)
        producer.begin_transaction()
        producer.produce(local + "t", b"in a transaction", partition=0)
        producer.commit_transaction(30)
        until(
            "it is stopped",
            lambda: (
                (link.b.partition(link.name, remote + "t") or {}).get("reason") == "TRANSACTION_VERIFICATION_ENABLED"
            ),
        )
        found = link.wait_state(remote + "t", "Stopped")
        assert TRANSACTION_VERIFICATION in found["message"]
        assert "--disable-transaction-verification" in found["message"]
        link.attach(local, remote, "--disable-transaction-verification")
        link.wait_end(remote + "t", 2)
        link.detach(local)
        assert setting(link.b.kafka) == "true"
    finally:
        change(link.b.kafka, former)
