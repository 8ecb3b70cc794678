"""What a distributor produces of batches that it has read."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

from isthmus_plugins.distribution.copy_flags import FlagsError, read_flags, write_flags
from isthmus_plugins.distribution.positions import Course
from isthmus_protocol.record_headers import HeaderRewriter, Values
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


def copies(
    batches: Iterable[Frame],
    header: bytes,
    course: Course,
    level: int,
    *,
    from_offset: int = 0,
    joined: bool = True,
) -> Copies:
    """The records of whole batches of one partition from ``from_offset`` on that are passed on, with their flags.

    Several batches become one, as offsets are not kept and large batches are cheap for everybody behind; unless they
    are not to be ``joined``, for a target that takes none as large. A message whose flags cannot be read is not passed
    on: nobody knows where it has been. Raises MalformedBatch, UnsupportedBatch, BatchTooLarge.
    """
    rewriter = HeaderRewriter(header)
    made: list[bytes] = []
    refused: list[Refused] = []
    for batch in batches:
        first_offset = read_header(batch).base_offset  # what is filled ends with a batch
        why: dict[Values, str] = {}
        change = partial(_change, course, level, first_offset, why)
        found = rewriter.add(batch, change, from_offset)
        refused += (Refused(reason, *found[values]) for values, reason in why.items())
        if not joined:
            made += rewriter.batches()
    return Copies(made + rewriter.batches(), refused)


def _change(course: Course, level: int, first_offset: int, why: dict[Values, str], values: Values) -> bytes | None:
    try:
        flags = course.flags(first_offset, _flags(values), level)
    except FlagsError as error:
        why[values] = str(error)
        return None
    return None if flags is None else write_flags(flags)


def _flags(values: Values) -> int:
    if len(values) > 1:
        raise FlagsError(f"{len(values)} headers have copy flags: one has them, or none")
    return read_flags(values[0]) if values else 0
