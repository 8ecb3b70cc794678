"""Keeps the leader epochs of topics that were made anew rising, as clients see them.

A topic that is made anew begins with leader epoch 0. A client that knows a higher one takes every answer for
outdated, and never reads again (seen with librdkafka 2). So to clients the new topic's epochs are shifted beyond those
of the old one (``EpochShift``), in Metadata and DescribeTopicPartitions; and requests that name an epoch which they
learned there are forwarded without it: brokers check it only if it is there.

Epochs in records and in committed offsets are the brokers' own, below the shifted ones.
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from isthmus_control.control_state import ControlState
from isthmus_control.truncations import EpochShift
from isthmus_plugins.api import Replace, Request, RequestHook, Verdict
from isthmus_plugins.replication.link.part import Part
from isthmus_protocol import peeks
from isthmus_protocol.messages import decode_request, encode_request
from isthmus_protocol.schema import ApiKey
from isthmus_protocol.topic_entries import topic_entries

_EPOCH: Final = struct.Struct(">i")
UNCHECKED: Final = _EPOCH.pack(-1)
"""As current leader epoch: the broker does not compare it with its own."""


class LeaderEpochs(Part):
    """Hooks that do nothing until a topic was made anew."""

    def __init__(self) -> None:
        self._shifts: dict[str, EpochShift] = {}
        self._topics: frozenset[bytes] = frozenset()
        """Names and ids."""
        self._seen: object = None

    def hooks(self) -> Sequence[RequestHook]:
        return [
            RequestHook(ApiKey.METADATA, self.on_metadata, whole=True, pure=True),
            RequestHook(ApiKey.DESCRIBE_TOPIC_PARTITIONS, self.on_metadata, whole=True, pure=True),
            RequestHook(ApiKey.FETCH, self.on_fetch, whole=True, pure=True),
            RequestHook(ApiKey.LIST_OFFSETS, self.on_search, whole=True, pure=True),
            RequestHook(ApiKey.OFFSET_FOR_LEADER_EPOCH, self.on_search, whole=True, pure=True),
        ]

    def control_changed(self, state: ControlState) -> None:
        if state.epoch_shifts is not self._seen:
            self._seen = state.epoch_shifts
            self._shifts = dict(state.epoch_shifts)
            ids = (uuid.UUID(each.topic_id).bytes for each in self._shifts.values())
            self._topics = frozenset((*ids, *(name.encode() for name in self._shifts)))

    def on_metadata(self, request: Request) -> Verdict:
        """Show shifted epochs."""
        if not self._shifts:
            return None
        return Replace(request.frame, partial(self._shifted, request.api_key, request.version))

    def _shifted(self, api_key: int, version: int, frame: bytes) -> bytes:
        entries = topic_entries(api_key, version).named(frame, map(str.encode, self._shifts))
        shifted: bytearray | None = None
        for name, entry in entries.items():
            shift = self._shifts[name.decode()]
            if entry.topic_id is not None and entry.topic_id != uuid.UUID(shift.topic_id).bytes:
                continue
            for start, _ in filter(None, entry.leader_epochs):
                (epoch,) = _EPOCH.unpack_from(frame, start)
                if epoch >= 0:
                    shifted = shifted or bytearray(frame)
                    _EPOCH.pack_into(shifted, start, epoch + shift.by)
        return frame if shifted is None else bytes(shifted)

    def on_fetch(self, request: Request) -> Verdict:
        """Forward a Fetch without the epochs of such topics' partitions; nothing else of it changes."""
        if not self._shifts:
            return None
        found = peeks.fetch_leader_epochs(request.version, request.frame)
        places = [place for topic, places in found if topic in self._topics for place in places if place is not None]
        if not places:
            return None
        frame = bytearray(request.frame)
        for start, end in places:
            frame[start:end] = UNCHECKED
        return Replace(bytes(frame))

    def on_search(self, request: Request) -> Verdict:
        """The same for ListOffsets and OffsetForLeaderEpoch."""
        if not self._shifts or self._topics.isdisjoint(
            peeks.topics(request.api_key, request.version, "request", request.frame)
        ):
            return None
        head, payload = decode_request(request.frame)
        asked: Any = payload
        topics = tuple(
            _unchecked(topic) if getattr(topic, "name", getattr(topic, "topic", None)) in self._shifts else topic
            for topic in asked.topics
        )
        return Replace(encode_request(replace(asked, topics=topics), request.correlation_id, head.client_id))


def _unchecked(topic: Any) -> Any:
    """A request's topic, without the epochs that its partitions are thought to have."""
    if not all(hasattr(partition, "current_leader_epoch") for partition in topic.partitions):
        return topic
    partitions = tuple(replace(partition, current_leader_epoch=-1) for partition in topic.partitions)
    return replace(topic, partitions=partitions)
