"""Operators' requests and connections between whole plugins, over a loopback interface in memory, on model clusters."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Collection

import pytest
from support.fake_cluster import FakeControl
from support.loopback import LoopbackAcceptor
from support.plugins import Proxy, Two, on_two

from isthmus_control.anchors import Anchor
from isthmus_control.commands import (
    AttachNamespace,
    Body,
    CreateLink,
    DeleteLink,
    RegisterProducerIds,
)
from isthmus_control.model import ResourceType, Role
from isthmus_control.outcome import Outcome
from isthmus_plugins import links
from isthmus_plugins.cluster import BrokerUnavailable, TopicPartition
from isthmus_plugins.links import OperationError
from isthmus_plugins.process import LinkListenerSpec
from isthmus_plugins.replication.follower import topics as follower_topics


def test_one_call_sets_up_both_ends() -> None:
    async def work(two: Two) -> None:
        created = await two.create()
        assert (created.link_name, created.remote_cluster_id, created.dials) == ("a-to-b", "B", True)
        await two.connected()
        a, b = two.a.status(), two.b.status()
        assert a.link_id == b.link_id
        assert b.last_heard_seconds is not None
        assert (b.local_cluster_id, b.remote_cluster_id, b.dials, b.reason) == ("B", "A", False, None)
        links_ = [two.controls[name].state.links["a-to-b"] for name in "AB"]
        sealed = [link.secrets[""] for link in links_]
        secrets = [two.a.context.unseal(each, links_[0].link_id) for each in sealed]
        assert secrets[0] == secrets[1]
        assert len(secrets[0]) == 32
        ranges = [two.controls[name].state.producer_id_ranges for name in "AB"]
        assert ranges[0] == ranges[1]
        assert set(ranges[0]) == {"A", "B"}

    on_two(work)


class Failing:
    """A control log that fails for some commands."""

    def __init__(self, control: FakeControl, kind: type[Body], times: int, before: bool) -> None:
        self._append = control.append
        self._kind = kind
        self.left = times
        self._before = before
        control.append = self.append  # type: ignore[method-assign]

    async def append(self, body: Body) -> Outcome:
        if isinstance(body, self._kind) and self.left:
            self.left -= 1
            if not self._before:
                await self._append(body)
            raise BrokerUnavailable("the control log does not answer")
        return await self._append(body)


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("where", ["A", "B"])
def test_a_failed_half_is_healed_by_trying_again(where: str, before: bool) -> None:
    async def work(two: Two) -> None:
        Failing(two.controls[where], CreateLink, 1, before)
        with pytest.raises(OperationError) as raised:
            await two.create()
        assert raised.value.http_status in (409, 503)
        if where == "A" and not before:  # it counted, though nobody knew: the operator sees it, and deletes it
            with pytest.raises(OperationError, match="already"):
                await two.create()
            await two.a.links.delete("a-to-b", local_only=True)
        await two.create()
        await two.connected()

    on_two(work)


def test_a_failed_half_that_cannot_be_undone_is_replaced() -> None:
    async def work(two: Two) -> None:
        Failing(two.controls["A"], CreateLink, 1, True)
        Failing(two.controls["B"], DeleteLink, 1, True)
        with pytest.raises(OperationError, match="does not answer"):
            await two.create()
        assert "a-to-b" in two.controls["B"].state.links
        await two.create()
        await two.connected()
        assert two.a.status().link_id == two.b.status().link_id

    on_two(work)


def test_a_link_that_is_in_use_is_not_replaced() -> None:
    async def work(two: Two) -> None:
        await two.create()
        await two.connected()
        two.controls["A"].apply(DeleteLink("a-to-b"))
        await two.until("B notices", lambda: two.b.status().state == "Disconnected")
        attach = AttachNamespace("a-to-b", ResourceType.TOPIC, "r-", "l-", Role.FOLLOWER, create_missing=True)
        two.controls["B"].apply(attach)
        with pytest.raises(OperationError, match="it has a link"):
            await two.create()

    on_two(work)


@pytest.mark.parametrize(
    ("remote", "code"),
    [
        ("127.0.0.1:1", "BOOTSTRAP_TCP_CONNECTION_FAILED_ERROR"),
        ("nonsense", "INVALID_REQUEST"),
        ("127.0.0.1:x", "INVALID_REQUEST"),
        (":1", "INVALID_REQUEST"),
    ],
)
def test_addresses_that_lead_nowhere(remote: str, code: str) -> None:
    async def work(two: Two) -> None:
        with pytest.raises(OperationError) as raised:
            await two.create(remote=remote)
        assert raised.value.code == code

    on_two(work)


def test_the_own_cluster_is_no_peer() -> None:
    async def work(two: Two) -> None:
        with pytest.raises(OperationError, match="is of cluster 'A', and so is this proxy"):
            await two.create(remote=two.a.address)

    on_two(work)


@pytest.mark.parametrize("where", ["A", "B"])
def test_two_clusters_of_one_id_are_not_both_linked(where: str) -> None:
    """``where``: the cluster that has a link to another one of that id. It is known by its control topic."""

    def anchor(cluster_id: str, topic: int, generation: int = 0) -> Anchor:
        return Anchor(cluster_id, str(uuid.UUID(int=topic)), generation, 10, 1, "ab")

    async def work(two: Two) -> None:
        twin = "B" if where == "A" else "A"
        for name, number in (("A", 1), ("B", 2)):
            two.controls[name].anchors.known = anchor(name, number)
        two.controls[where].apply(CreateLink("other", str(uuid.uuid4()), twin, False))
        heard = two.controls[where].anchors.heard
        heard[twin] = anchor(twin, 3)
        with pytest.raises(OperationError, match=f"link 'other' .* another cluster with the id '{twin}'") as raised:
            await two.create()
        assert raised.value.code == "PEER_IS_ANOTHER_CLUSTER"
        assert list(two.controls[where].state.links) == ["other"]
        assert not two.controls[twin].state.links
        # It lost its control topic, and an operator has accepted another one.
        heard[twin] = anchor(twin, 3, generation=-1)
        await two.create()
        await two.connected()
        # The same cluster may have any number of links.
        heard[twin] = anchor(twin, 2 if twin == "B" else 1)
        await two.create("again")
        await two.connected("again")

    on_two(work)


def test_producer_id_ranges_that_disagree_are_told() -> None:
    async def work(two: Two) -> None:
        two.controls["A"].apply(RegisterProducerIds("A", 5))
        two.controls["B"].apply(RegisterProducerIds("A", 6))
        with pytest.raises(OperationError, match="producer id range"):
            await two.create()
        assert not two.controls["A"].state.links
        assert not two.controls["B"].state.links

    on_two(work)


def test_attach_and_detach_from_either_side() -> None:
    async def work(two: Two) -> None:
        two.clusters["A"].add_topic("l-t").partitions[0].write_values(b"x", b"y")
        await two.create()
        await two.connected()
        for proxy, other, request in (
            (two.a, two.b, links.Attach(local="l-", remote="r-", role="leader")),
            (two.b, two.a, links.Attach(local="r-", remote="l-", role="follower")),
        ):
            planned = await proxy.links.attach("a-to-b", request.model_copy(update={"dry_run": True}))
            assert planned.dry_run
            assert not proxy.status().mappings
            await proxy.links.attach("a-to-b", request)
            await proxy.links.attach("a-to-b", request)  # again: nothing happens
            assert [mapping.role for mapping in two.a.status().mappings] == ["leader"]
            assert [mapping.role for mapping in two.b.status().mappings] == ["follower"]
            await two.until(
                "copied", lambda: "r-t" in two.clusters["B"].found and two.clusters["B"].partition("r-t").end
            )
            await two.until(
                "both follow",
                lambda: (
                    [
                        (each.topic, each.state, each.partition_mirror_lag)
                        for end in (two.a, two.b)
                        for each in end.status().partitions
                    ]
                    == [("l-t", "Following", 0), ("r-t", "Following", 0)]
                ),
            )
            await other.links.detach("a-to-b", "r-" if other is two.b else "l-")
            assert not two.a.status().mappings
            assert not two.b.status().mappings
            assert not two.b.status().partitions
            history = two.controls["B"].state.histories["r-t"].partitions[0]
            assert history[-1].end_offset == 2
        assert two.clusters["B"].partition("r-t").end == 2

    on_two(work)


def test_the_ends_of_many_topics_are_recorded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that cannot be read keeps the operator's command from succeeding, and the others' ends from nothing."""

    async def work(two: Two) -> None:
        for number in range(40):
            two.clusters["A"].add_topic(f"l-{number}").partitions[0].write_values(b"x")
        await two.create()
        await two.connected()
        await two.a.links.attach("a-to-b", links.Attach(local="l-", remote="r-", role="leader"))
        await two.until(
            "copied",
            lambda: (
                len(followers := [each for each in two.b.status().partitions if each.state == "Following"]) == 40
                and all(each.partition_mirror_lag == 0 for each in followers)
            ),
        )
        cluster, read = two.clusters["B"], 0
        log_ends = cluster.log_ends

        async def ends(places: Collection[TopicPartition]) -> dict[TopicPartition, int]:
            nonlocal read
            read += 1
            return {place: end for place, end in (await log_ends(places)).items() if place != ("r-7", 0)}

        monkeypatch.setattr(cluster, "log_ends", ends)
        with pytest.raises(OperationError, match="r-7-0 cannot be read"):
            await two.b.links.detach("a-to-b", "r-")
        histories = two.controls["B"].state.histories
        recorded = {topic: history.partitions[0][-1].end_offset for topic, history in histories.items()}
        assert recorded == {f"r-{number}": None if number == 7 else 1 for number in range(40)}
        assert read <= follower_topics.IDLE_TRIES

    on_two(work)


def test_a_half_that_fails_is_taken_back() -> None:
    async def work(two: Two) -> None:
        await two.create()
        await two.connected()
        two.controls["B"].enforced = failing  # type: ignore[method-assign]
        with pytest.raises(OperationError):
            await two.b.links.attach("a-to-b", links.Attach(local="r-", remote="l-", role="follower"))
        assert not two.a.status().mappings

    async def failing(offset: int) -> None:
        raise BrokerUnavailable("no")

    on_two(work)


def test_what_the_control_log_would_refuse_is_refused_in_a_dry_run() -> None:
    async def work(two: Two) -> None:
        await two.create()
        await two.create("other")
        await two.connected("other")
        await two.connected()
        await two.a.links.attach("a-to-b", links.Attach(local="l-", remote="r-", role="leader"))
        overlapping = links.Attach(local="x-", remote="r-x-", role="leader", dry_run=True)
        with pytest.raises(OperationError, match=r"follows one link at most|two namespaces would meet"):
            await two.a.links.attach("other", overlapping)

    on_two(work)


@pytest.mark.parametrize("operation", ["delete", "detach", "attach", "verify"])
def test_links_that_are_not_there(operation: str) -> None:
    async def work(two: Two) -> None:
        request = links.Attach(local="l-", remote="r-", role="leader")
        more = {"delete": (), "detach": ("l-",), "attach": (request,), "verify": (print,)}[operation]
        with pytest.raises(OperationError) as raised:
            await getattr(two.a.links, operation)("x", *more)
        assert (raised.value.code, raised.value.http_status) == ("NOT_FOUND", 404)

    on_two(work)


def test_delete_both_ends_or_one() -> None:
    async def work(two: Two) -> None:
        for deleting, other in ((two.a, two.b), (two.b, two.a)):
            await two.create()
            await two.connected()
            await deleting.links.delete("a-to-b")
            assert not deleting.links.statuses()
            assert not other.links.statuses()
        await two.create()
        await two.connected()
        await two.b.links.delete("a-to-b", local_only=True)
        await two.until("A is told why", lambda: two.a.status().reason == "PEER_HAS_NO_SUCH_LINK")
        with pytest.raises(OperationError, match="--local-only"):
            await two.a.links.delete("a-to-b")
        await two.a.links.delete("a-to-b", local_only=True)
        assert not two.a.links.statuses()

    on_two(work)


def test_the_peers_absence_shows_with_its_reason_and_ends() -> None:
    async def work(two: Two) -> None:
        await two.create()
        await two.connected()
        await two.b.stop()
        await two.until("it is noticed", lambda: two.a.status().state == "Disconnected")
        assert two.a.status().reason in ("CONNECTION_LOST", "BOOTSTRAP_TCP_CONNECTION_FAILED_ERROR")
        with pytest.raises(OperationError, match="not connected"):
            await two.a.links.verify("a-to-b", lambda done, total: None)
        port = two.b.context.port
        assert port is not None
        two.b = Proxy(two.clusters["B"], two.controls["B"], "b")
        two.b.context.link_listener = LinkListenerSpec("127.0.0.1", port, None, LoopbackAcceptor)
        await two.b.start()
        await two.connected()

    on_two(work)


def test_two_addresses_of_one_proxy_make_one_connection() -> None:
    async def work(two: Two) -> None:
        await two.create(remote=two.b.address.replace("127.0.0.1", "localhost"))
        assert len(two.a.status().remote) == 2
        await two.connected()
        await asyncio.sleep(0.5)
        connections = two.a.plugin.parts.peers.connections("a-to-b")
        assert len(connections) == 1
        heard = connections[0]
        await asyncio.sleep(0.5)
        assert two.a.plugin.parts.peers.connections("a-to-b") == [heard]
        assert not heard.lost

    on_two(work)


def test_without_a_lease_nobody_is_spoken_to() -> None:
    async def work(two: Two) -> None:
        two.b.context.lease_deadline = 0.0
        with pytest.raises(OperationError, match="no lease"):
            await two.create()

    on_two(work)


def test_settings_are_altered_at_both_ends_and_a_wrong_one_is_refused() -> None:
    async def work(two: Two) -> None:
        await two.create()
        await two.connected()
        altered = await two.a.links.alter("a-to-b", links.AlterLink(config={"sync.confirm.timeout.ms": "5000"}))
        assert altered.sync_confirm_timeout_ms == 5000
        await two.until("told", lambda: two.b.status().sync_confirm_timeout_ms == 5000)
        with pytest.raises(OperationError, match="a link has no setting 'nope'") as raised:
            await two.b.links.alter("a-to-b", links.AlterLink(config={"nope": "1"}))
        assert raised.value.http_status == 422
        with pytest.raises(ValueError, match="say what to change"):
            links.AlterLink(offsets_groups=["app-*"])
        await two.b.links.alter("a-to-b", links.AlterLink(config={"sync.confirm.timeout.ms": None}))
        await two.until("told", lambda: two.a.status().sync_confirm_timeout_ms == 10_000)

    on_two(work)
