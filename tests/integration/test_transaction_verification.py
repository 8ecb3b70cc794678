"""The target brokers' check of transactions: switched off as agreed, and restored, on real brokers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from support.kafka import unique
from support.links import Linked, linked, until

from isthmus.cluster_access import ClusterAccess
from isthmus.kafka_client import ClusterClient
from isthmus_bench.kafka import KafkaCluster
from isthmus_control.model import TRANSACTION_VERIFICATION

pytestmark = pytest.mark.brokers


@pytest.fixture(scope="module")
def link(kafka_pair: tuple[KafkaCluster, KafkaCluster]) -> Iterator[Linked]:
    with linked(*kafka_pair) as pair:
        yield pair


def test_brokers_of_each_version_have_the_setting_and_act_on_it(kafka_of_each_version: KafkaCluster) -> None:
    async def work() -> None:
        async with ClusterClient([kafka_of_each_version.bootstrap_servers]) as client:
            cluster = ClusterAccess(client)
            former = await cluster.cluster_config(TRANSACTION_VERIFICATION)
            for chosen, effective in (("false", "false"), ("true", "true"), (None, "true"), (former, former or "true")):
                await cluster.alter_cluster_config(TRANSACTION_VERIFICATION, chosen)
                async with asyncio.timeout(10):
                    while set((await cluster.broker_configs(TRANSACTION_VERIFICATION)).values()) != {effective}:
                        await asyncio.sleep(0.02)
                assert await cluster.cluster_config(TRANSACTION_VERIFICATION) == chosen
            await cluster.alter_cluster_config(TRANSACTION_VERIFICATION, "false", validate_only=True)
            assert await cluster.cluster_config(TRANSACTION_VERIFICATION) == former

    asyncio.run(work())


def test_off_while_attached_with_consent_also_over_kill_9(link: Linked) -> None:
    def setting() -> str | None:
        async def read() -> str | None:
            async with ClusterClient([link.b.kafka.bootstrap_servers]) as client:
                return await ClusterAccess(client).cluster_config(TRANSACTION_VERIFICATION)

        return asyncio.run(read())

    former = setting()
    plan = link.attach(None, None, "--disable-transaction-verification", "--dry-run")
    assert plan["transaction_verification"]["action"] in ("disable", "none")
    assert setting() == former
    link.attach(None, None, "--disable-transaction-verification")
    assert setting() == "false"
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
    assert setting() == "false"
    link.detach()
    assert setting() == former
    assert link.b.proxy.get("/v1/status")["held_configs"] == []
