"""Keeps this machine's cores awake while something is measured, about as ``idle=poll`` would.

A core that nobody uses is halted; on a virtual machine its host then gives it to others, and what wakes up next runs
two to five times as long, with cold caches. Requests that come 20 ms apart meet that at every hop, and it changes from
minute to minute with what else the host does.

Where the kernel's idle governor is *haltpoll*, idle cores poll meanwhile, which is what ``idle=poll`` does: a parameter
of the kernel is set, and set back. Elsewhere each core is woken every 0.1 ms for nothing: 4 % of its time. (Tasks of
the scheduler's idle class that spin are no way: between sessions the scheduler shares time by session.)

Runs as a child (:mod:`isthmus_bench.children`), which sets back what it has set when its starter ends, however it does.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from isthmus_bench.children import Child

GOVERNOR: Final = Path("/sys/devices/system/cpu/cpuidle/current_governor")
PARAMETERS: Final = Path("/sys/module/haltpoll/parameters")
POLL_NS: Final = 1_000_000_000
"""A core that is idle for longer is halted."""
POLLING: Final = {
    "guest_halt_poll_ns": str(POLL_NS),
    "guest_halt_poll_grow_start": str(POLL_NS),
    "guest_halt_poll_allow_shrink": "N",
}
INTERVAL_S: Final = 0.0001
NICE: Final = 19
_POLL: Final = "poll"
_PR_SET_TIMERSLACK: Final = 29


def can_poll() -> bool:
    """Whether idle cores can be set to poll."""
    try:
        governor = GOVERNOR.read_text().strip()
    except OSError:
        return False
    return governor == "haltpoll" and all(os.access(PARAMETERS / name, os.W_OK) for name in POLLING)


@contextmanager
def cores_awake() -> Iterator[str]:
    """Have no core sleep for long meanwhile. How that is done."""
    with ExitStack() as stack:
        if can_poll():
            stack.enter_context(Child("isthmus_bench.awake", _POLL))
            yield "polling"
            return
        for core in sorted(os.sched_getaffinity(0)):
            stack.enter_context(Child("isthmus_bench.awake", str(core)))
        yield "woken every 0.1 ms"


def _poll() -> None:
    """Have idle cores poll until standard input ends."""
    before = {name: (PARAMETERS / name).read_text() for name in POLLING}
    try:
        for name, value in POLLING.items():
            (PARAMETERS / name).write_text(value)
        print("{}", flush=True)
        sys.stdin.read()
    finally:
        for name, value in before.items():
            (PARAMETERS / name).write_text(value)


def _end_with_starter() -> None:
    sys.stdin.read()
    os._exit(0)


def _wake(core: int) -> None:
    """Wake a core again and again, until standard input ends."""
    os.sched_setaffinity(0, {core})
    os.nice(NICE)
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    threading.Thread(target=_end_with_starter, daemon=True).start()
    print("{}", flush=True)
    while True:
        time.sleep(INTERVAL_S)


if __name__ == "__main__":
    if sys.argv[1] == _POLL:
        _poll()
    else:
        _wake(int(sys.argv[1]))
