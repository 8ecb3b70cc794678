"""Links between real clusters that somebody in between can neither read nor alter: over TLS, with keys of their own."""

from __future__ import annotations

import secrets
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.certificates import Authority
from support.links import Linked, linked, until, whole

from isthmus_bench.kafka import KafkaCluster
from isthmus_protocol import link

pytestmark = pytest.mark.brokers


@contextmanager
def made(pair: Linked, encryption: str) -> Iterator[Linked]:
    """The link with a pair of namespaces attached, over which some records have come."""
    pair.attach()
    source, target = pair.names("secured")
    pair.a.create_topic(source)
    pair.a.produce(source, [b"one", b"two"])
    pair.wait_end(target, 2)
    for side in (pair.a, pair.b):
        assert side.link(pair.name)["encryption"] == encryption
        assert side.link(pair.name)["reason"] is None
    yield pair
    pair.a.produce(source, [b"three"])
    pair.wait_end(target, 3)
    assert [each.value for each in pair.b.read(target)] == [b"one", b"two", b"three"]


def _answer_without_certificate(address: str, authority: Authority) -> bytes:
    """What somebody is answered who knows the authority, and has nothing signed by it."""
    host, _, port = address.partition(":")
    context = ssl.create_default_context(cafile=str(authority.file))
    with (
        socket.create_connection((host, int(port)), timeout=30) as plain,
        context.wrap_socket(plain, server_hostname=host) as stranger,
    ):
        try:
            stranger.sendall(link.encode_json(link.MessageType.HELLO, {}))
            return stranger.recv(1)
        except (ssl.SSLError, ConnectionError):
            return b""


@pytest.mark.one_in_ci("stories", of="links that are encrypted")
def test_a_proxy_that_only_dials_over_tls_both_ways_with_a_control_key(
    kafka_pair: tuple[KafkaCluster, KafkaCluster], tmp_path: Path
) -> None:
    """Both ends show a certificate; the link's secret stands sealed in both control logs."""
    authority = Authority(tmp_path)
    (a_cert, a_key), (b_cert, b_key) = authority.issue("a"), authority.issue("b")
    dials = {"tls_cafile": str(authority.file), "tls_certfile": str(a_cert), "tls_keyfile": str(a_key)}
    listens = {"tls_cafile": str(authority.file), "tls_certfile": str(b_cert), "tls_keyfile": str(b_key)}
    keys = [secrets.token_hex(32) for _ in "ab"]
    sealed = {"control_key_env": "CONTROL_KEY"}
    a, b = kafka_pair
    a_proxy = whole(a, {"CONTROL_KEY": keys[0]}, only_dials=True, link=dials, cluster=sealed)
    b_proxy = whole(b, {"CONTROL_KEY": keys[1]}, link_listener=listens, cluster=sealed)
    with linked(a, b, a_proxies=[a_proxy], b_proxies=[b_proxy]) as pair, made(pair, "tls"):
        for side in (pair.a, pair.b):
            warnings = side.proxy.get("/v1/status")["process"]["warnings"]
            assert not [each for each in warnings if "not sealed" in each], warnings
        assert _answer_without_certificate(b_proxy.link_address, authority) == b""
        for proxy in (a_proxy, b_proxy):  # what was sealed opens again
            proxy.stop()
            proxy.start()
        until("connected again", lambda: pair.a.link(pair.name)["encryption"] == "tls")


@pytest.mark.one_in_ci("stories", of="links that are encrypted")
def test_without_tls_frames_are_encrypted(kafka_pair: tuple[KafkaCluster, KafkaCluster]) -> None:
    a, b = kafka_pair
    with linked(a, b, a_proxies=[whole(a, only_dials=True)]) as pair, made(pair, "frames"):
        pass
