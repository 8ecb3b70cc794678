"""One partition of this cluster's offsets topic, as it is read: what it adds up to."""

from __future__ import annotations

from collections import deque
from typing import Final

from isthmus_protocol.offsets_log import OffsetsLog
from isthmus_protocol.records import BatchHeader

TRANSACTIONAL_MAX: Final = 2000
"""So many batches of transactions are kept, the last ones."""


class Source:
    """One partition of the offsets topic, as far as it is read."""

    __slots__ = (
        "broker_id",
        "leader_epoch",
        "loaded",
        "log_end",
        "next_offset",
        "offsets_log",
        "partition",
        "problem",
        "retry_at",
        "transactional",
        "waiting",
    )

    def __init__(self, partition: int, broker_id: int, leader_epoch: int, offsets_log: OffsetsLog) -> None:
        self.partition = partition
        self.broker_id = broker_id
        self.leader_epoch = leader_epoch
        self.offsets_log = offsets_log
        self.next_offset = 0
        """What the log adds up to was taken up to this."""
        self.waiting: deque[tuple[bytes, BatchHeader]] = deque()
        """Batches that were read and not taken yet: the first is a commit marker whose decision is on its way."""
        self.transactional: deque[tuple[bytes, BatchHeader]] = deque(maxlen=TRANSACTIONAL_MAX)
        """The last batches of transactions that were taken, of records the header alone: before a partition is pushed
        whole, decisions that their markers carry out have to be on the other side."""
        self.log_end: int | None = None
        """Where the log ended once in this leader epoch; None: not known.

        All that was committed before is below it. That a read finds no more does not say so: reads end at the high
        watermark, which a new leader learns late.
        """
        self.loaded = False
        """Whether it has been read to its end once: before that, what it adds up to is older than what groups have."""
        self.problem: str | None = None
        """Why it cannot be read on."""
        self.retry_at = 0.0

    @property
    def read_offset(self) -> int:
        return self.waiting[-1][1].next_offset if self.waiting else self.next_offset
