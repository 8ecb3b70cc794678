"""Tokens: what an operator hands to one of another cluster, who makes a link with it (``docs/adr/0020``).

    token   isthmus-token-<base64 of seed and checksum>
              seed: 32 random bytes ── derive ──> id, signing key (Ed25519), acceptor's key

The control log keeps the id, the signing key's public half and the acceptor's key. Who holds the token signs the
handshake, which is verified by the public half; then the acceptor proves itself by its key, which the holder derives,
too. Neither sends what it holds. Who reads the log cannot use a token, and nobody chooses one: a text that was not made
here has no right checksum.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

PREFIX: Final = "isthmus-token-"
SEED_BYTES: Final = 32
CHECKSUM_BYTES: Final = 4
ID_BYTES: Final = 8
KEY_BYTES: Final = 32


class NoToken(ValueError):
    """The text is none. The message does not show it."""


class Token:
    """A token, as who holds it has it."""

    def __init__(self, seed: bytes) -> None:
        self._seed = seed

    @classmethod
    def new(cls) -> Token:
        return cls(os.urandom(SEED_BYTES))

    @classmethod
    def parse(cls, text: str) -> Token:
        """The token of a text. Raises :class:`NoToken`."""
        text = text.strip()
        try:
            raw = base64.urlsafe_b64decode(text.removeprefix(PREFIX).encode("ascii"))
        except ValueError:
            raw = b""
        seed, checksum = raw[:SEED_BYTES], raw[SEED_BYTES:]
        right = text.startswith(PREFIX) and len(raw) == SEED_BYTES + CHECKSUM_BYTES
        if not right or not hmac.compare_digest(checksum, _checksum(seed)):
            raise NoToken(
                "this is no token as `isthmus link token create` makes them, on a proxy of the other cluster: it is "
                "cut, or somebody chose it"
            )
        return cls(seed)

    def __repr__(self) -> str:
        return f"Token({self.token_id})"

    @property
    def text(self) -> str:
        """What is handed over. Secret."""
        return PREFIX + base64.urlsafe_b64encode(self._seed + _checksum(self._seed)).decode()

    @property
    def token_id(self) -> str:
        """Names it, and is no secret."""
        return self._derived("id", ID_BYTES).hex()

    @property
    def public_key(self) -> str:
        """Of its signatures, hexadecimal."""
        return self._signing_key().public_key().public_bytes_raw().hex()

    @property
    def acceptor_key(self) -> bytes:
        """With it the cluster that made the token proves itself."""
        return self._derived("acceptor", KEY_BYTES)

    def sign(self, words: bytes) -> str:
        """The holder's proof: a signature of what both ends of a connection have said, hexadecimal."""
        return self._signing_key().sign(words).hex()

    def _signing_key(self) -> Ed25519PrivateKey:
        return Ed25519PrivateKey.from_private_bytes(self._derived("holder", KEY_BYTES))

    def _derived(self, what: str, size: int) -> bytes:
        return HKDF(hashes.SHA256(), size, None, f"isthmus token {what}".encode()).derive(self._seed)


def is_signed(public_key: str, words: bytes, signature: str) -> bool:
    """Whether who holds a token has signed these words."""
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key)).verify(bytes.fromhex(signature), words)
    except (InvalidSignature, ValueError):
        return False
    return True


def _checksum(seed: bytes) -> bytes:
    return hashlib.sha256(b"isthmus token" + seed).digest()[:CHECKSUM_BYTES]
