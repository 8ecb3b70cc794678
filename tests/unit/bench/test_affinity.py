"""Which cores the sites of a benchmark have."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from isthmus_bench import affinity


@pytest.mark.parametrize(
    ("cores", "sites"),
    [
        ({3}, ({3}, {3})),
        ({0, 1}, ({0}, {1})),
        ({0, 2, 5}, ({0}, {2, 5})),
        ({4, 5, 6, 7}, ({4, 5}, {6, 7})),
    ],
)
def test_each_site_has_half_of_the_cores(
    cores: set[int], sites: tuple[set[int], set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores)
    assert affinity.two_sites() == sites


def test_what_is_started_meanwhile_runs_there() -> None:
    before = os.sched_getaffinity(0)
    chosen = {max(before)}
    with affinity.started_on(chosen):
        ask = [sys.executable, "-S", "-c", "import os; print(*os.sched_getaffinity(0))"]
        assert {int(each) for each in subprocess.run(ask, capture_output=True, check=True).stdout.split()} == chosen
    assert os.sched_getaffinity(0) == before


def test_all_threads_of_a_process_are_moved() -> None:
    threads = (
        "import sys, threading\n"
        "for _ in range(2): threading.Thread(target=sys.stdin.read, daemon=True).start()\n"
        "print(flush=True); threading.Event().wait(60)"
    )
    chosen = {max(os.sched_getaffinity(0))}
    with subprocess.Popen(
        [sys.executable, "-S", "-c", threads], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        affinity.run_on(chosen, [process.pid])
        tasks = os.listdir(f"/proc/{process.pid}/task")
        assert len(tasks) == 3
        assert all(os.sched_getaffinity(int(each)) == chosen for each in tasks)
        process.kill()
