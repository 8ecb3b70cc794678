"""Clients that work by themselves within their block, for tests: in a thread, or in a process that a thread reads."""

from __future__ import annotations

import subprocess
import threading
from abc import ABC, abstractmethod
from typing import Final, Self

from support.step_processes import end

LEFT_WITHIN_S: Final = 60.0
"""A client that closes may wait for its cluster."""


class ClientThread(ABC):
    """A client that works in a thread of its own."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        """It is to end."""
        self._thread = threading.Thread(target=self._run, name=type(self).__name__)

    @abstractmethod
    def _run(self) -> None:
        """Work until :attr:`ended` is set."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.ended.set()
        self._thread.join(LEFT_WITHIN_S)
        assert not self._thread.is_alive(), "a client has not ended, so what it says may not be all"


class ClientProcess(ClientThread):
    """A client in a process, with pipes, that prints lines until its input ends: ``WORD REST``.

    ``within_s``: how long it may take to end.
    """

    def __init__(self, process: subprocess.Popen[str], within_s: float) -> None:
        super().__init__()
        self._process = process
        self._within_s = within_s

    @abstractmethod
    def _note(self, word: str, rest: str) -> None:
        """It has printed a line."""

    def _run(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            word, _, rest = line.rstrip().partition(" ")
            self._note(word, rest)

    def __exit__(self, *exc_info: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("end\n")  # Java asks whether there is anything to read
        end(self._process, self._within_s)
        super().__exit__(*exc_info)
        self._process.stdout.close()
