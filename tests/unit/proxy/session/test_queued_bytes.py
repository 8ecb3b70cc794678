"""What the process keeps of requests that are not whole is bounded, in bytes and in time."""

from __future__ import annotations

import asyncio
import struct

from support.sessions import (
    answer,
    fronted,
    hook,
    hooked,
    id_of,
    produce,
    request,
    run,
    settled,
    stalled,
    until,
)

from isthmus.session.downstream import PRODUCE_HEAD_BYTES_MAX
from isthmus.session.listener import Limits
from isthmus.session.queued_bytes import UNCOUNTED_BYTES, QueuedBytes
from isthmus_plugins.api import Answer, Hold, Request, Verdict
from isthmus_protocol.wire import write_uvarint

LARGE = 100_000


def test_as_long_as_anything_is_left_the_first_come_in_and_the_others_in_their_order() -> None:
    queued, came = QueuedBytes(100), []
    assert queued.ask("a", 60, lambda: came.append("a"))
    assert queued.ask("b", 300, lambda: came.append("b"))
    for each in "cde":
        assert not queued.ask(each, 50, lambda each=each: came.append(each))  # type: ignore[misc]
    assert queued.forget("d")
    assert not queued.forget("a")
    queued.give_back(60)
    assert came == []
    queued.give_back(300)
    assert came == ["c", "e"]
    assert (queued.left, queued.waiting) == (0, 0)
    queued.give_back(100)
    queued.take(100)
    assert not queued.ask("f", 1, lambda: None)


def test_frames_wait_unread_while_others_are_kept_and_come_in_when_these_are_whole() -> None:
    async def main() -> None:
        async with fronted(hook(lambda request: None), limits=Limits(queued_bytes_max=LARGE)) as front:
            first, first_upstream, _ = await front.connect()
            second, second_upstream, _ = await front.connect()
            frame = hooked(1, b"x" * LARGE)
            first.send(frame[:UNCOUNTED_BYTES])
            await until(lambda: front.gateway.queued_bytes.left <= 0)
            second.send(frame * 20)
            await until(lambda: front.gateway.queued_bytes.waiting == 1)
            await stalled(front)
            assert front.gateway.bytes_from_clients < len(frame) * 10, "the second one is not read"
            small, small_upstream, _ = await front.connect()
            small.send(hooked(5))
            assert await small_upstream.take() == hooked(5)
            first.send(frame[UNCOUNTED_BYTES:])
            assert await first_upstream.take() == frame
            for _ in range(20):
                assert await second_upstream.take() == frame
            assert front.gateway.queued_bytes.left == LARGE

    run(main())


def test_what_a_connection_kept_or_waited_for_is_given_back_when_it_ends() -> None:
    async def main() -> None:
        async with fronted(hook(lambda request: None), limits=Limits(queued_bytes_max=LARGE)) as front:
            frame = hooked(1, b"x" * LARGE)
            first, _, _ = await front.connect()
            second, _, session = await front.connect()
            first.send(frame[:UNCOUNTED_BYTES])
            await until(lambda: front.gateway.queued_bytes.left <= 0)
            second.send(frame[:UNCOUNTED_BYTES])
            await until(lambda: front.gateway.queued_bytes.waiting == 1)
            session.close("test")
            assert front.gateway.queued_bytes.waiting == 0
            first.reset()
            await until(lambda: front.gateway.queued_bytes.left == LARGE)

    run(main())


def test_a_request_that_is_held_counts_until_it_is_decided() -> None:
    async def main() -> None:
        decided = asyncio.Event()

        def on_request(request: Request) -> Verdict:
            async def verdict() -> Verdict:
                await decided.wait()
                return Answer(answer(1), "test")

            return Hold(verdict())

        async with fronted(hook(on_request)) as front:
            most = front.gateway.queued_bytes.left
            client, _, _ = await front.connect()
            client.send(frame := hooked(1, b"x" * LARGE))
            await until(lambda: any(session.downstream.busy for session in front.gateway.sessions))
            assert front.gateway.queued_bytes.left == most - len(frame)
            decided.set()
            assert await client.take() == answer(1)
            assert front.gateway.queued_bytes.left == most

    run(main())


def test_a_frame_that_is_not_whole_in_time_ends_its_connection() -> None:
    async def main() -> None:
        async with fronted(hook(lambda request: None), limits=Limits(frame_timeout_s=0.2)) as front:
            client, upstream, session = await front.connect()
            client.send(whole := hooked(1, b"x" * LARGE))
            assert await upstream.take() == whole
            client.send(whole[:UNCOUNTED_BYTES])
            assert await client.closed() == b""
            assert session.close_cause == "unfinished request"
            assert front.gateway.queued_bytes.left == Limits().queued_bytes_max

    run(main())


def test_a_connection_that_sends_nothing_may_be_idle() -> None:
    async def main() -> None:
        async with fronted(hook(lambda request: None), limits=Limits(frame_timeout_s=0.05)) as front:
            client, upstream, _ = await front.connect()
            client.send(hooked(1, b"x" * LARGE))
            await upstream.take()
            await asyncio.sleep(0.2)
            client.send(hooked(2))
            assert id_of(await upstream.take()) == 2

    run(main())


def test_the_acks_of_a_produce_stand_in_its_first_bytes() -> None:
    def with_tag(size: int) -> bytes:
        frame = produce(1, records=b"r" * 300_000)
        behind_client_id = 14 + len("client")
        tags = b"\x01\x63" + write_uvarint(size) + bytes(size)
        body = frame[4:behind_client_id] + tags + frame[behind_client_id + 1 :]
        return struct.pack(">i", len(body)) + body

    async def main() -> None:
        async with fronted() as front:
            client, upstream, _ = await front.connect()
            client.send(few := with_tag(PRODUCE_HEAD_BYTES_MAX - 100))
            assert await upstream.take() == few
            client.send(with_tag(10 * PRODUCE_HEAD_BYTES_MAX)[: PRODUCE_HEAD_BYTES_MAX + 100])
            assert await client.closed() == b""
            assert front.gateway.closed_by_cause["oversized request"] == 1
            await settled(front)
            assert front.gateway.queued_bytes.left == Limits().queued_bytes_max

    run(main())


def test_one_address_has_as_many_connections_as_it_may() -> None:
    async def main() -> None:
        async with fronted(limits=Limits(connections_per_address_max=2)) as front:
            clients = [await front.connect() for _ in range(2)]
            assert await (await front.dial()).closed() == b""
            assert front.gateway.closed_by_cause["connections of one address"] == 1
            assert front.gateway.connections_from == {"127.0.0.1": 2}
            await clients[0][0].close()
            await until(lambda: front.gateway.connections_from["127.0.0.1"] == 1)
            client, upstream, _ = await front.connect()
            client.send(request(1))
            assert await upstream.take() == request(1)

    run(main())


def test_a_frame_that_the_proxy_does_not_read_is_not_late() -> None:
    async def main() -> None:
        async with fronted(hook(lambda request: None), limits=Limits(frame_timeout_s=0.1)) as front:
            client, upstream, session = await front.connect()
            frame = hooked(1, b"x" * LARGE)
            client.send(frame[:UNCOUNTED_BYTES])
            await until(lambda: front.gateway.queued_bytes.left < Limits().queued_bytes_max)
            session.downstream.hold_reading()  # as where the broker, or another cluster, is slow
            await asyncio.sleep(0.4)
            client.send(frame[UNCOUNTED_BYTES:])
            session.downstream.release_reading()
            assert await upstream.take() == frame

            client.send(frame[:UNCOUNTED_BYTES])
            await until(lambda: front.gateway.queued_bytes.left < Limits().queued_bytes_max)
            session.downstream.pause_writing()  # as where the client reads no answers
            await until(lambda: session.close_cause == "unfinished request")

    run(main())


def test_what_was_read_while_it_waited_for_room_leaves_nothing_counted() -> None:
    async def main() -> None:
        async with fronted(hook(lambda request: None), limits=Limits(queued_bytes_max=LARGE)) as front:
            first, _, _ = await front.connect()
            second, upstream, session = await front.connect()
            frame = hooked(1, b"x" * LARGE)
            first.send(frame[:UNCOUNTED_BYTES])
            await until(lambda: front.gateway.queued_bytes.left <= 0)
            second.send(frame[:UNCOUNTED_BYTES])
            await until(lambda: front.gateway.queued_bytes.waiting == 1)
            session.downstream.data_received(frame[UNCOUNTED_BYTES:])  # transports may have read before they pause
            assert await upstream.take() == frame
            assert front.gateway.queued_bytes.waiting == 0
            second.send(hooked(2))
            assert id_of(await upstream.take()) == 2
            first.reset()
            await until(lambda: front.gateway.queued_bytes.left == LARGE)

    run(main())
