"""What the other cluster of a link may have done here, as the control log judges it."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from support.command_log import CommandLog

from isthmus_control import commands as c
from isthmus_control.grants import BROKER_SETTINGS, EVERYTHING, parse_grants
from isthmus_control.levels import CONSENT
from isthmus_control.model import (
    AttachRequest,
    OffsetsCopy,
    OffsetsForm,
    OnSourceDelete,
    OnSourceLoss,
    ResourceType,
    Role,
)
from isthmus_control.outcome import Rejected, Rejection
from isthmus_control.rules.grants import TOKENS_MAX, WAITING_MAX
from isthmus_control.sealing import Seal, Sealed

TOPIC, GROUP = ResourceType.TOPIC, ResourceType.CONSUMER_GROUP
LEADER, FOLLOWER = Role.LEADER, Role.FOLLOWER
LINK_ID, TOPIC_ID = (str(uuid.UUID(int=number)) for number in (1, 2))
KEY = Sealed(Seal.NONE, "", "a2V5")


class Log(CommandLog):
    """Cluster B's, linked with A."""

    def __init__(self, granted: str = "", level: int = CONSENT) -> None:
        super().__init__("B")
        self.now_ms = 1_000
        if level:
            self.ok(c.RaiseLevel(level))
        grants = parse_grants(granted) if granted else ()
        self.ok(c.CreateLink("ab", LINK_ID, "A", False, grants=grants))

    @property
    def at_ms(self) -> int:
        return self.now_ms

    @property
    def granted(self) -> list[str]:
        return [f"{each}{' (attached)' if each.attached else ''}" for each in self.state.links["ab"].grants]

    @property
    def waiting(self) -> list[str]:
        return [each.local_prefix for each in self.state.links["ab"].waiting]

    def attach(self, prefix: str, role: Role = FOLLOWER, kind: ResourceType = TOPIC, **more: Any) -> Any:
        more = {"for_peer": True, **more}
        return self.do(c.AttachNamespace("ab", kind, prefix, prefix, role, create_missing=True, **more))

    def refused(self, *arguments: Any, **more: Any) -> str:
        outcome = self.attach(*arguments, **more)
        assert isinstance(outcome, Rejected), outcome
        assert outcome.code is Rejection.NOT_GRANTED
        return outcome.message

    def attached(self, *arguments: Any, **more: Any) -> None:
        outcome = self.attach(*arguments, **more)
        assert not isinstance(outcome, Rejected), outcome


def test_the_other_cluster_has_attached_what_it_was_granted_and_nothing_else() -> None:
    log = Log("lead:orders-,follow:orders-,lead:consumer-group:app-")
    assert "--may 'lead:prod-'" in log.refused("prod-")
    log.refused("order")
    log.refused("orders-", kind=GROUP)
    log.refused("app-", LEADER, GROUP)
    log.refused("")
    log.attached("orders-eu-")
    log.attached("orders-us-", LEADER)
    log.attached("app-", kind=GROUP)
    assert not log.state.links["ab"].pairs(LEADER, GROUP)
    # This side's own operator asks nobody here.
    log.attached("prod-", for_peer=False)


def test_a_token_is_sealed_anew_until_it_is_used() -> None:
    log = Log()
    log.ok(c.CreateToken("ab" * 8, "cd" * 16, KEY, (), log.now_ms + 1_000))
    again = Sealed(Seal.AES_256_GCM, "ab12cd34", "AAAA")
    log.ok(c.SealToken("ab" * 8, again))
    assert log.state.link_tokens["ab" * 8].acceptor_key == again
    log.ok(c.DeleteToken("ab" * 8))
    log.ok(c.SealToken("ab" * 8, KEY))
    assert not log.state.link_tokens


def test_what_is_cut_or_changed_for_that_takes_a_right_of_its_own() -> None:
    log = Log("lead:orders-")
    assert "--may 'replace:orders-'" in log.refused("orders-", truncate_topic_ids=(TOPIC_ID,))
    assert "grant ab --broker-settings " in log.refused("orders-", disable_transaction_verification=True)
    log.refused("orders-", on_source_delete=OnSourceDelete.DELETE)
    log.refused("orders-", on_source_loss=OnSourceLoss.CUT)
    log.attached("orders-", on_source_delete=OnSourceDelete.KEEP)
    alter = c.AlterMapping("ab", TOPIC, "orders-", None, OnSourceDelete.DELETE, for_peer=True)
    refused = log.do(alter)
    assert isinstance(refused, Rejected)
    assert refused.code is Rejection.NOT_GRANTED
    log.refused("orders-", disable_transaction_verification=True)
    log.ok(c.ChangeGrants("ab", given=(*parse_grants("replace:orders-"), BROKER_SETTINGS)))
    log.ok(alter)
    log.attached("orders-", disable_transaction_verification=True, truncate_topic_ids=(TOPIC_ID,))
    log.ok(c.ChangeGrants("ab", taken=(*parse_grants("replace:orders-"), BROKER_SETTINGS)))
    # What stands may be said again; other topics are not cut.
    log.attached("orders-", disable_transaction_verification=True)
    log.refused("orders-", truncate_topic_ids=(TOPIC_ID,))


def test_links_of_before_keep_what_they_have_attached_and_nothing_more() -> None:
    log = Log(level=0)
    log.ok(c.AttachNamespace("ab", TOPIC, "in-", "in-", FOLLOWER, create_missing=True))
    log.ok(c.AttachNamespace("ab", GROUP, "app-", "app-", LEADER, create_missing=True))
    log.ok(c.SetOffsetsTopic("ab", FOLLOWER, OffsetsCopy(OffsetsForm.WHOLE)))
    assert isinstance(log.do(c.ChangeGrants("ab", given=parse_grants("lead:x"))), Rejected)
    log.ok(c.RaiseLevel(CONSENT))
    assert log.granted == [
        "lead:in- (attached)",
        "follow:consumer-group:app- (attached)",
        "lead:__consumer_offsets (attached)",
    ]
    log.refused("other-")
    log.refused("in-", truncate_topic_ids=(TOPIC_ID,))
    # A promotion there that is abandoned: detached by the other side, and attached again.
    log.ok(c.DetachNamespace("ab", GROUP, "app-", for_peer=True))
    log.attached("app-", LEADER, GROUP)
    # Detached by this side, it is not attached again by the other one.
    log.ok(c.DetachNamespace("ab", GROUP, "app-"))
    log.refused("app-", LEADER, GROUP)


def test_what_this_side_attached_the_other_may_detach_and_attach_again_until_this_side_detaches_it() -> None:
    log = Log()
    log.attached("out-", LEADER, for_peer=False)
    assert log.granted == ["follow:out- (attached)"]
    log.ok(c.DetachNamespace("ab", TOPIC, "out-", for_peer=True))
    log.attached("out-", LEADER)
    log.ok(c.DetachNamespace("ab", TOPIC, "out-"))
    assert log.granted == []
    log.refused("out-", LEADER)


def test_what_this_side_withdraws_the_other_may_not_attach_again() -> None:
    for for_peer in (True, False):
        log = Log()
        log.attached("out-", LEADER, for_peer=False)
        log.ok(c.DetachNamespace("ab", TOPIC, "out-", for_peer=True))
        log.ok(c.RequestAttach("ab", AttachRequest(TOPIC, "out-", "out-", LEADER, asked_here=True)))
        log.ok(c.WithdrawAttach("ab", TOPIC, "out-", for_peer))
        assert log.granted == (["follow:out- (attached)"] if for_peer else [])


def test_revoked_is_what_comes_and_what_is_attached_goes_on() -> None:
    log = Log("lead:orders-,follow:audit-")
    log.attached("orders-eu-")
    log.ok(c.ChangeGrants("ab", taken=parse_grants("lead:orders-")))
    assert log.granted == ["follow:audit-", "lead:orders-eu- (attached)"]
    assert log.state.links["ab"].mapping(TOPIC, "orders-eu-") is not None
    log.refused("orders-us-")
    # Once it is detached, its own can be taken back as well.
    log.ok(c.DetachNamespace("ab", TOPIC, "orders-eu-", for_peer=True))
    log.ok(c.ChangeGrants("ab", taken=parse_grants("lead:orders-eu-")))
    log.refused("orders-eu-")
    refused = log.do(c.ChangeGrants("ab", taken=parse_grants("lead:orders-")))
    assert isinstance(refused, Rejected)
    assert "has no grant lead:orders-; it has follow:audit-" in refused.message


def test_a_copy_of_the_offsets_topic_is_granted_by_its_name() -> None:
    copy = c.SetOffsetsTopic("ab", FOLLOWER, OffsetsCopy(OffsetsForm.WHOLE), for_peer=True)
    log = Log("lead:orders-")
    refused = log.do(copy)
    assert isinstance(refused, Rejected)
    assert "lead:__consumer_offsets" in refused.message
    log.ok(c.ChangeGrants("ab", given=parse_grants("lead:__consumer_offsets")))
    log.ok(copy)


def test_what_waits_is_bounded_and_ends_when_it_is_attached_or_withdrawn() -> None:
    log = Log()
    for number in range(WAITING_MAX):
        log.ok(c.RequestAttach("ab", AttachRequest(TOPIC, f"p{number}-", "x-", FOLLOWER, False)))
    assert isinstance(log.do(c.RequestAttach("ab", AttachRequest(TOPIC, "more-", "x-", FOLLOWER, False))), Rejected)
    before = log.state.links["ab"]
    log.now_ms += 5_000
    assert log.ok(c.RequestAttach("ab", AttachRequest(TOPIC, "p0-", "x-", FOLLOWER, False))) == ()
    assert log.state.links["ab"] == before, "the same again is no change"
    log.ok(c.WithdrawAttach("ab", TOPIC, "p0-"))
    assert "p0-" not in log.waiting
    assert isinstance(log.do(c.WithdrawAttach("ab", TOPIC, "p0-")), Rejected)
    log.ok(c.ChangeGrants("ab", given=parse_grants("lead:p1-")))
    assert "p1-" in log.waiting, "whoever asked for it has it attached"
    log.attached("p1-")
    assert "p1-" not in log.waiting


def test_both_operators_who_ask_for_the_same_pair_agree() -> None:
    log = Log()
    log.ok(c.RequestAttach("ab", AttachRequest(TOPIC, "out-", "out-", LEADER, asked_here=True)))
    # That the other side says so as well does not make it that side's alone.
    log.ok(c.RequestAttach("ab", AttachRequest(TOPIC, "out-", "out-", LEADER, asked_here=False)))
    log.attached("out-", LEADER)
    assert log.waiting == []
    assert log.granted == ["follow:out- (attached)"], "as if this side had attached it"


def test_a_token_is_used_once_before_it_expires() -> None:
    log = Log()
    log.ok(c.CreateToken("00" * 8, "11" * 32, KEY, parse_grants("lead:orders-"), 61_000))
    log.ok(c.CreateToken("22" * 8, "33" * 32, KEY, (), 2_000))
    log.now_ms = 2_000
    late = log.do(c.CreateLink("late", str(uuid.UUID(int=8)), "C", False, token="22" * 8))
    assert isinstance(late, Rejected)
    assert late.code is Rejection.NOT_FOUND
    create = c.CreateLink("new", str(uuid.UUID(int=9)), "C", False, token="00" * 8, grants=EVERYTHING)
    log.ok(create)
    assert list(map(str, log.state.links["new"].grants)) == ["lead:orders-"], "the token's, whoever said what"
    assert log.ok(create) == (), "setting up both sides may be tried again"
    again = log.do(c.CreateLink("again", str(uuid.UUID(int=10)), "C", False, token="00" * 8))
    assert isinstance(again, Rejected)


def test_tokens_are_bounded_and_make_room_when_they_expire() -> None:
    log = Log()
    for number in range(TOKENS_MAX):
        log.ok(c.CreateToken(f"{number:016x}", "11" * 32, KEY, (), 2_000))
    one_more = c.CreateToken("ff" * 8, "11" * 32, KEY, (), 90_000)
    assert isinstance(log.do(one_more), Rejected)
    log.now_ms = 3_000
    log.ok(one_more)
    assert list(log.state.link_tokens) == ["ff" * 8]
    log.ok(c.DeleteToken("ff" * 8))
    assert isinstance(log.do(c.DeleteToken("ff" * 8)), Rejected)


@pytest.mark.parametrize(
    "wrong",
    ["replace:consumer-group:app-", "lead:__isthmus_", "lead:a b", "follow:principal:app-", "lead:" + "x" * 250],
)
def test_what_nobody_can_be_granted(wrong: str) -> None:
    log = Log()
    refused = log.do(c.ChangeGrants("ab", given=parse_grants(wrong)))
    assert isinstance(refused, Rejected)
    assert refused.code is Rejection.INVALID


def test_before_the_level_everything_is_as_it_was() -> None:
    log = Log(level=CONSENT - 1)
    log.attached("prod-", for_peer=False, truncate_topic_ids=(TOPIC_ID,))
    assert log.granted == []
    for new in (
        c.CreateToken("00" * 8, "11" * 32, KEY, (), 9_000),
        c.RequestAttach("ab", AttachRequest(TOPIC, "x-", "x-", LEADER, True)),
        c.CreateLink("new", str(uuid.UUID(int=9)), "C", False, grants=parse_grants("lead:x")),
    ):
        refused = log.do(new)
        assert isinstance(refused, Rejected)
        assert refused.code is Rejection.NOT_SUPPORTED
