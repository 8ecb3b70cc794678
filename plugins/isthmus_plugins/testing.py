"""A kit for unit tests of plugins for namespaces: a session, and a broker with its logs in memory.

    async with Kit(plugin, "orders-", {"limit_s": 5}) as kit:
        kit.create_topic("orders-eu")
        assert await kit.produce("orders-eu", b"a record") == Produced(0, 0)

What a client sends goes through the plugin's hooks as in a proxy, to the broker and back; acks wait for its confirmers.
The broker takes Produce and Fetch, and answers what else is asked with the defaults of its API. It has no
transactions, no groups and one leader, itself; a plugin that needs more is tested with a real one (docs/plugins.md).
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, Self, cast

from isthmus_control.apply import apply
from isthmus_control.commands import Body, Command, ConfigurePlugin, CreateNamespace, EnablePlugin
from isthmus_control.control_state import ControlState
from isthmus_control.model import ResourceType
from isthmus_control.outcome import Rejected
from isthmus_plugins.api import Answer, Ask, Client, Close, Gate, Hold, Replace, Request, ResponseHook, Verdict
from isthmus_plugins.cluster import Fetched, FetchPartition, PartitionInfo, TopicInfo, TopicPartition
from isthmus_plugins.namespace_host import NamespaceHost
from isthmus_plugins.namespace_plugins import NamespacePlugin
from isthmus_plugins.process import CaptureAllowed, PluginContext
from isthmus_plugins.tasks import Supervision
from isthmus_protocol import schema
from isthmus_protocol.bodies import build
from isthmus_protocol.error_codes import UNKNOWN_TOPIC_ID, UNKNOWN_TOPIC_OR_PARTITION
from isthmus_protocol.messages import (
    ResponsePayload,
    build_request,
    decode_request,
    decode_response,
    encode_request,
    encode_response,
)
from isthmus_protocol.record_codec import Record, decode_records, encode_batch
from isthmus_protocol.records import BatchHeader, rebase, walk
from isthmus_protocol.schema import ApiKey

PRODUCE_VERSION, FETCH_VERSION = 9, 12
"""Those that name topics by their names."""
BROKER_ID = 1
NAME = "plugin"


class ConnectionClosed(Exception):
    """A hook has closed the connection, for this reason."""


class Produced(NamedTuple):
    """What a producer is answered."""

    error_code: int
    base_offset: int


class Broker:
    """A cluster of one broker, and the cluster interface of plugins to it."""

    def __init__(self) -> None:
        self.logs: dict[TopicPartition, list[bytes]] = {}
        """Batches by (topic, partition)."""
        self._topics: dict[str, TopicInfo] = {}
        self._grown = asyncio.Event()

    def create_topic(self, name: str, partitions: int = 1) -> None:
        places = tuple(PartitionInfo(BROKER_ID, 0) for _ in range(partitions))
        self._topics[name] = TopicInfo(name, uuid.uuid4().bytes, places, 1, False)
        self.logs |= {(name, partition): [] for partition in range(partitions)}

    def delete_topic(self, name: str) -> None:
        del self._topics[name]
        self.logs = {place: log for place, log in self.logs.items() if place[0] != name}

    def end(self, topic: str, partition: int = 0) -> int:
        """The log's end."""
        log = self.logs[topic, partition]
        return _header(log[-1]).next_offset if log else 0

    def append(self, topic: str, partition: int, batch: bytes) -> int:
        """Append a batch, and return where it stands."""
        offset = self.end(topic, partition)
        self.logs[topic, partition].append(rebase(batch, offset))
        self._grown.set()
        return offset

    def answer(self, frame: bytes) -> bytes:
        """The broker's answer to a request."""
        head, payload = decode_request(frame)
        asked: Any = payload
        values: dict[str, Any] = {}
        if head.api_key == ApiKey.PRODUCE:
            values = {"responses": [self._produce(topic) for topic in asked.topic_data]}
        elif head.api_key == ApiKey.FETCH:
            values = {"responses": [self._fetch(topic) for topic in asked.topics]}
        return encode_response(build(schema.response_type(head.api_key, head.version), values), head.correlation_id)

    def _produce(self, topic: Any) -> dict[str, Any]:
        parts = []
        for part in topic.partition_data:
            known = (topic.name, part.index) in self.logs
            code = 0 if known else UNKNOWN_TOPIC_OR_PARTITION
            offset = self.append(topic.name, part.index, bytes(part.records)) if known else -1
            parts.append({"index": part.index, "error_code": code, "base_offset": offset})
        return {"name": topic.name, "partition_responses": parts}

    def _fetch(self, topic: Any) -> dict[str, Any]:
        parts = []
        for part in topic.partitions:
            place = topic.topic, part.partition
            code = 0 if place in self.logs else UNKNOWN_TOPIC_OR_PARTITION
            records = b"" if code else self._from(*place, part.fetch_offset)
            watermark = -1 if code else self.end(*place)
            parts.append(
                {
                    "partition_index": part.partition,
                    "error_code": code,
                    "high_watermark": watermark,
                    "last_stable_offset": watermark,
                    "records": records,
                }
            )
        return {"topic": topic.topic, "partitions": parts}

    def _from(self, topic: str, partition: int, offset: int) -> bytes:
        return b"".join(batch for batch in self.logs[topic, partition] if _header(batch).next_offset > offset)

    # ---- isthmus_plugins.api.ClusterApi, as far as there is anything to ask ----

    async def topics(self) -> Mapping[str, TopicInfo]:
        return dict(self._topics)

    async def topic(self, name: str) -> TopicInfo | None:
        return self._topics.get(name)

    async def leader_of(self, topic: str, partition: int) -> int | None:
        return BROKER_ID if (topic, partition) in self.logs else None

    async def broker_racks(self) -> Mapping[int, str | None]:
        return {BROKER_ID: None}

    async def log_end(self, topic: str, partition: int) -> int:
        return self.end(topic, partition)

    async def log_ends(self, partitions: Collection[TopicPartition]) -> Mapping[TopicPartition, int]:
        return {place: self.end(*place) for place in partitions if place in self.logs}

    high_watermark, high_watermarks, last_stable_offset = log_end, log_ends, log_end

    async def fetch_connection(self, broker_id: int, lane: str) -> Self:
        return self

    async def fetch(
        self,
        partitions: Sequence[FetchPartition],
        wait_max_ms: int,
        bytes_max: int,
        read_committed: bool = False,
        only_changes: bool = False,
    ) -> list[Fetched]:
        """Of a plugin's own connection. Waits for records as a broker does."""
        found = [self._fetched(each) for each in partitions]
        if not any(each.records for each in found) and wait_max_ms:
            self._grown.clear()
            try:
                async with asyncio.timeout(wait_max_ms / 1000):
                    await self._grown.wait()
            except TimeoutError:
                pass
            found = [self._fetched(each) for each in partitions]
        return found

    def _fetched(self, asked: FetchPartition) -> Fetched:
        name = next((topic.name for topic in self._topics.values() if topic.topic_id == asked.topic_id), None)
        if name is None:
            return Fetched(asked.topic_id, asked.partition, UNKNOWN_TOPIC_ID, -1, -1, memoryview(b""))
        end = self.end(name, asked.partition)
        records = memoryview(self._from(name, asked.partition, asked.offset))
        return Fetched(asked.topic_id, asked.partition, 0, end, 0, records, end)

    def close(self) -> None: ...


def _header(batch: bytes) -> BatchHeader:
    ((_, _, header),) = walk(batch)
    return header


class _Control:
    """A control log that one process reads."""

    def __init__(self) -> None:
        self.state = ControlState("cluster")
        self._subscribers: list[Callable[[ControlState], None]] = []

    def apply(self, body: Body) -> None:
        offset = self.state.applied_offset + 1
        self.state, outcome = apply(self.state, offset, Command(str(uuid.uuid4()), 0, "kit", offset - 1, body))
        if isinstance(outcome, Rejected):
            raise ValueError(outcome.message)
        for subscriber in self._subscribers:
            subscriber(self.state)

    def subscribe(self, changed: Callable[[ControlState], None]) -> None:
        self._subscribers.append(changed)


class Kit:
    """A plugin, enabled for a namespace, between a client and a broker."""

    def __init__(
        self,
        plugin: NamespacePlugin,
        prefix: str,
        settings: Mapping[str, Any] | None = None,
        type: ResourceType = ResourceType.TOPIC,
        **context: Any,
    ) -> None:
        """``context``: fields of the plugin's context, such as ``data_directory``."""
        self.broker = Broker()
        self._plugin = plugin
        self._namespace = type, prefix
        self._settings = dict(settings or {})
        self._control = _Control()
        self._client = Client(1, "127.0.0.1", BROKER_ID)
        self._correlation_id = 0
        defaults: dict[str, Any] = {"proxy_name": "kit", "cluster_id": "cluster", "data_directory": None, "clock": time}
        defaults["capture_allowed"] = CaptureAllowed()
        self.context = cast(
            PluginContext,
            SimpleNamespace(
                **{**defaults, **context},
                cluster=self.broker,
                supervision=Supervision(),
                control=self._control,
                known_topic_name=self._topic_name,
                topic_names=self._resolved,
                lease_deadline=float("inf"),
            ),
        )
        self.host = NamespaceHost(self.context, {NAME: plugin}, lambda: None)

    async def __aenter__(self) -> Self:
        """Raises ValueError where the plugin refuses the settings."""
        text = json.dumps(self._settings)
        refused = self.host.check(*self._namespace, NAME, text, self._plugin.version)
        if refused is not None:
            raise ValueError(refused)
        self._control.apply(CreateNamespace(*self._namespace))
        self._control.apply(EnablePlugin(*self._namespace, NAME, text, self._plugin.version))
        self.host.start()
        (running,) = self.host.running.values()
        await running.started.wait()
        if running.error is not None:
            raise ValueError(running.error)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.host.stop()

    def configure(self, **settings: Any) -> None:
        """Change settings of the plugin, as an operator would."""
        self._settings |= settings
        text = json.dumps(self._settings)
        self._control.apply(ConfigurePlugin(*self._namespace, NAME, text, self._plugin.version))

    def create_topic(self, name: str, partitions: int = 1) -> None:
        self.broker.create_topic(name, partitions)

    def delete_topic(self, name: str) -> None:
        self.broker.delete_topic(name)

    def _topic_name(self, topic_id: bytes) -> str | None:
        known = self.broker._topics.values()
        return next((topic.name for topic in known if topic.topic_id == topic_id), None)

    async def _resolved(self, topic_ids: Collection[bytes]) -> Mapping[bytes, str]:
        return {each: name for each in topic_ids if (name := self._topic_name(each)) is not None}

    # ---- what a client does ----

    async def produce(
        self, topic: str, *values: bytes, partition: int = 0, acks: int = -1, timeout_ms: int = 30_000
    ) -> Produced:
        """Send one batch, and return what the producer is answered when its ack comes."""
        made = [Record(number, 0, None, value) for number, value in enumerate(values)]
        batch = encode_batch(made, BatchHeader(0, 0, 0, 2, 0, 0, 0, 0, 0, -1, -1, -1, len(made)))
        data = [{"name": topic, "partition_data": [{"index": partition, "records": batch}]}]
        asked = {"acks": acks, "timeout": timeout_ms, "topic_data": data}
        found: Any = await self.ask(ApiKey.PRODUCE, PRODUCE_VERSION, asked)
        ((answered,),) = (each.partition_responses for each in found.responses)
        return Produced(int(answered.error_code), answered.base_offset)

    async def fetch(self, topic: str, partition: int = 0, offset: int = 0) -> list[bytes | None]:
        """The values of the records from an offset on, as a consumer gets them."""
        asked = {"topics": [{"topic": topic, "partitions": [{"partition": partition, "fetch_offset": offset}]}]}
        found: Any = await self.ask(ApiKey.FETCH, FETCH_VERSION, asked)
        ((answered,),) = (each.partitions for each in found.responses)
        if answered.error_code:
            raise ValueError(f"error {int(answered.error_code)}")
        records = bytes(answered.records or b"")
        batches = (records[start:end] for start, end, _ in walk(records))
        return [record.value for batch in batches for record in decode_records(batch) if record.offset >= offset]

    async def ask(self, api_key: int, version: int, values: Mapping[str, Any]) -> ResponsePayload:
        """Send any request, and return its answer. Raises ConnectionClosed where a hook closes the connection."""
        self._correlation_id += 1
        frame = encode_request(build_request(ApiKey(api_key), version, values), self._correlation_id, "kit")
        _, payload = decode_response(api_key, version, await self._answer(api_key, version, frame))
        return payload

    async def _answer(self, api_key: int, version: int, frame: bytes) -> bytes:
        """As a session has it: each hook of the API in turn, then the broker, then the hooks that want its answer."""
        behind: list[ResponseHook] = []
        for hook in self.host.hooks():
            if hook.api_key != api_key:
                continue
            now = asyncio.get_running_loop().time()
            request = Request(frame, True, api_key, version, self._correlation_id, now, self._client)
            verdict: Verdict = hook.on_request(request)
            while isinstance(verdict, Hold | Ask):
                if isinstance(verdict, Hold):
                    verdict = await verdict.verdict
                else:
                    verdict = verdict.then(self.broker.answer(verdict.frame))
            if isinstance(verdict, Close):
                raise ConnectionClosed(verdict.reason)
            if isinstance(verdict, Answer):
                return await self._through(verdict.frame, behind)
            if isinstance(verdict, Replace):
                frame = verdict.frame
                if verdict.on_response is not None:
                    behind.append(verdict.on_response)
        return await self._through(self.broker.answer(frame), behind)

    async def _through(self, answer: bytes | Gate, behind: list[ResponseHook]) -> bytes:
        for hook in reversed(behind):
            answer = hook(await _opened(answer))
        return await _opened(answer)


async def _opened(answer: bytes | Gate) -> bytes:
    """What goes out when all gates have opened."""
    while isinstance(answer, Gate):
        opened = asyncio.Event()
        if not answer.take(opened.set):
            await opened.wait()
        answer = answer.answer()
    return answer
