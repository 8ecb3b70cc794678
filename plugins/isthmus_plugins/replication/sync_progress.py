"""How far a partition of a synchronous link is on its way into In-Sync, or out of it, as one proxy knows it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

NOT_READ: Final = -1
"""In place of a log's end that is being read."""


@dataclass(slots=True)
class Progress:
    """What this proxy knows of a partition that it pushes over a synchronous link."""

    seen_at: float
    """Since when this proxy pushes it: the one before it may have granted a lease just before."""
    joining: int | None = None
    """Where the record In-Sync that is in force stands in the control log; None without one."""
    joined_at: float = 0.0
    held_at: float | None = None
    """Since when every proxy holds acks."""
    join_end: int | None = None
    """The log's end when every proxy held acks."""
    floor: int | None = None
    """From where on this proxy knows of every decision to commit in it; None: not yet."""
    level: bool = False
    in_sync: bool = False
    why: str | None = None
    """It leaves, for this. What was begun is carried through: a record may have been made whose answer was lost."""
    lost_at: float | None = None
    """Since when there is no stream."""
    confirmed: int = 0
    granted_at: float = float("-inf")
    retry_at: float = float("-inf")
    failed: str | None = None
    """Why it did not get In-Sync when it tried last."""
