"""Processes and ports of clusters."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.links import until

from isthmus_bench.kafka import ports
from isthmus_bench.kafka.errors import EmbeddedKafkaError
from isthmus_bench.kafka.probe import BrokerDied, NotReady, wait_until_ready
from isthmus_bench.kafka.processes import MARK, Process, kill_marked, marked, wait_any

SLEEP = "import sys, time; print('up', flush=True); time.sleep(60)"


def sleeper(directory: Path) -> Process:
    """A process that carries a cluster's mark and does nothing."""
    command = [sys.executable, "-c", SLEEP, f"{MARK}{directory}"]
    process = Process.spawn(command, os.environ, directory / "log")
    deadline = time.monotonic() + 20
    while "up" not in (directory / "log").read_text() and time.monotonic() < deadline:
        time.sleep(0.01)
    return process


def test_an_end_is_noticed_and_reaped(tmp_path: Path) -> None:
    process = sleeper(tmp_path)
    assert process.alive()
    assert process.resident_bytes() > 1_000_000
    assert not process.wait(0.01)
    process.send(signal.SIGTERM)
    assert process.wait(10)
    assert not process.alive()
    assert process.resident_bytes() == 0
    assert not Path(f"/proc/{process.pid}").exists()  # no zombie
    process.send(signal.SIGKILL)  # harmless


def test_a_paused_process_does_nothing_from_then_on(tmp_path: Path) -> None:
    """Signals are taken by one thread, which stops the others: on a busy machine some time after."""
    busy = """
import sys, threading, time
count = 0
def run():
    global count
    while True:
        count += 1
        print(count, flush=True)
for _ in range(8):
    threading.Thread(target=run, daemon=True).start()
time.sleep(60)
"""
    process = Process.spawn([sys.executable, "-c", busy, f"{MARK}{tmp_path}"], os.environ, tmp_path / "log")
    for _ in range(10):
        before = _size(tmp_path / "log")
        until("it goes on", lambda before=before: _size(tmp_path / "log") > before, 20)
        process.pause()
        stopped = _size(tmp_path / "log")
        time.sleep(0.01)
        assert _size(tmp_path / "log") == stopped
        process.resume()
    process.kill()
    process.pause()  # harmless


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def test_output_goes_to_the_log_and_is_appended(tmp_path: Path) -> None:
    for word in ("one", "two"):
        code = f"import sys; print({word!r}); sys.stderr.write('err\\n')"
        process = Process.spawn([sys.executable, "-uc", code], os.environ, tmp_path / "log")
        assert process.wait(20)
    assert sorted((tmp_path / "log").read_text().split()) == ["err", "err", "one", "two"]


def test_attach_wants_the_mark(tmp_path: Path) -> None:
    process = sleeper(tmp_path)
    try:
        assert Process.attach(process.pid, f"{MARK}{tmp_path}x") is None
        assert Process.attach(os.getpid(), f"{MARK}{tmp_path}") is None
        attached = Process.attach(process.pid, f"{MARK}{tmp_path}")
        assert attached is not None
        attached.kill()
        assert not process.alive()
        assert Process.attach(process.pid, f"{MARK}{tmp_path}") is None
    finally:
        process.kill()


def test_all_processes_of_a_directory_are_found_and_no_others(tmp_path: Path) -> None:
    directories = [tmp_path / name for name in ("a", "ab")]
    for directory in directories:
        directory.mkdir()
    first, second, other = sleeper(directories[0]), sleeper(directories[0]), sleeper(directories[1])
    try:
        assert {process.pid for process in marked(directories[0])} == {first.pid, second.pid}
        kill_marked(directories[0])
        assert not first.alive()
        assert not second.alive()
        assert other.alive()
    finally:
        other.kill()


def test_wait_any_returns_what_has_ended(tmp_path: Path) -> None:
    first, second = sleeper(tmp_path), sleeper(tmp_path)
    try:
        assert wait_any([first, second], 0.01) == []
        second.kill()
        assert wait_any([first, second], 10) == [second]
    finally:
        first.kill()


@pytest.mark.parametrize("keep", [False, True])
def test_the_guard_clears_up_after_a_killed_owner(tmp_path: Path, keep: bool) -> None:
    directory = tmp_path / "cluster"
    directory.mkdir()
    process = sleeper(directory)
    code = (
        "import sys, threading; from pathlib import Path; from isthmus_bench.kafka.processes import Guard\n"
        f"Guard.shared().add(Path({str(directory)!r}), keep={keep})\n"
        "print(Guard.shared().pid, flush=True); threading.Event().wait()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        guard = os.pidfd_open(int(owner.stdout.readline()))
        owner.kill()
    try:
        assert process.wait(20)
        deadline = time.monotonic() + 20
        while directory.exists() and not keep and time.monotonic() < deadline:
            time.sleep(0.01)
        assert directory.exists() == keep
    finally:
        os.close(guard)


def test_ports_in_a_row() -> None:
    picked = ports.pick_run("127.0.0.1", 4)
    try:
        assert picked == list(range(picked[0], picked[0] + 4))
        assert all(ports.is_free("127.0.0.1", port) for port in picked)
    finally:
        ports.release(picked)


def test_picked_ports_are_free_claimed_and_not_for_outgoing_connections() -> None:
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    picked = ports.pick("127.0.0.1", 5)
    try:
        assert len(set(picked)) == 5
        assert not any(low <= port <= high for port in picked)
        assert all(ports.is_free("127.0.0.1", port) for port in picked)
        claimed = "import sys; from isthmus_bench.kafka import ports; sys.exit(not ports._claim(int(sys.argv[1])))"
        assert subprocess.run([sys.executable, "-c", claimed, str(picked[0])]).returncode == 1
    finally:
        ports.release(picked)
    assert subprocess.run([sys.executable, "-c", claimed, str(picked[0])]).returncode == 0


def test_a_chosen_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(EmbeddedKafkaError, match=f"port {port} on 127.0.0.1 is in use: choose another"):
            ports.take("127.0.0.1", port, 1)
    assert ports.take("127.0.0.1", port, 1) == [port]
    with pytest.raises(EmbeddedKafkaError, match="out of range"):
        ports.take("127.0.0.1", 65535, 2)


def test_a_broker_that_ends_is_told_at_once(tmp_path: Path) -> None:
    process = Process.spawn([sys.executable, "-c", "raise SystemExit(1)"], os.environ, tmp_path / "log")
    port = ports.pick("127.0.0.1", 1)
    try:
        with pytest.raises(BrokerDied) as failure:
            wait_until_ready({7: ("127.0.0.1", port[0])}, {7: process}, "id", [7], None, 30)
        assert failure.value.broker_id == 7
    finally:
        ports.release(port)


def test_a_broker_that_is_silent_is_told_after_the_timeout(tmp_path: Path) -> None:
    process = sleeper(tmp_path)
    port = ports.pick("127.0.0.1", 1)
    try:
        with pytest.raises(NotReady, match=r"broker 1: .*refused"):
            wait_until_ready({1: ("127.0.0.1", port[0])}, {1: process}, "id", [1], None, 0.1)
    finally:
        process.kill()
        ports.release(port)
