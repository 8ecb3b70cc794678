"""Ids of clusters: the form that Kafka gives them, and parts of names that are made of others.

Whoever formats a cluster chooses its id, and brokers take any text. Kafka's own are 16 bytes in URL-safe Base64.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final
from urllib.parse import quote

_USUAL: Final = re.compile(r"[a-zA-Z0-9_-]{1,22}")
_DIGEST_CHARS: Final = 32


def is_usual(cluster_id: str) -> bool:
    """Whether an id is of the form that Kafka documents: 22 characters at most, of those that URLs have."""
    return _USUAL.fullmatch(cluster_id) is not None


def escaped(cluster_id: str, chars_max: int, escape: str = "%") -> str:
    """An id in letters, digits, ``_``, ``-``, ``.`` and ``escape`` alone, in ``chars_max`` characters at most.

    Every other character becomes its bytes in UTF-8, each as ``escape`` and two hexadecimal digits. What is too long
    ends with a digest of the whole.
    """
    text = quote(cluster_id, safe="").replace("~", "%7E").replace("%", escape)
    if len(text) <= chars_max:
        return text
    digest = hashlib.sha256(cluster_id.encode()).hexdigest()[:_DIGEST_CHARS]
    return text[: chars_max - len(digest) - 1] + "." + digest
