"""Connections without TLS: their ends agree on keys, and somebody in between can end them and nothing else."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from support.certificates import Authority
from support.link_ends import Listener, listening, over_a_listener

from isthmus_control.tokens import Token
from isthmus_plugins.replication.link.call_codec import Question, by_methods
from isthmus_plugins.replication.link.connection import LinkConnection, LinkLost, LinkRejected, Receiver
from isthmus_plugins.replication.link.features import ENCRYPTED_FRAMES, FEATURES, PIECES, Protection
from isthmus_plugins.tasks import Supervision, Tasks
from isthmus_protocol import link
from isthmus_protocol.link import MessageType

OLD = [feature for feature in FEATURES if feature != ENCRYPTED_FRAMES]
WORDS = "only the two ends know this"


@dataclass(frozen=True, slots=True)
class Said:
    text: str


@dataclass(frozen=True, slots=True)
class Say(Question[Said]):
    METHOD = "say"

    text: str


async def say(connection: LinkConnection, question: Say) -> Said:
    return Said(question.text)


Altering: TypeAlias = Callable[[bool, MessageType, bytes], bytes]
"""What becomes of a frame: whether the dialler sent it, its type, its body; what goes on in its place."""


class Middle:
    """Somebody between dialler and acceptor, who sees and may alter each frame."""

    def __init__(self, port: int, alter: Altering) -> None:
        self.seen = bytearray()
        self._port = port
        self._alter = alter
        self.tasks = Tasks("middle", Supervision())

    async def between(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._port)
        self.tasks.start("there", self._pass_on(True, reader, back))
        self.tasks.start("back", self._pass_on(False, there, writer))

    async def _pass_on(self, dialler: bool, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                size, kind = link.HEAD.unpack(await reader.readexactly(link.HEAD.size))
                body = await reader.readexactly(size - 1)
                self.seen += body
                writer.write(self._alter(dialler, MessageType(kind), body))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def between(listener: Listener, alter: Altering) -> AsyncIterator[Middle]:
    middle = Middle(listener.port, alter)
    server = await asyncio.start_server(middle.between, "127.0.0.1", 0)
    listener.port = server.sockets[0].getsockname()[1]
    try:
        yield middle
    finally:
        server.close()
        await middle.tasks.close()
        await asyncio.sleep(0)  # transports that were closed just now


def unaltered(dialler: bool, kind: MessageType, body: bytes) -> bytes:
    return link.encode(kind, body)


@pytest.mark.parametrize("token", [None, Token.new()])
@pytest.mark.parametrize("features", [FEATURES, OLD])
def test_what_goes_over_a_connection_can_be_read_where_an_end_is_older(
    features: list[str], token: Token | None
) -> None:
    async def work(listener: Listener) -> None:
        listener.token = token
        async with between(listener, unaltered) as middle:
            dialler, acceptor = await listener.pair(features=features)
            protection = Protection.NONE if features is OLD else Protection.FRAMES
            assert dialler.protection is acceptor.protection is protection
            for one, other in ((dialler, acceptor), (acceptor, dialler)):
                one.handlers = by_methods([Say.by(say)])
                assert (await other.call(Say(WORDS))).text == WORDS
            assert (WORDS.encode() in middle.seen) == (features is OLD)
            dialler.close()

    over_a_listener(work, FEATURES)


def test_large_frames_come_in_pieces_between_others_and_all_are_encrypted() -> None:
    sizes = {1: 20_000_000, 2: 3_000_000, 3: 200_000, 4: 10}

    class Taking(Receiver):
        def __init__(self) -> None:
            self.sizes: list[tuple[int, int]] = []
            self.all = asyncio.Event()

        def on_append(self, connection: LinkConnection, append: link.Append) -> None:
            assert bytes(append.records) == bytes([append.stream]) * len(append.records)
            self.sizes.append((append.stream, len(append.records)))
            if len(self.sizes) == len(sizes):
                self.all.set()

    async def work(listener: Listener) -> None:
        async with between(listener, unaltered) as middle:
            dialler, acceptor = await listener.pair()
            acceptor.receiver = taking = Taking()
            acceptor.handlers = by_methods([Say.by(say)])
            for stream, size in sizes.items():
                dialler.send(link.encode_append_head(stream, 0, 0, 0, 0, size), bytes([stream]) * size)
            assert (await dialler.call(Say(WORDS))).text == WORDS
            await taking.all.wait()
            assert dict(taking.sizes) == sizes
            assert taking.sizes[-1][0] == 1, "the largest one last"
            assert bytes(1000) not in middle.seen
            assert b"\x01" * 1000 not in middle.seen
            dialler.close()

    assert PIECES in FEATURES
    over_a_listener(work, FEATURES)


def without_encryption(body: bytes) -> bytes:
    said = json.loads(body)
    said["features"] = OLD
    return json.dumps(said).encode()


def with_tls(body: bytes) -> bytes:
    return json.dumps({**json.loads(body), "tls": True}).encode()


@pytest.mark.parametrize("token", [None, Token.new()])
@pytest.mark.parametrize("alter", [without_encryption, with_tls])
@pytest.mark.parametrize(
    "which", [(MessageType.HELLO,), (MessageType.CHALLENGE,), (MessageType.HELLO, MessageType.CHALLENGE)]
)
def test_nobody_in_between_has_both_ends_do_without(
    which: tuple[MessageType, ...], alter: Callable[[bytes], bytes], token: Token | None
) -> None:
    def altered(dialler: bool, kind: MessageType, body: bytes) -> bytes:
        return link.encode(kind, alter(body) if kind in which else body)

    async def work(listener: Listener) -> None:
        listener.token = token
        async with between(listener, altered):
            with pytest.raises(LinkRejected) as raised:
                await listener.dial()
            assert raised.value.code == "AUTHENTICATION_ERROR"
            assert listener.ready.empty()

    over_a_listener(work, FEATURES)


def test_a_welcome_of_somebody_in_between_says_nothing() -> None:
    """It is the first frame behind the proofs: it could take away what they cover."""

    def altered(dialler: bool, kind: MessageType, body: bytes) -> bytes:
        if dialler or kind is MessageType.CHALLENGE:
            return link.encode(kind, body)
        return link.encode_json(MessageType.WELCOME, {"features": [], "cluster_id": "C", "key": "00" * 32})

    async def work(listener: Listener) -> None:
        async with between(listener, altered):
            with pytest.raises(LinkLost, match="WELCOME in the clear"):
                await listener.dial()

    over_a_listener(work, FEATURES)


@pytest.mark.parametrize("said", [{}, {"proof": 1}, {"proof": "00" * 32}])
def test_who_holds_a_token_goes_on_with_nobody_who_does_not_prove_to_have_made_it(said: dict[str, Any]) -> None:
    """The WELCOME of a connection with a token is in the clear, and its proof covers both ends' keys."""

    def altered(dialler: bool, kind: MessageType, body: bytes) -> bytes:
        return link.encode_json(kind, said) if kind is MessageType.WELCOME else link.encode(kind, body)

    async def work(listener: Listener) -> None:
        listener.token = Token.new()
        async with between(listener, altered):
            with pytest.raises(LinkRejected, match="not of the cluster that made the token"):
                await listener.dial()

    over_a_listener(work, FEATURES)


def test_a_plain_welcome_alters_nothing_of_what_a_peer_has_proved() -> None:
    def altered(dialler: bool, kind: MessageType, body: bytes) -> bytes:
        return link.encode_json(kind, {"cluster_id": "C"}) if kind is MessageType.WELCOME else link.encode(kind, body)

    async def work(listener: Listener) -> None:
        async with between(listener, altered):
            dialler, _ = await listener.pair()
            assert dialler.peer["cluster_id"] == "B"
            dialler.close()

    over_a_listener(work, OLD)


@pytest.mark.parametrize("what", ["altered", "repeated", "left out", "slipped in"])
@pytest.mark.parametrize("to_acceptor", [True, False])
def test_a_connection_ends_where_somebody_in_between_meddles(
    what: str, to_acceptor: bool, caplog: pytest.LogCaptureFixture
) -> None:
    meddles = False

    def altered(dialler: bool, kind: MessageType, body: bytes) -> bytes:
        frame = link.encode(kind, body)
        if not meddles or dialler is not to_acceptor:
            return frame
        if what == "altered":
            return link.encode(kind, body[:-1] + bytes([body[-1] ^ 1]))
        if what == "slipped in":
            return link.encode_json(MessageType.CALL, {"id": 1, "method": "say", "params": {"text": "x"}}) + frame
        return frame + frame if what == "repeated" else b""

    async def work(listener: Listener) -> None:
        nonlocal meddles
        async with between(listener, altered):
            ends = dialler, acceptor = await listener.pair()
            for end in ends:
                end.handlers = by_methods([Say.by(say)])
            sender, receiver = ends if to_acceptor else (acceptor, dialler)
            await sender.call(Say("before"))
            meddles = True
            sender.send(link.encode(MessageType.HEARTBEAT, b""))
            await asyncio.sleep(0.05)
            meddles = False
            sender.send(link.encode(MessageType.HEARTBEAT, b""))
            assert await receiver.lost_within(5)
            assert await sender.lost_within(5)
            lines = [each for each in caplog.records if each.message == "refused what a link peer sent"]
            assert len(lines) == 1

    over_a_listener(work, FEATURES)


def test_over_tls_nothing_is_encrypted_twice(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.issue("b")
    server_tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_tls.load_cert_chain(certificate, key)
    client_tls = ssl.create_default_context(cafile=str(authority.file))

    async def run() -> None:
        async with listening(FEATURES) as listener:
            server = await asyncio.get_running_loop().create_server(listener.made, "127.0.0.1", 0, ssl=server_tls)
            listener.port = server.sockets[0].getsockname()[1]
            dialler, acceptor = await listener.pair(tls=client_tls)
            assert dialler.protection is acceptor.protection is Protection.TLS
            acceptor.handlers = by_methods([Say.by(say)])
            assert (await dialler.call(Say(WORDS))).text == WORDS
            await dialler.stopped()
            server.close()

    asyncio.run(run())


def test_an_end_that_approves_knows_what_protects_the_connection() -> None:
    seen: list[Protection] = []

    def approve(peer: dict[str, Any], protection: Protection) -> None:
        seen.append(protection)

    async def work(listener: Listener) -> None:
        for features in (FEATURES, OLD):
            dialler, _ = await listener.pair(approve=approve, features=features)
            dialler.close()
        assert seen == [Protection.FRAMES, Protection.NONE]

    over_a_listener(work, FEATURES)
