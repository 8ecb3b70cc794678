"""How far a partition is on its way into In-Sync."""

from __future__ import annotations

from isthmus_control.model import SyncRecord, SyncState
from isthmus_plugins.replication.sync.progress import Progress


def joined(topic_id: str, at_offset: int) -> SyncRecord:
    return SyncRecord(topic_id, SyncState.IN_SYNC, 0, 0, None, at_offset)


def test_who_joins_again_has_its_floor_but_not_that_of_another_topic_nor_of_before_it_was_suspended() -> None:
    progress = Progress(0.0, 1)
    progress.joins(joined("one", 5), 1.0)
    assert progress.floor is None
    progress.floor = 100
    progress.joins(joined("one", 6), 2.0)
    assert progress.floor == 100
    progress.joins(joined("another", 7), 3.0)
    assert progress.floor is None, "its records begin at 0 again"
    progress.floor, progress.suspended = 3, True
    progress.joins(joined("another", 8), 4.0)
    assert (progress.floor, progress.suspended) == (None, False)
    assert (progress.joining, progress.joined_at) == (8, 4.0)


def test_under_another_leader_epoch_it_is_seen_anew() -> None:
    progress = Progress(0.0, 1)
    progress.leader_moved(1, 5.0)
    assert progress.promised_at == 0.0
    progress.leader_moved(3, 6.0)
    assert progress.promised_at == 6.0
