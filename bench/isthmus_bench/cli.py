"""``isthmus cluster``: embedded Kafka clusters by hand.

Clusters live under one directory, each in a folder with its name; they go on in the background until they are stopped.
Exit status 1: it could not be done, and the message says what to do; 2: wrong usage.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from isthmus.cli.output import Output, OutputOption, columns, fields, show
from isthmus_bench.kafka import DEFAULT_VERSION, TESTED_VERSIONS, EmbeddedKafkaError, KafkaCluster, java_tool
from isthmus_bench.kafka.cluster import STATE_FILE
from isthmus_bench.kafka.jars import cache_directory, say_on_stderr

cluster_app: Final = typer.Typer(
    name="cluster",
    help="Embedded Kafka clusters: real brokers on this machine, for demos, tests and benchmarks.",
    no_args_is_help=True,
)


NameOption = Annotated[str, typer.Option("--name", help="The cluster's name.")]
DirOption = Annotated[
    Path | None,
    typer.Option("--dir", help="Where clusters are kept, each in a folder with its name (default: in the cache)"),
]
BrokerOption = Annotated[int, typer.Option("--broker", help="The broker's id; ids count from 1.")]


@contextmanager
def _errors_shown() -> Iterator[None]:
    """Errors that the user can act on end as a message and exit status 1."""
    try:
        yield
    except EmbeddedKafkaError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(1) from error


def _home(directory: Path | None) -> Path:
    return (directory if directory is not None else cache_directory() / "clusters").absolute()


def _attach(name: str, directory: Path | None) -> KafkaCluster:
    home = _home(directory)
    if "/" in name or not (home / name / STATE_FILE).is_file():
        there = ", ".join(_names(home)) or "none"
        raise EmbeddedKafkaError(f"there is no cluster {name!r} in {home}. Clusters there: {there}")
    return KafkaCluster.attach(home / name)


def _names(home: Path) -> list[str]:
    return sorted(path.parent.name for path in home.glob(f"*/{STATE_FILE}"))


def _settings(pairs: Sequence[str]) -> dict[str, str]:
    settings = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or not key.strip():
            raise typer.BadParameter(f"{pair!r} is not KEY=VALUE", param_hint="--set")
        settings[key.strip()] = value
    return settings


def _described(cluster: KafkaCluster) -> dict[str, Any]:
    memory = cluster.resident_bytes()
    live = cluster.live_brokers()
    brokers = []
    for broker_id, (host, port) in cluster.addresses().items():
        process = cluster.process(broker_id)
        brokers.append(
            {
                "id": broker_id,
                "address": f"{host}:{port}",
                "roles": "broker,controller" if broker_id in cluster.spec.controllers else "broker",
                "state": "running" if process is not None else "stopped",
                "in_cluster": broker_id in live,
                "pid": process.pid if process is not None else None,
                "memory_mb": round(memory[broker_id] / 1e6) if broker_id in memory else None,
                "log": str(cluster.log_path(broker_id)),
            }
        )
    running = sum(broker["state"] == "running" for broker in brokers)
    return {
        "name": cluster.spec.name,
        "state": "running" if running == len(brokers) else "degraded" if running else "stopped",
        "cluster_id": cluster.cluster_id,
        "bootstrap_servers": cluster.bootstrap_servers,
        "version": cluster.version,
        "directory": str(cluster.directory),
        "brokers": brokers,
    }


def _lines(result: Any) -> Iterator[str]:
    """One cluster or several, for people."""
    clusters = result if isinstance(result, list) else [result]
    if not clusters:
        yield "no clusters"
    for cluster in clusters:
        yield from fields((key, value) for key, value in cluster.items() if not isinstance(value, list))
        if rows := cluster.get("brokers"):
            yield ""
            yield from columns([head.upper() for head in rows[0]], [list(row.values()) for row in rows])
            yield ""


@cluster_app.command()
def start(
    name: NameOption = "kafka",
    brokers: Annotated[int | None, typer.Option("--brokers", help="How many brokers (default: 1)")] = None,
    version: Annotated[
        str | None,
        typer.Option(
            "--version", help=f"Kafka's version; tested: {', '.join(TESTED_VERSIONS)} (default: {DEFAULT_VERSION})"
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option("--port", help="Port of broker 1; broker 2 has the next one, and so on (default: free ones)"),
    ] = None,
    directory: DirOption = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A broker setting; may be repeated.")
    ] = None,
    heap_mb: Annotated[int | None, typer.Option("--heap-mb", help="Heap of a broker, MB (default: 256)")] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Start a cluster in the background, or one that was stopped with --keep-data again.

    The first start of a version downloads Kafka (60 MB) into the cache.

    Example:

        isthmus cluster start --name a --brokers 3 --port 19092 --set min.insync.replicas=2 -o json
    """
    chosen: dict[str, Any] = {"name": name}
    for key, value in (("brokers", brokers), ("version", version), ("heap_mb", heap_mb)):
        if value is not None:
            chosen[key] = value
    if settings:
        chosen["settings"] = _settings(settings)
    with _errors_shown():
        home = _home(directory)
        if "/" not in name and (home / name / STATE_FILE).is_file():
            cluster = _start_again(name, directory, chosen, port)
        else:
            cluster = KafkaCluster(home / name, port=port, background=True, **chosen)
            cluster.start()
        show(_described(cluster), output, _lines)


def _start_again(name: str, directory: Path | None, chosen: Mapping[str, Any], port: int | None) -> KafkaCluster:
    cluster = _attach(name, directory)
    stop_it = f"isthmus cluster stop --name {name} --dir {_home(directory)}"
    if any(cluster.alive(broker_id) for broker_id in cluster.broker_ids):
        raise EmbeddedKafkaError(
            f"the cluster {name} runs already at {cluster.bootstrap_servers}: use it, choose another --name, or first: "
            f"{stop_it}"
        )
    for key, value in chosen.items():
        if getattr(cluster.spec, key) != value:
            raise EmbeddedKafkaError(
                f"there is a stopped cluster {name} with other {key} ({getattr(cluster.spec, key)}). Start it without "
                f"this option, choose another --name, or remove it first: {stop_it}"
            )
    if port is not None and port != cluster.addresses()[1][1]:
        raise EmbeddedKafkaError(
            f"there is a stopped cluster {name} on port {cluster.addresses()[1][1]}. Start it without --port, choose "
            f"another --name, or remove it first: {stop_it}"
        )
    say_on_stderr(f"starting the stopped cluster {name} again, with its data")
    cluster.start()
    return cluster


@cluster_app.command()
def stop(
    name: NameOption = "kafka",
    directory: DirOption = None,
    keep_data: Annotated[
        bool, typer.Option("--keep-data", help="Keep everything, so that start continues with it.")
    ] = False,
) -> None:
    """Stop a cluster and remove it with all its data.

    Example:

        isthmus cluster stop --name a --keep-data
    """
    with _errors_shown():
        cluster = _attach(name, directory)
        cluster.keep_data(keep_data)
        kept = cluster.directory
        cluster.stop()
    typer.echo(f"{name} is stopped; its data is in {kept}" if keep_data else f"{name} is stopped and removed")


@cluster_app.command()
def status(
    name: Annotated[str | None, typer.Option("--name", help="One cluster; else all under --dir.")] = None,
    directory: DirOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show what runs: brokers, addresses, processes, memory, logs.

    Example:

        isthmus cluster status --name a -o json
    """
    with _errors_shown():
        if name is not None:
            show(_described(_attach(name, directory)), output, _lines)
        else:
            home = _home(directory)
            show([_described(KafkaCluster.attach(home / each)) for each in _names(home)], output, _lines)


@cluster_app.command()
def kill(broker: BrokerOption, name: NameOption = "kafka", directory: DirOption = None) -> None:
    """Kill one broker as a power failure would (SIGKILL).

    Example:

        isthmus cluster kill --name a --broker 2
    """
    with _errors_shown():
        _attach(name, directory).kill(broker)
    typer.echo(f"broker {broker} of {name} is killed")


@cluster_app.command("stop-broker")
def stop_broker(broker: BrokerOption, name: NameOption = "kafka", directory: DirOption = None) -> None:
    """Stop one broker in order: it hands over its partitions first.

    Example:

        isthmus cluster stop-broker --name a --broker 2
    """
    with _errors_shown():
        _attach(name, directory).stop_broker(broker)
    typer.echo(f"broker {broker} of {name} is stopped")


@cluster_app.command("start-broker")
def start_broker(broker: BrokerOption, name: NameOption = "kafka", directory: DirOption = None) -> None:
    """Start one broker that was stopped or killed, on its old port and data.

    Example:

        isthmus cluster start-broker --name a --broker 2
    """
    with _errors_shown():
        _attach(name, directory).start_broker(broker)
    typer.echo(f"broker {broker} of {name} is ready")


@cluster_app.command()
def restart(broker: BrokerOption, name: NameOption = "kafka", directory: DirOption = None) -> None:
    """Stop one broker in order and start it again.

    Example:

        isthmus cluster restart --name a --broker 2
    """
    with _errors_shown():
        _attach(name, directory).restart(broker)
    typer.echo(f"broker {broker} of {name} is ready")


@cluster_app.command()
def pause(broker: BrokerOption, name: NameOption = "kafka", directory: DirOption = None) -> None:
    """Freeze one broker (SIGSTOP): its connections stay open and nothing is answered.

    Example:

        isthmus cluster pause --name a --broker 2
    """
    with _errors_shown():
        _attach(name, directory).pause(broker)
    typer.echo(f"broker {broker} of {name} is paused")


@cluster_app.command()
def resume(broker: BrokerOption, name: NameOption = "kafka", directory: DirOption = None) -> None:
    """Let a paused broker go on (SIGCONT).

    Example:

        isthmus cluster resume --name a --broker 2
    """
    with _errors_shown():
        _attach(name, directory).resume(broker)
    typer.echo(f"broker {broker} of {name} goes on")


@cluster_app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": True})
def tool(
    name: Annotated[
        str, typer.Argument(help="The tool, as its script is called: kafka-topics, kafka-console-producer.")
    ],
    arguments: Annotated[list[str] | None, typer.Argument(help="What the tool is given.")] = None,
    version: Annotated[str, typer.Option("--version", help="Kafka's version.")] = DEFAULT_VERSION,
) -> None:
    """Run one of Kafka's own command line tools, against any cluster or proxy, without Kafka being installed.

    Example:

        isthmus cluster tool kafka-topics --bootstrap-server 127.0.0.1:19192 --list
    """
    with _errors_shown():
        found = java_tool(version, name)
    os.execve(found.argv[0], [*found.argv, *(arguments or ())], found.env)  # its input, output and exit status are ours
