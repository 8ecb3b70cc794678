"""What the costliest requests of a client that may do everything cost the others, and in memory."""

from __future__ import annotations

import contextlib
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from confluent_kafka.admin import AdminClient, NewTopic
from support.kafka import unique
from support.links import until
from support.wire import Wire, advertised, batch_of

from isthmus_bench.kafka import KafkaCluster
from isthmus_bench.proxies import ProxyProcess
from isthmus_protocol.error_codes import POLICY_VIOLATION
from isthmus_protocol.schema import ApiKey
from isthmus_protocol.wire import write_uvarint

pytestmark = pytest.mark.brokers

MIB: Final = 1 << 20
MEASURED_S: Final = 3.0
RATIO_MAX: Final = 10.0
"""Of an ack's 99th percentile beside costly requests and without, where other tests run: it was hundreds."""


@pytest.fixture(scope="module")
def proxy(kafka: KafkaCluster) -> Iterator[ProxyProcess]:
    extra = {"client_listener": {"queued_bytes_max": 64 * MIB}}
    with ProxyProcess(kafka.bootstrap_servers, name="costs", extra=extra) as process:
        yield process


@pytest.fixture(scope="module")
def address(proxy: ProxyProcess) -> str:
    (found,) = advertised(proxy.bootstrap).values()
    return found


def deletion(names: int, name: bytes = b"") -> bytes:
    body = b"\x00" + write_uvarint(names + 1) + (write_uvarint(len(name) + 1) + name) * names
    frame = struct.pack(">hhih", ApiKey.DELETE_TOPICS, 5, 1, -1) + body + struct.pack(">i", 30_000) + b"\x00"
    return struct.pack(">i", len(frame)) + frame


def ack_times_s(wire: Wire, topic: str, seconds: float) -> list[float]:
    """How long acks of one batch after the other take, sorted."""
    partition = {"index": 0, "records": batch_of([b"x" * 100])}
    values = {"acks": -1, "timeout": 30_000, "topic_data": [{"name": topic, "partition_data": [partition]}]}
    found, end = [], time.monotonic() + seconds
    while (began := time.monotonic()) < end:
        answer = wire.request(ApiKey.PRODUCE, 9, values)
        assert answer.responses[0].partition_responses[0].error_code == 0
        found.append(time.monotonic() - began)
    return sorted(found)


def percentile_99(times: list[float]) -> float:
    return times[len(times) * 99 // 100]


def resident(proxy: ProxyProcess) -> int:
    return int(Path(f"/proc/{proxy.pid}/statm").read_text().split()[1]) * 4096


def costly(address: str, frames: list[bytes], over: threading.Event, sent: list[int]) -> None:
    """One costly request after the other, over a new connection where one was closed."""
    while not over.is_set():
        for frame in frames:
            with contextlib.suppress(ConnectionError), Wire(address) as wire:
                wire.send_bytes(frame)
                wire.receive_frame()
                sent.append(len(frame))


@pytest.mark.one_in_ci("stories", of="costly requests")
def test_costly_requests_of_one_client_leave_another_ones_acks_where_they_were(
    proxy: ProxyProcess, address: str
) -> None:
    topic, reserved = unique("acked"), unique("reserved-")
    admin = AdminClient({"bootstrap.servers": proxy.bootstrap})
    admin.create_topics([NewTopic(topic, 1, 1)])[topic].result()
    proxy.cli("namespace", "create", reserved, "--reserved")
    # As many as may be, which are refused one by one; 4 MiB of them, and 8 MiB, which end the connection.
    frames = [deletion(20_000, f"{reserved}x".encode()), deletion(4 * MIB - 100), deletion(8 * MIB - 100)]
    over, sent = threading.Event(), list[int]()
    with Wire(address) as wire:
        ack_times_s(wire, topic, 1.0)
        before = percentile_99(ack_times_s(wire, topic, MEASURED_S))
        attacking = threading.Thread(target=costly, args=(address, frames, over, sent))
        attacking.start()
        try:
            beside = ack_times_s(wire, topic, MEASURED_S)
        finally:
            over.set()
            attacking.join()
    ratio = percentile_99(beside) / before
    print(
        f"p99 {before * 1000:.1f} ms, beside {percentile_99(beside) * 1000:.1f} ms: {ratio:.2f}; {len(sent)} requests"
    )
    assert sent
    assert ratio < RATIO_MAX
    assert max(beside) < 2.0, "21 s, were they decoded"


@pytest.mark.one_in_ci("stories", of="costly requests")
def test_unfinished_frames_of_many_connections_take_what_they_may_together(proxy: ProxyProcess, address: str) -> None:
    reserved = unique("kept-")
    proxy.cli("namespace", "create", reserved, "--reserved")
    name = f"{reserved}x".encode()
    size = 99 * MIB
    head = struct.pack(">hhih", ApiKey.PRODUCE, 9, 1, -1) + b"\x00\x00" + struct.pack(">hi", -1, 30_000)
    head += b"\x02" + write_uvarint(len(name) + 1) + name + b"\x02" + struct.pack(">i", 0) + write_uvarint(size - 200)
    refused = struct.pack(">i", size) + head
    # With a second topic behind the records nothing can be said before they are there.
    kept = struct.pack(">i", size) + head.replace(
        b"\x02" + write_uvarint(len(name) + 1), b"\x03" + write_uvarint(len(name) + 1)
    )
    before = resident(proxy)
    with Wire(address) as wire:
        wire.send_bytes(refused)
        for _ in range(90):
            wire.send_bytes(bytes(MIB))
        time.sleep(1.0)
        grown = resident(proxy) - before
        print(f"grown by {grown / MIB:.0f} MiB by a refused Produce")
        assert grown < 30 * MIB, "nothing is kept of what is refused by its head"
    with contextlib.ExitStack() as stack:
        wires = [stack.enter_context(Wire(address)) for _ in range(3)]

        def send(wire: Wire) -> None:
            with contextlib.suppress(OSError):
                wire.send_bytes(kept)
                for _ in range(90):
                    wire.send_bytes(bytes(MIB))

        sending = [threading.Thread(target=send, args=(wire,), daemon=True) for wire in wires]
        for each in sending:
            each.start()
        until("the first one is kept", lambda: resident(proxy) - before > 80 * MIB, 30)
        time.sleep(1.0)
        grown = resident(proxy) - before
        print(f"grown by {grown / MIB:.0f} MiB")
        assert grown < 160 * MIB, "one is kept, and the two others are not read"
        with Wire(address) as other:
            assert other.request(ApiKey.METADATA, 9, {"topics": None}).cluster_id
    until("all is given back", lambda: resident(proxy) - before < 40 * MIB, 30)


@pytest.mark.one_in_ci("stories", of="costly requests")
def test_a_connection_that_is_idle_to_the_broker_is_closed_to_the_client() -> None:
    """The broker's own limit counts through the proxy, for a client that has sent half a request, too."""
    with (
        KafkaCluster(name="idle", settings={"connections.max.idle.ms": "2000"}) as cluster,
        ProxyProcess(cluster.bootstrap_servers, name="idle") as process,
    ):
        (address,) = advertised(process.bootstrap).values()
        with Wire(address) as idle, Wire(address) as half, Wire(address) as busy:
            for each in (idle, half):
                assert each.request(ApiKey.METADATA, 9, {"topics": None}).cluster_id
            half.send_bytes(deletion(100)[:50])
            over, closed = threading.Event(), []

            def keep_busy() -> None:
                while not over.wait(0.5):
                    assert busy.request(ApiKey.METADATA, 9, {"topics": None}).cluster_id

            keeping = threading.Thread(target=keep_busy)
            keeping.start()
            try:
                closed = [each.receive_frame() for each in (idle, half)]
            finally:
                over.set()
                keeping.join()
            assert closed == [None, None]
            assert busy.request(ApiKey.METADATA, 9, {"topics": None}).cluster_id


@pytest.mark.one_in_ci("stories", of="costly requests")
def test_what_applications_of_thousands_of_topics_ask_at_once_passes(proxy: ProxyProcess, address: str) -> None:
    name = unique("many")
    proxy.cli("namespace", "create", f"{name}-reserved-", "--reserved")
    made = [
        {
            "name": f"{name}-{each}",
            "num_partitions": 1,
            "replication_factor": 1,
            "configs": [{"name": "retention.ms", "value": "1"}],
        }
        for each in (*range(2_000), "reserved-x")
    ]
    commits = [
        {
            "name": f"{name}-{topic}",
            "partitions": [{"partition_index": each, "committed_offset": 1} for each in range(2_000)],
        }
        for topic in range(3)
    ]
    with Wire(address) as wire:
        values = {"topics": made, "timeout": 30_000, "validate_only": True}
        created = wire.request(ApiKey.CREATE_TOPICS, 7, values).topics
        assert {topic.name: int(topic.error_code) for topic in created} == {
            topic["name"]: POLICY_VIOLATION if topic is made[-1] else 0 for topic in made
        }
        group = {"group_id": name, "generation_id_or_member_epoch": -1, "topics": commits}
        answered = wire.request(ApiKey.OFFSET_COMMIT, 9, group).topics
        assert sum(len(topic.partitions) for topic in answered) == 6_000
        asked = {"topics": [{"name": topic["name"]} for topic in made], "allow_auto_topic_creation": False}
        assert len(wire.request(ApiKey.METADATA, 9, asked).topics) == len(made)
