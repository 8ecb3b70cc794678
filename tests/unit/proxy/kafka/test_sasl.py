"""SCRAM against the RFC's own example and against a server of a few lines; PLAIN."""

from __future__ import annotations

import base64
import hashlib
import hmac

import pytest

from isthmus.kafka.sasl import PlainExchange, ScramExchange


def test_the_example_of_rfc_7677() -> None:
    exchange = ScramExchange("SCRAM-SHA-256", "user", "pencil", nonce="rOprNGfwEbeRWgbNEkqO")
    assert exchange.first() == b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO"
    final = exchange.next(b"r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096")
    assert final == (
        b"c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
    )
    assert exchange.next(b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4=") is None


def server_answers(mechanism: str, password: str, first: bytes, nonce: str = "srv") -> tuple[bytes, bytes, str]:
    """The server's first message, the proof that it wants, and its last message, by the RFC's formulas."""
    algorithm = {"SCRAM-SHA-256": "sha256", "SCRAM-SHA-512": "sha512"}[mechanism]
    bare = first.decode().removeprefix("n,,")
    full_nonce = bare.split("r=", 1)[1] + nonce
    server_first = f"r={full_nonce},s={base64.b64encode(b'salty').decode()},i=4096"
    salted = hashlib.pbkdf2_hmac(algorithm, password.encode(), b"salty", 4096)
    signed = f"{bare},{server_first},c=biws,r={full_nonce}".encode()
    server_key = hmac.digest(salted, b"Server Key", algorithm)
    signature = hmac.digest(server_key, signed, algorithm)
    client_key = hmac.digest(salted, b"Client Key", algorithm)
    stored = hashlib.new(algorithm, client_key).digest()
    proof = bytes(a ^ b for a, b in zip(client_key, hmac.digest(stored, signed, algorithm), strict=True))
    return server_first.encode(), b"v=" + base64.b64encode(signature), base64.b64encode(proof).decode()


@pytest.mark.parametrize("mechanism", ["SCRAM-SHA-256", "SCRAM-SHA-512"])
@pytest.mark.parametrize(("username", "password"), [("alice", "hunter2"), ("a=b,c", "pä,=ss")])
def test_both_sides_prove_themselves(mechanism: str, username: str, password: str) -> None:
    exchange = ScramExchange(mechanism, username, password)
    first = exchange.first()
    assert b"n=a=3Db=2Cc," in first or username == "alice"
    server_first, server_final, proof = server_answers(mechanism, password, first)
    final = exchange.next(server_first)
    assert final is not None
    assert final.decode().endswith(f",p={proof}")
    assert exchange.next(server_final) is None


def test_two_exchanges_have_two_nonces() -> None:
    assert ScramExchange("SCRAM-SHA-256", "u", "p").first() != ScramExchange("SCRAM-SHA-256", "u", "p").first()


def test_a_server_that_does_not_know_the_password_is_found_out() -> None:
    exchange = ScramExchange("SCRAM-SHA-256", "alice", "hunter2")
    server_first, server_final, _ = server_answers("SCRAM-SHA-256", "guess", exchange.first())
    exchange.next(server_first)
    with pytest.raises(ValueError, match="did not prove"):
        exchange.next(server_final)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"", "malformed"),
        (b"\xff", "malformed"),
        (b"e=other-error", "refuses: other-error"),
        (b"r=somebody-else,s=c2FsdA==,i=4096", "nonce"),
        (b"r=mine,s=c2FsdA==,i=4096", "nonce"),
        (b"r=mine+,s=?,i=4096", "malformed"),
        (b"r=mine+,i=4096", "no salt"),
        (b"r=mine+,s=c2FsdA==,i=x", "no salt or iterations"),
        (b"r=mine+,s=c2FsdA==,i=1", "asks for 1 iterations"),
        (b"r=mine+,s=c2FsdA==,i=999999999", "asks for 999999999 iterations"),
    ],
)
def test_what_a_server_must_not_say(answer: bytes, reason: str) -> None:
    exchange = ScramExchange("SCRAM-SHA-256", "alice", "hunter2", nonce="mine")
    exchange.first()
    with pytest.raises(ValueError, match=reason):
        exchange.next(answer)


def test_plain() -> None:
    exchange = PlainExchange("alice", "hunter2")
    assert exchange.first() == b"\0alice\0hunter2"
    assert exchange.next(b"") is None
