"""What each record says of the log that its writer had applied, compared by whoever reads it.

From feature level 2 on an envelope has, beside ``seen``, the generation of the log that its writer had read and the
digest of the records up to ``seen``, the one that an anchor has there (:mod:`isthmus_control.anchors`). A reader that
has another one has read another log: one of them is of a log that lost its end since, or was written over.

The comparison is each reader's own and changes no state: where a log is read from a snapshot on, some of it cannot be
compared. What a writer had read of an earlier generation is settled: an operator has accepted the log as it is since.
"""

from __future__ import annotations

from typing import Final

from isthmus_control.anchors import LOG_CUT, LOG_REWRITTEN, RecentRecords
from isthmus_control.commands import Command, Prefix
from isthmus_control.control_state import ControlState
from isthmus_control.replica import Halted

CHARACTERS: Final = 32
"""So many of an anchor's digest stand in each record."""


def prefix_of(state: ControlState, recent: RecentRecords) -> Prefix:
    """Of the log up to the record that was applied last."""
    return Prefix(state.generation, (recent.digest_at(state.applied_offset) or "")[:CHARACTERS])


def why_forked(command: Command, offset: int, generation: int, recent: RecentRecords) -> Halted | None:
    """Why the log in which ``command`` stands at ``offset`` is not the one that its writer had applied; None: it is, or
    what this reader has does not tell. ``generation``: of the log there."""
    prefix = command.prefix
    if prefix is None or prefix.generation < generation:
        return None
    who = f"proxy {command.by!r}, which wrote the record at offset {offset}, had applied the log up to {command.seen}"
    if prefix.generation > generation:
        return Halted(LOG_CUT, f"the log does not have the operator's last word on it, and {who}")
    if command.seen >= offset:
        return Halted(LOG_CUT, f"the log lost its end: {who}")
    own = recent.digest_at(command.seen)
    if own is None or not prefix.digest or own.startswith(prefix.digest):
        return None
    return Halted(LOG_REWRITTEN, f"other records stand in the log than were there once: {who}, and had others")
