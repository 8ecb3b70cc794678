"""Acks go without a link that is Out-Of-Sync for long, where the namespaces say so (``docs/adr/0008``).

It is counted by the process that fronts the partition's leader: clocks differ, and what is recorded late
is waited for longer, never shorter.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from isthmus_control.commands import DegradeSync, PartitionSync
from isthmus_control.demands import NEVER
from isthmus_control.model import Link, SyncRecord
from isthmus_plugins.held_answers import Partition
from isthmus_plugins.replication.ack_rules import NOT_KNOWN, AckRules, Known
from isthmus_plugins.replication.leader_stream import LedPartition
from isthmus_plugins.replication.sync_progress import Progress

log = logging.getLogger("isthmus_plugins.replication")


def is_due(rules: AckRules, key: LedPartition, record: SyncRecord, progress: Progress, now: float) -> bool:
    """Whether acks are to go without a partition that is Out-Of-Sync, from now on."""
    progress.out_since = now if progress.out_since is None else progress.out_since
    after_ms = rules.demands(key.topic).degrade_after_ms
    long_enough = after_ms != NEVER and (now - progress.out_since) * 1000 >= after_ms
    return long_enough and not rules.is_degraded(key.topic, record)


def commands(
    rules: AckRules,
    link: Link,
    keys: Iterable[LedPartition],
    record_of: Callable[[str, Partition], SyncRecord | None],
    known: Known,
) -> list[DegradeSync]:
    """What is to be recorded, and applied, before such acks go out."""
    entries: dict[int, list[PartitionSync]] = {}
    for key in keys:
        record = record_of(link.name, key.place)
        if record is not None:
            entry = PartitionSync(key.topic, record.topic_id, key.partition, max(0, known.get(key, NOT_KNOWN)[1]))
            entries.setdefault(rules.demands(key.topic).degrade_after_ms, []).append(entry)
    for after_ms, of_time in entries.items():
        told = {"link": link.name, "partitions": len(of_time), "after_ms": after_ms}
        log.warning("acks go without a link that is out of sync", extra=told)
    return [DegradeSync(link.name, link.link_id, tuple(each), after_ms) for after_ms, each in entries.items()]
