"""Verification of copies of offsets topics that are redacted or encrypted: their ends, and how many records they have.

Record by record they cannot be compared: what is left out is not for the other side to know, and what is encrypted is
not equal. So each side counts the latest records of its keys: the source those of groups that leave it, the target all
that its copy has. A copy that was made in several forms or with several keys may have more, and never fewer.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Final

from isthmus_control.model import NamespaceMapping, OffsetsForm, Role
from isthmus_plugins.links import OperationError
from isthmus_plugins.replication.offsets_topic.keyring import KeyringFile
from isthmus_plugins.replication.offsets_topic.leaving import OffsetsSource
from isthmus_protocol.offsets_cipher import KeyringError
from isthmus_protocol.offsets_copy import group_of
from isthmus_protocol.producer_ids import is_filler
from isthmus_protocol.record_codec import decode_records
from isthmus_protocol.records import BatchHeader

Batches = AsyncIterator[tuple[memoryview, BatchHeader, bool]]
"""(batch, header, whether its transaction was aborted), in the order of the log."""

NOTE: Final = (
    "{form}: not compared record by record; latest records of the groups that are copied: {source} at the source, "
    "{copy} in the copy"
)


def is_compared(mapping: NamespaceMapping) -> bool:
    """Whether the topics of a mapping are compared record by record."""
    return mapping.offsets is None or mapping.offsets.form is OffsetsForm.WHOLE


class OffsetsCount:
    """Counts this side's records of an offsets topic and its copy."""

    def __init__(self, keyring_file: KeyringFile) -> None:
        self._source = OffsetsSource(keyring_file)

    async def latest(self, mapping: NamespaceMapping, batches: Batches) -> int:
        """How many keys have a record that lasts, of those that leave the source (LEADER), or of all (FOLLOWER).

        Raises BatchError, OperationError.
        """
        assert mapping.offsets is not None
        try:
            treatment = self._source.treatment(mapping.offsets) if mapping.role is Role.LEADER else None
        except KeyringError as error:
            raise OperationError("KEYRING_UNUSABLE", str(error), 409) from error
        latest: dict[bytes, bool] = {}
        async for batch, header, aborted in batches:
            if aborted or header.is_control or is_filler(header.producer_id):
                continue
            for record in decode_records(batch):
                if treatment is not None:
                    group = group_of(record)
                    if group is None or treatment(group, record) is None:
                        continue
                latest[record.key or b""] = record.value is not None
        return sum(latest.values())
