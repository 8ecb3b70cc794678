"""Links between real clusters: what is copied and how, what is refused and why, what status and verify say."""

from __future__ import annotations

import json
import re
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition
from support.kafka import unique
from support.links import Linked, Side, linked, until

from isthmus.client import AdminClient, AdminError, Attach, CreateLink
from isthmus_bench.kafka import KafkaCluster
from isthmus_bench.proxies import ProxyFailed
from isthmus_plugins.replication.logs.topic_settings import OVERRIDES

pytestmark = pytest.mark.brokers


@pytest.fixture(scope="module")
def link(kafka_pair: tuple[KafkaCluster, KafkaCluster]) -> Iterator[Linked]:
    """One link for all tests of this module, with a pair of namespaces attached."""
    with linked(*kafka_pair) as pair:
        pair.attach()
        yield pair


# ---- what is copied ----


def test_records_are_the_same_in_everything_a_consumer_sees(link: Linked) -> None:
    source, target = link.names("everything")
    link.a.create_topic(source, config={"retention.ms": "-1"})
    for compression in ("none", "gzip", "snappy", "lz4", "zstd"):
        for idempotent in (True, False):
            producer = link.a.producer(compression_type=compression, enable_idempotence=idempotent)
            for number in range(20):
                producer.produce(
                    source,
                    key=None if number % 5 == 0 else b"key-%d" % number,
                    value=None if number % 7 == 0 else b"value" * number,
                    headers=[("h", b"\x00\xff"), ("h", None), ("", b"")] if number % 3 == 0 else None,
                    timestamp=1_500_000_000_000 + number,  # years old: nothing is refused for it
                )
            assert producer.flush(30) == 0
    link.wait_end(target, 200)
    assert link.b.read(target) == link.a.read(source)
    verdict = next(each for each in link.verify()["partitions"] if each["topic"] == source)
    assert verdict["equal"]
    assert verdict["records"] == verdict["compared_to"] == 200


def test_effective_configuration_is_the_sources_but_for_the_overrides(link: Linked) -> None:
    source, target = link.names("configured")
    chosen = {
        "max.message.bytes": "2000000",
        "segment.bytes": "20000000",
        "retention.ms": "86400000",
        "compression.type": "gzip",
        "message.timestamp.after.max.ms": "1000000",
        "min.insync.replicas": "1",
    }
    link.a.create_topic(source, 3, chosen)
    until("the follower is there", lambda: link.b.topics().get(target) == 3)
    theirs, ours = link.a.topic_config(source), link.b.topic_config(target)
    assert {name for name in theirs if theirs[name] != ours[name]} <= set(OVERRIDES)
    # One is of 3.9 alone.
    assert {name: ours[name] for name in OVERRIDES if name in ours} == {
        name: value for name, value in OVERRIDES.items() if name in theirs
    }
    assert ours["segment.bytes"] == "20000000"


def test_new_topics_and_partitions_within_a_second_and_from_their_first_record(link: Linked) -> None:
    source, target = link.names("soon")
    took = []
    started = time.monotonic()
    link.a.create_topic(source)
    link.a.produce(source, [b"first"])
    until("the record is there", lambda: target in link.b.topics() and link.b.end(target) == 1, 10, 0.01)
    took.append(time.monotonic() - started)
    started = time.monotonic()
    link.a.add_partitions(source, 3)
    link.a.produce(source, [b"first of 2"], partition=2)
    until("it is there, too", lambda: link.b.topics()[target] == 3 and link.b.end(target, 2) == 1, 10, 0.01)
    took.append(time.monotonic() - started)
    assert [record.value for record in link.b.read(target, 2)] == [b"first of 2"]
    assert max(took) < 3, took  # a second, and what clients take to make and to look, on a busy machine


def test_who_makes_what_it_needs_goes_on_at_the_follower(link: Linked) -> None:
    """As Kafka Connect does: a topic that is there is fine with it, any other refusal ends it."""
    source, target = link.names("needed")
    link.a.create_topic(source)
    until("the follower is there", lambda: target in link.b.topics())
    with pytest.raises(KafkaException) as there:
        link.b.create_topic(target)
    assert there.value.args[0].code() == KafkaError.TOPIC_ALREADY_EXISTS
    with pytest.raises(KafkaException) as new:
        link.b.create_topic(f"{target}-2")
    assert new.value.args[0].code() == KafkaError.POLICY_VIOLATION


def test_a_large_backlog_and_a_large_batch(link: Linked) -> None:
    source, target = link.names("large")
    link.detach()
    link.a.create_topic(source, config={"max.message.bytes": "8000000"})
    values = [bytes([number % 256]) * 100_000 for number in range(200)]
    link.a.produce(source, values, batch_size=4_000_000, linger_ms=50)
    link.a.produce(source, [b"x" * 6_000_000], message_max_bytes=8_000_000)
    link.attach()
    link.wait_end(target, 201)
    link.wait_following()
    verdict = next(each for each in link.verify()["partitions"] if each["topic"] == source)
    assert verdict["equal"]


# ---- lag, status, metrics ----


def test_status_and_metrics_tell_lag(link: Linked) -> None:
    source, target = link.names("lag")
    link.a.create_topic(source)
    link.a.produce(source, [b"x"] * 10)
    link.wait_end(target, 10)
    ours = link.wait_state(target, "Following")
    assert (ours["source_end"], ours["follower_end"], ours["partition_mirror_lag"], ours["lag_seconds"]) == (
        10,
        10,
        0,
        0,
    )
    theirs = link.a.partition(link.name, source)
    assert theirs is not None
    assert (theirs["role"], theirs["state"], theirs["remote_topic"]) == ("leader", "Following", target)
    metrics = httpx.get(f"{link.b.proxy.url}/metrics", trust_env=False).text
    labels = f'{{link="{link.name}",partition="0",role="follower",topic="{target}"}}'
    assert f"isthmus_link_mirror_lag_offsets{labels} 0.0" in metrics
    assert f"isthmus_link_mirror_lag_seconds{labels} 0.0" in metrics
    stated = labels.replace("topic=", 'state="Following",topic=').replace("role=", 'reason="",role=')
    assert f"isthmus_link_partition_state{stated} 1.0" in metrics
    size = re.search(rf"isthmus_link_partition_bytes_total{re.escape(labels)} ([0-9.e+]+)", metrics)
    assert size is not None
    assert float(size[1]) > 100
    of_link = re.search(rf'isthmus_link_bytes_total{{link="{link.name}",role="follower"}} ([0-9.e+]+)', metrics)
    assert of_link is not None
    assert float(of_link[1]) >= float(size[1])

    link.b.kafka.pause(1)
    try:
        link.a.produce(source, [b"x"] * 7)
        until(
            "the source tells the lag",
            lambda: (
                (found := link.a.partition(link.name, source)) is not None
                and found["partition_mirror_lag"] == 7
                and found["lag_seconds"] > 0.5
                and found["state"] == "Catching Up"
            ),
        )
        until("the target, too", lambda: (link.b.partition(link.name, target) or {})["partition_mirror_lag"] == 7)
    finally:
        link.b.kafka.resume(1)
    link.wait_end(target, 17)
    link.wait_state(target, "Following")

    link.a.proxy.pause()
    try:
        unknown = until(
            "the target does not know it any more",
            lambda: (found := link.b.partition(link.name, target) or {})["lag_unknown_seconds"] and found,
        )
        assert (unknown["partition_mirror_lag"], unknown["lag_seconds"]) == (None, None)
        assert unknown["state"] != "Following"
        metrics = httpx.get(f"{link.b.proxy.url}/metrics", trust_env=False).text
        assert f"isthmus_link_mirror_lag_unknown_seconds{labels}" in metrics
        assert f"isthmus_link_mirror_lag_offsets{labels}" not in metrics
    finally:
        link.a.proxy.resume()
    assert link.wait_state(target, "Following")["partition_mirror_lag"] == 0
    # Its lease ran out meanwhile, and it may be back on the link before it has another one.
    until("the source takes writes again", lambda: link.a.proxy.get("/v1/status")["process"]["lease"]["vouching"])


# ---- the life of a source ----


def test_a_follower_is_trimmed_with_its_source(link: Linked) -> None:
    source, target = link.names("trimmed")
    link.a.create_topic(source)
    link.a.produce(source, [b"x"] * 20)
    link.wait_end(target, 20)
    link.a.admin().delete_records([TopicPartition(source, 0, 12)])[TopicPartition(source, 0)].result(30)
    until("the follower starts at 12", lambda: link.b.read(target)[0].offset == 12, 20)
    verdict = next(each for each in link.verify(check=False)["partitions"] if each["topic"] == source)
    assert verdict["equal"]
    assert verdict["compared_from"] == 12


def test_a_deleted_source_topic(link: Linked) -> None:
    source, target = link.names("deleted")
    link.a.create_topic(source)
    link.a.produce(source, [b"x"] * 3)
    link.wait_end(target, 3)
    link.a.delete_topic(source)
    until("B knows", lambda: (link.b.partition(link.name, target) or {}).get("reason") == "SOURCE_TOPIC_MAY_BE_DELETED")
    assert link.b.end(target) == 3
    link.a.create_topic(source)
    until("A knows", lambda: (link.a.partition(link.name, source) or {}).get("reason") == "SOURCE_TOPIC_ID_CHANGED")
    found = link.a.partition(link.name, source)
    assert found is not None
    assert found["state"] == "Refused"
    assert "created again" in found["message"]
    assert link.b.end(target) == 3
    link.a.delete_topic(source)
    link.b.delete_topic(target, direct=True)


# ---- somebody else's records ----


@pytest.mark.one_in_ci("stories")
@pytest.mark.parametrize("while_connected", [True, False])
def test_a_write_that_bypasses_the_proxy_shows_as_diverged_and_is_cut(link: Linked, while_connected: bool) -> None:
    source, target = link.names("bypassed")
    link.a.create_topic(source)
    link.a.produce(source, [b"x"] * 10)
    link.wait_end(target, 10)
    if while_connected:
        link.b.produce(target, [b"not the source's"], direct=True)
    else:
        link.b.proxy.stop()
        link.b.produce(target, [b"not the source's"], direct=True)
        link.a.produce(source, [b"other"])
        link.b.proxy.start()
    found = link.wait_state(target, "Diverged")
    assert found["reason"] in ("TARGET_WRITTEN_BY_OTHERS", "TRUNCATING")
    link.a.produce(source, [b"more"] * 5)
    link.wait_state(target, "Following")
    until("the follower has what the source has", lambda: link.b.end(target) == link.a.end(source))
    assert link.b.read(target) == link.a.read(source)
    verdict = next(each for each in link.verify(check=False)["partitions"] if each["topic"] == source)
    assert verdict["equal"]


def test_a_target_that_is_not_empty_is_refused_until_the_operator_agrees(link: Linked) -> None:
    local, remote = unique("taken-") + "-", unique("taken-") + "-"
    link.a.create_topic(local + "t")
    link.a.produce(local + "t", [b"theirs"] * 5)
    link.b.create_topic(remote + "t", config={"segment.bytes": "30000000"})
    link.b.create_topic(remote + "empty", config={"segment.bytes": "30000000"})
    link.a.create_topic(local + "empty")
    link.b.produce(remote + "t", [b"ours"] * 8)

    with pytest.raises(ProxyFailed, match="TARGET_TOPIC_NOT_EMPTY"):
        link.attach(local, remote)
    assert all(mapping["local"] != local for mapping in link.a.link(link.name)["mappings"])
    plan = link.attach(local, remote, "--truncate-target", "--dry-run")
    actions = {each["topic"]: (each["action"], each["records_lost"]) for each in plan["topics"]}
    assert plan["dry_run"]
    assert actions == {remote + "t": ("truncate", 8), remote + "empty": ("follow", 0)}
    assert link.b.end(remote + "t") == 8
    assert all(mapping["local"] != local for mapping in link.a.link(link.name)["mappings"])

    link.attach(local, remote, "--truncate-target")
    until("it is the source's", lambda: [record.value for record in link.b.read(remote + "t")] == [b"theirs"] * 5)
    until("the empty one follows, too", lambda: link.follower_state(remote + "empty") == "Following")
    assert (
        link.b.topic_config(remote + "empty")["segment.bytes"] == link.a.topic_config(local + "empty")["segment.bytes"]
    )
    link.detach(local)


def test_detach_and_attach_again_goes_on_where_it_was(link: Linked) -> None:
    local, remote = unique("again-") + "-", unique("again-") + "-"
    link.attach(local, remote)
    link.a.create_topic(local + "t", 2)
    link.a.produce(local + "t", [b"before"] * 30)
    link.wait_end(remote + "t", 30)
    topic_id = link.b.proxy.get(f"/v1/topics/{remote}t")["topic_id"]
    link.detach(local)
    with pytest.raises(KafkaException):
        link.b.produce(remote + "t", [b"reserved still"])
    link.a.produce(local + "t", [b"meanwhile"] * 30)
    plan = link.attach(local, remote)
    assert [(each["topic"], each["action"]) for each in plan["topics"]] == [(remote + "t", "follow")]
    link.wait_end(remote + "t", 60)
    assert link.b.proxy.get(f"/v1/topics/{remote}t")["topic_id"] == topic_id
    assert link.b.read(remote + "t") == link.a.read(local + "t")
    link.detach(local)


# ---- the link itself ----


def until_up(name: str, *sides: Side) -> None:
    """Wait until both ends of a link, or one of them, are up; where they are not, with what they say instead."""
    told: dict[str, Any] = {}

    def up() -> bool:
        told.update({side.kafka.spec.name: side.link(name) for side in sides})
        return all(each["state"] == "Following" for each in told.values())

    try:
        until("it is up", up)
    except AssertionError:
        said = {side: [each[word] for word in ("state", "reason", "message")] for side, each in told.items()}
        raise AssertionError(f"not up: {said}") from None


def test_create_list_describe_delete(link: Linked) -> None:
    name = unique("other")
    created = link.b.proxy.cli("link", "create", name, "--remote", link.a.proxy.link_address)  # the other way round
    assert created["link_name"] == name
    until_up(name, link.a, link.b)
    assert link.b.link(name)["dials"]
    assert not link.a.link(name)["dials"]
    assert link.a.link(name)["link_id"] == link.b.link(name)["link_id"]
    assert link.a.link(name)["remote_cluster_id"] == link.b.kafka.cluster_id
    listed = {each["link_name"] for each in link.a.proxy.cli("link", "list")}
    assert {name, link.name} <= listed
    with pytest.raises(ProxyFailed, match="ALREADY_EXISTS"):
        link.a.proxy.cli("link", "create", name, "--remote", link.b.proxy.link_address)
    link.a.proxy.cli("link", "delete", name)
    for side in (link.a, link.b):
        assert name not in {each["link_name"] for each in side.proxy.get("/v1/links")["items"]}


def test_a_program_makes_and_uses_a_link(link: Linked) -> None:
    name, prefix = unique("program"), unique("program-") + "-"
    assert link.a.proxy.link_address is not None
    with AdminClient(link.b.proxy.url) as admin:
        assert admin.create_link(CreateLink(link_name=name, remote=link.a.proxy.link_address)).dials
        admin.attach(name, Attach(local=prefix, remote=prefix, role="follower"))
        assert [each.local for each in admin.wait_for_link(name, "Following", 30).mappings] == [prefix]
        link.a.create_topic(prefix + "t")
        link.a.produce(prefix + "t", [b"x"])
        link.wait_end(prefix + "t", 1)
        assert admin.verify(name).equal
        with pytest.raises(AdminError) as refused:
            admin.create_link(CreateLink(link_name=name, remote=link.a.proxy.link_address))
        assert refused.value.code == "ALREADY_EXISTS"
        admin.detach(name, prefix)
        admin.delete_link(name)
        assert name not in [each.link_name for each in admin.links()]


def test_half_a_link_is_healed_by_creating_it_again(link: Linked) -> None:
    name = unique("half")
    link.a.proxy.cli("link", "create", name, "--remote", link.b.proxy.link_address)
    until_up(name, link.b)
    link.a.proxy.cli("link", "delete", name, "--local-only")
    until("B notices", lambda: link.b.link(name)["state"] == "Disconnected")
    link.a.proxy.cli("link", "create", name, "--remote", link.b.proxy.link_address)
    until_up(name, link.a, link.b)
    # And the other half: A has it, B does not.
    link.b.proxy.cli("link", "delete", name, "--local-only")
    until("A is told", lambda: link.a.link(name)["reason"] == "PEER_HAS_NO_SUCH_LINK")
    with pytest.raises(ProxyFailed, match="--local-only"):
        link.a.proxy.cli("link", "delete", name)
    link.a.proxy.cli("link", "delete", name, "--local-only")


def test_wrong_addresses_are_named(link: Linked) -> None:
    for remote, code in (
        (link.a.proxy.link_address, "INVALID_REQUEST"),  # this cluster itself
        ("127.0.0.1:1", "BOOTSTRAP_TCP_CONNECTION_FAILED_ERROR"),
        (link.b.kafka.bootstrap_servers, "BOOTSTRAP_TCP_CONNECTION_FAILED_ERROR"),  # a broker
        (link.b.proxy.url.removeprefix("http://"), "BOOTSTRAP_TCP_CONNECTION_FAILED_ERROR"),
        ("nowhere", "INVALID_REQUEST"),
    ):
        with pytest.raises(ProxyFailed, match=code):
            link.a.proxy.cli("link", "create", unique("wrong"), "--remote", remote)


def test_strangers_are_refused_with_a_logged_reason_while_the_link_goes_on(link: Linked) -> None:
    source, target = link.names("undisturbed")
    link.a.create_topic(source)
    link.wait_state(target, "Following")
    host, port = link.b.proxy.link_address.split(":")

    def say(data: bytes) -> bytes:
        with socket.create_connection((host, int(port)), 5) as stranger:
            stranger.settimeout(15)
            try:
                stranger.sendall(data)
                said = b""
                while chunk := stranger.recv(65536):
                    said += chunk
            except ConnectionResetError:
                return b""
            return said

    def hello(**words: Any) -> bytes:
        body = {
            "versions": [1, 1],
            "nonce": "00" * 32,
            "key": "11" * 32,
            "cluster_id": link.a.kafka.cluster_id,
            **words,
        }
        data = json.dumps(body).encode()
        return struct.pack(">IB", len(data) + 1, 1) + data

    assert say(b"GET / HTTP/1.1\r\n\r\n") == b""
    assert say(struct.pack(">IB", 2**31, 1)) == b""
    assert say(struct.pack(">IB", 30, 18) + bytes(29)) == b""  # records before anything was proved
    assert say(struct.pack(">IB", 3, 1) + b"{}") == b""
    link_id = link.a.link(link.name)["link_id"]
    assert b"LINK_NOT_FOUND" in say(hello(purpose="link", link_id="x"))
    assert b"PEER_IS_ANOTHER_CLUSTER" in say(hello(purpose="link", link_id=link_id, cluster_id="another"))
    assert b"UNSUPPORTED_VERSION" in say(hello(purpose="link", link_id=link_id, versions=[7, 9]))
    proof = b'{"proof": "' + b"ab" * 32 + b'"}'
    answered = say(hello(purpose="link", link_id=link_id) + struct.pack(">IB", len(proof) + 1, 3) + proof)
    assert b"AUTHENTICATION_ERROR" in answered
    assert link.b.proxy.log.count("link connections rejected") >= 5, "a line a minute for each cause"
    for reason in ("LINK_NOT_FOUND", "PEER_IS_ANOTHER_CLUSTER", "UNSUPPORTED_VERSION", "AUTHENTICATION_ERROR"):
        assert reason in link.b.proxy.log

    link.a.produce(source, [b"x"] * 3)
    link.wait_end(target, 3)
    link.wait_state(target, "Following")
