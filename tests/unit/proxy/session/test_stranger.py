"""Clients that have not authenticated, on real sockets: what passes, what waits, what ends them. No hook is asked."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import json
import ssl
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from support.sessions import (
    HOOKED,
    Front,
    Wire,
    answer,
    answer_of,
    fronted,
    hook,
    hooked,
    id_of,
    request,
    run,
    say_whether_sasl,
    stalled,
    until,
)

from isthmus.session.downstream import Downstream
from isthmus.session.listener import Limits
from isthmus.session.session import Session, SessionState
from isthmus.session.stranger import Stranger
from isthmus.session.upstream import Upstream
from isthmus_bench.kafka.security import Authority
from isthmus_plugins.api import Request, RequestHook, Verdict
from isthmus_protocol.messages import build_request, decode_response, encode_request
from isthmus_protocol.schema import ApiKey

AUTHENTICATING, SERVING = SessionState.AUTHENTICATING, SessionState.SERVING
SOON = Limits(authentication_timeout_s=0.3)


class Seen:
    """Hooks on every API that sees no request of a stranger's."""

    def __init__(self) -> None:
        self.apis: list[int] = []

    def hooks(self) -> list[RequestHook]:
        keys = (HOOKED, ApiKey.DELETE_TOPICS, ApiKey.API_VERSIONS, ApiKey.SASL_HANDSHAKE, ApiKey.SASL_AUTHENTICATE)
        return [hook(self._on_request, api_key=key) for key in keys]

    def _on_request(self, request: Request) -> Verdict:
        self.apis.append(request.api_key)
        return None


@contextlib.asynccontextmanager
async def guarded(
    *, required: bool | None = True, seen: Seen | None = None, limits: Limits | None = None
) -> AsyncIterator[Front]:
    """A proxy whose broker has SASL, or has none; None: has not said yet."""
    hooks = seen.hooks() if seen is not None else ()
    async with fronted(*hooks, limits=limits, asks_for_sasl=True) as front:
        if required is not None:
            await said(front, required)
        yield front


async def said(front: Front, required: bool) -> Wire:
    sasl = front.gateway.broker_sasl
    assert sasl is not None
    target = front.target
    sasl.required(target)
    wire = await say_whether_sasl(front.broker, required)
    await until(lambda: sasl.required(target) is required)
    return wire


def sent(api_key: int, version: int, correlation_id: int, values: dict[str, Any]) -> bytes:
    return encode_request(build_request(api_key, version, values), correlation_id, "client")


def handshake(correlation_id: int, mechanism: str, version: int = 1) -> bytes:
    return sent(ApiKey.SASL_HANDSHAKE, version, correlation_id, {"mechanism": mechanism})


def authenticate(correlation_id: int, message: bytes, version: int = 2) -> bytes:
    return sent(ApiKey.SASL_AUTHENTICATE, version, correlation_id, {"auth_bytes": message})


def handshaken(correlation_id: int, version: int = 1, error_code: int = 0) -> bytes:
    values = {"error_code": error_code, "mechanisms": ["PLAIN"]}
    return answer_of(ApiKey.SASL_HANDSHAKE, version, correlation_id, values)


def authenticated(correlation_id: int, challenge: bytes = b"", error_code: int = 0, version: int = 2) -> bytes:
    values = {"error_code": error_code, "auth_bytes": challenge}
    return answer_of(ApiKey.SASL_AUTHENTICATE, version, correlation_id, values)


def message(content: bytes) -> bytes:
    """With nothing but its size around it."""
    return struct.pack(">I", len(content)) + content


def token(subject: str) -> str:
    parts = (json.dumps(each).encode() for each in ({"alg": "none"}, {"sub": subject}))
    return ".".join((*(base64.urlsafe_b64encode(each).decode().rstrip("=") for each in parts), ""))


def bearer(subject: str, more: str = "") -> bytes:
    return f"n,,\x01{more}auth=Bearer {token(subject)}\x01\x01".encode()


async def passes(client: Wire, upstream: Wire, asked: bytes, answered: bytes) -> None:
    """A frame comes to the broker as it is, and so does its answer to the client."""
    client.send(asked)
    assert await upstream.take() == asked
    upstream.send(answered)
    assert await client.take() == answered


async def serves(client: Wire, upstream: Wire, session: Session) -> None:
    await until(lambda: session.state is SERVING)
    await passes(client, upstream, request(77), answer(77))


async def refused(front: Front, client: Wire, upstream: Wire, *frames: bytes) -> None:
    client.send(*frames)
    assert await client.closed() == b""
    assert await upstream.closed() == b""
    assert front.gateway.closed_by_cause == {"not authenticated": 1}


# ---- who may not ----


@pytest.mark.parametrize("begun", [False, True], ids=["at first", "in an exchange"])
def test_of_what_a_stranger_may_not_send_only_the_head_is_read(begun: bool) -> None:
    seen = Seen()

    async def main() -> None:
        async with guarded(seen=seen) as front:
            client, upstream, _ = await front.connect(AUTHENTICATING)
            if begun:
                await passes(client, upstream, handshake(1, "SCRAM-SHA-256"), handshaken(1))
                await passes(
                    client, upstream, authenticate(2, b"n,,n=a,r=b"), authenticated(2, b"r=bc,s=c2FsdA==,i=4096")
                )
            eight_mib = request(3, (ApiKey.DELETE_TOPICS, 5), bytes(8 << 20))
            await refused(front, client, upstream, eight_mib[:1000])

    run(main())
    assert seen.apis == []


def test_a_frame_of_more_than_a_broker_takes_from_a_stranger() -> None:
    async def main() -> None:
        async with guarded() as front:
            client, upstream, _ = await front.connect(AUTHENTICATING)
            await passes(client, upstream, handshake(1, "PLAIN"), handshaken(1))
            await refused(front, client, upstream, authenticate(2, bytes(512 * 1024))[:100])

    run(main())


@pytest.mark.parametrize(
    "sent_first",
    [
        b"",
        handshake(1, "PLAIN")[:9],
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(90),
    ],
    ids=["nothing", "a part of a frame", "HTTP", "TLS"],
)
def test_a_stranger_has_a_limited_time(sent_first: bytes) -> None:
    async def main() -> None:
        async with guarded(limits=SOON) as front:
            client, upstream, _ = await front.connect(AUTHENTICATING)
            await refused(front, client, upstream, sent_first)

    run(main())


def test_a_broker_that_never_answers_a_stranger() -> None:
    async def main() -> None:
        async with guarded(limits=SOON) as front:
            client, upstream, _ = await front.connect(AUTHENTICATING)
            client.send(handshake(1, "PLAIN"))
            await upstream.take()
            assert await client.closed() == b""

    run(main())


# ---- who may ----


def test_plain() -> None:
    seen = Seen()

    async def main() -> None:
        async with guarded(seen=seen, limits=SOON) as front:
            client, upstream, session = await front.connect(AUTHENTICATING)
            versions = sent(ApiKey.API_VERSIONS, 3, 0, {"client_software_name": "x", "client_software_version": "1"})
            await passes(client, upstream, versions, answer_of(ApiKey.API_VERSIONS, 3, 0, {}))
            await passes(client, upstream, handshake(1, "PLAIN"), handshaken(1))
            assert session.client.principal is None
            assert seen.apis == []
            await passes(client, upstream, authenticate(2, b"\0alice\0secret"), authenticated(2))
            await serves(client, upstream, session)
            assert session.client.principal == "User:alice"
            await passes(client, upstream, hooked(4), answer(4))
            assert seen.apis == [HOOKED]
            await asyncio.sleep(2 * SOON.authentication_timeout_s)
            await serves(client, upstream, session)

    run(main())


def test_what_comes_with_the_last_message_waits_for_its_answer() -> None:
    """A client need not wait for answers, and a broker takes one frame after the other."""
    seen = Seen()

    async def main() -> None:
        async with guarded(seen=seen) as front:
            client, upstream, session = await front.connect(AUTHENTICATING)
            asked = [handshake(1, "PLAIN"), authenticate(2, b"\0alice\0secret"), hooked(3), request(4)]
            client.send(*asked)
            for frame, answered in zip(asked[:2], (handshaken(1), authenticated(2)), strict=True):
                assert await upstream.take() == frame
                assert session.state is AUTHENTICATING
                assert seen.apis == []
                upstream.send(answered)
                assert await client.take() == answered
            assert [await upstream.take() for _ in range(2)] == asked[2:]
            assert seen.apis == [HOOKED]
            assert session.state is SERVING

    run(main())


def test_a_wrong_password_is_told_and_nothing_more_passes() -> None:
    async def main() -> None:
        async with guarded() as front:
            client, upstream, session = await front.connect(AUTHENTICATING)
            await passes(client, upstream, handshake(1, "PLAIN"), handshaken(1))
            await passes(client, upstream, authenticate(2, b"\0alice\0guess"), authenticated(2, error_code=58))
            assert session.client.principal is None
            await refused(front, client, upstream, request(3))

    run(main())


def test_a_proof_is_needed_behind_a_name() -> None:
    async def main() -> None:
        async with guarded() as front:
            client, upstream, session = await front.connect(AUTHENTICATING)
            await passes(client, upstream, handshake(1, "SCRAM-SHA-512"), handshaken(1))
            await passes(client, upstream, authenticate(2, b"n,,n=alice,r=b"), authenticated(2, b"r=bc"))
            assert session.state is AUTHENTICATING
            await passes(client, upstream, authenticate(3, b"c=biws,r=bc,p=x"), authenticated(3, b"v=y"))
            await serves(client, upstream, session)
            assert session.client.principal == "User:alice"

    run(main())


def test_a_token_that_the_broker_refuses_names_nobody() -> None:
    """It is answered without an error, by the reason (RFC 7628); then the client may try another one."""

    async def main() -> None:
        async with guarded() as front:
            client, upstream, session = await front.connect(AUTHENTICATING)
            await passes(client, upstream, handshake(1, "OAUTHBEARER"), handshaken(1))
            await passes(client, upstream, authenticate(2, bearer("admin")), authenticated(2, b'{"status":"invalid"}'))
            assert session.client.principal is None
            assert session.state is AUTHENTICATING
            extended = bearer("mallory", more=f"traceid=auth=Bearer {token('admin')}\x01")
            await passes(client, upstream, authenticate(3, extended), authenticated(3))
            await serves(client, upstream, session)
            assert session.client.principal == "User:mallory"

    run(main())


def test_api_versions_newer_than_the_proxy_are_answered_by_it() -> None:
    async def main() -> None:
        async with guarded() as front:
            client, _, session = await front.connect(AUTHENTICATING)
            client.send(request(5, (ApiKey.API_VERSIONS, 99), b"\1\1\1\0"))
            correlation_id, payload = decode_response(ApiKey.API_VERSIONS, 0, await client.take())
            assert (correlation_id, payload.error_code) == (5, 35)
            assert session.state is AUTHENTICATING
            client.send(*(request(n, (ApiKey.API_VERSIONS, 99)) for n in range(10_000)))
            assert await client.closed() == b""

    run(main())


# ---- messages without heads ----


def test_plain_behind_handshake_v0() -> None:
    async def main() -> None:
        async with guarded() as front:
            client, upstream, session = await front.connect(AUTHENTICATING)
            await passes(client, upstream, handshake(1, "PLAIN", 0), handshaken(1, 0))
            await passes(client, upstream, message(b"\0alice\0secret"), message(b""))
            await serves(client, upstream, session)
            assert session.client.principal == "User:alice"

    run(main())


def test_scram_behind_handshake_v0_in_small_pieces() -> None:
    async def main() -> None:
        async with guarded() as front:
            client, upstream, session = await front.connect(AUTHENTICATING)
            await passes(client, upstream, handshake(1, "SCRAM-SHA-256", 0), handshaken(1, 0))
            for asked, answered in ((b"n,,n=alice,r=b", b"r=bc,s=c2FsdA==,i=4096"), (b"c=biws,r=bc,p=x", b"v=y")):
                for wire, other, frame in ((client, upstream, message(asked)), (upstream, client, message(answered))):
                    for byte in frame:
                        assert session.state is AUTHENTICATING
                        wire.send(bytes([byte]))
                        await asyncio.sleep(0.001)
                    assert await other.take() == frame
            await serves(client, upstream, session)
            assert session.client.principal == "User:alice"

    run(main())


def test_a_message_may_look_like_a_request() -> None:
    async def main() -> None:
        async with guarded() as front:
            client, upstream, session = await front.connect(AUTHENTICATING)
            await passes(client, upstream, handshake(1, "SCRAM-SHA-256", 0), handshaken(1, 0))
            await passes(client, upstream, hooked(1), message(b"r=bc"))
            assert session.state is AUTHENTICATING

    run(main())


@pytest.mark.parametrize("version", [0, 1])
def test_a_mechanism_whose_messages_are_not_known(version: int) -> None:
    """The broker is asked whether it takes requests. Of GSSAPI's last message it says nothing, where it has no head."""
    seen = Seen()

    async def main() -> None:
        async with guarded(seen=seen) as front:
            client, upstream, session = await front.connect(AUTHENTICATING)
            await passes(client, upstream, handshake(1, "GSSAPI", version), handshaken(1, version))
            if version:
                await passes(client, upstream, authenticate(2, b"\x60\x82"), authenticated(2, b"\x60"))
                await passes(client, upstream, authenticate(3, b"\5\4"), authenticated(3))
            else:
                await passes(client, upstream, message(b"\x60\x82"), message(b"\x60"))
                client.send(message(b"\5\4"))
                assert await upstream.take() == message(b"\5\4")
            client.send(hooked(4))
            asked = await upstream.take()
            assert asked == front.gateway.fence_frame
            assert seen.apis == []
            upstream.send(answer(id_of(asked), bytes(6)))
            assert await upstream.take() == hooked(4)
            assert session.state is SERVING
            upstream.send(answer(4))
            assert await client.take() == answer(4)
            await serves(client, upstream, session)

    run(main())


def test_a_client_that_has_authenticated_in_an_unknown_way_may_be_silent() -> None:
    async def main() -> None:
        async with guarded(limits=SOON) as front:
            client, upstream, session = await front.connect(AUTHENTICATING)
            await passes(client, upstream, handshake(1, "GSSAPI"), handshaken(1))
            await passes(client, upstream, authenticate(2, b"\x60\x82"), authenticated(2))
            asked = await upstream.take()
            assert asked == front.gateway.fence_frame
            upstream.send(answer(id_of(asked), bytes(6)))
            await serves(client, upstream, session)

    run(main())


def test_a_broker_that_would_take_no_request_ends_the_connection() -> None:
    async def main() -> None:
        async with guarded() as front:
            client, upstream, _ = await front.connect(AUTHENTICATING)
            await passes(client, upstream, handshake(1, "GSSAPI"), handshaken(1))
            await passes(client, upstream, authenticate(2, b"\x60\x82"), authenticated(2, b"\x60"))
            client.send(hooked(3))
            asked = await upstream.take()
            upstream.send(answer(id_of(asked), struct.pack(">hi", 34, 0)))
            assert await client.closed() == b""
            assert front.gateway.closed_by_cause == {"not authenticated": 1}

    run(main())


# ---- whether the broker's listener has SASL ----


def test_without_sasl_all_are_served_at_once() -> None:
    async def main() -> None:
        async with guarded(required=False) as front:
            client, upstream, session = await front.connect(SERVING)
            await serves(client, upstream, session)

    run(main())


@pytest.mark.parametrize("required", [True, False])
def test_a_request_waits_until_it_is_known_whether_it_may_pass(required: bool) -> None:
    seen = Seen()

    async def main() -> None:
        async with guarded(required=None, seen=seen) as front:
            client = await front.dial()
            wires = [await front.broker.accept()]
            client.send(hooked(1), request(2))
            await until(lambda: front.gateway.bytes_from_clients > 0)
            assert seen.apis == []
            await say_whether_sasl(front.broker, required)
            if required:
                assert await client.closed() == b""
                assert front.gateway.closed_by_cause == {"not authenticated": 1}
            else:
                assert [await wires[0].take() for _ in range(2)] == [hooked(1), request(2)]
                assert seen.apis == [HOOKED]

    run(main())


def test_a_broker_that_was_restarted_is_asked_again() -> None:
    async def main() -> None:
        async with guarded(required=None) as front:
            sasl, target = front.gateway.broker_sasl, front.target
            assert sasl is not None
            first = await said(front, False)
            assert sasl.required(target) is False
            await first.abandon()
            await until(lambda: sasl.required(target) is None)
            second = await said(front, True)
            await second.abandon()
            third = await say_whether_sasl(front.broker, False)
            await until(lambda: sasl.required(target) is False)
            await third.close()

    run(main())


@pytest.mark.parametrize("required", [True, None])
def test_a_client_with_a_certificate_waits_for_no_answer_but_for_its_login(
    tmp_path: Path, required: bool | None
) -> None:
    authority = Authority(tmp_path)
    authority.create()
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(authority.ca_file))
    server.load_cert_chain(authority.issue("proxy"))
    server.verify_mode = ssl.CERT_REQUIRED
    context = ssl.create_default_context(cafile=str(authority.ca_file))
    context.load_cert_chain(authority.issue("app"))

    async def main() -> None:
        async with fronted(asks_for_sasl=True, client_ssl=server) as front:
            if required:
                await said(front, True)
            state = AUTHENTICATING if required else SERVING
            client, upstream, session = await front.connect(state, context)
            assert session.client.principal == "User:CN=app"
            if required:
                await refused(front, client, upstream, request(1))
            else:
                await serves(client, upstream, session)

    run(main())


# ---- ends ----


def test_a_client_that_goes_is_noticed_while_the_broker_is_waited_for() -> None:
    async def main() -> None:
        async with guarded() as front:
            client, upstream, session = await front.connect(AUTHENTICATING)
            client.send(handshake(1, "PLAIN"))
            await upstream.take()
            await client.close()
            assert await upstream.closed() == b""
            assert session.close_cause == "client closed"

    run(main())


def test_what_is_kept_of_a_stranger_is_bounded() -> None:
    async def main() -> None:
        async with guarded(limits=Limits(sasl_frame_bytes_max=20_000)) as front:
            client, upstream, _ = await front.connect(AUTHENTICATING)
            client.send(handshake(1, "PLAIN"), authenticate(2, b"\0alice\0secret"))
            await upstream.take()
            frames = [request(number, body=bytes(1000)) for number in range(20_000)]
            writing = asyncio.ensure_future(_sent(client, frames))  # noqa: TID251
            await stalled(front)
            assert front.gateway.bytes_from_clients < 1 << 20
            upstream.send(handshaken(1))
            assert await upstream.take() == authenticate(2, b"\0alice\0secret")
            upstream.send(authenticated(2))
            for number, frame in enumerate(frames):
                assert await upstream.take() == frame
                upstream.send(answer(number))
            await writing

    run(main())


async def _sent(client: Wire, frames: list[bytes]) -> None:
    for start in range(0, len(frames), 1000):
        client.send(*frames[start : start + 1000])
        await client.writer.drain()


def test_large_logins_take_their_turn_and_nobody_elses_room() -> None:
    async def main() -> None:
        large = 100_000
        async with guarded(limits=Limits(queued_bytes_max=4 * large)) as front:
            gateway, frame = front.gateway, authenticate(2, b"t" * 2 * large)
            clients = [await front.connect(AUTHENTICATING) for _ in range(3)]
            for client, upstream, _ in clients:
                await passes(client, upstream, handshake(1, "OTHER"), handshaken(1))
            (first, first_upstream, _), (second, second_upstream, _), (third, _, gone) = clients
            first.send(frame[: large // 2])
            await until(lambda: gateway.strangers_bytes.left <= 0)
            for waiting, client in enumerate((second, third), 1):
                client.send(frame[: large // 2])
                await until(lambda waiting=waiting: gateway.strangers_bytes.waiting == waiting)  # type: ignore[misc]
            gone.close("test")
            assert (gateway.strangers_bytes.waiting, gateway.queued_bytes.kept) == (1, 0)
            first.send(frame[large // 2 :])
            assert await first_upstream.take() == frame
            await until(lambda: not gateway.strangers_bytes.waiting)
            second.send(frame[large // 2 :])
            assert await second_upstream.take() == frame
            assert gateway.strangers_bytes.kept == 0

    run(main())


@pytest.mark.parametrize("ends", ["unanswered", "unanswered without a head", "known", "served"])
def test_a_session_that_was_a_strangers_leaves_no_cycle_behind(ends: str) -> None:
    async def main() -> None:
        async with guarded(required=None if ends == "known" else True) as front:
            gc.collect()
            gc.disable()
            try:
                client = await front.dial()
                upstream = await front.broker.accept()
                version = 0 if ends == "unanswered without a head" else 1
                client.send(handshake(1, "PLAIN", version))
                await upstream.take()
                if ends == "known":
                    await say_whether_sasl(front.broker, False)
                    await until(lambda: all(each.state is SERVING for each in front.gateway.sessions))
                elif ends != "unanswered":
                    upstream.send(handshaken(1, version))
                    await client.take()
                    said = b"\0alice\0secret"
                    client.send(authenticate(2, said) if version else message(said))
                    await upstream.take()
                    if version:
                        upstream.send(authenticated(2))
                        await client.take()
                await client.close()
                await upstream.closed()
                parts = (Session, Stranger, Upstream, Downstream)
                await until(lambda: not any(isinstance(each, parts) for each in gc.get_objects()))
            finally:
                gc.enable()

    run(main())


def test_half_a_message_when_the_client_goes() -> None:
    async def main() -> None:
        async with guarded() as front:
            client, upstream, session = await front.connect(AUTHENTICATING)
            await passes(client, upstream, handshake(1, "PLAIN", 0), handshaken(1, 0))
            client.send(message(bytes(100))[:50])
            await client.close()
            assert await upstream.closed() == b""
            assert session.close_cause == "client closed"

    run(main())
