"""A follower whose log is not the source's any more: salvaged, cut to correspond, and it goes on."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from confluent_kafka import TopicPartition
from support.kafka import unique
from support.links import Linked, linked, taking_transactions, truncated, until

from isthmus_bench.kafka import KafkaCluster
from isthmus_bench.ready_commands import run, start
from isthmus_protocol.record_codec import decode_records
from isthmus_protocol.salvage import read_salvage

pytestmark = pytest.mark.brokers

KILLS_MAX: Final = 5
"""Of a replay, until one comes in the middle."""


@pytest.fixture(scope="module")
def link(kafka_pair: tuple[KafkaCluster, KafkaCluster]) -> Iterator[Linked]:
    """One link for all tests of this module, with a pair of namespaces attached."""
    with linked(*kafka_pair) as pair, taking_transactions(pair.b):
        pair.attach()
        yield pair


def test_what_a_rogue_producer_wrote_is_salvaged_and_cut(link: Linked) -> None:
    source, target = link.names("rogue")
    link.a.create_topic(source, 2, {"max.message.bytes": "900000"})
    link.a.produce(source, [b"%d" % number for number in range(100)])
    link.a.produce(source, [b"other"] * 20, partition=1)
    link.wait_end(target, 100)
    link.wait_end(target, 20, partition=1)
    link.b.produce(target, [b"rogue-%d" % number for number in range(5)], direct=True)
    link.a.produce(source, [b"more-%d" % number for number in range(10)])

    told = truncated(link, target)
    link.wait_end(target, 110)
    link.wait_following()
    assert link.b.read(target) == link.a.read(source)
    assert link.b.read(target, 1) == link.a.read(source, 1)
    assert link.b.topic_config(target)["max.message.bytes"] == "900000"
    verdicts = [each for each in link.verify()["partitions"] if each["topic"] == source]
    assert all(each["equal"] for each in verdicts), verdicts

    (cut,) = (each for each in told["partitions"] if each["messages_truncated"])
    assert (cut["partition"], cut["offset_truncated_to"]) == (0, 100)
    salvage = read_salvage(Path(cut["salvage_file"]).read_bytes())
    assert (salvage.head.topic, salvage.head.from_offset) == (target, 100)
    records = [record for batch, _ in salvage.batches() for record in decode_records(batch)]
    assert [(record.offset, record.value) for record in records][:5] == [
        (100 + number, b"rogue-%d" % number) for number in range(5)
    ]
    assert cut["messages_truncated"] == len(records)
    status = link.b.partition(link.name, target)
    assert status is not None
    assert (status["offset_truncated_to"], status["messages_truncated"]) == (100, len(records))


def test_transactions_and_the_logs_start_are_put_back_as_they_were(link: Linked) -> None:
    source, target = link.names("transactions")
    link.a.create_topic(source)
    link.a.produce(source, [b"expired"] * 10)
    producer = link.a.producer(transactional_id=unique("txn-"))
    producer.init_transactions(30)
    for outcome in ("commit", "abort", "commit"):
        producer.begin_transaction()
        for number in range(5):
            producer.produce(source, b"%s-%d" % (outcome.encode(), number))
        assert producer.flush(30) == 0
        producer.commit_transaction(30) if outcome == "commit" else producer.abort_transaction(30)
    link.a.produce(source, [b"plain"] * 10, enable_idempotence=True)
    place = TopicPartition(source, 0, 7)
    link.a.admin(direct=True).delete_records([place])[place].result(20)
    link.wait_end(target, 38)
    until("the follower is trimmed", lambda: link.b.read(target)[0].offset == 7)
    link.b.produce(target, [b"rogue"], direct=True)

    told = truncated(link, target)
    assert told["messages_truncated"] == 1
    link.a.produce(source, [b"more"] * 5)
    link.wait_end(target, 43)
    link.wait_following()
    assert link.b.read(target) == link.a.read(source)
    assert link.b.read(target)[0].offset == 7
    verdicts = [each for each in link.verify()["partitions"] if each["topic"] == source]
    assert all(each["equal"] for each in verdicts), verdicts


def test_what_was_cut_is_replayed_once_by_a_command_that_was_killed(link: Linked, tmp_path: Path) -> None:
    source, target = link.names("replayed")
    link.a.create_topic(source)
    link.a.produce(source, [b"the source's"])
    link.wait_end(target, 1)
    rogue = link.b.producer(direct=True, compression_type="lz4")
    for number in range(20_000):
        value, time_ms = b"%06d" % number * 150, 1 + time.time_ns() // 10**6
        rogue.produce(target, value, b"%d" % number, 0, timestamp=time_ms, headers={"n": b"\xff"})
        rogue.poll(0)
    assert rogue.flush(30) == 0
    wrote = link.b.read(target, direct=True)[1:]
    link.a.produce(source, [b"more"])
    told = truncated(link, target)
    (cut,) = (each for each in told["partitions"] if each["messages_truncated"])

    records = cut["messages_truncated"]
    for _ in range(KILLS_MAX):
        rescued = unique("rescued-")
        link.a.create_topic(rescued)
        command = ["salvage", "replay", cut["salvage_file"], "--topic", rescued, "--bootstrap-server", link.a.bootstrap]
        would = json.loads(run([*command, "--dry-run", "-o", "json"], 30).stdout)
        assert (would["records"], would["replayed"]) == (records, 0)
        assert link.a.end(rescued) == 0
        with (tmp_path / "output").open("wb") as output:
            process = start(command, output)
        until("it has begun", lambda topic=rescued: link.a.end(topic), interval_s=0.001)
        process.kill()
        process.wait(10)
        if link.a.end(rescued) < records:  # else it had produced all of it, on a machine that looked too late
            break
    assert 0 < link.a.end(rescued) < records

    done = json.loads(run([*command, "-o", "json"], 30).stdout)
    assert done["replayed"] + done["already_there"] == records
    # What had come from the source behind it was cut as well.
    assert [each[1:] for each in link.a.read(rescued)][: len(wrote)] == [each[1:] for each in wrote]
    assert json.loads(run([*command, "-o", "json"], 30).stdout)["replayed"] == 0
    assert link.a.end(rescued) == records
    files = json.loads(run(["salvage", "list", str(Path(cut["salvage_file"]).parent), "-o", "json"], 30).stdout)
    (listed,) = (each for each in files if each["file"] == Path(cut["salvage_file"]).name)
    assert (rescued, records) in [(each["topic"], each["acked"]) for each in listed["replays"]]
