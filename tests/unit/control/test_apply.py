"""The rules of namespaces, links, follower topics, provenance, producer ids and leases."""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import Any

import pytest
from support.command_log import CommandLog

from isthmus_control import apply as rules
from isthmus_control import commands as c
from isthmus_control.apply import apply
from isthmus_control.clock import Hlc, Register
from isthmus_control.codec import canonical, from_json, parse
from isthmus_control.control_state import ControlState
from isthmus_control.levels import ORIGINS
from isthmus_control.model import (
    TRANSACTION_VERIFICATION,
    AgreedCut,
    BrokerClaim,
    LinkMode,
    LinkSettings,
    NamespaceKey,
    ProvenanceRange,
    Reason,
    ResourceType,
    Role,
    SourceEpoch,
    TopicState,
)
from isthmus_control.outcome import (
    Accepted,
    Duplicate,
    FollowerTopicChanged,
    LeaseChanged,
    LinkChanged,
    NamespaceAttached,
    NamespaceChanged,
    NamespaceDetached,
    Outcome,
    ProvenanceChanged,
    Rejected,
    Rejection,
)
from isthmus_protocol.producer_ids import CLUSTERS_MAX

TOPIC, GROUP = ResourceType.TOPIC, ResourceType.CONSUMER_GROUP
LEADER, FOLLOWER = Role.LEADER, Role.FOLLOWER


def uid() -> str:
    return str(uuid.uuid4())


class Log(CommandLog):
    """A log of one proxy, applied as it is written; each command is made a millisecond later."""

    def __init__(self, cluster_id: str = "A") -> None:
        super().__init__(cluster_id)
        self.now_ms = 1_000

    @property
    def at_ms(self) -> int:
        return self.now_ms

    def do(self, body: c.Body, **envelope: Any) -> Outcome:
        self.now_ms += 1
        return super().do(body, **envelope)

    def refused(self, body: c.Body, code: Rejection, *words: str, **envelope: Any) -> str:
        before = self.state
        outcome = self.do(body, **envelope)
        assert isinstance(outcome, Rejected), outcome
        assert outcome.code is code, outcome
        for word in words:
            assert word in outcome.message
        bookkeeping = {
            name: getattr(self.state, name)
            for name in ("applied_offset", "recent_ids", "recent_offsets", "forgotten_offset")
        }
        assert self.state == before.evolve(**bookkeeping)
        return outcome.message

    def link(self, name: str = "a-to-b", remote: str = "B") -> None:
        self.ok(c.CreateLink(name, uid(), remote, True, ("b:9192",)))

    def attach(self, link: str, local: str, remote: str, role: Role, kind: ResourceType = TOPIC) -> tuple[Any, ...]:
        return self.ok(c.AttachNamespace(link, kind, local, remote, role, create_missing=True))


# --- namespaces


def test_namespace_life() -> None:
    log = Log()
    (created,) = log.ok(c.CreateNamespace(TOPIC, "orders-"))
    assert created == NamespaceChanged(None, log.state.namespace(TOPIC, "orders-"))
    assert not created.after.reserved

    (altered,) = log.ok(c.AlterNamespace(TOPIC, "orders-", True))
    assert altered.after.reserved
    assert altered.after.reserved_at_offset == log.state.applied_offset
    assert altered.after.reserved_reason == "reserved by the operator"
    assert log.ok(c.AlterNamespace(TOPIC, "orders-", True)) == ()

    at = altered.after.reserved_at_offset
    (renamed,) = log.ok(c.AlterNamespace(TOPIC, "orders-", True, "frozen for the move"))
    assert (renamed.after.reserved_reason, renamed.after.reserved_at_offset) == ("frozen for the move", at)

    (cleared,) = log.ok(c.AlterNamespace(TOPIC, "orders-", False))
    assert (cleared.after.reserved, cleared.after.reserved_at_offset) == (False, None)
    assert log.ok(c.AlterNamespace(TOPIC, "orders-", False)) == ()
    (again,) = log.ok(c.AlterNamespace(TOPIC, "orders-", True))
    assert again.after.reserved_at_offset > at

    assert log.ok(c.DeleteNamespace(TOPIC, "orders-")) == (NamespaceChanged(again.after, None),)
    assert log.state.namespaces == {}


def test_namespace_errors() -> None:
    log = Log()
    log.ok(c.CreateNamespace(TOPIC, "orders-"))
    log.refused(c.CreateNamespace(TOPIC, "orders-"), Rejection.ALREADY_EXISTS, "topic namespace 'orders-'")
    log.ok(c.CreateNamespace(GROUP, "orders-"))  # another type is another namespace
    log.ok(c.CreateNamespace(GROUP, "any thing: goes"))
    log.refused(c.CreateNamespace(TOPIC, "a b"), Rejection.INVALID, "'a b'")
    log.refused(c.CreateNamespace(TOPIC, "__isthmus_x"), Rejection.INVALID, "internal")
    log.refused(c.CreateNamespace(TOPIC, "__consumer_offsets"), Rejection.INVALID, "internal")
    log.refused(c.CreateNamespace(TOPIC, "x" * 250), Rejection.INVALID)
    log.refused(c.CreateNamespace(TOPIC, "x", reason="why"), Rejection.INVALID, "reason")
    log.refused(c.AlterNamespace(TOPIC, "x", True), Rejection.NOT_FOUND, "'x'")
    log.refused(c.AlterNamespace(TOPIC, "orders-", False, "why"), Rejection.INVALID)
    log.refused(c.DeleteNamespace(TOPIC, "x"), Rejection.NOT_FOUND)


# --- links


def test_link_life() -> None:
    log = Log()
    link_id = uid()
    create = c.CreateLink("a-to-b", link_id, "B", True, ("b1:9192", "[::1]:9192"), ("a:1",))
    (created,) = log.ok(create)
    link = log.state.links["a-to-b"]
    assert created == LinkChanged(None, link)
    assert (link.local_cluster_id, link.remote_cluster_id, link.mode) == ("A", "B", LinkMode.ASYNCHRONOUS)
    assert link.remote_addresses == ("b1:9192", "[::1]:9192")
    assert link.local_addresses == ("a:1",)
    assert log.ok(create) == ()  # the same set-up again

    (altered,) = log.ok(c.AlterLink("a-to-b", remote_addresses=("b2:1",), config={"follower.replication.factor": "2"}))
    assert altered.after.remote_addresses == ("b2:1",)
    assert altered.after.config == {"follower.replication.factor": "2"}
    assert log.ok(c.AlterLink("a-to-b", remote_addresses=("b2:1",))) == ()
    (removed,) = log.ok(c.AlterLink("a-to-b", config={"follower.replication.factor": None}))
    assert removed.after.config == {}

    (deleted,) = log.ok(c.DeleteLink("a-to-b"))
    assert deleted.after is None
    log.refused(c.DeleteLink("a-to-b"), Rejection.NOT_FOUND, "'a-to-b'")
    assert link.number == 0
    log.link()
    assert log.state.links["a-to-b"].number == 1  # never given again


def test_link_errors() -> None:
    log = Log()
    log.link()
    base = c.CreateLink("x", uid(), "B", True, ("b:1",))
    log.refused(replace(base, name="a-to-b"), Rejection.ALREADY_EXISTS, "'a-to-b'", "B")
    twin = log.state.links["a-to-b"].link_id
    log.refused(replace(base, link_id=twin), Rejection.ALREADY_EXISTS, "'a-to-b'")
    log.refused(replace(base, name="a b"), Rejection.INVALID)
    log.refused(replace(base, link_id="1"), Rejection.INVALID, "UUID")
    log.refused(replace(base, remote_cluster_id="A"), Rejection.INVALID, "same cluster")
    log.refused(replace(base, remote_cluster_id=""), Rejection.INVALID)
    log.refused(replace(base, remote_addresses=()), Rejection.INVALID, "dials")
    for wrong in ("b", "b:0", "b:70000", "kafka://b:1", "a b:1", "u@b:1", ":1", "b:1\n"):
        log.refused(replace(base, remote_addresses=(wrong,)), Rejection.INVALID, "address")
    log.refused(replace(base, mode=LinkMode.SYNCHRONOUS), Rejection.INVALID, "asynchronous")
    log.refused(replace(base, config={"x": "1"}), Rejection.INVALID, "follower.replication.factor")
    log.refused(replace(base, config={"follower.replication.factor": "0"}), Rejection.INVALID, "'0'")
    log.refused(c.AlterLink("x"), Rejection.NOT_FOUND)
    log.refused(c.AlterLink("a-to-b", remote_addresses=()), Rejection.INVALID, "dials")
    log.ok(c.AlterLink("a-to-b", remote_addresses=(), dials=False))


def test_mirrored_settings_merge_and_move_the_clock() -> None:
    log = Log()
    log.link()
    link = log.state.links["a-to-b"]
    peer_clock = Hlc(50_000, 3, "B")
    theirs = LinkSettings(link.settings.mode, {"B": Register(("new:1",), peer_clock)}, {})
    (merged,) = log.ok(c.MergeLink("a-to-b", link.link_id, theirs))
    assert merged.after.remote_addresses == ("new:1",)
    assert log.state.clock == peer_clock
    assert log.ok(c.MergeLink("a-to-b", link.link_id, theirs)) == ()
    # A write here after having seen theirs is later than theirs, whatever our wall clock says.
    log.ok(c.AlterLink("a-to-b", remote_addresses=("newer:1",)), at_ms=2_000)
    assert log.ok(c.MergeLink("a-to-b", link.link_id, theirs)) == ()
    assert log.state.links["a-to-b"].remote_addresses == ("newer:1",)

    log.refused(c.MergeLink("a-to-b", uid(), theirs), Rejection.CONFLICT, "created again")
    third = replace(theirs, addresses={"C": Register(("c:1",), peer_clock)})
    log.refused(c.MergeLink("a-to-b", link.link_id, third), Rejection.INVALID, "third")
    broken = replace(theirs, mode=Register(LinkMode.ASYNCHRONOUS, Hlc(2**60, 0, "B")))
    log.refused(c.MergeLink("a-to-b", link.link_id, broken), Rejection.INVALID, "time")


def test_both_sides_converge_on_the_later_write() -> None:
    a, b = Log("A"), Log("B")
    link_id = uid()
    a.ok(c.CreateLink("l", link_id, "B", True, ("b:1",), ("a:1",)))
    b.ok(c.CreateLink("l", link_id, "A", False, ("a:1",), ("b:1",)))
    # Apart: both change both addresses.
    a.ok(c.AlterLink("l", remote_addresses=("b:2",), local_addresses=("a:2",)), at_ms=5_000)
    b.ok(c.AlterLink("l", remote_addresses=("a:3",), local_addresses=("b:3",)), at_ms=6_000)
    from_a, from_b = a.state.links["l"].settings, b.state.links["l"].settings
    a.ok(c.MergeLink("l", link_id, from_b))
    b.ok(c.MergeLink("l", link_id, from_a))
    assert a.state.links["l"].settings == b.state.links["l"].settings
    assert a.state.links["l"].remote_addresses == ("b:3",)
    assert b.state.links["l"].remote_addresses == ("a:3",)


# --- attaching


def test_following_reserves_and_detaching_leaves_reserved() -> None:
    log = Log()
    log.link()
    log.ok(c.CreateNamespace(TOPIC, "remote-"))
    changed, attached = log.attach("a-to-b", "remote-", "local-", FOLLOWER)
    at = log.state.applied_offset
    assert (changed.after.reserved, changed.after.reserved_at_offset) == (True, at)
    assert isinstance(attached, NamespaceAttached)
    log.refused(c.AlterNamespace(TOPIC, "remote-", False), Rejection.CONFLICT, "'a-to-b'", "detach it first")
    log.refused(c.DeleteNamespace(TOPIC, "remote-"), Rejection.CONFLICT, "'a-to-b'")
    assert log.ok(c.AlterNamespace(TOPIC, "remote-", True, "mine")) == ()

    detached, left = log.ok(c.DetachNamespace("a-to-b", TOPIC, "remote-"))
    assert isinstance(detached, NamespaceDetached)
    assert (left.after.reserved, left.after.reserved_at_offset) == (True, at)
    assert "'a-to-b'" in left.after.reserved_reason
    log.refused(c.DetachNamespace("a-to-b", TOPIC, "remote-"), Rejection.NOT_FOUND, "not attached")
    (cleared,) = log.ok(c.AlterNamespace(TOPIC, "remote-", False))
    assert not cleared.after.reserved


def test_leading_does_not_reserve() -> None:
    log = Log()
    log.link()
    log.attach("a-to-b", "local-", "remote-", LEADER)
    namespace = log.state.namespace(TOPIC, "local-")
    assert namespace is not None
    assert not namespace.reserved
    log.ok(c.AlterNamespace(TOPIC, "local-", True))  # the first step of a reversal
    (detached,) = log.ok(c.DetachNamespace("a-to-b", TOPIC, "local-"))
    assert isinstance(detached, NamespaceDetached)


def test_deleting_a_link_detaches_everything_and_keeps_reservations() -> None:
    log = Log()
    log.link()
    log.attach("a-to-b", "in-", "in-", FOLLOWER)
    log.attach("a-to-b", "out-", "out-", LEADER)
    changes = log.ok(c.DeleteLink("a-to-b"))
    assert [type(change) for change in changes] == [
        NamespaceDetached,
        NamespaceChanged,
        NamespaceDetached,
        LinkChanged,
    ]
    namespace = log.state.namespace(TOPIC, "in-")
    assert namespace is not None
    assert namespace.reserved
    log.ok(c.DeleteNamespace(TOPIC, "in-"))


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        # (link, local, remote, role): one following link at most, overlap counted.
        (("b1", "x-", "x-", FOLLOWER), ("c", "x-", "y-", FOLLOWER), ("follows one link at most", "'b1'")),
        (("b1", "x-", "x-", FOLLOWER), ("c", "x-a-", "y-", FOLLOWER), ("follows one link at most",)),
        (("b1", "x-a-", "x-", FOLLOWER), ("c", "x-", "y-", FOLLOWER), ("follows one link at most",)),
        (("b1", "", "x-", FOLLOWER), ("c", "x-", "y-", FOLLOWER), ("follows one link at most",)),
        # a name has one counterpart on a link, and one origin in the other cluster.
        (("b1", "x-", "x-", LEADER), ("b1", "x-a-", "y-", LEADER), ("two counterparts",)),
        (("b1", "x-", "z-", LEADER), ("b1", "y-", "z-", LEADER), ("would meet there",)),
        (("b1", "x-", "z-", LEADER), ("b2", "y-", "z-a", LEADER), ("would meet there", "'b1'")),
        # what comes from a cluster does not go back.
        (("b1", "x-", "x-", FOLLOWER), ("b1", "x-a-", "y-", LEADER), ("would go back",)),
        (("b1", "x-", "x-", LEADER), ("b1", "x-a-", "y-", FOLLOWER), ("would go back",)),
        (("b1", "x-", "x-", FOLLOWER), ("b2", "x-", "x-", LEADER), ("would go back", "'b1'")),
        (("b1", "", "a.", LEADER), ("b2", "b.", "", FOLLOWER), ("would go back",)),
    ],
)
def test_mappings_that_cannot_stand_together(first: Any, second: Any, words: tuple[str, ...]) -> None:
    for one, two in ((first, second), (second, first)):
        log = Log()
        log.link("b1", "B")
        log.link("b2", "B")
        log.link("c", "C")
        log.attach(*one)
        link, local, remote, role = two
        body = c.AttachNamespace(link, TOPIC, local, remote, role, create_missing=True)
        log.refused(body, Rejection.CONFLICT, *(words if one is first else ()))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("b1", "x-", "x-", LEADER), ("c", "x-", "x-", LEADER)),  # leads many
        (("b1", "x-", "x-", FOLLOWER), ("c", "x-", "x-", LEADER)),  # a chain
        (("b1", "a.", "a.", LEADER), ("b1", "b.", "b.", FOLLOWER)),  # active-active
        (("b1", "", "x-", FOLLOWER), ("c", "_x", "y-", FOLLOWER)),  # the empty prefix leaves underscores out
        (("b1", "x-", "x-", LEADER), ("b2", "x-", "y-", LEADER)),  # two links, two names there
        (("b1", "x-", "x-", FOLLOWER), ("b2", "x-", "y-", LEADER)),  # back under a name that does not return
    ],
)
def test_mappings_that_can(first: Any, second: Any) -> None:
    for one, two in ((first, second), (second, first)):
        log = Log()
        log.link("b1", "B")
        log.link("b2", "B")
        log.link("c", "C")
        log.attach(*one)
        log.attach(*two)


def test_types_do_not_overlap() -> None:
    log = Log()
    log.link("b", "B")
    log.link("c", "C")
    log.attach("b", "x-", "x-", FOLLOWER)
    log.attach("c", "x-", "x-", FOLLOWER, GROUP)


def test_attach_again_and_consent() -> None:
    log = Log()
    log.link()
    attach = c.AttachNamespace("a-to-b", TOPIC, "in-", "in-", FOLLOWER)
    log.refused(attach, Rejection.NOT_FOUND, "create it first")
    log.ok(replace(attach, create_missing=True))
    first = log.state.links["a-to-b"].mappings[0]
    assert log.ok(attach) == ()
    log.refused(replace(attach, remote_prefix="other-"), Rejection.CONFLICT, "'in-'")
    log.refused(replace(attach, role=LEADER), Rejection.CONFLICT, "follower")
    agreed = (uid(),)
    (consent,) = log.ok(replace(attach, truncate_topic_ids=agreed))
    assert consent.mapping == replace(first, truncate_topic_ids=agreed)
    log.refused(c.AttachNamespace("a-to-b", TOPIC, "out-", "out-", LEADER, agreed, True), Rejection.INVALID, "truncate")
    log.refused(replace(attach, truncate_topic_ids=("t",)), Rejection.INVALID, "UUID")
    log.refused(replace(attach, link="x"), Rejection.NOT_FOUND)
    log.refused(replace(attach, remote_prefix="__isthmus_"), Rejection.INVALID)


def test_what_was_agreed_to_be_cut_is_not_taken_back_before_it_is() -> None:
    log = Log()
    log.ok(c.RaiseLevel(ORIGINS))
    log.link()
    attach = c.AttachNamespace("a-to-b", TOPIC, "in-", "in-", FOLLOWER, create_missing=True)
    ours, other = uid(), uid()
    cuts = (AgreedCut(ours, "word"), AgreedCut(other, "word"))
    log.ok(replace(attach, cuts=cuts))
    log.ok(c.SetFollowerTopic("a-to-b", "in-t", "in-t", uid(), TopicState.FOLLOWING, ours))

    def agreed() -> tuple[AgreedCut, ...]:
        return log.state.links["a-to-b"].mappings[0].cuts

    log.ok(attach)
    assert agreed() == cuts[:1], "the topic follows once it is cut"
    log.ok(replace(attach, cuts=(AgreedCut(ours, "another"),)))
    assert agreed() == (AgreedCut(ours, "another"),)
    log.refused(replace(attach, cuts=(AgreedCut("t", "word"),)), Rejection.INVALID, "UUID")
    log.refused(replace(attach, cuts=(AgreedCut(ours, ""),)), Rejection.INVALID, "no token")
    leads = c.AttachNamespace("a-to-b", TOPIC, "out-", "out-", LEADER, create_missing=True)
    log.refused(replace(leads, cuts=cuts), Rejection.INVALID, "cut")


def test_what_was_led_follows_by_one_command_where_the_other_side_was_failed_over() -> None:
    log = Log()
    log.ok(c.RaiseLevel(ORIGINS))
    log.link()
    log.attach("a-to-b", "in-", "there-", LEADER)
    back = c.AttachNamespace("a-to-b", TOPIC, "in-", "there-", FOLLOWER)
    log.refused(back, Rejection.CONFLICT, "detach it first")
    log.refused(replace(back, remote_prefix="other-", recovers=True), Rejection.CONFLICT, "detach it first")
    log.ok(replace(back, recovers=True))
    (mapping,) = log.state.links["a-to-b"].mappings
    assert (mapping.local_prefix, mapping.remote_prefix, mapping.role) == ("in-", "there-", FOLLOWER)
    assert log.state.namespaces[NamespaceKey(TOPIC, "in-")].reserved
    assert log.ok(replace(back, recovers=True)) == (), "again"
    log.refused(replace(back, role=LEADER, recovers=True), Rejection.CONFLICT, "follower")


def test_a_broker_setting_is_held_while_a_mapping_agrees() -> None:
    log = Log()
    log.link()
    attach = c.AttachNamespace("a-to-b", TOPIC, "in-", "in-", FOLLOWER, create_missing=True)
    agreed = replace(attach, disable_transaction_verification=True)
    hold = c.HoldBrokerConfig(TRANSACTION_VERIFICATION, "false", None)
    log.ok(attach)
    log.refused(hold, Rejection.CONFLICT, "consent")
    log.ok(agreed)
    (change,) = log.ok(hold)
    assert (change.before, change.after.former) == (None, None)
    assert log.ok(replace(hold, former="false")) == ()  # another proxy saw what the first one had set
    assert log.state.held_configs[TRANSACTION_VERIFICATION].former is None
    log.refused(replace(hold, name="log.retention.ms"), Rejection.INVALID, "log.retention.ms")
    release = c.ReleaseBrokerConfig(TRANSACTION_VERIFICATION)
    log.refused(release, Rejection.CONFLICT, "needs")
    log.ok(attach)  # the consent is taken back
    (change,) = log.ok(release)
    assert change.after is None
    assert log.ok(release) == ()
    wrong = c.AttachNamespace("a-to-b", TOPIC, "out-", "out-", LEADER, create_missing=True)
    log.refused(replace(wrong, disable_transaction_verification=True), Rejection.INVALID, "follower's side")


# --- follower topics and provenance


class Following(Log):
    """A log in which ``in-t`` follows on link ``b``."""

    def __init__(self) -> None:
        super().__init__()
        self.link("b", "B")
        self.attach("b", "in-", "out-", FOLLOWER)
        self.source_id, self.topic_id = uid(), uid()
        self.ok(self.topic(TopicState.CREATING))
        self.ok(self.topic(TopicState.FOLLOWING, topic_id=self.topic_id))

    def topic(self, state: TopicState, **more: Any) -> c.SetFollowerTopic:
        return c.SetFollowerTopic("b", "in-t", "out-t", self.source_id, state, **more)

    def at(self, offset: int, partition: int = 0) -> tuple[c.PartitionOffset, ...]:
        return (c.PartitionOffset("in-t", self.topic_id, partition, offset),)

    def epoch(self, epoch: int, start: int, partition: int = 0) -> c.RecordSourceEpochs:
        return c.RecordSourceEpochs((c.PartitionEpoch("in-t", self.topic_id, partition, epoch, start),))

    @property
    def ranges(self) -> list[tuple[str, int, int | None]]:
        return [(r.source_cluster_id, r.start_offset, r.end_offset) for r in self.state.provenance("in-t", 0)]


def test_follower_topic_life() -> None:
    log = Following()
    assert log.ok(log.topic(TopicState.FOLLOWING, topic_id=log.topic_id)) == ()
    log.refused(log.topic(TopicState.CREATING), Rejection.CONFLICT, "'in-t'", "following")
    log.refused(log.topic(TopicState.FOLLOWING), Rejection.INVALID, "topic id")
    log.refused(log.topic(TopicState.REFUSED), Rejection.INVALID, "reason")
    reason = Reason("SOURCE_TOPIC_ID_CHANGED", "created again")
    (change,) = log.ok(log.topic(TopicState.REFUSED, reason=reason))
    assert (change.after.topic_id, change.after.reason) == (log.topic_id, reason)
    wrong = replace(log.topic(TopicState.CREATING), source_topic="out-u")
    log.refused(wrong, Rejection.CONFLICT, "no mapping says so")
    log.refused(replace(wrong, topic="x"), Rejection.CONFLICT)
    log.refused(log.topic(TopicState.DETACHED), Rejection.CONFLICT)

    _, _, detached = log.ok(c.DetachNamespace("b", TOPIC, "in-"))
    assert detached.after.state is TopicState.DETACHED
    log.refused(log.topic(TopicState.FOLLOWING, topic_id=log.topic_id), Rejection.CONFLICT, "no mapping says so")
    log.attach("b", "in-", "out-", FOLLOWER)
    (again,) = log.ok(log.topic(TopicState.FOLLOWING, topic_id=log.topic_id))
    assert again.before.state is TopicState.DETACHED


def test_topics_stay_when_groups_or_principals_are_detached() -> None:
    log = Following()
    for kind, prefix in ((GROUP, "in-"), (ResourceType.PRINCIPAL, "")):
        log.ok(c.AttachNamespace("b", kind, prefix, prefix, FOLLOWER, create_missing=True))
        log.ok(c.DetachNamespace("b", kind, prefix))
    assert log.state.follower_topics["in-t"].state is TopicState.FOLLOWING


def test_detaching_drops_what_was_only_intended() -> None:
    log = Following()
    log.ok(c.SetFollowerTopic("b", "in-u", "out-u", uid(), TopicState.CREATING))
    changes = log.ok(c.DeleteLink("b"))
    ended = {change.before.topic: change.after for change in changes if isinstance(change, FollowerTopicChanged)}
    assert ended["in-u"] is None
    assert ended["in-t"].state is TopicState.DETACHED
    assert set(log.state.follower_topics) == {"in-t"}
    log.ok(c.DeleteNamespace(TOPIC, "in-"))
    assert log.state.follower_topics == {}


def test_forgetting_a_topic() -> None:
    log = Following()
    log.refused(c.ForgetFollowerTopic("x", "in-t"), Rejection.CONFLICT, "'b'")
    (gone,) = log.ok(c.ForgetFollowerTopic("b", "in-t"))
    assert gone.after is None
    assert log.ok(c.ForgetFollowerTopic("b", "in-t")) == ()


def test_recreating_a_topic() -> None:
    log = Following()
    recreate = c.RecreateFollowerTopic("b", "in-t", log.topic_id)
    log.refused(replace(recreate, link="x"), Rejection.NOT_FOUND)
    log.refused(replace(recreate, topic="in-u"), Rejection.NOT_FOUND)
    log.refused(replace(recreate, topic_id="t"), Rejection.INVALID, "UUID")
    (change,) = log.ok(recreate)
    assert (change.after.state, change.after.topic_id) == (TopicState.CREATING, log.topic_id)
    assert log.ok(recreate) == ()
    (change,) = log.ok(log.topic(TopicState.CREATING))  # the old one is gone
    assert change.after.topic_id is None
    log.ok(log.topic(TopicState.REFUSED, reason=Reason("CODE", "words")))
    (change,) = log.ok(replace(recreate, topic_id=None))
    assert (change.after.state, change.after.reason) == (TopicState.CREATING, None)
    log.ok(c.DetachNamespace("b", TOPIC, "in-"))
    log.refused(recreate, Rejection.NOT_FOUND)


def test_deletions_are_doubted_until_they_were_compared() -> None:
    log = Following()

    def at(offset: int, partition: int = 0) -> c.PartitionOffset:
        return c.PartitionOffset("in-t", log.topic_id, partition, offset)

    def doubted() -> dict[int, int]:
        return dict(log.state.follower_topics["in-t"].doubted)

    log.refused(c.DoubtDeletions(()), Rejection.INVALID)
    log.refused(c.DoubtDeletions((replace(at(5), topic="in-u"),)), Rejection.NOT_FOUND)
    log.refused(c.DoubtDeletions((replace(at(5), topic_id=uid()),)), Rejection.NOT_FOUND)
    log.refused(c.DoubtDeletions((at(-1),)), Rejection.INVALID)
    log.refused(c.SettleDeletions((replace(at(5), topic_id=uid()),)), Rejection.NOT_FOUND)
    assert log.ok(c.SettleDeletions((at(5),))) == ()
    (change,) = log.ok(c.DoubtDeletions((at(5), at(7, 2))))
    assert dict(change.after.doubted) == doubted() == {0: 5, 2: 7}
    assert log.ok(c.DoubtDeletions((at(5), at(6, 2)))) == ()
    log.ok(c.DoubtDeletions((at(8),)))
    # What was compared before the last one was doubted says nothing about that.
    assert log.ok(c.SettleDeletions((at(7),))) == ()
    # It goes with the topic, whatever it follows meanwhile.
    log.ok(c.DetachNamespace("b", TOPIC, "in-"))
    log.refused(c.DoubtDeletions((at(9),)), Rejection.NOT_FOUND)
    log.ok(c.AttachNamespace("b", TOPIC, "in-", "out-", FOLLOWER))
    log.ok(log.topic(TopicState.FOLLOWING, topic_id=log.topic_id))
    assert doubted() == {0: 8, 2: 7}
    assert from_json(ControlState, parse(canonical(log.state)), "s") == log.state
    log.ok(c.SettleDeletions((at(8), at(7, 2))))
    assert doubted() == {}
    log.ok(c.DoubtDeletions((at(8),)))
    log.ok(c.RecreateFollowerTopic("b", "in-t", log.topic_id))
    assert doubted() == {}


def test_a_follower_is_compacted_and_not_any_more() -> None:
    log = Following()
    record = log.state.follower_topics["in-t"]
    assert not record.compacts
    compact = c.CompactFollowerTopic("in-t", log.topic_id, True, record.compacts_since_offset)
    log.refused(replace(compact, topic="in-u"), Rejection.NOT_FOUND)
    log.refused(replace(compact, topic_id=uid()), Rejection.NOT_FOUND)
    log.refused(replace(compact, since_offset=compact.since_offset + 1), Rejection.CONFLICT, "anew")
    assert log.ok(replace(compact, compacts=False)) == ()
    (change,) = log.ok(compact)
    assert (change.after.compacts, change.after.cleaned) == (True, True)
    assert change.after.compacts_since_offset > compact.since_offset
    # Who decided before that looks again; the record of the same topic stays as it is.
    log.refused(replace(compact, compacts=False), Rejection.CONFLICT, "anew")
    assert log.ok(log.topic(TopicState.FOLLOWING, topic_id=log.topic_id)) == ()
    since = change.after.compacts_since_offset
    (change,) = log.ok(replace(compact, compacts=False, since_offset=since))
    assert (change.after.compacts, change.after.cleaned) == (False, True)
    log.ok(replace(compact, since_offset=change.after.compacts_since_offset))
    # A topic that follows again may have been written meanwhile: it is filled first.
    log.ok(c.DetachNamespace("b", TOPIC, "in-"))
    log.refused(replace(compact, compacts=False), Rejection.NOT_FOUND)
    log.ok(c.AttachNamespace("b", TOPIC, "in-", "out-", FOLLOWER))
    log.ok(log.topic(TopicState.FOLLOWING, topic_id=log.topic_id))
    record = log.state.follower_topics["in-t"]
    assert (record.compacts, record.cleaned) == (False, True)
    log.ok(c.DetachNamespace("b", TOPIC, "in-"))
    log.ok(c.AttachNamespace("b", TOPIC, "in-", "out-", FOLLOWER))
    log.topic_id = uid()
    log.ok(log.topic(TopicState.CREATING))
    log.ok(log.topic(TopicState.FOLLOWING, topic_id=log.topic_id))
    assert not log.state.follower_topics["in-t"].cleaned


def test_provenance_of_attach_detach_and_local_writes() -> None:
    log = Following()
    (change,) = log.ok(c.OpenProvenance("b", log.at(0)))
    assert change == ProvenanceChanged("in-t", log.topic_id, (0,))
    assert log.ok(c.OpenProvenance("b", log.at(7))) == ()  # goes on
    log.ok(c.DetachNamespace("b", TOPIC, "in-"))
    log.ok(c.CloseProvenance(log.at(100)))
    assert log.ok(c.CloseProvenance(log.at(100))) == ()
    log.refused(c.CloseProvenance(log.at(101)), Rejection.CONFLICT, "in-t-0", "100")
    assert log.ranges == [("B", 0, 100)]

    # 20 local records later it follows again, but not from inside what it had.
    log.attach("b", "in-", "out-", FOLLOWER)
    log.refused(c.OpenProvenance("b", log.at(120)), Rejection.CONFLICT, "does not follow")
    log.ok(log.topic(TopicState.FOLLOWING, topic_id=log.topic_id))
    log.refused(c.OpenProvenance("b", log.at(90)), Rejection.CONFLICT, "truncate")
    log.ok(c.OpenProvenance("b", log.at(120)))
    assert log.ranges == [("B", 0, 100), ("A", 100, 120), ("B", 120, None)]
    log.ok(c.TruncateProvenance(log.at(90)))
    assert log.ranges == [("B", 0, 90), ("B", 90, None)]


def test_unclean_recovery_truncates_then_follows() -> None:
    log = Following()
    log.ok(c.OpenProvenance("b", log.at(0)))
    log.ok(c.CloseProvenance(log.at(100)))
    log.ok(c.TruncateProvenance(log.at(90)))
    log.ok(c.OpenProvenance("b", log.at(90)))
    assert log.ranges == [("B", 0, 90), ("B", 90, None)]
    log.ok(c.CloseProvenance(log.at(95)))
    log.ok(c.TruncateProvenance(log.at(0)))
    assert log.ranges == []


def test_a_recreated_topic_has_no_history() -> None:
    log = Following()
    log.ok(c.OpenProvenance("b", log.at(0)))
    log.topic_id = uid()
    log.refused(c.OpenProvenance("b", log.at(0)), Rejection.CONFLICT, "id")
    log.refused(c.CloseProvenance(log.at(0)), Rejection.NOT_FOUND, "no provenance")
    log.ok(log.topic(TopicState.FOLLOWING, topic_id=log.topic_id))
    log.ok(c.OpenProvenance("b", log.at(5)))
    assert log.ranges == [("B", 5, None)]
    history = log.state.histories["in-t"]
    assert history.topic_id == log.topic_id


def test_source_epochs() -> None:
    log = Following()
    log.refused(log.epoch(3, 0), Rejection.NOT_FOUND)
    log.ok(c.OpenProvenance("b", log.at(0)))
    log.ok(log.epoch(3, 0))
    assert log.ok(log.epoch(3, 0)) == ()
    log.ok(log.epoch(5, 40))
    log.refused(log.epoch(4, 50), Rejection.CONFLICT, "in-t-0")
    log.refused(log.epoch(5, 50), Rejection.CONFLICT)
    log.refused(log.epoch(6, 39), Rejection.CONFLICT)
    log.ok(log.epoch(6, 40))  # epoch 5 wrote nothing
    log.ok(log.epoch(8, 100))
    assert log.state.source_epochs("in-t", 0) == (SourceEpoch(3, 0), SourceEpoch(6, 40), SourceEpoch(8, 100))
    log.refused(c.CloseProvenance(log.at(30)), Rejection.CONFLICT, "40")
    log.ok(c.TruncateProvenance(log.at(60)))  # an unclean election at the source
    assert log.state.source_epochs("in-t", 0) == (SourceEpoch(3, 0), SourceEpoch(6, 40))
    log.ok(log.epoch(9, 60))
    log.ok(c.CloseProvenance(log.at(60)))  # whose first append never came
    (closed,) = log.state.provenance("in-t", 0)
    assert closed == ProvenanceRange(
        "B", log.source_id, 0, 60, closed.recorded_ms, (SourceEpoch(3, 0), SourceEpoch(6, 40))
    )
    assert log.state.source_epochs("in-t", 0) == ()
    log.refused(log.epoch(10, 60), Rejection.CONFLICT, "follows nothing")


def test_one_bad_entry_rejects_the_command() -> None:
    log = Following()
    log.ok(c.OpenProvenance("b", (*log.at(0, 0), *log.at(0, 1))))
    good, bad = c.PartitionEpoch("in-t", log.topic_id, 0, 1, 0), c.PartitionEpoch("in-t", log.topic_id, 2, 1, 0)
    log.refused(c.RecordSourceEpochs((good, bad)), Rejection.CONFLICT, "in-t-2")
    log.refused(c.RecordSourceEpochs(()), Rejection.INVALID)
    log.refused(c.TruncateProvenance(log.at(-1)), Rejection.INVALID)
    log.refused(c.TruncateProvenance(log.at(0, -1)), Rejection.INVALID)


# --- producer ids


def test_producer_id_ranges() -> None:
    log = Log()
    (first,) = log.ok(c.RegisterProducerIds("B"))
    assert first.index == 0
    assert log.ok(c.RegisterProducerIds("B")) == ()
    assert log.ok(c.RegisterProducerIds("B", 0)) == ()
    log.refused(c.RegisterProducerIds("B", 1), Rejection.CONFLICT, "range 0")
    log.refused(c.RegisterProducerIds("C", 0), Rejection.CONFLICT, "cluster B")
    log.ok(c.RegisterProducerIds("C", 2))
    log.ok(c.RegisterProducerIds("A"))
    assert log.state.producer_id_ranges == {"B": 0, "C": 2, "A": 1}
    log.refused(c.RegisterProducerIds("D", CLUSTERS_MAX), Rejection.INVALID)
    log.refused(c.RegisterProducerIds("D", -1), Rejection.INVALID)


# --- leases


def claim(name: str, *brokers: int, incarnation: str | None = None, every: bool = False) -> c.ClaimBrokers:
    claims = tuple(BrokerClaim(number, "h", 9000 + number) for number in brokers)
    return c.ClaimBrokers(name, incarnation or uid(), claims, every, None, 10_000, "0.1.0", -1)


def test_one_proxy_for_a_broker() -> None:
    log = Log()
    log.ok(claim("p1", 1))
    log.ok(claim("p2", 2))
    log.refused(claim("p3", 1), Rejection.CONFLICT, "'p1'", "broker 1")
    log.refused(claim("p3", every=True), Rejection.CONFLICT, "'p1'")
    log.ok(claim("p3", 3))
    assert {number: address.port for number, address in log.state.broker_addresses().items()} == {
        1: 9001,
        2: 9002,
        3: 9003,
    }


def test_a_whole_cluster_proxy_is_alone_and_changes_what_it_serves() -> None:
    log = Log()
    first = claim("all", 1, 2, every=True)
    log.ok(first)
    log.refused(claim("p3", 3), Rejection.CONFLICT, "'all'")
    log.ok(claim("all", 1, 2, 3, incarnation=first.incarnation, every=True))
    assert log.state.proxies["all"].broker_ids == {1, 2, 3}
    assert log.state.superseded == {}


def test_a_new_process_takes_over_the_name() -> None:
    log = Log()
    old, new = claim("p1", 1), claim("p1", 1)
    log.ok(old)
    seen_old = log.state.applied_offset
    (change,) = log.ok(new)
    assert isinstance(change, LeaseChanged)
    assert (change.before.incarnation, change.after.incarnation) == (old.incarnation, new.incarnation)
    # The old one may still run: a reservation must know of it.
    assert set(log.state.superseded) == {old.incarnation}
    log.refused(c.RenewLease("p1", old.incarnation, 0), Rejection.LEASE_LOST, "newer process")
    log.refused(old, Rejection.LEASE_LOST, "newer process")
    log.ok(c.ExpireLease("p1", old.incarnation, change.before.renewed_at_offset))
    assert log.state.superseded == {}
    # It sleeps on, its claim was made before it could know.
    log.refused(old, Rejection.LEASE_LOST, "newer process", seen=seen_old)
    log.ok(c.RenewLease("p1", new.incarnation, 0))


def test_renewal_and_enforcement() -> None:
    log = Log()
    body = claim("p1", 1)
    log.ok(body)
    log.ok(c.CreateNamespace(TOPIC, "x", True))
    log.ok(c.RenewLease("p1", body.incarnation, 1))
    log.ok(c.RenewLease("p1", body.incarnation, 0))  # was overtaken
    lease = log.state.proxies["p1"]
    assert (lease.enforced_offset, lease.renewed_at_offset) == (1, 3)
    log.refused(c.RenewLease("p1", body.incarnation, 99), Rejection.INVALID)
    log.refused(c.RenewLease("p2", body.incarnation, 0), Rejection.LEASE_LOST)


def test_expiry_is_compared_in_the_log() -> None:
    log = Log()
    body = claim("p1", 1)
    log.ok(body)
    log.ok(c.RenewLease("p1", body.incarnation, 0))
    log.refused(c.ExpireLease("p1", body.incarnation, 0), Rejection.CONFLICT, "renewed")
    log.ok(c.ExpireLease("p1", body.incarnation, 1))
    assert log.state.proxies == {}
    assert log.ok(c.ExpireLease("p1", body.incarnation, 1)) == ()
    log.refused(c.RenewLease("p1", body.incarnation, 0), Rejection.LEASE_LOST, "not renewed in time")
    log.ok(claim("p2", 1))


def test_release() -> None:
    log = Log()
    old, new = claim("p1", 1), claim("p1", 1)
    log.ok(old)
    log.ok(new)
    log.ok(c.ReleaseLease("p1", old.incarnation))
    assert log.state.superseded == {}
    log.ok(c.ReleaseLease("p1", new.incarnation))
    assert log.state.proxies == {}
    assert log.ok(c.ReleaseLease("p1", new.incarnation)) == ()


def test_claim_errors() -> None:
    log = Log()
    good = claim("p1", 1)
    log.refused(replace(good, name=""), Rejection.INVALID)
    log.refused(replace(good, incarnation="x"), Rejection.INVALID, "UUID")
    log.refused(replace(good, lease_ms=10), Rejection.INVALID)
    log.refused(replace(good, brokers=()), Rejection.INVALID)
    log.refused(replace(good, brokers=good.brokers * 2), Rejection.INVALID, "twice")
    log.refused(replace(good, enforced_offset=50), Rejection.INVALID)
    log.ok(good)
    log.refused(replace(claim("p2", 2), incarnation=good.incarnation), Rejection.INVALID)


# --- the envelope


def test_a_retried_command_counts_once() -> None:
    log = Log()
    log.ok(c.CreateNamespace(TOPIC, "x"), id=(same := uid()))
    log.ok(c.DeleteNamespace(TOPIC, "x"))
    assert log.do(c.CreateNamespace(TOPIC, "x"), id=same, seen=-1) == Duplicate(0)
    assert log.state.namespaces == {}
    refused_id = uid()
    log.refused(c.DeleteNamespace(TOPIC, "y"), Rejection.NOT_FOUND, id=refused_id)
    log.ok(c.CreateNamespace(TOPIC, "y"))
    assert isinstance(log.do(c.DeleteNamespace(TOPIC, "y"), id=refused_id), Duplicate)


def test_a_command_from_before_what_is_remembered_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "REMEMBERED_COMMANDS", 4)
    log = Log()
    old = uid()
    log.ok(c.CreateNamespace(TOPIC, "x"), id=old, seen=-1)
    log.ok(c.DeleteNamespace(TOPIC, "x"))
    for number in range(4):
        log.ok(c.CreateNamespace(TOPIC, f"n{number}"))
    assert old not in log.state.recent_ids
    log.refused(c.CreateNamespace(TOPIC, "x"), Rejection.STALE, "make it again", id=old, seen=-1)
    log.ok(c.CreateNamespace(TOPIC, "x"))


def test_impossible_envelopes() -> None:
    log = Log()
    log.refused(c.CreateNamespace(TOPIC, "x"), Rejection.INVALID, "time", at_ms=-1)
    log.refused(c.CreateNamespace(TOPIC, "x"), Rejection.INVALID, "time", at_ms=2**53)
    log.refused(c.CreateNamespace(TOPIC, "x"), Rejection.INVALID, "seen", seen=100)
    with pytest.raises(ValueError, match="applied already"):
        apply(log.state, 0, c.Command(uid(), 0, "p", -1, c.DeleteLink("x")))


def test_a_log_is_accepted_in_rising_generations() -> None:
    state = ControlState("A")
    for number, (generation, accepted) in enumerate([(5, True), (5, False), (4, False), (6, True)]):
        command = c.Command(str(uuid.UUID(int=number)), 1, "p", -1, c.AcceptLog(generation))
        state, outcome = apply(state, number, command)
        assert isinstance(outcome, Accepted) == accepted
    assert state.generation == 6
    assert from_json(ControlState, parse(canonical(state))).generation == 6
    assert b"generation" not in canonical(ControlState("A")), "older versions do not know it, and need not"
