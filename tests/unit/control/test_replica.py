"""A replica: records in order, snapshots, and when it must stop."""

from __future__ import annotations

import base64
import json
import uuid
import zlib
from dataclasses import replace

import pytest

from isthmus_control import commands as c
from isthmus_control import replica as r
from isthmus_control.apply import SNAPSHOT_INTERVAL
from isthmus_control.codec import canonical
from isthmus_control.control_state import ControlState
from isthmus_control.levels import KNOWN_LEVEL
from isthmus_control.model import Claim, ResourceType
from isthmus_control.outcome import Accepted, Rejected, Rejection

TOPIC = ResourceType.TOPIC


def record(body: c.Body, seen: int = -1) -> bytes:
    return c.encode(c.Command(str(uuid.uuid4()), 1, "p", seen, body))


def newest(records: list[tuple[int, bytes | None]]) -> c.Snapshot | None:
    found = (r.snapshot_in(offset, value) for offset, value in reversed(records))
    return next((each for each in found if each is not None), None)


class Log:
    def __init__(self) -> None:
        self.records: list[bytes | None] = []
        self.replica = r.Replica(ControlState("A"))

    def append(self, value: bytes | None) -> r.Applied:
        self.records.append(value)
        return self.replica.feed(len(self.records) - 1, value)

    def fill(self, until: int) -> None:
        """Append harmless commands up to and including offset ``until``."""
        while len(self.records) <= until:
            number = len(self.records)
            self.append(record(c.CreateNamespace(TOPIC, f"n{number % 50}-"), seen=number - 1))


def test_what_is_no_command_is_rejected_and_passed_over() -> None:
    log = Log()
    for junk in (b"junk", b"", None):
        applied = log.append(junk)
        assert applied.command is None
        assert isinstance(applied.outcome, Rejected)
        assert applied.outcome.code is Rejection.MALFORMED
    assert isinstance(log.append(record(c.CreateNamespace(TOPIC, "x"))).outcome, Accepted)
    assert log.replica.next_offset == 4


def test_a_newer_record_halts_for_good() -> None:
    log = Log()
    log.append(record(c.CreateNamespace(TOPIC, "x")))
    newer = json.loads(record(c.DeleteNamespace(TOPIC, "x")))
    newer["kind"] = "promote"
    with pytest.raises(r.Halted, match="upgrade this proxy") as caught:
        log.append(json.dumps(newer).encode())
    assert caught.value.reason == r.NEWER_VERSION
    assert log.replica.halted is caught.value
    assert log.replica.state.namespace(TOPIC, "x") is not None  # readable, and as it was
    with pytest.raises(r.Halted):
        log.append(record(c.DeleteNamespace(TOPIC, "x")))
    assert log.replica.due_state is None


def test_a_level_that_this_version_does_not_know_halts_and_so_does_a_snapshot_of_it() -> None:
    log = Log()
    log.append(record(c.RaiseLevel(KNOWN_LEVEL)))
    assert log.replica.halted is None
    with pytest.raises(r.Halted, match=f"level {KNOWN_LEVEL + 1}, and this version knows {KNOWN_LEVEL}") as caught:
        log.append(record(c.RaiseLevel(KNOWN_LEVEL + 1)))
    assert caught.value.reason == r.NEWER_VERSION
    assert log.replica.halted is caught.value
    raised = r.take(ControlState("A", applied_offset=SNAPSHOT_INTERVAL - 1, level=KNOWN_LEVEL))
    assert r.load(raised, "A").level == KNOWN_LEVEL
    newer = r.take(ControlState("A", applied_offset=SNAPSHOT_INTERVAL - 1, level=KNOWN_LEVEL + 1))
    with pytest.raises(r.Halted, match="upgrade this proxy") as caught:
        r.load(newer, "A")
    assert caught.value.reason == r.NEWER_VERSION


def test_a_gap_halts() -> None:
    log = Log()
    log.append(record(c.CreateNamespace(TOPIC, "x")))
    with pytest.raises(r.Halted, match="records 1 to 4 are missing") as caught:
        log.replica.feed(5, record(c.DeleteNamespace(TOPIC, "x")))
    assert caught.value.reason == r.RECORDS_MISSING
    with pytest.raises(ValueError, match="applied already"):
        r.Replica(log.replica.state).feed(0, b"")


def test_a_snapshot_is_due_taken_compared_and_loaded() -> None:
    log = Log()
    log.fill(SNAPSHOT_INTERVAL - 2)
    assert log.replica.due_state is None
    log.fill(SNAPSHOT_INTERVAL - 1)
    assert log.replica.due_state is not None
    log.fill(SNAPSHOT_INTERVAL + 20)
    due = log.replica.due_state
    assert due is not None
    snapshot = r.take(due)
    assert snapshot.as_of == SNAPSHOT_INTERVAL - 1
    assert isinstance(log.append(record(snapshot)).outcome, Accepted)
    assert log.replica.due_state is None
    assert log.append(record(snapshot)).outcome == Accepted(())  # two proxies were at it
    log.fill(SNAPSHOT_INTERVAL + 40)

    # A fresh reader that knows the tail only.
    tail_start = SNAPSHOT_INTERVAL + 10
    found = newest(list(enumerate(log.records))[tail_start:])
    assert found == snapshot
    fresh = r.Replica(r.load(found, "A"))
    assert fresh.next_offset == SNAPSHOT_INTERVAL
    for offset in range(fresh.next_offset, len(log.records)):
        fresh.feed(offset, log.records[offset])
    assert fresh.state == log.replica.state
    assert canonical(fresh.state) == canonical(log.replica.state)


def test_snapshots_of_many_topics_are_due_less_often() -> None:
    """Each costs what the state has: were they due as often as small ones, many topics would cost their square."""
    log, size = Log(), 3 * SNAPSHOT_INTERVAL
    claims = {("t", number): Claim("t", 1, 0) for number in range(size)}
    log.replica.state = log.replica.state.evolve(claims=claims)
    log.fill(size - 2)
    assert log.replica.due_state is None
    log.fill(size)
    due = log.replica.due_state
    assert due is not None
    assert due.applied_offset == size - 1
    log.append(record(r.take(due)))
    log.fill(2 * size)
    assert [state.applied_offset for state in log.replica.bases()[-2:]] == [size - 1, 2 * size - 1]


def test_a_snapshot_that_differs_halts() -> None:
    log = Log()
    log.fill(SNAPSHOT_INTERVAL)
    due = log.replica.due_state
    assert due is not None
    snapshot = r.take(due)
    other = r.take(r.load(snapshot, "A").evolve(namespaces={}))
    with pytest.raises(r.Halted, match="one of them is wrong") as caught:
        log.append(record(other))
    assert caught.value.reason == r.STATE_DIFFERS


def test_a_snapshot_out_of_place_is_rejected() -> None:
    log = Log()
    log.fill(20)
    outcome = log.append(record(r.take(log.replica.state))).outcome
    assert isinstance(outcome, Rejected)
    assert newest(list(enumerate(log.records))) is None


def test_the_newest_snapshot_wins_and_junk_is_passed_over() -> None:
    log = Log()
    for boundary in (1, 2):
        log.fill(boundary * SNAPSHOT_INTERVAL)
        due = log.replica.due_state
        assert due is not None
        snapshot = r.take(due)
        log.append(record(snapshot))
    log.append(b'{"kind":"snapshot"}')
    log.append(None)
    found = newest(list(enumerate(log.records)))
    assert found is not None
    assert found.as_of == 2 * SNAPSHOT_INTERVAL - 1
    assert newest(list(enumerate(log.records))[-2:]) is None


def test_snapshots_that_cannot_be_loaded() -> None:
    state = ControlState("A", applied_offset=SNAPSHOT_INTERVAL - 1)
    good = r.take(state)
    assert r.load(good, "A") == state
    data = json.loads(canonical(state))
    data["quota"] = 1
    newer_bytes = json.dumps(data).encode()
    newer = replace(good, state=base64.b64encode(zlib.compress(newer_bytes)).decode(), digest=r.digest(newer_bytes))
    for snapshot, cluster_id, reason in (
        (good, "B", r.OTHER_CLUSTER),
        (newer, "A", r.NEWER_VERSION),
        (replace(good, state="%%"), "A", r.SNAPSHOT_DAMAGED),
        (replace(good, state=good.state[:16]), "A", r.SNAPSHOT_DAMAGED),
        (replace(good, digest="00"), "A", r.SNAPSHOT_DAMAGED),
        (replace(good, as_of=2 * SNAPSHOT_INTERVAL - 1), "A", r.SNAPSHOT_DAMAGED),
    ):
        with pytest.raises(r.Halted) as caught:
            r.load(snapshot, cluster_id)
        assert caught.value.reason == reason
