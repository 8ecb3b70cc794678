"""Keeps this machine's cores awake while something is measured, as ``idle=poll`` would.

A core that nobody uses is halted; on a virtual machine its host then gives it to others, and what wakes up next runs
three times as long, with cold caches. Requests that come 20 ms apart meet that at every hop, and it changes from minute
to minute with what else the host does. A task of the scheduler's idle class on each core takes only time that
nobody else wants, and makes way at once.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from isthmus_bench.children import Child


@contextmanager
def cores_awake() -> Iterator[None]:
    """Have no core sleep meanwhile."""
    with ExitStack() as stack:
        for core in sorted(os.sched_getaffinity(0)):
            stack.enter_context(Child("isthmus_bench.awake", str(core)))
        yield


def _end_with_starter() -> None:
    sys.stdin.read()
    os._exit(0)


def main() -> None:
    """Spin on one core, until standard input ends."""
    os.sched_setaffinity(0, {int(sys.argv[1])})
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    threading.Thread(target=_end_with_starter, daemon=True).start()
    print("{}", flush=True)
    while True:
        pass


if __name__ == "__main__":
    main()
