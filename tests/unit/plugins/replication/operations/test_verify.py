"""Verification of whole links on model clusters: what equal means, and where the first difference is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest
from support.partition_log import Partition, batch
from support.plugins import Two, on_two

from isthmus_plugins import links
from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused, TransactionMarkers
from isthmus_plugins.replication.comparison import comparison
from isthmus_plugins.replication.link import calls
from isthmus_plugins.replication.link.connection import LinkRejected
from isthmus_protocol.record_codec import Record, encode_batch
from isthmus_protocol.records import Compression, whole_header

PROGRESS: list[tuple[int, int]] = []


async def report(two: Two, by: str = "a") -> links.VerifyReport:
    PROGRESS.clear()
    proxy = two.a if by == "a" else two.b
    found: links.VerifyReport = await proxy.links.verify("a-to-b", lambda done, total: PROGRESS.append((done, total)))
    return found


def on_a_link(work: Callable[[Two], Awaitable[None]]) -> None:
    async def linked(two: Two) -> None:
        await two.create()
        await two.connected()
        await two.a.links.attach("a-to-b", links.Attach(local="l-", remote="r-", role="leader"))
        await work(two)

    on_two(linked)


async def copied(two: Two, values: int = 50) -> tuple[Partition, Partition]:
    source = two.clusters["A"].add_topic("l-t").partitions[0]
    for number in range(values):
        source.write_values(b"%d" % number, b"more", attributes=number % 5)
    await two.until(
        "copied", lambda: "r-t" in two.clusters["B"].found and two.clusters["B"].partition("r-t").end == source.end
    )
    return source, two.clusters["B"].partition("r-t")


def keyed(offset: int, key: bytes, value: bytes | None) -> bytes:
    return encode_batch([Record(offset, 1, key, value)], whole_header(batch(offset, [b""])))


def replace_batch(partition: Partition, index: int, data: bytes) -> None:
    partition.log[index] = data


@pytest.mark.parametrize("by", ["a", "b"])
def test_equal(by: str) -> None:
    async def work(two: Two) -> None:
        await copied(two)
        found = await report(two, by)
        (verdict,) = found.partitions
        assert found.equal
        assert (verdict.compared_from, verdict.compared_to, verdict.records) == (0, 100, 100)
        assert (verdict.source_end, verdict.follower_end, verdict.difference) == (100, 100, None)
        assert PROGRESS[-1] == (101, 101), "a partition, and its offsets"

    on_a_link(work)


@pytest.mark.parametrize("index", [0, 17, 49])
def test_the_first_differing_offset_is_named(index: int) -> None:
    async def work(two: Two) -> None:
        _, target = await copied(two)
        replace_batch(target, index, batch(2 * index, [b"%d" % index, b"other"]))
        found = await report(two)
        (verdict,) = found.partitions
        assert not found.equal
        assert not verdict.equal
        assert verdict.compared_to == 2 * index + 1
        assert verdict.difference == f"the records at offset {2 * index + 1} differ"

    on_a_link(work)


@pytest.mark.parametrize("what", ["timestamp", "missing"])
def test_other_differences(what: str) -> None:
    async def work(two: Two) -> None:
        _, target = await copied(two)
        if what == "timestamp":
            replace_batch(target, 3, batch(6, [b"3", b"more"], timestamp=5))
        else:
            del target.log[3], target.headers[3]
        found = await report(two)
        assert found.partitions[0].compared_to == 6
        assert not found.equal

    on_a_link(work)


def test_batches_that_were_cut_otherwise_hold_equal_records() -> None:
    async def work(two: Two) -> None:
        _, target = await copied(two)
        recompressed = batch(10, [b"5", b"more"], attributes=Compression.GZIP)
        assert recompressed != target.log[5]
        replace_batch(target, 5, recompressed)
        target.log[6:8] = [batch(12, [b"6", b"more", b"7", b"more"])]
        target.headers[6:8] = [target.headers[6]._replace(last_offset_delta=3)]
        assert (await report(two)).equal

    on_a_link(work)


def test_what_became_of_a_transaction_is_compared() -> None:
    async def work(two: Two) -> None:
        source, target = await copied(two, 5)
        source.transact(7, [b"a", b"b"], committed=True)
        await two.until("copied", lambda: target.end == source.end)
        assert (await report(two)).equal
        marker = TransactionMarkers("", 0, target.headers[-1].producer_id, 0, False, 0)
        target.log.pop()
        target.headers.pop()
        target.end -= 1
        target.producers[marker.producer_id].transaction_start = 10
        target.mark(marker)
        (verdict,) = (await report(two)).partitions
        assert not verdict.equal
        assert verdict.compared_to == 10

    on_a_link(work)


@pytest.mark.parametrize("chunk", [comparison.CHUNK_BYTES, 1])
def test_of_compacted_topics_the_latest_records_are_compared(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where what makes a record superfluous is read much later."""
    monkeypatch.setattr(comparison, "CHUNK_BYTES", chunk)

    async def work(two: Two) -> None:
        topic = two.clusters["A"].add_topic("l-t", configs={"cleanup.policy": "compact"})
        source = topic.partitions[0]
        for key in (b"a", b"b", b"a", b"c", b"b", b"a"):
            source.write(keyed(source.end, key, b"%d" % source.end))
        source.write(keyed(source.end, b"c", None))
        await two.until(
            "copied", lambda: "r-t" in two.clusters["B"].found and two.clusters["B"].partition("r-t").end == source.end
        )
        target = two.clusters["B"].partition("r-t")
        source.write(batch(source.end, [b"no key"]))
        await two.until("copied", lambda: two.clusters["B"].partition("r-t").end == source.end)
        source.clean({0, 3, 7})
        target.clean({1, 2, 3, 6})
        for by in "ab":
            assert (await report(two, by)).equal
        target.clean({5})
        for by in "ab":
            (verdict,) = (await report(two, by)).partitions
            assert not verdict.equal
            assert verdict.compared_to == 0  # where the latest record of that key stands now

    on_a_link(work)


def test_what_is_missing_on_a_side_is_not_equal() -> None:
    async def work(two: Two) -> None:
        await copied(two)

        async def refuse(topic: str, partitions: int, factor: int, configs: Mapping[str, str]) -> bytes:
            raise KafkaRefused(44, "POLICY_VIOLATION", "no more topics")

        two.clusters["B"].create_topic = refuse  # type: ignore[method-assign]
        two.clusters["A"].add_topic("l-other")
        two.clusters["B"].add_topic("r-third")
        for by, prefix in (("a", "l-"), ("b", "r-")):
            found = await report(two, by)
            assert not found.equal
            differences = {each.topic.removeprefix(prefix): each.difference for each in found.partitions}
            assert differences.pop("t") is None
            assert set(differences) == {"other", "third"}
            assert all("does not exist" in str(why) for why in differences.values())
        await two.until(
            "A tells why",
            lambda: any(each.reason == "TARGET_TOPIC_NOT_CREATED" for each in two.a.status().partitions),
        )

    on_a_link(work)


def test_more_partitions_on_a_side() -> None:
    async def work(two: Two) -> None:
        await copied(two)
        two.clusters["B"]._grow(two.clusters["B"].found["r-t"], 2)
        for by in "ab":
            found = await report(two, by)
            assert [(each.partition, each.equal) for each in found.partitions] == [(0, True), (1, False)]

    on_a_link(work)


def test_logs_that_begin_elsewhere() -> None:
    async def work(two: Two) -> None:
        _, target = await copied(two)
        target.start = 4
        found = await report(two)
        assert not found.equal
        assert found.partitions[0].difference == "the logs start at 0 and 4"

    on_a_link(work)


def test_nothing_to_compare_is_not_equal() -> None:
    async def work(two: Two) -> None:
        found = await report(two)
        assert not found.equal
        assert found.partitions == []

    on_a_link(work)


def test_a_partition_that_cannot_be_read_is_not_equal() -> None:
    async def work(two: Two) -> None:
        await copied(two)
        two.clusters["B"].down.add(1)
        found = await report(two)
        assert not found.equal
        assert "not compared" in str(found.partitions[0].difference) or "does not exist" in str(
            found.partitions[0].difference
        )

    on_a_link(work)


def test_topics_of_no_link_are_nobodys_business() -> None:
    async def work(two: Two) -> None:
        await copied(two)
        two.clusters["B"].add_topic("private")
        connection: Any = two.a.plugin.parts.peers.connections("a-to-b")[0]
        for question in (calls.TopicLimits("private"), calls.Digest("private", 0, 0, 1, "records")):
            with pytest.raises(LinkRejected, match="no topic of this link"):
                await connection.call(question)

    on_a_link(work)


def test_many_topics_are_looked_at_together_and_none_of_them_costs_a_look_at_all() -> None:
    async def work(two: Two) -> None:
        for number in range(30):
            two.clusters["A"].add_topic(f"l-{number}", 3).partitions[0].write_values(b"v")
        await two.until(
            "copied",
            lambda: all(
                f"r-{number}" in two.clusters["B"].found and two.clusters["B"].partition(f"r-{number}").end
                for number in range(30)
            ),
        )
        looks = {"A": 0, "B": 0}
        for name, cluster in two.clusters.items():

            async def topics(name: str = name, read: Any = cluster.topics) -> Any:
                looks[name] += 1
                return await read()

            cluster.topics = topics  # type: ignore[method-assign]
        loop = asyncio.get_running_loop()
        began = loop.time()
        found = await report(two)
        took_s = loop.time() - began
        assert found.equal
        assert len(found.partitions) == 90
        assert (PROGRESS[0], PROGRESS[-1]) == ((0, 90), (120, 120)), "what is done shows, also where logs are empty"
        others = int(took_s / 0.4) + 1  # those of the leader end
        assert looks["A"] <= 1 + others, looks
        assert looks["B"] <= 1 + others, looks
        # One topic after the other, each partition's limits alone, took 30 x 2 x 4 requests of some milliseconds.
        assert took_s < 0.4

    on_a_link(work)


def test_a_topic_that_cannot_be_read_there_is_not_compared_and_all_others_are() -> None:
    async def work(two: Two) -> None:
        await copied(two)
        source = two.clusters["A"].add_topic("l-u").partitions[0]
        source.write_values(b"v")
        await two.until("copied", lambda: "r-u" in two.clusters["B"].found and two.clusters["B"].partition("r-u").end)
        read = two.clusters["B"].log_start

        async def failing(topic: str, partition: int) -> int:
            if topic == "r-u":
                raise BrokerUnavailable("it is away")
            return await read(topic, partition)

        two.clusters["B"].log_start = failing  # type: ignore[method-assign]
        found = await report(two)
        verdicts = {each.topic: each for each in found.partitions}
        assert verdicts["l-t"].equal
        assert verdicts["l-u"].difference == "not compared: it is away", "not that it does not exist"
        assert not found.equal

    on_a_link(work)
