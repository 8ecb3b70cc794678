"""Clients that have not authenticated, in front of brokers with SASL: what they cost, and how they may log in."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import struct
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Final

import pytest
import uvloop
from confluent_kafka.admin import AdminClient
from support.kafka import VERSIONS
from support.links import until
from support.wire import Wire, log_in

from isthmus.kafka.sasl import PlainExchange, SaslExchange, ScramExchange
from isthmus.kafka.security import SecuritySpec
from isthmus.session.authentication import Exchange
from isthmus.session.broker_sasl import BrokerSasl
from isthmus.session.dispatch import compile_routes
from isthmus.session.endpoint import Endpoint
from isthmus.session.listener import Gateway, Limits, Listener
from isthmus_bench.kafka import KafkaCluster, Security
from isthmus_bench.kafka.settings import ListenerName
from isthmus_bench.proxies import ProxyProcess
from isthmus_plugins.api import Client
from isthmus_plugins.tasks import Supervision
from isthmus_protocol.error_codes import ILLEGAL_SASL_STATE
from isthmus_protocol.schema import ApiKey

pytestmark = pytest.mark.brokers

LISTENERS: Final[tuple[ListenerName, ...]] = ("SASL_PLAINTEXT", "PLAINTEXT")
SECURITY: Final = Security(users={"admin": "admin-secret", "alice": "alice-secret"})
MIB: Final = 1 << 20


@pytest.fixture(scope="module", params=VERSIONS)
def brokers(request: pytest.FixtureRequest) -> Iterator[KafkaCluster]:
    settings = {
        "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512,OAUTHBEARER",
        "listener.name.sasl_plaintext.oauthbearer.sasl.jaas.config": (
            "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule required "
            'unsecuredLoginStringClaim_sub="broker";'
        ),
    }
    chosen = {"version": request.param, "listeners": LISTENERS, "security": SECURITY, "settings": settings}
    with KafkaCluster(name="strangers", **chosen) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def proxy(brokers: KafkaCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxyProcess]:
    """Fronts the listener with SASL."""
    password = tmp_path_factory.mktemp("secrets") / "password"
    password.write_text("admin-secret")
    cluster = {
        "security_protocol": "SASL_PLAINTEXT",
        "sasl_mechanism": "SCRAM-SHA-512",
        "sasl_username": "admin",
        "sasl_password_file": str(password),
    }
    extra = {"cluster": cluster, "client_listener": {"authentication_timeout_s": 2.0}}
    with ProxyProcess(brokers.bootstrap_servers, name="strangers", extra=extra) as process:
        yield process


def target_of(brokers: KafkaCluster, listener: ListenerName = "SASL_PLAINTEXT") -> Endpoint:
    (address,) = brokers.addresses(listener).values()
    return Endpoint(*address)


def exchange_of(mechanism: str, password: str = "alice-secret") -> SaslExchange:
    return PlainExchange("alice", password) if mechanism == "PLAIN" else ScramExchange(mechanism, "alice", password)


def log_in_v0(wire: Wire, exchange: SaslExchange, mechanism: str) -> None:
    """As clients did before KIP-152. Raises ConnectionError where the broker closes, which is how it refuses."""
    assert wire.request(ApiKey.SASL_HANDSHAKE, 0, {"mechanism": mechanism}).error_code == 0
    said: bytes | None = exchange.first()
    while said is not None:
        wire.send_bytes(struct.pack(">I", len(said)) + said)
        answer = wire.receive_frame()
        if answer is None:
            raise ConnectionError("refused")
        said = exchange.next(answer[4:])


def lists_topics(wire: Wire) -> None:
    assert wire.request(ApiKey.METADATA, 9, {"topics": None}).cluster_id


def cpu_s(proxy: ProxyProcess) -> float:
    fields = Path(f"/proc/{proxy.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def resident(proxy: ProxyProcess) -> int:
    return int(Path(f"/proc/{proxy.pid}/statm").read_text().split()[1]) * 4096


def test_whether_a_listener_has_sasl_is_asked(brokers: KafkaCluster) -> None:
    """Which is no failed authentication to the broker."""

    async def main() -> None:
        sasl = BrokerSasl(SecuritySpec(), None, Supervision())
        targets = {name: target_of(brokers, name) for name in LISTENERS}
        await sasl.ask(targets.values(), 20)
        assert {name: sasl.required(target) for name, target in targets.items()} == {
            "SASL_PLAINTEXT": True,
            "PLAINTEXT": False,
        }
        await sasl.close()

    (broker_id,) = brokers.broker_ids
    failed = brokers.log(broker_id).count("Failed authentication")
    uvloop.run(main())
    with Wire(brokers.bootstrap_servers) as wire, pytest.raises(ConnectionError):
        log_in(wire, exchange_of("PLAIN", "guess"), "PLAIN")
    until("this one is", lambda: brokers.log(broker_id).count("Failed authentication") == failed + 1)


def test_a_request_of_8_mib_of_a_stranger_costs_nothing(proxy: ProxyProcess) -> None:
    """DeleteTopics of millions of topics, which took 21 s of the loop and 1.2 GiB."""
    topics = 8 * MIB - 32
    head = struct.pack(">hhih", ApiKey.DELETE_TOPICS, 5, 1, -1) + b"\0"
    request = head + _uvarint(topics + 1) + b"\1" * topics + struct.pack(">iB", 30_000, 0)
    frame = struct.pack(">I", len(request)) + request
    cpu, memory = cpu_s(proxy), resident(proxy)
    for _ in range(20):
        with Wire(proxy.bootstrap) as wire, contextlib.suppress(ConnectionError):
            wire.send_bytes(frame)
            assert wire.receive_frame() is None
    assert cpu_s(proxy) - cpu < 0.5
    assert resident(proxy) - memory < 8 * MIB
    assert 1 <= proxy.log.count("connection refused by protocol") <= 3, "a line a minute"
    with Wire(proxy.bootstrap) as wire:
        log_in(wire, exchange_of("PLAIN"), "PLAIN")
        lists_topics(wire)


def _uvarint(value: int) -> bytes:
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    return bytes((*encoded, value))


@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
@pytest.mark.parametrize("version", [0, 1])
def test_logins(brokers: KafkaCluster, proxy: ProxyProcess, mechanism: str, version: int) -> None:
    """Through the proxy as directly."""
    log = log_in if version else log_in_v0
    for address in (brokers.bootstrap_servers, proxy.bootstrap):
        with Wire(address) as wire:
            log(wire, exchange_of(mechanism), mechanism)
            lists_topics(wire)
        with Wire(address) as wire, pytest.raises(ConnectionError):
            log(wire, exchange_of(mechanism, "guess"), mechanism)


def token(subject: str, lifetime_s: int = 600) -> str:
    """One that a broker takes without a signature, as it does where nothing else is configured."""
    claims = {"sub": subject, "iat": int(time.time()) - 5, "exp": int(time.time()) + lifetime_s}
    parts = (json.dumps(each).encode() for each in ({"alg": "none"}, claims))
    return ".".join((*(base64.urlsafe_b64encode(each).decode().rstrip("=") for each in parts), ""))


class Principals:
    """Is notified of who a client is."""

    def __init__(self) -> None:
        self.seen: list[str | None] = []

    def opened(self, client: Client) -> None:
        pass

    def authenticated(self, client: Client) -> None:
        self.seen.append(client.principal)

    def closed(self, client: Client) -> None:
        pass


@contextlib.asynccontextmanager
async def fronting(target: Endpoint) -> AsyncIterator[tuple[str, Principals]]:
    """A proxy's listener in front of a broker with SASL: its address, and whom plugins are told of."""
    sasl, principals = BrokerSasl(SecuritySpec(), None, Supervision()), Principals()
    await sasl.ask([target], 20)
    gateway = Gateway(compile_routes((), lambda *_: None), Limits(), Supervision(), broker_sasl=sasl)
    gateway.connection_observers = (principals,)
    listener = Listener(gateway, 1, Endpoint("127.0.0.1", 0), lambda: [target])
    await listener.start()
    await listener.accept()
    try:
        yield str(listener.bind), principals
    finally:
        await listener.stop()
        await gateway.drain(5)
        await sasl.close()


def test_a_token_names_who_the_broker_takes_it_for(brokers: KafkaCluster) -> None:
    """One that it refuses is answered without an error; one in another field than ``auth`` it does not read."""

    def log_in_with(address: str) -> None:
        forged, own = token("admin", lifetime_s=-100), token("mallory")
        with Wire(address) as wire:
            assert wire.request(ApiKey.SASL_HANDSHAKE, 1, {"mechanism": "OAUTHBEARER"}).error_code == 0
            for said, refused in (
                (f"n,,\x01auth=Bearer {forged}\x01\x01", True),
                (f"n,,\x01traceid=auth=Bearer {forged}\x01auth=Bearer {own}\x01\x01", False),
            ):
                answer = wire.request(ApiKey.SASL_AUTHENTICATE, 2, {"auth_bytes": said.encode()})
                assert answer.error_code == 0
                assert bool(answer.auth_bytes) is refused
            lists_topics(wire)

    async def main() -> None:
        async with fronting(target_of(brokers)) as (address, principals):
            await asyncio.to_thread(log_in_with, address)
            assert principals.seen == ["User:mallory"]

    uvloop.run(main())


@pytest.mark.parametrize("version", [0, 1])
def test_a_broker_says_whether_it_takes_requests(brokers: KafkaCluster, version: int) -> None:
    """What is asked on behalf of mechanisms whose last message is not known."""

    def asked(wire: Wire) -> int | None:
        try:
            return int(wire.request(ApiKey.API_VERSIONS, 0, {}).error_code)
        except ConnectionError:
            return None

    log = log_in if version else log_in_v0
    with Wire(brokers.bootstrap_servers) as wire:
        log(wire, exchange_of("SCRAM-SHA-256"), "SCRAM-SHA-256")
        assert asked(wire) == 0
    with Wire(brokers.bootstrap_servers) as wire:
        log(wire, HalfAnExchange("SCRAM-SHA-256", "alice", "alice-secret"), "SCRAM-SHA-256")
        assert asked(wire) == (ILLEGAL_SASL_STATE if version else None)


@pytest.mark.parametrize("version", [0, 1])
def test_a_mechanism_whose_messages_are_not_known(
    brokers: KafkaCluster, version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of GSSAPI: here it is SCRAM that the proxy does not know."""
    monkeypatch.setattr(Exchange, "is_scram", property(lambda exchange: False))
    log = log_in if version else log_in_v0

    def log_in_with(address: str) -> None:
        with Wire(address) as wire:
            log(wire, exchange_of("SCRAM-SHA-256"), "SCRAM-SHA-256")
            lists_topics(wire)
            lists_topics(wire)
        with Wire(address) as wire:
            log(wire, HalfAnExchange("SCRAM-SHA-256", "alice", "alice-secret"), "SCRAM-SHA-256")
            with pytest.raises(ConnectionError):
                lists_topics(wire)

    async def main() -> None:
        async with fronting(target_of(brokers)) as (address, principals):
            await asyncio.to_thread(log_in_with, address)
            assert principals.seen == []

    uvloop.run(main())


class HalfAnExchange(ScramExchange):
    """Leaves out the proof."""

    def next(self, answer: bytes) -> None:
        assert answer.startswith(b"r=")


def test_a_stranger_that_says_nothing_goes(proxy: ProxyProcess) -> None:
    with Wire(proxy.bootstrap) as wire:
        began = time.monotonic()
        assert wire.receive_frame() is None
        assert 1.5 < time.monotonic() - began < 10


@pytest.mark.suite("clients")
def test_a_broker_that_is_restarted(brokers: KafkaCluster, proxy: ProxyProcess) -> None:
    """It is asked again; until then, and after that, strangers get nowhere, and clients in as before."""
    settings = brokers.librdkafka_properties(user="alice") | {"bootstrap.servers": proxy.bootstrap, "log_level": 0}
    (broker_id,) = brokers.broker_ids
    brokers.restart(broker_id)
    until("clients are in again", lambda: AdminClient(settings).list_topics(timeout=30).brokers)
    with Wire(proxy.bootstrap) as wire, pytest.raises(ConnectionError):
        lists_topics(wire)


@pytest.mark.suite("clients")
def test_a_listener_without_sasl_that_is_restarted(brokers: KafkaCluster, proxy: ProxyProcess) -> None:
    proxy.stop()
    with ProxyProcess(brokers.bootstrap("PLAINTEXT"), name="strangers") as plain:
        with Wire(plain.bootstrap) as wire:
            lists_topics(wire)
        (broker_id,) = brokers.broker_ids
        brokers.restart(broker_id)

        def served() -> bool:
            try:
                with Wire(plain.bootstrap) as wire:
                    lists_topics(wire)
            except ConnectionError:
                return False
            return True

        until("clients are in again", served)
        assert "not authenticated" not in plain.log, "they were not taken for strangers meanwhile"
    proxy.start()
