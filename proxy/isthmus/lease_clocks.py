"""Notices time that a proxy's clock does not count: its VM was paused, and the wall clock was set right since.

A lease is counted on a clock that stands still meanwhile, while other proxies see it run out. (Where the machine was
suspended, that clock has gone on: see :mod:`isthmus_plugins.clock`.) Until the wall clock is set right no clock of a
guest shows it: see docs/operations.md.
"""

from __future__ import annotations

from typing import NamedTuple

from isthmus_plugins.clock import monotonic, time


class Clocks(NamedTuple):
    """A moment on two clocks, in seconds."""

    monotonic: float
    wall: float


def now() -> Clocks:
    return Clocks(monotonic(), time())


def ran_ahead_s(since: Clocks, moment: Clocks) -> float:
    """How much further the wall clock has run; one that was set back has not."""
    return max(0.0, moment.wall - since.wall - (moment.monotonic - since.monotonic))
