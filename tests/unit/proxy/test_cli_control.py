"""``isthmus control``: what it says of files that are none, of clusters that do not answer, and of a proxy's export."""

from __future__ import annotations

import json
import socket
import stat
from pathlib import Path
from typing import Any

import pytest
from support.admin import RunningAdmin
from typer.testing import CliRunner

from isthmus.cli.root import app
from isthmus_control.anchors import LogRecord, RecentRecords
from isthmus_control.commands import AcceptLog, Command, encode
from isthmus_control.control_state import ControlState
from isthmus_control.exports import Export, decode, export
from isthmus_control.replica import Replica

TOPIC_ID = "11111111-1111-4111-8111-111111111111"


def small() -> Export:
    replica, recent = Replica(ControlState("cluster-a")), RecentRecords()
    value = encode(Command("22222222-2222-4222-8222-222222222222", 1, "p", -1, AcceptLog(3)))
    replica.feed(0, value)
    recent.add(LogRecord(0, value))
    made = export(replica, recent, TOPIC_ID)
    assert made is not None
    return made


def run(*arguments: str) -> tuple[int, Any]:
    result = CliRunner().invoke(app, ["control", *arguments, "-o", "json"])
    return result.exit_code, json.loads(result.stdout or result.stderr)


@pytest.fixture
def config(tmp_path: Path) -> str:
    """Of a cluster that does not answer."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    path = tmp_path / "a.toml"
    path.write_text(f'[cluster]\nbootstrap_servers = "127.0.0.1:{port}"\n[client_listener]\nbind = "127.0.0.1:0"\n')
    return str(path)


@pytest.mark.parametrize("command", ["import", "repair"])
def test_what_is_no_export_is_not_written(command: str, config: str, tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    code, error = run(command, str(file), "--config", config)
    assert (code, error["code"]) == (2, "FILE")
    file.write_bytes(small().encode()[:-1])
    code, error = run(command, str(file), "--config", config)
    assert (code, error["code"]) == (2, "MALFORMED_EXPORT")


@pytest.mark.parametrize("arguments", [("import", "FILE"), ("repair", "FILE"), ("repair", "--accept-loss")])
def test_a_cluster_that_does_not_answer(arguments: tuple[str, ...], config: str, tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_bytes(small().encode())
    code, error = run(*(str(file) if each == "FILE" else each for each in arguments), "--config", config)
    assert (code, error["code"]) == (3, "NOT_REACHABLE")


def test_a_proxy_writes_its_export_for_its_user_alone(tmp_path: Path) -> None:
    with RunningAdmin() as admin:
        code, error = run("export", "--url", admin.url)
        assert (code, error["code"]) == (1, "NOT_READY")
        admin.services.export = lambda: None
        code, error = run("export", "--url", admin.url)
        assert (code, error["code"]) == (1, "NOT_FOUND")
        admin.services.export = small
        for directory in (tmp_path / "data", None):
            admin.services.data_directory = directory
            code, written = run("export", "--url", admin.url)
            assert (code, written["end_offset"], written["topic_id"]) == (0, 1, TOPIC_ID)
            path = Path(written["path"])
            assert path.parent == directory or directory is None
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert decode(path.read_bytes()) == small()
            if directory is None:
                path.unlink()
                path.parent.rmdir()
