"""The schema module against kio's index and the rules of the protocol."""

from __future__ import annotations

import pytest
from kio.schema.index import api_key_map

from isthmus_protocol import schema
from isthmus_protocol.schema import ApiKey, WireType, message_spec, supported


def test_api_keys_are_those_of_kio() -> None:
    assert {key.value: key.name for key in ApiKey} == {key: name.upper() for key, name in api_key_map.items()}


def test_supported_leaves_out_what_clients_do_not_send() -> None:
    # The listeners of Apache Kafka 4.3's message definitions: these do not list "broker".
    controller_only = {52, 53, 54, 56, 58, 59, 62, 63, 67, 70, 73, 82}
    share_persister = {83, 84, 85, 86, 87}
    assert set(api_key_map) - set(supported()) == controller_only | share_persister


@pytest.mark.parametrize(
    "api_key",
    [
        ApiKey.WRITE_TXN_MARKERS,
        ApiKey.DESCRIBE_PRODUCERS,
        ApiKey.DESCRIBE_QUORUM,
        ApiKey.SHARE_FETCH,
        ApiKey.STREAMS_GROUP_HEARTBEAT,
        ApiKey.GET_TELEMETRY_SUBSCRIPTIONS,
    ],
)
def test_supported_keeps_what_clients_and_tools_send(api_key: ApiKey) -> None:
    assert api_key in supported()


def test_every_supported_version_has_schemas() -> None:
    for api_key, (lowest, highest) in supported().items():
        for version in range(lowest, highest + 1):
            for types in (schema.request_type, schema.response_type):
                entity_type = types(api_key, version)
                assert (entity_type.__api_key__, entity_type.__version__) == (api_key, version)


@pytest.mark.parametrize(("api_key", "version"), [(0, 2), (0, 99), (4, 0), (999, 0), (-1, 0)])
def test_unknown_versions_are_lookup_errors(api_key: int, version: int) -> None:
    for function in (
        schema.request_type,
        schema.response_type,
        schema.request_flexible,
        schema.response_header_flexible,
        lambda key, number: message_spec(key, number, "request"),
    ):
        with pytest.raises(LookupError):
            function(api_key, version)


def test_headers() -> None:
    assert [schema.request_flexible(ApiKey.METADATA, version) for version in (8, 9)] == [False, True]
    assert [schema.response_header_flexible(ApiKey.METADATA, version) for version in (8, 9)] == [False, True]
    assert schema.request_flexible(ApiKey.API_VERSIONS, 3)
    assert message_spec(ApiKey.API_VERSIONS, 3, "response").flexible
    assert not schema.response_header_flexible(ApiKey.API_VERSIONS, 3)  # KIP-511
    assert not schema.request_flexible(ApiKey.SASL_HANDSHAKE, 1)


def test_fields_in_wire_order() -> None:
    spec = message_spec(ApiKey.PRODUCE, 10, "response")
    assert [field.name for field in spec.fields] == ["responses", "throttle_time"]
    (node_endpoints,) = spec.tagged
    assert (node_endpoints.name, node_endpoints.tag, node_endpoints.is_array) == ("node_endpoints", 0, True)
    assert node_endpoints.entity is not None
    host = node_endpoints.entity.fields[1]
    assert (host.name, host.wire, host.nullable) == ("host", WireType.STRING, False)
    rack = node_endpoints.entity.fields[3]
    assert (rack.name, rack.nullable) == ("rack", True)


def test_nullable_structs_and_values() -> None:
    fields = {field.name: field for field in message_spec(ApiKey.DESCRIBE_TOPIC_PARTITIONS, 0, "response").fields}
    assert fields["next_cursor"].nullable  # KIP-893
    assert not fields["topics"].nullable
    topics = {field.name: field for field in message_spec(ApiKey.METADATA, 12, "request").fields}["topics"]
    assert topics.nullable
    assert topics.entity is not None
    # kio's None for a UUID of zeros is no null of the protocol.
    assert [(field.name, field.nullable) for field in topics.entity.fields] == [("topic_id", False), ("name", True)]
