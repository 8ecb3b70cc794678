"""A real proxy whose file descriptors run short: its own work goes on, and clients' when there are some again."""

from __future__ import annotations

import os
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest
from support.links import linked, until, whole

from isthmus_bench.kafka import KafkaCluster
from isthmus_bench.proxies import ProxyProcess

pytestmark = pytest.mark.brokers
LIMIT = 192
FIT = LIMIT // 4
STRANGERS = 200


def limit(proxy: ProxyProcess, descriptors: int) -> None:
    resource.prlimit(proxy.pid, resource.RLIMIT_NOFILE, (descriptors, LIMIT))


def ready(proxy: ProxyProcess) -> list[str]:
    """Why it is not."""
    answer = httpx.get(f"{proxy.url}/health/ready", timeout=5, trust_env=False)
    reasons: list[str] = answer.json()["reasons"]
    return reasons


def connected(stack: ExitStack, address: str, count: int) -> Iterator[socket.socket]:
    host, _, port = address.rpartition(":")
    for _ in range(count):
        yield stack.enter_context(socket.create_connection((host, int(port)), 5))


def closed(connections: list[socket.socket]) -> list[socket.socket]:
    """Those that the other side has ended."""
    found = []
    for each in connections:
        each.setblocking(False)
        try:
            if not each.recv(1):
                found.append(each)
        except BlockingIOError:
            pass
        except ConnectionResetError:
            found.append(each)
    return found


@pytest.mark.one_in_ci("stories", of="faults of records")
@pytest.mark.parametrize("short", ["source", "target"])
def test_a_proxy_without_descriptors(short: str, kafka_pair: tuple[KafkaCluster, KafkaCluster]) -> None:
    a, b = kafka_pair
    sides = (("source", a), ("target", b))
    proxies = [whole(kafka, descriptors=LIMIT if name == short else None) for name, kafka in sides]
    scarce, other = proxies if short == "source" else reversed(proxies)
    with (
        linked(a, b, a_proxies=proxies[:1], b_proxies=proxies[1:]) as link,
        ExitStack() as strangers,
    ):
        link.attach()
        source, target = link.names("scarce")
        link.a.create_topic(source, 1, direct=True)
        link.a.produce(source, [b"before"], direct=True)
        link.wait_end(target, 1)

        # More clients than fit, and strangers at the link listener.
        clients = list(connected(strangers, scarce.bootstrap, STRANGERS))
        until("those beyond the limit are closed", lambda: len(closed(clients)) >= STRANGERS - FIT)
        peers = list(connected(strangers, scarce.link_address, STRANGERS))
        until("and strangers that would take the last", lambda: len(closed(peers)) > STRANGERS // 2)
        assert "connections turned away" in scarce.log
        link.a.produce(source, [b"meanwhile"], direct=True)
        link.wait_end(target, 2)
        assert scarce.get("/v1/status")["process"]["lease"]["vouching"]

        # None at all: what is connected goes on, who comes waits, nothing spins.
        limit(scarce, len(os.listdir(f"/proc/{scarce.pid}/fd")) - 5)
        until("the log says so", lambda: "file descriptors run short" in scarce.log)
        with ExitStack() as waiting:
            list(connected(waiting, scarce.bootstrap, 1))
            worked = cpu_s(scarce)
            time.sleep(3)
            assert cpu_s(scarce) - worked < 1.5
            link.a.produce(source, [b"without"], direct=True)
            link.wait_end(target, 3)
            other.stop()
            other.start()
            time.sleep(1)
            limit(scarce, LIMIT)
            strangers.close()
            link.a.produce(source, [b"after"], direct=True)
            link.wait_end(target, 4, timeout_s=60)
        link.wait_following()
        until("it is ready again", lambda: not ready(scarce), 60)
        until("the log says so, too", lambda: "file descriptors suffice again" in scarce.log)
        assert [each["equal"] for each in link.verify()["partitions"] if each["topic"] == source] == [True]


def cpu_s(proxy: ProxyProcess) -> float:
    """CPU that the process has used so far."""
    with open(f"/proc/{proxy.pid}/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
