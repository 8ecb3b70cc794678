"""Is a broker ready? Asked over the protocol: it answers, belongs to the right cluster, and knows its peers."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Collection, Mapping
from typing import Any, Final, cast

from kio.schema.describe_cluster.v0.request import DescribeClusterRequest
from kio.schema.describe_cluster.v0.response import DescribeClusterResponse
from kio.schema.sasl_authenticate.v1.request import SaslAuthenticateRequest
from kio.schema.sasl_authenticate.v1.response import SaslAuthenticateResponse
from kio.schema.sasl_handshake.v1.request import SaslHandshakeRequest
from kio.static.protocol import RequestPayload

from isthmus_bench.kafka.errors import EmbeddedKafkaError
from isthmus_bench.kafka.processes import Process, wait_any
from isthmus_protocol.messages import MalformedFrame, decode_response, encode_request

ASK_TIMEOUT_S: Final = 5.0
PAUSE_S: Final = 0.02
"""Between two tries. Nothing can be awaited before a broker listens; meanwhile we wait for its death."""

Address = tuple[str, int]


class BrokerDied(EmbeddedKafkaError):
    """A broker ended before it was ready."""

    def __init__(self, broker_id: int) -> None:
        super().__init__(f"broker {broker_id} ended before it was ready")
        self.broker_id = broker_id


class NotReady(EmbeddedKafkaError):
    """Brokers run and are not ready in time."""


def describe_cluster(
    address: Address, credentials: tuple[str, str] | None = None, timeout_s: float = ASK_TIMEOUT_S
) -> DescribeClusterResponse:
    """What the broker at ``address`` (plain text, or SASL PLAIN with ``credentials``) says of its cluster.

    Lists live brokers only (KIP-700). Raises OSError and MalformedFrame.
    """
    with socket.create_connection(address, timeout_s) as connection:
        if credentials is not None:
            _ask(connection, SaslHandshakeRequest(mechanism="PLAIN"))
            token = f"\0{credentials[0]}\0{credentials[1]}".encode()
            answer = cast(SaslAuthenticateResponse, _ask(connection, SaslAuthenticateRequest(auth_bytes=token)))
            if answer.error_code != 0:
                raise ConnectionRefusedError(answer.error_message)
        return cast(
            DescribeClusterResponse,
            _ask(connection, DescribeClusterRequest(include_cluster_authorized_operations=False)),
        )


def _ask(connection: socket.socket, request: RequestPayload) -> Any:
    connection.sendall(encode_request(request, 0, "isthmus-cluster"))
    size = _read(connection, 4)
    (length,) = struct.unpack(">i", size)
    return decode_response(request.__api_key__, request.__version__, size + _read(connection, length))[1]


def _read(connection: socket.socket, count: int) -> bytes:
    chunks = bytearray()
    while len(chunks) < count:
        chunk = connection.recv(count - len(chunks))
        if not chunk:
            raise ConnectionResetError("the broker closed the connection")
        chunks += chunk
    return bytes(chunks)


def wait_until_ready(
    addresses: Mapping[int, Address],
    processes: Mapping[int, Process],
    cluster_id: str,
    peers: Collection[int],
    credentials: tuple[str, str] | None,
    timeout_s: float,
) -> None:
    """Wait until every broker of ``addresses`` lists all ``peers``.

    Raises BrokerDied if one of ``processes`` ends, NotReady after ``timeout_s``, EmbeddedKafkaError if another cluster
    answers.
    """
    deadline = time.monotonic() + timeout_s
    waiting = dict(addresses)
    why: dict[int, str] = dict.fromkeys(waiting, "does not listen")
    while True:
        for broker_id, address in list(waiting.items()):
            try:
                answer = describe_cluster(address, credentials)
            except ConnectionRefusedError as error:
                why[broker_id] = str(error)
                continue
            except (OSError, MalformedFrame) as error:
                why[broker_id] = f"listens, but: {error}"
                continue
            if answer.error_code == 0 and answer.cluster_id != cluster_id:
                raise EmbeddedKafkaError(
                    f"port {address[1]}, meant for broker {broker_id}, belongs to the cluster {answer.cluster_id}: "
                    "choose another port"
                )
            known = {int(broker.broker_id) for broker in answer.brokers}
            if known.issuperset(peers):
                del waiting[broker_id]
            else:
                why[broker_id] = f"sees only the brokers {sorted(known)}"
        if not waiting:
            return
        for process in wait_any(processes.values(), PAUSE_S):
            raise BrokerDied(next(broker_id for broker_id, each in processes.items() if each is process))
        if time.monotonic() > deadline:
            reasons = "; ".join(f"broker {broker_id}: {why[broker_id]}" for broker_id in waiting)
            raise NotReady(f"not ready after {timeout_s:.0f} s: {reasons}")
