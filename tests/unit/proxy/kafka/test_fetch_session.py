"""Fetch sessions: what travels, and what is asked for when the broker has forgotten."""

from __future__ import annotations

from isthmus.kafka.fetch_session import FetchSession
from isthmus_plugins.cluster import FetchPartition

TOPIC, OTHER = b"t" * 16, b"o" * 16


def wanted(*partitions: FetchPartition) -> dict[tuple[bytes, int], FetchPartition]:
    return {(each.topic_id, each.partition): each for each in partitions}


FIRST, SECOND, THIRD = (
    FetchPartition(TOPIC, 0, 5, 100),
    FetchPartition(TOPIC, 1, 7, 100),
    FetchPartition(OTHER, 0, 0, 1),
)


def test_only_what_changes_travels() -> None:
    session = FetchSession()
    assert session.request(wanted(FIRST, SECOND, THIRD)) == (0, 0, {TOPIC: [FIRST, SECOND], OTHER: [THIRD]}, {})
    session.answered(42)
    assert session.request(wanted(FIRST, SECOND, THIRD)) == (42, 1, {}, {})
    session.answered(42)
    moved = SECOND._replace(offset=9)
    assert session.request(wanted(FIRST, moved)) == (42, 2, {TOPIC: [moved]}, {OTHER: [0]})
    session.answered(42)
    assert session.request(wanted(moved, THIRD)) == (42, 3, {OTHER: [THIRD]}, {TOPIC: [0]})


def test_a_session_that_the_broker_forgot_is_begun_again() -> None:
    session = FetchSession()
    session.request(wanted(FIRST))
    session.answered(42)
    session.request(wanted(FIRST))
    session.forget()
    assert session.request(wanted(FIRST)) == (42, 0, {TOPIC: [FIRST]}, {})  # in the place of the old one
    session.answered(43)
    assert session.request(wanted(FIRST)) == (43, 1, {}, {})


def test_a_broker_that_keeps_no_session_is_asked_for_everything() -> None:
    session = FetchSession()
    for _ in range(3):
        assert session.request(wanted(FIRST)) == (0, 0, {TOPIC: [FIRST]}, {})
        session.answered(0)


def test_epochs_begin_again_after_the_last_one() -> None:
    session = FetchSession()
    session.request(wanted(FIRST))
    session.answered(42)
    session._epoch = 2**31 - 1
    session.request(wanted(FIRST))
    session.answered(42)
    assert session.request(wanted(FIRST)).epoch == 1
