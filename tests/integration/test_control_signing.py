"""Records of the control log that say what their writers had applied, and that are signed, on real brokers."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.control_topics import delete_topic, forget
from support.power_loss import lose_end

from isthmus.control_log import ControlLog, ControlLogHalted, ControlLogLost, LeaseSpec
from isthmus.control_topic import TOPIC
from isthmus.kafka.client import ClusterClient, TopicPartition
from isthmus_bench.kafka import KafkaCluster
from isthmus_bench.proxies import ProxyFailed, ProxyProcess
from isthmus_control import anchors
from isthmus_control.commands import (
    AcceptLog,
    Command,
    CreateNamespace,
    DeleteNamespace,
    RaiseLevel,
    encode,
)
from isthmus_control.levels import KNOWN_LEVEL
from isthmus_control.model import BrokerClaim, ResourceType
from isthmus_control.outcome import Accepted
from isthmus_control.sealing import Secret
from isthmus_control.signing import Signer
from isthmus_plugins.tasks import Supervision, Tasks
from isthmus_protocol.record_codec import Record, encode_batch
from isthmus_protocol.records import PLAIN_HEADER

pytestmark = [pytest.mark.brokers, pytest.mark.timeout(240)]

BROKER = 1
KIND = ResourceType.TOPIC
KEY, OTHER_KEY = "5a" * 32, "a5" * 32


@pytest.fixture(scope="module")
def broker() -> Iterator[KafkaCluster]:
    """A cluster of this module's own: it loses power, and strangers write to its control topic."""
    with KafkaCluster(name="control-signing", brokers=1) as cluster:
        yield cluster


def signer_of(cluster: KafkaCluster, key: str = KEY) -> Signer:
    return Signer(Secret(bytes.fromhex(key)), cluster.cluster_id)


@asynccontextmanager
async def control_log(cluster: KafkaCluster, name: str) -> AsyncIterator[ControlLog]:
    async with ClusterClient([cluster.bootstrap_servers]) as client:
        log = ControlLog(client, name, supervision=Supervision(), signer=signer_of(cluster))
        try:
            await log.start()
            yield log
        finally:
            await log.close(release=False)


def namespace(prefix: str) -> CreateNamespace:
    return CreateNamespace(KIND, prefix, reserved=True)


async def claim(log: ControlLog, broker_id: int = BROKER) -> None:
    spec = LeaseSpec((BrokerClaim(broker_id, "localhost", 9000),), lease_ms=2_000, version="test")
    assert isinstance(await log.claim(spec), Accepted)


@pytest.mark.one_in_ci("stories", of="lost control topics")
def test_a_log_that_was_written_over_is_seen_by_a_record_of_one_who_had_applied_the_other(broker: KafkaCluster) -> None:
    """By those who never knew what is lost, at once and when they start, until an operator has accepted it."""
    forget(broker)

    async def nothing(offset: int, read_epoch: int = -1) -> list[Any]:
        await asyncio.sleep(0.05)
        return []

    async def refused(log: ControlLog) -> None:
        with pytest.raises(ControlLogHalted, match="it lost its end"):
            await log.append(namespace("d-"))

    async def run() -> None:
        tasks = Tasks("test", Supervision())
        async with control_log(broker, "one") as one:
            await one.append(RaiseLevel(KNOWN_LEVEL, one.key_id))
            await one.append(namespace("a-"))
            reading = one._topic.fetch
            one._topic.fetch = nothing  # type: ignore[method-assign]
            async with control_log(broker, "other") as other:
                await other.append(namespace("b-"))  # which the fetch that is under way takes
                await one.applied(other.state.applied_offset + 1)
            had = one.state.applied_offset
            broker.kill(BROKER)
            lose_end(broker, BROKER, TOPIC)
            await asyncio.to_thread(broker.start_broker, BROKER)
            async with control_log(broker, "two") as two:
                await claim(two)
                assert two.vouching
                assert two.state.namespace(KIND, "b-") is None
                await two.append(namespace("c-"))
                assert two.state.applied_offset >= had, "other records stand in its place"
                late = tasks.start("late", refused(one))
                async with asyncio.timeout(30):
                    while two.halted is None:  # noqa: ASYNC110 - a halt is not told to anybody
                        await asyncio.sleep(0.02)
                assert two.halted.reason == anchors.LOG_REWRITTEN
                assert f"proxy 'one', which wrote the record at offset {two.state.applied_offset + 1}" in str(
                    two.halted
                )
                assert not two.vouching
                assert two.state.namespace(KIND, "d-") is None
                one._topic.fetch = reading  # type: ignore[method-assign]
                await late
                assert one.halted is not None, "the leader's epochs tell the one that had applied it"
        async with ClusterClient([broker.bootstrap_servers]) as client:
            third = ControlLog(client, "three", supervision=Supervision(), signer=signer_of(broker))
            with pytest.raises(ControlLogLost, match="had applied the log up to"):
                await third.start()
            await third.start(accept_loss=True)
            await claim(third)
            assert third.vouching
            assert third.state.generation > 0
            await third.close()

    asyncio.run(run())


# --- whole processes


@contextmanager
def proxy_of(cluster: KafkaCluster, directory: Path, key: str | None) -> Iterator[ProxyProcess]:
    proxy = ProxyProcess(
        cluster.bootstrap_servers,
        name="one",
        directory=directory,
        extra={"proxy": {"lease_s": 3.0}, "cluster": {} if key is None else {"control_key_env": "CONTROL_KEY"}},
        environment={} if key is None else {"CONTROL_KEY": key},
    )
    try:
        yield proxy
    finally:
        proxy.close()


def write(cluster: KafkaCluster, *values: bytes) -> None:
    """Records by somebody who reaches a broker directly."""

    async def run() -> None:
        async with ClusterClient([cluster.bootstrap_servers]) as client:
            place = TopicPartition(TOPIC, 0)
            batch = encode_batch([Record(at, 0, None, value) for at, value in enumerate(values)], PLAIN_HEADER)
            assert (await client.produce_raw({place: batch}))[place].error is None

    asyncio.run(run())


def by_a_stranger(offset: int, body: Any, signer: Signer | None = None) -> bytes:
    return encode(Command(str(uuid.uuid4()), 1, "one", offset, body), KNOWN_LEVEL, signer)


def reserved(proxy: ProxyProcess) -> list[str]:
    return [each["prefix"] for each in proxy.get("/v1/namespaces")["items"]]


@pytest.mark.one_in_ci("stories", of="signed control logs")
def test_what_is_written_without_the_key_does_not_count_and_is_told(broker: KafkaCluster, tmp_path: Path) -> None:
    forget(broker)
    with proxy_of(broker, tmp_path, KEY) as proxy:
        proxy.start()
        proxy.cli("namespace", "create", "orders-", "--reserved")
        assert proxy.get("/v1/control")["key_id"] is None
        done = proxy.cli("control", "upgrade")
        assert (done["after"], done["signs"], done["key_id"]) == (KNOWN_LEVEL, True, signer_of(broker).key_id)
        at = proxy.get("/v1/control")["offset"]
        write(
            broker,
            *(by_a_stranger(at, body) for body in (DeleteNamespace(KIND, "orders-"), AcceptLog(9), RaiseLevel(99))),
            by_a_stranger(at, DeleteNamespace(KIND, "orders-"), signer_of(broker, OTHER_KEY)),
        )
        proxy.cli("namespace", "create", "later-", "--reserved")
        assert reserved(proxy) == ["later-", "orders-"]
        assert proxy.get("/v1/control")["unsigned_records"] == 4
        (warning,) = (each for each in proxy.get("/v1/status")["process"]["warnings"] if TOPIC in each)
        assert f"somebody without the control key writes to {TOPIC}: the record at offset" in warning
        metrics = httpx.get(f"{proxy.url}/metrics", timeout=5, trust_env=False).text
        assert "isthmus_control_log_unsigned_total 4.0" in metrics
        assert "control log record rejected" in proxy.log
        proxy.stop()
        with proxy_of(broker, tmp_path, OTHER_KEY) as keyless, pytest.raises(ProxyFailed) as refused:
            keyless.start()
        assert f"signed with the control key of id {signer_of(broker).key_id}" in str(refused.value)
        assert "set cluster.control_key_file" in str(refused.value)
        with proxy_of(broker, tmp_path, KEY) as again:
            again.start()
            assert reserved(again) == ["later-", "orders-"]


@pytest.mark.one_in_ci("stories", of="signed control logs")
def test_the_runbook_of_a_signed_log(broker: KafkaCluster, tmp_path: Path) -> None:
    """An export is written again with the key alone, and what it leads to is signed still."""
    forget(broker)
    with proxy_of(broker, tmp_path, KEY) as proxy:
        proxy.start()
        proxy.cli("control", "upgrade")
        proxy.cli("namespace", "create", "orders-", "--reserved")
        written = proxy.cli("control", "export")["path"]
        proxy.stop()

        async def lose() -> None:
            async with ClusterClient([broker.bootstrap_servers]) as client:
                await delete_topic(client)

        asyncio.run(lose())
        restore = ("control", "import", written, "--config", str(proxy.config_path), "--accept-loss")
        code, error = isthmus(*restore, environment={"CONTROL_KEY": OTHER_KEY})
        assert (code, json.loads(error)["code"]) == (2, "MALFORMED_EXPORT")
        assert f"control key of id {signer_of(broker).key_id}" in error
        code, done = isthmus(*restore, environment={"CONTROL_KEY": KEY})
        assert (code, json.loads(done)["step"]) == (0, "make")
        proxy.start()
        assert reserved(proxy) == ["orders-"]
        proxy.cli("namespace", "create", "later-", "--reserved")
        described = proxy.get("/v1/control")
        assert (described["key_id"], described["unsigned_records"]) == (signer_of(broker).key_id, 0)


def isthmus(*arguments: str, environment: dict[str, str]) -> tuple[int, str]:
    """An ``isthmus`` command with ``-o json``: how it ended, and what it printed."""
    command = [sys.executable, "-m", "isthmus", *arguments, "-o", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})
    return done.returncode, done.stdout or done.stderr
