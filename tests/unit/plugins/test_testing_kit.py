"""The kit for tests of plugins: with plugins made for it, and with the example of the documentation."""

from __future__ import annotations

import asyncio
import importlib.util
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from support.sessions import until

from isthmus_plugins.api import Close, Verdict
from isthmus_plugins.namespace_plugins import (
    Enabled,
    NamespaceHook,
    NamespacePlugin,
    NamespaceRequest,
    NamespaceResponse,
    Scope,
    Settings,
)
from isthmus_plugins.testing import ConnectionClosed, Kit, Produced
from isthmus_protocol.records import walk
from isthmus_protocol.schema import ApiKey

EXAMPLE = Path(__file__).parents[3] / "docs" / "examples" / "archive" / "isthmus_archive.py"


class LimitSettings(Settings):
    bytes_max: int = 100


class Limit(NamespacePlugin):
    """Refuses batches that are too large, and counts what is fetched."""

    settings = LimitSettings

    def __init__(self) -> None:
        self.fetched = 0

    def enabled(self, scope: Scope) -> Enabled:
        return Limited(self, scope.settings)


class Limited(Enabled):
    def __init__(self, plugin: Limit, settings: LimitSettings) -> None:
        self._plugin, self._settings = plugin, settings

    def hooks(self) -> Sequence[NamespaceHook]:
        return [
            NamespaceHook(ApiKey.PRODUCE, self._check),
            NamespaceHook(ApiKey.FETCH, None, self._count),
            NamespaceHook(ApiKey.DELETE_RECORDS, lambda asked: Close("never")),
        ]

    def _check(self, asked: NamespaceRequest) -> Verdict:
        if any(len(batch.data) > self._settings.bytes_max for batch in asked.batches):
            return asked.refuse(10, "too large")
        return None

    def _count(self, answer: NamespaceResponse) -> bytes:
        self._plugin.fetched += sum(batch.header.record_count for batch in answer.batches)
        return answer.frame


def test_a_client_a_plugin_and_a_broker() -> None:
    async def run() -> None:
        plugin = Limit()
        async with Kit(plugin, "pay-") as kit:
            for topic in ("pay-t", "other"):
                kit.create_topic(topic, 2)
            assert await kit.produce("pay-t", b"a", b"b") == Produced(0, 0)
            assert await kit.produce("pay-t", b"c") == Produced(0, 2)
            assert await kit.produce("pay-t", bytes(200)) == Produced(10, -1)
            assert await kit.produce("other", bytes(200)) == Produced(0, 0)
            assert await kit.produce("pay-nowhere", b"a") == Produced(3, -1)
            assert await kit.fetch("pay-t") == [b"a", b"b", b"c"]
            assert await kit.fetch("pay-t", offset=1) == [b"b", b"c"]
            assert await kit.fetch("other") == [bytes(200)]
            assert plugin.fetched == 6, "whole batches, of the namespace"
            kit.configure(bytes_max=1000)
            await asyncio.sleep(0)
            assert await kit.produce("pay-t", bytes(200)) == Produced(0, 3)
            asked: dict[str, Any] = {"topics": [{"name": "pay-t", "partitions": [{"partition_index": 0}]}]}
            with pytest.raises(ConnectionClosed, match="never"):
                await kit.ask(ApiKey.DELETE_RECORDS, 2, asked)

    asyncio.run(run())


def test_settings_that_a_plugin_refuses() -> None:
    async def run() -> None:
        with pytest.raises(ValueError, match="bytes_max: Input should be a valid integer"):
            await Kit(Limit(), "pay-", {"bytes_max": "many"}).__aenter__()

    asyncio.run(run())


@pytest.fixture
def archive(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The example of the documentation."""
    spec = importlib.util.spec_from_file_location("isthmus_archive", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    module.DISCOVERY_INTERVAL_S = 0.05
    return module


def archived_ends(archive: Any) -> dict[tuple[str, ...], float]:
    return {
        tuple(sample.labels.values()): sample.value
        for family in archive.plugin.isthmus_metrics()
        for sample in family.samples
    }


def test_the_example_of_the_documentation(tmp_path: Path, archive: Any) -> None:
    async def run() -> None:
        async with Kit(archive.plugin, "pay-", {"directory": str(tmp_path), "limit_s": 5}) as kit:
            kit.create_topic("pay-t")
            kit.create_topic("other")
            for number in range(5):
                assert await kit.produce("pay-t", b"record %d" % number) == Produced(0, number)
                (file,) = (tmp_path / "pay-t").iterdir()
                assert b"record %d" % number in file.read_bytes()
            assert await kit.produce("other", b"x") == Produced(0, 0)
            assert archived_ends(archive) == {("pay-t", "0"): 5.0}
            assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert [path.name for path in tmp_path.iterdir()] == ["pay-t"]

    asyncio.run(run())


@pytest.mark.fails_on_purpose
def test_the_example_copies_each_partition_once_whatever_failed(
    tmp_path: Path, archive: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with Kit(archive.plugin, "pay-", {"directory": str(tmp_path), "limit_s": 5}) as kit:
            kit.create_topic("pay-t")
            assert await kit.produce("pay-t", b"first") == Produced(0, 0)
            topics = kit.broker.topics

            async def once() -> Any:
                monkeypatch.setattr(kit.broker, "topics", topics)
                raise RuntimeError("an answer that nobody foresaw")

            monkeypatch.setattr(kit.broker, "topics", once)
            await until(lambda: kit.context.supervision.failures["archive/discover"] == 1)
            await asyncio.sleep(1)  # it has begun anew
            assert await kit.produce("pay-t", b"second") == Produced(0, 1)
            (file,) = (tmp_path / "pay-t").iterdir()
            await asyncio.sleep(0.1)
            assert len(list(walk(memoryview(file.read_bytes())))) == 2

    asyncio.run(run())


def test_the_example_takes_a_topic_that_is_made_anew_for_another_one(tmp_path: Path, archive: Any) -> None:
    async def run() -> None:
        async with Kit(archive.plugin, "pay-", {"directory": str(tmp_path), "limit_s": 5}) as kit:
            kit.create_topic("pay-t")
            for number in range(3):
                await kit.produce("pay-t", b"record %d" % number)
            kit.delete_topic("pay-t")
            await until(lambda: not archived_ends(archive))
            kit.create_topic("pay-t")
            assert await kit.produce("pay-t", b"anew") == Produced(0, 0)
            assert archived_ends(archive) == {("pay-t", "0"): 1.0}
            found = sorted(len(list(walk(memoryview(each.read_bytes())))) for each in (tmp_path / "pay-t").iterdir())
            assert found == [1, 3]

    asyncio.run(run())
