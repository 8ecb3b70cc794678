"""What a connection reads in the answer to Metadata while clients are told to look for another cluster."""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Sequence
from typing import Any

from support.fake_cluster import FakeCluster, FakeContext, FakeControl

from isthmus_control.commands import AttachNamespace, CreateLink, DetachNamespace, MoveClients
from isthmus_control.model import NamespaceKey, ResourceType, Role
from isthmus_control.outcome import Accepted
from isthmus_plugins.api import Client, Close, Gate, Replace, Request, ResponseHook
from isthmus_plugins.replication.client_views.client_moves import ClientMoves
from isthmus_plugins.replication.client_views.told_clients import MOMENT_S
from isthmus_protocol.bodies import error_code
from isthmus_protocol.error_codes import REBOOTSTRAP_REQUIRED, TOPIC_AUTHORIZATION_FAILED, UNKNOWN_TOPIC_OR_PARTITION
from isthmus_protocol.messages import build_request, build_response, decode_response, encode_request, encode_response
from isthmus_protocol.schema import ApiKey

TOPIC = ResourceType.TOPIC
KEY = NamespaceKey(TOPIC, "a-")
V = 13
A_ID = uuid.UUID(int=7, version=4)
BROKERS = [{"node_id": 1, "host": "h", "port": 9092, "rack": None}]


class Case:
    """A cluster that led ``a-`` topics, until they were promoted at the other cluster."""

    def __init__(self, *, moved: bool = True) -> None:
        rng = random.Random(1)
        self.control = FakeControl("A", rng)
        self.control.wall_ms = int(time.time() * 1000)
        self.context: Any = FakeContext(FakeCluster(rng, [1]), self.control)
        self.context.clock = self
        self.now = 100.0
        self.known: dict[bytes, str] = {}
        self.context.known_topic_name = self.known.get
        self.moves = ClientMoves(self.context)
        self.hook, self.reads = self.moves.hooks()
        self.control.subscribe(self.moves.control_changed)
        self.do(CreateLink("l", str(uuid.UUID(int=1, version=4)), "B", True, ("b:1",)))
        self.do(AttachNamespace("l", *KEY, "b-", Role.LEADER, create_missing=True))
        self.clients: dict[int, Client] = {}
        self.open(1)
        if moved:
            self.move()

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return time.time()

    def do(self, body: Any) -> None:
        outcome = self.control.apply(body)
        assert isinstance(outcome, Accepted), outcome

    def move(self) -> None:
        self.now += 1
        self.do(DetachNamespace("l", *KEY, for_peer=True))
        self.do(MoveClients("l", *KEY, "b-", 60_000))

    def open(self, session_id: int, host: str = "10.0.0.1") -> None:
        self.clients[session_id] = Client(session_id, f"{host}:5000", 1)
        assert self.moves.opened(self.clients[session_id]) is None

    def ask(
        self,
        session_id: int = 1,
        *topics: str | uuid.UUID,
        every: bool = False,
        errors: Sequence[int] = (),
        aside: bool = False,
    ) -> int:
        """The error in front of the answer; the rest is as the broker gave it."""
        named = [{"name": None, "topic_id": each} if isinstance(each, uuid.UUID) else {"name": each} for each in topics]
        values = {"topics": None if every else named, "allow_auto_topic_creation": False}
        frame = encode_request(build_request(ApiKey.METADATA, V, values), 7, "client")
        request = Request(frame, True, ApiKey.METADATA, V, 7, self.now, self.clients[session_id])
        request.aside = aside
        verdict = self.hook.on_request(request)
        codes = [*errors, *(0 for _ in topics)][: len(topics)]
        found = [
            {"error_code": error_code(code), "name": str(each), "partitions": []}
            for each, code in zip(topics, codes, strict=True)
        ]
        answered = encode_response(build_response(ApiKey.METADATA, V, {"brokers": BROKERS, "topics": found}), 7)
        if verdict is None:
            return 0
        assert isinstance(verdict, Replace)
        assert verdict.frame is frame
        assert verdict.on_response is not None
        seen = asyncio.run(_seen(verdict.on_response, answered))
        assert not isinstance(seen, Gate)
        correlation_id, payload = decode_response(ApiKey.METADATA, V, seen)
        answer: Any = payload
        assert correlation_id == 7
        assert [each.host for each in answer.brokers] == ["h"], "who does not know the error reads on"
        assert [each.name for each in answer.topics] == [str(each) for each in topics]
        return int(answer.error_code)

    def read(self, session_id: int, *topics: uuid.UUID) -> bool:
        """Whether a Fetch of these closes the connection."""
        values = {"topics": [{"topic_id": each, "partitions": []} for each in topics], "forgotten_topics_data": []}
        frame = encode_request(build_request(ApiKey.FETCH, 16, values), 7, "client")
        verdict = self.reads.on_request(Request(frame, True, ApiKey.FETCH, 16, 7, self.now, self.clients[session_id]))
        assert verdict is None or isinstance(verdict, Close)
        return verdict is not None


async def _seen(look: ResponseHook, answered: bytes) -> bytes | Gate:
    return look(answered)


def test_who_asks_for_what_has_moved_is_told() -> None:
    case = Case()
    assert case.ask(1, "a-t") == REBOOTSTRAP_REQUIRED
    case.now += MOMENT_S
    assert case.ask(1, "a-t") == 0
    assert case.moves.told(KEY) == 1
    (told,) = case.moves.metrics()
    assert [(each.labels, each.value) for each in told.samples] == [({"namespace": "a-"}, 1)]


def test_what_a_connection_asks_beside_that_is_told_too() -> None:
    """librdkafka does not look for another cluster where an answer without the error comes next."""
    case = Case()
    frame = encode_request(build_request(ApiKey.METADATA, V, {"topics": [{"name": "a-t"}]}), 7, "client")
    found = [{"error_code": error_code(0), "name": "a-t", "partitions": []}]
    answered = encode_response(build_response(ApiKey.METADATA, V, {"brokers": BROKERS, "topics": found}), 7)
    on_its_way = [
        case.hook.on_request(Request(frame, True, ApiKey.METADATA, V, 7, case.now, case.clients[1])) for _ in range(2)
    ]
    codes = []
    for verdict in on_its_way:
        case.now += 2 * MOMENT_S  # until the broker answers
        assert isinstance(verdict, Replace)
        assert verdict.on_response is not None
        seen = asyncio.run(_seen(verdict.on_response, answered))
        assert isinstance(seen, bytes)
        answer: Any = decode_response(ApiKey.METADATA, V, seen)[1]
        codes.append(int(answer.error_code))
    assert codes == [REBOOTSTRAP_REQUIRED] * 2
    assert case.ask(1, "a-t") == 0, "asked more than a moment later"
    case.now += 10
    assert [case.ask(1, "a-t") for _ in range(3)] == [REBOOTSTRAP_REQUIRED] * 3
    assert case.moves.told(KEY) == 2


def test_who_comes_back_is_told_again_and_then_after_a_while() -> None:
    case = Case()
    assert case.ask(1, "a-t") == REBOOTSTRAP_REQUIRED
    case.moves.closed(case.clients[1])
    for session_id in (2, 3):
        case.open(session_id)
    case.open(4, "10.0.0.2")
    assert case.ask(2, "a-t") == REBOOTSTRAP_REQUIRED
    assert case.ask(3, "a-t") == 0
    assert case.ask(4, "a-t") == REBOOTSTRAP_REQUIRED
    case.now += 10
    assert case.ask(3, "a-t") == REBOOTSTRAP_REQUIRED


def test_a_connection_that_is_taken_for_one_to_the_other_cluster_is_closed() -> None:
    """Java's are by a broker's id: it reads over one that it opened before it heard from there."""
    case = Case()
    ours, theirs = A_ID, uuid.UUID(int=8, version=4)
    case.known[ours.bytes] = "a-t"
    case.open(2)
    case.open(3, "10.0.0.2")
    assert not case.read(2, theirs), "it was not told"
    assert case.ask(1, "a-t") == REBOOTSTRAP_REQUIRED
    assert not case.read(2), "it goes on in its session"
    assert not case.read(2, ours), "it has not heard from there"
    assert case.read(2, theirs)
    assert case.read(2, ours, theirs)
    assert not case.read(3, theirs), "another client"
    case.now += 10
    assert not case.read(2, theirs), "it is told before it can read here"
    assert case.ask(2, "a-t") == REBOOTSTRAP_REQUIRED
    assert case.read(2, theirs)
    case.now += 60
    assert not case.read(2, theirs), "all of it is over"
    assert case.reads.versions[0] == 13


def test_nobody_else_is_told() -> None:
    for topics, every in (((), True), ((), False), (("b-t",), False), (("a-t", "b-t"), False)):
        case = Case()
        assert case.ask(1, *topics, every=every) == 0
    case = Case(moved=False)
    assert case.ask(1, "b-t") == 0
    assert case.ask(1, "a-t") == 0
    case.move()
    assert case.ask(1, "a-t") == 0, "it asked for another one before"
    assert case.moves.told(KEY) == 0


def test_all_of_it_is_over_in_time() -> None:
    case = Case()
    case.now += 60
    assert case.ask(1, "a-t") == 0


def test_who_may_describe_nothing_of_it_is_told_nothing() -> None:
    case = Case()
    assert case.ask(1, "a-t", errors=[TOPIC_AUTHORIZATION_FAILED]) == 0
    assert case.ask(1, "a-t", errors=[UNKNOWN_TOPIC_OR_PARTITION]) == 0
    assert case.ask(1, "a-t", "a-u", errors=[TOPIC_AUTHORIZATION_FAILED]) == REBOOTSTRAP_REQUIRED


def test_without_a_lease_nobody_is_told() -> None:
    case = Case()
    case.context.lease_deadline = case.now - 1
    assert case.ask(1, "a-t") == 0


def test_what_is_no_name_is_not_remembered() -> None:
    case = Case()
    assert case.ask(1, "b" * 250) == 0
    assert case.ask(1, "a-t") == REBOOTSTRAP_REQUIRED


def test_topics_are_known_by_their_ids() -> None:
    case = Case()
    assert case.ask(1, A_ID) == 0, "nobody knows it"
    case.known[A_ID.bytes] = "a-t"
    assert case.ask(1, A_ID) == REBOOTSTRAP_REQUIRED


def test_older_versions_of_metadata_are_left_as_they_are() -> None:
    case = Case()
    assert case.hook.versions[0] == V
    assert case.hook.pure


def test_without_a_link_nothing_is_remembered() -> None:
    rng = random.Random(1)
    control = FakeControl("A", rng)
    context: Any = FakeContext(FakeCluster(rng, [1]), control)
    moves = ClientMoves(context)
    moves.control_changed(control.state)
    hook, _ = moves.hooks()
    frame = encode_request(build_request(ApiKey.METADATA, V, {"topics": [{"name": "a-t"}]}), 7, "client")
    assert hook.on_request(Request(frame, True, ApiKey.METADATA, V, 7, 1.0, Client(1, "h:1", 1))) is None


def test_a_large_answer_is_read_aside_and_tells_once_of_two() -> None:
    async def work() -> None:
        case = Case()
        topics = [f"a-{number}" for number in range(2_000)]
        values = {"topics": [{"name": each} for each in topics], "allow_auto_topic_creation": False}
        frame = encode_request(build_request(ApiKey.METADATA, V, values), 7, "client")
        found = [{"error_code": error_code(0), "name": each, "partitions": []} for each in topics]
        answered = encode_response(build_response(ApiKey.METADATA, V, {"brokers": BROKERS, "topics": found}), 7)
        gates: list[Gate] = []
        opened = asyncio.Event()
        for _ in range(2):
            verdict = case.hook.on_request(Request(frame, True, ApiKey.METADATA, V, 7, case.now, case.clients[1]))
            assert isinstance(verdict, Replace)
            assert verdict.on_response is not None
            gate = verdict.on_response(answered)
            assert isinstance(gate, Gate)
            gates.append(gate)
        for gate in gates:
            opened.clear()
            if not gate.take(opened.set):
                async with asyncio.timeout(5):
                    await opened.wait()
        codes = []
        for gate in gates:
            frame_seen = gate.answer()
            assert isinstance(frame_seen, bytes)
            answer: Any = decode_response(ApiKey.METADATA, V, frame_seen)[1]
            codes.append(int(answer.error_code))
        assert codes == [REBOOTSTRAP_REQUIRED] * 2
        assert case.moves.told(KEY) == 1

    asyncio.run(work())
