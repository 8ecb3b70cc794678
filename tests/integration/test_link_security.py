"""Links between real clusters that somebody in between can neither read nor alter: over TLS, with keys of their own."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from support.certificates import Authority
from support.kafka import unique
from support.links import Linked, linked, until, whole

from isthmus_bench.kafka import KafkaCluster
from isthmus_bench.proxies import ProxyProcess
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


@pytest.mark.one_in_ci("stories", of="consents and encryption")
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


@pytest.mark.one_in_ci("stories", of="consents and encryption")
def test_without_tls_frames_are_encrypted(kafka_pair: tuple[KafkaCluster, KafkaCluster]) -> None:
    a, b = kafka_pair
    with linked(a, b, a_proxies=[whole(a, only_dials=True)]) as pair, made(pair, "frames"):
        pass


def _served(address: str) -> bytes:
    """The certificate of a listener, whoever signed it."""
    host, _, port = address.rpartition(":")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection((host, int(port)), timeout=30) as plain, context.wrap_socket(plain) as connected:
        found = connected.getpeercert(binary_form=True)
        assert found is not None
        return found


@pytest.mark.one_in_ci("stories", of="consents and encryption")
def test_certificates_are_renewed_while_all_goes_on(
    kafka_pair: tuple[KafkaCluster, KafkaCluster], tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.issue("b")
    files = {"tls_certfile": str(certificate), "tls_keyfile": str(key)}
    a, b = kafka_pair
    a_proxy = whole(a, only_dials=True, link={"tls_cafile": str(authority.file)})
    b_proxy = whole(b, client_listener=files, link_listener=files)
    with linked(a, b, a_proxies=[a_proxy], b_proxies=[b_proxy], token=tmp_path / "token") as pair:
        pair.attach()
        source, _ = pair.names("renewed")
        pair.a.create_topic(source)
        pair.a.produce(source, [b"one"])
        until("copied", lambda: (pair.b.link(pair.name)["partitions"] or [{}])[0].get("follower_end") == 1)
        listeners = [b_proxy.bootstrap, b_proxy.link_address]
        before = [_served(each) for each in listeners]
        good = certificate.read_bytes()

        certificate.write_bytes(b"no certificate")
        os.kill(b_proxy.pid, signal.SIGHUP)
        until("told", lambda: any("client_listener.tls" in each for each in _warnings(b_proxy)))
        assert [_served(each) for each in listeners] == before
        certificate.write_bytes(good)
        until("mended", lambda: not any("tls" in each for each in _warnings(b_proxy)))

        authority.issue("b")  # a new key, too
        until("renewed", lambda: all(_served(each) != old for each, old in zip(listeners, before, strict=True)))
        assert 'outcome="reloaded"' in httpx.get(f"{b_proxy.url}/metrics").text
        other, token = unique("link"), tmp_path / "another token"
        b_proxy.write_token(token)
        a_proxy.cli("link", "create", other, "--remote", b_proxy.link_address, "--token-file", str(token))
        a_proxy.cli("link", "delete", other)
        pair.a.produce(source, [b"two"])
        until("went on", lambda: pair.b.link(pair.name)["partitions"][0]["follower_end"] == 2)
        assert not _lost(pair)

        pair.raise_levels()
        rotated = pair.b.proxy.cli("link", "rotate-secret", pair.name)
        secrets_known = [side.proxy.cli("control", "describe")["secrets"] for side in (pair.a, pair.b)]
        assert all(rotated["secret_id"] in {each["secret_id"] for each in known} for known in secrets_known)
        assert not _lost(pair)
        b_proxy.kill()
        b_proxy.start()
        until("connected", lambda: pair.b.link(pair.name)["encryption"] == "tls")
        pair.a.produce(source, [b"three"])
        until("goes on", lambda: pair.b.link(pair.name)["partitions"][0]["follower_end"] == 3)


@pytest.mark.one_in_ci("stories", of="consents and encryption")
def test_a_control_key_comes_and_becomes_another_one(tmp_path: Path) -> None:
    """Secrets that stood open are sealed, then sealed anew; records are signed, then with the other key."""
    old, new, key = secrets.token_hex(32), secrets.token_hex(32), tmp_path / "key"
    key.write_text(old)
    with (
        KafkaCluster(name="keys-a") as a,
        KafkaCluster(name="keys-b") as b,
        linked(a, b, a_proxies=[whole(a)]) as pair,
    ):
        proxy = pair.a.proxy
        pair.raise_levels()
        (known,) = proxy.cli("control", "describe")["secrets"]
        assert known["key_id"] is None

        def sealed() -> tuple[str | None, str | None]:
            control = proxy.cli("control", "describe")
            return control["secrets"][0]["key_id"], control["own_sealing_key_id"]

        def sealed_with_own() -> bool:
            with_key, own = sealed()
            return with_key is not None and with_key == own

        seen = []
        for lines in (old, f"{old}\n{new}", f"{new}\n{old}"):
            key.write_text(lines)
            proxy.stop()
            proxy.extra("cluster", control_key_file=str(key))
            proxy.start()
            until("sealed", sealed_with_own)
            upgraded = proxy.cli("control", "upgrade")
            seen.append((sealed()[0], upgraded["key_id"], upgraded["signs"]))
            until("connected", lambda: pair.a.link(pair.name)["encryption"] == "frames")
        assert seen[0][0] == seen[1][0] != seen[2][0]
        assert seen[0][1] == seen[1][1] != seen[2][1]
        assert [each[2] for each in seen] == [True, False, True]
        pair.attach()
        source, target = pair.names("keys")
        pair.a.create_topic(source)
        pair.a.produce(source, [b"x"])
        pair.wait_end(target, 1)
        proxy.stop()
        key.write_text(new)  # too early: what is below is signed with the old one
        proxy.spawn()
        until("refused", lambda: not proxy.running)
        assert "control_key_file" in proxy.log
        key.write_text(f"{new}\n{old}")
        proxy.start()


def _lost(pair: Linked) -> list[str]:
    """The connections of the link that were lost."""
    return [line for line in pair.a.proxy.log.splitlines() if "link peer lost" in line and pair.name in line]


def _warnings(proxy: ProxyProcess) -> list[str]:
    found: list[str] = proxy.get("/v1/status")["process"]["warnings"]
    return found
