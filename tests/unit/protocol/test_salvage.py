"""Salvage files: what is written is read again, and whatever is not whole is refused."""

from __future__ import annotations

import json

import pytest
from support.partition_log import batch

from isthmus_protocol.record_codec import decode_records
from isthmus_protocol.records import whole_header
from isthmus_protocol.salvage import MAGIC_LINE, MalformedSalvage, SalvageHead, SalvageWriter, read_salvage

HEAD = SalvageHead("C", "a-to-b", "t", "id", "s", 3, 100, 105, "TARGET_WRITTEN_BY_OTHERS", "why", 17, "p")
BATCHES = (batch(98, [b"a", b"b", b"c\n"]), batch(101, [b"\n", b"{}", b"d", b"e"]))


def content(batches: tuple[bytes, ...] = BATCHES) -> bytes:
    writer = SalvageWriter(HEAD)
    parts = [writer.head()]
    for each in batches:
        writer.add(each, whole_header(each))
        parts.append(each)
    return b"".join((*parts, writer.tail()))


@pytest.mark.parametrize("batches", [BATCHES, BATCHES[:1], ()])
def test_what_was_written_is_read(batches: tuple[bytes, ...]) -> None:
    salvage = read_salvage(content(batches))
    assert salvage.head == HEAD
    assert (salvage.tail.batches, salvage.tail.size) == (len(batches), sum(map(len, batches)))
    assert tuple(bytes(data) for data, _ in salvage.batches()) == batches
    values = [record.value for data, _ in salvage.batches() for record in decode_records(data)]
    assert len(values) == salvage.tail.records


def test_the_file_says_what_it_is() -> None:
    lines = content().split(b"\n")
    assert lines[0] + b"\n" == MAGIC_LINE
    assert json.loads(lines[1])["from_offset"] == 100


def test_a_file_that_was_never_finished_is_refused_wherever_it_ends() -> None:
    whole = content()
    for end in range(len(whole)):
        with pytest.raises(MalformedSalvage):
            read_salvage(whole[:end])


def test_damage_is_found_wherever_it_is() -> None:
    whole = bytearray(content())
    head_end = whole.index(b"\n", len(MAGIC_LINE))
    for place in (0, head_end + 1, head_end + 100, len(whole) - 3):
        whole[place] ^= 1
        with pytest.raises(MalformedSalvage):
            read_salvage(bytes(whole))
        whole[place] ^= 1
    read_salvage(bytes(whole))


@pytest.mark.parametrize("line", [b"[]", b"{}", b"nonsense", b'{"batches":"x","records":1,"size":1,"sha256":""}'])
def test_a_head_or_tail_of_another_shape_is_refused(line: bytes) -> None:
    whole = content()
    with pytest.raises(MalformedSalvage, match="tail"):
        read_salvage(whole[: whole.rindex(b"\n", 0, len(whole) - 1)] + b"\n" + line + b"\n")
    rest = whole[whole.index(b"\n", len(MAGIC_LINE)) :]
    with pytest.raises(MalformedSalvage, match="head"):
        read_salvage(MAGIC_LINE + line + rest)
