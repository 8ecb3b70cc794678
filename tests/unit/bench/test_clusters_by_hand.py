"""Tools by name, clusters' state files, and the command line's errors: everything that needs no broker."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from isthmus_bench import cli
from isthmus_bench.cli import cluster_app
from isthmus_bench.kafka import EmbeddedKafkaError, JavaTool, KafkaCluster
from isthmus_bench.kafka.archive import random_id
from isthmus_bench.kafka.catalogue import TOOLS, main_class
from isthmus_bench.kafka.cluster import STATE_FILE, ClusterState, telling_lines
from isthmus_bench.kafka.distribution import Distribution
from isthmus_bench.kafka.java import Java
from isthmus_bench.kafka.settings import ClusterSpec


def distribution_with(directory: Path, *classes: str) -> Distribution:
    jar = directory / "kafka-tools-4.3.0.jar"
    with zipfile.ZipFile(jar, "w") as archive:
        for name in classes:
            archive.writestr(name.replace(".", "/") + ".class", b"")
    return Distribution("4.3.0", Java(Path("/java"), 17, "x", bundled=False), (jar,))


def test_a_tool_is_found_where_its_version_has_it(tmp_path: Path) -> None:
    for folder, place in (("old", "kafka.tools.ConsoleProducer"), ("new", "org.apache.kafka.tools.ConsoleProducer")):
        (tmp_path / folder).mkdir()
        assert main_class(distribution_with(tmp_path / folder, place), "kafka-console-producer") == place


def test_a_main_class_may_be_named_itself(tmp_path: Path) -> None:
    assert main_class(distribution_with(tmp_path), "kafka.tools.Anything") == "kafka.tools.Anything"


def test_missing_tools_are_told_from_unknown_ones(tmp_path: Path) -> None:
    empty = distribution_with(tmp_path)
    with pytest.raises(EmbeddedKafkaError, match=r"Kafka 4\.3\.0 has no kafka-topics"):
        main_class(empty, "kafka-topics")
    with pytest.raises(EmbeddedKafkaError, match=r"there is no tool 'kafka-topic'.*kafka-topics"):
        main_class(empty, "kafka-topic")


def test_every_tool_is_a_script_of_kafkas() -> None:
    assert all(name.startswith("kafka-") and places for name, places in TOOLS.items())


def test_ids_look_like_kafkas() -> None:
    ids = {random_id() for _ in range(200)}
    assert len(ids) == 200
    assert {len(each) for each in ids} == {22}
    assert not any(each.startswith("-") for each in ids)


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """The directory of a cluster whose broker is gone."""
    state = ClusterState(
        spec=ClusterSpec(name="a"),
        cluster_id="id",
        bootstrap_servers="127.0.0.1:1234",
        ports={1: {"PLAINTEXT": 1234, "CONTROLLER": 1235}},
        pids={1: 1},  # a number that another process has by now
        password="",
    )
    directory = tmp_path / "a"
    directory.mkdir()
    (directory / STATE_FILE).write_text(state.model_dump_json())
    return directory


def test_a_stopped_cluster_is_recognized(stopped: Path) -> None:
    cluster = KafkaCluster.attach(stopped)
    assert cluster.bootstrap_servers == "127.0.0.1:1234"
    assert not cluster.alive(1)
    assert cluster.live_brokers() == set()
    for act in (cluster.kill, cluster.stop_broker, cluster.pause, cluster.resume):
        with pytest.raises(EmbeddedKafkaError, match="broker 1 does not run"):
            act(1)
    with pytest.raises(EmbeddedKafkaError, match="no broker 2 in a"):
        cluster.kill(2)
    cluster.stop()
    assert not stopped.exists()


def test_attach_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(EmbeddedKafkaError, match="no cluster in"):
        KafkaCluster.attach(tmp_path)
    (tmp_path / STATE_FILE).write_text("{}")
    with pytest.raises(EmbeddedKafkaError, match="is damaged"):
        KafkaCluster.attach(tmp_path)


def test_a_cluster_that_is_not_started_says_so() -> None:
    cluster = KafkaCluster()
    with pytest.raises(EmbeddedKafkaError, match="not started"):
        _ = cluster.bootstrap_servers
    cluster.stop()  # nothing to do


def test_a_log_is_cut_down_to_what_tells() -> None:
    log = "INFO a\nERROR b [x]\n2026 ERROR Exiting\njava.lang.IllegalStateException: why\n\tat somewhere\nINFO c\n"
    assert telling_lines(log) == "2026 ERROR Exiting\n  java.lang.IllegalStateException: why"
    assert telling_lines("first\nsecond\n") == "first\n  second"
    assert telling_lines("") == "its log is empty"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["stop", "--name", "nobody"], 1, "there is no cluster 'nobody'"),
        (["kill", "--name", "../a", "--broker", "1"], 1, "there is no cluster '../a'"),
        (["kill", "--name", "a", "--broker", "1"], 1, "broker 1 does not run"),
        (["kill", "--name", "a", "--broker", "4"], 1, "no broker 4 in a"),
        (["kill", "--name", "a"], 2, "--broker"),
        (["start", "--name", "b", "--version", "newest"], 1, "not a Kafka version"),
        (["start", "--name", "b", "--set", "nonsense"], 2, "KEY=VALUE"),
        (["start", "--name", "b", "--brokers", "0"], 1, "1 to 32 brokers"),
        (["start", "--name", "a", "--version", "4.1.1"], 1, "with other version (4.3.0)"),
        (["status", "-o", "xml"], 2, "xml"),
    ],
)
def test_errors_of_the_command_line(stopped: Path, arguments: list[str], code: int, message: str) -> None:
    result = CliRunner().invoke(cluster_app, [*arguments, "--dir", str(stopped.parent)], env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    assert message in result.stderr
    assert result.stdout == ""


def test_a_tool_gets_all_that_stands_behind_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []
    monkeypatch.setattr(cli, "java_tool", lambda version, name: JavaTool(["java", version, name], {}))
    monkeypatch.setattr(cli.os, "execve", lambda file, argv, env: ran.append(argv))
    done = CliRunner().invoke(cluster_app, ["tool", "--version", "4.1.1", "kafka-topics", "--version", "--help", "x"])
    assert done.exit_code == 0, done.output
    assert ran == [["java", "4.1.1", "kafka-topics", "--version", "--help", "x"]]


def test_status_shows_a_cluster_that_is_down(stopped: Path) -> None:
    result = CliRunner().invoke(cluster_app, ["status", "--dir", str(stopped.parent)])
    assert result.exit_code == 0
    assert "127.0.0.1:1234" in result.stdout
    assert "stopped" in result.stdout


def test_each_command_has_an_example() -> None:
    for command in cluster_app.registered_commands:
        assert command.callback is not None
        name = command.name or command.callback.__name__
        shown = CliRunner().invoke(cluster_app, [name, "--help"])
        assert shown.exit_code == 0
        assert f"isthmus cluster {name} " in shown.stdout
