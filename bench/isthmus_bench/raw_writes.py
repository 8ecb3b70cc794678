"""Writes of a producer without KIP-890's second part, as load generators send them, and what coordinators answer."""

from __future__ import annotations

import struct
import time
from itertools import count
from typing import Any, Final

from isthmus_bench.load import CLIENT_ID, LoadError, RawClient
from isthmus_protocol import peeks
from isthmus_protocol.error_codes import (
    CONCURRENT_TRANSACTIONS,
    COORDINATOR_LOAD_IN_PROGRESS,
    COORDINATOR_NOT_AVAILABLE,
    NOT_COORDINATOR,
)
from isthmus_protocol.messages import decode_response
from isthmus_protocol.record_requests import produce_body
from isthmus_protocol.records import BatchHeader, seal
from isthmus_protocol.schema import ApiKey

PRODUCE_VERSION: Final = 11
ADD_PARTITIONS_VERSION: Final = 3
END_TXN_VERSION: Final = 3
"""The newest without KIP-890's second part, as at brokers of every version."""
TIMEOUT_MS: Final = 30_000
RETRIABLE: Final = frozenset(
    {COORDINATOR_LOAD_IN_PROGRESS, COORDINATOR_NOT_AVAILABLE, NOT_COORDINATOR, CONCURRENT_TRANSACTIONS}
)
"""A coordinator that loads, moves or still completes the transaction before."""
PATIENCE_S: Final = 30.0
_HEAD: Final = struct.Struct(">ihhih")


class Refused(LoadError):
    """A request was answered with an error code, which asking again does not change."""


def produce(client: RawClient, topic: str, header: BatchHeader, payload: bytes, transactional_id: str | None) -> None:
    """Write a batch to partition 0 and wait for the answer. Raises Refused, LoadError."""
    body = produce_body({topic: {0: seal(header, payload)}}, TIMEOUT_MS, transactional_id)
    client_id = CLIENT_ID.encode()
    size = _HEAD.size - 4 + len(client_id) + 1 + sum(map(len, body))
    head = _HEAD.pack(size, ApiKey.PRODUCE, PRODUCE_VERSION, 0, len(client_id)) + client_id + b"\x00"
    answer = client.exchange(b"".join((head, *body)))
    ((_, ((_, error_code, _),)),) = peeks.produce_response(PRODUCE_VERSION, answer)
    if error_code:
        raise Refused(f"a Produce was answered with error code {error_code}")


def patiently(client: RawClient, api_key: int, version: int, values: dict[str, Any], retry_s: float) -> tuple[Any, int]:
    """Ask until a coordinator is ready: its answer, and how often it was asked again. Raises Refused, LoadError."""
    deadline = time.monotonic() + PATIENCE_S
    for retries in count():
        frame = client.ask_frame(api_key, version, values)
        errors = peeks.error_codes(api_key, version, frame) - {0}
        if not errors:
            return decode_response(api_key, version, frame)[1], retries
        if not errors <= RETRIABLE or time.monotonic() > deadline:
            raise Refused(f"{ApiKey(api_key).name} was answered with error codes {sorted(errors)}")
        time.sleep(retry_s)
    raise AssertionError
