"""Where anchors of control logs are kept, outside of them: a directory of this machine, and a group's committed offset.

A place holds one anchor for each cluster: of this proxy's own, and of those that its links go to. So a cluster whose
log is lost is told by the others how far it had been.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final, Protocol

from isthmus.errors import KafkaError, PeerFault
from isthmus.kafka.client import Backoff, ClusterClient, TopicPartition
from isthmus.kafka.groups import GroupClient
from isthmus_control.anchors import Anchor, MalformedAnchor
from isthmus_control.model import INTERNAL_PREFIX
from isthmus_plugins.clock import monotonic
from isthmus_plugins.cluster import CommittedOffset
from isthmus_plugins.private_files import write_file
from isthmus_protocol.cluster_ids import escaped
from isthmus_protocol.error_codes import (
    CLUSTER_AUTHORIZATION_FAILED,
    GROUP_AUTHORIZATION_FAILED,
    LEADER_NOT_AVAILABLE,
    TOPIC_AUTHORIZATION_FAILED,
    UNKNOWN_TOPIC_OR_PARTITION,
)
from isthmus_protocol.offsets_log import OFFSETS_TOPIC
from isthmus_protocol.schema import ApiKey

GROUP_PREFIX: Final = INTERNAL_PREFIX + "control_"
"""Followed by the id of the cluster that the anchor is of."""
OFFSET_PARTITION: Final = TopicPartition(OFFSETS_TOPIC, 0)
"""For which the group commits: deleting the control topic must not delete what is committed."""
RETENTION_MS: Final = 10 * 365 * 24 * 3_600_000
"""A group without members has its commits expire: not while all proxies are stopped for a while."""
WRITE_TIMEOUT_S: Final = 8.0
FILE_PREFIX: Final = "control-anchor-"
_ID_CHARS_MAX: Final = 200
"""Of a file's name, which has 255 at most."""
_DENIED: Final = frozenset({CLUSTER_AUTHORIZATION_FAILED, GROUP_AUTHORIZATION_FAILED, TOPIC_AUTHORIZATION_FAILED})


class PlaceUnavailable(Exception):
    """What the place has is not known now, or it takes nothing. ``denied``: an authorizer keeps it so."""

    def __init__(self, message: str, denied: bool = False) -> None:
        super().__init__(message)
        self.denied = denied


class AnchorPlace(Protocol):
    """Each method raises :class:`PlaceUnavailable`. ``name`` is for people."""

    name: str

    async def read(self, cluster_id: str) -> Anchor | None: ...

    async def write(self, anchor: Anchor) -> None: ...


class AnchorFiles:
    """``[data] directory``: a file for each cluster, replaced as a whole."""

    def __init__(self, directory: Path) -> None:
        self.name = f"the data directory {directory}"
        self._directory = directory

    async def read(self, cluster_id: str) -> Anchor | None:
        return await asyncio.to_thread(self._read, cluster_id)

    async def write(self, anchor: Anchor) -> None:
        await asyncio.to_thread(self._write, anchor)

    def _path(self, cluster_id: str) -> Path:
        return self._directory / f"{FILE_PREFIX}{escaped(cluster_id, _ID_CHARS_MAX)}.json"

    def _read(self, cluster_id: str) -> Anchor | None:
        path = self._path(cluster_id)
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        except (OSError, UnicodeDecodeError) as error:
            raise PlaceUnavailable(f"{path} cannot be read: {error}") from error
        return _decoded(text, str(path))

    def _write(self, anchor: Anchor) -> None:
        path = self._path(anchor.cluster_id)
        try:
            write_file(path, anchor.encode().encode())
        except OSError as error:
            raise PlaceUnavailable(f"{path} cannot be written: {error}") from error


class AnchorGroups:
    """The cluster's own offsets topic: metadata of what a group of the proxies commits, for no topic of theirs."""

    def __init__(self, client: ClusterClient) -> None:
        """``client`` is the caller's and stays open."""
        self.name = f"consumer group {GROUP_PREFIX}<cluster id>"
        self._client = client
        self._groups = GroupClient(client)

    async def read(self, cluster_id: str) -> Anchor | None:
        group = GROUP_PREFIX + cluster_id
        try:
            if not await self._has_offsets_topic():
                return None  # nobody has ever committed anything in this cluster
            found = await self._groups.committed_for(group, OFFSET_PARTITION)
        except PeerFault as error:
            raise _unavailable(group, error) from error
        return None if found is None else _decoded(found.metadata, f"group {group}")

    async def write(self, anchor: Anchor) -> None:
        group = GROUP_PREFIX + anchor.cluster_id
        offset = CommittedOffset(anchor.offset, anchor.encode())
        deadline, backoff = monotonic() + WRITE_TIMEOUT_S, Backoff()
        while True:
            try:
                refused = await self._groups.commit(group, {OFFSET_PARTITION: offset}, RETENTION_MS)
                error: PeerFault | None = next((KafkaError(each.error_code) for each in refused.values()), None)
            except PeerFault as fault:
                error = fault
            if error is None:
                return
            unavailable = _unavailable(group, error)
            if unavailable.denied or monotonic() > deadline:
                raise unavailable from error
            await asyncio.sleep(backoff.next_s())  # the coordinator loads, or the offsets topic is being made

    async def _has_offsets_topic(self) -> bool:
        """Asked before anything of a group: looking for a group's coordinator makes the topic."""
        answer = await (await self._client.any()).call(
            ApiKey.METADATA,
            {"topics": [{"name": OFFSETS_TOPIC}], "allow_auto_topic_creation": False},
            timeout=self._client.request_timeout_s,
        )
        (topic,) = answer.topics
        if topic.error_code not in (0, LEADER_NOT_AVAILABLE, UNKNOWN_TOPIC_OR_PARTITION):
            raise KafkaError(topic.error_code, OFFSETS_TOPIC)
        return bool(topic.error_code != UNKNOWN_TOPIC_OR_PARTITION)


def places_of(directory: Path | None, client: ClusterClient) -> list[AnchorPlace]:
    """All places that a proxy has. ``directory``: ``[data] directory``, if it has one."""
    return [*([] if directory is None else [AnchorFiles(directory)]), AnchorGroups(client)]


def _unavailable(group: str, error: PeerFault) -> PlaceUnavailable:
    if isinstance(error, KafkaError) and error.code in _DENIED:
        return PlaceUnavailable(
            f"the proxy's own identity needs Read on consumer group {group} and on topic {OFFSETS_TOPIC}: {error}", True
        )
    return PlaceUnavailable(f"group {group}: {error}")


def _decoded(text: str, where: str) -> Anchor:
    try:
        return Anchor.decode(text)
    except MalformedAnchor as error:
        raise PlaceUnavailable(f"{where} holds no anchor that this version can read: {error}") from error
