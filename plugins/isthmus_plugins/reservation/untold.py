"""Answers that leave the proxies' own topics and groups out: clients that do not name them are not told of them.

Where an answer tells topics or groups that its request did not name:

==============================  ========================================================================================
Metadata                        of all topics. It is spliced: of thousands of topics none is decoded
DescribeTopicPartitions         of all topics, and in the cursor: it becomes the prefix of our topics
ConsumerGroupHeartbeat,         what the group's coordinator assigns, by id: a pattern matches all topics that the
ShareGroupHeartbeat             members may describe (KIP-848). An id that is not known yet is looked up first;
                                what is taken from a member again: ``owned_partitions``
ConsumerGroupDescribe,          the same, by name
ShareGroupDescribe
OffsetFetch,                    of all topics in which a group has committed offsets
DescribeShareGroupOffsets
DescribeLogDirs, ElectLeaders,  of all topics
ListPartitionReassignments
ListConfigResources             topics that have settings of their own
DescribeTransactions            partitions of a transaction
ListGroups                      groups
==============================  ========================================================================================

Members' metadata and assignments in classic groups are what clients have told each other, and ACLs what operators have
set: both stay as they are. Kafka's own internal topics are told as brokers do.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any, Final
from uuid import UUID

from isthmus_control.model import INTERNAL_PREFIX
from isthmus_plugins.api import Gate, Replace, Request, RequestHook, Verdict
from isthmus_plugins.aside import answered_by_size
from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused
from isthmus_plugins.process import PluginContext
from isthmus_plugins.reservation.owned_partitions import OwnedPartitions
from isthmus_plugins.tasks import Tasks
from isthmus_protocol import peeks
from isthmus_protocol.bodies import error_code
from isthmus_protocol.error_codes import COORDINATOR_LOAD_IN_PROGRESS
from isthmus_protocol.messages import build_response, decode_response, encode_response
from isthmus_protocol.refusals import RESOURCE_TYPE_TOPIC
from isthmus_protocol.schema import ApiKey
from isthmus_protocol.splicing import edited_frame, encoded_string
from isthmus_protocol.topic_entries import topic_entries

ASSIGNING: Final = (ApiKey.CONSUMER_GROUP_HEARTBEAT, ApiKey.SHARE_GROUP_HEARTBEAT)
TELLING: Final = (
    ApiKey.CONSUMER_GROUP_DESCRIBE,
    ApiKey.SHARE_GROUP_DESCRIBE,
    ApiKey.DESCRIBE_SHARE_GROUP_OFFSETS,
    ApiKey.DESCRIBE_LOG_DIRS,
    ApiKey.LIST_PARTITION_REASSIGNMENTS,
    ApiKey.LIST_CONFIG_RESOURCES,
    ApiKey.DESCRIBE_TRANSACTIONS,
    ApiKey.LIST_GROUPS,
)
"""What is decoded where the proxies' own topics or groups are in it."""
_PREFIX: Final = INTERNAL_PREFIX.encode()
_NAMES: Final = ("name", "topic", "topic_name", "group_id")
"""What a topic or group is called in structs of these APIs."""
_FIRST_PARTITION: Final = bytes(4)


class Untold:
    """Hooks that look at answers."""

    def __init__(self, context: PluginContext) -> None:
        self._context = context
        self._tasks = Tasks("untold-topics", context.supervision)
        self._owned = OwnedPartitions()

    async def stop(self) -> None:
        await self._tasks.close()

    def hooks(self) -> Sequence[RequestHook]:
        return [
            RequestHook(ApiKey.DESCRIBE_TOPIC_PARTITIONS, self.on_page, whole=True, pure=True),
            RequestHook(ApiKey.OFFSET_FETCH, self.on_offset_fetch, whole=True, pure=True),
            *(RequestHook(api, self.on_heartbeat, whole=True, pure=True) for api in ASSIGNING),
            *(RequestHook(api, self.on_question, whole=True, pure=True) for api in TELLING),
        ]

    def is_ours(self, topic_id: bytes) -> bool:
        """Whether a topic is the proxies' own, as far as it is known."""
        if topic_id in self._context.internal_topic_ids:
            return True
        name = self._context.known_topic_name(topic_id)
        return name is not None and name.startswith(INTERNAL_PREFIX)

    # ---- requests ----

    def on_all_topics(self, request: Request) -> Verdict:
        """Forward a Metadata request for all topics, and leave ours out of the answer."""
        return Replace(request.frame, partial(_spliced, request.api_key, request.version))

    def on_page(self, request: Request) -> Verdict:
        """The same for DescribeTopicPartitions."""
        return Replace(request.frame, partial(_page, request.version))

    def on_heartbeat(self, request: Request) -> Verdict:
        """Forward a heartbeat, and leave our topics out of what its member is assigned."""
        frame = request.frame
        if request.api_key == ApiKey.CONSUMER_GROUP_HEARTBEAT:
            frame = self._owned.heartbeat(request)
        return Replace(frame, partial(self._assigned, request.api_key, request.version, request.frame))

    def on_offset_fetch(self, request: Request) -> Verdict:
        """Leave our topics out of the answer where a group's committed offsets are asked for in all topics."""
        return self.on_question(request) if peeks.fetches_all_offsets(request.version, request.frame) else None

    def on_question(self, request: Request) -> Verdict:
        """Forward a request, and leave our topics and groups out of the answer."""
        return Replace(request.frame, partial(self._without, request.api_key, request.version))

    # ---- answers ----

    def _assigned(self, api_key: int, version: int, asked: bytes, frame: bytes) -> bytes | Gate:
        internal = self._context.internal_topic_ids
        unknown = {
            each
            for each in peeks.assigned_topics(api_key, version, frame)
            if each not in internal and self._context.known_topic_name(each) is None
        }
        if unknown:
            gate = Gate()
            self._tasks.start("names", self._assigned_later(gate, api_key, version, frame, unknown))
            return gate.then(partial(self._assigned_theirs, api_key, version, asked))
        return self._assigned_theirs(api_key, version, asked, frame)

    def _assigned_theirs(self, api_key: int, version: int, asked: bytes, frame: bytes) -> bytes | Gate:
        ours = any(map(self.is_ours, peeks.assigned_topics(api_key, version, frame)))
        if api_key == ApiKey.CONSUMER_GROUP_HEARTBEAT:
            self._owned.answered(version, asked, frame, untold=ours)
        return answered_by_size(partial(self._pruned_frame, api_key, version), frame) if ours else frame

    async def _assigned_later(
        self, gate: Gate, api_key: int, version: int, frame: bytes, unknown: Collection[bytes]
    ) -> None:
        """Open the gate when the names of topics have been read. Where they cannot be, the member is to ask again."""
        try:
            await self._context.topic_names(unknown)
        except (BrokerUnavailable, KafkaRefused):
            later = build_response(api_key, version, {"error_code": error_code(COORDINATOR_LOAD_IN_PROGRESS)})
            frame = encode_response(later, int.from_bytes(frame[4:8], "big", signed=True))
        gate.open(frame)

    def _without(self, api_key: int, version: int, frame: bytes) -> bytes | Gate:
        if _PREFIX not in frame and not any(each in frame for each in self._context.internal_topic_ids):
            return frame
        return answered_by_size(partial(self._pruned_frame, api_key, version), frame)

    def _pruned_frame(self, api_key: int, version: int, frame: bytes) -> bytes:
        correlation_id, answered = decode_response(api_key, version, frame)
        return encode_response(self._pruned(answered), correlation_id)

    def _pruned(self, value: Any) -> Any:
        """A struct, or an array of them, without elements that are about our topics or groups."""
        if isinstance(value, tuple):
            return tuple(self._pruned(each) for each in value if not self._is_about_ours(each))
        if not is_dataclass(value):
            return value
        inside = {field.name: getattr(value, field.name) for field in fields(value)}
        kept = {
            name: self._pruned(each) for name, each in inside.items() if isinstance(each, tuple) or is_dataclass(each)
        }
        return replace(value, **kept) if kept else value  # type: ignore[type-var]

    def _is_about_ours(self, element: Any) -> bool:
        if not is_dataclass(element):
            return False
        names = [getattr(element, name, None) for name in _NAMES]
        if getattr(element, "resource_type", None) == RESOURCE_TYPE_TOPIC:
            names.append(getattr(element, "resource_name", None))
        if any(name is not None and name.startswith(INTERNAL_PREFIX) for name in names):
            return True
        topic_id: UUID | None = getattr(element, "topic_id", None)
        return topic_id is not None and self.is_ours(topic_id.bytes)


def _spliced(api_key: int, version: int, frame: bytes) -> bytes:
    entries = topic_entries(api_key, version)
    return entries.spliced(frame, [(entry, b"") for entry in entries.beginning_with(frame, _PREFIX)])


def _page(version: int, frame: bytes) -> bytes:
    frame = _spliced(ApiKey.DESCRIBE_TOPIC_PARTITIONS, version, frame)
    cursor = peeks.next_topic(version, frame)
    if cursor is None or not cursor[0].startswith(_PREFIX):
        return frame
    _, name, partition = cursor  # names are in order: the prefix comes before our first one
    return edited_frame(frame, [(*name, encoded_string(_PREFIX, flexible=True)), (*partition, _FIRST_PARTITION)])
