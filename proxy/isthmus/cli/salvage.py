"""``isthmus salvage``: reads the files that keep what was cut from follower topics."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from isthmus.cli.output import EXIT_CODES, CliError, Exit, Output, OutputOption, columns, example, fields, show
from isthmus_protocol.offsets_salvage import OFFSETS_MAGIC_LINE, read_offsets_salvage
from isthmus_protocol.record_codec import decode_records
from isthmus_protocol.records import BatchError
from isthmus_protocol.salvage import SUFFIX, MalformedSalvage, Salvage, read_ends, read_salvage

app = typer.Typer(
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Files that keep what was cut from follower topics whose log was not the source's any more, and committed "
    "offsets of groups that were put back.",
    epilog=example("isthmus salvage show orders-eu-0-100-105-9aa253d4.salvage") + EXIT_CODES,
)

DirectoryArgument = Annotated[Path, typer.Argument(help="`salvage` in a proxy's [data] directory.")]
FileArgument = Annotated[
    Path,
    typer.Argument(
        help="A salvage file; `isthmus salvage list`, `isthmus link truncations` and `isthmus link describe` tell them."
    ),
]


@app.callback()
def _salvage() -> None:
    pass


@app.command(
    "show",
    epilog=example("isthmus salvage show orders-eu-0-100-105-9aa253d4.salvage", "isthmus salvage show FILE -o json")
    + EXIT_CODES,
)
def show_file(file: FileArgument, output: OutputOption = Output.TABLE) -> None:
    """Check a salvage file, and print where it comes from, and the records, or the committed offsets of groups, in it.

    Keys, values and headers are printed as text where they are UTF-8, else as base64 (-o json says which).
    """
    try:
        content = file.read_bytes()
        if content.startswith(OFFSETS_MAGIC_LINE):
            of_groups = read_offsets_salvage(content)
            entries = [asdict(each) for each in of_groups.offsets]
            show({**asdict(of_groups.head), **asdict(of_groups.tail), "entries": entries}, output, _lines_of_groups)
            return
        salvage = read_salvage(content)
        records = list(_records(salvage))
    except OSError as error:
        raise CliError("FILE", f"{file} cannot be read: {error.strerror}", Exit.USAGE, output) from None
    except (MalformedSalvage, BatchError) as error:
        raise CliError("MALFORMED_SALVAGE", f"{file}: {error}", Exit.USAGE, output) from None
    show({**asdict(salvage.head), **asdict(salvage.tail), "entries": records}, output, _lines)


@app.command(
    "list",
    epilog=example("isthmus salvage list /var/lib/isthmus/salvage", "isthmus salvage list DIRECTORY -o json")
    + EXIT_CODES,
)
def list_files(directory: DirectoryArgument, output: OutputOption = Output.TABLE) -> None:
    """List the salvage files of a directory, the oldest first: what was cut, when and why. Records are not read."""
    try:
        found = [_listed(path) for path in directory.iterdir() if path.name.endswith(SUFFIX)]
    except OSError as error:
        raise CliError("DIRECTORY", f"{directory} cannot be read: {error.strerror}", Exit.USAGE, output) from None
    show(sorted(found, key=lambda each: (each.get("at_ms", 0), each["file"])), output, _table)


def _listed(path: Path) -> dict[str, Any]:
    listed: dict[str, Any] = {"file": path.name, "size": path.stat().st_size}
    try:
        with path.open("rb") as file:
            if file.readline(len(OFFSETS_MAGIC_LINE)) == OFFSETS_MAGIC_LINE:
                offsets = read_offsets_salvage(OFFSETS_MAGIC_LINE + file.read())
                return {**listed, **asdict(offsets.head), "offsets": offsets.tail.offsets}
            file.seek(0)
            head, tail = read_ends(file)
    except (MalformedSalvage, OSError) as error:
        return {**listed, "error": str(error)}
    return {**listed, **asdict(head), "batches": tail.batches, "records": tail.records}


def _table(files: list[dict[str, Any]]) -> Iterator[str]:
    yield from columns(
        ("CUT_AT", "TOPIC", "PARTITION", "OFFSETS", "RECORDS", "BYTES", "CODE", "FILE"),
        (
            (
                datetime.fromtimestamp(each["at_ms"] / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
                each["topic"] if "topic" in each else f"groups {each['namespace']}*",
                each["partition"],
                f"{each['from_offset']} to {each['to_offset'] - 1}",
                each["records"] if "records" in each else each["offsets"],
                each["size"],
                each["code"],
                each["file"],
            )
            if "error" not in each
            else (None, None, None, None, None, each["size"], each["error"], each["file"])
            for each in files
        ),
    )


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


def _lines_of_groups(salvage: dict[str, Any]) -> Iterator[str]:
    yield from fields(
        [
            ("groups", f"{salvage['namespace']}* of cluster {salvage['cluster_id']}, over link {salvage['link']}"),
            ("lost", f"partition {salvage['partition']} of the source's offsets topic"),
            ("its offsets", f"{salvage['from_offset']} to {salvage['to_offset'] - 1}"),
            ("put back because", f"{salvage['code']}: {salvage['message']}"),
            ("committed offsets", salvage["offsets"]),
        ]
    )
    yield ""
    yield from columns(
        ("GROUP", "TOPIC", "PARTITION", "OFFSET", "SOURCE_OFFSET", "METADATA"),
        (
            (
                each["group"],
                each["topic"],
                each["partition"],
                each["offset"],
                None if each["source_offset"] < 0 else each["source_offset"],
                each["metadata"] or None,
            )
            for each in salvage["entries"]
        ),
    )
