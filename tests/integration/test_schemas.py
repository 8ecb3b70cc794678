"""Records in Confluent's wire format over a tree of real clusters, each with a schema registry of its own."""

from __future__ import annotations

import json
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from support.apicurio import registries
from support.distributing import PLUGINS, distributing
from support.links import Side, whole
from support.schema_story import ADDRESS, MESSAGES, MONEY, STREET, Clients
from support.wire_format import decode
from typer.testing import CliRunner

from isthmus.cli.root import app
from isthmus_bench.kafka import KafkaCluster

FORMATS = {"one": "{tenant}-{instance}-{environment}-{topic}", "other": "{tenant}-{environment}-{topic}"}
SUBJECTS = {"one": "t-main-dev-{}-value", "other": "t-dev-{}-value"}
"""What those of a topic are called."""


@pytest.mark.brokers
@pytest.mark.suite("stories")
@pytest.mark.timeout(600)
def test_records_of_either_side_are_read_at_the_other_by_its_own_registry(
    kafka_pair: tuple[KafkaCluster, KafkaCluster], tmp_path: Path
) -> None:
    """Producers ask their side's registry for ids, consumers ask theirs what an id means: of schemas of each kind, with
    references, of one that comes later, and when the primary registry is gone."""
    clusters = dict(zip(FORMATS, kafka_pair, strict=True))
    proxies = {name: [whole(kafka, **PLUGINS)] for name, kafka in clusters.items()}
    with ExitStack() as stack:
        running = dict(zip(FORMATS, stack.enter_context(registries(2)), strict=True))
        clients = {name: stack.enter_context(closing(Clients(each.url))) for name, each in running.items()}
        both = stack.enter_context(distributing(clusters, proxies, tmp_path))
        topics = {topic: both.create_topic(1) for topic in {message.topic for message in MESSAGES}}
        messages = [each._replace(topic=topics[each.topic]) for each in MESSAGES]
        both.apply(both.document([*FORMATS]))
        both.wait_distributing()
        file = tmp_path / "schemas.yaml"
        described = {
            name: {"kind": "apicurio", "url": each.url, "subjects": FORMATS[name]} for name, each in running.items()
        }
        file.write_text(json.dumps({"primary": "one", "registries": described}))

        def sync() -> None:
            result = CliRunner().invoke(app, ["schemas", "sync", str(file)], prog_name="isthmus")
            assert result.exit_code == 0, result.output

        def register(topic: str, schema: str, kind: str, **references: tuple[str, int]) -> None:
            named = {name: (SUBJECTS["one"].format(each), number) for name, (each, number) in references.items()}
            clients["one"].register(SUBJECTS["one"].format(topic), schema, kind, **named)

        def produce(name: str, sent: Any) -> list[bytes]:
            """Each message by the registry of its side, through the side's proxy; what they are in its topic."""
            made = [each.record(clients[name], SUBJECTS[name]) for each in sent]
            for each, record in zip(sent, made, strict=True):
                both.sides[name].produce(each.topic, [record])
            return made

        def read(name: str, topic: str) -> list[Any]:
            """As applications of a side have them: through its proxy, by its registry."""
            found = both.sides[name].read(topic, isolation="read_committed")
            return [decode(each.value or b"", clients[name].known) for each in found]

        for topic, schema, kind in (
            ("address", ADDRESS, "AVRO"),
            ("street", STREET, "JSON"),
            ("money", MONEY, "PROTOBUF"),
        ):
            register(topic, schema, kind)
        customer, grown, house, bill = messages
        for each in (customer, house, bill):
            register(each.topic, each.schema.text, each.schema.kind, **each.references)
        sync()

        for each in (customer, house, bill):
            (here,), (there,) = produce("one", [each]), produce("other", [each])
            assert here == there, "one schema has two ids"
            both.wait_settled(each.topic)
            for name in FORMATS:
                assert read(name, each.topic) == [each.value, each.value], (name, each.schema.kind)

        # A schema that comes when records of it have come already.
        register(grown.topic, grown.schema.text, grown.schema.kind, **grown.references)
        (record,) = produce("one", [grown])
        both.wait_settled(grown.topic)
        assert clients["other"].ask("GET", f"/schemas/ids/{int.from_bytes(record[1:5], 'big')}").status_code == 404
        sync()
        produce("other", [grown])
        both.wait_settled(grown.topic)
        expected = sorted(json.dumps(each.value) for each in (customer, customer, grown, grown))
        for name in FORMATS:
            assert sorted(map(json.dumps, read(name, grown.topic))) == expected, name

        # What was distributed is there without the primary.
        running["one"].kill()
        (record,) = produce("other", [bill])
        both.wait_settled(bill.topic)
        found = both.sides["one"].read(bill.topic, isolation="read_committed")
        assert [each.value for each in found] == [record] * 3
        assert read("other", bill.topic) == [bill.value] * 3


@pytest.mark.brokers
@pytest.mark.suite("stories")
@pytest.mark.timeout(600)
def test_schemas_of_a_registry_stand_in_a_topic_and_their_ids_rise(kafka: KafkaCluster, tmp_path: Path) -> None:
    """The primary registry is an application like others: its topic is written and read through a proxy."""
    with ExitStack() as stack:
        proxy = stack.enter_context(whole(kafka))
        side = Side(kafka, [proxy])
        primary, target = stack.enter_context(registries(2, side.bootstrap))
        clients = stack.enter_context(closing(Clients(primary.url)))
        there = stack.enter_context(closing(Clients(target.url)))
        street, address = (clients.register(*each) for each in (("street", STREET, "JSON"), ("address", ADDRESS)))
        assert 0 < street < address
        assert clients.register("address-of-somebody-else", ADDRESS) == address, "it is known, and has its id"
        (topic,) = (each for each in side.topics() if each.endswith("journal"))
        end = side.end(topic)
        assert end > 2

        primary.kill()
        primary.begin()
        primary.wait()
        assert clients.look_up("street", STREET, "JSON") == street
        assert clients.register("money", MONEY, "PROTOBUF") > address
        assert side.end(topic) > end

        file = tmp_path / "schemas.yaml"
        described = {
            name: {"kind": "apicurio", "url": each.url} for name, each in (("one", primary), ("other", target))
        }
        file.write_text(json.dumps({"primary": "one", "registries": described}))
        result = CliRunner().invoke(app, ["schemas", "sync", str(file)], prog_name="isthmus")
        assert result.exit_code == 0, result.output
        assert there.known(address) == clients.known(address)
        assert there.look_up("address-of-somebody-else", ADDRESS) == address
