"""``isthmus namespace``: prefixes of topics, groups and principals, and their reservations."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal

import typer

from isthmus.cli.client import Admin, UrlOption
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
    shows_progress,
)

UNITS_MS: Final = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}

ResourceType = Literal["topic", "consumer-group", "principal"]

app = typer.Typer(
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Namespaces: prefixes of topics, consumer groups and principals.",
    epilog=example("isthmus namespace create orders- --type topic") + EXIT_CODES,
)

PrefixArgument = Annotated[
    str, typer.Argument(help='The prefix; "" holds every name that does not start with an underscore.')
]
TypeOption = Annotated[ResourceType, typer.Option("--type", help="What the namespace holds.")]
YesNo = Literal["yes", "no"]
StaleReadsOption = Annotated[
    YesNo | None,
    typer.Option(
        "--stale-reads",
        help="Where it follows over a synchronous link: with no, consumers here wait while it is not known that this "
        "cluster has all that was acked (Out-Of-Sync, or the other cluster is not heard). Else they read on.",
    ),
]
WaitOption = Annotated[
    bool, typer.Option("--wait/--no-wait", help="Return when every proxy of the cluster acts on it.")
]
ConsistencyOption = Annotated[
    Literal["available", "strict"] | None,
    typer.Option(
        "--consistency",
        help="On a synchronous link: with strict, producers without transactions (and commits of groups) wait as well "
        "while it is Out-Of-Sync.",
    ),
]
VisibilityOption = Annotated[
    Literal["local", "confirmed"] | None,
    typer.Option(
        "--visibility",
        help="On a synchronous link: with confirmed, consumers here see a record when the other cluster has it, too.",
    ),
]
DegradeOption = Annotated[
    str | None,
    typer.Option(
        "--degrade-after",
        metavar="TIME|never",
        help="When a synchronous link is Out-Of-Sync for so long (90s, 5m, 2h), transactional and strict producers "
        "(and commits of groups) are acked without it.",
    ),
]
ConfirmOption = Annotated[
    str | None,
    typer.Option(
        "--confirm",
        metavar="ALL|'ANY k (LINK, ...)'",
        help="Of several synchronous links, acks wait for so many of these, and for each other one.",
    ),
]
ReasonOption = Annotated[
    str | None,
    typer.Option("--reason", help="Told to clients that are refused and may describe it."),
]


@app.command(
    epilog=example(
        "isthmus namespace create orders- --type topic",
        "isthmus namespace create orders- --reserved --reason migration",
    )
    + EXIT_CODES
)
def create(
    prefix: PrefixArgument,
    type: TypeOption = "topic",
    reserved: Annotated[bool, typer.Option("--reserved", help="Refuse clients' writes to what it holds.")] = False,
    reason: ReasonOption = None,
    informational: Annotated[
        bool, typer.Option("--informational", help="No part of a synchronous link, now or ever.")
    ] = False,
    consistency: ConsistencyOption = None,
    visibility: VisibilityOption = None,
    degrade_after: DegradeOption = None,
    confirm: ConfirmOption = None,
    stale_reads: StaleReadsOption = None,
    wait: WaitOption = True,
    url: UrlOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Create a namespace."""
    body: dict[str, Any] = {"type": type, "prefix": prefix, "reserved": reserved, "reason": reason}
    body |= {"informational": informational, **_demands(consistency, visibility, degrade_after, confirm, output)}
    body |= {} if stale_reads is None else {"stale_reads": stale_reads == "yes"}
    with Admin(url, output) as admin:
        _say_waiting(reserved and wait, output)
        _show_enforced(admin.post("/v1/namespaces", body, wait=wait), wait, output)


@app.command("list", epilog=example("isthmus namespace list --type topic -o json") + EXIT_CODES)
def list_(
    type: Annotated[ResourceType | None, typer.Option("--type", help="Only those of this type.")] = None,
    url: UrlOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """List namespaces."""
    with Admin(url, output) as admin:
        show(admin.get("/v1/namespaces", type=type)["items"], output, namespace_lines)


@app.command(epilog=example("isthmus namespace describe orders-") + EXIT_CODES)
def describe(
    prefix: PrefixArgument,
    type: TypeOption = "topic",
    url: UrlOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Describe a namespace, its reservation and the links that it is attached to."""
    with Admin(url, output) as admin:
        show(admin.get(f"/v1/namespaces/{type}", prefix=prefix), output, _described)


@app.command(
    "show",
    epilog=example("isthmus namespace show orders-", "isthmus namespace show User:app- --type principal") + EXIT_CODES,
)
def show_(
    prefix: PrefixArgument,
    type: TypeOption = "topic",
    url: UrlOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show what is in a namespace: its topics, groups or principals, and how many there are.

    Principals are those that access control names. What the proxy's own user may not describe is not shown.
    """
    with Admin(url, output) as admin:
        show(admin.get(f"/v1/namespaces/{type}/contents", prefix=prefix), output, _contents)


@app.command(
    epilog=example("isthmus namespace overlap orders- orders-eu-", "isthmus namespace overlap A AB -o json")
    + EXIT_CODES
)
def overlap(
    prefix: PrefixArgument,
    other: Annotated[str, typer.Argument(help="The other prefix, of the same type.")],
    type: TypeOption = "topic",
    url: UrlOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Say whether two namespaces overlap, whether or not they exist, and which attachments refuse each other then."""
    with Admin(url, output) as admin:
        show(admin.get(f"/v1/namespaces/{type}/overlap", prefix=prefix, other=other), output, _overlap)


@app.command(
    epilog=example(
        "isthmus namespace alter orders- --reserved",
        "isthmus namespace alter orders- --consistency strict --degrade-after 5m",
        "isthmus namespace alter orders- --confirm 'ANY 1 (a-to-b, a-to-c)'",
        "isthmus namespace alter remote-orders- --stale-reads no",
        "isthmus namespace alter metrics- --informational yes",
    )
    + EXIT_CODES
)
def alter(
    prefix: PrefixArgument,
    reserved: Annotated[
        bool | None, typer.Option("--reserved/--no-reserved", help="Refuse or take clients' writes.")
    ] = None,
    type: TypeOption = "topic",
    reason: ReasonOption = None,
    consistency: ConsistencyOption = None,
    visibility: VisibilityOption = None,
    degrade_after: DegradeOption = None,
    confirm: ConfirmOption = None,
    informational: Annotated[
        YesNo | None, typer.Option("--informational", help="No part of a synchronous link, from now on.")
    ] = None,
    stale_reads: StaleReadsOption = None,
    wait: WaitOption = True,
    url: UrlOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Reserve a namespace, or clear its reservation, or change what it asks of synchronous links, or is to them."""
    demands = _demands(consistency, visibility, degrade_after, confirm, output)
    answers = {"informational": informational, "stale_reads": stale_reads}
    demands |= {name: answer == "yes" for name, answer in answers.items() if answer is not None}
    if reserved is None and not demands:
        options = (
            "--[no-]reserved, --consistency, --visibility, --degrade-after, --confirm, --informational, --stale-reads"
        )
        raise CliError("USAGE", f"say what to alter: {options}", Exit.USAGE, output)
    with Admin(url, output) as admin:
        _say_waiting(wait, output)
        body = {"reserved": reserved, "reason": reason, **demands}
        _show_enforced(admin.patch(f"/v1/namespaces/{type}", body, prefix=prefix, wait=wait), wait, output)


@app.command(epilog=example("isthmus namespace delete orders-") + EXIT_CODES)
def delete(
    prefix: PrefixArgument,
    type: TypeOption = "topic",
    wait: WaitOption = True,
    url: UrlOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Delete a namespace. What it holds stays, and may be written again."""
    with Admin(url, output) as admin:
        _say_waiting(wait, output)
        admin.delete(f"/v1/namespaces/{type}", prefix=prefix, wait=wait)
        result = {"type": type, "prefix": prefix, "deleted": True}
        show(result, output, lambda _: [f"{type} namespace {prefix_cell(prefix)} deleted"])


def _demands(
    consistency: str | None, visibility: str | None, degrade_after: str | None, confirm: str | None, output: Output
) -> dict[str, Any]:
    """What was said of synchronous links, as the REST interface takes it. Raises CliError."""
    after_ms = None if degrade_after is None else _milliseconds(degrade_after, output)
    said = {"consistency": consistency, "visibility": visibility, "degrade_after_ms": after_ms, "confirm": confirm}
    return {name: value for name, value in said.items() if value is not None}


def _milliseconds(text: str, output: Output) -> int:
    """A time as people write it; 0 for never."""
    if text == "never":
        return 0
    found = re.fullmatch(r"(\d{1,12})(ms|s|m|h|d)", text)
    if found is None or not int(found[1]):
        message = f"{text!r} is not a time: say 90s, 5m, 2h, or never"
        raise CliError("USAGE", message, Exit.USAGE, output)
    return int(found[1]) * UNITS_MS[found[2]]


def _say_waiting(waits: bool, output: Output) -> None:
    if waits and shows_progress(output):
        typer.echo("waiting until every proxy of the cluster acts on it", err=True)


def _show_enforced(namespace: dict[str, Any], wait: bool, output: Output) -> None:
    """Print a namespace. Fails if it was to be waited for, and some proxy does not act on it yet."""
    show(namespace, output, _described)
    waiting_for = namespace.get("waiting_for") or []
    if wait and waiting_for:
        raise CliError(
            "NOT_ENFORCED_YET",
            f"decided, but not enforced yet by {', '.join(waiting_for)}: a client's write may still get through there; "
            "`isthmus namespace describe` shows when it is done",
            output=output,
        )


def namespace_lines(namespaces: list[dict[str, Any]]) -> list[str]:
    """A table of namespaces."""
    return columns(
        ("TYPE", "PREFIX", "STATE", "LINKS", "REASON"),
        (
            (each["type"], prefix_cell(each["prefix"]), each["state"], _links(each), each["reserved_reason"])
            for each in namespaces
        ),
    )


def _contents(contents: dict[str, Any]) -> Iterator[str]:
    namespace, items = contents["namespace"], contents["items"]
    yield from _described(namespace)
    made = datetime.fromtimestamp(namespace["created_ms"] / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    what = "nothing" if contents["empty"] else f"{contents['count']} {namespace['type']}s"
    if namespace["type"] == "topic" and items:
        what += f" with {sum(each['partitions'] for each in items)} partitions"
    yield from fields([("made", made), ("holds", what)])
    if not items:
        return
    yield ""
    if namespace["type"] == "topic":
        rows = ((each["name"], each["partitions"], each["state"], each["link_name"]) for each in items)
        yield from columns(("TOPIC", "PARTITIONS", "STATE", "FOLLOWS_OVER"), rows)
    else:
        yield from (each["name"] for each in items)


def _overlap(found: dict[str, Any]) -> Iterator[str]:
    first, second = prefix_cell(found["prefix"]), prefix_cell(found["other"])
    yield {
        "none": f"{first} and {second} do not overlap",
        "same": f"{first} and {second} are the same",
        "holds": f"{first} and {second} overlap: all names of {second} are in {first}",
        "held": f"{first} and {second} overlap: all names of {first} are in {second}",
    }[found["relation"]]
    if found["refused"]:
        yield ""
        rows = ((each["roles"], each["links"], each["reason"]) for each in found["refused"])
        yield from columns(("REFUSED", "OVER", "SINCE"), rows)


def _links(namespace: dict[str, Any]) -> list[str]:
    return [f"{each['link_name']} ({each['role']})" for each in namespace["mappings"]]


def _described(namespace: dict[str, Any]) -> Iterator[str]:
    pairs: list[tuple[str, Any]] = [
        ("type", namespace["type"]),
        ("prefix", prefix_cell(namespace["prefix"])),
        ("state", namespace["state"]),
    ]
    if namespace["reserved_reason"]:
        pairs.append(("reason", namespace["reserved_reason"]))
    if namespace["waiting_for"]:
        pairs.append(("waiting for", namespace["waiting_for"]))
    if namespace["informational"]:
        pairs.append(("informational", "no part of a synchronous link"))
    if namespace["consistency"] != "available":
        pairs.append(("consistency", namespace["consistency"]))
    if namespace["visibility"] != "local":
        pairs.append(("visibility", namespace["visibility"]))
    if namespace["degrade_after_ms"]:
        pairs.append(("degrade after", f"{namespace['degrade_after_ms'] / 1000:g} s Out-Of-Sync"))
    if namespace["confirm"] != "ALL":
        pairs.append(("confirm", namespace["confirm"]))
    if not namespace.get("stale_reads", True):  # older proxies do not say
        pairs.append(("stale reads", "no: consumers wait while it is not known to be In-Sync"))
    for each in namespace["mappings"]:
        pairs.append(("link", f"{each['link_name']}: {each['role']}, remote {prefix_cell(each['remote'])}"))
    yield from fields(pairs)
