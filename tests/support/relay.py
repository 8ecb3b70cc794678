"""A TCP relay that can be cut in the middle of a frame, stalled, and slowed down, and records what clients send."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from types import TracebackType
from typing import Final, Self

CHUNK: Final = 4096
THIN_BUFFER_BYTES: Final = 64 * 1024


class Relay:
    """Listens on a port of its own, or the chosen one, and passes bytes on to ``target`` (host, port), which may be
    set later.

    ``bytes_per_s``: so much passes over each connection, in each direction, and hardly more is on its way.
    ``recording``: what clients send is kept, in ``sent``.
    """

    def __init__(
        self,
        target: tuple[str, int] | None = None,
        port: int = 0,
        bytes_per_s: int | None = None,
        host: str = "127.0.0.1",
        recording: bool = False,
    ) -> None:
        self.target = target
        self.accepted = 0
        self.sent: list[bytearray] = []
        """By connection, in the order in which they came."""
        self._recording = recording
        self._bytes_per_s = bytes_per_s
        self._server = socket.create_server((host, port))
        if bytes_per_s is not None:  # what is accepted has it from here
            self._server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, THIN_BUFFER_BYTES)
        self._lock = threading.Lock()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._left: int | None = None
        self._refusing = False
        self._stalled: set[socket.socket] = set()
        self._moved = threading.Condition()
        self.delay_s = 0.0
        """How long each chunk waits."""
        self._thread = threading.Thread(target=self._accept, name="relay", daemon=True)
        self._thread.start()

    @property
    def address(self) -> str:
        host, port = self._server.getsockname()[:2]
        return f"{host}:{port}"

    def cut_after(self, size: int | None) -> None:
        """Cut all connections when so many more bytes have passed, whatever they are a part of; None: do not."""
        with self._lock:
            self._left = size

    def cut(self, refuse: bool = False) -> None:
        """Cut all connections now; with ``refuse`` close new ones at once until ``mend``."""
        with self._lock:
            self._refusing = refuse
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for end in pair:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def stall(self, one_way: bool = False) -> None:
        """Hold what comes over the connections that there are, which stay open; new ones work.

        ``one_way``: hold what the target sends only.
        """
        with self._moved, self._lock:
            self._stalled.update(end for pair in self._pairs for end in (pair[1:] if one_way else pair))

    def release(self) -> None:
        """Deliver, late, what was held."""
        with self._moved:
            self._stalled.clear()
            self._moved.notify_all()

    def mend(self) -> None:
        with self._lock:
            self._refusing = False

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.release()
        self.cut()
        self._thread.join(5)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            try:
                downstream, _ = self._server.accept()
            except OSError:
                return
            if self._refusing or self.target is None:
                downstream.close()
                continue
            with self._lock:  # who sees the connection at the target may stall or cut it at once
                try:
                    upstream = socket.create_connection(self.target, 5)
                    upstream.settimeout(None)
                except OSError:
                    downstream.close()
                    continue
                self._pairs.append((downstream, upstream))
            self.accepted += 1
            kept = None
            if self._recording:
                self.sent.append(kept := bytearray())
            for one, other, keep in ((downstream, upstream, kept), (upstream, downstream, None)):
                threading.Thread(target=self._pump, args=(one, other, keep), name="relay-pump", daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, kept: bytearray | None) -> None:
        due_at = 0.0
        try:
            while data := source.recv(CHUNK):
                if kept is not None:
                    kept += data
                if self.delay_s:
                    time.sleep(self.delay_s)
                if self._bytes_per_s is not None:
                    now = time.monotonic()
                    due_at = max(due_at, now) + len(data) / self._bytes_per_s
                    time.sleep(due_at - now)
                with self._moved:
                    self._moved.wait_for(lambda: source not in self._stalled)
                with self._lock:
                    due = self._left is not None and self._left <= len(data)
                    if due:
                        data, self._left = data[: self._left], None
                    elif self._left is not None:
                        self._left -= len(data)
                try:
                    sink.sendall(data)
                finally:  # also where the bytes were those of a connection that the receiver has closed
                    if due:
                        self.cut()
        except OSError:
            pass
        finally:
            for end in (source, sink):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            source.close()
