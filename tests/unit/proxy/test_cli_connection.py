"""Which listener commands ask, and what they show there: URLs, tokens, certificates, profiles."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.admin import RunningAdmin, access
from support.certificates import Authority
from typer.testing import CliRunner

from isthmus.admin.unix_socket import UnixSocket
from isthmus.cli import app
from isthmus.config import parse_config
from isthmus.config_tls import admin_listener_tls

TOKEN, VIEWER = "a" * 64, "b" * 64


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's home; nothing of the environment of the tests counts."""
    for name in ("URL", "CONFIG", "PROFILE", "TOKEN_FILE", "CACERT", "CERT", "KEY"):
        monkeypatch.delenv(f"ISTHMUS_{name}", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "config" / "isthmus").mkdir(parents=True)
    return tmp_path


@pytest.fixture
def admin(home: Path) -> Iterator[RunningAdmin]:
    """One that wants a token over TCP; ``operator`` and ``viewer`` are the files of who has one."""
    (home / "operator").write_text(f"alice {TOKEN}\n")
    (home / "viewer").write_text(f"# mine\n{VIEWER}\n")
    rules = access(operator_token_file=str(home / "operator"), viewer_token_file=str(home / "viewer"))
    with RunningAdmin(rules, unix_socket=UnixSocket(home / "a.sock", 0o600)) as running:
        yield running


def run(*arguments: str, **environment: str) -> Any:
    return CliRunner().invoke(app, [*arguments, "-o", "json"], prog_name="isthmus", env=environment)


def name_of(result: Any) -> str:
    assert result.exit_code == 0, result.output
    return str(json.loads(result.stdout)["name"])


def code_of(result: Any) -> tuple[int, str]:
    return result.exit_code, json.loads(result.stderr)["code"]


def profiles(home: Path, text: str) -> Path:
    path = home / "config" / "isthmus" / "config.toml"
    path.write_text(text)
    return path


def test_a_token_is_shown_from_a_file_or_the_environment(admin: RunningAdmin, home: Path) -> None:
    assert code_of(run("status", "--url", admin.url)) == (1, "UNAUTHENTICATED")
    assert name_of(run("--token-file", str(home / "viewer"), "status", "--url", admin.url)) == "proxy-1"
    assert name_of(run("status", ISTHMUS_URL=admin.url, ISTHMUS_TOKEN_FILE=str(home / "operator"))) == "proxy-1"
    create = ("namespace", "create", "orders-", "--url", admin.url)
    assert code_of(run("--token-file", str(home / "viewer"), *create)) == (1, "FORBIDDEN")
    assert run("--token-file", str(home / "operator"), *create).exit_code == 0
    (home / "empty").write_text("# nothing\n")
    for file in ("empty", "none"):
        exit_code, code = code_of(run("--token-file", str(home / file), "status", "--url", admin.url))
        assert (exit_code, code) == (2, "FILE")


def test_a_unix_socket_needs_none(admin: RunningAdmin, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert name_of(run("status", "--url", f"unix:{home}/a.sock")) == "proxy-1"
    assert name_of(run("status", "--url", f"unix://{home}/a.sock")) == "proxy-1"
    monkeypatch.chdir(home)
    assert name_of(run("status", ISTHMUS_URL="unix:a.sock")) == "proxy-1"
    for wrong in ("unix:none.sock", f"unix:{'x' * 200}"):  # httpcore closes no socket that could not connect
        command = [sys.executable, "-m", "isthmus", "status", "--url", wrong]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        assert ended.returncode == 3
        assert f"no answer from a proxy at {wrong}" in ended.stderr


def test_the_current_profile_counts_where_nothing_else_is_said(admin: RunningAdmin, home: Path) -> None:
    operator, viewer = home / "operator", home / "viewer"
    path = profiles(
        home,
        f"""# Mine.
[profiles.a]
url = "{admin.url}"
token_file = "{operator}"   # who I am

[profiles.b]
url = "unix:{home}/a.sock"
[profiles.c]
url = "http://127.0.0.1:1"
""",
    )
    assert code_of(run("status")) == (3, "NOT_REACHABLE"), "the default"
    assert code_of(run("config", "show")) == (2, "NO_SUCH_PROFILE")
    assert code_of(run("config", "use", "d")) == (2, "NO_SUCH_PROFILE")
    for name in ("a", "b"):
        path.chmod(0o600)
        assert json.loads(run("config", "use", name).stdout)["current"] is True
        assert path.stat().st_mode & 0o777 == 0o600
        assert name_of(run("status")) == "proxy-1"
        assert path.read_text().count("current =") == 1
    assert "token_file" in path.read_text()
    assert "# who I am" in path.read_text()
    assert [(each["profile"], each["current"]) for each in json.loads(run("config", "list").stdout)] == [
        ("a", False),
        ("b", True),
        ("c", False),
    ]
    run("config", "use", "a")
    assert TOKEN not in run("config", "show").stdout + run("config", "show", "a").stdout
    # A profile's token goes nowhere else by itself.
    assert code_of(run("status", "--url", admin.url)) == (1, "UNAUTHENTICATED")
    assert code_of(run("status", ISTHMUS_URL=admin.url)) == (1, "UNAUTHENTICATED")
    assert name_of(run("--profile", "a", "status", "--url", admin.url)) == "proxy-1"
    assert code_of(run("--profile", "c", "status")) == (3, "NOT_REACHABLE")
    assert name_of(run("status", ISTHMUS_PROFILE="b")) == "proxy-1"
    create = ("namespace", "create", "orders-")
    assert code_of(run("--token-file", str(viewer), *create)) == (1, "FORBIDDEN")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[profiles.a", "Expected"),
        ('[profiles.a]\ntoken = "x"\nurl = "http://x"', "has 'token', and may have url, token_file"),
        ("[profiles.a]", "has no url"),
        ("[profiles.a]\nurl = 1", "table of texts"),
        ('profile = "a"', "has 'profile'"),
        ("current = 1", "current is text"),
        ('[profiles."a b"]\nurl = "http://x"', "letters, digits"),
        ("profiles = 1", "profiles are tables"),
    ],
)
def test_a_file_of_profiles_that_cannot_be_used_is_an_error(home: Path, text: str, said: str) -> None:
    profiles(home, text)
    for command in (("status",), ("config", "list"), ("config", "use", "a")):
        result = run(*command)
        assert code_of(result) == (2, "PROFILES")
        assert said in json.loads(result.stderr)["message"]


def test_certificates_go_both_ways(home: Path) -> None:
    authority = Authority(home)
    certificate, key = authority.issue("proxy")
    settings: dict[str, Any] = {
        "tls_certfile": str(certificate),
        "tls_keyfile": str(key),
        "tls_client_cafile": str(authority.file),
        "tls_operators": ["ops"],
    }
    cluster = '[cluster]\nbootstrap_servers = "127.0.0.1:1"\n[client_listener]\nbind = "127.0.0.1:0"\n'
    lines = "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items())
    tls = admin_listener_tls(parse_config(f"{cluster}[admin_listener]\n{lines}", home))
    own, own_key = (str(path) for path in authority.issue("ops"))
    ca = str(authority.file)
    with RunningAdmin(access(**settings), tls=tls) as running:
        status = ("status", "--url", running.url)
        assert code_of(run(*status)) == (3, "NOT_REACHABLE"), "it is not who the system trusts"
        assert code_of(run("--cacert", ca, *status)) == (1, "UNAUTHENTICATED")
        assert name_of(run("--cacert", ca, "--cert", own, "--key", own_key, *status)) == "proxy-1"
        profiles(home, f'current = "x"\n[profiles.x]\nurl = "{running.url}"\ncacert = "{ca}"\ncert = "{own}"\n')
        assert code_of(run("status")) == (2, "FILE"), "the key is missing"
        assert name_of(run("--key", own_key, "status")) == "proxy-1"
        assert code_of(run("--cacert", str(home / "none"), *status)) == (2, "FILE")
