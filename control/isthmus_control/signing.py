"""MACs of the control log's records: who does not have the cluster's control key writes none that counts.

The key is derived from the control key that seals secrets (:mod:`isthmus_control.sealing`), the same on every proxy of
the cluster. A MAC is of the whole envelope and of the cluster, so a record counts in no other cluster's log. That one
does not count twice in its own is for the rules of :func:`~isthmus_control.apply.apply`.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from isthmus_control.codec import canonical_json
from isthmus_control.sealing import Secret

MAC: Final = "mac"
"""The field of an envelope."""
_MAC_CHARACTERS: Final = 32
"""HMAC-SHA-256-128 (RFC 4868), hexadecimal."""
_KEY_BYTES: Final = 32


class Signer:
    """Makes and checks MACs of one cluster's records with one control key.

    ``others``: more keys that a proxy has, while the control key is rotated. Each has its own signer (:meth:`of`).
    """

    __slots__ = ("_cluster", "_key", "_others", "key_id")

    def __init__(self, control_key: Secret, cluster_id: str, others: Iterable[Secret] = ()) -> None:
        self._key = HKDF(hashes.SHA256(), _KEY_BYTES, None, b"isthmus control log records").derive(control_key.reveal())
        self._cluster = cluster_id.encode() + b"\0"
        self.key_id = hashlib.sha256(b"isthmus signing key id" + self._key).hexdigest()[:8]
        """Says which key is needed, and nothing about it."""
        self._others = [Signer(other, cluster_id) for other in others]

    def of(self, key_id: str) -> Signer | None:
        """The signer of one of the keys; None: there is no such key, or no id, since nothing is signed."""
        return next((signer for signer in (self, *self._others) if signer.key_id == key_id), None)

    def all(self) -> Sequence[Signer]:
        """Those of all keys."""
        return (self, *self._others)

    def mac(self, envelope: Mapping[str, Any]) -> str:
        """The MAC of an envelope, as JSON types, without one."""
        made = hmac.digest(self._key, self._cluster + canonical_json(envelope), "sha256")
        return made.hex()[:_MAC_CHARACTERS]

    def signed(self, envelope: Mapping[str, Any]) -> bool:
        """Whether an envelope has the MAC that a proxy with the key gave it."""
        mac = envelope.get(MAC)
        rest = {name: value for name, value in envelope.items() if name != MAC}
        return isinstance(mac, str) and mac.isascii() and hmac.compare_digest(mac, self.mac(rest))

    def prove(self, anchor: str) -> str:
        """What proves, to who has the key, that an anchor was told by this cluster itself."""
        return self.mac({"anchor": anchor})

    def proves(self, anchor: str, proof: str) -> bool:
        """Whether it does."""
        return self.signed({"anchor": anchor, MAC: proof})


def key_needed(needed: str, signer: Signer | None) -> str | None:
    """Why a proxy cannot follow a log whose records are signed with the key of this id; None: it can, or none are."""
    if not needed or (signer is not None and signer.of(needed) is not None):
        return None
    ids = "" if signer is None else ", ".join(each.key_id for each in signer.all())
    has = "none is configured here" if signer is None else f"the one configured here has id {ids}"
    return (
        f"the records of the control log are signed with the control key of id {needed}, and {has}: set "
        f"cluster.control_key_file to the key that the other proxies of the cluster have"
    )
