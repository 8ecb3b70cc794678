"""``isthmus topic``: local topics that follow, with where their records came from."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Annotated, Any, Final
from urllib.parse import quote

import typer

from isthmus.cli.client import Admin, UrlOption
from isthmus.cli.output import EXIT_CODES, Output, OutputOption, columns, example, fields, show

app = typer.Typer(
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Topics that follow a link: states, refusals, provenance.",
    epilog=example("isthmus topic list --link a-to-b") + EXIT_CODES,
)


EPOCHS_SHOWN: Final = 5
"""Of a range; all are in ``-o json``."""

DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Change nothing, print what would be lost.")]
NameArgument = Annotated[str, typer.Argument(help="The local topic's name.")]


@app.command("list", epilog=example("isthmus topic list --link a-to-b") + EXIT_CODES)
def list_(
    link: Annotated[str | None, typer.Option("--link", help="Only those of this link.")] = None,
    url: UrlOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """List the local topics that follow, may not follow, or did."""
    with Admin(url, output) as admin:
        show(admin.get("/v1/topics", link=link)["items"], output, _listed)


@app.command(
    epilog=example("isthmus topic describe orders-eu", "isthmus topic describe orders-eu --provenance") + EXIT_CODES
)
def describe(
    name: NameArgument,
    provenance: Annotated[
        bool, typer.Option("--provenance", help="Show which cluster wrote which offsets first, in which term.")
    ] = False,
    url: UrlOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Describe a topic: its source, and which cluster each range of offsets came from."""
    with Admin(url, output) as admin:
        show(admin.get(f"/v1/topics/{quote(name, safe='')}"), output, _origins if provenance else _described)


@app.command(
    epilog=example("isthmus topic forget orders-eu --dry-run", "isthmus topic forget orders-eu --delete") + EXIT_CODES
)
def forget(
    name: NameArgument,
    delete: Annotated[bool, typer.Option("--delete", help="Delete the topic and its records, too.")] = False,
    dry_run: DryRunOption = False,
    url: UrlOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Stop following a topic that was deleted at the source. Its records stay, unless --delete is given."""
    _decide(name, "forget", {"delete": delete, "dry_run": dry_run}, url, output)


@app.command(
    epilog=example("isthmus topic recreate orders-eu --dry-run", "isthmus topic recreate orders-eu") + EXIT_CODES
)
def recreate(
    name: NameArgument,
    dry_run: DryRunOption = False,
    url: UrlOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Lose a topic that cannot go on as it is, and follow its source's present one from the start."""
    _decide(name, "recreate", {"dry_run": dry_run}, url, output)


@app.command(
    "give-up",
    epilog=example("isthmus topic give-up orders-eu --dry-run", "isthmus topic give-up orders-eu") + EXIT_CODES,
)
def give_up(
    name: NameArgument,
    dry_run: DryRunOption = False,
    url: UrlOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Go on without what a truncation lost: the local copy is gone, and the source does not give it back."""
    _decide(name, "give-up", {"dry_run": dry_run}, url, output)


@app.command(
    epilog=example("isthmus topic truncate orders-eu --dry-run", "isthmus topic truncate orders-eu") + EXIT_CODES
)
def truncate(
    name: NameArgument,
    dry_run: DryRunOption = False,
    url: UrlOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Cut a topic that is held because its source lost what it had acked In-Sync. What goes is salvaged."""
    _decide(name, "truncate", {"dry_run": dry_run}, url, output)


def _decide(name: str, what: str, body: dict[str, Any], url: str | None, output: Output) -> None:
    with Admin(url, output) as admin:
        show(admin.post(f"/v1/topics/{quote(name, safe='')}/{what}", body), output, _decided)


def _decided(decision: dict[str, Any]) -> Iterator[str]:
    yield from fields(
        [
            ("topic", decision["topic"]),
            ("link", decision["link_name"]),
            ("source topic", f"{decision['source_topic']} ({decision['source']})"),
            ("dry run" if decision["dry_run"] else "done", decision["action"]),
            ("records lost", decision["records_lost"]),
            ("result", decision["message"]),
        ]
    )


def _listed(topics: list[dict[str, Any]]) -> list[str]:
    return columns(
        ("TOPIC", "STATE", "LINK", "SOURCE_TOPIC", "PARTITIONS", "REASON"),
        (
            (
                each["topic"],
                each["state"],
                each["link_name"],
                each["source_topic"],
                len(each["partitions"]) or None,
                each["message"] or each["reason"],
            )
            for each in topics
        ),
    )


def _described(topic: dict[str, Any]) -> Iterator[str]:
    yield from fields(
        [
            ("topic", topic["topic"]),
            ("state", topic["state"]),
            ("reason", topic["message"] or topic["reason"]),
            ("link", topic["link_name"]),
            ("source topic", topic["source_topic"]),
            ("topic id", topic["topic_id"]),
            ("source topic id", topic["source_topic_id"]),
            *(("while it follows", f"{name}={value}") for name, value in sorted(topic["overrides"].items())),
        ]
    )
    if topic["partitions"]:
        yield ""
        yield from columns(
            ("PARTITION", "FROM", "TO", "SOURCE_CLUSTER", "SOURCE_TOPIC_ID"),
            (
                (
                    partition["partition"],
                    each["start_offset"],
                    "now" if each["end_offset"] is None else each["end_offset"],
                    each["source_cluster_id"],
                    each["source_topic_id"],
                )
                for partition in topic["partitions"]
                for each in partition["provenance"]
            ),
        )


def _origins(topic: dict[str, Any]) -> Iterator[str]:
    """A line for each range of offsets; what is between two, or behind the last one, is unknown."""
    yield from fields([("topic", topic["topic"]), ("state", topic["state"]), ("topic id", topic["topic_id"])])
    for partition in topic["partitions"]:
        yield ""
        yield f"partition {partition['partition']}"
        yield from columns(
            ("  OFFSETS", "CLUSTER", "TERM", "TOPIC_ID", "EPOCHS", "SINCE", "ENDED", "VIA"),
            _ranges(partition["origins"]),
        )


def _ranges(origins: list[dict[str, Any]]) -> Iterator[tuple[Any, ...]]:
    until = 0
    for each in origins:
        if each["start_offset"] > until:
            yield f"  [{until}, {each['start_offset']})", "unknown", None, None, None, None, None, None
        until = each["end_offset"] or 0
        yield (
            f"  [{each['start_offset']}, {'...' if each['end_offset'] is None else each['end_offset']})",
            f"{each['cluster_id']}{' (assumed)' if each['assumed'] else ''}",
            each["term"] or "before terms",
            each["topic_id"],
            _epochs(each),
            datetime.fromtimestamp(each["since_ms"] / 1000, UTC).isoformat(timespec="seconds"),
            each["ended"],
            each["via_cluster_id"] or "written here",
        )


def _epochs(origin: dict[str, Any]) -> str:
    """Each with the offset of its first record, the last ones of many."""
    found = [f"{each['epoch']}@{each['start_offset']}" for each in origin["epochs"]]
    more = f"({len(found) - EPOCHS_SHOWN} more),"
    shown = ",".join(found) if len(found) <= EPOCHS_SHOWN else more + ",".join(found[-EPOCHS_SHOWN:])
    missing = origin["epochs_missing_before"]
    return shown if missing is None else f"{shown} (some before {missing} may be missing)"
