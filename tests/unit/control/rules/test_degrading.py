"""Partitions that are Out-Of-Sync for long: what is recorded before acks go without them, and how that ends."""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import Any

from support.command_log import CommandLog

from isthmus_control import commands as c
from isthmus_control.codec import canonical, from_json, parse
from isthmus_control.control_state import ControlState
from isthmus_control.demands import NEVER
from isthmus_control.model import Degraded, LinkMode, Reason, ResourceType, Role, SyncRecord, SyncState
from isthmus_control.outcome import Rejected, Rejection, SyncChanged

TOPIC = ResourceType.TOPIC
IN, OUT = SyncState.IN_SYNC, SyncState.OUT_OF_SYNC
T_ID, OTHER_ID = (str(uuid.UUID(int=number)) for number in (1, 2))
MINUTE_MS = 60_000


class Log(CommandLog):
    """The log of cluster A, which leads ``out-`` on the synchronous link ``ab``."""

    def __init__(self, after_ms: int = MINUTE_MS) -> None:
        super().__init__()
        self.link_id = str(uuid.uuid4())
        self.ok(c.CreateLink("ab", self.link_id, "B", True, ("b:1",)))
        self.ok(c.AttachNamespace("ab", TOPIC, "out-", "out-", Role.LEADER, create_missing=True))
        self.ok(c.AlterLink("ab", LinkMode.SYNCHRONOUS))
        self.ok(c.AlterDemands(TOPIC, "out-", degrade_after_ms=after_ms))

    @property
    def at_ms(self) -> int:
        return 7_000

    def refused(self, body: c.Body, words: str, **envelope: Any) -> None:
        before = self.state.sync_records
        outcome = self.do(body, **envelope)
        assert isinstance(outcome, Rejected)
        assert (outcome.code, self.state.sync_records) == (Rejection.CONFLICT, before)
        assert words in outcome.message

    def sync(self, state: SyncState, *, reached: bool = False, topic_id: str = T_ID) -> tuple[Any, ...]:
        why = None if state is IN else Reason("TIMEOUT_ERROR", "why")
        entries = (c.PartitionSync("out-t", topic_id, 0, 5),)
        return self.ok(c.RecordSync("ab", self.link_id, state, entries, why, reached))

    def out(self) -> None:
        self.sync(IN)
        self.sync(IN, reached=True)
        self.sync(OUT)

    def degrade(self, after_ms: int = MINUTE_MS, topic_id: str = T_ID) -> c.DegradeSync:
        return c.DegradeSync("ab", self.link_id, (c.PartitionSync("out-t", topic_id, 0, 9),), after_ms)

    @property
    def record(self) -> SyncRecord:
        return self.state.sync_records["ab"]["out-t", 0]


def test_it_is_recorded_who_says_so_and_since_when_and_it_ends_when_all_is_there() -> None:
    log = Log()
    log.out()
    before = log.record
    (changed,) = log.ok(log.degrade())
    assert isinstance(changed, SyncChanged)
    degraded = Degraded(MINUTE_MS, 9, 7_000, "proxy-1", log.state.applied_offset)
    assert log.record == replace(before, degraded=degraded)
    assert log.ok(log.degrade()) == ()
    assert from_json(ControlState, parse(canonical(log.state))) == log.state
    log.sync(IN)  # acks are held, to see whether it gets level
    assert log.record.degraded == degraded
    log.sync(OUT)  # it does not
    assert log.record.degraded == degraded
    log.sync(IN)
    (changed,) = log.sync(IN, reached=True)
    assert changed.before.degraded == degraded
    assert log.record.degraded is None
    assert log.sync(IN, reached=True) == ()


def test_what_is_in_sync_or_another_topic_or_was_not_seen_is_not_degraded() -> None:
    log = Log()
    log.refused(log.degrade(), "is not Out-Of-Sync")
    log.sync(IN)
    log.sync(IN, reached=True)
    log.refused(log.degrade(), "is not Out-Of-Sync")
    log.sync(OUT)
    log.refused(log.degrade(topic_id=OTHER_ID), "is not Out-Of-Sync")
    log.refused(log.degrade(), "had not seen", seen=log.record.at_offset - 1)
    log.refused(replace(log.degrade(), link_id=OTHER_ID), "deleted and created again")
    log.ok(c.AlterLink("ab", LinkMode.ASYNCHRONOUS))
    log.refused(log.degrade(), "asynchronous")


def test_it_needs_a_setting_that_says_no_longer_time() -> None:
    log = Log(NEVER)
    log.out()
    log.refused(log.degrade(), "do not let")
    log.ok(c.AlterDemands(TOPIC, "out-", degrade_after_ms=2 * MINUTE_MS))
    log.refused(log.degrade(), "do not let")
    log.ok(log.degrade(2 * MINUTE_MS))
    log.ok(c.CreateNamespace(TOPIC, "out-t"))  # which wants none of it
    log.refused(log.degrade(5 * MINUTE_MS), "do not let")
