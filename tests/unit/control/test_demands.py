"""What namespaces ask of synchronous links."""

from __future__ import annotations

import uuid

from isthmus_control import commands as c
from isthmus_control.apply import apply
from isthmus_control.codec import canonical, from_json, parse
from isthmus_control.control_state import ControlState
from isthmus_control.demands import NONE, Consistency, Demands
from isthmus_control.model import NamespaceKey, ResourceType
from isthmus_control.outcome import Accepted, Outcome, Rejected, Rejection

TOPIC, GROUP = ResourceType.TOPIC, ResourceType.CONSUMER_GROUP
STRICT, AVAILABLE = Consistency.STRICT, Consistency.AVAILABLE


class Log:
    def __init__(self) -> None:
        self.state = ControlState("A")

    def do(self, body: c.Body) -> Outcome:
        command = c.decode(c.encode(c.Command(str(uuid.uuid4()), 1_000, "p", self.state.applied_offset, body)))
        self.state, outcome = apply(self.state, self.state.applied_offset + 1, command)
        return outcome

    def ok(self, body: c.Body) -> None:
        assert isinstance(outcome := self.do(body), Accepted), outcome

    def refused(self, body: c.Body, code: Rejection, words: str) -> None:
        before = self.state.namespaces
        outcome = self.do(body)
        assert isinstance(outcome, Rejected)
        assert (outcome.code, self.state.namespaces) == (code, before)
        assert words in outcome.message

    def demands(self, topic: str) -> Demands:
        return self.state.lookup.demands(topic)


def test_a_namespace_asks_for_more_and_takes_it_back() -> None:
    log = Log()
    log.ok(c.CreateNamespace(TOPIC, "pay-", demands=Demands(STRICT)))
    log.ok(c.CreateNamespace(TOPIC, "log-"))
    assert (log.demands("pay-t").strict, log.demands("log-t"), log.demands("other")) == (True, NONE, NONE)
    log.ok(c.AlterDemands(TOPIC, "pay-"))  # nothing is altered
    log.ok(c.AlterNamespace(TOPIC, "pay-", True))  # another thing is
    assert log.demands("pay-t").strict
    assert from_json(ControlState, parse(canonical(log.state))) == log.state
    log.ok(c.AlterDemands(TOPIC, "pay-", AVAILABLE))
    log.ok(c.AlterDemands(TOPIC, "log-", STRICT))
    assert (log.demands("pay-t"), log.demands("log-t").strict) == (NONE, True)
    log.ok(c.DeleteNamespace(TOPIC, "log-"))
    assert log.demands("log-t") == NONE


def test_a_topic_in_several_namespaces_gets_the_most_that_one_asks() -> None:
    log = Log()
    log.ok(c.CreateNamespace(TOPIC, "", demands=Demands(STRICT)))
    log.ok(c.CreateNamespace(TOPIC, "pay-", demands=Demands(AVAILABLE)))
    assert log.demands("pay-t").strict
    assert not log.demands("__consumer_offsets").strict


def test_what_cannot_be_asked_for() -> None:
    log = Log()
    log.refused(c.AlterDemands(TOPIC, "x", STRICT), Rejection.NOT_FOUND, "'x'")
    log.refused(c.CreateNamespace(GROUP, "g-", demands=Demands(STRICT)), Rejection.INVALID, "no topics")
    log.ok(c.CreateNamespace(GROUP, "g-"))
    log.refused(c.AlterDemands(GROUP, "g-", STRICT), Rejection.INVALID, "no topics")
    log.ok(c.AlterDemands(GROUP, "g-", AVAILABLE))
    log.refused(
        c.CreateNamespace(TOPIC, "i-", informational=True, demands=Demands(STRICT)), Rejection.INVALID, "informational"
    )
    log.ok(c.CreateNamespace(TOPIC, "i-", informational=True))
    log.refused(c.AlterDemands(TOPIC, "i-", STRICT), Rejection.INVALID, "informational")


def test_an_older_snapshot_asks_for_nothing() -> None:
    log = Log()
    log.ok(c.CreateNamespace(TOPIC, "pay-"))
    raw = parse(canonical(log.state))
    for _, namespace in raw["namespaces"]:
        del namespace["demands"]
    assert from_json(ControlState, raw).namespaces[NamespaceKey(TOPIC, "pay-")].demands == NONE
