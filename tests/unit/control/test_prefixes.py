"""What records say of the log that their writers had applied, and what a reader makes of it."""

from __future__ import annotations

import uuid

import pytest

from isthmus_control import anchors
from isthmus_control import commands as c
from isthmus_control.anchors import LogRecord, RecentRecords
from isthmus_control.control_state import ControlState
from isthmus_control.model import ResourceType
from isthmus_control.prefixes import CHARACTERS, prefix_of, why_forked
from isthmus_control.replica import Halted, Replica

BODY = c.CreateNamespace(ResourceType.TOPIC, "a-")


def read(*values: str) -> RecentRecords:
    recent = RecentRecords()
    for offset, value in enumerate(values):
        recent.add(LogRecord(offset, value.encode()))
    return recent


def command(seen: int, recent: RecentRecords, generation: int = 3) -> c.Command:
    prefix = prefix_of(ControlState("A", applied_offset=seen, generation=generation), recent)
    return c.Command(str(uuid.uuid4()), 1, "p", seen, BODY, prefix)


def test_a_record_of_the_same_log_fits() -> None:
    recent = read("a", "b", "c", "d")
    for seen in range(-1, 4):
        made = command(seen, recent)
        assert made.prefix is not None
        assert len(made.prefix.digest) == (CHARACTERS if seen >= 0 else 0)
        assert why_forked(made, 4, 3, recent) is None
        assert why_forked(made, 9, 3, read("a", "b", "c", "d", "e")) is None, "a late one, too"


def test_a_record_of_another_log_does_not() -> None:
    lost, kept = read("a", "b", "c", "d"), read("a", "b", "x", "y", "z", "z")
    assert why_forked(command(1, lost), 6, 3, kept) is None, "what it had seen is there still"
    for seen in (2, 3):
        found = why_forked(command(seen, lost), 6, 3, kept)
        assert found is not None
        assert found.reason == anchors.LOG_REWRITTEN
        assert f"proxy 'p', which wrote the record at offset 6, had applied the log up to {seen}" in str(found)
    cut = why_forked(command(3, lost), 3, 3, kept)
    assert cut is not None
    assert cut.reason == anchors.LOG_CUT


def test_an_operators_word_settles_what_was_before_it() -> None:
    lost, kept = read("a", "b", "c", "d"), read("a", "b", "x", "y")
    for offset in (3, 9):
        assert why_forked(command(3, lost), offset, 4, kept) is None
    later = why_forked(command(3, kept, generation=5), 4, 4, kept)
    assert later is not None
    assert later.reason == anchors.LOG_CUT
    assert "the operator's last word" in str(later)


def test_what_cannot_be_compared_is_not() -> None:
    recent = read("a", "b")
    made = command(1, recent)
    assert why_forked(c.Command(made.id, 1, "p", 1, BODY), 2, 3, read("x", "y")) is None
    assert why_forked(c.Command(made.id, 1, "p", 1, BODY, c.Prefix(3, "")), 2, 3, read("x", "y")) is None
    later = RecentRecords()
    later.add(LogRecord(anchors.WINDOW + 5, b"x"))
    assert why_forked(made, anchors.WINDOW + 6, 3, later) is None


def test_a_replica_applies_nothing_of_a_record_that_does_not_fit() -> None:
    replica = Replica(ControlState("A"))
    value = c.encode(command(-1, RecentRecords(), 0), 2)
    with pytest.raises(Halted, match="because") as caught:
        replica.feed(0, value, lambda made: Halted(anchors.LOG_REWRITTEN, "because"))
    assert caught.value.reason == anchors.LOG_REWRITTEN
    assert replica.state == ControlState("A")
    assert replica.halted is caught.value
