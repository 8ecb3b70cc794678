"""A reversal with whole plugins on model clusters: nothing is lost, one leads, it goes back and there again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from support.fake_cluster import Partition, simulated_now
from support.plugins import Proxy, Two, on_two
from support.promoting import differ

from isthmus_control.commands import (
    AcceptReversal,
    AnnounceReversal,
    Body,
    ChangeGrants,
    EndReversal,
    HandOver,
    HoldReversal,
    ReleaseLease,
)
from isthmus_control.model import ResourceType, Role
from isthmus_control.origins import Ended
from isthmus_plugins import links
from isthmus_plugins.cluster import BrokerUnavailable
from isthmus_plugins.links import NamespaceRef, OperationError
from isthmus_plugins.replication.operations.handing_over import HandingOver

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


def test_proxies_look_after_reversals_while_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    looks, look = list[float](), HandingOver._look_after_some

    async def noted(self: HandingOver) -> None:
        looks.append(simulated_now())
        await look(self)

    monkeypatch.setattr(HandingOver, "_look_after_some", noted)

    async def work(two: Two) -> None:
        await following(two)
        await asyncio.sleep(60)
        assert not looks
        await two.a.links.reverse("a-to-b", asked("A"))
        await two.until("it is over", lambda: not any(each.state.reversals for each in two.controls.values()))
        await asyncio.sleep(60)
        assert not looks or looks[-1] < simulated_now() - 50

    on_two(work, 600)


def test_asked_at_the_follower_it_takes_the_leaders_consent() -> None:
    async def work(two: Two) -> None:
        two.controls["A"].apply(ChangeGrants("a-to-b", taken=two.controls["A"].state.links["a-to-b"].grants))
        for request in (asked("B", here=True, dry_run=True), asked("B", here=True)):
            with pytest.raises(OperationError, match="--may 'lead:a-' --broker-settings") as raised:
                await two.b.links.reverse("a-to-b", request)
            assert raised.value.code == "NOT_GRANTED"
        assert not two.controls["A"].state.reversals
        await two.a.links.grant("a-to-b", links.ChangeGrants(may=["lead:a-", "lead:consumer-group:ga-"]))
        await two.a.links.grant("a-to-b", links.ChangeGrants(may=["broker-settings"]))
        planned = await two.b.links.reverse("a-to-b", asked("B", here=True, dry_run=True))
        assert (planned.refused, planned.reversed, planned.led_here) == ([], False, True)
        write(two, "A", b"before")
        done = await two.b.links.reverse("a-to-b", asked("B", here=True))
        assert (done.reversed, done.namespaces) == (True, refs("B"))
        assert [role(two, "A"), role(two, "B")] == [Role.FOLLOWER, Role.LEADER]
        for side, again in ((two.b, asked("B", here=True)), (two.a, asked("A"))):  # it is done
            with pytest.raises(OperationError) as raised:
                await side.links.reverse("a-to-b", again)
            assert raised.value.code == "NOT_FOUND"
        write(two, "B", b"after")
        await two.until("equal", lambda: equal(two), 30)

        async def down() -> None:
            two.clusters["A"].partition("a-t").leader = -1

        at(two, "B", HoldReversal, down)
        with pytest.raises(OperationError, match="the other cluster, which leads: taken back") as raised:
            await two.a.links.reverse("a-to-b", asked("A", here=True, hold_seconds=1))
        assert raised.value.code == "NOT_DRAINED"

    reversing(work)


def test_who_is_known_to_hold_something_else_leads_once_somebody_says_that_he_knows() -> None:
    async def work(two: Two) -> None:
        why = differ(two, "b-t")
        planned = await two.a.links.reverse("a-to-b", asked("A", dry_run=True))
        assert planned.refused == [f"{why} (isthmus link acknowledge there says that you know)"]
        with pytest.raises(OperationError, match=f"nothing is held: {why}"):
            await two.a.links.reverse("a-to-b", asked("A"))
        await two.b.links.acknowledge("a-to-b")
        assert (await two.a.links.reverse("a-to-b", asked("A"))).reversed

    reversing(work)


def at(two: Two, name: str, body: type[Body], then: Callable[[], Awaitable[None]], before: bool = False) -> None:
    """Have something done, once, when a command of that kind is recorded at a cluster, or about to be."""
    control = two.controls[name]
    append = control.append

    async def watched(asked: Body) -> Any:
        if not isinstance(asked, body):
            return await append(asked)
        control.append = append  # type: ignore[method-assign]
        outcome = None if before else await append(asked)
        await then()
        return await append(asked) if before else outcome

    control.append = watched  # type: ignore[method-assign]


async def restarted(two: Two, name: str) -> None:
    """The one proxy of a cluster is killed."""
    await (two.a if name == "A" else two.b).stop()
    await anew(two, name)


async def dying(two: Two, name: str) -> None:
    """The same of the proxy that runs this: what it was about to do never comes."""
    two.restarts = asyncio.get_running_loop().create_task(restarted(two, name))  # type: ignore[attr-defined]
    await asyncio.Event().wait()


async def anew(two: Two, name: str) -> None:
    """The next process of the one proxy of a cluster, of whose lease it is known that it runs no more."""
    before = two.a if name == "A" else two.b
    two.controls[name].unsubscribe_all()
    two.controls[name].apply(ReleaseLease(before.context.proxy_name, before.context.incarnation))
    after = Proxy(two.clusters[name], two.controls[name], before.context.proxy_name)
    listener = after.context.link_listener
    assert listener is not None
    assert before.context.port is not None
    after.context.link_listener = replace(listener, port=before.context.port)
    setattr(two, name.lower(), after)
    await after.start()


async def again(two: Two) -> None:
    """It works, as if nothing had been."""
    await two.until("connected", lambda: two.a.plugin.parts.peers.connections("a-to-b"), 60)
    await two.until("settled", lambda: not two.controls["A"].state.reversals, 60)
    write(two, "A", b"again")
    await two.a.links.reverse("a-to-b", asked("A"))
    write(two, "B", b"at last")
    await two.until("equal", lambda: equal(two), 60)
    assert [role(two, "A"), role(two, "B")] == [Role.FOLLOWER, Role.LEADER]


def test_taken_back_when_the_other_cluster_does_not_get_drained() -> None:
    async def work(two: Two) -> None:
        append = two.controls["B"].append

        async def failing(body: Body) -> Any:
            if isinstance(body, AcceptReversal):
                raise BrokerUnavailable("the control log does not answer")
            return await append(body)

        two.controls["B"].append = failing  # type: ignore[method-assign]
        with pytest.raises(OperationError, match="does not answer"):
            await two.a.links.reverse("a-to-b", asked("A"))
        assert [writable(two, "A"), role(two, "B")] == [True, Role.FOLLOWER]
        two.controls["B"].append = append  # type: ignore[method-assign]

        async def down() -> None:
            two.clusters["B"].partition("b-t").leader = -1

        at(two, "A", HoldReversal, down)
        with pytest.raises(OperationError, match="taken back"):
            await two.a.links.reverse("a-to-b", asked("A", hold_seconds=1))
        two.clusters["B"].partition("b-t").leader = 1
        await again(two)

    reversing(work)


def test_a_drain_that_is_recorded_too_late_takes_no_later_ones_place() -> None:
    """The other cluster's control log takes longer than writes are held, and than the next reversal takes."""

    async def work(two: Two) -> None:
        append, next_one, recorded = two.controls["B"].append, asyncio.Event(), asyncio.Event()

        async def slow(body: Body) -> Any:
            if not isinstance(body, AcceptReversal):
                return await append(body)
            two.controls["B"].append = append  # type: ignore[method-assign]
            await next_one.wait()
            outcome = await append(body)
            recorded.set()
            return outcome

        async def too_late() -> None:
            next_one.set()
            await recorded.wait()

        two.controls["B"].append = slow  # type: ignore[method-assign]
        with pytest.raises(OperationError, match="taken back"):
            await two.a.links.reverse("a-to-b", asked("A", hold_seconds=1))
        write(two, "A", b"led on")
        at(two, "A", HandOver, too_late)
        assert (await two.a.links.reverse("a-to-b", asked("A"))).reversed
        assert recorded.is_set()
        write(two, "B", b"led")
        await two.until("equal", lambda: equal(two), 60)

    reversing(work)


def test_a_reversal_dies_with_its_owner_until_it_is_handed_over() -> None:
    async def work(two: Two) -> None:
        at(two, "A", HoldReversal, lambda: dying(two, "A"))
        with pytest.raises((OperationError, asyncio.CancelledError)):
            await two.a.links.reverse("a-to-b", asked("A"))
        await two.until("taken back", lambda: writable(two, "A"), 30)
        await again(two)

    reversing(work)


@pytest.mark.parametrize("name", ["A", "B"])
def test_once_handed_over_the_other_cluster_leads_whoever_dies(name: str) -> None:
    async def work(two: Two) -> None:
        at(two, "A", HandOver, lambda: dying(two, "A") if name == "A" else restarted(two, "B"))
        with suppress(OperationError, asyncio.CancelledError):
            await two.a.links.reverse("a-to-b", asked("A"))
        assert not writable(two, "A")
        await two.until("B leads", lambda: writable(two, "B"), 60)
        write(two, "B", b"led")
        await two.until("equal", lambda: equal(two), 60)
        await two.until("ended", lambda: not two.controls["A"].state.reversals, 60)

    reversing(work)


def test_abandoned_by_an_operator_where_the_other_cluster_never_heard() -> None:
    async def work(two: Two) -> None:
        at(two, "A", HandOver, two.b.stop)
        with pytest.raises(OperationError, match="does not lead yet") as raised:
            await two.a.links.reverse("a-to-b", asked("A"))
        assert raised.value.code == "HANDED_OVER"
        assert [writable(two, "A"), writable(two, "B")] == [False, False]
        (shown,) = two.a.status().reversals
        assert (shown.step, "to lead" in shown.waits_for) == ("handed-over", True)
        with pytest.raises(OperationError, match="--yes"):
            await two.a.links.abandon_reversal("a-to-b", links.AbandonReversal())
        await two.a.links.abandon_reversal("a-to-b", links.AbandonReversal(although_unreachable=True))
        assert writable(two, "A")
        await anew(two, "B")
        write(two, "A", b"led again")
        await two.until("equal", lambda: equal(two), 60)
        await again(two)

    reversing(work)


def test_not_abandoned_where_the_other_cluster_leads() -> None:
    async def work(two: Two) -> None:
        at(two, "A", EndReversal, lambda: abandoned(two), before=True)
        await two.a.links.reverse("a-to-b", asked("A"))
        assert [writable(two, "A"), writable(two, "B")] == [False, True]
        with pytest.raises(OperationError, match="nothing of link"):
            await two.a.links.abandon_reversal("a-to-b", links.AbandonReversal())

    async def abandoned(two: Two) -> None:
        with pytest.raises(OperationError, match="leads already"):
            await two.a.links.abandon_reversal("a-to-b", links.AbandonReversal())

    reversing(work)


def test_what_could_not_be_reversed_is_refused_before_anything_is_held() -> None:
    async def work(two: Two) -> None:
        unverified = links.Reverse(namespaces=refs("A"), dry_run=True)
        (told,) = (await two.a.links.reverse("a-to-b", unverified)).refused
        assert "transaction.partition.verification.enable" in told
        with pytest.raises(OperationError, match="nothing is held"):
            await two.a.links.reverse("a-to-b", links.Reverse(namespaces=refs("A")))
        with pytest.raises(OperationError, match="not led over"):
            await two.b.links.reverse("a-to-b", links.Reverse(namespaces=[NamespaceRef(local="x-")]))
        half = [NamespaceRef(local="b-"), NamespaceRef(local="x-")]
        with pytest.raises(OperationError, match="'x-' does not follow"):
            await two.b.links.reverse("a-to-b", links.Reverse(namespaces=half, here=True))
        with pytest.raises(OperationError, match="not led over link 'a-to-b' here: the other cluster leads it"):
            await two.b.links.reverse("a-to-b", asked("B"))
        two.clusters["B"].add_topic("b-new").partitions[0].write_values(b"another's")
        two.clusters["A"].add_topic("a-new")
        told = (await two.a.links.reverse("a-to-b", asked("A", dry_run=True))).refused
        assert "a-new is not followed" in told
        two.controls["B"].apply(ChangeGrants("a-to-b", taken=two.controls["B"].state.links["a-to-b"].grants))
        with pytest.raises(OperationError, match="follow:b-"):
            await two.a.links.reverse("a-to-b", asked("A", dry_run=True))
        assert not [body for body in two.controls["A"].commands if isinstance(body, AnnounceReversal)]

    reversing(work)
