"""``isthmus salvage``: the files that keep what was cut from follower topics, read and produced again."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from isthmus.cli import salvage_replay
from isthmus.cli.files import named
from isthmus.cli.output import EXIT_CODES, CliError, Exit, Output, OutputOption, columns, example, fields, show
from isthmus.salvage_files import Note, notes_in, read_file
from isthmus_protocol.offsets_salvage import OFFSETS_MAGIC_LINE, OffsetsSalvage, read_offsets_salvage
from isthmus_protocol.record_codec import Record, decode_records
from isthmus_protocol.records import BatchError, BatchHeader
from isthmus_protocol.salvage import SUFFIX, MalformedSalvage, Salvage, identity, read_ends
from isthmus_protocol.salvaged_records import Fate, fates

CELL_CHARS_MAX: Final = 120
"""Of a key, value or headers in a table."""

app = typer.Typer(
    rich_markup_mode=None,
    no_args_is_help=True,
    help="Files that keep what was cut from follower topics whose log was not the source's any more, and committed "
    "offsets of groups that were put back.",
    epilog=example(
        "isthmus salvage list /var/lib/isthmus/salvage",
        "isthmus salvage show orders-eu-0-100-105-9aa253d4.salvage",
        "isthmus salvage replay orders-eu-0-100-105-9aa253d4.salvage --topic orders-eu --bootstrap-server proxy-a:9092",
    )
    + EXIT_CODES,
)

DirectoryArgument = Annotated[Path, typer.Argument(help="`salvage` in a proxy's [data] directory.")]
FileArgument = Annotated[
    Path,
    typer.Argument(
        help="A salvage file; `isthmus salvage list`, `isthmus link truncations` and `isthmus link describe` tell them."
    ),
]


app.command("replay", epilog=salvage_replay.EXAMPLES)(salvage_replay.replay)


@app.command(
    "show",
    epilog=example(
        "isthmus salvage show orders-eu-0-100-105-9aa253d4.salvage",
        "isthmus salvage show FILE --limit 10",
        "isthmus salvage show FILE -o json",
    )
    + EXIT_CODES,
)
def show_file(
    file: FileArgument,
    limit: Annotated[int | None, typer.Option("--limit", min=0, help="So many records at most.")] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Check a salvage file, and print where it comes from, and the records, or the committed offsets of groups, in it.

    KIND says what became of a record: a plain one, of a transaction that was committed, was aborted or is open (its
    end is not in the file), a marker, or a filler, which no consumer sees. Keys, values and headers are printed as text
    where they are UTF-8, else as base64 (-o json says which); a table cuts what is long.
    """
    try:
        with named(file, output), open(file, "rb") as opened:
            found = read_file(opened)
            if isinstance(found, OffsetsSalvage):
                told = [asdict(each) for each in found.offsets[:limit]]
                left_off = len(found.offsets) - len(told)
                shown = {**asdict(found.head), **asdict(found.tail), "entries": told, "entries_left_off": left_off}
                show(shown, output, _lines_of_groups)
                return
            told, left_off = _entries(found, limit)
    except (MalformedSalvage, BatchError) as error:
        raise CliError("MALFORMED_SALVAGE", f"{file}: {error}", Exit.USAGE, output) from None
    shown = {**asdict(found.head), **asdict(found.tail), "entries": told, "entries_left_off": left_off}
    show(shown, output, _lines)


@app.command(
    "list",
    epilog=example("isthmus salvage list /var/lib/isthmus/salvage", "isthmus salvage list DIRECTORY -o json")
    + EXIT_CODES,
)
def list_files(directory: DirectoryArgument, output: OutputOption = Output.TABLE) -> None:
    """List the salvage files of a directory, the oldest first: what was cut, when and why, and what was replayed.

    Records are not read.
    """
    with named(directory, output):
        notes = list(notes_in(directory))
        found = [_listed(path, notes) for path in directory.iterdir() if path.name.endswith(SUFFIX)]
    show(sorted(found, key=lambda each: (each.get("at_ms", 0), each["file"])), output, _table)


def _listed(path: Path, notes: list[Note]) -> dict[str, Any]:
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
    replays = [asdict(note) for note in notes if note.salvage == identity(head, tail)]
    return {**listed, **asdict(head), "batches": tail.batches, "records": tail.records, "replays": replays}


def _table(files: list[dict[str, Any]]) -> Iterator[str]:
    yield from columns(
        ("CUT_AT", "TOPIC", "PARTITION", "OFFSETS", "RECORDS", "BYTES", "CODE", "REPLAYED", "FILE"),
        (
            (
                _time(each["at_ms"]),
                each["topic"] if "topic" in each else f"groups {each['namespace']}*",
                each["partition"],
                f"{each['from_offset']} to {each['to_offset'] - 1}",
                each["records"] if "records" in each else each["offsets"],
                each["size"],
                each["code"],
                [_replay(one) for one in each.get("replays", ())],
                each["file"],
            )
            if "error" not in each
            else (None, None, None, None, None, each["size"], each["error"], None, each["file"])
            for each in files
        ),
    )


def _replay(replay: dict[str, Any]) -> str:
    what = "all" if replay["done_ms"] else f"{replay['acked']} of {replay['records']}"
    return f"{what} to {replay['topic']}-{replay['partition']}"


def _entries(salvage: Salvage, limit: int | None) -> tuple[list[dict[str, Any]], int]:
    """The first records, markers among them, and how many are left off."""
    entries: list[dict[str, Any]] = []
    left_off = 0
    for (batch, header), fate in zip(salvage.batches(), fates(salvage), strict=True):
        if limit is not None and len(entries) >= limit:
            left_off += header.record_count
            continue
        for record in decode_records(batch):
            if record.offset < salvage.head.from_offset:
                continue
            if limit is not None and len(entries) >= limit:
                left_off += 1
            else:
                entries.append(_entry(record, header, fate))
    return entries, left_off


def _entry(record: Record, header: BatchHeader, fate: Fate) -> dict[str, Any]:
    return {
        "offset": record.offset,
        "timestamp_ms": record.timestamp,
        "kind": fate.value,
        "producer_id": header.producer_id,
        "producer_epoch": header.producer_epoch,
        "key": _content(record.key),
        "value": _content(record.value),
        "headers": [[_name(name), _content(value)] for name, value in record.headers],
    }


def _name(name: str) -> str:
    """A header's name: brokers do not check that it is UTF-8."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _content(content: bytes | None) -> dict[str, str] | None:
    if content is None:
        return None
    try:
        return {"text": content.decode()}
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(content).decode()}


def _cell(content: dict[str, str] | None) -> str:
    """A key or value in a table: nothing in it moves the cursor, or fills the screen."""
    if content is None:
        return "null"
    text = content["text"] if "text" in content else f"base64:{content['base64']}"
    return _cut(text) if text else '""'


def _cut(text: str) -> str:
    some = text[:CELL_CHARS_MAX]
    shown = "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in some)
    return shown if len(text) <= CELL_CHARS_MAX else f"{shown}... ({len(text)} characters)"


def _headers(headers: list[list[Any]]) -> str | None:
    return ", ".join(f"{_cut(name)}={_cell(value)}" for name, value in headers) or None


def _lines(salvage: dict[str, Any]) -> Iterator[str]:
    yield from fields(
        [
            ("topic", f"{salvage['topic']} (id {salvage['topic_id']}) of cluster {salvage['cluster_id']}"),
            ("partition", salvage["partition"]),
            ("offsets", f"{salvage['from_offset']} to {salvage['to_offset'] - 1}"),
            ("followed", f"{salvage['source_topic']} over link {salvage['link']}"),
            ("cut because", f"{salvage['code']}: {salvage['message']}"),
            ("cut at", _time(salvage["at_ms"])),
            ("batches", salvage["batches"]),
            ("records", salvage["records"]),
        ]
    )
    yield ""
    yield from columns(
        ("OFFSET", "TIMESTAMP_MS", "KIND", "PRODUCER", "KEY", "VALUE", "HEADERS"),
        (
            (
                each["offset"],
                each["timestamp_ms"],
                each["kind"],
                None if each["producer_id"] < 0 else f"{each['producer_id']}/{each['producer_epoch']}",
                _cell(each["key"]),
                _cell(each["value"]),
                _headers(each["headers"]),
            )
            for each in salvage["entries"]
        ),
    )
    yield from _left_off(salvage)


def _left_off(salvage: dict[str, Any]) -> Iterator[str]:
    if salvage["entries_left_off"]:
        yield f"and {salvage['entries_left_off']} more"


def _time(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


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
    yield from _left_off(salvage)
