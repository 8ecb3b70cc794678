"""Captured traffic of two real clusters with a link: what the link did, and events in a Kafka topic."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from confluent_kafka import Consumer
from support.kafka import unique
from support.links import Linked, linked, until, whole

from isthmus_bench.kafka import KafkaCluster
from isthmus_plugins.capture.blocks import LINKS, whole_blocks
from isthmus_plugins.capture.files import SEALED_LINKS

pytestmark = pytest.mark.brokers


class Scene(NamedTuple):
    pair: Linked
    data: tuple[Path, Path]
    prefix: str

    def enable(self, side: int, *settings: str) -> None:
        proxy = (self.pair.a, self.pair.b)[side].proxy
        more = [each for setting in ("roll_s=1", *settings) for each in ("--set", setting)]
        proxy.cli("plugin", "enable", "capture", "--namespace", self.prefix, *more)

    def rows(self, side: int, kind: str) -> list[dict[str, Any]]:
        """What was captured of links, of one kind, in the order of time."""
        found = []
        for file in sorted(self.data[side].rglob(f"*{SEALED_LINKS}")):
            for _, described, data in whole_blocks(file.read_bytes()):
                names = [name for name, _ in described["fields"]]
                for values in LINKS.row.iter_unpack(data):
                    row = dict(zip(names, values, strict=True))
                    for name, table in described["tables"].items():
                        row[name] = None if row[name] < 0 else table[row[name]]
                    found.append(row)
        return [row for row in found if row["kind"] == kind]


@pytest.fixture
def scene(kafka_pair: tuple[KafkaCluster, KafkaCluster], tmp_path: Path) -> Iterator[Scene]:
    plugins = {"enabled": ["reservation", "replication", "capture"]}
    allowed = {"files_directory": str(tmp_path / "clients"), "servers_allowed": [kafka_pair[1].bootstrap_servers]}
    (tmp_path / "clients").mkdir()
    data = tmp_path / "a", tmp_path / "b"
    proxies = [
        whole(kafka, plugins=plugins, data={"directory": str(directory)}, capture=allowed)
        for kafka, directory in zip(kafka_pair, data, strict=True)
    ]
    prefix = unique("captured-") + "-"
    with linked(*kafka_pair, a_proxies=proxies[:1], b_proxies=proxies[1:]) as pair:
        pair.attach(prefix, prefix)
        yield Scene(pair, data, prefix)


@pytest.mark.one_in_ci("stories", of="captures of links")
def test_what_a_link_did_is_in_the_files_of_both_sides(scene: Scene) -> None:
    pair, topic = scene.pair, scene.prefix + "t"
    pair.a.create_topic(topic)
    pair.wait_following()
    for side in (0, 1):
        scene.enable(side)
    assert len(pair.a.produce(topic, [b"%d" % number for number in range(50)])) == 50

    def whole_way(rows: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
        return rows if rows and rows[-1]["end_offset"] == 50 else None

    appended = until("B's files have it", lambda: whole_way(scene.rows(1, "appended")))
    confirmed = until("A's files have it", lambda: whole_way(scene.rows(0, "confirmed")))
    for rows, role in ((appended, "follower"), (confirmed, "leader")):
        ends = [row["end_offset"] for row in rows]
        assert [row["base_offset"] for row in rows] == [0, *ends[:-1]], "one goes on where the other ended"
        assert {(row["link"], row["role"], row["topic"], row["partition"]) for row in rows} == {
            (pair.name, role, topic, 0)
        }
        assert all(0 < row["took_us"] < 30_000_000 for row in rows)
    assert sum(row["batches"] for row in appended) >= 1
    states = scene.rows(0, "state")
    assert {row["state"] for row in states if row["topic"] == topic} >= {"Following"}
    assert {row["role"] for row in states if row["topic"] is None} == {None}
    pair.b.proxy.close()
    assert pair.a.produce(topic, [b"x"]) == [50]
    lost: dict[str, Any] = until(
        "the loss is there",
        lambda: next((row for row in scene.rows(0, "state") if row["topic"] and row["state"] == "Disconnected"), None),
    )
    assert lost["time_us"] > states[0]["time_us"]
    assert lost["role"] == "leader"


@pytest.mark.one_in_ci("stories", of="captures of links")
def test_events_go_to_a_topic_of_another_cluster_once_each(scene: Scene) -> None:
    pair, topic, events = scene.pair, scene.prefix + "t", unique("events-")
    pair.a.create_topic(topic)
    pair.b.create_topic(events, 3, direct=True)
    scene.enable(0, f"kafka_topic={events}", f"kafka_servers={pair.b.kafka.bootstrap_servers}", "files=false")
    for number in range(40):
        assert pair.a.produce(topic, [b"secret"], acks="all") == [number]

    def found() -> list[dict[str, Any]]:
        consumer = Consumer(
            {
                "bootstrap.servers": pair.b.kafka.bootstrap_servers,
                "group.id": unique("group-"),
                "auto.offset.reset": "earliest",
                "enable.partition.eof": True,
            }
        )
        consumer.subscribe([events])
        read: list[dict[str, Any]] = []
        ended = 0
        try:
            while ended < 3:
                message = consumer.poll(30)
                assert message is not None
                if message.error() is not None:
                    ended += 1
                    continue
                assert message.key() == pair.a.proxy.name.encode()
                assert b"secret" not in message.value()
                read.append(json.loads(message.value()))
        finally:
            consumer.close()
        return read

    def produced(read: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [each for each in read if each["type"] == "request" and each["api_key"] == 0]

    def kinds(read: list[dict[str, Any]]) -> set[str]:
        return {each["kind"] for each in read if each["type"] == "link"}

    def all_there() -> list[dict[str, Any]] | None:
        read = found()
        return read if len(produced(read)) >= 40 and kinds(read) >= {"confirmed", "state"} else None

    read: list[dict[str, Any]] = until("all are there", all_there)
    writes = produced(read)
    assert [each["base_offset"] for each in writes] == list(range(40)), "in order, once each"
    for each in writes:
        assert (each["format"], each["cluster"], each["namespace"]) == (1, pair.a.kafka.cluster_id, scene.prefix)
        assert (each["topic"], each["partition"], each["records"], each["error_code"]) == (topic, 0, 1, 0)
        assert each["broker_us"] > 0
        assert "group_id" not in each, "what is not known is left out"
    assert not list(scene.data[0].rglob(f"*{scene.prefix}*")), "no files were wanted"


@pytest.mark.one_in_ci("stories", of="captures of links")
def test_a_topic_needs_its_servers_and_a_client_file_that_says_what_is_known(scene: Scene, tmp_path: Path) -> None:
    proxy = scene.pair.a.proxy
    client = tmp_path / "clients" / "client.properties"
    client.write_text("security.protocol=SSL\nsasl.kerberos.service.name=kafka\n")
    outside = tmp_path / "control.key"
    outside.write_text("a key")
    (tmp_path / "clients" / "link").symlink_to(outside)
    servers = f"kafka_servers={scene.pair.b.kafka.bootstrap_servers}"
    for settings, word in (
        (("kafka_topic=t",), "kafka_servers"),
        (("files=false",), "nothing would be written"),
        (("kafka_topic=t", servers, "kafka_client_file=client.properties"), "line 2 has none of the settings"),
        (("kafka_topic=t", servers, "kafka_client_file=none"), "No such file"),
        (("kafka_topic=t", servers, "kafka_client_file=link"), "is not below"),
        (("kafka_topic=t", servers, f"kafka_client_file={outside}"), "is not below"),
        (("kafka_topic=t", "kafka_servers=attacker:9092"), "servers_allowed"),
    ):
        more = [each for setting in settings for each in ("--set", setting)]
        with pytest.raises(Exception, match=word):
            proxy.cli("plugin", "enable", "capture", "--namespace", scene.prefix, *more)
