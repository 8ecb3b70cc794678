"""The command line of the demo, and what ends a demo that was kept."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Final

import typer

from isthmus.cli.output import CliError, Exit, Output, OutputOption, example
from isthmus_bench.demo.story import Demo
from isthmus_bench.demo.telling import Telling
from isthmus_bench.demo.tree import TreeDemo
from isthmus_bench.kafka import DEFAULT_VERSION, EmbeddedKafkaError, KafkaCluster
from isthmus_bench.kafka.jars import cache_directory
from isthmus_bench.proxies import ProxyFailed

DEFAULT_REPORT: Final = Path("demo-report.html")
RECORDS: Final = 100_000
TREE_RECORDS: Final = 2_000
KEPT: Final = "demo"
"""The folder in the cache where a demo that is kept lives."""

demo_app: Final = typer.Typer(rich_markup_mode=None)


@demo_app.command(
    epilog=example(
        "isthmus demo", "isthmus demo --reverse", "isthmus demo --tree", "isthmus demo --keep", "isthmus demo --stop"
    )
)
def demo(
    records: Annotated[
        int | None,
        typer.Option("--records", min=1, help="How many to produce: 100,000, or 2,000 at each cluster of a tree."),
    ] = None,
    brokers: Annotated[int, typer.Option("--brokers", min=1, max=5, help="Brokers of each cluster.")] = 1,
    version: Annotated[str, typer.Option("--version", help="Kafka's version.")] = DEFAULT_VERSION,
    keep: Annotated[
        bool,
        typer.Option("--keep", help="Kill nothing, and leave clusters and proxies up, to try by hand."),
    ] = False,
    reverse: Annotated[
        bool,
        typer.Option(
            "--reverse", help="Kill nothing: B leads in place of A, and A again, under a running application."
        ),
    ] = False,
    tree: Annotated[
        bool,
        typer.Option(
            "--tree",
            help="Three clusters that all take writes to one topic: who gets what, by which way, how often, when a "
            "proxy is killed.",
        ),
    ] = False,
    stop: Annotated[bool, typer.Option("--stop", help="Stop what an earlier --keep left up.")] = False,
    report: Annotated[
        Path, typer.Option("--report", help="Where the report of the demo's own traffic goes.")
    ] = DEFAULT_REPORT,
    no_report: Annotated[bool, typer.Option("--no-report", help="Make none: Spark is what takes longest.")] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Copy a topic from one Kafka cluster to another through two proxies, prove it equal, and kill the first cluster.

    Exits with 1 if the two sides differ, or if a record that was acked is not there after the failover, or the
    reversals, or is there twice after these; with --tree if a message is not on every cluster once.
    """
    home = cache_directory() / KEPT
    if stop:
        stop_kept(home, output)
        return
    if keep and home.exists():
        raise CliError("ALREADY_RUNNING", f"a demo was kept in {home}: isthmus demo --stop ends it", output=output)
    if tree:
        if keep or reverse:
            raise CliError("USAGE", "--tree goes without --keep and --reverse", Exit.USAGE, output)
        demo_of_a_tree(TREE_RECORDS if records is None else records, version, output)
        return
    telling = Telling(quiet=output is not Output.TABLE)
    try:
        with ExitStack() as stack:
            directory = home if keep else Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="isthmus-demo-")))
            directory.mkdir(parents=True, exist_ok=True)
            page = None if no_report else report
            result = Demo(stack, telling, directory, records or RECORDS, brokers, version, keep, reverse, page).run()
            if keep:
                stack.pop_all()
    except (EmbeddedKafkaError, ProxyFailed) as error:
        if keep:
            stop_kept(home, Output.JSON, quiet=True)
        raise CliError("DEMO_FAILED", str(error), output=output) from None
    telling.end()
    if output is not Output.TABLE:
        typer.echo(json.dumps(result, indent=2))
    failover, reversal = result["failover"], result["reversal"]
    if not (
        result["equal"]
        and result["write_refused"]
        and (failover is None or (failover["missing"] == 0 and failover["written_at"] is not None))
        and (reversal is None or reversal["lost"] == reversal["doubled"] == 0)
    ):
        raise typer.Exit(Exit.FAILED)


def demo_of_a_tree(records: int, version: str, output: Output) -> None:
    """``records``: at each cluster."""
    telling = Telling(quiet=output is not Output.TABLE)
    try:
        with ExitStack() as stack:
            directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="isthmus-demo-")))
            result = TreeDemo(stack, telling, directory, records, version).run()
    except (EmbeddedKafkaError, ProxyFailed) as error:
        raise CliError("DEMO_FAILED", str(error), output=output) from None
    telling.end()
    if output is not Output.TABLE:
        typer.echo(json.dumps(result, indent=2))
    if result["lost"] or result["doubled"]:
        raise typer.Exit(Exit.FAILED)


def stop_kept(home: Path, output: Output, quiet: bool = False) -> None:
    """Stop what ``--keep`` left up and remove its files."""
    if not home.exists():
        if not quiet:
            raise CliError("NOT_FOUND", "no demo was kept", output=output)
        return
    proxies = home / "proxies.json"
    for pid in json.loads(proxies.read_text()) if proxies.exists() else ():
        # The number may mean another process by now: only one that runs a proxy out of this folder is ours.
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if os.fsencode(home) in command:
            os.kill(pid, signal.SIGTERM)
    for name in ("a", "b"):
        if (home / name).exists():
            KafkaCluster.attach(home / name).stop()
    shutil.rmtree(home, ignore_errors=True)
    if not quiet:
        typer.echo("stopped")
