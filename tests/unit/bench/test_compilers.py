"""How busy the compilers of JVMs are."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from isthmus_bench.compilers import Compilers

BUSY_S = 0.2


def measured(name: str) -> float:
    """What a thread of that name used, in seconds, as it is told of this process."""
    used, ended = threading.Event(), threading.Event()

    def work() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)
        while time.thread_time() < BUSY_S:
            pass
        used.set()
        ended.wait()

    compilers, began = Compilers([os.getpid()]), time.monotonic()
    thread = threading.Thread(target=work)
    thread.start()
    used.wait()
    share = compilers.share()
    took = time.monotonic() - began
    ended.set()
    thread.join()
    return share * took


@pytest.mark.parametrize("name", ["C1 CompilerThre", "C2 CompilerThre"])
def test_threads_that_compile_count(name: str) -> None:
    assert measured(name) == pytest.approx(BUSY_S, abs=0.15)


def test_other_threads_do_not() -> None:
    assert measured("data-plane-kafk") == 0


@pytest.mark.parametrize(("name", "policy"), [("C2 CompilerThre", os.SCHED_IDLE), ("data-plane-kafk", os.SCHED_OTHER)])
def test_they_alone_give_way(name: str, policy: int) -> None:
    named, ended = threading.Event(), threading.Event()

    def work() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text(name)
        named.set()
        ended.wait()

    thread = threading.Thread(target=work)
    thread.start()
    named.wait()
    try:
        Compilers([os.getpid()]).give_way()
        assert os.sched_getscheduler(thread.native_id or 0) == policy
    finally:
        ended.set()
        thread.join()


def test_what_was_before_does_not_count_and_what_has_ended_is_no_error() -> None:
    measured("C2 CompilerThre")
    compilers = Compilers([os.getpid(), 2**22 + 1])
    assert compilers.share() == 0
