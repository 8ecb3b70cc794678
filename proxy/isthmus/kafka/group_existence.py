"""Whether there is a consumer group, of whatever type."""

from __future__ import annotations

from typing import Any, Final

from isthmus.errors import KafkaError
from isthmus.kafka.broker_connection import BrokerConnection
from isthmus.kafka.client import ClusterClient
from isthmus_protocol.error_codes import GROUP_ID_NOT_FOUND, UNSUPPORTED_VERSION
from isthmus_protocol.schema import ApiKey

EXISTS_DEADLINE_S: Final = 5.0
"""A client waits for the answer, and its connection with it."""
DEAD: Final = "Dead"
"""The state of a classic group that there is not, in versions that have no error for it."""
_DESCRIBING: Final = (
    (ApiKey.DESCRIBE_GROUPS, "groups"),
    (ApiKey.CONSUMER_GROUP_DESCRIBE, "group_ids"),
    (ApiKey.SHARE_GROUP_DESCRIBE, "group_ids"),
    (ApiKey.STREAMS_GROUP_DESCRIBE, "group_ids"),
)
"""Each type of group has an API of its own, which does not know the groups of another."""


async def group_exists(client: ClusterClient, group: str) -> bool:
    """Whether the group's coordinator knows it. Raises KafkaError, GROUP_AUTHORIZATION_FAILED among others."""

    async def attempt() -> bool:
        connection = await client.to(await client.coordinator(group, deadline_s=EXISTS_DEADLINE_S))
        for api_key, field in _DESCRIBING:
            if api_key in connection.versions and await _describes(client, connection, api_key, field, group):
                return True
        return False

    return await client.retrying(attempt, deadline_s=EXISTS_DEADLINE_S)


async def _describes(
    client: ClusterClient, connection: BrokerConnection, api_key: ApiKey, field: str, group: str
) -> bool:
    answer: Any = await connection.call(
        api_key, {field: [group], "include_authorized_operations": False}, timeout=client.request_timeout_s
    )
    [described] = answer.groups
    # UNSUPPORTED_VERSION: the coordinator knows the API, and groups of this type are switched off.
    if described.error_code in (GROUP_ID_NOT_FOUND, UNSUPPORTED_VERSION):
        return False
    if described.error_code:
        raise KafkaError(described.error_code, getattr(described, "error_message", None))
    return bool(described.group_state != DEAD)
