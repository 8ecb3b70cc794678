"""Has the test's own process run out of file descriptors."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator

LIMIT = 256


@contextlib.contextmanager
def limited(limit: int = LIMIT) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextlib.contextmanager
def few_left(room: int) -> Iterator[list[int]]:
    """There is room for so many more descriptors, the last ones. Yields those that are held: whoever closes some takes
    them out."""
    with limited():
        held: list[int] = []
        try:
            with contextlib.suppress(OSError):
                while True:
                    held.append(os.open("/", os.O_RDONLY))
            for _ in range(room):
                os.close(held.pop())
            yield held
        finally:
            for each in held:
                os.close(each)


def open_now() -> int:
    """How many this process has."""
    return len(os.listdir("/proc/self/fd"))
