"""The vocabulary of the logs, read from the sources, and their two forms."""

from __future__ import annotations

import ast
import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from isthmus import logs

ROOT = Path(__file__).parents[3]
SOURCES = [path for folder in ("proxy", "plugins", "control", "protocol") for path in (ROOT / folder).rglob("*.py")]
LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}
NEVER_LOGGED = {"records", "key", "value", "headers", "password", "secret", "token", "frame", "payload"}


def log_calls() -> Iterator[tuple[Path, ast.Call, ast.expr]]:
    """Each call of a module's ``log``, and of what has it say something rarely: where, the call, its message."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and isinstance(node.func.value, ast.Name)
                and node.func.value.id == "log"
            ):
                if node.func.attr in LEVELS:
                    yield path, node, node.args[0]
                elif node.func.attr == "log":
                    yield path, node, node.args[1]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "rare_lines":
                yield path, node, node.args[1]


def test_every_message_is_a_constant_phrase() -> None:
    calls = list(log_calls())
    assert len(calls) > 20, "the sources' log calls were not found"
    for path, call, message in calls:
        where = f"{path.relative_to(ROOT)}:{call.lineno}"
        assert isinstance(message, ast.Constant), f"{where}: the message is not constant"
        assert isinstance(message.value, str), where
        assert "%" not in message.value, f"{where}: the message has a format in it"
        if isinstance(call.func, ast.Attribute):
            extra = [argument for argument in call.args if argument is not message]
            assert len(extra) <= (call.func.attr == "log"), f"{where}: arguments are formatted into the message"


def test_no_field_carries_contents_or_secrets() -> None:
    for path, call, _ in log_calls():
        for keyword in call.keywords:
            if keyword.arg == "extra" and isinstance(keyword.value, ast.Dict):
                names = {key.value for key in keyword.value.keys if isinstance(key, ast.Constant)}
                assert not names & NEVER_LOGGED, f"{path.relative_to(ROOT)}:{call.lineno}: {names & NEVER_LOGGED}"


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    names = ("isthmus", "isthmus_plugins", "isthmus_control", "uvicorn.error")
    before = {name: (list(logging.getLogger(name).handlers), logging.getLogger(name).propagate) for name in names}
    yield io.StringIO()
    for name, (handlers, propagate) in before.items():
        logging.getLogger(name).handlers[:] = handlers
        logging.getLogger(name).propagate = propagate


def test_json_is_one_object_a_line_with_fields_beside_the_event(stream: io.StringIO) -> None:
    logs.configure("json", "debug", stream)
    logging.getLogger("isthmus.session").info("session closed", extra={"session": 7, "cause": "drained"})
    line = json.loads(stream.getvalue())
    assert line["event"] == "session closed"
    assert (line["session"], line["cause"], line["level"], line["logger"]) == (7, "drained", "info", "isthmus.session")
    assert line["time"].endswith("Z")


def test_text_has_the_fields_behind_the_event(stream: io.StringIO) -> None:
    logs.configure("text", "info", stream)
    log = logging.getLogger("isthmus_plugins.replication")
    log.debug("not shown")
    log.warning("link peer lost", extra={"link": "a-to-b"})
    (line,) = stream.getvalue().splitlines()
    assert line.endswith("warning isthmus_plugins.replication: link peer lost link='a-to-b'")


def test_a_traceback_stays_with_its_event(stream: io.StringIO) -> None:
    logs.configure("json", "info", stream)
    try:
        raise ValueError("why")
    except ValueError:
        logging.getLogger("isthmus.tasks").exception("task failed", extra={"task": "owner/name"})
    line = json.loads(stream.getvalue())
    assert "ValueError: why" in line["traceback"]
