"""User story: the old source comes back after a failover, ahead of what the other cluster has, and follows it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

import httpx
import pytest
from confluent_kafka import KafkaException
from support.groups import commit, offsets
from support.kafka import unique
from support.links import Linked, Side, relayed, taking_transactions, truncated_at, until
from support.relay import Relay
from support.runbooks import Kill, Runbook, kills

from isthmus_bench import ready_commands
from isthmus_bench.kafka import KafkaCluster
from isthmus_bench.proxies import ProxyFailed

pytestmark = [pytest.mark.brokers, pytest.mark.timeout(240)]

SHARED, AHEAD, NEW = 2000, 30, 20
RECORD_BYTES = 500


class FailedOver(NamedTuple):
    """A led two topics and a group, B was failed over and written to, and A is back."""

    link: Linked
    relay: Relay
    orders: str
    """The namespace of topics, at both sides."""
    group: str

    @property
    def topic(self) -> str:
        """A has records of it that B never saw."""
        return self.orders + "t"

    @property
    def same(self) -> str:
        """A has no more of it than B."""
        return self.orders + "same"

    def check_planned(self, side: Side) -> None:
        """What a side says that recovering does."""
        told = until("both sides answer", lambda: side.proxy.cli("link", "recover", self.link.name, "--dry-run"))
        plans = {each["topic"]: each for pair in told["namespaces"] for each in pair["topics"]}
        assert {name: each["action"] for name, each in plans.items()} == {self.topic: "refuse", self.same: "follow"}
        (partition,) = plans[self.topic]["partitions"]
        assert [partition[each] for each in ("shared", "end", "source_end")] == [SHARED, SHARED + AHEAD, SHARED + NEW]
        assert plans[self.topic]["groups_moved"] == [self.group]

    def check_goes_on(self) -> None:
        """A is a follower like any other, also of what nothing was cut of."""
        link = self.link
        link.b.produce(self.same, values("more", NEW))
        until("A goes on", lambda: link.a.end(self.same) == SHARED + NEW)
        verdicts = link.verify()["partitions"]
        assert all(each["equal"] for each in verdicts if each["topic"] in (self.topic, self.same))

    def check_recovered(self) -> str:
        """A has what B has, and what it had alone is salvaged; the salvage file."""
        link, topic, same = self.link, self.topic, self.same
        done = truncated_at(link.a, link.name, topic)
        assert (done["messages_truncated"], done["partitions"][0]["offset_truncated_to"]) == (AHEAD, SHARED)
        until("A has what is new", lambda: topic in link.a.topics() and link.a.end(topic) == SHARED + NEW)
        assert link.a.read(topic) == link.b.read(topic)
        assert link.a.read(same) == link.b.read(same)
        file: str = done["partitions"][0]["salvage_file"]
        shown = ready_commands.run(["salvage", "show", file, "--limit", "100"], 30).stdout
        assert shown.count("ahead") == AHEAD
        until("the position is B's", lambda: offsets(link.a, self.group) == {(topic, 0): SHARED + 3})
        assert appended_bytes(link) < 2 * NEW * RECORD_BYTES, "what both have was not copied again"
        return file


def value(what: str, number: int) -> bytes:
    return (b"%s %d " % (what.encode(), number)).ljust(RECORD_BYTES, b".")


def values(what: str, count: int) -> list[bytes]:
    return [value(what, number) for number in range(count)]


def appended_bytes(link: Linked) -> float:
    """What the link has appended to A's logs."""
    lines = httpx.get(f"{link.a.proxy.url}/metrics", trust_env=False).text.splitlines()
    found = [line for line in lines if line.startswith("isthmus_link_appended_bytes_total") and link.name in line]
    return sum(float(line.split()[-1]) for line in found)


@pytest.fixture
def came_back(kafka_pair: tuple[KafkaCluster, KafkaCluster]) -> Iterator[FailedOver]:
    """The source is up again at the end."""
    source, _ = kafka_pair
    with relayed(*kafka_pair) as (link, relay), taking_transactions(link.a, link.b):
        link.raise_levels()
        scene = FailedOver(link, relay, unique("orders-") + "-", unique("app-"))
        try:
            fail_over(scene)
            yield scene
        finally:
            if not source.alive(source.broker_ids[0]):
                source.start_broker(source.broker_ids[0])


def fail_over(scene: FailedOver) -> None:
    link, topic, same, group = scene.link, scene.topic, scene.same, scene.group
    source = link.a.kafka
    link.attach(scene.orders, scene.orders)
    link.attach(group, group, "--type", "consumer-group")
    for name in (topic, same):
        link.a.create_topic(name)
    link.a.produce(topic, values("shared", SHARED))
    link.a.produce(same, values("same", SHARED))
    link.wait_end(topic, SHARED)
    link.wait_end(same, SHARED)
    commit(link.a, group, {(topic, 0): SHARED - 10})
    until("the position is there", lambda: offsets(link.b, group) == {(topic, 0): SHARED - 10})

    # A is ahead of B when it dies, with a position that B never saw, and B goes on.
    link.b.proxy.kill()
    link.a.produce(topic, values("ahead", AHEAD))
    commit(link.a, group, {(topic, 0): SHARED + 7})
    link.a.proxy.kill()
    source.kill(source.broker_ids[0])
    link.b.proxy.start()
    until("failed over", lambda: link.b.proxy.cli("link", "failover", link.name), 90)
    assert link.b.produce(topic, values("new", NEW))[0] == SHARED
    commit(link.b, group, {(topic, 0): SHARED + 3})

    source.start_broker(source.broker_ids[0])
    link.a.proxy.start()
    until("A is back", lambda: link.a.link(link.name)["state"] != "Disconnected")


@pytest.mark.suite("stories")
@pytest.mark.parametrize("asked_at", ["a", "b"])
def test_the_old_source_follows_from_where_both_part(came_back: FailedOver, asked_at: str) -> None:
    """Whichever side is asked, and nothing dies."""
    side = came_back.link.a if asked_at == "a" else came_back.link.b
    came_back.check_planned(side)
    side.proxy.cli("link", "recover", came_back.link.name)
    came_back.check_recovered()
    came_back.check_goes_on()


@pytest.mark.suite("stories")
@pytest.mark.parametrize("asked_at", ["a", "b"])
def test_clients_that_still_write_to_the_old_source_are_refused_first(came_back: FailedOver, asked_at: str) -> None:
    """Whatever they were acked until then is shown before it is cut, and salvaged."""
    link, topic = came_back.link, came_back.topic
    side = link.a if asked_at == "a" else link.b
    acked = list[bytes]()

    def write_on() -> None:
        with suppress(KafkaException):  # it is refused in the end
            while True:
                late = value("late", len(acked))
                link.a.produce(topic, [late])
                acked.append(late)

    with ThreadPoolExecutor(1) as pool:
        writer = pool.submit(write_on)
        until("they write", lambda: len(acked) > 10)
        with pytest.raises(ProxyFailed, match="clients still wrote to"):
            side.proxy.cli("link", "recover", link.name)
        writer.result(60)
    told = side.proxy.cli("link", "recover", link.name, "--dry-run")
    (plan,) = (each for pair in told["namespaces"] for each in pair["topics"] if each["action"] == "refuse")
    assert plan["records_lost"] == AHEAD + len(acked)
    side.proxy.cli("link", "recover", link.name)
    done = truncated_at(link.a, link.name, topic)
    assert done["messages_truncated"] == AHEAD + len(acked)
    file = done["partitions"][0]["salvage_file"]
    assert ready_commands.run(["salvage", "show", file, "--limit", "100000"], 30).stdout.count("late") == len(acked)
    until("A has what is new", lambda: topic in link.a.topics() and link.a.end(topic) == SHARED + NEW)
    assert link.a.read(topic) == link.b.read(topic)


@pytest.mark.parametrize("kill", kills("failback"))
def test_by_the_runbook(came_back: FailedOver, kill: Kill) -> None:
    """And clients go back to A in the end."""
    link, topic, group = came_back.link, came_back.topic, came_back.group
    salvage = f"{link.a.proxy.tables['data']['directory']}/salvage"
    names = {"orders-": came_back.orders, "app-": group, "/var/lib/isthmus/salvage": salvage}
    for side in (link.a, link.b):
        came_back.check_planned(side)
    with Runbook("failback", link, came_back.relay, names, kill, {"Following"}) as book:
        told = book.step("See what A has alone")
        assert all(each in told for each in ("SHARED", str(SHARED + AHEAD), str(SHARED + NEW), group))
        book.step("Have A follow B")
        file = came_back.check_recovered()
        assert "equal" in book.step("Wait, and compare")
        assert file.rpartition("/")[2] in book.step("See what was cut")
        came_back.check_goes_on()

        assert link.b.produce(topic, values("last", 1)) == [SHARED + NEW]
        commit(link.b, group, {(topic, 0): SHARED + NEW})
        until("A has it", lambda: link.a.end(topic) == SHARED + NEW + 1)
        until("the position, too", lambda: offsets(link.a, group) == {(topic, 0): SHARED + NEW})
        link.wait_following()
        book.step("Lead at A again")
    assert link.a.produce(topic, values("home", 5))[0] == SHARED + NEW + 1
    link.wait_end(topic, SHARED + NEW + 6)
    assert link.b.read(topic) == link.a.read(topic)
    commit(link.a, group, {(topic, 0): SHARED + NEW + 3})
    until("B has the position", lambda: offsets(link.b, group) == {(topic, 0): SHARED + NEW + 3})
    b_truncations = link.b.proxy.get(f"/v1/links/{link.name}/truncations")["items"]
    assert not b_truncations, "nothing was cut at B"
    with pytest.raises(KafkaException):
        link.b.produce(topic, values("refused", 1))
