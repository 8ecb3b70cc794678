"""User story: a cluster that two others followed is lost; one takes over, the other one follows it, whichever has more,
and the lost one comes back (multi-zone disaster recovery).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from support.groups import commit, offsets
from support.kafka import unique
from support.links import Linked, Side, relayed, truncated_at, truncation, until, whole
from support.relay import Relay
from support.runbooks import Kill, Runbook, Victim, kills

from isthmus_bench import ready_commands
from isthmus_bench.kafka import KafkaCluster
from isthmus_control.levels import KNOWN_LEVEL

pytestmark = [pytest.mark.brokers, pytest.mark.timeout(400)]

SHARED, LATER, OF_A, OF_B = 300, 40, 15, 25
"""Records: that all have; of A that B or C alone has; of A that nobody else has; of B since the failover."""
STATES = {6: "behind", 7: "ahead"}
"""What C is, by the step of the page for that."""
BACK = 9
BEFORE_IT_RECOVERS = BACK, 0
"""The step and command that have A, which is back, lead to C no more: it follows B two commands later."""


class Three(NamedTuple):
    """A led to B and to C."""

    first: Linked
    """A and B."""
    relay: Relay
    c: Side
    names: dict[str, str]
    """Of the page."""

    @property
    def topic(self) -> str:
        return self.names["orders-"] + "eu"

    def has(self, side: Side, end: int) -> None:
        until(f"it has {end} records", lambda: self.topic in side.topics() and side.end(self.topic) == end, 120)

    def follow(self) -> bool:
        """Whether C follows B, and A does when it runs."""
        a, b, link = self.first.a, self.first.b, self.first.name
        followed = self._c_follows()
        return followed and (not a.proxy.running or {side.link(link)["state"] for side in (a, b)} == {"Following"})

    def nobody_follows_a(self) -> bool:
        """Whether C follows B, and A, which is back and knows no better, leads what B refuses, and nothing to C."""
        a, b, link = self.first.a, self.first.b, self.first.name
        refused = [each["reason"] for each in a.link(link)["partitions"]] == ["NOT_FOLLOWING"]
        led_to = [len(side.link(each)["mappings"]) for side, each in ((a, link), (b, link), (a, self.names["a-to-c"]))]
        connected = all(side.link(link)["state"] != "Disconnected" for side in (a, b))
        return self._c_follows() and connected and refused and led_to == [1, 0, 0]

    def _c_follows(self) -> bool:
        return {side.link(self.names["b-to-c"])["state"] for side in (self.first.b, self.c)} == {"Following"}


def values(what: str, count: int) -> list[bytes]:
    return [b"%s %d" % (what.encode(), number) for number in range(count)]


@pytest.fixture
def three(kafka_pair: tuple[KafkaCluster, KafkaCluster]) -> Iterator[Three]:
    """A's cluster is up again at the end."""
    source, _ = kafka_pair
    with relayed(*kafka_pair) as (first, relay), KafkaCluster(name="lost-c") as kafka, whole(kafka) as proxy:
        first.raise_levels()
        until("raised", lambda: proxy.cli("control", "upgrade")["after"] == KNOWN_LEVEL)
        names = {"orders-": unique("orders-") + "-", "a-to-c": unique("a-to-c"), "b-to-c": unique("b-to-c")}
        first.a.proxy.cli("link", "create", names["a-to-c"], "--remote", proxy.link_address)
        try:
            yield Three(first, relay, Side(kafka, [proxy]), names)
        finally:
            if not source.alive(source.broker_ids[0]):
                source.start_broker(source.broker_ids[0])
            for side, name in ((first.a, "a-to-c"), (first.b, "b-to-c")):
                side.proxy.cli("link", "delete", names[name], "--local-only", check=False)


def lose(three: Three, state: str) -> None:
    """A is gone with records of its own, and C is behind B, or ahead of it."""
    a, b, c, topic = three.first.a, three.first.b, three.c, three.topic
    orders = three.names["orders-"]
    a.create_topic(topic)
    a.produce(topic, values("shared", SHARED))
    for link in (three.first.name, three.names["a-to-c"]):
        names = "--local", orders, "--remote", orders, "--role", "leader"
        until("attached", lambda link=link, names=names: a.proxy.cli("link", "attach", link, *names))
    three.has(b, SHARED)
    three.has(c, SHARED)
    late, other = (c, b) if state == "behind" else (b, c)
    late.proxy.kill()
    a.produce(topic, values("later", LATER))
    three.has(other, SHARED + LATER)
    other.proxy.kill()
    a.produce(topic, values("of A", OF_A))
    a.proxy.kill()
    a.kafka.kill(a.kafka.broker_ids[0])
    for side in (b, c):
        side.proxy.start()
    commit(c, "reader", {(topic, 0): c.end(topic)}, direct=True)


def cases() -> list[Any]:
    """C behind and ahead; and B's proxy or broker dies where C, or A, is attached to it."""
    found = [pytest.param(state, None, id=state, marks=pytest.mark.suite("stories")) for state in STATES.values()]
    for each in kills("lost-source"):
        (kill,) = each.values
        if kill.what is not Victim.LINK and kill.step in (*STATES, BACK):
            state = STATES.get(kill.step, "ahead")
            found.append(pytest.param(state, kill, id=f"{state}-{each.id}", marks=each.marks))
    return found


@pytest.mark.parametrize(("state", "kill"), cases())
def test_one_takes_over_and_the_others_follow(three: Three, state: str, kill: Kill | None) -> None:
    a, b, c, topic = three.first.a, three.first.b, three.c, three.topic
    second = three.names["b-to-c"]
    lose(three, state)
    at_failover, at_c = (SHARED + LATER, SHARED) if state == "behind" else (SHARED, SHARED + LATER)
    waits = kill is not None and (kill.step, kill.command) == BEFORE_IT_RECOVERS
    well = three.nobody_follows_a if waits else three.follow
    with Runbook("lost-source", three.first, three.relay, three.names, kill, well, third=c) as book:
        told = book.step("See what each has")
        assert all(str(each) in told for each in (at_failover, at_c)), told
        book.step("Fail over to B")
        assert b.produce(topic, values("of B", OF_B))[0] == at_failover
        book.step("Take C out of A's link")
        book.step("Link B to C")
        told = book.step("See up to where both are the same")
        if state == "behind":
            assert "refuse" not in told, told
            book.step("Where C has no more than B")
            book.leave_out("Or where C is ahead")
        else:
            assert str(SHARED) in told, told
            book.leave_out("Where C has no more than B")
            book.step("Or where C is ahead")
            done = truncated_at(c, second, topic)
            assert (done["messages_truncated"], done["partitions"][0]["offset_truncated_to"]) == (LATER, SHARED)
            shown = ready_commands.run(["salvage", "show", done["partitions"][0]["salvage_file"]], 30).stdout
            assert (shown.count("later"), shown.count("shared")) == (LATER, 0)
        three.has(c, at_failover + OF_B)
        assert "equal" in book.step("Wait, and compare")
        assert (truncation(c, second, topic) is None) == (state == "behind")
        assert c.read(topic) == b.read(topic)
        assert offsets(c, "reader") == {(topic, 0): SHARED}, "of what it has, or had in common with B"

        a.kafka.start_broker(a.kafka.broker_ids[0])
        a.proxy.start()
        until("A is back", lambda: all(side.link(three.first.name)["encryption"] for side in (a, b)))
        book.step("When A is there again")
        done = truncated_at(a, three.first.name, topic)
        cut = OF_A if state == "behind" else LATER + OF_A
        assert (done["messages_truncated"], done["partitions"][0]["offset_truncated_to"]) == (cut, at_failover)
        three.has(a, at_failover + OF_B)
        assert "equal" in book.step("Wait, and compare again")

    expected = values("shared", SHARED) + (values("later", LATER) if state == "behind" else []) + values("of B", OF_B)
    assert [record.value for record in b.read(topic)] == expected
    end = len(expected)
    assert b.produce(topic, [b"to both"]) == [end]
    for side in (a, c):
        three.has(side, end + 1)
        assert side.read(topic) == b.read(topic)
