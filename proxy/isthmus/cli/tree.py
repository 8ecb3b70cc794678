"""``isthmus tree``: the tree of clusters that topics are distributed over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import quote

import typer

from isthmus.cli.client import Admin, UrlOption
from isthmus.cli.files import named
from isthmus.cli.output import (
    EXIT_CODES,
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
    help="The tree of clusters that all take writes to the same topics: every message gets to every cluster.",
    epilog=example("isthmus tree apply tree.yaml --dry-run") + EXIT_CODES,
)

PARTITIONS_SHOWN: Final = 20


@app.command(
    epilog=example(
        "isthmus tree apply tree.yaml --dry-run",
        "isthmus --profile cluster-1 tree apply tree.yaml",
        "isthmus --profile cluster-1 tree apply tree.yaml --give-up",
    )
    + EXIT_CODES
)
def apply(
    file: Annotated[Path, typer.Argument(help="The next version of the tree, as YAML.", dir_okay=False)],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what it comes to, and change nothing.")] = False,
    give_up: Annotated[
        bool,
        typer.Option(
            "--give-up",
            help="Clusters that it takes out are lost, with what they passed on to nobody. What they were given last "
            "is given again.",
        ),
    ] = False,
    own_messages: Annotated[
        bool,
        typer.Option(
            "--own-messages",
            help="The cluster is new, and what its topics hold never came over a tree: distribute it as its own.",
        ),
    ] = False,
    url: UrlOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Have the cluster whose proxy is asked be a leaf of the next version of a tree.

    Apply it at each cluster of the tree: a distributor waits until its target has the same version. Topics that this
    cluster lacks are made as the others have them. The same version again changes nothing else. A cluster that comes to
    a tree is to have no messages in its topics. A dry run exits with 1 where the version cannot be applied yet.
    """
    with named(file, output):
        text = file.read_text(encoding="utf-8")
    with Admin(url, output) as admin:
        request = {"document": text, "dry_run": dry_run, "give_up": give_up, "own_messages": own_messages}
        applied = admin.put("/v1/tree", request)
    show(applied, output, _applied)
    raise typer.Exit(Exit.FAILED if applied["blocked"] else Exit.OK)


def _applied(applied: dict[str, Any]) -> Iterator[str]:
    plan = applied["plan"]
    yield from plan["drawing"].splitlines()
    yield ""
    would_be = "would be" if applied["dry_run"] else "is"
    for leaf, by in applied["added"].items():
        yield f"{leaf} {would_be} new: {by} fills it with all that it has, from retention on"
    for leaf in applied["removed"]:
        yield f"{leaf} {would_be} taken out: it leaves by isthmus tree leave"
    for leaf, held in applied["not_empty"].items():
        yield from _not_empty(leaf, held, leaf == plan["leaf"])
    for topic in applied["topics"]:
        yield from _compared(topic, would_be)
    for name in applied["names_unfit"]:
        pattern = plan["names"][plan["leaf"]]
        yield f"topic {name} {would_be} left out: its name is not such as {pattern}"
    for leaf, why in applied["not_compared"].items():
        yield f"{leaf} does not say which topics it has: {why}"
    for why in applied["blocked"]:
        yield f"not yet: {why}"
    topics = ", ".join(f"{prefix_cell(each)}*" for each in plan["topics"])
    version, before = plan["version"], applied["before"]
    again = " already" if before == version else ""
    yield f"{plan['leaf']} {would_be} at version {version}{again}, and distributes {topics}"


def _not_empty(leaf: str, held: list[str], here: bool) -> Iterator[str]:
    yield f"{leaf} is new, and not empty: {'; '.join(held)}"
    if not here:
        yield f"so tree apply at {leaf} is refused: delete these topics there, or see --own-messages"


def _compared(topic: dict[str, Any], would_be: str) -> Iterator[str]:
    name, count = topic["topic"], topic["partitions"]
    if topic["reason"] is not None:
        yield f"topic {name} is not made: {topic['reason']}"
    elif topic["like"] is not None:
        settings = "".join(f", {each}={value}" for each, value in topic["settings"].items())
        replicas = topic["replication_factor"]
        yield f"topic {name} {would_be} made as at {topic['like']}: partitions {count}, replicas {replicas}{settings}"
    for setting, why in topic["settings_refused"].items():
        yield f"topic {name} {would_be} made without {setting}: {why}"
    for leaf, there in topic["elsewhere"].items():
        yield f"topic {name}: {count} partitions here, {there} at {leaf}: messages go by their keys"


@app.command(
    epilog=example("isthmus tree document > tree.yaml", "isthmus --profile cluster-1 tree document -o json > tree.json")
    + EXIT_CODES
)
def document(url: UrlOption = None, output: OutputOption = Output.TABLE) -> None:
    """Print the tree's document with all levels and targets, as a cluster that comes to the tree is to apply it."""
    with Admin(url, output) as admin:
        found = admin.get("/v1/tree/document")
    show(found, Output.YAML if output is Output.TABLE else output, lambda _: ())


@app.command("show", epilog=example("isthmus tree show", "isthmus tree show --all -o json") + EXIT_CODES)
def show_tree(
    everything: Annotated[
        bool, typer.Option("--all", help="All partitions, also those that wait for nothing.")
    ] = False,
    url: UrlOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show the tree, and the distributors of the cluster whose proxy is asked.

    Exits with 1 where no proxy has a level, or a distributor that this proxy runs waits or leaves out a partition.
    """
    with Admin(url, output) as admin:
        found = admin.get("/v1/tree")
    show(found, output, lambda each: _shown(each, everything))
    offsets = found["offsets"]
    waits = (offsets is not None and offsets["reason"] is not None) or any(
        each["state"] in ("Waiting", "Unclaimed") or any(part["left_out"] for part in each["partitions"])
        for each in found["distributors"]
    )
    raise typer.Exit(Exit.FAILED if waits else Exit.OK)


def _shown(found: dict[str, Any], everything: bool) -> Iterator[str]:
    plan = found["plan"]
    yield from fields(
        [
            ("tree version", plan["version"]),
            ("this cluster", plan["leaf"]),
            ("topics", [f"{prefix_cell(each)}*" for each in plan["topics"]]),
            *((f"names at {leaf}", pattern) for leaf, pattern in plan["names"].items()),
            ("exactly once", plan["exactly_once"]),
        ]
    )
    yield ""
    for each in found["distributors"]:
        if each["fill_total"]:
            done, total = each["fill_total"] - each["fill_left"], each["fill_total"]
            yield f"{each['target']} is new: it was filled with {done} of {total} offsets ({100 * done // total}%)"
            yield ""
    rows = [
        (
            each["level"],
            each["target"],
            each["proxy"],
            each["state"],
            each["given"],
            _sum(each["partitions"], "lag"),
            each["refused"],
            each["lost"],
            each["reason"],
        )
        for each in found["distributors"]
    ]
    yield from columns(("LEVEL", "TARGET", "PROXY", "STATE", "GIVEN", "LAG", "REFUSED", "LOST", "REASON"), rows)
    by_key = {
        f"{part['topic']}: messages go by their keys at level {each['level']}, {each['target']} has "
        f"{part['target_partitions']} partitions"
        for each in found["distributors"]
        for part in each["partitions"]
        if part["target_partitions"] is not None
    }
    if by_key:
        yield ""
        yield from sorted(by_key)
    partitions = [
        (each["level"], f"{part['topic']}-{part['partition']}", *_cells(part))
        for each in found["distributors"]
        for part in each["partitions"]
        if everything or part["reason"] is not None
    ]
    if partitions:
        yield ""
        yield from columns(
            ("LEVEL", "PARTITION", "POSITION", "SETTLED", "LAG", "REASON"),
            partitions if everything else partitions[:PARTITIONS_SHOWN],
        )
        if not everything and len(partitions) > PARTITIONS_SHOWN:
            yield f"and {len(partitions) - PARTITIONS_SHOWN} more (--all)"
    if found["offsets"] is not None:
        yield ""
        yield from _offsets(found["offsets"], everything)


def _offsets(offsets: dict[str, Any], everything: bool) -> Iterator[str]:
    lag = "unknown" if offsets["lag_ms"] is None else f"{offsets['lag_ms'] / 1000:.1f} s"
    yield from fields(
        [
            ("offsets of groups", [f"{prefix_cell(each)}*" for each in offsets["groups"]]),
            ("state", offsets["state"]),
            ("reason", offsets["reason"]),
            ("proxy", offsets["proxy"]),
            ("margin", f"{offsets['margin_ms'] / 1000:g} s"),
            *(
                (f"margin of {prefix_cell(prefix)}*", f"{margin_ms / 1000:g} s")
                for prefix, margin_ms in offsets["margins_ms"].items()
            ),
            ("lag", lag),
            ("sent", offsets["sent"]),
            ("set", offsets["set"]),
        ]
    )
    rows = [
        (each["group"], f"{each['topic']}-{each['partition']}", each["origin"], each["reason"])
        for each in offsets["waiting"]
    ]
    if rows:
        yield ""
        yield from columns(("GROUP", "PARTITION", "OF", "WAITS FOR"), rows if everything else rows[:PARTITIONS_SHOWN])
        if not everything and len(rows) > PARTITIONS_SHOWN:
            yield f"and {len(rows) - PARTITIONS_SHOWN} more (--all)"


def _sum(partitions: list[dict[str, Any]], name: str) -> int:
    return sum(each[name] or 0 for each in partitions)


def _cells(partition: dict[str, Any]) -> tuple[Any, ...]:
    return partition["position"], partition["settled"], partition["lag"], partition["reason"]


@app.command(
    epilog=example(
        "isthmus tree target cluster-1 8 cluster-4 --dry-run",
        "isthmus tree target cluster-1 8 cluster-4",
        "isthmus tree target cluster-1 8 cluster-4 --give-up",
        "isthmus tree target cluster-1 8",
    )
    + EXIT_CODES
)
def target(
    cluster: Annotated[str, typer.Argument(help="Whose distributor: the cluster whose proxy is asked.")],
    level: Annotated[int, typer.Argument(help="Its level.")],
    leaf: Annotated[
        str | None, typer.Argument(help="A cluster on the other side of the level; without one, as the document says.")
    ] = None,
    give_up: Annotated[
        bool,
        typer.Option(
            "--give-up",
            help="The target of before is lost: give again what is not known to be on all clusters of its side.",
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Change nothing, print where it would write and what it would give again.")
    ] = False,
    url: UrlOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Choose which cluster of the other side a distributor writes to.

    A target that answers is switched where it was given all. One that does not is waited for, unless it is given up.
    """
    with Admin(url, output) as admin:
        path = f"/v1/tree/clusters/{quote(cluster, safe='')}/levels/{level}/target"
        found = admin.put(path, {"leaf": leaf, "give_up": give_up, "dry_run": dry_run})
    show(found, output, lambda each: _would_write(each, level, give_up) if dry_run else _shown(each, everything=False))


def _would_write(found: dict[str, Any], level: int, give_up: bool) -> Iterator[str]:
    (status,) = (each for each in found["distributors"] if each["level"] == level)
    yield f"level {level} would write to {status['target']}"
    if give_up:
        known = [each for each in status["partitions"] if each["position"] is not None]
        again = sum(each["position"] - (each["settled"] or 0) for each in known)
        yield f"{again} offsets would be given again, if the target of before does not answer: they are not settled"


@app.command("go-back", epilog=example("isthmus tree go-back billing-1") + EXIT_CODES)
def go_back(
    group: Annotated[str, typer.Argument(help="A consumer group without members at this cluster.")],
    url: UrlOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Set a group to where other clusters say that it is to go on here, also where it went on by itself.

    Without it a group is never put back that has committed here since.
    """
    with Admin(url, output) as admin:
        found = admin.post(f"/v1/tree/groups/{quote(group, safe='')}/go-back")
    show(found, output, lambda each: _shown(each, everything=False))


@app.command(epilog=example("isthmus tree leave --dry-run", "isthmus tree leave") + EXIT_CODES)
def leave(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Change nothing, print what others lack of what is here.")
    ] = False,
    give_up: Annotated[bool, typer.Option("--give-up", help="Also if others lack what is here.")] = False,
    url: UrlOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Distribute nothing any more from the cluster whose proxy is asked.

    Refused while others lack what is here. They go on writing to it until they have a version of the tree without it. A
    dry run exits with 1 where it would be refused.
    """
    with Admin(url, output) as admin:
        left = admin.delete("/v1/tree", dry_run=dry_run, give_up=give_up)
    show(left, output, _left)
    raise typer.Exit(Exit.FAILED if dry_run and left["lacking"] and not give_up else Exit.OK)


def _left(left: dict[str, Any]) -> Iterator[str]:
    yield from (f"others lack what is here: {each}" for each in left["lacking"])
    yield "would leave the tree" if left["dry_run"] else "left the tree"
