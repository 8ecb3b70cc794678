"""Kafka's message schemas as data: which APIs and versions there are, their headers, and their fields in wire order.

The source is kio, whose classes are generated from Apache Kafka's own message definitions. Nothing here reads bytes.
Everything is resolved on first use and cached, because loading all of kio's classes takes a second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, dataclass, fields, is_dataclass
from enum import Enum, IntEnum
from functools import cache
from types import MappingProxyType, UnionType
from typing import Any, Final, Literal, Union, cast, get_args, get_origin

from kio.index import load_request_schema, load_response_schema
from kio.schema.index import api_key_map, schema_name_map
from kio.static.protocol import Entity, RequestPayload, ResponsePayload

MessageKind = Literal["request", "response"]


class ApiKey(IntEnum):
    """Every API that kio has a schema for; a test compares the list with kio's index."""

    PRODUCE = 0
    FETCH = 1
    LIST_OFFSETS = 2
    METADATA = 3
    OFFSET_COMMIT = 8
    OFFSET_FETCH = 9
    FIND_COORDINATOR = 10
    JOIN_GROUP = 11
    HEARTBEAT = 12
    LEAVE_GROUP = 13
    SYNC_GROUP = 14
    DESCRIBE_GROUPS = 15
    LIST_GROUPS = 16
    SASL_HANDSHAKE = 17
    API_VERSIONS = 18
    CREATE_TOPICS = 19
    DELETE_TOPICS = 20
    DELETE_RECORDS = 21
    INIT_PRODUCER_ID = 22
    OFFSET_FOR_LEADER_EPOCH = 23
    ADD_PARTITIONS_TO_TXN = 24
    ADD_OFFSETS_TO_TXN = 25
    END_TXN = 26
    WRITE_TXN_MARKERS = 27
    TXN_OFFSET_COMMIT = 28
    DESCRIBE_ACLS = 29
    CREATE_ACLS = 30
    DELETE_ACLS = 31
    DESCRIBE_CONFIGS = 32
    ALTER_CONFIGS = 33
    ALTER_REPLICA_LOG_DIRS = 34
    DESCRIBE_LOG_DIRS = 35
    SASL_AUTHENTICATE = 36
    CREATE_PARTITIONS = 37
    CREATE_DELEGATION_TOKEN = 38
    RENEW_DELEGATION_TOKEN = 39
    EXPIRE_DELEGATION_TOKEN = 40
    DESCRIBE_DELEGATION_TOKEN = 41
    DELETE_GROUPS = 42
    ELECT_LEADERS = 43
    INCREMENTAL_ALTER_CONFIGS = 44
    ALTER_PARTITION_REASSIGNMENTS = 45
    LIST_PARTITION_REASSIGNMENTS = 46
    OFFSET_DELETE = 47
    DESCRIBE_CLIENT_QUOTAS = 48
    ALTER_CLIENT_QUOTAS = 49
    DESCRIBE_USER_SCRAM_CREDENTIALS = 50
    ALTER_USER_SCRAM_CREDENTIALS = 51
    VOTE = 52
    BEGIN_QUORUM_EPOCH = 53
    END_QUORUM_EPOCH = 54
    DESCRIBE_QUORUM = 55
    ALTER_PARTITION = 56
    UPDATE_FEATURES = 57
    ENVELOPE = 58
    FETCH_SNAPSHOT = 59
    DESCRIBE_CLUSTER = 60
    DESCRIBE_PRODUCERS = 61
    BROKER_REGISTRATION = 62
    BROKER_HEARTBEAT = 63
    UNREGISTER_BROKER = 64
    DESCRIBE_TRANSACTIONS = 65
    LIST_TRANSACTIONS = 66
    ALLOCATE_PRODUCER_IDS = 67
    CONSUMER_GROUP_HEARTBEAT = 68
    CONSUMER_GROUP_DESCRIBE = 69
    CONTROLLER_REGISTRATION = 70
    GET_TELEMETRY_SUBSCRIPTIONS = 71
    PUSH_TELEMETRY = 72
    ASSIGN_REPLICAS_TO_DIRS = 73
    LIST_CONFIG_RESOURCES = 74
    DESCRIBE_TOPIC_PARTITIONS = 75
    SHARE_GROUP_HEARTBEAT = 76
    SHARE_GROUP_DESCRIBE = 77
    SHARE_FETCH = 78
    SHARE_ACKNOWLEDGE = 79
    ADD_RAFT_VOTER = 80
    REMOVE_RAFT_VOTER = 81
    UPDATE_RAFT_VOTER = 82
    INITIALIZE_SHARE_GROUP_STATE = 83
    READ_SHARE_GROUP_STATE = 84
    WRITE_SHARE_GROUP_STATE = 85
    DELETE_SHARE_GROUP_STATE = 86
    READ_SHARE_GROUP_STATE_SUMMARY = 87
    STREAMS_GROUP_HEARTBEAT = 88
    STREAMS_GROUP_DESCRIBE = 89
    DESCRIBE_SHARE_GROUP_OFFSETS = 90
    ALTER_SHARE_GROUP_OFFSETS = 91
    DELETE_SHARE_GROUP_OFFSETS = 92


CONTROLLER_ONLY: Final = frozenset(
    {
        ApiKey.VOTE,
        ApiKey.BEGIN_QUORUM_EPOCH,
        ApiKey.END_QUORUM_EPOCH,
        ApiKey.ALTER_PARTITION,
        ApiKey.ENVELOPE,
        ApiKey.FETCH_SNAPSHOT,
        ApiKey.BROKER_REGISTRATION,
        ApiKey.BROKER_HEARTBEAT,
        ApiKey.ALLOCATE_PRODUCER_IDS,
        ApiKey.CONTROLLER_REGISTRATION,
        ApiKey.ASSIGN_REPLICAS_TO_DIRS,
        ApiKey.UPDATE_RAFT_VOTER,
    }
)
"""APIs whose definition does not list the listener "broker": no client of a broker may use them."""

BROKERS_ONLY: Final = frozenset(
    {
        ApiKey.INITIALIZE_SHARE_GROUP_STATE,
        ApiKey.READ_SHARE_GROUP_STATE,
        ApiKey.WRITE_SHARE_GROUP_STATE,
        ApiKey.DELETE_SHARE_GROUP_STATE,
        ApiKey.READ_SHARE_GROUP_STATE_SUMMARY,
    }
)
"""APIs that a broker serves to other brokers alone (the share coordinator's persister, KIP-932)."""


@cache
def supported() -> Mapping[int, tuple[int, int]]:
    """The client-facing APIs that the proxy knows: ``{api key: (lowest version, highest version)}``, both inclusive."""
    ranges: dict[int, tuple[int, int]] = {}
    for api_key, name in sorted(api_key_map.items()):
        if api_key not in CONTROLLER_ONLY and api_key not in BROKERS_ONLY:
            versions = schema_name_map[name]
            ranges[api_key] = (min(versions), max(versions))
    return MappingProxyType(ranges)


@cache
def request_type(api_key: int, version: int) -> type[RequestPayload]:
    """kio's class of a request's body. Raises LookupError where there is no such API or version."""
    _check_known(api_key, version)
    return load_request_schema(api_key, version)


@cache
def response_type(api_key: int, version: int) -> type[ResponsePayload]:
    """kio's class of a response's body. Raises LookupError where there is no such API or version."""
    _check_known(api_key, version)
    return load_response_schema(api_key, version)


@cache
def request_flexible(api_key: int, version: int) -> bool:
    """Whether a request is flexible (KIP-482): compact types and tags in its body, and tags in its header (v2)."""
    return request_type(api_key, version).__flexible__


@cache
def response_header_flexible(api_key: int, version: int) -> bool:
    """Whether a response's header has tags (v1). Never so for ApiVersions, whose body may be flexible all the same."""
    header: Any = response_type(api_key, version).__header_schema__
    return bool(header.__flexible__)


def _check_known(api_key: int, version: int) -> None:
    if api_key not in api_key_map or version not in schema_name_map[api_key_map[api_key]]:
        raise LookupError(f"No schema for API key {api_key}, version {version}")


class WireType(Enum):
    """How a field's value (or one element of it, where it is an array) lies on the wire."""

    FIXED = "fixed"
    """``FieldSpec.size`` bytes."""
    STRING = "string"
    """Length and bytes; the length is an INT16, or an UNSIGNED_VARINT plus one in flexible versions."""
    BYTES = "bytes"
    """Length and bytes (or records); the length is an INT32, or an UNSIGNED_VARINT plus one in flexible versions."""
    ENTITY = "entity"
    """The fields of ``FieldSpec.entity``, one after the other."""


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """One field of a message, as it lies on the wire."""

    name: str
    wire: WireType
    is_array: bool
    nullable: bool
    """Whether null is allowed: an array or string of length -1, or a struct behind a marker byte (KIP-893)."""
    tag: int | None
    """The tag's number; None for an untagged field."""
    kafka_type: str
    """kio's name of the type, such as "int32" or "records"; empty for entities."""
    size: int
    """Bytes of a FIXED value, else 0."""
    code: str
    """The ``struct`` code of a FIXED value ("16s" for a UUID), else empty."""
    entity: EntitySpec | None
    """The struct's fields for ENTITY, else None."""


@dataclass(frozen=True, slots=True)
class EntitySpec:
    """A message's body, or a struct inside one."""

    name: str
    flexible: bool
    fields: tuple[FieldSpec, ...]
    """The untagged fields, in wire order."""
    tagged: tuple[FieldSpec, ...]
    """The tagged fields, by rising tag."""


_STRUCT_CODES: Final = MappingProxyType(
    {
        "bool": ("?", 1),
        "int8": ("b", 1),
        "uint8": ("B", 1),
        "int16": ("h", 2),
        "uint16": ("H", 2),
        "int32": ("i", 4),
        "uint32": ("I", 4),
        "int64": ("q", 8),
        "uint64": ("Q", 8),
        "float64": ("d", 8),
        "uuid": ("16s", 16),
        "error_code": ("h", 2),
        "timedelta_i32": ("i", 4),
        "timedelta_i64": ("q", 8),
        "datetime_i64": ("q", 8),
    }
)


@cache
def entity_spec(entity_type: type[Entity]) -> EntitySpec:
    """The fields of one of kio's classes, structs inside it included, in wire order."""
    specs = [_field_spec(field) for field in fields(entity_type)]
    return EntitySpec(
        name=entity_type.__name__,
        flexible=entity_type.__flexible__,
        fields=tuple(spec for spec in specs if spec.tag is None),
        tagged=tuple(sorted((spec for spec in specs if spec.tag is not None), key=lambda spec: spec.tag or 0)),
    )


def message_spec(api_key: int, version: int, kind: MessageKind) -> EntitySpec:
    """The fields of a request's or response's body. Raises LookupError where there is no such API or version."""
    return entity_spec(request_type(api_key, version) if kind == "request" else response_type(api_key, version))


def _field_spec(field: Field[Any]) -> FieldSpec:
    inner, nullable = _without_none(field.type)
    is_array = get_origin(inner) is tuple
    if is_array:
        inner, _ = _without_none(get_args(inner)[0])
    kafka_type = field.metadata.get("kafka_type", "")
    entity: EntitySpec | None = None
    code, size = "", 0
    if is_dataclass(inner):
        wire = WireType.ENTITY
        entity = entity_spec(cast(type[Entity], inner))
    elif kafka_type == "string":
        wire = WireType.STRING
    elif kafka_type in ("bytes", "records"):
        wire = WireType.BYTES
    else:
        wire = WireType.FIXED
        code, size = _STRUCT_CODES[kafka_type]
        nullable = nullable and is_array  # A UUID or a time that "is None" in kio is a value like others on the wire.
    tag = field.metadata.get("tag")
    return FieldSpec(
        name=field.name,
        wire=wire,
        is_array=is_array,
        nullable=nullable,
        tag=None if tag is None else int(tag),
        kafka_type=kafka_type,
        size=size,
        code=code,
        entity=entity,
    )


def _without_none(annotation: Any) -> tuple[Any, bool]:
    if get_origin(annotation) not in (UnionType, Union):
        return annotation, False
    (inner,) = (arg for arg in get_args(annotation) if arg is not type(None))
    return inner, True
