"""What is produced of a batch: the worked example in bytes, filling, and messages that nobody knows where they were."""

from __future__ import annotations

from support.records import PLAIN
from support.trees import BALANCED

from isthmus_plugins.distribution.copies import Copies, Refused
from isthmus_plugins.distribution.copy_flags import ALL_LEVELS, HEADER_NAME, write_flags
from isthmus_plugins.distribution.plan import plan
from isthmus_plugins.distribution.positions import Course, Stretch, Term
from isthmus_protocol.record_codec import Record, decode_records, encode_batch

NAME = HEADER_NAME.encode()
LIVE = Course((Stretch(Term(1, 0), "x", 0, 0),))


def batch_of(*flags: bytes | None, offset: int = 0) -> bytes:
    """A record for each: None has no header, and b"" one without a value."""
    records = [
        Record(offset + number, number, b"k", b"v%d" % number, () if each is None else ((HEADER_NAME, each or None),))
        for number, each in enumerate(flags)
    ]
    return encode_batch(records, PLAIN)


def copied(
    batches: list[bytes], course: Course, level: int, from_offset: int = 0, name: bytes = NAME, **more: int
) -> tuple[list[bytes], list[Refused]]:
    copies = Copies(name, course, level, **more)
    for batch in batches:
        copies.add(batch, from_offset)
    made = copies.batches()
    assert copies.messages == len(read(made))
    return made, copies.refused


def read(batches: list[bytes]) -> list[tuple[bytes | None, bytes | None]]:
    return [(record.value, dict(record.headers)[HEADER_NAME]) for batch in batches for record in decode_records(batch)]


def test_the_worked_example_in_bytes() -> None:
    arrived = {"cluster-1": [batch_of(None)]}
    for leaf in ("cluster-1", "cluster-2", "cluster-3", "cluster-4"):
        for distributor in plan(BALANCED, {}):
            if distributor.leaf == leaf:
                for batch in arrived[leaf]:
                    made, refused = copied([batch], LIVE, distributor.level)
                    assert not refused
                    if made:
                        arrived.setdefault(distributor.target, []).extend(made)
    assert {leaf: [read([batch]) for batch in batches] for leaf, batches in arrived.items() if leaf != "cluster-1"} == {
        "cluster-2": [[(b"v0", bytes((0, 0, 0, 0, 0, 0, 0, 0b0001)))]],
        "cluster-3": [[(b"v0", bytes((0, 0, 0, 0, 0, 0, 0, 0b0100)))]],
        "cluster-4": [[(b"v0", bytes((0, 0, 0, 0, 0, 0, 0, 0b0101)))]],
    }
    assert len(arrived["cluster-1"]) == 1


def test_what_was_passed_on_is_left_out() -> None:
    batch = batch_of(None, write_flags(0b001), write_flags(0b100), write_flags(0), offset=10)
    assert read(copied([batch], LIVE, 2)[0]) == [
        (b"v0", write_flags(0b010)),
        (b"v2", write_flags(0b110)),
        (b"v3", write_flags(0b010)),
    ]
    assert read(copied([batch], LIVE, 2, from_offset=13)[0]) == [(b"v3", write_flags(0b010))]
    assert copied([batch_of(write_flags(1))], LIVE, 1) == ([], [])


def test_a_new_leaf_is_filled_with_everything() -> None:
    filling = Course(LIVE.stretches, fill_until=10)
    flags = [write_flags(0b001), None]
    assert read(copied([batch_of(*flags, offset=8)], filling, 1)[0]) == [
        (b"v0", write_flags(ALL_LEVELS)),
        (b"v1", write_flags(ALL_LEVELS)),
    ]
    assert read(copied([batch_of(*flags, offset=10)], filling, 1)[0]) == [(b"v1", write_flags(1))]


def test_messages_whose_flags_cannot_be_read_stay_where_they_are() -> None:
    twice = Record(14, 0, None, b"v", ((HEADER_NAME, write_flags(0)), (HEADER_NAME, write_flags(0))))
    records = decode_records(batch_of(b"\0" * 4, None, b"", b"\0" * 4, offset=10))
    made, refused = copied([encode_batch([*records, twice], PLAIN)], LIVE, 1)
    assert read(made) == [(b"v1", write_flags(1))]
    said = "copy flags are 8 bytes, there are {}: whatever wrote them is no distributor"
    assert refused == [
        Refused(said.format("4 bytes"), 10, 2),
        Refused(said.format("null"), 12, 1),
        Refused("2 headers have copy flags: one has them, or none", 14, 1),
    ]


def test_batches_are_joined_up_to_a_size() -> None:
    batches = [batch_of(None, offset=10), batch_of(None, None, offset=20), batch_of(write_flags(1), offset=30)]
    assert [len(read([each])) for each in copied(batches, LIVE, 1)[0]] == [3]
    assert [len(read([each])) for each in copied(batches, LIVE, 1, payload_max=1)[0]] == [1, 1, 1]


def test_another_name() -> None:
    ((batch,), _) = copied([batch_of(write_flags(1))], LIVE, 1, name=b"my-flags")
    assert decode_records(batch)[0].headers == ((HEADER_NAME, write_flags(1)), ("my-flags", write_flags(1)))
