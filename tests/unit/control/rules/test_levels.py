"""Raising the log's feature level, and what is refused before and after."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
from support.command_log import CommandLog

from isthmus_control import apply as applying
from isthmus_control import commands as c
from isthmus_control.codec import canonical
from isthmus_control.model import BrokerClaim, ResourceType
from isthmus_control.outcome import Duplicate, LevelRaised, Outcome, Refuse, Rejected, Rejection
from isthmus_control.rules.levels import check_writable


def claim(name: str, version: str, broker: int = 1) -> c.ClaimBrokers:
    return c.ClaimBrokers(name, str(uuid.uuid4()), (BrokerClaim(broker, "h", 9),), False, None, 10_000, version, -1)


def refused(outcome: Outcome) -> tuple[Rejection, str]:
    assert isinstance(outcome, Rejected), outcome
    return outcome.code, outcome.message


def test_a_level_is_raised_and_never_lowered() -> None:
    log = CommandLog()
    assert b"level" not in canonical(log.state)
    assert log.ok(c.RaiseLevel(2)) == (LevelRaised(0, 2),)
    assert b'"level":2' in canonical(log.state)
    assert log.ok(c.RaiseLevel(2)) == ()
    assert refused(log.do(c.RaiseLevel(1))) == (
        Rejection.CONFLICT,
        "the control log has feature level 2, and that is never lowered",
    )
    assert refused(log.do(c.RaiseLevel(0)))[0] is Rejection.INVALID
    assert log.state.level == 2


def test_a_proxy_that_does_not_know_the_level_holds_it_up_until_its_lease_is_gone() -> None:
    log = CommandLog()
    log.ok(claim("p1", "0.2.0+level.1"))
    old = claim("p2", "0.1.0", 2)
    log.ok(old)
    code, words = refused(log.do(c.RaiseLevel(1)))
    assert code is Rejection.CONFLICT
    assert "proxy 'p2' (version 0.1.0) knows feature level 0 at most" in words
    # A process that a newer one of its name replaced may still run.
    log.ok(claim("p2", "0.2.0+level.1", 2))
    assert refused(log.do(c.RaiseLevel(1)))[0] is Rejection.CONFLICT
    log.ok(c.ReleaseLease("p2", old.incarnation))
    assert log.ok(c.RaiseLevel(1)) == (LevelRaised(0, 1),)
    assert "'p1'" in refused(log.do(c.RaiseLevel(2)))[1]


def test_what_is_refused_is_not_even_written() -> None:
    """The version before stops at the record, accepted or not."""
    log = CommandLog()
    log.ok(claim("p1", "0.1.0"))
    for body in (c.RaiseLevel(1), c.RaiseLevel(0)):
        with pytest.raises(Refuse):
            check_writable(log.state, body)
    check_writable(log.state, c.RegisterProducerIds("B"))
    check_writable(CommandLog().state, c.RaiseLevel(1))


def test_a_claim_that_crossed_with_the_raising_is_refused() -> None:
    log = CommandLog()
    log.ok(c.RaiseLevel(1))
    code, words = refused(log.do(claim("p1", "0.1.0")))
    assert code is Rejection.NOT_SUPPORTED
    assert "knows feature level 0 at most, and the control log has 1" in words
    log.ok(claim("p1", "0.2.0+level.1"))


KEY, OTHER = "ab12cd34", "00ff00ff"


def test_records_are_signed_once_every_proxy_has_the_key() -> None:
    log = CommandLog()
    log.ok(claim("p1", f"0.3.0+key.{KEY}.level.2"))
    second = claim("p2", "0.3.0+level.2", 2)
    log.ok(second)
    assert refused(log.do(c.RaiseLevel(2, KEY))) == (
        Rejection.CONFLICT,
        f"proxy 'p2' has no control key, and is to have {KEY}: set cluster.control_key_file to the same key on all "
        f"proxies",
    )
    log.ok(replace(second, version=f"0.3.0+key.{OTHER}.level.2"))
    assert f"proxy 'p2' has the control key {OTHER}, not {KEY}" in refused(log.do(c.RaiseLevel(2, KEY)))[1]
    # Without a key the level may be raised nevertheless, and again with one.
    assert log.ok(c.RaiseLevel(2)) == (LevelRaised(0, 2),)
    log.ok(replace(second, version=f"0.3.0+key.{KEY}.level.2"))
    assert log.ok(c.RaiseLevel(2, KEY)) == (LevelRaised(2, 2, KEY),)
    assert log.state.key_id == KEY
    for body in (c.RaiseLevel(2), c.RaiseLevel(2, KEY)):
        assert log.ok(body) == ()
    assert refused(log.do(c.RaiseLevel(2, OTHER))) == (
        Rejection.CONFLICT,
        f"the records of the control log are signed with the control key {KEY}, and that is not changed",
    )
    assert log.state.key_id == KEY


def test_below_level_2_nothing_is_signed() -> None:
    log = CommandLog()
    assert refused(log.do(c.RaiseLevel(1, KEY)))[0] is Rejection.NOT_SUPPORTED
    with pytest.raises(Refuse):
        check_writable(log.state, c.RaiseLevel(1, KEY))
    check_writable(log.state, c.RaiseLevel(2, KEY))
    assert b"key_id" not in c.encode(c.Command(str(uuid.uuid4()), 1, "p", 0, c.RaiseLevel(1)))
    assert b"key_id" not in canonical(log.state)


def test_a_copy_of_a_signed_record_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who does not have the key can append copies: of what counted lately, long ago, or in another generation."""
    monkeypatch.setattr(applying, "REMEMBERED_COMMANDS", 4)
    log = CommandLog()
    lease = claim("p1", f"0.3.0+key.{KEY}.level.2")
    log.ok(lease)
    log.ok(c.RaiseLevel(2, KEY))
    renewal = {"seen": log.state.applied_offset, "id": str(uuid.uuid4())}
    log.ok(c.RenewLease("p1", lease.incarnation, -1), **renewal)
    created = {"seen": log.state.applied_offset, "id": str(uuid.uuid4())}
    prefix = c.Prefix(0, "")
    log.ok(c.CreateNamespace(ResourceType.TOPIC, "a-"), **created, prefix=prefix)
    assert isinstance(log.do(c.CreateNamespace(ResourceType.TOPIC, "a-"), **created), Duplicate)
    for number in range(5):
        log.ok(c.CreateNamespace(ResourceType.TOPIC, f"n{number}-"))
    log.ok(c.DeleteNamespace(ResourceType.TOPIC, "a-"))
    for body, envelope in (
        (c.RenewLease("p1", lease.incarnation, -1), renewal),
        (c.CreateNamespace(ResourceType.TOPIC, "a-"), created),
    ):
        assert refused(log.do(body, **envelope))[0] is Rejection.STALE
    renewed_at = log.state.proxies["p1"].renewed_at_offset
    log.ok(c.AcceptLog(7), prefix=prefix)
    fresh = c.CreateNamespace(ResourceType.TOPIC, "b-")
    assert "before an operator accepted" in refused(log.do(fresh, prefix=prefix))[1]
    assert log.state.proxies["p1"].renewed_at_offset == renewed_at
    assert log.state.namespace(ResourceType.TOPIC, "a-") is None
    log.ok(fresh, prefix=c.Prefix(7, ""))


@dataclass(frozen=True, slots=True)
class Newer(c.Body):
    KIND: ClassVar[str] = "newer"
    SINCE: ClassVar[int] = 1


def test_what_a_level_brings_is_refused_below_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(c, "KINDS", {**c.KINDS, "newer": Newer})
    monkeypatch.setattr(applying, "_HANDLERS", {**applying._HANDLERS, Newer: lambda state, *_: (state, ())})
    log = CommandLog()
    code, words = refused(log.do(Newer()))
    assert code is Rejection.NOT_SUPPORTED
    assert "newer needs feature level 1 of the control log, which has 0" in words
    log.ok(c.RaiseLevel(1))
    log.ok(Newer())
