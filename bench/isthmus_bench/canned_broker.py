"""A broker of canned answers: it knows one topic, lists others, appends nothing, and costs little.

For measuring what stands before a broker where the real one, and what else a machine with few cores runs, would only
add noise; and for tests of the benchmark without Java. Answers are encoded once for each API and version.
"""

from __future__ import annotations

import argparse
import asyncio
import struct
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final, cast
from uuid import UUID, uuid5

from isthmus_bench.children import serve
from isthmus_control.model import CONTROL_TOPIC, TRANSACTIONS_TOPIC
from isthmus_protocol import schema
from isthmus_protocol.bodies import build
from isthmus_protocol.messages import encode_response
from isthmus_protocol.schema import ApiKey

NODE_ID: Final = 1
TOPIC_ID: Final = UUID(int=0x1517)
FETCHED_BYTES: Final = 1_024_000
LISTED_PARTITIONS: Final = 3
"""Of each topic that is only listed."""
Encoded = tuple[bytes, bytes]
"""An answer's size prefix, and what follows its correlation id."""
_HEAD: Final = struct.Struct(">iIi")
_IDS: Final = struct.Struct(">i")


def _listed(count: int) -> list[dict[str, Any]]:
    """Topics as they stand in an answer that lists all: the proxies' own among them, where there are any."""
    names = [f"listed-{number}" for number in range(count)]
    if names:
        names[count // 2 : count // 2] = [CONTROL_TOPIC, TRANSACTIONS_TOPIC]
    replicas = {"leader_id": NODE_ID, "replica_nodes": [1, 2, 3], "isr_nodes": [1, 2, 3]}
    partitions = [{"partition_index": index, **replicas} for index in range(LISTED_PARTITIONS)]
    return [{"name": name, "topic_id": uuid5(TOPIC_ID, name), "partitions": partitions} for name in names]


def _answers(
    port: int, topics: list[str], fetched_bytes: int, listed: int
) -> dict[int, Callable[[], Mapping[str, Any]]]:
    ranges = [
        {"api_key": key, "min_version": low, "max_version": high} for key, (low, high) in schema.supported().items()
    ]
    partition = {"partition_index": 0, "leader_id": NODE_ID, "replica_nodes": [NODE_ID], "isr_nodes": [NODE_ID]}
    metadata = {
        "brokers": [{"node_id": NODE_ID, "host": "127.0.0.1", "port": port}],
        "cluster_id": "canned",
        "controller_id": NODE_ID,
        "topics": [
            *({"name": name, "topic_id": TOPIC_ID, "partitions": [partition]} for name in topics),
            *_listed(listed),
        ],
    }
    appended = {
        "responses": [
            {"name": topics[0], "topic_id": TOPIC_ID, "partition_responses": [{"index": 0, "base_offset": 5}]}
        ]
    }
    records = bytes(fetched_bytes)
    found = {
        "responses": [
            {
                "topic": topics[0],
                "topic_id": TOPIC_ID,
                "partitions": [{"partition_index": 0, "high_watermark": 1000, "records": records}],
            }
        ]
    }
    return {
        ApiKey.API_VERSIONS: lambda: {"api_keys": ranges},
        ApiKey.METADATA: lambda: metadata,
        ApiKey.PRODUCE: lambda: appended,
        ApiKey.FETCH: lambda: found,
    }


class CannedConnection(asyncio.Protocol):
    """Answers what comes, in order."""

    def __init__(self, answers: Mapping[int, Callable[[], Mapping[str, Any]]], encoded: dict[int, Encoded]) -> None:
        self._answers = answers
        self._encoded = encoded
        self._left = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._left:
            data = self._left + data
        position, available = 0, len(data)
        out: list[bytes] = []
        while available - position >= _HEAD.size:
            size, key, correlation_id = _HEAD.unpack_from(data, position)
            end = position + 4 + size
            if end > available:
                break
            answer = self._encoded.get(key)
            if answer is None:
                answer = self._encoded[key] = self._encode(key)
            out += (answer[0], _IDS.pack(correlation_id), answer[1])
            position = end
        self._left = data[position:]
        if out:
            self._transport.writelines(out)

    def _encode(self, key: int) -> Encoded:
        api_key, version = key >> 16, key & 0xFFFF
        frame = encode_response(build(schema.response_type(api_key, version), self._answers[api_key]()), 0)
        return frame[:4], frame[8:]


async def start(topics: list[str], fetched_bytes: int, listed: int) -> int:
    """Listen on a free port, which is returned."""
    encoded: dict[int, Encoded] = {}
    answers: dict[int, Callable[[], Mapping[str, Any]]] = {}
    loop = asyncio.get_running_loop()
    server = await loop.create_server(partial(CannedConnection, answers, encoded), "127.0.0.1", 0, backlog=1024)
    port: int = server.sockets[0].getsockname()[1]
    answers |= _answers(port, topics, fetched_bytes, listed)
    return port


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("topics", nargs="+")
    parser.add_argument("--fetched-bytes", type=int, default=FETCHED_BYTES)
    parser.add_argument("--listed", type=int, default=0, help="further topics in every answer to Metadata")
    chosen = parser.parse_args()
    serve(lambda: start(chosen.topics, chosen.fetched_bytes, chosen.listed))


if __name__ == "__main__":
    main()
