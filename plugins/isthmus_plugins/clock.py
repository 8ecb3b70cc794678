"""The clock of a proxy. In the place of the module :mod:`time`, wherever something waits, or runs out.

``monotonic`` goes on while the machine is suspended (CLOCK_BOOTTIME), unlike :func:`time.monotonic`: others see a lease
run out meanwhile, and whoever held it must know as soon as it wakes. What no clock of a guest counts (a VM that was
paused) shows when its wall clock is set right.
"""

from __future__ import annotations

from functools import partial
from time import CLOCK_BOOTTIME, clock_gettime, time

__all__ = ["monotonic", "time"]

monotonic = partial(clock_gettime, CLOCK_BOOTTIME)
"""Seconds that never go back, from a beginning that means nothing."""
