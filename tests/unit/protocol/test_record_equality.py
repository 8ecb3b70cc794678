"""What counts as equal: each allowed difference, and everything else."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.partition_log import runs_of
from support.records import MIB, large_inside

from isthmus_plugins.decompression import PIECE_BYTES, decompressed
from isthmus_protocol.producer_ids import ProducerIdRange, carry, translate
from isthmus_protocol.record_codec import Record, decode_records, encode_batch
from isthmus_protocol.record_equality import (
    Difference,
    Equality,
    LatestDigest,
    RecordsDigest,
    batch_digest,
    equal_batches,
    first_difference,
)
from isthmus_protocol.records import (
    CONTROL_BIT,
    DELETE_HORIZON_BIT,
    HEADER_SIZE,
    LOG_APPEND_TIME_BIT,
    TRANSACTIONAL_BIT,
    BatchHeader,
    Compression,
    MalformedBatch,
    restamp,
    seal,
    whole_header,
)

NOW = 1_700_000_000_000
PLAIN = BatchHeader(0, 49, -1, 2, 0, 0, 0, 0, 0, -1, -1, -1, 1)
IDEMPOTENT = PLAIN._replace(producer_id=5, producer_epoch=2, base_sequence=30)
A, B = 0, 1
RECORDS = [Record(o, NOW + o, b"k%d" % o, b"v" * 40, (("h", b"x"),)) for o in range(10, 20)]


def change(batch: bytes, **changes: int) -> bytes:
    return seal(whole_header(batch)._replace(**changes), batch[HEADER_SIZE:])


def copied(batch: bytes, source: int, target: int) -> bytes:
    header = whole_header(batch)
    return restamp(
        batch,
        base_offset=header.base_offset,
        producer_id=carry(header.producer_id, source, target),
        producer_epoch=header.producer_epoch,
        base_sequence=header.base_sequence,
    )


def same(first: bytes, second: bytes, first_index: int = A, second_index: int = B) -> bool:
    """Whether two batches are equal as whole batches; digests and direct comparison have to agree."""
    by_digest = batch_digest(first, first_index) == batch_digest(second, second_index)
    directly = equal_batches(first, first_index, second, second_index)
    assert by_digest is (directly is Equality.BATCH)
    assert equal_batches(second, second_index, first, first_index) is directly
    return by_digest


# -- Whole batches -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", list(Compression))
@pytest.mark.parametrize("like", [PLAIN, IDEMPOTENT, IDEMPOTENT._replace(attributes=TRANSACTIONAL_BIT)])
def test_a_copy_is_equal_there_and_back(like: BatchHeader, compression: Compression) -> None:
    batch = encode_batch(RECORDS, like, compression=compression)
    there = copied(batch, A, B)
    assert same(batch, there)
    assert same(batch, copied(there, B, A), A, A)
    assert same(batch, change(there, leader_epoch=99))


def test_an_id_that_was_not_translated_is_another_producer() -> None:
    batch = encode_batch(RECORDS, IDEMPOTENT)
    assert not same(batch, batch)
    assert same(batch, batch, A, A)
    assert not same(batch, change(batch, producer_id=translate(6, A)))


def test_plain_batches_may_be_stamped() -> None:
    batch = encode_batch(RECORDS, PLAIN)
    stamp = ProducerIdRange(A).stamp_id(3)
    stamped = restamp(batch, base_offset=10, producer_id=stamp, producer_epoch=0, base_sequence=4711)
    assert same(batch, stamped)
    assert same(batch, stamped, A, 2)
    # A producer's own batch is another thing, whatever its id.
    assert not same(batch, change(stamped, producer_id=translate(3, A)))


@pytest.mark.parametrize(
    "changes",
    [
        {"base_offset": 11},
        {"last_offset_delta": 10},
        {"base_timestamp": NOW + 11},
        {"max_timestamp": NOW + 20},
        {"record_count": 9},
        {"producer_epoch": 3},
        {"base_sequence": 31},
        {"attributes": TRANSACTIONAL_BIT},
        {"attributes": LOG_APPEND_TIME_BIT},
        {"attributes": DELETE_HORIZON_BIT},
    ],
)
def test_everything_else_in_a_header_has_to_be_the_same(changes: dict[str, int]) -> None:
    batch = encode_batch(RECORDS, IDEMPOTENT)
    assert batch_digest(batch, A) != batch_digest(change(copied(batch, A, B), **changes), B)


@given(st.integers(HEADER_SIZE, HEADER_SIZE + 500), st.integers(1, 255))
def test_every_byte_of_the_payload_has_to_be_the_same(position: int, flip: int) -> None:
    batch = encode_batch(RECORDS, IDEMPOTENT)
    other = bytearray(batch)
    other[min(position, len(batch) - 1)] ^= flip
    assert batch_digest(batch, A) != batch_digest(other, A)


def marker(kind: int = 1, coordinator_epoch: int = 5, timestamp: int = NOW, offset: int = 20, **changes: int) -> bytes:
    record = Record(offset, timestamp, struct.pack(">hh", 0, kind), struct.pack(">hi", 0, coordinator_epoch))
    attributes = CONTROL_BIT | TRANSACTIONAL_BIT
    return change(
        encode_batch([record], PLAIN._replace(attributes=attributes)),
        **{"producer_id": 5, "producer_epoch": 2, **changes},
    )


def test_markers_may_differ_in_what_the_target_writes_itself() -> None:
    theirs = translate(5, A)
    assert same(marker(), marker(producer_id=theirs))
    assert same(marker(), marker(timestamp=NOW + 5000, producer_id=theirs))
    assert same(marker(), marker(coordinator_epoch=9, producer_id=theirs))
    for other in (
        marker(kind=0, producer_id=theirs),
        marker(offset=21, producer_id=theirs),
        marker(producer_id=translate(6, A)),
        marker(producer_id=theirs, producer_epoch=3),
    ):
        assert not same(marker(), other)
        assert equal_batches(marker(), A, other, B) is Equality.DIFFERENT


def test_control_records_of_another_kind_have_to_be_the_same_bytes() -> None:
    assert same(marker(kind=2), marker(kind=2), A, A)
    assert not same(marker(kind=2), marker(kind=2, coordinator_epoch=6), A, A)


def test_a_marker_is_not_a_record() -> None:
    record = encode_batch([Record(20, NOW, b"k", b"v")], PLAIN)
    assert equal_batches(marker(), A, record, B) is Equality.DIFFERENT


def test_digests_refuse_what_is_no_batch() -> None:
    with pytest.raises(MalformedBatch):
        batch_digest(b"", A)
    with pytest.raises(MalformedBatch):
        add(RecordsDigest(), encode_batch(RECORDS, PLAIN)[:-1])


# -- Records -----------------------------------------------------------------------------------------------------------


def add(digest: RecordsDigest, batch: bytes, **how: Any) -> None:
    """Add a batch's records, all at once."""
    for _ in digest.adding(batch, decompressed(batch), **how):
        pass


def records_digest(*batches: bytes, from_offset: int = 0) -> bytes:
    digest = RecordsDigest()
    for batch in batches:
        add(digest, batch, from_offset=from_offset)
    return digest.digest()


def test_re_encoded_batches_are_equal_by_their_records() -> None:
    holes = encode_batch([r for r in RECORDS if r.offset not in (13, 14, 17)], PLAIN, compression=Compression.LZ4)
    runs = [run.batch for run in runs_of(holes) if run.batch]
    assert len(runs) == 3
    assert records_digest(holes) == records_digest(*runs)
    assert records_digest(holes) != records_digest(*runs[:2])
    assert equal_batches(holes, A, encode_batch(decode_records(holes), PLAIN), B) is Equality.RECORDS


def test_append_time_copies_are_equal_by_their_records() -> None:
    batch = change(encode_batch(RECORDS, PLAIN), attributes=LOG_APPEND_TIME_BIT, max_timestamp=NOW + 500)
    assert equal_batches(batch, A, runs_of(batch)[0].batch or b"", B) is Equality.RECORDS
    # The same bytes without the bit are other times.
    assert equal_batches(batch, A, encode_batch(RECORDS, PLAIN), B) is Equality.DIFFERENT


def test_markers_and_earlier_records_are_left_out() -> None:
    batch = encode_batch(RECORDS, PLAIN)
    assert records_digest(batch, marker()) == records_digest(batch)
    assert records_digest(batch, from_offset=15) == records_digest(encode_batch(RECORDS[5:], PLAIN))
    digest = RecordsDigest()
    add(digest, batch, from_offset=15)
    add(digest, marker())
    assert digest.records == 5


CHANGES: list[tuple[str, Callable[[Record], Record]]] = [
    ("timestamp", lambda r: r._replace(timestamp=r.timestamp + 1)),
    ("key", lambda r: r._replace(key=None)),
    ("key", lambda r: r._replace(key=b"")),
    ("value", lambda r: r._replace(value=None)),
    ("value", lambda r: r._replace(value=b"w" * 40)),
    ("headers", lambda r: r._replace(headers=())),
    ("headers", lambda r: r._replace(headers=(("h", None),))),
    ("headers", lambda r: r._replace(headers=(("i", b"x"),))),
    ("headers", lambda r: r._replace(headers=(*r.headers, *r.headers))),
]


@pytest.mark.parametrize(("what", "changed"), CHANGES)
@pytest.mark.parametrize("position", [0, 4, 9])
def test_any_change_of_a_record_is_found_and_named(
    what: str, changed: Callable[[Record], Record], position: int
) -> None:
    other = list(RECORDS)
    other[position] = changed(other[position])
    assert first_difference(RECORDS, other) == Difference(10 + position, what)
    assert first_difference(other, RECORDS) == Difference(10 + position, what)
    first, second = encode_batch(RECORDS, PLAIN), encode_batch(other, PLAIN)
    assert records_digest(first) != records_digest(second)
    assert equal_batches(first, A, second, B) is Equality.DIFFERENT
    assert not equal_batches(first, A, second, B)


def test_missing_records_are_named_by_side() -> None:
    assert first_difference(RECORDS, RECORDS) is None
    assert first_difference([], []) is None
    assert first_difference(RECORDS, RECORDS[:-1]) == Difference(19, "missing in the second")
    assert first_difference(RECORDS[:-1], RECORDS) == Difference(19, "missing in the first")
    assert first_difference(RECORDS, RECORDS[1:]) == Difference(10, "missing in the second")
    assert first_difference(RECORDS[3:], RECORDS) == Difference(10, "missing in the first")
    assert str(first_difference(RECORDS, [])) == "offset 10: missing in the second"


def test_a_difference_never_shows_contents() -> None:
    other = [r._replace(value=b"secret", key=b"private") for r in RECORDS]
    assert str(first_difference(RECORDS, other)) == "offset 10: key"


def test_a_records_own_attributes_do_not_count() -> None:
    assert first_difference(RECORDS, [r._replace(attributes=1) for r in RECORDS]) is None


def test_what_belongs_to_the_next_field_does_not_slip_over() -> None:
    ways = [
        Record(0, NOW, b"ab", b"c"),
        Record(0, NOW, b"a", b"bc"),
        Record(0, NOW, b"abc", b""),
        Record(0, NOW, b"abc", None),
        Record(0, NOW, None, b"abc"),
        Record(0, NOW, b"a", b"b", (("c", None),)),
        Record(0, NOW, b"a", b"b", (("c", b""),)),
        Record(0, NOW, b"a", b"b", (("", b"c"),)),
    ]
    assert len({records_digest(encode_batch([r], PLAIN)) for r in ways}) == len(ways)


records = st.lists(
    st.builds(
        Record,
        offset=st.integers(0, 30),
        timestamp=st.integers(NOW, NOW + 1),
        key=st.sampled_from([None, b"", b"k"]),
        value=st.sampled_from([None, b"", b"v"]),
        headers=st.sampled_from([(), (("h", None),), (("h", b""),)]),
        attributes=st.just(0),
    ),
    unique_by=lambda r: r.offset,
    min_size=1,
    max_size=6,
).map(lambda drawn: sorted(drawn, key=lambda record: record.offset))


@settings(deadline=None)
@given(records, records)
def test_digests_are_equal_exactly_where_no_difference_is_found(first: list[Record], second: list[Record]) -> None:
    a = encode_batch(first, PLAIN, compression=Compression.ZSTD)
    b = encode_batch(second, PLAIN)
    assert (records_digest(a) == records_digest(b)) is (first_difference(first, second) is None) is (first == second)


# -- Much in little ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("values", [1, 1000])
def test_batches_that_hold_much_are_compared_in_steps(values: int) -> None:
    size = 4 * MIB if values > 1 else 140 * MIB
    batch = large_inside(Compression.ZSTD, values, size)
    (again,) = [run.batch for run in runs_of(batch)]
    assert again is not None
    digests, steps = [], []
    for each in (batch, again):
        digest = RecordsDigest()
        steps.append(sum(1 for _ in digest.adding(each, decompressed(each))))
        digests.append((digest.records, digest.digest()))
        latest = LatestDigest()
        assert [None for _ in latest.adding(each, decompressed(each))] == [None] * steps[-1]
        assert latest.digest(0, values)[1] == 0, "no record has a key"
    assert digests[0] == digests[1]
    assert digests[0][0] == values
    assert min(steps) >= (4 * MIB // PIECE_BYTES if values > 1 else 1)
