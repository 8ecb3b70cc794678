"""``isthmus verify``: are both sides of a link equal?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any
from urllib.parse import quote

import typer

from isthmus.cli.client import Admin, UrlOption
from isthmus.cli.left_out_lines import left_out_lines
from isthmus.cli.operation import follow
from isthmus.cli.output import EXIT_CODES, Exit, Output, OutputOption, columns, example, show

app = typer.Typer(rich_markup_mode=None)


@app.command(epilog=example("isthmus verify a-to-b", "isthmus verify a-to-b -o json") + EXIT_CODES)
def verify(
    name: Annotated[str, typer.Argument(help="The link's name.")],
    url: UrlOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Read both sides of a link up to a snapshot and compare record by record; exits with 1 if they are not equal.

    Consumer groups are compared by what they have committed. What could not be compared is not equal,
    nor is a link of which nothing was.
    """
    with Admin(url, output) as admin:
        operation = admin.post(f"/v1/links/{quote(name, safe='')}/verify")
        report = follow(admin, operation, f"comparing {name}", output, cancel=True)
    show(report, output, _lines)
    raise typer.Exit(Exit.OK if report["equal"] else Exit.FAILED)


def _lines(report: dict[str, Any]) -> Iterator[str]:
    yield from columns(
        ("TOPIC", "REMOTE_TOPIC", "PARTITION", "EQUAL", "FROM", "TO", "RECORDS", "DIFFERENCE"),
        (
            (
                each["topic"],
                each["remote_topic"],
                each["partition"],
                each["equal"],
                each["compared_from"],
                each["compared_to"],
                each["records"],
                each["difference"] or each["note"],
            )
            for each in report["partitions"]
        ),
    )
    if report["groups"]:
        yield ""
        yield from columns(
            ("GROUP", "REMOTE_GROUP", "EQUAL", "POSITIONS", "WAITING", "DIFFERENCE"),
            (
                (
                    each["group"],
                    each["remote_group"],
                    each["equal"],
                    each["positions"],
                    each["waiting"],
                    each["difference"],
                )
                for each in report["groups"]
            ),
        )
    yield from left_out_lines(report["left_out"])
    verdict = report["message"] or ("equal" if report["equal"] else "NOT equal")
    yield f"{report['link_name']}: {verdict}, {report['records']} records compared in {report['seconds']:.1f} s"
