"""Secrets of links, sealed before they enter the command log.

The log is a topic, and whoever can read the topic can read its records. With a key from the configuration (the same on
every proxy of the cluster) secrets are sealed with AES-256-GCM, bound to what they are for, so that a sealed secret
moved to another link does not open. Without a key they are stored as they are, and status says so.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

KEY_BYTES = 32
NONCE_BYTES = 12  # what GCM is made for (NIST SP 800-38D)


class SealingError(Exception):
    """A secret cannot be sealed or opened with this key. The message names key ids, never secrets."""


class Seal(StrEnum):
    NONE = "none"
    AES_256_GCM = "aes-256-gcm"


@dataclass(frozen=True, slots=True)
class Sealed:
    """A secret as the log stores it. ``data`` is base64: nonce and ciphertext, or the plain bytes for ``Seal.NONE``."""

    seal: Seal
    key_id: str
    data: str = field(repr=False)

    @property
    def is_sealed(self) -> bool:
        return self.seal is not Seal.NONE


class Secret:
    """Bytes that appear in no repr, log or traceback by accident. ``reveal()`` is the only way to them."""

    __slots__ = ("_value",)

    def __init__(self, value: bytes) -> None:
        self._value = value

    def reveal(self) -> bytes:
        return self._value

    def __repr__(self) -> str:
        return "Secret(...)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self._value == other._value

    def __hash__(self) -> int:
        return hash(self._value)

    def __reduce__(self) -> str:
        raise TypeError("a Secret is not written anywhere")


class Sealer:
    """Seals and opens with one key, or passes through without one. While that is rotated, ``others`` open, too."""

    __slots__ = ("_aead", "_others", "key_id")

    def __init__(self, key: Secret | None, others: Iterable[Secret] = ()) -> None:
        """``key``: 32 bytes, or None. Raises :class:`SealingError` for another length."""
        self._others = [Sealer(other) for other in others]
        self._aead: AESGCM | None = None
        self.key_id = ""
        if key is None:
            return
        raw = key.reveal()
        if len(raw) != KEY_BYTES:
            raise SealingError(f"a sealing key has {KEY_BYTES} bytes, this one has {len(raw)}")
        self._aead = AESGCM(raw)
        # Says which key a secret needs without saying anything about the key.
        self.key_id = hashlib.sha256(b"isthmus sealing key id" + raw).hexdigest()[:8]

    def seal(self, secret: Secret, purpose: str) -> Sealed:
        """``secret`` for the log. ``purpose`` is authenticated with it: what it belongs to, such as a link's id."""
        if self._aead is None:
            return Sealed(Seal.NONE, "", base64.b64encode(secret.reveal()).decode())
        nonce = os.urandom(NONCE_BYTES)
        data = nonce + self._aead.encrypt(nonce, secret.reveal(), purpose.encode())
        return Sealed(Seal.AES_256_GCM, self.key_id, base64.b64encode(data).decode())

    def open(self, sealed: Sealed, purpose: str) -> Secret:
        """What was sealed for ``purpose``. Raises :class:`SealingError`."""
        try:
            data = base64.b64decode(sealed.data, validate=True)
        except ValueError:
            raise SealingError(f"the secret of {purpose} is damaged") from None
        if sealed.seal is Seal.NONE:
            return Secret(data)
        if self._aead is None:
            raise SealingError(f"the secret of {purpose} is sealed with key {sealed.key_id}, and no key is configured")
        other = next((each for each in self._others if each.key_id == sealed.key_id), None)
        if other is not None:
            return other.open(sealed, purpose)
        if sealed.key_id != self.key_id:
            raise SealingError(
                f"the secret of {purpose} is sealed with key {sealed.key_id}, the configured key is {self.key_id}"
            )
        try:
            return Secret(self._aead.decrypt(data[:NONCE_BYTES], data[NONCE_BYTES:], purpose.encode()))
        except (InvalidTag, ValueError):
            raise SealingError(f"the secret of {purpose} does not open: it was changed or belongs elsewhere") from None
