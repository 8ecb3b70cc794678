"""The routes of plugins that namespaces have.

Settings are checked here, by the proxy that is asked, against the plugin's own schema. Each other proxy checks them
again when it applies the change; one that cannot run the plugin refuses what it would look at.
"""

from __future__ import annotations

from typing import Any, Final

from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse

from isthmus.admin import problems, views
from isthmus.admin.control import Prefix, Wait, append, control_of, enforced, namespace_of
from isthmus.admin.hiding import settings_for_who_asks
from isthmus.admin.models import DisabledPluginView, EnabledPluginView, PluginRequest, PluginsView
from isthmus.admin.services import AdminServices, ControlLogPort
from isthmus_control.codec import canonical_json
from isthmus_control.commands import ConfigurePlugin, DisablePlugin, EnablePlugin
from isthmus_control.model import EnabledPlugin, ResourceType
from isthmus_plugins.links import OperationError
from isthmus_plugins.namespace_host import NamespaceHost

ENDS_TIMEOUT_S: Final = 10.0
"""How long an answer waits for a plugin to end."""


def install(app: FastAPI, services: AdminServices) -> None:
    """Add the routes."""
    accepted: dict[int | str, dict[str, Any]] = {
        202: {
            "model": EnabledPluginView,
            "description": "Decided; `waiting_for` names the proxies that do not act on it yet.",
        }
    }
    disabled: dict[int | str, dict[str, Any]] = {
        202: {
            "model": DisabledPluginView,
            "description": "Decided; `waiting_for` names the proxies that may still ask it, `ended` is this proxy's.",
        }
    }
    path = "/v1/namespaces/{type}/plugins/{plugin}"

    @app.get("/v1/plugins", tags=["plugins"], summary="List plugins: what namespaces can have, and have")
    async def list_plugins() -> PluginsView:
        host = _host(services)
        enabled = [
            each.model_copy(update={"settings": settings_for_who_asks(each.settings)}) for each in host.statuses()
        ]
        return PluginsView(offered=host.offers(), enabled=enabled)

    @app.post(path, tags=["plugins"], summary="Enable a plugin", status_code=201, responses=accepted)
    async def enable_plugin(
        type: ResourceType, plugin: str, prefix: Prefix, request: PluginRequest, response: Response, wait: Wait = True
    ) -> EnabledPluginView:
        settings, version = _checked(services, type, prefix, plugin, request.settings or {})
        body = EnablePlugin(type, prefix, plugin, settings, version, request.position)
        control = await append(services, body)
        return await _changed(control, type, prefix, plugin, response, wait)

    @app.patch(path, tags=["plugins"], summary="Configure a plugin", responses=accepted)
    async def configure_plugin(
        type: ResourceType, plugin: str, prefix: Prefix, request: PluginRequest, response: Response, wait: Wait = True
    ) -> EnabledPluginView:
        """Settings that are given replace all settings."""
        enabled = _enabled(control_of(services), type, prefix, plugin)
        settings, version = enabled.settings, enabled.version
        if request.settings is not None:
            settings, version = _checked(services, type, prefix, plugin, request.settings)
        body = ConfigurePlugin(type, prefix, plugin, settings, version, request.position)
        control = await append(services, body)
        return await _changed(control, type, prefix, plugin, response, wait)

    @app.delete(path, tags=["plugins"], summary="Disable a plugin", status_code=204, responses=disabled)
    async def disable_plugin(type: ResourceType, plugin: str, prefix: Prefix, wait: Wait = True) -> Response:
        """Answered when no proxy asks it any more, and it has ended on this one, or after ten seconds: acks that wait
        for it go on waiting for as long as they would have."""
        control = await append(services, DisablePlugin(type, prefix, plugin))
        offset = namespace_of(control, type, prefix).plugins_at_offset
        assert offset is not None
        if wait:
            await enforced(control, offset)
        ended = await _host(services).ended(type, prefix, plugin, ENDS_TIMEOUT_S if wait else 0)
        waits = views.waiting_for(control, offset)
        if ended and not waits:
            return Response(status_code=204)
        view = DisabledPluginView(plugin=plugin, waiting_for=waits, ended=ended)
        return JSONResponse(view.model_dump(mode="json"), 202)


def _host(services: AdminServices) -> NamespaceHost:
    if services.plugins is None:
        raise problems.not_ready("the proxy")
    return services.plugins


def _checked(
    services: AdminServices, type: ResourceType, prefix: str, plugin: str, settings: dict[str, Any]
) -> tuple[str, int]:
    """Settings as the control log has them, and their version. Raises OperationError where this proxy refuses them."""
    host = _host(services)
    text, version = canonical_json(settings).decode(), host.schema_version(plugin)
    refused = host.check(type, prefix, plugin, text, version)
    if refused is not None:
        raise OperationError("INVALID", f"plugin {plugin!r} cannot be enabled: {refused}", 422)
    return text, version


def _enabled(control: ControlLogPort, type: ResourceType, prefix: str, plugin: str) -> EnabledPlugin:
    for each in namespace_of(control, type, prefix).plugins:
        if each.name == plugin:
            return each
    raise OperationError("NOT_FOUND", f"plugin {plugin!r} is not enabled for the {type} namespace {prefix!r}", 404)


async def _changed(
    control: ControlLogPort, type: ResourceType, prefix: str, plugin: str, response: Response, wait: bool
) -> EnabledPluginView:
    """Answer when every proxy acts on it, or with 202 before."""
    offset = namespace_of(control, type, prefix).plugins_at_offset
    assert offset is not None
    if wait:
        await enforced(control, offset)
    waits = views.waiting_for(control, offset)
    if waits:
        response.status_code = 202
    return views.plugin_view(_enabled(control, type, prefix, plugin), waits)
