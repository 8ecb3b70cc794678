"""Salvage files of committed offsets: what was written is read, and nothing else."""

from __future__ import annotations

import pytest

from isthmus_protocol.offsets_salvage import (
    OFFSETS_MAGIC_LINE,
    OffsetsSalvageHead,
    SalvagedOffset,
    encode_offsets_salvage,
    read_offsets_salvage,
)
from isthmus_protocol.salvage import MalformedSalvage, read_salvage

HEAD = OffsetsSalvageHead("B", "a-to-b", "far-", 7, 2, 5, 9, "SOURCE_LOST_COMMITS", "why", 1_700_000_000_000, "b")
OFFSETS = [SalvagedOffset("far-a", "far-t", 0, 8, "m\nü", 5), SalvagedOffset("far-b", "far-t", 1, 3, "", -1)]
CONTENT = encode_offsets_salvage(HEAD, OFFSETS)


@pytest.mark.parametrize("offsets", [OFFSETS, []])
def test_what_is_written_is_read(offsets: list[SalvagedOffset]) -> None:
    salvage = read_offsets_salvage(encode_offsets_salvage(HEAD, offsets))
    assert salvage.head == HEAD
    assert list(salvage.offsets) == offsets
    assert salvage.tail.offsets == len(offsets)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "no salvage file of committed offsets"),
        (OFFSETS_MAGIC_LINE, "never finished"),
        (CONTENT[:-1], "never finished"),
        (CONTENT.replace(b'"offset": 8', b'"offset": 9'), "not those that were written"),
        (CONTENT.replace(b'"offsets": 2', b'"offsets": 3'), "not those that were written"),
        (CONTENT.replace(b'"namespace"', b'"space"'), "head does not have"),
        (CONTENT.replace(b'"leader_epoch": 2', b'"leader_epoch": "2"'), "leader_epoch in the head is not of type int"),
        (CONTENT[: CONTENT.rindex(b"{")] + b"junk\n", "the tail is not JSON"),
    ],
)
def test_what_is_none_is_refused(content: bytes, words: str) -> None:
    with pytest.raises(MalformedSalvage, match=words):
        read_offsets_salvage(content)


def test_the_two_kinds_of_files_are_told_apart() -> None:
    with pytest.raises(MalformedSalvage):
        read_salvage(CONTENT)
