"""Who a client is, as its SASL messages and certificates say."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from isthmus.session.authentication import Authentication, certificate_principal, name_in
from isthmus_plugins.api import Client, Replace, Request
from isthmus_protocol import schema
from isthmus_protocol.bodies import build
from isthmus_protocol.messages import build_request, encode_request, encode_response
from isthmus_protocol.schema import ApiKey


def token(**claims: Any) -> str:
    parts = (json.dumps(each).encode() for each in ({"alg": "none"}, claims))
    return ".".join((*(base64.urlsafe_b64encode(each).decode().rstrip("=") for each in parts), ""))


@pytest.mark.parametrize(
    ("mechanism", "said", "name"),
    [
        ("PLAIN", b"\0alice\0secret", "alice"),
        ("PLAIN", b"bob\0alice\0secret", "bob"),
        ("PLAIN", b"nonsense", None),
        ("SCRAM-SHA-512", b"n,,n=alice,r=abc", "alice"),
        ("SCRAM-SHA-256", b"n,,n=a=2Cb=3Dc,r=abc", "a,b=c"),
        ("SCRAM-SHA-256", b"n,a=bob,n=alice,r=abc", "bob"),
        ("SCRAM-SHA-256", b"c=biws,r=abc,p=proof", None),
        ("OAUTHBEARER", f"n,,\x01auth=Bearer {token(sub='alice')}\x01\x01".encode(), "alice"),
        ("OAUTHBEARER", f"n,,\x01auth=Bearer {token(iss='x')}\x01\x01".encode(), None),
        ("OAUTHBEARER", b"n,,\x01auth=Bearer x\x01\x01", None),
        ("GSSAPI", b"\x60\x82", None),
        ("PLAIN", b"\xff\0\xff\0", None),
    ],
)
def test_the_name_in_a_message(mechanism: str, said: bytes, name: str | None) -> None:
    assert name_in(mechanism, said) == name


def test_the_principal_of_a_certificate() -> None:
    subject = ((("countryName", "DE"),), (("organizationName", "A, B"),), (("commonName", "app"),))
    assert certificate_principal({"subject": subject}) == "User:CN=app,O=A\\, B,C=DE"
    assert certificate_principal({}) is None
    assert certificate_principal(None) is None


class Exchange:
    def __init__(self) -> None:
        self.told: list[str | None] = []
        self.client = Client(1, "127.0.0.1:1", 1)
        self.authentication = Authentication(lambda client: self.told.append(client.principal))

    def handshake(self, mechanism: str) -> None:
        frame = encode_request(build_request(ApiKey.SASL_HANDSHAKE, 1, {"mechanism": mechanism}), 1, "c")
        assert self._hook(ApiKey.SASL_HANDSHAKE, 1, frame) is None

    def says(self, said: bytes, error_code: int = 0) -> None:
        frame = encode_request(build_request(ApiKey.SASL_AUTHENTICATE, 2, {"auth_bytes": said}), 2, "c")
        verdict = self._hook(ApiKey.SASL_AUTHENTICATE, 2, frame)
        if verdict is not None:
            assert isinstance(verdict, Replace)
            assert verdict.on_response is not None
            values = {"error_code": error_code, "auth_bytes": b""}
            answer = encode_response(build(schema.response_type(ApiKey.SASL_AUTHENTICATE, 2), values), 2)
            assert verdict.on_response(answer) is answer

    def _hook(self, api_key: int, version: int, frame: bytes) -> Any:
        (hook,) = [each for each in self.authentication.hooks() if each.api_key == api_key]
        return hook.on_request(Request(frame, True, api_key, version, 1, 0.0, self.client))


def test_a_principal_is_known_when_the_broker_has_accepted_it() -> None:
    exchange = Exchange()
    exchange.handshake("PLAIN")
    exchange.says(b"\0alice\0guess", error_code=58)
    assert exchange.told == []
    exchange.handshake("PLAIN")
    exchange.says(b"\0alice\0secret")
    assert exchange.told == ["User:alice"]


def test_a_name_without_its_proof_is_nobody() -> None:
    exchange = Exchange()
    exchange.handshake("SCRAM-SHA-256")
    exchange.says(b"n,,n=alice,r=abc")
    assert exchange.told == []
    exchange.says(b"c=biws,r=abcdef,p=wrong", error_code=58)
    assert exchange.told == []
    exchange.says(b"c=biws,r=abcdef,p=again")
    assert exchange.told == [], "the exchange was over"
    exchange.handshake("SCRAM-SHA-256")
    exchange.says(b"n,,n=alice,r=abc")
    exchange.says(b"c=biws,r=abcdef,p=right")
    assert exchange.told == ["User:alice"]
    assert exchange.client.principal == "User:alice"


def test_one_who_logs_in_again_is_told_once() -> None:
    exchange = Exchange()
    for said in (b"\0alice\0secret", b"\0alice\0secret", b"\0bob\0secret"):
        exchange.handshake("PLAIN")
        exchange.says(said)
    assert exchange.told == ["User:alice", "User:bob"]
