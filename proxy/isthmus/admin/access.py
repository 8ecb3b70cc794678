"""Who somebody is at the admin listener, and what they may do there.

Over the unix socket, whoever may open it: an operator. Over TCP, who shows a token, a client certificate, or both, as
configured; from a loopback address without either only where the configuration says so. Else nobody.
"""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final

from isthmus.admin.tokens import TokenFile
from isthmus.config import AdminListenerSection, is_loopback

if TYPE_CHECKING:
    import asyncio

NOBODY_WARNING: Final = (
    "nobody may use the admin listener but for /health: set admin_listener.unix_socket, operator_token_file or "
    "tls_client_cafile"
)


class Role(IntEnum):
    """What somebody may do. A later one may do more."""

    VIEWER = 0
    """Read."""
    OPERATOR = 1
    """Everything."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Somebody who may use the listener."""

    name: str
    """For the audit."""
    role: Role


@dataclass(frozen=True, slots=True)
class Peer:
    """The other end of a connection."""

    address: str
    uid: int | None = None
    """Of the process at the other end of the unix socket; None: it came over TCP."""
    certificate: Mapping[str, Any] | None = None
    """Its verified client certificate, as :meth:`ssl.SSLSocket.getpeercert` has it."""

    @classmethod
    def of(cls, transport: asyncio.BaseTransport) -> Peer:
        """Who a connection is with."""
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family == socket.AF_UNIX:
            credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            process, uid, _ = struct.unpack("3i", credentials)
            return cls(f"pid:{process}", uid)
        name = transport.get_extra_info("peername")
        address = str(name[0]) if isinstance(name, tuple | list) and name else "unknown"
        return cls(address, certificate=transport.get_extra_info("peercert") or None)


class Unauthenticated(Exception):
    """Somebody did not show who they are. The message says what is missing, to them."""


class Access:
    """The rules of one admin listener. Raises ConfigurationError where a token file cannot be read."""

    def __init__(self, listener: AdminListenerSection, hosts: Iterable[str] = ()) -> None:
        """``hosts``: names of this proxy, beside those that the listener's configuration has."""
        self._listener = listener
        files = {Role.VIEWER: listener.viewer_token_file, Role.OPERATOR: listener.operator_token_file}
        self._tokens = {
            role: TokenFile(f"admin_listener.{role.name.lower()}_token_file", path)
            for role, path in files.items()
            if path is not None
        }
        self._hosts = {_plain(name) for name in ("localhost", listener.bind.host, *listener.hosts, *hosts)}

    @property
    def metrics_open(self) -> bool:
        """Whether anybody may read the metrics."""
        return self._listener.metrics_without_authentication

    def identify(self, peer: Peer, authorization: str | None) -> Identity:
        """Who asks. ``authorization``: that header. Raises Unauthenticated."""
        listener = self._listener
        if peer.uid is not None:
            return Identity(f"uid:{peer.uid}", Role.OPERATOR)
        if listener.loopback_without_authentication:
            return Identity("loopback", Role.OPERATOR)
        certified = None
        if listener.tls_client_cafile is not None:
            if peer.certificate is None:
                raise Unauthenticated("show a client certificate: isthmus takes --cert and --key")
            certified = self._certified(peer.certificate)
        if self._tokens:
            return self._shown(authorization)
        if certified is None:
            raise Unauthenticated("this listener is open to nobody: admin_listener of its configuration says to whom")
        return certified

    def _shown(self, authorization: str | None) -> Identity:
        scheme, _, presented = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not presented.strip():
            raise Unauthenticated("show a token (Authorization: Bearer ...): isthmus takes --token-file")
        best: Identity | None = None
        for role, file in sorted(self._tokens.items()):
            if (token := file.find(presented.strip())) is not None:
                best = Identity(token.name or f"{role.name.lower()} token", role)
        if best is None:
            raise Unauthenticated("the token is not good here")
        return best

    def _certified(self, certificate: Mapping[str, Any]) -> Identity:
        names = [value for part in certificate.get("subject", ()) for key, value in part if key == "commonName"]
        names += [value for _, value in certificate.get("subjectAltName", ())]
        operators = [name for name in names if name in self._listener.tls_operators]
        role = Role.OPERATOR if operators else Role.VIEWER
        return Identity((operators or names or ["a certificate without a name"])[0], role)

    def is_host(self, host: str | None) -> bool:
        """Whether a Host header names this proxy: by its address, or a name that it is known to have.

        A name of somebody else's may lead a browser here that takes us for a part of their site.
        """
        if not host:
            return False
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return _plain(name) in self._hosts
        return True

    def warnings(self) -> Iterable[str]:
        """What an operator is to be told."""
        listener = self._listener
        over_tcp = self._tokens or listener.tls_client_cafile or listener.loopback_without_authentication
        if not over_tcp and listener.unix_socket is None:
            yield NOBODY_WARNING
        if self._tokens and listener.tls_certfile is None and not is_loopback(listener.bind.host):
            yield "tokens for the admin listener go over the network as they are: set admin_listener.tls_certfile"
        yield from (file.trouble for file in self._tokens.values() if file.trouble is not None)


def _plain(name: str) -> str:
    return name.lower().removesuffix(".")
