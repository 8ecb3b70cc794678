"""``isthmus salvage replay``: produces again what a salvage file holds."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import typer

from isthmus.cli.files import why
from isthmus.cli.output import EXIT_CODES, CliError, Exit, Output, OutputOption, example, fields, show, shows_progress
from isthmus.salvage_files import is_ours_alone, read_file
from isthmus_protocol.offsets_salvage import OffsetsSalvage
from isthmus_protocol.records import BatchError
from isthmus_protocol.salvage import MalformedSalvage, Salvage
from isthmus_protocol.salvaged_records import Fate

GOES_ON: Final = "the same command goes on from what was acked"
EXAMPLES: Final = (
    example(
        "isthmus salvage replay FILE --topic orders-eu --bootstrap-server proxy-a:9092 --dry-run",
        "isthmus salvage replay FILE --topic orders-eu --bootstrap-server proxy-a:9092",
        "isthmus salvage replay FILE --topic rescued --partition 0 --bootstrap-server proxy-a:9092 "
        "--command-config client.properties",
    )
    + EXIT_CODES
)


def replay(
    file: Annotated[Path, typer.Argument(help="A salvage file of records; `isthmus salvage list` tells them.")],
    topic: Annotated[str, typer.Option("--topic", help="Where the records go. It is not made.")],
    bootstrap_server: Annotated[
        str,
        typer.Option("--bootstrap-server", metavar="HOST:PORT,...", help="Its cluster: the proxies, as for clients."),
    ],
    command_config: Annotated[
        Path | None,
        typer.Option("--command-config", dir_okay=False, help="A Kafka client's properties file: TLS, SASL."),
    ] = None,
    partition: Annotated[
        int | None, typer.Option("--partition", min=0, help="Where to, if not to the partition that was cut.")
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="From the first record, whatever was replayed to this topic before.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Produce again what a salvage file holds, in order, with keys, values, headers and timestamps as they were.

    A killed command that is given again goes on where it was: each record is there once. For that it keeps a note
    beside the file (replay-....json), and what is done by that is not done again. Left out are records of aborted
    transactions, and of such as have no end in the file. They are new records to whoever consumes the topic: at new
    offsets, outside of transactions.
    """
    try:
        with open(file, "rb") as opened:
            salvage = read_file(opened)
            if isinstance(salvage, OffsetsSalvage):
                message = f"{file} holds committed offsets: docs/operations.md says how kafka-consumer-groups sets them"
                raise CliError("NO_RECORDS", message, Exit.USAGE, output)
            if not is_ours_alone(opened):
                raise CliError("AT_WORK", f"another process replays {file}", Exit.FAILED, output)
            target = Target(topic, partition, bootstrap_server, command_config)
            told = _replayed(salvage, file.parent, target, again, dry_run, output)
    except OSError as error:
        where = error.filename or file
        raise CliError("FILE", f"{where} cannot be read or written: {why(error)}", Exit.USAGE, output) from None
    except (MalformedSalvage, BatchError) as error:
        raise CliError("MALFORMED_SALVAGE", f"{file}: {error}", Exit.USAGE, output) from None
    show(told, output, _lines)


class Target(NamedTuple):
    """What the options say of where records go."""

    topic: str
    partition: int | None
    bootstrap_server: str
    command_config: Path | None


def _replayed(
    salvage: Salvage, directory: Path, target: Target, again: bool, dry_run: bool, output: Output
) -> dict[str, Any]:
    """What was done, or would be, as it is printed. Raises CliError, BatchError, MalformedSalvage, OSError."""
    from isthmus.client_properties import read_security
    from isthmus.errors import ConfigurationError, KafkaError, PeerFault
    from isthmus.kafka.client import ClusterClient, SecuritySpec
    from isthmus.salvage_replay import NONE, Outcome, ReplayRefused, SalvageReplay

    progress = shows_progress(output)

    def progressed(done: int, total: int) -> None:
        if progress:
            typer.echo(f"\r{done} of {total} records are there", err=True, nl=done == total)

    async def run() -> Outcome:
        security = SecuritySpec() if target.command_config is None else read_security(target.command_config)
        servers = [each.strip() for each in target.bootstrap_server.split(",")]
        async with ClusterClient(servers, security, client_id="isthmus-salvage") as client:
            work = SalvageReplay(client, salvage, target.topic, target.partition, directory)
            return Outcome(await work.plan(again), 0, NONE, NONE) if dry_run else await work.run(progressed, again)

    try:
        done = asyncio.run(run())
    except (ConfigurationError, ValueError) as error:
        if isinstance(error, BatchError | MalformedSalvage):
            raise
        raise CliError("INVALID_CONFIG", str(error), Exit.USAGE, output) from None
    except ReplayRefused as error:
        raise CliError(error.code, str(error), Exit.FAILED, output) from None
    except KafkaError as error:
        raise CliError(error.name, f"{error}; {GOES_ON}", output=output) from None
    except PeerFault as error:
        message = f"the cluster does not answer: {error}; {GOES_ON}"
        raise CliError("NOT_REACHABLE", message, Exit.NOT_REACHABLE, output) from None
    plan = done.plan
    return {
        "topic": target.topic,
        "partition": salvage.head.partition if target.partition is None else target.partition,
        "dry_run": dry_run,
        "records": plan.records,
        "already_there": plan.already,
        "replayed": done.appended,
        "first_offset": None if done.first_offset == NONE else done.first_offset,
        "last_offset": None if done.last_offset == NONE else done.last_offset,
        "aborted_records": plan.fates.get(Fate.ABORTED, 0),
        "open_records": plan.fates.get(Fate.OPEN, 0),
    }


def _lines(told: dict[str, Any]) -> Iterator[str]:
    left = told["records"] - told["already_there"]
    what = f"{left} would be produced" if told["dry_run"] else f"{told['replayed']} produced"
    if told["first_offset"] is not None:
        what += f", at offsets {told['first_offset']} to {told['last_offset']}"
    yield from fields(
        [
            ("to", f"{told['topic']}-{told['partition']}"),
            ("records", told["records"]),
            ("there already", told["already_there"]),
            ("now", what),
            ("left out", f"{told['aborted_records']} of aborted transactions"),
            ("not committed", f"{told['open_records']} of transactions whose end is not in the file: left out, too"),
        ]
    )
