"""What the control log accepts of plugins that are enabled for namespaces.

It knows neither plugins nor what their settings mean: the proxy that an operator asks checks that, and each proxy
again that applies it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from isthmus_control import commands as c
from isthmus_control.codec import MalformedValue, parse
from isthmus_control.control_state import ControlState
from isthmus_control.model import EnabledPlugin, Namespace, NamespaceKey
from isthmus_control.outcome import NamespaceChanged, Refuse, Rejection, require
from isthmus_control.rules.checks import Result

PLUGINS_MAX = 16
"""Of one namespace."""
SETTINGS_BYTES_MAX = 32 * 1024
PLUGIN_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}\Z")


def _namespace(state: ControlState, body: c.EnablePlugin | c.ConfigurePlugin | c.DisablePlugin) -> Namespace:
    key = NamespaceKey(body.type, body.prefix)
    namespace = state.namespaces.get(key)
    if namespace is None:
        raise Refuse(Rejection.NOT_FOUND, f"there is no {key}: create it first")
    return namespace


def _checked(body: c.EnablePlugin | c.ConfigurePlugin) -> EnabledPlugin:
    require(PLUGIN_NAME.match(body.plugin), Rejection.INVALID, f"{body.plugin!r} is no name of a plugin")
    require(body.version >= 1, Rejection.INVALID, f"version {body.version} of settings is below 1")
    size = len(body.settings.encode())
    require(
        size <= SETTINGS_BYTES_MAX,
        Rejection.INVALID,
        f"settings of {size} bytes are more than {SETTINGS_BYTES_MAX}",
    )
    try:
        settings = parse(body.settings.encode())
    except MalformedValue:
        settings = None
    require(type(settings) is dict, Rejection.INVALID, f"settings of {body.plugin!r} are no JSON object")
    return EnabledPlugin(body.plugin, body.settings, body.version)


def _placed(
    others: tuple[EnabledPlugin, ...], plugin: EnabledPlugin, position: int | None
) -> tuple[EnabledPlugin, ...]:
    require(
        position is None or 0 <= position <= len(others),
        Rejection.INVALID,
        f"there is no place {position} among {len(others)} other plugins: say 0 to {len(others)}",
    )
    at = len(others) if position is None else position
    return (*others[:at], plugin, *others[at:])


def _with(state: ControlState, offset: int, before: Namespace, plugins: tuple[EnabledPlugin, ...]) -> Result:
    if plugins == before.plugins:
        return state, ()
    after = replace(before, plugins=plugins, plugins_at_offset=offset)
    return state.evolve(namespaces={**state.namespaces, before.key: after}), (NamespaceChanged(before, after),)


def _enable(state: ControlState, offset: int, command: c.Command, body: c.EnablePlugin) -> Result:
    before, plugin = _namespace(state, body), _checked(body)
    require(
        all(each.name != plugin.name for each in before.plugins),
        Rejection.ALREADY_EXISTS,
        f"plugin {plugin.name!r} is enabled already for the {before.key}: configure it",
    )
    require(
        len(before.plugins) < PLUGINS_MAX, Rejection.CONFLICT, f"the {before.key} has {PLUGINS_MAX} plugins already"
    )
    return _with(state, offset, before, _placed(before.plugins, plugin, body.position))


def _configure(state: ControlState, offset: int, command: c.Command, body: c.ConfigurePlugin) -> Result:
    before, plugin = _namespace(state, body), _checked(body)
    place = _place(before, body.plugin)
    others = (*before.plugins[:place], *before.plugins[place + 1 :])
    return _with(state, offset, before, _placed(others, plugin, place if body.position is None else body.position))


def _disable(state: ControlState, offset: int, command: c.Command, body: c.DisablePlugin) -> Result:
    before = _namespace(state, body)
    place = _place(before, body.plugin)
    return _with(state, offset, before, (*before.plugins[:place], *before.plugins[place + 1 :]))


def _place(namespace: Namespace, name: str) -> int:
    for place, each in enumerate(namespace.plugins):
        if each.name == name:
            return place
    raise Refuse(Rejection.NOT_FOUND, f"plugin {name!r} is not enabled for the {namespace.key}")


PLUGIN_HANDLERS: Mapping[type[c.Body], Callable[[ControlState, int, c.Command, Any], Result]] = {
    c.EnablePlugin: _enable,
    c.ConfigurePlugin: _configure,
    c.DisablePlugin: _disable,
}
