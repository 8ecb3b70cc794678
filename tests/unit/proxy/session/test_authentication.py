"""Who a client is, as its SASL messages and certificates say."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from isthmus.session.authentication import Authentication, certificate_principal, name_in
from isthmus_plugins.api import Client, Replace, Request, Verdict
from isthmus_protocol import schema
from isthmus_protocol.bodies import build
from isthmus_protocol.messages import RequestPayload, build_request, encode_request, encode_response
from isthmus_protocol.schema import ApiKey
from isthmus_protocol.wire import MalformedFrame


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
        ("SCRAM-SHA-256", b"n,,n=token-id,r=abc,tokenauth=true", None),
        ("OAUTHBEARER", f"n,,\x01auth=Bearer {token(sub='alice')}\x01\x01".encode(), "alice"),
        ("OAUTHBEARER", f"n,,\x01auth=Bearer {token(iss='x')}\x01\x01".encode(), None),
        ("OAUTHBEARER", b"n,,\x01auth=Bearer x\x01\x01", None),
        ("OAUTHBEARER", f"n,,\x01auth=bearer  {token(sub='alice')}\x01\x01".encode(), "alice"),
        (
            "OAUTHBEARER",
            f"n,,\x01t=auth=Bearer {token(sub='x')}\x01auth=Bearer {token(sub='alice')}\x01\x01".encode(),
            "alice",
        ),
        (
            "OAUTHBEARER",
            f"n,,\x01auth=Bearer {token(sub='x')}\x01auth=Bearer {token(sub='alice')}\x01\x01".encode(),
            None,
        ),
        ("OAUTHBEARER", f"n,,\x01auth=Basic {token(sub='alice')}\x01\x01".encode(), None),
        ("OAUTHBEARER", f"n,,\x01auth=Bearer {token(sub=['alice'])}\x01\x01".encode(), None),
        ("OAUTHBEARER", b"n,,\x01auth=Bearer x." + base64.urlsafe_b64encode(b"[" * 300_000) + b".\x01\x01", None),
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


class Login:
    """A client that logs in on an open connection."""

    def __init__(self) -> None:
        self.told: list[str | None] = []
        self.client = Client(1, "127.0.0.1:1", 1)
        self.authentication = Authentication(lambda client: self.told.append(client.principal))

    def handshake(self, mechanism: str, error_code: int = 0, version: int = 1) -> None:
        asked = build_request(ApiKey.SASL_HANDSHAKE, version, {"mechanism": mechanism})
        values = {"error_code": error_code, "mechanisms": []}
        self._answered(ApiKey.SASL_HANDSHAKE, version, values, self._sent(ApiKey.SASL_HANDSHAKE, version, asked))

    def says(self, said: bytes, error_code: int = 0, challenge: bytes = b"") -> None:
        values = {"error_code": error_code, "auth_bytes": challenge}
        self._answered(ApiKey.SASL_AUTHENTICATE, 2, values, self.sends(said))

    def sends(self, said: bytes) -> Verdict:
        return self._sent(ApiKey.SASL_AUTHENTICATE, 2, build_request(ApiKey.SASL_AUTHENTICATE, 2, {"auth_bytes": said}))

    def _sent(self, api_key: int, version: int, asked: RequestPayload) -> Verdict:
        (hook,) = [each for each in self.authentication.hooks() if each.api_key == api_key]
        frame = encode_request(asked, 1, "c")
        return hook.on_request(Request(frame, True, api_key, version, 1, 0.0, self.client))

    def _answered(self, api_key: int, version: int, values: dict[str, Any], verdict: Verdict) -> None:
        if verdict is not None:
            assert isinstance(verdict, Replace)
            assert verdict.on_response is not None
            answer = encode_response(build(schema.response_type(api_key, version), values), 1)
            assert verdict.on_response(answer) is answer


def test_a_principal_is_known_when_the_broker_has_accepted_it() -> None:
    login = Login()
    login.handshake("PLAIN")
    login.says(b"\0alice\0guess", error_code=58)
    assert login.told == []
    login.says(b"\0alice\0secret")
    assert login.told == [], "the exchange was over"
    login.handshake("PLAIN")
    login.says(b"\0alice\0secret")
    assert login.told == ["User:alice"]


def test_a_name_without_its_proof_is_nobody() -> None:
    login = Login()
    login.handshake("SCRAM-SHA-256")
    login.says(b"n,,n=alice,r=abc")
    assert login.told == []
    login.says(b"c=biws,r=abcdef,p=wrong", error_code=58)
    assert login.told == []
    login.says(b"c=biws,r=abcdef,p=again")
    assert login.told == [], "the exchange was over"
    login.handshake("SCRAM-SHA-256")
    login.says(b"n,,n=alice,r=abc")
    login.says(b"c=biws,r=abcdef,p=right")
    assert login.told == ["User:alice"]
    assert login.client.principal == "User:alice"


def test_a_token_counts_when_its_answer_has_nothing_to_object() -> None:
    login = Login()
    login.handshake("OAUTHBEARER")
    login.says(f"n,,\x01auth=Bearer {token(sub='admin')}\x01\x01".encode(), challenge=b'{"status":"invalid_token"}')
    assert login.told == []
    login.says(f"n,,\x01auth=Bearer {token(sub='mallory')}\x01\x01".encode())
    assert login.told == ["User:mallory"], "the broker has taken this one"


def test_messages_behind_a_handshake_that_was_refused_name_nobody() -> None:
    login = Login()
    login.handshake("PLAIN", error_code=34)
    login.says(b"\0admin\0x")
    assert login.told == []


def test_who_says_two_things_at_once_is_nobody() -> None:
    login = Login()
    login.handshake("PLAIN")
    first = login.sends(b"\0alice\0secret")
    assert first is not None
    assert login.sends(b"\0admin\0secret") is None
    login.says(b"\0admin\0secret")
    assert login.told == []


def test_handshake_v0_logs_nobody_in_again() -> None:
    login = Login()
    login.handshake("PLAIN", error_code=34, version=0)
    with pytest.raises(MalformedFrame, match="version 0"):
        login.handshake("PLAIN", version=0)


def test_one_who_logs_in_again_is_told_once() -> None:
    login = Login()
    for said in (b"\0alice\0secret", b"\0alice\0secret", b"\0bob\0secret"):
        login.handshake("PLAIN")
        login.says(said)
    assert login.told == ["User:alice", "User:bob"]
