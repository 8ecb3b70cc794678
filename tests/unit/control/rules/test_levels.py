"""Raising the log's feature level, and what is refused before and after."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import ClassVar

import pytest
from support.command_log import CommandLog

from isthmus_control import apply as applying
from isthmus_control import commands as c
from isthmus_control.codec import canonical
from isthmus_control.model import BrokerClaim
from isthmus_control.outcome import LevelRaised, Outcome, Refuse, Rejected, Rejection
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
