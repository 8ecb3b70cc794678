"""The Kafka connector's jars: what is asked for, a cache that is whole or not there, and a topic that is read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pyspark
import pytest
from confluent_kafka import Producer
from pyspark.sql import SparkSession
from support.kafka import unique

from isthmus_bench.kafka import KafkaCluster
from isthmus_spark import connector

# Retrieves what the module names, with what the connector depends on; counts its runs; leaves out or fails as told.
JAVA = """#!{python}
import pathlib, re, sys, time
here = pathlib.Path({here!r})
with (here / "runs").open("a") as file:
    file.write("run\\n")
module = pathlib.Path(sys.argv[sys.argv.index("-ivy") + 1]).read_text()
out = pathlib.Path(sys.argv[sys.argv.index("-retrieve") + 1]).parent
wanted = re.findall('name="([^"]*)" rev="([^"]*)"', module)
if 'transitive="true"' in module and not (here / "unmatched").exists():
    version = wanted[0][1]
    wanted += [("spark-token-provider-kafka-0-10_2.13", version), ("kafka-clients", "1"), ("commons-pool2", "1")]
for artifact, version in wanted:
    (out / f"{{artifact}}-{{version}}.jar").write_text("")
    time.sleep(0.1)
if (here / "broken").exists():
    print("Server access error: unreachable")
    sys.exit(1)
"""


@pytest.fixture
def java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Java that needs no network; returns the directory with its log and switches."""
    program = tmp_path / "bin" / "java"
    program.parent.mkdir()
    program.write_text(JAVA.format(python=sys.executable, here=str(tmp_path)))
    program.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setenv("ISTHMUS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(connector.JARS_VARIABLE, raising=False)
    return tmp_path


def names(jars: list[Path]) -> list[str]:
    return [jar.name for jar in jars]


def asked_for(jars: connector.JarSet) -> list[tuple[str | None, ...]]:
    module = ElementTree.fromstring(connector.ivy_module(jars))
    return [tuple(each.get(key) for key in ("org", "name", "rev")) for each in module.iter("dependency")]


def test_the_set_of_the_running_version_is_taken_once(java: Path) -> None:
    said: list[str] = []
    version = pyspark.__version__
    jars = connector.connector_jars(said.append)
    assert names(jars) == [
        "commons-pool2-1.jar",
        "kafka-clients-1.jar",
        f"spark-sql-kafka-0-10_2.13-{version}.jar",
        f"spark-token-provider-kafka-0-10_2.13-{version}.jar",
    ]
    assert said[-1].endswith(f"jars of {version} for PySpark {version}")
    assert connector.connector_jars(said.append) == jars
    assert (java / "runs").read_text() == "run\n"
    assert not list((java / "cache" / "spark-kafka").glob(".get-*"))


def test_where_that_is_not_whole_another_is_taken_and_told(java: Path) -> None:
    (java / "unmatched").touch()
    said: list[str] = []
    assert names(connector.connector_jars(said.append)) == [
        "commons-pool2-2.13.1.jar",
        "kafka-clients-3.9.2.jar",
        "spark-sql-kafka-0-10_2.13-4.2.0.jar",
        "spark-token-provider-kafka-0-10_2.13-4.0.0.jar",
    ]
    assert "jars of 4.2.0-tokens-4.0.0" in said[-1]
    connector.connector_jars(said.append)
    assert (java / "runs").read_text() == "run\n" * 2


def test_a_failure_leaves_nothing_and_says_what_to_do(java: Path) -> None:
    (java / "broken").touch()
    with pytest.raises(connector.ConnectorError, match=rf"(?s){connector.JARS_VARIABLE}.*unreachable.*unreachable"):
        connector.connector_jars(lambda line: None)
    assert [each.name for each in (java / "cache" / "spark-kafka").iterdir()] == ["lock"]
    (java / "broken").unlink()
    assert len(connector.connector_jars(lambda line: None)) == 4


def test_what_a_killed_process_left_is_removed(java: Path) -> None:
    abandoned = java / "cache" / "spark-kafka" / ".get-abandoned"
    abandoned.mkdir(parents=True)
    connector.connector_jars(lambda line: None)
    assert not abandoned.exists()


def test_two_processes_download_once(java: Path) -> None:
    program = "from isthmus_spark.connector import connector_jars; print(len(connector_jars()))"
    both = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate(timeout=60)[0] for process in both] == ["4\n", "4\n"]
    assert (java / "runs").read_text() == "run\n"


def test_jars_by_hand(java: Path) -> None:
    directory = java / "mine"
    directory.mkdir()
    (directory / "a.jar").touch()
    (java / "b.jar").touch()
    given = {connector.JARS_VARIABLE: f"{directory}:{java / 'b.jar'}"}
    assert names(connector.connector_jars(lambda line: None, given)) == ["a.jar", "b.jar"]
    with pytest.raises(connector.ConnectorError, match=r"none.*is no jar"):
        connector.connector_jars(lambda line: None, {connector.JARS_VARIABLE: str(java / "none")})
    assert not (java / "runs").exists()


@pytest.mark.parametrize("version", ["4.2.0", "4.3.0"])
def test_what_ivy_is_asked_for(version: str) -> None:
    matched, mixed = connector.jar_sets(version)
    assert asked_for(matched) == [("org.apache.spark", "spark-sql-kafka-0-10_2.13", version)]
    assert asked_for(mixed) == list(mixed.wanted)


@pytest.mark.brokers
def test_the_shared_session_reads_a_topic(spark_kafka: SparkSession, kafka: KafkaCluster) -> None:
    topic = unique("connector-")
    producer = Producer({"bootstrap.servers": kafka.bootstrap_servers})
    for number in range(3):
        producer.produce(topic, key=str(number))
    assert producer.flush(60) == 0
    reader = spark_kafka.read.format("kafka").option("kafka.bootstrap.servers", kafka.bootstrap_servers)
    rows = reader.option("subscribe", topic).load().select("offset", "key").collect()
    assert sorted(tuple(row) for row in rows) == [(0, b"0"), (1, b"1"), (2, b"2")]
