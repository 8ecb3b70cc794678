"""What drives sessions on real sockets: a broker that the test plays, a raw client, frames made by hand."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
import struct
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, Self

import uvloop

from isthmus.kafka.security import SecuritySpec
from isthmus.session.broker_sasl import BrokerSasl
from isthmus.session.dispatch import compile_routes
from isthmus.session.endpoint import Endpoint
from isthmus.session.listener import Gateway, Limits, Listener
from isthmus.session.session import Session, SessionState
from isthmus_bench.kafka.security import Authority
from isthmus_plugins.api import Request, RequestHook, Verdict
from isthmus_plugins.tasks import Supervision
from isthmus_protocol import schema
from isthmus_protocol.bodies import build
from isthmus_protocol.error_codes import ILLEGAL_SASL_STATE
from isthmus_protocol.messages import build_request, encode_request, encode_response
from isthmus_protocol.schema import ApiKey, supported

OPAQUE = (ApiKey.HEARTBEAT, 3)
"""Nobody looks into these."""
HOOKED = ApiKey.LIST_GROUPS
FETCH_VERSION = 17
PRODUCE_VERSION = 9
STEP_TIMEOUT_S = 20.0


# ---- frames ----


def request(correlation_id: int, api: tuple[int, int] = OPAQUE, body: bytes = b"") -> bytes:
    """A request frame with a null client id."""
    return struct.pack(">ihhih", 10 + len(body), *api, correlation_id, -1) + body


def answer(correlation_id: int, body: bytes = b"") -> bytes:
    return struct.pack(">ii", 4 + len(body), correlation_id) + body


def produce(correlation_id: int, acks: int = -1, topic: str = "t", records: bytes = b"", version: int = 9) -> bytes:
    partition = {"index": 0, "records": records}
    values = {"acks": acks, "timeout": 30_000, "topic_data": [{"name": topic, "partition_data": [partition]}]}
    return encode_request(build_request(ApiKey.PRODUCE, version, values), correlation_id, "client")


def fetch(correlation_id: int) -> bytes:
    return encode_request(build_request(ApiKey.FETCH, FETCH_VERSION, {}), correlation_id, "client")


def fetched(correlation_id: int, records: bytes) -> bytes:
    """A Fetch answer that tells a broker's address behind the records."""
    values = {
        "responses": [{"topic_id": None, "partitions": [{"partition_index": 0, "records": records}]}],
        "node_endpoints": [{"node_id": 1, "host": "broker.internal", "port": 9092}],
    }
    return encode_response(build(schema.response_type(ApiKey.FETCH, FETCH_VERSION), values), correlation_id)


def id_of(frame: bytes, request_frame: bool = True) -> int:
    return int.from_bytes(frame[8:12] if request_frame else frame[4:8], "big", signed=True)


# ---- the two ends ----


class Wire:
    """One end of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, *frames: bytes) -> None:
        self.writer.write(b"".join(frames))

    async def take(self) -> bytes:
        """The next frame."""
        size = await self.reader.readexactly(4)
        return size + await self.reader.readexactly(int.from_bytes(size, "big"))

    async def closed(self) -> bytes:
        """What came before the other end closed. Then this one closes, as clients do."""
        try:
            came = await self.reader.read()
        except ConnectionResetError:
            return b""
        self.writer.close()
        return came

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()

    def reset(self) -> None:
        self.writer.transport.abort()

    async def abandon(self) -> None:
        """Close without waiting until what was sent has gone out."""
        self.reset()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


class Broker:
    """Accepts connections and leaves the rest to the test."""

    def __init__(self) -> None:
        self._arrivals: asyncio.Queue[Wire] = asyncio.Queue()
        self.wires: list[Wire] = []

    async def start(self) -> Self:
        self.server = await asyncio.start_server(self._arrived, "127.0.0.1", 0, limit=1 << 16)
        self.port: int = self.server.sockets[0].getsockname()[1]
        return self

    async def _arrived(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        wire = Wire(reader, writer)
        self.wires.append(wire)
        self._arrivals.put_nowait(wire)

    async def accept(self) -> Wire:
        return await self._arrivals.get()

    async def stop(self) -> None:
        self.server.close()
        for wire in self.wires:
            await wire.abandon()


class Front:
    """Broker, proxy, and clients that connect through it."""

    def __init__(self, broker: Broker, gateway: Gateway, listener: Listener) -> None:
        self.broker = broker
        self.gateway = gateway
        self.listener = listener
        self._wires: list[Wire] = []

    @property
    def target(self) -> Endpoint:
        """The broker's listener."""
        return Endpoint("127.0.0.1", self.broker.port)

    async def dial(self, context: ssl.SSLContext | None = None) -> Wire:
        """A client, whose session may not be there yet."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.listener.bind.port, limit=1 << 16, ssl=context)
        wire = Wire(reader, writer)
        self._wires.append(wire)
        return wire

    async def connect(
        self, state: SessionState = SessionState.SERVING, context: ssl.SSLContext | None = None
    ) -> tuple[Wire, Wire, Session]:
        """A client, the broker's end of its session, and the session, which is in this state."""
        before = set(self.gateway.sessions)
        client = await self.dial(context)
        upstream = await self.broker.accept()
        await until(lambda: any(s.state is state for s in self.gateway.sessions - before))
        (session,) = self.gateway.sessions - before
        return client, upstream, session

    async def stop(self) -> None:
        await self.listener.stop()
        for wire in self._wires:
            await wire.abandon()
        await self.gateway.drain(0)


async def say_whether_sasl(broker: Broker, required: bool) -> Wire:
    """Answer a proxy that asks whether this broker's listener has SASL. Returns the connection that it keeps."""
    wire = await broker.accept()
    head = id_of(await wire.take())
    ranges = [{"api_key": key, "min_version": low, "max_version": high} for key, (low, high) in supported().items()]
    wire.send(answer_of(ApiKey.API_VERSIONS, 4, head, {"api_keys": ranges}))
    values = {"error_code": 0 if required else ILLEGAL_SASL_STATE, "mechanisms": ["PLAIN"] if required else []}
    wire.send(answer_of(ApiKey.SASL_HANDSHAKE, 1, id_of(await wire.take()), values))
    return wire


def answer_of(api_key: int, version: int, correlation_id: int, values: dict[str, Any]) -> bytes:
    return encode_response(build(schema.response_type(api_key, version), values), correlation_id)


@contextlib.asynccontextmanager
async def fronted(
    *hooks: RequestHook,
    limits: Limits | None = None,
    client_ssl: ssl.SSLContext | None = None,
    asks_for_sasl: bool = False,
) -> AsyncIterator[Front]:
    """``asks_for_sasl``: whether the broker's listener has SASL is asked, which :func:`say_whether_sasl` answers."""
    broker = await Broker().start()
    routes = compile_routes(hooks, lambda node_id, host, port: (b"proxy.example", 19092))
    supervision = Supervision()
    sasl = BrokerSasl(SecuritySpec(), None, supervision) if asks_for_sasl else None
    gateway = Gateway(routes, limits or Limits(), supervision, broker_sasl=sasl)
    gateway.lost_write_margin_s = 0.05
    bind = Endpoint("127.0.0.1", 0)
    listener = Listener(gateway, 1, bind, lambda: [Endpoint("127.0.0.1", broker.port)], client_ssl)
    await listener.start()
    await listener.accept()
    front = Front(broker, gateway, listener)
    try:
        yield front
    finally:
        await front.stop()
        if sasl is not None:
            await sasl.close()
        await broker.stop()


def tls_contexts(directory: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """What the proxy, and what its clients, need for TLS."""
    authority = Authority(directory)
    authority.create()
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(authority.issue("proxy"))
    return server, ssl.create_default_context(cafile=str(authority.ca_file))


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop turn until something is so."""
    while not condition():  # noqa: ASYNC110 - everything happens on this loop: each turn brings it closer
        await asyncio.sleep(0)


async def settled(front: Front) -> None:
    """Return when what was sent before has had every chance to arrive: a request of another session has passed."""
    for _ in range(3):
        client, upstream, session = await front.connect()
        client.send(request(1))
        await upstream.take()
        upstream.send(answer(1))
        await client.take()
        await client.close()
        await until(lambda gone=session: gone not in front.gateway.sessions)  # type: ignore[misc]


async def stalled(front: Front) -> None:
    """Return when nothing moves any more."""
    gateway = front.gateway
    quiet = 0
    before = (0, 0)
    while quiet < 5:
        now = (gateway.bytes_from_brokers, gateway.bytes_from_clients)
        quiet = quiet + 1 if now == before else 0
        before = now
        await asyncio.sleep(0.02)


def run(main: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(main, STEP_TIMEOUT_S)

    uvloop.run(bounded())


def hook(on_request: Callable[[Request], Verdict], whole: bool = True, api_key: int = HOOKED) -> RequestHook:
    return RequestHook(api_key, on_request, whole)


def hooked(correlation_id: int, body: bytes = b"") -> bytes:
    return request(correlation_id, (HOOKED, 0), body)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
