"""Clients that move to the cluster that leads now: what the two clusters of a link say to each other about it.

After a promotion, or a failover, the cluster that leads asks the other one to tell its clients, again and again as long
as there is time for that: after a failover it may be away. Every proxy asks, and the first answer counts for all. Who
tells its clients (``client_views.client_moves``) needs nobody; when the time is over, that is recorded.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from isthmus_control.commands import EndClientMove, MoveClients
from isthmus_control.control_state import ControlState
from isthmus_control.levels import CLIENT_MOVES as LEVEL
from isthmus_control.model import ClientMove, NamespaceKey, ResourceType
from isthmus_control.outcome import Rejection
from isthmus_plugins.links import ClientMoveStatus, OperationError
from isthmus_plugins.move_times import MoveTimes
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.link import calls
from isthmus_plugins.replication.link.connection import LinkConnection
from isthmus_plugins.replication.link.features import CLIENT_MOVES
from isthmus_plugins.replication.operations.commands import LinkCommands
from isthmus_plugins.tasks import Tasks

log = logging.getLogger("isthmus_plugins.replication")

LOOK_S: Final = 0.5
"""How often a proxy looks whom it is to ask, and what is over."""


class MovingClients:
    """``told``: how often this proxy has told clients of a namespace."""

    def __init__(self, context: PluginContext, commands: LinkCommands, told: Callable[[NamespaceKey], int]) -> None:
        self._context = context
        self._clock = context.clock
        self._commands = commands
        self._told = told
        self._times = MoveTimes(context.clock)
        self._tasks = Tasks("client-moves", context.supervision)
        self._troubles: dict[NamespaceKey, str] = {}
        """Why the other cluster was not told."""

    def start(self) -> None:
        self._tasks.keep("look", self._look_for_ever)

    async def stop(self) -> None:
        await self._tasks.close()

    def control_changed(self, state: ControlState) -> None:
        """The control state is another one."""
        self._times.control_changed(state)

    def check(self, link_name: str, seconds: float, *, without_source: bool = False) -> None:
        """Raise OperationError where clients could not be told. ``without_source``: the other cluster may be away."""
        if not seconds:
            return
        level = self._context.control.state.level
        if level < LEVEL:
            raise OperationError(
                Rejection.NOT_SUPPORTED.told,
                f"moving clients needs feature level {LEVEL} of the control log, which has {level}: isthmus control "
                "upgrade",
                409,
            )
        if not without_source:
            self._commands.knows(link_name, CLIENT_MOVES)

    def statuses(self, link_name: str) -> list[ClientMoveStatus]:
        """Whose clients are told, of a link."""
        now = self._clock.monotonic()
        return [self._status(move, now) for move in self._moves() if move.link == link_name]

    def _status(self, move: ClientMove, now: float) -> ClientMoveStatus:
        return ClientMoveStatus(
            local=move.prefix,
            remote=move.remote_prefix,
            clients_of="remote" if move.there else "local",
            left_seconds=round(self._times.left_s(move.key, now), 1),
            told=None if move.there else self._told(move.key),
            waits_for=self._troubles.get(move.key, "the other cluster to tell its clients") if move.there else None,
        )

    def _moves(self) -> list[ClientMove]:
        return [each for _, each in sorted(self._context.control.state.client_moves.items())]

    async def _look_for_ever(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            moves = self._moves()
            self._troubles = {each.key: why for each in moves if (why := self._troubles.get(each.key)) is not None}
            for move in moves:
                if self._clock.monotonic() > self._context.lease_deadline:
                    break
                try:
                    await self._look(move)
                except OperationError as error:
                    self._troubles[move.key] = error.message

    async def _look(self, move: ClientMove) -> None:
        left_s = self._times.left_s(move.key, self._clock.monotonic())
        gone = move.there and move.link not in self._context.control.state.links
        if move.there and left_s and not gone:
            self._commands.knows(move.link, CLIENT_MOVES)
            question = calls.MoveClients(move.remote_prefix, move.prefix, max(1, round(left_s * 1000)))
            await self._commands.call(move.link, question)
            log.info("the other cluster tells its clients", extra={"link": move.link, "namespace": move.prefix})
        elif left_s and not gone:
            return
        await self._commands.append(EndClientMove(move.link, *move.key, move.offset))

    async def on_move_clients(self, connection: LinkConnection, question: calls.MoveClients) -> calls.Done:
        """The other cluster leads a namespace that was led here. Raises LinkRejected where it was not granted that."""
        body = MoveClients(connection.link_name, ResourceType.TOPIC, question.prefix, question.to, question.for_ms)
        await self._commands.append_for_peer(body)
        return calls.Done()
