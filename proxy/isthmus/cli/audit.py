"""``isthmus audit``: who changed what."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from isthmus.cli.client import Admin, UrlOption
from isthmus.cli.output import EXIT_CODES, Output, OutputOption, columns, example, show

app = typer.Typer(rich_markup_mode=None)


@app.command(epilog=example("isthmus audit", "isthmus audit --limit 1000 -o json") + EXIT_CODES)
def audit(
    limit: Annotated[int, typer.Option("--limit", min=1, max=1000, help="So many lines, the last ones.")] = 100,
    url: UrlOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """List who changed what by way of any proxy of the cluster, the oldest first.

    -o json has what was asked, and how the namespace, link or topic was before and after.
    """
    with Admin(url, output) as admin:
        show(admin.get("/v1/audit", limit=limit)["items"], output, _lines)


def _lines(changes: list[dict[str, Any]]) -> Iterator[str]:
    yield from columns(
        ("AT", "PROXY", "WHO", "FROM", "ACTION", "OUTCOME", "CHANGED"),
        (
            (
                datetime.fromtimestamp(each["at_ms"] / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
                each["proxy"],
                _plain(each["who"]),
                _plain(each["peer"]),
                _plain(each["action"]),
                f"{each['outcome']}: {each['code']}" if each["code"] else each["outcome"],
                _changed(each),
            )
            for each in changes
        ),
    )


def _changed(change: dict[str, Any]) -> str:
    """What is another than before, in one line."""
    before, after = change["before"], change["after"]
    if not isinstance(before, dict) or not isinstance(after, dict):
        return "made" if after and not before else "gone" if before and not after else "-"
    return " ".join(f"{name}: {_text(before.get(name))} -> {_text(after[name])}" for name in after) or "-"


def _plain(text: str) -> str:
    """Without what a terminal takes for more than text: paths are whatever somebody asked for."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _text(value: Any) -> str:
    return _plain(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
