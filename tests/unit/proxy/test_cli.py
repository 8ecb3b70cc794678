"""The command line against a real admin listener: what is printed where, and how each command ends."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, get_args

import httpx
import pytest
import typer
import yaml
from support.admin import RunningAdmin
from typer.main import get_command
from typer.testing import CliRunner

from isthmus.cli import app, root
from isthmus.cli.namespace import ResourceType as TypeChoice
from isthmus_control.commands import ClaimBrokers, CreateNamespace
from isthmus_control.levels import KNOWN_LEVEL, with_known_level
from isthmus_control.model import ResourceType
from isthmus_control.origins import Ended, Origin, OriginEpoch, OriginRange, PartitionOrigins, TopicOrigins
from isthmus_plugins.links import (
    ClientMoveStatus,
    DrillStatus,
    OperationError,
    SourceLossStatus,
    SyncStatus,
    TransactionVerificationPlan,
)

WIDE = {"TERMINAL_WIDTH": "200", "COLUMNS": "200"}


@pytest.fixture(scope="module")
def listener() -> Iterator[RunningAdmin]:
    with RunningAdmin() as running:
        yield running


@pytest.fixture
def admin(listener: RunningAdmin) -> Iterator[RunningAdmin]:
    """The listener with nothing in it but its one link and its own lease, as long as all of it."""
    listener.call(listener.log.enforce, "proxy-1")
    yield listener
    listener.call(_reset, listener)


def _reset(listener: RunningAdmin) -> None:
    links = listener.links
    links.links = {"a-to-b": links.links["a-to-b"]}
    links.created, links.attached, links.calls = [], [], []
    links.equal, links.verify_error, links.verification = True, None, None
    links.proceed.set()
    listener.log.set_state(listener.log.state.evolve(namespaces={}, origins={}, level=0))


def run(*arguments: str, url: str | None = None, **more: Any) -> Any:
    more.setdefault("env", WIDE)
    return CliRunner().invoke(app, [*arguments, *(["--url", url] if url else [])], prog_name="isthmus", **more)


def ok(result: Any) -> Any:
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return json.loads(result.stdout)


def all_commands() -> Iterator[tuple[str, ...]]:
    def below(command: Any, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
        yield path
        context = typer.Context(command)
        if hasattr(command, "list_commands"):
            for name in command.list_commands(context):
                yield from below(command.get_command(context, name), (*path, name))

    commands: Any = get_command(app)
    for name in root.OWN:
        yield from below(commands.get_command(None, name), (name,))


# --- help


def test_help_lists_the_commands_and_the_exit_codes() -> None:
    result = run("--help")
    assert result.exit_code == 0
    for name in ("proxy", "namespace", "link", "topic", "status", "verify"):
        assert re.search(rf"^  {name} ", result.stdout, re.MULTILINE)
    for code in range(4):
        assert re.search(rf"^    {code}  \w+", result.stdout, re.MULTILINE)
    assert "--install-completion" in result.stdout


@pytest.mark.parametrize("path", sorted(all_commands()), ids=" ".join)
def test_every_help_has_an_example_that_is_its_own(path: tuple[str, ...]) -> None:
    result = run(*path, "--help")
    assert result.exit_code == 0
    assert f"    isthmus {' '.join(path)}" in result.stdout.partition("Example")[2]
    assert "Exit codes:" in result.stdout
    assert "--install-completion" not in result.stdout


def test_namespaces_have_the_types_of_the_control_state() -> None:
    assert set(get_args(TypeChoice)) == {str(kind) for kind in ResourceType}


def test_a_mistyped_command_is_wrong_usage_with_a_suggestion() -> None:
    result = run("verfy", "a-to-b")
    assert result.exit_code == 2
    assert "Did you mean 'verify'?" in result.stderr
    assert run("link", "attach", "a-to-b", "--local", "a", "--remote", "b", "--role", "boss").exit_code == 2


def test_the_version_is_printed() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*\n", run("--version").stdout)


def test_status_imports_neither_the_server_nor_the_protocol() -> None:
    program = (
        "import sys; from isthmus.cli import app; from typer.testing import CliRunner;"
        "CliRunner().invoke(app, ['status', '--url', 'http://127.0.0.1:1']);"
        "print([m for m in ('fastapi', 'kio', 'uvloop', 'isthmus_bench') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


# --- namespaces


def test_namespaces_are_created_listed_described_altered_and_deleted(admin: RunningAdmin) -> None:
    created = ok(run("namespace", "create", "orders-", "--type", "topic", "-o", "json", url=admin.url))
    assert (created["prefix"], created["state"]) == ("orders-", "open")
    listed = ok(run("namespace", "list", "--type", "topic", "-o", "json", url=admin.url))
    assert [each["prefix"] for each in listed] == ["orders-"]
    assert ok(run("namespace", "list", "--type", "principal", "-o", "json", url=admin.url)) == []
    altered = ok(
        run("namespace", "alter", "orders-", "--reserved", "--no-wait", "--reason", "move", "-o", "json", url=admin.url)
    )
    assert (altered["state"], altered["waiting_for"]) == ("reserving", ["proxy-1"])
    admin.call(admin.log.enforce, "proxy-1")
    described = ok(run("namespace", "describe", "orders-", "-o", "json", url=admin.url))
    assert (described["state"], described["reserved_reason"]) == ("reserved", "move")
    strict = run("namespace", "alter", "orders-", "--consistency", "strict", "--no-wait", "-o", "json", url=admin.url)
    assert (ok(strict)["consistency"], ok(strict)["state"]) == ("strict", described["state"])
    assert "strict" in run("namespace", "describe", "orders-", url=admin.url).stdout
    alter = "namespace", "alter", "orders-", "--no-wait", "-o", "json"
    assert ok(run(*alter, "--degrade-after", "5m", url=admin.url))["degrade_after_ms"] == 300_000
    assert "300 s" in run("namespace", "describe", "orders-", url=admin.url).stdout
    assert ok(run(*alter, "--degrade-after", "never", url=admin.url))["degrade_after_ms"] is None
    assert [run(*alter, "--degrade-after", text, url=admin.url).exit_code for text in ("5", "0s", "soon")] == [2] * 3
    missing = run(*alter, "--confirm", "any 1 (c, b)", url=admin.url)
    assert (missing.exit_code, "no link 'b'" in missing.stdout + missing.stderr) == (1, True)
    unclear = run(*alter, "--confirm", "ANY 1", url=admin.url)
    assert (unclear.exit_code, "neither ALL" in unclear.stdout + unclear.stderr) == (1, True)
    assert ok(run(*alter, "--confirm", "ALL", url=admin.url))["confirm"] == "ALL"
    assert run("namespace", "alter", "orders-", url=admin.url).exit_code == 2
    ok(run("namespace", "create", "more-", "--consistency", "strict", "--no-wait", "-o", "json", url=admin.url))
    ok(run("namespace", "delete", "more-", "--no-wait", "-o", "json", url=admin.url))
    admin.log.set_state(admin.log.state.evolve(level=KNOWN_LEVEL))
    waits = ok(
        run(*alter, "--stale-reads", "no", "--consistency", "available", "--degrade-after", "never", url=admin.url)
    )
    assert waits["stale_reads"] is False
    assert "consumers wait" in run("namespace", "describe", "orders-", url=admin.url).stdout
    informational = run(*alter, "--informational", "yes", url=admin.url)
    assert (informational.exit_code, "informational" in informational.stderr) == (1, True)
    assert ok(run(*alter, "--informational", "yes", "--stale-reads", "yes", url=admin.url))["informational"] is True
    assert ok(run(*alter, "--informational", "no", url=admin.url))["informational"] is False
    cleared = run("namespace", "alter", "orders-", "--no-reserved", "--no-wait", "-o", "json", url=admin.url)
    assert ok(cleared)["state"] == "open"
    assert ok(run("namespace", "delete", "orders-", "--no-wait", "-o", "json", url=admin.url))["deleted"] is True
    assert admin.log.state.namespaces == {}


def test_a_reservation_that_is_not_enforced_in_time_fails(admin: RunningAdmin, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who cuts over when the command succeeds must not be told so too early."""
    monkeypatch.setattr("isthmus.admin.control.ENFORCE_TIMEOUT_S", 0.05)
    result = run("namespace", "create", "orders-", "--reserved", "-o", "json", url=admin.url)
    assert result.exit_code == 1
    assert json.loads(result.stdout)["state"] == "reserving"
    error = json.loads(result.stderr)
    assert error["code"] == "NOT_ENFORCED_YET"
    assert "not enforced yet by proxy-1" in error["message"]


def test_what_is_in_a_namespace_is_shown(admin: RunningAdmin) -> None:
    cluster: Any = admin.services.cluster
    ok(run("namespace", "create", "shown-", "-o", "json", url=admin.url))
    assert "nothing" in run("namespace", "show", "shown-", url=admin.url).stdout
    cluster.add_topic("shown-t", 3)
    told = ok(run("namespace", "show", "shown-", "-o", "json", url=admin.url))
    assert ([each["name"] for each in told["items"]], told["empty"]) == (["shown-t"], False)
    table = run("namespace", "show", "shown-", url=admin.url).stdout
    assert "1 topics with 3 partitions" in table
    assert "shown-t  3" in table


def test_whether_namespaces_overlap_is_said(admin: RunningAdmin) -> None:
    assert ok(run("namespace", "overlap", "AB", "A", "-o", "json", url=admin.url))["relation"] == "held"
    table = run("namespace", "overlap", "A", "AB", url=admin.url).stdout
    assert "all names of AB are in A" in table
    assert "both follow" in table
    assert "do not overlap" in run("namespace", "overlap", "A", "B", url=admin.url).stdout


def test_creating_a_reserved_namespace_returns_when_it_is_enforced(admin: RunningAdmin) -> None:
    done = threading.Event()
    results: list[Any] = []

    def create() -> None:
        results.append(run("namespace", "create", "orders-", "--reserved", "-o", "json", url=admin.url))
        done.set()

    thread = threading.Thread(target=create)
    thread.start()
    assert not done.wait(0.5)
    while not done.wait(0.1):  # the request may be later than the first of these
        admin.call(admin.log.enforce, "proxy-1")
    thread.join()
    assert ok(results[0])["state"] == "reserved"


def test_the_empty_prefix_can_be_named(admin: RunningAdmin) -> None:
    assert ok(run("namespace", "create", "", "--type", "consumer-group", "-o", "json", url=admin.url))["prefix"] == ""
    table = run("namespace", "list", url=admin.url).stdout
    assert re.search(r'^consumer-group +"" +open', table, re.MULTILINE)
    ok(run("namespace", "delete", "", "--type", "consumer-group", "--no-wait", "-o", "json", url=admin.url))


def test_a_refusal_is_one_line_or_one_object_on_standard_error(admin: RunningAdmin) -> None:
    admin.call(admin.log.apply, CreateNamespace(ResourceType.TOPIC, "orders-"))
    text = run("namespace", "create", "orders-", url=admin.url)
    assert text.exit_code == 1
    assert re.fullmatch(r"error: .*orders-.* \(ALREADY_EXISTS\)\n", text.stderr)
    assert text.stdout == ""
    machine = run("namespace", "create", "orders-", "-o", "json", url=admin.url)
    assert machine.exit_code == 1
    assert machine.stdout == ""
    body = json.loads(machine.stderr)
    assert (body["error_code"], body["code"]) == (40901, "ALREADY_EXISTS")


# --- the control log


def test_the_feature_level_is_described_and_raised(admin: RunningAdmin) -> None:
    assert re.search("^feature level +0$", run("control", "describe", url=admin.url).stdout, re.MULTILINE)
    plan = run("control", "upgrade", "--dry-run", url=admin.url)
    assert f"would be raised from 0 to {KNOWN_LEVEL}" in plan.stdout
    assert ok(run("control", "upgrade", "--to", "1", "-o", "json", url=admin.url))["after"] == 1
    assert ok(run("control", "describe", "-o", "json", url=admin.url))["level"] == 1
    assert "has feature level 1 already" in run("control", "upgrade", "--to", "1", url=admin.url).stdout
    too_high = run("control", "upgrade", "--to", "99", url=admin.url)
    assert (too_high.exit_code, "upgrade it first" in too_high.stderr) == (1, True)


def test_an_upgrade_signs_records_and_one_that_is_run_again_does(admin: RunningAdmin) -> None:
    ok(run("control", "upgrade", "-o", "json", url=admin.url))
    described = run("control", "describe", url=admin.url).stdout
    assert re.search("^records are signed with control key +none: they are not signed$", described, re.MULTILINE)
    for name, lease in admin.log.state.proxies.items():  # the key is configured everywhere meanwhile
        claim = ClaimBrokers(
            name, lease.incarnation, lease.brokers, False, None, 10_000, with_known_level("2", "ab12cd34"), -1
        )
        admin.call(admin.log.apply, claim)
    admin.log.key_id = "ab12cd34"
    plan = run("control", "upgrade", "--dry-run", url=admin.url).stdout
    assert "records are signed with the control key ab12cd34 from then on" in plan
    assert admin.log.state.key_id == ""
    done = ok(run("control", "upgrade", "-o", "json", url=admin.url))
    levels = done["before"], done["after"]
    assert (*levels, done["signs"], done["key_id"]) == (KNOWN_LEVEL, KNOWN_LEVEL, True, "ab12cd34")
    described = run("control", "describe", url=admin.url).stdout
    assert re.search("^records are signed with control key +ab12cd34$", described, re.MULTILINE)
    assert "signed with" not in run("control", "upgrade", url=admin.url).stdout


# --- links


def test_links_are_created_listed_described_and_deleted(admin: RunningAdmin, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("hunter2\n")
    create = ("link", "create", "a-to-c", "--remote", "127.0.0.1:49192", "-o", "json")
    assert ok(run(*create, "--token-file", str(token), url=admin.url))["remote"] == ["127.0.0.1:49192"]
    assert admin.links.created[0].token == "hunter2"
    table = run("link", "list", url=admin.url).stdout
    assert re.search(r"^a-to-b +Following +asynchronous .* orders-:orders- \(leader\) +1 +2 +0\.1", table, re.MULTILINE)
    described = run("link", "describe", "a-to-b", url=admin.url).stdout
    assert re.search(r"^orders-eu +0 +leader +Following +10 +8 +2", described, re.MULTILINE)
    why = "own +orders-eu-0 ends at 5, the group's committed offset is 8"
    group = rf"^app-1 +far-app-1 +leader +Catching Up +3 +1 +1\.5 +{why}$"
    assert re.search(group, described, re.MULTILINE)
    assert re.search(group, run("status", url=admin.url).stdout, re.MULTILINE)
    assert re.search(r"^warning +records of type 99$", described, re.MULTILINE)
    assert "acls (leader): Following, 2 bindings" in described
    assert re.search(r"^allow User:app-1 read topic 'x' +no mapping of the link holds it", described, re.MULTILINE)
    assert ok(run("link", "delete", "a-to-c", "--local-only", "-o", "json", url=admin.url))["deleted"] is True
    assert admin.links.calls == [("delete", "a-to-c", True)]


def test_a_token_can_come_from_standard_input_and_must_be_there(admin: RunningAdmin, tmp_path: Path) -> None:
    create = ("link", "create", "a-to-c", "--remote", "127.0.0.1:49192", "--token-file")
    assert run(*create, "-", url=admin.url, input="hunter2\n").exit_code == 0
    assert admin.links.created[0].token == "hunter2"
    missing = run(*create, str(tmp_path / "none"), url=admin.url)
    assert missing.exit_code == 2
    assert "No such file" in missing.stderr


def test_tokens_and_grants(admin: RunningAdmin) -> None:
    create = ("link", "token", "create", "--may", "lead:orders-,lead:consumer-group:a,b", "--may", "follow:x")
    made = run(*create, "--broker-settings", "--expires", "2m", url=admin.url)
    assert made.stdout == "isthmus\n", "what is piped into `isthmus link create --token-file -`"
    assert "until 1970-01-01T00:02:00" in made.stderr
    assert admin.links.granted == ["lead:orders-", "lead:consumer-group:a,b", "follow:x", "broker-settings"]
    assert ok(run(*create, "-o", "json", url=admin.url))["token_id"] == "ab" * 8
    for wrong in (("--may", "orders-"), ("--expires", "1 hour"), ("--expires", "0s")):
        assert run("link", "token", "create", *wrong, url=admin.url).exit_code == 2
    assert ("ab" * 8) in run("link", "token", "list", url=admin.url).stdout
    assert run("link", "token", "delete", "ab" * 8, url=admin.url).exit_code == 0
    assert run("link", "token", "delete", "cd" * 8, url=admin.url).exit_code == 1

    admin.links.granted.clear()
    ok(run("link", "grant", "a-to-b", "--may", "lead:in-", "-o", "json", url=admin.url))
    shown = run("link", "grants", "a-to-b", url=admin.url).stdout
    assert re.search(r"^lead:in- +granted$", shown, re.MULTILINE)
    assert re.search(r"^follow:out- +with what is", shown, re.MULTILINE)
    waits = r"^topic +prod- +follower +prod- +the other cluster .* lead:prod- +it was not"
    assert re.search(waits, shown, re.MULTILINE)
    ok(run("link", "revoke", "a-to-b", "--may", "lead:in-", "-o", "json", url=admin.url))
    assert admin.links.granted == []
    assert run("link", "grant", "a-to-b", url=admin.url).exit_code == 2

    link = admin.links.links["a-to-b"]
    admin.links.links["a-to-b"] = link.model_copy(update={"waiting": admin.links.grants("a-to-b").waiting})
    for command, head in (
        (("link", "describe", "a-to-b"), "not attached, waits"),
        (("status",), "attached to a-to-b, w"),
    ):
        text = run(*command, url=admin.url).stdout
        assert head in text
        assert re.search(waits, text, re.MULTILINE)
    admin.links.links["a-to-b"] = link

    admin.links.missing = ["lead:orders-"]
    attach = ("link", "attach", "a-to-b", "--local", "orders-", "--remote", "orders-", "--role", "leader")
    assert "waits: the other cluster has not granted lead:orders-" in run(*attach, url=admin.url).stdout
    assert "would wait" in run(*attach, "--dry-run", url=admin.url).stdout
    admin.links.missing = []
    admin.links.attached.clear()


def test_namespaces_are_attached_and_detached(admin: RunningAdmin, tmp_path: Path) -> None:
    attach = ("link", "attach", "a-to-b", "--local", "orders-", "--remote", "", "--role", "leader")
    assert ok(run(*attach, "-o", "json", url=admin.url))["dry_run"] is False
    dry = run(*attach, "--truncate-target", "--dry-run", url=admin.url)
    assert dry.exit_code == 0
    assert 'orders- (leader) would be attached to a-to-b, remote ""' in dry.stdout
    assert re.search(r"^orders-eu +orders-eu +truncate +7 +the target refuses settings of", dry.stdout, re.MULTILINE)
    assert re.search(r"^orders-us +0 +20 +23 +25 +1970-01-01T00:00:00", dry.stdout, re.MULTILINE)
    assert "would be moved there: app-1" in dry.stdout
    assert "--cut 2a32 salvages and cuts" in dry.stdout
    ok(run(*attach, "--on-source-loss", "hold", "-o", "json", url=admin.url))
    asked = [(each.remote, each.truncate_target, each.dry_run, each.on_source_loss) for each in admin.links.attached]
    assert asked == [("", False, False, None), ("", True, True, None), ("", False, False, "hold")]
    ok(run(*attach, "--cut", "2a32", "-o", "json", url=admin.url))
    assert admin.links.attached.pop().cut == "2a32"
    offsets = tmp_path / "shared"
    offsets.write_text("orders-eu 0 20\norders-eu 1 7\n\n")
    ok(run(*attach, "--shared-until", str(offsets), "-o", "json", url=admin.url))
    said = [(each.topic, each.partition, each.offset) for each in admin.links.attached.pop().shared_until]
    assert said == [("orders-eu", 0, 20), ("orders-eu", 1, 7)]
    offsets.write_text("orders-eu 0\n")
    wrong = run(*attach, "--shared-until", str(offsets), url=admin.url)
    assert (wrong.exit_code, "no lines of TOPIC PARTITION OFFSET" in wrong.stderr) == (2, True)
    alter = ("link", "alter", "a-to-b", "--local", "orders-")
    ok(run(*alter, "--on-source-loss", "cut", "-o", "json", url=admin.url))
    assert admin.links.calls.pop() == ("alter mapping", "a-to-b", "topic", "orders-", "cut", None)
    ok(run(*alter, "--on-source-delete", "delete", "-o", "json", url=admin.url))
    assert admin.links.calls.pop() == ("alter mapping", "a-to-b", "topic", "orders-", None, "delete")
    assert run(*alter, url=admin.url).exit_code == 2
    alone = run(*alter, url=admin.url)
    assert (alone.exit_code, "go together" in alone.stderr) == (2, True)
    ok(run("link", "detach", "a-to-b", "--local", "orders-", "-o", "json", url=admin.url))
    assert admin.links.calls == [("detach", "a-to-b", "orders-", "topic", False)]


def test_the_other_cluster_is_to_lead(admin: RunningAdmin) -> None:
    dry = run("link", "reverse", "a-to-b", "--namespace", "orders-", "--dry-run", url=admin.url)
    assert dry.exit_code == 0
    assert "orders- would be led by the other cluster of a-to-b, and followed here" in dry.stdout
    assert "orders-eu-0 ends at 7" in dry.stdout
    assert "transaction of 'app'" in dry.stdout
    waits = ("--transactions-wait", "0", "--hold", "2.5", "--move-clients", "10m")
    named = ("--local", "orders-", "--local-group", "app-", "-o", "json")
    assert ok(run("link", "reverse", "a-to-b", *named, *waits, url=admin.url))["reversed"]
    done = run("link", "reverse", "a-to-b", "--local", "orders-", url=admin.url)
    assert done.stdout == "orders- is led by the other cluster of a-to-b, and followed here\n"
    back = run("link", "reverse", "a-to-b", "--local", "orders-", "--here", url=admin.url)
    assert back.stdout == "orders- is led here, and followed by the other cluster of a-to-b\n"
    for yes in ((), ("--yes",)):
        assert run("link", "reverse", "a-to-b", "--abandon", *yes, url=admin.url).exit_code == 0
    wanted = [("topic", "orders-"), ("consumer-group", "app-")]
    assert admin.links.calls == [
        ("reverse", "a-to-b", wanted[:1], 1.0, 5.0, 0),
        ("reverse", "a-to-b", wanted, 0.0, 2.5, 600.0),
        ("reverse", "a-to-b", wanted[:1], 1.0, 5.0, 0),
        ("reverse", "a-to-b", wanted[:1], 1.0, 5.0, 0),
        ("abandon reversal", "a-to-b", False),
        ("abandon reversal", "a-to-b", True),
    ]
    moves = ("--local", "orders-", "--move-clients", "10")
    for wrong in (
        (),
        ("--local", "orders-", "--yes"),
        ("--local", "orders-", "--abandon"),
        ("--abandon", "--here"),
        moves,
    ):
        assert run("link", "reverse", "a-to-b", *wrong, url=admin.url).exit_code == 2


def test_the_old_source_is_recovered(admin: RunningAdmin) -> None:
    dry = run("link", "recover", "a-to-b", "--dry-run", url=admin.url)
    assert dry.exit_code == 0
    assert "orders- (follower) would be attached to a-to-b" in dry.stdout
    assert re.search(r"^orders-us +0 +20 +23 +25", dry.stdout, re.MULTILINE)
    named = ("--local", "orders-", "--local-group", "app-", "-o", "json")
    assert ok(run("link", "recover", "a-to-b", *named, url=admin.url))["namespaces"][0]["role"] == "follower"
    wanted = [("topic", "orders-"), ("consumer-group", "app-")]
    assert admin.links.calls == [("recover", "a-to-b", []), ("recover", "a-to-b", wanted)]


# --- verify, status, topics


def test_verify_ends_with_0_if_equal_and_with_1_if_not(admin: RunningAdmin) -> None:
    equal = run("verify", "a-to-b", "-o", "json", url=admin.url)
    assert ok(equal)["equal"] is True
    assert ok(equal)["partitions"][0]["compared_to"] == 10
    admin.links.equal = False
    different = run("verify", "a-to-b", "-o", "json", url=admin.url)
    assert different.exit_code == 1
    assert json.loads(different.stdout)["equal"] is False
    table = run("verify", "a-to-b", url=admin.url)
    assert table.exit_code == 1
    assert re.search(r"^orders-eu +orders-eu +0 +no +0 +6 +6 +values differ$", table.stdout, re.MULTILINE)
    assert re.search(r"^app-1 +far-app-1 +yes +3 +1 +-$", table.stdout, re.MULTILINE)
    assert "a-to-b: NOT equal, 6 records compared" in table.stdout
    assert table.stderr == ""  # nobody looks: no progress


@contextmanager
def verifying_on_a_terminal(admin: RunningAdmin) -> Iterator[subprocess.Popen[str]]:
    """``isthmus verify`` with a terminal as standard error, once it has shown the progress made so far."""
    admin.links.proceed.clear()
    terminal, slave = pty.openpty()
    command = [sys.executable, "-m", "isthmus", "verify", "a-to-b", "--url", admin.url]
    heeding = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # where these tests run in the background it is not
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=slave, text=True, preexec_fn=heeding) as process:
        os.close(slave)
        shown = b""
        while b"4/10" not in shown:
            shown += os.read(terminal, 4096)
        assert b"comparing a-to-b" in shown
        yield process
    os.close(terminal)


def test_verify_shows_progress_on_a_terminal(admin: RunningAdmin) -> None:
    with verifying_on_a_terminal(admin) as process:
        admin.call(admin.links.proceed.set)
        stdout, _ = process.communicate(timeout=20)
        assert process.returncode == 0
        assert "a-to-b: equal, 10 records compared" in stdout
        assert "comparing" not in stdout


def test_an_interrupted_verify_cancels_its_operation(admin: RunningAdmin) -> None:
    with verifying_on_a_terminal(admin) as process:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
        assert process.returncode != 0
    (newest, *_) = httpx.get(f"{admin.url}/v1/operations", trust_env=False).json()["items"]
    assert newest["error"]["code"] == "CANCELLED"


def test_a_verification_that_cannot_be_made_is_a_failure(admin: RunningAdmin) -> None:
    admin.links.verify_error = OperationError("PEER_DISCONNECTED", "the other cluster is not connected", 503)
    result = run("verify", "a-to-b", "-o", "json", url=admin.url)
    assert (result.exit_code, result.stdout) == (1, "")
    assert json.loads(result.stderr) == {"code": "PEER_DISCONNECTED", "message": "the other cluster is not connected"}
    unknown = run("verify", "none", url=admin.url)
    assert unknown.exit_code == 1
    assert "(NOT_FOUND)" in unknown.stderr


def test_status_is_a_table_json_or_yaml(admin: RunningAdmin) -> None:
    status = ok(run("status", "-o", "json", url=admin.url))
    assert (status["name"], status["ready"], status["links"][0]["link_name"]) == ("proxy-1", True, "a-to-b")
    as_yaml = yaml.safe_load(run("status", "-o", "yaml", url=admin.url).stdout)
    assert as_yaml.keys() == status.keys()
    admin.call(admin.log.apply, CreateNamespace(ResourceType.TOPIC, "orders-", True, "move"))
    table = run("status", url=admin.url).stdout
    for line in (
        r"^proxy +proxy-1 1\.2\.3 \(sidecar\)$",
        r"^ready +yes$",
        r"^1 +127\.0\.0\.1:19093 +127\.0\.0\.1:9092$",
        r"^topic +orders- +reserving +- +move$",
        r"^a-to-b +Following",
        r"^proxy-1 \(this\) +active +1 ",
    ):
        assert re.search(line, table, re.MULTILINE), line


def test_the_url_can_come_from_the_environment(admin: RunningAdmin) -> None:
    assert ok(run("status", "-o", "json", env={"ISTHMUS_URL": admin.url}))["name"] == "proxy-1"


def test_topics_are_listed_and_described(admin: RunningAdmin) -> None:
    assert run("topic", "list", url=admin.url).stdout.startswith("TOPIC")
    unknown = run("topic", "describe", "none", url=admin.url)
    assert unknown.exit_code == 1
    assert "follows no link here" in unknown.stderr


def test_who_wrote_which_offsets_of_a_topic_is_shown(admin: RunningAdmin) -> None:
    topic_id = str(uuid.UUID(int=1))
    ranges = (
        OriginRange(Origin("A", topic_id), 10, 40, 0, (OriginEpoch(0, 10),), 30, "C", ended=Ended.CUT, assumed=True),
        OriginRange(Origin("A", topic_id, "t1"), 40, 40, 1_000, via="C", ended=Ended.FAILED_OVER),
        OriginRange(Origin("B", topic_id, "t2"), 40, None, 2_000, tuple(OriginEpoch(n, 40 + n) for n in range(7))),
    )
    known = TopicOrigins("orders-eu", topic_id, {0: PartitionOrigins(ranges), 2: PartitionOrigins()})
    admin.log.set_state(admin.log.state.evolve(origins={"orders-eu": known}))
    described = ok(run("topic", "describe", "orders-eu", "--provenance", "-o", "json", url=admin.url))
    assert described["state"] == "independent"
    first, _, last = described["partitions"][0]["origins"]
    assert (first["term"], first["assumed"], first["epochs_missing_before"]) == (None, True, 30)
    assert (last["term"], last["end_offset"], last["via_cluster_id"], len(last["epochs"])) == ("t2", None, None, 7)
    shown = run("topic", "describe", "orders-eu", "--provenance", url=admin.url).stdout
    for line in (
        r"^partition 0$",
        r"^  \[0, 10\) +unknown ",
        r"^  \[10, 40\) +A \(assumed\) +before terms .* 0@10 \(some before 30 may be missing\) .* cut +C$",
        r"^  \[40, 40\) +A +t1 .* - +1970-01-01T00:00:01\+00:00 +failed-over +C$",
        r"^  \[40, \.\.\.\) +B +t2 .* \(2 more\),2@42,3@43,4@44,5@45,6@46 .* written here$",
        r"^partition 2$",
    ):
        assert re.search(line, shown, re.MULTILINE), (line, shown)


def test_namespaces_are_promoted(admin: RunningAdmin) -> None:
    command = ("link", "promote", "a-to-b", "--local", "orders-", "--local-group", "app-")
    report = ok(run(*command, "--move-clients", "90s", "-o", "json", url=admin.url))
    assert [each["promoted"] for each in report["namespaces"]] == [True, True]
    assert admin.links.calls == [("promote", "a-to-b", [("topic", "orders-"), ("consumer-group", "app-")], 90.0)]
    planned = run(*command, "--dry-run", url=admin.url).stdout
    assert re.search(r"^topic +orders- ", planned, re.MULTILINE)
    assert "the brokers here would refuse:\norders-eu: retention.ms=5: POLICY_VIOLATION: too short" in planned
    assert "fewer replicas than there are to be:\norders-eu has 2 of 3 replicas: " in planned
    assert "link acknowledge a-to-b:\norders-eu-1: the record at offset 5 is another one" in planned
    assert run("link", "promote", "a-to-b", url=admin.url).exit_code == 2


def test_what_follows_is_failed_over(admin: RunningAdmin) -> None:
    refused = run("link", "failover", "a-to-b", url=admin.url)
    assert (refused.exit_code != 0, "SOURCE_REACHABLE" in refused.stderr) == (True, True)
    report = ok(run("link", "failover", "a-to-b", "--yes", "--move-clients", "1h", "-o", "json", url=admin.url))
    assert admin.links.calls == [("failover", "a-to-b", 3600.0)]
    assert report["namespaces"][0]["claims"][0]["in_sync_until_ms"] == 1_760_000_000_123
    printed = run("link", "failover", "a-to-b", "--local", "orders-", "--dry-run", url=admin.url).stdout
    assert re.search(r"^orders-eu +0 +7 +2025-10-09T08:53:20\+00:00 +12s", printed, re.MULTILINE)
    assert re.search(r"^orders-eu +1 +3 +- +- +not known", printed, re.MULTILINE)
    assert "keep a follower's: orders-eu" in printed
    assert "the brokers here would refuse:\norders-eu: retention.ms=5: POLICY_VIOLATION: too short" in printed
    assert "fewer replicas than there are to be:\norders-eu has 2 of 3 replicas: " in printed
    assert "before you have it follow:\norders-eu-1: the record at offset 5 is another one" in printed
    assert "heard 12.4s ago" in printed
    printed = run("link", "failover", "a-to-b", "--local-group", "orders-", "--dry-run", url=admin.url).stdout
    assert "acked to groups of orders- before 2025-10-09T08:53:20+00:00 is here" in printed
    assert re.search(r"^orders-billing +2025-10-09T08:53:21\+00:00 +11s", printed, re.MULTILINE)


def test_what_a_failover_would_lose_is_printed_and_what_is_unknown_fails(admin: RunningAdmin) -> None:
    unknown = run("drill", "failover", "a-to-b", url=admin.url)
    assert unknown.exit_code == 1
    assert re.search(r"^known +no: not known of 1 partitions: .* \(SOURCE_PARTITIONS_UNKNOWN\)$", unknown.stdout, re.M)
    assert re.search(r"^orders-eu +1 +- +3 +- +- +- +no leader$", unknown.stdout, re.M)
    assert re.search(r"^copy left over +it is being deleted", unknown.stdout, re.M)
    known = run("drill", "failover", "a-to-b", "--local", "orders-", "--local-group", "orders-", url=admin.url)
    assert known.exit_code == 0
    assert re.search(r"^known +of all 2 partitions, as of now$", known.stdout, re.M)
    assert re.search(r"^records lost +2\nacked records lost +0\ntime lost +1.5s\ncommitted", known.stdout, re.M)
    assert re.search(r"^orders-billing +4 +0.2", known.stdout, re.M)
    assert re.search(
        r"^copy +1 topics with 2 partitions, 1 groups, 6 committed offsets; made in 2.5s$", known.stdout, re.M
    )
    assert re.search(
        r"^time to write again +5.25s .*\n +leases +4.00s .*\n +look +0.25s\n +carry out +1.00s$", known.stdout, re.M
    )
    assert re.search(r"^transactions +3 ended, 1 of them committed$", known.stdout, re.M)
    assert re.search(r"^not copied +principal User:$", known.stdout, re.M)
    dry = "--local", "orders-", "--dry-run", "--partitions-max", "7"
    assert re.search(
        r"^copy +would have 1 topics", run("drill", "failover", "a-to-b", *dry, url=admin.url).stdout, re.M
    )
    report = ok(run("drill", "failover", "a-to-b", "--local", "orders-", "-o", "json", url=admin.url))
    assert (report["lost"]["partitions"][0]["records"], report["measured"]["seconds"]) == (2, 5.25)
    calls = [(0, 1000), (2, 1000), (1, 7), (1, 1000)]
    assert admin.links.calls == [("drill failover", "a-to-b", *asked) for asked in calls]


def test_whose_clients_are_told_to_move_is_shown(admin: RunningAdmin) -> None:
    link = admin.links.links["a-to-b"]
    here = ClientMoveStatus(local="orders-", remote="far-", clients_of="local", left_seconds=61.5, told=7)
    there = here.model_copy(update={"clients_of": "remote", "told": None, "waits_for": "the link"})
    admin.links.links["a-to-b"] = link.model_copy(update={"client_moves": [here, there]})
    text = run("link", "describe", "a-to-b", url=admin.url).stdout
    assert re.search(
        r"^moving clients +orders-, 61.5 s are left; this proxy has told clients 7 times$", text, re.MULTILINE
    )
    assert re.search(r"^moving clients +orders-, of the other cluster, .* waits for the link$", text, re.MULTILINE)
    admin.links.links["a-to-b"] = link


def test_the_copy_of_a_drill_is_shown(admin: RunningAdmin) -> None:
    link = admin.links.links["a-to-b"]
    used = DrillStatus(copy_name="__isthmus_drill_ab12cd34", begun_ms=1_760_000_000_000, in_use=True)
    left = used.model_copy(update={"in_use": False})
    stuck = left.model_copy(update={"message": "its failover has not ended"})
    for drill, words in ((used, "tried on it"), (left, "being deleted"), (stuck, "has not ended")):
        admin.links.links["a-to-b"] = link.model_copy(update={"drill": drill})
        text = run("link", "describe", "a-to-b", url=admin.url).stdout
        assert re.search(rf"^drill +copy __isthmus_drill_ab12cd34 since 2025-10-09T08:53:20.*{words}$", text, re.M)
    admin.links.links["a-to-b"] = link


def test_what_becomes_of_a_topic_is_decided(admin: RunningAdmin) -> None:
    decided = ok(run("topic", "forget", "orders-eu", "--delete", "-o", "json", url=admin.url))
    assert (decided["action"], decided["dry_run"]) == ("delete", False)
    shown = run("topic", "recreate", "orders-eu", "--dry-run", url=admin.url).stdout
    assert re.search(r"^dry run +recreate$", shown, re.MULTILINE)
    assert re.search(r"^records lost +7$", shown, re.MULTILINE)
    given_up = ok(run("topic", "give-up", "orders-eu", "-o", "json", url=admin.url))
    assert (given_up["action"], given_up["dry_run"]) == ("give up", False)
    cut = ok(run("topic", "truncate", "orders-eu", "--dry-run", "-o", "json", url=admin.url))
    assert (cut["action"], cut["dry_run"]) == ("truncate", True)
    assert admin.links.calls == [
        ("forget", "orders-eu", True, False),
        ("recreate", "orders-eu", True),
        ("give up", "orders-eu", False),
        ("truncate", "orders-eu", True),
    ]


def test_a_links_secret_is_rotated(admin: RunningAdmin) -> None:
    said = run("link", "rotate-secret", "a-to-b", url=admin.url).stdout
    assert said == "link a-to-b has a new secret at both sides (9b2e2c5e-0000-4000-8000-000000000001)\n"
    assert admin.links.calls[-1] == ("rotate-secret", "a-to-b")


def test_what_a_source_lost_is_told_until_it_is_acknowledged(admin: RunningAdmin) -> None:
    lost = SourceLossStatus(
        number=7,
        role="follower",
        type="topic",
        topic="orders-eu",
        remote_topic="orders-eu",
        partition=0,
        from_offset=90,
        to_offset=100,
        count=10,
        state="cut",
        found_ms=1_760_000_000_123,
        found_by="proxy-1",
        salvage_proxy="proxy-1",
        salvage_file="/salvage/x",
        message="what was lost",
    )
    before = admin.links.links["a-to-b"]
    admin.links.links["a-to-b"] = before.model_copy(update={"source_losses": [lost], "source_losses_left_off": 3})
    for printed in (
        run("link", "describe", "a-to-b", url=admin.url).stdout,
        run("status", url=admin.url).stdout,
    ):
        line = r"^a-to-b +follower +orders-eu +0 +90 +100 +10 +- +cut +2025-10-09T08:53:20\+00:00 +proxy-1:/salvage/x$"
        assert re.search(line, printed, re.MULTILINE), printed
        assert "and 3 older ones of a-to-b" in printed
    done = run("link", "acknowledge", "a-to-b", url=admin.url)
    assert done.stdout == "1 losses and differences of link a-to-b acknowledged\n"
    assert "/salvage/x" not in run("link", "describe", "a-to-b", url=admin.url).stdout
    admin.links.links["a-to-b"] = before


# --- not reachable


def test_the_offsets_topic_is_chosen_and_its_copy_shown(admin: RunningAdmin) -> None:
    arguments = ("--offsets-topic", "redacted", "--offsets-group", "app-*", "--offsets-group", "billing")
    altered = run("link", "alter", "a-to-b", *arguments, url=admin.url)
    assert altered.exit_code == 0
    assert "__consumer_offsets (leader), redacted: app-*, billing" in altered.stdout
    assert admin.links.calls == [("alter", "a-to-b", "redacted", ["app-*", "billing"])]
    ok(run("link", "create", "b", "--remote", "h:1", *arguments, "-o", "json", url=admin.url))
    (created,) = admin.links.created
    assert (created.offsets_topic, created.offsets_groups) == ("redacted", ["app-*", "billing"])
    view = ok(run("offsets", "show", "a-to-b", "--group", "app-1", "-o", "json", url=admin.url))
    assert view["groups"][0]["offsets"][0]["offset"] == 7
    table = run("offsets", "show", "a-to-b", url=admin.url).stdout
    assert "3 (1f0c)" in table
    assert re.search(r"app-1 +classic +orders-eu +0 +7", table)


def test_what_groups_have_committed_is_listed_side_by_side(admin: RunningAdmin) -> None:
    table = run("offsets", "list", "a-to-b", url=admin.url).stdout
    assert re.search(r"^app-1 +orders-eu +0 +7 +7 +-$", table, re.MULTILINE)
    assert re.search(r"^app-1 +orders-eu +1 +4 +- +-$", table, re.MULTILINE)
    assert re.search(r"^app-2 +- +- +- +- +the source's coordinator is not there$", table, re.MULTILINE)
    assert table.endswith("and 3 groups more: --group shows one\n")
    view = ok(run("offsets", "list", "a-to-b", "--group", "app-9", "-o", "json", url=admin.url))
    assert view["groups"][0]["group"] == "app-9"
    assert run("offsets", "list", "nope", url=admin.url).exit_code == 1


def test_a_link_is_waited_for(admin: RunningAdmin) -> None:
    assert run("link", "wait", "a-to-b", "Following", url=admin.url).stdout == "link a-to-b is Following\n"
    late = run("link", "wait", "a-to-b", "In-Sync", "--timeout-s", "0", url=admin.url)
    assert (late.exit_code, late.stdout) == (1, "")
    assert late.stderr == "error: link a-to-b is In-Sync: not within 0 s; it is Following (NOT_IN_TIME)\n"
    assert run("link", "wait", "nope", "In-Sync", url=admin.url).exit_code == 1
    assert run("link", "wait", "a-to-b", "Level", url=admin.url).exit_code == 2


def test_a_proxy_is_waited_for(admin: RunningAdmin) -> None:
    assert ok(run("status", "--wait-s", "5", "-o", "json", url=admin.url))["ready"]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens there
        nobody = run("status", "--wait-s", "0.1", url=f"http://127.0.0.1:{taken.getsockname()[1]}")
    assert nobody.exit_code == 3


def test_attaching_says_whom_the_check_of_transactions_concerns(admin: RunningAdmin) -> None:
    attach = ("link", "attach", "a-to-b", "--local", "x-", "--remote", "x-", "--role", "leader")
    assert "docs/operations.md" not in run(*attach, url=admin.url).stdout
    plan = TransactionVerificationPlan(setting="the.setting", enabled=True, action="none", message="only of interest")
    admin.links.verification = plan
    shown = run(*attach, url=admin.url).stdout
    assert "\nnote: only of interest.\nSee docs/operations.md, " in shown
    admin.links.verification = plan.model_copy(update={"action": "disable", "message": "what is lost"})
    shown = run(*attach, url=admin.url).stdout
    assert "\nthe.setting: switched off\nwhat is lost.\nSee docs/operations.md, " in shown
    assert "\nthe.setting: would be switched off\n" in run(*attach, "--dry-run", url=admin.url).stdout
    headings = Path(__file__).parents[3].joinpath("docs/operations.md").read_text().splitlines()
    assert "## " + shown.partition('operations.md, "')[2].partition('"')[0] in headings


def test_the_mode_is_set_and_shown(admin: RunningAdmin) -> None:
    planned = run("link", "set-mode", "a-to-b", "synchronous", "--dry-run", url=admin.url)
    assert planned.stdout.startswith("link a-to-b would be synchronous (it was asynchronous)")
    done = ok(
        run("link", "set-mode", "a-to-b", "synchronous", "--confirm-timeout-ms", "5000", "-o", "json", url=admin.url)
    )
    assert (done["mode"], done["sync_confirm_timeout_ms"], done["dry_run"]) == ("synchronous", 5_000, False)
    assert admin.links.calls == [("mode", "a-to-b", "synchronous", True), ("mode", "a-to-b", "synchronous", False)]

    link = admin.links.links["a-to-b"]
    assert "ACKS" not in run("link", "describe", "a-to-b", url=admin.url).stdout
    link.partitions[0].sync = SyncStatus(state="In-Sync", since_offset=7, since_ms=1_760_000_000_000)
    described = run("link", "describe", "a-to-b", url=admin.url).stdout
    assert re.search(r"^mode +synchronous$", described, re.MULTILINE)
    assert re.search(r"^ack waits at most +5000 ms \(sync.confirm.timeout.ms\)$", described, re.MULTILINE)
    assert re.search(r"In-Sync +offset 7, 2025-10-09T08:53:20\+00:00", described)
    assert "In-Sync" in run("status", url=admin.url).stdout

    for wrong in (("link", "set-mode", "a-to-b", "sync"), ("link", "set-mode", "a-to-b")):
        assert run(*wrong, url=admin.url).exit_code == 2
    short = run("link", "set-mode", "a-to-b", "synchronous", "--confirm-timeout-ms", "1999", url=admin.url)
    assert short.exit_code == 2
    assert run("link", "set-mode", "nope", "synchronous", url=admin.url).exit_code == 1


def test_keys_are_made_rotated_and_never_printed(tmp_path: Path) -> None:
    ring = tmp_path / "ring.json"
    first = ok(run("offsets", "keygen", str(ring), "--group", "app-*", "-o", "json"))
    assert ring.stat().st_mode & 0o777 == 0o600
    ring.chmod(0o640)
    second = ok(run("offsets", "keygen", str(ring), "--group", "app-*", "-o", "json"))
    entry = json.loads(ring.read_text())["groups"]["app-*"]
    assert entry["current"] == second["key_id"]
    assert set(entry["keys"]) == {first["key_id"], second["key_id"]}
    assert ring.stat().st_mode & 0o777 == 0o640
    assert not any(key in json.dumps([first, second]) for key in entry["keys"].values())
    assert list(tmp_path.iterdir()) == [ring]
    wrong = run("offsets", "keygen", str(ring), "--group", "a*b")
    assert (wrong.exit_code, wrong.stdout) == (2, "")
    ring.write_text("{")
    broken = run("offsets", "keygen", str(ring), "--group", "app-*")
    assert broken.exit_code == 2
    assert "not JSON" in broken.stderr
    nowhere = run("offsets", "keygen", str(tmp_path / "no" / "ring.json"), "--group", "app-*")
    assert "cannot be read or written" in nowhere.stderr


@pytest.mark.parametrize(
    "command",
    [
        ("link", "attach", "a-to-b", "--local", "a-", "--remote", "a-", "--role", "leader", "--shared-until"),
        ("link", "create", "a-to-c", "--remote", "127.0.0.1:1", "--token-file"),
        ("offsets", "keygen", "--group", "app-*"),
        ("salvage", "list"),
        ("salvage", "show"),
        ("tree", "apply"),
    ],
    ids=" ".join,
)
def test_what_cannot_be_read_of_the_machine_is_said_alike(command: tuple[str, ...], tmp_path: Path) -> None:
    missing = tmp_path / "no" / "file"
    result = run(*command, str(missing))
    assert result.exit_code == 2
    assert re.fullmatch(
        rf"error: {re.escape(str(missing))} cannot be read( or written)?: No such file or directory \(FILE\)\n",
        result.stderr,
    )


@pytest.mark.parametrize(
    "command", [("link", "create", "a-to-c", "--remote", "127.0.0.1:1", "--token-file"), ("tree", "apply")]
)
def test_text_is_utf_8(command: tuple[str, ...], tmp_path: Path) -> None:
    (file := tmp_path / "file").write_bytes(b"\xff")
    assert f"{file} cannot be read: not UTF-8 (FILE)" in run(*command, str(file)).stderr


def test_a_proxy_that_is_not_there_is_told_apart_from_a_refusal() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free = taken.getsockname()[1]
    result = run("status", url=f"http://127.0.0.1:{free}")
    assert result.exit_code == 3
    assert f"http://127.0.0.1:{free}" in result.stderr
    assert "--url or ISTHMUS_URL" in result.stderr
    machine = run("status", "-o", "json", url=f"http://127.0.0.1:{free}")
    assert json.loads(machine.stderr)["code"] == "NOT_REACHABLE"
    assert run("status", url="127.0.0.1:28080").exit_code == 2


def test_something_else_at_the_url_is_not_a_proxy() -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(404)
            self.end_headers()
            self.wfile.write(b"<html>nothing here</html>")

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        result = run("status", url=f"http://127.0.0.1:{server.server_port}")
        thread.join()
    assert result.exit_code == 3
    assert "is not an admin listener" in result.stderr


# --- proxy


def test_check_prints_each_problem_with_its_fix(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_text('[cluster]\nbootstrap_server = "127.0.0.1:1"\n[client_listener]\nbind = "127.0.0.1:0"\n')
    result = run("proxy", "--config", str(file), "--check")
    assert result.exit_code == 1
    assert "2 problems" in result.stdout
    assert "  cluster.bootstrap_server: unknown key; did you mean cluster.bootstrap_servers?" in result.stdout
    machine = run("proxy", "--config", str(file), "--check", "-o", "json")
    verdict = json.loads(machine.stdout)
    assert verdict["valid"] is False
    assert {each["key"] for each in verdict["problems"]} == {"cluster.bootstrap_server", "cluster.bootstrap_servers"}
    without_check = run("proxy", "--config", str(file))
    assert without_check.exit_code == 1
    assert without_check.stderr.startswith(f"error: {file}: 2 problems")


def test_check_tells_unreachable_brokers_apart(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        free = taken.getsockname()[1]
    file = tmp_path / "a.toml"
    file.write_text(f'[cluster]\nbootstrap_servers = "127.0.0.1:{free}"\n[client_listener]\nbind = "127.0.0.1:0"\n')
    result = run("proxy", "--config", str(file), "--check")
    assert result.exit_code == 3
    assert "cluster.bootstrap_servers" in result.stdout
    assert "Connection refused" in result.stdout
    assert run("proxy", "--config", str(tmp_path / "none.toml")).exit_code == 2


# --- commands of others


def _mount(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    monkeypatch.setitem(sys.modules, "cli_test_commands", sys.modules[__name__])
    entries = {name: EntryPoint(name, value, root.COMMAND_ENTRY_POINTS) for name, value in values.items()}
    monkeypatch.setattr(root, "_mounted", lambda: entries)


def hello(name: str) -> None:
    """Greet.

    Only for tests.
    """
    typer.echo(f"hello {name}")


group = typer.Typer(help="A group of another distribution.")
group.command("one")(hello)
group.command("two")(hello)
NOT_A_COMMAND = 5


def test_commands_of_other_distributions_are_mounted(monkeypatch: pytest.MonkeyPatch) -> None:
    _mount(monkeypatch, demo="cli_test_commands:hello", bench="cli_test_commands:group")
    assert run("demo", "you").stdout == "hello you\n"
    assert run("bench", "two", "you").stdout == "hello you\n"
    listed = run("--help").stdout
    assert re.search(r"^  demo +Greet\.$", listed, re.MULTILINE)
    assert listed.index("  demo ") < listed.index("  proxy ") < listed.index("  bench ")


def test_a_command_that_does_not_load_fails_alone_and_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    _mount(monkeypatch, bench="no_such_module_anywhere.cli:app", demo="cli_test_commands:NOT_A_COMMAND")
    result = run("bench", "passthrough", "--seconds", "5")
    assert result.exit_code == 1
    assert "needs the module 'no_such_module_anywhere', which is not installed" in result.stderr
    assert "neither a typer.Typer nor a function" in run("demo").stderr
    listed = run("--help")
    assert listed.exit_code == 0
    assert "(not available here: see --help)" in listed.stdout


# --- plugins


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("enable", "p", "--namespace", "a-", "--set", "no-value"), "'no-value' is no setting"),
        (("enable", "p", "--namespace", "a-", "--set", "=1"), "'=1' is no setting"),
        (("configure", "p", "--namespace", "a-"), "say what to change"),
    ],
)
def test_wrong_settings_of_plugins_are_told_before_anything_is_asked(arguments: tuple[str, ...], words: str) -> None:
    result = run("plugin", *arguments, url="http://127.0.0.1:9")
    assert result.exit_code == 2
    assert words in result.stderr


def test_plugins_need_a_proxy_that_is_up(admin: RunningAdmin) -> None:
    result = run("plugin", "list", "-o", "json", url=admin.url)
    assert result.exit_code == 1
    assert json.loads(result.stderr)["code"] == "NOT_READY"


def test_settings_of_a_link_are_set_and_removed(admin: RunningAdmin) -> None:
    settings = ("--config", "sync.confirm.timeout.ms=5000", "--config", "follower.replication.factor=")
    assert run("link", "alter", "a-to-b", *settings, url=admin.url).exit_code == 0
    assert admin.links.altered[-1].config == {"sync.confirm.timeout.ms": "5000", "follower.replication.factor": None}
    for said, value in (("12h", "43200000"), ("7d", "604800000"), ("90s", "90000"), ("off", "off")):
        assert run("link", "alter", "a-to-b", "--verify-every", said, url=admin.url).exit_code == 0
        assert admin.links.altered[-1].config == {"verify.every.ms": value}
    assert run("link", "alter", "a-to-b", "--verify-every", "week", url=admin.url).exit_code == 2
    assert run("link", "alter", "a-to-b", url=admin.url).exit_code == 2
    assert run("link", "alter", "a-to-b", "--config", "sync.confirm.timeout.ms", url=admin.url).exit_code == 2
