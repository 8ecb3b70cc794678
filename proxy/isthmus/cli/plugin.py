"""``isthmus plugin``: what namespaces have besides replication, enabled and configured at run time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any
from urllib.parse import quote

import typer

from isthmus.cli.client import Admin, UrlOption
from isthmus.cli.namespace import TypeOption
from isthmus.cli.output import (
    EXIT_CODES,
    CliError,
    Exit,
    Output,
    OutputOption,
    columns,
    example,
    fields,
    prefix_cell,
    show,
)

app = typer.Typer(
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Plugins of namespaces: enabled, ordered and configured at run time, on all proxies of the cluster.",
    epilog=example("isthmus plugin enable archive --namespace orders-", "isthmus plugin list") + EXIT_CODES,
)

NameArgument = Annotated[str, typer.Argument(help="The plugin, as `isthmus plugin list` has it.")]
NamespaceOption = Annotated[
    str, typer.Option("--namespace", help='The namespace\'s prefix; "" is the one that holds nearly every name.')
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="A setting; VALUE is JSON, or else text. May be repeated."),
]
PositionOption = Annotated[
    int | None,
    typer.Option("--position", min=0, help="Its place among the namespace's other plugins: 0 sees requests first."),
]
WaitOption = Annotated[
    bool, typer.Option("--wait/--no-wait", help="Return when every proxy of the cluster acts on it.")
]


@app.command("list", epilog=example("isthmus plugin list", "isthmus plugin list -o json") + EXIT_CODES)
def list_(
    namespace: Annotated[
        str | None, typer.Option("--namespace", help="Only what the namespace with this prefix has.")
    ] = None,
    url: UrlOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """List what namespaces have, as it runs on the proxy that is asked, and what they could have."""
    with Admin(url, output) as admin:
        found = admin.get("/v1/plugins")
        if namespace is not None:
            found["enabled"] = [each for each in found["enabled"] if each["prefix"] == namespace]
        show(found, output, _lines)


@app.command(epilog=example("isthmus plugin describe capture") + EXIT_CODES)
def describe(name: NameArgument, url: UrlOption = None, output: OutputOption = Output.TABLE) -> None:
    """Describe a plugin and its settings."""
    with Admin(url, output) as admin:
        offered = admin.get("/v1/plugins")["offered"]
        found = next((each for each in offered if each["plugin"] == name), None)
        if found is None:
            raise admin.error("NOT_FOUND", f"this proxy has no plugin {name!r} for namespaces")
        show(found, output, _described)


@app.command(
    epilog=example(
        "isthmus plugin enable archive --namespace orders-",
        "isthmus plugin enable capture --namespace orders- --set sampling=0.1 --position 0",
    )
    + EXIT_CODES
)
def enable(
    name: NameArgument,
    namespace: NamespaceOption,
    type: TypeOption = "topic",
    settings: SetOption = None,
    position: PositionOption = None,
    wait: WaitOption = True,
    url: UrlOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Enable a plugin for a namespace."""
    body = {"settings": _settings(settings or [], output), "position": position}
    with Admin(url, output) as admin:
        path = f"/v1/namespaces/{type}/plugins/{quote(name, safe='')}"
        _show_changed(admin.post(path, body, prefix=namespace, wait=wait), wait, output)


@app.command(
    epilog=example(
        "isthmus plugin configure capture --namespace orders- --set sampling=1.0",
        "isthmus plugin configure capture --namespace orders- --position 0",
    )
    + EXIT_CODES
)
def configure(
    name: NameArgument,
    namespace: NamespaceOption,
    type: TypeOption = "topic",
    settings: SetOption = None,
    reset: Annotated[bool, typer.Option("--reset", help="Begin with the plugin's defaults.")] = False,
    position: PositionOption = None,
    wait: WaitOption = True,
    url: UrlOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Change settings of an enabled plugin, or its place in the order. Settings that are not named stay."""
    changed = _settings(settings or [], output)
    if not changed and not reset and position is None:
        raise CliError("USAGE", "say what to change: --set, --reset, --position", Exit.USAGE, output)
    with Admin(url, output) as admin:
        body: dict[str, Any] = {"position": position}
        if changed or reset:
            body["settings"] = {**({} if reset else _current(admin, name, type, namespace)), **changed}
        path = f"/v1/namespaces/{type}/plugins/{quote(name, safe='')}"
        _show_changed(admin.patch(path, body, prefix=namespace, wait=wait), wait, output)


@app.command(epilog=example("isthmus plugin disable archive --namespace orders-") + EXIT_CODES)
def disable(
    name: NameArgument,
    namespace: NamespaceOption,
    type: TypeOption = "topic",
    wait: WaitOption = True,
    url: UrlOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Disable a plugin for a namespace, and wait until it has ended. Its settings are forgotten."""
    with Admin(url, output) as admin:
        path = f"/v1/namespaces/{type}/plugins/{quote(name, safe='')}"
        left = admin.delete(path, prefix=namespace, wait=wait) or {"ended": True, "waiting_for": []}
        result = {"plugin": name, "type": type, "prefix": namespace, "disabled": True, "ended": left["ended"]}
        show(result, output, lambda _: _disabled(name, type, namespace, left["ended"]))
        if wait:
            _all_act(left["waiting_for"], output)


def _disabled(name: str, type: str, prefix: str, ended: bool) -> Iterator[str]:
    yield f"plugin {name} disabled for the {type} namespace {prefix_cell(prefix)}"
    if not ended:
        yield "it has not ended here yet: acks that waited for it before go on waiting, or it takes its time to stop"


def _current(admin: Admin, name: str, type: str, prefix: str) -> dict[str, Any]:
    """The settings of an enabled plugin. Raises CliError."""
    namespace = admin.get(f"/v1/namespaces/{type}", prefix=prefix)
    for each in namespace["plugins"]:
        if each["plugin"] == name:
            return dict(each["settings"])
    raise admin.error("NOT_FOUND", f"plugin {name!r} is not enabled for the {type} namespace {prefix!r}")


def _settings(said: list[str], output: Output) -> dict[str, Any]:
    """Settings as they were given. Raises CliError."""
    found: dict[str, Any] = {}
    for each in said:
        name, equals, value = each.partition("=")
        if not equals or not name:
            raise CliError("USAGE", f"{each!r} is no setting: say --set NAME=VALUE", Exit.USAGE, output)
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def _show_changed(plugin: dict[str, Any], wait: bool, output: Output) -> None:
    """Print a namespace's plugin. Fails if it was to be waited for, and some proxy does not act on it yet."""
    show(plugin, output, lambda each: fields((name.replace("_", " "), value) for name, value in each.items()))
    if wait:
        _all_act(plugin["waiting_for"], output)


def _all_act(waiting_for: list[str], output: Output) -> None:
    """Raises CliError where some proxy does not."""
    if waiting_for:
        waits = ", ".join(waiting_for)
        raise CliError("NOT_ENFORCED_YET", f"decided, but {waits} does not act on it yet", output=output)


def _lines(found: dict[str, Any]) -> Iterator[str]:
    rows = [
        (each["type"], prefix_cell(each["prefix"]), each["plugin"], each["state"], each["failures"], each["reason"])
        for each in found["enabled"]
    ]
    yield from columns(("TYPE", "NAMESPACE", "PLUGIN", "STATE", "FAILURES", "REASON"), rows)
    yield ""
    offered = [(each["plugin"], each["types"], each["policy"], each["about"]) for each in found["offered"]]
    yield from columns(("OFFERED", "FOR", "POLICY", "ABOUT"), offered)


def _described(plugin: dict[str, Any]) -> Iterator[str]:
    schema = plugin["settings_schema"]
    yield from fields(
        [
            ("plugin", plugin["plugin"]),
            ("about", plugin["about"]),
            ("for namespaces of", plugin["types"]),
            ("when it fails", "requests are refused" if plugin["policy"] == "closed" else "requests go on"),
        ]
    )
    yield ""
    required = schema.get("required", ())
    rows = [
        (name, each.get("type"), "required" if name in required else json.dumps(each.get("default")), _about(each))
        for name, each in schema.get("properties", {}).items()
    ]
    yield from columns(("SETTING", "TYPE", "DEFAULT", "ABOUT"), rows) if rows else ["no settings"]


def _about(setting: dict[str, Any]) -> str:
    return " ".join(str(setting.get("description", "")).split())
