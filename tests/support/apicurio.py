"""Apicurio Registry, as a process of its own with nothing but memory behind it, or a topic of Kafka.

The first start on a machine downloads it (159 MB, from Maven Central) into the cache that Kafka's jars are in; a start
takes 10 to 20 s. So it is for ``--suite stories``.
"""

from __future__ import annotations

import os
import shutil
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import httpx

from isthmus_bench.kafka import ports
from isthmus_bench.kafka.cluster import telling_lines
from isthmus_bench.kafka.errors import EmbeddedKafkaError
from isthmus_bench.kafka.jars import cache_directory, ivy_jar, locked, run_resolver, say_on_stderr
from isthmus_bench.kafka.java import find_java, trust_options
from isthmus_bench.kafka.processes import MARK, Guard, Process, remove

VERSION: Final = "3.3.3"
OLDEST_JAVA: Final = 21
HOST: Final = "127.0.0.1"
READY_TIMEOUT_S: Final = 180.0
LOOK_AGAIN_S: Final = 0.2
_GROUP: Final = "io.apicurio"
_ARTIFACT: Final = "apicurio-registry-app"
_IVY: Final = f"""\
<ivy-module version="2.0" xmlns:m="http://ant.apache.org/ivy/maven">
<info organisation="isthmus" module="registry"/><configurations><conf name="default"/></configurations>
<dependencies><dependency org="{_GROUP}" name="{_ARTIFACT}" rev="{VERSION}" transitive="false" conf="default->default">
<artifact name="{_ARTIFACT}" type="tar.gz" ext="tar.gz" m:classifier="all"/></dependency></dependencies></ivy-module>
"""


def unpacked() -> Path:
    """The folder of the registry in the cache, which is whole if it is there. Raises EmbeddedKafkaError."""
    home = cache_directory() / "apicurio-registry" / VERSION
    if not home.is_dir():
        with locked(home.with_name(f"{VERSION}.lock"), lambda: None):
            if not home.is_dir():
                for abandoned in home.parent.glob(f".{VERSION}-*"):
                    shutil.rmtree(abandoned, ignore_errors=True)
                work = Path(tempfile.mkdtemp(prefix=f".{VERSION}-", dir=home.parent))
                try:
                    _download(work)
                    with tarfile.open(next(work.glob("*.tar.gz"))) as archive:
                        archive.extractall(work / "unpacked", filter="data")
                    (work / "unpacked").rename(home)
                finally:
                    shutil.rmtree(work, ignore_errors=True)
    return home


def _download(work: Path) -> None:
    java = find_java(OLDEST_JAVA)
    trust = trust_options(java, work, os.environ)
    maven, ivy = shutil.which("mvn"), ivy_jar()
    said = "there is neither Maven nor Ivy"
    if maven is not None:
        command = [maven, "-B", "-q", f"-Dmaven.repo.local={cache_directory() / 'maven'}"]
        command += ["org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy", f"-DoutputDirectory={work}"]
        command += [f"-Dartifact={_GROUP}:{_ARTIFACT}:{VERSION}:tar.gz:all"]
        options = " ".join([os.environ.get("MAVEN_OPTS", ""), *trust]).strip()
        environment = {**os.environ, "JAVA_HOME": str(java.home), "MAVEN_OPTS": options}
        with locked(cache_directory() / "maven.lock", lambda: None):
            said = run_resolver(command, environment, cache_directory() / "maven", say_on_stderr) or ""
    if ivy is not None and not list(work.glob("*.tar.gz")):
        module, cache = work / "ivy.xml", cache_directory() / "ivy"
        module.write_text(_IVY)
        command = [str(java.executable), f"-Divy.default.ivy.user.dir={cache}", *trust, "-jar", str(ivy)]
        command += ["-ivy", str(module), "-cache", str(cache / "cache"), "-confs", "default"]
        command += ["-retrieve", f"{work}/[artifact]-[revision].[ext]"]
        with locked(cache / "lock", lambda: None):
            said = run_resolver(command, dict(os.environ), cache / "cache", say_on_stderr) or ""
    if not list(work.glob("*.tar.gz")):
        raise EmbeddedKafkaError(f"{_ARTIFACT} {VERSION} could not be downloaded: {said}")


class ApicurioRegistry:
    """One registry, empty at each start, or with what stands in its topic at these brokers."""

    def __init__(self, bootstrap: str | None = None) -> None:
        self._ports = ports.pick(HOST, 2)
        self.url = f"http://{HOST}:{self._ports[0]}"
        self._directory = Path(tempfile.mkdtemp(prefix="isthmus-registry-"))
        self._process: Process | None = None
        self._bootstrap = bootstrap
        Guard.shared().add(self._directory)

    def begin(self) -> None:
        """Start it; ``wait`` returns when it is ready."""
        serving, managing = self._ports
        command = [str(find_java(OLDEST_JAVA).executable), "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
        command += ["-XX:-UsePerfData", f"{MARK}{self._directory}", f"-Djava.io.tmpdir={self._directory}"]
        command += [f"-Dapicurio.storage.kind={'kafkasql' if self._bootstrap else 'sql'}"]
        if self._bootstrap:
            command += [f"-Dapicurio.kafkasql.bootstrap.servers={self._bootstrap}"]
        command += ["-Dapicurio.storage.sql.kind=h2"]
        command += [f"-Dapicurio.datasource.url=jdbc:h2:mem:r{serving}", f"-Dquarkus.http.host={HOST}"]
        command += [f"-Dquarkus.http.port={serving}", f"-Dquarkus.management.port={managing}"]
        command += ["-jar", str(unpacked() / "quarkus-run.jar")]
        self._process = Process.spawn(command, dict(os.environ), self._directory / "registry.log")

    def wait(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not self._answers():
            if self._process.wait(LOOK_AGAIN_S) or time.monotonic() > deadline:
                raise EmbeddedKafkaError(f"the registry did not start:\n  {telling_lines(self.log())}")

    def _answers(self) -> bool:
        try:
            return httpx.get(f"{self.url}/apis/registry/v3/system/info", trust_env=False, timeout=10).is_success
        except httpx.TransportError:
            return False

    def log(self) -> str:
        return (self._directory / "registry.log").read_text(errors="replace")

    def kill(self) -> None:
        """What it held in memory is gone, too."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        self.kill()
        remove(self._directory)
        Guard.shared().drop(self._directory)
        ports.release(self._ports)


@contextmanager
def registries(count: int, bootstrap: str | None = None) -> Iterator[list[ApicurioRegistry]]:
    """Some of them, started at once. ``bootstrap``: of the first one's topic."""
    made = [ApicurioRegistry(None if number else bootstrap) for number in range(count)]
    try:
        for each in made:
            each.begin()
        for each in made:
            each.wait()
        yield made
    finally:
        for each in made:
            each.close()
