"""A control log as a file: what comes out of it is what went in, and nothing damaged is taken for a log."""

from __future__ import annotations

import uuid

import pytest

from isthmus_control import commands as c
from isthmus_control import exports
from isthmus_control.anchors import WINDOW, LogRecord, RecentRecords
from isthmus_control.apply import SNAPSHOT_INTERVAL
from isthmus_control.control_state import ControlState
from isthmus_control.exports import MalformedExport, decode, export
from isthmus_control.model import ResourceType
from isthmus_control.replica import Replica, load, take

TOPIC_ID = str(uuid.UUID(int=7))


class Proxy:
    """A proxy's replica, and the records that it keeps."""

    def __init__(self, replica: Replica | None = None) -> None:
        self.replica = replica or Replica(ControlState("A"))
        self.recent = RecentRecords()

    def apply(self, count: int, body: c.Body | None = None) -> None:
        for _ in range(count):
            offset = self.replica.next_offset
            made = body or c.RenewLease("p", TOPIC_ID, -1)
            if body is None and offset % 100 == 0:
                made = c.CreateNamespace(ResourceType.TOPIC, f"n{offset}-", offset % 300 == 0)
            value = c.encode(c.Command(str(uuid.UUID(int=offset)), 1, "p", offset - 1, made))
            self.replica.feed(offset, value)
            self.recent.add(LogRecord(offset, value, 3))


@pytest.mark.parametrize("count", [1, WINDOW - 1, WINDOW, 2 * WINDOW, 3 * WINDOW + 7])
def test_an_export_leads_to_the_same_state(count: int) -> None:
    proxy = Proxy()
    proxy.apply(count)
    made = export(proxy.replica, proxy.recent, TOPIC_ID)
    assert made is not None
    found = decode(made.encode())
    assert found.replica().state == proxy.replica.state
    assert (found.end, found.cluster_id, found.topic_id, found.generation) == (count, "A", TOPIC_ID, 0)
    assert (found.snapshot is None) == (found.first == 0)
    assert found.value(count - 1) == (proxy.recent.last or LogRecord(0, None)).value
    if found.first:
        assert found.value(found.first - 1) is None
        assert found.snapshot is not None
        assert found.snapshot.as_of == found.first - 1


def test_a_proxy_that_started_from_a_snapshot_exports_as_well() -> None:
    first = Proxy()
    first.apply(2 * SNAPSHOT_INTERVAL)
    snapshot = take(first.replica.state)
    later = Proxy(Replica(load(snapshot, "A")))
    later.apply(1, snapshot)
    later.apply(1, c.AcceptLog(9))
    made = export(later.replica, later.recent, TOPIC_ID)
    assert made is not None
    found = decode(made.encode())
    assert found.replica().state == later.replica.state
    assert found.generation == 9


def test_there_is_nothing_to_export_of_an_empty_log() -> None:
    assert export(Proxy().replica, RecentRecords(), TOPIC_ID) is None


def test_what_is_damaged_is_said_to_be() -> None:
    proxy = Proxy()
    proxy.apply(SNAPSHOT_INTERVAL + 3)
    made = export(proxy.replica, proxy.recent, TOPIC_ID)
    assert made is not None
    data = made.encode()
    assert decode(data)
    for wrong in (
        b"",
        b"{}",
        b"[]",
        data[:-1],
        data.replace(b'"isthmus_control_log":1', b'"isthmus_control_log":2'),
        data.replace(b'"first":', b'"first":1'),
        data.replace(b'"cluster_id":"A"', b'"cluster_id":"A","more":1'),
        data.replace(b'"generation":0', b'"generation":1'),
        data.replace(b'"records":["', b'"records":["AAAA","'),
    ):
        assert wrong != data
        with pytest.raises(MalformedExport):
            decode(wrong)
    assert exports.VERSION == 1
