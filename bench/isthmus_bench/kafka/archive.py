"""Prepare a Kafka version once for one Java, so that clusters start quickly ever after.

Two things come of a throwaway broker that is formatted, started and used for a moment:

- a *template* of what the storage tool writes when it formats a log directory: the feature levels of the version, the
  same for every cluster. With it a cluster is formatted without starting a JVM;
- a *class data archive* (JEP 310): the JVM maps the classes that brokers and tools load instead of reading and
  verifying them. On two cores a broker opens its port after 0.9 s instead of 2.0, for 1.4 s of CPU time instead of 2.5,
  and takes 45 MB less memory; tools start in half the time.

Clusters run without an archive, too, only more slowly; so a failure to make one is reported and not raised.
"""

from __future__ import annotations

import base64
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Final

from isthmus_bench.kafka import ports as port_numbers
from isthmus_bench.kafka.catalogue import main_class
from isthmus_bench.kafka.distribution import Distribution, properties_file, unprepared
from isthmus_bench.kafka.errors import EmbeddedKafkaError
from isthmus_bench.kafka.jars import Say, locked, say_on_stderr
from isthmus_bench.kafka.probe import wait_until_ready
from isthmus_bench.kafka.processes import MARK, Guard, Process, remove
from isthmus_bench.kafka.settings import ClusterSpec, broker_properties, properties_text

BROKER_MAIN: Final = "kafka.Kafka"
_STORAGE_TOOL: Final = "kafka.tools.StorageTool"
_ARCHIVE: Final = "classes.jsa"


def _training(bootstrap: str) -> Iterator[tuple[str, list[str]]]:
    """Tools that make the broker, and themselves, load what is usually needed."""
    yield "kafka-topics", ["--bootstrap-server", bootstrap, "--create", "--topic", "t", "--partitions", "2"]
    produce = ["--topic", "t", "--num-records", "100", "--record-size", "100", "--throughput", "-1"]
    yield "kafka-producer-perf-test", [*produce, "--producer-props", f"bootstrap.servers={bootstrap}"]
    consume = ["--topic", "t", "--group", "g", "--from-beginning", "--max-messages", "100", "--timeout-ms", "5000"]
    yield "kafka-console-consumer", ["--bootstrap-server", bootstrap, *consume]
    yield "kafka-consumer-groups", ["--bootstrap-server", bootstrap, "--list"]


def random_id() -> str:
    """A cluster or directory id as Kafka makes them: 22 characters, and none begins with '-'."""
    while (made := base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")).startswith("-"):
        pass
    return made


@cache
def prepare(version: str, say: Say = say_on_stderr) -> Distribution:
    """A distribution that is ready to run, with template and archive. Raises EmbeddedKafkaError.

    Safe when several processes ask at once: one prepares, the others wait.
    """
    distribution = unprepared(version, say)
    home = distribution.home
    if not home.is_dir():
        lock = home.parent.with_name(f"{version}.lock")
        with locked(lock, lambda: say(f"Kafka {version}: another process prepares it")):
            if not home.is_dir():
                _train(distribution, say)
    archive = home / _ARCHIVE
    return replace(distribution, archive=archive) if archive.is_file() else distribution


def format_storage(
    distribution: Distribution, configuration: Path, cluster_id: str, options: tuple[str, ...] = ()
) -> None:
    """Format a broker's log directories with Kafka's own tool. Raises EmbeddedKafkaError with what it said."""
    # With "=": an id may begin with "-".
    arguments = ["format", f"--cluster-id={cluster_id}", "-c", str(configuration), *options]
    done = subprocess.run(
        distribution.command(_STORAGE_TOOL, arguments, heap_mb=128),
        env=distribution.environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    if done.returncode != 0:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line and not line.startswith("\tat ")]
        raise EmbeddedKafkaError("the cluster's storage could not be formatted:\n  " + "\n  ".join(lines[-8:]))


def format_from_template(distribution: Distribution, data: Path, broker_id: int, cluster_id: str) -> None:
    """The same as the tool does, for a cluster without users and chosen features (meta.properties: KIP-858)."""
    data.mkdir(parents=True)
    shutil.copyfile(distribution.template, data / distribution.template.name)
    meta = {"version": "1", "cluster.id": cluster_id, "node.id": str(broker_id), "directory.id": random_id()}
    (data / "meta.properties").write_text(properties_text(meta))


def _train(distribution: Distribution, say: Say) -> None:
    say(f"Kafka {distribution.version}: preparing a quick start (once, some 15 s)")
    started = time.monotonic()
    home = distribution.home
    for abandoned in home.parent.glob(f".{home.name}-*"):  # of a process that was killed: we hold its lock
        shutil.rmtree(abandoned, ignore_errors=True)
    result = Path(tempfile.mkdtemp(prefix=f".{home.name}-", dir=home.parent))
    work = Path(tempfile.mkdtemp(prefix="isthmus-prepare-"))
    Guard.shared().add(work)
    try:
        classes = _use_a_broker(distribution, work, result)
        try:
            _dump(distribution, classes, work, result / _ARCHIVE)
        except EmbeddedKafkaError as error:
            say(f"Kafka {distribution.version}: no class data archive, starts take longer: {error}")
        result.chmod(0o755)
        result.rename(home)
    finally:
        remove(work)
        Guard.shared().drop(work)
        shutil.rmtree(result, ignore_errors=True)
    say(f"Kafka {distribution.version}: prepared ({time.monotonic() - started:.0f} s)")


def _use_a_broker(distribution: Distribution, work: Path, result: Path) -> list[Path]:
    """Format, start and use a broker. Puts the template into ``result``; returns lists of the classes loaded."""
    spec = ClusterSpec(version=distribution.version)
    names = spec.port_names(1)
    numbers = port_numbers.pick(spec.host, len(names))
    ports = {1: dict(zip(names, numbers, strict=True))}
    cluster_id = random_id()
    configuration = properties_file(
        work / "server.properties", properties_text(broker_properties(spec, 1, ports, work, work, ""))
    )
    format_storage(distribution, configuration, cluster_id)
    shutil.copyfile(work / "data" / "bootstrap.checkpoint", result / "bootstrap.checkpoint")
    lists: list[Path] = []

    def listing() -> str:
        lists.append(work / f"{len(lists)}.classes")
        return f"-XX:DumpLoadedClassList={lists[-1]}"

    flags = [f"{MARK}{work}", listing()]
    command = distribution.command(BROKER_MAIN, [str(configuration)], flags=flags, log_level="info")
    broker = Process.spawn(command, distribution.environment(), work / "broker.log")
    try:
        bootstrap = f"{spec.host}:{ports[1]['PLAINTEXT']}"
        wait_until_ready({1: (spec.host, ports[1]["PLAINTEXT"])}, {1: broker}, cluster_id, [1], None, 120)
        for name, arguments in _training(bootstrap):
            tool = distribution.command(main_class(distribution, name), arguments, flags=[listing()])
            subprocess.run(tool, env=distribution.environment(), capture_output=True, timeout=120)
        broker.send(signal.SIGTERM)  # the list of classes is complete when the JVM ends in order
        broker.wait(60)
    finally:
        broker.kill()
        port_numbers.release(numbers)
    return [path for path in lists if path.is_file()]


def _dump(distribution: Distribution, lists: Iterable[Path], work: Path, archive: Path) -> None:
    """Make the archive of the listed classes."""
    # The lists of several processes as one: numbers of classes ("id: 5") mean something in their own list only.
    lines = (line.split(" id: ")[0] for path in lists for line in path.read_text().splitlines() if line[:1] != "#")
    merged = work / "all.classes"
    merged.write_text("\n".join(dict.fromkeys(lines)) + "\n")
    command = [str(distribution.java.executable), "-Xshare:dump", "-XX:+UseSerialGC"]
    command += [*distribution.module_flags, f"{MARK}{work}"]
    command += [f"-XX:SharedClassListFile={merged}", f"-XX:SharedArchiveFile={archive}"]
    done = subprocess.run(command, env=distribution.environment(), capture_output=True, text=True, timeout=300)
    if done.returncode != 0 or not archive.is_file():
        raise EmbeddedKafkaError((done.stdout + done.stderr).strip()[-500:] or f"exit status {done.returncode}")
