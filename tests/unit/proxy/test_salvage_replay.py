"""A replay on the model of a broker: what it appends, once, wherever it is killed and given again."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.fake_cluster import run_simulated
from support.partition_log import Partition, batch, control_batch, decoded
from support.seeds import seeds

from isthmus.errors import ConnectionLost, KafkaError
from isthmus.kafka.results import (
    Fetched,
    ListedOffset,
    PartitionInfo,
    Produced,
    ProducerIdentity,
    Producers,
    ProducerState,
    TopicInfo,
    TopicPartition,
)
from isthmus.salvage_files import notes_in
from isthmus.salvage_replay import EARLIEST, Outcome, ReplayRefused, SalvageReplay
from isthmus_protocol.error_codes import MESSAGE_TOO_LARGE, NETWORK_EXCEPTION, NOT_LEADER_OR_FOLLOWER
from isthmus_protocol.producer_ids import ProducerIdRange
from isthmus_protocol.record_codec import Record, encode_batch
from isthmus_protocol.records import LOG_APPEND_TIME_BIT, TRANSACTIONAL_BIT, BatchHeader, Compression, whole_header
from isthmus_protocol.salvage import Salvage, SalvageHead, SalvageWriter, read_salvage
from isthmus_protocol.salvaged_records import Fate, fates

TOPIC = "t"
FIRST = 11
PLACE = TopicPartition(TOPIC, 0)


class Killed(BaseException):
    """The process ends here."""


class Client:
    """What a replay asks of a cluster, answered by one partition."""

    cluster_id = "C"

    def __init__(self, partition: Partition, partitions: int = 1) -> None:
        self.partition = partition
        self.partitions = partitions
        self.topic_id = uuid.UUID(int=5, version=4)
        self.producers = 0
        self.bytes_max = 1 << 20
        self.fate: Callable[[bytes], tuple[bool, int | BaseException | None]] = lambda batch: (True, None)
        """Whether a batch is appended, and what comes of it then: an answer, an error code, or an exception."""

    async def refresh(self, topics: object = None) -> Mapping[str, TopicInfo]:
        found = {each: PartitionInfo(each, 1, 0, (1,), (1,)) for each in range(self.partitions)}
        return {TOPIC: TopicInfo(TOPIC, self.topic_id, False, found)}

    async def list_offsets(
        self, wanted: Mapping[TopicPartition, int], *, isolation: int = 0
    ) -> dict[TopicPartition, ListedOffset]:
        offset = self.partition.start if wanted[PLACE] == EARLIEST else self.partition.high_watermark
        return {PLACE: ListedOffset(self.partition.end if isolation < 0 else offset, -1, -1, None)}

    async def fetch(self, topic: str, partition: int, offset: int) -> Fetched:
        end = self.partition.high_watermark
        return Fetched(self.partition.read(offset, 4_000, end), end, end, self.partition.start, (), None)

    async def init_producer_id(self) -> ProducerIdentity:
        self.producers += 1
        return ProducerIdentity(1000 + self.producers, 0)

    async def describe_producers(self, places: object) -> dict[TopicPartition, Producers]:
        known = [
            ProducerState(each, producer.epoch, producer.last_sequence, 0, 0, -1)
            for each, producer in self.partition.producers.items()
        ]
        return {PLACE: Producers(tuple(known), None)}

    async def retrying(self, attempt: Callable[[], Any], *, topics: object) -> Any:
        return await attempt()

    async def produce_raw(self, batches: Mapping[TopicPartition, bytes]) -> dict[TopicPartition, Produced]:
        data = batches[PLACE]
        if len(data) > self.bytes_max:
            return {PLACE: Produced(-1, -1, -1, KafkaError(MESSAGE_TOO_LARGE))}
        appended, then = self.fate(data)
        code, offset = self.partition.produce(data) if appended else (0, -1)
        if isinstance(then, BaseException):
            raise then
        error = code or then
        return {PLACE: Produced(offset, -1, -1, KafkaError(error) if error else None)}


class Scene:
    """A salvage file, and what of it consumers are to see."""

    def __init__(self, directory: Path, *parts: bytes, to_offset: int | None = None) -> None:
        self.directory = directory
        head = SalvageHead("B", "l", "cut", "id", "s", 0, FIRST, to_offset or _end(parts), "WHY", "so", 1, "p")
        writer = SalvageWriter(head)
        content = [writer.head()]
        for part in parts:
            writer.add(part, whole_header(part))
            content.append(part)
        self.salvage: Salvage = read_salvage(b"".join((*content, writer.tail())))
        self.partition = Partition(1)
        self.partition.write_values(b"before")
        self.client = Client(self.partition)
        self._notes: dict[Path, bytes] = {}

    def replay(self, partition: int | None = None) -> SalvageReplay:
        client: Any = self.client
        return SalvageReplay(client, self.salvage, TOPIC, partition, self.directory)

    async def run(self, again: bool = False) -> Outcome:
        """Whoever is killed writes nothing any more: the note stays as it was then."""
        try:
            return await self.replay().run(self._progressed, again)
        except Killed:
            for path, content in self._notes.items():
                path.write_bytes(content)
            raise

    def _progressed(self, done: int, total: int) -> None:
        """A chunk is sent next."""
        self._notes = {path: path.read_bytes() for path in self.directory.iterdir()}

    @property
    def values(self) -> list[bytes | None]:
        return [each.value for each in self.partition.records().values()][1:]


def _end(parts: tuple[bytes, ...]) -> int:
    return whole_header(parts[-1]).next_offset


def _plain(base: int, count: int, size: int = 1, **more: Any) -> bytes:
    return batch(base, [b"%d" % (base + each) * size for each in range(count)], **more)


def _transaction(base: int, count: int, producer_id: int) -> bytes:
    return _plain(base, count, producer_id=producer_id, producer_epoch=0, base_sequence=0, attributes=TRANSACTIONAL_BIT)


def test_what_was_committed_goes_again_and_what_was_not_is_said(tmp_path: Path) -> None:
    filler = ProducerIdRange(1).filler_id(1)
    parts = (
        _plain(9, 4),  # the cut goes through it
        _transaction(13, 2, producer_id=1),
        _transaction(15, 2, producer_id=2),
        control_batch(17, True, producer_id=1, producer_epoch=0),
        _transaction(18, 1, producer_id=1),
        control_batch(19, False, producer_id=2, producer_epoch=0),
        _plain(20, 1, producer_id=filler, producer_epoch=0, base_sequence=0, attributes=TRANSACTIONAL_BIT),
        _plain(21, 1),
    )

    async def main() -> None:
        scene = Scene(tmp_path, *parts)
        assert fates(scene.salvage) == [
            Fate.PLAIN,
            Fate.COMMITTED,
            Fate.ABORTED,
            Fate.MARKER,
            Fate.OPEN,
            Fate.MARKER,
            Fate.FILLER,
            Fate.PLAIN,
        ]
        plan = await scene.replay().plan()
        assert (plan.records, plan.already, plan.fates[Fate.ABORTED], plan.fates[Fate.OPEN]) == (5, 0, 2, 1)
        assert not list(tmp_path.iterdir())
        done = await scene.run()
        assert (done.appended, done.first_offset, done.last_offset) == (5, 1, 5)
        assert scene.values == [b"11", b"12", b"13", b"14", b"21"]
        (note,) = notes_in(tmp_path)
        assert (note.acked, note.records, note.done_ms > 0) == (5, 5, True)
        assert (await scene.run()).appended == 0
        assert (await scene.run(again=True)).appended == 5
        assert len(scene.values) == 10

    run_simulated(main())


@pytest.mark.parametrize("codec", Compression)
def test_records_are_as_they_were(tmp_path: Path, codec: Compression) -> None:
    records = [
        Record(11, 1_000, None, b"v", (("h", b"\xff"), ("h", None))),
        Record(12, 900, b"k", None),
        Record(13, -1, b"", b""),
        Record(14, 2_000, b"\x00", b"x" * 300_000),
    ]
    like = BatchHeader(11, 0, 0, 2, 0, 0, 0, 0, 0, -1, -1, -1, 0)
    stamped = batch(15, [b"s"], attributes=LOG_APPEND_TIME_BIT, timestamp=77)

    async def main() -> None:
        scene = Scene(tmp_path, encode_batch(records, like, compression=codec), stamped)
        await scene.run()
        found = list(scene.partition.records().values())[1:]
        assert [each[1:] for each in found[:4]] == [each[1:] for each in records]
        assert (found[4].value, found[4].timestamp) == (b"s", 77)
        headers = scene.partition.headers[1:]
        assert {header.compression for header in headers[:-1]} == {codec}
        assert headers[0].base_sequence == 0

    run_simulated(main())


@pytest.mark.parametrize("seed", seeds(12))
def test_killed_anywhere_it_goes_on_and_doubles_nothing(tmp_path: Path, seed: int) -> None:
    """Batches are appended, or not, their answers come, are lost, or the process ends; others write meanwhile."""
    chance = random.Random(seed)
    parts, base = [], FIRST
    for _ in range(12):
        count = chance.randrange(1, 40)
        parts.append(_plain(base, count, size=chance.choice((1, 50, 3_000))))
        base += count + chance.randrange(3)

    async def main() -> None:
        scene = Scene(tmp_path, *parts)
        late: list[bytes] = []

        def fate(data: bytes) -> tuple[bool, int | BaseException | None]:
            if chance.random() < 0.3:
                scene.partition.write_values(b"other")
            if late and chance.random() < 0.5:
                scene.partition.produce(late.pop())  # which a killed process had sent
            kind = chance.choice(("well", "well", "lost", "moved", "refused", "killed", "on its way"))
            if kind == "on its way":
                late[:] = [data]
                return False, Killed()
            return kind in ("well", "lost", "killed"), {
                "well": None,
                "lost": NETWORK_EXCEPTION,
                "moved": NOT_LEADER_OR_FOLLOWER,
                "refused": ConnectionLost("gone"),
                "killed": Killed(),
            }[kind]

        scene.client.fate = fate
        scene.client.bytes_max = chance.choice((1 << 20, 20_000))
        for _ in range(200):
            try:
                await scene.run()
                break
            except (Killed, ConnectionLost, KafkaError):
                if late and chance.random() < 0.3:
                    scene.partition.produce(late.pop())
        else:
            pytest.fail("it does not come to an end")
        wanted = [record.value for part in parts for record in decoded(part)]
        assert [each for each in scene.values if each != b"other"] == wanted, scene.partition.describe()
        assert scene.client.producers == 1

    run_simulated(main())


def test_what_retention_deleted_of_a_killed_replay_is_known_by_the_broker_or_an_error(tmp_path: Path) -> None:
    async def main() -> None:
        scene = Scene(tmp_path, _plain(FIRST, 400, size=1_000))
        chunks = 0

        def fate(data: bytes) -> tuple[bool, BaseException | None]:
            nonlocal chunks
            chunks += 1
            return True, Killed() if chunks == 2 else None

        scene.client.fate = fate
        with pytest.raises(Killed):
            await scene.run()
        scene.partition.delete_records(-1)
        known = scene.partition.producers.copy()
        scene.partition.producers.clear()
        (note,) = notes_in(tmp_path)
        assert note.acked == 0
        with pytest.raises(ReplayRefused) as refused:
            await scene.run()
        assert refused.value.code == "PROGRESS_UNKNOWN"
        scene.partition.producers.update(known)
        before = known[note.producer_id].last_sequence + 1
        assert 0 < before < 400
        assert (await scene.run()).appended == 400 - before

    run_simulated(main())


def test_a_topic_that_is_not_there_or_another_one_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        scene = Scene(tmp_path, _plain(FIRST, 3))
        with pytest.raises(ReplayRefused) as refused:
            await scene.replay(partition=4).plan()
        assert refused.value.code == "NO_SUCH_PARTITION"
        scene.client.fate = lambda data: (True, Killed())
        with pytest.raises(Killed):
            await scene.run()
        scene.client.topic_id = uuid.UUID(int=6, version=4)
        with pytest.raises(ReplayRefused) as refused:
            await scene.run()
        assert refused.value.code == "TOPIC_REPLACED"
        scene.client.fate = lambda data: (True, None)
        assert (await scene.run(again=True)).appended == 3

    run_simulated(main())


def test_a_record_that_is_too_large_by_itself_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        scene = Scene(tmp_path, _plain(FIRST, 3, size=100), _plain(FIRST + 3, 1, size=5_000))
        scene.client.bytes_max = 400
        with pytest.raises(KafkaError, match="MESSAGE_TOO_LARGE"):
            await scene.run()
        assert len(scene.values) == 3
        scene.client.bytes_max = 1 << 20
        assert (await scene.run()).appended == 1

    asyncio.run(main())
