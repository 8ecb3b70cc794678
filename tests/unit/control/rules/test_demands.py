"""What namespaces ask of synchronous links."""

from __future__ import annotations

import uuid

import pytest
from support.command_log import CommandLog

from isthmus_control import commands as c
from isthmus_control.codec import canonical, from_json, parse
from isthmus_control.control_state import ControlState
from isthmus_control.demands import ALL, NEVER, NONE, Confirm, Consistency, Demands, Visibility
from isthmus_control.levels import INFORMATIONAL, STALE_READS
from isthmus_control.model import LinkMode, NamespaceKey, ResourceType, Role
from isthmus_control.outcome import Rejected, Rejection

TOPIC, GROUP, PRINCIPAL = ResourceType.TOPIC, ResourceType.CONSUMER_GROUP, ResourceType.PRINCIPAL
STRICT, AVAILABLE = Consistency.STRICT, Consistency.AVAILABLE


class Log(CommandLog):
    def refused(self, body: c.Body, code: Rejection, words: str) -> None:
        before = self.state.namespaces
        outcome = self.do(body)
        assert isinstance(outcome, Rejected)
        assert (outcome.code, self.state.namespaces) == (code, before)
        assert words in outcome.message

    def demands(self, name: str, kind: ResourceType = TOPIC) -> Demands:
        return self.state.lookup.demands(kind, name)


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
    log.refused(c.CreateNamespace(PRINCIPAL, "User:p-", demands=Demands(STRICT)), Rejection.INVALID, "neither")
    log.ok(c.CreateNamespace(PRINCIPAL, "User:p-"))
    log.refused(c.AlterDemands(PRINCIPAL, "User:p-", STRICT), Rejection.INVALID, "neither")
    log.ok(c.AlterDemands(PRINCIPAL, "User:p-", AVAILABLE))
    confirmed = Demands(visibility=Visibility.CONFIRMED)
    log.refused(c.CreateNamespace(GROUP, "g-", demands=confirmed), Rejection.INVALID, "no topics")
    log.refused(
        c.CreateNamespace(TOPIC, "i-", informational=True, demands=Demands(STRICT)), Rejection.INVALID, "informational"
    )
    log.ok(c.CreateNamespace(TOPIC, "i-", informational=True))
    log.refused(c.AlterDemands(TOPIC, "i-", STRICT), Rejection.INVALID, "informational")


def test_acks_go_without_a_link_only_where_all_namespaces_say_so() -> None:
    log = Log()
    for name in ("b", "c"):
        log.ok(c.CreateLink(name, str(uuid.uuid4()), name.upper(), True, ("h:1",)))
    any_of = Confirm.parse("ANY 1 (c, b)")
    assert (any_of, str(any_of), str(ALL), Confirm.parse("all")) == (Confirm(1, ("b", "c")), "ANY 1 (b, c)", "ALL", ALL)
    log.ok(c.CreateNamespace(TOPIC, "pay-", demands=Demands(degrade_after_ms=60_000, confirm=any_of)))
    assert (log.demands("pay-t").degrade_after_ms, log.demands("pay-t").confirm) == (60_000, any_of)
    log.ok(c.CreateNamespace(TOPIC, "pay-t"))
    assert log.demands("pay-t") == NONE
    assert log.demands("pay-u").confirm == any_of
    log.ok(c.AlterDemands(TOPIC, "pay-t", degrade_after_ms=90_000, confirm=any_of))
    assert (log.demands("pay-t").degrade_after_ms, log.demands("pay-t").confirm) == (90_000, any_of)
    log.ok(c.AlterDemands(TOPIC, "pay-t", confirm=Confirm(2, ("b", "c"))))
    assert log.demands("pay-t").confirm == ALL, "one asks for another set"
    log.ok(c.AlterDemands(TOPIC, "pay-", degrade_after_ms=NEVER, confirm=ALL))
    assert log.demands("pay-u") == NONE
    assert from_json(ControlState, parse(canonical(log.state))) == log.state


def test_groups_ask_for_themselves() -> None:
    log = Log()
    for name in ("b", "c"):
        log.ok(c.CreateLink(name, str(uuid.uuid4()), name.upper(), True, ("h:1",)))
    any_of = Confirm(1, ("b", "c"))
    log.ok(c.CreateNamespace(TOPIC, "pay-", demands=Demands(STRICT)))
    log.ok(c.AttachNamespace("b", GROUP, "pay-", "far-", Role.LEADER, create_missing=True))
    assert (log.demands("pay-g", GROUP), log.state.lookup.demanding(GROUP, "pay-g")) == (NONE, "")
    assert log.state.lookup.led_groups("b") == ("",)
    log.ok(c.CreateNamespace(GROUP, "pay-eu-", demands=Demands(degrade_after_ms=60_000, confirm=any_of)))
    log.ok(c.CreateNamespace(GROUP, "other-"))
    lookup = log.state.lookup
    assert log.demands("pay-eu-g", GROUP) == NONE, "the one around it asks for all, and for ever"
    log.ok(c.AlterDemands(GROUP, "pay-", degrade_after_ms=60_000, confirm=any_of))
    assert log.demands("pay-eu-g", GROUP).confirm == any_of
    names = "pay-g", "pay-eu-g", "other-g", "nobody"
    assert [lookup.demanding(GROUP, each) for each in names] == ["pay-", "pay-eu-", "other-", ""]
    assert (lookup.led_groups("b"), lookup.led_groups("c")) == (("pay-", "pay-eu-"), ())
    assert log.demands("pay-t") == Demands(STRICT)
    assert from_json(ControlState, parse(canonical(log.state))) == log.state


def test_sets_and_times_that_cannot_be() -> None:
    log = Log()
    log.ok(c.CreateLink("b", str(uuid.uuid4()), "B", True, ("h:1",)))
    log.ok(c.CreateNamespace(TOPIC, "pay-"))
    for confirm in (Confirm(0, ("b",)), Confirm(2, ("b",)), Confirm(1, ("b", "b")), Confirm(1, ())):
        log.refused(c.AlterDemands(TOPIC, "pay-", confirm=confirm), Rejection.INVALID, "cannot be confirmed")
    log.refused(c.AlterDemands(TOPIC, "pay-", confirm=Confirm(1, ("b", "x"))), Rejection.NOT_FOUND, "'x'")
    unknown = Demands(confirm=Confirm(1, ("x",)))
    log.refused(c.CreateNamespace(TOPIC, "x-", demands=unknown), Rejection.NOT_FOUND, "'x'")
    for after_ms in (-1, 999, 10**12):
        log.refused(c.AlterDemands(TOPIC, "pay-", degrade_after_ms=after_ms), Rejection.INVALID, "ms")


@pytest.mark.parametrize("text", ["", "ANY", "ANY 1", "ANY 1 ()", "ANY (b)", "1 (b)", "ANY 1 (b,,c)", "ANY -1 (b)"])
def test_what_is_not_a_set(text: str) -> None:
    with pytest.raises(ValueError, match="neither ALL"):
        Confirm.parse(text)


def test_an_older_snapshot_asks_for_nothing() -> None:
    log = Log()
    log.ok(c.CreateNamespace(TOPIC, "pay-"))
    raw = parse(canonical(log.state))
    for _, namespace in raw["namespaces"]:
        del namespace["demands"]
    assert from_json(ControlState, raw).namespaces[NamespaceKey(TOPIC, "pay-")].demands == NONE


def test_whether_a_namespace_is_informational_is_altered_where_no_synchronous_link_has_it() -> None:
    log = Log()
    log.ok(c.CreateNamespace(TOPIC, "n-"))
    log.refused(c.AlterDemands(TOPIC, "n-", informational=True), Rejection.NOT_SUPPORTED, "level")
    log.ok(c.RaiseLevel(INFORMATIONAL))
    log.ok(c.CreateLink("ab", str(uuid.uuid4()), "B", True, ("h:1",)))
    log.ok(c.AttachNamespace("ab", TOPIC, "n-", "n-", Role.LEADER))
    log.ok(c.AlterLink("ab", LinkMode.SYNCHRONOUS))
    log.refused(c.AlterDemands(TOPIC, "n-", informational=True), Rejection.CONFLICT, "synchronous link 'ab'")
    log.ok(c.AlterLink("ab", LinkMode.ASYNCHRONOUS))
    log.ok(c.AlterDemands(TOPIC, "n-", informational=True))
    log.refused(c.AlterLink("ab", LinkMode.SYNCHRONOUS), Rejection.CONFLICT, "informational")
    log.refused(c.AlterDemands(TOPIC, "n-", STRICT), Rejection.INVALID, "informational")
    log.ok(c.AlterDemands(TOPIC, "n-", STRICT, informational=False))
    log.refused(c.AlterDemands(TOPIC, "n-", informational=True), Rejection.INVALID, "informational")
    log.ok(c.AlterDemands(TOPIC, "n-", AVAILABLE, informational=True))
    assert log.state.namespaces[NamespaceKey(TOPIC, "n-")].informational
    assert from_json(ControlState, parse(canonical(log.state))) == log.state


def test_stale_reads_are_of_topics_that_may_follow_over_synchronous_links() -> None:
    log = Log()
    log.refused(c.CreateNamespace(TOPIC, "n-", stale_reads=False), Rejection.NOT_SUPPORTED, "level")
    log.ok(c.RaiseLevel(STALE_READS))
    log.refused(c.CreateNamespace(GROUP, "n-", stale_reads=False), Rejection.INVALID, "no topics")
    log.refused(
        c.CreateNamespace(TOPIC, "n-", informational=True, stale_reads=False), Rejection.INVALID, "informational"
    )
    log.ok(c.CreateNamespace(TOPIC, "n-", stale_reads=False))
    log.ok(c.CreateNamespace(TOPIC, ""))
    names = "n-t", "other", "__consumer_offsets"
    assert [log.state.lookup.reads_stale(each) for each in names] == [False, True, True]
    log.refused(c.AlterDemands(TOPIC, "n-", informational=True), Rejection.INVALID, "informational")
    log.ok(c.AlterDemands(TOPIC, "", stale_reads=False))
    log.ok(c.AlterDemands(TOPIC, "n-", stale_reads=True))
    assert [log.state.lookup.reads_stale(each) for each in names] == [False, False, True], "one says no"
    log.ok(c.AlterDemands(TOPIC, "", stale_reads=True))
    assert log.demands("n-t") == NONE
    assert log.state.lookup.reads_stale("n-t")
    assert from_json(ControlState, parse(canonical(log.state))) == log.state
