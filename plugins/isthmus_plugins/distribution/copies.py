"""What a distributor produces of a batch that it has read."""

from __future__ import annotations

from typing import NamedTuple

from isthmus_plugins.distribution.copy_flags import FlagsError, read_flags, write_flags
from isthmus_plugins.distribution.positions import Course
from isthmus_protocol.record_headers import Values, rewrite_header
from isthmus_protocol.records import Frame, read_header


class Refused(NamedTuple):
    """Messages that stay on this cluster."""

    reason: str
    first_offset: int
    messages: int


class Copies(NamedTuple):
    batches: list[bytes]
    """For the target, of no producer and at base offset 0; none where there is nothing to do."""
    refused: list[Refused]


def copies(batch: Frame, header: bytes, course: Course, level: int, *, from_offset: int = 0) -> Copies:
    """The records of one whole batch from ``from_offset`` on that are passed on, with their flags.

    A message whose flags cannot be read is not passed on: nobody knows where it has been. Raises MalformedBatch,
    UnsupportedBatch, BatchTooLarge.
    """
    first_offset = read_header(batch).base_offset  # what is filled ends with a batch
    refused: dict[Values, str] = {}

    def change(values: Values) -> bytes | None:
        try:
            flags = course.flags(first_offset, _flags(values), level)
        except FlagsError as error:
            refused[values] = str(error)
            return None
        return None if flags is None else write_flags(flags)

    rewritten = rewrite_header(batch, header, change, from_offset=from_offset)
    found = rewritten.found
    return Copies(rewritten.batches, [Refused(reason, *found[values]) for values, reason in refused.items()])


def _flags(values: Values) -> int:
    if len(values) > 1:
        raise FlagsError(f"{len(values)} headers have copy flags: one has them, or none")
    return read_flags(values[0]) if values else 0
