"""``isthmus spark anomalies``: alerts while traffic flows."""

from __future__ import annotations

import json
import signal
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from isthmus_spark.anomalies.limits import BadLimit, Limits

EPILOG: Final = """\b
Examples:
  isthmus spark anomalies --from east:9092 --topic captured --to ops:9092 --alerts alerts --checkpoint anomalies
  isthmus spark anomalies /var/lib/isthmus/capture --to ops:9092 --alerts alerts --checkpoint anomalies --once -o json

\b
Exit codes:
  0  ended by SIGTERM or SIGINT, or done (--once)
  1  failed; started again it goes on from its checkpoint
  2  wrong usage
"""


def anomalies(
    capture: Annotated[
        Path | None, typer.Argument(help="The directory with captured traffic, unless it comes from a topic.")
    ] = None,
    *,
    bootstrap: Annotated[
        str | None, typer.Option("--from", help="The cluster that captured events are read from.", metavar="HOST:PORT")
    ] = None,
    topic: Annotated[
        str | None, typer.Option("--topic", help="The topic that proxies write captured events to.")
    ] = None,
    from_config: Annotated[
        Path | None, typer.Option("--from-config", help="A file of Kafka client settings for --from.", exists=True)
    ] = None,
    to: Annotated[str, typer.Option("--to", help="The cluster that gets alerts.", metavar="HOST:PORT")],
    alerts: Annotated[str, typer.Option("--alerts", help="The topic that alerts are written to.")],
    to_config: Annotated[
        Path | None, typer.Option("--to-config", help="A file of Kafka client settings for --to.", exists=True)
    ] = None,
    checkpoint: Annotated[
        str, typer.Option("--checkpoint", help="A directory of this query alone; it goes on from there.")
    ],
    starting: Annotated[
        str | None,
        typer.Option("--starting", help="Without a checkpoint: latest, or earliest (the default with --once)."),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Read what there is, and end.")] = False,
    trigger: Annotated[
        str | None,
        typer.Option("--trigger", help="Time between batches (default: 0 seconds for a topic, 5 seconds for files)."),
    ] = None,
    limit: Annotated[
        list[str] | None, typer.Option("--set", help="A limit, docs/spark.md has them all: slow_times=8.")
    ] = None,
    watermark: Annotated[
        str, typer.Option("--watermark", help="After this time without events a subject is forgotten.")
    ] = "10 minutes",
    shards: Annotated[
        int, typer.Option("--shards", help="What is judged side by side; for a new checkpoint.", min=1)
    ] = 1,
    metrics_port: Annotated[int | None, typer.Option("--metrics-port", help="Serve metrics for Prometheus.")] = None,
    master: Annotated[
        str | None, typer.Option("--master", help="Spark's master (default: this machine's cores).")
    ] = None,
    output: Annotated[
        str, typer.Option("-o", "--output", help="How to print alerts: table or json (lines).")
    ] = "table",
) -> None:
    """Watch captured traffic as it flows: slow brokers, refused writes, bursts of errors, lost sequences, stalls."""
    if (capture is None) == (bootstrap is None or topic is None) or (capture is not None and (bootstrap or topic)):
        raise typer.BadParameter("name a directory with captured traffic, or --from and --topic")
    if starting not in (None, "latest", "earliest"):
        raise typer.BadParameter("it is latest or earliest", param_hint="--starting")
    try:
        limits = Limits.chosen(limit or ())
    except BadLimit as error:
        raise typer.BadParameter(str(error), param_hint="--set") from error

    from isthmus_spark.anomalies.alerts import AlertsError
    from isthmus_spark.anomalies.checkpoint import CheckpointError
    from isthmus_spark.anomalies.query import SETTINGS, Ending, FromFiles, FromKafka, Query, QueryError, ToKafka
    from isthmus_spark.connector import ConnectorError
    from isthmus_spark.session import session

    ending = Ending()
    for number in (signal.SIGTERM, signal.SIGINT):
        # An event must not be set by a handler that interrupts who waits for it.
        signal.signal(number, lambda *_: threading.Thread(target=ending.ask, name="end").start())
    source: FromKafka | FromFiles
    if capture is not None:
        source = FromFiles(str(capture))
    else:
        source = FromKafka(_settings(from_config, bootstrap), str(topic))
    try:
        _say("starting Spark")
        spark = session("isthmus-anomalies", master, kafka=True, **SETTINGS)
        try:
            query = Query(
                spark,
                source,
                ToKafka(_settings(to_config, to), alerts),
                checkpoint,
                lambda alert: typer.echo(json.dumps(alert) if output == "json" else _line(alert)),
                _say,
                ending,
                limits,
                watermark,
                shards,
                starting or ("earliest" if once else "latest"),
                None if once else trigger or ("0 seconds" if capture is None else "5 seconds"),
            )
            if metrics_port is not None:
                query.metrics.serve(metrics_port)
            query.run()
        finally:
            spark.stop()
    except (AlertsError, CheckpointError, ConnectorError, QueryError, OSError) as error:
        if not ending.asked:
            _say(f"error: {error}")
            raise typer.Exit(1) from error
    _say("ended")


def _settings(file: Path | None, bootstrap: str | None) -> dict[str, str]:
    """Of a Kafka client's properties file, ``name=value`` in lines."""
    lines = [] if file is None else [line.strip() for line in file.read_text().splitlines()]
    pairs = (line.split("=", 1) for line in lines if line and not line.startswith(("#", "!")) and "=" in line)
    return {**{name.strip(): value.strip() for name, value in pairs}, "bootstrap.servers": str(bootstrap)}


def _line(alert: dict[str, Any]) -> str:
    when = datetime.fromtimestamp(alert["last_us"] / 1e6, UTC)
    facts = {**alert["subject"], **alert["facts"]}
    about = "  ".join(f"{name}={value}" for name, value in facts.items())
    return (
        f"{when:%Y-%m-%d %H:%M:%S}  {alert['rule']:<13}  {alert['measured']:g} {alert['unit']} "
        f"(limit {alert['limit']:g})  {about}\n    {alert['advice']}"
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
