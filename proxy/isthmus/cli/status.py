"""``isthmus status``: one proxy, and what it knows of its cluster."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from isthmus.cli.client import Admin, UrlOption
from isthmus.cli.grants import waiting_lines
from isthmus.cli.link import group_lines, link_lines, loss_lines, partition_lines
from isthmus.cli.namespace import namespace_lines
from isthmus.cli.output import EXIT_CODES, Output, OutputOption, columns, example, fields, show

app = typer.Typer(rich_markup_mode=None)


@app.command(
    epilog=example(
        "isthmus status", "isthmus status --wait-s 60", "isthmus status -o json --url http://127.0.0.1:28080"
    )
    + EXIT_CODES
)
def status(
    wait_s: Annotated[
        float | None,
        typer.Option("--wait-s", min=0, help="Wait so many seconds at most until the proxy is ready for clients."),
    ] = None,
    url: UrlOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show a proxy, its brokers and limits, the cluster's namespaces, links with their lag, and other proxies."""
    with Admin(url, output) as admin:

        def look() -> tuple[Any, str | None]:
            seen = admin.get("/v1/status")
            return seen, None if seen["ready"] else "; ".join(seen["reasons"])

        seen = admin.get("/v1/status") if wait_s is None else admin.wait_for("the proxy is ready", look, wait_s)
        show(seen, output, _lines)


def _lines(status: dict[str, Any]) -> Iterator[str]:
    process, connections, limits = status["process"], status["connections"], status["limits"]
    lease = process["lease"]
    pairs: list[tuple[str, Any]] = [
        ("proxy", f"{status['name']} {status['version']} ({process['mode']})"),
        ("cluster", status["cluster_id"]),
        ("ready", "yes" if status["ready"] else f"no: {'; '.join(status['reasons'])}"),
        ("vouching", "yes" if lease["vouching"] else f"no: {lease['reason'] or 'no lease'}"),
        ("up", f"{status['uptime_seconds']:.0f} s"),
        ("clients bootstrap at", process["bootstrap"]),
        ("links reach it at", process["link_address"]),
        ("control log offset", status["control_log_offset"]),
    ]
    if connections and limits:
        pairs += [
            ("connections", f"{connections['open']} of {limits['connections_max']} ({connections['opened']} opened)"),
            ("file descriptors", f"{limits['file_descriptors_open']} of {limits['file_descriptors_max']}"),
        ]
    pairs.append(("plugins", process["plugins"]))
    pairs += [("warning", text) for text in process["warnings"]]
    for held in status["held_configs"]:
        former = "not set" if held["former"] is None else held["former"]
        pairs.append(("held broker setting", f"{held['name']}={held['value']} for links (before: {former})"))
    yield from fields(pairs)
    if process["brokers"]:
        yield ""
        rows = ((each["broker_id"], each["address"], each["broker"]) for each in process["brokers"])
        yield from columns(("BROKER", "CLIENTS_CONNECT_TO", "BROKER_ADDRESS"), rows)
    if status["proxies"]:
        yield ""
        yield from columns(
            ("PROXY", "STATE", "BROKERS", "VERSION", "ENFORCES_TO"),
            (
                (
                    each["name"] + (" (this)" if each["this"] else ""),
                    each["state"],
                    [broker["broker_id"] for broker in each["brokers"]],
                    each["version"],
                    each["enforced_offset"],
                )
                for each in status["proxies"]
            ),
        )
    if status["namespaces"]:
        yield ""
        yield from namespace_lines(status["namespaces"])
    if status["links"]:
        yield ""
        yield from link_lines(status["links"])
        for link in status["links"]:
            yield from waiting_lines(link.get("waiting", []), link["link_name"])
        yield from loss_lines(status["links"])
        partitions = [each for link in status["links"] for each in link["partitions"]]
        if partitions:
            yield ""
            yield from partition_lines(partitions)
        groups = [each for link in status["links"] for each in link["groups"]]
        if groups:
            yield ""
            yield from group_lines(groups)
