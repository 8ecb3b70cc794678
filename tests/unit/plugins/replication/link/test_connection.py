"""One connection between two proxies, over loopback sockets: handshake, calls, limits, loss."""

from __future__ import annotations

import asyncio
import json
import struct
from dataclasses import dataclass
from typing import Any

import pytest
from support.link_ends import Listener, over_a_listener, strangers_answer

from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused
from isthmus_plugins.replication.link import connection as module
from isthmus_plugins.replication.link.call_codec import Question, by_methods
from isthmus_plugins.replication.link.connection import (
    INVALID_ANSWER,
    UNKNOWN_METHOD,
    LinkConnection,
    LinkLost,
    LinkRejected,
    Receiver,
)
from isthmus_plugins.replication.link.features import FEATURES, PIECES, Protection
from isthmus_protocol import link, link_pieces
from isthmus_protocol.link import MessageType


def test_both_ends_know_each_other_and_share_a_secret() -> None:
    async def work(listener: Listener) -> None:
        dialler, acceptor = await listener.pair()
        assert (dialler.peer["proxy"], acceptor.peer["proxy"]) == ("b", "a")
        assert (dialler.purpose, acceptor.purpose) == ("link", "link")
        assert min(dialler.round_trip_s, acceptor.round_trip_s) > 0
        assert dialler.agreed_secret("x") == acceptor.agreed_secret("x") != dialler.agreed_secret("y")
        dialler.close()

    over_a_listener(work)


@pytest.mark.parametrize("guess", [b"", b"another"])
def test_who_does_not_hold_the_secret_is_rejected(guess: bytes) -> None:
    async def work(listener: Listener) -> None:
        with pytest.raises(LinkRejected) as raised:
            await listener.dial(secret=guess)
        assert raised.value.code == "AUTHENTICATION_ERROR"
        assert listener.ready.empty()

    over_a_listener(work)


def test_a_rejection_comes_with_its_reason() -> None:
    async def work(listener: Listener) -> None:
        with pytest.raises(LinkRejected, match="no such link"):
            await listener.dial(link_id="unknown")

    over_a_listener(work)


@pytest.mark.parametrize("versions", [(7, 9), (-3, 0)])
def test_peers_of_other_versions_are_told_so(versions: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(listener: Listener) -> None:
        encoded = link.encode_json

        def older(kind: MessageType, body: dict[str, Any]) -> bytes:
            return encoded(kind, {**body, "versions": versions} if kind is MessageType.HELLO else body)

        monkeypatch.setattr(link, "encode_json", older)
        with pytest.raises(LinkRejected) as raised:
            await listener.dial()
        assert raised.value.code == "UNSUPPORTED_VERSION"
        assert "upgrade" in raised.value.message

    over_a_listener(work)


def test_the_dialler_may_disapprove_before_it_proves_anything() -> None:
    async def work(listener: Listener) -> None:
        def approve(peer: dict[str, Any], protection: Protection) -> None:
            raise LinkRejected("NO", f"not {peer['proxy']}")

        with pytest.raises(LinkRejected, match="not b"):
            await listener.dial(approve=approve)
        await asyncio.sleep(0.05)
        assert listener.ready.empty()

    over_a_listener(work)


def frame(kind: int, body: bytes) -> bytes:
    return struct.pack(">IB", len(body) + 1, kind) + body


HELLO = {"versions": [1, 1], "nonce": "00" * 32, "key": "11" * 32, "purpose": "link", "link_id": "1"}


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100),  # a TLS client
        struct.pack(">IB", 0, 1),
        struct.pack(">IB", 2**32 - 1, 1),
        struct.pack(">IB", 17 * 1024, 1),  # before the handshake is over, frames are small
        frame(99, b"{}"),
        frame(1, b"{}"),
        frame(1, b"[]"),
        frame(1, b"\xff"),
        frame(1, json.dumps({**HELLO, "versions": "1"}).encode()),
        frame(1, json.dumps({**HELLO, "nonce": "zz"}).encode()),
        frame(1, json.dumps({**HELLO, "nonce": 5}).encode()),
        frame(1, json.dumps({**HELLO, "key": "11"}).encode()),
        frame(3, b'{"proof": ""}'),  # out of turn
        frame(16, b'{"id": 1, "method": "x"}'),
        frame(18, bytes(40)),
    ],
)
def test_garbage_ends_its_own_connection(data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async def work(listener: Listener) -> None:
        assert await strangers_answer(listener, data) == b""
        assert "refused what a link peer sent" in caplog.text
        dialler, _ = await listener.pair()
        assert not dialler.lost
        dialler.close()

    over_a_listener(work)


@pytest.mark.parametrize("proof", ["", "00", "ä", "ff" * 32])
def test_a_wrong_proof(proof: str) -> None:
    async def work(listener: Listener) -> None:
        said = frame(1, json.dumps(HELLO).encode()) + frame(3, json.dumps({"proof": proof}).encode())
        assert b"AUTHENTICATION_ERROR" in await strangers_answer(listener, said)

    over_a_listener(work)


def test_a_handshake_has_a_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HANDSHAKE_TIMEOUT_S", 0.1)

    async def work(listener: Listener) -> None:
        assert await strangers_answer(listener, b"\0") == b""

    over_a_listener(work)


def test_dialling_what_is_no_link_listener() -> None:
    async def work(listener: Listener) -> None:
        async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            writer.close()

        server = await asyncio.start_server(greet, "127.0.0.1", 0)
        listener.port = server.sockets[0].getsockname()[1]
        with pytest.raises(LinkLost, match="no link listener"):
            await listener.dial()
        server.close()

    over_a_listener(work)


@dataclass(frozen=True, slots=True)
class Doubled:
    number: int


@dataclass(frozen=True, slots=True)
class Double(Question[Doubled]):
    METHOD = "double"

    number: int


@dataclass(frozen=True, slots=True)
class InOrder(Question[Doubled]):
    METHOD = "double"
    IN_ORDER = True

    number: int


@dataclass(frozen=True, slots=True)
class Other(Question[Doubled]):
    METHOD = "other"


def test_calls_in_both_directions_at_once() -> None:
    async def work(listener: Listener) -> None:
        dialler, acceptor = await listener.pair()

        async def double(connection: LinkConnection, question: Double) -> Doubled:
            await asyncio.sleep(0.01 if question.number % 2 else 0)
            return Doubled(2 * question.number)

        for end in (dialler, acceptor):
            end.handlers = by_methods([Double.by(double)])
        answers = await asyncio.gather(
            *(end.call(Double(number)) for number in range(20) for end in (dialler, acceptor))
        )
        assert [answer.number for answer in answers] == [2 * number for number in range(20) for _ in range(2)]
        dialler.close()

    over_a_listener(work)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (LinkRejected("NOT_LEADER", "no"), "NOT_LEADER"),
        (BrokerUnavailable("no"), "BROKER_UNAVAILABLE"),
        (KafkaRefused(29, "TOPIC_AUTHORIZATION_FAILED", "no"), "TOPIC_AUTHORIZATION_FAILED"),
        (KeyError("topic"), "INVALID_REQUEST"),
        (RuntimeError("bug"), "INTERNAL_ERROR"),
    ],
)
def test_a_call_that_fails(error: Exception, code: str) -> None:
    async def work(listener: Listener) -> None:
        dialler, acceptor = await listener.pair()

        async def fail(connection: LinkConnection, question: Double) -> Doubled:
            raise error

        acceptor.handlers = by_methods([Double.by(fail)])
        with pytest.raises(LinkRejected) as raised:
            await dialler.call(Double(1))
        assert raised.value.code == code
        with pytest.raises(LinkRejected, match="no such call") as raised:
            await dialler.call(Other())
        assert raised.value.code == UNKNOWN_METHOD
        assert not dialler.lost
        dialler.close()

    over_a_listener(work)


@dataclass(frozen=True, slots=True)
class DoubledText:
    number: str


@dataclass(frozen=True, slots=True)
class DoubleText(Question[DoubledText]):
    """What another version takes the same call for."""

    METHOD = "double"

    number: int | str


def test_what_is_not_understood_is_an_answer_and_no_end() -> None:
    async def work(listener: Listener) -> None:
        dialler, acceptor = await listener.pair()

        async def double(connection: LinkConnection, question: Double) -> Doubled:
            return Doubled(2 * question.number)

        acceptor.handlers = by_methods([Double.by(double)])
        with pytest.raises(LinkRejected, match=r"double\.number is not a whole number") as raised:
            await dialler.call(DoubleText("one"))
        assert raised.value.code == "INVALID_REQUEST"
        with pytest.raises(LinkRejected, match="the answer to double: number is not text") as raised:
            await dialler.call(DoubleText(1))
        assert raised.value.code == INVALID_ANSWER
        assert (await dialler.call(Double(1))).number == 2
        dialler.close()

    over_a_listener(work)


def test_a_call_that_others_count_on_and_that_is_not_understood_ends_the_connection() -> None:
    async def work(listener: Listener) -> None:
        dialler, acceptor = await listener.pair()

        async def decide(connection: LinkConnection, question: InOrder) -> Doubled:
            return Doubled(question.number)

        acceptor.handlers = by_methods([InOrder.by(decide)])
        with pytest.raises(LinkLost):
            await dialler.call(DoubleText("one"), 5)

    over_a_listener(work)


def test_calls_are_announced_in_the_order_of_frames_and_before_they_are_answered() -> None:
    async def work(listener: Listener) -> None:
        dialler, acceptor = await listener.pair()
        came: list[tuple[str, Question[Any]]] = []

        class Told(Receiver):
            def on_call(self, connection: LinkConnection, question: Question[Any]) -> None:
                came.append(("announced", question))

        async def double(connection: LinkConnection, question: Double) -> Doubled:
            came.append(("asked", question))
            return Doubled(2 * question.number)

        acceptor.receiver = Told()
        acceptor.handlers = by_methods([Double.by(double)])
        dialler.gather()
        answers = [dialler.begin_call(Double(number)) for number in range(3)]
        dialler.write()
        assert [(await answer(5)).number for answer in answers] == [0, 2, 4]
        assert came == [(what, Double(number)) for what in ("announced", "asked") for number in range(3)]
        dialler.close()

    over_a_listener(work)


def test_calls_fail_when_the_connection_is_lost() -> None:
    async def work(listener: Listener) -> None:
        dialler, acceptor = await listener.pair()
        started = asyncio.Event()

        async def hang(connection: LinkConnection, question: Double) -> Doubled:
            started.set()
            await asyncio.sleep(60)
            return Doubled(0)

        acceptor.handlers = by_methods([Double.by(hang)])
        lost: list[str] = []

        class Told(Receiver):
            def on_lost(self, connection: LinkConnection) -> None:
                lost.append(connection.lost_reason)

        dialler.receiver = Told()
        calling = asyncio.get_running_loop().create_task(dialler.call(Double(1)), name="call")
        await started.wait()
        with pytest.raises(TimeoutError):
            await dialler.call(Double(1), timeout_s=0.05)
        await acceptor.stopped()
        with pytest.raises(LinkLost):
            await calling
        with pytest.raises(LinkLost):
            await dialler.call(Double(1))
        assert await dialler.lost_within(5)
        assert lost == ["the peer closed the connection"]

    over_a_listener(work)


def test_a_silent_peer_is_taken_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEARTBEAT_INTERVAL_S", 0.05)
    monkeypatch.setattr(module, "SILENCE_MAX_S", 0.4)

    async def work(listener: Listener) -> None:
        dialler, acceptor = await listener.pair()
        assert not await dialler.lost_within(1.0)  # heartbeats keep it
        assert acceptor._timer is not None
        acceptor._timer.cancel()  # it says nothing any more
        assert await dialler.lost_within(2.0)
        assert isinstance(dialler.lost_error, module.PeerSilent)

    over_a_listener(work)


def test_records_that_nobody_asked_for_end_the_connection() -> None:
    async def work(listener: Listener) -> None:
        dialler, acceptor = await listener.pair()
        dialler.send(link.encode_append_head(1, 7, 3, 10, 0, 3), b"abc")
        assert await acceptor.lost_within(5)
        assert "no open stream" in acceptor.lost_reason

    over_a_listener(work)


def test_backpressure_shows_and_ends() -> None:
    async def work(listener: Listener) -> None:
        dialler, acceptor = await listener.pair()
        sizes: list[int] = []
        writable = asyncio.Event()

        class Taking(Receiver):
            def on_append(self, connection: LinkConnection, append: link.Append) -> None:
                sizes.append(len(append.records))

        class Sending(Receiver):
            def on_writable(self, connection: LinkConnection) -> None:
                writable.set()

        acceptor.receiver, dialler.receiver = Taking(), Sending()
        acceptor._transport.pause_reading()
        sent = 0
        while dialler.writable:
            dialler.send(link.encode_append_head(1, 0, 0, 0, 0, 1_000_000), bytes(1_000_000))
            sent += 1
            assert sent < 100
            await asyncio.sleep(0)
        acceptor._transport.resume_reading()
        await writable.wait()
        dialler.close()
        assert await acceptor.lost_within(5)
        assert sizes == [1_000_000] * sent

    over_a_listener(work)


def test_what_is_queued_for_a_stuck_peer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FLUSH_TIMEOUT_S", 0.1)

    async def work(listener: Listener) -> None:
        dialler, acceptor = await listener.pair()
        acceptor._transport.pause_reading()
        for _ in range(40):
            dialler.send(link.encode_append_head(1, 0, 0, 0, 0, 1_000_000), bytes(1_000_000))
        dialler.close()
        await asyncio.sleep(0.3)
        assert dialler._transport.get_write_buffer_size() == 0

    over_a_listener(work)


class Came(Receiver):
    """What came over a connection, in order: streams of records, and methods of calls."""

    def __init__(self, last: int | str) -> None:
        self.last = last
        self.order: list[int | str] = []
        self.all = asyncio.Event()

    def on_append(self, connection: LinkConnection, append: link.Append) -> None:
        self._came(append.stream)

    def on_call(self, connection: LinkConnection, question: Question[Any]) -> None:
        self._came(question.METHOD)

    def _came(self, what: int | str) -> None:
        self.order.append(what)
        if what == self.last:
            self.all.set()


LARGE_BYTES = 60_000_000


async def send_small_behind_large(listener: Listener, last: int | str) -> list[int | str]:
    """Records of stream 1, large ones, over a line that takes nothing for now; then a call, and a few of stream 2."""
    dialler, acceptor = await listener.pair()

    async def double(connection: LinkConnection, question: Double) -> Doubled:
        return Doubled(2 * question.number)

    came = acceptor.receiver = Came(last)
    acceptor.handlers = by_methods([Double.by(double)])
    acceptor._transport.pause_reading()
    dialler.send(link.encode_append_head(1, 0, 0, 0, 0, LARGE_BYTES), bytes(LARGE_BYTES))
    await asyncio.sleep(0.05)
    assert not dialler.writable
    answer = dialler.begin_call(Double(1))
    dialler.send(link.encode_append_head(2, 0, 0, 0, 0, 100), bytes(100))
    acceptor._transport.resume_reading()
    await came.all.wait()
    assert (await answer(5)).number == 2
    dialler.close()
    return came.order


def test_a_small_batch_does_not_wait_for_a_large_one() -> None:
    async def work(listener: Listener) -> None:
        assert await send_small_behind_large(listener, last=1) == ["double", 2, 1]

    over_a_listener(work, FEATURES)


def test_a_peer_of_a_version_before_pieces_gets_whole_frames_in_order() -> None:
    async def work(listener: Listener) -> None:
        assert await send_small_behind_large(listener, last=2) == [1, "double", 2]

    over_a_listener(work, [each for each in FEATURES if each != PIECES])


def test_little_is_written_ahead_of_a_line_that_takes_nothing() -> None:
    async def work(listener: Listener) -> None:
        dialler, acceptor = await listener.pair()
        acceptor._transport.pause_reading()
        for stream in range(1, 40):
            dialler.send(link.encode_append_head(stream, 0, 0, 0, 0, 2_000_000), bytes(2_000_000))
        await asyncio.sleep(0.05)
        most = 2 * link_pieces.PIECE_BYTES + 100
        assert dialler._transport.get_write_buffer_size() <= most, "what comes next waits for that much"
        dialler.close()

    over_a_listener(work, FEATURES)


def test_pieces_that_lie_end_the_connection() -> None:
    async def work(listener: Listener) -> None:
        dialler, acceptor = await listener.pair()
        dialler.send(*link_pieces.encode_piece(1, 100_000, [b"x"]))
        dialler.send(*link_pieces.encode_piece(1, 200_000, [b"x"]))
        assert await acceptor.lost_within(5)
        assert "a PIECE of 1 bytes, of a frame of 200000, where 1 of 100000 have come" in acceptor.lost_reason

    over_a_listener(work)


def test_a_stream_that_ends_frees_what_waits_of_it() -> None:
    async def work(listener: Listener) -> None:
        dialler, acceptor = await listener.pair()
        came = acceptor.receiver = Came(last=2)
        acceptor._transport.pause_reading()
        for stream in (1, 2):
            dialler.send(link.encode_append_head(stream, 0, 0, 0, 0, LARGE_BYTES), bytes(LARGE_BYTES))
        await asyncio.sleep(0.05)
        dialler.drop_stream(1)
        acceptor._transport.resume_reading()
        await came.all.wait()
        assert came.order == [2]
        assert acceptor._reassembly.announced_bytes == 0
        dialler.close()

    over_a_listener(work, FEATURES)
