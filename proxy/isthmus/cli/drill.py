"""``isthmus drill``: what an emergency would come to, tried while there is none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any
from urllib.parse import quote

import typer

from isthmus.cli.client import Admin, UrlOption
from isthmus.cli.operation import follow
from isthmus.cli.output import EXIT_CODES, Exit, Output, OutputOption, columns, example, fields, prefix_cell, show

app = typer.Typer(
    rich_markup_mode=None,
    no_args_is_help=True,
    help="What an emergency would come to, tried while there is none.",
    epilog=example("isthmus drill failover a-to-b") + EXIT_CODES,
)


@app.callback()
def _group() -> None:
    """A single command under a name of its own."""


@app.command(
    epilog=example(
        "isthmus drill failover a-to-b --dry-run",
        "isthmus drill failover a-to-b",
        "isthmus drill failover a-to-b --local orders- --local-group app- -o json",
    )
    + EXIT_CODES
)
def failover(
    name: Annotated[str, typer.Argument(help="The link's name.")],
    local: Annotated[list[str] | None, typer.Option("--local", help="Prefix of a local topic namespace.")] = None,
    local_group: Annotated[
        list[str] | None, typer.Option("--local-group", help="Prefix of a local consumer group namespace.")
    ] = None,
    partitions_max: Annotated[
        int | None, typer.Option("--partitions-max", min=1, help="Make no copy with more partitions than this (1000).")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Make no copy, print what would be lost and how large it would be.")
    ] = False,
    url: UrlOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Print what failing over a link now would lose, and how long it takes, tried on a copy of what follows.

    The copy has topics with as many partitions, replicas and the same settings, what is open of transactions, and
    groups' committed offsets, but not the records; it is hidden from clients, and deleted in the end. Exits with 1 if
    what would be lost is not known of all partitions, or not as of now: the source is away, say. Asked at the cluster
    that leads, it says what would be lost as that cluster's proxy knows it, and makes no copy.
    """
    body: dict[str, Any] = {
        "namespaces": [
            *({"type": "topic", "local": prefix} for prefix in local or ()),
            *({"type": "consumer-group", "local": prefix} for prefix in local_group or ()),
        ],
        "dry_run": dry_run,
    }
    if partitions_max is not None:
        body["partitions_max"] = partitions_max
    with Admin(url, output) as admin:
        operation = admin.post(f"/v1/links/{quote(name, safe='')}/drill/failover", body)
        report = follow(admin, operation, f"trying a failover of {name}", output, cancel=True)
    show(report, output, _lines)
    raise typer.Exit(Exit.OK if report["lost"]["known"] else Exit.FAILED)


def _lines(report: dict[str, Any]) -> Iterator[str]:
    lost = report["lost"]
    yield from fields(
        [
            (
                "link",
                f"{report['link_name']}, asked where it {'follows' if report['asked'] == 'follower' else 'leads'}",
            ),
            ("namespaces", [f"{each['type']} {prefix_cell(each['local'])}" for each in report["namespaces"]]),
            *_lost(lost),
            *_measured(report),
        ]
    )
    if lost["partitions"]:
        yield ""
        yield from columns(
            ("TOPIC", "PARTITION", "SOURCE_END", "CONFIRMED", "RECORDS", "ACKED", "SECONDS", "MESSAGE"),
            (
                (
                    each["topic"],
                    each["partition"],
                    each["source_end"],
                    each["confirmed"],
                    each["records"],
                    each["acked_records"],
                    each["seconds"],
                    each["message"],
                )
                for each in lost["partitions"]
            ),
        )
    if lost["groups"]:
        yield ""
        yield from columns(
            ("GROUP", "POSITIONS", "SECONDS", "MESSAGE"),
            ((each["group"], each["positions"], each["seconds"], each["message"]) for each in lost["groups"]),
        )


def _lost(lost: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """What would be lost (RPO), in all."""
    if lost["known"]:
        yield "known", f"of all {lost['partitions_total']} partitions, as of now"
    else:
        yield "known", f"no: {lost['message']} ({lost['reason']})"
        if lost["as_of_seconds"] is None:
            return
        if lost["as_of_seconds"]:
            yield "as of", f"{lost['as_of_seconds']:.1f}s ago"
    yield "records lost", lost["records"]
    yield "acked records lost", _or_unknown(lost["acked_records"])
    yield "time lost", "not known" if lost["seconds"] is None else f"{lost['seconds']:.1f}s"
    yield "committed offsets lost", _or_unknown(lost["positions"])


def _measured(report: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """How long it takes (RTO), and on which copy that was measured."""
    size, measured = report["copy_size"], report["measured"]
    if size is None:
        return
    if measured is None:
        yield "copy", f"would have {_counted(size)}"
        return
    yield (
        "copy",
        f"{_counted(size)}, {measured['positions']} committed offsets; made in {measured['copy_seconds']:.1f}s",
    )
    yield "time to write again", f"{measured['seconds']:.2f}s after the source is heard last; of these:"
    yield "  leases", f"{measured['leases_seconds']:.2f}s until what the source was promised is over, not measured"
    yield "  look", f"{measured['look_seconds']:.2f}s"
    yield "  carry out", f"{measured['carry_out_seconds']:.2f}s"
    yield "first records", f"in all partitions {measured['write_seconds']:.2f}s later"
    committed = measured["transactions_committed"]
    yield "transactions", f"{measured['transactions_ended']} ended, {committed} of them committed"
    if measured["settings_refused"]:
        yield "settings refused", "; ".join(measured["settings_refused"])
    if size["not_copied"]:
        yield "not copied", [f"{each['type']} {prefix_cell(each['local'])}" for each in size["not_copied"]]
    if not report["copy_deleted"]:
        yield "copy left over", "it is being deleted, see isthmus link describe"


def _counted(size: dict[str, Any]) -> str:
    return f"{size['topics']} topics with {size['partitions']} partitions, {size['groups']} groups"


def _or_unknown(count: int | None) -> int | str:
    return "not known" if count is None else count
