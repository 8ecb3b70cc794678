"""The rules of synchronous links: their mode, and what is recorded of their partitions."""

from __future__ import annotations

import json
import random
import uuid
from dataclasses import replace
from typing import Any

import pytest
from support.command_log import CommandLog
from support.seeds import seeds

from isthmus_control import commands as c
from isthmus_control.clock import Hlc, Register
from isthmus_control.codec import canonical, from_json, parse
from isthmus_control.control_state import ControlState
from isthmus_control.levels import BOTH_WAYS, FROM_FIRST
from isthmus_control.model import (
    Link,
    LinkMode,
    LinkSettings,
    Reason,
    ResourceType,
    Role,
    SyncRecord,
    SyncState,
    leads_commits,
)
from isthmus_control.outcome import Accepted, Duplicate, LinkChanged, NamespaceDetached, Rejected, Rejection
from isthmus_control.outcome import SyncChanged as Changed

TOPIC, GROUP, LEADER, FOLLOWER = ResourceType.TOPIC, ResourceType.CONSUMER_GROUP, Role.LEADER, Role.FOLLOWER
SYNC, ASYNC = LinkMode.SYNCHRONOUS, LinkMode.ASYNCHRONOUS
IN, OUT = SyncState.IN_SYNC, SyncState.OUT_OF_SYNC
T_ID, U_ID, OTHER_ID = (str(uuid.UUID(int=number)) for number in (1, 2, 3))
WHY = Reason("PEER_SILENT", "nothing was heard for 10 s")


class Log(CommandLog):
    """The log of cluster A, which leads ``out-`` on link ``ab``, synchronously unless told otherwise."""

    def __init__(self, mode: LinkMode = SYNC) -> None:
        super().__init__()
        self.ok(c.CreateLink("ab", str(uuid.uuid4()), "B", True, ("b:1",)))
        self.ok(c.AttachNamespace("ab", TOPIC, "out-", "out-", LEADER, create_missing=True))
        if mode is SYNC:
            self.ok(c.AlterLink("ab", SYNC))

    @property
    def link(self) -> Link:
        return self.state.links["ab"]

    @property
    def at_ms(self) -> int:
        return 1_000 + self.state.applied_offset

    def refused(self, body: c.Body, code: Rejection, *words: str, **envelope: Any) -> None:
        before = self.state
        outcome = self.do(body, **envelope)
        assert isinstance(outcome, Rejected), outcome
        assert outcome.code is code, outcome
        assert all(word in outcome.message for word in words), outcome.message
        assert (self.state.links, self.state.sync_records) == (before.links, before.sync_records)

    def record(self, state: SyncState, *partitions: int, at: int = 5, topic: str = "out-t") -> c.RecordSync:
        entries = tuple(c.PartitionSync(topic, T_ID, partition, at) for partition in partitions or (0,))
        return c.RecordSync("ab", self.link.link_id, state, entries, None if state is IN else WHY)

    def reached(self, *partitions: int) -> c.RecordSync:
        return replace(self.record(IN, *partitions), reached=True)

    def merge(self, mode: LinkMode, wall_ms: int, node: str = "B", **config: str) -> c.MergeLink:
        written = Hlc(wall_ms, 0, node)
        settings = LinkSettings(Register(mode, written), {}, {k: Register(v, written) for k, v in config.items()})
        return c.MergeLink("ab", self.link.link_id, settings)

    def states(self) -> dict[tuple[str, int], SyncState]:
        return {key: record.state for key, record in self.state.sync_records.get("ab", {}).items()}


@pytest.fixture
def log() -> Log:
    return Log()


# --- the mode


def test_new_links_are_asynchronous_and_are_altered() -> None:
    log = Log(ASYNC)
    new = c.CreateLink("x", str(uuid.uuid4()), "B", True, ("b:1",), mode=SYNC)
    log.refused(new, Rejection.INVALID, "always in asynchronous mode")
    (changed,) = log.ok(c.AlterLink("ab", SYNC))
    assert isinstance(changed, LinkChanged)
    assert (log.link.mode, log.link.synchronous_at_offset) == (SYNC, log.state.applied_offset)
    since = log.link
    assert log.ok(c.AlterLink("ab", SYNC)) == ()
    assert log.link == since
    log.ok(c.AlterLink("ab", ASYNC))
    assert (log.link.mode, log.link.synchronous_at_offset) == (ASYNC, None)


def test_the_mode_is_merged_as_all_settings_are() -> None:
    log = Log(ASYNC)
    log.ok(c.DetachNamespace("ab", TOPIC, "out-"))
    log.ok(c.AttachNamespace("ab", TOPIC, "in-", "in-", FOLLOWER, create_missing=True))
    log.ok(log.merge(SYNC, 50_000))
    assert (log.link.mode, log.link.synchronous_at_offset) == (SYNC, log.state.applied_offset)
    assert log.ok(log.merge(ASYNC, 40_000)) == ()  # older

    log = Log()
    log.ok(log.record(IN))
    _, ended = log.ok(log.merge(ASYNC, 60_000))
    assert (ended.topic, ended.before.state, ended.after) == ("out-t", IN, None)
    assert (log.link.mode, log.link.synchronous_at_offset, log.state.sync_records) == (ASYNC, None, {})


def test_a_synchronous_link_may_lead_both_ways() -> None:
    log = Log(ASYNC)
    log.ok(c.RaiseLevel(BOTH_WAYS))
    follow = c.AttachNamespace("ab", TOPIC, "in-", "in-", FOLLOWER, create_missing=True)
    log.ok(follow)
    log.ok(c.AlterLink("ab", SYNC))
    log.ok(replace(follow, local_prefix="more-", remote_prefix="more-"))
    assert not leads_commits(log.link)
    log.ok(c.AttachNamespace("ab", GROUP, "g-", "g-", LEADER, create_missing=True))
    assert leads_commits(log.link)


def test_before_that_it_goes_from_the_cluster_that_made_it_synchronous_to_the_other_one() -> None:
    log = Log(ASYNC)
    follow = c.AttachNamespace("ab", TOPIC, "in-", "in-", FOLLOWER, create_missing=True)
    log.refused(log.merge(SYNC, 50_000), Rejection.CONFLICT, "'out-'", "one direction")
    log.ok(follow)
    log.refused(c.AlterLink("ab", SYNC), Rejection.CONFLICT, "'in-'", "one direction")
    log.ok(c.DetachNamespace("ab", TOPIC, "in-"))
    log.ok(c.AlterLink("ab", SYNC))
    log.refused(follow, Rejection.CONFLICT, "'in-'", "one direction")
    log.ok(replace(follow, type=GROUP))
    log.ok(replace(follow, local_prefix="more-", remote_prefix="more-", role=LEADER))


def test_informational_namespaces_are_in_no_synchronous_link() -> None:
    log = Log(ASYNC)
    log.ok(c.CreateNamespace(TOPIC, "info-", informational=True))
    attach = c.AttachNamespace("ab", TOPIC, "info-", "info-", LEADER)
    log.ok(c.DetachNamespace("ab", TOPIC, "out-"))
    log.ok(attach)
    log.refused(c.AlterLink("ab", SYNC), Rejection.CONFLICT, "'info-'", "informational")
    # Also where the other side says so: nothing of it is taken, so that somebody looks.
    other = {"follower.replication.factor": "2"}
    log.refused(log.merge(SYNC, 50_000, **other), Rejection.CONFLICT, "'info-'", "informational")
    log.ok(log.merge(ASYNC, 50_000, **other))
    log.ok(c.DetachNamespace("ab", TOPIC, "info-"))
    log.ok(c.AlterLink("ab", SYNC))
    log.refused(attach, Rejection.CONFLICT, "informational")


def test_how_long_an_ack_may_wait_is_a_setting() -> None:
    log = Log()
    assert log.link.sync_confirm_timeout_ms == 10_000
    for wrong in ("", "0", "1999", "-5000", "5e3", "10000000", "2000 "):
        log.refused(c.AlterLink("ab", config={"sync.confirm.timeout.ms": wrong}), Rejection.INVALID, "from 2000")
    log.ok(c.AlterLink("ab", config={"sync.confirm.timeout.ms": "2000"}))
    assert log.link.sync_confirm_timeout_ms == 2_000


# --- what is recorded


def test_in_sync_and_out_of_it(log: Log) -> None:
    first, second = log.ok(log.record(IN, 0, 1))
    at = log.state.applied_offset
    assert first == Changed("ab", "out-t", 0, None, SyncRecord(T_ID, IN, 5, 999 + at, None, at, reached=False))
    assert (second.partition, second.before) == (1, None)
    assert log.state.sync_record("ab", "out-t", T_ID, 0) == first.after
    assert log.state.sync_record("ab", "out-t", U_ID, 0) is None
    assert log.state.sync_record("ab", "out-t", T_ID, 2) is None
    assert log.state.sync_record("ac", "out-t", T_ID, 0) is None

    (reached,) = log.ok(log.reached(1))
    assert (reached.before, reached.after.reached) == (second.after, True)
    assert log.ok(log.reached(1)) == ()
    assert log.ok(log.record(IN, 1)) == ()  # what was reached is not taken back
    (out,) = log.ok(log.record(OUT, 1, at=90))
    assert (out.before, out.after.since_offset, out.after.reason) == (reached.after, 90, WHY)
    assert log.states() == {("out-t", 0): IN, ("out-t", 1): OUT}
    (again,) = log.ok(log.record(IN, 0, 1, at=120))  # of many, those that change
    assert (again.partition, again.after.since_offset, again.after.reason) == (1, 120, None)


def test_one_that_never_reached_in_sync_gets_syncing_again(log: Log) -> None:
    log.ok(log.record(IN, 0, 1))
    log.ok(log.reached(1))
    failed, left = log.ok(log.record(OUT, 0, 1))
    assert (failed.partition, failed.before.reached, failed.after) == (0, False, None)
    assert (left.partition, left.after.state) == (1, OUT)
    log.refused(log.record(OUT, 0), Rejection.CONFLICT, "out-t-0", "Syncing")


def test_one_that_was_in_sync_stays_out_of_sync_however_often_it_tries(log: Log) -> None:
    log.ok(log.record(IN))
    log.ok(log.reached())
    for _ in range(3):
        log.ok(log.record(OUT))
        assert log.states() == {("out-t", 0): OUT}
        (tried,) = log.ok(log.record(IN))
        assert tried.after.reached


def test_what_was_reached_is_said_of_what_is_held_and_by_who_has_seen_it(log: Log) -> None:
    log.refused(log.reached(), Rejection.CONFLICT, "out-t-0", "Syncing")
    log.refused(replace(log.record(OUT), reached=True), Rejection.INVALID, "has not reached")
    log.ok(log.record(IN))
    at = log.state.applied_offset
    log.refused(log.reached(), Rejection.CONFLICT, f"offset {at}", seen=at - 1)
    log.ok(log.reached(), seen=at)
    # Who led before and has not seen it cannot make it Syncing again, nor Out-Of-Sync.
    log.refused(log.record(OUT), Rejection.CONFLICT, "had not seen", seen=at)
    log.ok(log.record(OUT))
    log.refused(log.reached(), Rejection.CONFLICT, "out-t-0", "acks are not held")


def test_the_same_again_keeps_since_when_it_was(log: Log) -> None:
    log.ok(log.record(IN))
    log.ok(log.reached())
    log.ok(log.record(OUT, at=9))
    before = log.state.sync_records
    assert log.ok(log.record(OUT, at=70)) == ()
    assert log.ok(replace(log.record(OUT, at=70), reason=Reason("CONNECTION_LOST", "gone")), seen=0) == ()
    assert log.state.sync_records == before


def test_one_that_is_new_is_in_sync_from_its_first_record_and_out_of_sync_after_that(log: Log) -> None:
    log.ok(c.RaiseLevel(FROM_FIRST))
    new = replace(log.record(IN), from_first=True)
    (first,) = log.ok(new)
    assert (first.after.state, first.after.reached, first.after.from_first) == (IN, False, True)
    assert log.ok(new) == ()  # another proxy says the same
    (out,) = log.ok(log.record(OUT))
    assert (out.after.state, out.after.reached, out.after.from_first) == (OUT, True, False)
    log.refused(new, Rejection.CONFLICT, "out-t-0", "not new")
    (again,) = log.ok(log.record(IN))
    assert (again.after.reached, again.after.from_first) == (True, False)
    log.refused(replace(log.record(OUT), from_first=True), Rejection.INVALID, "new")
    log.refused(replace(log.reached(), from_first=True), Rejection.INVALID, "new")


def test_one_that_is_new_reaches_in_sync_like_any_other(log: Log) -> None:
    log.ok(c.RaiseLevel(FROM_FIRST))
    log.ok(replace(log.record(IN), from_first=True))
    (reached,) = log.ok(log.reached())
    assert (reached.after.reached, reached.after.from_first) == (True, False)


def test_to_one_that_is_syncing_nothing_was_promised(log: Log) -> None:
    log.refused(log.record(OUT), Rejection.CONFLICT, "out-t-0", "Syncing")
    log.ok(log.record(IN))
    log.refused(log.record(OUT, 0, 1), Rejection.CONFLICT, "out-t-1", "Syncing")  # all of it or nothing


def test_another_topic_of_the_name_is_another_one(log: Log) -> None:
    log.ok(log.record(IN))
    new = replace(log.record(IN, at=0), partitions=(c.PartitionSync("out-t", U_ID, 0, 0),))
    log.refused(replace(new, state=OUT, reason=WHY), Rejection.CONFLICT, U_ID)
    log.refused(replace(new, reached=True), Rejection.CONFLICT, U_ID)
    (changed,) = log.ok(new)
    assert (changed.before.topic_id, changed.after.topic_id) == (T_ID, U_ID)
    assert log.state.sync_record("ab", "out-t", T_ID, 0) is None


def test_who_records_has_seen_what_it_changes(log: Log) -> None:
    synchronous_at = log.link.synchronous_at_offset
    assert synchronous_at is not None
    log.refused(log.record(IN), Rejection.CONFLICT, "had not seen", seen=synchronous_at - 1)
    log.ok(log.record(IN), seen=synchronous_at)
    at = log.state.applied_offset
    # A proxy that led the partition before: late, it lets go of nothing that is leased now.
    log.refused(log.record(OUT), Rejection.CONFLICT, f"offset {at}", "had not seen", seen=at - 1)
    log.ok(log.record(OUT), seen=at)
    log.ok(c.DetachNamespace("ab", TOPIC, "out-"))
    log.ok(c.AttachNamespace("ab", TOPIC, "out-", "out-", LEADER))
    log.refused(log.record(IN), Rejection.CONFLICT, "had not seen", seen=log.state.applied_offset - 1)
    log.ok(log.record(IN))


def test_a_retry_counts_once(log: Log) -> None:
    same = str(uuid.uuid4())
    log.ok(log.record(IN), id=same)
    log.ok(log.reached())
    log.ok(log.record(OUT))
    assert isinstance(log.do(log.record(IN), id=same), Duplicate)
    assert log.states() == {("out-t", 0): OUT}


def test_what_is_refused(log: Log) -> None:
    good = log.record(IN)
    (entry,) = good.partitions
    log.refused(replace(good, link="x"), Rejection.NOT_FOUND, "'x'")
    log.refused(replace(good, link_id=OTHER_ID), Rejection.CONFLICT, "created again")
    log.refused(replace(good, reason=WHY), Rejection.INVALID, "reason")
    log.refused(replace(log.record(OUT), reason=None), Rejection.INVALID, "reason")
    log.refused(replace(log.record(OUT), reason=Reason("X", "x" * 1_001)), Rejection.INVALID, "too long")
    log.refused(replace(good, partitions=()), Rejection.INVALID, "entries")
    log.refused(replace(good, partitions=(entry, entry)), Rejection.INVALID, "twice")
    for wrong in ({"topic_id": "t"}, {"partition": -1}, {"offset": -1}):
        log.refused(replace(good, partitions=(replace(entry, **wrong),)), Rejection.INVALID)  # type: ignore[arg-type]
    for topic in ("t", "__consumer_offsets"):
        log.refused(log.record(IN, topic=topic), Rejection.CONFLICT, repr(topic), "leads")
    log.ok(c.AlterLink("ab", ASYNC))
    log.refused(good, Rejection.CONFLICT, "asynchronous")


# --- where records end


def test_records_end_with_the_mode_the_namespace_and_the_link(log: Log) -> None:
    log.ok(c.AttachNamespace("ab", TOPIC, "more-", "more-", LEADER, create_missing=True))
    log.ok(c.AttachNamespace("ab", GROUP, "out-", "out-", LEADER, create_missing=True))

    def begin() -> None:
        log.ok(log.record(IN))
        log.ok(log.record(IN, topic="more-t"))

    begin()
    log.ok(c.DetachNamespace("ab", GROUP, "out-"))
    assert set(log.states()) == {("out-t", 0), ("more-t", 0)}
    detached, ended = log.ok(c.DetachNamespace("ab", TOPIC, "out-"))
    assert isinstance(detached, NamespaceDetached)
    assert (ended.topic, ended.after) == ("out-t", None)
    assert set(log.states()) == {("more-t", 0)}

    log.ok(c.AttachNamespace("ab", TOPIC, "out-", "out-", LEADER))
    begin()
    altered, *ended_all = log.ok(c.AlterLink("ab", ASYNC))
    assert isinstance(altered, LinkChanged)
    assert [change.topic for change in ended_all] == ["more-t", "out-t"]
    log.ok(c.AlterLink("ab", SYNC))
    assert log.state.sync_records == {}  # it begins anew

    begin()
    changes = log.ok(c.DeleteLink("ab"))
    assert sum(isinstance(change, Changed) for change in changes) == 2
    assert log.state.sync_records == {}


def test_the_state_goes_through_a_snapshot_and_an_older_one_has_no_records(log: Log) -> None:
    log.ok(log.record(IN, 0, 1, 10))
    log.ok(log.reached(1))
    log.ok(log.record(OUT, 1))
    assert from_json(ControlState, parse(canonical(log.state))) == log.state
    older = json.loads(canonical(log.state))
    del older["sync_records"]
    del older["links"]["ab"]["synchronous_at_offset"]
    loaded = from_json(ControlState, older)
    assert loaded.sync_records == {}
    assert loaded.links["ab"].synchronous_at_offset is None


OFFSETS = "__consumer_offsets"


def test_the_offsets_topic_is_led_with_groups(log: Log) -> None:
    log.refused(log.record(IN, topic=OFFSETS), Rejection.CONFLICT, OFFSETS)
    log.ok(c.AttachNamespace("ab", GROUP, "out-", "out-", LEADER, create_missing=True))
    log.ok(log.record(IN, 0, 1, topic=OFFSETS))
    log.ok(log.record(OUT, 1, topic=OFFSETS))
    assert log.states() == {(OFFSETS, 0): IN}  # the other one never got there


def test_who_records_committed_offsets_knows_all_groups_and_topics_that_have_them(log: Log) -> None:
    log.ok(c.AttachNamespace("ab", GROUP, "out-", "out-", LEADER, create_missing=True))
    for kind, prefix in ((GROUP, "more-"), (TOPIC, "more-")):
        seen = log.state.applied_offset
        log.ok(c.AttachNamespace("ab", kind, prefix, prefix, LEADER, create_missing=True))
        log.refused(log.record(IN, topic=OFFSETS), Rejection.CONFLICT, "had not seen", seen=seen)
    log.ok(log.record(IN, topic=OFFSETS))


def test_records_of_committed_offsets_end_with_the_last_group_namespace(log: Log) -> None:
    for prefix in ("out-", "more-"):
        log.ok(c.AttachNamespace("ab", GROUP, prefix, prefix, LEADER, create_missing=True))
    log.ok(log.record(IN, topic=OFFSETS))
    log.ok(c.DetachNamespace("ab", GROUP, "out-"))
    assert log.states() == {(OFFSETS, 0): IN}
    log.ok(c.DetachNamespace("ab", GROUP, "more-"))
    assert log.states() == {}
    for prefix in ("out-", "more-"):
        log.ok(c.AttachNamespace("ab", GROUP, prefix, prefix, LEADER))
    log.ok(log.record(IN, topic=OFFSETS))
    log.ok(c.DeleteLink("ab"))
    assert log.state.sync_records == {}


@pytest.mark.parametrize("seed", seeds(20))
def test_no_record_outlives_what_it_is_about(seed: int) -> None:
    chance = random.Random(seed)
    log = Log(chance.choice((SYNC, ASYNC)))
    link_id = log.link.link_id
    for _ in range(150):
        prefix = chance.choice(("out-", "more-"))
        entries = tuple(
            c.PartitionSync(chance.choice(("out-t", "more-t", OFFSETS)), chance.choice((T_ID, U_ID)), partition, 7)
            for partition in range(chance.randrange(1, 4))
        )
        state = chance.choice((IN, OUT))
        body: c.Body = chance.choice(
            (
                c.RecordSync("ab", link_id, state, entries, None if state is IN else WHY),
                c.RecordSync("ab", link_id, state, entries[:1], None if state is IN else WHY),
                c.RecordSync("ab", link_id, IN, entries, reached=True),
                c.RecordSync("ab", link_id, IN, entries[:1], reached=True),
                c.AlterLink("ab", chance.choice((SYNC, SYNC, ASYNC))),
                log.merge(chance.choice((SYNC, ASYNC)), chance.randrange(1_000, 1_300), chance.choice("AB")),
                c.AttachNamespace("ab", TOPIC, prefix, prefix, LEADER, create_missing=True),
                c.DetachNamespace("ab", TOPIC, prefix),
                c.AttachNamespace("ab", GROUP, prefix, prefix, LEADER, create_missing=True),
                c.DetachNamespace("ab", GROUP, prefix),
            )
        )
        before = log.state
        seen = max(0, log.state.applied_offset - chance.choice((0, 0, 0, 3)))
        outcome = log.do(body, seen=seen)
        link = log.link
        assert (link.mode is SYNC) == (link.synchronous_at_offset is not None)
        records = log.state.sync_records.get("ab", {})
        assert not records or link.mode is SYNC
        for (topic, _), record in records.items():
            assert link.leads_groups if topic == OFFSETS else any(mapping.holds(topic) for mapping in link.mappings)
            assert (record.state is OUT) == (record.reason is not None)
        changed = {
            (change.topic, change.partition): change.after
            for change in (outcome.changes if isinstance(outcome, Accepted) else ())
            if isinstance(change, Changed)
        }
        former = before.sync_records.get("ab", {})
        assert {key for key in {*former, *records} if former.get(key) != records.get(key)} == set(changed)
        if isinstance(body, c.RecordSync):
            for key, record in changed.items():
                known = former.get(key)
                assert known is None or seen >= known.at_offset
                if record is None:  # Syncing again
                    assert known is not None
                    assert not known.reached
                    continue
                same = known is not None and known.topic_id == record.topic_id
                assert record.reached == (same and (known.reached or body.reached))
                assert record.state is IN or (same and record.reached)
        assert from_json(ControlState, parse(canonical(log.state))) == log.state
