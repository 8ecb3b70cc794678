"""``isthmus salvage``: reads the files that keep what was cut from follower topics."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from isthmus.cli.output import EXIT_CODES, CliError, Exit, Output, OutputOption, columns, example, fields, show
from isthmus_protocol.record_codec import decode_records
from isthmus_protocol.records import BatchError
from isthmus_protocol.salvage import MalformedSalvage, Salvage, read_salvage

app = typer.Typer(
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Files that keep what was cut from follower topics whose log was not the source's any more.",
    epilog=example("isthmus salvage show orders-eu-0-100-105-9aa253d4.salvage") + EXIT_CODES,
)

FileArgument = Annotated[Path, typer.Argument(help="A salvage file; `isthmus link truncations` tells where they are.")]


@app.callback()
def _salvage() -> None:
    pass


@app.command(
    "show",
    epilog=example("isthmus salvage show orders-eu-0-100-105-9aa253d4.salvage", "isthmus salvage show FILE -o json")
    + EXIT_CODES,
)
def show_file(file: FileArgument, output: OutputOption = Output.TABLE) -> None:
    """Check a salvage file, and print where its records come from and the records themselves.

    Keys, values and headers are printed as text where they are UTF-8, else as base64 (-o json says which).
    """
    try:
        salvage = read_salvage(file.read_bytes())
        records = list(_records(salvage))
    except OSError as error:
        raise CliError("FILE", f"{file} cannot be read: {error.strerror}", Exit.USAGE, output) from None
    except (MalformedSalvage, BatchError) as error:
        raise CliError("MALFORMED_SALVAGE", f"{file}: {error}", Exit.USAGE, output) from None
    show({**asdict(salvage.head), **asdict(salvage.tail), "entries": records}, output, _lines)


def _records(salvage: Salvage) -> Iterator[dict[str, Any]]:
    for batch, header in salvage.batches():
        for record in decode_records(batch):
            if record.offset < salvage.head.from_offset:
                continue
            yield {
                "offset": record.offset,
                "timestamp_ms": record.timestamp,
                "kind": "marker" if header.is_control else "transactional" if header.is_transactional else "record",
                "producer_id": header.producer_id,
                "key": _content(record.key),
                "value": _content(record.value),
                "headers": [[name, _content(value)] for name, value in record.headers],
            }


def _content(content: bytes | None) -> dict[str, str] | None:
    if content is None:
        return None
    try:
        return {"text": content.decode()}
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(content).decode()}


def _cell(content: dict[str, str] | None) -> str:
    return "null" if content is None else content.get("text") or f"base64:{content.get('base64', '')}"


def _lines(salvage: dict[str, Any]) -> Iterator[str]:
    yield from fields(
        [
            ("topic", f"{salvage['topic']} (id {salvage['topic_id']}) of cluster {salvage['cluster_id']}"),
            ("partition", salvage["partition"]),
            ("offsets", f"{salvage['from_offset']} to {salvage['to_offset'] - 1}"),
            ("followed", f"{salvage['source_topic']} over link {salvage['link']}"),
            ("cut because", f"{salvage['code']}: {salvage['message']}"),
            ("batches", salvage["batches"]),
            ("records", salvage["records"]),
        ]
    )
    yield ""
    yield from columns(
        ("OFFSET", "TIMESTAMP_MS", "KIND", "KEY", "VALUE"),
        (
            (each["offset"], each["timestamp_ms"], each["kind"], _cell(each["key"]), _cell(each["value"]))
            for each in salvage["entries"]
        ),
    )
