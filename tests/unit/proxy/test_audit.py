"""What the log says of changes: who, what, before, after, and what came of it."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.admin import MemoryLinks, MemoryLog, RunningAdmin, access, make_services
from typer.testing import CliRunner

from isthmus.admin import AdminServer
from isthmus.admin.audit import ASKED_CHARS_MAX, different
from isthmus.admin.hiding import HIDDEN, shown
from isthmus.cli import app
from isthmus.logs import fields_of
from isthmus_control.commands import (
    AttachNamespace,
    CreateLink,
    CreateToken,
    RaiseLevel,
    SealSecret,
    SetFollowerTopic,
)
from isthmus_control.grants import parse_grants
from isthmus_control.levels import CONSENT
from isthmus_control.model import Reason, ResourceType, Role, TopicState
from isthmus_control.outcome import Accepted
from isthmus_control.sealing import Seal, Sealed

ALICE, BOB = "a" * 64, "b" * 64
ID = "11111111-1111-4111-8111-111111111111"


class Audited:
    """A listener, and what its audit has said."""

    def __init__(self, admin: AdminServer, log: MemoryLog, links: MemoryLinks, client: httpx.AsyncClient) -> None:
        self.admin = admin
        self.log = log
        self.links = links
        self.client = client
        self._lines: list[logging.LogRecord] = []

    async def change(self, method: str, path: str, **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """The two lines of one request: what was asked, what came of it."""
        del self._lines[:]
        await self.client.request(method, path, **more)
        asked, done = self.lines()
        assert asked["change"] == done["change"]
        assert (asked["who"], asked["action"], asked["asked"]) == (done["who"], done["action"], done["asked"])
        return asked, done

    def lines(self) -> list[dict[str, Any]]:
        return [{"line": record.getMessage(), **fields_of(record)} for record in self._lines]

    @contextmanager
    def listening(self) -> Iterator[None]:
        handler = logging.Handler()
        handler.emit = self._lines.append  # type: ignore[method-assign]
        logger = logging.getLogger("isthmus.audit")
        logger.addHandler(handler)
        logger.setLevel("INFO")
        try:
            yield
        finally:
            logger.removeHandler(handler)


def with_audit(directory: Path, test: Callable[[Audited], Awaitable[None]]) -> None:
    async def run() -> None:
        tokens = directory / "tokens"
        tokens.write_text(f"alice {ALICE}\nbob {BOB}\n")
        log, links = MemoryLog(), MemoryLinks()
        services = make_services(log, links)
        await log.enforce("proxy-1")
        admin = AdminServer(services, "127.0.0.1", 0, access(operator_token_file=str(tokens)))
        await admin.start()
        url, headers = f"http://127.0.0.1:{admin.port}", {"authorization": f"Bearer {ALICE}"}
        async with httpx.AsyncClient(base_url=url, headers=headers, trust_env=False) as client:
            audited = Audited(admin, log, links, client)
            with audited.listening():
                try:
                    await test(audited)
                finally:
                    await admin.stop()

    asyncio.run(run())


def test_a_change_says_who_what_before_after_and_outcome(tmp_path: Path) -> None:
    async def test(audited: Audited) -> None:
        body = {"type": "topic", "prefix": "orders-", "reserved": True, "reason": "move"}
        asked, done = await audited.change("POST", "/v1/namespaces?wait=false", json=body)
        assert asked["line"] == "change asked"
        assert done["line"] == "change"
        assert (done["who"], done["peer"], done["proxy"]) == ("alice", "127.0.0.1", "proxy-1")
        assert done["action"] == "POST /v1/namespaces"
        assert done["asked"] == body | {"wait": "false"}
        assert done["outcome"] == "done"
        assert "before" not in done
        assert (done["after"]["reserved"], done["after"]["reserved_reason"]) == (True, "move")

        path = "/v1/namespaces/topic?prefix=orders-&wait=false"
        change = {"consistency": "strict"}
        headers = {"authorization": f"Bearer {BOB}"}
        _, done = await audited.change("PATCH", path, json=change, headers=headers)
        assert (done["who"], done["before"], done["after"]) == (
            "bob",
            {"consistency": "available"},
            {"consistency": "strict"},
        )
        _, done = await audited.change("DELETE", path)
        assert (done["outcome"], "after" in done) == ("done", False)
        assert done["before"]["reserved"] is True

    with_audit(tmp_path, test)


def test_what_is_refused_or_fails_says_why(tmp_path: Path) -> None:
    async def test(audited: Audited) -> None:
        _, done = await audited.change("DELETE", "/v1/namespaces/topic?prefix=none-")
        assert (done["outcome"], done["code"], "before" in done) == ("refused", "NOT_FOUND", False)
        _, done = await audited.change("POST", "/v1/links/nope/mode", json={"mode": "half"})
        assert (done["outcome"], done["code"]) == ("refused", "INVALID_REQUEST")
        _, done = await audited.change("POST", "/v1/nothing", json={"a": [1]})
        assert (done["outcome"], done["code"]) == ("refused", "NO_SUCH_PATH")
        audited.log.fault = RuntimeError("a bug")
        _, done = await audited.change("POST", "/v1/namespaces", json={"prefix": "orders-"})
        assert (done["outcome"], done["code"]) == ("failed", "INTERNAL_ERROR")

    with_audit(tmp_path, test)


def test_reading_says_nothing_nor_does_who_is_not_let_in(tmp_path: Path) -> None:
    async def test(audited: Audited) -> None:
        for path in ("/v1/status", "/metrics", "/health/live", "/v1/links"):
            await audited.client.get(path)
        await audited.client.post("/v1/namespaces", json={"prefix": "a"}, headers={"authorization": "Bearer x"})
        assert audited.lines() == []

    with_audit(tmp_path, test)


def test_an_operation_has_a_line_when_it_ends(tmp_path: Path) -> None:
    async def test(audited: Audited) -> None:
        audited.links.proceed.clear()
        _, started = await audited.change("POST", "/v1/links/a-to-b/verify")
        assert started["outcome"] == "started"
        _, again = await audited.change("POST", "/v1/links/a-to-b/verify")
        assert again["outcome"] == "started"
        operation = (await audited.client.get("/v1/operations")).json()["items"][0]
        audited.links.proceed.set()
        async with asyncio.timeout(5):
            await audited.client.get(f"/v1/operations/{operation['id']}?wait_s=5")
        await asyncio.sleep(0.05)
        ended = audited.lines()[-1]
        assert (ended["change"], ended["outcome"], ended["who"]) == (started["change"], "done", "alice")
        audited.links.proceed.clear()
        _, cut = await audited.change("POST", "/v1/links/a-to-b/verify")
        await audited.admin.stop()
        assert audited.lines()[-1] == cut | {
            "outcome": "failed",
            "code": "CANCELLED",
            "at_ms": audited.lines()[-1]["at_ms"],
        }

    with_audit(tmp_path, test)


def test_links_topics_and_the_control_log_are_seen(tmp_path: Path) -> None:
    async def test(audited: Audited) -> None:
        log = audited.log
        log.apply(CreateLink("a-to-b", ID, "cluster-b", False))
        log.apply(AttachNamespace("a-to-b", ResourceType.TOPIC, "o-", "o-", Role.FOLLOWER, create_missing=True))
        log.apply(SetFollowerTopic("a-to-b", "o-eu", "o-eu", ID, TopicState.CREATING))
        forget = audited.links.forget_topic

        def decided(*arguments: Any) -> Any:
            refused = SetFollowerTopic("a-to-b", "o-eu", "o-eu", ID, TopicState.REFUSED, reason=Reason("CODE", "why"))
            assert isinstance(log.apply(refused), Accepted)
            return forget(*arguments)

        audited.links.forget_topic = decided  # type: ignore[method-assign]
        _, done = await audited.change("POST", "/v1/topics/o-eu/forget", json={"delete": True})
        assert (done["before"], done["after"]) == (
            {"state": "creating", "reason": None},
            {"state": "refused", "reason": "CODE"},
        )
        _, done = await audited.change("POST", "/v1/control/upgrade", json={"to": 1})
        assert (done["before"], done["after"]) == ({"level": 0}, {"level": 1})
        _, done = await audited.change("DELETE", "/v1/links/a-to-b")
        assert (done["outcome"], "before" in done) == ("done", False), "the double leaves the log alone"

    with_audit(tmp_path, test)


def test_tokens_and_the_ids_of_secrets_are_seen(tmp_path: Path) -> None:
    async def test(audited: Audited) -> None:
        log, create = audited.log, audited.links.create_token
        log.apply(RaiseLevel(CONSENT))
        sealed = Sealed(Seal.AES_256_GCM, "ab12cd34", "AAAA")
        log.apply(CreateLink("a-to-b", ID, "cluster-b", False, secret=sealed))

        def made(*arguments: Any) -> Any:
            token = CreateToken("ab" * 8, "cd" * 16, sealed, parse_grants("lead:o-"), 1_860_000_000_000)
            assert isinstance(log.apply(token), Accepted)
            return create(*arguments)

        audited.links.create_token = made  # type: ignore[method-assign]
        _, done = await audited.change("POST", "/v1/link-tokens", json={"may": ["lead:o-"]})
        assert (done["before"], done["after"]) == (
            {"ab" * 8: None},
            {"ab" * 8: {"may": ["lead:o-"], "expires_ms": 1_860_000_000_000}},
        )
        rotate = audited.links.rotate_secret

        def rotated(*arguments: Any) -> Any:
            again = Sealed(Seal.AES_256_GCM, "ef56ab78", "BBBB")
            assert isinstance(log.apply(SealSecret("a-to-b", ID, "", again)), Accepted)
            return rotate(*arguments)

        audited.links.rotate_secret = rotated  # type: ignore[method-assign]
        _, done = await audited.change("POST", "/v1/links/a-to-b/rotate-secret")
        assert done["after"] == {"sealed": [{"id": None, "key_id": "ef56ab78"}]}

    with_audit(tmp_path, test)


def test_no_secret_is_said_and_nothing_without_bound(tmp_path: Path) -> None:
    async def test(audited: Audited) -> None:
        body = {"link_name": "x", "remote": "b:1", "token": "enrol-me", "config": {"sasl.jaas.config": "hunter2"}}
        _, done = await audited.change("POST", "/v1/links?password=hunter2", json=body)
        said = json.dumps(audited.lines())
        assert done["asked"]["token"] == HIDDEN
        assert "enrol-me" not in said
        assert "hunter2" not in said
        assert ALICE not in said
        _, done = await audited.change("POST", "/v1/namespaces", json={"prefix": "x" * 100_000})
        assert len(done["asked"]) < ASKED_CHARS_MAX + 10

    with_audit(tmp_path, test)


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (None, None, (None, None)),
        (None, {"a": 1}, (None, {"a": 1})),
        ({"a": 1}, None, ({"a": 1}, None)),
        ({"a": 1, "b": 2}, {"a": 1, "b": 3}, ({"b": 2}, {"b": 3})),
        ({"a": 1}, {"a": 1}, (None, None)),
    ],
)
def test_only_what_is_different_is_said(before: Any, after: Any, expected: Any) -> None:
    assert different(before, after) == expected


def test_secrets_are_hidden_at_any_depth() -> None:
    told = {"a": [{"hash_salt": "x", "n": 1}], "token": None, "Password": 5, "sasl.credentials": {"x": "y"}}
    assert shown(told) == {
        "a": [{"hash_salt": HIDDEN, "n": 1}],
        "token": None,
        "Password": HIDDEN,
        "sasl.credentials": HIDDEN,
    }


def test_the_lines_are_read_back(tmp_path: Path) -> None:
    async def test(audited: Audited) -> None:
        await audited.client.post("/v1/namespaces?wait=false", json={"prefix": "a-", "reserved": True})
        await audited.client.delete("/v1/namespaces/topic?prefix=b-")
        made, refused = (await audited.client.get("/v1/audit")).json()["items"]
        assert (made["who"], made["outcome"], made["after"]["reserved"], made["before"]) == (
            "alice",
            "done",
            True,
            None,
        )
        assert (refused["outcome"], refused["code"]) == ("refused", "NOT_FOUND")
        assert (await audited.client.get("/v1/audit?limit=1")).json()["items"] == [refused]
        assert (await audited.client.get("/v1/audit?limit=0")).status_code == 422
        audit = audited.admin.guard._app._services.audit  # type: ignore[attr-defined]
        audit.put({"no": "line of ours"})
        audit.put({**{name: value for name, value in made.items() if value is not None}, "change": "x", "more": 1})
        assert [each["change"] for each in (await audited.client.get("/v1/audit")).json()["items"]][2:] == ["x"]

    with_audit(tmp_path, test)


def test_the_command_shows_them() -> None:
    with RunningAdmin() as running:

        def run(*arguments: str) -> str:
            result = CliRunner().invoke(app, [*arguments, "--url", running.url], env={"COLUMNS": "250"})
            assert result.exit_code == 0, result.output
            return result.stdout

        run("namespace", "create", "orders-", "--no-wait")
        run("namespace", "alter", "orders-", "--consistency", "strict", "--no-wait")
        run("namespace", "delete", "orders-", "--no-wait")
        head, made, altered, gone = run("audit").splitlines()
        assert head.split() == ["AT", "PROXY", "WHO", "FROM", "ACTION", "OUTCOME", "CHANGED"]
        assert re.search(r"Z  proxy-1  loopback  127.0.0.1  POST /v1/namespaces +done +made$", made)
        assert altered.endswith("consistency: available -> strict")
        assert gone.endswith("gone")
        assert len(json.loads(run("audit", "--limit", "2", "-o", "json"))) == 2
        odd = {"change": "1", "at_ms": 0, "proxy": "p", "who": "w", "peer": "x", "outcome": "done"}
        running.call(running.services.audit.put, odd | {"action": "POST /v1/\x1b[2J\n"})
        assert run("audit").splitlines()[-1].split()[4:6] == ["POST", "/v1/?[2J?"]
