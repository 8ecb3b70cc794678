"""Plugins that operators enable for namespaces, at run time: the contract.

A distribution offers one as a :class:`NamespacePlugin` (hook ``isthmus_namespace_plugin``). ``isthmus plugin enable``
records it with settings for a namespace in the control log; each proxy then asks the plugin for an :class:`Enabled`,
one for each namespace and settings, and calls its hooks for requests that name something the namespace holds.

* *Ordering.* Requests of one connection are seen in their order. Hooks of wider namespaces come before those of
  narrower ones, within a namespace they come in the order that the operator gave; answers are seen in reverse.
  What one replaces is what those behind it see. Reservation and replication come first.
* *Local view.* A hook sees what comes through this proxy: other proxies of the cluster have their own copy of it.
* *Two kinds, never mixed.* A hook without ``limit_s`` is synchronous: it is called between two reads of a socket, and
  must neither block nor await. One with ``limit_s`` is a coroutine function: nothing behind its request is read on that
  connection until it is done, at the latest after that time.
* *Failure policy.* A hook that raises, or is late, fails as :attr:`NamespacePlugin.policy` says: ``closed`` refuses
  what the request asks of the namespace, with a code that clients try again; ``open`` goes on as if the hook had
  returned None. Both are counted (``isthmus_plugin_failures_total``). A plugin that a proxy does not have, or whose
  settings it refuses, fails closed.
* *Must not.* Keep ``frame``, ``batches`` or ``payload`` of a synchronous hook after it has returned; change them;
  start tasks without an owner (``isthmus_plugins.tasks.Tasks``).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict

from isthmus_control.model import ResourceType, contains
from isthmus_plugins.api import Client, Gate, Request, Verdict
from isthmus_plugins.confirmation import Confirmer
from isthmus_plugins.process import PluginContext
from isthmus_plugins.verdicts import verdict_of
from isthmus_protocol import peeks
from isthmus_protocol.messages import RequestHead, RequestPayload, ResponsePayload, decode_request, decode_response
from isthmus_protocol.records import BatchHeader, walk
from isthmus_protocol.refusals import Part, Refusal, refuse
from isthmus_protocol.schema import ApiKey


class Policy(StrEnum):
    """What becomes of a request of which a hook fails."""

    CLOSED = "closed"
    OPEN = "open"


class Settings(BaseModel):
    """The base of a plugin's settings; a plugin without any takes it as it is."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


@dataclass(frozen=True, slots=True)
class Scope:
    """For what a plugin is enabled."""

    type: ResourceType
    prefix: str
    settings: Any
    """An instance of the plugin's ``settings``."""
    context: PluginContext

    def __contains__(self, name: str) -> bool:
        return contains(self.type, self.prefix, name)


class Batch(NamedTuple):
    """A batch in a Produce request, or in the answer to a Fetch."""

    topic: str
    partition: int
    header: BatchHeader
    data: memoryview
    """The whole batch, its header included."""


class NamespaceRequest:
    """A request that names something of the namespace, as one hook sees it."""

    def __init__(self, request: Request, scope: Scope, names: tuple[str, ...], shared: Views) -> None:
        self.scope = scope
        self.names = names
        """The namespace's topics or groups that the request names, each once."""
        self.client: Client = request.client
        self.api_key = request.api_key
        self.version = request.version
        self.now = request.now
        """When its bytes arrived, seconds on the loop's monotonic clock."""
        self._request = request
        self._views = shared

    @property
    def frame(self) -> bytes:
        """With its size prefix."""
        return self._request.frame

    @property
    def payload(self) -> RequestPayload:
        """Decoded, once for all hooks that ask."""
        return self._views.decoded[1]

    @property
    def batches(self) -> Iterator[Batch]:
        """Of a Produce request: the batches for the namespace's topics."""
        wanted = set(self.names)
        return (batch for batch in self._views.batches if batch.topic in wanted)

    def refuse(self, code: int, message: str | None = None, cause: str = "plugin") -> Verdict:
        """Refuse what the request asks of the namespace, and forward the rest.

        ``code``: Kafka's. ``cause``: counted in the metric of refusals.
        """
        wanted = set(self.names)

        def decide(part: Part) -> Refusal | None:
            named = self._views.name_of(part, self.scope.type)
            return Refusal(code, message) if named is None or named in wanted else None

        head, payload = self._views.decoded
        return verdict_of(self._request, head, refuse(head, payload, decide), cause)


class NamespaceResponse:
    """The answer to a request that named something of the namespace."""

    def __init__(self, api_key: int, version: int, names: tuple[str, ...], frame: bytes, views: Views) -> None:
        self.api_key = api_key
        self.version = version
        self.names = names
        self.frame = frame
        """With its size prefix."""
        self._views = views

    @cached_property
    def payload(self) -> ResponsePayload:
        return decode_response(self.api_key, self.version, self.frame)[1]

    @property
    def batches(self) -> Iterator[Batch]:
        """Of an answer to a Fetch: the batches of the namespace's topics."""
        wanted = set(self.names)
        topic_name = self._views.topic_name
        for topic, partitions in peeks.fetch_response(self.version, self.frame)[-1]:
            name = topic_name(topic)
            if name in wanted:
                for partition, *_, records in partitions:
                    yield from _batches(name, partition, records)


class Views:
    """What several hooks may want of one request, made once."""

    def __init__(self, request: Request, topic_name: Callable[[bytes], str]) -> None:
        self._request = request
        self.topic_name = topic_name
        """What the request calls a topic, as a name."""

    @cached_property
    def decoded(self) -> tuple[RequestHead, RequestPayload]:
        return decode_request(self._request.frame)

    @property
    def batches(self) -> Iterator[Batch]:
        request = self._request
        if request.api_key == ApiKey.PRODUCE:
            *_, topics = peeks.produce_batches(request.version, request.frame)
            for topic, partitions in topics:
                for partition, records in partitions:
                    yield from _batches(self.topic_name(topic), partition, records)

    def name_of(self, part: Part, kind: ResourceType) -> str | None:
        """The topic or group that a part is about; None: what the request as a whole is about."""
        if kind is ResourceType.CONSUMER_GROUP:
            return str(part.item) if part.api_key == ApiKey.DELETE_GROUPS else None
        if part.topic is not None:
            return part.topic
        return None if part.topic_id is None else self.topic_name(part.topic_id.bytes)


def _batches(topic: str, partition: int, records: memoryview | None) -> Iterator[Batch]:
    if records:
        for start, end, header in walk(records):
            yield Batch(topic, partition, header, records[start:end])


OnRequest = Callable[[NamespaceRequest], Verdict] | Callable[[NamespaceRequest], Awaitable[Verdict]]
OnResponse = Callable[[NamespaceResponse], bytes | Gate]


@dataclass(frozen=True, slots=True)
class NamespaceHook:
    """One plugin's interest in one API."""

    api_key: int
    on_request: OnRequest | None = None
    on_response: OnResponse | None = None
    """Returns the frame to send on: the same object where nothing changes. It has the whole answer held in memory."""
    limit_s: float | None = None
    """Of a coroutine function as ``on_request``: how long it may take."""
    versions: tuple[int, int] = (0, 0x7FFF)


class Enabled:
    """A plugin at work for one namespace. Override what it does."""

    lacks: str | None = None
    """What of it does not work on this proxy. Operators are told, and cannot enable it like that; where it is enabled
    already, since the proxy's configuration was another then, the rest of it works."""

    def hooks(self) -> Sequence[NamespaceHook]:
        """Asked once."""
        return ()

    def confirmers(self) -> Sequence[Confirmer]:
        """Conditions for acks of the namespace's topics: see ``confirmation``. Asked once."""
        return ()

    async def start(self) -> None:
        """Until this has returned, requests that hooks want to see wait."""

    async def stop(self) -> None:
        """It is disabled, or has other settings; nobody waits for its confirmers any more."""


class NamespacePlugin:
    """What can be enabled for namespaces. Override what differs."""

    about = ""
    """One line for operators."""
    settings: type[BaseModel] = Settings
    version = 1
    """Of ``settings``: raised when older settings would not be understood any more."""
    types: frozenset[ResourceType] = frozenset({ResourceType.TOPIC})
    policy = Policy.CLOSED

    def enabled(self, scope: Scope) -> Enabled:
        """Enabled, configured, or asked whether it could be: nothing starts before :meth:`Enabled.start`.

        Raises ValueError: not with these settings, or not on this proxy.
        """
        raise NotImplementedError
