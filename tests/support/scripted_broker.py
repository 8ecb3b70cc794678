"""A peer that speaks the protocol's frames and otherwise does what a test tells it to: faults on demand."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Self

from isthmus_protocol import schema
from isthmus_protocol.bodies import build
from isthmus_protocol.messages import RequestHead, decode_request, encode_response
from isthmus_protocol.schema import ApiKey

Handler = Callable[["Peer", RequestHead, Any], Awaitable[None]]


class Peer:
    """The broker's end of one connection."""

    def __init__(self, broker: ScriptedBroker, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.broker = broker
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    def answer(self, head: RequestHead, values: Mapping[str, Any], version: int | None = None) -> bytes:
        """The frame of an answer, from plain values."""
        payload = build(schema.response_type(head.api_key, head.version if version is None else version), values)
        return encode_response(payload, head.correlation_id)

    def close(self) -> None:
        self.writer.close()

    async def read_request(self) -> tuple[RequestHead, Any] | None:
        try:
            size = await self.reader.readexactly(4)
            return decode_request(size + await self.reader.readexactly(int.from_bytes(size, "big")))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None


class ScriptedBroker:
    """Listens on a free port. Each request goes to its API's handler: ``on(ApiKey.METADATA, handler)``.

    ApiVersions is answered unless there is a handler for it, with every version that the schemas know, or ``versions``.
    """

    def __init__(self, node_id: int = 1) -> None:
        self.node_id = node_id
        self.versions: dict[int, tuple[int, int]] = dict(schema.supported())
        self.requests: list[tuple[RequestHead, Any]] = []
        self.connections = 0
        self._handlers: dict[int, Handler] = {}
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self.host = "127.0.0.1"
        self.port = 0

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def on(self, api_key: int, handler: Handler) -> None:
        self._handlers[api_key] = handler

    def answers(self, api_key: int, values: Mapping[str, Any] | Callable[[Any], Mapping[str, Any]]) -> None:
        """Answer an API with these values, or with what a function makes of the request."""

        async def handler(peer: Peer, head: RequestHead, request: Any) -> None:
            peer.send(peer.answer(head, values(request) if callable(values) else values))

        self.on(api_key, handler)

    def seen(self, api_key: int) -> list[Any]:
        return [request for head, request in self.requests if head.api_key == api_key]

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, self.host, self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        peer = Peer(self, reader, writer)
        try:
            while (received := await peer.read_request()) is not None:
                head, request = received
                self.requests.append(received)
                await self._handlers.get(head.api_key, _unexpected)(peer, head, request)
        except asyncio.CancelledError:
            pass
        finally:
            self._tasks.discard(task)
            writer.close()


async def _unexpected(peer: Peer, head: RequestHead, request: Any) -> None:
    if head.api_key != ApiKey.API_VERSIONS:
        raise AssertionError(f"no handler for {request}")
    ranges = [
        {"api_key": key, "min_version": low, "max_version": high} for key, (low, high) in peer.broker.versions.items()
    ]
    peer.send(peer.answer(head, {"api_keys": ranges}))


def metadata_of(brokers: list[ScriptedBroker], topics: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Values of a Metadata answer. A topic has topic_id, error_code and leaders: {partition: (node, epoch)}."""
    return {
        "brokers": [{"node_id": broker.node_id, "host": broker.host, "port": broker.port} for broker in brokers],
        "cluster_id": "scripted",
        "controller_id": brokers[0].node_id,
        "topics": [
            {
                "name": name,
                "topic_id": topic.get("topic_id"),
                "error_code": topic.get("error_code", 0),
                "partitions": [
                    {"partition_index": index, "leader_id": node, "leader_epoch": epoch, "replica_nodes": [node]}
                    for index, (node, epoch) in topic.get("leaders", {}).items()
                ],
            }
            for name, topic in topics.items()
        ],
    }
