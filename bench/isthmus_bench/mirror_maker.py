"""MirrorMaker 2 (KIP-382) as a process of its own, in dedicated mode: what a link is compared with."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Final, Self

from isthmus_bench.kafka.archive import prepare
from isthmus_bench.kafka.distribution import Distribution, properties_file
from isthmus_bench.kafka.jars import MIRROR_MAKER, Say, resolve_jars
from isthmus_bench.kafka.processes import MARK, Guard, Process
from isthmus_bench.kafka.settings import properties_text

MAIN: Final = "org.apache.kafka.connect.mirror.MirrorMaker"
SOURCE: Final = "a"
TARGET: Final = "b"
"""The clusters' aliases. The default policy puts the source's before the names of the target's topics."""
HEAP_MB: Final = 2048
_JVM_FLAGS: Final = (
    # As Kafka's own start script does it; the embedded brokers' flags stand before and are for quick starts.
    "-Xms256m",
    "-XX:-UseSerialGC",
    "-XX:+UseG1GC",
    "-XX:MaxGCPauseMillis=20",
    "-XX:InitiatingHeapOccupancyPercent=35",
    "-XX:TieredStopAtLevel=4",
)
STOP_TIMEOUT_S: Final = 10.0

DEFAULT: Final[Mapping[str, str]] = MappingProxyType({})
TUNED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "tasks.max": "4",
        f"{SOURCE}.consumer.fetch.max.bytes": str(64 << 20),
        f"{SOURCE}.consumer.max.partition.fetch.bytes": str(8 << 20),
        f"{SOURCE}.consumer.max.poll.records": "20000",
        f"{SOURCE}.consumer.receive.buffer.bytes": str(1 << 20),
        f"{TARGET}.producer.batch.size": str(512 << 10),
        f"{TARGET}.producer.linger.ms": "5",
        f"{TARGET}.producer.buffer.memory": str(256 << 20),
        f"{TARGET}.producer.max.request.size": str(8 << 20),
        f"{TARGET}.producer.send.buffer.bytes": str(1 << 20),
    }
)
"""For throughput, with acks as they are: several tasks, large fetches, large batches with a little time to fill."""

_ONE_BROKER: Final = {
    f"{name}replication.factor": "1"
    for name in (
        "",
        "checkpoints.topic.",
        "heartbeats.topic.",
        "offset-syncs.topic.",
        "offset.storage.",
        "status.storage.",
        "config.storage.",
    )
}


def settings_text(source: str, target: str, topics: str, chosen: Mapping[str, str]) -> str:
    """``mm2.properties`` for ``topics`` (a pattern) from one cluster of one broker to another."""
    return properties_text(
        {
            "clusters": f"{SOURCE}, {TARGET}",
            f"{SOURCE}.bootstrap.servers": source,
            f"{TARGET}.bootstrap.servers": target,
            f"{SOURCE}->{TARGET}.enabled": "true",
            f"{SOURCE}->{TARGET}.topics": topics,
            f"{TARGET}->{SOURCE}.enabled": "false",
            f"{TARGET}->{SOURCE}.emit.heartbeats.enabled": "false",
            "sync.topic.acls.enabled": "false",  # the brokers have no authorizer
            **_ONE_BROKER,
            **chosen,
        }
    )


def target_topic(topic: str) -> str:
    """What a topic is called on the target."""
    return f"{SOURCE}.{topic}"


class MirrorMaker:
    """One MirrorMaker 2 that copies ``topics`` (a pattern); it starts with the context and ends with it."""

    def __init__(
        self,
        source: str,
        target: str,
        topics: str,
        *,
        version: str,
        directory: Path,
        settings: Mapping[str, str],
        say: Say,
    ) -> None:
        self._distribution = distribution(version, say)
        self._directory = directory
        self._text = settings_text(source, target, topics, settings)
        self._process: Process | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def log_path(self) -> Path:
        return self._directory / "mirror-maker.log"

    def __enter__(self) -> Self:
        self._directory.mkdir(parents=True)
        Guard.shared().add(self._directory)
        configuration = properties_file(self._directory / "mm2.properties", self._text)
        flags = [*_JVM_FLAGS, f"{MARK}{self._directory}"]
        command = self._distribution.command(MAIN, [str(configuration)], heap_mb=HEAP_MB, flags=flags)
        self._process = Process.spawn(command, self._distribution.environment(), self.log_path)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        self._process.send(signal.SIGTERM)
        if not self._process.wait(STOP_TIMEOUT_S):
            self._process.kill()
        Guard.shared().drop(self._directory)

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.alive()


def distribution(version: str, say: Say) -> Distribution:
    """The brokers' jars with MirrorMaker's behind them. Raises EmbeddedKafkaError."""
    brokers = prepare(version, say)
    return dataclasses.replace(brokers, jars=(*brokers.jars, *resolve_jars(version, say, MIRROR_MAKER)))
