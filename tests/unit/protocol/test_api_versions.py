"""ApiVersions responses: the intersection, what must stay untouched in it, and KIP-511's answer."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kio.schema.errors import ErrorCode
from support.entities import Encoder, RandomEntities
from support.seeds import examples

from isthmus_protocol.api_versions import intersect, proxied, unsupported_version_answer
from isthmus_protocol.messages import decode_response, encode_response
from isthmus_protocol.schema import ApiKey, response_type, supported
from isthmus_protocol.wire import MalformedFrame

VERSIONS = range(supported()[ApiKey.API_VERSIONS][1] + 1)


def answer(version: int, *apis: tuple[int, int, int], seed: int = 1, **fields: Any) -> Any:
    """A broker's answer with these ``(api key, lowest, highest)``, the rest at random."""
    entity = RandomEntities(seed, array_min=1).entity(response_type(ApiKey.API_VERSIONS, version))
    entry = type(entity.api_keys[0])
    keys = tuple(entry(api_key=key, min_version=low, max_version=high) for key, low, high in apis)
    return dataclasses.replace(entity, error_code=ErrorCode.none, api_keys=keys, **fields)


def seen(version: int, entity: Any) -> dict[int, tuple[int, int]]:
    _, found = decode_response(ApiKey.API_VERSIONS, version, intersect(version, encode_response(entity, 3)))
    assert dataclasses.replace(found, api_keys=()) == dataclasses.replace(entity, api_keys=())
    return {api.api_key: (api.min_version, api.max_version) for api in found.api_keys}


@pytest.mark.parametrize("version", VERSIONS)
def test_only_what_both_know(version: int) -> None:
    metadata_max = supported()[ApiKey.METADATA][1]
    entity = answer(
        version,
        (ApiKey.METADATA, 4, metadata_max + 3),
        (ApiKey.FETCH, 0, 11),
        (ApiKey.HEARTBEAT, 90, 99),
        (ApiKey.VOTE, 0, 2),
        (ApiKey.READ_SHARE_GROUP_STATE, 0, 0),
        (31_000, 0, 5),
    )
    assert seen(version, entity) == {ApiKey.METADATA: (4, metadata_max), ApiKey.FETCH: (4, 11)}


@pytest.mark.parametrize("version", VERSIONS)
def test_an_answer_within_what_the_proxy_knows_is_the_same_object(version: int) -> None:
    frame = encode_response(answer(version, (ApiKey.METADATA, 1, 9), (ApiKey.PRODUCE, 3, 9)), 5)
    assert intersect(version, frame) is frame
    assert intersect(version, frame) is frame


@pytest.mark.parametrize("version", VERSIONS)
def test_sasl_handshake_v0_stays(version: int) -> None:
    entity = answer(version, (ApiKey.SASL_HANDSHAKE, 0, 1), (ApiKey.SASL_AUTHENTICATE, 0, 2))
    assert seen(version, entity) == {ApiKey.SASL_HANDSHAKE: (0, 1), ApiKey.SASL_AUTHENTICATE: (0, 2)}
    assert set(proxied()) == set(supported())


def test_produce_keeps_the_low_versions_that_old_clients_look_for() -> None:
    # KAFKA-18659: brokers list v0 to v2 and refuse them.
    assert seen(3, answer(3, (ApiKey.PRODUCE, 0, 12))) == {ApiKey.PRODUCE: (0, 12)}
    assert seen(3, answer(3, (ApiKey.PRODUCE, 0, 2))) == {}


@pytest.mark.parametrize("version", [3, 4])
def test_features_and_unknown_tags_stay(version: int) -> None:
    for seed in range(20):
        entity = answer(version, (ApiKey.VOTE, 0, 1), (ApiKey.FETCH, 4, 8), (ApiKey.METADATA, 0, 99), seed=seed)
        assert entity.supported_features
        assert entity.finalized_features
        frame = Encoder(random.Random(seed)).response(entity, 9)
        kept = intersect(version, frame)
        _, found = decode_response(ApiKey.API_VERSIONS, version, kept)
        assert [api.api_key for api in found.api_keys] == [ApiKey.FETCH, ApiKey.METADATA]
        assert dataclasses.replace(found, api_keys=()) == dataclasses.replace(entity, api_keys=())
        tags = len(encode_response(dataclasses.replace(entity, api_keys=()), 9)) - 4 - 4 - 2 - 1 - 4
        assert kept.endswith(frame[-tags:])  # Everything behind the throttle time, byte by byte.


def test_each_connection_has_its_correlation_id() -> None:
    entity = answer(3, (ApiKey.METADATA, 0, 99))
    ids = [1, 2, -7]
    frames = [intersect(3, encode_response(entity, correlation_id)) for correlation_id in ids]
    assert [decode_response(ApiKey.API_VERSIONS, 3, frame)[0] for frame in frames] == ids
    assert len({frame[8:] for frame in frames}) == 1


def test_a_broker_that_is_older_than_the_clients_version() -> None:
    """It answers in the form of v0, whatever the request's version was (KIP-511)."""
    entity = dataclasses.replace(
        answer(0, (ApiKey.API_VERSIONS, 0, 3), (ApiKey.VOTE, 0, 0)), error_code=ErrorCode.unsupported_version
    )
    found = decode_response(ApiKey.API_VERSIONS, 0, intersect(4, encode_response(entity, 3)))[1]
    assert found == dataclasses.replace(entity, api_keys=entity.api_keys[:1])


def test_a_client_that_is_newer_than_the_proxy() -> None:
    for correlation_id in (0, 77, -1):
        found_id, found = decode_response(ApiKey.API_VERSIONS, 0, unsupported_version_answer(correlation_id))
        assert found_id == correlation_id
        assert found.error_code is ErrorCode.unsupported_version
        ((api_key, low, high),) = [(api.api_key, api.min_version, api.max_version) for api in found.api_keys]
        assert (api_key, (low, high)) == (ApiKey.API_VERSIONS, supported()[ApiKey.API_VERSIONS])


@settings(max_examples=examples(200), deadline=None)
@given(st.sampled_from(list(VERSIONS)), st.binary(max_size=60), st.booleans())
def test_any_bytes_are_an_answer_or_malformed(version: int, noise: bytes, framed: bool) -> None:
    frame = (len(noise) + 4).to_bytes(4, "big") + bytes(4) + noise if framed else noise
    try:
        intersect(version, frame)
    except MalformedFrame:
        pass


@pytest.mark.parametrize("version", VERSIONS)
def test_every_truncation_is_malformed(version: int) -> None:
    frame = encode_response(answer(version, (ApiKey.METADATA, 0, 99), (ApiKey.FETCH, 4, 8)), 1)
    for end in range(len(frame)):
        with pytest.raises(MalformedFrame):
            intersect(version, frame[:end])
