"""What a cluster is made of, and the ``server.properties`` that follow from it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, model_validator

from isthmus_bench.kafka.jars import DEFAULT_VERSION, parse_version
from isthmus_bench.kafka.security import BROKER_USER, MECHANISMS, Security, plain_jaas

ListenerName = Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"]
"""A listener is named by its security protocol."""

MAX_BROKERS: Final = 32
CONTROLLER: Final = "CONTROLLER"
INTERNAL: Final = "INTERNAL"
"""The brokers' own listener, where clients' listeners ask for credentials, or brokers meet elsewhere than clients."""

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")

OURS: Final = frozenset(
    {
        "advertised.listeners",
        "broker.id",
        "controller.listener.names",
        "controller.quorum.bootstrap.servers",
        "controller.quorum.voters",
        "inter.broker.listener.name",
        "listener.security.protocol.map",
        "listeners",
        "log.dir",
        "log.dirs",
        "metadata.log.dir",
        "node.id",
        "process.roles",
        "security.inter.broker.protocol",
    }
)
"""Settings that make the cluster what it is; they cannot be chosen."""


class Reach(BaseModel):
    """An address to listen on and the one by which others reach it, such as through a WAN (isthmus_bench.wan)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bind: str
    advertised: str


class ClusterSpec(BaseModel):
    """One cluster. Broker ids count from 1."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = "kafka"
    version: str = DEFAULT_VERSION
    brokers: int = 1
    cluster_id: str = ""
    """Else it gets one as Kafka makes them."""
    settings: Mapping[str, str] = {}
    """Broker settings, for all brokers."""
    broker_settings: Mapping[int, Mapping[str, str]] = {}
    """More settings for single brokers, such as ``broker.rack``."""
    features: Mapping[str, int] = {}
    """Feature levels to format with, such as ``transaction.version``; else the version's own."""
    listeners: tuple[ListenerName, ...] = ("PLAINTEXT",)
    """Clients' listeners, the first one is the main one."""
    security: Security = Security()
    host: str = "127.0.0.1"
    between_brokers: Reach | None = None
    """Where brokers and controllers talk to each other; else it is ``host``, too."""
    advertised_ports: Mapping[str, tuple[int, ...]] = {}
    """Of clients' listeners that are reached by way of others, such as relays: their ports, broker 1's first."""
    heap_mb: int = 256
    jvm_flags: tuple[str, ...] = ()
    """After our own, so they win: ``-XX:TieredStopAtLevel=4`` for benchmarks of throughput."""
    classes: tuple[Path, ...] = ()
    """Directories of brokers' own plugins (policies, remote storage), after Kafka's jars in the class path."""

    @model_validator(mode="after")
    def _check(self) -> ClusterSpec:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"{self.name!r} cannot be a cluster's name: letters, digits, '.', '_' and '-', at most 63")
        if not 1 <= self.brokers <= MAX_BROKERS:
            raise ValueError(f"a cluster has 1 to {MAX_BROKERS} brokers, not {self.brokers}")
        for settings in (self.settings, *self.broker_settings.values()):
            if fixed := sorted(OURS & settings.keys()):
                raise ValueError(f"{', '.join(fixed)} cannot be set: the cluster decides it itself")
        if unknown := sorted(self.broker_settings.keys() - set(self.ids)):
            raise ValueError(f"there is no broker {', '.join(map(str, unknown))} to set anything for")
        if len(set(self.listeners)) != len(self.listeners) or not self.listeners:
            raise ValueError("name each listener once, and one at least")
        for name, ports in self.advertised_ports.items():
            if name not in self.listeners or len(ports) != self.brokers:
                raise ValueError(f"advertised ports of {name}: one for each broker, of a listener that there is")
        if any(name.startswith("SASL") for name in self.listeners) and not self.security.users:
            raise ValueError("a SASL listener needs users")
        return self

    @property
    def ids(self) -> range:
        return range(1, self.brokers + 1)

    @property
    def controllers(self) -> range:
        """Brokers that are controllers, too. Three where there are so many: any one may die and the quorum lives."""
        return range(1, 4 if self.brokers >= 3 else 2)

    @property
    def secured(self) -> bool:
        """Whether brokers need a listener, and credentials, of their own."""
        return self.security.authorize or any(name != "PLAINTEXT" for name in self.listeners)

    @property
    def tls(self) -> bool:
        return any(name.endswith("SSL") for name in self.listeners)

    @property
    def inter_broker(self) -> str:
        return INTERNAL if self.secured or self.between_brokers is not None else "PLAINTEXT"

    def bind_host(self, listener: str) -> str:
        """Where a listener listens."""
        reach = self.between_brokers
        return self.host if reach is None or listener not in (INTERNAL, CONTROLLER) else reach.bind

    def advertised_host(self, listener: str) -> str:
        """Where a listener is reached."""
        reach = self.between_brokers
        return self.host if reach is None or listener not in (INTERNAL, CONTROLLER) else reach.advertised

    def advertised_port(self, listener: str, broker_id: int, port: int) -> int:
        """By which a listener at ``port`` is reached."""
        advertised = self.advertised_ports.get(listener)
        return port if advertised is None else advertised[broker_id - 1]

    def port_names(self, broker_id: int) -> list[str]:
        """The listeners that a broker needs ports for, the main one first."""
        names: list[str] = list(self.listeners)
        if self.inter_broker == INTERNAL:
            names.append(INTERNAL)
        if broker_id in self.controllers:
            names.append(CONTROLLER)
        return names


Ports = Mapping[int, Mapping[str, int]]
"""Broker id to listener name to port."""


def broker_properties(
    spec: ClusterSpec, broker_id: int, ports: Ports, directory: Path, tls_directory: Path, password: str
) -> dict[str, str]:
    """A broker's ``server.properties``. ``directory`` is the broker's own; ``password`` is BROKER_USER's."""
    replicas = min(3, spec.brokers)
    own = ports[broker_id]
    client = {name: own[name] for name in own if name != CONTROLLER}
    protocols: dict[str, str] = {name: name for name in spec.listeners}
    protocols[CONTROLLER] = "SASL_PLAINTEXT" if spec.secured else "PLAINTEXT"
    protocols[spec.inter_broker] = protocols[CONTROLLER]
    properties = {
        "node.id": str(broker_id),
        "process.roles": "broker,controller" if broker_id in spec.controllers else "broker",
        "controller.quorum.voters": ",".join(
            f"{i}@{spec.advertised_host(CONTROLLER)}:{ports[i][CONTROLLER]}" for i in spec.controllers
        ),
        "controller.listener.names": CONTROLLER,
        "inter.broker.listener.name": spec.inter_broker,
        "listeners": ",".join(f"{name}://{spec.bind_host(name)}:{port}" for name, port in own.items()),
        "advertised.listeners": ",".join(
            f"{name}://{spec.advertised_host(name)}:{spec.advertised_port(name, broker_id, port)}"
            for name, port in client.items()
        ),
        "listener.security.protocol.map": ",".join(f"{name}:{protocol}" for name, protocol in protocols.items()),
        "log.dirs": str(directory / "data"),
        # Fewer threads and smaller buffers than for a machine of its own.
        "num.network.threads": "2",
        "num.io.threads": "4",
        "log.cleaner.dedupe.buffer.size": str(4 << 20),
        "log.index.size.max.bytes": str(1 << 20),
        "offsets.topic.num.partitions": "4",
        "offsets.topic.replication.factor": str(replicas),
        "transaction.state.log.num.partitions": "4",
        "transaction.state.log.replication.factor": str(replicas),
        "transaction.state.log.min.isr": str(min(2, replicas)),
        "group.initial.rebalance.delay.ms": "0",
        # A dead broker is noticed after five seconds instead of nine.
        "broker.heartbeat.interval.ms": "500" if spec.brokers > 1 else "2000",
        "broker.session.timeout.ms": "5000",
        "controller.quorum.election.timeout.ms": "500",
        "controller.quorum.election.backoff.max.ms": "200",
        # Brokers in which nothing happens take half as much CPU time.
        "metadata.max.idle.interval.ms": "5000",
    }
    if parse_version(spec.version)[0] >= 4:
        properties |= {
            "group.coordinator.threads": "1",
            "share.coordinator.threads": "1",
            "share.coordinator.state.topic.num.partitions": "4",
            "share.coordinator.state.topic.replication.factor": str(replicas),
            "share.coordinator.state.topic.min.isr": str(min(2, replicas)),
        }
    if spec.secured:
        properties |= _secured(spec, password)
    if spec.tls:
        properties |= {
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": str(tls_directory / f"broker-{broker_id}.pem"),
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": str(tls_directory / "ca.crt"),
            "ssl.principal.mapping.rules": "RULE:^CN=([^,]+).*$/$1/",
            "listener.name.ssl.ssl.client.auth": spec.security.client_certificates,
        }
    return {**properties, **spec.settings, **spec.broker_settings.get(broker_id, {})}


def _secured(spec: ClusterSpec, password: str) -> dict[str, str]:
    security = spec.security
    own = plain_jaas({BROKER_USER: password}, (BROKER_USER, password))
    properties = {
        "sasl.mechanism.inter.broker.protocol": "PLAIN",
        "sasl.mechanism.controller.protocol": "PLAIN",
        "sasl.enabled.mechanisms": ",".join(MECHANISMS),
    }
    for name in (INTERNAL, CONTROLLER):
        properties[f"listener.name.{name.lower()}.sasl.enabled.mechanisms"] = "PLAIN"
        properties[f"listener.name.{name.lower()}.plain.sasl.jaas.config"] = own
    for name in spec.listeners:
        if name.startswith("SASL"):
            properties[f"listener.name.{name.lower()}.plain.sasl.jaas.config"] = plain_jaas(security.users)
            for mechanism in MECHANISMS[1:]:
                properties[f"listener.name.{name.lower()}.{mechanism.lower()}.sasl.jaas.config"] = (
                    "org.apache.kafka.common.security.scram.ScramLoginModule required;"
                )
    if security.authorize:
        properties["authorizer.class.name"] = "org.apache.kafka.metadata.authorizer.StandardAuthorizer"
        properties["super.users"] = ";".join(f"User:{user}" for user in (BROKER_USER, *security.super_users))
    return properties


def properties_text(properties: Mapping[str, str]) -> str:
    """As Java's Properties read it back: Latin-1, backslash escapes."""
    return "".join(f"{_escaped(key, key=True)}={_escaped(value)}\n" for key, value in properties.items())


def _escaped(text: str, *, key: bool = False) -> str:
    plain = text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")
    if key:
        plain = re.sub(r"([ :=#!])", r"\\\1", plain)
    elif plain.startswith(" "):
        plain = "\\" + plain
    utf16 = plain.encode("utf-16-be")
    units = [int.from_bytes(utf16[i : i + 2], "big") for i in range(0, len(utf16), 2)]
    return "".join(chr(unit) if 0x20 <= unit < 0x7F else f"\\u{unit:04x}" for unit in units)
