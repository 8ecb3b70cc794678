"""Reads and changes access control bindings (DescribeAcls, CreateAcls, DeleteAcls) under the proxy's identity."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

from isthmus.errors import KafkaError
from isthmus.kafka.client import ClusterClient
from isthmus_control.acls import EVERY_ACL, AclBinding, AclFilter
from isthmus_protocol.messages import build_request, decode_response
from isthmus_protocol.schema import ApiKey

AT_ONCE_MAX: Final = 500
"""Bindings in one request: a controller takes up a request whole or not at all."""
_VOLATILE: Final = 4 + 4 + 1 + 4
"""Size, correlation id, tags of the header, throttle time: what two answers that say the same may differ in."""


class AclClient:
    """Bindings of a cluster. Raises KafkaError: SECURITY_DISABLED where it has no authorizer."""

    def __init__(self, client: ClusterClient) -> None:
        self._client = client
        self._last: tuple[int, bytes, frozenset[AclBinding]] | None = None
        """Version and bytes of the last answer to a question for all, and what it says."""

    async def matching(self, wanted: AclFilter) -> frozenset[AclBinding]:
        """The bindings that a filter matches.

        An answer for all of them that is the same bytes as the last one is not decoded again.
        """
        connection = await self._client.any()
        version = connection.version(ApiKey.DESCRIBE_ACLS)
        values = {
            "resource_type_filter": wanted.resource_type,
            "resource_name_filter": wanted.resource_name,
            "pattern_type_filter": wanted.pattern_type,
            "principal_filter": wanted.principal,
            "host_filter": wanted.host,
            "operation": wanted.operation,
            "permission_type": wanted.permission,
        }
        frame = await connection.request_raw(
            build_request(ApiKey.DESCRIBE_ACLS, version, values), timeout=self._client.request_timeout_s
        )
        said = bytes(frame[_VOLATILE:])
        if wanted == EVERY_ACL and self._last is not None and self._last[:2] == (version, said):
            return self._last[2]
        answer: Any = decode_response(ApiKey.DESCRIBE_ACLS, version, frame)[1]
        if answer.error_code:
            raise KafkaError(answer.error_code, answer.error_message)
        found = frozenset(
            AclBinding(
                resource.resource_type,
                resource.resource_name,
                resource.pattern_type,
                acl.principal,
                acl.host,
                acl.operation,
                acl.permission_type,
            )
            for resource in answer.resources
            for acl in resource.acls
        )
        if wanted == EVERY_ACL:
            self._last = (version, said, found)
        return found

    async def create(self, bindings: Collection[AclBinding]) -> None:
        """Create bindings; those that exist stay as they are."""
        for part in _parts(bindings):
            creations = [
                {
                    "resource_type": each.resource_type,
                    "resource_name": each.resource_name,
                    "resource_pattern_type": each.pattern_type,
                    "principal": each.principal,
                    "host": each.host,
                    "operation": each.operation,
                    "permission_type": each.permission,
                }
                for each in part
            ]
            answer = await (await self._client.controller()).call(
                ApiKey.CREATE_ACLS, {"creations": creations}, timeout=self._client.request_timeout_s
            )
            _check(answer.results)

    async def delete(self, bindings: Collection[AclBinding]) -> None:
        """Delete exactly these bindings, those that there are."""
        for part in _parts(bindings):
            filters = [
                {
                    "resource_type_filter": each.resource_type,
                    "resource_name_filter": each.resource_name,
                    "pattern_type_filter": each.pattern_type,
                    "principal_filter": each.principal,
                    "host_filter": each.host,
                    "operation": each.operation,
                    "permission_type": each.permission,
                }
                for each in part
            ]
            answer = await (await self._client.controller()).call(
                ApiKey.DELETE_ACLS, {"filters": filters}, timeout=self._client.request_timeout_s
            )
            _check(answer.filter_results)
            _check([deleted for result in answer.filter_results for deleted in result.matching_acls])


def _parts(bindings: Collection[AclBinding]) -> list[list[AclBinding]]:
    ordered = sorted(bindings)
    return [ordered[start : start + AT_ONCE_MAX] for start in range(0, len(ordered), AT_ONCE_MAX)]


def _check(results: Collection[Any]) -> None:
    for result in results:
        if result.error_code:
            raise KafkaError(result.error_code, result.error_message)
