"""What plugins ask of a cluster, on real brokers: requests that are written by hand are understood."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import pytest
import uvloop
from support.kafka import unique

from isthmus.cluster_access import ClusterAccess, FetchOverConnection
from isthmus.errors import OurBug
from isthmus.kafka import transactional_producer
from isthmus.kafka.client import LATEST, ClusterClient
from isthmus.kafka.results import TopicPartition
from isthmus_bench.kafka import KafkaCluster
from isthmus_bench.load import batch
from isthmus_plugins.cluster import CommittedOffset, FetchPartition, PartitionsRefused, ProducerFenced
from isthmus_protocol.records import walk

pytestmark = pytest.mark.brokers


def on_cluster(kafka: KafkaCluster, test: Callable[[ClusterAccess, str, bytes], Awaitable[None]]) -> None:
    """Run a test with a new topic of three partitions."""

    async def started() -> None:
        async with ClusterClient(kafka.bootstrap_servers.split(",")) as client:
            access = ClusterAccess(client)
            topic = unique("access-")
            topic_id = await access.create_topic(topic, 3, 1, {})
            await client.list_offsets({TopicPartition(topic, partition): LATEST for partition in range(3)})
            await test(access, topic, topic_id)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(started())


def plain() -> bytes:
    """A batch of three records."""
    return batch(3, 100)


def test_batches_are_appended_and_refused(kafka_of_each_version: KafkaCluster) -> None:
    async def test(access: ClusterAccess, topic: str, topic_id: bytes) -> None:
        connection = await access.produce_connection(1, "test")
        for first in (0, 3):
            (results,) = await connection.produce([{(topic, index): plain() for index in range(3)}], 10_000)
            assert {place: (result.error_code, result.base_offset) for place, result in results.items()} == {
                (topic, index): (0, first) for index in range(3)
            }
        damaged = bytearray(plain())
        damaged[-1] ^= 1
        results, more = await connection.produce(
            [{(topic, 0): bytes(damaged), (topic, 1): plain()}, {(topic, 0): plain(), (topic, 1): plain()}], 10_000
        )
        assert (results[topic, 0].error_name, results[topic, 0].base_offset) == ("CORRUPT_MESSAGE", -1)
        assert (results[topic, 1].error_code, results[topic, 1].base_offset) == (0, 6)
        assert [more[topic, index].base_offset for index in range(2)] == [6, 9]  # a broker goes on after a refusal
        (unknown,) = await connection.produce([{("no-such-topic", 0): plain()}], 10_000)
        assert unknown["no-such-topic", 0].error_name == "UNKNOWN_TOPIC_OR_PARTITION"

    on_cluster(kafka_of_each_version, test)


def test_only_changes_are_answered_in_a_fetch_session(kafka_of_each_version: KafkaCluster) -> None:
    async def test(access: ClusterAccess, topic: str, topic_id: bytes) -> None:
        producer = await access.produce_connection(1, "test")

        async def read(*wanted: FetchPartition) -> dict[int, int]:
            """By partition that was answered: the offset after the last record."""
            connection = await access.fetch_connection(1, "tail")
            fetched = await connection.fetch(list(wanted), 100, 1 << 20, only_changes=True)
            assert not any(each.error_code for each in fetched)
            return {
                each.partition: max((header.next_offset for _, _, header in walk(each.records)), default=0)
                for each in fetched
            }

        wanted = [FetchPartition(topic_id, index, 0, 1 << 20) for index in range(3)]
        assert await read(*wanted) == {0: 0, 1: 0, 2: 0}
        assert await read(*wanted) == {}
        await producer.produce([{(topic, 1): plain()}], 10_000)
        assert await read(*wanted) == {1: 3}
        wanted[1] = wanted[1]._replace(offset=3)
        assert await read(*wanted) == {}
        await producer.produce([{(topic, 0): plain(), (topic, 1): plain(), (topic, 2): plain()}], 10_000)
        assert await read(*wanted[1:]) == {1: 6, 2: 3}
        wanted[1:] = [wanted[1]._replace(offset=6), wanted[2]._replace(offset=3)]
        assert await read(*wanted) == {0: 3}
        connection = await access.fetch_connection(1, "tail")
        assert isinstance(connection, FetchOverConnection)
        connection._session._id += 1  # the broker has forgotten it
        wanted[0] = wanted[0]._replace(offset=3)
        assert await read(*wanted) == {0: 0, 1: 0, 2: 0}
        assert await read(*wanted) == {}
        connection.close()
        assert await read(*wanted) == {0: 0, 1: 0, 2: 0}

    on_cluster(kafka_of_each_version, test)


def test_a_transaction_has_batches_and_offsets_or_neither(
    kafka_of_each_version: KafkaCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever begins with a transactional id has what was open before aborted, and who had it is told."""
    monkeypatch.setattr(transactional_producer, "OFFSETS_AT_ONCE", 2)

    async def test(access: ClusterAccess, topic: str, topic_id: bytes) -> None:
        group = unique("positions-")
        first, second = (access.transactions(group) for _ in range(2))
        await first.begin()
        for number in (1, 2, 3):
            batches = {(topic, 0): [plain(), plain()], (topic, 1): [plain()]} if number < 3 else {}
            ends = await first.commit(batches, group, {(topic, 0): CommittedOffset(number, f"term {number}")})
            assert ends == ({(topic, 0): 7 * number - 1, (topic, 1): 4 * number - 1} if number < 3 else {})

        async def all_committed() -> Mapping[tuple[str, int], CommittedOffset]:
            """Groups whose last transaction is being completed are left out."""
            async with asyncio.timeout(10):
                while True:
                    found = await access.committed_offsets([group], stable=True)
                    if group in found:
                        return found[group]
                    await asyncio.sleep(0.01)

        async def committed() -> CommittedOffset:
            return (await all_committed())[topic, 0]

        assert await committed() == CommittedOffset(3, "term 3")
        assert [await access.last_stable_offset(topic, index) for index in (0, 1)] == [14, 8]  # a marker each time
        await second.begin()
        with pytest.raises(ProducerFenced, match=group):
            await first.commit({(topic, 0): [plain()]}, group, {(topic, 0): CommittedOffset(4, "fenced")})
        with pytest.raises(OurBug, match="begin first"):
            await first.commit({}, group, {(topic, 0): CommittedOffset(4, "in doubt")})
        assert await committed() == CommittedOffset(3, "term 3")
        many = {(topic, partition): CommittedOffset(7, "") for partition in range(3)}  # more than one request has
        ends = await second.commit({(topic, 0): [plain()]}, group, many)
        assert ends == {(topic, 0): 17}, "nothing of the one that was fenced is there"
        assert await all_committed() == many

    on_cluster(kafka_of_each_version, test)


def test_a_transaction_of_which_a_partition_is_refused_is_aborted_and_the_next_one_follows(
    kafka_of_each_version: KafkaCluster,
) -> None:
    async def test(access: ClusterAccess, topic: str, topic_id: bytes) -> None:
        group, large = unique("positions-"), batch(3, 500_000)
        transactions = access.transactions(group)
        await transactions.begin()
        for number in range(2):
            if number:
                await transactions.open([(topic, 0), (topic, 1)], group)
            with pytest.raises(PartitionsRefused, match=f"{topic}-1: ") as refused:
                await transactions.commit(
                    {(topic, 0): [plain()], (topic, 1): [large]}, group, {(topic, 0): CommittedOffset(7, "aborted")}
                )
            ((place, (error, records, size)),) = refused.value.refused.items()
            assert (place, error.error_name) == ((topic, 1), "MESSAGE_TOO_LARGE")
            assert (records, size, refused.value.ends) == (3, len(large), {})
        with pytest.raises(PartitionsRefused, match="UNKNOWN_TOPIC_OR_PARTITION: no-such-topic-0"):
            await transactions.open([("no-such-topic", 0), (topic, 0)], group)
        await transactions.open([(topic, 0)], group)
        kept = {(topic, 0): CommittedOffset(8, "committed")}
        ends = await transactions.commit({(topic, 0): [plain()], (topic, 1): [plain()]}, group, kept)
        assert ends[topic, 0] >= 2 * 4 + 3, "what was aborted, with markers, and this"
        async with asyncio.timeout(10):
            while True:  # until the transaction is complete
                stable = await access.last_stable_offset(topic, 1)
                found = await access.committed_offsets([group], stable=True)
                if stable > ends[topic, 1] and group in found:
                    break
                await asyncio.sleep(0.01)
        assert found[group] == kept
        connection = await access.fetch_connection(1, "test")
        wanted = [FetchPartition(topic_id, 1, 0, 1 << 20)]
        (fetched,) = await connection.fetch(wanted, 0, 1 << 20, read_committed=True)
        committed = [header.next_offset for _, _, header in walk(fetched.records) if not header.is_control]
        assert committed == [ends[topic, 1]]

    on_cluster(kafka_of_each_version, test)
