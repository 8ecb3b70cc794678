"""``isthmus spark tree``."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from isthmus_spark.command import EXIT_CODES, MasterOption, OutputOption, ReportOption, say, table_lines

if TYPE_CHECKING:
    from isthmus_spark.tree.run import Proof

EPILOG: Final = (
    "\b\nExamples:\n"
    "  isthmus tree document -o json > tree.json\n"
    "  isthmus spark tree tree.json --check\n"
    "  isthmus spark tree tree.json --topic orders-eu --servers b=localhost:9092 --report tree.html\n\n" + EXIT_CODES
)


def tree(
    file: Annotated[Path, typer.Argument(help="What `isthmus tree document -o json` prints.", exists=True)],
    topic: Annotated[
        list[str] | None, typer.Option(metavar="PREFIX", help="Repeatable (default: the tree's topics).")
    ] = None,
    servers: Annotated[
        list[str] | None,
        typer.Option(metavar="CLUSTER=HOST:PORT", help="Brokers, where they are reached otherwise. Repeatable."),
    ] = None,
    config: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CLUSTER=FILE", help="A file of Kafka client properties, as Kafka's tools take it. Repeatable."
        ),
    ] = None,
    on_the_way_s: Annotated[
        float, typer.Option("--on-the-way-s", help="What is younger may be missing still.", min=0)
    ] = 60.0,
    report: ReportOption = None,
    master: MasterOption = None,
    output: OutputOption = "table",
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 unless it is proven.")] = False,
) -> None:
    """Prove from the topics themselves that every message of a tree is on every cluster, once, and by which path."""
    from dataclasses import replace

    from py4j.protocol import Py4JJavaError
    from pyspark.errors import PySparkException

    from isthmus_spark.audit.admin import AuditError, properties_file
    from isthmus_spark.connector import ConnectorError
    from isthmus_spark.session import session
    from isthmus_spark.tree.document import DocumentError, read_tree
    from isthmus_spark.tree.run import prove

    try:
        document = read_tree(file)
    except DocumentError as error:
        say(f"isthmus: {error}")
        raise typer.Exit(2) from None
    elsewhere = _by_cluster(servers or (), document.servers, "--servers")
    document = replace(document, servers={**document.servers, **elsewhere})
    files = {name: Path(path) for name, path in _by_cluster(config or (), document.servers, "--config").items()}
    say("starting Spark")
    began = time.monotonic()
    until_ms = round((time.time() - on_the_way_s) * 1000)
    try:
        spark = session("isthmus-tree", master, kafka=True)
        try:
            properties = {name: properties_file(spark, path) for name, path in files.items()}
            proof = prove(spark, document, properties, topic or document.topics, until_ms, say)
            if report is not None:
                from isthmus_spark.tree.page import tree_report

                tree_report(proof, {"tree": str(file), "Spark": spark.version}).write(report)
        finally:
            spark.stop()
    except (AuditError, ConnectorError) as error:
        say(f"isthmus: {error}")
        raise typer.Exit(1) from None
    except (PySparkException, Py4JJavaError) as error:
        say("isthmus: Spark failed: " + "\n  ".join(str(error).splitlines()[:3]))
        raise typer.Exit(1) from None
    say(f"done in {time.monotonic() - began:.1f} s")
    if output == "json":
        typer.echo(json.dumps(proof.as_dict(), indent=2))
    else:
        for line in _said(proof):
            typer.echo(line)
    raise typer.Exit(int(check and not proof.proven))


def _by_cluster(given: Sequence[str], known: object, option: str) -> dict[str, str]:
    found = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not equals or not isinstance(known, dict) or name not in known:
            raise typer.BadParameter(f"{each!r} is not CLUSTER=..., with a cluster of the tree", param_hint=option)
        found[name] = value
    return found


def _said(proof: Proof) -> Iterator[str]:
    if proof.ways:
        yield from table_lines(proof.ways)
        yield ""
    if proof.findings:
        yield from table_lines(proof.findings)
        yield ""
    counted = ", ".join(f"{name} has {count:,}" for name, count in proof.records.items())
    yield f"{proof.messages:,} messages; {counted}"
    yield "every message is on every cluster, once" if proof.proven else "not proven"
