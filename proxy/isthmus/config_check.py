"""``isthmus proxy --check``: whether a configuration would work, cluster and certificates included."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Callable
from typing import Final, TypeVar

from isthmus.admin.access import Access
from isthmus.config import Address, ClusterSection, ConfigError, Problem, ProxyConfig
from isthmus.config_tls import (
    admin_listener_tls,
    client_listener_tls,
    cluster_tls,
    link_dial_tls,
    link_listener_tls,
    session_tls,
)
from isthmus.errors import AuthenticationFailed, ConfigurationError, PeerFault
from isthmus.kafka.broker_connection import BrokerConnection
from isthmus_protocol.schema import ApiKey

CONNECT_TIMEOUT_S: Final = 5.0
"""How long a check waits for one broker."""


T = TypeVar("T")


async def check(config: ProxyConfig) -> list[Problem]:
    """What would stop this configuration from working now: certificates, and bootstrap servers that do not answer.

    Binds nothing, so that a running proxy's configuration can be checked.
    """
    problems: list[Problem] = []
    for make in (client_listener_tls, link_listener_tls, link_dial_tls, admin_listener_tls, session_tls):
        _collect(problems, make, config)
    try:
        Access(config.admin_listener)
    except ConfigurationError as error:
        problems.append(Problem(error.key, error.problem, "", error.fix))
    tls = _collect(problems, cluster_tls, config)
    if not problems:
        problems += await check_cluster(config, tls)
    return list(dict.fromkeys(problems))


def _collect(problems: list[Problem], make: Callable[[ProxyConfig], T], config: ProxyConfig) -> T | None:
    try:
        return make(config)
    except ConfigError as error:
        problems += error.problems
        return None


async def check_cluster(config: ProxyConfig, tls: ssl.SSLContext | None) -> list[Problem]:
    """What is wrong with each bootstrap server: no answer, no Kafka, no such identity, or no broker of this id.

    ``tls``: of :func:`cluster_tls`.
    """
    found = await asyncio.gather(*(_probe(server, tls, config.cluster) for server in config.cluster.bootstrap_servers))
    return list(dict.fromkeys(problem for problem in found if problem is not None))


async def _probe(server: Address, tls: ssl.SSLContext | None, cluster: ClusterSection) -> Problem | None:
    def unusable(what: str, fix: str) -> Problem:
        expected = "a Kafka broker that answers"
        return Problem("cluster.bootstrap_servers", f'"{server}": {what}', expected, fix, unreachable=True)

    try:
        connection = await BrokerConnection.connect(
            *server, cluster.security, timeout=CONNECT_TIMEOUT_S, tls_context=tls
        )
        try:
            if cluster.broker_id is not None:
                return await _no_such_broker(connection, cluster.broker_id)
        finally:
            await connection.close()
    except AuthenticationFailed as error:
        fix = "correct sasl_mechanism, sasl_username or the password"
        return Problem("cluster.sasl_username", f"a refusal: {error}", "an identity that the broker accepts", fix)
    except PeerFault as error:
        return unusable(*_why(error.__cause__, cluster.security_protocol))
    return None


def _why(cause: BaseException | None, security_protocol: str) -> tuple[str, str]:
    """What kept us from a connection, and what to do."""
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted ({cause.verify_message})", "correct ssl_cafile or ssl_check_hostname"
    if isinstance(cause, ssl.SSLError):
        fix = f"the port may be without TLS: correct security_protocol ({security_protocol}) or the port"
        return f"no TLS connection ({cause.reason or 'failed'})", fix
    if isinstance(cause, TimeoutError):
        return f"no answer in {CONNECT_TIMEOUT_S:g} s", "start the broker, or correct the address"
    if isinstance(cause, OSError) and not isinstance(cause, ConnectionResetError):
        # asyncio's text names the address again, and all of them where a name has several.
        known = cause.errno is not None and cause.errno > 0
        reason = os.strerror(cause.errno) if known and cause.errno else cause.strerror or str(cause)
        return f"not reachable ({reason})", "start the broker, or correct the address"
    fix = f"the port may want another security_protocol than {security_protocol}, or be no Kafka listener"
    return "it does not speak Kafka in this way", fix


async def _no_such_broker(connection: BrokerConnection, broker_id: int) -> Problem | None:
    answer = await connection.call(ApiKey.METADATA, {"topics": [], "allow_auto_topic_creation": False})
    known = sorted(int(broker.node_id) for broker in answer.brokers)
    if broker_id in known:
        return None
    expected = f"a broker of the cluster ({', '.join(map(str, known))})"
    return Problem("cluster.broker_id", str(broker_id), expected, "correct the id, or start that broker")
