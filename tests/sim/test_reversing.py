"""A reversal with whole plugins on model clusters: nothing is lost, one leads, it goes back and there again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from support.fake_cluster import Partition
from support.plugins import Two, on_two

from isthmus_control.model import ResourceType, Role
from isthmus_control.origins import Ended
from isthmus_plugins import links
from isthmus_plugins.links import NamespaceRef

LEADS = links.Attach(local="a-", remote="b-", role="leader")
GROUPS = links.Attach(
    type="consumer-group", local="ga-", remote="gb-", role="leader", disable_transaction_verification=True
)
PREFIXES = {"A": ("a-", "ga-"), "B": ("b-", "gb-")}
MAY = ["follow:b-", "lead:b-", "follow:consumer-group:gb-", "lead:consumer-group:gb-"]


def refs(name: str) -> list[NamespaceRef]:
    topics, groups = PREFIXES[name]
    return [NamespaceRef(local=topics), NamespaceRef(type="consumer-group", local=groups)]


def asked(name: str, **more: Any) -> links.Reverse:
    return links.Reverse(namespaces=refs(name), disable_transaction_verification=True, **more)


def log_of(two: Two, name: str, index: int = 0) -> Partition:
    return two.clusters[name].partition("a-t" if name == "A" else "b-t", index)


def values(partition: Partition) -> list[bytes | None]:
    return [record.value for record in partition.records().values()]


def writable(two: Two, name: str) -> bool:
    """Whether a client may write there, by the cluster's control log."""
    state = two.controls[name].state
    return state.lookup.topic_reservation(PREFIXES[name][0] + "t") is None


def role(two: Two, name: str) -> Role | None:
    mapping = two.controls[name].state.links["a-to-b"].mapping(ResourceType.TOPIC, PREFIXES[name][0])
    return None if mapping is None else mapping.role


def write(two: Two, name: str, *values: bytes, index: int = 0) -> None:
    assert writable(two, name)
    for value in values:
        log_of(two, name, index).write_values(value)


def equal(two: Two) -> bool:
    return all(values(log_of(two, "A", index)) == values(log_of(two, "B", index)) for index in range(2))


async def following(two: Two) -> None:
    """B follows A, topics and groups, and has all."""
    two.clusters["A"].add_topic("a-t", 2)
    for index in range(2):
        for number in range(5):
            log_of(two, "A", index).write_values(b"%d" % number)
    await two.create()
    await two.connected()
    await two.a.links.attach("a-to-b", LEADS)
    await two.a.links.attach("a-to-b", GROUPS)
    await two.until("copied", lambda: "b-t" in two.clusters["B"].found and equal(two), 30)


def reversing(work: Callable[[Two], Awaitable[None]]) -> None:
    async def begun(two: Two) -> None:
        await following(two)
        await work(two)

    on_two(begun, 600)


def test_there_and_back_and_there_again() -> None:
    async def work(two: Two) -> None:
        sides = {"A": two.a, "B": two.b}
        for number, (leader, follower) in enumerate([("A", "B"), ("B", "A"), ("A", "B")]):
            write(two, leader, b"before %d" % number)
            report = await sides[leader].links.reverse("a-to-b", asked(leader))
            assert report.reversed
            assert [writable(two, leader), writable(two, follower)] == [False, True]
            assert [role(two, leader), role(two, follower)] == [Role.FOLLOWER, Role.LEADER]
            assert not two.controls["A"].state.reversals
            write(two, follower, b"after %d" % number)
            await two.until("equal", lambda: equal(two), 30)
        assert values(log_of(two, "A"))[5:] == [
            b"before 0",
            b"after 0",
            b"before 1",
            b"after 1",
            b"before 2",
            b"after 2",
        ]
        for name, topic in (("A", "a-t"), ("B", "b-t")):
            state = two.controls[name].state
            ranges = state.origins[topic].partitions[0].ranges
            assert Ended.REVERSED in [each.ended for each in ranges], (name, ranges)

    reversing(work)
