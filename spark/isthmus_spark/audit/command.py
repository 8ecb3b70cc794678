"""``isthmus spark audit``."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from isthmus_spark.command import EXIT_CODES, MasterOption, OutputOption, ReportOption, Rows, say, table_lines, written

IGNORABLE: Final = ("key", "value", "headers", "timestamp", "start")

EPILOG: Final = (
    "\b\nExamples:\n"
    "  isthmus spark audit --left a:9092 --right b:9092 --topic orders- --check\n"
    "  isthmus spark audit --left a:9092 --right b:9092 --topic orders-=A.orders- --group app- --report audit.html\n"
    "  isthmus spark audit --left a:9092 --right b:9092 --topic orders-eu --partition 3 --from 1000 -o json\n\n"
    + EXIT_CODES
)

_SIDE: Final = "a file of Kafka client properties, as Kafka's tools take it."


def audit(
    left: Annotated[str, typer.Option(help="One cluster: HOST:PORT, or several with commas.")],
    right: Annotated[str, typer.Option(help="The other cluster.")],
    topic: Annotated[
        list[str],
        typer.Option(
            metavar="NAME", help="A name or prefix, LEFT=RIGHT where the right side has another one. Repeatable."
        ),
    ],
    group: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help='Consumer groups, in the same way; "" is all of them. Repeatable.'),
    ] = None,
    left_config: Annotated[Path | None, typer.Option(help=f"For the left side, {_SIDE}", exists=True)] = None,
    right_config: Annotated[Path | None, typer.Option(help=f"For the right side, {_SIDE}", exists=True)] = None,
    isolation: Annotated[
        str, typer.Option(help="read_committed, or read_uncommitted: also what is open or was aborted.")
    ] = "read_committed",
    partition: Annotated[
        list[int] | None, typer.Option(metavar="NUMBER", help="Only this partition. Repeatable.", min=0)
    ] = None,
    from_offset: Annotated[int, typer.Option("--from", help="The first offset of each partition.", min=0)] = 0,
    to_offset: Annotated[
        int | None, typer.Option("--to", help="The offset before which to end (default: the shorter log's end).", min=0)
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(metavar="FIELD", help=f"What may differ: {', '.join(IGNORABLE)} (of the log). Repeatable."),
    ] = None,
    whole: Annotated[bool, typer.Option("--whole", help="Other ends of logs are differences, not lag.")] = False,
    buckets: Annotated[
        int, typer.Option(help="Differing buckets of a partition that are read again at a time.", min=1)
    ] = 4,
    report: ReportOption = None,
    master: MasterOption = None,
    output: OutputOption = "table",
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 if they are not equal.")] = False,
) -> None:
    """Compare two clusters' topics record by record, and what groups have committed.

    Offsets, keys, values, headers and timestamps have to be the same, of compacted topics those of the latest record of
    each key. Both sides are read up to the end of the shorter log; what comes after it is lag. What could not be
    compared is not equal.
    """
    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    from isthmus_spark.audit.admin import AuditError, Cluster, properties_file
    from isthmus_spark.audit.plan import EQUAL, Asked
    from isthmus_spark.audit.run import audit as run
    from isthmus_spark.connector import ConnectorError
    from isthmus_spark.session import session

    if isolation not in ("read_committed", "read_uncommitted"):
        raise typer.BadParameter("read_committed or read_uncommitted", param_hint="--isolation")
    if unknown := sorted({*(ignore or ())} - {*IGNORABLE}):
        raise typer.BadParameter(f"{', '.join(unknown)} is not one of {', '.join(IGNORABLE)}", param_hint="--ignore")
    asked = Asked(
        topics=topic,
        groups=group or (),
        committed=isolation == "read_committed",
        ignored=ignore or (),
        partitions=partition or (),
        from_offset=from_offset,
        to_offset=to_offset,
        whole=whole,
        buckets=buckets,
    )
    say("starting Spark")
    try:
        spark = session("isthmus-audit", master, kafka=True)
        began = time.monotonic()
        try:
            with ExitStack() as stack:
                sides = [
                    stack.enter_context(Cluster(spark, servers, properties_file(spark, file) if file else {}))
                    for servers, file in ((left, left_config), (right, right_config))
                ]
                audited = run(spark, sides[0], sides[1], asked, say)
                seconds = round(time.monotonic() - began, 3)
                partitions = [row.asDict() for row in audited.partitions.collect()]
                findings = [row.asDict() for row in audited.findings.collect()]
                groups = {"positions": audited.positions, "waiting": audited.waiting}
                if report is not None:
                    from isthmus_spark.audit.page import audit_report

                    about = {"left": left, "right": right, "isolation": isolation, "Spark": spark.version}
                    audit_report(partitions, findings, groups, about).write(report)
                    written(audited.findings, report)
                    written(audited.partitions, report, "partitions")
        finally:
            spark.stop()
    except (AuditError, ConnectorError) as error:
        say(f"isthmus: {error}")
        raise typer.Exit(1) from None
    except (PySparkException, Py4JJavaError) as error:
        say("isthmus: Spark failed: " + "\n  ".join(str(error).splitlines()[:3]))
        raise typer.Exit(1) from None
    equal = not findings and all(row["state"] == EQUAL for row in partitions)
    say(f"done in {seconds:.1f} s")
    if output == "json":
        document = {"equal": equal, "seconds": seconds, "groups": groups}
        typer.echo(json.dumps(document | {"findings": findings, "partitions": partitions}, indent=2))
    else:
        for line in _said(partitions, findings, groups, equal):
            typer.echo(line)
    raise typer.Exit(int(check and not equal))


def _said(partitions: Rows, findings: Rows, groups: dict[str, Any], equal: bool) -> Iterator[str]:
    if findings:
        used = [name for name in findings[0] if any(row[name] is not None for row in findings)]
        yield from table_lines([{name: row[name] for name in used} for row in findings])
    for row in partitions:
        if row["lag"]:
            behind = "right" if row["lag"] > 0 else "left"
            yield f"{row['left_topic']}-{row['partition']}: the {behind} side is {abs(row['lag']):,} offsets behind"
    records = [sum(row[f"{side}_records"] for row in partitions) for side in ("left", "right")]
    states = Counter(str(row["state"]) for row in partitions)
    counted = ", ".join(f"{number} {state}" for state, number in states.items())
    yield f"{len(partitions)} partitions ({counted}); {records[0]:,} and {records[1]:,} records"
    if groups["positions"]:
        yield f"{groups['positions']:,} committed offsets, {groups['waiting']:,} of them wait for data"
    yield "equal up to the shorter logs' ends" if equal else "not equal"
