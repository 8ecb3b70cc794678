"""The version before and this one side by side, in every order, under traffic over a synchronous link.

Every acked record is there once, at both sides, at the offset that its producer was told (``support.storm``), and the
link is In-Sync again by itself after each step, whichever versions its ends run.
"""

from __future__ import annotations

from typing import Final

import pytest
from support.links import linked, until, whole
from support.upgrades import FROM_LEVEL, Upgrade, upgrading
from support.versions import environment_of

from isthmus_bench.kafka import KafkaCluster
from isthmus_bench.proxies import ProxyFailed, ProxyProcess
from isthmus_control.levels import KNOWN_LEVEL

pytestmark = [pytest.mark.suite("upgrade"), pytest.mark.brokers, pytest.mark.timeout(580)]

WITHOUT_CONFIRMED_COMMITS: Final = "a3b7efb61ad594a838e004837fdd70c11faa77da"
"""The last commit whose proxies do not know all that a synchronous link needs."""
ENDS = pytest.mark.parametrize("ends", ["stop", "kill"])


def raise_levels(upgrade: Upgrade) -> None:
    """An operator raises the feature level of both control logs, once leases of the version before have run out."""
    for side in (upgrade.pair.a, upgrade.pair.b):
        until("raised", lambda side=side: side.proxy.cli("control", "upgrade")["after"] == KNOWN_LEVEL)
        assert side.proxy.cli("control", "describe")["level"] == KNOWN_LEVEL
    upgrade.storm.note("feature levels raised")
    upgrade.works()


@ENDS
@pytest.mark.parametrize("first", ["source", "target"])
def test_one_cluster_is_upgraded_before_the_other(first: str, ends: str) -> None:
    with upgrading(ends) as upgrade:
        source, target = upgrade.pair.a.proxy, upgrade.pair.b.proxy
        for proxy in (source, target) if first == "source" else (target, source):
            upgrade.to_new(proxy)
        raise_levels(upgrade)


@ENDS
def test_proxies_of_one_cluster_are_upgraded_one_at_a_time(ends: str) -> None:
    with upgrading(ends, a_brokers=2) as upgrade:
        first, second = upgrade.pair.a.proxies
        upgrade.to_new(second)
        with pytest.raises(ProxyFailed, match=f"proxy '{first.name}' .* knows feature level {FROM_LEVEL}"):
            second.cli("control", "upgrade")
        upgrade.to_new(upgrade.pair.b.proxy)
        upgrade.to_new(first)
        raise_levels(upgrade)


@ENDS
@pytest.mark.parametrize("first", ["source", "target"])
def test_a_downgrade_works_before_the_level_is_raised(first: str, ends: str) -> None:
    with upgrading(ends) as upgrade:
        source, target = upgrade.pair.a.proxy, upgrade.pair.b.proxy
        upgrade.to_new(source)
        upgrade.to_new(target)
        for proxy in (source, target) if first == "source" else (target, source):
            upgrade.to_old(proxy)


@pytest.mark.parametrize("downgraded", ["source", "target"])
def test_a_downgrade_afterwards_is_refused_and_the_link_is_out_of_sync(downgraded: str) -> None:
    with upgrading("stop") as upgrade:
        source, target = upgrade.pair.a.proxy, upgrade.pair.b.proxy
        upgrade.to_new(source)
        upgrade.to_new(target)
        raise_levels(upgrade)
        old, other = (source, target) if downgraded == "source" else (target, source)
        upgrade.refuses(old, f"feature level {KNOWN_LEVEL}", "upgrade this proxy")
        out_of_sync(upgrade, other)
        old.environment = {}
        old.start()
        upgrade.works()


def out_of_sync(upgrade: Upgrade, proxy: ProxyProcess) -> None:
    """Wait until a proxy says that the link is Out-Of-Sync, and why."""

    def said() -> bool:
        link = proxy.get(f"/v1/links/{upgrade.pair.name}")
        return link["state"] == "Out-Of-Sync" and link["reason"] is not None and bool(link["message"])

    until("Out-Of-Sync, with a reason", said)


def test_a_peer_that_does_not_know_what_the_link_needs_makes_it_out_of_sync_with_the_reason() -> None:
    old = environment_of(WITHOUT_CONFIRMED_COMMITS)
    with (
        KafkaCluster(name="features-a") as a,
        KafkaCluster(name="features-b") as b,
        linked(a, b, a_proxies=[whole(a, old)], b_proxies=[whole(b, old)]) as pair,
    ):
        pair.attach()
        source, target = pair.names("t")
        pair.a.create_topic(source)
        pair.a.produce(source, [b"x"])
        pair.wait_following()
        pair.a.proxy.cli("link", "set-mode", pair.name, "synchronous")
        until("In-Sync", lambda: pair.a.link(pair.name)["state"] == "In-Sync")

        pair.a.proxy.stop()
        pair.a.proxy.environment = {}
        pair.a.proxy.start()
        until("refused", lambda: pair.a.link(pair.name)["reason"] == "PEER_VERSION_UNSUPPORTED")
        until("Out-Of-Sync", lambda: pair.a.link(pair.name)["state"] == "Out-Of-Sync")
        assert f"proxy {pair.b.proxy.name} does not know confirmed-commits" in pair.a.link(pair.name)["message"]
        pair.a.produce(source, [b"y"])  # plain producers go on while a link is Out-Of-Sync

        pair.b.proxy.stop()
        pair.b.proxy.environment = {}
        pair.b.proxy.start()
        until("In-Sync again", lambda: pair.a.link(pair.name)["state"] == "In-Sync")
        assert pair.a.link(pair.name)["reason"] is None
        pair.a.produce(source, [b"z"])
        assert [each.value for each in pair.b.read(target, direct=True)] == [b"x", b"y", b"z"]
