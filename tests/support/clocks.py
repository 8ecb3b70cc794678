"""Proxies whose wall clock is apart from the machine's. What they measure takes as long as before.

Brokers keep the machine's: a JVM that libfaketime is loaded into needs a minute to start. What brokers tell by their
clocks are the times of records, which producers may give as well.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

HOUR_S: Final = 3600


def apart(seconds: int) -> dict[str, str]:
    """The environment of a proxy whose clock is so far ahead, or behind."""
    if not seconds:
        return {}
    path = os.pathsep.join(filter(None, (str(Path(__file__).parent / "clock_apart"), os.environ.get("PYTHONPATH"))))
    return {"PYTHONPATH": path, "ISTHMUS_TEST_CLOCK_S": str(seconds)}
