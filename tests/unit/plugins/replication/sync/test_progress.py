"""How far a partition is on its way into In-Sync."""

from __future__ import annotations

import pytest

from isthmus_control.model import SyncRecord, SyncState
from isthmus_plugins.replication.sync.progress import TRANSITIONS, Event, ImpossibleTransition, Phase, Progress


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


P, E = Phase, Event
TABLE = """
              recorded  asked      read         unread     level      reached  led_elsewhere  lost       ended
out           joining   .          .            .          .          .        .              .          out
joining       joining   asking     .            .          .          .        .              giving_up  out
asking        joining   .          catching_up  joining    .          .        .              giving_up  out
catching_up   joining   .          .            .          level      .        .              giving_up  out
level         joining   .          .            .          level      in_sync  .              giving_up  out
in_sync       joining   .          .            .          .          .        joining        leaving    out
giving_up     joining   giving_up  giving_up    giving_up  giving_up  leaving  .              giving_up  out
leaving       joining   .          .            .          .          .        giving_up      leaving    out
"""


def edges() -> list[tuple[str, str, str]]:
    head, *rows = [line.split() for line in TABLE.strip().splitlines()]
    return [(row[0], event, after) for row in rows for event, after in zip(head, row[1:], strict=True)]


def see(progress: Progress, event: Event) -> None:
    """Have a partition see an event as the confirmer tells it."""
    match event:
        case E.RECORDED:
            progress.joins(joined("one", 9), 1.0)
        case E.ASKED:
            progress.asked()
        case E.READ:
            progress.read(10, 2.0)
        case E.UNREAD:
            progress.read(None, 2.0)
        case E.LEVEL:
            progress.join_end = 10
            progress.has(10, 1)
        case E.REACHED:
            progress.reached(12)
        case E.LED_ELSEWHERE:
            progress.led_elsewhere(3.0)
        case E.LOST:
            progress.lost("gone")
        case E.ENDED:
            progress.leaves()


@pytest.mark.parametrize(("phase", "event", "after"), [each for each in edges() if each[:2] != ("out", "level")])
def test_each_edge(phase: str, event: str, after: str) -> None:
    progress = Progress(0.0, 1, phase=P[phase.upper()])
    if after == ".":
        with pytest.raises(ImpossibleTransition, match=P[phase.upper()].value):
            see(progress, E[event.upper()])
        assert progress.phase is P[phase.upper()]
        return
    see(progress, E[event.upper()])
    assert progress.phase is P[after.upper()]


def test_the_table_holds_nothing_else() -> None:
    assert len(TRANSITIONS) == sum(after != "." for _, _, after in edges())


def test_the_way_in_and_out() -> None:
    progress = Progress(0.0, 1)
    progress.has(100, 1)
    assert progress.phase is P.OUT, "whatever the other side has, nobody has recorded it"
    progress.joins(joined("one", 9), 1.0)
    assert progress.asks
    progress.asked()
    assert not progress.asks
    progress.has(100, 1)
    assert progress.phase is P.ASKING, "from where on acks are held is not known"
    progress.read(10, 2.0)
    assert (progress.floor, progress.held_at) == (10, 2.0)
    progress.has(9, 1)
    assert progress.phase is P.CATCHING_UP
    progress.has(10, 1)
    progress.reached(12)
    assert (progress.joining, progress.was_in_sync) == (12, True)
    progress.lost("nothing was confirmed")
    assert (progress.why, progress.was_in_sync) == ("nothing was confirmed", True)
    progress.leaves()
    assert (progress.why, progress.joining, progress.join_end, progress.was_in_sync) == (None, None, None, False)
