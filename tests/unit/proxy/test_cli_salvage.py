"""``isthmus salvage``: what it prints of files, and what it says of one that is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from support.partition_log import batch
from typer.testing import CliRunner

from isthmus.cli.root import app
from isthmus.salvage_files import is_ours_alone
from isthmus_protocol.offsets_salvage import OffsetsSalvageHead, SalvagedOffset, encode_offsets_salvage
from isthmus_protocol.record_codec import Record, encode_batch
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


def test_a_file_of_committed_offsets_is_shown(tmp_path: Path) -> None:
    head = OffsetsSalvageHead("B", "a-to-b", "far-", 7, 2, 5, 9, "SOURCE_LOST_COMMITS", "why", 17, "p")
    offsets = [SalvagedOffset("far-a", "far-t", 0, 8, "m", 5), SalvagedOffset("far-b", "far-t", 1, 3, "", -1)]
    path = tmp_path / "offsets-x.salvage"
    path.write_bytes(encode_offsets_salvage(head, offsets))
    told = json.loads(CliRunner().invoke(app, ["salvage", "show", str(path), "-o", "json"]).output)
    assert (told["partition"], told["offsets"], told["entries"][0]["offset"]) == (7, 2, 8)
    table = CliRunner().invoke(app, ["salvage", "show", str(path)]).output
    assert "5 to 8" in table
    (listed,) = json.loads(CliRunner().invoke(app, ["salvage", "list", str(tmp_path), "-o", "json"]).output)
    assert (listed["file"], listed["namespace"], listed["offsets"]) == ("offsets-x.salvage", "far-", 2)
    assert "groups far-*" in CliRunner().invoke(app, ["salvage", "list", str(tmp_path)]).output
    assert [line.split() for line in table.splitlines()[-2:]] == [
        ["far-a", "far-t", "0", "8", "5", "m"],
        ["far-b", "far-t", "1", "3", "-", "-"],
    ]
    path.write_bytes(path.read_bytes()[:-5])
    assert CliRunner().invoke(app, ["salvage", "show", str(path)]).exit_code == 2


def test_the_files_of_a_directory_are_listed(tmp_path: Path) -> None:
    path = salvage(tmp_path)
    (tmp_path / "unfinished.part").write_bytes(b"")
    (tmp_path / "y.salvage").write_bytes(path.read_bytes()[:-5])
    (tmp_path / "z.salvage").write_bytes(b"something else")
    shown = CliRunner().invoke(app, ["salvage", "list", str(tmp_path), "-o", "json"])
    assert shown.exit_code == 0, shown.output
    listed = {each["file"]: each for each in json.loads(shown.output)}
    assert set(listed) == {"x.salvage", "y.salvage", "z.salvage"}
    whole = listed["x.salvage"]
    assert (whole["topic"], whole["records"], whole["size"]) == ("orders", 3, path.stat().st_size)
    assert "no tail" in listed["y.salvage"]["error"]
    assert "no salvage file" in listed["z.salvage"]["error"]
    table = CliRunner().invoke(app, ["salvage", "list", str(tmp_path)]).output
    assert "1970-01-01T00:00:00Z  orders  3          11 to 12  3" in table
    assert CliRunner().invoke(app, ["salvage", "list", str(tmp_path / "absent")]).exit_code == 2


def test_a_table_holds_no_control_characters_and_is_as_short_as_it_is_asked_to_be(tmp_path: Path) -> None:
    writer = SalvageWriter(HEAD)
    records = [
        Record(11, 5, b"", b"\x1b[2J\n" + b"x" * 300, (("h\n", b"\x07"), ("none", None))),
        Record(12, 6, None, None),
    ]
    data = encode_batch(records, whole_header(batch(11, [b"a", b"b"])))
    head = writer.head()
    writer.add(data, whole_header(data))
    path = tmp_path / "x.salvage"
    path.write_bytes(head + data + writer.tail())
    table = CliRunner().invoke(app, ["salvage", "show", str(path)]).output
    assert "\x1b" not in table
    assert "\x07" not in table
    assert "(305 characters)" in table
    assert r"\x1b[2J\n" in table
    assert r"h\n=\x07, none=null" in table
    assert "more" not in table
    some = CliRunner().invoke(app, ["salvage", "show", str(path), "--limit", "1"]).output
    assert "and 1 more" in some
    told = json.loads(CliRunner().invoke(app, ["salvage", "show", str(path), "--limit", "1", "-o", "json"]).output)
    assert ([each["offset"] for each in told["entries"]], told["entries_left_off"]) == ([11], 1)


def test_what_cannot_be_replayed_is_said(tmp_path: Path) -> None:
    path = salvage(tmp_path)
    groups = tmp_path / "groups.salvage"
    head = OffsetsSalvageHead("B", "a-to-b", "far-", 7, 2, 5, 9, "SOURCE_LOST_COMMITS", "why", 17, "p")
    groups.write_bytes(encode_offsets_salvage(head, []))
    properties = tmp_path / "client.properties"
    properties.write_text("security.protocol=SASL_SSL\nsasl.mechanism=OAUTHBEARER\n")

    def replay(file: Path, *more: str) -> Any:
        arguments = ["salvage", "replay", str(file), "--topic", "t", "--bootstrap-server", "127.0.0.1:9", *more]
        return CliRunner().invoke(app, arguments)

    with path.open("rb") as mine:
        assert is_ours_alone(mine)
        assert (replay(path).exit_code, "another process" in replay(path).output) == (1, True)
    assert (replay(path).exit_code, replay(groups).exit_code, replay(tmp_path / "absent").exit_code) == (3, 2, 2)
    assert "kafka-consumer-groups" in replay(groups).output
    assert replay(path, "--command-config", str(properties)).exit_code == 2
    assert [each.name for each in tmp_path.glob("replay-*")] == []
