"""No client ever learns a broker's own address: every answer of every API and version is looked through."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kio.schema.errors import ErrorCode
from support.entities import Encoder, RandomEntities
from support.seeds import examples

from isthmus_protocol.addresses import TAIL_BYTES_MAX, AddressMap, NodeEndpointsStream, rewriter, stream_rewriter
from isthmus_protocol.messages import decode_response, encode_response
from isthmus_protocol.schema import ApiKey, EntitySpec, WireType, message_spec, response_type, supported
from isthmus_protocol.wire import MalformedFrame, NeedMore

CLIENT_VERSIONS = [
    (api_key, version) for api_key, (low, high) in supported().items() for version in range(low, high + 1)
]
REWRITTEN = [(api_key, version) for api_key, version in CLIENT_VERSIONS if rewriter(api_key, version)]
STREAMED = [(api_key, version) for api_key, version in CLIENT_VERSIONS if stream_rewriter(api_key, version)]

SECRET = "broker-17.internal"


def proxied(node_id: int, host: bytes, port: int) -> tuple[bytes, int] | None:
    """The address of an even node's proxy; odd nodes have none."""
    assert host == SECRET.encode()
    return (b"proxy-%d.example.com" % (node_id % 10), 9000 + node_id % 10) if node_id % 2 == 0 else None


def all_proxied(node_id: int, _host: bytes, _port: int) -> tuple[bytes, int] | None:
    return b"proxy-%d.example.com" % (node_id % 10), 9000 + node_id % 10


def not_proxied(_node_id: int, _host: bytes, _port: int) -> None:
    return None


def unchanged(_node_id: int, host: bytes, port: int) -> tuple[bytes, int]:
    return host, port


# Where addresses can stand.

BROKER_ADDRESSES = {
    (ApiKey.METADATA, "brokers"),
    (ApiKey.DESCRIBE_CLUSTER, "brokers"),
    (ApiKey.FIND_COORDINATOR, ""),
    (ApiKey.FIND_COORDINATOR, "coordinators"),
    (ApiKey.PRODUCE, "node_endpoints"),
    (ApiKey.FETCH, "node_endpoints"),
    (ApiKey.SHARE_FETCH, "node_endpoints"),
    (ApiKey.SHARE_ACKNOWLEDGE, "node_endpoints"),
    (ApiKey.DESCRIBE_QUORUM, "nodes.listeners"),
}
"""Structs of responses that hold a broker's (or controller's) host and port."""

OTHER_ADDRESSES = {
    # Addresses of clients, as the broker sees them (which is the proxy), or as they told it themselves.
    (ApiKey.DESCRIBE_GROUPS, "groups.members.client_host"),
    (ApiKey.CONSUMER_GROUP_DESCRIBE, "groups.members.client_host"),
    (ApiKey.SHARE_GROUP_DESCRIBE, "groups.members.client_host"),
    (ApiKey.STREAMS_GROUP_DESCRIBE, "groups.members.client_host"),
    (ApiKey.STREAMS_GROUP_DESCRIBE, "groups.members.user_endpoint.host"),
    (ApiKey.STREAMS_GROUP_DESCRIBE, "groups.members.user_endpoint.port"),
    (ApiKey.STREAMS_GROUP_HEARTBEAT, "partitions_by_user_endpoint.user_endpoint.host"),
    (ApiKey.STREAMS_GROUP_HEARTBEAT, "partitions_by_user_endpoint.user_endpoint.port"),
    # Hosts in ACLs, as somebody wrote them.
    (ApiKey.DESCRIBE_ACLS, "resources.acls.host"),
    (ApiKey.DELETE_ACLS, "filter_results.matching_acls.host"),
}
"""Fields of responses that sound like addresses and are none of a broker's."""

ADDRESS_WORDS = ("host", "port", "address", "listener", "endpoint", "url", "uri", "server", "bootstrap", "advertised")


def paths(spec: EntitySpec, prefix: str = "") -> Iterator[tuple[str, str]]:
    """``(path of the struct, name)`` of every field that is no struct itself."""
    for field in (*spec.fields, *spec.tagged):
        if field.entity is None:
            yield prefix, field.name
        else:
            yield from paths(field.entity, f"{prefix}.{field.name}" if prefix else field.name)


def test_every_place_of_an_address_is_known() -> None:
    """Fails when a new API or version brings an address to somewhere: then ``addresses`` must learn it."""
    no_addresses = {"endpoint_type", "endpoint_information_epoch"}
    found = {
        (api_key, struct, name)
        for api_key, version in CLIENT_VERSIONS
        for struct, name in paths(message_spec(api_key, version, "response"))
        if name not in no_addresses and any(word in part for word in ADDRESS_WORDS for part in name.split("_"))
    }
    known = {(api_key, struct, name) for api_key, struct in BROKER_ADDRESSES for name in ("host", "port")}
    other = {(api_key, *path.rpartition(".")[::2]) for api_key, path in OTHER_ADDRESSES}
    assert found == known | other


def with_secrets(spec: EntitySpec, entity: Any, api_key: int, rng: random.Random, path: str = "") -> Any:
    """The entity with SECRET for the host of every broker in it."""
    values = {}
    for field in (*spec.fields, *spec.tagged):
        value = getattr(entity, field.name)
        if field.entity is not None and value is not None:
            inside = f"{path}.{field.name}" if path else field.name
            elements = tuple(
                with_secrets(field.entity, element, api_key, rng, inside)
                for element in (value if field.is_array else (value,))
            )
            values[field.name] = elements if field.is_array else elements[0]
        elif field.name == "host" and field.wire is WireType.STRING and (api_key, path) in BROKER_ADDRESSES:
            values[field.name] = SECRET
        elif field.name in ("node_id", "broker_id") and field.kafka_type == "int32":
            values[field.name] = rng.randint(0, 1000)
        elif field.name == "port":
            values[field.name] = rng.randint(0, 65535)
    return dataclasses.replace(entity, **values)


def response(api_key: int, version: int, seed: int = 0, array_max: int = 3, array_min: int = 0) -> Any:
    messages = RandomEntities(f"{api_key} {version} {seed}", array_max, array_min)
    entity = messages.entity(response_type(api_key, version))
    if api_key == ApiKey.DESCRIBE_CONFIGS:
        return with_secret_settings(entity, messages.rng)
    return with_secrets(message_spec(api_key, version, "response"), entity, api_key, messages.rng)


ADDRESS_SETTINGS = ("listeners", "advertised.listeners", "controller.quorum.voters")


def with_secret_settings(entity: Any, rng: random.Random) -> Any:
    """A DescribeConfigs answer of brokers and a topic; the brokers' settings hold SECRET."""
    results = []
    for result in entity.results:
        configs = tuple(
            dataclasses.replace(
                config,
                name=rng.choice(ADDRESS_SETTINGS),
                value=SECRET,
                synonyms=tuple(dataclasses.replace(synonym, value=SECRET) for synonym in config.synonyms),
            )
            for config in result.configs
        )
        results.append(dataclasses.replace(result, resource_type=4, configs=configs))
    topic = [dataclasses.replace(result, resource_type=2) for result in entity.results[:1]]
    return dataclasses.replace(entity, results=(*results, *topic))


def clients_view(api_key: int, version: int, frame: bytes, addresses: AddressMap) -> Iterator[bytes]:
    """A response as a client gets it, in every way that the proxy may take."""
    rewrite, stream = rewriter(api_key, version), stream_rewriter(api_key, version)
    if rewrite is None:
        yield frame
        return
    yield rewrite(addresses, frame)
    if stream is not None:
        for chunk_bytes in (1, 100, len(frame)):
            yield streamed(stream(addresses, len(frame)), frame, chunk_bytes)


def streamed(stream: NodeEndpointsStream, frame: bytes, chunk_bytes: int) -> bytes:
    return b"".join(stream.feed(frame[start : start + chunk_bytes]) for start in range(0, len(frame), chunk_bytes))


@pytest.mark.parametrize("addresses", [proxied, all_proxied, not_proxied])
def test_no_answer_of_any_api_holds_a_brokers_address(addresses: AddressMap) -> None:
    with_addresses = set()
    for api_key, version in CLIENT_VERSIONS:
        for seed in range(3):
            entity = response(api_key, version, seed, array_min=seed)
            frame = Encoder(random.Random(seed)).response(entity)
            if SECRET.encode() in frame:
                with_addresses.add((api_key, version))
            for answer in clients_view(api_key, version, frame, addresses):
                assert SECRET.encode() not in answer, (ApiKey(api_key).name, version)
                decode_response(api_key, version, answer)
    assert with_addresses == set(REWRITTEN)


# What the client sees instead.


def expected_answer(entity: Any, addresses: AddressMap) -> Any:
    """What the client should decode, made from the broker's answer without any bytes."""
    api_key = entity.__api_key__
    if api_key == ApiKey.DESCRIBE_QUORUM:
        return dataclasses.replace(
            entity, nodes=tuple(dataclasses.replace(node, listeners=()) for node in entity.nodes)
        )
    if api_key == ApiKey.DESCRIBE_CONFIGS:
        return dataclasses.replace(entity, results=tuple(map(expected_configs, entity.results)))
    if api_key == ApiKey.FIND_COORDINATOR:
        if hasattr(entity, "coordinators"):
            found = tuple(expected_coordinator(coordinator, addresses) for coordinator in entity.coordinators)
            return dataclasses.replace(entity, coordinators=found)
        return expected_coordinator(entity, addresses)
    name = "brokers" if hasattr(entity, "brokers") else "node_endpoints"
    if getattr(entity, "endpoint_type", 1) != 1:
        addresses = not_proxied
    kept = []
    for endpoint in getattr(entity, name):
        node_id = endpoint.broker_id if hasattr(endpoint, "broker_id") else endpoint.node_id
        address = addresses(node_id, endpoint.host.encode(), endpoint.port)
        if address is not None:
            kept.append(dataclasses.replace(endpoint, host=address[0].decode(), port=address[1]))
    return dataclasses.replace(entity, **{name: tuple(kept)})


def expected_configs(result: Any) -> Any:
    if result.resource_type != 4:
        return result
    hidden = [
        dataclasses.replace(
            config,
            value=None,
            is_sensitive=True,
            synonyms=tuple(dataclasses.replace(synonym, value=None) for synonym in config.synonyms),
        )
        for config in result.configs
    ]
    return dataclasses.replace(result, configs=tuple(hidden))


def expected_coordinator(coordinator: Any, addresses: AddressMap) -> Any:
    address = addresses(coordinator.node_id, coordinator.host.encode(), coordinator.port)
    if address is not None:
        return dataclasses.replace(coordinator, host=address[0].decode(), port=address[1])
    return dataclasses.replace(
        coordinator, error_code=ErrorCode.coordinator_not_available, node_id=-1, host="", port=-1
    )


@pytest.mark.parametrize("addresses", [proxied, all_proxied, not_proxied, unchanged])
@pytest.mark.parametrize(("api_key", "version"), REWRITTEN)
def test_rewritten_answers_decode_to_the_same_but_for_addresses(
    api_key: int, version: int, addresses: AddressMap
) -> None:
    rewrite = rewriter(api_key, version)
    assert rewrite is not None
    for seed in range(4):
        entity = response(api_key, version, seed)
        frame = encode_response(entity, 1234)
        answer = rewrite(addresses, frame)
        assert decode_response(api_key, version, answer) == (1234, expected_answer(entity, addresses))
        with_tags = Encoder(random.Random(seed)).response(entity, 1234)
        answer = rewrite(addresses, with_tags)
        assert decode_response(api_key, version, answer) == (1234, expected_answer(entity, addresses))
        hidden = api_key in (ApiKey.DESCRIBE_QUORUM, ApiKey.DESCRIBE_CONFIGS)
        if addresses is unchanged and not hidden and getattr(entity, "endpoint_type", 1) == 1:
            assert answer is with_tags


@pytest.mark.parametrize(("api_key", "version"), REWRITTEN)
def test_answers_without_addresses_are_the_same_object(api_key: int, version: int) -> None:
    rewrite = rewriter(api_key, version)
    assert rewrite is not None
    entity = response(api_key, version, array_max=0)
    if api_key == ApiKey.FIND_COORDINATOR and version < 4:
        entity = dataclasses.replace(entity, node_id=-1, host="", port=-1)  # As brokers answer an error.
    frame = encode_response(entity, 1)
    assert rewrite(not_proxied, frame) is frame


def test_metadata_is_not_walked_behind_the_brokers() -> None:
    entity = response(ApiKey.METADATA, 12, array_min=3)
    frame = encode_response(entity, 1)
    behind = frame.rindex(SECRET.encode()) + 500
    rewrite = rewriter(ApiKey.METADATA, 12)
    assert rewrite is not None
    noise = frame[:behind] + b"\xff" * (len(frame) - behind)
    assert rewrite(all_proxied, noise).endswith(b"\xff" * (len(frame) - behind))


@pytest.mark.parametrize(("api_key", "version"), [(0, 9), (1, 15), (0, 3), (18, 4), (55, 1), (12, 4)])
def test_apis_without_addresses_need_no_rewriter(api_key: int, version: int) -> None:
    assert rewriter(api_key, version) is None
    assert stream_rewriter(api_key, version) is None


# Streaming.


def stream_of(api_key: int, version: int, addresses: AddressMap, frame: bytes) -> NodeEndpointsStream:
    stream = stream_rewriter(api_key, version)
    assert stream is not None
    return stream(addresses, len(frame))


@pytest.mark.parametrize(("api_key", "version"), STREAMED)
@pytest.mark.parametrize("longer", [-18, -17, -5, -3, -2, -1, 0, 1, 2, 3, 20, 120, 130, 140])
def test_streamed_answers_keep_their_length(api_key: int, version: int, longer: int) -> None:
    """Hosts of every length near the broker's: rewritten where they fit, else the node endpoints are left out."""

    def addresses(node_id: int, host: bytes, port: int) -> tuple[bytes, int]:
        return b"p" * max(1, len(host) + longer), 12

    for seed in range(3):
        entity = response(api_key, version, seed, array_min=1)
        entity = dataclasses.replace(entity, node_endpoints=entity.node_endpoints[:1])
        frame = Encoder(random.Random(seed) if seed else None).response(entity)
        answer = streamed(stream_of(api_key, version, addresses, frame), frame, 50)
        assert len(answer) == len(frame)
        _, seen = decode_response(api_key, version, answer)
        fits = longer < -1 or longer == 0  # One byte cannot be filled with a tagged field.
        expected = expected_answer(entity, addresses if fits else not_proxied)
        assert seen == expected


@pytest.mark.parametrize(("api_key", "version"), STREAMED)
def test_a_stream_passes_chunks_on_as_they_are(api_key: int, version: int) -> None:
    entity = dataclasses.replace(response(api_key, version, array_min=5), node_endpoints=())
    frame = encode_response(entity, 1)
    assert len(frame) > 3000
    stream = stream_of(api_key, version, not_proxied, frame)
    chunks = [frame[start : start + 1000] for start in range(0, len(frame), 1000)]
    assert all(stream.feed(chunk) is chunk for chunk in chunks)


@pytest.mark.parametrize(("api_key", "version"), STREAMED)
def test_a_stream_keeps_back_no_more_than_the_end(api_key: int, version: int) -> None:
    entity = response(api_key, version, array_min=2)
    frame = encode_response(entity, 1)
    # An empty array and no tagged fields, or no tagged fields alone, are what remains of the end without endpoints.
    end = len(encode_response(dataclasses.replace(entity, node_endpoints=()), 1))
    end -= 2 if api_key == ApiKey.SHARE_FETCH else 1
    stream = stream_of(api_key, version, all_proxied, frame)
    for position in range(len(frame)):
        sent = stream.feed(frame[position : position + 1])
        if position < end:
            assert sent == frame[position : position + 1]
        elif position < len(frame) - 1:
            assert sent == b""
        else:
            assert len(sent) == len(frame) - end


@pytest.mark.parametrize(("api_key", "version"), STREAMED)
def test_streaming_does_not_depend_on_the_chunks(api_key: int, version: int) -> None:
    rng = random.Random(1)
    for seed in range(5):
        frame = Encoder(rng).response(response(api_key, version, seed))
        whole = streamed(stream_of(api_key, version, proxied, frame), frame, len(frame))
        for _ in range(5):
            stream, position, sent = stream_of(api_key, version, proxied, frame), 0, b""
            while position < len(frame):
                size = rng.choice((0, 1, 2, 3, 17, 400, 5000))
                sent += stream.feed(frame[position : min(position + size, len(frame))])
                position += size
            assert sent == whole


def test_a_long_end_is_refused_before_it_is_kept() -> None:
    entity = response(ApiKey.FETCH, 17, array_min=1)
    endpoints = entity.node_endpoints * (TAIL_BYTES_MAX // len(entity.node_endpoints) // 20)
    frame = encode_response(dataclasses.replace(entity, node_endpoints=endpoints), 1)
    stream = stream_of(ApiKey.FETCH, 17, proxied, frame)
    start = frame.index(SECRET.encode()) - 100
    with pytest.raises(MalformedFrame, match="more than"):
        [stream.feed(frame[position : position + 50]) for position in range(0, start + 200, 50)]


def test_a_chunk_of_the_next_frame_is_the_callers_mistake() -> None:
    frame = encode_response(response(ApiKey.FETCH, 17), 1)
    with pytest.raises(ValueError, match="next frame"):
        stream_of(ApiKey.FETCH, 17, proxied, frame).feed(frame + b"x")


@pytest.mark.parametrize("cut", [1, 5, 20])
def test_a_stream_that_ends_early_is_malformed(cut: int) -> None:
    frame = encode_response(response(ApiKey.FETCH, 17, array_min=2), 1)[:-cut]
    for chunk_bytes in (1, 64, len(frame)):
        with pytest.raises(MalformedFrame):
            streamed(stream_of(ApiKey.FETCH, 17, proxied, frame), frame, chunk_bytes)


def test_addresses_do_not_pass_where_unknown_tags_leave_no_room() -> None:
    entity = dataclasses.replace(response(ApiKey.FETCH, 17, 1, array_max=0), node_endpoints=())
    plain = encode_response(entity, 1)
    endpoint = response(ApiKey.FETCH, 17, array_min=1).node_endpoints[0]
    tagged = encode_response(dataclasses.replace(entity, node_endpoints=(endpoint,)), 1)[len(plain) :]
    content = plain[4:-1] + b"\x03" + tagged + b"\x64\x00" + b"\x90\x4e\x00"  # The tags 100 and 10,000.
    frame = len(content).to_bytes(4, "big") + content
    with pytest.raises(MalformedFrame, match="must not pass"):
        streamed(stream_of(ApiKey.FETCH, 17, not_proxied, frame), frame, 10)


# Bytes that are not what they should be.


@settings(max_examples=examples(500), deadline=None)
@given(data=st.data())
def test_any_bytes_are_rewritten_or_malformed(data: st.DataObject) -> None:
    api_key, version = data.draw(st.sampled_from(REWRITTEN))
    frame = bytearray(encode_response(response(api_key, version, data.draw(st.integers(0, 3)), array_max=2), 1))
    places = st.integers(4, len(frame) - 1)
    for position, byte in data.draw(st.lists(st.tuples(places, st.integers(0, 255)), max_size=5)):
        frame[position] = byte
    if data.draw(st.booleans()):
        frame[(position := data.draw(places)) : position + 4] = b"\xff\xff\xff\x7f"
    hurt = bytes(frame[: data.draw(places)] if data.draw(st.booleans()) else frame)
    rewrite, stream = rewriter(api_key, version), stream_rewriter(api_key, version)
    assert rewrite is not None
    for whole in (hurt, (len(hurt) - 4).to_bytes(4, "big") + hurt[4:]):
        try:
            rewrite(all_proxied, whole)
        except (MalformedFrame, NeedMore):
            pass
        if stream is not None:
            try:
                answer = streamed(stream(not_proxied, len(whole)), whole, data.draw(st.sampled_from((1, 33, 10_000))))
            except MalformedFrame:
                continue
            assert len(answer) == len(whole)
