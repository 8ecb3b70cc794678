"""Flags that clients produce are taken off: where a topic is distributed, and of nothing else in the batch."""

from __future__ import annotations

import asyncio
import random
import uuid
from types import SimpleNamespace
from typing import Any

import pytest
from support.records import PLAIN
from support.reservations import request_of

from isthmus_control.model import DistributionTree
from isthmus_plugins.api import NEED_MORE, Hold, Replace, Request, Verdict
from isthmus_plugins.distribution.copy_flags import HEADER_NAME, write_flags
from isthmus_plugins.distributor.produced_flags import ProducedFlags
from isthmus_protocol.messages import decode_request
from isthmus_protocol.record_codec import Record, decode_records, encode_batch
from isthmus_protocol.records import Compression, restamp, whole_header
from isthmus_protocol.schema import ApiKey

TREE = DistributionTree(1, "c1", ("t-",), (4,), "{}")
FLAGS = (HEADER_NAME, write_flags(8))
RECORDS = [
    Record(0, 5, b"k", b"v", (("a", b"1"), FLAGS, ("b", None))),
    Record(1, 6, None, HEADER_NAME.encode(), (("x", HEADER_NAME.encode()),)),
    Record(2, 7, b"k", None, (FLAGS, FLAGS)),
]
VERSIONS = (9, 13)
"""One that names topics, and one that has their ids."""


def batch_of(records: list[Record], compression: Compression = Compression.NONE) -> bytes:
    batch = encode_batch(records, PLAIN, compression=compression)
    return restamp(batch, producer_id=7, producer_epoch=1, base_sequence=30)


def produced(version: int, topics: dict[str, bytes], part: float = 1.0) -> Request:
    data = [
        {"name": name, "topic_id": ids(name), "partition_data": [{"index": 3, "records": records}]}
        for name, records in topics.items()
    ]
    values = {"transactional_id": "id", "acks": -1, "timeout": 1000, "topic_data": data}
    return request_of(ApiKey.PRODUCE, version, values, part)


def ids(name: str) -> uuid.UUID:
    return uuid.uuid5(uuid.NAMESPACE_DNS, name)


def hook(tree: DistributionTree | None = TREE) -> ProducedFlags:
    known = {ids(name).bytes: name for name in ("t-1", "other")}
    context: Any = SimpleNamespace(known_topic_name=known.get)
    found = ProducedFlags(context)
    found.distributed(tree, HEADER_NAME)
    return found


def batches(verdict: Verdict) -> list[bytes]:
    assert isinstance(verdict, Replace)
    assert verdict.on_response is None
    _, payload = decode_request(verdict.frame)
    asked: Any = payload
    assert (asked.transactional_id, asked.acks) == ("id", -1)
    return [bytes(each.records) for topic in asked.topic_data for each in topic.partition_data]


@pytest.mark.parametrize("compression", list(Compression))
@pytest.mark.parametrize("version", VERSIONS)
def test_flags_are_taken_off_and_nothing_else(version: int, compression: Compression) -> None:
    batch, plain = batch_of(RECORDS, compression), batch_of(RECORDS)
    flags = hook()
    kept, changed = batches(flags.on_produce(produced(version, {"other": plain, "t-1": batch})))
    assert kept == plain
    expected = [each._replace(headers=tuple(header for header in each.headers if header != FLAGS)) for each in RECORDS]
    assert decode_records(changed) == expected
    before, after = whole_header(batch), whole_header(changed)
    assert after._replace(crc=before.crc, length=before.length) == before
    assert flags.taken_off == 1


@pytest.mark.parametrize("version", VERSIONS)
def test_what_has_no_flags_goes_as_it_is(version: int) -> None:
    without = batch_of(RECORDS[1:2])
    request = produced(version, {"t-1": without})
    assert hook().on_produce(request) is None
    assert request.leave is None, "the next one may have flags"
    other = produced(version, {"other": batch_of(RECORDS)})
    assert hook().on_produce(other) is None
    assert other.leave is not None
    assert hook().on_produce(produced(version, {"t-1": b"no batch"})) is None


def test_nothing_is_looked_at_without_a_tree() -> None:
    flags = hook(None)
    request = produced(9, {"t-1": batch_of(RECORDS)}, part=0.5)
    assert flags.on_produce(request) is None
    leave = request.leave
    assert leave is not None
    assert leave.until > 1e9
    flags.distributed(TREE, HEADER_NAME)
    assert leave.until < 0, "it ends with the first tree"
    assert flags.on_produce(request) is NEED_MORE


def test_large_compressed_batches_are_looked_into_beside_the_loop() -> None:
    value = random.Random(1).randbytes(100_000)
    records = [RECORDS[0]._replace(value=value)]
    batch = batch_of(records, Compression.GZIP)
    verdict = hook().on_produce(produced(9, {"t-1": batch}))
    assert isinstance(verdict, Hold)

    async def held() -> Verdict:
        return await verdict.verdict

    (changed,) = batches(asyncio.run(held()))
    assert [dict(each.headers) for each in decode_records(changed)] == [{"a": b"1", "b": None}]
