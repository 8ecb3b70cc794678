"""Whole-cluster proxies and sidecars in front of three brokers: who serves what, and restarts under load."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import pytest
from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from support.kafka import unique
from support.links import until
from support.wire import Wire, advertised, batch_of

from isthmus.kafka.client import LATEST, ClusterClient
from isthmus.kafka.client import TopicPartition as Place
from isthmus_bench import ready_commands
from isthmus_bench.kafka import KafkaCluster
from isthmus_bench.proxies import ProxyFailed, ProxyProcess
from isthmus_protocol.messages import decode_response
from isthmus_protocol.schema import ApiKey

pytestmark = pytest.mark.brokers


@pytest.fixture(scope="module")
def three() -> Iterator[KafkaCluster]:
    """Three brokers of this module's own: it stops them."""
    settings = {"broker.session.timeout.ms": "3000", "broker.heartbeat.interval.ms": "500"}  # of killed brokers
    with KafkaCluster(name="modes", brokers=3, settings=settings) as cluster:
        yield cluster


@contextmanager
def whole_cluster(cluster: KafkaCluster, **more: Any) -> Iterator[ProxyProcess]:
    with ProxyProcess(cluster.bootstrap_servers, name="whole", **more) as proxy:
        yield proxy


@contextmanager
def sidecars(cluster: KafkaCluster) -> Iterator[dict[int, ProxyProcess]]:
    """A proxy for each broker, by the broker's id."""
    with ExitStack() as stack:
        proxies = {}
        for broker_id in cluster.broker_ids:
            proxy = ProxyProcess(
                cluster.bootstrap_servers,
                name=f"sidecar-{broker_id}",
                broker_id=broker_id,
                extra={"proxy": {"lease_s": 5.0}},
            )
            stack.callback(proxy.close)
            proxy.spawn()
            proxies[broker_id] = proxy
        for proxy in proxies.values():
            proxy.wait_ready()
        yield proxies


def create_topic(cluster: KafkaCluster, partitions: int = 6) -> str:
    topic = unique("topic-")
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap_servers})
    new = NewTopic(topic, partitions, replication_factor=3, config={"min.insync.replicas": "2"})
    admin.create_topics([new])[topic].result(30)
    return topic


def produce_to_all(bootstrap: str, topic: str, count: int) -> None:
    producer = Producer({"bootstrap.servers": bootstrap, "acks": "all"})
    for number in range(count):
        producer.produce(topic, str(number), partition=number % 6)
    assert producer.flush(30) == 0


def read(bootstrap: str, topic: str, partitions: int = 6) -> dict[int, list[int]]:
    """The numbers in each partition, up to the ends as they are now."""
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": unique("group-"), "enable.partition.eof": "true"})
    found: dict[int, list[int]] = defaultdict(list)
    consumer.assign([TopicPartition(topic, partition, 0) for partition in range(partitions)])
    ended: set[int] = set()
    try:
        while len(ended) < partitions:
            message = consumer.poll(20)
            assert message is not None
            error = message.error()
            if error is None:
                found[message.partition()].append(int(message.value()))
            elif error.code() == KafkaError._PARTITION_EOF:
                ended.add(message.partition())
    finally:
        consumer.close()
    return found


class Load:
    """An idempotent producer that writes 0, 1, 2, ... for as long as the block lasts; then all must be stored."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        settings = {"bootstrap.servers": bootstrap, "enable.idempotence": True, "linger.ms": 2}
        self._producer = Producer(settings | {"reconnect.backoff.max.ms": 500})
        self._topic = topic
        self._stop = threading.Event()
        self._moved = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="load")
        self.sent = self.stored = 0
        self.failures: list[str] = []

    def __enter__(self) -> Self:
        self._thread.start()
        self.more()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        if error is None:
            assert self._producer.flush(60) == 0
            assert self.failures == []
            assert self.stored == self.sent
        else:
            self._producer.purge()

    def more(self, count: int = 500) -> None:
        """Return when ``count`` more records are stored."""
        with self._moved:
            goal = self.stored + count
            assert self._moved.wait_for(lambda: self.stored >= goal, 60), f"{self.stored} stored, {self.failures}"

    def _run(self) -> None:
        while not self._stop.is_set():
            if len(self._producer) < 1000:
                self._producer.produce(
                    self._topic, str(self.sent), partition=self.sent % 6, on_delivery=self._delivered
                )
                self.sent += 1
                self._producer.poll(0 if self.sent % 4 else 0.004)
            else:
                self._producer.poll(0.01)

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        with self._moved:
            if error is None:
                self.stored += 1
            else:
                self.failures.append(str(error))
            self._moved.notify_all()

    def check(self, bootstrap: str) -> None:
        """Nothing lost, doubled, or out of order."""
        expected = {partition: list(range(partition, self.sent, 6)) for partition in range(6)}
        assert read(bootstrap, self._topic) == expected


def test_whole_cluster_serves_every_broker_and_bootstraps_from_every_port(three: KafkaCluster) -> None:
    topic = create_topic(three)
    with whole_cluster(three) as proxy:
        told = advertised(proxy.bootstrap)
        assert told.keys() == {1, 2, 3}
        assert not set(told.values()) & set(three.bootstrap_servers.split(","))
        for address in told.values():
            assert advertised(address) == told
            produce_to_all(address, topic, 60)
        assert sum(map(len, read(proxy.bootstrap, topic).values())) == 180
        assert {each["broker_id"] for each in proxy.get("/v1/status")["process"]["brokers"]} == {1, 2, 3}


@pytest.mark.one_in_ci("stories", of="faults of records")
def test_sidecars_together_serve_the_cluster(three: KafkaCluster) -> None:
    topic = create_topic(three)
    with sidecars(three) as proxies:
        addresses = {broker_id: proxy.bootstrap for broker_id, proxy in proxies.items()}
        for proxy in proxies.values():
            assert advertised(proxy.bootstrap) == addresses
            produce_to_all(proxy.bootstrap, topic, 60)
        assert sum(map(len, read(addresses[2], topic).values())) == 180
        # A client uses all of them, whichever it began with.
        statuses = [proxy.get("/v1/status") for proxy in proxies.values()]
        assert all(status["process"]["mode"] == "sidecar" for status in statuses)

        seconds = [
            ProxyProcess(three.bootstrap_servers, name=f"second-{mode}", broker_id=broker_id)
            for mode, broker_id in (("sidecar", 1), ("whole", None))
        ]
        try:
            for second in seconds:
                second.spawn()
            for second in seconds:
                with pytest.raises(ProxyFailed, match="ended with 1") as refused:
                    second.wait_ready()
                assert "sidecar-1" in str(refused.value)
                assert "Traceback" not in second.log
        finally:
            for second in seconds:
                second.close()
        assert advertised(addresses[1]) == addresses


@pytest.mark.one_in_ci("stories", of="faults of records")
def test_a_broker_that_comes_later_gets_a_port(three: KafkaCluster) -> None:
    topic = create_topic(three)
    three.stop_broker(3)
    with whole_cluster(three) as proxy:
        assert advertised(proxy.bootstrap).keys() == {1, 2}
        produce_to_all(proxy.bootstrap, topic, 60)
        three.start_broker(3)
        with Load(proxy.bootstrap, create_topic(three)) as load:
            while advertised(proxy.bootstrap).keys() != {1, 2, 3}:
                load.more(50)
        assert {each["broker_id"] for each in proxy.get("/v1/status")["process"]["brokers"]} == {1, 2, 3}
        assert sum(map(len, read(advertised(proxy.bootstrap)[3], topic).values())) == 60


@pytest.mark.one_in_ci("stories", of="faults of records")
def test_broker_restarts_under_load(three: KafkaCluster) -> None:
    topic = create_topic(three)
    with whole_cluster(three) as proxy:
        with Load(proxy.bootstrap, topic) as load:
            three.stop_broker(2)
            load.more()
            three.start_broker(2)
            load.more()
            three.kill(1)
            load.more()
            three.start_broker(1)
            load.more()
        load.check(proxy.bootstrap)


@pytest.mark.one_in_ci("stories", of="faults of records")
def test_proxy_restarts_under_load(three: KafkaCluster) -> None:
    topic = create_topic(three)
    with sidecars(three) as proxies:
        with Load(proxies[1].bootstrap, topic) as load:
            assert proxies[2].stop() == 0
            proxies[2].start()
            load.more()
            proxies[3].kill()
            proxies[3].start()
            load.more()
        load.check(proxies[1].bootstrap)


def test_a_proxy_that_slept_takes_no_writes_until_it_has_caught_up(three: KafkaCluster) -> None:
    """It may have missed a reservation: writes get an error that producers try again on, and none is lost."""
    topic = create_topic(three)
    with whole_cluster(three, extra={"proxy": {"lease_s": 2.0}}) as proxy:
        # Whether the load has room for another request just then is up to chance; this one has none on its way.
        waiting = Producer({"bootstrap.servers": proxy.bootstrap, "enable.idempotence": True})
        elsewhere = create_topic(three)
        waiting.produce(elsewhere, "before", partition=0)
        assert waiting.flush(60) == 0
        with Load(proxy.bootstrap, topic) as load:
            proxy.pause()
            waiting.produce(elsewhere, "meanwhile", partition=0)
            time.sleep(4)
            proxy.resume()
            load.more()
        load.check(proxy.bootstrap)
        assert waiting.flush(60) == 0
        metrics = httpx.get(proxy.url + "/metrics", trust_env=False).text
        refused = re.findall(r'isthmus_requests_refused_total{cause="no_lease"} ([\d.]+)', metrics)
        assert refused, metrics


def registered(proxy: ProxyProcess) -> dict[str, dict[int, str]]:
    """The proxies that have a lease, as one of them tells it: by name, addresses of the brokers that each fronts."""
    return {
        each["name"]: {broker["broker_id"]: broker["address"] for broker in each["brokers"]}
        for each in proxy.get("/v1/proxies")["items"]
        if each["state"] == "active"
    }


@pytest.mark.suite("stories")
def test_a_proxy_that_dies_is_registered_no_more(three: KafkaCluster) -> None:
    """Its broker is free then: a proxy of another name takes it, and clients are told of that."""
    with sidecars(three) as proxies:
        addresses = {broker_id: proxy.bootstrap for broker_id, proxy in proxies.items()}
        expected = {f"sidecar-{broker_id}": {broker_id: address} for broker_id, address in addresses.items()}
        for proxy in proxies.values():
            assert registered(proxy) == expected
        proxies[3].kill()
        del expected["sidecar-3"]
        until("it is gone", lambda: registered(proxies[1]) == registered(proxies[2]) == expected)
        with ProxyProcess(three.bootstrap_servers, name="heir", broker_id=3) as heir:
            expected["heir"] = {3: heir.bootstrap}
            for proxy in (proxies[1], proxies[2], heir):
                until("they know who is there", lambda proxy=proxy: registered(proxy) == expected)
                assert advertised(proxy.bootstrap) == {**addresses, 3: heir.bootstrap}


class Reading:
    """A member of a group that reads a topic and commits by itself, until the block ends; it must never fail."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self.assigned = 0
        self.read: dict[int, list[int]] = defaultdict(list)
        self.failures: list[str] = []
        settings = {"bootstrap.servers": bootstrap, "group.id": unique("group-"), "auto.offset.reset": "earliest"}
        self._consumer = Consumer(settings | {"auto.commit.interval.ms": 200, "reconnect.backoff.max.ms": 500})
        self._consumer.subscribe([topic], on_assign=self._on_assign)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reading")

    def _on_assign(self, *_: Any) -> None:
        self.assigned += 1

    def _run(self) -> None:
        while not self._stop.is_set():
            message = self._consumer.poll(0.1)
            if message is None:
                continue
            if (error := message.error()) is None:
                self.read[message.partition()].append(int(message.value()))
            else:
                self.failures.append(str(error))

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._consumer.close()


@pytest.mark.suite("stories")
@pytest.mark.parametrize("dies", [True, False], ids=["former dies", "former runs"])
def test_a_proxy_moves_to_another_machine_unseen_by_consumers(dies: bool, three: KafkaCluster) -> None:
    """It keeps its name, by which it takes its broker over, and its clients find it at its new address by the broker's
    id."""
    topic = create_topic(three)
    with sidecars(three) as proxies, ExitStack() as stack:
        addresses = {broker_id: proxy.bootstrap for broker_id, proxy in proxies.items()}
        reading = stack.enter_context(Reading(addresses[1], topic))
        with Load(addresses[1], topic) as load:
            until("it reads", lambda: sum(map(len, reading.read.values())) > 100)
            if dies:
                proxies[2].kill()
            moved = ProxyProcess(three.bootstrap_servers, name="sidecar-2", broker_id=2)
            host, port = "127.0.0.2", moved.bootstrap.rpartition(":")[2]
            moved.extra("client_listener", bind=f"{host}:{port}")
            stack.enter_context(moved)
            addresses[2] = f"{host}:{port}"
            for proxy in (proxies[1], proxies[3], moved):
                until("its address is known", lambda proxy=proxy: registered(proxy)["sidecar-2"] == {2: addresses[2]})
            assert advertised(addresses[3]) == advertised(addresses[2]) == addresses
            if not dies:
                until("the former one stops", lambda: not proxies[2].running)
            load.more(2000)
        expected = {partition: list(range(partition, load.sent, 6)) for partition in range(6)}
        until("all is read", lambda: reading.read == expected)
        assert not reading.failures
        assert reading.assigned == 1, "the group rebalanced"


@pytest.mark.one_in_ci("stories", of="faults of records")
@pytest.mark.parametrize("name", ["another", "whole"])
def test_a_proxy_that_another_one_relieved_stops(name: str, three: KafkaCluster) -> None:
    """It slept until nothing in the control log spoke of it any more: its clients are not kept from the one that
    serves, nor is the place taken back from that one, under whichever name."""
    lease: dict[str, Any] = {"extra": {"proxy": {"lease_s": 2.0}}}
    topic = create_topic(three)
    with whole_cluster(three, **lease) as slept:
        client = Producer({"bootstrap.servers": slept.bootstrap})
        client.produce(topic, "before")
        assert client.flush(30) == 0
        slept.pause()
        with ProxyProcess(three.bootstrap_servers, name=name, **lease) as relief:

            def leases() -> list[tuple[str, str]]:
                return [(each["name"], each["state"]) for each in relief.get("/v1/proxies")["items"]]

            until("its lease is gone", lambda: leases() == [(name, "active")])
            slept.resume()
            until("it stops", lambda: not slept.running)
            assert slept.stop() == 1
            assert "it must stop" in slept.log or "this one must stop" in slept.log
            assert relief.running
            produce_to_all(relief.bootstrap, topic, 6)


def test_what_clients_that_went_elsewhere_had_asked_a_proxy_that_slept_is_not_asked_any_more(
    three: KafkaCluster,
) -> None:
    """They have asked again where they went, and gone on: the end of a transaction would end the next one."""
    lease: dict[str, Any] = {"extra": {"proxy": {"lease_s": 2.0}}}
    topic, transactional_id = create_topic(three, 1), unique("storm-")
    producer: dict[str, Any] = {}

    def coordinator(proxy: ProxyProcess) -> str | None:
        with Wire(proxy.bootstrap) as wire:
            found = wire.request(ApiKey.FIND_COORDINATOR, 3, {"key": transactional_id, "key_type": 1})
            return None if found.error_code else f"{found.host}:{found.port}"

    def initialised(wire: Wire) -> bool:
        asked = {"transactional_id": transactional_id, "transaction_timeout": 60_000}
        answer = wire.request(ApiKey.INIT_PRODUCER_ID, 4, {**asked, "producer_id": -1, "producer_epoch": -1})
        producer.update(producer_id=answer.producer_id, producer_epoch=answer.producer_epoch)
        return not answer.error_code

    def added(wire: Wire) -> bool:
        asked = {f"v3_and_below_{name}": value for name, value in producer.items()}
        topics = [{"name": topic, "partitions": [0]}]
        asked |= {"v3_and_below_transactional_id": transactional_id, "v3_and_below_topics": topics}
        (found,) = wire.request(ApiKey.ADD_PARTITIONS_TO_TXN, 3, asked).results_by_topic_v3_and_below
        return not found.results_by_partition[0].partition_error_code

    def ended(wire: Wire, committed: bool) -> int:
        asked = {"transactional_id": transactional_id, "committed": committed, **producer}
        return int(wire.request(ApiKey.END_TXN, 3, asked).error_code)

    with whole_cluster(three, **lease) as slept:
        elsewhere = Wire(until("the coordinator is there", lambda: coordinator(slept)))
        until("there is a producer", lambda: initialised(elsewhere))
        until("a transaction has begun", lambda: added(elsewhere))
        slept.pause()
        elsewhere.send(ApiKey.END_TXN, 3, {"transactional_id": transactional_id, "committed": True, **producer})
        elsewhere.close()
        with (
            ProxyProcess(three.bootstrap_servers, name="relief", **lease) as relief,
            Wire(until("the coordinator is there", lambda: coordinator(relief))) as wire,
        ):
            assert ended(wire, committed=True) == 0
            until("the next transaction has begun", lambda: added(wire))
            slept.resume()
            until("it stops", lambda: not slept.running)
            assert slept.stop() == 1
            assert ended(wire, committed=False) == 0


def test_a_broker_whose_port_is_taken_leaves_the_others_served(three: KafkaCluster) -> None:
    topic = create_topic(three)
    taken = socket.create_server(("127.0.0.1", 0))
    port = taken.getsockname()[1]
    proxy = ProxyProcess(three.bootstrap_servers, name="taken", extra={"client_listener.broker_ports": {"2": port}})
    with closing(proxy), taken:
        proxy.spawn()

        def reasons() -> list[str]:
            found: list[str] = proxy.get("/v1/status")["reasons"]
            return found

        until("it says why it is not ready", lambda: any("broker 2 is not served" in each for each in reasons()))
        assert httpx.get(f"{proxy.url}/health/ready", trust_env=False).status_code == 503
        assert sorted(advertised(proxy.bootstrap)) == [1, 3]
        admin = AdminClient({"bootstrap.servers": three.bootstrap_servers})
        led = admin.list_topics(topic, timeout=20).topics[topic].partitions
        producer = Producer({"bootstrap.servers": proxy.bootstrap})
        served = [number for number, partition in led.items() if partition.leader != 2]
        for number in served:
            producer.produce(topic, "served", partition=number)
        assert producer.flush(30) == 0
        taken.close()
        until("it has the port", lambda: reasons() == [])
        assert advertised(proxy.bootstrap)[2] == f"127.0.0.1:{port}"
        produce_to_all(proxy.bootstrap, topic, 6)


def test_without_plugins_it_is_a_plain_proxy(three: KafkaCluster) -> None:
    topic = create_topic(three)
    with whole_cluster(three, extra={"plugins": {"enabled": []}}) as proxy:
        produce_to_all(proxy.bootstrap, topic, 60)
        assert sum(map(len, read(proxy.bootstrap, topic).values())) == 60
        assert proxy.get("/v1/status")["process"]["plugins"] == []
        # It enforces no reservation, so it vouches for none.
        told = proxy.cli("namespace", "create", "plain-", "--reserved", "--no-wait")
        assert told["state"] == "reserving"
        assert proxy.name in told["waiting_for"]  # and proxies that were killed a moment ago
        proxy.cli("namespace", "delete", "plain-", "--no-wait")


def test_sigterm_answers_what_was_taken_in(three: KafkaCluster) -> None:
    """Of requests in flight, those that reached the broker are answered; the others never reach it."""
    topic = create_topic(three, partitions=1)

    version, answered = 9, 0

    def send(wire: Wire) -> None:
        data = [{"name": topic, "partition_data": [{"index": 0, "records": batch_of([b"x"])}]}]
        values = {"transactional_id": None, "acks": -1, "timeout": 30_000, "topic_data": data}
        try:
            while True:
                wire.send(ApiKey.PRODUCE, version, values)
        except (OSError, ValueError):  # the proxy closed, or the test is over
            pass

    async def end_offset() -> int:
        async with ClusterClient(three.bootstrap_servers.split(",")) as client:
            return (await client.list_offsets({Place(topic, 0): LATEST}))[Place(topic, 0)].offset

    async def leader() -> int:
        async with ClusterClient(three.bootstrap_servers.split(",")) as client:
            return (await client.leader(topic, 0)).leader

    whole = whole_cluster(three, extra={"proxy": {"drain_timeout_s": 60.0}})  # a busy machine takes its time
    with whole as proxy, Wire(advertised(proxy.bootstrap)[asyncio.run(leader())]) as wire:
        sending = threading.Thread(target=send, args=(wire,))
        sending.start()
        while (frame := wire.receive_frame()) is not None:
            _, answer = decode_response(ApiKey.PRODUCE, version, frame)
            assert answer.responses[0].partition_responses[0].base_offset == answered
            answered += 1
            if answered == 300:
                proxy.signal(signal.SIGTERM)
        sending.join()
        assert answered >= 300
        assert "drain timed out" not in proxy.log
        assert asyncio.run(end_offset()) == answered
        assert proxy.stop() == 0
        assert "Traceback" not in proxy.log


def test_more_signals_do_not_end_a_proxy_that_ends_well(three: KafkaCluster) -> None:
    """Whoever stops it twice, or a terminal's Ctrl-C beside a supervisor's SIGTERM, reads the first one's exit code."""
    with whole_cluster(three) as proxy:
        while proxy.running:
            proxy.signal(signal.SIGTERM)
            time.sleep(0.001)
        assert proxy.stop() == 0
        assert "Traceback" not in proxy.log


def test_check_and_errors_of_configuration(three: KafkaCluster, tmp_path: Path) -> None:
    config = tmp_path / "proxy.toml"

    def run(text: str, *arguments: str) -> tuple[int, str]:
        config.write_text(text)
        done = ready_commands.run(["proxy", "--config", str(config), *arguments], 60)
        assert "Traceback" not in done.stderr
        return done.returncode, done.stdout + done.stderr

    def tables(**cluster: Any) -> str:
        keys = {"bootstrap_servers": three.bootstrap_servers} | cluster
        lines = [f"{key} = {f'{value!r}' if isinstance(value, str) else value}" for key, value in keys.items()]
        listeners = '\n[client_listener]\nbind = "127.0.0.1:0"\n[admin_listener]\nbind = "127.0.0.1:0"\n'
        return "[cluster]\n" + "\n".join(lines) + listeners

    assert run(tables(), "--check") == (0, f"{config}: valid, and every bootstrap server answers\n")
    code, text = run(tables(bootstrap_server="x"), "--check")
    assert code == 1
    assert "did you mean cluster.bootstrap_servers?" in text
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        dead = f"127.0.0.1:{taken.getsockname()[1]}"
        code, text = run(tables(bootstrap_servers=dead), "--check")
        assert code not in (0, 1)
        assert dead in text
        code, text = run(tables(bootstrap_servers=dead))
        assert code == 1
        assert "cluster.bootstrap_servers" in text
        taken.listen()
        code, text = run(tables().replace('bind = "127.0.0.1:0"', f'bind = "{dead}"', 1))
        assert code == 1
        assert "client_listener.bind" in text
        assert dead in text
    code, text = run(tables(sasl_password="hunter2"))
    assert code == 1
    assert "sasl_password_file" in text
    assert "hunter2" not in text
