"""The client's side of SASL PLAIN (RFC 4616) and SCRAM (RFC 5802, 7677), as Kafka's brokers speak them. No I/O."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
from typing import Final, Protocol

SCRAM_ITERATIONS_MIN: Final = 4096
"""What RFC 7677 demands, and the least that Kafka stores."""
SCRAM_ITERATIONS_MAX: Final = 100_000
"""A server may ask for any number, and the event loop waits meanwhile; Kafka's own maximum is 16384."""

_HASHES: Final = {"SCRAM-SHA-256": "sha256", "SCRAM-SHA-512": "sha512"}


class SaslExchange(Protocol):
    """Messages of one authentication, in turn."""

    def first(self) -> bytes: ...

    def next(self, answer: bytes) -> bytes | None:
        """The message to send after the server's ``answer``; None when it is done.

        Raises ValueError when the server's answer is not what one who knows our password sends.
        """


class PlainExchange:
    """User and password in the clear: for TLS only."""

    def __init__(self, username: str, password: str) -> None:
        self._message = f"\0{username}\0{password}".encode()

    def first(self) -> bytes:
        return self._message

    def next(self, answer: bytes) -> bytes | None:
        return None


class ScramExchange:
    """Proves that we know the password, and demands the same of the server, without sending it."""

    def __init__(self, mechanism: str, username: str, password: str, nonce: str | None = None) -> None:
        self._hash = _HASHES[mechanism]
        self._password = password.encode()
        self._nonce = nonce or secrets.token_urlsafe(24)
        escaped = username.replace("=", "=3D").replace(",", "=2C")
        self._first_bare = f"n={escaped},r={self._nonce}"
        self._server_signature: bytes | None = None

    def first(self) -> bytes:
        return f"n,,{self._first_bare}".encode()

    def next(self, answer: bytes) -> bytes | None:
        try:
            text = answer.decode()
            fields = dict(field.split("=", 1) for field in text.split(","))
        except ValueError:
            raise ValueError("the server's SCRAM message is malformed") from None
        if "e" in fields:
            raise ValueError(f"the server refuses: {fields['e']}")
        if self._server_signature is None:
            return self._final(text, fields)
        if not hmac.compare_digest(_decode(fields.get("v", "")), self._server_signature):
            raise ValueError("the server did not prove that it knows the password")
        return None

    def _final(self, server_first: str, fields: dict[str, str]) -> bytes:
        nonce, salt, iterations = fields.get("r", ""), _decode(fields.get("s", "")), fields.get("i", "")
        if not nonce.startswith(self._nonce) or nonce == self._nonce:
            raise ValueError("the server's nonce does not continue ours")
        if not salt or not iterations.isdecimal():
            raise ValueError("the server's SCRAM message has no salt or iterations")
        if not SCRAM_ITERATIONS_MIN <= int(iterations) <= SCRAM_ITERATIONS_MAX:
            raise ValueError(
                f"the server asks for {iterations} iterations, not {SCRAM_ITERATIONS_MIN} to {SCRAM_ITERATIONS_MAX}"
            )
        salted = hashlib.pbkdf2_hmac(self._hash, self._password, salt, int(iterations))
        without_proof = f"c=biws,r={nonce}"  # biws: the header "n,," in base64
        signed = f"{self._first_bare},{server_first},{without_proof}".encode()
        client_key = self._hmac(salted, b"Client Key")
        signature = self._hmac(hashlib.new(self._hash, client_key).digest(), signed)
        proof = bytes(left ^ right for left, right in zip(client_key, signature, strict=True))
        self._server_signature = self._hmac(self._hmac(salted, b"Server Key"), signed)
        return f"{without_proof},p={base64.b64encode(proof).decode()}".encode()

    def _hmac(self, key: bytes, message: bytes) -> bytes:
        return hmac.digest(key, message, self._hash)


def _decode(encoded: str) -> bytes:
    try:
        return base64.b64decode(encoded, validate=True)
    except binascii.Error:
        raise ValueError("the server's SCRAM message is malformed") from None
