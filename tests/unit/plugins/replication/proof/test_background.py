"""What both clusters hold is compared in the background: whole plugins on model clusters."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from support.fake_cluster import FakeFetchConnection
from support.partition_log import Partition, batch
from support.plugins import Two, on_two

from isthmus_control.proofs import Proof
from isthmus_plugins import links
from isthmus_plugins.cluster import Fetched
from isthmus_plugins.replication.comparison import digests
from isthmus_plugins.replication.logs import reading
from isthmus_plugins.replication.proof import background
from isthmus_plugins.replication.proof.background import BackgroundVerification

STEP_S = 0.5


def on_a_link(work: Callable[[Two], Awaitable[None]], every_s: float | None = None) -> None:
    """Topics ``l-`` of A follow as ``r-`` at B."""

    async def linked(two: Two) -> None:
        await two.create()
        await two.connected()
        await two.a.links.attach("a-to-b", links.Attach(local="l-", remote="r-", role="leader"))
        if every_s is not None:
            await verify_every(two, str(int(every_s * 1000)))
        await work(two)

    on_two(linked, timeout_s=100_000)


async def verify_every(two: Two, value: str) -> None:
    await two.b.links.alter("a-to-b", links.AlterLink(config={"verify.every.ms": value}))


async def copied(two: Two, batches: int = 20, topic: str = "t", **config: Any) -> tuple[Partition, Partition]:
    source = two.clusters["A"].add_topic(f"l-{topic}", **config).partitions[0]
    for number in range(batches):
        source.write_values(b"%d" % number, b"more", attributes=number % 5)
    await two.until("copied", lambda: of(two, topic) is not None and of(two, topic).end == source.end)
    return source, of(two, topic)


def of(two: Two, topic: str = "t") -> Any:
    """The follower's partition; None: it is not made yet."""
    name = f"r-{topic}"
    return two.clusters["B"].partition(name) if name in two.clusters["B"].found else None


def shown(two: Two, topic: str = "t") -> links.PartitionStatus:
    (found,) = (each for each in two.b.status().partitions if each.topic == f"r-{topic}")
    return found


def recorded(two: Two, topic: str = "t") -> Proof | None:
    return two.controls["B"].state.follower_topics[f"r-{topic}"].proofs.get(0)


async def slowly(what: str, ready: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """What is looked for takes seconds, and a status costs a millisecond."""
    for _ in range(int(timeout_s / STEP_S)):
        if ready():
            return
        await asyncio.sleep(STEP_S)
    raise AssertionError(what)


async def equal(two: Two, until: int, topic: str = "t", timeout_s: float = 60.0) -> None:
    await slowly(f"{topic} equal until {until}", lambda: shown(two, topic).equal_until == until, timeout_s)


async def whole(two: Two, topic: str = "t") -> None:
    """A pass has been over all."""
    await slowly("a pass", lambda: shown(two, topic).verified_seconds is not None)


def test_what_follows_is_compared_to_its_end_and_on_and_that_is_shown_and_recorded() -> None:
    async def work(two: Two) -> None:
        source, _ = await copied(two)
        await equal(two, 40)
        await whole(two)
        status = two.b.status()
        assert (status.verify_every_seconds, status.state) == (7 * 86_400, "Following")
        assert status.verified_seconds == shown(two).verified_seconds
        source.write_values(b"new")
        await equal(two, 41)
        assert (two.a.status().partitions[0].equal_until, two.a.status().verified_seconds) == (None, None)
        await slowly("recorded", lambda: recorded(two) is not None, 120)
        proof = recorded(two)
        assert proof is not None
        assert (proof.equal_until, proof.at, proof.difference) == (41, 41, None)
        assert proof.passed_ms == proof.begun_ms > 0

    on_a_link(work)


def test_what_has_nothing_costs_nothing() -> None:
    """There are thousands of new topics."""

    async def work(two: Two) -> None:
        asked = list[str]()
        end_of = two.b.context.cluster.last_stable_offset

        async def last_stable_offset(topic: str, partition: int) -> int:
            asked.append(topic)
            return await end_of(topic, partition)

        two.b.context.cluster.last_stable_offset = last_stable_offset  # type: ignore[method-assign]
        source, _ = await copied(two, 0)
        await slowly("it follows", lambda: bool(two.b.status().partitions))
        await whole(two)
        await asyncio.sleep(2 * background.RECORD_S)
        assert (asked, recorded(two), shown(two).equal_until) == ([], None, 0)
        source.write_values(b"first")
        await equal(two, 1)
        assert set(asked) == {"r-t"}

    on_a_link(work)


@pytest.mark.parametrize("side", ["A", "B"])
@pytest.mark.parametrize("what", ["value", "crc", "length"])
def test_a_byte_that_changed_after_it_was_equal_is_told(side: str, what: str) -> None:
    async def work(two: Two) -> None:
        partition = dict(zip("AB", await copied(two), strict=True))[side]
        await equal(two, 40)
        damaged = bytearray(partition.log[10])
        damaged[{"value": -3, "crc": 17, "length": 8}[what]] ^= 1
        partition.log[10] = bytes(damaged)
        await slowly("told", lambda: shown(two).differs_at is not None, 120)
        status = shown(two)
        assert (status.differs_at, status.equal_until, status.state) == (20, 20, "Following")
        assert status.reason == "LOGS_DIFFER"
        where = "this cluster's log" if side == "B" else "the source's log"
        assert what == "length" or f"{where} cannot be read" in str(status.message)
        link = two.b.status()
        assert link.reason == "LOGS_DIFFER"
        assert "r-t-0" in str(link.message)
        proof = recorded(two)
        assert proof is not None
        assert proof.difference is not None, "at once"

    on_a_link(work, every_s=8)


def test_a_record_that_differs_is_named_and_told_until_it_is_equal_again() -> None:
    async def work(two: Two) -> None:
        _, target = await copied(two)
        await equal(two, 40)
        was = target.log[10]
        target.log[10] = batch(20, [b"10", b"other"])
        await slowly("told", lambda: shown(two).differs_at == 21, 120)
        assert "offset 21 is not what the source's l-t has there" in str(shown(two).message)
        await asyncio.sleep(20)
        assert shown(two).differs_at == 21
        target.log[10] = was
        await slowly("equal again", lambda: shown(two).differs_at is None)
        await equal(two, 40)
        assert (shown(two).reason, two.b.status().reason) == (None, None)

    on_a_link(work, every_s=8)


def test_an_acknowledged_difference_is_told_no_more_before_the_next_pass() -> None:
    async def work(two: Two) -> None:
        source, target = await copied(two)
        await equal(two, 40)
        target.log[10] = batch(20, [b"10", b"other"])
        await slowly("told", lambda: shown(two).differs_at == 21, 200)
        done = await two.b.links.acknowledge("a-to-b")
        assert done.acknowledged == 1
        assert (shown(two).differs_at, shown(two).reason) == (None, None)
        source.write_values(b"new")
        await asyncio.sleep(15)
        assert (shown(two).differs_at, shown(two).equal_until) == (None, 21), "the pass went on, what is equal did not"
        await slowly("told again", lambda: shown(two).differs_at == 21, 200)

    on_a_link(work, every_s=100)


def test_a_proxy_that_gets_a_partition_goes_on_where_it_was() -> None:
    async def work(two: Two) -> None:
        source, _ = await copied(two)
        await equal(two, 40)
        await slowly("recorded", lambda: recorded(two) is not None, 120)
        parts = two.b.plugin.parts
        await parts.background_verification.stop()
        started: Any = BackgroundVerification(parts.context, parts.follower_end, parts.digests)
        started.start()
        await asyncio.sleep(20)
        record = two.controls["B"].state.follower_topics["r-t"]
        found = started.shown(record, 0)
        assert (found.equal_until, found.age_seconds > 20, started.bytes_read) == (40, True, 0)
        source.write_values(b"new")
        await slowly("goes on", lambda: started.shown(record, 0).equal_until == 41)
        assert started.bytes_read < 200
        await started.stop()

    on_a_link(work)


def test_what_the_control_log_does_not_take_is_recorded_later(caplog: pytest.LogCaptureFixture) -> None:
    async def work(two: Two) -> None:
        source, _ = await copied(two)
        two.controls["B"].trouble = 2.0  # no record gets there
        await equal(two, source.end)
        await slowly("tried", lambda: "proofs of equality not recorded" in caplog.messages, 120)
        assert recorded(two) is None
        assert "task failed" not in caplog.messages
        two.controls["B"].trouble = 0.0
        await slowly("recorded", lambda: recorded(two) is not None, 120)

    on_a_link(work)


def test_it_is_compared_as_often_as_is_set_or_not_at_all() -> None:
    async def work(two: Two) -> None:
        await verify_every(two, "off")
        await slowly("told", lambda: two.a.status().verify_every_seconds is None)
        await copied(two)
        await asyncio.sleep(20)
        assert (shown(two).equal_until, two.b.status().verify_every_seconds) == (None, None)
        await verify_every(two, "20000")
        await equal(two, 40)
        for _ in range(3):
            await asyncio.sleep(15)
            assert (shown(two).verified_seconds or 99) < 20
        with pytest.raises(links.OperationError, match="milliseconds from 1000"):
            await verify_every(two, "7d")

    on_a_link(work)


def test_compacted_topics_are_compared_by_the_latest_records_and_too_many_keys_are_left_to_operators(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def work(two: Two) -> None:
        source = two.clusters["A"].add_topic("l-t", configs={"cleanup.policy": "compact"}).partitions[0]
        for number in range(30):
            source.write_values(b"%d" % number, keys=[b"k%d" % (number % 7)])
        await two.until("copied", lambda: of(two) is not None and of(two).end == source.end)
        source.compact(20, drop_tombstones=True)
        await equal(two, 30)
        await whole(two)
        monkeypatch.setattr(background, "KEYS_MAX", 3)
        monkeypatch.setattr(background, "TOO_MANY_KEYS_RETRY_S", 20.0)
        await slowly("not compared", lambda: shown(two).verify_trouble is not None, 120)
        assert "more than 3 keys" in str(shown(two).verify_trouble)
        assert shown(two).differs_at is None
        monkeypatch.setattr(background, "KEYS_MAX", 7)
        await slowly("compared", lambda: shown(two).verify_trouble is None, 60)

    on_a_link(work, every_s=8)


@pytest.mark.parametrize("side", ["A", "B"])
def test_what_retention_takes_on_one_side_differs_from_nothing(side: str) -> None:
    async def work(two: Two) -> None:
        await copied(two)
        await equal(two, 40)
        cluster, topic = two.clusters[side], "l-t" if side == "A" else "r-t"
        await cluster.delete_records(topic, 0, 20)
        before = two.now_ms
        await slowly("passes", lambda: (shown(two).verified_seconds or 1e9) < (two.now_ms - before) / 1000, 300)
        assert (shown(two).equal_until, shown(two).differs_at) == (40, None)

    on_a_link(work, every_s=8)


def test_transactions_are_compared_when_they_have_ended() -> None:
    async def work(two: Two) -> None:
        source, target = await copied(two, 2)
        source.transact(7, [b"a", b"b"], committed=True)
        await equal(two, source.end)
        source.transact(7, [b"a", b"b"], committed=False)
        await two.until("copied", lambda: target.end == source.end)
        await equal(two, source.end)

    on_a_link(work)


def test_nothing_is_compared_while_a_partition_catches_up() -> None:
    async def work(two: Two) -> None:
        await copied(two)
        await equal(two, 40)
        source, target = await copied(two, 1, "u")
        await equal(two, 2, "u")
        stream = next(each for each in two.b.plugin.parts.follower_end.streams() if each.topic == "r-u")
        stream.note_source_end(100, 5_000)
        first = two.clusters["A"].partition("l-t")
        first.write_values(b"new")
        await asyncio.sleep(20)
        assert shown(two).equal_until == 40
        source.write_values(*[b"x"] * 98)
        await two.until("copied", lambda: target.end == source.end == 100)
        await equal(two, 41)
        await equal(two, 100, "u")

    on_a_link(work)


def test_reading_is_paced_and_both_sides_read_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "PIECE_BYTES", 2_000)
    monkeypatch.setattr(background, "PIECE_BYTES_MIN", 2_000)
    monkeypatch.setattr(background, "PIECE_COST", 0)
    monkeypatch.setattr(reading, "BATCH_COST", 0)
    monkeypatch.setattr(background, "BYTES_PER_S", 1_000.0)
    monkeypatch.setattr(digests, "READ_BYTES_MIN", 1)

    async def work(two: Two) -> None:
        source = two.clusters["A"].add_topic("l-t").partitions[0]
        for _ in range(250):
            source.write_values(bytes(1_000))
        await two.until("copied", lambda: of(two) is not None and of(two).end == source.end)
        read = {"A": 0, "B": 0}
        fetch = FakeFetchConnection.fetch

        async def counted(self: Any, partitions: Any, *args: Any, **more: Any) -> list[Fetched]:
            found = await fetch(self, partitions, *args, **more)
            if args[1] <= 2_000:
                read["A" if self._cluster is two.clusters["A"] else "B"] += sum(len(each.records) for each in found)
            return found

        monkeypatch.setattr(FakeFetchConnection, "fetch", counted)
        begun = asyncio.get_running_loop().time()
        await equal(two, 250, timeout_s=400)
        took = asyncio.get_running_loop().time() - begun
        assert 240 < took < 290
        assert read["B"] <= read["A"] * 1.05
        assert read["A"] <= read["B"] * 1.05
        assert two.b.plugin.parts.background_verification.bytes_read >= 250_000

    on_a_link(work)


@pytest.mark.parametrize(("value_bytes", "most"), [(200, 30_000), (100_000, 300_000)])
def test_a_piece_of_small_batches_has_fewer_bytes_and_costs_no_more(
    monkeypatch: pytest.MonkeyPatch, value_bytes: int, most: int
) -> None:
    """Clients wait for as long as a piece takes, which goes by its batches where they are small."""
    monkeypatch.setattr(background, "PIECE_BYTES", 300_000)
    monkeypatch.setattr(background, "PIECE_BYTES_MIN", 5_000)
    monkeypatch.setattr(digests, "READ_BYTES_MIN", 1)

    async def work(two: Two) -> None:
        source = two.clusters["A"].add_topic("l-t").partitions[0]
        for _ in range(1_000 if value_bytes == 200 else 20):
            source.write_values(bytes(value_bytes))
        await two.until("copied", lambda: of(two) is not None and of(two).end == source.end)
        pieces = {"A": list[tuple[int, int]](), "B": list[tuple[int, int]]()}
        digest = digests.Verification.digest

        async def noted(self: Any, topic: Any, *args: Any) -> Any:
            found = await digest(self, topic, *args)
            reads = args[4]
            pieces["A" if topic.name == "l-t" else "B"].append((reads.bytes, reads.cost))
            return found

        monkeypatch.setattr(digests.Verification, "digest", noted)
        await equal(two, source.end)
        for side in pieces.values():
            sizes, costs = zip(*side[1:], strict=True)  # the first one goes by what was read while it was copied
            assert max(sizes) <= most
            assert max(sizes) > most // 2, "a question for each"
            assert max(costs) <= 300_000 + value_bytes + reading.BATCH_COST

    on_a_link(work)


def test_a_peer_that_does_not_know_digests_of_the_background_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "BACKGROUND_DIGESTS", "of the future")

    async def work(two: Two) -> None:
        await copied(two)
        await asyncio.sleep(20)
        assert shown(two).equal_until is None

    on_a_link(work)
