"""Acks go without a link that is Out-Of-Sync for long, where the namespaces say so (``docs/adr/0008``).

It is counted by the process that fronts the partition's leader: clocks differ, and what is recorded late
is waited for longer, never shorter.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from isthmus_control.commands import DegradeSync, PartitionSync
from isthmus_control.demands import NEVER
from isthmus_control.model import Link, SyncRecord
from isthmus_plugins.cluster import TopicPartition
from isthmus_plugins.replication.partitions import LinkPartition
from isthmus_plugins.replication.sync.progress import Progress
from isthmus_plugins.replication.sync.quorums import NOT_KNOWN, Known, Quorums

log = logging.getLogger("isthmus_plugins.replication")


def due_after_ms(
    quorums: Quorums, key: LinkPartition, record: SyncRecord, progress: Progress, now: float
) -> int | None:
    """After which time acks are to go without a partition that is Out-Of-Sync, from now on; None: not for now.

    Groups of one partition of the offsets topic may ask for several times: the longest that is over counts for all.
    """
    progress.out_since = now if progress.out_since is None else progress.out_since
    asked = {demands.degrade_after_ms for demands in quorums.asked(key).values()} - {NEVER}
    over = max((after_ms for after_ms in asked if (now - progress.out_since) * 1000 >= after_ms), default=NEVER)
    known = record.degraded.after_ms if record.degraded is not None else NEVER
    return over if over > known else None


def commands(
    link: Link,
    due: Mapping[LinkPartition, int],
    record_of: Callable[[str, TopicPartition], SyncRecord | None],
    known: Known,
) -> list[DegradeSync]:
    """What is to be recorded, and applied, before such acks go out. ``due``: after which time."""
    entries: dict[int, list[PartitionSync]] = {}
    for key, after_ms in due.items():
        record = record_of(link.name, key.place)
        if record is not None:
            entry = PartitionSync(key.topic, record.topic_id, key.partition, max(0, known.get(key, NOT_KNOWN)[1]))
            entries.setdefault(after_ms, []).append(entry)
    for after_ms, of_time in entries.items():
        extra = {"link": link.name, "partitions": len(of_time), "after_ms": after_ms}
        log.warning("acks go without a link that is out of sync", extra=extra)
    return [DegradeSync(link.name, link.link_id, tuple(each), after_ms) for after_ms, each in entries.items()]
