"""Files of captured traffic: written, sealed, sampled, hashed, bounded; read back by the Spark side's own reader."""

from __future__ import annotations

import errno
import io
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from isthmus_plugins.capture import files as module
from isthmus_plugins.capture.blocks import LINKS, MAGIC, MAJOR, NewerFormat, whole_blocks
from isthmus_plugins.capture.files import SEALED, SEALED_LINKS
from isthmus_plugins.capture.notes import Kind, pack, pack_link, told
from isthmus_plugins.capture.writer import UNNAMED_AT_ONCE, Writer, write
from isthmus_protocol import schema
from isthmus_protocol.bodies import build
from isthmus_protocol.messages import build_request, encode_request, encode_response
from isthmus_protocol.schema import ApiKey
from isthmus_spark.blocks import DamagedFile, read_file
from isthmus_spark.blocks import NewerFormat as NewerRead

SECRET = b"contents of a record"


def note(kind: Kind, said: bytes = b"", at: int = 0) -> bytes:
    return of_a_frame(kind, told(kind, 1, said)[-1], at, 0)


def of_a_frame(kind: Kind, first: bytes, at: int, key: int) -> bytes:
    return pack([int(kind), 1, at / 1e9, at / 1e9, int(key), first])


def settings(*namespaces: dict[str, Any]) -> bytes:
    defaults = {"type": "topic", "sampling": 1.0, "hash_clients": False, "salt": "", "roll_bytes": 1 << 20}
    defaults |= {"roll_s": 60.0, "keep_bytes": 1 << 30}
    wanted = [{**defaults, "directory": f"topic={each['prefix']}", **each} for each in namespaces]
    about = {"source": {"proxy": "p", "cluster": "c"}, "namespaces": wanted, "monotonic_ns": 0}
    return note(Kind.SETTINGS, json.dumps({**about, "wall_ns": 1_700_000_000_000_000_000}).encode())


def commits(topic: str, count: int = 1, begin: int = 0) -> bytes:
    """Requests with an answer each, a millisecond apart."""
    notes, key = b"", ApiKey.OFFSET_COMMIT << 16 | 8
    for number in range(begin, begin + count):
        values = {"group_id": "g", "topics": [{"name": topic, "partitions": [{"committed_metadata": SECRET.decode()}]}]}
        asked = encode_request(build_request(ApiKey.OFFSET_COMMIT, 8, values), number, "client")
        answered = encode_response(build(schema.response_type(ApiKey.OFFSET_COMMIT, 8), {}), number)
        notes += of_a_frame(Kind.REQUEST, asked, number * 1_000_000, key)
        notes += of_a_frame(Kind.ANSWER, answered, number * 1_000_000 + 500_000, key)
    return notes


def written(root: Path, *chunks: bytes) -> dict[str, Any]:
    reports: list[dict[str, Any]] = []
    write(chunks, root, reports.append)
    return reports[-1]


def link_note(kind: str, topic: str | None, end: int, at: int = 0) -> bytes:
    """``end``: of what was appended or confirmed, or where both logs end."""
    role, state = (None, "Following") if topic is None else ("follower", "Catching Up" if kind == "state" else None)
    return note(
        Kind.LINK,
        pack_link(
            (kind, "to-b", role, "B", topic, state, None),
            (-1 if topic is None else 0, end - 1, end, end + 5, end, 1, 100, 2500, 5, 70),
        ),
        at=at,
    )


def rows(root: Path) -> list[dict[str, Any]]:
    files = sorted(root.rglob(f"*{SEALED}"))
    return [row for file in files for batch in read_file(file) for row in batch.to_pylist()]


def test_events_are_read_as_they_were_written(tmp_path: Path) -> None:
    report = written(tmp_path, settings({"prefix": "pay-"}), commits("pay-t", 3), commits("other"))
    assert (report["events"], report["dropped"], report["files"]) == (3, 0, 1)
    found = rows(tmp_path)
    assert [row["correlation_id"] for row in found] == [0, 1, 2]
    first = found[0]
    assert (first["topic"], first["group_id"], first["client_id"], first["api_key"]) == ("pay-t", "g", "client", 8)
    assert (first["broker_us"], first["gate_us"], first["principal"], first["namespace"]) == (500, 0, None, "pay-")
    assert (first["cluster"], first["proxy"]) == ("c", "p")
    assert int(found[1]["time"].timestamp() * 1000) == 1_700_000_000_001
    assert SECRET not in b"".join(file.read_bytes() for file in tmp_path.rglob("*.*"))


def test_chunks_may_end_anywhere(tmp_path: Path) -> None:
    data = settings({"prefix": "pay-"}) + commits("pay-t", 20)
    written(tmp_path, *(data[at : at + 37] for at in range(0, len(data), 37)))
    assert [row["correlation_id"] for row in rows(tmp_path)] == list(range(20))


def test_the_narrowest_namespace_that_holds_a_topic_has_its_events(tmp_path: Path) -> None:
    said = settings({"prefix": ""}, {"prefix": "pay-"})
    written(tmp_path, said, commits("pay-t"), commits("other", begin=1))
    assert {row["topic"]: row["namespace"] for row in rows(tmp_path)} == {"pay-t": "pay-", "other": ""}


def test_a_part_is_sampled_and_clients_are_hashed(tmp_path: Path) -> None:
    said = settings({"prefix": "pay-", "sampling": 0.25, "hash_clients": True, "salt": "s"})
    written(tmp_path, said, commits("pay-t", 4000))
    found = rows(tmp_path)
    assert 850 < len(found) < 1150
    (hashed,) = {row["client_id"] for row in found}
    assert hashed != "client"
    assert len(hashed) == 16


def test_files_are_rolled_by_size_and_the_oldest_ones_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK_ROWS", 100)
    monkeypatch.setattr(module, "BLOCK_S", 0.0)
    said = settings({"prefix": "pay-", "roll_bytes": 20_000, "keep_bytes": 70_000})
    chunks = [commits("pay-t", 100, begin) for begin in range(0, 2000, 100)]
    written(tmp_path, said, *chunks)
    files = sorted(tmp_path.rglob(f"*{SEALED}"))
    assert sum(file.stat().st_size for file in files) <= 70_000 + 40_000
    assert rows(tmp_path)[-1]["correlation_id"] == 1999
    assert 1 < len(files) < 20


def test_a_full_disk_drops_events_and_counts_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = module.BlockFiles._begin
    full = [True]

    def begun(self: module.BlockFiles) -> None:
        if full[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        begin(self)

    monkeypatch.setattr(module.BlockFiles, "_begin", begun)
    monkeypatch.setattr(module, "BLOCK_ROWS", 10)
    reports: list[dict[str, Any]] = []

    def chunks() -> Any:
        yield settings({"prefix": "pay-"}) + commits("pay-t", 10)
        full[0] = False
        yield commits("pay-t", 10, 10)

    write(chunks(), tmp_path, reports.append)
    assert (reports[-1]["events"], reports[-1]["dropped"]) == (10, 10)
    assert [row["correlation_id"] for row in rows(tmp_path)] == list(range(10, 20))


def test_a_disk_that_takes_a_part_of_a_block_is_given_the_rest(tmp_path: Path) -> None:
    """As RLIMIT_FSIZE has it, or a disk that is nearly full: what is taken is counted, and nobody raises."""

    class Part(io.FileIO):
        def write(self, data: Any) -> int:
            return super().write(memoryview(data)[:7])

    file = tmp_path / "file"
    with Part(file, "x") as part:
        module._write_all(part, b"0123456789" * 5)
    assert file.read_bytes() == b"0123456789" * 5


def test_files_are_their_owners_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        written(tmp_path / "capture", settings({"prefix": "pay-"}), commits("pay-t"))
    finally:
        os.umask(before)
    (file,) = tmp_path.rglob(f"*{SEALED}")
    assert stat.filemode(file.stat().st_mode) == "-rw-------"
    assert stat.filemode(file.parent.stat().st_mode) == "drwx------"


def test_names_of_very_many_topics_are_asked_for_in_pieces(tmp_path: Path) -> None:
    reports: list[dict[str, Any]] = []
    writer = Writer(tmp_path)
    for number in range(2 * UNNAMED_AT_ONCE + 5):
        writer._unnamed[number.to_bytes(16, "big")] = 0.0
    while (report := writer.report())["unnamed"]:
        reports.append(report)
        assert len(json.dumps(report)) < 64 * 1024  # what the proxy reads of one line
    assert [len(report["unnamed"]) for report in reports] == [UNNAMED_AT_ONCE, UNNAMED_AT_ONCE, 5]


def test_what_a_process_left_open_is_sealed_as_far_as_it_is_whole(tmp_path: Path) -> None:
    written(tmp_path, settings({"prefix": "pay-"}), commits("pay-t", 5))
    (file,) = tmp_path.rglob(f"*{SEALED}")
    data = file.read_bytes()
    left = file.with_name(file.stem + "-p-0.capture.open")
    left.write_bytes(data + data[: len(data) // 2])
    file.unlink()
    written(tmp_path, settings({"prefix": "pay-"}))
    assert len(rows(tmp_path)) == 5
    assert not list(tmp_path.rglob("*.open"))


def test_events_wait_for_the_names_of_topics(tmp_path: Path) -> None:
    topic_id = bytes(range(16))
    import uuid

    data = [{"topic_id": uuid.UUID(bytes=topic_id), "partition_data": [{"index": 0, "records": b""}]}]
    asked = encode_request(build_request(ApiKey.PRODUCE, 13, {"topic_data": data}), 1, "me")
    answered = encode_response(build(schema.response_type(ApiKey.PRODUCE, 13), {}), 1)
    key = ApiKey.PRODUCE << 16 | 13
    reports: list[dict[str, Any]] = []
    chunks = [
        settings({"prefix": "pay-"})
        + of_a_frame(Kind.REQUEST, asked, 0, key)
        + of_a_frame(Kind.ANSWER, answered, 0, key),
        note(Kind.TOPIC, topic_id + b"pay-t"),
    ]
    write(chunks, tmp_path, reports.append)
    assert reports[0]["unnamed"] == [topic_id.hex()]
    assert [row["topic"] for row in rows(tmp_path)] == ["pay-t"]


def link_rows(root: Path) -> list[dict[str, Any]]:
    """As the blocks describe themselves."""
    found = []
    for file in sorted(root.rglob(f"*{SEALED_LINKS}")):
        for _, described, data in whole_blocks(file.read_bytes()):
            names = [name for name, _ in described["fields"]]
            for values in LINKS.row.iter_unpack(data):
                row = dict(zip(names, values, strict=True))
                texts = {
                    name: None if row[name] < 0 else table[row[name]] for name, table in described["tables"].items()
                }
                found.append({**row, **texts, "namespace": described["source"]["namespace"]})
    return found


def test_what_links_do_is_in_files_of_the_narrowest_namespace(tmp_path: Path) -> None:
    said = settings({"prefix": "pay-"}, {"prefix": ""}, {"prefix": "g", "type": "consumer-group", "directory": "g"})
    notes = (link_note("appended", "pay-t", 7, 1_000_000), link_note("state", "other", 9), link_note("state", None, 0))
    written(tmp_path, said, b"".join(notes))
    found = {(row["namespace"], row["kind"], row["topic"]): row for row in link_rows(tmp_path)}
    assert sorted(found, key=str) == [("", "state", "other"), ("", "state", None), ("pay-", "appended", "pay-t")]
    row = found["pay-", "appended", "pay-t"]
    assert row["time_us"] == 1_700_000_000_001_000
    assert (row["link"], row["role"], row["remote_cluster"], row["state"]) == ("to-b", "follower", "B", None)
    numbers = ("partition", "base_offset", "end_offset", "source_end", "follower_end", "batches", "bytes", "took_us")
    assert [row[name] for name in numbers] == [0, 6, 7, 12, 7, 1, 100, 2500]
    assert (row["lag"], row["lag_ms"]) == (5, 70)
    assert (found["", "state", None]["role"], found["", "state", None]["state"]) == (None, "Following")


def test_states_are_never_left_out_by_sampling(tmp_path: Path) -> None:
    said = settings({"prefix": "pay-", "sampling": 0.25})
    notes = [link_note(kind, "pay-t", end) for end in range(400) for kind in ("confirmed", "state")]
    written(tmp_path, said, *notes)
    kinds = [row["kind"] for row in link_rows(tmp_path)]
    assert kinds.count("state") == 400
    assert 50 < kinds.count("confirmed") < 150


def test_damaged_and_newer_files_are_refused(tmp_path: Path) -> None:
    written(tmp_path, settings({"prefix": "pay-"}), commits("pay-t", 5))
    (file,) = tmp_path.rglob(f"*{SEALED}")
    data = bytearray(file.read_bytes())
    damaged = tmp_path / "damaged"
    for change in (data[:-1], data[:40] + b"x" + data[41:], b"x" + data[1:], data + b"more"):
        damaged.write_bytes(change)
        with pytest.raises(DamagedFile, match="damaged"):
            list(read_file(damaged))
    data[len(MAGIC) : len(MAGIC) + 2] = (MAJOR + 1).to_bytes(2, "big")
    damaged.write_bytes(data)
    with pytest.raises(NewerRead, match="upgrade"):
        list(read_file(damaged))
    with pytest.raises(NewerFormat, match="upgrade"):
        list(whole_blocks(bytes(data)))
