"""``isthmus`` commands, each in a process of its own that has loaded them already: it is forked from one that has.

To load a command takes half a second of a core, a proxy with its plugins and schemas one or two; to run a command, or
start a proxy, takes a fraction of that. Whoever runs hundreds pays for the first one alone. A command gets what
processes start with: arguments, environment, directory, and files for its output.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import io
import json
import os
import resource
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import redirect_stderr, suppress
from functools import cache
from importlib.metadata import entry_points
from typing import Any, BinaryIO, Final, NoReturn

from isthmus.cli import main
from isthmus.cli.root import OWN

_REQUEST_BYTES_MAX: Final = 1 << 17
_PR_SET_PDEATHSIG: Final = 1
_NOBODYS_URL: Final = "http://127.0.0.1:1"
_starting: Final = threading.Lock()
_requests: socket.socket | None = None
"""To the process that forks; None: it is not there yet."""


class Process:
    """One that was forked; like a subprocess.Popen."""

    def __init__(self, arguments: Sequence[str], tells: socket.socket) -> None:
        self.args = ["isthmus", *arguments]
        self.returncode: int | None = None
        """Below 0: the signal that ended it."""
        self._tells = tells
        """Where its exit code comes from; nothing, if what forks has ended and the process with it."""
        self._ending = threading.Lock()
        said, descriptors, *_ = socket.recv_fds(tells, 16, 1)
        if not said:
            tells.close()
            raise ChildProcessError(f"what runs commands has ended, and so did {' '.join(self.args)}")
        self.pid = int(said)
        (self._descriptor,) = descriptors

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, at its end. Raises subprocess.TimeoutExpired."""
        code = self._ended(timeout)
        if code is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return code

    def _ended(self, timeout: float | None) -> int | None:
        with self._ending:
            if self.returncode is None and _readable(self._tells, timeout):
                self.returncode = int(self._tells.recv(16) or -signal.SIGKILL)
                self._tells.close()
                os.close(self._descriptor)
            return self.returncode

    def send_signal(self, number: int) -> None:
        """Nothing happens to one that has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _readable(tells: socket.socket, timeout_s: float | None) -> bool:
    poll = select.poll()  # takes descriptors of any number
    poll.register(tells, select.POLLIN)
    return bool(poll.poll(None if timeout_s is None else timeout_s * 1000))


def start(arguments: Sequence[str], output: BinaryIO, descriptors: int | None = None) -> Process:
    """``isthmus`` with these arguments, which writes there. It ends with its starter.

    ``descriptors``: how many file descriptors it may have; None: as many as the starter.
    """
    return _start(arguments, output.fileno(), output.fileno(), descriptors=descriptors)


def run(arguments: Sequence[str], timeout_s: int) -> subprocess.CompletedProcess[str]:
    """``isthmus`` with these arguments, to its end. Raises subprocess.TimeoutExpired."""
    output, errors = (os.memfd_create(name) for name in ("output", "errors"))
    try:
        process = _start(arguments, output, errors, ends_after_s=timeout_s)
        code = process.wait()
        said, complained = (os.pread(file, os.fstat(file).st_size, 0).decode() for file in (output, errors))
    finally:
        os.close(output)
        os.close(errors)
    if code == -signal.SIGALRM:
        raise subprocess.TimeoutExpired(process.args, timeout_s, said, complained)
    return subprocess.CompletedProcess(process.args, code, said, complained)


def _start(
    arguments: Sequence[str], output: int, errors: int, *, descriptors: int | None = None, ends_after_s: int = 0
) -> Process:
    """``ends_after_s``: an alarm ends it then; 0: none."""
    about = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "descriptors": descriptors,
        "ends_after_s": ends_after_s,
    }
    told, tells = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with tells:
        socket.send_fds(_forker(), [json.dumps(about).encode()], [output, errors, tells.fileno()])
    return Process(arguments, told)


def _forker() -> socket.socket:
    """The process that forks, started if need be. It ends with this one."""
    global _requests
    with _starting:
        if _requests is None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                number = theirs.fileno()
                command = [sys.executable, "-m", __name__, str(number)]
                process = subprocess.Popen(
                    command, pass_fds=[number], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
                )
            atexit.register(process.wait)
            atexit.register(ours.close)
            _requests = ours
        return _requests


# ---- the process that forks ----


def die_with_parent() -> None:
    """Called in a process that shall never outlive the thread that started it, also where that is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()


def _serve(requests: socket.socket) -> None:
    """Fork what is asked for, and tell the exit codes, until whoever asks has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: its starter decides
    with selectors.DefaultSelector() as selector:
        selector.register(requests, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.data is None:
                    request, files, *_ = socket.recv_fds(requests, _REQUEST_BYTES_MAX, 3)
                    if not request:
                        return
                    about = json.loads(request)
                    if about["arguments"][0] == "proxy":
                        _load_proxy()
                    gc.freeze()  # what is shared with it is not looked through by it
                    pid = os.fork()
                    if pid == 0:
                        _become(about, *files[:2])
                    for number in files[:2]:
                        os.close(number)
                    process = os.pidfd_open(pid)
                    tells = socket.socket(fileno=files[2])
                    with suppress(BrokenPipeError):
                        socket.send_fds(tells, [str(pid).encode()], [process])
                    selector.register(process, selectors.EVENT_READ, (pid, tells))
                else:
                    pid, tells = key.data
                    selector.unregister(key.fileobj)
                    os.close(key.fd)
                    with suppress(BrokenPipeError), tells:
                        tells.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())


def _become(about: dict[str, Any], output: int, errors: int) -> NoReturn:
    """Be the command that is asked for, and end with it."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.alarm(about["ends_after_s"])
    os.dup2(output, 1)
    os.dup2(errors, 2)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    if about["descriptors"] is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (about["descriptors"], about["descriptors"]))
    os.environ.clear()
    os.environ.update(about["environment"])
    os.chdir(about["directory"])
    sys.argv = ["isthmus", *about["arguments"]]
    code = 1
    try:
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


@cache
def _load_proxy() -> None:
    """Load what each proxy loads when it starts: plugins, and the schemas of what it routes."""
    process = importlib.import_module("isthmus.process")
    for plugin in entry_points(group=process.PLUGIN_ENTRY_POINTS):
        plugin.load()
    importlib.import_module("isthmus.session.dispatch").compile_routes((), None)
    importlib.import_module("pydantic.v1")  # the admin listener's, when it makes its routes


def _load() -> None:
    """Load all commands, and what they load when they run: one of them does, in vain."""
    for module in OWN.values():
        importlib.import_module(module)
    sys.argv = ["isthmus", "link", "list", "--url", _NOBODYS_URL]
    with redirect_stderr(io.StringIO()), suppress(SystemExit):
        main()


if __name__ == "__main__":
    its_requests = socket.socket(fileno=int(sys.argv[1]))
    _load()
    _serve(its_requests)
