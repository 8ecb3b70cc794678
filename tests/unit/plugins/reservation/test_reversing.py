"""What clients wait for while a reversal is under way, and what lets them go on: records, and no time that is over."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, cast

import pytest
from support.reservations import EVERYTHING, Process, asked, decide, request_of, started

from isthmus_control import commands as c
from isthmus_control.levels import REVERSALS
from isthmus_control.model import NamespaceKey, ResourceType, Role
from isthmus_plugins.api import NEED_MORE, Answer, Ask, Client, Close, Gate, Hold, Request, Verdict
from isthmus_plugins.reservation import ReservationPlugin, coordinators, reversing
from isthmus_plugins.tasks import Tasks
from isthmus_protocol.error_codes import (
    COORDINATOR_LOAD_IN_PROGRESS,
    INVALID_REQUEST,
    NOT_COORDINATOR,
    NOT_LEADER_OR_FOLLOWER,
    POLICY_VIOLATION,
    TOPIC_AUTHORIZATION_FAILED,
    UNKNOWN_TOPIC_ID,
)
from isthmus_protocol.messages import decode_response
from isthmus_protocol.schema import ApiKey

TOPIC, GROUP = ResourceType.TOPIC, ResourceType.CONSUMER_GROUP
ID, OWNER = str(uuid.UUID(int=2)), str(uuid.UUID(int=4))
HOLD_MS = 60_000
ANNOUNCE = c.AnnounceReversal("l", TOPIC, "a-", (NamespaceKey(GROUP, "g-"),), ID, OWNER, 1_000, HOLD_MS)
HELD = c.HoldReversal("l", ID, OWNER)
HAND_OVER = c.HandOver("l", ID, OWNER, ())
TAKE_BACK = c.TakeBack("l", ID)


class Case:
    """A cluster that leads ``a-`` topics and ``g-`` groups."""

    def __init__(self) -> None:
        self.process = Process()
        self.plugin: ReservationPlugin = started(self.process)
        self.do(c.RaiseLevel(REVERSALS), c.CreateLink("l", str(uuid.UUID(int=1)), "B", True, ("b:1",)))
        for kind, prefix in ((TOPIC, "a-"), (GROUP, "g-")):
            self.do(c.AttachNamespace("l", kind, prefix, prefix, Role.LEADER, create_missing=True))

        self._clients = Tasks("clients", self.process.supervision)

    def client(self, verdict: Awaitable[Verdict]) -> asyncio.Task[Verdict]:
        async def waits() -> Verdict:
            return await verdict

        return self._clients.start("client", waits())

    def do(self, *bodies: c.Body) -> None:
        for body in bodies:
            self.process.do(body)

    def ask(self, request: Request) -> Verdict:
        for hook in self.plugin.isthmus_request_hooks():
            if hook.api_key == request.api_key and (verdict := hook.on_request(request)) is not None:
                return verdict
        return None


async def settled(verdict: Verdict) -> Verdict:
    while isinstance(verdict, Hold | Ask):
        verdict = (
            await verdict.verdict
            if isinstance(verdict, Hold)
            else verdict.then(verdict.read(asked(verdict.frame, EVERYTHING)))
        )
    return verdict


def produce(*topics: str, version: int = 9, part: float = 1.0) -> Request:
    data = [{"name": each, "partition_data": [{"index": 0, "records": b"x" * 99}]} for each in topics]
    values = {"transactional_id": None, "acks": -1, "timeout": 1000, "topic_data": data}
    return request_of(ApiKey.PRODUCE, version, values, part)


def adds_partitions(*topics: str) -> Request:
    named = [{"name": each, "partitions": [0]} for each in topics]
    values = {"v3_and_below_transactional_id": "t", "v3_and_below_producer_id": 1, "v3_and_below_producer_epoch": 0}
    return request_of(ApiKey.ADD_PARTITIONS_TO_TXN, 3, values | {"v3_and_below_topics": named})


def adds_offsets(group: str) -> Request:
    values = {"transactional_id": "t", "producer_id": 1, "producer_epoch": 0, "group_id": group}
    return request_of(ApiKey.ADD_OFFSETS_TO_TXN, 3, values)


def commit(group: str, *topics: str | uuid.UUID) -> Request:
    """Of topics by name, or all of them by id."""
    positions = [{"partition_index": 0, "committed_offset": 5, "committed_metadata": ""}]
    values = {"group_id": group, "generation_id_or_member_epoch": 3, "member_id": "m"}
    version = 10 if any(isinstance(each, uuid.UUID) for each in topics) else 8
    field = "topic_id" if version == 10 else "name"
    named = [{field: each, "partitions": positions} for each in topics or ("a-t",)]
    return request_of(ApiKey.OFFSET_COMMIT, version, values | {"topics": named})


def codes(request: Request, verdict: Verdict) -> set[int]:
    assert isinstance(verdict, Answer)
    frame = verdict.frame if isinstance(verdict.frame, bytes) else cast(Any, verdict.frame.answer())
    answer: Any = decode_response(request.api_key, request.version, frame)[1]
    if request.api_key == ApiKey.PRODUCE:
        return {int(part.error_code) for topic in answer.responses for part in topic.partition_responses}
    if request.api_key == ApiKey.OFFSET_COMMIT:
        return {int(part.error_code) for topic in answer.topics for part in topic.partitions}
    if request.api_key == ApiKey.ADD_PARTITIONS_TO_TXN:
        topics = answer.results_by_topic_v3_and_below
        return {int(part.partition_error_code) for topic in topics for part in topic.results_by_partition}
    return {int(answer.error_code)}


def run(work: Callable[[Case], Awaitable[None]]) -> None:
    async def begun() -> None:
        await work(Case())

    asyncio.run(begun())


def test_announced_all_goes_on_but_what_adds_to_a_transaction() -> None:
    async def work(case: Case) -> None:
        case.do(ANNOUNCE)
        assert case.ask(produce("a-t")) is None
        assert case.ask(commit("g-1")) is None
        for request in (adds_partitions("a-t"), adds_offsets("g-1")):
            assert codes(request, await settled(case.ask(request))) == {COORDINATOR_LOAD_IN_PROGRESS}
        for request in (adds_partitions("other"), adds_offsets("other")):
            assert case.ask(request) is None
        case.do(TAKE_BACK)
        for request in (adds_partitions("a-t"), adds_offsets("g-1")):
            assert case.ask(request) is None

    run(work)


def test_a_held_write_goes_on_once_it_is_taken_back() -> None:
    async def work(case: Case) -> None:
        case.do(ANNOUNCE, HELD)
        assert case.ask(produce("a-t", part=0.8)) is NEED_MORE, "its records are not thrown away"
        assert case.ask(produce("other")) is None
        waits = case.client(settled(case.ask(produce("a-t"))))
        await asyncio.sleep(0.02)
        assert not waits.done()
        case.do(c.CreateNamespace(TOPIC, "c-", True))  # another reservation changes nothing
        await asyncio.sleep(0.02)
        assert not waits.done()
        case.do(TAKE_BACK)
        assert await waits is None

    run(work)


@pytest.mark.parametrize("ends", [(), (HAND_OVER,)], ids=["time over", "handed over"])
def test_a_held_write_never_goes_on_otherwise(ends: tuple[c.Body, ...]) -> None:
    async def work(case: Case) -> None:
        case.do(ANNOUNCE if ends else replace(ANNOUNCE, hold_ms=50), HELD)
        request = produce("a-t")
        waits = case.client(settled(case.ask(request)))
        await asyncio.sleep(0.02 if ends else 0.1)
        assert waits.done() or ends
        case.do(*ends)
        assert codes(request, await waits) == {INVALID_REQUEST if ends else NOT_LEADER_OR_FOLLOWER}

    run(work)


def test_without_a_lease_it_is_refused_whatever_was_recorded() -> None:
    async def work(case: Case) -> None:
        case.do(ANNOUNCE, HELD)
        waits = case.client(settled(case.ask(produce("a-t"))))
        await asyncio.sleep(0.02)
        case.process.lease_deadline = float("-inf")
        case.do(TAKE_BACK)
        assert isinstance(await waits, Answer)

    run(work)


def test_commits_are_answered_so_that_heartbeats_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reversing, "COMMITS_HELD_S", 0.1)

    async def work(case: Case) -> None:
        case.do(ANNOUNCE, HELD)
        for ends in ((), (TAKE_BACK,)):
            request = commit("g-1")
            verdict = case.ask(request)
            assert isinstance(verdict, Answer)
            assert isinstance(verdict.frame, Gate)
            opened = asyncio.Event()
            assert not verdict.frame.take(opened.set)
            case.do(*ends)
            async with asyncio.timeout(2):
                await opened.wait()
            assert codes(request, verdict) == {COORDINATOR_LOAD_IN_PROGRESS}
        assert case.ask(commit("g-1")) is None

    run(work)


def test_a_held_group_is_not_made_and_nothing_is_altered() -> None:
    case = Case()
    case.do(ANNOUNCE, HELD)
    join = request_of(
        ApiKey.JOIN_GROUP,
        5,
        {
            "group_id": "g-new",
            "session_timeout": 1,
            "rebalance_timeout": 1,
            "member_id": "",
            "protocol_type": "consumer",
            "protocols": [],
        },
    )
    assert codes(join, decide(case.plugin, join)) == {COORDINATOR_LOAD_IN_PROGRESS}
    delete = request_of(ApiKey.DELETE_TOPICS, 4, {"topic_names": ["a-t"]})
    verdict = decide(case.plugin, delete)
    assert isinstance(verdict, Answer)
    answer: Any = decode_response(ApiKey.DELETE_TOPICS, 4, cast(bytes, verdict.frame))[1]
    assert [int(each.error_code) for each in answer.responses] == [POLICY_VIOLATION]


MOVED = replace(ANNOUNCE, move_clients_ms=60_000)
"""Its clients are told to look for the other cluster."""


def test_writers_that_are_to_look_for_the_other_cluster_are_told_to_ask_who_leads() -> None:
    async def work(case: Case) -> None:
        case.process.at_ms = int(time.time() * 1000)
        case.do(MOVED, HELD)
        request = produce("a-t")
        waits = case.client(settled(case.ask(request)))
        await asyncio.sleep(0.02)
        case.do(HAND_OVER)
        assert codes(request, await waits) == {NOT_LEADER_OR_FOLLOWER}, "nobody leads yet"
        case.do(c.EndReversal("l", ID))
        for topics in (("a-t",), ("a-t", "a-u")):
            request = produce(*topics)
            assert codes(request, await settled(case.ask(request))) == {NOT_LEADER_OR_FOLLOWER}
        request = adds_partitions("a-t")
        assert codes(request, await settled(case.ask(request))) == {INVALID_REQUEST}, "it initialises there anyway"
        (move,) = case.process.state.client_moves.values()
        case.do(c.EndClientMove("l", *move.key, move.offset))
        request = produce("a-t")
        assert codes(request, await settled(case.ask(request))) == {INVALID_REQUEST}

    run(work)


def test_what_was_promoted_elsewhere_is_written_here_until_it_is_reserved() -> None:
    async def work(case: Case) -> None:
        case.process.at_ms = int(time.time() * 1000)
        case.do(c.DetachNamespace("l", TOPIC, "a-", True), c.MoveClients("l", TOPIC, "a-", "a-", 60_000))
        assert case.ask(produce("a-t")) is None
        case.do(c.AlterNamespace(TOPIC, "a-", True))
        request = produce("a-t")
        assert codes(request, await settled(case.ask(request))) == {NOT_LEADER_OR_FOLLOWER}

    run(work)


@pytest.mark.parametrize("reversed_", [True, False], ids=["reversed", "promoted elsewhere"])
def test_members_of_groups_look_for_the_coordinator_now_and_then(reversed_: bool) -> None:
    async def work(case: Case) -> None:
        case.process.at_ms = int(time.time() * 1000)
        ours, theirs = (uuid.UUID(int=number, version=4) for number in (8, 9))
        case.process.ids[ours.bytes] = case.process.known_ids[ours.bytes] = "b-t"

        async def answered(session_id: int, later_s: float, *topics: str | uuid.UUID) -> Close | set[int]:
            request = commit("g-1", *topics)
            request.client = Client(session_id, "127.0.0.1:5000", 1)
            request.now += later_s
            verdict = await settled(case.ask(request))
            if isinstance(verdict, Answer):
                return codes(request, verdict)
            return verdict if isinstance(verdict, Close) else set()

        else_ = {TOPIC_AUTHORIZATION_FAILED} if reversed_ else set()
        if reversed_:
            case.do(MOVED, HELD, HAND_OVER)
            assert await answered(1, 0) == else_, "nobody leads yet"
            case.do(c.EndReversal("l", ID))
        else:
            case.do(*(c.DetachNamespace("l", *each, True) for each in ((TOPIC, "a-"), (GROUP, "g-"))))
            assert await answered(1, 0) == else_
            case.do(c.MoveClients("l", TOPIC, "a-", "a-", 60_000))
        assert await answered(1, 0, "a-t", "b-t") == set(), "the other one is here"
        assert await answered(1, 0) == {NOT_COORDINATOR}
        assert await answered(1, 1) == else_
        assert await answered(2, 5) == {NOT_COORDINATOR}
        assert await answered(1, 10) == {NOT_COORDINATOR}
        assert await answered(2, 11) == else_
        assert await answered(3, 0, ours) == set(), "it is here"
        assert not isinstance(await answered(3, 0, ours, theirs), Close), "the other one is here"
        for later_s in (0, 1):
            assert isinstance(await answered(3, later_s, theirs), Close), "it has moved, and knows the ids there"
        assert await answered(1, 70) == else_, "it is over"
        assert await answered(3, 70, theirs) == ({UNKNOWN_TOPIC_ID} if reversed_ else set())

    run(work)


def test_so_many_connections_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinators, "CONNECTIONS_MAX", 2)

    async def work(case: Case) -> None:
        case.process.at_ms = int(time.time() * 1000)
        case.do(MOVED, HELD, HAND_OVER, c.EndReversal("l", ID))
        told = []
        for session_id in (1, 2, 3, 2, 1):
            request = commit("g-1")
            request.client = Client(session_id, "127.0.0.1:5000", 1)
            told.append(codes(request, await settled(case.ask(request))) == {NOT_COORDINATOR})
        assert told == [True, True, True, False, True]

    run(work)
