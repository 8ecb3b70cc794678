"""What is recorded of what a source lost: who waits for it, what becomes of it, and when it is told no more."""

from __future__ import annotations

import uuid
from dataclasses import replace

import pytest
from support.command_log import CommandLog

from isthmus_control import commands as c
from isthmus_control.codec import canonical, from_json, parse
from isthmus_control.control_state import ControlState
from isthmus_control.levels import SOURCE_LOSSES
from isthmus_control.model import OnSourceLoss, Reason, ResourceType, Role, TopicState
from isthmus_control.outcome import Rejected, Rejection
from isthmus_control.rules import source_losses
from isthmus_control.source_losses import COMMITS_MAX, LossState, LostCommit, SourceLoss
from isthmus_control.truncations import PartitionCut, PartitionView, SalvageFile, TruncationPhase
from isthmus_protocol.offsets_log import OFFSETS_TOPIC

TOPIC, GROUP, FOLLOWER = ResourceType.TOPIC, ResourceType.CONSUMER_GROUP, Role.FOLLOWER
LINK_ID, T_ID, NEW_ID, SOURCE_ID, OWNER = (str(uuid.UUID(int=number)) for number in range(1, 6))
P = TruncationPhase
HELD = c.FoundLoss(TOPIC, "in-", "in-t", T_ID, 0, 90, 100, 10, LossState.HELD)
CUTTING = replace(HELD, state=LossState.CUTTING)
COMMITS = (LostCommit("g-1", "in-t", 0, 8, 5),)
OF_GROUPS = c.FoundLoss(GROUP, "g-", OFFSETS_TOPIC, "", 7, 5, 9, 1, LossState.HELD, 1, COMMITS)
SAFE = SalvageFile(0, "p", "/salvage/x", 10)


class Log(CommandLog):
    """The log of cluster B, where ``in-t`` and groups ``g-`` follow over link ``ab``."""

    def __init__(self) -> None:
        super().__init__("B")
        self.ok(c.RaiseLevel(SOURCE_LOSSES))
        self.ok(c.CreateLink("ab", LINK_ID, "A", False))
        for kind, prefix in ((TOPIC, "in-"), (GROUP, "g-")):
            self.ok(c.AttachNamespace("ab", kind, prefix, "far-", FOLLOWER, create_missing=True))
        self.ok(c.SetFollowerTopic("ab", "in-t", "far-t", SOURCE_ID, TopicState.FOLLOWING, T_ID))
        self.ok(c.OpenProvenance("ab", (c.PartitionOffset("in-t", T_ID, 0, 0),)))

    def found(self, *losses: c.FoundLoss) -> None:
        self.ok(c.RecordSourceLosses("ab", LINK_ID, losses))

    @property
    def only(self) -> SourceLoss:
        (loss,) = self.state.source_losses
        return loss

    def set(self, to: OnSourceLoss | None, kind: ResourceType = TOPIC) -> None:
        prefix = "in-" if kind is TOPIC else "g-"
        if to is None:
            self.ok(c.AttachNamespace("ab", kind, prefix, "far-", FOLLOWER))
        else:
            self.ok(c.AlterMapping("ab", kind, prefix, to))

    def truncate(self) -> None:
        """Have the topic cut to the source's log."""
        why, views = Reason("UNEXPECTED_TRUNCATION", "why"), (PartitionView(1, 0),)
        self.ok(c.BeginTruncation("ab", "in-t", T_ID, why, views, None, "p", OWNER))

    def advance(self, *phases: TruncationPhase, cuts: tuple[PartitionCut, ...] | None = None) -> None:
        for phase in phases:
            found = {"cuts": cuts} if cuts is not None else {}
            salvaged = (SAFE,) if phase is P.SPOOLING else None
            new = NEW_ID if phase is P.REFILLING else None
            self.ok(
                c.AdvanceTruncation("in-t", T_ID, OWNER, phase, salvaged=salvaged, new_topic_id=new, **found)  # type: ignore[arg-type]
            )


def test_what_is_held_is_cut_by_nobody_until_the_operator_says_so() -> None:
    log = Log()
    log.found(HELD)
    assert log.state.held("in-t", T_ID) == log.state.held("in-t", T_ID, 0) == log.only
    assert log.state.held("in-t", T_ID, 1) is log.state.held("in-t", NEW_ID) is None
    assert "isthmus topic truncate in-t" in log.only.describe()
    why, views = Reason("UNEXPECTED_TRUNCATION", "why"), (PartitionView(1, 0),)
    begin = c.BeginTruncation("ab", "in-t", T_ID, why, views, None, "p", OWNER)
    refused = log.do(begin)
    assert isinstance(refused, Rejected)
    assert "offsets 90 to 99" in refused.message
    log.ok(c.ReleaseSourceLosses("in-t", T_ID))
    assert log.only.state is LossState.CUTTING
    log.found(replace(HELD, from_offset=80))  # a proxy that decided before it knew
    assert (log.only.state, log.only.from_offset) == (LossState.CUTTING, 80)
    log.truncate()
    log.advance(P.SALVAGING, cuts=(PartitionCut(0, 0, 90, 100),))
    log.advance(P.SPOOLING, P.RECREATING, P.REFILLING, P.RESTORING, P.CLEANING, P.DONE)
    assert (log.only.state, log.only.salvaged) == (LossState.CUT, SAFE)
    again = log.do(c.ReleaseSourceLosses("in-t", NEW_ID))
    assert isinstance(again, Rejected)
    assert again.code is Rejection.CONFLICT


@pytest.mark.parametrize("differs", [False, True])
def test_a_truncation_that_is_cancelled(differs: bool) -> None:
    """Because of what is held now it changes nothing; because nothing differs any more it is over."""
    log = Log()
    log.truncate()
    log.found(HELD if differs else CUTTING)
    log.advance(P.CANCELLING, cuts=() if differs else (PartitionCut(0, 0, 100, 100),))
    log.advance(P.DONE)
    assert (log.only.state, log.only.salvaged) == (LossState.HELD if differs else LossState.CUT, None)


def test_the_setting_stays_until_it_is_named_and_decides_what_is_held() -> None:
    log = Log()

    def now() -> OnSourceLoss | None:
        mapping = log.state.links["ab"].mapping(TOPIC, "in-")
        assert mapping is not None
        return mapping.on_source_loss

    assert now() is None
    log.set(OnSourceLoss.HOLD)
    log.set(None)
    assert now() is OnSourceLoss.HOLD
    log.found(HELD, OF_GROUPS)
    log.set(OnSourceLoss.CUT)
    assert [loss.state for loss in log.state.source_losses] == [LossState.CUTTING, LossState.HELD]
    log.set(OnSourceLoss.CUT, GROUP)
    assert [loss.state for loss in log.state.source_losses] == [LossState.CUTTING, LossState.CUTTING]
    log.found(replace(OF_GROUPS, state=LossState.CUT, salvaged=SAFE))
    assert log.state.source_losses[1].state is LossState.CUT
    log.found(replace(OF_GROUPS, from_offset=6))  # the next one
    assert [loss.state for loss in log.state.source_losses][1:] == [LossState.CUT, LossState.HELD]


def test_the_setting_is_the_followers() -> None:
    log = Log()
    for role, kind in ((Role.LEADER, TOPIC), (FOLLOWER, ResourceType.PRINCIPAL)):
        prefix = "User:a-" if kind is ResourceType.PRINCIPAL else "out-"
        refused = log.do(
            c.AttachNamespace("ab", kind, prefix, prefix, role, (), True, on_source_loss=OnSourceLoss.HOLD)
        )
        assert isinstance(refused, Rejected)
        assert refused.code is Rejection.INVALID
        log.ok(c.AttachNamespace("ab", kind, prefix, prefix, role, (), True))
        refused = log.do(c.AlterMapping("ab", kind, prefix, OnSourceLoss.HOLD))
        assert isinstance(refused, Rejected)
        assert refused.code is Rejection.INVALID
    refused = log.do(c.AlterMapping("ab", TOPIC, "nothing-", OnSourceLoss.HOLD))
    assert isinstance(refused, Rejected)
    assert refused.code is Rejection.NOT_FOUND


def test_what_is_detached_is_kept_and_told_until_it_is_acknowledged() -> None:
    log = Log()
    log.found(HELD, OF_GROUPS)
    log.ok(c.DetachNamespace("ab", TOPIC, "in-"))
    assert [loss.state for loss in log.state.source_losses] == [LossState.KEPT, LossState.HELD]
    log.ok(c.AcknowledgeSourceLosses("ab", log.state.applied_offset))
    assert (log.only.type, log.only.acknowledged) == (GROUP, True)  # it still holds
    assert log.ok(c.AcknowledgeSourceLosses("ab", log.state.applied_offset)) == ()
    log.ok(c.DetachNamespace("ab", GROUP, "g-"))
    assert log.state.source_losses == ()


@pytest.mark.parametrize("decision", [c.ForgetFollowerTopic("ab", "in-t"), c.RecreateFollowerTopic("ab", "in-t", T_ID)])
def test_who_decides_otherwise_of_a_topic_has_decided(decision: c.Body) -> None:
    log = Log()
    log.found(HELD)
    log.ok(decision)
    assert log.only.state is LossState.KEPT


def test_only_what_was_told_is_acknowledged() -> None:
    log = Log()
    log.found(replace(OF_GROUPS, state=LossState.CUT))
    until = log.only.number
    log.found(replace(OF_GROUPS, partition=8, state=LossState.CUT))
    log.ok(c.AcknowledgeSourceLosses("ab", until))
    assert log.only.partition == 8
    log.ok(c.DeleteLink("ab"))
    assert log.state.source_losses == ()


def test_what_was_acknowledged_is_told_again_only_if_more_was_lost() -> None:
    log = Log()
    log.found(CUTTING)
    log.ok(c.AcknowledgeSourceLosses("ab", log.state.applied_offset))
    log.found(CUTTING)  # the logs are compared again
    assert log.only.acknowledged
    log.found(replace(CUTTING, from_offset=80))
    assert not log.only.acknowledged
    log.ok(c.AcknowledgeSourceLosses("ab", log.state.applied_offset))
    log.found(replace(CUTTING, from_offset=80, state=LossState.CUT))
    assert log.state.source_losses == ()


def test_a_namespace_of_groups_without_a_prefix_holds_what_it_does_elsewhere() -> None:
    log = Log()
    log.ok(c.AttachNamespace("ab", GROUP, "_x-", "_x-", FOLLOWER, create_missing=True))
    log.ok(c.DetachNamespace("ab", GROUP, "g-"))
    log.ok(c.AttachNamespace("ab", GROUP, "", "", FOLLOWER, create_missing=True))
    log.found(replace(OF_GROUPS, namespace=""))
    assert log.only.holds("g-1")
    assert not log.only.holds("_x-1")


def test_old_ones_are_counted_and_what_is_held_is_never_left_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_losses, "TOLD_MAX", 3)
    log = Log()
    log.found(replace(OF_GROUPS, partition=0))
    for partition in range(1, 6):
        log.found(replace(OF_GROUPS, partition=partition, state=LossState.CUT))
    assert [loss.partition for loss in log.state.source_losses] == [0, 3, 4, 5]
    assert log.state.source_losses_left_off == {"ab": 2}
    log.ok(c.AcknowledgeSourceLosses("ab", log.state.applied_offset))
    assert log.state.source_losses_left_off == {}
    assert log.only.partition == 0


def test_nothing_is_told_of_a_link_that_is_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_losses, "TOLD_MAX", 0)
    log = Log()
    log.found(replace(OF_GROUPS, state=LossState.CUT))
    assert (log.state.source_losses, log.state.source_losses_left_off) == ((), {"ab": 1})
    log.ok(c.DeleteLink("ab"))
    assert log.state.source_losses_left_off == {}


def test_what_no_follower_can_have_found() -> None:
    log = Log()
    wrong = [
        replace(HELD, namespace="out-"),
        replace(HELD, topic_id=NEW_ID),
        replace(HELD, to_offset=90),
        replace(HELD, count=0),
        replace(HELD, partition=-1),
        replace(HELD, state=LossState.KEPT),
    ]
    for each in wrong:
        assert isinstance(log.do(c.RecordSourceLosses("ab", LINK_ID, (each,))), Rejected), each
    assert isinstance(log.do(c.RecordSourceLosses("ab", NEW_ID, (HELD,))), Rejected)
    assert isinstance(log.do(c.RecordSourceLosses("ab", LINK_ID, ())), Rejected)
    assert log.state.source_losses == ()


def test_what_is_listed_is_bounded_and_survives_a_snapshot() -> None:
    log = Log()
    log.found(replace(OF_GROUPS, commits=COMMITS * (COMMITS_MAX + 1)), HELD)
    assert len(log.state.source_losses[0].commits) == COMMITS_MAX
    assert from_json(ControlState, parse(canonical(log.state))) == log.state
    assert "1 committed offsets of 1 groups" in log.state.source_losses[0].describe()
