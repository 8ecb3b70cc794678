"""Who dials, who is accepted: several proxies on a side, strangers, a peer that turns out to be another."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from support.loopback import run_on_loopback
from support.plugins import Proxy, Two, on_two

from isthmus_control.clock import Register
from isthmus_control.commands import AlterLink, CreateLink, MergeLink
from isthmus_control.concerns import Concerns
from isthmus_control.model import LinkMode
from isthmus_control.sealing import Seal, Sealed
from isthmus_plugins import links
from isthmus_plugins.replication.link import features, peers
from isthmus_plugins.replication.link.features import ENCRYPTED_FRAMES


def test_every_proxy_is_connected_with_every_one_of_the_other_cluster() -> None:
    async def run() -> None:
        two = Two(brokers=3)
        sides = {
            name: [
                Proxy(two.clusters[name], two.controls[name], f"{name.lower()}{broker}", brokers=frozenset({broker}))
                for broker in (1, 2, 3)
            ]
            for name in "AB"
        }
        every = [*sides["A"], *sides["B"]]
        for proxy in every:
            await proxy.start()
        two.a, two.b = sides["A"][1], sides["B"][2]
        await two.create()
        for proxy in every:
            await two.until(
                f"{proxy.context.proxy_name} knows all",
                lambda p=proxy: len(p.plugin.parts.peers.connections("a-to-b")) == 3,
            )
        for broker in (1, 2, 3):
            connection = two.a.plugin.parts.peers.fronting("a-to-b", broker)
            assert connection is not None
            assert connection.peer["proxy"] == f"b{broker}"
        assert two.a.plugin.parts.peers.fronting("a-to-b", 4) is None

        # Records go to the proxy that fronts the target partition's leader, from the one that fronts the source's.
        topic = two.clusters["A"].add_topic("l-t", 6)
        for partition in topic.partitions:
            partition.write_values(b"x")
        await two.a.links.attach("a-to-b", links.Attach(local="l-", remote="r-", role="leader"))
        await two.until(
            "copied",
            lambda: (
                "r-t" in two.clusters["B"].found
                and all(each.end == 1 for each in two.clusters["B"].found["r-t"].partitions)
            ),
        )
        for name, prefix in (("A", "l-"), ("B", "r-")):
            for proxy in sides[name]:
                (broker,) = proxy.context.fronted_brokers or ()
                told = {each.partition for each in proxy.status().partitions}
                led = {
                    index
                    for index, partition in enumerate(two.clusters[name].found[prefix + "t"].partitions)
                    if partition.leader == broker
                }
                assert told == led

        # A partition whose leader moves goes on by way of another proxy, at both sides.
        for name, prefix in (("A", "l-"), ("B", "r-")):
            for partition in two.clusters[name].found[prefix + "t"].partitions:
                partition.move(1 + partition.leader % 3)
        for partition in topic.partitions:
            partition.write_values(b"y")
        await two.until("copied", lambda: all(each.end == 2 for each in two.clusters["B"].found["r-t"].partitions), 20)
        # Detached by one proxy: the streams of all end.
        await sides["B"][0].links.detach("a-to-b", "r-")
        for proxy in sides["B"]:
            assert not proxy.status().partitions
        for proxy in every:
            await proxy.stop()

    run_on_loopback(run())


def test_a_proxy_of_another_cluster_at_the_address_is_refused_and_the_right_one_found_later() -> None:
    async def work(two: Two) -> None:
        await two.create()
        await two.connected()
        wrong = Proxy(two.clusters["B"], two.controls["B"], "wrong")
        wrong.context.cluster_id = "C"
        await wrong.start()
        right = two.controls["A"].state.links["a-to-b"].remote_addresses
        two.controls["A"].apply(AlterLink("a-to-b", remote_addresses=(wrong.address,)))
        for connection in two.a.plugin.parts.peers.connections("a-to-b"):
            connection.close()
        await two.until("it goes on over the known address", lambda: two.a.status().state == "Following")
        assert two.a.plugin.parts.peers.connections("a-to-b")[0].peer["proxy"] == "b"
        assert right
        await wrong.stop()

    on_two(work)


@pytest.mark.parametrize("known", [True, False])
def test_the_link_of_another_cluster(known: bool) -> None:
    async def work(two: Two) -> None:
        await two.create()
        await two.connected()
        # B's half goes to a cluster C in truth: A is not it.
        state = two.controls["B"].state
        link = state.links["a-to-b"]
        if known:
            other = replace(link, remote_cluster_id="C")
            two.controls["B"].state = state.evolve(links={"a-to-b": other})
        else:
            two.controls["B"].state = state.evolve(links={})
        for connection in two.b.plugin.parts.peers.connections("a-to-b"):
            connection.close()
        code = "PEER_IS_ANOTHER_CLUSTER" if known else "PEER_HAS_NO_SUCH_LINK"
        await two.until("A is told", lambda: two.a.status().reason == code)
        two.controls["B"].state = state
        await two.connected()

    on_two(work)


@pytest.mark.parametrize("downgraded", ["a", "b"])
def test_a_proxy_that_does_not_know_what_a_synchronous_link_needs_is_refused(
    downgraded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever dials: the link is Out-Of-Sync at both sides, with the reason, and In-Sync again after an upgrade."""

    async def work(two: Two) -> None:
        two.clusters["A"].add_topic("l-t").partitions[0].write_values(b"x")
        await two.create()
        await two.connected()
        await two.a.links.attach("a-to-b", links.Attach(local="l-", remote="r-", role="leader"))
        await two.until("Following", lambda: [each.state for each in two.a.status().partitions] == ["Following"])
        await two.a.links.set_mode("a-to-b", links.SetMode(mode="synchronous"))
        await two.until("In-Sync", lambda: two.a.status().state == "In-Sync")
        old = (two.a if downgraded == "a" else two.b).plugin.parts.peers
        known = old._identity
        with monkeypatch.context() as patch:
            patch.setattr(old, "_identity", lambda: {**known(), "features": ["sync-lease"]})
            for connection in old.connections("a-to-b"):
                connection.close()
            new = two.b if downgraded == "a" else two.a
            for proxy in (two.a, two.b):
                await two.until("Out-Of-Sync", lambda proxy=proxy: proxy.status().state == "Out-Of-Sync", 30)
                assert proxy.status().reason is not None
            assert new.status().reason == "PEER_VERSION_UNSUPPORTED"
            assert f"proxy {downgraded} does not know confirmed-commits, decisions" in (new.status().message or "")
            assert not new.plugin.parts.peers.connections("a-to-b")
        await two.until("In-Sync again", lambda: two.a.status().state == "In-Sync", 30)
        await two.until("no reason is left", lambda: two.a.status().reason is None)

    on_two(work)


def require_encryption(proxy: Proxy, required: bool) -> None:
    proxy.context.link_policy = replace(proxy.context.link_policy, require_encryption=required)


@pytest.mark.parametrize("downgraded", ["a", "b"])
def test_a_link_with_a_proxy_that_does_not_encrypt_says_so_and_is_refused_where_that_is_required(
    downgraded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(two: Two) -> None:
        await two.create()
        await two.connected()
        assert [two.a.status().encryption, two.b.status().encryption] == ["frames", "frames"]
        old, new = (two.a, two.b) if downgraded == "a" else (two.b, two.a)
        known = old.plugin.parts.peers._identity
        with monkeypatch.context() as patch:
            words = {**known(), "features": [each for each in known()["features"] if each != ENCRYPTED_FRAMES]}
            patch.setattr(old.plugin.parts.peers, "_identity", lambda: words)
            for required in (False, True):
                require_encryption(new, required)
                for connection in old.plugin.parts.peers.connections("a-to-b"):
                    connection.close()
                reason = "PEER_VERSION_UNSUPPORTED" if required else "NOT_ENCRYPTED"
                await two.until("told", lambda reason=reason: new.status().reason == reason)
                assert f"proxy {downgraded} does not know encrypted-frames" in (new.status().message or "")
                assert new.status().encryption == (None if required else "none")
                assert (new.status().state == "Disconnected") is required
        await two.connected()
        await two.until("no reason is left", lambda: new.status().reason is None)
        assert new.status().encryption == "frames"

    on_two(work)


def test_no_link_is_created_in_the_clear_where_encryption_is_required(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(two: Two) -> None:
        monkeypatch.setattr(features, "FEATURES", ())
        require_encryption(two.b, True)
        with pytest.raises(links.OperationError, match="does not know encrypted-frames") as raised:
            await two.create()
        assert raised.value.code == "UNSUPPORTED_VERSION"
        require_encryption(two.b, False)
        require_encryption(two.a, True)
        with pytest.raises(links.OperationError, match="does not know encrypted-frames"):
            await two.create()

    on_two(work)


def test_a_link_that_becomes_synchronous_lets_go_of_a_proxy_that_does_not_know_how() -> None:
    async def work(two: Two) -> None:
        await two.create()
        await two.connected()
        (connection,) = two.b.plugin.parts.peers.connections("a-to-b")
        connection.peer["features"] = []
        link = two.controls["B"].state.links["a-to-b"]
        mode = Register(LinkMode.SYNCHRONOUS, replace(link.settings.mode.written, wall_ms=2**52))
        two.controls["B"].apply(MergeLink("a-to-b", link.link_id, replace(link.settings, mode=mode)))
        assert connection.lost
        assert "proxy a does not know" in connection.lost_reason

    on_two(work)


@pytest.mark.parametrize("side", ["a", "b"])
def test_a_link_that_a_newer_proxy_wrote_of_is_stopped_with_the_reason(side: str) -> None:
    async def work(two: Two) -> None:
        await two.create()
        await two.connected()
        two.controls[side.upper()].newer(Concerns(links=("a-to-b",)))
        stopped = two.a if side == "a" else two.b
        await asyncio.sleep(3)
        for proxy in (two.a, two.b):
            assert not proxy.plugin.parts.peers.connections("a-to-b")
            assert proxy.status().state == "Disconnected"
        assert stopped.status().reason == "CONTROL_RECORD_UNKNOWN"
        assert "upgrade this proxy" in (stopped.status().message or "")

    on_two(work)


def test_a_secret_that_does_not_open_is_told() -> None:
    async def work(two: Two) -> None:
        await two.create()
        await two.connected()
        two.controls["A"].apply(AlterLink("a-to-b", secret=Sealed(Seal.AES_256_GCM, "00", "AAAA")))
        for connection in two.a.plugin.parts.peers.connections("a-to-b"):
            connection.close()
        await two.until("A tells it", lambda: two.a.status().reason == "AUTHENTICATION_ERROR")
        assert "sealed with key" in (two.a.status().message or "")

    on_two(work)


def test_strangers_keep_no_link_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "HANDSHAKES_MAX", 5)

    async def work(two: Two) -> None:
        host, port = two.b.address.split(":")
        strangers = [await asyncio.open_connection(host, int(port)) for _ in range(5)]
        await asyncio.sleep(0.05)
        await two.create()
        await two.connected()
        assert await strangers[0][0].read() == b"", "the oldest one went"
        for _, stranger in strangers:
            stranger.close()

    on_two(work)


def test_an_address_where_nobody_is_has_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """Also while the link is up over another one."""

    async def work(two: Two) -> None:
        await two.create()
        await two.connected()
        for port in (1, 2):
            state = two.a.plugin.parts.peers._states["a-to-b"]
            two.a.plugin.parts.peers._keep_dialling("a-to-b", state, f"127.0.0.1:{port}")
        await asyncio.sleep(10)

    on_two(work)
    lines = [each.address for each in caplog.records if each.message == "link peer not reached"]
    assert sorted(lines) == ["127.0.0.1:1", "127.0.0.1:2"]


def test_who_finds_no_room_has_a_line_a_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(peers.descriptors, "is_kept", lambda descriptor: True)

    async def work(two: Two) -> None:
        for _ in range(5):
            assert not two.b.plugin.parts.peers._admits(3, "127.0.0.1:4")
            await asyncio.sleep(2)
        assert not two.b.plugin.parts.peers._admits(3, "127.0.0.2:4")

    on_two(work)
    lines = [each for each in caplog.records if each.message == "link connections rejected"]
    assert [(each.peer, each.code, each.connections) for each in lines] == [
        ("127.0.0.1", "TOO_MANY", 1),
        ("127.0.0.2", "TOO_MANY", 1),
    ]


def test_a_host_that_does_not_resolve_is_told() -> None:
    async def work(two: Two) -> None:
        link = CreateLink("x", "8d5f1b3e-6f0b-4c6e-9d0e-1f2a3b4c5d6e", "B", True, ("no-such-host.invalid:1",))
        two.controls["A"].apply(link)
        secret = two.a.context.seal(b"s", "8d5f1b3e-6f0b-4c6e-9d0e-1f2a3b4c5d6e")
        two.controls["A"].apply(AlterLink("x", secret=secret))
        await two.until("it is told", lambda: two.a.status("x").reason == "UNRESOLVABLE_BOOTSTRAP_ERROR")

    on_two(work)
