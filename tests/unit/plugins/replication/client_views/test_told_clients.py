"""Which connections are told, and how often: those that asked for what has moved alone."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from isthmus_plugins.replication.client_views import told_clients
from isthmus_plugins.replication.client_views.told_clients import AGAIN_S, NAMES_MAX, ToldClients, beginnings

BEGUN = 100.0


def begun(topic: str) -> float | None:
    return BEGUN if topic.startswith("a-") else None


class Case:
    def __init__(self) -> None:
        self.clients = ToldClients()

    def open(self, session_id: int, *named: str, at: float = 0.0, host: str = "h") -> None:
        self.clients.opened(session_id, host, at)
        if named:
            self.clients.asked(session_id, named)

    def tell(self, session_id: int, at: float, client_id: str = "c") -> bool:
        told = self.clients.may_be_told(session_id, client_id, begun, at)
        if told:
            self.clients.told(session_id, client_id, BEGUN, at)
        return told


def test_a_connection_is_told_at_a_rate() -> None:
    case = Case()
    case.open(1, "a-t")
    assert case.tell(1, BEGUN)
    assert not case.tell(1, BEGUN + 1)
    assert not case.tell(1, BEGUN + AGAIN_S - 1)
    assert case.tell(1, BEGUN + AGAIN_S)
    assert not case.tell(1, BEGUN + 2 * AGAIN_S - 1)


def test_connections_from_before_are_told_at_once_however_many_a_client_has() -> None:
    case = Case()
    for session_id in range(1, 100):
        case.open(session_id, "a-t")
    assert all(case.tell(session_id, BEGUN) for session_id in range(1, 100))


def test_who_asked_for_anything_else_is_not_told() -> None:
    case = Case()
    case.open(1)
    assert not case.tell(1, BEGUN), "it asked for nothing"
    case.open(2, "a-t", "b-t")
    assert not case.tell(2, BEGUN)
    case.open(3, "b-t")
    case.clients.asked(3, ("a-t",))
    assert not case.tell(3, BEGUN), "that was before"
    case.open(4, "a-t", "a-u")
    case.clients.asked(4, ("a-t",))
    assert case.tell(4, BEGUN)
    assert not case.tell(5, BEGUN), "nobody knows it"
    case.clients.closed(4)
    case.clients.closed(4)
    assert not case.tell(4, BEGUN)


def test_who_comes_back_is_told_at_a_rate() -> None:
    case = Case()
    case.open(1, "a-t")
    assert case.tell(1, BEGUN)
    told = []
    for number in range(1, 1_000):  # its name leads here still: it comes back every tenth of a second
        at = BEGUN + number / 10
        case.open(1 + number, "a-t", at=at)
        if case.tell(1 + number, at):
            told.append(at)
        case.clients.closed(1 + number)
    assert told[0] == BEGUN + 0.1, "over a connection that it may have opened before it knew where to go"
    assert len(told) == 10
    assert min(later - earlier for earlier, later in pairwise(told)) >= AGAIN_S


def test_clients_that_come_back_are_told_apart() -> None:
    case = Case()
    at = BEGUN + 1
    for session_id, host in ((1, "h"), (2, "i"), (3, "h")):
        case.open(session_id, "a-t", at=at, host=host)
    assert case.tell(1, at)
    assert case.tell(2, at)
    assert case.tell(3, at, "d")
    case.open(4, "a-t", at=at)
    assert not case.tell(4, at)
    assert not case.tell(4, at + AGAIN_S - 0.1)
    assert case.tell(4, at + AGAIN_S), "it stayed"


def test_it_is_known_for_so_long_that_a_client_was_told() -> None:
    case = Case()
    case.open(1, "a-t")
    case.open(2)
    case.open(3, host="i")
    assert not case.clients.was_told(2, "c", BEGUN)
    assert case.tell(1, BEGUN)
    assert case.clients.was_told(2, "c", BEGUN), "over whichever connection"
    assert not case.clients.was_told(2, "d", BEGUN)
    assert not case.clients.was_told(3, "c", BEGUN)
    assert not case.clients.was_told(4, "c", BEGUN), "nobody knows it"
    assert case.clients.was_told(2, "c", BEGUN + AGAIN_S - 0.1)
    assert not case.clients.was_told(2, "c", BEGUN + AGAIN_S)


def test_who_are_too_many_to_be_told_apart_are_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(told_clients, "CLIENTS_MAX", 2)
    case = Case()
    for session_id in range(1, 5):
        case.open(session_id, "a-t", at=BEGUN + 1, host=str(session_id))
    assert [case.tell(session_id, BEGUN + 1) for session_id in range(1, 5)] == [True, True, False, False]
    assert case.tell(3, BEGUN + 1 + AGAIN_S)


def test_beginnings_are_few_and_each_name_has_one() -> None:
    assert beginnings(()) == ()
    assert beginnings(("b", "a", "b")) == ("a", "b")
    many = [f"{prefix}{number}" for prefix in ("orders-", "payments-") for number in range(500)]
    found = beginnings(many)
    assert 10 < len(found) <= NAMES_MAX
    assert all(each.startswith(("orders-", "payments-")) for each in found)
    assert beginnings(many, 2) == ("orders-", "payments-")
    assert beginnings(many, 1) == ("",)
    rng = random.Random(1)
    for _ in range(200):
        names = ["".join(rng.choices("abc", k=rng.randint(0, 4))) for _ in range(rng.randint(0, 40))]
        at_most = rng.randint(1, 8)
        found = beginnings(names, at_most)
        assert len(found) <= at_most
        assert list(found) == sorted(set(found))
        assert all(name.startswith(found) for name in names)
