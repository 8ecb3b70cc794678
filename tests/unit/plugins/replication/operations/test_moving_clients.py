"""Clients of who led are told to move: by a promotion, by a failover whose source comes back, and for a time alone."""

from __future__ import annotations

from typing import Any

import pytest
from support.plugins import Two
from support.promoting import on_following

from isthmus_control.commands import ChangeGrants, DetachNamespace
from isthmus_control.levels import CLIENT_MOVES
from isthmus_control.model import ClientMove, Grant, NamespaceKey, ResourceType, Right
from isthmus_plugins.api import Client
from isthmus_plugins.failover_report import Failover
from isthmus_plugins.links import NamespaceRef, OperationError, Promote, Reverse
from isthmus_plugins.replication.link import features

HERE, THERE = NamespaceKey(ResourceType.TOPIC, "l-"), NamespaceKey(ResourceType.TOPIC, "r-")
FOR_S = 30
PROMOTE = Promote(namespaces=[NamespaceRef(local="r-")], move_clients_seconds=FOR_S)
FAIL_OVER = Failover(move_clients_seconds=FOR_S, although_reachable=True)


def moves(two: Two, name: str) -> dict[NamespaceKey, ClientMove]:
    return dict(two.controls[name].state.client_moves)


async def promote(two: Two, request: Promote = PROMOTE) -> None:
    await two.b.links.promote("a-to-b", request, lambda done, total: None)


async def fail_over(two: Two, request: Failover = FAIL_OVER) -> None:
    await two.b.links.fail_over("a-to-b", request, lambda done, total: None)


async def told_at_a(two: Two) -> None:
    await two.until("told", lambda: HERE in moves(two, "A") and not moves(two, "B"))
    move = moves(two, "A")[HERE]
    assert (move.link, move.remote_prefix, move.there) == ("a-to-b", "r-", False)
    assert 0 < move.for_ms <= FOR_S * 1_000


@pytest.mark.parametrize("how", [promote, fail_over])
def test_the_other_cluster_tells_its_clients_until_the_time_is_over(how: Any) -> None:
    async def work(two: Two) -> None:
        await how(two)
        assert not two.controls["B"].state.namespaces[THERE].reserved
        await told_at_a(two)
        two.a.plugin.parts.client_moves.opened(Client(1, "h:1", 1))
        (status,) = two.a.status().client_moves
        assert (status.local, status.remote, status.clients_of, status.told) == ("l-", "r-", "local", 0)
        assert FOR_S - 5 < status.left_seconds <= FOR_S
        await two.until("over", lambda: not moves(two, "A"), FOR_S + 5)
        assert not two.a.status().client_moves

    on_following(work, 300)


def test_nobody_is_told_unasked() -> None:
    async def work(two: Two) -> None:
        await promote(two, Promote(namespaces=PROMOTE.namespaces))
        assert not moves(two, "A")
        assert not moves(two, "B")

    on_following(work)


def test_who_led_tells_its_clients_after_a_reversal() -> None:
    async def work(two: Two) -> None:
        may = (Grant(Right.FOLLOW, *THERE),)
        two.controls["B"].apply(ChangeGrants("a-to-b", may))
        asked = Reverse(
            namespaces=[NamespaceRef(local="l-")],
            disable_transaction_verification=True,
            move_clients_seconds=FOR_S,
        )
        assert (await two.a.links.reverse("a-to-b", asked)).reversed
        await told_at_a(two)

    on_following(work, 120)


def test_a_source_that_is_away_is_asked_when_it_is_there_again() -> None:
    async def work(two: Two) -> None:
        peers = two.b.plugin.parts.peers
        await two.a.stop()
        await two.until("lost", lambda: not peers.connections("a-to-b"))
        await fail_over(two, Failover(move_clients_seconds=FOR_S))
        assert moves(two, "B")[THERE].there
        await two.until("tried", lambda: "not connected" in (two.b.status().client_moves[0].waits_for or ""))
        (status,) = two.b.status().client_moves
        assert (status.clients_of, status.told) == ("remote", None)
        await two.until("over", lambda: not moves(two, "B"), FOR_S + 5)

    on_following(work, 300)


def test_who_was_not_granted_that_is_refused_and_says_so() -> None:
    async def work(two: Two) -> None:
        control = two.controls["A"]
        control.apply(ChangeGrants("a-to-b", (), control.state.links["a-to-b"].grants))
        control.apply(DetachNamespace("a-to-b", *HERE))  # what is attached may be followed, whatever was taken back
        assert not control.state.links["a-to-b"].grants
        await fail_over(two)
        await two.until("refused", lambda: "not granted" in (two.b.status().client_moves[0].waits_for or ""))
        assert not moves(two, "A")
        await two.until("over", lambda: not moves(two, "B"), FOR_S + 5)

    on_following(work, 300)


def test_it_is_refused_at_once_where_it_could_not_be_done() -> None:
    async def work(two: Two) -> None:
        control = two.controls["B"]
        control.state = control.state.evolve(level=CLIENT_MOVES - 1)
        for how in (promote, fail_over):
            with pytest.raises(OperationError, match="feature level") as raised:
                await how(two)
            assert raised.value.code == "NOT_SUPPORTED"
        control.state = control.state.evolve(level=CLIENT_MOVES)
        for connection in two.b.plugin.parts.peers.connections("a-to-b"):
            connection.peer["features"] = [each for each in features.FEATURES if each != features.CLIENT_MOVES]
        with pytest.raises(OperationError, match="upgrade"):
            await promote(two)
        assert control.state.namespaces[THERE].reserved

    on_following(work)
