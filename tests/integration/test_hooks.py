"""Every hook of the contract, asked of a plugin that was installed beside the others: one test for each."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from confluent_kafka import KafkaException
from support.kafka import unique
from support.links import Linked, linked, until, whole

from isthmus_bench.kafka import KafkaCluster

pytestmark = pytest.mark.brokers

WITNESS = '''
"""Writes down what it is asked and told, a line of JSON each."""

import json
import os

import typer
from prometheus_client.core import CounterMetricFamily

from isthmus_plugins.api import Answer, Close, RequestHook
from isthmus_plugins.confirmation import Confirmer
from isthmus_plugins.hookspecs import hookimpl
from isthmus_plugins.link_operations import LinkOperations
from isthmus_plugins.namespace_plugins import Enabled, NamespaceHook, NamespacePlugin
from isthmus_protocol.schema import ApiKey


def witness(what, **said):
    with open(os.environ["WITNESS"], "a") as file:
        file.write(json.dumps({"what": what, **said}) + "\\n")


class Condition(Confirmer):
    name = "the witness"
    limit_s = 5.0

    def bound(self, acks):
        self.acks = acks

    def concerns(self, topic):
        return topic.endswith("confirmed")

    def confirmed_end(self, place, epoch, transactional):
        witness("confirmed_end", topic=place[0])
        return 1 << 60


class ForNamespace(Enabled):
    def hooks(self):
        return [NamespaceHook(ApiKey.PRODUCE, lambda asked: asked.refuse(44, "the witness says no"))]


class Witness(NamespacePlugin):
    about = "a witness"
    observes_links = True

    @hookimpl
    async def isthmus_start(self, context):
        witness("start", proxy=context.proxy_name)

    @hookimpl
    async def isthmus_stop(self):
        witness("stop")

    @hookimpl
    def isthmus_request_hooks(self):
        def on_request(request):
            witness("request", principal=request.client.principal)

        return [RequestHook(ApiKey.INIT_PRODUCER_ID, on_request)]

    @hookimpl
    def isthmus_confirmers(self):
        return [Condition()]

    @hookimpl
    def isthmus_namespace_plugin(self):
        return self

    def enabled(self, scope):
        return ForNamespace()

    @hookimpl
    def isthmus_connection_observers(self):
        return [self]

    def opened(self, client):
        witness("opened", session=client.session_id)
        return Close("the witness says no") if os.path.exists(os.environ["WITNESS"] + ".closed") else None

    def authenticated(self, client):
        witness("authenticated", session=client.session_id)

    def closed(self, client):
        witness("closed", session=client.session_id)

    @hookimpl
    def isthmus_link_observers(self):
        return [self]

    def link_appended(self, event):
        witness("appended", **event._asdict())

    def link_confirmed(self, event):
        witness("confirmed", **event._asdict())

    def link_told(self, event):
        witness("told", **event._asdict())

    @hookimpl
    def isthmus_metrics(self):
        family = CounterMetricFamily("isthmus_witness", "What was witnessed")
        family.add_metric([], 42)
        yield family

    @hookimpl(tryfirst=True)
    def isthmus_link_operations(self):
        witness("link_operations")
        return None

    @hookimpl(tryfirst=True)
    def isthmus_tree_operations(self):
        witness("tree_operations")
        return None


plugin = Witness()
app = typer.Typer()


@app.command()
def say(what: str):
    """Say something."""
    print(f"the witness says {what}")
'''
ENTRY_POINTS = "[isthmus.plugins]\nwitness = witness:plugin\n[isthmus.commands]\nwitness = witness:app\n"


class Scene(NamedTuple):
    pair: Linked
    site: Path
    file: Path

    def said(self, what: str, **known: Any) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.file.read_text().splitlines()]
        return [line for line in lines if line["what"] == what and known.items() <= line.items()]

    def told(self, what: str, **known: Any) -> list[dict[str, Any]]:
        """As soon as it was."""
        found: list[dict[str, Any]] = until(f"{what} {known}", lambda: self.said(what, **known))
        return found


@pytest.fixture(scope="module")
def scene(kafka_pair: tuple[KafkaCluster, KafkaCluster], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    site, file = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("said") / "witness"
    (site / "witness.py").write_text(WITNESS)
    about = site / "witness-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: witness\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(ENTRY_POINTS)
    enabled = {"enabled": ["reservation", "replication", "witness"]}
    environment = {"PYTHONPATH": str(site), "WITNESS": str(file)}
    proxies = [whole(each, environment, plugins=enabled) for each in kafka_pair]
    with linked(*kafka_pair, a_proxies=proxies[:1], b_proxies=proxies[1:]) as pair:
        yield Scene(pair, site, file)


def test_hook_start(scene: Scene) -> None:
    assert {each["proxy"] for each in scene.said("start")} == {scene.pair.a.proxy.name, scene.pair.b.proxy.name}


def test_hook_request_hooks(scene: Scene) -> None:
    topic = unique("asked-")
    scene.pair.a.create_topic(topic)
    scene.pair.a.produce(topic, [b"x"], enable_idempotence=True)
    assert scene.said("request")[-1]["principal"] is None, "the cluster takes anybody"


def test_hook_confirmers(scene: Scene) -> None:
    topic = unique("to-be-") + "confirmed"
    scene.pair.a.create_topic(topic)
    assert scene.pair.a.produce(topic, [b"x"], acks="all") == [0]
    assert scene.said("confirmed_end", topic=topic)


def test_hook_namespace_plugin(scene: Scene) -> None:
    prefix = unique("refused-") + "-"
    proxy = scene.pair.a.proxy
    proxy.cli("namespace", "create", prefix)
    scene.pair.a.create_topic(prefix + "t")
    assert scene.pair.a.produce(prefix + "t", [b"x"]) == [0]
    proxy.cli("plugin", "enable", "witness", "--namespace", prefix)
    with pytest.raises((KafkaException, AssertionError)):
        scene.pair.a.produce(prefix + "t", [b"y"])
    proxy.cli("plugin", "disable", "witness", "--namespace", prefix)
    assert scene.pair.a.produce(prefix + "t", [b"z"]) == [1]


def test_hook_connection_observers(scene: Scene) -> None:
    topic = unique("connected-")
    scene.pair.a.create_topic(topic)
    assert scene.said("opened")
    refusing = Path(f"{scene.file}.closed")
    refusing.touch()
    try:
        with pytest.raises((KafkaException, AssertionError)):
            scene.pair.a.produce(topic, [b"x"], message_timeout_ms=2000)
    finally:
        refusing.unlink()
    session = scene.said("opened")[-1]["session"]
    assert scene.told("closed", session=session)
    assert scene.pair.a.produce(topic, [b"y"]) == [0], "nothing came in"


def test_hook_link_observers(scene: Scene) -> None:
    pair, prefix = scene.pair, unique("linked-") + "-"
    pair.attach(prefix, prefix)
    pair.a.create_topic(prefix + "t")
    link = {"link": pair.name, "topic": prefix + "t", "partition": 0}
    scene.told("told", **link, role="follower", state="Following")
    assert pair.a.produce(prefix + "t", [b"x" * 10, b"y" * 10]) == [0, 1]
    appended = scene.told("appended", **link, end_offset=2)[-1]
    confirmed = scene.told("confirmed", **link, end_offset=2)[-1]
    assert appended["base_offset"] in (0, 1)
    assert appended["batches"] >= 1
    assert appended["size_bytes"] > 10
    assert 0 < appended["took_s"] < confirmed["took_s"] < 30
    a, b = (side.kafka.cluster_id for side in (pair.a, pair.b))
    assert (appended["remote_cluster_id"], confirmed["remote_cluster_id"]) == (a, b)
    (again, *_) = scene.told("told", link=pair.name, topic=None, state="Following")
    assert (again["role"], again["partition"], again["lag"]) == (None, -1, None)
    pair.b.proxy.close()
    lost = scene.told("told", **link, role="leader", state="Disconnected")[-1]
    assert (lost["source_end"], lost["follower_end"]) in ((2, 2), (None, None))
    assert scene.said("stop"), "and stop"


def test_hook_metrics(scene: Scene) -> None:
    text = httpx.get(f"{scene.pair.a.proxy.url}/metrics", timeout=10, trust_env=False).text
    assert "isthmus_witness_total 42.0" in text


def test_hook_link_operations(scene: Scene) -> None:
    assert len(scene.said("link_operations")) == 2, "it was asked first, and had no answer"
    assert scene.pair.a.link(scene.pair.name)["link_name"] == scene.pair.name


def test_hook_tree_operations(scene: Scene) -> None:
    assert len(scene.said("tree_operations")) == 2
    answer = httpx.get(f"{scene.pair.a.proxy.url}/v1/tree", timeout=10, trust_env=False)
    assert (answer.status_code, answer.json()["code"]) == (404, "NOT_FOUND"), "nobody has an answer"


def test_hook_stop(scene: Scene) -> None:
    scene.pair.a.proxy.close()
    assert scene.told("stop")


def test_a_command_of_its_own(scene: Scene) -> None:
    command = (sys.executable, "-m", "isthmus", "witness", "hello")
    environment = {"PYTHONPATH": str(scene.site), "PATH": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "the witness says hello\n"
