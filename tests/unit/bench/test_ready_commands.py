"""Commands that are forked from one that is loaded are as those that a shell starts."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from isthmus_bench import ready_commands
from isthmus_bench.ready_commands import run


@pytest.fixture
def silent() -> Iterator[str]:
    """The URL of somebody who takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize(
    "arguments",
    [
        ("status", "--help"),
        ("link", "no-such-command"),
        ("link", "list", "--url", "http://127.0.0.1:1", "-o", "json"),
        ("proxy", "--config", "no-such-file"),
        ("salvage", "show", "no-such-file"),
    ],
)
def test_it_ends_and_says_what_one_of_a_shell_does(arguments: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "isthmus", *arguments]
    shells = subprocess.run(command, capture_output=True, text=True, check=False)
    done = run(arguments, 60)
    assert (done.returncode, done.stdout, done.stderr) == (shells.returncode, shells.stdout, shells.stderr)


def test_environment_and_directory_are_those_of_whoever_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (1, 2):
        monkeypatch.setenv("ISTHMUS_URL", f"http://127.0.0.1:{number}")
        assert f"http://127.0.0.1:{number} " in json.loads(run(["status", "-o", "json"], 60).stderr)["message"]
    (tmp_path / "here.toml").write_text("[proxy]\n")
    monkeypatch.chdir(tmp_path)
    assert "cluster" in run(["proxy", "--config", "here.toml", "--check"], 60).stdout


def test_several_run_at_once(silent: str) -> None:
    with ThreadPoolExecutor(2) as pool:
        run(["status", "--help"], 60)  # from here on it takes a moment
        waiting = pool.submit(run, ["status", "--url", silent], 2)
        assert run(["status", "--help"], 60).returncode == 0
        assert not waiting.done()
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.result()


def test_it_ends_with_its_starter() -> None:
    program = """
import sys
from isthmus_bench.ready_commands import run
run(["status", "--help"], 60)
print("ran", flush=True)
sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as starter:
        assert starter.stdout is not None
        assert starter.stdout.readline() == b"ran\n"
        (forker,) = Path(f"/proc/{starter.pid}/task/{starter.pid}/children").read_text().split()
        assert ready_commands.__name__ in Path(f"/proc/{forker}/cmdline").read_text()
        starter.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 20
    while Path(f"/proc/{forker}/cmdline").exists() and Path(f"/proc/{forker}/cmdline").read_text():
        assert time.monotonic() < deadline, "it is still there"
        time.sleep(0.05)
