"""What leaves the source of its offsets topic, and what of that can be read with which keys."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.offsets import KeyValue, commit, commit_key, deleted, group_key, marker_batch, offsets_batch
from support.seeds import examples

from isthmus_protocol.group_names import ByPattern, GroupPatterns
from isthmus_protocol.offsets_cipher import (
    EMPTY_KEYRING,
    CipherError,
    Keyring,
    KeyringError,
    key_id_of,
    parse_keyring,
    with_new_key,
)
from isthmus_protocol.offsets_copy import OMITTED_MAX, Treatment, copy_name, treated
from isthmus_protocol.record_codec import Marker, Record, decode_records
from isthmus_protocol.records import Frame, verify_crc, whole_header

OPEN, SECRET = "app-open", "undisclosed"


def keyring_text(*patterns: str, text: str | None = None) -> str:
    for pattern in patterns:
        text, _ = with_new_key(text, pattern)
    assert text is not None
    return text


def redacted(*patterns: str) -> Treatment:
    groups = GroupPatterns(patterns)
    return lambda group, record: record if group in groups else None


def left(*batches: bytes, treatment: Treatment | None, aborted: Sequence[int] = ()) -> list[Frame]:
    headers = [whole_header(batch) for batch in batches]
    return treated(
        [(batch, header, header.producer_id in aborted) for batch, header in zip(batches, headers, strict=True)],
        treatment,
    )


def records_in(frames: Sequence[Frame]) -> list[Record]:
    found = []
    for frame in frames:
        verify_crc(frame)
        found += decode_records(frame)
    return found


# --- chosen records


def test_redacted_records_leave_their_offsets_behind() -> None:
    batch = offsets_batch(
        10,
        [
            commit(SECRET, "t", 1),
            commit(OPEN, "t", 2, metadata="m"),
            (group_key(SECRET), b"members"),
            (group_key(OPEN), b"members"),
            deleted(OPEN, "t"),
            commit(SECRET, "t", 3),
        ],
    )
    (found,) = left(batch, treatment=redacted("app-*"))
    original = decode_records(batch)
    assert decode_records(found) == [original[1], original[3], original[4]]
    header = whole_header(found)
    assert (header.base_offset, header.next_offset) == (11, 16)


def test_batches_of_which_nothing_is_left_go_as_one_without_records() -> None:
    secret = [offsets_batch(offset, [commit(SECRET, "t", 1)] * 2) for offset in (0, 2, 4)]
    kept = offsets_batch(6, [commit(OPEN, "t", 1)])
    after = offsets_batch(9, [commit(SECRET, "t", 1)])
    found = left(*secret, kept, after, treatment=redacted(OPEN))
    spans = [(h.base_offset, h.next_offset, h.record_count) for h in map(whole_header, found)]
    assert spans == [(0, 6, 0), (6, 7, 1), (9, 10, 0)]
    for frame in found:
        verify_crc(frame)


def test_a_long_stretch_is_left_out_in_parts() -> None:
    batches = [offsets_batch(offset, [commit(SECRET, "t", 1)]) for offset in range(0, 3 * OMITTED_MAX, 1000)]
    spans = [(h.base_offset, h.next_offset) for h in map(whole_header, left(*batches, treatment=redacted(OPEN)))]
    assert len(spans) > 1
    assert all(end - start <= OMITTED_MAX for start, end in spans)
    assert spans[-1][1] == whole_header(batches[-1]).next_offset


def test_whole_copies_are_the_batches_themselves_without_aborted_commits() -> None:
    plain, aborted, marker = (
        offsets_batch(0, [commit(OPEN, "t", 1)]),
        offsets_batch(1, [commit(OPEN, "t", 2)], producer_id=7),
        marker_batch(2, 7, Marker.ABORT),
    )
    found = left(plain, aborted, marker, treatment=None, aborted=[7])
    assert (found[0], found[2]) == (plain, marker)
    assert (whole_header(found[1]).record_count, whole_header(found[1]).next_offset) == (0, 2)


def test_records_of_unknown_kinds_do_not_leave() -> None:
    alien: list[KeyValue] = [(b"\x00\x63" + SECRET.encode(), b"x"), (b"", b"x"), (b"\x00\x01\x7f", b"x")]
    (found,) = left(offsets_batch(0, alien), treatment=redacted("*"))
    assert whole_header(found).record_count == 0


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
ours = st.builds(
    lambda group, topic, offset, metadata: commit(OPEN + group, topic, offset, metadata=metadata),
    texts,
    texts,
    st.integers(0, 2**60),
    texts,
)
others = st.one_of(
    st.builds(
        lambda group, offset: commit(SECRET + group, f"topic-{SECRET}", offset, metadata=f"meta {SECRET}"),
        texts,
        st.integers(0, 2**60),
    ),
    st.builds(lambda group: deleted(SECRET + group, f"topic-{SECRET}"), texts),
    st.builds(lambda group, type_: (group_key(SECRET + group, type_), SECRET.encode()), texts, st.integers(2, 40)),
    st.builds(lambda raw: (raw + SECRET.encode(), SECRET.encode()), st.binary(max_size=6)),
)
treatments: Sequence[Callable[[], Treatment]] = (
    lambda: redacted("app-*"),
    lambda: parse_keyring(keyring_text("app-*")).encrypt,
)


@settings(deadline=None, max_examples=examples(150))
@given(st.lists(st.lists(st.one_of(ours, others), min_size=1, max_size=6), min_size=1, max_size=4), st.booleans())
def test_nothing_of_other_groups_leaves_whatever_the_batch(batches: list[list[KeyValue]], encrypted: bool) -> None:
    made: list[bytes] = []
    offset = 0
    for records in batches:
        made.append(offsets_batch(offset, records))
        offset += len(records)
    found = left(*made, treatment=treatments[encrypted]())
    raw = b"".join(bytes(frame) for frame in found)
    assert SECRET.encode() not in raw
    assert not encrypted or OPEN.encode() not in raw
    assert whole_header(found[0]).base_offset >= 0
    assert whole_header(found[-1]).next_offset == offset
    kept = [
        (at, record)
        for at, record in enumerate(record for records in batches for record in records)
        if OPEN.encode() in record[0]
    ]
    assert [record.offset for record in records_in(found)] == [at for at, _ in kept]


# --- encrypted records


@pytest.fixture
def ring() -> Keyring:
    return parse_keyring(keyring_text("app-*", "billing"))


def record(key_value: KeyValue, offset: int = 5) -> Record:
    return Record(offset, 1234, *key_value)


def test_a_record_comes_back_as_it_was(ring: Keyring) -> None:
    for plain in (record(commit("app-1", "orders", 7, metadata="here")), record(deleted("app-1", "orders"))):
        encrypted = ring.encrypt("app-1", plain)
        assert encrypted is not None
        assert (encrypted.offset, encrypted.timestamp) == (5, 1234)
        assert key_id_of(encrypted.key) is not None
        assert ring.decrypt(encrypted) == plain
        assert EMPTY_KEYRING.decrypt(encrypted) is None
    assert ring.encrypt("undisclosed", plain) is None


def test_equal_keys_stay_equal_and_equal_values_do_not(ring: Keyring) -> None:
    one, two = (ring.encrypt("app-1", record(commit("app-1", "orders", 7))) for _ in range(2))
    other = ring.encrypt("app-1", record(commit("app-1", "orders", 7, partition=1)))
    assert one is not None
    assert two is not None
    assert other is not None
    assert one.key == two.key != other.key
    assert one.value != two.value


def test_a_key_opens_its_own_groups_only(ring: Keyring) -> None:
    text = keyring_text("app-*", "billing")
    whole = parse_keyring(text)
    some = parse_keyring(json.dumps({"groups": {"billing": json.loads(text)["groups"]["billing"]}}))
    disclosed = whole.encrypt("billing", record(commit("billing", "t", 1)))
    closed = whole.encrypt("app-1", record(commit("app-1", "t", 1)))
    assert disclosed is not None
    assert closed is not None
    assert some.decrypt(disclosed) == record(commit("billing", "t", 1))
    assert some.decrypt(closed) is None
    assert key_id_of(disclosed.key) != key_id_of(closed.key)


def test_rotation_keeps_what_was_written_readable_and_deletions_in_force() -> None:
    old_text = keyring_text("app-*")
    new_text, key_id = with_new_key(old_text, "app-*")
    old, new = parse_keyring(old_text), parse_keyring(new_text)
    plain, gone = record(commit("app-1", "t", 1)), record(deleted("app-1", "t"))
    before, after = old.encrypt("app-1", plain), new.encrypt("app-1", plain)
    assert before is not None
    assert after is not None
    assert new.decrypt(before) == new.decrypt(after) == plain
    assert old.decrypt(after) is None
    assert key_id_of(after.key) == bytes.fromhex(key_id)
    first, second = old.encrypt("app-1", gone), new.encrypt("app-1", gone)
    assert first is not None
    assert first.value is None
    assert second is not None
    assert second.value is not None
    assert new.decrypt(second) == gone


def test_what_was_put_together_from_other_records_does_not_open(ring: Keyring) -> None:
    one = ring.encrypt("app-1", record(commit("app-1", "t", 1)))
    two = ring.encrypt("app-1", record(commit("app-1", "u", 2)))
    alien = ring.encrypt("billing", record(commit("billing", "u", 2)))
    assert one is not None
    assert two is not None
    assert alien is not None
    assert one.key is not None
    for damaged in (
        one._replace(value=two.value),
        one._replace(value=alien.value),
        one._replace(key=one.key[:-1] + bytes([one.key[-1] ^ 1])),
    ):
        with pytest.raises(CipherError):
            ring.decrypt(damaged)


def test_records_that_are_not_encrypted_are_taken_as_they_are(ring: Keyring) -> None:
    plain = record(commit("app-1", "t", 1))
    assert ring.decrypt(plain) == plain
    assert ring.decrypt(Record(1, 2, None, b"x")) == Record(1, 2, None, b"x")
    assert key_id_of(commit_key("app-1", "t")) is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("[]", "object"),
        ('{"groups": []}', "object"),
        ('{"groups": {}, "more": 1}', "object"),
        ('{"groups": {"a*b": {}}}', "'a*b'"),
        ('{"groups": {"a": {}}}', "'a'"),
        ('{"groups": {"a": {"current": "x", "keys": {"x": "SGVsbG8="}}}}', "base64 of 32"),
        ('{"groups": {"a": {"current": "x", "keys": {"x": 7}}}}', "base64 of 32"),
        ('{"groups": {"a": {"current": "x", "keys": {"x": "' + "A" * 43 + '="}}}}', "another id"),
    ],
)
def test_keyrings_that_cannot_be_used(text: str, words: str) -> None:
    with pytest.raises(KeyringError, match=words.replace("*", r"\*")) as caught:
        parse_keyring(text)
    assert "SGVsbG8" not in str(caught.value)
    assert "AAAA" not in str(caught.value)


def test_a_current_key_must_be_there() -> None:
    ring = json.loads(keyring_text("a"))
    ring["groups"]["a"]["current"] = "00"
    with pytest.raises(KeyringError, match="'current' of 'a'"):
        parse_keyring(json.dumps(ring))
    with pytest.raises(KeyringError, match="pattern"):
        with_new_key(None, "a,b")


def test_keys_show_nowhere(ring: Keyring) -> None:
    text = keyring_text("app-*")
    assert repr(parse_keyring(text)) == "Keyring(1 keys)"
    assert len(repr(parse_keyring(text)._by_id)) < 200


def test_the_best_pattern_counts() -> None:
    table = ByPattern({"*": 1, "app-*": 2, "app-x*": 3, "app-x1": 4})
    assert [table.get(name) for name in ("z", "app-1", "app-x2", "app-x1", "")] == [1, 2, 3, 4, 1]
    assert ByPattern({"a": 1}).get("ab") is None
    assert "a" not in GroupPatterns(())


def test_the_copys_name() -> None:
    assert copy_name("Q0x1") == "__consumer_offsets_Q0x1"
