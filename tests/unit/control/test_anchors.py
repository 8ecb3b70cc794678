"""Anchors of the control log: what every proxy comes to alike, and what tells that a log is another one."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from support.seeds import seeds

from isthmus_control import anchors
from isthmus_control.anchors import (
    WINDOW,
    Anchor,
    LogFacts,
    LogRecord,
    MalformedAnchor,
    RecentRecords,
    digest,
    why_lost,
    window_start,
)

TOPIC_ID = "11111111-1111-4111-8111-111111111111"
ANCHOR = Anchor("A", TOPIC_ID, 3, 10, 7, "ab")
INTACT = LogFacts(TOPIC_ID, 3, 11, "ab", 11)


def record(offset: int, text: str = "") -> LogRecord:
    return LogRecord(offset, f"{offset}{text}".encode(), offset // 100)


def read(start: int, end: int, **changed: str) -> RecentRecords:
    recent = RecentRecords()
    for offset in range(start, end):
        recent.add(record(offset, changed.get(f"at{offset}", "")))
    return recent


@pytest.mark.parametrize("offset", [0, WINDOW - 1, WINDOW, 2 * WINDOW - 1, 2 * WINDOW, 5 * WINDOW + 17])
def test_whoever_read_the_window_comes_to_the_same_digest(offset: int) -> None:
    """Wherever reading began, and however far it went on."""
    start = window_start(offset)
    assert 0 <= offset - start < 2 * WINDOW
    assert offset - start >= min(offset, WINDOW)
    expected = digest(record(each) for each in range(start, offset + 1))
    for begun in {0, start // 2, start}:
        recent = read(begun, offset + 1)
        assert recent.digest_at(offset) == expected
        for later in range(offset + 1, offset + WINDOW):
            recent.add(record(later))
        assert recent.digest_at(offset) == expected
    if start:
        assert read(start + 1, offset + 1).digest_at(offset) is None
        assert read(start + 1, offset + 1).anchor("A", TOPIC_ID, 0) is None


@pytest.mark.parametrize("seed", seeds(10))
def test_digests_that_run_along_are_those_of_the_records(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every offset that is kept, wherever reading began; none where its window was not read from its start on."""
    monkeypatch.setattr(anchors, "WINDOW", 8)
    rng = random.Random(seed)
    values = [None if rng.random() < 0.1 else rng.randbytes(rng.randint(0, 9)) for _ in range(100)]
    records = [LogRecord(offset, value) for offset, value in enumerate(values)]
    for begun in range(0, 60, 7):
        recent = RecentRecords()
        for end in range(begun, len(records)):
            recent.add(records[end])
            for offset in range(max(begun, anchors.kept_from(end)), end + 1):
                first = window_start(offset)
                expected = digest(records[first : offset + 1]) if first >= begun else None
                # What was known once stays known for as long as the record is kept.
                assert recent.digest_at(offset) == expected
            assert recent.digest_at(end + 1) is None
            assert recent.digest_at(anchors.kept_from(end) - 1) is None


def test_any_record_of_the_window_counts() -> None:
    offset = 3 * WINDOW + 5
    start = window_start(offset)
    expected = read(0, offset + 1).digest_at(offset)
    for other in (start, offset - 1, offset):
        assert read(0, offset + 1, **{f"at{other}": "!"}).digest_at(offset) != expected
    assert read(0, offset + 1, **{f"at{start - 1}": "!"}).digest_at(offset) == expected
    assert digest([LogRecord(0, None)]) != digest([LogRecord(0, b"")])
    assert digest([LogRecord(0, b"a"), LogRecord(1, b"b")]) != digest([LogRecord(0, b"ab")])


def test_recent_records_have_no_gap_and_are_bounded() -> None:
    recent = read(0, 10)
    recent.add(record(9, "again"))
    assert recent.since(8) == [record(8), record(9)]
    with pytest.raises(ValueError, match="11 does not follow 9"):
        recent.add(record(11))
    assert len(read(0, 20 * WINDOW)._records) <= 3 * WINDOW
    assert read(5, 10).since(4) is None
    assert RecentRecords().anchor("A", TOPIC_ID, 0) is None


def test_an_anchor_is_of_the_last_record() -> None:
    recent = read(0, 151)
    found = recent.anchor("A", TOPIC_ID, 2)
    assert found == Anchor("A", TOPIC_ID, 2, 150, 1, recent.digest_at(150) or "")
    assert Anchor.decode(found.encode()) == found
    assert len(found.encode()) < 400, "metadata of committed offsets has 4096 bytes"


@pytest.mark.parametrize("text", ["", "{}", '{"cluster_id":1}', ANCHOR.encode().replace("}", ',"x":1}'), "\udcff"])
def test_what_is_no_anchor_is_said_to_be_none(text: str) -> None:
    with pytest.raises(MalformedAnchor):
        Anchor.decode(text)


def test_a_log_that_goes_on_is_the_one() -> None:
    assert why_lost(ANCHOR, INTACT, "x") is None
    assert why_lost(ANCHOR, INTACT._replace(end=900), "x") is None
    repaired = INTACT._replace(end=900, epoch_end=4)
    assert why_lost(ANCHOR, repaired, "x") is None, "the same records stand there again, written in a later epoch"
    trimmed = INTACT._replace(end=900, digest=None)
    assert why_lost(ANCHOR, trimmed, "x") is None


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (INTACT._replace(topic_id="other"), anchors.TOPIC_REPLACED),
        (INTACT._replace(end=10, digest=None), anchors.LOG_CUT),
        (INTACT._replace(end=0, digest=None, epoch_end=0), anchors.LOG_CUT),
        (INTACT._replace(digest="cd"), anchors.LOG_REWRITTEN),
        (INTACT._replace(digest=None, epoch_end=10), anchors.LOG_REWRITTEN),
        (INTACT._replace(generation=2), anchors.LOG_CUT),
    ],
)
def test_another_log_is_told_by(facts: LogFacts, reason: str) -> None:
    found = why_lost(ANCHOR, facts, "the data directory")
    assert found is not None
    assert found.reason == reason
    assert found.reason in anchors.LOST
    assert "the data directory" in str(found)
    assert "offset 10" in str(found)
    accepted = facts._replace(generation=4)
    assert why_lost(ANCHOR, accepted, "x") is None, "an operator has accepted it"


def test_of_two_anchors_the_later_generation_says_more() -> None:
    assert max((ANCHOR, replace(ANCHOR, generation=4, offset=0)), key=lambda each: each.age).generation == 4
    assert max((ANCHOR, replace(ANCHOR, offset=11)), key=lambda each: each.age).offset == 11
