"""The spool: batches and manifests go in and come out the same."""

from __future__ import annotations

import pytest
from support.partition_log import batch

from isthmus_protocol.record_codec import Record, encode_batch
from isthmus_protocol.records import MalformedBatch, verify_crc, whole_header
from isthmus_protocol.spool import Manifest, decode_manifest, encode_manifest, spool_batch, spooled

MANIFEST = Manifest(
    2,
    3,
    {"cleanup.policy": "delete", "max.message.bytes": "5"},
    ("ab", "cd"),
    {"g": {0: (5, ""), 1: (7, "metadata")}, "ü": {1: (0, "\n")}},
)


def test_batches_come_out_as_they_went_in() -> None:
    inner = batch(5, [b"a"], attributes=4) + batch(9, [b"b", b"c"], producer_id=4, producer_epoch=1, base_sequence=7)
    outer = spool_batch(inner)
    verify_crc(outer)
    assert whole_header(outer).base_offset == 0
    assert [bytes(value) for value in spooled(outer)] == [inner]


def test_a_record_without_value_is_none_of_a_spool() -> None:
    header = whole_header(spool_batch(b"x"))
    with pytest.raises(MalformedBatch):
        list(spooled(encode_batch([Record(0, 0, None, None)], header)))


@pytest.mark.parametrize("manifest", [MANIFEST, Manifest(1, 1, {}, ("",), {})])
def test_a_manifest_comes_out_as_it_went_in(manifest: Manifest) -> None:
    values = encode_manifest(manifest, "mine")
    assert decode_manifest(values) == manifest
    assert decode_manifest([*values[1:], *values, values[0]]) == manifest, "written twice, and late"
    assert decode_manifest([encode_manifest(MANIFEST, "another's")[0], *values]) == manifest


def test_a_manifest_that_is_not_whole_is_refused() -> None:
    values = encode_manifest(MANIFEST, "mine")
    for end in range(len(values)):
        with pytest.raises(ValueError, match="not whole"):
            decode_manifest(values[:end])
    with pytest.raises(ValueError, match="not whole"):
        decode_manifest(values[:1] + values[2:])
