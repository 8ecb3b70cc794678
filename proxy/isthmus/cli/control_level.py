"""``isthmus control describe`` and ``upgrade``: the control log's feature level."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from isthmus.cli.client import Admin, UrlOption
from isthmus.cli.output import EXIT_CODES, Output, OutputOption, columns, example, fields, show

app = typer.Typer()
"""Their commands, which ``isthmus control`` has beside its own."""


@app.command(epilog=example("isthmus control describe", "isthmus control describe -o json") + EXIT_CODES)
def describe(url: UrlOption = None, output: OutputOption = Output.TABLE) -> None:
    """Describe the control log: its feature level, and which proxies are behind."""
    with Admin(url, output) as admin:
        show(admin.get("/v1/control"), output, _described)


@app.command(epilog=example("isthmus control upgrade --dry-run", "isthmus control upgrade --to 1 -o json") + EXIT_CODES)
def upgrade(
    to: Annotated[
        int | None, typer.Option("--to", min=1, help="The feature level; without it the highest that the proxy knows.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Change nothing, say what would happen.")] = False,
    url: UrlOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Raise the control log's feature level, once all proxies of the cluster are upgraded.

    Refused while a proxy with a lease does not know it. There is no way back: versions that do not know it refuse to
    start from then on. From level 2 on records are signed with the control key, if the proxies have one: run it again
    when they got one later. That is refused while a proxy with a lease does not have the same.
    """
    with Admin(url, output) as admin:
        show(admin.post("/v1/control/upgrade", {"to": to, "dry_run": dry_run}), output, _upgraded)


def _described(control: dict[str, Any]) -> Iterator[str]:
    yield from fields(
        [
            ("feature level", control["level"]),
            ("this proxy knows", control["known_level"]),
            ("proxies that do not know that", control["behind"]),
            ("records are signed with control key", control["key_id"] or "none: they are not signed"),
            ("this proxy's control key", control["own_key_id"] or "none"),
            ("proxies that do not have that", control["without_key"]),
            ("records that were not signed", control["unsigned_records"]),
            ("this proxy seals secrets with key", control["own_sealing_key_id"] or "none: they are not sealed"),
            ("offset", control["offset"]),
        ]
    )
    if control["secrets"]:
        yield ""
        yield from columns(
            ("LINK", "SECRET", "SEALED_WITH_KEY"),
            (
                (each["link_name"], each["secret_id"] or "as created", each["key_id"] or "none")
                for each in control["secrets"]
            ),
        )
    yield from (f"not understood: {each}" for each in control["not_understood"])


def _upgraded(upgrade: dict[str, Any]) -> Iterator[str]:
    before, after = upgrade["before"], upgrade["after"]
    if before == after:
        yield f"the control log has feature level {after} already"
    else:
        verb = "would be raised" if upgrade["dry_run"] else "was raised"
        yield f"the feature level {verb} from {before} to {after}; versions that do not know it refuse to start then"
        for each in upgrade["brings"]:
            yield f"  {each}"
    if upgrade["signs"]:
        key = f"the control key {upgrade['key_id']}"
        yield f"records are signed with {key} from then on; proxies without it refuse to start"
