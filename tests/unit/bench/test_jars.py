"""Kafka's jars: what is asked for, and a cache that is whole or not there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from isthmus_bench.kafka import jars
from isthmus_bench.kafka.errors import EmbeddedKafkaError

# Writes the jars that the project names; counts its runs; fails where a file "broken" lies beside the log.
MAVEN = """#!{python}
import pathlib, re, sys, time
log = pathlib.Path({log!r})
with log.open("a") as file:
    file.write("run\\n")
out = pathlib.Path(next(a.split("=", 1)[1] for a in sys.argv if a.startswith("-DoutputDirectory=")))
pom = pathlib.Path(sys.argv[sys.argv.index("-f") + 1]).read_text()
out.mkdir()
for artifact, version in re.findall("<artifactId>([^<]*)</artifactId><version>([0-9.]*)</version></dep", pom):
    (out / f"{{artifact}}-{{version}}.jar").write_text("")
    if log.with_name("broken").exists():
        sys.exit("[ERROR] Could not transfer artifact")
    time.sleep(0.2)
"""


@pytest.fixture
def maven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Maven on the PATH that needs no network; returns the log of its runs."""
    log = tmp_path / "bin" / "runs"
    log.parent.mkdir()
    program = log.with_name("mvn")
    program.write_text(MAVEN.format(python=sys.executable, log=str(log)))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{log.parent}:/usr/bin:/bin")
    monkeypatch.setenv("ISTHMUS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(jars, "ivy_jar", lambda: None)
    return log


@pytest.mark.parametrize("version", ["", "4", "4.3", "v4.3.0", "../4.3.0", "latest", "4.3.0/x"])
def test_what_is_no_version_is_refused(version: str) -> None:
    with pytest.raises(EmbeddedKafkaError, match=r"not a Kafka version: .* 4\.3\.0"):
        jars.parse_version(version)


def test_a_version_without_what_we_need_is_refused() -> None:
    with pytest.raises(EmbeddedKafkaError, match="too old"):
        jars.parse_version("3.8.1")
    assert jars.parse_version("3.9.2") == (3, 9, 2)


@pytest.mark.parametrize("jar_set", [jars.KAFKA, jars.MIRROR_MAKER])
@pytest.mark.parametrize("version", jars.TESTED_VERSIONS)
def test_both_resolvers_are_asked_for_the_same(version: str, jar_set: str) -> None:
    space = {"m": "http://maven.apache.org/POM/4.0.0"}
    wanted = jars.coordinates(version, jar_set)
    project = ElementTree.fromstring(jars.maven_project(wanted))
    named = [
        tuple(dependency.findtext(f"m:{part}", namespaces=space) for part in ("groupId", "artifactId", "version"))
        for dependency in project.iterfind("m:dependencies/m:dependency", space)
    ]
    module = ElementTree.fromstring(jars.ivy_module(wanted))
    assert named == wanted
    assert [tuple(each.get(key) for key in ("org", "name", "rev")) for each in module.iter("dependency")] == named


def test_jars_are_downloaded_once(maven: Path) -> None:
    said: list[str] = []
    first = jars.resolve_jars("4.3.0", said.append)
    assert [jar.name for jar in first] == [
        "kafka-tools-4.3.0.jar",
        "kafka_2.13-4.3.0.jar",
        "log4j-slf4j-impl-2.24.3.jar",
    ]
    assert "Maven Central" in said[0]
    assert jars.resolve_jars("4.3.0", said.append) == first
    assert maven.read_text() == "run\n"
    assert not list((first[0].parent.parent.parent).glob(".4.3.0-*"))


def test_mirror_maker_has_a_folder_of_its_own(maven: Path) -> None:
    found = jars.resolve_jars("4.3.0", lambda line: None, jars.MIRROR_MAKER)
    assert [jar.name for jar in found] == ["connect-mirror-4.3.0.jar"]
    assert found[0].parent.parent == jars.kafka_home("4.3.0", jars.MIRROR_MAKER)
    assert not jars.kafka_home("4.3.0").exists()


def test_a_failed_download_leaves_nothing_and_is_tried_again(maven: Path) -> None:
    maven.with_name("broken").touch()
    with pytest.raises(EmbeddedKafkaError) as failure:
        jars.resolve_jars("4.1.1", lambda line: None)
    assert "Could not transfer artifact" in str(failure.value)
    assert "tested are" in str(failure.value)
    assert not jars.kafka_home("4.1.1").exists()
    assert not list(jars.kafka_home("4.1.1").parent.glob(".4.1.1-*"))
    maven.with_name("broken").unlink()
    assert jars.resolve_jars("4.1.1", lambda line: None)


def test_what_a_killed_process_left_is_removed(maven: Path) -> None:
    home = jars.kafka_home("4.1.1")
    (home.with_name(".4.1.1-abandoned") / "jars").mkdir(parents=True)
    assert len(jars.resolve_jars("4.1.1", lambda line: None)) == 3
    assert not home.with_name(".4.1.1-abandoned").exists()


def test_two_processes_download_once(maven: Path) -> None:
    program = (
        "from isthmus_bench.kafka import jars; jars.ivy_jar = lambda: None; "
        "print(len(jars.resolve_jars('4.3.0', lambda line: None)))"
    )
    processes = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate(timeout=60)[0] for process in processes] == ["3\n", "3\n"]
    assert maven.read_text() == "run\n"


def test_without_maven_and_ivy_the_error_says_what_to_install(maven: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    maven.with_name("mvn").unlink()
    monkeypatch.setenv("PATH", str(maven.parent))
    with pytest.raises(EmbeddedKafkaError, match="install Maven"):
        jars.resolve_jars("4.3.0", lambda line: None)


def test_a_slow_download_tells_how_far_it_is_and_ends_at_the_limit(
    maven: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jars, "PROGRESS_S", 0.1)
    said: list[str] = []
    jars.resolve_jars("4.3.0", said.append)
    assert "jars so far" in said[1]
    monkeypatch.setattr(jars, "DOWNLOAD_TIMEOUT_S", 0.15)
    with pytest.raises(EmbeddedKafkaError, match="not done after"):
        jars.resolve_jars("4.1.1", said.append)
