"""What the control log records of bindings that links made."""

from __future__ import annotations

import uuid
from dataclasses import replace

import pytest

from isthmus_control import commands as c
from isthmus_control.acls import AclBinding, AclResource, Pattern, Permission
from isthmus_control.apply import apply
from isthmus_control.control_state import ControlState
from isthmus_control.model import ResourceType, Role
from isthmus_control.outcome import Accepted, AclsRecorded, Outcome, Rejected, Rejection
from isthmus_control.rules import acls

PRINCIPAL = ResourceType.PRINCIPAL
APP = "User:app-"


def binding(name: str, principal: str = "User:app-1") -> AclBinding:
    return AclBinding(AclResource.TOPIC, name, Pattern.LITERAL, principal, "*", 3, Permission.ALLOW)


A, B, C = (binding(name) for name in "abc")


class Log:
    """A log in which the principals ``User:app-`` follow on link ``l``."""

    def __init__(self) -> None:
        self.state = ControlState("B")
        self.do(c.CreateLink("l", str(uuid.uuid4()), "A", True, ("a:1",)))
        self.do(c.AttachNamespace("l", PRINCIPAL, APP, APP, Role.FOLLOWER, create_missing=True))

    def do(self, body: c.Body) -> Outcome:
        command = c.Command(str(uuid.uuid4()), 1, "test", self.state.applied_offset, body)
        self.state, outcome = apply(self.state, self.state.applied_offset + 1, command)
        return outcome

    def record(self, made: tuple[AclBinding, ...] = (), deleted: tuple[AclBinding, ...] = ()) -> Outcome:
        return self.do(c.RecordAcls("l", APP, made, deleted))


def test_what_is_made_is_known_until_it_is_deleted() -> None:
    log = Log()
    assert log.record(made=(B, A)) == Accepted((AclsRecorded(APP, 2),))
    assert log.state.acls == {APP: (A, B)}
    assert log.record(made=(A,)) == Accepted(())
    assert log.record(made=(C,), deleted=(A,)) == Accepted((AclsRecorded(APP, 2),))
    assert log.state.acls == {APP: (B, C)}
    log.record(deleted=(B, C))
    assert log.state.acls == {}


def test_only_a_link_that_the_namespace_follows_makes_bindings_of_its_principals() -> None:
    log = Log()
    for body, code in (
        (c.RecordAcls("other", APP, (A,)), Rejection.CONFLICT),
        (c.RecordAcls("l", "User:b-", (A,)), Rejection.CONFLICT),
        (c.RecordAcls("l", APP, (binding("a", "User:bob"),)), Rejection.INVALID),
    ):
        outcome = log.do(body)
        assert isinstance(outcome, Rejected)
        assert outcome.code is code
    log.do(c.AttachNamespace("l", PRINCIPAL, "User:led-", "User:led-", Role.LEADER, create_missing=True))
    assert isinstance(log.do(c.RecordAcls("l", "User:led-", ())), Rejected)


def test_there_is_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acls, "ACLS_MAX", 2)
    log = Log()
    log.record(made=(A, B))
    assert isinstance(log.record(made=(C,)), Rejected)
    assert log.record(made=(C,), deleted=(A,)) == Accepted((AclsRecorded(APP, 2),))


def test_the_record_outlives_the_link_and_ends_with_the_reservation() -> None:
    for end in (c.AlterNamespace(PRINCIPAL, APP, False), c.DeleteNamespace(PRINCIPAL, APP)):
        log = Log()
        log.record(made=(A,))
        log.do(c.DeleteLink("l"))
        assert log.state.acls == {APP: (A,)}
        assert replace(log.state).namespaces[PRINCIPAL, APP].reserved
        outcome = log.do(end)
        assert isinstance(outcome, Accepted)
        assert AclsRecorded(APP, 0) in outcome.changes
        assert log.state.acls == {}


def test_a_promoted_namespace_has_bindings_of_its_own() -> None:
    log = Log()
    log.record(made=(A,))
    owner = str(uuid.uuid4())
    log.do(c.BeginPromotion("l", PRINCIPAL, APP, {}, owner))
    log.do(c.DetachNamespace("l", PRINCIPAL, APP))
    outcome = log.do(c.EndPromotion(PRINCIPAL, APP, owner))
    assert isinstance(outcome, Accepted), outcome
    assert AclsRecorded(APP, 0) in outcome.changes
    assert log.state.acls == {}
