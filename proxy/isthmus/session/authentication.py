"""Who a client is: the principal that a broker has accepted over SASL, or the proxy's TLS listener by a certificate.

SASL passes through, so the proxy reads what it carries: the names of PLAIN (RFC 4616), SCRAM (RFC 5802) and
OAUTHBEARER (RFC 7628, the token's claim ``sub``). A broker may be set to make other principals of these; of mechanisms
whose messages say nothing (GSSAPI) none is known. Nothing is decided by it here: the broker decides.
"""

from __future__ import annotations

import base64
import binascii
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from isthmus_plugins.api import Client, Close, Replace, Request, RequestHook, Verdict
from isthmus_protocol.locate import locator
from isthmus_protocol.schema import ApiKey
from isthmus_protocol.wire import MalformedFrame, NeedMore

_USER: Final = "User:"
_SHORT: Final = {
    "commonName": "CN",
    "organizationName": "O",
    "organizationalUnitName": "OU",
    "localityName": "L",
    "stateOrProvinceName": "ST",
    "countryName": "C",
}
_ESCAPED: Final = str.maketrans({each: f"\\{each}" for each in ',+"\\<>;'})


class Authentication:
    """Reads the SASL exchanges of all connections."""

    def __init__(self, authenticated: Callable[[Client], None]) -> None:
        """``authenticated``: called when a client's principal is known, or is another one."""
        self._authenticated = authenticated
        self._mechanisms: dict[int, str] = {}
        """By session, what its handshake asked for."""
        self._names: dict[int, str] = {}
        """By session, who an exchange that is under way is about."""

    def hooks(self) -> Sequence[RequestHook]:
        return (
            RequestHook(ApiKey.SASL_HANDSHAKE, self._on_handshake, whole=True),
            RequestHook(ApiKey.SASL_AUTHENTICATE, self._on_authenticate, whole=True),
        )

    def opened(self, client: Client) -> Close | None:
        return None

    def authenticated(self, client: Client) -> None:
        pass

    def closed(self, client: Client) -> None:
        self._mechanisms.pop(client.session_id, None)
        self._names.pop(client.session_id, None)

    def _on_handshake(self, request: Request) -> Verdict:
        try:
            mechanism = locator(ApiKey.SASL_HANDSHAKE, request.version, "request", ("mechanism",))(request.frame)
        except (MalformedFrame, NeedMore):
            return None  # the broker says what it thinks of it
        self._mechanisms[request.client.session_id] = mechanism.decode("utf-8", "replace")
        self._names.pop(request.client.session_id, None)
        return None

    def _on_authenticate(self, request: Request) -> Verdict:
        client, version = request.client, request.version
        mechanism = self._mechanisms.get(client.session_id, "")
        try:
            said = locator(ApiKey.SASL_AUTHENTICATE, version, "request", ("auth_bytes",))(request.frame)
        except (MalformedFrame, NeedMore):
            return None
        name = name_in(mechanism, bytes(said))
        if name is not None:
            self._names[client.session_id] = name
        if mechanism.startswith("SCRAM-") and name is not None:
            return None  # the proof is in the next message
        if client.session_id not in self._names:
            return None

        def answered(frame: bytes) -> bytes:
            principal = _USER + self._names.pop(client.session_id, "")
            # It may log in again on an open connection (KIP-368), as the same one.
            if principal not in (_USER, client.principal) and _error_code(version, frame) == 0:
                client.principal = principal
                self._authenticated(client)
            return frame

        return Replace(request.frame, answered)


def _error_code(version: int, frame: bytes) -> int | None:
    try:
        code = locator(ApiKey.SASL_AUTHENTICATE, version, "response", ("error_code",))(frame)
    except (MalformedFrame, NeedMore):
        return None
    return int(code)


def name_in(mechanism: str, said: bytes) -> str | None:
    """The name in a client's message of a SASL exchange; None where it has none."""
    try:
        if mechanism == "PLAIN":
            authorization, name, _ = said.decode().split("\0")
            return authorization or name
        if mechanism.startswith("SCRAM-"):
            if not said.startswith((b"n,", b"y,")):
                return None
            _, authorization, name, *_ = said.decode().split(",")
            chosen = authorization.removeprefix("a=") or name.removeprefix("n=")
            return chosen.replace("=2C", ",").replace("=3D", "=")
        if mechanism == "OAUTHBEARER":
            token = said.decode().partition("auth=Bearer ")[2].partition("\x01")[0]
            payload = token.split(".")[1]
            subject = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))["sub"]
            return str(subject)
    except (ValueError, IndexError, KeyError, TypeError, binascii.Error, struct.error):
        return None
    return None


def certificate_principal(certificate: Mapping[str, Any] | None) -> str | None:
    """The principal of a client's verified certificate, as brokers write it by default (RFC 2253, its last part first).

    ``certificate``: what ``ssl.SSLSocket.getpeercert`` returns.
    """
    if not certificate or not certificate.get("subject"):
        return None
    parts = [
        "+".join(f"{_SHORT.get(key, key)}={value.translate(_ESCAPED)}" for key, value in part)
        for part in reversed(certificate["subject"])
    ]
    return _USER + ",".join(parts)
