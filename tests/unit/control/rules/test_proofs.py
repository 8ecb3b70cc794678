"""What is recorded of how far followers were found equal, and the setting that says how often that is looked at."""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import Any

from support.command_log import CommandLog

from isthmus_control import commands as c
from isthmus_control.codec import canonical, from_json, parse
from isthmus_control.control_state import ControlState
from isthmus_control.levels import KNOWN_LEVEL, PROOFS
from isthmus_control.model import ResourceType, Role, TopicState
from isthmus_control.outcome import Rejected, Rejection
from isthmus_control.proofs import FoundDifference, Proof

SOURCE_ID, T_ID, OTHER_ID = (str(uuid.UUID(int=number)) for number in (1, 2, 3))
DIFFERENCE = FoundDifference(20, 24, 5, "words")


class Log(CommandLog):
    """The log of cluster A, where ``in-t`` follows over link ``ab``."""

    def __init__(self, level: int = KNOWN_LEVEL) -> None:
        super().__init__()
        self.ok(c.RaiseLevel(level))
        self.ok(c.CreateLink("ab", str(uuid.uuid4()), "B", True, ("b:1",)))
        self.ok(c.AttachNamespace("ab", ResourceType.TOPIC, "in-", "out-", Role.FOLLOWER, create_missing=True))
        self.follow(TopicState.CREATING, None)
        self.follow(TopicState.FOLLOWING, T_ID)

    def follow(self, state: TopicState, topic_id: str | None, source_id: str = SOURCE_ID) -> None:
        self.ok(c.SetFollowerTopic("ab", "in-t", "out-t", source_id, state, topic_id))

    def proof(self, equal_until: int = 9, partition: int = 0, **more: Any) -> c.PartitionProof:
        return c.PartitionProof("in-t", T_ID, partition, Proof(equal_until, 1, 2, 5, **more))

    @property
    def proofs(self) -> dict[int, Proof]:
        return dict(self.state.follower_topics["in-t"].proofs)

    def refused(self, body: c.Body, *words: str) -> None:
        outcome = self.do(body)
        assert isinstance(outcome, Rejected), outcome
        assert outcome.code is Rejection.INVALID
        assert all(word in outcome.message for word in words), outcome.message


def test_proofs_are_of_what_follows_now() -> None:
    log = Log()
    (change,) = log.ok(c.RecordProofs((log.proof(9), log.proof(7, 3))))
    assert log.proofs == change.after.proofs == {0: Proof(9, 1, 2, 5), 3: Proof(7, 1, 2, 5)}
    assert log.ok(c.RecordProofs((log.proof(9),))) == ()
    others = replace(log.proof(8), topic="in-u"), replace(log.proof(8), topic_id=OTHER_ID)
    assert log.ok(c.RecordProofs(others)) == (), "it is detached by now, or another one"
    log.ok(c.RecordProofs((*others, log.proof(10))))
    assert log.proofs[0].equal_until == 10
    assert from_json(ControlState, parse(canonical(log.state)), "s") == log.state
    log.refused(c.RecordProofs(()))
    log.refused(c.RecordProofs((log.proof(-1),)), "in-t")
    log.refused(c.RecordProofs((log.proof(1, -1),)))
    log.refused(c.RecordProofs((log.proof(difference=replace(DIFFERENCE, message="x" * 100_000)),)))


def test_a_difference_stays_until_it_is_acknowledged_where_it_is() -> None:
    log = Log()
    log.ok(c.RecordProofs((log.proof(difference=DIFFERENCE),)))

    def at(offset: int) -> c.AcknowledgeDifferences:
        return c.AcknowledgeDifferences((c.PartitionOffset("in-t", T_ID, 0, offset),))

    assert log.ok(at(19)) == (), "another one, which the operator was not told of"
    assert log.proofs[0].difference == DIFFERENCE
    (change,) = log.ok(at(20))
    assert change.after.proofs[0] == replace(log.proof().proof, difference=None)
    assert log.ok(at(20)) == ()


def test_proofs_go_with_what_they_are_about() -> None:
    def recorded() -> Log:
        log = Log()
        log.ok(c.RecordProofs((log.proof(),)))
        return log

    log = recorded()
    log.follow(TopicState.FOLLOWING, T_ID)
    assert log.proofs
    log.follow(TopicState.FOLLOWING, T_ID, OTHER_ID)
    assert not log.proofs, "another source"
    log = recorded()
    log.ok(c.RecreateFollowerTopic("ab", "in-t", T_ID))
    assert not log.proofs
    log = recorded()
    log.ok(c.DetachNamespace("ab", ResourceType.TOPIC, "in-"))
    log.ok(c.AttachNamespace("ab", ResourceType.TOPIC, "in-", "out-", Role.FOLLOWER))
    log.follow(TopicState.FOLLOWING, T_ID)
    assert not log.proofs, "others may have written meanwhile"


def test_how_often_is_a_setting_of_the_level_that_brings_it() -> None:
    log = Log()
    assert log.state.links["ab"].verify_every_ms == 7 * 86_400_000
    for value, every_ms in (("60000", 60_000), ("off", None), (None, 7 * 86_400_000)):
        log.ok(c.AlterLink("ab", config={"verify.every.ms": value}))
        assert log.state.links["ab"].verify_every_ms == every_ms
    for value in ("999", "7d", "0", "-5", "99999999999"):
        log.refused(c.AlterLink("ab", config={"verify.every.ms": value}), "from 1000 to")
    before = Log(PROOFS - 1)
    before.refused(c.AlterLink("ab", config={"verify.every.ms": "60000"}), f"level {PROOFS}")
