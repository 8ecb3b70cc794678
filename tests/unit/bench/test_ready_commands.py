"""Commands that are forked from one that is loaded are as those that a shell starts."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.links import until

from isthmus_bench import ready_commands
from isthmus_bench.ready_commands import run, start


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


@pytest.fixture
def config(tmp_path: Path, silent: str) -> Path:
    """Of a proxy that waits for its cluster."""
    path = tmp_path / "proxy.toml"
    path.write_text(
        f'[cluster]\nbootstrap_servers = "{silent.removeprefix("http://")}"\n[client_listener]\nbind = "127.0.0.1:0"\n'
        '[admin_listener]\nbind = "127.0.0.1:0"\n'
    )
    return path


def test_one_that_goes_on_is_a_process(config: Path, tmp_path: Path) -> None:
    said = tmp_path / "said"
    with said.open("ab") as output:
        process = start(["proxy", "--config", str(config)], output, descriptors=300)
    assert process.poll() is None
    until("it says something", lambda: said.read_text())
    assert "Max open files            300 " in Path(f"/proc/{process.pid}/limits").read_text()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.1)
    process.kill()
    assert process.wait(20) == process.poll() == -signal.SIGKILL
    process.send_signal(signal.SIGTERM)  # nobody is there any more


def test_it_ends_with_its_starter_as_do_those_that_go_on(config: Path) -> None:
    program = """
import sys
from isthmus_bench.ready_commands import start
process = start(["proxy", "--config", sys.argv[1]], sys.stderr.buffer)
print(process.pid, flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", program, str(config)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as starter:
        assert starter.stdout is not None
        proxy = int(starter.stdout.readline())
        assert ready_commands.__name__ in Path(f"/proc/{proxy}/cmdline").read_text()
        (forker,) = Path(f"/proc/{starter.pid}/task/{starter.pid}/children").read_text().split()
        assert ready_commands.__name__ in Path(f"/proc/{forker}/cmdline").read_text()
        starter.send_signal(signal.SIGKILL)
    for pid in (int(forker), proxy):
        line = Path(f"/proc/{pid}/cmdline")
        until("it has ended", lambda line=line: not line.exists() or not line.read_text())
