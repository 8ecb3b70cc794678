"""Waits on standard input until the owner of embedded clusters is gone, then clears up after it.

Run as a script, by ``processes.Guard``, with nothing but the standard library. Lines: ``add DIRECTORY``,
``keep DIRECTORY`` (kill the processes, leave the files), ``drop DIRECTORY`` (it was stopped in order).
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys


def watch() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    keep: dict[str, bool] = {}
    for line in sys.stdin.buffer:
        verb, _, directory = os.fsdecode(line).rstrip("\n").partition(" ")
        if verb == "drop":
            keep.pop(directory, None)
        else:
            keep[directory] = verb == "keep"
    for directory, kept in keep.items():
        clear(directory, kept)


def clear(directory: str, kept: bool) -> None:
    """Kill everything that carries the cluster's mark, then remove its files."""
    mark = os.fsencode(f"-Disthmus.cluster={directory}")
    while found := [entry for entry in os.listdir("/proc") if entry.isdigit() and mark in _arguments(entry)]:
        for entry in found:
            pid = int(entry)
            try:
                descriptor = os.pidfd_open(pid)
            except OSError:
                continue
            try:
                if mark in _arguments(entry):
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                    select.select([descriptor], [], [], 5)  # until it is gone
            except ProcessLookupError:
                pass
            finally:
                os.close(descriptor)
    if not kept:
        shutil.rmtree(directory, ignore_errors=True)


def _arguments(entry: str) -> list[bytes]:
    try:
        with open(f"/proc/{entry}/cmdline", "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []


if __name__ == "__main__":
    watch()
