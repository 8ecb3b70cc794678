"""Whatever bytes clients and brokers send: their connection ends or goes on, and the process serves the next one."""

from __future__ import annotations

import asyncio
import os
import traceback
from functools import partial
from typing import Any, Final

import pytest
import uvloop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.seeds import examples

from isthmus.kafka.security import SecuritySpec
from isthmus.session.broker_sasl import BrokerSasl
from isthmus.session.dispatch import compile_routes
from isthmus.session.endpoint import Endpoint
from isthmus.session.listener import Gateway, Limits, Listener
from isthmus_plugins.api import Ask, Hold, Request, RequestHook, Verdict
from isthmus_plugins.tasks import Supervision
from isthmus_protocol import peeks
from isthmus_protocol.bodies import build
from isthmus_protocol.messages import build_request, encode_request, encode_response
from isthmus_protocol.schema import ApiKey, response_type

EXAMPLES: Final = examples(int(os.environ.get("ISTHMUS_FUZZ_EXAMPLES", "400")))
FRAMES = [
    encode_request(build_request(ApiKey.API_VERSIONS, 3, {}), 1, "client"),
    encode_request(build_request(ApiKey.METADATA, 12, {"topics": [{"name": "t"}]}), 2, None),
    encode_request(build_request(ApiKey.FIND_COORDINATOR, 4, {"key_type": 0, "coordinator_keys": ["g"]}), 3, "c"),
    *(
        encode_request(
            build_request(
                ApiKey.PRODUCE,
                version,
                {
                    "transactional_id": None,
                    "acks": acks,
                    "timeout": 1000,
                    "topic_data": [{"name": "t", "partition_data": [{"index": 0, "records": b"r" * 200}]}],
                },
            ),
            4,
            "c",
        )
        for version, acks in ((3, 1), (9, -1), (12, 0))
    ),
]

LOGINS = [
    FRAMES[0],
    *(
        encode_request(build_request(ApiKey.SASL_HANDSHAKE, version, {"mechanism": mechanism}), 1, "client")
        for version, mechanism in ((0, "PLAIN"), (0, "GSSAPI"), (1, "OAUTHBEARER"), (1, "SCRAM-SHA-256"))
    ),
    encode_request(build_request(ApiKey.SASL_AUTHENTICATE, 2, {"auth_bytes": b"n,,n=a,r=b"}), 1, "client"),
    b"\0\0\0\x04\0a\0b",
    FRAMES[3],
]
ANSWERS = [
    b"\0\0\0\x0a\0\0\0\1\0\0\0\0\0\0",  # to SaslHandshake, or in the exchange
    encode_response(build(response_type(ApiKey.SASL_AUTHENTICATE, 2), {"auth_bytes": b"r=bc"}), 1),
    b"\0\0\0\0",
    b"\0\0\0\x0a\0\0\0\0\0\0\0\0\0\0",  # to what the proxy asks
]


def mutated(frames: list[bytes]) -> st.SearchStrategy[bytes]:
    """Frames after one another, with bytes changed, cut out and put in."""

    @st.composite
    def build(draw: st.DrawFn) -> bytes:
        data = bytearray(b"".join(draw(st.lists(st.sampled_from(frames), min_size=1, max_size=4))))
        for _ in range(draw(st.integers(0, 4))):
            position = draw(st.integers(0, len(data) - 1))
            length = draw(st.integers(0, 3))
            data[position : position + length] = draw(st.binary(max_size=4))
            if not data:
                data.append(0)
        return bytes(data)

    return build()


def on_produce(request: Request) -> Verdict:
    peeks.produce_topics(request.version, request.frame)
    kind = len(request.frame) % 3
    if not kind:
        return None
    return Ask(FRAMES[0], lambda told: Hold(asyncio.sleep(0)) if kind == 1 else None, partial(peeks.brokers, 9))


async def exchange(sent: bytes, cuts: list[int], answered: bytes, sasl: bool = False) -> None:
    failures: list[str] = []

    def failed(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        failures.append(f"{context} {''.join(traceback.format_exception(error)) if error else ''}")

    asyncio.get_running_loop().set_exception_handler(failed)

    async def broker(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if await reader.read(1):
                writer.write(answered)
                writer.write_eof()
                await reader.read()
        except ConnectionError:
            pass
        writer.close()

    server = await asyncio.start_server(broker, "127.0.0.1", 0)
    hooks = [RequestHook(ApiKey.PRODUCE, on_produce, whole=True)]
    target = Endpoint("127.0.0.1", server.sockets[0].getsockname()[1])
    broker_sasl = BrokerSasl(SecuritySpec(), None, Supervision())
    gateway = Gateway(
        compile_routes(hooks, lambda node_id, host, port: (b"proxy", 1)),
        Limits(frame_bytes_max=10_000, sasl_frame_bytes_max=5_000),
        Supervision(),
        broker_sasl=broker_sasl if sasl else None,
    )
    if sasl:
        broker_sasl._asked(target).tell(True)
    listener = Listener(gateway, 1, Endpoint("127.0.0.1", 0), lambda: [target])
    await listener.start()
    await listener.accept()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.bind.port)
        position = 0
        for cut in [*sorted(cut % (len(sent) + 1) for cut in cuts), len(sent)]:
            writer.write(sent[position:cut])
            await writer.drain()
            position = cut
        writer.write_eof()
        try:
            async with asyncio.timeout(10):
                await reader.read()
        except ConnectionError:
            pass
        writer.close()
        assert not failures, failures[0]
        # The process serves the next client.
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.bind.port)
        writer.close()
    finally:
        await listener.stop()
        await gateway.drain(0)
        await broker_sasl.close()
        server.close()
    assert not failures, failures[0]


@pytest.mark.timeout(300 + EXAMPLES)
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    sent=st.one_of(st.binary(max_size=300), mutated(FRAMES)),
    cuts=st.lists(st.integers(0, 2_000), max_size=4),
    answered=st.one_of(st.binary(max_size=100), st.just(b"\0\0\0\6\0\0\0\1\0\0")),
)
def test_any_bytes_end_at_most_their_own_connection(sent: bytes, cuts: list[int], answered: bytes) -> None:
    uvloop.run(exchange(sent, cuts, answered))


@pytest.mark.timeout(300 + EXAMPLES)
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    sent=st.one_of(st.binary(max_size=300), mutated(LOGINS)),
    cuts=st.lists(st.integers(0, 500), max_size=4),
    answered=st.one_of(st.binary(max_size=100), mutated(ANSWERS)),
)
def test_so_do_any_bytes_of_those_who_have_not_authenticated(sent: bytes, cuts: list[int], answered: bytes) -> None:
    uvloop.run(exchange(sent, cuts, answered, sasl=True))
