"""``isthmus`` commands, each in a process of its own that has loaded them already: it is forked from one that has.

To load a command takes half a second of a core, to run it a tenth of that. Whoever runs hundreds pays for the first one
alone. A command gets what processes start with: arguments, environment, directory, and files for its output.
"""

from __future__ import annotations

import atexit
import importlib
import io
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import redirect_stderr, suppress
from typing import Any, Final, NoReturn

from isthmus.cli import main
from isthmus.cli.root import OWN

_REQUEST_BYTES_MAX: Final = 1 << 17
_NOBODYS_URL: Final = "http://127.0.0.1:1"
_starting: Final = threading.Lock()
_requests: socket.socket | None = None
"""To the process that forks; None: it is not there yet."""


def run(arguments: Sequence[str], timeout_s: int) -> subprocess.CompletedProcess[str]:
    """``isthmus`` with these arguments, to its end. Raises subprocess.TimeoutExpired."""
    command = ["isthmus", *arguments]
    about = {"arguments": arguments, "environment": dict(os.environ), "directory": os.getcwd(), "timeout_s": timeout_s}
    output, errors = (os.memfd_create(name) for name in ("output", "errors"))
    told, tells = os.pipe()
    try:
        try:
            socket.send_fds(_forker(), [json.dumps(about).encode()], [output, errors, tells])
        finally:
            os.close(tells)
        code = os.read(told, 16)
        said, complained = (os.pread(file, os.fstat(file).st_size, 0).decode() for file in (output, errors))
    finally:
        for file in (output, errors, told):
            os.close(file)
    if not code:
        raise ChildProcessError(f"what runs commands has ended, and so did {' '.join(command)}")
    if int(code) == -signal.SIGALRM:
        raise subprocess.TimeoutExpired(command, timeout_s, said, complained)
    return subprocess.CompletedProcess(command, int(code), said, complained)


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
                    pid = os.fork()
                    if pid == 0:
                        _become(json.loads(request), *files[:2])
                    for number in files[:2]:
                        os.close(number)
                    selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, files[2]))
                else:
                    pid, tells = key.data
                    selector.unregister(key.fileobj)
                    os.close(key.fd)
                    with suppress(BrokenPipeError), open(tells, "w") as file:
                        file.write(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))


def _become(about: dict[str, Any], output: int, errors: int) -> NoReturn:
    """Be the command that is asked for, and end with it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.alarm(about["timeout_s"])
    os.dup2(output, 1)
    os.dup2(errors, 2)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
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
