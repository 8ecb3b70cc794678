"""Answers to EndTxn that wait: for the log to be read, and for what it says to be on the other side."""

from __future__ import annotations

from typing import Any

import pytest

from isthmus_plugins.api import Gate
from isthmus_plugins.replication.transactions.end_txn_gate import (
    HELD_S,
    LATE_AT_ONCE,
    LOOKED_AT_ONCE,
    EndTxnGate,
)
from isthmus_protocol.messages import build_request, decode_response, encode_request
from isthmus_protocol.schema import ApiKey

FRAME = b"the broker's answer"


class Scene:
    def __init__(self) -> None:
        self.now = 100.0
        self.read_to = 10
        self.missing: set[str] = set()
        self.held = EndTxnGate(self.reached, self.outstanding, lambda: self.now, self.ask)
        self.asked = 0

    def ask(self) -> None:
        self.asked += 1

    def reached(self, partition: int) -> int:
        assert partition == 3
        return self.read_to

    def outstanding(self, transactional_id: str) -> bool:
        return transactional_id in self.missing

    def hold(self, transactional_id: str, version: int = 5) -> Gate:
        asked = {"transactional_id": transactional_id, "producer_id": 1, "producer_epoch": 2, "committed": True}
        request = encode_request(build_request(ApiKey.END_TXN, version, asked), 7, "client")
        return self.held.hold(transactional_id, request, FRAME)

    def tell(self, log_end: int | None) -> None:
        taken = self.held.take_unknown_ends()
        for answer in taken:
            answer.partition, answer.log_end = 3, log_end
        self.held.ends_read(taken)
        self.check()

    @property
    def waits(self) -> bool:
        return bool(self.held._waiting)

    def check(self) -> int:
        """In how many steps."""
        return 1 + sum(1 for _ in self.held.check())


def frame_of(gate: Gate) -> bytes | None:
    return gate.answer() if gate.take(lambda: None) else None  # type: ignore[return-value]


def test_it_waits_for_the_log_and_then_for_what_stands_in_it() -> None:
    scene = Scene()
    gates = [scene.hold("a"), scene.hold("b")]
    assert scene.asked == 2
    scene.tell(12)
    assert scene.waits
    scene.missing.add("a")
    scene.read_to = 12
    scene.check()
    assert frame_of(gates[1]) == FRAME
    scene.missing.clear()
    scene.check()
    assert frame_of(gates[0]) == FRAME
    assert not scene.waits


def test_an_end_that_was_not_read_is_asked_for_again() -> None:
    scene = Scene()
    gate = scene.hold("a")
    scene.tell(None)
    scene.tell(5)
    assert frame_of(gate) == FRAME


@pytest.mark.parametrize("version", range(6))
def test_it_waits_no_longer_than_clients_can(version: int) -> None:
    scene = Scene()
    scene.missing.add("a")
    gate = scene.hold("a", version)
    scene.tell(5)
    assert list(scene.held.expire(scene.now + HELD_S - 0.1)) == []
    assert list(scene.held.expire(scene.now + HELD_S)) == [["a"]]
    frame = frame_of(gate)
    assert frame is not None
    correlation_id, answer = decode_response(ApiKey.END_TXN, version, frame)
    found: Any = answer
    assert (correlation_id, found.error_code) == (7, 14)
    assert not scene.waits


def test_nobody_waits_where_nothing_is_synchronous_any_more() -> None:
    scene = Scene()
    gate = scene.hold("a")
    scene.held.follow(False)
    scene.check()
    assert frame_of(gate) == FRAME
    scene.tell(5)
    assert not scene.waits


def test_what_a_client_does_not_wait_for_any_more_is_forgotten() -> None:
    scene = Scene()
    scene.missing.add("a")
    scene.hold("a").drop()
    scene.tell(5)
    assert not scene.waits


MANY = 1_000


def many(scene: Scene) -> list[Gate]:
    gates = [scene.hold(f"t{number}") for number in range(MANY)]
    scene.tell(12)
    assert not any(map(frame_of_open, gates))
    return gates


def frame_of_open(gate: Gate) -> bytes | None:
    """What goes out of one that may have opened."""
    return gate._frame


def test_thousands_are_let_go_in_steps_each_as_it_is_in_its_own() -> None:
    scene = Scene()
    gates = many(scene)
    assert not scene.held.has_few
    scene.read_to = 12
    steps, gone = scene.held.check(), 0
    for _ in steps:
        before, gone = gone, sum(map(bool, map(frame_of_open, gates)))
        assert 0 < gone - before < LOOKED_AT_ONCE / 5
        if gone > MANY / 2:
            scene.missing |= {f"t{number}" for number in range(MANY)}  # as of a fresh decision of each
    assert gone < MANY * 0.6
    assert scene.held.has_few == (len(scene.held._waiting) < LOOKED_AT_ONCE / 6)
    scene.held.follow(False)
    assert scene.check() > 3
    assert [frame_of(gate) for gate in gates] == [FRAME] * MANY
    assert scene.held.has_few


def test_thousands_that_are_late_are_refused_in_steps() -> None:
    scene = Scene()
    gates = many(scene)
    refused: list[str] = []
    scene.missing = {f"t{number}" for number in range(MANY - 1)}
    for step in scene.held.expire(scene.now + HELD_S):
        refused += step
        assert 0 < len(step) <= LATE_AT_ONCE
        assert sum(map(bool, map(frame_of_open, gates[:-1]))) == len(refused)
        if len(refused) == MANY / 2:  # the last one goes between two steps
            scene.read_to = 12
            scene.check()
    assert refused == [f"t{number}" for number in range(MANY - 1)]
    assert frame_of(gates[-1]) == FRAME
    assert not scene.waits
