"""A control topic that was deleted, cut, written over or replaced, on real brokers: seen, not vouched for, repaired."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.control_topics import delete_topic, forget
from support.kafka import VERSIONS, Clusters
from support.links import linked, until, whole
from support.power_loss import lose_end

from isthmus import control_log as control_logs
from isthmus.anchor_places import AnchorFiles, AnchorGroups, AnchorPlace, PlaceUnavailable
from isthmus.control_log import ControlLog, ControlLogHalted, ControlLogLost, LeaseSpec
from isthmus.control_topic import TOPIC
from isthmus.errors import ConfigurationError
from isthmus.kafka.client import ClusterClient
from isthmus_bench import ready_commands
from isthmus_bench.kafka import KafkaCluster
from isthmus_bench.proxies import ProxyFailed, ProxyProcess
from isthmus_control import anchors
from isthmus_control.commands import CreateNamespace
from isthmus_control.model import BrokerClaim, ResourceType
from isthmus_control.outcome import Accepted
from isthmus_plugins.tasks import Supervision, Tasks

pytestmark = [pytest.mark.brokers, pytest.mark.timeout(240)]

BROKER = 1
LEASE_MS = 2_000
KIND = ResourceType.TOPIC
Places = Callable[[ClusterClient], Sequence[AnchorPlace]]


@pytest.fixture(scope="module")
def broker() -> Iterator[KafkaCluster]:
    """A cluster of this module's own: it loses power, and its control topic."""
    with KafkaCluster(name="control-topic", brokers=1) as cluster:
        yield cluster


@asynccontextmanager
async def control_log(cluster: KafkaCluster, name: str, places: Places) -> AsyncIterator[ControlLog]:
    async with ClusterClient([cluster.bootstrap_servers]) as client:
        log = ControlLog(client, name, supervision=Supervision(), places=places(client))
        try:
            await log.start()
            yield log
        finally:
            await log.close(release=False)


async def claim(log: ControlLog, broker_id: int = BROKER) -> None:
    spec = LeaseSpec((BrokerClaim(broker_id, "localhost", 9000),), lease_ms=LEASE_MS, version="test")
    assert isinstance(await log.claim(spec), Accepted)


async def anchored(log: ControlLog, at_least: int) -> None:
    """Until every place has the record."""
    cluster_id = log.anchors.cluster_id
    async with asyncio.timeout(30):
        for place in log.anchors._places:
            while not await _has(place, cluster_id, at_least):  # noqa: ASYNC110
                await asyncio.sleep(0.05)


async def _has(place: AnchorPlace, cluster_id: str, at_least: int) -> bool:
    try:
        found = await place.read(cluster_id)
    except PlaceUnavailable:  # the group's coordinator is on its way
        return False
    return found is not None and found.offset >= at_least


async def lost(log: ControlLog) -> str:
    async with asyncio.timeout(60):
        while log.halted is None:  # noqa: ASYNC110 - a halt is not told to anybody
            await asyncio.sleep(0.02)
    return log.halted.reason


async def why_lost(log: ControlLog) -> str:
    """Why it does not start, once its group's coordinator can be asked."""
    async with asyncio.timeout(60):
        while True:
            with pytest.raises(ControlLogLost) as caught:
                await log.start()
            if caught.value.reason != anchors.ANCHORS_UNKNOWN:
                return caught.value.reason
            await asyncio.sleep(0.1)


async def refused(log: ControlLog) -> None:
    """A command that waits for the broker, and would take the place of what is lost."""
    with pytest.raises(ControlLogHalted, match="it lost its end"):
        await log.append(namespace("c-"))


def namespace(prefix: str) -> CreateNamespace:
    return CreateNamespace(KIND, prefix, reserved=True)


@pytest.mark.one_in_ci("stories")
@pytest.mark.parametrize("batches", [1, 3])
def test_a_running_proxy_sees_an_end_that_was_cut(batches: int, broker: KafkaCluster) -> None:
    """Of one record, too, whose offset its own command takes again; no place outside of the log is needed for that."""
    forget(broker)

    async def run() -> None:
        async with control_log(broker, "one", lambda client: ()) as one:
            await claim(one)
            await one.append(namespace("a-"))
            await one.close(release=False)  # the log ends with the reservation
        tasks = Tasks("test", Supervision())
        async with control_log(broker, "two", lambda client: ()) as two:
            await two.append(namespace("b-"))
            end = two.state.applied_offset + 1
            broker.kill(BROKER)
            cut = lose_end(broker, BROKER, TOPIC, batches=batches)
            assert cut.base_offset == end - batches
            waiting = tasks.start("append", refused(two))
            await asyncio.to_thread(broker.start_broker, BROKER)
            assert await lost(two) == anchors.LOG_CUT
            await waiting
            assert not two.vouching
            assert two.state.namespace(KIND, "b-") is not None, "what it remembers is what the log is repaired with"

    asyncio.run(run())


@pytest.mark.one_in_ci("stories")
@pytest.mark.parametrize("where", ["directory", "group"])
@pytest.mark.parametrize("what", ["cut", "written-over", "deleted", "replaced"])
def test_a_proxy_that_starts_does_not_vouch_for_another_log(
    what: str, where: str, broker: KafkaCluster, tmp_path: Path
) -> None:
    forget(broker)

    def places(client: ClusterClient) -> Sequence[AnchorPlace]:
        return [AnchorFiles(tmp_path)] if where == "directory" else [AnchorGroups(client)]

    async def lose() -> None:
        async with ClusterClient([broker.bootstrap_servers]) as client:
            if what in ("deleted", "replaced"):
                await delete_topic(client)
        if what in ("cut", "written-over"):
            broker.kill(BROKER)
            lose_end(broker, BROKER, TOPIC, batches=2)
            await asyncio.to_thread(broker.start_broker, BROKER)
        if what in ("replaced", "written-over"):  # by one that knows nothing of anchors
            async with control_log(broker, "older", lambda client: ()) as older:
                for number in range(5):
                    await older.append(namespace(f"n{number}-"))

    async def run() -> None:
        async with control_log(broker, "one", places) as one:
            for number in range(5):
                await one.append(namespace(f"n{number}-"))
            await one.append(namespace("a-"))
            await anchored(one, one.state.applied_offset)
        async with control_log(broker, "one", places) as again:
            assert again.halted is None, "nothing was lost yet"
        await lose()
        async with ClusterClient([broker.bootstrap_servers]) as client:
            log = ControlLog(client, "one", supervision=Supervision(), places=places(client))
            for _ in range(2):  # it does not get better by itself
                assert (
                    await why_lost(log)
                    == {
                        "cut": anchors.LOG_CUT,
                        "written-over": anchors.LOG_REWRITTEN,
                        "deleted": anchors.TOPIC_LOST,
                        "replaced": anchors.TOPIC_REPLACED,
                    }[what]
                )
            assert (TOPIC in await client.refresh([TOPIC])) == (what != "deleted"), "it made none"
            # An operator gives up what it held: once, and it counts for everybody.
            await log.start(accept_loss=True)
            await claim(log)
            assert log.vouching
            assert log.state.namespace(KIND, "a-") is None
            other = ControlLog(client, "other", supervision=Supervision(), places=places(client))
            with pytest.raises(ConfigurationError, match="nothing is lost"):
                await other.start(accept_loss=True)
            await log.close()
        async with control_log(broker, "one", places) as accepted:
            assert accepted.state.generation > 0

    asyncio.run(run())


@pytest.mark.one_in_ci("stories", of="lost control topics")
def test_of_two_proxies_the_one_that_had_not_read_it_stops_vouching_too(
    broker: KafkaCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the other one had applied stands in the group: it is compared before anything is written there."""
    forget(broker)
    monkeypatch.setattr(control_logs, "CATCH_UP_TIMEOUT_S", 2.0)

    async def run() -> None:
        async with control_log(broker, "one", lambda client: [AnchorGroups(client)]) as one:
            await one.append(namespace("a-"))
            await anchored(one, 0)
            two_client = ClusterClient([broker.bootstrap_servers])
            await two_client.start()
            two = ControlLog(two_client, "two", supervision=Supervision(), places=[AnchorGroups(two_client)])
            await two.start()
            # It stands still for the next one.
            reading = two._topic.fetch

            async def nothing(offset: int, read_epoch: int = -1) -> list[Any]:
                await asyncio.sleep(0.05)
                return []

            two._topic.fetch = nothing  # type: ignore[method-assign]
            await one.append(namespace("b-"))
            await anchored(one, one.state.applied_offset)
            broker.kill(BROKER)
            lose_end(broker, BROKER, TOPIC)
            await asyncio.to_thread(broker.start_broker, BROKER)
            two._topic.fetch = reading  # type: ignore[method-assign]
            reasons = await asyncio.gather(lost(one), lost(two))
            assert set(reasons) == {anchors.LOG_CUT}
            assert two.halted is not None
            assert "consumer group" in str(two.halted)
            await two.close(release=False)
            await two_client.close()

    asyncio.run(run())


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.one_in_ci("clients", of="anchors in groups")
def test_a_group_keeps_an_anchor_on_every_version(version: str, kafka_cluster: Clusters) -> None:
    """Also in a cluster that had no offsets topic."""
    cluster = kafka_cluster(version=version)
    anchor = anchors.Anchor("x" * 22, "11111111-1111-4111-8111-111111111111", 3, 10, 7, "ab" * 32)

    async def run() -> None:
        async with ClusterClient([cluster.bootstrap_servers]) as client:
            place = AnchorGroups(client)
            assert await place.read(anchor.cluster_id) is None

            async def written() -> bool:
                try:
                    await place.write(anchor)
                except Exception:
                    await asyncio.sleep(0.2)  # the offsets topic is being made
                    return False
                return True

            async with asyncio.timeout(60):
                while not await written():
                    pass
            assert await place.read(anchor.cluster_id) == anchor
            assert await place.read("y") is None
            assert await AnchorGroups(client).read(anchor.cluster_id) == anchor

    asyncio.run(run())


# --- whole processes


@contextmanager
def proxy_of(cluster: KafkaCluster, directory: Path, name: str = "one") -> Iterator[ProxyProcess]:
    proxy = ProxyProcess(
        cluster.bootstrap_servers, name=name, directory=directory, extra={"proxy": {"name": name, "lease_s": 3.0}}
    )
    try:
        yield proxy
    finally:
        proxy.close()


def isthmus(*arguments: str, check: bool = True) -> Any:
    """An ``isthmus`` command with ``-o json``: what it printed, or with ``check`` False how it ended and its error."""
    done = ready_commands.run([*arguments, "-o", "json"], 60)
    if not check:
        return done.returncode, json.loads(done.stderr)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def not_ready(proxy: ProxyProcess) -> str:
    answer = httpx.get(f"{proxy.url}/health/ready", timeout=5, trust_env=False)
    return "" if answer.status_code == 200 else " ".join(answer.json()["reasons"])


def supervised(proxy: ProxyProcess) -> bool:
    """Start it again where it ended, as a supervisor does; whether it is ready."""
    if not proxy.running:
        proxy.spawn()
    return not not_ready(proxy)


@pytest.mark.one_in_ci("stories", of="lost control topics")
def test_the_runbook_of_a_lost_end(broker: KafkaCluster, tmp_path: Path) -> None:
    """docs/operations.md, step by step: a running proxy remembers, an export is written, the topic is repaired."""
    forget(broker)
    with proxy_of(broker, tmp_path) as proxy:
        proxy.start()
        proxy.cli("namespace", "create", "orders-", "--reserved")
        end = proxy.cli("control", "export")["end_offset"]
        until("anchored", lambda: _anchor_of(tmp_path, broker) >= end - 1)
        broker.kill(BROKER)
        lose_end(broker, BROKER, TOPIC, batches=2)
        broker.start_broker(BROKER)
        reason = until("seen", lambda: (why := not_ready(proxy)) and "lost its end" in why and why)
        assert "__isthmus_control" in reason
        assert proxy.running, "reads go on, and it remembers"
        written = proxy.cli("control", "export")
        assert Path(written["path"]).stat().st_mode & 0o777 == 0o600

        config = ("--config", str(proxy.config_path))
        plan = isthmus("control", "repair", written["path"], *config, "--dry-run")
        assert plan["done"] is False
        assert plan["step"] in ("append", "replace"), "a renewal may have taken the place"
        if plan["step"] == "replace":
            code, error = isthmus("control", "repair", written["path"], *config, check=False)
            assert (code, error["code"]) == (1, "LOSS_NOT_ACCEPTED")
            code, error = isthmus("control", "import", written["path"], *config, check=False)
            assert (code, error["code"]) == (1, "NOT_EMPTY")
        done = isthmus("control", "repair", written["path"], *config, "--accept-loss")
        assert done["done"] is True
        until("ready again", lambda: supervised(proxy))
        (found,) = proxy.get("/v1/namespaces")["items"]
        assert (found["prefix"], found["state"]) == ("orders-", "reserved")
        assert isthmus("control", "repair", written["path"], *config, "--dry-run")["step"] in ("nothing", "replace")


def _anchor_of(directory: Path, cluster: KafkaCluster) -> int:
    (file,) = (directory / "one-data").glob("control-anchor-*.json")
    return int(json.loads(file.read_text())["offset"])


async def _anchor_in_group(cluster: KafkaCluster) -> int:
    async with ClusterClient([cluster.bootstrap_servers]) as client:
        anchor = await AnchorGroups(client).read(client.cluster_id or "")
    return -1 if anchor is None else anchor.offset


@pytest.mark.one_in_ci("stories", of="lost control topics")
def test_the_runbook_of_a_deleted_topic(broker: KafkaCluster, tmp_path: Path) -> None:
    """The process that remembered is gone: an export that was made before brings the log back, at the same offsets."""
    forget(broker)
    with proxy_of(broker, tmp_path) as proxy:
        proxy.start()
        proxy.cli("namespace", "create", "orders-", "--reserved")
        written = proxy.cli("control", "export")
        proxy.cli("namespace", "create", "later-", "--reserved")
        until("anchored", lambda: asyncio.run(_anchor_in_group(broker)) >= written["end_offset"])
        proxy.stop()
        asyncio.run(_delete(broker))
        (tmp_path / "one-data").rename(tmp_path / "elsewhere")  # as a pod's disk: the cluster's own group knows still
        proxy.spawn()
        reason = until("seen", lambda: (why := not_ready(proxy)) and "is lost" in why and why)
        assert "consumer group" in reason
        status = proxy.get("/v1/status")
        assert "is lost" in status["process"]["lease"]["reason"]

        exported = str(tmp_path / "elsewhere" / Path(written["path"]).name)
        config = ("--config", str(proxy.config_path))
        code, error = isthmus("control", "import", exported, *config, check=False)
        assert (code, error["code"]) == (1, "LOSS_NOT_ACCEPTED")
        assert f"offsets {written['end_offset']} to" in error["message"]
        done = isthmus("control", "import", exported, *config, "--accept-loss")
        assert (done["step"], done["from_offset"]) == ("make", 0)
        until("ready again", lambda: supervised(proxy))
        (found,) = proxy.get("/v1/namespaces")["items"]
        assert (found["prefix"], found["state"]) == ("orders-", "reserved")


@pytest.mark.one_in_ci("stories", of="lost control topics")
def test_a_new_control_log_is_begun_by_an_operator_alone(broker: KafkaCluster, tmp_path: Path) -> None:
    forget(broker)
    with proxy_of(broker, tmp_path) as proxy:
        proxy.start()
        proxy.cli("namespace", "create", "orders-", "--reserved")
        until("anchored", lambda: _anchor_of(tmp_path, broker) > 0)
        proxy.stop()
        asyncio.run(_delete(broker))
        proxy.spawn()
        until("seen", lambda: "is lost" in not_ready(proxy))
        proxy.stop()
        proxy.options = ("--new-control-log",)
        proxy.start()
        assert proxy.get("/v1/namespaces")["items"] == []
        proxy.stop()
        with pytest.raises(ProxyFailed, match="nothing is lost"):
            proxy.start()
        proxy.options = ()
        proxy.start()


async def _delete(cluster: KafkaCluster) -> None:
    async with ClusterClient([cluster.bootstrap_servers]) as client:
        await delete_topic(client)


@pytest.mark.one_in_ci("stories", of="lost control topics")
def test_a_linked_cluster_tells_one_that_lost_everything(
    broker: KafkaCluster, kafka_pair: tuple[KafkaCluster, KafkaCluster], tmp_path: Path
) -> None:
    """Its topic, its group and its disk: nothing of its own knows that there was a log. The other one does, and has
    proof of it, which this one knows again by its control key."""
    forget(broker)
    key = tmp_path / "control.key"
    key.write_text("ab" * 32)
    with linked(kafka_pair[0], broker, b_proxies=[whole(broker, cluster={"control_key_file": str(key)})]) as link:
        dialler, proxy = link.a.proxy, link.b.proxy
        heard = dialler.directory / f"{dialler.name}-data"
        until("heard", lambda: list(heard.glob(f"control-anchor-{broker.cluster_id}*.json")))
        proxy.stop()
        forget(broker)
        for file in (proxy.directory / f"{proxy.name}-data").glob("control-anchor-*"):
            file.unlink()
        proxy.spawn()
        words = "of a link that this cluster does not know"
        until("told", lambda: words in not_ready(proxy))
        assert proxy.running
        # What it was told it tells the next process, too.
        proxy.stop()
        proxy.spawn()
        until("told again", lambda: "had been applied" in not_ready(proxy))
