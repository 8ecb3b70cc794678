"""The leader end's view of its own offsets topic: what of it leaves over which link, and in which form."""

from __future__ import annotations

from collections.abc import Iterator

from isthmus_control.model import OffsetsCopy, OffsetsForm
from isthmus_plugins.replication.offsets_topic.keyring import KeyringFile
from isthmus_protocol.group_names import GroupPatterns
from isthmus_protocol.offsets_copy import Treatment, treated
from isthmus_protocol.records import BatchError, BatchHeader, Frame, as_committed, whole_header


class OffsetsSource:
    """Batches of this cluster's offsets topic as they may leave it."""

    def __init__(self, keyring_file: KeyringFile) -> None:
        self._keyring_file = keyring_file

    def batches(
        self, copy: OffsetsCopy, offset: int, batches: Iterator[tuple[Frame, BatchHeader, bool]]
    ) -> tuple[bytes, int, BatchError | None]:
        """What leaves of batches, where that ends, and why it does not go further.

        ``batches``: (batch, header, whether its transaction was aborted), from ``offset`` on; no transaction of theirs
        is open. Raises KeyringError: nothing leaves.
        """
        treatment = self.treatment(copy)
        taken: list[tuple[Frame, BatchHeader, bool]] = []
        end, broken = offset, None
        try:
            for batch, header, aborted in batches:
                if header.is_transactional and not header.is_control and not aborted:
                    batch = as_committed(batch)
                    header = whole_header(batch)
                taken.append((batch, header, aborted))
                end = header.next_offset
        except BatchError as error:
            broken = error
        try:
            return b"".join(treated(taken, treatment)), end, broken
        except BatchError as error:
            return b"", offset, error

    def treatment(self, copy: OffsetsCopy) -> Treatment | None:
        """What becomes of a record on its way; None: nothing. Raises KeyringError."""
        if copy.form is OffsetsForm.WHOLE:
            return None
        if copy.form is OffsetsForm.ENCRYPTED:
            return self._keyring_file.keyring().encrypt
        groups = GroupPatterns(copy.groups)
        return lambda group, record: record if group in groups else None
