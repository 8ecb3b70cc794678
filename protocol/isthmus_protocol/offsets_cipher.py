"""Records of the offsets topic, encrypted for each group so that a copy can be compacted and chosen groups be read.

A keyring has an entry for each pattern of groups; an entry has keys by their ids and says which of them is current::

    {"groups": {"app-*": {"current": "1f0c...", "keys": {"1f0c...": "base64 of 32 bytes"}}}}

The id of a key is computed from the key, so no id can name two. An encrypted record:

    key     "IS" | version 1 | key id (8) | nonce (12) | AES-256-GCM of the record's key
    value   "IS" | version 1 | key id (8) | nonce (12) | AES-256-GCM of the record's value, bound to the encrypted key

The key's nonce is a keyed hash of the plaintext (RFC 5297's idea): equal keys of records become equal bytes, so that
the cleaner finds them, and a nonce comes back only with the text that it was made for. The value's nonce is random.
"IS" is no type of a record that Kafka has, so nobody takes one for the other.

A null value deletes what stands under its key. It stays null, or the cleaner could not take it away, unless the group
has older keys, too: then a record under an older key would come back with it, so the deletion itself is encrypted and
stays.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import os
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from isthmus_protocol.group_names import ByPattern, pattern_problem
from isthmus_protocol.record_codec import Record

KEY_BYTES: Final = 32
KEY_ID_BYTES: Final = 8
NONCE_BYTES: Final = 12
MAGIC: Final = b"IS\x01"
_NONCE_AT: Final = len(MAGIC) + KEY_ID_BYTES
_TEXT_AT: Final = _NONCE_AT + NONCE_BYTES
_NULL: Final = b"\x00"
_PRESENT: Final = b"\x01"


class KeyringError(ValueError):
    """A keyring cannot be used. The message names patterns and key ids, never keys."""


class CipherError(ValueError):
    """An encrypted record is damaged, or was put together from parts of others."""


class OffsetsKey:
    """One key, as three that are used: for records' keys, for their nonces, for values."""

    __slots__ = ("_keys", "_nonces", "_values", "key_id")

    def __init__(self, key: bytes) -> None:
        """``key``: 32 bytes. Raises KeyringError."""
        if len(key) != KEY_BYTES:
            raise KeyringError(f"a key has {KEY_BYTES} bytes, not {len(key)}")
        self.key_id = _derived(key, b"id")[:KEY_ID_BYTES]
        self._keys = AESGCM(_derived(key, b"keys"))
        self._nonces = _derived(key, b"nonces")
        self._values = AESGCM(_derived(key, b"values"))

    def __repr__(self) -> str:
        return f"OffsetsKey({self.key_id.hex()})"

    @property
    def _head(self) -> bytes:
        return MAGIC + self.key_id

    def encrypt_key(self, plain: bytes) -> bytes:
        """Equal for equal ``plain``."""
        nonce = hmac.digest(self._nonces, plain, "sha256")[:NONCE_BYTES]
        return self._head + nonce + self._keys.encrypt(nonce, plain, self._head)

    def encrypt_value(self, plain: bytes | None, encrypted_key: bytes) -> bytes:
        nonce = os.urandom(NONCE_BYTES)
        text = _NULL if plain is None else _PRESENT + plain
        return self._head + nonce + self._values.encrypt(nonce, text, self._head + encrypted_key)

    def decrypt_key(self, encrypted: bytes) -> bytes:
        """Raises CipherError."""
        return _opened(self._keys, encrypted, self._head)

    def decrypt_value(self, encrypted: bytes, encrypted_key: bytes) -> bytes | None:
        """Raises CipherError."""
        text = _opened(self._values, encrypted, self._head + encrypted_key)
        return None if text == _NULL else text[1:]


def _derived(key: bytes, purpose: bytes) -> bytes:
    return hmac.digest(key, b"isthmus offsets " + purpose, hashlib.sha256)


def _opened(cipher: AESGCM, encrypted: bytes, bound: bytes) -> bytes:
    try:
        return cipher.decrypt(encrypted[_NONCE_AT:_TEXT_AT], encrypted[_TEXT_AT:], bound)
    except (InvalidTag, ValueError):
        raise CipherError("an encrypted record of the offsets topic does not open with its key") from None


def key_id_of(encrypted: bytes | None) -> bytes | None:
    """The id of the key that a record's key or value is encrypted with; None if it is not encrypted."""
    if encrypted is None or not encrypted.startswith(MAGIC) or len(encrypted) < _TEXT_AT:
        return None
    return encrypted[len(MAGIC) : _NONCE_AT]


class GroupKeys(NamedTuple):
    """What a keyring has for one pattern of groups."""

    current: OffsetsKey
    rotated: bool
    """Whether there are older ones, too."""


class Keyring:
    """Keys by groups, to encrypt, and by their ids, to decrypt."""

    __slots__ = ("_by_group", "_by_id")

    def __init__(self, by_group: Mapping[str, GroupKeys], by_id: Mapping[bytes, OffsetsKey]) -> None:
        self._by_group = ByPattern(by_group)
        self._by_id = dict(by_id)

    def __repr__(self) -> str:
        return f"Keyring({len(self._by_id)} keys)"

    def encrypt(self, group: str, record: Record) -> Record | None:
        """The record as it may leave the source; None where the group has no key."""
        keys = self._by_group.get(group)
        if keys is None:
            return None
        key = keys.current.encrypt_key(record.key or b"")
        value = None
        if record.value is not None or keys.rotated:
            value = keys.current.encrypt_value(record.value, key)
        return Record(record.offset, record.timestamp, key, value)

    def decrypt(self, record: Record) -> Record | None:
        """The record as it was at the source; None where its key is missing. Raises CipherError.

        A record that is not encrypted comes back as it is.
        """
        key_id = key_id_of(record.key)
        if key_id is None or record.key is None:
            return record
        key = self._by_id.get(key_id)
        if key is None:
            return None
        plain = key.decrypt_key(record.key)
        if record.value is None:
            return record._replace(key=plain)
        if key_id_of(record.value) != key_id:
            raise CipherError("the key and the value of a record of the offsets topic are encrypted with two keys")
        return record._replace(key=plain, value=key.decrypt_value(record.value, record.key))


EMPTY_KEYRING: Final = Keyring({}, {})


def parse_keyring(text: str) -> Keyring:
    """Raises KeyringError."""
    by_group: dict[str, GroupKeys] = {}
    by_id: dict[bytes, OffsetsKey] = {}
    for pattern, entry in _entries(text).items():
        if problem := pattern_problem(pattern):
            raise KeyringError(problem)
        keys = entry.get("keys") if isinstance(entry, dict) else None
        if not isinstance(keys, dict) or not keys or not set(entry) <= {"keys", "current"}:
            raise KeyringError(f"the entry of {pattern!r} is not an object of 'current' and 'keys'")
        found = {key_id: _key(pattern, key_id, encoded) for key_id, encoded in keys.items()}
        current = found.get(str(entry.get("current")))
        if current is None:
            raise KeyringError(f"'current' of {pattern!r} is not the id of one of its keys")
        by_group[pattern] = GroupKeys(current, len(found) > 1)
        by_id |= {key.key_id: key for key in found.values()}
    return Keyring(by_group, by_id)


def with_new_key(text: str | None, pattern: str) -> tuple[str, str]:
    """The text of a keyring with a new current key for a pattern, and the key's id. None: a new keyring.

    Older keys of the pattern stay. Raises KeyringError.
    """
    if problem := pattern_problem(pattern):
        raise KeyringError(problem)
    if text is not None:
        parse_keyring(text)
    entries = {} if text is None else dict(_entries(text))
    raw = os.urandom(KEY_BYTES)
    key_id = OffsetsKey(raw).key_id.hex()
    before = entries.get(pattern, {}).get("keys", {})
    entries[pattern] = {"current": key_id, "keys": {**before, key_id: base64.b64encode(raw).decode()}}
    return json.dumps({"groups": entries}, indent=2, sort_keys=True) + "\n", key_id


def _entries(text: str) -> Mapping[str, Any]:
    try:
        ring = json.loads(text)
    except ValueError:
        raise KeyringError("the keyring is not JSON") from None  # without the parser's words: they may quote a key
    entries = ring.get("groups") if isinstance(ring, dict) and len(ring) == 1 else None
    if not isinstance(entries, dict):
        raise KeyringError('the keyring is not an object {"groups": {...}}')
    return entries


def _key(pattern: str, key_id: str, encoded: object) -> OffsetsKey:
    try:
        raw = base64.b64decode(encoded if isinstance(encoded, str) else "", validate=True)
        key = OffsetsKey(raw)
    except (binascii.Error, ValueError):
        raise KeyringError(f"key {key_id[:16]!r} of {pattern!r} is not base64 of {KEY_BYTES} bytes") from None
    if key.key_id.hex() != key_id:
        raise KeyringError(f"key {key_id[:16]!r} of {pattern!r} has another id, {key.key_id.hex()!r}: it was mixed up")
    return key
