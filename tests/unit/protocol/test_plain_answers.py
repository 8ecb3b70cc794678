"""Plain Produce answers: recognised from their bytes, and never an answer that has something to look into."""

from __future__ import annotations

import random
from collections.abc import Callable
from uuid import UUID

import pytest
from support.entities import RandomEntities

from isthmus_protocol import addresses, schema
from isthmus_protocol.bodies import build
from isthmus_protocol.messages import encode_response
from isthmus_protocol.plain_answers import PARTITIONS_MAX, pass_plain_produce
from isthmus_protocol.schema import ApiKey

LOWEST, HIGHEST = schema.supported()[ApiKey.PRODUCE]
BY_ID = 13
"""The first version with topic ids."""


def recogniser(version: int) -> Callable[[bytes], bool]:
    """Whether a frame comes back without being looked at."""
    looked: list[bytes] = []

    def look(frame: bytes) -> bytes:
        looked.append(frame)
        return frame

    passed = pass_plain_produce(version, look)

    def is_plain(frame: bytes) -> bool:
        looked.clear()
        assert passed(frame) is frame
        return not looked

    return is_plain


def answer(version: int, partitions: int, rng: random.Random, **more: object) -> bytes:
    content = [
        {
            "index": rng.getrandbits(31),
            "base_offset": rng.getrandbits(63),
            "log_append_time": rng.choice([-1, rng.getrandbits(40)]),
            "log_start_offset": rng.getrandbits(63),
        }
        for _ in range(partitions)
    ]
    topic = {"topic_id": UUID(int=rng.getrandbits(128) | 1), "partition_responses": content}
    frame_type = schema.response_type(ApiKey.PRODUCE, version)
    return encode_response(build(frame_type, {"responses": [topic], **more}), rng.getrandbits(31))


@pytest.mark.parametrize("version", range(BY_ID, HIGHEST + 1))
@pytest.mark.parametrize("partitions", [1, 2, 3, PARTITIONS_MAX])
def test_answers_without_error_are_plain(version: int, partitions: int) -> None:
    is_plain = recogniser(version)
    rng = random.Random(f"{version} {partitions}")
    for _ in range(20):
        assert is_plain(answer(version, partitions, rng))


@pytest.mark.parametrize("version", range(BY_ID, HIGHEST + 1))
def test_answers_with_addresses_errors_or_other_shapes_are_not(version: int) -> None:
    is_plain = recogniser(version)
    rng = random.Random(version)
    endpoints = [{"node_id": 1, "host": "broker.internal", "port": 9092}]
    assert not is_plain(answer(version, 1, rng, node_endpoints=endpoints))
    assert not is_plain(answer(version, PARTITIONS_MAX + 1, rng))
    assert not is_plain(b"")
    frame = answer(version, 2, rng)
    for cut in range(len(frame)):
        assert not is_plain(frame[:cut])


@pytest.mark.parametrize("version", range(BY_ID, HIGHEST + 1))
def test_no_plain_answer_would_be_rewritten(version: int) -> None:
    is_plain, rewrite = recogniser(version), addresses.rewriter(ApiKey.PRODUCE, version)
    assert rewrite is not None
    kinds = {True: 0, False: 0}
    for seed in range(300):
        entity = RandomEntities(seed, array_max=2).entity(schema.response_type(ApiKey.PRODUCE, version))
        frame = encode_response(entity, seed)
        changed = rewrite(lambda node_id, host, port: (b"proxy", 1), frame) != frame
        assert not (is_plain(frame) and changed)
        kinds[changed] += 1
    assert min(kinds.values()) > 20
    rng = random.Random(version)
    plain = answer(version, 1, rng)
    for position in range(len(plain)):  # any one byte other: never taken for plain where the walk finds it is not
        for value in (0, 1, 2, 3, 127, 128, 255):
            frame = plain[:position] + bytes([value]) + plain[position + 1 :]
            if is_plain(frame):
                assert rewrite(lambda node_id, host, port: (b"proxy", 1), frame) == frame


def test_all_of_versions_with_names_are_looked_at() -> None:
    def look(frame: bytes) -> bytes:
        return frame

    assert all(pass_plain_produce(version, look) is look for version in range(LOWEST, BY_ID))
