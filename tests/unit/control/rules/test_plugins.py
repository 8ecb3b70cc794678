"""Plugins that are enabled for namespaces, as the control log keeps them."""

from __future__ import annotations

from typing import Any

from support.command_log import CommandLog

from isthmus_control import commands as c
from isthmus_control.codec import canonical, from_json, parse
from isthmus_control.control_state import ControlState
from isthmus_control.model import EnabledPlugin, NamespaceKey, ResourceType
from isthmus_control.outcome import Rejected, Rejection
from isthmus_control.rules.plugins import PLUGINS_MAX, SETTINGS_BYTES_MAX

TOPIC, GROUP = ResourceType.TOPIC, ResourceType.CONSUMER_GROUP


class Log(CommandLog):
    def __init__(self) -> None:
        super().__init__()
        self.ok(c.CreateNamespace(TOPIC, "pay-"))

    def refused(self, body: c.Body, code: Rejection, words: str) -> None:
        before = self.state.namespaces
        outcome = self.do(body)
        assert isinstance(outcome, Rejected)
        assert (outcome.code, self.state.namespaces) == (code, before)
        assert words in outcome.message

    @property
    def enabled(self) -> list[str]:
        return [each.name for each in self.state.namespaces[NamespaceKey(TOPIC, "pay-")].plugins]


def enable(name: str, settings: str = "{}", **more: Any) -> c.EnablePlugin:
    return c.EnablePlugin(TOPIC, "pay-", name, settings, 1, **more)


def configure(name: str, settings: str = "{}", version: int = 1, **more: Any) -> c.ConfigurePlugin:
    return c.ConfigurePlugin(TOPIC, "pay-", name, settings, version, **more)


def test_plugins_are_enabled_in_an_order_and_disabled() -> None:
    log = Log()
    log.ok(enable("b"))
    log.ok(enable("d"))
    log.ok(enable("a", position=0))
    log.ok(enable("c", position=2))
    assert log.enabled == ["a", "b", "c", "d"]
    log.ok(configure("a", position=3))
    assert log.enabled == ["b", "c", "d", "a"]
    log.ok(c.DisablePlugin(TOPIC, "pay-", "c"))
    assert log.enabled == ["b", "d", "a"]
    namespace = log.state.namespaces[NamespaceKey(TOPIC, "pay-")]
    assert namespace.plugins_at_offset == log.state.applied_offset, "that is waited for"
    assert from_json(ControlState, parse(canonical(log.state))) == log.state


def test_settings_change_and_keep_their_place() -> None:
    log = Log()
    log.ok(enable("a", '{"x":1}'))
    log.ok(enable("b"))
    log.ok(configure("a", '{"x":2}', version=3))
    plugins = log.state.namespaces[NamespaceKey(TOPIC, "pay-")].plugins
    assert plugins == (EnabledPlugin("a", '{"x":2}', 3), EnabledPlugin("b", "{}", 1))
    changed_at = log.state.namespaces[NamespaceKey(TOPIC, "pay-")].plugins_at_offset
    log.ok(configure("a", '{"x":2}', version=3))
    assert log.state.namespaces[NamespaceKey(TOPIC, "pay-")].plugins_at_offset == changed_at, "nothing has changed"


def test_what_cannot_be_enabled() -> None:
    log = Log()
    log.refused(c.EnablePlugin(TOPIC, "x-", "a", "{}", 1), Rejection.NOT_FOUND, "'x-'")
    log.refused(enable("a b"), Rejection.INVALID, "no name of a plugin")
    for settings in ("", "[]", "1", '{"x":1,"x":2}', "{"):
        log.refused(enable("a", settings), Rejection.INVALID, "no JSON object")
    log.refused(enable("a", '{"x":"' + "y" * SETTINGS_BYTES_MAX + '"}'), Rejection.INVALID, "are more than")
    log.refused(c.EnablePlugin(TOPIC, "pay-", "a", "{}", 0), Rejection.INVALID, "below 1")
    log.refused(enable("a", position=1), Rejection.INVALID, "no place 1")
    log.ok(enable("a"))
    log.refused(enable("a"), Rejection.ALREADY_EXISTS, "configure it")
    for position in (-1, 1):
        log.refused(configure("a", position=position), Rejection.INVALID, "no place")
    log.refused(configure("b"), Rejection.NOT_FOUND, "'b' is not enabled")
    log.refused(c.DisablePlugin(TOPIC, "pay-", "b"), Rejection.NOT_FOUND, "'b' is not enabled")
    for number in range(PLUGINS_MAX - 1):
        log.ok(enable(f"p{number}"))
    log.refused(enable("one-more"), Rejection.CONFLICT, "plugins already")


def test_a_resource_has_the_plugins_of_all_namespaces_that_hold_it_the_widest_first() -> None:
    log = Log()
    log.ok(c.CreateNamespace(TOPIC, ""))
    log.ok(c.CreateNamespace(TOPIC, "pay-eu-"))
    log.ok(c.CreateNamespace(GROUP, "pay-"))
    log.ok(enable("a"))
    log.ok(c.EnablePlugin(TOPIC, "pay-eu-", "b", "{}", 1))
    log.ok(c.EnablePlugin(TOPIC, "", "c", "{}", 1))
    log.ok(c.EnablePlugin(GROUP, "pay-", "d", "{}", 1))

    def plugged(kind: ResourceType, name: str) -> list[str]:
        return [plugin.name for each in log.state.lookup.plugged(kind, name) for plugin in each.plugins]

    assert plugged(TOPIC, "pay-eu-t") == ["c", "a", "b"]
    assert plugged(TOPIC, "pay-t") == ["c", "a"]
    assert plugged(TOPIC, "__consumer_offsets") == []
    assert plugged(GROUP, "pay-g") == ["d"]
    assert plugged(ResourceType.PRINCIPAL, "User:pay-") == []
    log.ok(c.DeleteNamespace(TOPIC, ""))
    assert plugged(TOPIC, "pay-t") == ["a"]


def test_an_older_snapshot_has_no_plugins() -> None:
    log = Log()
    raw = parse(canonical(log.state))
    for _, namespace in raw["namespaces"]:
        del namespace["plugins"], namespace["plugins_at_offset"]
    assert from_json(ControlState, raw) == log.state
