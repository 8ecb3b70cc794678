"""Attaching and detaching: at both ends or at neither, nothing lost unasked, and an error that says how far it came.

Both ends are whole, on model clusters and a simulated clock.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from support.fake_cluster import run_simulated
from support.plugins import Two, on_two
from support.replicas import LINK, End, Replicas

from isthmus_control.commands import AttachNamespace, Body, DetachNamespace
from isthmus_control.model import NamespaceKey, ResourceType, Role
from isthmus_control.origins import Ended
from isthmus_control.outcome import Outcome
from isthmus_control.states import ReasonCode
from isthmus_plugins import links
from isthmus_plugins.cluster import BrokerUnavailable, CommittedOffset, KafkaRefused
from isthmus_plugins.links import OperationError
from isthmus_plugins.replication.link import calls

LEADS = links.Attach(local="m-", remote="s-", role="leader")
FOLLOWS = links.Attach(local="s-", remote="m-", role="follower")
GROUPS = links.Attach(local="g-", remote="h-", role="leader", type="consumer-group")
PRINCIPALS = links.Attach(local="User:a-", remote="User:b-", role="leader", type="principal")
TOPIC = ResourceType.TOPIC


class Scene:
    """A link between A and B, which are connected. ``steps``: attached and detached where, in order."""

    def __init__(self) -> None:
        self.replicas = Replicas(random.Random(1), 1)
        self.steps: list[tuple[str, str]] = []
        self.fails: dict[str, type[Body]] = {}
        """By cluster: the command that its control log does not take."""
        for name, control in self.replicas.controls.items():
            self._watch(name, control)

    def _watch(self, name: str, control: Any) -> None:
        append = control.append

        async def watched(body: Body) -> Outcome:
            if isinstance(body, self.fails.get(name, ())):
                raise BrokerUnavailable("the control log does not answer")
            outcome: Outcome = await append(body)
            if isinstance(body, AttachNamespace | DetachNamespace):
                self.steps.append((name, body.KIND.partition("-")[0]))
            return outcome

        control.append = watched

    def end(self, which: str) -> End:
        return self.replicas.ends[which]

    async def attach(self, request: links.Attach, **more: Any) -> links.AttachResult:
        """By the side that the request is for: A leads."""
        which = "A" if request.role == "leader" else "B"
        asked = request.model_copy(update=more)
        found: links.AttachResult = await self.end(which).parts.service.attach(LINK, asked)
        return found

    async def detach(self, which: str, local_only: bool = False) -> None:
        await self.end(which).parts.service.detach(LINK, "m-" if which == "A" else "s-", local_only=local_only)

    def attached(self, prefixes: tuple[str, str] = ("m-", "s-"), kind: ResourceType = TOPIC) -> str:
        """The sides at which the pair is attached."""
        states = ((name, self.replicas.controls[name].state.links[LINK]) for name in "AB")
        return "".join(name for (name, link), own in zip(states, prefixes, strict=True) if link.mapping(kind, own))

    def is_reserved(self) -> bool:
        """Whether no client may write what follows at B."""
        namespace = self.replicas.controls["B"].state.namespaces.get(NamespaceKey(TOPIC, "s-"))
        return namespace is not None and namespace.reserved

    def seen(self) -> object:
        """All that attaching may change."""
        clusters = {name: [dict(topic.configs) for topic in each.found.values()] for name, each in self.clusters}
        states = {name: (control.state.links, control.state.namespaces) for name, control in self.controls}
        return clusters, states, [dict(each.cluster_configs) for _, each in self.clusters]

    @property
    def clusters(self) -> list[tuple[str, Any]]:
        return [("A", self.replicas.a), ("B", self.replicas.b)]

    @property
    def controls(self) -> list[tuple[str, Any]]:
        return list(self.replicas.controls.items())


async def connected_again(scene: Scene) -> None:
    await scene.replicas.connect()
    await scene.replicas.until("connected", lambda: all(scene.end(name).peers.live for name in "AB"))


def on_link(work: Callable[[Scene], Awaitable[None]]) -> None:
    async def run() -> None:
        scene = Scene()
        scene.replicas.start()
        await connected_again(scene)
        await work(scene)
        await scene.replicas.stop()

    run_simulated(run())


async def refused(work: Awaitable[object], code: str, said: str | None = None) -> OperationError:
    with pytest.raises(OperationError, match=said) as raised:
        await work
    assert raised.value.code == code
    return raised.value


# ---- both ends ----


@pytest.mark.parametrize("request_", [LEADS, FOLLOWS], ids=["leader", "follower"])
def test_the_follower_is_attached_before_the_leader_and_detached_after_it_whoever_asks(request_: links.Attach) -> None:
    async def work(scene: Scene) -> None:
        source = scene.replicas.a.add_topic("m-t").partitions[0]
        source.write_values(b"x", b"y")
        result = await scene.attach(request_)
        assert [(each.topic, each.action) for each in result.topics] == [("s-t", "create")]
        assert scene.steps == [("B", "attach"), ("A", "attach")], "else clients might write what records come into"
        assert scene.is_reserved()
        await scene.replicas.until("copied", lambda: "s-t" in scene.replicas.b.found and copy_end(scene) == 2)
        await scene.attach(request_)  # again: nothing happens
        assert scene.attached() == "AB"
        scene.steps.clear()
        source.write_values(b"z")
        await scene.detach("A" if request_ is FOLLOWS else "B")
        assert scene.steps == [("A", "detach"), ("B", "detach")]
        assert scene.attached() == ""
        history = scene.replicas.controls["B"].state.histories["s-t"].partitions[0]
        assert history[-1].end_offset == copy_end(scene), "where it stopped is known"
        assert scene.is_reserved(), "nobody has decided that clients may write it"

    on_link(work)


@pytest.mark.parametrize("request_", [LEADS, FOLLOWS], ids=["leader", "follower"])
def test_a_dry_run_says_which_settings_would_be_refused(request_: links.Attach) -> None:
    async def work(scene: Scene) -> None:
        a, b = scene.replicas.a, scene.replicas.b
        for cluster in (a, b):
            cluster.defaults |= {"segment.bytes": "1073741824"}
        for name in ("new", "there", "lost"):
            a.add_topic("m-" + name, configs={"segment.bytes": "100000"})
        a.add_topic("m-fine", configs={"segment.bytes": "5000000"})
        a.add_topic("m-never")
        b.add_topic("s-there")
        b.add_topic("s-lost").partitions[0].write_values(b"other")
        b.policy = lambda topic, name, value: (
            "no such names" if topic == "s-never" else "too small" if value == "100000" else None
        )
        before = scene.seen()
        result = await scene.attach(request_, dry_run=True, truncate_target=True)
        assert scene.seen() == before
        told = {each.topic: (each.action, each.settings_refused, each.reason) for each in result.topics}
        why = "the target refuses settings of s-{} (segment.bytes): POLICY_VIOLATION: too small"
        assert told == {
            "s-new": ("create", why.format("new"), None),
            "s-there": ("follow", why.format("there"), None),
            "s-lost": ("truncate", why.format("lost"), None),
            "s-fine": ("create", None, None),
            "s-never": ("create", None, "the target refuses the topic: POLICY_VIOLATION: no such names"),
        }

    on_link(work)


def copy_end(scene: Scene) -> int:
    end: int = scene.replicas.b.partition("s-t").end
    return end


@pytest.mark.parametrize("request_", [LEADS, FOLLOWS], ids=["leader", "follower"])
def test_a_dry_run_tells_what_would_be_and_changes_nothing(request_: links.Attach) -> None:
    async def work(scene: Scene) -> None:
        scene.replicas.a.add_topic("m-new")
        scene.replicas.a.add_topic("m-full")
        scene.replicas.b.add_topic("s-full").partitions[0].write_values(b"somebody's")
        before = scene.seen()
        told = await scene.attach(request_, dry_run=True, disable_transaction_verification=True)
        plans = {each.topic: (each.action, each.records_lost) for each in told.topics}
        assert plans == {"s-new": ("create", 0), "s-full": ("refuse", 1)}
        assert told.transaction_verification is not None
        assert told.transaction_verification.action == "disable"
        agreed = await scene.attach(request_, dry_run=True, truncate_target=True)
        assert {each.topic: each.action for each in agreed.topics}["s-full"] == "truncate"
        assert scene.seen() == before
        assert not scene.steps

    on_link(work)


@pytest.mark.parametrize("request_", [LEADS, FOLLOWS], ids=["leader", "follower"])
def test_a_topic_that_holds_other_records_keeps_everything_from_being_attached(request_: links.Attach) -> None:
    async def work(scene: Scene) -> None:
        for name in ("m-a", "m-b", "m-c"):
            scene.replicas.a.add_topic(name)
        for name in ("s-a", "s-b"):
            scene.replicas.b.add_topic(name).partitions[0].write_values(b"somebody's")
        error = await refused(scene.attach(request_), ReasonCode.TARGET_TOPIC_NOT_EMPTY)
        assert "s-a exists" in error.message
        assert "s-b exists" in error.message
        assert (error.http_status, scene.attached(), scene.steps) == (409, "", [])
        assert [scene.replicas.b.partition(name).end for name in ("s-a", "s-b")] == [1, 1]

    on_link(work)


@pytest.mark.parametrize("request_", [LEADS, FOLLOWS], ids=["leader", "follower"])
def test_what_is_agreed_to_counts_at_the_follower_whichever_side_is_asked(request_: links.Attach) -> None:
    async def work(scene: Scene) -> None:
        scene.replicas.a.add_topic("m-t")
        topic = scene.replicas.b.add_topic("s-t")
        topic.partitions[0].write_values(b"somebody's")
        await scene.attach(request_, truncate_target=True, disable_transaction_verification=True)
        assert scene.attached() == "AB"
        (mapping,) = (each for each in mappings(scene) if each.local_prefix == "s-")
        assert mapping.truncate_topic_ids == (str(uuid.UUID(bytes=topic.topic_id)),), "and none that comes later"
        assert list(scene.replicas.b.cluster_configs.values()) == ["false"]
        assert not scene.replicas.a.cluster_configs
        await scene.replicas.until("emptied", lambda: scene.replicas.b.found.get("s-t") not in (None, topic))
        await scene.replicas.until("follows", lambda: scene.end("B").follower.streams())

    on_link(work)


def mappings(scene: Scene) -> list[Any]:
    return list(scene.replicas.controls["B"].state.links[LINK].mappings)


# ---- at both or at neither ----


@pytest.mark.parametrize("request_", [LEADS, FOLLOWS], ids=["leader", "follower"])
@pytest.mark.parametrize("where", ["A", "B"])
def test_where_one_end_cannot_record_it_the_other_has_not_either(request_: links.Attach, where: str) -> None:
    async def work(scene: Scene) -> None:
        scene.fails[where] = AttachNamespace
        with pytest.raises(OperationError, match="control log does not answer"):
            await scene.attach(request_)
        assert scene.attached() == ""
        scene.fails.clear()
        await scene.attach(request_)
        assert scene.attached() == "AB"

    on_link(work)


@pytest.mark.parametrize("request_", [LEADS, FOLLOWS], ids=["leader", "follower"])
def test_a_proxy_that_may_not_know_of_it_keeps_the_source_from_being_attached(request_: links.Attach) -> None:
    """Its clients could still write what the first records come into."""

    async def work(scene: Scene) -> None:
        control: Any = scene.replicas.controls["B"]
        enforced = control.enforced

        async def unknown(offset: int) -> None:
            raise BrokerUnavailable("not known of all proxies")

        control.enforced = unknown
        with pytest.raises(OperationError, match="not known of all proxies"):
            await scene.attach(request_)
        assert "A" not in scene.attached()
        control.enforced = enforced
        await scene.attach(request_)
        assert scene.attached() == "AB"

    on_link(work)


@pytest.mark.parametrize("request_", [LEADS, FOLLOWS], ids=["leader", "follower"])
def test_an_answer_that_was_lost_is_an_error_and_trying_again_heals_it(request_: links.Attach) -> None:
    async def work(scene: Scene) -> None:
        other: Any = scene.replicas.controls["B" if request_ is LEADS else "A"]
        append = other.append

        async def then_cut(body: Body) -> Outcome:
            outcome: Outcome = await append(body)
            if isinstance(body, AttachNamespace):
                scene.replicas.cut()
            return outcome

        other.append = then_cut
        error = await refused(scene.attach(request_), "UNAVAILABLE", "did not answer")
        assert error.http_status == 503
        other.append = append
        await refused(scene.attach(request_), "UNAVAILABLE", "is not connected")
        await connected_again(scene)
        await scene.attach(request_)
        assert scene.attached() == "AB"

    on_link(work)


def test_what_the_other_end_would_refuse_is_refused_before_anything_changes() -> None:
    async def work(scene: Scene) -> None:
        scene.replicas.controls["B"].apply(
            AttachNamespace(LINK, TOPIC, "s-", "elsewhere-", Role.FOLLOWER, create_missing=True)
        )
        before = scene.seen()
        with pytest.raises(OperationError, match="the other cluster refused"):
            await scene.attach(LEADS)
        with pytest.raises(OperationError):
            await scene.attach(LEADS, dry_run=True)
        assert scene.seen() == before

    on_link(work)


def test_what_the_own_end_would_refuse_is_refused_before_the_other_is_asked() -> None:
    async def work(scene: Scene) -> None:
        scene.replicas.controls["A"].apply(
            AttachNamespace(LINK, TOPIC, "m-", "elsewhere-", Role.LEADER, create_missing=True)
        )
        for dry_run in (True, False):
            with pytest.raises(OperationError):
                await scene.attach(LEADS, dry_run=dry_run)
        assert not scene.steps

    on_link(work)


def test_a_peer_is_told_of_the_topics_of_the_namespace_alone() -> None:
    async def work(scene: Scene) -> None:
        for name in ("m-t", "private", "__internal"):
            scene.replicas.a.add_topic(name, 2)
        (connection,) = scene.end("B").peers.connections(LINK)
        answer = await connection.call(calls.LedTopics("m-"))
        assert [(each.topic, each.partitions) for each in answer.topics] == [("m-t", 2)]

    on_link(work)


def test_consent_that_the_brokers_do_not_follow_is_told_and_the_source_is_not_attached() -> None:
    async def work(scene: Scene) -> None:
        cluster: Any = scene.replicas.b
        alter = cluster.alter_cluster_config

        async def refuse(name: str, value: str | None, validate_only: bool = False) -> None:
            if not validate_only:
                raise KafkaRefused(31, "CLUSTER_AUTHORIZATION_FAILED", "no")

        cluster.alter_cluster_config = refuse
        with pytest.raises(OperationError, match=r"attached, but transaction\.partition\..* is not set as agreed"):
            await scene.attach(FOLLOWS, disable_transaction_verification=True)
        assert "A" not in scene.attached()
        cluster.alter_cluster_config = alter
        await scene.attach(FOLLOWS, disable_transaction_verification=True)
        assert scene.attached() == "AB"

    on_link(work)


@pytest.mark.parametrize(("error", "code"), [(BrokerUnavailable("away"), 503), (KafkaRefused(29, "NO", "not so"), 409)])
@pytest.mark.parametrize("request_", [LEADS, FOLLOWS], ids=["leader", "follower"])
def test_brokers_that_do_not_say_what_is_there_keep_it_from_being_attached(
    request_: links.Attach, error: Exception, code: int
) -> None:
    async def work(scene: Scene) -> None:
        scene.replicas.a.add_topic("m-t")
        scene.replicas.b.add_topic("s-t")

        async def fail(*args: Any) -> Any:
            raise error

        scene.replicas.b.log_end = fail  # type: ignore[method-assign]
        with pytest.raises(OperationError, match=r"away|not so") as raised:
            await scene.attach(request_)
        assert raised.value.http_status == (409 if request_ is LEADS else code), "of a peer's refusal 409"
        assert scene.attached() == ""

    on_link(work)


# ---- groups and principals ----


def test_groups_are_not_attached_while_their_offsets_could_not_be_copied_and_a_plan_names_what_is_replaced() -> None:
    async def work(scene: Scene) -> None:
        of_group = {("s-t", 0): CommittedOffset(3, ""), ("own", 0): CommittedOffset(4, "")}
        scene.replicas.b.offsets["h-1"] = dict(of_group)
        scene.replicas.b.offsets["other"] = dict(of_group)
        await refused(scene.attach(GROUPS), ReasonCode.TRANSACTION_VERIFICATION_ENABLED)
        assert scene.attached(("g-", "h-"), ResourceType.CONSUMER_GROUP) == ""
        scene.replicas.a.add_topic("m-t")
        await scene.attach(LEADS, disable_transaction_verification=True)
        told = await scene.attach(GROUPS, disable_transaction_verification=True)
        assert [(each.group, each.source_group, each.positions_replaced) for each in told.groups] == [("h-1", "g-1", 1)]
        assert scene.attached(("g-", "h-"), ResourceType.CONSUMER_GROUP) == "AB"

    on_link(work)


@pytest.mark.parametrize("where", ["A", "B"])
def test_principals_are_attached_where_both_clusters_let_their_bindings_be_seen_and_changed(where: str) -> None:
    async def work(scene: Scene) -> None:
        cluster = dict(scene.clusters)[where]
        cluster.acls_refused = KafkaRefused(54, "SECURITY_DISABLED", "no authorizer")
        await refused(scene.attach(PRINCIPALS), ReasonCode.NO_AUTHORIZER, f"cluster {where} has no authorizer")
        assert scene.attached(("User:a-", "User:b-"), ResourceType.PRINCIPAL) == ""
        assert not scene.steps
        cluster.acls_refused = None
        await scene.attach(PRINCIPALS, dry_run=True)
        assert not scene.steps
        await scene.attach(PRINCIPALS)
        assert scene.steps == [("B", "attach"), ("A", "attach")]

    on_link(work)


# ---- detaching ----


async def following(scene: Scene) -> None:
    scene.replicas.a.add_topic("m-t").partitions[0].write_values(b"x")
    await scene.attach(LEADS, disable_transaction_verification=True)
    await scene.replicas.until("copied", lambda: "s-t" in scene.replicas.b.found and copy_end(scene) == 1)


def test_without_a_connection_the_follower_stays_as_it_is_unless_its_end_alone_is_to_be_detached() -> None:
    """It may lack what was sent to it."""

    async def work(scene: Scene) -> None:
        await following(scene)
        scene.replicas.cut()
        await refused(scene.detach("B"), "UNAVAILABLE", "--local-only")
        assert scene.attached() == "AB"
        await scene.detach("B", local_only=True)
        assert scene.attached() == "A"
        await connected_again(scene)
        await scene.detach("A")
        assert scene.attached() == ""

    on_link(work)


def test_a_leader_that_is_detached_alone_leaves_a_follower_that_is_detached_later() -> None:
    async def work(scene: Scene) -> None:
        await following(scene)
        scene.replicas.cut()
        await scene.detach("A", local_only=True)
        assert scene.attached() == "B"
        assert scene.is_reserved()
        await connected_again(scene)
        await scene.detach("B")
        assert scene.attached() == ""

    on_link(work)


def test_what_was_detached_at_one_end_when_the_link_was_cut_is_detached_at_both_by_the_same_command() -> None:
    async def work(scene: Scene) -> None:
        await following(scene)
        scene.replicas.cut()
        await refused(scene.detach("A"), "UNAVAILABLE", "--local-only")
        assert scene.attached() == "B"
        await connected_again(scene)
        await scene.detach("A")
        assert scene.attached() == ""
        await refused(scene.detach("A"), "NOT_FOUND", "'m-' is not attached")

    on_link(work)


def test_log_ends_that_cannot_be_read_are_told_and_recorded_later() -> None:
    async def work(scene: Scene) -> None:
        await following(scene)
        cluster: Any = scene.replicas.b
        log_ends = cluster.log_ends

        async def away(places: Any) -> Any:
            raise BrokerUnavailable("the brokers are away")

        cluster.log_ends = away
        error = await refused(scene.detach("B"), "BROKER_UNAVAILABLE", "detached, but log ends not recorded")
        assert error.http_status == 503
        assert scene.attached() == ""
        state = scene.replicas.controls["B"].state
        assert state.histories["s-t"].partitions[0][-1].end_offset is None
        cluster.log_ends = log_ends
        topics = await cluster.topics()
        stopped = [(state.follower_topics["s-t"], topics["s-t"])]
        await scene.end("B").parts.service.attaching.stopped_to_follow(stopped, Ended.DETACHED)
        state = scene.replicas.controls["B"].state
        assert state.histories["s-t"].partitions[0][-1].end_offset == 1

    on_link(work)


def test_the_brokers_check_of_transactions_comes_back_with_the_last_that_needed_it_off() -> None:
    async def work(scene: Scene) -> None:
        await following(scene)
        cluster: Any = scene.replicas.b
        assert list(cluster.cluster_configs.values()) == ["false"]
        alter = cluster.alter_cluster_config

        async def refuse(*args: Any, **more: Any) -> None:
            raise KafkaRefused(31, "CLUSTER_AUTHORIZATION_FAILED", "no")

        cluster.alter_cluster_config = refuse
        with pytest.raises(OperationError, match=r"detached, but transaction\.partition\..* is not set"):
            await scene.detach("B")
        assert scene.attached() == ""
        assert list(cluster.cluster_configs.values()) == ["false"]
        cluster.alter_cluster_config = alter
        await scene.replicas.until("by itself", lambda: not cluster.cluster_configs)

    on_link(work)


def test_what_is_not_attached_cannot_be_detached() -> None:
    async def work(scene: Scene) -> None:
        error = await refused(scene.detach("A"), "NOT_FOUND", "'m-' is not attached")
        assert error.http_status == 404
        await refused(scene.end("A").parts.service.detach("no-link", "m-"), "NOT_FOUND", "links here: a-to-b")

    on_link(work)


@pytest.mark.parametrize("side", ["A", "B"])
def test_what_becomes_of_what_the_source_loses_is_set_from_either_side(side: str) -> None:
    async def work(scene: Scene) -> None:
        await following(scene)
        local, remote, role = ("m-", "s-", "leader") if side == "A" else ("s-", "m-", "follower")
        service = scene.end(side).parts.service

        def now() -> str | None:
            mappings = scene.end("B").parts.service.status(LINK).mappings
            return next(mapping.on_source_loss for mapping in mappings if mapping.local == "s-")

        assert now() is None
        for wanted, then in (("hold", "hold"), (None, "hold"), ("cut", "cut")):
            request = links.Attach(
                local=local,
                remote=remote,
                role=role,  # type: ignore[arg-type]
                on_source_loss=wanted,  # type: ignore[arg-type]
                disable_transaction_verification=True,
            )
            await service.attach(LINK, request)
            assert now() == then
        await service.alter_mapping(LINK, links.AlterMapping(local=local, on_source_loss="hold"))
        assert now() == "hold"
        await service.alter_mapping(LINK, links.AlterMapping(local=local, on_source_delete="delete"))
        (pair,) = (each for each in scene.end("B").parts.service.status(LINK).mappings if each.local == "s-")
        assert (pair.on_source_loss, pair.on_source_delete) == ("hold", "delete")
        nothing = links.AlterMapping(local="nothing-", on_source_loss="hold")
        await refused(service.alter_mapping(LINK, nothing), "NOT_FOUND", "'nothing-' is not attached")
        if side == "A":
            for connection in scene.end("A").peers.live:
                connection.peer["features"] = []  # an older one, which would not do it
            await refused(service.attach(LINK, request), "PEER_VERSION_UNSUPPORTED", "upgrade")
        principals = links.Attach(
            local="User:a", remote="User:b", role="leader", type="principal", on_source_loss="cut"
        )
        await refused(service.attach(LINK, principals), "INVALID", "leave it out")

    on_link(work)


def test_acks_of_topics_that_come_wait_when_the_command_returns() -> None:
    async def work(two: Two) -> None:
        await two.create()
        await two.connected()
        await two.a.links.attach(LINK, LEADS)
        await two.a.links.set_mode(LINK, links.SetMode(mode="synchronous"))
        leader_end = two.a.plugin.parts.leader_end
        await two.until("they wait", lambda: leader_end.holds_from_first(LINK, None))
        await two.b.links.attach(LINK, links.Attach(local="more-", remote="more-", role="follower"))
        assert two.a.plugin.parts.sync.partitions.new.is_ready(LINK, "more-")

    on_two(work)
