"""What a client may describe, as the broker says: it is asked on the client's own connection (:class:`Ask`).

===============  =============================
topics           Metadata, which makes nothing
consumer groups  DescribeGroups
principals       DescribeAcls, of nobody
===============  =============================
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final
from uuid import uuid4

from isthmus_control.model import ResourceType
from isthmus_plugins.api import ASKED_ID
from isthmus_protocol.error_codes import (
    COORDINATOR_LOAD_IN_PROGRESS,
    COORDINATOR_NOT_AVAILABLE,
    GROUP_ID_NOT_FOUND,
    INVALID_TOPIC_EXCEPTION,
    LEADER_NOT_AVAILABLE,
    NOT_COORDINATOR,
    SECURITY_DISABLED,
    UNKNOWN_TOPIC_OR_PARTITION,
)
from isthmus_protocol.messages import build_request, decode_response, encode_request
from isthmus_protocol.schema import ApiKey

_APIS: Final = {
    ResourceType.TOPIC: ApiKey.METADATA,
    ResourceType.CONSUMER_GROUP: ApiKey.DESCRIBE_GROUPS,
    ResourceType.PRINCIPAL: ApiKey.DESCRIBE_ACLS,
}
VERSIONS: Final = {ApiKey.METADATA: 12, ApiKey.DESCRIBE_GROUPS: 5, ApiKey.DESCRIBE_ACLS: 3}
"""In which the broker is asked: all brokers from 3.9 on have these."""
MAY_DESCRIBE: Final = {
    ResourceType.TOPIC: (0, UNKNOWN_TOPIC_OR_PARTITION, LEADER_NOT_AVAILABLE, INVALID_TOPIC_EXCEPTION),
    ResourceType.CONSUMER_GROUP: (
        0,
        COORDINATOR_LOAD_IN_PROGRESS,
        COORDINATOR_NOT_AVAILABLE,
        NOT_COORDINATOR,
        GROUP_ID_NOT_FOUND,
    ),
    ResourceType.PRINCIPAL: (0, SECURITY_DISABLED),
}
"""Codes that a broker answers to who may, whether there is such a thing or not. Any other one is no leave."""
_ANY: Final = 1
"""Of resource types, pattern types, operations and permissions in a filter of ACLs."""


def question(kind: ResourceType, names: Collection[str], client_id: str | None) -> bytes:
    """A request whose answer says which of these the client may describe. It counts as the client's in quotas."""
    api = _APIS[kind]
    values: dict[str, Any]
    if kind is ResourceType.TOPIC:
        values = {"topics": [{"name": name} for name in names], "allow_auto_topic_creation": False}
    elif kind is ResourceType.CONSUMER_GROUP:
        values = {"groups": tuple(names)}
    else:
        values = {
            "resource_type_filter": _ANY,
            "resource_name_filter": None,
            "pattern_type_filter": _ANY,
            "principal_filter": f"User:{uuid4()}",
            "host_filter": None,
            "operation": _ANY,
            "permission_type": _ANY,
        }
    return encode_request(build_request(api, VERSIONS[api], values), ASKED_ID, client_id)


def described(kind: ResourceType, names: Collection[str], frame: bytes) -> Collection[str]:
    """Which of ``names`` the client may describe, by the broker's answer."""
    api = _APIS[kind]
    answer: Any = decode_response(api, VERSIONS[api], frame)[1]
    leave = MAY_DESCRIBE[kind]
    if kind is ResourceType.TOPIC:
        return {topic.name for topic in answer.topics if int(topic.error_code) in leave}
    if kind is ResourceType.CONSUMER_GROUP:
        return {group.group_id for group in answer.groups if int(group.error_code) in leave}
    return names if int(answer.error_code) in leave else ()
