"""Where captured events may go: what the process's configuration allows, and what becomes of settings from before."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from isthmus_control.model import ResourceType
from isthmus_plugins.capture import Captured, CapturePlugin, CaptureSettings
from isthmus_plugins.capture.allowed import KafkaClient, NotAllowed, kafka_client
from isthmus_plugins.capture.kafka_topic import ClientFileError
from isthmus_plugins.namespace_plugins import Scope
from isthmus_plugins.process import CaptureAllowed, PluginContext
from isthmus_plugins.testing import Kit

SERVERS = "broker-1:9092, broker-2:9092"


@pytest.fixture
def clients(tmp_path: Path) -> Path:
    """The directory of client files, beside a key that is none of capture's business."""
    (tmp_path / "control.key").write_text("sasl.password=the key\n")
    directory = tmp_path / "clients"
    directory.mkdir()
    (directory / "a.properties").write_text("bootstrap.servers=broker-9:9092\nsasl.password=secret\n")
    (directory / "b.properties").write_text("sasl.password=secret\n")
    (directory / "link").symlink_to(tmp_path / "control.key")
    return directory


def test_files_are_read_below_one_directory(clients: Path) -> None:
    allowed = CaptureAllowed(clients)
    assert kafka_client("", "a.properties", allowed) == KafkaClient("", str(clients / "a.properties"))
    assert kafka_client("", str(clients / "a.properties"), allowed).file == str(clients / "a.properties")
    for outside in ("../control.key", str(clients.parent / "control.key"), "link", "../clients/../control.key"):
        with pytest.raises(NotAllowed, match="is not below"):
            kafka_client("", outside, allowed)
    with pytest.raises(NotAllowed, match="names none"):
        kafka_client("", "a.properties", CaptureAllowed())
    with pytest.raises(ClientFileError, match="names no brokers"):
        kafka_client("", "b.properties", allowed)


def test_brokers_are_those_of_the_file_or_those_that_are_allowed(clients: Path) -> None:
    both = CaptureAllowed(clients, frozenset({"broker-1:9092", "broker-2:9092"}))
    assert kafka_client(SERVERS, "", both).servers == SERVERS
    assert kafka_client(SERVERS, "b.properties", both) == KafkaClient(SERVERS, str(clients / "b.properties"))
    for servers, file in (("attacker:9092", ""), ("attacker:9092", "b.properties"), (f"{SERVERS},attacker:1", "")):
        with pytest.raises(NotAllowed, match=r"attacker.*servers_allowed"):
            kafka_client(servers, file, both)


def test_settings_that_are_not_allowed_cannot_be_enabled(tmp_path: Path) -> None:
    """What was enabled before goes on with its files alone (``Enabled.lacks``)."""

    async def main() -> None:
        settings = {"kafka_topic": "events", "kafka_servers": "elsewhere:9092"}
        with pytest.raises(ValueError, match="no events go to topic events: kafka_servers has elsewhere:9092"):
            async with Kit(CapturePlugin(), "orders-", settings, data_directory=tmp_path):
                pass
        scope = Scope(
            ResourceType.TOPIC,
            "orders-",
            CaptureSettings.model_validate(settings),
            cast(PluginContext, SimpleNamespace(data_directory=tmp_path, capture_allowed=CaptureAllowed())),
        )
        captured = CapturePlugin().enabled(scope)
        assert isinstance(captured, Captured)
        assert captured.lacks is not None
        wanted = captured.wanted
        assert (wanted["files"], wanted["kafka_topic"], wanted["kafka_servers"]) == (True, "", "")

    asyncio.run(main())
