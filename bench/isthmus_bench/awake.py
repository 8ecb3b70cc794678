"""Keeps this machine's cores awake while something is measured, about as ``idle=poll`` would.

A core that nobody uses is halted; on a virtual machine its host then gives it to others, and what wakes up next runs
two to five times as long, with cold caches. Requests that come 20 ms apart meet that at every hop, and it changes from
minute to minute with what else the host does. So each core is woken every 0.1 ms for nothing: 4 % of its time. (Tasks
of the scheduler's idle class that spin are no way: between sessions the scheduler shares time by session.)
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Final

from isthmus_bench.children import Child

INTERVAL_S: Final = 0.0001
NICE: Final = 19
_PR_SET_TIMERSLACK: Final = 29


@contextmanager
def cores_awake() -> Iterator[None]:
    """Have no core sleep for long meanwhile."""
    with ExitStack() as stack:
        for core in sorted(os.sched_getaffinity(0)):
            stack.enter_context(Child("isthmus_bench.awake", str(core)))
        yield


def _end_with_starter() -> None:
    sys.stdin.read()
    os._exit(0)


def main() -> None:
    """Wake one core again and again, until standard input ends."""
    os.sched_setaffinity(0, {int(sys.argv[1])})
    os.nice(NICE)
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    threading.Thread(target=_end_with_starter, daemon=True).start()
    print("{}", flush=True)
    while True:
        time.sleep(INTERVAL_S)


if __name__ == "__main__":
    main()
