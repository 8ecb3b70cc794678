"""``isthmus bench scale``, and its report as tables."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from isthmus.cli.output import Output, OutputOption
from isthmus_bench.command import carry_out, in_tables
from isthmus_bench.tables import Table, number

if TYPE_CHECKING:
    from isthmus_bench.scale import Report


def scale(
    sizes: Annotated[
        list[int] | None,
        typer.Option("--topics", min=1, help="How many; may be repeated (default: 250, 500, 1000, 2000)."),
    ] = None,
    version: Annotated[str | None, typer.Option("--version", help="Kafka's version (default: the newest).")] = None,
    partitions: Annotated[int | None, typer.Option("--partitions", min=1, help="Of each topic.")] = None,
    brokers: Annotated[int | None, typer.Option("--brokers", min=1, max=9, help="Of each cluster.")] = None,
    restarts: Annotated[
        bool,
        typer.Option("--restarts/--no-restarts", help="Restart the brokers of the source in the end: takes longest."),
    ] = True,
    quick: Annotated[bool, typer.Option("--quick", help="Only to see that it works.")] = False,
    markdown: Annotated[Path | None, typer.Option("--markdown", help="Write the tables into this file, too.")] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Measure what many topics cost a link: attaching, verifying, a new one beside them, for several sizes in one run.

    Attaching is compared with a Java AdminClient that creates the same topics, which needs a JDK. Takes about fifteen
    minutes. Exit code 1 if a target is missed (not with --quick).
    """
    from dataclasses import replace

    from httpx import HTTPError

    from isthmus_bench import scale as measured
    from isthmus_bench.kafka import DEFAULT_VERSION, EmbeddedKafkaError
    from isthmus_bench.proxies import ProxyFailed

    chosen: dict[str, Any] = {
        "sizes": tuple(sizes) if sizes else None,
        "partitions": partitions,
        "brokers": brokers,
    }
    version = version or DEFAULT_VERSION
    plan = measured.Plan.quick(version) if quick else measured.Plan(version)
    plan = replace(plan, restarts=restarts, **{name: value for name, value in chosen.items() if value is not None})
    carry_out(
        lambda say: measured.run(plan, say),
        (EmbeddedKafkaError, HTTPError, ProxyFailed),
        *in_tables(lambda report: f"{report.broker}; {report.machine}", tables),
        markdown=markdown,
        output=output,
        judged=not quick,
    )


def tables(report: Report) -> Iterator[Table]:
    """The report as tables of text."""
    heads = [
        "topics",
        "partitions",
        "created s",
        "usable s",
        "attach s",
        "attach / usable",
        "verify s",
        "new topic s",
        "max s",
        "by the source s",
        "of the max s",
        "behind it s",
        "MB",
    ]
    rows = [
        [
            str(each.topics),
            str(each.partitions),
            number(each.created_s, 1),
            number(each.usable_s, 1),
            number(each.attached_s, 1),
            number(each.attach_ratio, 2),
            number(each.verified_s, 1),
            number(each.new_topic_s, 2),
            number(each.new_topic_max_s, 2),
            number(each.new_topic_acked_s, 2),
            number(each.new_topic_max_acked_s, 2),
            number(each.new_topic_behind_s, 2),
            number(each.resident_mb, 0),
        ]
        for each in report.figures
    ]
    yield "Many topics", heads, rows
    heads = ["topics", "usable ms", "attach ms", "attach CPU ms", "verify ms", "verify CPU ms", "idle, of a core"]
    rows = [
        [
            str(each.topics),
            *(
                number(seconds * 1000 / each.topics, 1)
                for seconds in (
                    each.usable_s,
                    each.attached_s,
                    each.attach_cpu_s,
                    each.verified_s,
                    each.verify_cpu_s,
                )
            ),
            number(each.idle_cores, 3),
        ]
        for each in report.figures
    ]
    yield "A topic", heads, rows
    heads = [
        "topics",
        "partitions",
        "took s",
        "CPU s",
        "source's log KB",
        "target's log KB",
        "CPU ms, bytes a partition",
    ]
    rows = [
        [
            str(each.topics),
            str(each.partitions),
            number(restart.took_s, 0),
            number(restart.cpu_s, 1),
            number(restart.source_bytes / 1000, 0),
            number(restart.target_bytes / 1000, 0),
            f"{number(restart.cpu_s * 1000 / each.partitions, 2)}, "
            + number((restart.source_bytes + restart.target_bytes) / each.partitions, 0),
        ]
        for each in report.figures
        if (restart := each.restart) is not None
    ]
    if rows:
        yield "A rolling restart of the source's brokers", heads, rows
    heads = ["target", "limit", "measured", "met"]
    rows = [
        [
            each.target,
            "< " + number(each.limit, 2),
            number(each.measured, 2),
            "not measured" if each.met is None else "yes" if each.met else "NO",
        ]
        for each in report.verdicts
    ]
    yield "Targets", heads, rows
