"""Who a client is: the principal that a broker has accepted over SASL, or the proxy's TLS listener by a certificate.

SASL passes through, so the proxy reads what it carries: the names of PLAIN (RFC 4616), SCRAM (RFC 5802) and
OAUTHBEARER (RFC 7628, the token's claim ``sub``). A name counts when the broker has taken the last message of its
exchange: a token that it did not take, or that another field than ``auth`` holds, names nobody. A broker may be set to
make other principals of these; of mechanisms whose messages say nothing (GSSAPI) none is known, and none of a
delegation token, which names itself and not its owner.
"""

from __future__ import annotations

import base64
import binascii
import enum
import json
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
SCRAM_MESSAGES: Final = 2
"""The client's first one and its proof."""


class Progress(enum.Enum):
    """How far a SASL exchange is."""

    OPEN = "open"
    PERHAPS_DONE = "perhaps done"
    """The broker has taken a message of a mechanism whose messages are not known here."""
    DONE = "done"
    """The broker has taken the last message."""


class Exchange:
    """One SASL exchange, as it is seen to pass. It begins when a broker has taken the handshake."""

    __slots__ = ("_message", "_taken", "mechanism", "name", "progress", "unanswered")

    def __init__(self, mechanism: str) -> None:
        self.mechanism = mechanism
        self.progress = Progress.OPEN
        self.name: str | None = None
        """Whom the broker has accepted: once it has, and where the mechanism says it."""
        self.unanswered = False
        """The client has said something that the broker has not answered."""
        self._message = b""
        """The client's, of those that have a name the last one."""
        self._taken = 0

    @property
    def is_scram(self) -> bool:
        return self.mechanism.startswith("SCRAM-")

    def says(self, message: bytes) -> None:
        """The client's next message is on its way to the broker."""
        self.unanswered = True
        if not (self.is_scram and self._taken):  # the second one of SCRAM is the proof
            self._message = message

    def taken(self, challenge: bytes) -> None:
        """The broker has taken it, and answers this."""
        self.unanswered = False
        self._taken += 1
        if self.mechanism == "PLAIN":
            done = True
        elif self.is_scram:
            done = self._taken == SCRAM_MESSAGES
        elif self.mechanism == "OAUTHBEARER":
            done = not challenge  # a token that is refused is answered without an error, by the reason
        else:
            self.progress = Progress.PERHAPS_DONE
            return
        if done:
            self.progress = Progress.DONE
            self.name = name_in(self.mechanism, self._message)
            self._message = b""


class Authentication:
    """Reads the exchanges of clients that log in again on an open connection (KIP-368), or behind a certificate."""

    def __init__(self, authenticated: Callable[[Client], None]) -> None:
        """``authenticated``: called when a client's principal is known, or is another one."""
        self._authenticated = authenticated
        self._exchanges: dict[int, Exchange] = {}
        """By session."""

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
        self._exchanges.pop(client.session_id, None)

    def _on_handshake(self, request: Request) -> Verdict:
        session_id, version = request.client.session_id, request.version
        try:
            mechanism = mechanism_asked(version, request.frame)
        except (MalformedFrame, NeedMore):
            return None  # the broker says what it thinks of it
        self._exchanges.pop(session_id, None)

        def answered(frame: bytes) -> bytes:
            if handshake_error(frame) == 0:
                if version == 0:
                    raise MalformedFrame("SaslHandshake version 0 cannot log in again on an open connection")
                self._exchanges[session_id] = Exchange(mechanism)
            return frame

        return Replace(request.frame, answered)

    def _on_authenticate(self, request: Request) -> Verdict:
        client, version = request.client, request.version
        exchange = self._exchanges.get(client.session_id)
        if exchange is None:
            return None
        if exchange.unanswered:  # who does not wait could have an answer taken for that to another message
            del self._exchanges[client.session_id]
            return None
        try:
            exchange.says(auth_bytes(version, request.frame))
        except (MalformedFrame, NeedMore):
            return None

        def answered(frame: bytes) -> bytes:
            if taken(exchange, version, frame) and exchange.progress is not Progress.DONE:
                return frame
            self._exchanges.pop(client.session_id, None)
            if exchange.progress is Progress.DONE and accept(client, exchange):
                self._authenticated(client)
            return frame

        return Replace(request.frame, answered)


def accept(client: Client, exchange: Exchange) -> bool:
    """Have the client be whom the broker has accepted, where that is known. False: nothing changes."""
    principal = None if exchange.name is None else _USER + exchange.name
    if principal is None or principal == client.principal:
        return False
    client.principal = principal
    return True


# ---- what is in the frames ----


def mechanism_asked(version: int, frame: bytes) -> str:
    """The mechanism of a SaslHandshake request. Raises MalformedFrame, NeedMore."""
    mechanism: bytes = locator(ApiKey.SASL_HANDSHAKE, version, "request", ("mechanism",))(frame)
    return mechanism.decode("utf-8", "replace")


def handshake_error(frame: bytes) -> int:
    """The error code of a broker's answer to SaslHandshake, which stands behind the head in every version."""
    return int.from_bytes(frame[8:10], "big", signed=True)


def auth_bytes(version: int, frame: bytes) -> bytes:
    """The client's message in a SaslAuthenticate request. Raises MalformedFrame, NeedMore."""
    return bytes(locator(ApiKey.SASL_AUTHENTICATE, version, "request", ("auth_bytes",))(frame))


def taken(exchange: Exchange, version: int, frame: bytes) -> bool:
    """Tell an exchange of a broker's answer to SaslAuthenticate. False: the broker has refused, and it is over."""
    try:
        code, challenge = locator(ApiKey.SASL_AUTHENTICATE, version, "response", ("error_code", "auth_bytes"))(frame)
    except NeedMore:
        raise MalformedFrame("an answer to SaslAuthenticate ends too early") from None
    if code == 0:
        exchange.taken(bytes(challenge))
    return bool(code == 0)


def name_in(mechanism: str, message: bytes) -> str | None:
    """The name in a client's message of a SASL exchange; None where it has none."""
    try:
        if mechanism == "PLAIN":
            authorization, name, _ = message.decode().split("\0")
            return authorization or name
        if mechanism.startswith("SCRAM-"):
            return _scram_name(message)
        if mechanism == "OAUTHBEARER":
            return _token_subject(message)
    except (ValueError, IndexError, KeyError, TypeError, RecursionError, binascii.Error):
        return None
    return None


def _scram_name(message: bytes) -> str | None:
    """Of the first message. None of a delegation token's."""
    if not message.startswith((b"n,", b"y,")):
        return None
    _, authorization, name, *more = message.decode().split(",")
    if any(each.lower() == "tokenauth=true" for each in more):
        return None
    chosen = authorization.removeprefix("a=") or name.removeprefix("n=")
    return chosen.replace("=2C", ",").replace("=3D", "=")


def _token_subject(message: bytes) -> str | None:
    """The claim ``sub`` of the token that a broker reads: that of the only field ``auth``."""
    _, *fields = message.decode().split("\x01")
    tokens = [field.removeprefix("auth=") for field in fields if field.startswith("auth=")]
    if len(tokens) != 1:
        return None
    scheme, _, token = tokens[0].partition(" ")
    if scheme.lower() != "bearer":
        return None
    payload = token.strip().split(".")[1]
    subject = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))["sub"]
    return subject if isinstance(subject, str) else None


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
