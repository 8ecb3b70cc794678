"""Who wrote which offsets first, as a chain of real clusters says it: leaders move, the middle one is promoted."""

from __future__ import annotations

from typing import Any

import pytest
from support.kafka import Clusters, unique
from support.links import GRANTED, Linked, Side, linked, sidecars, taking_transactions, until, whole

from isthmus_bench import ready_commands
from isthmus_control.levels import KNOWN_LEVEL

pytestmark = [pytest.mark.brokers, pytest.mark.timeout(180)]


def origins(side: Side, topic: str) -> list[dict[str, Any]]:
    """Of partition 0, as ``isthmus topic describe`` has them."""
    found: list[dict[str, Any]] = side.proxy.cli("topic", "describe", topic)["partitions"][0]["origins"]
    return found


def said(side: Side, topic: str) -> list[tuple[Any, ...]]:
    """What both sides have to say alike."""
    return [
        (each["cluster_id"], each["topic_id"], each["term"], each["start_offset"], each["end_offset"], each["epochs"])
        for each in origins(side, topic)
    ]


def agreed(pair: Linked, source: str, target: str) -> list[tuple[Any, ...]]:
    """What both sides say, once they say the same."""
    until("both say the same", lambda: said(pair.a, source) == said(pair.b, target), 30)
    return said(pair.a, source)


def follows_on(pair: Linked, c: Side) -> str:
    """Have a third cluster follow the second one; what its topics' names begin with."""
    name, last = unique("b-to-c"), unique("last-") + "-"
    until("raised", lambda: c.proxy.cli("control", "upgrade")["after"] == KNOWN_LEVEL)
    pair.b.proxy.cli("link", "create", name, "--remote", c.proxy.link_address)
    c.proxy.cli("link", "grant", name, "--may", GRANTED, "--broker-settings")
    pair.b.proxy.cli("link", "attach", name, "--local", pair.remote, "--remote", last, "--role", "leader")
    return last


def test_all_sides_say_who_wrote_what(kafka_cluster: Clusters) -> None:
    a, b, third = kafka_cluster(brokers=3), kafka_cluster(), kafka_cluster()
    with (
        linked(a, b, a_proxies=sidecars(a), b_proxies=[whole(b)]) as pair,
        whole(third) as proxy,
        taking_transactions(c := Side(third, [proxy])),
    ):
        pair.raise_levels()
        last = follows_on(pair, c)
        source, target = pair.names(unique("t"))
        second_source, second = unique("from-") + ".t", unique("to-") + ".t"
        pair.a.create_topic(second_source, replicas=3)
        pair.a.create_topic(source, replicas=3)
        pair.a.produce(source, [b"before"] * 10)
        pair.attach()
        pair.wait_end(target, 10)
        before, term = agreed(pair, source, target)
        assert (before[0], before[2:5]) == (a.cluster_id, (None, 0, 10)), "written here before anybody said so"
        assert (term[0], bool(term[2]), term[3:5]) == (a.cluster_id, True, (10, None))
        assert {each["via_cluster_id"] for each in origins(pair.b, target)} == {a.cluster_id}
        last += target.removeprefix(pair.remote)
        until("the last one has it", lambda: last in c.topics() and c.end(last) == 10)
        assert said(c, last) == [before, term], "what the one in the middle was told"
        assert {each["via_cluster_id"] for each in origins(c, last)} == {b.cluster_id}

        # Its leader moves, while another proxy pushes: the same term goes on, in another epoch from there on.
        leader = pair.a.admin(direct=True).list_topics(source, timeout=10).topics[source].partitions[0].leader
        a.stop_broker(leader)
        pair.a.produce(source, [b"after"] * 5)
        pair.wait_end(target, 15)
        moved = agreed(pair, source, target)[-1]
        assert moved[:5] == term[:5]
        (epoch,) = moved[5]
        assert (epoch["start_offset"], epoch["epoch"] > 0) == (10, True)
        until("the last one has it", lambda: c.end(last) == 15)
        assert said(c, last)[-1] == moved
        shown = ready_commands.run(["topic", "describe", target, "--provenance", "--url", pair.b.proxy.url], 30)
        assert "before terms" in shown.stdout
        assert term[2] in shown.stdout
        assert "assumed" not in shown.stdout

        # What was followed ends as it did, and a term of B's own begins there, before anybody has written.
        pair.attach(second_source[:-1], second[:-1])
        pair.a.produce(second_source, [b"x"] * 3)
        pair.wait_end(second, 3)
        agreed(pair, second_source, second)
        pair.b.proxy.cli("link", "promote", pair.name, "--local", pair.remote)
        pair.b.proxy.cli("link", "failover", pair.name, "--local", second[:-1], "--yes")
        for topic, end, ended in ((target, 15, "promoted"), (second, 3, "failed-over")):
            followed, own = origins(pair.b, topic)[-2:]
            assert (followed["cluster_id"], followed["end_offset"], followed["ended"]) == (a.cluster_id, end, ended)
            assert (own["cluster_id"], own["start_offset"], own["end_offset"]) == (b.cluster_id, end, None)
            assert own["term"]
            assert pair.b.produce(topic, [b"here now"]) == [end]
        until("the last one has it", lambda: c.end(last) == 16)
        assert said(c, last) == said(pair.b, target)
