"""What is given of a partition at once: where that ends, and that what follows goes on right there."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_cluster import FakeCluster, run_simulated
from support.partition_log import TIMESTAMP, Partition

from isthmus_plugins.distribution.copies import Copies
from isthmus_plugins.distribution.copy_flags import HEADER_NAME
from isthmus_plugins.distribution.positions import Course, Stretch, Term
from isthmus_plugins.distributor import reads as reads_module
from isthmus_plugins.distributor.parcels import Parcel, Prepared
from isthmus_plugins.distributor.reads import Reads
from isthmus_protocol.record_codec import Record, decode_records, encode_batch
from isthmus_protocol.records import PLAIN_HEADER, Compression, whole_header

PLACE = ("t", 0)
COURSE = Course((Stretch(Term(1, 0), "x", 0, 0),))
PAYLOAD_MAX = 100
"""Bytes of a batch that is made: two messages of those that are written here."""
SOME = st.lists(st.tuples(st.booleans(), st.sampled_from("abc")), min_size=1, max_size=5)
"""Messages: whether their flags can be read, and their keys."""


def write(log: Partition, *messages: tuple[bool, str], compression: Compression = Compression.NONE) -> None:
    """One batch, by whoever leads the log now."""
    records = [
        Record(number, TIMESTAMP + number, key.encode(), b"v", () if is_read else ((HEADER_NAME, b"?"),))
        for number, (is_read, key) in enumerate(messages)
    ]
    log.produce(encode_batch(records, PLAIN_HEADER, compression=compression))


def parcels(written: Callable[[Partition], None], one_batch: bool = True) -> tuple[Partition, list[Parcel]]:
    """All of a log, each from where the one before ends."""
    cluster = FakeCluster(random.Random(0))
    log = cluster.add_topic("t").partitions[0]
    written(log)

    async def test() -> list[Parcel]:
        reads = Reads(cluster, "reads")  # type: ignore[arg-type]
        task = asyncio.get_running_loop().create_task(reads.run(await cluster.topics(), {PLACE: 0}))
        found: list[Parcel] = []
        position = 0
        while position < log.end:
            copies = Copies(HEADER_NAME.encode(), COURSE, 1, PAYLOAD_MAX if one_batch else 10**6, one_batch)
            prepared = Prepared(PLACE, copies, None)
            while position < log.end:
                await reads.wait()
                for read in reads.take(10**6):
                    if read.offset == position:  # others were read before it went back
                        prepared.add(read)
                        position = read.following
            found.append(prepared.parcel())
            position = found[-1].following
            reads.go_back(PLACE, position)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return found

    return log, run_simulated(test())


def keys(*given: Parcel) -> list[bytes | None]:
    return [record.key for each in given for batch in each.batches.get(PLACE, ()) for record in decode_records(batch)]


def refused(*given: Parcel) -> int:
    return sum(each.messages for parcel in given for each in parcel.refused)


def epoch_before(log: Partition, offset: int) -> int:
    return max(header.leader_epoch for header in log.headers if header.base_offset < offset)


def test_where_nothing_is_left_to_be_given_the_parcel_has_all() -> None:
    """Whatever stays here at the end, also in a batch that is compressed otherwise."""

    def written(log: Partition) -> None:
        write(log, (True, "a"), (True, "b"))
        write(log, (False, "c"), compression=Compression.GZIP)

    _, (parcel,) = parcels(written)
    assert (keys(parcel), parcel.following, parcel.is_all) == ([b"a", b"b"], 3, True)
    assert (parcel.messages, refused(parcel)) == (2, 1)


def test_what_stays_here_behind_the_first_batch_is_counted_once() -> None:
    """With the batch that it is read with again, though some of the same kind was before."""

    def written(log: Partition) -> None:
        write(log, (False, "a"), (True, "b"), (True, "c"), (True, "d"), (False, "e"), (True, "f"), (False, "g"))

    _, given = parcels(written)
    assert keys(*given) == [b"b", b"c", b"d", b"f"]
    assert len(given) > 1
    assert refused(*given) == 3


def test_the_leader_epoch_is_of_what_is_before_the_position() -> None:
    """Not of what was read behind it, which is given later: brokers are asked where that epoch ends."""

    def written(log: Partition) -> None:
        for key in "abcdef":
            write(log, (True, key))
            log.move(log.leader)

    log, given = parcels(written)
    assert keys(*given) == [b"a", b"b", b"c", b"d", b"e", b"f"]
    assert len(given) > 1
    assert [each.epoch for each in given] == [epoch_before(log, each.following) for each in given]


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(SOME, st.sampled_from(list(Compression))) | st.sampled_from(["committed", "aborted", "elected"]),
        min_size=1,
        max_size=8,
    ),
    st.booleans(),
    st.sampled_from([100, 10**6]),
)
def test_batch_by_batch_the_same_is_given(
    steps: list[tuple[list[tuple[bool, str]], Compression] | str], is_compacted: bool, bytes_read: int
) -> None:
    """Of logs with transactions, elections and what the cleaner leaves: nothing twice, and nothing left out."""

    def written(log: Partition) -> None:
        for number, step in enumerate(steps):
            if step == "elected":
                log.move(log.leader)
            elif isinstance(step, str):
                log.transact(number, [b"t%d" % number, b"d"], committed=step == "committed")
            else:
                write(log, *step[0], compression=step[1])
        if is_compacted:
            log.compact(log.end, drop_tombstones=True)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(reads_module, "PARTITION_BYTES", bytes_read)
        log, given = parcels(written)
        _, at_once = parcels(written, one_batch=False)
    assert keys(*given) == keys(*at_once)
    assert sum(each.messages for each in given) == len(keys(*given))
    assert refused(*given) == refused(*at_once)
    assert [each.is_all for each in given] == [False] * (len(given) - 1) + [True] * bool(given)
    for each in given:
        assert [whole_header(batch).record_count for batch in each.batches.get(PLACE, ())] == [each.messages] * bool(
            each.messages
        )
        assert each.messages or len(given) == 1
        assert each.epoch == epoch_before(log, each.following)
