"""The unix socket of the admin listener: its file's rights say who may use it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
from pathlib import Path
from typing import NamedTuple

from isthmus_plugins.accepting import Acceptor


class UnixSocket(NamedTuple):
    path: Path
    mode: int
    """The file's permissions."""


class UnixAcceptor(Acceptor[asyncio.BaseProtocol]):
    """Accepts connections at a path."""

    def __init__(self, where: UnixSocket, *arguments: object, **more: object) -> None:
        """As :class:`~isthmus_plugins.accepting.Acceptor`, with a path in the place of host and port."""
        super().__init__(str(where.path), 0, *arguments, **more)  # type: ignore[arg-type]
        self._where = where
        self._file: tuple[int, int] | None = None
        """Device and inode of our own file."""

    async def bind(self) -> None:
        """Make the file. What a process left that was killed is replaced. Raises OSError, also where one listens."""
        path, mode = self._where
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listening.setblocking(False)
            _remove_left_behind(path)
            mask = os.umask(0o777 & ~mode)  # nobody else may open it from the moment on that it is there
            try:
                listening.bind(str(path))
            finally:
                os.umask(mask)
        except OSError as error:
            listening.close()
            raise OSError(error.errno, error.strerror, str(path)) from None
        status = path.lstat()
        self._file = status.st_dev, status.st_ino
        self._sockets.append(listening)

    async def close(self) -> None:
        """Accept no more, and remove the file, unless it is another process's by now."""
        await super().close()
        if self._file is not None:
            with contextlib.suppress(OSError):
                status = self._where.path.lstat()
                if (status.st_dev, status.st_ino) == self._file:
                    self._where.path.unlink()
            self._file = None


def _remove_left_behind(path: Path) -> None:
    """Remove a socket on which nobody listens. Any other file stays, and binding fails."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            return
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(1.0)
        try:
            asking.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
        except OSError:
            return
