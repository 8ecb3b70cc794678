"""What the control log accepts of clients that are told to look for the cluster that leads now.

Nothing is decided by it: who leads was recorded before, and clients that nobody tells stay where they are. So a time
may end it, by anybody's clock.

============================  ==========================================================================================
A reversal has ended          the cluster that led tells its clients (:mod:`isthmus_control.rules.reversals`)
A promotion, or a failover,   the cluster that leads asks the other one for that, which may be away, again and again
has ended                     (:mod:`isthmus_control.rules.promotions`); that one tells its clients
This cluster leads again      it tells nobody any more
============================  ==========================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from isthmus_control import commands as c
from isthmus_control.bounds import MOVE_CLIENTS_MS_MAX
from isthmus_control.control_state import ControlState
from isthmus_control.grants import missing, needed, not_granted
from isthmus_control.model import ClientMove, NamespaceKey, ResourceType, Role
from isthmus_control.outcome import Change, ClientMoveChanged, Rejection, require
from isthmus_control.rules.checks import Result, check_prefix, drop, link_named, namespace_at, put


def check_time(for_ms: int) -> None:
    """Refuse a time that is none. Raises Refuse."""
    require(
        0 <= for_ms <= MOVE_CLIENTS_MS_MAX,
        Rejection.INVALID,
        f"clients are told to move for 0 to {MOVE_CLIENTS_MS_MAX} ms",
    )


def told(
    state: ControlState,
    offset: int,
    command: c.Command,
    link: str,
    key: NamespaceKey,
    remote_prefix: str,
    for_ms: int,
    *,
    there: bool,
) -> tuple[ControlState, list[Change]]:
    """The state in which clients are to be told; of a namespace of topics alone, and not for no time."""
    if key.type is not ResourceType.TOPIC or not for_ms:
        return state, []
    before = state.client_moves.get(key)
    move = ClientMove(link, *key, remote_prefix, there, command.at_ms, for_ms, offset)
    return state.evolve(client_moves=put(state.client_moves, key, move)), [ClientMoveChanged(before, move)]


def told_no_more(
    state: ControlState, key: NamespaceKey, *, there: bool | None = None
) -> tuple[ControlState, list[Change]]:
    """The state in which nobody is told any more. ``there``: of one of the two clusters alone."""
    before = state.client_moves.get(key)
    if before is None or there not in (None, before.there):
        return state, []
    return state.evolve(client_moves=drop(state.client_moves, key)), [ClientMoveChanged(before, None)]


def _move(state: ControlState, offset: int, command: c.Command, body: c.MoveClients) -> Result:
    require(body.type is ResourceType.TOPIC, Rejection.INVALID, "clients are moved by the topics that they ask for")
    check_time(body.for_ms)
    require(body.for_ms > 0, Rejection.INVALID, "clients are told to move for some time")
    check_prefix(body.type, body.remote_prefix)
    link = link_named(state, body.link)
    namespace = namespace_at(state, body.type, body.prefix)
    # Who may follow a namespace may lead it after it, which it says here that it does.
    lacking = missing(link, needed(body.type, body.prefix, Role.LEADER))
    require(not lacking, Rejection.NOT_GRANTED, not_granted(link.name, lacking))
    known = state.client_moves.get(namespace.key)
    same = known is not None and (known.link, known.there) == (link.name, False)
    if known is not None and same and known.ends_ms >= command.at_ms + body.for_ms:
        return state, ()  # another proxy of that cluster has asked, too
    state, changes = told(
        state, offset, command, link.name, namespace.key, body.remote_prefix, body.for_ms, there=False
    )
    return state, tuple(changes)


def _end(state: ControlState, offset: int, command: c.Command, body: c.EndClientMove) -> Result:
    key = NamespaceKey(body.type, body.prefix)
    before = state.client_moves.get(key)
    if before is None or before.offset != body.begun_offset:
        return state, ()  # another proxy was faster
    state, changes = told_no_more(state, key)
    return state, tuple(changes)


CLIENT_MOVE_HANDLERS: Mapping[type[c.Body], Callable[[ControlState, int, c.Command, Any], Result]] = {
    c.MoveClients: _move,
    c.EndClientMove: _end,
}
