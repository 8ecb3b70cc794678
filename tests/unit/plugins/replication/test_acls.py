"""Bindings of principal namespaces over a link, both ends, on model clusters."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any

import pytest
from support.plugins import Two, on_two

from isthmus_control import commands as c
from isthmus_control.acls import AclBinding, AclResource, Pattern, Permission
from isthmus_control.levels import with_known_level
from isthmus_control.model import ResourceType
from isthmus_plugins import links
from isthmus_plugins.cluster import KafkaRefused
from isthmus_plugins.links import OperationError
from isthmus_plugins.replication import acls

READ = 3
HERE, THERE = "User:app-", "User:b-app-"


def allow(topic: str, principal: str = "User:app-1", **more: Any) -> AclBinding:
    return AclBinding(AclResource.TOPIC, topic, Pattern.LITERAL, principal, "*", READ, Permission.ALLOW)._replace(
        **more
    )


def deny(topic: str, principal: str = "User:app-1", **more: Any) -> AclBinding:
    return allow(topic, principal, permission=Permission.DENY, **more)


def there(binding: AclBinding) -> AclBinding:
    """A binding as B has it."""
    return binding._replace(
        principal=binding.principal.replace(HERE, THERE), resource_name=f"b-{binding.resource_name}"
    )


ONE, TWO = allow("orders-1"), allow("orders-2")


async def attach(two: Two, **more: Any) -> None:
    """The link with a namespace of topics, and one of principals that A leads."""
    await two.create()
    await two.connected()
    await two.a.links.attach("a-to-b", links.Attach(local="orders-", remote="b-orders-", role="leader"))
    await principals(two, **more)


async def principals(two: Two, **more: Any) -> links.AttachResult:
    request = links.Attach(local=HERE, remote=THERE, role="leader", type="principal", **more)
    result: links.AttachResult = await two.a.links.attach("a-to-b", request)
    return result


async def settled(two: Two, *bindings: AclBinding) -> None:
    """Wait until B has exactly these."""
    await two.until("B has them", lambda: two.clusters["B"].bindings == set(bindings))
    await two.until("A knows", lambda: [each.state for each in two.a.status().acls] == ["Following"])


def test_bindings_are_made_changed_and_deleted() -> None:
    async def scenario(two: Two) -> None:
        a, b = two.clusters["A"], two.clusters["B"]
        a.set_acls(ONE, allow("orders-1", "User:bob"), allow("other"))
        b.set_acls(allow("b-orders-1", "User:local"))
        await attach(two)
        local = allow("b-orders-1", "User:local")
        await settled(two, local, there(ONE))
        a.set_acls(TWO)
        await settled(two, local, there(TWO))
        a.set_acls()
        await settled(two, local)
        assert two.controls["B"].state.acls == {}

    on_two(scenario)


def test_only_what_the_link_made_is_deleted() -> None:
    async def scenario(two: Two) -> None:
        a, b = two.clusters["A"], two.clusters["B"]
        a.set_acls(ONE, TWO)
        b.set_acls(there(ONE), there(allow("orders-9")))
        await attach(two)
        await settled(two, there(ONE), there(TWO), there(allow("orders-9")))
        assert two.controls["B"].state.acls == {THERE: (there(TWO),)}
        a.set_acls()
        await settled(two, there(ONE), there(allow("orders-9")))

    on_two(scenario)


def test_nobody_is_let_in_on_the_way() -> None:
    """A DENY is there before the ALLOW beside it, and goes after it."""

    async def scenario(two: Two) -> None:
        a, b = two.clusters["A"], two.clusters["B"]
        whole = allow("orders-", pattern_type=Pattern.PREFIXED)
        a.set_acls(whole, deny("orders-secret"))
        await attach(two)
        await settled(two, there(whole), there(deny("orders-secret")))
        a.set_acls()
        await settled(two)
        assert [each for each in b.acl_changes if each[1] != acls.NOBODYS] == [
            ("create", there(deny("orders-secret"))),
            ("create", there(whole)),
            ("delete", there(whole)),
            ("delete", there(deny("orders-secret"))),
        ]

    on_two(scenario)


def test_what_is_not_mapped_is_in_the_status() -> None:
    async def scenario(two: Two) -> None:
        two.clusters["A"].set_acls(ONE, allow("other"))
        await attach(two)
        await settled(two, there(ONE))
        [told] = two.a.status().acls
        assert (told.role, told.bindings) == ("leader", 1)
        [not_mapped] = told.not_mapped
        assert not_mapped.binding == "allow User:app-1 read topic 'other'"
        assert "no mapping of the link holds the topic 'other'" in not_mapped.reason
        [told] = two.b.status().acls
        assert (told.role, told.state, told.bindings, told.not_mapped) == ("follower", "Following", 1, [])
        samples = {
            (sample.labels["role"], sample.labels["state"]): sample.value
            for metric in two.a.plugin.isthmus_metrics()
            if metric.name == "isthmus_link_acl_bindings"
            for sample in metric.samples
        }
        assert samples == {("leader", "mapped"): 1, ("leader", "not_mapped"): 1}

    on_two(scenario)


def test_bindings_of_topics_that_are_detached_stay() -> None:
    """An application that moves to B needs its rights there."""

    async def scenario(two: Two) -> None:
        a = two.clusters["A"]
        a.set_acls(ONE)
        await attach(two)
        await settled(two, there(ONE))
        await two.a.links.detach("a-to-b", "orders-")
        await two.until("A sees it", lambda: len(two.a.status().acls[0].not_mapped) == 1)
        await settled(two, there(ONE))
        await two.a.links.detach("a-to-b", HERE, "principal")
        a.set_acls()
        assert two.clusters["B"].bindings == {there(ONE)}
        # Attached again, what the source has no more goes.
        await two.a.links.attach("a-to-b", links.Attach(local="orders-", remote="b-orders-", role="leader"))
        await principals(two)
        await settled(two)

    on_two(scenario)


def test_bindings_of_a_namespace_that_is_no_longer_reserved_are_its_own() -> None:
    async def scenario(two: Two) -> None:
        a = two.clusters["A"]
        a.set_acls(ONE)
        await attach(two)
        await settled(two, there(ONE))
        await two.a.links.detach("a-to-b", HERE, "principal")
        two.controls["B"].apply(c.AlterNamespace(ResourceType.PRINCIPAL, THERE, False))
        a.set_acls(TWO)
        await principals(two)
        await settled(two, there(ONE), there(TWO))

    on_two(scenario)


def test_what_somebody_deletes_past_the_proxies_comes_back() -> None:
    async def scenario(two: Two) -> None:
        two.clusters["A"].set_acls(ONE)
        await attach(two)
        await settled(two, there(ONE))
        two.clusters["B"].set_acls()
        await asyncio.sleep(acls.PUSH_AGAIN_S)
        await settled(two, there(ONE))

    on_two(scenario)


@pytest.mark.parametrize("which", ["A", "B"])
def test_a_cluster_without_an_authorizer_is_an_error_when_attaching(which: str) -> None:
    async def scenario(two: Two) -> None:
        two.clusters[which].acls_refused = KafkaRefused(54, "SECURITY_DISABLED", "No Authorizer is configured.")
        for dry_run in (True, False):
            with pytest.raises(OperationError, match=f"cluster {which} has no authorizer") as raised:
                await attach(two, dry_run=dry_run) if dry_run else await principals(two)
            assert raised.value.code == "NO_AUTHORIZER"
        assert all(mapping.type == "topic" for mapping in two.a.status().mappings)

    on_two(scenario)


def test_a_follower_that_refuses_later_shows_and_is_tried_again() -> None:
    async def scenario(two: Two) -> None:
        a, b = two.clusters["A"], two.clusters["B"]
        await attach(two)
        await settled(two)
        b.acls_refused = KafkaRefused(31, "CLUSTER_AUTHORIZATION_FAILED", "")
        a.set_acls(ONE)
        for proxy in (two.a, two.b):
            await two.until("it is told", lambda proxy=proxy: proxy.status().acls[0].state == "Stopped")  # type: ignore[misc]
            [told] = proxy.status().acls
            assert told.reason == "ACLS_REFUSED"
            assert "Alter" in (told.message or "")
        b.acls_refused = None
        await settled(two, there(ONE))
        a.acls_refused = KafkaRefused(54, "SECURITY_DISABLED", "")
        await two.until("it is told", lambda: two.a.status().acls[0].reason == "NO_AUTHORIZER")

    on_two(scenario)


def test_a_follower_that_was_killed_between_record_and_binding() -> None:
    """Recorded and not made, made and not seen, deleted and still recorded: the next look puts it right."""

    async def scenario(two: Two) -> None:
        a, b = two.clusters["A"], two.clusters["B"]
        a.set_acls(ONE)
        await attach(two)
        await settled(two, there(ONE))
        control = two.controls["B"]
        control.apply(c.RecordAcls("a-to-b", THERE, (there(TWO), there(allow("orders-3")))))
        b.set_acls(there(ONE), there(allow("orders-3")))
        a.set_acls(ONE, TWO)
        await settled(two, there(ONE), there(TWO))
        assert control.state.acls == {THERE: (there(ONE), there(TWO))}

    on_two(scenario)


def test_another_proxy_of_the_source_does_it() -> None:
    """One of several, the first by name among those with a lease."""

    async def scenario(two: Two) -> None:
        two.clusters["A"].set_acls(ONE)
        control = two.controls["A"]
        control.apply(c.ReleaseLease("a", two.a.context.incarnation))
        control.apply(c.ClaimBrokers("0-first", str(uuid.uuid4()), (), True, None, 10_000, with_known_level("0"), -1))
        assert set(control.state.proxies) == {"0-first"}
        await attach(two)
        assert two.a.status().acls == []
        assert two.clusters["B"].bindings == frozenset()

    on_two(scenario)
