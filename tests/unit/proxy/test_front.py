"""Which brokers a proxy serves, and where: real ports, in front of brokers that say what a test tells them to."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop
from support.scripted_broker import ScriptedBroker

from isthmus.config import parse_config
from isthmus.errors import ConfigurationError
from isthmus.front import BROKERS_INTERVAL_S, Addresses, Front
from isthmus.kafka.client import ClusterClient
from isthmus.session.dispatch import compile_routes
from isthmus.session.listener import Gateway, Limits
from isthmus_bench.kafka import ports
from isthmus_control.apply import apply
from isthmus_control.commands import ClaimBrokers, Command
from isthmus_control.control_state import ControlState
from isthmus_control.model import BrokerClaim
from isthmus_control.outcome import Accepted
from isthmus_plugins.tasks import Supervision
from isthmus_protocol.schema import ApiKey

HOST = "127.0.0.1"
SOON_S = 5 * BROKERS_INTERVAL_S
ADVERTISED = "proxy.example"


class Cluster:
    """Brokers that all say the same of each other."""

    def __init__(self) -> None:
        self.brokers: dict[int, ScriptedBroker] = {}
        self.gone: set[int] = set()

    async def join(self, broker_id: int) -> ScriptedBroker:
        broker = self.brokers[broker_id] = ScriptedBroker(broker_id)
        broker.answers(ApiKey.METADATA, lambda request: self._metadata())
        await broker.__aenter__()
        return broker

    def _metadata(self) -> dict[str, Any]:
        return {
            "brokers": [
                {"node_id": number, "host": broker.host, "port": broker.port}
                for number, broker in self.brokers.items()
                if number not in self.gone
            ],
            "cluster_id": "scripted",
            "controller_id": min(self.brokers),
            "topics": [],
        }

    async def stop(self) -> None:
        for broker in self.brokers.values():
            await broker.stop()


class Scene:
    """A front and its cluster."""

    def __init__(self, cluster: Cluster, client: ClusterClient, listener: str, more: str) -> None:
        (first, *_) = cluster.brokers.values()
        config = parse_config(
            f'[cluster]\nbootstrap_servers = "{first.address}"\n{more}\n'
            f'[client_listener]\nadvertised_host = "{ADVERTISED}"\n{listener}',
            Path(),
            {},
        )
        self.cluster = cluster
        self.addresses = Addresses(ADVERTISED)
        self.supervision = Supervision()
        self.gateway = Gateway(compile_routes((), self.addresses), Limits(), self.supervision)
        self.front = Front(config, client, self.gateway, self.addresses, None, self.supervision)
        self.changes = 0

    async def serve(self) -> None:
        """As the process does: what changes once all is bound is told."""
        await self.front.bind()
        self.front.on_change = self._changed
        await self.front.serve()

    def _changed(self) -> None:
        self.changes += 1

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(SOON_S):
            while not condition():  # noqa: ASYNC110 - a port is bound in its own time
                await asyncio.sleep(0.02)

    async def reaches(self, port: int) -> set[int]:
        """The brokers to which a client of this port is connected; none: its connection is closed."""
        before = {number: broker.connections for number, broker in self.cluster.brokers.items()}
        reader, writer = await asyncio.open_connection(HOST, port)

        def reached() -> set[int]:
            return {number for number, broker in self.cluster.brokers.items() if broker.connections > before[number]}

        closed = asyncio.get_running_loop().create_task(reader.read(), name="test/read")
        await self.until(lambda: bool(reached()) or closed.done())
        writer.close()
        await closed
        return reached()


@contextlib.asynccontextmanager
async def front_of(*broker_ids: int, listener: str, more: str = "") -> AsyncIterator[Scene]:
    """Not bound yet. ``listener``: of the configuration's table."""
    cluster = Cluster()
    for broker_id in broker_ids:
        await cluster.join(broker_id)
    (first, *_) = cluster.brokers.values()
    async with ClusterClient([first.address]) as client:
        scene = Scene(cluster, client, listener, more)
        try:
            yield scene
        finally:
            await scene.front.stop()
            await scene.gateway.drain(0)
            await cluster.stop()


@pytest.fixture
def run_of_ports() -> Iterator[int]:
    """The first of ten ports that are free."""
    taken = ports.pick_run(HOST, 10)
    yield taken[0]
    ports.release(taken)


def run(main: Coroutine[Any, Any, None]) -> None:
    uvloop.run(asyncio.wait_for(main, 60))


@contextlib.contextmanager
def taken(port: int) -> Iterator[socket.socket]:
    with socket.create_server((HOST, port)) as listening:
        yield listening


def test_a_port_to_bootstrap_from_and_one_for_each_broker(run_of_ports: int) -> None:
    base = run_of_ports

    async def main() -> None:
        async with front_of(0, 4, listener=f'bind = "{HOST}:{base}"') as scene:
            front = scene.front
            await front.bind()
            assert str(front.bootstrap) == f"{ADVERTISED}:{base}"
            assert front.claims() == (BrokerClaim(0, ADVERTISED, base + 1), BrokerClaim(4, ADVERTISED, base + 5))
            assert (front.brokers, front.fronts(0), front.fronts(99)) == (None, True, True)
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection(HOST, base + 1)
            await front.serve()
            assert await scene.reaches(base + 1) == {0}
            assert await scene.reaches(base + 5) == {4}
            assert len(await scene.reaches(base)) == 1, "any broker"
            assert scene.addresses(4, b"broker.internal", 9092) == (ADVERTISED.encode(), base + 5)
            assert scene.addresses(9, b"broker.internal", 9092) is None, "nobody serves it"
            assert (front.unserved, scene.changes) == ({}, 0)

    run(main())


def test_brokers_come_and_those_that_go_keep_their_port(run_of_ports: int) -> None:
    base = run_of_ports

    async def main() -> None:
        async with front_of(0, listener=f'bind = "{HOST}:{base}"') as scene:
            front = scene.front
            await scene.serve()
            await scene.cluster.join(1)
            await scene.until(lambda: scene.changes == 1)
            assert front.claims()[1:] == (BrokerClaim(1, ADVERTISED, base + 2),)
            assert scene.addresses(1, b"broker.internal", 9092) == (ADVERTISED.encode(), base + 2)
            assert await scene.reaches(base + 2) == {1}
            scene.cluster.gone.add(1)
            asked = len(scene.cluster.brokers[0].requests)
            await scene.until(lambda: len(scene.cluster.brokers[0].requests) > asked)
            await asyncio.sleep(0.1)
            assert len(front.claims()) == 2, "it may be restarting"
            assert await scene.reaches(base + 2) == set()
            scene.cluster.gone.clear()
            await scene.until(lambda: len(scene.cluster.brokers[0].requests) > asked + 1)
            await asyncio.sleep(0.1)
            assert await scene.reaches(base + 2) == {1}
            assert scene.changes == 1

    run(main())


def test_a_broker_whose_port_is_taken_is_served_when_it_is_free(run_of_ports: int) -> None:
    base = run_of_ports

    async def main() -> None:
        async with front_of(0, 1, listener=f'bind = "{HOST}:{base}"') as scene:
            front = scene.front
            with taken(base + 1):
                await scene.serve()
                assert list(front.unserved) == [0]
                assert f"{HOST}:{base + 1} cannot be bound: Address already in use" in front.unserved[0]
                assert [claim.broker_id for claim in front.claims()] == [1]
                assert scene.addresses(0, b"broker.internal", 9092) is None
                assert front.fronts(0), "links look after its partitions"
                assert await scene.reaches(base + 2) == {1}
            await scene.until(lambda: scene.changes == 1)
            assert front.unserved == {}
            assert [claim.broker_id for claim in front.claims()] == [0, 1]
            assert await scene.reaches(base + 1) == {0}

    run(main())


def test_a_port_that_another_process_begins_to_listen_on_in_between(run_of_ports: int) -> None:
    base = run_of_ports

    async def main() -> None:
        async with front_of(0, 1, listener=f'bind = "{HOST}:{base}"') as scene:
            front = scene.front
            with socket.socket() as other:
                other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                other.bind((HOST, base + 1))  # as we do: it shows when one of both listens
                await front.bind()
                front.on_change = scene._changed
                assert len(front.claims()) == 2
                other.listen()
                await front.serve()
                assert list(front.unserved) == [0]
                assert scene.changes == 1
                assert [claim.broker_id for claim in front.claims()] == [1]
                assert scene.addresses(0, b"broker.internal", 9092) is None
            await scene.until(lambda: scene.changes == 2)
            assert front.unserved == {}
            assert await scene.reaches(base + 1) == {0}

    run(main())


@pytest.mark.parametrize(
    ("base_setting", "broker_ports", "unserved"),
    [
        (-1, "", 1),  # at the port to bootstrap from
        (0, "[client_listener.broker_ports]\n7 = {port}", 7),  # at broker 2's
    ],
)
def test_a_broker_whose_port_is_another_s(
    run_of_ports: int, base_setting: int, broker_ports: str, unserved: int
) -> None:
    base = run_of_ports

    async def main() -> None:
        listener = f'bind = "{HOST}:{base}"\nbroker_port_base = {base + base_setting}\n'
        async with front_of(1, 2, 7, listener=listener + broker_ports.format(port=base + 2)) as scene:
            front = scene.front
            await scene.serve()
            assert list(front.unserved) == [unserved]
            assert "another broker's, or to bootstrap from" in front.unserved[unserved] or "in use" in str(
                front.unserved
            )
            assert [claim.broker_id for claim in front.claims()] == sorted({1, 2, 7} - {unserved})

    run(main())


def test_a_broker_for_which_there_is_no_port(run_of_ports: int) -> None:
    async def main() -> None:
        async with front_of(1, 60_000, listener=f'bind = "{HOST}:{run_of_ports}"') as scene:
            await scene.front.bind()
            assert list(scene.front.unserved) == [60_000]
            assert "60000 = 19100" in scene.front.unserved[60_000]
            assert [claim.broker_id for claim in scene.front.claims()] == [1]

    run(main())


def test_free_ports_are_taken_for_all(run_of_ports: int) -> None:
    async def main() -> None:
        async with front_of(1, 2, listener=f'bind = "{HOST}:0"') as scene:
            await scene.serve()
            found = [claim.port for claim in scene.front.claims()]
            assert len({*found, scene.front.bootstrap.port}) == 3
            assert [await scene.reaches(port) for port in found] == [{1}, {2}]

    run(main())


def test_a_port_to_bootstrap_from_that_is_taken_is_an_error(run_of_ports: int) -> None:
    async def main() -> None:
        async with front_of(1, listener=f'bind = "{HOST}:{run_of_ports}"') as scene:
            with (
                taken(run_of_ports),
                pytest.raises(ConfigurationError, match="cannot be bound: Address already in use"),
            ):
                await scene.front.bind()

    run(main())


def test_the_sidecar_of_one_broker(run_of_ports: int) -> None:
    async def main() -> None:
        bind = f'bind = "{HOST}:{run_of_ports}"'
        async with front_of(1, 2, listener=bind, more="broker_id = 2") as scene:
            front = scene.front
            assert (front.brokers, front.fronts(2)) == (frozenset({2}), False)
            await scene.serve()
            assert front.claims() == (BrokerClaim(2, ADVERTISED, run_of_ports),)
            assert str(front.bootstrap) == f"{ADVERTISED}:{run_of_ports}"
            assert (front.fronts(2), front.fronts(1)) == (True, False)
            assert await scene.reaches(run_of_ports) == {2}
        async with front_of(1, 2, listener=bind, more="broker_id = 2") as scene:
            with taken(run_of_ports), pytest.raises(ConfigurationError, match="cannot be bound"):
                await scene.front.bind()
        async with front_of(1, 2, listener=bind, more="broker_id = 3") as scene:
            with pytest.raises(ConfigurationError, match=r"no broker 3. It has 1, 2: name one of them"):
                await scene.front.bind()

    run(main())


def test_brokers_that_do_not_answer_for_a_while_are_looked_for_again(
    run_of_ports: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with front_of(0, listener=f'bind = "{HOST}:{run_of_ports}"') as scene:
            await scene.serve()
            broker = scene.cluster.brokers[0]
            await broker.stop()
            await scene.until(lambda: "brokers not followed" in caplog.text)
            await broker.__aenter__()
            await scene.cluster.join(1)
            await scene.until(lambda: scene.changes == 1)
            assert [claim.broker_id for claim in scene.front.claims()] == [0, 1]
            assert not scene.supervision.failing

    run(main())


def test_clients_are_told_where_other_proxies_serve_brokers() -> None:
    claim = BrokerClaim(5, "other.example", 19_097)
    command = ClaimBrokers("other", str(uuid.uuid4()), (claim,), False, None, 10_000, "1", -1)
    state, outcome = apply(ControlState("c"), 0, Command(str(uuid.uuid4()), 0, "other", -1, command))
    assert isinstance(outcome, Accepted)
    addresses = Addresses(ADVERTISED)
    assert addresses(5, b"broker.internal", 9092) is None
    addresses.follow(state)
    assert addresses(5, b"broker.internal", 9092) == (b"other.example", 19_097)
    addresses.ports[5] = 19_000
    assert addresses(5, b"broker.internal", 9092) == (ADVERTISED.encode(), 19_000), "this proxy's own, if it has one"
    del addresses.ports[5]
    addresses.follow(ControlState("c"))
    assert addresses(5, b"broker.internal", 9092) is None
