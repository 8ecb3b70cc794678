"""Who is let in at the admin listener, over real sockets: tokens, certificates, the unix socket, browsers, bodies."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
import stat
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.admin import MemoryLinks, MemoryLog, access, make_services
from support.certificates import Authority

from isthmus.admin import AdminServer, server
from isthmus.admin.access import NOBODY_WARNING, Access, Peer, Role
from isthmus.admin.guard import BODY_BYTES_MAX
from isthmus.admin.server import CONNECTIONS_MAX
from isthmus.admin.tokens import tokens_in
from isthmus.admin.unix_socket import UnixSocket
from isthmus.config import AdminListenerSection, parse_config
from isthmus.config_check import check
from isthmus.config_tls import admin_listener_tls
from isthmus.errors import ConfigurationError
from isthmus_control.commands import CreateNamespace, EnablePlugin
from isthmus_control.model import ResourceType

ALICE, BOB, OTHER = "a" * 64, "b" * 64, "c" * 64
NAMESPACE = {"type": "topic", "prefix": "orders-"}


class Listener:
    """A running one, and a client of it."""

    def __init__(self, admin: AdminServer, log: MemoryLog) -> None:
        self.admin = admin
        self.log = log
        self.client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{admin.port}", trust_env=False)

    async def code(self, method: str, path: str, **more: Any) -> tuple[int, str | None]:
        """Status and code of an answer; the code of a success is None."""
        answer = await self.client.request(method, path, **more)
        return answer.status_code, None if answer.is_success else answer.json()["code"]


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


@asynccontextmanager
async def listening(unix_socket: UnixSocket | None = None, tls: ssl.SSLContext | None = None, **settings: Any) -> Any:
    log = MemoryLog()
    services = make_services(log, MemoryLinks())
    await log.enforce("proxy-1")
    admin = AdminServer(services, "127.0.0.1", 0, access(**settings), tls=tls, unix_socket=unix_socket)
    await admin.start()
    listener = Listener(admin, log)
    try:
        yield listener
    finally:
        await listener.client.aclose()
        await admin.stop()


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(test())  # type: ignore[arg-type]


def tokens(directory: Path, name: str, text: str) -> str:
    path = directory / name
    path.write_text(text)
    return str(path)


# --- tokens


def test_a_token_says_who_may_read_and_who_may_do_everything(tmp_path: Path) -> None:
    async def test() -> None:
        operators = tokens(tmp_path, "operators", f"# people\nalice {ALICE}  # on call\n\n{OTHER}\n")
        viewers = tokens(tmp_path, "viewers", BOB)
        async with listening(operator_token_file=operators, viewer_token_file=viewers) as listener:
            for wrong in ({}, bearer("d" * 64), {"authorization": "Bearer"}, {"authorization": f"Basic {ALICE}"}):
                for path in ("/v1/status", "/v1/nothing", "/openapi.json", "/metrics", "/", "/health"):
                    assert await listener.code("GET", path, headers=wrong) == (401, "UNAUTHENTICATED")
                assert await listener.code("POST", "/v1/namespaces", json=NAMESPACE, headers=wrong) == (
                    401,
                    "UNAUTHENTICATED",
                )
            for path in ("/v1/status", "/metrics", "/openapi.json"):
                assert await listener.code("GET", path, headers=bearer(BOB)) == (200, None)
            for method in ("POST", "PATCH", "DELETE", "PUT", "TRACE"):
                assert await listener.code(method, "/v1/namespaces", headers=bearer(BOB)) == (403, "FORBIDDEN")
            for good in (ALICE, OTHER):
                assert await listener.code("GET", "/v1/status", headers=bearer(good)) == (200, None)
            assert not listener.log.state.namespaces
            made = await listener.client.post("/v1/namespaces", json=NAMESPACE, headers=bearer(ALICE))
            assert made.status_code == 201
            assert listener.admin.guard.refused["UNAUTHENTICATED"] > 0

    run(test)


def test_secrets_in_plugins_settings_are_for_operators(tmp_path: Path) -> None:
    async def test() -> None:
        operators, viewers = tokens(tmp_path, "operators", ALICE), tokens(tmp_path, "viewers", BOB)
        async with listening(operator_token_file=operators, viewer_token_file=viewers) as listener:
            listener.log.apply(CreateNamespace(ResourceType.TOPIC, "o-"))
            settings = json.dumps({"sampling": 1.0, "salt": "pepper"})
            listener.log.apply(EnablePlugin(ResourceType.TOPIC, "o-", "capture", settings, 1))
            for path in ("/v1/namespaces", "/v1/namespaces/topic?prefix=o-", "/v1/status"):
                told = (await listener.client.get(path, headers=bearer(ALICE))).text
                assert "pepper" in told
                hidden = (await listener.client.get(path, headers=bearer(BOB))).text
                assert "pepper" not in hidden
                assert '"salt":"(hidden)"' in hidden
                assert '"sampling":1.0' in hidden

    run(test)


def test_health_is_open_and_metrics_where_it_is_said(tmp_path: Path) -> None:
    async def test() -> None:
        operators = tokens(tmp_path, "operators", ALICE)
        async with listening(operator_token_file=operators, metrics_without_authentication=True) as listener:
            for path in ("/health/live", "/health/ready", "/metrics"):
                assert await listener.code("GET", path) == (200, None)
            for path in ("/health/../v1/status", "/health/%2e%2e/v1/status", "/metrics/", "//metrics"):
                assert (await listener.code("GET", path))[0] in (401, 404)
            assert await listener.code("POST", "/health/live") == (401, "UNAUTHENTICATED")

    run(test)


def test_nobody_is_let_in_where_nothing_says_who(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with listening(loopback_without_authentication=False) as listener:
            assert await listener.code("GET", "/health/ready") == (200, None)
            for path in ("/v1/status", "/metrics"):
                for _ in range(5):
                    assert await listener.code("GET", path) == (401, "UNAUTHENTICATED")
        assert list(access(loopback_without_authentication=False).warnings()) == [NOBODY_WARNING]
        assert list(access().warnings()) == []

    run(test)
    said = [record for record in caplog.records if record.getMessage() == "admin request refused"]
    assert len(said) == 1, "one line for each address and minute"


def test_a_token_file_is_read_again_when_it_changes_and_kept_while_it_is_broken(tmp_path: Path) -> None:
    path = tmp_path / "operators"
    path.write_text(ALICE)
    rules = access(operator_token_file=str(path))
    stranger = Peer("10.0.0.1")

    def good(token: str) -> bool:
        try:
            return rules.identify(stranger, f"Bearer {token}").role is Role.OPERATOR
        except Exception:
            return False

    assert good(ALICE)
    for at in range(50):  # also within the resolution of the file's time
        token = f"{at:064d}"
        path.write_text(token)
        assert good(token)
        assert not good(ALICE)
    path.unlink()
    assert good(token)
    assert "No such file" in next(iter(rules.warnings()))
    path.write_text("short")
    assert good(token)
    (warning,) = rules.warnings()
    assert "the token in line 1" in warning
    assert "short" not in warning.partition("line 1")[0].replace(str(path), "")
    path.write_text(BOB)
    assert good(BOB)
    assert not good(token)
    assert not list(rules.warnings())
    path.write_text("")
    assert not good(BOB)
    os.utime(path, (1_000_000_000, 1_000_000_000))
    assert not good(BOB)
    path.write_text(ALICE)
    assert good(ALICE)


def test_what_a_token_file_may_hold() -> None:
    assert tokens_in(f"\n# all\n  bob  {BOB} # a friend\n{ALICE}\n") == [("bob", BOB), (None, ALICE)]
    for wrong in ("hunter2", f"bob {BOB} more", f"b/b {BOB}", "é" * 40, f"bob {'x' * 31}"):
        with pytest.raises(ValueError, match="line 1") as error:
            tokens_in(wrong)
        assert wrong.split()[-1] not in str(error.value)
    with pytest.raises(ConfigurationError, match=r"admin_listener.operator_token_file.*No such file"):
        access(operator_token_file="/nowhere/tokens")


# --- the unix socket


def test_who_may_open_the_unix_socket_is_an_operator(tmp_path: Path) -> None:
    async def test() -> None:
        path = tmp_path / "admin.sock"
        left = socket.socket(socket.AF_UNIX)
        left.bind(str(path))
        left.close()  # its process was killed
        async with listening(UnixSocket(path, 0o600), loopback_without_authentication=False) as listener:
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert await listener.code("GET", "/v1/status") == (401, "UNAUTHENTICATED")
            transport = httpx.AsyncHTTPTransport(uds=str(path))
            async with httpx.AsyncClient(transport=transport, base_url="http://any.name") as local:
                assert (await local.post("/v1/namespaces", json=NAMESPACE)).status_code == 201
                assert (await local.get("/metrics")).status_code == 200
                evil = {"origin": "https://evil.example"}
                assert (await local.get("/v1/status", headers=evil)).status_code == 403
            # Strangers that hold all connections of the other door keep nobody out.
            held = [await asyncio.open_connection("127.0.0.1", listener.admin.port) for _ in range(CONNECTIONS_MAX + 1)]
            async with httpx.AsyncClient(
                transport=httpx.AsyncHTTPTransport(uds=str(path)), base_url="http://x"
            ) as local:
                assert (await local.get("/v1/status")).status_code == 200
            for _, writer in held:
                writer.close()
            # A second process does not take it over, nor remove it.
            services = make_services(MemoryLog())
            second = AdminServer(services, "127.0.0.1", 0, access(), unix_socket=UnixSocket(path, 0o600))
            with pytest.raises(OSError, match="in use") as error:
                await second.start()
            assert error.value.filename == str(path)
            await second.stop()
            assert path.exists()
        assert not path.exists()
        path.write_text("something else")
        third = AdminServer(make_services(MemoryLog()), "127.0.0.1", 0, access(), unix_socket=UnixSocket(path, 0o600))
        with pytest.raises(OSError, match="in use"):
            await third.start()
        await third.stop()
        assert path.read_text() == "something else"

    run(test)


# --- browsers


@pytest.mark.parametrize("host", ["evil.example", "evil.example:28080", "127.0.0.1.evil.example", "", "localhost.evil"])
def test_a_name_that_was_made_to_lead_here_gets_nothing(host: str) -> None:
    async def test() -> None:
        async with listening() as listener:
            for method, path in (("GET", "/v1/status"), ("GET", "/metrics"), ("POST", "/v1/namespaces")):
                assert await listener.code(method, path, headers={"host": host}) == (421, "HOST_NOT_ALLOWED")
            assert not listener.log.state.namespaces
            assert await listener.code("GET", "/health/ready", headers={"host": host}) == (200, None)

    run(test)


def test_its_own_names_and_addresses_are_known() -> None:
    rules = access(hosts=["admin.example.org"])
    for good in (
        "127.0.0.1",
        "127.0.0.1:28080",
        "[::1]:28080",
        "10.1.2.3:1",
        "localhost:80",
        "Admin.Example.org.",
        "LOCALHOST",
    ):
        assert rules.is_host(good), good
    for bad in (None, "", "[", "[::1", "example.org", "admin.example.org.evil", "127.0.0.1@evil", "1.2.3.4.5", "::"):
        assert not rules.is_host(bad) or bad in ("[::1",), bad


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_a_page_of_another_site_gets_nothing(headers: dict[str, str]) -> None:
    async def test() -> None:
        async with listening() as listener:
            assert await listener.code("GET", "/v1/status", headers=headers) == (403, "ORIGIN_NOT_ALLOWED")
            simple = {**headers, "content-type": "text/plain"}
            for path in ("/v1/namespaces", "/v1/links/a-to-b/verify"):
                answer = await listener.code("POST", path, headers=simple, content=b"{}")
                assert answer == (403, "ORIGIN_NOT_ALLOWED")
            assert await listener.code("GET", "/v1/status", headers={"sec-fetch-site": "none"}) == (200, None)

    run(test)


# --- how much


def test_a_body_is_json_and_small() -> None:
    async def test() -> None:
        async with listening() as listener:

            async def chunks() -> Any:
                for _ in range(40):
                    yield b" " * 65536

            large = {"type": "topic", "prefix": "a" * BODY_BYTES_MAX}
            for body in ({"json": large}, {"content": chunks(), "headers": {"content-type": "application/json"}}):
                assert await listener.code("POST", "/v1/namespaces", **body) == (413, "TOO_LARGE")
            assert listener.admin.guard.refused["TOO_LARGE"] == 2
            for media in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
                headers = {"content-type": media}
                answer = await listener.code("POST", "/v1/namespaces", content=b'{"prefix": "a"}', headers=headers)
                assert answer == (422, "INVALID_REQUEST")
            assert not listener.log.state.namespaces

    run(test)


@pytest.mark.parametrize(
    "sent", [b"", b"GET /v1/status HTTP/1.1\r\nHost: 127.0.0.1\r\nX: ", b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\n"]
)
def test_who_connects_and_asks_nothing_is_gone_after_a_while(sent: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HEAD_TIMEOUT_S", 0.3)

    async def test() -> None:
        async with listening() as listener:
            reader, writer = await asyncio.open_connection("127.0.0.1", listener.admin.port)
            for byte in sent:
                writer.write(bytes([byte]))
                await asyncio.sleep(0.001)
            async with asyncio.timeout(5):
                with suppress(ConnectionError):  # it was gone while this was still sending
                    assert await reader.read() == b""
            writer.close()

    run(test)


def test_what_is_no_http_is_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with listening() as listener:
            for sent in (
                b"\x16\x03\x01\x02\x00\x01",
                b"\x00\x00\x00\x20\x00\x12",
                b"GET\r\n\r\n",
                b"x" * 100 + b"\r\n\r\n",
            ):
                reader, writer = await asyncio.open_connection("127.0.0.1", listener.admin.port)
                writer.write(sent + b"\r\n\r\n")
                assert b" 400 " in await reader.read()
                writer.close()

    run(test)
    assert [record.getMessage() for record in caplog.records] == ["Invalid HTTP request received."]


# --- certificates


class Certified:
    """A listener with TLS, and clients of it with and without a certificate."""

    def __init__(self, directory: Path, **settings: str | list[str]) -> None:
        self.authority = Authority(directory)
        certificate, key = self.authority.issue("proxy")
        paths = {"tls_certfile": certificate, "tls_keyfile": key, "tls_client_cafile": self.authority.file}
        self.settings: dict[str, Any] = {name: str(path) for name, path in paths.items()} | settings
        text = json.dumps  # TOML writes text and lists as JSON does
        lines = [f"{name} = {text(value)}" for name, value in self.settings.items()]
        cluster = '[cluster]\nbootstrap_servers = "127.0.0.1:1"\n[client_listener]\nbind = "127.0.0.1:0"\n'
        config = parse_config(cluster + "[admin_listener]\n" + "\n".join(lines), directory)
        self.tls = admin_listener_tls(config)

    def client(self, port: int, name: str | None = None) -> httpx.AsyncClient:
        context = ssl.create_default_context(cafile=str(self.authority.file))
        if name is not None:
            context.load_cert_chain(*self.authority.issue(name))
        return httpx.AsyncClient(base_url=f"https://127.0.0.1:{port}", verify=context, trust_env=False)


def test_a_client_certificate_says_who_it_is(tmp_path: Path) -> None:
    async def test() -> None:
        certified = Certified(tmp_path, tls_operators=["ops"])
        async with listening(tls=certified.tls, **certified.settings) as listener:
            port = listener.admin.port
            async with certified.client(port) as nobody:
                assert (await nobody.get("/health/live")).status_code == 200
                assert (await nobody.get("/v1/status")).json()["code"] == "UNAUTHENTICATED"
            async with certified.client(port, "prometheus") as viewer:
                assert (await viewer.get("/metrics")).status_code == 200
                assert (await viewer.post("/v1/namespaces", json=NAMESPACE)).json()["code"] == "FORBIDDEN"
            async with certified.client(port, "ops") as operator:
                assert (await operator.post("/v1/namespaces", json=NAMESPACE)).status_code == 201
            (tmp_path / "other").mkdir()
            forged = ssl.create_default_context(cafile=str(certified.authority.file))
            forged.load_cert_chain(*Authority(tmp_path / "other").issue("ops"))
            client = httpx.AsyncClient(base_url=f"https://127.0.0.1:{port}", verify=forged, trust_env=False)
            async with client:
                with pytest.raises(httpx.TransportError):
                    await client.get("/health/live")
            with pytest.raises(httpx.TransportError):
                await listener.client.get("/health/live")  # without TLS

    run(test)


def test_a_certificate_and_who_signs_clients_are_others_from_some_connection_on(tmp_path: Path) -> None:
    async def test() -> None:
        certified = Certified(tmp_path, tls_operators=["ops"])
        async with listening(tls=certified.tls, **certified.settings) as listener:
            port = listener.admin.port
            async with certified.client(port, "ops") as before:
                assert (await before.get("/v1/status")).status_code == 200
                (tmp_path / "other").mkdir()
                other = Certified(tmp_path / "other", tls_operators=["ops"])
                listener.admin.use_tls(other.tls)
                assert (await before.get("/v1/status")).status_code == 200, "it stays connected"
            async with other.client(port, "ops") as operator:
                assert (await operator.get("/v1/status")).status_code == 200
            async with certified.client(port, "ops") as late:
                with pytest.raises(httpx.TransportError):
                    await late.get("/v1/status")

    run(test)


def test_beside_tokens_both_are_needed(tmp_path: Path) -> None:
    async def test() -> None:
        certified = Certified(tmp_path, operator_token_file=tokens(tmp_path, "operators", ALICE))
        async with listening(tls=certified.tls, **certified.settings) as listener:
            port = listener.admin.port
            async with certified.client(port) as without:
                assert (await without.get("/v1/status", headers=bearer(ALICE))).status_code == 401
            async with certified.client(port, "laptop") as client:
                assert (await client.get("/v1/status")).status_code == 401
                assert (await client.post("/v1/namespaces", json=NAMESPACE, headers=bearer(ALICE))).status_code == 201

    run(test)


def test_tokens_over_the_network_without_tls_are_warned_of(tmp_path: Path) -> None:
    operators = tokens(tmp_path, "operators", ALICE)
    (warning,) = Access(
        AdminListenerSection.model_validate({"bind": "10.0.0.1:28080", "operator_token_file": operators})
    ).warnings()
    assert "admin_listener.tls_certfile" in warning


def test_a_check_of_the_configuration_reads_tokens_and_certificates(tmp_path: Path) -> None:
    cluster = '[cluster]\nbootstrap_servers = "127.0.0.1:1"\n[client_listener]\nbind = "127.0.0.1:0"\n'
    tokens(tmp_path, "short", "hunter2")

    def problems(lines: str) -> list[str]:
        config = parse_config(f"{cluster}[admin_listener]\n{lines}", tmp_path)
        found = asyncio.run(check(config))
        assert "hunter2" not in str(found)
        return [each.key for each in found]

    assert problems('viewer_token_file = "none"') == ["admin_listener.viewer_token_file"]
    assert problems('operator_token_file = "short"') == ["admin_listener.operator_token_file"]
    assert problems('tls_certfile = "none"') == ["admin_listener.tls_certfile"]
