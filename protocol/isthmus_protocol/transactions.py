"""Whose transactions were aborted, in a read_committed Fetch answer (KIP-98)."""

from __future__ import annotations

from collections.abc import Iterable

from isthmus_protocol.records import BatchHeader


class AbortedTransactions:
    """Distinguishes batches of aborted transactions from others, for one partition of one Fetch answer.

    The answer lists each aborted transaction that overlaps its records by producer id and first offset; it ends with
    the producer's next marker.
    """

    __slots__ = ("_aborting", "_later")

    def __init__(self, listed: Iterable[tuple[int, int]]) -> None:
        self._later = sorted(listed, key=lambda transaction: transaction[1], reverse=True)
        self._aborting: set[int] = set()

    def hold(self, header: BatchHeader) -> bool:
        """Whether a batch is part of an aborted transaction. To be asked for each batch of the answer, in order."""
        while self._later and self._later[-1][1] <= header.last_offset:
            self._aborting.add(self._later.pop()[0])
        if header.is_control:
            self._aborting.discard(header.producer_id)
            return False
        return header.is_transactional and header.producer_id in self._aborting
