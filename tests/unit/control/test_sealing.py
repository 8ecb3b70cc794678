"""Secrets: sealed with a key, bound to their purpose, in no repr."""

from __future__ import annotations

import base64
import pickle
from dataclasses import replace

import pytest

from isthmus_control.sealing import Seal, Sealer, SealingError, Secret

KEY, OTHER = Secret(b"k" * 32), Secret(b"o" * 32)
PASSWORD = Secret(b"hunter2 hunter2")


def test_sealed_and_opened() -> None:
    sealer = Sealer(KEY)
    sealed = sealer.seal(PASSWORD, "link 1")
    assert sealed.is_sealed
    assert b"hunter2" not in base64.b64decode(sealed.data)
    assert sealer.open(sealed, "link 1") == PASSWORD
    assert sealer.seal(PASSWORD, "link 1").data != sealed.data  # a nonce of its own
    assert Sealer(KEY).open(sealed, "link 1") == PASSWORD  # on another proxy


def test_without_a_key_it_is_stored_and_says_so() -> None:
    sealed = Sealer(None).seal(PASSWORD, "link 1")
    assert (sealed.seal, sealed.is_sealed) == (Seal.NONE, False)
    assert Sealer(None).open(sealed, "link 1") == PASSWORD
    assert Sealer(KEY).open(sealed, "link 1") == PASSWORD  # a key that was configured later


def test_what_does_not_open() -> None:
    sealer = Sealer(KEY)
    sealed = sealer.seal(PASSWORD, "link 1")
    raw = bytearray(base64.b64decode(sealed.data))
    raw[-1] ^= 1
    damaged = replace(sealed, data=base64.b64encode(raw).decode())
    for wrong, opener, purpose, words in (
        (sealed, sealer, "link 2", "belongs elsewhere"),
        (damaged, sealer, "link 1", "was changed"),
        (replace(sealed, data="%"), sealer, "link 1", "damaged"),
        (replace(sealed, data=""), sealer, "link 1", "was changed"),
        (sealed, Sealer(None), "link 1", "no key is configured"),
        (sealed, Sealer(OTHER), "link 1", sealed.key_id),
    ):
        with pytest.raises(SealingError, match=words):
            opener.open(wrong, purpose)


def test_a_key_has_32_bytes() -> None:
    with pytest.raises(SealingError, match="32 bytes, this one has 5"):
        Sealer(Secret(b"short"))


def test_secrets_do_not_show() -> None:
    sealed = Sealer(None).seal(PASSWORD, "link 1")
    for text in (repr(PASSWORD), str(PASSWORD), f"{PASSWORD}", repr(sealed), repr(Sealer(KEY))):
        assert "hunter2" not in text
        assert sealed.data not in text
    with pytest.raises(TypeError):
        pickle.dumps(PASSWORD)
