"""``isthmus schemas``: what is printed, and how commands end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.confluent_registry import ConfluentRegistry, served
from typer.testing import CliRunner

from isthmus.cli.root import app

WIDE = {"COLUMNS": "300"}
FORMATS = {"primary": "{tenant}-{instance}-{topic}", "one": "{tenant}-{topic}", "two": "{topic}.{tenant}"}


@pytest.fixture
def registries() -> Iterator[dict[str, ConfluentRegistry]]:
    with served(3) as made:
        made[0].register("t-main-orders", {"schema": '"string"'})
        yield dict(zip(FORMATS, made, strict=True))


@pytest.fixture
def file(tmp_path: Path, registries: dict[str, ConfluentRegistry]) -> Path:
    described = {
        name: {"kind": "confluent", "url": each.url, "subjects": FORMATS[name]} for name, each in registries.items()
    }
    path = tmp_path / "schemas.yaml"
    path.write_text(json.dumps({"primary": "primary", "registries": described}))
    return path


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["schemas", *map(str, arguments)], env=WIDE, prog_name="isthmus")


def lines(result: Any, exit_code: int = 0) -> list[str]:
    assert result.exit_code == exit_code, result.output
    return [" ".join(line.split()) for line in result.stdout.splitlines()]


def test_schemas_are_distributed_and_shown(file: Path, registries: dict[str, ConfluentRegistry]) -> None:
    assert lines(run("sync", file, "--dry-run")) == [
        "one: would register t-orders version 1, id 1",
        "two: would register orders.t version 1, id 1",
        "TARGET STATE EQUAL STEPS FINDINGS LEFT_OUT WRITES REASON",
        "one Behind 0 1 0 0 allowed -",
        "two Behind 0 1 0 0 allowed -",
    ]
    assert lines(run("status", file), 1)[1:] == ["one Behind 0 1 0 0 allowed -", "two Behind 0 1 0 0 allowed -"]
    assert lines(run("sync", file))[-1] == "two In-Sync 1 1 0 0 refused -"
    assert lines(run("status", file))[-1] == "two In-Sync 1 0 0 0 refused -"
    registries["primary"].put_config(body={"compatibility": "FULL"})
    assert lines(run("sync", file))[:2] == ["one: level of all subjects: FULL", "two: level of all subjects: FULL"]

    registries["two"].subjects["foreign.t"] = {1: {"id": 9, "schema": '"int"', "deleted": False}}
    shown = lines(run("status", file), 1)
    assert shown[-1].startswith("two ONLY_AT_TARGET foreign.t 1 the primary does not have it (id 9 here)")
    told = json.loads(run("sync", file, "-o", "json").stdout)
    assert [each["state"] for each in told["targets"]] == ["In-Sync", "Differs"]
    assert told["targets"][1]["findings"][0]["reason"] == "ONLY_AT_TARGET"
    assert lines(run("sync", file, "--delete"))[:2] == [
        "two: delete foreign.t version 1",
        "two: delete for good foreign.t version 1",
    ]


def test_who_is_away_is_named(file: Path, registries: dict[str, ConfluentRegistry]) -> None:
    registries["two"].stop()
    shown = lines(run("sync", file), 3)
    assert shown[-2] == "one In-Sync 1 1 0 0 refused -"
    assert shown[-1].startswith(f"two Unreachable 0 0 0 0 - no answer from {registries['two'].url}")
    registries["primary"].stop()
    assert "one Unknown 0 0 0 0 - PRIMARY_UNREACHABLE" in lines(run("status", file), 3)[-2]


def test_a_target_becomes_the_primary(file: Path, registries: dict[str, ConfluentRegistry]) -> None:
    run("sync", file)
    registries["primary"].stop()
    assert lines(run("writes", file, "one", "allow")) == ["one: writes are allowed"]
    registries["one"].register("t-new", {"schema": '"long"'})
    document = json.loads(file.read_text())
    document["primary"] = "one"
    document["registries"]["primary"]["subjects"] = "{tenant}-main-{topic}"
    file.write_text(json.dumps(document))
    registries["primary"].start()
    assert lines(run("sync", file))[:2] == [
        "primary: register t-main-new version 1, id 2",
        "two: register new.t version 1, id 2",
    ]
    assert registries["primary"].mode == "READONLY"
    assert lines(run("writes", file, "one", "refuse")) == ["one: writes are refused"]
    assert "the primary one refuses writes" in lines(run("status", file))[0]
    assert "three is not in" in run("writes", file, "three", "allow").stderr


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"primary": "three"}, "three is not one of the registries (primary, one, two)"),
        ({"other": 1}, "other: Extra inputs"),
        ({"registries": {}}, "at least 2 items"),
        ({"one": {"url": "ftp://x"}}, "registries.one.url"),
        ({"one": {"kind": "glue"}}, "registries.one.kind"),
        ({"one": {"user": "u"}}, "registries.one: user and password_file go together"),
        ({"one": {"user": "u", "password_file": "p", "token_file": "t"}}, "keep one of them"),
        ({"one": {"key": "k"}}, "key is that of cert"),
        ({"one": {"subjects": "{topic}.{unknown}"}}, "registries.one.subjects: '{topic}.{unknown}' has {unknown}"),
        ({"one": {"subjects": ["{topic}", "{tenant}"]}}, "2 formats, and the primary has 1"),
        ({"primary_": {"subjects": "{topic}{tenant}"}}, "registries.primary.subjects: '{topic}{tenant}'"),
        ({"one": {"token_file": "missing"}}, "missing cannot be read"),
        ({"one": {"user": "u", "password_file": "missing"}}, "missing cannot be read"),
    ],
)
def test_what_is_wrong_in_a_document(file: Path, change: dict[str, Any], said: str) -> None:
    document = json.loads(file.read_text())
    for name, value in change.items():
        if name.rstrip("_") in document["registries"] and isinstance(value, dict):
            document["registries"][name.rstrip("_")] |= value
        else:
            document[name] = value
    file.write_text(json.dumps(document))
    result = run("status", file)
    assert result.exit_code == 2, result.output
    assert said in result.stderr


def test_two_registries_with_one_url_and_no_file(file: Path) -> None:
    document = json.loads(file.read_text())
    document["registries"]["one"]["url"] = document["registries"]["primary"]["url"] + "/"
    file.write_text(json.dumps(document))
    assert "registries primary and one have one url" in run("status", file).stderr
    file.write_text("a: [")
    assert run("status", file).exit_code == 2
    file.unlink()
    assert "cannot be read: No such file" in run("sync", file).stderr
    assert "--follow goes with neither" in run("sync", file, "--follow", "--dry-run").stderr


def test_a_follower_ends_in_order(file: Path, registries: dict[str, ConfluentRegistry]) -> None:
    command = [sys.executable, "-m", "isthmus", "schemas", "sync", str(file)]
    command += ["--follow", "--interval-s", "0.1", "-o", "json"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    ) as it:
        assert it.stdout is not None
        first = json.loads(it.stdout.readline())
        assert [len(each["steps"]) for each in first["targets"]] == [1, 1]
        registries["primary"].register("t-main-orders", {"schema": '"bytes"'})
        # What is the same as before is not told.
        second = json.loads(it.stdout.readline())
        assert second["targets"][0]["steps"] == [{"step": "register", "subject": "t-orders", "version": 2, "id": 2}]
        registries["primary"].stop()
        third = json.loads(it.stdout.readline())
        assert {each["state"] for each in third["targets"]} == {"Unknown"}
        registries["primary"].start()
        assert {each["state"] for each in json.loads(it.stdout.readline())["targets"]} == {"In-Sync"}
        it.send_signal(signal.SIGTERM)
        assert it.wait(60) == 0
    assert registries["one"].mode == "READONLY"
