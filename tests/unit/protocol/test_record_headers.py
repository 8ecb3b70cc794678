"""One header of each record, written without decoding: compared with what decoding and encoding makes of it."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.records import NOW, PLAIN, batch_of, contents, header_lists, record_lists

from isthmus_protocol.record_codec import Record, decode_records, encode_batch
from isthmus_protocol.record_headers import PAYLOAD_BYTES_MAX, Change, Found, HeaderRewriter, Values, without_header
from isthmus_protocol.records import (
    DELETE_HORIZON_BIT,
    HEADER_SIZE,
    LOG_APPEND_TIME_BIT,
    TRANSACTIONAL_BIT,
    BatchError,
    Compression,
    CorruptBatch,
    seal,
    verify_crc,
    whole_header,
)

NAME = "flags"
OURS = st.sampled_from([None, b"", b"\1", b"leave out"])


@st.composite
def named_lists(draw: st.DrawFn) -> list[Record]:
    """Records of which some have one or more headers of the name, between others, or the name inside another one."""
    records = []
    for record in draw(record_lists()):
        headers = [*draw(header_lists)]
        for value in draw(st.lists(OURS, max_size=2)):
            headers.insert(draw(st.integers(0, len(headers))), (NAME, value))
        if draw(st.booleans()):
            headers.append((draw(st.sampled_from(["x" + NAME, NAME + "x", "x"])), b"\x0aflags\x02a"))
        records.append(record._replace(headers=tuple(headers)))
    return records


def change(values: Values) -> bytes | None:
    return None if b"leave out" in values else b"%d" % len(values)


def changed(records: list[Record]) -> list[Record]:
    """What should come of it."""
    expected = []
    for record in records:
        values = [value for name, value in record.headers if name == NAME]
        content = change(tuple(values))
        if content is not None:
            at = next((at for at, (name, _) in enumerate(record.headers) if name == NAME), len(record.headers))
            others = [header for header in record.headers if header[0] != NAME]
            headers = (*others[:at], (NAME, content), *others[at:])
            expected.append(record._replace(offset=len(expected), headers=headers))
    return expected


def rewritten(batches: list[bytes], by: Change = change, payload_max: int = PAYLOAD_BYTES_MAX) -> list[bytes]:
    rewriter = HeaderRewriter(NAME.encode(), payload_max)
    for batch in batches:
        rewriter.add(batch, by)
    return rewriter.batches()


def read(batches: list[bytes]) -> list[Record]:
    found: list[Record] = []
    for batch in batches:
        verify_crc(batch)
        header, records = whole_header(batch), decode_records(batch)
        assert [record.offset for record in records] == list(range(header.last_offset_delta + 1))
        assert header.base_offset == 0
        assert header.base_timestamp == records[0].timestamp
        assert header.max_timestamp == max(record.timestamp for record in records)
        assert header.is_as_produced
        assert not header.is_idempotent
        found += [record._replace(offset=len(found) + record.offset) for record in records]
    return found


@settings(deadline=None)
@given(named_lists(), st.sampled_from(list(Compression)), st.integers(0, 800))
def test_it_is_what_decoding_and_encoding_makes(records: list[Record], compression: Compression, after: int) -> None:
    batch = encode_batch(records, PLAIN, compression=compression)
    from_offset = records[0].offset + after
    rewriter = HeaderRewriter(NAME.encode())
    seen = rewriter.add(batch, change, from_offset)
    made = rewriter.batches()
    rest = [record for record in records if record.offset >= from_offset]
    assert read(made) == changed(rest)
    assert all(whole_header(new).compression is compression for new in made)
    found: dict[Values, Found] = {}
    for record in rest:
        values = tuple(value for name, value in record.headers if name == NAME)
        first, count = found.get(values, Found(record.offset, 0))
        found[values] = Found(first, count + 1)
    assert seen == found


@settings(deadline=None)
@given(named_lists(), st.sampled_from(list(Compression)), st.integers(NOW, NOW + 1000))
def test_append_time_becomes_each_records_own(
    records: list[Record], compression: Compression, append_time: int
) -> None:
    batch = batch_of(records, LOG_APPEND_TIME_BIT | compression, max_timestamp=append_time)
    expected = [record._replace(timestamp=append_time) for record in changed(records)]
    assert read(rewritten([batch])) == expected


def test_nothing_of_a_producer_or_the_cleaner_is_kept() -> None:
    records = [Record(offset, NOW + offset, None, b"v") for offset in (3, 9)]
    batch = batch_of(
        records,
        TRANSACTIONAL_BIT | DELETE_HORIZON_BIT,
        producer_id=7,
        producer_epoch=1,
        base_sequence=4,
        leader_epoch=2,
    )
    (new,) = rewritten([batch])
    header = whole_header(new)
    assert (header.attributes, header.producer_id, header.base_sequence, header.leader_epoch) == (0, -1, -1, -1)


def test_batches_are_no_larger_than_a_broker_takes() -> None:
    values = [b"v" * size for size in (300, 300, 300, 2000, 300)]
    records = [Record(offset, NOW, None, value) for offset, value in enumerate(values)]
    batches = rewritten([encode_batch(records, PLAIN)], payload_max=1000)
    assert [whole_header(batch).record_count for batch in batches] == [3, 1, 1]
    assert all(len(batch) <= 1000 + HEADER_SIZE for batch in (batches[0], batches[2]))
    assert read(batches) == changed(records)


@settings(deadline=None)
@given(
    st.lists(st.tuples(named_lists(), st.sampled_from(list(Compression))), max_size=4), st.sampled_from([200, 10**6])
)
def test_batches_are_joined(parts: list[tuple[list[Record], Compression]], payload_max: int) -> None:
    made = rewritten(
        [encode_batch(records, PLAIN, compression=compression) for records, compression in parts],
        payload_max=payload_max,
    )
    expected = [record for records, _ in parts for record in changed(records)]
    assert read(made) == [record._replace(offset=number) for number, record in enumerate(expected)]
    if payload_max == 10**6:
        kept = [compression for records, compression in parts if changed(records)]
        apart = sum(one is not other for one, other in pairwise(kept))
        assert len(made) <= len(parts)
        assert len(made) >= bool(kept) + apart


LEFT_OUT = Record(0, NOW, None, b"v", ((NAME, b"leave out"),))


@settings(deadline=None)
@given(st.lists(st.tuples(named_lists(), st.sampled_from(list(Compression))), max_size=3), st.sampled_from([50, 200]))
@example(
    [([Record(0, NOW, None, None), Record(1, NOW, None, None)], Compression.NONE), ([LEFT_OUT], Compression.GZIP)], 50
)
def test_one_batch_at_a_time_the_same_is_made(parts: list[tuple[list[Record], Compression]], payload_max: int) -> None:
    """Each from where the rest of the one before begins. The last one has no rest, also where only that is behind it
    which is left out."""
    batches: list[bytes] = []
    following = 0
    for records, compression in parts:
        moved = [record._replace(offset=record.offset - records[0].offset + following) for record in records]
        following = moved[-1].offset + 1
        batches.append(encode_batch(moved, PLAIN, compression=compression))
        batches.append(seal(PLAIN._replace(base_offset=following, last_offset_delta=4, record_count=0), b""))
        following += 5
    made: list[list[bytes]] = []
    found: Counter[Values] = Counter()
    rest: int | None = 0
    while rest is not None:
        rewriter = HeaderRewriter(NAME.encode(), payload_max, one_batch=True)
        for batch in batches:
            found.update({values: each.records for values, each in rewriter.add(batch, change, rest).items()})
        rest = rewriter.rest
        made.append(rewriter.batches())
    assert [len(each) for each in made] == [1] * len(made) or made == [[]]
    at_once = HeaderRewriter(NAME.encode(), payload_max)
    expected = Counter[Values]()
    for batch in batches:
        expected.update({values: each.records for values, each in at_once.add(batch, change).items()})
    assert found == expected
    assert [batch for each in made for batch in each] == at_once.batches()


@settings(deadline=None)
@given(named_lists(), st.data())
def test_damaged_batches_are_refused_or_read_as_they_decode(records: list[Record], data: st.DataObject) -> None:
    batch = encode_batch(records, PLAIN)
    payload = bytearray(batch[HEADER_SIZE:])
    payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del payload[data.draw(st.integers(0, len(payload))) :]
    damaged = seal(whole_header(batch), payload)
    try:
        expected = changed(decode_records(damaged))
    except BatchError:
        expected = None
    try:
        found = read(rewritten([damaged]))
    except BatchError:
        assert expected is None
    else:
        # Headers among which the name is nowhere are copied as they are.
        assert expected is None or found == expected


def test_a_wrong_crc_is_not_made_right() -> None:
    batch = bytearray(encode_batch([Record(0, NOW, None, b"v")], PLAIN))
    batch[-1] ^= 1
    with pytest.raises(CorruptBatch):
        rewritten([batch])


def test_an_emptied_batch_has_nothing() -> None:
    emptied = seal(PLAIN._replace(base_offset=7, last_offset_delta=4, record_count=0), b"")
    assert rewritten([emptied]) == []


@settings(deadline=None)
@given(contents)
def test_a_null_header_stays_apart_from_an_empty_one(content: bytes | None) -> None:
    batch = encode_batch([Record(0, NOW, None, None, ((NAME, content),))], PLAIN)
    seen: list[Values] = []
    rewritten([batch], lambda values: seen.append(values))
    assert seen == [(content,)]


@settings(deadline=None)
@given(named_lists(), st.sampled_from(list(Compression)))
def test_a_header_is_taken_off_and_all_else_stays(records: list[Record], compression: Compression) -> None:
    batch = encode_batch(
        records, PLAIN._replace(producer_id=5, producer_epoch=1, base_sequence=9), compression=compression
    )
    without = without_header(batch, NAME.encode())
    expected = [
        record._replace(headers=tuple(header for header in record.headers if header[0] != NAME)) for record in records
    ]
    assert (without is None) == (expected == records)
    if without is not None:
        verify_crc(without)
        assert decode_records(without) == expected
        before, after = whole_header(batch), whole_header(without)
        assert after._replace(crc=before.crc, length=before.length) == before


def test_no_header_is_taken_off_of_what_is_damaged() -> None:
    batch = bytearray(batch_of([Record(0, NOW, b"k", b"v", ((NAME, b"x"),))]))
    batch[-1] ^= 1
    with pytest.raises(BatchError):
        without_header(bytes(batch), NAME.encode())
