"""Answers that wait at gates: on real sockets, a broker that the test plays on one side, a raw client on the other."""

from __future__ import annotations

import asyncio
import gc
import os
import random
from itertools import permutations
from typing import Any

import pytest
from support.seeds import seeds
from support.sessions import (
    HOOKED,
    Front,
    Wire,
    answer,
    fetch,
    fetched,
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

from isthmus.session.downstream import Downstream
from isthmus.session.gated_answers import GatedAnswers
from isthmus.session.listener import Limits
from isthmus.session.peer import WRITE_HIGH_WATER_BYTES
from isthmus.session.session import Session, SessionState
from isthmus.session.upstream import Upstream
from isthmus_plugins.api import Answer, Gate, Hold, Replace, Request, RequestHook, Verdict
from isthmus_protocol import schema
from isthmus_protocol.bodies import build
from isthmus_protocol.messages import build_request, decode_response, encode_request, encode_response
from isthmus_protocol.schema import ApiKey

METADATA_VERSION = 12
OTHER = ApiKey.DESCRIBE_GROUPS


def other(correlation_id: int, body: bytes = b"") -> bytes:
    return request(correlation_id, (OTHER, 0), body)


class Gates:
    """A hook that gates the answers of an API."""

    def __init__(self, api_key: int = HOOKED) -> None:
        self.api_key = api_key
        self.made: dict[int, Gate] = {}
        """By correlation id."""
        self.answers: dict[int, bytes] = {}

    def hook(self) -> RequestHook:
        return hook(lambda request: Replace(request.frame, self.answered), api_key=self.api_key)

    def answered(self, frame: bytes) -> bytes | Gate:
        number = id_of(frame, False)
        self.answers[number] = frame
        return self.gate(number)

    def gate(self, number: int) -> Gate:
        return self.made.setdefault(number, Gate())

    def open(self, *numbers: int) -> None:
        for number in numbers:
            self.gate(number).open(answer(number, b"opened"))

    async def made_for(self, *numbers: int) -> None:
        await until(lambda: set(numbers) <= self.answers.keys())


def opened(number: int) -> bytes:
    return answer(number, b"opened")


async def forwarded(upstream: Wire, count: int) -> None:
    for _ in range(count):
        await upstream.take()


async def nothing_comes(front: Front, client: Wire) -> None:
    await settled(front)
    assert not client.reader._buffer  # type: ignore[attr-defined]


# ---- order ----


@pytest.mark.parametrize("order", list(permutations((1, 3, 4))))
def test_answers_keep_their_order_whatever_the_order_in_which_gates_open(order: tuple[int, ...]) -> None:
    async def main() -> None:
        gates = Gates()
        async with fronted(gates.hook()) as front:
            client, upstream, session = await front.connect()
            client.send(request(0), hooked(1), request(2), hooked(3), hooked(4), request(5))
            await forwarded(upstream, 6)
            upstream.send(*(answer(number, b"broker") for number in range(6)))
            assert await client.take() == answer(0, b"broker"), "what comes before a gate goes out"
            await gates.made_for(1, 3, 4)
            assert not session.pending
            assert front.gateway.gates.waiting == 3
            for number in order:
                if session.downstream.gated == 5:
                    await nothing_comes(front, client)
                gates.open(number)
            expected = [opened(1), answer(2, b"broker"), opened(3), opened(4), answer(5, b"broker")]
            assert [await client.take() for _ in expected] == expected
            assert front.gateway.gates.waiting == 0
            assert front.gateway.gates.time.total == 3
            client.send(request(6))
            await upstream.take()
            upstream.send(answer(6))
            assert await client.take() == answer(6)

    run(main())


def test_own_answers_and_streamed_ones_wait_behind_a_gate() -> None:
    async def main() -> None:
        gates = Gates()
        own = hook(lambda request: Answer(answer(request.correlation_id, b"own"), "test"), api_key=OTHER)
        async with fronted(gates.hook(), own) as front:
            client, upstream, session = await front.connect()
            client.send(hooked(1), other(2), fetch(3), other(4), hooked(5))
            await forwarded(upstream, 3)
            frame = fetched(3, os.urandom(100_000))
            upstream.send(answer(1), frame[:60_000])
            await gates.made_for(1)
            await until(lambda: front.gateway.bytes_from_brokers >= 60_000)
            await nothing_comes(front, client)
            gates.open(1)
            assert [await client.take() for _ in range(2)] == [opened(1), answer(2, b"own")]
            upstream.send(frame[60_000:], answer(5))
            came = await client.take()
            assert len(came) == len(frame)
            assert came[:100_000] == frame[:100_000]
            assert b"broker.internal" not in came
            assert await client.take() == answer(4, b"own")
            gates.open(5)
            assert await client.take() == opened(5)
            assert not session.downstream.busy

    run(main())


def test_a_streamed_answer_that_ends_behind_a_gate() -> None:
    async def main() -> None:
        gates = Gates()
        async with fronted(gates.hook()) as front:
            client, upstream, _ = await front.connect()
            client.send(hooked(1), fetch(2), request(3))
            await forwarded(upstream, 3)
            frame = fetched(2, os.urandom(100_000))
            upstream.send(answer(1), frame, answer(3))
            await until(lambda: front.gateway.bytes_from_brokers >= 100_000)
            await nothing_comes(front, client)
            gates.open(1)
            assert await client.take() == opened(1)
            assert b"broker.internal" not in await client.take()
            assert await client.take() == answer(3)

    run(main())


def test_a_gate_may_be_open_before_the_session_takes_it() -> None:
    async def main() -> None:
        gates = Gates()
        async with fronted(gates.hook()) as front:
            client, upstream, session = await front.connect()
            gates.open(1, 3)
            client.send(hooked(1), hooked(2), hooked(3))
            await forwarded(upstream, 3)
            upstream.send(answer(1), answer(2), answer(3))
            assert await client.take() == opened(1)
            await nothing_comes(front, client)
            gates.open(2)
            gates.made[2].open(answer(2, b"again"))
            assert [await client.take() for _ in range(2)] == [opened(2), opened(3)]
            assert not session.downstream.busy

    run(main())


def test_a_hook_may_open_the_gate_before_it() -> None:
    """As one does whose confirmations are cumulative: while the session looks at the answers in one read."""

    async def main() -> None:
        gates = Gates()

        def answered(frame: bytes) -> bytes | Gate:
            number = id_of(frame, False)
            if number > 1:
                gates.open(number - 2)
            return gates.answered(frame)

        async with fronted(hook(lambda request: Replace(request.frame, answered))) as front:
            client, upstream, _ = await front.connect()
            client.send(*(frame for number in range(0, 20, 2) for frame in (hooked(number), request(number + 1))))
            await forwarded(upstream, 20)
            upstream.send(*(answer(number) for number in range(20)))
            expected = [answer(number) if number % 2 else opened(number) for number in range(18)]
            assert [await client.take() for _ in range(18)] == expected
            gates.open(18)
            assert [await client.take() for _ in range(2)] == [opened(18), answer(19)]

    run(main())


class _Recorded:
    """A transport that tells what was written to it."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.written = b""

    def write(self, data: bytes) -> None:
        self.written += data
        self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


@pytest.mark.parametrize("seed", seeds(60))
def test_any_interleaving_sends_the_longest_prefix_that_may_go_out(seed: int) -> None:
    rng = random.Random(seed)
    gates, own_gates = Gates(), Gates(OTHER)

    def own(request: Request) -> Verdict:
        number = request.correlation_id
        return Answer(own_gates.gate(number) if number % 2 else answer(number, b"own"), "test")

    async def main() -> None:
        async with fronted(gates.hook(), hook(own, api_key=OTHER)) as front:
            _, _, session = await front.connect()
            downstream = session.downstream
            transport = _Recorded(downstream._transport)
            downstream._transport = transport  # type: ignore[assignment]
            downstream.send = transport.write
            asked: list[str] = []
            """What each request is, by its number."""
            arrived: dict[int, int] = {}
            """How much of each answer the broker has given."""
            broker: list[tuple[int, bytes]] = []
            """What the broker will say."""
            shut: set[int] = set()
            whole = {}

            def may_be_out() -> bytes:
                out = b""
                for number, kind in enumerate(asked):
                    if kind == "plain":
                        here = arrived.get(number, 0)
                        out += whole[number][:here] if here >= 8 else b""
                        if here < len(whole[number]):
                            break
                    elif kind == "own":
                        out += answer(number, b"own")
                    elif number in shut or (kind == "gated" and arrived.get(number, 0) < len(whole[number])):
                        break
                    else:
                        out += opened(number)
                return out

            for step in range(250):
                choice = rng.random()
                number = len(asked)
                if choice < 0.3 and step < 200:
                    kind = rng.choice(("plain", "gated", "gated", "own"))
                    if kind == "own" and number % 2:
                        kind = "own gated"
                    asked.append(kind)
                    if "gated" in kind:
                        shut.add(number)
                    api = (OTHER, 0) if "own" in kind else (HOOKED, 0) if "gated" in kind else None
                    downstream.data_received(request(number, *([] if api is None else [api])))
                    if "own" not in kind:
                        whole[number] = answer(number, os.urandom(rng.choice((0, 10, 3_000))))
                        broker.append((number, whole[number]))
                elif choice < 0.65 or step >= 225:
                    left = rng.choice((1, 7, 20, 5_000, 20_000))
                    data = b""
                    while broker and left > 0:
                        number, frame = broker[0]
                        start = arrived.get(number, 0)
                        part = frame[start : start + left]
                        data += part
                        left -= len(part)
                        arrived[number] = start + len(part)
                        if arrived[number] == len(frame):
                            broker.pop(0)
                    if data and session.upstream is not None:
                        session.upstream.data_received(data)
                elif shut:
                    for number in rng.sample(sorted(shut), min(len(shut), rng.choice((1, 1, 3)))):
                        shut.remove(number)
                        (own_gates if "own" in asked[number] else gates).open(number)
                assert transport.written == may_be_out(), (step, asked)
            for number in sorted(shut, key=lambda _: rng.random()):
                shut.remove(number)
                (own_gates if "own" in asked[number] else gates).open(number)
                assert transport.written == may_be_out()
            assert front.gateway.gates.waiting == 0
            assert downstream.gated == 0 or broker

    run(main())


# ---- hooks behind ----


def test_hooks_behind_a_gate_see_the_frame_when_it_opens() -> None:
    async def main() -> None:
        gates = Gates(ApiKey.METADATA)
        seen: list[str] = []

        def second(frame: bytes) -> bytes:
            seen.append("second")
            return frame

        behind = hook(lambda request: Replace(request.frame, second), api_key=ApiKey.METADATA)
        async with fronted(behind, gates.hook()) as front:
            client, upstream, _ = await front.connect()
            client.send(encode_request(build_request(ApiKey.METADATA, METADATA_VERSION, {}), 1, None))
            await upstream.take()
            brokers = {"brokers": [{"node_id": 1, "host": "broker.internal", "port": 9092}]}
            told = encode_response(build(schema.response_type(ApiKey.METADATA, METADATA_VERSION), brokers), 1)
            upstream.send(told)
            await gates.made_for(1)
            assert not seen
            gates.made[1].open(told)
            _, shown = decode_response(ApiKey.METADATA, METADATA_VERSION, await client.take())
            assert [each.host for each in shown.brokers] == ["proxy.example"]  # type: ignore[attr-defined]
            assert seen == ["second"]

    run(main())


@pytest.mark.parametrize("early", [False, True])
def test_two_gates_for_one_answer_wait_for_both(early: bool) -> None:
    async def main() -> None:
        first, second = Gates(), Gates()
        async with fronted(second.hook(), first.hook()) as front:
            client, upstream, _ = await front.connect()
            client.send(hooked(1), request(2))
            await forwarded(upstream, 2)
            if early:
                second.gate(1).open(answer(1, b"second"))
            upstream.send(answer(1), answer(2))
            await first.made_for(1)
            first.open(1)
            await second.made_for(1)
            assert second.answers[1] == opened(1)
            if not early:
                await nothing_comes(front, client)
                second.gate(1).open(answer(1, b"second"))
            assert [await client.take() for _ in range(2)] == [answer(1, b"second"), answer(2)]
            assert front.gateway.gates.waiting == 0

    run(main())


def test_an_answer_in_the_brokers_place_waits_at_the_gate_of_who_replaced_the_request() -> None:
    async def main() -> None:
        gates = Gates()
        own = hook(lambda request: Answer(answer(request.correlation_id, b"own"), "test"))
        async with fronted(gates.hook(), own) as front:
            client, _, session = await front.connect()
            client.send(hooked(1), hooked(2))
            await gates.made_for(1, 2)
            assert gates.answers[1] == answer(1, b"own")
            await nothing_comes(front, client)
            gates.open(2, 1)
            assert [await client.take() for _ in range(2)] == [opened(1), opened(2)]
            assert not session.pending

    run(main())


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("malformed", [False, True])
def test_a_hook_that_fails_behind_a_gate_closes_the_connection(early: bool, malformed: bool) -> None:
    async def main() -> None:
        gates = Gates(ApiKey.METADATA)

        def failing(frame: bytes) -> bytes:
            if malformed:
                return frame  # the rewriting of addresses behind it finds nothing that it knows
            raise ValueError("no")

        behind = hook(lambda request: Replace(request.frame, failing), api_key=ApiKey.METADATA)
        async with fronted(behind, gates.hook()) as front:
            client, upstream, session = await front.connect()
            if early:
                gates.open(1)
            client.send(encode_request(build_request(ApiKey.METADATA, METADATA_VERSION, {}), 1, None), request(2))
            await forwarded(upstream, 2)
            upstream.send(answer(1), answer(2))
            await gates.made_for(1)
            gates.open(1)
            assert await client.closed() == b""
            assert session.close_cause == ("malformed answer" if malformed else "hook failed")
            assert front.gateway.gates.waiting == 0

    run(main())


def test_a_gate_stands_for_one_answer() -> None:
    async def main() -> None:
        gate = Gate()
        async with fronted(hook(lambda request: Replace(request.frame, lambda frame: gate))) as front:
            client, upstream, session = await front.connect()
            client.send(hooked(1), hooked(2))
            await forwarded(upstream, 2)
            upstream.send(answer(1), answer(2))
            assert await client.closed() == b""
            assert session.close_cause == "hook failed"
            assert front.gateway.gates.waiting == 0

    run(main())


# ---- fences ----


def test_a_fence_passes_when_the_broker_has_answered() -> None:
    async def main() -> None:
        gates = Gates(ApiKey.PRODUCE)
        async with fronted(gates.hook()) as front:
            client, upstream, session = await front.connect()
            client.send(produce(1))
            await upstream.take()
            fence = asyncio.ensure_future(front.gateway.fence())  # noqa: TID251
            await settled(front)
            assert not fence.done()
            upstream.send(answer(1))
            await fence
            assert not session.has_unanswered_write()
            await front.gateway.fence()  # one that comes while the answer waits has nothing to wait for
            await nothing_comes(front, client)
            gates.open(1)
            assert len(await client.take()) > 0

    run(main())


# ---- ends ----


def test_draining_waits_for_gates_within_its_time() -> None:
    async def main() -> None:
        gates = Gates()
        async with fronted(gates.hook()) as front:
            client, upstream, session = await front.connect()
            client.send(hooked(1), request(2))
            await forwarded(upstream, 2)
            upstream.send(answer(1), answer(2))
            await gates.made_for(1)
            await until(lambda: not session.pending)
            draining = asyncio.ensure_future(front.gateway.drain(10))  # noqa: TID251
            await asyncio.sleep(0.05)
            assert not draining.done()
            gates.open(1)
            assert await client.closed() == opened(1) + answer(2)
            assert await draining
            assert session.close_cause == "drained"

    run(main())


def test_draining_gives_up_on_a_gate_that_does_not_open() -> None:
    async def main() -> None:
        gates = Gates()
        async with fronted(gates.hook()) as front:
            client, upstream, session = await front.connect()
            client.send(hooked(1), request(2))
            await forwarded(upstream, 2)
            upstream.send(answer(1), answer(2))
            await gates.made_for(1)
            await front.gateway.drain(0.05)
            assert await client.closed() == b"", "neither the answer nor what is behind it"
            assert session.close_cause == "drain timed out"
            assert gates.made[1].dropped

    run(main())


def test_draining_sends_the_rest_of_an_answer_that_streams() -> None:
    async def main() -> None:
        async with fronted() as front:
            client, upstream, _ = await front.connect()
            client.send(fetch(1))
            await upstream.take()
            frame = fetched(1, os.urandom(50_000))
            upstream.send(frame[:20_000])
            await client.reader.readexactly(20_000)
            draining = asyncio.ensure_future(front.gateway.drain(10))  # noqa: TID251
            await asyncio.sleep(0.05)
            upstream.send(frame[20_000:])
            assert len(await client.closed()) == len(frame) - 20_000
            await draining

    run(main())


@pytest.mark.parametrize("writes", [False, True])
def test_gates_of_a_client_that_is_gone_are_dropped(writes: bool) -> None:
    async def main() -> None:
        gates = Gates(ApiKey.PRODUCE)
        async with fronted(gates.hook()) as front:
            client, upstream, session = await front.connect()
            client.send(produce(1), *([produce(2)] if writes else []))
            await forwarded(upstream, 1 + writes)
            upstream.send(answer(1))
            await gates.made_for(1)
            assert front.gateway.gates.waiting == 1
            client.reset()
            if writes:
                await until(lambda: session.state is SessionState.SETTLING)
                upstream.send(answer(2))
                await gates.made_for(2)
                assert gates.made[2].dropped
            assert await upstream.closed() == b""
            assert gates.made[1].dropped
            assert session.close_cause == "client closed"
            assert front.gateway.gates.waiting == 0
            gates.open(1, 2)
            assert front.gateway.write_lost_at == float("-inf")

    run(main())


def test_a_lost_broker_closes_the_client_whose_answers_wait() -> None:
    async def main() -> None:
        gates = Gates(ApiKey.PRODUCE)
        async with fronted(gates.hook()) as front:
            client, upstream, session = await front.connect()
            client.send(produce(1))
            await upstream.take()
            upstream.send(answer(1))
            await gates.made_for(1)
            await upstream.close()
            assert await client.closed() == b""
            assert session.close_cause == "broker closed"
            assert gates.made[1].dropped
            gates.open(1)

    run(main())


def test_a_gate_that_opens_in_the_turn_in_which_the_connection_ends_sends_nothing_or_all() -> None:
    async def main() -> None:
        gates = Gates()
        async with fronted(gates.hook()) as front:
            for order in range(2):
                client, upstream, session = await front.connect()
                gates.made.clear()
                gates.answers.clear()
                client.send(hooked(1), hooked(2))
                await forwarded(upstream, 2)
                upstream.send(answer(1), answer(2))
                await gates.made_for(1, 2)
                if order:
                    gates.open(1)
                session.close("test")
                gates.open(1, 2)
                assert await client.closed() == (opened(1) if order else b"")

    run(main())


# ---- memory ----


def test_what_waits_behind_a_gate_is_bounded_in_bytes() -> None:
    async def main() -> None:
        gates = Gates()
        async with fronted(gates.hook()) as front:
            client, upstream, session = await front.connect()
            client.send(hooked(1), fetch(2), request(3))
            await forwarded(upstream, 3)
            frame = fetched(2, bytes(30 << 20))
            upstream.send(answer(1), frame, answer(3))
            await until(lambda: front.gateway.bytes_from_brokers > WRITE_HIGH_WATER_BYTES)
            await stalled(front)
            gated = session.downstream._gated
            assert gated is not None
            assert gated.waiting_bytes < 2 * WRITE_HIGH_WATER_BYTES
            gates.open(1)
            assert await client.take() == opened(1)
            assert len(await client.take()) == len(frame)
            assert await client.take() == answer(3)
            client.send(request(4))
            await upstream.take()
            upstream.send(answer(4))
            assert await client.take() == answer(4)

    run(main())


def test_own_answers_behind_a_gate_are_bounded() -> None:
    """Or anybody could make the proxy hold any number of them."""

    async def main() -> None:
        gates = Gates()
        own = hook(lambda request: Answer(answer(request.correlation_id, b"a" * 1_000), "test"), api_key=OTHER)
        async with fronted(gates.hook(), own, limits=Limits(in_flight_max=1 << 30)) as front:
            client, upstream, session = await front.connect()
            client.send(hooked(1))
            await upstream.take()
            upstream.send(answer(1))
            await gates.made_for(1)
            count = 100_000
            client.writer.write(other(2, b"q" * 100) * count)
            await stalled(front)
            assert front.gateway.bytes_from_clients < 2 * WRITE_HIGH_WATER_BYTES
            gates.open(1)
            assert await client.take() == opened(1)
            left = count * len(answer(2, b"a" * 1_000))
            while left:
                left -= len(await client.reader.read(1 << 20))
            assert not session.downstream.busy

    run(main())


def test_too_many_answers_at_gates_pause_the_client() -> None:
    async def main() -> None:
        gates = Gates()
        async with fronted(gates.hook(), limits=Limits(in_flight_max=4)) as front:
            client, upstream, session = await front.connect()
            sent = 0
            while not session.downstream.throttled:
                sent += 1
                client.send(hooked(sent))
                await upstream.take()
                upstream.send(answer(sent))
                await gates.made_for(sent)
            assert sent == 5
            client.send(hooked(6))
            await settled(front)
            assert not upstream.reader._buffer  # type: ignore[attr-defined]
            gates.open(2, 3, 4, 5)
            await settled(front)
            assert not upstream.reader._buffer, "nothing has gone out"  # type: ignore[attr-defined]
            gates.open(1)
            assert await upstream.take() == hooked(6)
            assert [await client.take() for _ in range(5)] == [opened(number) for number in range(1, 6)]

    run(main())


@pytest.mark.parametrize("end", ["opened", "client", "dropped"])
def test_a_closed_session_leaves_no_cycle_behind(end: str) -> None:
    async def main() -> None:
        gates = Gates()
        async with fronted(gates.hook()) as front:
            gc.collect()
            gc.disable()
            try:
                client, upstream, session = await front.connect()
                client.send(hooked(1), request(2))
                await forwarded(upstream, 2)
                upstream.send(answer(1), answer(2))
                await gates.made_for(1)
                if end == "opened":
                    gates.open(1)
                    assert [await client.take() for _ in range(2)] == [opened(1), answer(2)]
                if end == "dropped":
                    session.close("test")
                await client.close()
                await upstream.closed()
                del session
                parts = (Session, Upstream, Downstream, GatedAnswers)
                await until(lambda: not any(isinstance(each, parts) for each in gc.get_objects()))
                assert gates.made[1].dropped == (end != "opened")
            finally:
                gc.enable()

    run(main())


def test_a_held_request_behind_a_gate_is_answered_in_its_turn() -> None:
    async def main() -> None:
        gates = Gates()
        proceed = asyncio.Event()

        async def verdict(request: Request) -> Verdict:
            await proceed.wait()
            return Answer(answer(2, b"held"), "test")

        holding = hook(lambda request: Hold(verdict(request)), api_key=OTHER)
        async with fronted(gates.hook(), holding) as front:
            client, upstream, _ = await front.connect()
            client.send(hooked(1), other(2))
            await upstream.take()
            upstream.send(answer(1))
            await gates.made_for(1)
            proceed.set()
            await nothing_comes(front, client)
            gates.open(1)
            assert [await client.take() for _ in range(2)] == [opened(1), answer(2, b"held")]

    run(main())
