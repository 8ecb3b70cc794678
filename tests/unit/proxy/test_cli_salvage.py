"""``isthmus salvage show``: what it prints of a file, and what it says of one that is none."""

from __future__ import annotations

import json
from pathlib import Path

from support.partition_log import batch
from typer.testing import CliRunner

from isthmus.cli.root import app
from isthmus_protocol.records import whole_header
from isthmus_protocol.salvage import SalvageHead, SalvageWriter

HEAD = SalvageHead("C", "a-to-b", "orders", "id", "orders", 3, 11, 13, "TARGET_WRITTEN_BY_OTHERS", "why", 17, "p")


def salvage(directory: Path) -> Path:
    writer = SalvageWriter(HEAD)
    data = batch(10, [b"before", b"text", b"\xff"])
    head = writer.head()
    writer.add(data, whole_header(data))
    path = directory / "x.salvage"
    path.write_bytes(head + data + writer.tail())
    return path


def test_a_file_is_shown(tmp_path: Path) -> None:
    path = salvage(tmp_path)
    shown = CliRunner().invoke(app, ["salvage", "show", str(path), "-o", "json"])
    assert shown.exit_code == 0, shown.output
    told = json.loads(shown.output)
    assert (told["topic"], told["partition"], told["from_offset"]) == ("orders", 3, 11)
    assert [(each["offset"], each["value"]) for each in told["entries"]] == [
        (11, {"text": "text"}),
        (12, {"base64": "/w=="}),
    ]
    table = CliRunner().invoke(app, ["salvage", "show", str(path)])
    assert "base64:/w==" in table.output
    assert "11 to 12" in table.output


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    path = salvage(tmp_path)
    path.write_bytes(path.read_bytes()[:-5])
    for name in (path, tmp_path / "absent"):
        shown = CliRunner().invoke(app, ["salvage", "show", str(name)])
        assert shown.exit_code == 2
