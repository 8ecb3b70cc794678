"""Peers that say odd things, to whoever dialled and to whoever was dialled: one line, one closed connection."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import struct
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import pytest
from support.link_ends import SECRET, Listener, over_a_listener, strangers_answer
from support.plugins import Two, on_two

from isthmus_control.model import ResourceType
from isthmus_plugins import links
from isthmus_plugins.replication.link import calls
from isthmus_plugins.replication.link.connection import LinkConnection, LinkLost, LinkRejected
from isthmus_plugins.replication.link.features import FEATURES
from isthmus_protocol import link, link_pieces
from isthmus_protocol.link import MessageType

DEEP: Final = b"[" * 12_000
DEEP_OBJECTS: Final = b'{"a":' * 2_500
KEY: Final = "11" * 32
HELLO: Final = {"versions": [1, 1], "nonce": "00" * 32, "key": KEY, "purpose": "link", "link_id": "1"}
NO_KEY: Final = "00" * 32
"""Of small order: what comes of it is the same for every private key."""


def raw(kind: int, body: bytes) -> bytes:
    return struct.pack(">IB", len(body) + 1, kind) + body


def hello(**odd: Any) -> bytes:
    return link.encode(MessageType.HELLO, json.dumps({**HELLO, **odd}).encode().replace(b"Infinity", b"1e999"))


INFINITE: Final = float("inf")
TO_ACCEPTOR: Final[Mapping[str, bytes]] = {
    "deep": raw(1, DEEP),
    "deep objects": raw(1, DEEP_OBJECTS),
    "deep in a field": raw(1, b'{"link_id": ' + b"[" * 700 + b"]" * 700 + b', "versions": 1}'),
    "a number": raw(1, b"5"),
    "not UTF-8": raw(1, b'{"a": "\xff"}'),
    "digits": raw(1, b'{"versions": [' + b"9" * 9_000 + b", 1]}"),
    "infinite versions": hello(versions=[INFINITE, 1]),
    "versions of an object": hello(versions={"a": 1, "b": 2}),
    "three versions": hello(versions=[1, 1, 1]),
    "no versions": hello(versions=None),
    "lists for versions": hello(versions=[[], []]),
    "a number for a nonce": hello(nonce=5),
    "a short nonce": hello(nonce="00"),
    "a list for a key": hello(key=["11"] * 32),
    "a short key": hello(key="11"),
    "a key without digits": hello(key="zz" * 32),
    "no kind of frame": raw(99, b"{}"),
    "too large": raw(1, bytes(17 * 1024)),
    "empty": struct.pack(">IB", 0, 1),
    "out of turn": raw(16, b'{"id": 1, "method": "x"}'),
    "twice": hello() * 2,
    "encrypted": raw(23, bytes(100)),
}
REJECTED: Final[Mapping[str, bytes]] = {
    "a list for a proof": hello() + raw(3, b'{"proof": []}'),
    "no proof": hello() + raw(3, b"{}"),
    "half a character": hello(link_id="\ud800") + raw(3, b'{"proof": "\\ud800"}'),
    "an infinite number": hello(features=[INFINITE], brokers=INFINITE) + raw(3, b'{"proof": 1e999}'),
    "an object for features": hello(features={"a": 1}, tls="yes") + raw(3, b'{"proof": "00"}'),
}


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    assert not [each for each in caplog.records if each.levelno >= logging.ERROR]
    return [f"{each.message}: {getattr(each, 'detail', '')}" for each in caplog.records if "link " in each.message]


@pytest.mark.parametrize("name", [*TO_ACCEPTOR, *REJECTED])
def test_who_dials_says_something_odd_before_the_proof(name: str, caplog: pytest.LogCaptureFixture) -> None:
    async def work(listener: Listener) -> None:
        answer = await strangers_answer(listener, {**TO_ACCEPTOR, **REJECTED}[name])
        assert (b"AUTHENTICATION_ERROR" in answer) == (name in REJECTED)
        await asyncio.sleep(0)
        assert len(lines(caplog)) == 1, lines(caplog)
        dialler, _ = await listener.pair()
        dialler.close()

    over_a_listener(work, FEATURES)


def test_a_key_that_agrees_on_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Where links may be created without a token, everybody's proof holds."""

    async def work(listener: Listener) -> None:
        listener.secret = b""
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        said = {**HELLO, "key": NO_KEY, "features": list(FEATURES)}
        writer.write(link.encode_json(MessageType.HELLO, said))
        size, _ = link.HEAD.unpack(await reader.readexactly(link.HEAD.size))
        words = link.transcript(said, json.loads(await reader.readexactly(size - 1)))
        writer.write(link.encode_json(MessageType.PROOF, {"proof": link.proof(b"", "dialler", words)}))
        assert await reader.read() == b""
        writer.close()
        assert listener.ready.empty()
        assert "a key that is none" in "".join(lines(caplog))

    over_a_listener(work, FEATURES)


def challenge(said: dict[str, Any], **odd: Any) -> bytes:
    """Of an acceptor that holds the secret."""
    words: dict[str, Any] = {"version": 1, "nonce": "00" * 32, "key": KEY, "features": list(FEATURES), **odd}
    proof = link.proof(SECRET, "acceptor", link.transcript(said, words))
    return link.encode_json(MessageType.CHALLENGE, {**words, "proof": proof})


TO_DIALLER: Final[Mapping[str, Callable[[dict[str, Any]], bytes]]] = {
    "deep": lambda said: raw(2, DEEP),
    "deep objects": lambda said: raw(2, DEEP_OBJECTS),
    "nothing in it": lambda said: raw(2, b"{}"),
    "a list": lambda said: raw(2, b"[]"),
    "an infinite proof": lambda said: raw(2, b'{"proof": 1e999}'),
    "half a character": lambda said: raw(2, b'{"proof": "\\ud800"}'),
    "no key": lambda said: challenge(said, key=None),
    "a key of small order": lambda said: challenge(said, key=NO_KEY),
    "a list for a key": lambda said: challenge(said, key=[1]),
    "a welcome": lambda said: raw(4, b"{}"),
    "a welcome in the clear": lambda said: challenge(said) + raw(4, b"{}"),
    "a welcome that does not open": lambda said: challenge(said) + raw(23, bytes(100)),
    "a welcome out of a deep list": lambda said: challenge(said, features=[]) + raw(4, DEEP),
    "an odd rejection": lambda said: raw(5, b'{"code": ["a"], "message": {}}'),
    "an empty rejection": lambda said: raw(5, b"{}"),
    "too large": lambda said: raw(2, bytes(17 * 1024)),
    "a call": lambda said: raw(16, b'{"id": 1}'),
    "another protocol": lambda said: b"HTTP/1.1 400 Bad Request\r\n\r\n",
}


@pytest.mark.parametrize("name", TO_DIALLER)
def test_who_is_dialled_says_something_odd_before_the_proof(name: str, caplog: pytest.LogCaptureFixture) -> None:
    async def work(listener: Listener) -> None:
        closed = asyncio.Event()

        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            size, _ = link.HEAD.unpack(await reader.readexactly(link.HEAD.size))
            writer.write(TO_DIALLER[name](json.loads(await reader.readexactly(size - 1))))
            await reader.read()
            writer.close()
            await writer.wait_closed()
            closed.set()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        listener.port = server.sockets[0].getsockname()[1]
        with pytest.raises((LinkLost, LinkRejected)):
            await listener.dial()
        assert len(lines(caplog)) <= 1, lines(caplog)
        await closed.wait()
        server.close()

    over_a_listener(work, FEATURES)


BEHIND_THE_PROOF: Final[Mapping[str, bytes]] = {
    "a deep call": raw(16, DEEP * 10),
    "a deep answer": raw(17, DEEP_OBJECTS * 10),
    "a call with a list for a number": raw(16, b'{"id": [1], "method": "x"}'),
    "a call without a number": raw(16, b'{"method": "x"}'),
    "a call with an infinite number": raw(16, b'{"id": 1e999, "method": "x"}'),
    "a call that is a list": raw(16, b"[1]"),
    "an answer with a list for a number": raw(17, b'{"id": [1], "result": {}}'),
    "an answer with an object for a number": raw(17, b'{"id": {}}'),
    "an answer without a number": raw(17, b"{}"),
    "an answer whose error is text": raw(17, b'{"id": 1, "error": "no"}'),
    "an answer whose error is a list": raw(17, b'{"id": 1, "error": [1]}'),
    "a stream that is text": raw(20, b'{"stream": "x"}'),
    "a stream without end": raw(20, b'{"stream": 1e999}'),
    "an end that is a list": raw(20, b'{"stream": 1, "end_offset": []}'),
    "a stream that nobody opened": link.encode_append_head(7, 0, 0, 0, 0, 0),
    "an end of no stream": link.encode_appended(7, 2**62),
    "half an append": raw(18, b"x"),
    "half a confirmation": raw(19, b"x"),
    "half a piece": raw(22, b"x"),
    "a piece of too much": raw(22, struct.pack(">II", 1, 2**32 - 1) + b"x"),
    "a piece of too little": raw(22, struct.pack(">II", 1, 10) + b"x"),
    "a deep call in pieces": b"".join(
        b"".join(link_pieces.encode_piece(1, 100_001, [part])) for part in (b"\x10" + b"[" * 50_000, b"[" * 50_000)
    ),
    "a handshake": hello(),
    "no kind of frame": raw(99, b""),
    "an encrypted frame inside": raw(23, bytes(50)),
    "an empty frame": struct.pack(">IB", 0, 1),
    "a frame that is too large": struct.pack(">IB", 2**32 - 1, 16),
}


@pytest.mark.parametrize("features", [FEATURES, ()], ids=["encrypted", "plain"])
@pytest.mark.parametrize("dialled", [True, False])
@pytest.mark.parametrize("name", BEHIND_THE_PROOF)
def test_a_peer_says_something_odd_behind_the_proof(
    name: str, dialled: bool, features: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    async def work(listener: Listener) -> None:
        dialler, acceptor = await listener.pair()
        odd, other = (dialler, acceptor) if dialled else (acceptor, dialler)
        asked = asyncio.ensure_future(other.call(calls.Topology())) if "answer" in name else None  # noqa: TID251
        odd.send(BEHIND_THE_PROOF[name])
        assert await other.lost_within(5)
        assert await odd.lost_within(5)
        if asked is not None:
            with pytest.raises(LinkLost):
                await asked
        assert len(lines(caplog)) == 1, lines(caplog)
        dialler.close()

    over_a_listener(work, features)


@pytest.mark.parametrize(
    "result",
    [
        {"result": "text"},
        {"result": {"proxies": 5}},
        {"result": {"proxies": [{"link_address": "a:1"}]}},
        {"result": {"proxies": [{"proxy": 5}]}},
        {"error": {}},
        {"error": {"code": [], "message": 1e999}},
    ],
)
def test_an_answer_that_is_not_understood_is_the_callers_matter(result: dict[str, Any]) -> None:
    async def work(listener: Listener) -> None:
        dialler, acceptor = await listener.pair()
        acceptor._called = lambda call: acceptor.send(  # type: ignore[method-assign]
            link.encode_json(MessageType.RESULT, {"id": call["id"], **result})
        )
        with pytest.raises(LinkRejected):
            await dialler.call(calls.Topology())
        assert not dialler.lost
        dialler.close()

    over_a_listener(work, FEATURES)


def test_calls_that_wait_for_an_answer_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isthmus_plugins.replication.link.connection.ANSWERED_AT_ONCE_MAX", 3)

    async def work(listener: Listener) -> None:
        dialler, acceptor = await listener.pair()

        async def never(connection: LinkConnection, question: calls.Topology) -> calls.TopologyAnswer:
            await asyncio.sleep(60)
            return calls.TopologyAnswer()

        acceptor.handlers = {calls.Topology.METHOD: calls.Topology.by(never)}
        for _ in range(4):
            dialler.begin_call(calls.Topology())
        assert await dialler.lost_within(5)
        assert "3 others are not answered" in acceptor.lost_reason

    over_a_listener(work, FEATURES)


def test_a_link_whose_peer_says_something_odd_is_dialled_again() -> None:
    async def work(two: Two) -> None:
        await two.create()
        await two.connected()
        for proxy in (two.a, two.b):
            for _ in range(2):
                (before,) = proxy.plugin.parts.peers.connections("a-to-b")
                before.send(raw(16, DEEP * 10))
                assert await before.lost_within(5)
                await two.connected()
        assert not two.a.context.supervision.failing
        assert not two.b.context.supervision.failing

    on_two(work)


def test_a_peer_that_comes_again_and_again_has_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    """One that answers nothing, asks what nobody understands, and goes."""

    async def work(two: Two) -> None:
        await two.create()
        await two.connected()
        for kind in (ResourceType.TOPIC, ResourceType.CONSUMER_GROUP):
            asked = links.Attach(
                local="l-", remote="r-", role="leader", type=kind, disable_transaction_verification=True
            )
            await two.a.links.attach("a-to-b", asked)
        two.clusters["A"].add_topic("l-t")
        two.clusters["A"].add_topic("__consumer_offsets")
        await two.until("followed", lambda: two.b.context.control.state.follower_topics)
        two.b.plugin.parts.peers._answers = {}
        caplog.set_level(logging.INFO)
        caplog.clear()
        for _ in range(6):
            (odd,) = two.b.plugin.parts.peers.connections("a-to-b")
            for method in ("log_ends", "tell_anchors", "limits"):
                odd.send(raw(16, json.dumps({"id": 1, "method": method, "params": {"own": "x", "topic": 1}}).encode()))
            await asyncio.sleep(0.5)
            odd.send(raw(16, DEEP))
            assert await odd.lost_within(5)
            await two.until("again", lambda: two.b.plugin.parts.peers.connections("a-to-b"))

    on_two(work)
    lines = Counter(each.message for each in caplog.records)
    expected = ["control anchor not understood", "control anchors not told", "link calls not understood"]
    assert set(lines) >= {*expected, "link connections rejected", "source losses not told"}
    assert max(lines.values()) <= 2, lines


def test_addresses_that_are_none_are_not_dialled() -> None:
    async def work(two: Two) -> None:
        odd = ["", "nonsense", ":1", "127.0.0.1:99999", "127.0.0.1:-1", "[::1:1", f"{'a' * 300}:1", "x\n:1", "ä:1"]
        told: Callable[..., Awaitable[calls.TopologyAnswer]] = two.b.plugin.parts.peers._topology

        async def topology(connection: LinkConnection, question: calls.Topology) -> calls.TopologyAnswer:
            proxies = [calls.Proxy(f"odd-{number}", address, "all") for number, address in enumerate(odd)]
            return calls.TopologyAnswer((*(await told(connection, question)).proxies, *proxies))

        handlers = dict(two.b.plugin.parts.peers._answers or {})
        handlers[calls.Topology.METHOD] = calls.Topology.by(topology)
        two.b.plugin.parts.peers._answers = handlers
        await two.create()
        await two.connected()
        await asyncio.sleep(3)
        dialled = two.a.plugin.parts.peers._states["a-to-b"].dialling
        assert not dialled.intersection(odd)
        assert not two.a.context.supervision.failing

    on_two(work)


def test_a_stranger_has_little_kept_before_the_proof() -> None:
    """Whatever comes before it is a frame of at most 16 KiB, and only one of it is held."""

    async def work(listener: Listener) -> None:
        announced = struct.pack(">IB", link.HANDSHAKE_BYTES_MAX, 1)
        _, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        for _ in range(10):
            writer.write((announced if _ == 0 else b"") + os.urandom(1_000))
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        (held,) = listener.accepted
        assert held._splitter._held <= link.HANDSHAKE_BYTES_MAX
        assert not held.lost
        writer.write(bytes(link.HANDSHAKE_BYTES_MAX))
        assert await held.lost_within(5)
        writer.close()

    over_a_listener(work, FEATURES)
