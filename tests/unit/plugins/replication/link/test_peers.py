"""Who dials, who is accepted: several proxies on a side, strangers, a peer that turns out to be another."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from support.loopback import run_on_loopback
from support.plugins import Proxy, Two, on_two

from isthmus_control.commands import AlterLink, CreateLink
from isthmus_control.sealing import Seal, Sealed
from isthmus_plugins import links
from isthmus_plugins.replication.link import peers


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


def test_strangers_take_no_room(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(peers, "HANDSHAKES_MAX", 5)

    async def work(two: Two) -> None:
        host, port = two.b.address.split(":")
        strangers = [await asyncio.open_connection(host, int(port)) for _ in range(5)]
        await asyncio.sleep(0.05)
        reader, writer = await asyncio.open_connection(host, int(port))
        assert await reader.read() == b""
        writer.close()
        assert "TOO_MANY" in [getattr(record, "code", None) for record in caplog.records]
        for _, stranger in strangers:
            stranger.close()
        await asyncio.sleep(0.05)
        await two.create()
        await two.connected()

    on_two(work)


def test_a_host_that_does_not_resolve_is_told() -> None:
    async def work(two: Two) -> None:
        link = CreateLink("x", "8d5f1b3e-6f0b-4c6e-9d0e-1f2a3b4c5d6e", "B", True, ("no-such-host.invalid:1",))
        two.controls["A"].apply(link)
        secret = two.a.context.seal(b"s", "8d5f1b3e-6f0b-4c6e-9d0e-1f2a3b4c5d6e")
        two.controls["A"].apply(AlterLink("x", secret=secret))
        await two.until("it is told", lambda: two.a.status("x").reason == "UNRESOLVABLE_BOOTSTRAP_ERROR")

    on_two(work)
