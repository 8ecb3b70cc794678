"""Loaded by every Python process that has this directory in its PYTHONPATH: sets its wall clock apart, and no other."""

import os
import time

_shift_s = int(os.environ["ISTHMUS_TEST_CLOCK_S"])
_time, _time_ns = time.time, time.time_ns
time.time = lambda: _time() + _shift_s
time.time_ns = lambda: _time_ns() + _shift_s * 10**9
