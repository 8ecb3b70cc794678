"""Processes that outlive or follow their owner: started, awaited and signalled through pid file descriptors.

A pid file descriptor means one process for ever (a number may be reused), and it becomes readable when the process
ends, so a wait is a wait and not a loop of sleeps. Linux only.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

MARK: Final = "-Disthmus.cluster="
"""Every process of a cluster carries this argument, followed by the cluster's directory."""
STOPPED_POLL_S: Final = 0.001
_NOT_RUNNING: Final = "TtZX"
"""States of threads in /proc that are stopped, or have ended."""


class Process:
    """One process, ours or somebody else's child."""

    __slots__ = ("_descriptor", "pid")

    def __init__(self, pid: int, descriptor: int) -> None:
        self.pid = pid
        self._descriptor = descriptor

    @classmethod
    def spawn(cls, command: Sequence[str], environment: Mapping[str, str], log: Path) -> Process:
        """Start ``command`` in a session of its own (our terminal's Ctrl-C is not for it), output into ``log``."""
        pid = os.posix_spawn(
            command[0],
            list(command),
            environment,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
            setsid=True,
            setsigmask=[],
            setsigdef=[signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGHUP],
        )
        return cls(pid, os.pidfd_open(pid))

    @classmethod
    def attach(cls, pid: int, mark: str) -> Process | None:
        """The running process ``pid`` if ``mark`` is one of its arguments, else None."""
        try:
            descriptor = os.pidfd_open(pid)
        except OSError:
            return None
        # Read after the descriptor is there: now both mean the same process.
        if mark.encode() not in arguments(pid):
            os.close(descriptor)
            return None
        return cls(pid, descriptor)

    def alive(self) -> bool:
        return not self.wait(0)

    def wait(self, timeout_s: float) -> bool:
        """Wait until the process has ended; False if it has not after ``timeout_s``."""
        return wait_any([self], timeout_s) != []

    def send(self, number: signal.Signals) -> None:
        """Send a signal; nothing happens if the process has ended."""
        if self._descriptor >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, number)

    def pause(self) -> None:
        """SIGSTOP, and wait until no thread runs any more."""
        self.send(signal.SIGSTOP)
        wait_stopped(self.pid)

    def resume(self) -> None:
        """SIGCONT."""
        self.send(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and wait until the process is gone."""
        self.send(signal.SIGKILL)
        self.wait(30)

    def resident_bytes(self) -> int:
        """Resident memory; 0 if the process has ended."""
        try:
            status = Path(f"/proc/{self.pid}/status").read_text()
        except OSError:
            return 0
        return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS:")), 0)

    def _ended(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            with contextlib.suppress(ChildProcessError):  # not our child: init reaps it
                os.waitpid(self.pid, 0)


def wait_stopped(pid: int) -> None:
    """Return when no thread of a process that was sent SIGSTOP runs any more, or it has ended.

    One thread takes the signal and stops the others: on a busy machine they go on for a while after it was sent.
    """
    while any(state not in _NOT_RUNNING for state in _thread_states(pid)):
        time.sleep(STOPPED_POLL_S)


def _thread_states(pid: int) -> Iterator[str]:
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            yield stat.read_text().rpartition(")")[2].split()[0]


def wait_any(processes: Iterable[Process], timeout_s: float) -> list[Process]:
    """Those of ``processes`` that have ended, as soon as one has; empty after ``timeout_s``."""
    poll = select.poll()
    waiting = {}
    ended = []
    for process in processes:
        if process._descriptor < 0:
            ended.append(process)
        else:
            waiting[process._descriptor] = process
            poll.register(process._descriptor, select.POLLIN)
    if waiting:
        for descriptor, _ in poll.poll(0 if ended else max(0, timeout_s * 1000)):
            waiting[descriptor]._ended()
            ended.append(waiting[descriptor])
    return ended


def arguments(pid: int) -> list[bytes]:
    """The command line of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def marked(directory: Path) -> list[Process]:
    """Every process of the cluster in ``directory``, whoever started it."""
    mark = f"{MARK}{directory}"
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and mark.encode() in arguments(int(entry)):
            process = Process.attach(int(entry), mark)
            if process is not None:
                found.append(process)
    return found


def kill_marked(directory: Path) -> None:
    """Kill every process of the cluster in ``directory`` and wait until they are gone."""
    while found := marked(directory):
        for process in found:
            process.send(signal.SIGKILL)
        for process in found:
            process.wait(30)


class Guard:
    """Kills clusters, and removes their directories, when this process ends in whatever way.

    A helper process reads which directories are guarded from a pipe. The pipe closes when its owner is gone, SIGKILL
    included, and then the helper clears up. (PR_SET_PDEATHSIG would kill a broker when the *thread* that started it
    ends, and removes no files.)
    """

    _shared: Guard | None = None
    _lock: Final = threading.Lock()

    def __init__(self) -> None:
        reading, self._writing = os.pipe()
        script = str(Path(__file__).with_name("guard.py"))
        try:
            self.pid = os.posix_spawn(
                sys.executable,
                [sys.executable, "-I", "-S", script],
                os.environ,
                file_actions=[(os.POSIX_SPAWN_DUP2, reading, 0)],
                setsid=True,
                setsigmask=[],
                setsigdef=[signal.SIGTERM],
            )
        finally:
            os.close(reading)
        self._owner = os.getpid()

    @classmethod
    def shared(cls) -> Guard:
        with cls._lock:
            if cls._shared is None or cls._shared._owner != os.getpid():
                cls._shared = cls()
            return cls._shared

    def add(self, directory: Path, *, keep: bool = False) -> None:
        """Guard a cluster; its directory stays with ``keep``."""
        self._write(f"{'keep' if keep else 'add'} {directory}\n")

    def drop(self, directory: Path) -> None:
        self._write(f"drop {directory}\n")

    def _write(self, line: str) -> None:
        os.write(self._writing, line.encode())  # shorter than PIPE_BUF: threads cannot mix their lines


def remove(directory: Path) -> None:
    """Remove a cluster's directory. A process killed a moment ago can still make a file in it: not after kill()."""
    shutil.rmtree(directory, ignore_errors=True)
