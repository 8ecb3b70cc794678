"""Kafka's jars, from Maven Central by their coordinates, into a cache.

Maven does it where it is installed, else Ivy, which comes with pyspark. Both know where to look by their own defaults
and by the user's settings. The cache (``ISTHMUS_CACHE``, else ``~/.cache/isthmus``)::

    kafka/4.3.0/jars/*.jar          complete as soon as kafka/4.3.0 exists: it is moved into place in one step
    kafka/4.3.0/<java build>/       what was prepared for one Java: see archive.py
    kafka/4.3.0.lock                held while somebody resolves or prepares that version
    connect-mirror/4.3.0/jars/*.jar the same for MirrorMaker 2, which only a benchmark needs
    maven/, ivy/                    what the downloads themselves keep
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from isthmus_bench.kafka.errors import EmbeddedKafkaError
from isthmus_bench.kafka.java import Java, find_java, trust_options

TESTED_VERSIONS: Final = ("3.9.2", "4.1.1", "4.3.0")
DEFAULT_VERSION: Final = TESTED_VERSIONS[-1]
OLDEST_VERSION: Final = (3, 9)
"""Before it, tools have other names and SCRAM users cannot be made when a cluster is formatted."""

KAFKA: Final = "kafka"
MIRROR_MAKER: Final = "connect-mirror"
"""What jars there are: brokers with their tools, and MirrorMaker 2."""

DOWNLOAD_TIMEOUT_S: Final = 900
PROGRESS_S: Final = 15

_VERSION: Final = re.compile(r"(\d+)\.(\d+)\.(\d+)(-rc\d+)?")
_COPY_DEPENDENCIES: Final = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies"

Say = Callable[[str], None]
"""Takes one line of progress."""


def say_on_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def cache_directory(environment: Mapping[str, str] = os.environ) -> Path:
    """Where downloads are kept. Made if missing."""
    chosen = environment.get("ISTHMUS_CACHE")
    directory = Path(chosen).expanduser().absolute() if chosen else Path.home() / ".cache" / "isthmus"
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def parse_version(version: str) -> tuple[int, int, int]:
    """``4.3.0`` as numbers. Raises EmbeddedKafkaError for what is no Kafka version, or one that is too old."""
    match = _VERSION.fullmatch(version)
    tested = ", ".join(TESTED_VERSIONS)
    if match is None:
        raise EmbeddedKafkaError(f"{version!r} is not a Kafka version: give three numbers, such as {tested}")
    numbers = (int(match[1]), int(match[2]), int(match[3]))
    if numbers[:2] < OLDEST_VERSION:
        raise EmbeddedKafkaError(f"Kafka {version} is too old for embedded clusters: tested are {tested}")
    return numbers


def coordinates(version: str, jar_set: str = KAFKA) -> list[tuple[str, str, str]]:
    """(group, artifact, version) of what to resolve, dependencies come by themselves."""
    if jar_set == MIRROR_MAKER:
        return [("org.apache.kafka", "connect-mirror", version)]
    wanted = [
        ("org.apache.kafka", "kafka_2.13", version),
        ("org.apache.kafka", "kafka-tools", version),
    ]
    if parse_version(version)[0] >= 4:
        # Kafka 4 comes with log4j 2, but with nothing that leads its log calls (slf4j 1.7) there: it would log nothing.
        wanted.append(("org.apache.logging.log4j", "log4j-slf4j-impl", "2.24.3"))
    return wanted


@contextmanager
def locked(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold a lock between processes; calls ``waiting`` if another one has it. It ends with its process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def kafka_home(version: str, jar_set: str = KAFKA) -> Path:
    """The folder of a version in the cache, there or not. Raises EmbeddedKafkaError for an impossible version."""
    parse_version(version)
    return cache_directory() / jar_set / version


def resolve_jars(version: str, say: Say = say_on_stderr, jar_set: str = KAFKA) -> list[Path]:
    """The jars of one Kafka version, sorted; downloaded if they are not in the cache.

    Safe when several processes ask at once: one downloads, the others wait. Raises EmbeddedKafkaError.
    """
    home = kafka_home(version, jar_set)
    if not home.is_dir():
        with locked(home.with_name(f"{version}.lock"), lambda: say(f"Kafka {version}: another process gets its jars")):
            if not home.is_dir():
                _download(version, jar_set, home, say)
    return sorted((home / "jars").glob("*.jar"))


def _download(version: str, jar_set: str, home: Path, say: Say) -> None:
    for abandoned in home.parent.glob(f".{version}-*"):  # of a process that was killed: we hold its lock
        shutil.rmtree(abandoned, ignore_errors=True)
    java = find_java()
    maven = shutil.which("mvn")
    ivy = ivy_jar()
    if maven is None and ivy is None:
        raise EmbeddedKafkaError(
            "Kafka's jars have to be downloaded: install Maven, or pip install 'isthmus[embedded]', which brings Ivy"
        )
    wanted = coordinates(version, jar_set)
    failures: list[str] = []
    started = time.monotonic()
    work = Path(tempfile.mkdtemp(prefix=f".{version}-", dir=home.parent))
    try:
        trust = trust_options(java, work, os.environ)
        for name, resolve in (
            ("Maven", None if maven is None else lambda: _with_maven(maven, java, wanted, work, trust, say)),
            ("Ivy", None if ivy is None else lambda: _with_ivy(ivy, java, wanted, work, trust, say)),
        ):
            if resolve is None:
                continue
            say(f"{jar_set} {version}: getting its jars from Maven Central with {name} (60 MB, once)")
            shutil.rmtree(work / "jars", ignore_errors=True)
            output = resolve()
            missing = [
                artifact for _, artifact, number in wanted if not (work / "jars" / f"{artifact}-{number}.jar").is_file()
            ]
            if output is None and not missing:
                (work / "trust.p12").unlink(missing_ok=True)
                work.chmod(0o755)
                work.rename(home)
                say(f"Kafka {version}: jars are here ({time.monotonic() - started:.0f} s), kept in {home}")
                return
            failures.append(f"{name}: {output or 'left out ' + ', '.join(missing)}")
    finally:
        shutil.rmtree(work, ignore_errors=True)
    raise EmbeddedKafkaError(
        f"Kafka {version} could not be downloaded. If there is no such version: tested are "
        f"{', '.join(TESTED_VERSIONS)}. If Maven Central cannot be reached: check network, proxy (MAVEN_OPTS) and "
        "certificates (SSL_CERT_FILE).\n" + "\n".join(failures)
    )


def ivy_jar() -> Path | None:
    spec = find_spec("pyspark")
    if spec is None or spec.origin is None:
        return None
    return next(iter(sorted(Path(spec.origin).parent.glob("jars/ivy-*.jar"))), None)


def maven_project(wanted: Sequence[tuple[str, str, str]]) -> str:
    """A pom.xml that depends on what we need (its coordinates) and makes nothing."""
    dependencies = "".join(
        f"<dependency><groupId>{group}</groupId><artifactId>{artifact}</artifactId><version>{number}</version></dependency>"
        for group, artifact, number in wanted
    )
    return (
        '<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>'
        "<groupId>isthmus</groupId><artifactId>kafka-jars</artifactId><version>1</version><packaging>pom</packaging>"
        f"<dependencies>{dependencies}</dependencies></project>"
    )


def ivy_module(wanted: Sequence[tuple[str, str, str]]) -> str:
    """The same for Ivy. With ``default->runtime`` the named jars themselves would be left out."""
    dependencies = "".join(
        f'<dependency org="{group}" name="{artifact}" rev="{number}" conf="default->default"/>'
        for group, artifact, number in wanted
    )
    return (
        '<ivy-module version="2.0"><info organisation="isthmus" module="kafka-jars"/>'
        f'<configurations><conf name="default"/></configurations><dependencies>{dependencies}</dependencies>'
        "</ivy-module>"
    )


def _with_maven(
    maven: str, java: Java, wanted: Sequence[tuple[str, str, str]], work: Path, trust: list[str], say: Say
) -> str | None:
    project = work / "pom.xml"
    project.write_text(maven_project(wanted))
    # A repository of our own: a failed run leaves entries without jars, and other tools would trip over them. -U:
    # otherwise Maven remembers a failure for a day. Neither its folder nor Ivy's is safe for two processes.
    command = [maven, "-B", "-q", "-U", "-f", str(project), f"-Dmaven.repo.local={cache_directory() / 'maven'}"]
    command += [_COPY_DEPENDENCIES, f"-DoutputDirectory={work / 'jars'}", "-DincludeScope=runtime"]
    options = " ".join([os.environ.get("MAVEN_OPTS", ""), *trust]).strip()
    environment = {**os.environ, "JAVA_HOME": str(java.home), "MAVEN_OPTS": options}
    with locked(cache_directory() / "maven.lock", lambda: None):
        failure = run_resolver(command, environment, cache_directory() / "maven", say)
    project.unlink()
    return failure


def _with_ivy(
    ivy: Path, java: Java, wanted: Sequence[tuple[str, str, str]], work: Path, trust: list[str], say: Say
) -> str | None:
    module = work / "ivy.xml"
    module.write_text(ivy_module(wanted))
    cache = cache_directory() / "ivy"
    command = [str(java.executable), f"-Divy.default.ivy.user.dir={cache}", *trust, "-jar", str(ivy)]
    command += ["-ivy", str(module), "-cache", str(cache / "cache"), "-confs", "default", "-types", "jar", "bundle"]
    command += ["-retrieve", f"{work}/jars/[artifact]-[revision].[ext]"]
    with locked(cache / "lock", lambda: None):
        failure = run_resolver(command, dict(os.environ), cache / "cache", say)
    module.unlink()
    return failure


def run_resolver(command: list[str], environment: dict[str, str], arriving: Path, say: Say) -> str | None:
    """None, or what the command said when it failed. Says from time to time how many jars came to ``arriving``."""
    started, there = time.monotonic(), _count_jars(arriving)
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        with subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        ) as process:
            try:
                while process.poll() is None:
                    try:
                        process.wait(PROGRESS_S)
                    except subprocess.TimeoutExpired:
                        passed = time.monotonic() - started
                        if passed > DOWNLOAD_TIMEOUT_S:
                            return f"not done after {DOWNLOAD_TIMEOUT_S} s"
                        say(f"  {passed:.0f} s, {_count_jars(arriving) - there} jars so far")
            finally:
                process.kill()  # if it still runs: a timeout, an interrupt
        if process.returncode == 0:
            return None
        output.seek(0)
        said = [line.strip() for line in output]
    failures = [line for line in said if re.search(r"could not|not found|exception", line, re.IGNORECASE)]
    return "\n  ".join(["failed:", *dict.fromkeys((failures or said)[:5])])


def _count_jars(directory: Path) -> int:
    return sum(1 for _ in directory.rglob("*.jar"))
