"""Takes copy flags off what clients produce into topics that are distributed.

An application that produces what it consumed, with all its headers, would hand on flags, and its message would not be
distributed. Distributors write to brokers directly, and do not come by here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from isthmus_control.model import DistributionTree
from isthmus_plugins.api import NEED_MORE, Hold, Leave, Replace, Request, RequestHook, Verdict
from isthmus_plugins.process import PluginContext
from isthmus_protocol import peeks
from isthmus_protocol.messages import decode_request, encode_request
from isthmus_protocol.record_headers import without_header
from isthmus_protocol.records import BatchError, read_header
from isthmus_protocol.schema import ApiKey
from isthmus_protocol.wire import NeedMore

ASIDE_BYTES: Final = 32 * 1024
"""Of compressed batches that are looked into beside the loop."""


class ProducedFlags:
    """The hook; it costs nothing where this cluster is in no tree."""

    def __init__(self, context: PluginContext) -> None:
        self._context = context
        self._tree: DistributionTree | None = None
        self._header = b""
        self._leave = Leave(float("inf"))
        """For requests to one topic that is not distributed."""
        self.taken_off = 0
        """Batches that had flags."""

    def distributed(self, tree: DistributionTree | None, header: str) -> None:
        """What is distributed from now on, with this header."""
        self._tree, self._header = tree, header.encode()
        self._leave.until = float("-inf")
        self._leave = Leave(float("inf"))

    def hooks(self) -> Sequence[RequestHook]:
        return [RequestHook(ApiKey.PRODUCE, self.on_produce)]

    def on_produce(self, request: Request) -> Verdict:
        """Replace batches in which a record has flags."""
        if self._tree is None:
            request.leave = self._leave
            return None
        try:
            *_, topics = peeks.produce_topics(request.version, request.frame)
            concerned = {topic for topic in topics if self._is_distributed(request, topic)}
            if not concerned:
                if len(topics) == 1:
                    request.leave = self._leave
                return None
            *_, batches = peeks.produce_batches(request.version, request.frame)
        except NeedMore:
            return NEED_MORE
        if not request.whole:
            return NEED_MORE
        records = {
            (at, index): each
            for at, (topic, partitions) in enumerate(batches)
            for index, (_, each) in enumerate(partitions)
            if each and topic in concerned
        }
        if any(map(_is_large, records.values())):
            return Hold(asyncio.to_thread(self._without, request.correlation_id, request.frame, records))
        return self._without(request.correlation_id, request.frame, records)

    def _is_distributed(self, request: Request, topic: bytes) -> bool:
        by_id = peeks.topics_are_ids(ApiKey.PRODUCE, request.version)
        name = self._context.known_topic_name(topic) if by_id else peeks.topic_text(topic)
        # One that is not known yet is looked into: that changes nothing where there are no flags.
        return name is None or (self._tree is not None and name in self._tree)

    def _without(self, correlation_id: int, frame: bytes, records: Mapping[tuple[int, int], memoryview]) -> Verdict:
        """``records``: by the place of their topic in the request, and of their partition in that."""
        changed: dict[tuple[int, int], bytes] = {}
        for place, batch in records.items():
            try:
                without = without_header(batch, self._header)
            except BatchError:
                continue  # the broker refuses it
            if without is not None:
                changed[place] = without
        if not changed:
            return None
        self.taken_off += len(changed)
        head, payload = decode_request(frame)
        asked: Any = payload
        topics = tuple(
            replace(
                topic,
                partition_data=tuple(
                    replace(each, records=changed.get((at, index), each.records))
                    for index, each in enumerate(topic.partition_data)
                ),
            )
            for at, topic in enumerate(asked.topic_data)
        )
        return Replace(encode_request(replace(asked, topic_data=topics), correlation_id, head.client_id))


def _is_large(batch: memoryview) -> bool:
    try:
        return len(batch) > ASIDE_BYTES and bool(read_header(batch).compression)
    except BatchError:
        return False
