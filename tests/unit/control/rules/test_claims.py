"""What is recorded of leases that ran out."""

from __future__ import annotations

import uuid
from typing import Any

from support.command_log import CommandLog

from isthmus_control import commands as c
from isthmus_control.model import Claim, GroupClaim, ResourceType, Role, TopicState
from isthmus_control.outcome import Accepted, ClaimsRecorded, Outcome, Rejected, Rejection

TOPIC, GROUP, FOLLOWER = ResourceType.TOPIC, ResourceType.CONSUMER_GROUP, Role.FOLLOWER
LINK_ID, T_ID, OTHER_ID, SOURCE_ID = (str(uuid.UUID(int=number)) for number in (1, 2, 3, 4))


class Log(CommandLog):
    """The log of cluster B, whose ``in-t`` follows over link ``ab``."""

    def __init__(self) -> None:
        super().__init__("B")
        self.now_ms = 1_000
        self.do(c.CreateLink("ab", LINK_ID, "A", False))
        self.do(c.AttachNamespace("ab", TOPIC, "in-", "in-", FOLLOWER, create_missing=True))
        self.do(c.SetFollowerTopic("ab", "in-t", "in-t", SOURCE_ID, TopicState.FOLLOWING, T_ID))

    @property
    def at_ms(self) -> int:
        return self.now_ms

    def record(self, until_ms: int, topic_id: str = T_ID, **more: Any) -> Outcome:
        entry = c.PartitionClaim("in-t", topic_id, more.get("partition", 0), until_ms, 5)
        return self.do(c.RecordClaims("ab", more.get("link_id", LINK_ID), (entry,)))

    def record_groups(self, *claims: tuple[int, int]) -> Outcome:
        entries = tuple(c.OffsetsClaim(partition, 50, until_ms) for partition, until_ms in claims)
        return self.do(c.RecordClaims("ab", LINK_ID, (), entries))


def test_the_later_claim_counts_also_when_the_topic_follows_no_more() -> None:
    log = Log()
    assert log.record(500) == Accepted((ClaimsRecorded("ab", 1),))
    assert log.record(400) == Accepted()
    assert log.state.claim("in-t", T_ID, 0) == Claim(T_ID, 500, 5)
    assert log.state.claim("in-t", OTHER_ID, 0) is None
    assert log.state.claim("in-t", T_ID, 1) is None
    log.do(c.DetachNamespace("ab", TOPIC, "in-"))
    assert log.record(600) == Accepted((ClaimsRecorded("ab", 1),))
    assert log.state.claim("in-t", T_ID, 0) == Claim(T_ID, 600, 5)
    log.do(c.AttachNamespace("ab", TOPIC, "in-", "in-", FOLLOWER))
    assert log.state.claims == {}


def test_a_claim_of_a_clock_that_was_ahead_gives_way_and_none_is_recorded() -> None:
    log = Log()
    assert log.record(7_000) == Accepted(), "it cannot have run out"
    assert log.record(6_000) == Accepted((ClaimsRecorded("ab", 1),))
    log.now_ms = 900  # set back since
    assert log.record(800) == Accepted((ClaimsRecorded("ab", 1),))
    assert log.state.claim("in-t", T_ID, 0) == Claim(T_ID, 800, 5)
    assert log.record(700) == Accepted()


def test_claims_of_groups_end_when_another_namespace_follows() -> None:
    log = Log()
    assert log.record_groups((3, 400), (4, 500)) == Accepted((ClaimsRecorded("ab", 2),))
    assert log.record_groups((3, 300)) == Accepted()
    assert log.state.group_claim("ab", LINK_ID, 3) == GroupClaim(LINK_ID, 400, 50)
    assert log.state.group_claim("ab", OTHER_ID, 3) is None
    assert log.state.group_claim("ab", LINK_ID, 5) is None
    log.do(c.AttachNamespace("ab", ResourceType.PRINCIPAL, "p-", "p-", FOLLOWER, create_missing=True))
    assert log.state.group_claim("ab", LINK_ID, 3) is not None
    for kind, prefix in ((GROUP, "g-"), (TOPIC, "more-")):
        log.record_groups((3, 400))
        log.do(c.AttachNamespace("ab", kind, prefix, prefix, FOLLOWER, create_missing=True))
        assert log.state.group_claims == {}
    log.record_groups((3, 400))
    log.do(c.DetachNamespace("ab", GROUP, "g-"))
    assert log.state.group_claims, "what was, was"
    log.do(c.DeleteLink("ab"))
    assert log.state.group_claims == {}


def test_what_is_not_known_here_is_not_claimed() -> None:
    log = Log()
    assert log.record(500, OTHER_ID) == Accepted()
    assert log.state.claims == {}
    for wrong in ({"link_id": OTHER_ID}, {"partition": -1}):
        outcome = log.record(500, **wrong)
        assert isinstance(outcome, Rejected)
    outcome = log.do(c.RecordClaims("ab", LINK_ID, ()))
    assert isinstance(outcome, Rejected)
    assert outcome.code is Rejection.INVALID
