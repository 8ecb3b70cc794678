"""What the batches of a salvage file were to the readers of the log that they were cut from.

A transaction whose marker is in the file has ended as that says. One that was open where the log was cut, or whose
marker came later, has not: its records never were a read-committed consumer's.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from isthmus_protocol.producer_ids import is_filler
from isthmus_protocol.record_codec import Marker, decode_control
from isthmus_protocol.salvage import Salvage


class Fate(StrEnum):
    """Of a batch."""

    PLAIN = "record"
    COMMITTED = "committed"
    ABORTED = "aborted"
    OPEN = "open"
    """Of a transaction that has no marker in the file."""
    MARKER = "marker"
    FILLER = "filler"
    """A link put it where its source has no record."""


CONSUMED: Final = frozenset({Fate.PLAIN, Fate.COMMITTED})
"""What read-committed consumers get."""


def fates(salvage: Salvage) -> list[Fate]:
    """What became of each batch, in the order of :meth:`Salvage.batches`.

    Raises MalformedBatch, UnsupportedBatch for a marker that cannot be read.
    """
    found: list[Fate] = []
    unfinished: dict[int, list[int]] = {}
    for number, (batch, header) in enumerate(salvage.batches()):
        if is_filler(header.producer_id):
            found.append(Fate.FILLER)
        elif header.is_control:
            found.append(Fate.MARKER)
            if header.record_count:  # else the cleaner took the marker, when nothing of its transaction was left
                committed = decode_control(batch).marker is Marker.COMMIT
                for each in unfinished.pop(header.producer_id, ()):
                    found[each] = Fate.COMMITTED if committed else Fate.ABORTED
        elif header.is_transactional:
            found.append(Fate.OPEN)
            unfinished.setdefault(header.producer_id, []).append(number)
        else:
            found.append(Fate.PLAIN)
    return found
