"""Frames of a link that are encrypted: what one end seals, only the other one opens, once, and in order."""

from __future__ import annotations

from typing import Any

import pytest

from isthmus_protocol import link_cipher
from isthmus_protocol.link import MessageType, Splitter
from isthmus_protocol.link_cipher import FRAME_BYTES_MAX, SEALED_BYTES_MAX, FrameCipher
from isthmus_protocol.wire import MalformedFrame

SHARED, SECRET, SAID = b"s" * 32, b"the link's secret", b"all that was said"


def pair(**others: Any) -> tuple[FrameCipher, FrameCipher]:
    """The dialler's and the acceptor's; ``others``: what the acceptor has in another way."""
    words = {"shared": SHARED, "secret": SECRET, "said": SAID}
    return FrameCipher(**words, dialled=True), FrameCipher(**{**words, **others}, dialled=False)


def frames(sealed: list[bytes | memoryview]) -> list[tuple[MessageType, bytes]]:
    splitter = Splitter()
    splitter.authenticated(FRAME_BYTES_MAX)
    return [(kind, bytes(body)) for kind, body in splitter.feed(b"".join(sealed))]


def opened(cipher: FrameCipher, sealed: list[bytes | memoryview]) -> bytes:
    return b"".join(cipher.open(kind, memoryview(body)) for kind, body in frames(sealed))


@pytest.mark.parametrize(
    "size", [1, 100, SEALED_BYTES_MAX - 1, SEALED_BYTES_MAX, SEALED_BYTES_MAX + 1, 3 * SEALED_BYTES_MAX]
)
def test_what_one_end_seals_the_other_opens(size: int) -> None:
    dialler, acceptor = pair()
    for number in range(3):
        plain = bytes([number]) * size
        assert opened(acceptor, dialler.seal([plain[:1], memoryview(plain)[1:]])) == plain
        assert opened(dialler, acceptor.seal([plain])) == plain


def test_nothing_of_it_can_be_read() -> None:
    dialler, _ = pair()
    sealed = b"".join(dialler.seal([b"a secret value"])), b"".join(dialler.seal([b"a secret value"]))
    assert sealed[0] != sealed[1]
    assert b"secret" not in sealed[0] + sealed[1]


@pytest.mark.parametrize("others", [{"shared": b"t" * 32}, {"secret": b"another"}, {"said": b"something else"}])
def test_keys_are_of_the_exchange_the_secret_and_all_that_was_said(others: dict[str, bytes]) -> None:
    dialler, acceptor = pair(**others)
    with pytest.raises(MalformedFrame, match="altered"):
        opened(acceptor, dialler.seal([b"x"]))


@pytest.mark.parametrize("what", ["altered", "cut", "left out", "repeated", "reflected", "empty"])
def test_what_somebody_in_between_did_something_with_does_not_open(what: str) -> None:
    dialler, acceptor = pair()
    first, second = (bytes(frames(dialler.seal([b"x" * 50]))[0][1]) for _ in range(2))
    come = {
        "altered": [first[:20] + bytes([first[20] ^ 1]) + first[21:]],
        "cut": [first[:-1]],
        "left out": [second],
        "repeated": [first, first],
        "reflected": [bytes(frames(acceptor.seal([b"x" * 50]))[0][1])],
        "empty": [b""],
    }[what]
    *before, last = come
    for body in before:
        acceptor.open(MessageType.SEALED, memoryview(body))
    with pytest.raises(MalformedFrame, match="altered"):
        acceptor.open(MessageType.SEALED, memoryview(last))


def test_a_frame_in_the_clear_is_refused() -> None:
    _, acceptor = pair()
    with pytest.raises(MalformedFrame, match="APPEND in the clear"):
        acceptor.open(MessageType.APPEND, memoryview(b"x"))


def test_a_key_is_followed_by_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_cipher, "FRAMES_OF_A_KEY", 3)
    dialler, acceptor = pair()
    seen = set()
    for number in range(10):
        sealed = dialler.seal([b"the same"])
        seen.add(b"".join(sealed))
        assert opened(acceptor, sealed) == b"the same", number
    assert len(seen) == 10
