"""Gives clients back the metadata that their application has committed, without the copy flags that stand before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from isthmus_plugins.api import Gate, Replace, Request, RequestHook, Verdict
from isthmus_plugins.aside import answered_by_size
from isthmus_plugins.distribution.group_times import MARK, unmarked
from isthmus_protocol.messages import decode_response, encode_response
from isthmus_protocol.schema import ApiKey

_MARK: Final = MARK.encode()


class FetchedMetadata:
    """The hook; it lets everything through where no group's offsets are distributed."""

    def __init__(self) -> None:
        self.active = False

    def hooks(self) -> Sequence[RequestHook]:
        return [RequestHook(ApiKey.OFFSET_FETCH, self.on_offset_fetch, whole=True, pure=True)]

    def on_offset_fetch(self, request: Request) -> Verdict:
        """Forward the request, and take flags off the answer."""
        return Replace(request.frame, partial(_without_flags, request.version)) if self.active else None


def _without_flags(version: int, frame: bytes) -> bytes | Gate:
    return answered_by_size(partial(_rewritten, version), frame) if _MARK in frame else frame


def _rewritten(version: int, frame: bytes) -> bytes:
    correlation_id, payload = decode_response(ApiKey.OFFSET_FETCH, version, frame)
    answered: Any = payload
    if hasattr(answered, "groups"):
        groups = tuple(replace(group, topics=_topics(group.topics)) for group in answered.groups)
        return encode_response(replace(answered, groups=groups), correlation_id)
    return encode_response(replace(answered, topics=_topics(answered.topics)), correlation_id)


def _topics(topics: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(replace(topic, partitions=tuple(map(_partition, topic.partitions))) for topic in topics)


def _partition(partition: Any) -> Any:
    flags, metadata = unmarked(partition.metadata or "")
    return replace(partition, metadata=metadata) if flags else partition
