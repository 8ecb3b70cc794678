"""The process's file descriptors: how many there are, and for whom the last of them are kept.

Each connection takes one, a client's takes two. Clients are counted, and may have what is beyond a reserve. What nobody
counts, and what strangers open, is bounded as well: the kernel gives each new descriptor the lowest number that is
free, so a connection whose number stands among the last shows that all before are in use, and is turned away. These
are for what everybody depends on: connections to brokers, links that this proxy dials, operators, files.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
from typing import Final

log = logging.getLogger("isthmus.descriptors")

RESERVED_MAX: Final = 1024
"""Descriptors that are not for clients; half of the limit where that is less."""
LOOK_S: Final = 1.0


def raise_limit() -> int:
    """Raise the soft limit to the hard one, which is returned."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def _limit() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def _reserved() -> int:
    return min(RESERVED_MAX, _limit() // 2)


def clients_max() -> int:
    """For so many client connections there are descriptors, two each."""
    return (_limit() - _reserved()) // 2


def is_kept(descriptor: int) -> bool:
    """Whether it is one of the last, which are for the proxy's own connections and files."""
    return descriptor >= _limit() - _reserved() // 2


def require(count: int) -> None:
    """Raise OSError (EMFILE, ENFILE) unless there is room for so many more now."""
    opened: list[int] = []
    try:
        for _ in range(count):
            opened.append(os.open("/", os.O_RDONLY | os.O_CLOEXEC))
    finally:
        for each in opened:
            os.close(each)


def shortage() -> str | None:
    """What an operator is to be told where the last ones are in use; None: there are enough."""
    try:
        lowest = os.open("/", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        left = f"there are no file descriptors left ({error.strerror}; this process may have {_limit()})"
    else:
        os.close(lowest)
        if not is_kept(lowest):
            return None
        left = f"at least {lowest} of {_limit()} file descriptors are in use, and new clients and peers are turned away"
    fix = "raise the hard limit (LimitNOFILE= of systemd, ulimit -Hn) or lower client_listener.connections_max"
    return f"{left}: {fix}"


async def watch() -> None:
    """Log when they run short, and when that is over."""
    said = False
    while True:
        found = shortage()
        if found is not None and not said:
            log.error("file descriptors run short", extra={"detail": found})
        elif found is None and said:
            log.info("file descriptors suffice again", extra={"limit": _limit()})
        said = found is not None
        await asyncio.sleep(LOOK_S)
