"""What a distributor produces of batches that it has read."""

from __future__ import annotations

from typing import NamedTuple

from isthmus_plugins.distribution.copy_flags import FlagsError, read_flags, write_flags
from isthmus_plugins.distribution.positions import Course
from isthmus_protocol.record_headers import PAYLOAD_BYTES_MAX, HeaderRewriter, Values
from isthmus_protocol.records import Frame, read_header


class Refused(NamedTuple):
    """Messages that stay on this cluster."""

    reason: str
    first_offset: int
    messages: int


class Copies:
    """The records of one partition's batches that are passed on, with their flags.

    Several batches become one, as offsets are not kept and large batches are cheap for everybody behind, of up to
    ``payload_max`` bytes before compression; ``one_batch``: no more than one is made. A message whose flags cannot be
    read is not passed on: nobody knows where it has been.
    """

    def __init__(
        self,
        header: bytes,
        course: Course,
        level: int,
        payload_max: int = PAYLOAD_BYTES_MAX,
        one_batch: bool = False,
    ) -> None:
        self._course = course
        self._level = level
        self._rewriter = HeaderRewriter(header, payload_max, one_batch)
        self.messages = 0
        """That are passed on."""
        self.refused: list[Refused] = []

    def add(self, batch: Frame, from_offset: int = 0) -> None:
        """The records of a whole batch from ``from_offset`` on, before :attr:`rest`.

        Raises MalformedBatch, UnsupportedBatch, BatchTooLarge: nothing of this can be used then.
        """
        first_offset = read_header(batch).base_offset  # what is filled ends with a batch
        why: dict[Values, str] = {}
        passed: set[Values] = set()

        def change(values: Values) -> bytes | None:
            try:
                flags = self._course.flags(first_offset, _flags(values), self._level)
            except FlagsError as error:
                why[values] = str(error)
                return None
            if flags is None:
                return None
            passed.add(values)
            return write_flags(flags)

        found = self._rewriter.add(batch, change, from_offset)
        self.refused += (Refused(reason, *found[values]) for values, reason in why.items())
        self.messages += sum(found[values].records for values in passed)

    @property
    def rest(self) -> int | None:
        """Offset of the first message that is for a second batch, where only one is made; None: all were taken."""
        return self._rewriter.rest

    def batches(self) -> list[bytes]:
        """For the target, of no producer and at base offset 0; none where nothing is passed on."""
        return self._rewriter.batches()


def _flags(values: Values) -> int:
    if len(values) > 1:
        raise FlagsError(f"{len(values)} headers have copy flags: one has them, or none")
    return read_flags(values[0]) if values else 0
