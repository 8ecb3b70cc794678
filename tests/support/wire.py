"""A client of single frames, for what no client library does."""

from __future__ import annotations

import itertools
import select
import socket
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Final, Self

from confluent_kafka.admin import AdminClient

from isthmus.kafka.sasl import SaslExchange
from isthmus_protocol.messages import build_request, decode_response, encode_request
from isthmus_protocol.record_codec import Record, encode_batch
from isthmus_protocol.records import MAGIC, BatchHeader
from isthmus_protocol.schema import ApiKey
from support.kafka import NOW_MS

TIMEOUT_S: Final = 30.0
PLAIN: Final = BatchHeader(0, 0, -1, MAGIC, 0, 0, 0, 0, 0, -1, -1, -1, 0)
"""Of a batch without a producer id."""


def batch_of(values: Iterable[bytes], like: BatchHeader = PLAIN) -> bytes:
    """A batch of records without keys."""
    return encode_batch([Record(offset, NOW_MS, None, value) for offset, value in enumerate(values)], like)


def advertised(bootstrap: str) -> dict[int, str]:
    """The brokers' addresses as a client is told."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    return {broker.id: f"{broker.host}:{broker.port}" for broker in admin.list_topics(timeout=20).brokers.values()}


class Wire:
    """One connection. ``with Wire("127.0.0.1:9092") as wire: wire.request(ApiKey.METADATA, 12, {...})``."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), TIMEOUT_S)
        self._stream = self._socket.makefile("rb")
        self._ids = itertools.count()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._stream.close()
        self._socket.close()

    def send(self, api_key: int, version: int, values: dict[str, Any]) -> int:
        """Send a request; returns its correlation id."""
        correlation_id = next(self._ids)
        self._socket.sendall(encode_request(build_request(api_key, version, values), correlation_id, "wire"))
        return correlation_id

    def send_bytes(self, data: bytes) -> None:
        self._socket.sendall(data)

    def is_answered(self, within_s: float) -> bool:
        """Whether something of an answer comes in time. Nothing may have been received before but whole answers."""
        return bool(select.select([self._socket], [], [], within_s)[0])

    def receive_frame(self) -> bytes | None:
        """The next answer; None: the other side closed."""
        try:
            size = self._stream.read(4)
            if len(size) < 4:
                return None
            rest = self._stream.read(int.from_bytes(size, "big"))
        except ConnectionError:
            return None
        return size + rest

    def request(self, api_key: int, version: int, values: dict[str, Any]) -> Any:
        """Send a request and return the payload of its answer. Raises ConnectionError: closed without one."""
        return self.receive(api_key, version, self.send(api_key, version, values))

    def receive(self, api_key: int, version: int, correlation_id: int) -> Any:
        """The payload of the next answer, which is to this request. Raises ConnectionError: closed without one."""
        frame = self.receive_frame()
        if frame is None:
            raise ConnectionError("closed without an answer")
        answered, payload = decode_response(api_key, version, frame)
        assert answered == correlation_id
        return payload


def log_in(wire: Wire, exchange: SaslExchange, mechanism: str) -> None:
    """Raises ConnectionError where the broker refuses."""
    assert wire.request(ApiKey.SASL_HANDSHAKE, 1, {"mechanism": mechanism}).error_code == 0
    said: bytes | None = exchange.first()
    while said is not None:
        answer = wire.request(ApiKey.SASL_AUTHENTICATE, 2, {"auth_bytes": said})
        if answer.error_code:
            raise ConnectionError(answer.error_message)
        said = exchange.next(answer.auth_bytes)
