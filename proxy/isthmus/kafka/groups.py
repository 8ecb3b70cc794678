"""Consumer groups at their coordinators: what they have committed, and commits and deletions in their place."""

from __future__ import annotations

import asyncio
import struct
import zlib
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

from isthmus.errors import ConnectionLost, KafkaError, PeerFault, RequestTimedOut
from isthmus.kafka.broker_connection import BrokerConnection
from isthmus.kafka.client import ClusterClient
from isthmus_plugins.cluster import CommittedOffset, Refused, TopicPartition
from isthmus_protocol import peeks
from isthmus_protocol.error_codes import (
    COORDINATOR_LOAD_IN_PROGRESS,
    COORDINATOR_NOT_AVAILABLE,
    GROUP_ID_NOT_FOUND,
    NOT_COORDINATOR,
)
from isthmus_protocol.schema import ApiKey
from isthmus_protocol.wire import write_uvarint

T = TypeVar("T")

LANES: Final = 4
"""Connections to a coordinator: it reads the next request of one when it has answered the last."""
GROUPS_AT_ONCE: Final = 200
"""In one request to find coordinators or read offsets."""
OFFSET_FETCH_VERSION_MAX: Final = 9
"""Later ones name topics by id."""
OFFSET_COMMIT_VERSION_WITH_RETENTION: Final = 4
"""The last version that says how long an offset is kept."""
TXN_OFFSET_COMMIT_VERSIONS: Final = (3, 4)
"""Flexible (KIP-482); later ones add the group to a transaction implicitly, also where there is none."""
COORDINATORS_MAX: Final = 50_000
"""Groups whose coordinators are remembered."""
TRANSACTIONAL_ID: Final = "isthmus-group-offsets"
NO_GENERATION: Final = -1
NOTHING: Final = -1
"""In the place of an offset where a group has committed none. (Brokers take it as an offset, too.)"""
_NO_TAGS: Final = b"\x00"
_NOBODY: Final = struct.pack(">qhi", -1, -1, NO_GENERATION) + b"\x01\x00"
"""No producer id, epoch and generation; an empty member id, and no group instance id."""
_OFFSET: Final = struct.Struct(">iqi")
_NO_LEADER_EPOCH: Final = -1

_MOVED: Final = frozenset({COORDINATOR_LOAD_IN_PROGRESS, COORDINATOR_NOT_AVAILABLE, NOT_COORDINATOR})
"""Look for it again, try again."""


class GroupClient:
    """The groups of one cluster. Every method raises PeerFaults as :class:`ClusterClient` does."""

    def __init__(self, client: ClusterClient) -> None:
        self._client = client
        self._coordinators: dict[str, int] = {}
        """By group: the broker that was its coordinator when last asked."""

    # ---- reading ----

    async def ids(self) -> set[str]:
        """The ids of all groups, asked of every broker. Raises KafkaError while a coordinator loads."""

        async def ask(node_id: int) -> Iterator[str]:
            answer = await (await self._client.to(node_id, _lane("", 0))).call(
                ApiKey.LIST_GROUPS, {}, timeout=self._client.request_timeout_s
            )
            if answer.error_code:
                raise KafkaError(answer.error_code, f"ListGroups at broker {node_id}")
            return (group.group_id for group in answer.groups)

        await self._client.refresh(())
        answers = await asyncio.gather(*(ask(node_id) for node_id in self._client.brokers))
        return {group for answer in answers for group in answer}

    async def committed(
        self, groups: Collection[str], stable: bool = False
    ) -> dict[str, dict[TopicPartition, CommittedOffset]]:
        """The committed offsets of groups; groups whose coordinator does not report them now are left out.

        ``stable``: so are groups of which a transaction that commits offsets has not ended (KIP-447).
        """
        found: dict[str, dict[TopicPartition, CommittedOffset]] = {}
        by_coordinator: dict[int, list[str]] = {}
        for group, node_id in (await self._find(groups)).items():
            by_coordinator.setdefault(node_id, []).append(group)
        await asyncio.gather(
            *(
                self._read(node_id, chunk, stable, found)
                for node_id, asked in by_coordinator.items()
                for chunk in _chunks(asked)
            )
        )
        return found

    async def _read(
        self,
        node_id: int,
        groups: Sequence[str],
        stable: bool,
        found: dict[str, dict[TopicPartition, CommittedOffset]],
    ) -> None:
        try:
            answer = await (await self._client.to(node_id, _lane("", 0))).call(
                ApiKey.OFFSET_FETCH,
                {
                    "groups": [{"group_id": group, "member_epoch": -1, "topics": None} for group in groups],
                    "require_stable": stable,
                },
                at_most=OFFSET_FETCH_VERSION_MAX,
                timeout=self._client.request_timeout_s,
            )
        except (ConnectionLost, RequestTimedOut):
            self._forget(groups)
            return
        for group in answer.groups:
            if group.error_code == GROUP_ID_NOT_FOUND:
                found[group.group_id] = {}
            elif group.error_code:
                self._forget([group.group_id])
            elif not stable or not any(each.error_code for topic in group.topics for each in topic.partitions):
                found[group.group_id] = _committed(group)

    async def committed_for(self, group: str, partition: TopicPartition) -> CommittedOffset | None:
        """What one group has committed for a partition. Raises KafkaError where it may not be seen, or not now."""
        topic, index = partition
        asked = {"group_id": group, "member_epoch": -1, "topics": [{"name": topic, "partition_indexes": [index]}]}
        values = {"groups": [asked], "require_stable": False}
        answer = await self._call(group, ApiKey.OFFSET_FETCH, values, OFFSET_FETCH_VERSION_MAX)
        (found,) = answer.groups
        if found.error_code == GROUP_ID_NOT_FOUND:
            return None
        for code in (found.error_code, *(each.error_code for named in found.topics for each in named.partitions)):
            self._check(group, code)
        committed = _committed(found).get(partition)
        return None if committed is None or committed.offset == NOTHING else committed

    # ---- changing ----

    async def commit(
        self, group: str, offsets: Mapping[TopicPartition, CommittedOffset], retention_ms: int | None
    ) -> dict[TopicPartition, Refused]:
        """Commit offsets as nobody's member; what was refused. Doing it twice changes nothing.

        ``retention_ms``: how long they are kept, where the group has no members then; None: as the broker does.
        """
        if retention_ms is None:
            return await self._commit(group, offsets)
        topics = _by_topic(
            (place, {"partition_index": place[1], "committed_offset": each.offset, "committed_metadata": each.metadata})
            for place, each in offsets.items()
        )
        values = {
            "group_id": group,
            "generation_id_or_member_epoch": NO_GENERATION,
            "retention_time": retention_ms,
            "topics": topics,
        }
        answer = await self._call(group, ApiKey.OFFSET_COMMIT, values, OFFSET_COMMIT_VERSION_WITH_RETENTION)
        return self._refused(group, answer.topics)

    async def _commit(
        self, group: str, offsets: Mapping[TopicPartition, CommittedOffset]
    ) -> dict[TopicPartition, Refused]:
        """Clients of synchronous links wait for this one: nothing is decoded but where something was refused."""
        api_key = ApiKey.TXN_OFFSET_COMMIT

        async def ask(connection: BrokerConnection) -> dict[TopicPartition, Refused]:
            version = connection.version(api_key, TXN_OFFSET_COMMIT_VERSIONS[1])
            body = (txn_offset_commit_body(group, offsets),)
            frame = await connection.send_body(api_key, version, body, timeout=self._client.request_timeout_s)
            if peeks.error_codes(api_key, version, frame) <= {0}:
                return {}
            return self._refused(group, connection.decode(api_key, version, frame).topics)

        return await self._at_coordinator(group, ask)

    async def delete_offsets(self, group: str, partitions: Collection[TopicPartition]) -> dict[TopicPartition, Refused]:
        """Delete committed offsets; what was refused."""
        topics = _by_topic((place, {"partition_index": place[1]}) for place in partitions)
        answer = await self._call(group, ApiKey.OFFSET_DELETE, {"group_id": group, "topics": topics})
        if answer.error_code == GROUP_ID_NOT_FOUND:
            return {}
        self._check(group, answer.error_code)
        return self._refused(group, answer.topics)

    async def delete(self, group: str) -> None:
        """Delete a group without members, with its committed offsets. Raises KafkaError."""
        answer = await self._call(group, ApiKey.DELETE_GROUPS, {"groups_names": [group]})
        self._check(group, answer.results[0].error_code)

    async def _call(self, group: str, api_key: int, values: Mapping[str, Any], at_most: int | None = None) -> Any:
        timeout = self._client.request_timeout_s
        return await self._at_coordinator(
            group, lambda connection: connection.call(api_key, values, at_most=at_most, timeout=timeout)
        )

    async def _at_coordinator(self, group: str, ask: Callable[[BrokerConnection], Awaitable[T]]) -> T:
        node_id = (await self._find([group])).get(group)
        if node_id is None:
            raise ConnectionLost(f"the coordinator of group {group} is not known now")
        try:
            return await ask(await self._client.to(node_id, _lane(group, LANES)))
        except PeerFault:
            self._forget([group])
            raise

    def _refused(self, group: str, topics: Iterable[Any]) -> dict[TopicPartition, Refused]:
        refused = {}
        for topic in topics:
            for partition in topic.partitions:
                if partition.error_code:
                    error = KafkaError(partition.error_code)
                    refused[topic.name, partition.partition_index] = Refused(error.code, error.name)
                    if error.code in _MOVED:
                        self._forget([group])
        return refused

    def _check(self, group: str, error_code: int) -> None:
        if error_code:
            if error_code in _MOVED:
                self._forget([group])
            raise KafkaError(error_code, f"group {group}")

    # ---- coordinators ----

    async def _find(self, groups: Collection[str]) -> dict[str, int]:
        """The coordinators of groups, remembered or asked for; those that have none now are left out."""
        known = {group: self._coordinators[group] for group in groups if group in self._coordinators}
        new: dict[str, int] = {}
        for chunk in _chunks([group for group in groups if group not in known]):
            answer = await (await self._client.any()).call(
                ApiKey.FIND_COORDINATOR,
                {"key_type": 0, "coordinator_keys": chunk},
                timeout=self._client.request_timeout_s,
            )
            new |= {found.key: found.node_id for found in answer.coordinators if not found.error_code}
        if len(self._coordinators) + len(new) > COORDINATORS_MAX:  # groups come and go
            self._coordinators.clear()
        self._coordinators |= new
        return known | new

    def _forget(self, groups: Iterable[str]) -> None:
        for group in groups:
            self._coordinators.pop(group, None)


def _committed(group: Any) -> dict[TopicPartition, CommittedOffset]:
    """What a group of an OffsetFetch answer has; also negative ones, which clients commit to reset it."""
    return {
        (topic.name, partition.partition_index): CommittedOffset(partition.committed_offset, partition.metadata or "")
        for topic in group.topics
        for partition in topic.partitions
    }


def _lane(group: str, lanes: int) -> str:
    return f"groups-{zlib.crc32(group.encode()) % lanes}" if lanes else "groups"


def txn_offset_commit_body(group: str, offsets: Mapping[TopicPartition, CommittedOffset]) -> bytes:
    """The body of a TxnOffsetCommit of :data:`TXN_OFFSET_COMMIT_VERSIONS`, as nobody's: no producer id, no member.

    kio takes 18 us for one of one committed offset, and four times as long when it was used 20 ms before; this 3 us.
    """
    topics: dict[str, list[bytes]] = {}
    for (topic, partition), each in offsets.items():
        entry = _OFFSET.pack(partition, each.offset, _NO_LEADER_EPOCH) + _compact(each.metadata) + _NO_TAGS
        topics.setdefault(topic, []).append(entry)
    parts = [_compact(TRANSACTIONAL_ID), _compact(group), _NOBODY, write_uvarint(len(topics) + 1)]
    for topic, entries in topics.items():
        parts += (_compact(topic), write_uvarint(len(entries) + 1), *entries, _NO_TAGS)
    return b"".join(parts) + _NO_TAGS


def _compact(text: str) -> bytes:
    encoded = text.encode()
    return write_uvarint(len(encoded) + 1) + encoded


def _chunks(groups: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(groups), GROUPS_AT_ONCE):
        yield groups[start : start + GROUPS_AT_ONCE]


def _by_topic(partitions: Iterable[tuple[TopicPartition, dict[str, Any]]]) -> list[dict[str, Any]]:
    topics: dict[str, list[dict[str, Any]]] = {}
    for (topic, _), entry in partitions:
        topics.setdefault(topic, []).append(entry)
    return [{"name": name, "partitions": entries} for name, entries in topics.items()]
