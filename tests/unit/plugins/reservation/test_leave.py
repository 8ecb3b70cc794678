"""The leave that the reservation plugin gives: it saves asking again, and ends with what it rested on."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from support.loop_time import overtaken
from support.reservations import settled

from isthmus_control.control_state import ControlState
from isthmus_control.model import Namespace, NamespaceKey, ResourceType
from isthmus_plugins.api import Answer, Client, Request
from isthmus_plugins.clock import monotonic
from isthmus_plugins.reservation import LEAVE_S, ReservationPlugin
from isthmus_plugins.tasks import Supervision
from isthmus_protocol.messages import build_request, encode_request
from isthmus_protocol.schema import ApiKey

VERSION = 9


def produce(*topics: str, now: float) -> Request:
    data = [{"name": name, "partition_data": [{"index": 0, "records": b"r"}]} for name in topics]
    payload = build_request(ApiKey.PRODUCE, VERSION, {"acks": -1, "timeout": 1000, "topic_data": data})
    frame = encode_request(payload, 1, "client")
    return Request(frame, True, ApiKey.PRODUCE, VERSION, 1, now, Client(1, "", 1))


class Process:
    """A process whose lease and control state are set by the test."""

    def __init__(self) -> None:
        self.now = monotonic()
        self.plugin = ReservationPlugin()
        self.control: Any = SimpleNamespace(state=ControlState("A"), subscribe=self._subscribe)
        context: Any = SimpleNamespace(
            control=self.control,
            lease_deadline=self.now + 10,
            known_topic_name=None,
            internal_topic_ids=(),
            supervision=Supervision(),
        )
        self.context = context
        self.plugin.isthmus_start(context)

    def _subscribe(self, changed: Any) -> None:
        self.changed = changed

    def reserve(self, prefix: str) -> None:
        key = NamespaceKey(ResourceType.TOPIC, prefix)
        namespace = Namespace(ResourceType.TOPIC, prefix, 0, reserved=True, reserved_reason="because")
        self.control.state = self.control.state.evolve(namespaces={key: namespace})
        self.changed(self.control.state)

    def ask(self, *topics: str) -> Request:
        request = produce(*topics, now=self.now)
        self.verdict = settled(self.plugin.on_produce(request))
        return request


@pytest.fixture
def process() -> Process:
    return Process()


def test_a_request_for_one_topic_that_may_be_written_gets_leave_while_the_lease_runs(process: Process) -> None:
    process.ask("t")
    for topic in ("t", "u"):
        leave = process.ask(topic, topic).leave
        assert leave is None, "two topics"
        process.ask(topic)
        leave = process.ask(topic).leave
        assert leave is not None
        assert leave.until == process.now + LEAVE_S
    process.now = process.context.lease_deadline - LEAVE_S / 2
    process.ask("t")
    leave = process.ask("t").leave
    assert leave is not None
    assert leave.until == process.context.lease_deadline


def test_a_lease_that_is_lost_before_it_runs_out_is_noticed(process: Process) -> None:
    """The wall clock says that the machine stood still."""
    process.ask("t")
    leave = process.ask("t").leave
    process.context.lease_deadline = float("-inf")
    process.now += LEAVE_S + 0.01
    assert leave is not None
    assert leave.until < process.now
    process.ask("t")
    assert isinstance(process.verdict, Answer), "nobody vouches for it"


def test_what_is_refused_gets_none(process: Process) -> None:
    process.reserve("closed-")
    assert process.ask("closed-t").leave is None
    assert isinstance(process.verdict, Answer)


def test_a_new_reservation_ends_it_at_once(process: Process) -> None:
    process.ask("t")
    before = process.ask("t").leave
    assert before is not None
    process.reserve("t")
    assert before.until == float("-inf")
    assert process.ask("t").leave is None
    assert isinstance(process.verdict, Answer)
    process.reserve("other")
    process.ask("t")
    after = process.ask("t").leave
    assert after is not None
    assert after is not before


def test_it_ends_with_the_lease_and_goes_on_with_a_longer_one(process: Process) -> None:
    process.ask("t")
    leave = process.ask("t").leave
    assert leave is not None
    process.now += 11
    assert process.now > leave.until
    process.ask("t")
    assert isinstance(process.verdict, Answer), "nobody vouches for it"
    process.context.lease_deadline = process.now + 10
    assert process.ask("t").leave is leave
    assert leave.until == process.now + LEAVE_S


def test_what_the_thread_found_writable_is_not_remembered_when_it_is_reserved_by_then(process: Process) -> None:
    request = produce("t", "to", now=process.now)
    request.aside = True
    verdict = asyncio.run(overtaken(lambda: process.plugin.on_produce(request), lambda: process.reserve("t")))
    assert verdict is None, "a fence has it decided anew"
    process.ask("t", "to")
    assert isinstance(process.verdict, Answer)


def test_the_thread_gives_no_leave_and_asks_for_the_lease_itself(process: Process) -> None:
    request = produce("t", now=process.now)
    request.aside = True
    assert process.plugin.on_produce(request) is None
    leave = process.ask("t").leave
    process.context.lease_deadline = process.now - 1
    assert isinstance(settled(process.plugin.on_produce(request)), Answer)
    assert leave is not None
    assert leave.until == process.now + LEAVE_S
