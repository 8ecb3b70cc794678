"""Capture: what the clients of a namespace do, recorded in sealed files of events (docs/capture.md).

Notes are taken on the traffic path (``recorder``, ``notes``). A process of its own (``writer``) makes events of them
(``pairing``, ``first_bytes``) and writes them (``blocks``). Contents, keys and headers of records are never in a file.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from prometheus_client.core import CounterMetricFamily, Metric
from pydantic import Field, model_validator

from isthmus_control.model import ResourceType
from isthmus_plugins.capture.allowed import KafkaClient, NotAllowed, kafka_client
from isthmus_plugins.capture.kafka_topic import ClientFileError
from isthmus_plugins.capture.observed import ObservedConnections, ObservedLinks
from isthmus_plugins.capture.recorder import Recorder
from isthmus_plugins.hookspecs import hookimpl
from isthmus_plugins.namespace_plugins import Enabled, NamespacePlugin, Policy, Scope, Settings
from isthmus_plugins.observers import ConnectionObserver, LinkObserver

log = logging.getLogger("isthmus_plugins.capture")


class CaptureSettings(Settings):
    sampling: float = Field(default=1.0, gt=0, le=1)
    """Which part of the requests is recorded."""
    hash_clients: bool = False
    """Record client ids, principals and addresses as hashes."""
    salt: str = Field(default="", max_length=64, repr=False)
    """Of these hashes."""
    roll_bytes: int = Field(default=64 * 1024 * 1024, ge=64 * 1024, le=4 * 1024**3)
    """A file is sealed when it has so many bytes."""
    roll_s: float = Field(default=60.0, ge=1, le=86_400)
    """A file is sealed after this time, in seconds."""
    keep_bytes: int = Field(default=10 * 1024**3, ge=1024 * 1024)
    """The oldest files are deleted when those of this proxy have more bytes."""
    files: bool = True
    """Whether files are written."""
    kafka_topic: str = ""
    """A topic that events are written to as well, as JSON; it must exist."""
    kafka_servers: str = ""
    """host:port of brokers that have this topic, separated by commas, of those that each proxy's configuration allows
    (``[capture] servers_allowed``); empty: those that the client's file names."""
    kafka_client_file: str = ""
    """Below the directory that each proxy's configuration names (``[capture] files_directory``), a properties file with
    bootstrap.servers and the security settings of a client of these brokers."""

    @model_validator(mode="after")
    def _somewhere(self) -> CaptureSettings:
        if bool(self.kafka_topic) != bool(self.kafka_servers or self.kafka_client_file):
            raise ValueError("kafka_topic and its brokers belong together: kafka_servers, or a kafka_client_file")
        if not self.files and not self.kafka_topic:
            raise ValueError("nothing would be written: files is false, and there is no kafka_topic")
        return self


class Captured(Enabled):
    """One namespace that is captured."""

    def __init__(self, plugin: CapturePlugin, scope: Scope) -> None:
        self._plugin = plugin
        self.scope = scope
        self._client = KafkaClient("", "")
        settings = scope.settings
        if settings.kafka_topic:
            allowed = scope.context.capture_allowed
            try:
                self._client = kafka_client(settings.kafka_servers, settings.kafka_client_file, allowed)
            except (ClientFileError, NotAllowed) as error:
                self.lacks = f"no events go to topic {settings.kafka_topic}: {error}"

    @property
    def wanted(self) -> dict[str, Any]:
        """What the writer is told."""
        return {
            **self.scope.settings.model_dump(),
            "type": self.scope.type.value,
            "prefix": self.scope.prefix,
            "directory": self.directory,
            "kafka_topic": self.scope.settings.kafka_topic if self.lacks is None else "",
            "kafka_servers": self._client.servers,
            "kafka_client_file": self._client.file,
        }

    @property
    def directory(self) -> str:
        """A name for its files."""
        prefix = "".join(each if each.isalnum() or each in "-_." else "~" for each in self.scope.prefix)
        return f"{self.scope.type.value}={prefix}"

    async def start(self) -> None:
        await self._plugin.add(self)

    async def stop(self) -> None:
        await self._plugin.remove(self)


class CapturePlugin(NamespacePlugin):
    """Captures as long as it is enabled for some namespace."""

    about = "records requests and answers (never contents) in files for Spark jobs"
    settings = CaptureSettings
    types = frozenset((ResourceType.TOPIC, ResourceType.CONSUMER_GROUP))
    policy = Policy.OPEN

    def __init__(self) -> None:
        self._captured: list[Captured] = []
        self._recorder: Recorder | None = None
        self._connections = ObservedConnections()
        self._links = ObservedLinks()

    @hookimpl
    def isthmus_connection_observers(self) -> Sequence[ConnectionObserver]:
        return (self._connections,)

    @hookimpl
    def isthmus_link_observers(self) -> Sequence[LinkObserver]:
        return (self._links,)

    @hookimpl
    def isthmus_namespace_plugin(self) -> NamespacePlugin:
        return self

    def enabled(self, scope: Scope) -> Enabled:
        if scope.context.data_directory is None and scope.settings.files:
            raise ValueError("there is nowhere to write: set [data] directory in the proxy's configuration")
        return Captured(self, scope)

    async def add(self, captured: Captured) -> None:
        """Capture one namespace more."""
        self._captured.append(captured)
        context = captured.scope.context
        if self._recorder is None:
            data = context.data_directory or Path()  # without one, no namespace has files
            self._recorder = Recorder(context, data / "capture", self._connections)
            self._recorder.start()
            context.observe(self._recorder)
            self._connections.told = self._links.told = self._recorder.note
        self._configure()

    async def remove(self, captured: Captured) -> None:
        """Capture one namespace less."""
        self._captured.remove(captured)
        recorder = self._recorder
        if recorder is None:
            return
        if self._captured:
            self._configure()
        else:
            self._recorder = None
            captured.scope.context.observe(None)
            self._connections.told = self._links.told = None
            await recorder.stop()

    def _configure(self) -> None:
        assert self._recorder is not None
        self._recorder.configure([each.wanted for each in self._captured])

    @hookimpl
    def isthmus_metrics(self) -> Iterable[Metric]:
        recorder = self._recorder
        written = {} if recorder is None else recorder.written
        events = CounterMetricFamily("isthmus_capture_events", "Events that were written into capture files")
        events.add_metric([], written.get("events", 0))
        yield events
        sent = CounterMetricFamily("isthmus_capture_sent_events", "Events that were written into Kafka topics")
        sent.add_metric([], written.get("sent", 0))
        yield sent
        dropped = CounterMetricFamily(
            "isthmus_capture_dropped",
            "What is not in the files. notes: the writer did not keep up. events: they could not be written. unpaired: "
            "answers without a request",
            labels=["what"],
        )
        dropped.add_metric(["notes"], 0 if recorder is None else recorder.dropped)
        dropped.add_metric(["events"], written.get("dropped", 0))
        dropped.add_metric(["unpaired"], written.get("unpaired", 0))
        yield dropped


plugin = CapturePlugin()
