"""Frames of a link without TLS, encrypted and authenticated with keys of that connection alone.

From the acceptor's WELCOME on, all that an end writes goes in SEALED frames, whose body is AES-256-GCM of some of the
bytes that would have gone. One frame may come in several of them, and several in one::

    SEALED   ciphertext of at most SEALED_BYTES_MAX bytes, tag (16)

Each direction has a key of its own, derived from the exchange of X25519 keys in the handshake, which no secret that
becomes known later gives back, from the secret that both ends proved to hold, and from all that they said. The nonce is
the number of the frame in its direction, which is not sent: a frame that is altered, left out, repeated or moved does
not open. Before a key has sealed more than is wise (GCM's bound for one key) both ends derive the next one from it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from isthmus_protocol.link import HEAD, MessageType
from isthmus_protocol.wire import MalformedFrame

SEALED_BYTES_MAX: Final = 256 * 1024
"""Of plain bytes in one SEALED frame: a piece of a large frame, or small frames that are written together, fit."""
TAG_BYTES: Final = 16
FRAME_BYTES_MAX: Final = 1 + SEALED_BYTES_MAX + TAG_BYTES
"""What follows the size of a SEALED frame."""
FRAMES_OF_A_KEY: Final = 2**20
"""At most 2^34 blocks of 16 bytes, as TLS 1.3 has it (RFC 8446, 5.5)."""
_SEALED: Final = int(MessageType.SEALED)
_KEY_BYTES: Final = 32
_NONCE_BYTES: Final = 12


class _Direction:
    """The keys of what one end sends, one after the other."""

    __slots__ = ("_key", "aead", "count")

    def __init__(self, key: bytes) -> None:
        self._key = key
        self.aead = AESGCM(key)
        self.count = 0

    def nonce(self) -> bytes:
        """The next one. No key has the same twice."""
        if self.count == FRAMES_OF_A_KEY:
            self._key = HKDF(hashes.SHA256(), _KEY_BYTES, None, b"isthmus link frames, next key").derive(self._key)
            self.aead, self.count = AESGCM(self._key), 0
        nonce = self.count.to_bytes(_NONCE_BYTES, "big")
        self.count += 1
        return nonce


class FrameCipher:
    """What one end of a connection seals and opens, in the order in which it is written and read."""

    __slots__ = ("_received", "_sent")

    def __init__(self, shared: bytes, secret: bytes, said: bytes, *, dialled: bool) -> None:
        """``shared``: of the X25519 exchange; ``said``: :func:`isthmus_protocol.link.transcript`."""
        salt, what = hashlib.sha256(said).digest(), b"isthmus link frames"
        keys = HKDF(hashes.SHA256(), 2 * _KEY_BYTES, salt, what).derive(shared + secret)
        dialler, acceptor = _Direction(keys[:_KEY_BYTES]), _Direction(keys[_KEY_BYTES:])
        self._sent, self._received = (dialler, acceptor) if dialled else (acceptor, dialler)

    def seal(self, parts: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
        """SEALED frames with these bytes, in parts that are written one after the other."""
        plain = parts[0] if len(parts) == 1 else b"".join(parts)
        if len(plain) <= SEALED_BYTES_MAX:
            return self._sealed(plain)
        view = memoryview(plain)
        starts = range(0, len(plain), SEALED_BYTES_MAX)
        return [part for start in starts for part in self._sealed(view[start : start + SEALED_BYTES_MAX])]

    def _sealed(self, plain: bytes | memoryview) -> list[bytes | memoryview]:
        nonce = self._sent.nonce()  # may be the first one of the next key
        return [HEAD.pack(1 + len(plain) + TAG_BYTES, _SEALED), self._sent.aead.encrypt(nonce, plain, None)]

    def open(self, kind: MessageType, body: memoryview) -> bytes:
        """The bytes in a frame that came. Raises MalformedFrame: it is not the one that the peer sealed next."""
        if kind is not MessageType.SEALED:
            raise MalformedFrame(f"{kind.name} in the clear over a connection that is encrypted")
        nonce = self._received.nonce()
        try:
            return self._received.aead.decrypt(nonce, body, None)
        except (InvalidTag, ValueError) as error:
            raise MalformedFrame("an encrypted frame that somebody altered, left out or repeated") from error
