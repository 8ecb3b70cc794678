"""Batches that are small on the wire and large inside, or have very many records, and cannot be copied as they are."""

from __future__ import annotations

import pytest
from support import raw_log
from support.links import linked, until
from support.records import MIB, NOW, PLAIN, large_inside, minimal
from support.wire import Wire

from isthmus_bench.kafka import KafkaCluster
from isthmus_plugins.decompression import decompressed
from isthmus_protocol.record_compression import DECOMPRESSED_MAX, compress
from isthmus_protocol.records import HEADER_SIZE, Compression, seal, whole_header

pytestmark = [pytest.mark.brokers, pytest.mark.one_in_ci("stories", of="settings that are refused")]
RECORDS = 200_000


def many_records() -> bytes:
    payload = b"".join(minimal(number, b"") for number in range(RECORDS))
    header = PLAIN._replace(
        last_offset_delta=RECORDS - 1,
        record_count=RECORDS,
        base_timestamp=NOW,
        max_timestamp=NOW,
        attributes=Compression.LZ4,
    )
    return seal(header, compress(payload, Compression.LZ4))


def plain(batch: bytes) -> bytes:
    """As a producer sends it: the broker adds the append time."""
    header = whole_header(batch)
    return seal(
        header._replace(attributes=header.compression, max_timestamp=header.base_timestamp), batch[HEADER_SIZE:]
    )


def test_they_are_taken_apart_and_other_topics_go_on(kafka_pair: tuple[KafkaCluster, KafkaCluster]) -> None:
    """The topic has append time, so each of its batches is made anew at the target."""
    with linked(*kafka_pair) as link:
        (source, target), (other, other_remote) = link.names("inside"), link.names("beside")
        link.a.create_topic(source, config={"message.timestamp.type": "LogAppendTime"}, direct=True)
        link.a.create_topic(other, direct=True)
        ends = []
        with Wire(link.a.kafka.bootstrap_servers.split(",")[0]) as wire:
            for batch in (large_inside(Compression.ZSTD, size=140 * MIB), many_records()):
                error, base_offset = raw_log.produce(wire, source, plain(batch))
                assert error == 0
                ends.append(base_offset)
        link.a.produce(source, [b"after"], direct=True)
        assert ends == [0, 1]
        link.attach()
        link.a.produce(other, [b"x"] * 10)
        link.wait_end(other_remote, 10)
        link.wait_end(target, RECORDS + 2)
        with (
            Wire(link.a.kafka.bootstrap_servers.split(",")[0]) as a,
            Wire(link.b.kafka.bootstrap_servers.split(",")[0]) as b,
        ):
            large, again = raw_log.read_log(a, source).batches[0], raw_log.read_log(b, target).batches[0]
        assert (again.header.base_offset, again.header.record_count) == (0, 1)
        assert again.header.max_timestamp == large.header.max_timestamp
        assert len(again.data) < MIB
        size = sum(map(len, decompressed(again.data)))
        assert size == sum(map(len, decompressed(large.data))) > DECOMPRESSED_MAX
        until("followed", lambda: link.follower_state(target) == "Following")
        assert link.verify()["equal"]
