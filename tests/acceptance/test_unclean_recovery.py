"""User story: a link is cut, both clusters are written to, and an operator chooses whose records count (unclean link
recovery)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaException
from support.control_topics import forget
from support.kafka import unique
from support.links import Linked, relayed, truncated_at, truncation, until
from support.relay import Relay
from support.runbooks import Kill, Runbook, kills

from isthmus_bench import ready_commands
from isthmus_bench.kafka import KafkaCluster

pytestmark = [pytest.mark.brokers, pytest.mark.timeout(240)]

SHARED, OF_A, OF_B = 500, 30, 20
MODES = "asynchronous", "synchronous"
CHOSEN = {4: "b", 5: "a"}
"""By the step of the page: the cluster whose records count."""


def values(what: str, count: int) -> list[bytes]:
    return [b"%s %d" % (what.encode(), number) for number in range(count)]


def cases() -> list[Any]:
    """Both choices: of links of both modes, and something dies in the step that carries the choice out."""
    stories = pytest.mark.suite("stories")
    found = [
        pytest.param(chosen, mode, None, id=f"{chosen}-{mode}", marks=stories)
        for chosen in CHOSEN.values()
        for mode in MODES
    ]
    modes = cycle(MODES)
    for each in kills("unclean-recovery"):
        (kill,) = each.values
        if kill.step in CHOSEN:
            chosen, mode = CHOSEN[kill.step], next(modes)
            found.append(pytest.param(chosen, mode, kill, id=f"{chosen}-{mode}-{each.id}", marks=each.marks))
    return found


@pytest.fixture
def scene(kafka_pair: tuple[KafkaCluster, KafkaCluster]) -> Iterator[tuple[Linked, Relay]]:
    with relayed(*kafka_pair) as (link, relay):
        link.raise_levels()
        yield link, relay


def write_both(link: Linked, relay: Relay, orders: str, mode: str) -> None:
    """A topic of each cluster's own records behind those that both have; both reach each other again."""
    topic = orders + "eu"
    link.attach(orders, orders)
    link.a.create_topic(topic)
    link.a.produce(topic, values("shared", SHARED))
    link.wait_end(topic, SHARED)
    link.wait_following()
    if mode == "synchronous":
        until("accepted", lambda: link.a.proxy.cli("link", "set-mode", link.name, mode))
        until("In-Sync", lambda: {side.link(link.name)["state"] for side in (link.a, link.b)} == {"In-Sync"})
    relay.cut(refuse=True)
    link.a.produce(topic, values("of A", OF_A), acks="all")
    until("failed over", lambda: link.b.proxy.cli("link", "failover", link.name), 90)
    assert link.b.produce(topic, values("of B", OF_B))[0] == SHARED
    relay.mend()
    until("both reach each other", lambda: all(side.link(link.name)["encryption"] for side in (link.a, link.b)))


@pytest.mark.parametrize(("chosen", "mode", "kill"), cases())
def test_the_other_one_is_cut_to_what_both_have(
    scene: tuple[Linked, Relay], chosen: str, mode: str, kill: Kill | None
) -> None:
    link, relay = scene
    orders = unique("orders-") + "-"
    topic = orders + "eu"
    write_both(link, relay, orders, mode)
    leader, follower = (link.a, link.b) if chosen == "a" else (link.b, link.a)
    kept, lost = (("of A", OF_A), ("of B", OF_B)) if chosen == "a" else (("of B", OF_B), ("of A", OF_A))
    with Runbook("unclean-recovery", link, relay, {"orders-": orders}, kill, {"Following"}) as book:
        book.step("Make the link asynchronous")
        told = book.step("See who wrote what")
        assert all(side.kafka.cluster_id in told for side in (link.a, link.b)), told
        told = book.step("See what goes, whichever you choose")
        assert all(str(each) in told for each in (SHARED, SHARED + OF_A, SHARED + OF_B)), told
        if chosen == "b":
            book.step("Choose B's")
            book.leave_out("Or choose A's")
        else:
            book.leave_out("Choose B's")
            book.step("Or choose A's")
        done = truncated_at(follower, link.name, topic)
        (cut,) = done["partitions"]
        assert (done["messages_truncated"], cut["offset_truncated_to"]) == (lost[1], SHARED)
        assert "equal" in book.step("Wait, and compare")

    assert follower.read(topic) == leader.read(topic)
    assert [record.value for record in leader.read(topic)] == values("shared", SHARED) + values(*kept)
    shown = ready_commands.run(["salvage", "show", cut["salvage_file"], "--limit", "100"], 30).stdout
    assert (shown.count(lost[0]), shown.count("shared")) == (lost[1], 0)
    assert truncation(leader, link.name, topic) is None

    # The chosen one leads, as if nothing had been.
    with pytest.raises(KafkaException):
        follower.produce(topic, [b"refused"])
    end = SHARED + kept[1]
    assert leader.produce(topic, [b"goes on"]) == [end]
    until("it goes on", lambda: follower.end(topic) == end + 1)


@pytest.mark.parametrize("chosen", CHOSEN.values())
@pytest.mark.one_in_ci("stories", of="faults of steps")
def test_an_operator_says_what_both_have_where_nobody_knows(
    chosen: str, kafka_pair: tuple[KafkaCluster, KafkaCluster], tmp_path: Path
) -> None:
    """A has lost its control log, so that nothing is recorded of where its records come from."""
    orders = unique("orders-") + "-"
    topic = orders + "eu"
    with KafkaCluster(name="forgetful", brokers=1) as forgetful, relayed(forgetful, kafka_pair[1]) as (link, relay):
        link.raise_levels()
        write_both(link, relay, orders, "asynchronous")
        link.a.proxy.stop()
        forget(forgetful)
        link.a.proxy.options = ("--new-control-log",)
        link.a.proxy.start()
        link.b.proxy.cli("link", "delete", link.name, "--local-only")
        link.a.proxy.cli("link", "create", link.name, "--remote", relay.address)
        link.raise_levels()

        leader, follower = (link.a, link.b) if chosen == "a" else (link.b, link.a)
        kept, lost = (("of A", OF_A), ("of B", OF_B)) if chosen == "a" else (("of B", OF_B), ("of A", OF_A))

        def attach(*more: str, shared: int | None = None) -> Any:
            role = "leader" if chosen == "a" else "follower"
            if shared is not None:
                (tmp_path / "shared").write_text(f"{topic} 0 {shared}\n")
                more = (*more, "--shared-until", str(tmp_path / "shared"))
            pair = "--local", orders, "--remote", orders, "--role", role
            return link.a.proxy.cli("link", "attach", link.name, *pair, *more)

        def planned(shared: int | None) -> tuple[str | None, str]:
            """The word to have it cut by, and why it does not follow."""
            told = attach("--dry-run", shared=shared)
            (plan,) = told["topics"]
            assert plan["action"] == "refuse"
            return told["cut"], plan["reason"]

        word, why = planned(None)
        assert (word, "is not known to be the source's" in why) == (None, True), why
        word, why = planned(SHARED + 5)
        assert (word, "nothing is done with it" in why) == (None, True), why
        word, why = planned(SHARED)
        assert word is not None, why
        attach("--cut", word, shared=SHARED)
        done = truncated_at(follower, link.name, topic)
        (cut,) = done["partitions"]
        assert (done["messages_truncated"], cut["offset_truncated_to"]) == (lost[1], SHARED)
        until("it is as long", lambda: topic in follower.topics() and follower.end(topic) == SHARED + kept[1])
        assert follower.read(topic) == leader.read(topic)
        assert [record.value for record in leader.read(topic)] == values("shared", SHARED) + values(*kept)
        shown = ready_commands.run(["salvage", "show", cut["salvage_file"], "--limit", "100"], 30).stdout
        assert (shown.count(lost[0]), shown.count("shared")) == (lost[1], 0)
        link.wait_following()
        assert all(each["equal"] for each in link.verify()["partitions"])
