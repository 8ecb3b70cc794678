"""Tokens: made here, signed with, verified by what the log keeps, and nothing that somebody chose."""

from __future__ import annotations

import base64

import pytest

from isthmus_control.tokens import PREFIX, NoToken, Token, is_signed


def test_a_token_is_what_its_text_says() -> None:
    token = Token.new()
    read = Token.parse(f"  {token.text}\n")
    assert (read.token_id, read.public_key, read.acceptor_key) == (
        token.token_id,
        token.public_key,
        token.acceptor_key,
    )
    assert Token.new().token_id != token.token_id
    # 32 random bytes, of which nothing that is shown tells anything.
    seed = base64.urlsafe_b64decode(token.text.removeprefix(PREFIX))[:32]
    assert len(seed) == 32
    assert seed.hex() not in repr(token) + token.public_key + token.token_id + token.acceptor_key.hex()


def test_its_holder_signs_and_nobody_else() -> None:
    token, other = Token.new(), Token.new()
    signature = token.sign(b"words")
    assert is_signed(token.public_key, b"words", signature)
    assert not is_signed(token.public_key, b"other words", signature)
    assert not is_signed(other.public_key, b"words", signature)
    for odd in ("", "zz", "00", signature[:-2], "é"):
        assert not is_signed(token.public_key, b"words", odd)


@pytest.mark.parametrize(
    "chosen",
    [
        "",
        "Winter2026!",
        PREFIX,
        PREFIX + "Winter2026!",
        PREFIX + "a" * 48,
        PREFIX + base64.urlsafe_b64encode(b"correct horse battery staple 4711!").decode(),
        Token(bytes(32)).text[:-1],
        Token(bytes(32)).text.replace("A", "B", 1),
        PREFIX + "ü" * 48,
    ],
)
def test_a_token_that_somebody_chose_is_none(chosen: str) -> None:
    with pytest.raises(NoToken, match="link token create") as raised:
        Token.parse(chosen)
    assert not chosen or chosen not in str(raised.value)
