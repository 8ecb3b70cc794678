"""The brokers' check of transactions: off with the operator's consent, on again after, whoever dies in between."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from support.fake_cluster import FakeContext, run_simulated
from support.plugins import Two, on_two
from support.replicas import Replicas

from isthmus_control.commands import DetachNamespace
from isthmus_control.model import TRANSACTION_VERIFICATION, ResourceType
from isthmus_plugins import links
from isthmus_plugins.cluster import KafkaRefused
from isthmus_plugins.links import OperationError
from isthmus_plugins.replication.follower.transaction_verification import TransactionVerification

TOPIC, GROUP, PRINCIPAL = ResourceType.TOPIC, ResourceType.CONSUMER_GROUP, ResourceType.PRINCIPAL
PLAIN = links.Attach(local="l-", remote="r-", role="leader")
AGREED = PLAIN.model_copy(update={"disable_transaction_verification": True})


def on_linked(work: Callable[[Two], Awaitable[None]]) -> None:
    async def linked(two: Two) -> None:
        await two.create()
        await two.connected()
        await work(two)

    on_two(linked)


def value(two: Two) -> str | None:
    """What is set cluster-wide at the follower's cluster."""
    return two.clusters["B"].cluster_configs.get(TRANSACTION_VERIFICATION)


def verification(two: Two) -> TransactionVerification:
    return two.b.plugin.parts.transaction_verification


@pytest.mark.parametrize("former", [None, "true", "false"])
def test_off_while_agreed_and_restored_after(former: str | None) -> None:
    async def work(two: Two) -> None:
        if former is not None:
            two.clusters["B"].cluster_configs[TRANSACTION_VERIFICATION] = former
        await two.a.links.attach("a-to-b", AGREED)
        assert value(two) == "false"
        status = two.b.status().transaction_verification
        assert status is not None
        assert (status.enabled, status.disabled_by_link, status.former) == (False, True, former)
        assert two.b.status().mappings[0].disable_transaction_verification
        assert two.a.status().transaction_verification is None
        second = AGREED.model_copy(update={"local": "m-", "remote": "s-"})
        await two.a.links.attach("a-to-b", second)
        await two.a.links.detach("a-to-b", "l-")
        assert value(two) == "false"  # the other one needs it still
        await two.a.links.detach("a-to-b", "m-")
        assert value(two) == former
        assert not two.controls["B"].state.held_configs

    on_linked(work)


def test_a_dry_run_says_what_is_lost_and_changes_nothing() -> None:
    async def work(two: Two) -> None:
        plan = (
            await two.a.links.attach("a-to-b", AGREED.model_copy(update={"dry_run": True}))
        ).transaction_verification
        assert (plan.action, plan.enabled) == ("disable", True)
        assert "KIP-890" in plan.message
        assert value(two) is None
        plan = (await two.a.links.attach("a-to-b", PLAIN.model_copy(update={"dry_run": True}))).transaction_verification
        assert plan.action == "none"
        assert "--disable-transaction-verification" in plan.message
        assert "there is nothing to do" in plan.message
        follower = links.Attach(
            local="r-", remote="l-", role="follower", disable_transaction_verification=True, dry_run=True
        )
        assert (await two.b.links.attach("a-to-b", follower)).transaction_verification.action == "disable"

    on_linked(work)


def test_groups_need_it_off() -> None:
    async def work(two: Two) -> None:
        ours = verification(two)
        refused = await ours.plan(GROUP, False)
        assert refused.action == "refuse"
        assert TRANSACTION_VERIFICATION in str(refused.message)
        assert (await ours.plan(GROUP, True)).action == "disable"
        assert (await ours.plan(PRINCIPAL, False)).message is None
        await two.a.links.attach("a-to-b", AGREED)
        # Off for the sake of another mapping, whose detaching would switch it on again.
        assert (await ours.plan(GROUP, False)).action == "refuse"
        await two.a.links.detach("a-to-b", "l-")
        two.clusters["B"].cluster_configs[TRANSACTION_VERIFICATION] = "false"
        assert (await ours.plan(GROUP, False)).action == "none"  # the operator's own setting
        two.clusters["B"].broker_defaults.clear()
        two.clusters["B"].cluster_configs.clear()
        assert (await ours.plan(GROUP, False)).action == "none"  # brokers that know no such setting

    on_linked(work)


def test_consent_that_comes_later_or_is_taken_back() -> None:
    async def work(two: Two) -> None:
        await two.a.links.attach("a-to-b", PLAIN)
        objection = verification(two).objection()
        assert objection is not None
        code, message = objection
        assert code == "TRANSACTION_VERIFICATION_ENABLED"
        assert TRANSACTION_VERIFICATION in message
        assert "--disable-transaction-verification" in message
        await two.a.links.attach("a-to-b", AGREED)
        assert verification(two).objection() is None
        assert value(two) == "false"
        await two.a.links.attach("a-to-b", PLAIN)
        assert value(two) is None
        assert verification(two).objection() is not None

    on_linked(work)


def test_brokers_that_refuse_the_change() -> None:
    async def work(two: Two) -> None:
        async def refuse(name: str, value: str | None, validate_only: bool = False) -> None:
            raise KafkaRefused(31, "CLUSTER_AUTHORIZATION_FAILED", "Cluster authorization failed.")

        two.clusters["B"].alter_cluster_config = refuse  # type: ignore[method-assign]
        with pytest.raises(OperationError, match="CLUSTER_AUTHORIZATION_FAILED") as raised:
            await two.a.links.attach("a-to-b", AGREED)
        assert raised.value.code == "BROKER_REFUSED"
        assert not two.b.status().mappings

    on_linked(work)


def test_brokers_that_do_not_act_on_it_are_told_of() -> None:
    async def work(two: Two) -> None:

        async def own_value(name: str) -> dict[int, str | None]:
            return {1: "true", 2: "false"}

        two.clusters["B"].broker_configs = own_value  # type: ignore[method-assign]
        with pytest.raises(OperationError, match="a value of its own"):
            await two.b.links.attach(
                "a-to-b", links.Attach(local="r-", remote="l-", role="follower", disable_transaction_verification=True)
            )
        objection = verification(two).objection()
        assert objection is not None
        assert "a value of its own" in objection[1]
        status = two.b.status().transaction_verification
        assert status is not None
        assert "a value of its own" in str(status.message)

    on_linked(work)


class Killed(Exception):
    """The process ended here."""


@pytest.mark.parametrize("former", [None, "true"])
@pytest.mark.parametrize("dies_at", range(10))
def test_killed_anywhere_it_ends_as_agreed(dies_at: int, former: str | None) -> None:
    """Switch off and on again, dying once in between; whoever comes next finishes it."""

    async def run() -> None:
        replicas = Replicas(random.Random(dies_at))
        cluster, control = replicas.b, replicas.controls["B"]
        if former is not None:
            cluster.cluster_configs[TRANSACTION_VERIFICATION] = former
        context: Any = FakeContext(cluster, control)
        steps = 0

        def mortal(work: Callable[..., Awaitable[object]]) -> Callable[..., Awaitable[object]]:
            async def step(*args: object, **more: object) -> object:
                nonlocal steps
                for moment in ("before", "after"):
                    if moment == "after":
                        result = await work(*args, **more)
                    steps += 1
                    if steps == dies_at:
                        raise Killed(moment)
                return result

            return step

        cluster.alter_cluster_config = mortal(cluster.alter_cluster_config)  # type: ignore[method-assign, assignment]
        control.append = mortal(control.append)  # type: ignore[method-assign, assignment]

        async def settle() -> None:
            while True:
                try:
                    await TransactionVerification(context).reconcile()
                    return
                except Killed:
                    pass

        replicas.attach(disable_transaction_verification=True)
        await settle()
        assert cluster.cluster_configs[TRANSACTION_VERIFICATION] == "false"
        assert control.state.held_configs[TRANSACTION_VERIFICATION].former == former
        control.apply(DetachNamespace("a-to-b", TOPIC, "remote-"))
        await settle()
        assert cluster.cluster_configs.get(TRANSACTION_VERIFICATION) == former
        assert not control.state.held_configs

    run_simulated(run())
