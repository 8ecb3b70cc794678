"""Has what is due for many partitions at the same time recorded in few commands of the control log."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

from isthmus_control.commands import Body
from isthmus_control.control_state import ControlState
from isthmus_control.outcome import Rejected
from isthmus_plugins.process import PluginContext
from isthmus_plugins.tasks import Tasks

E = TypeVar("E")

AT_ONCE: Final = 500
"""Entries in a command, which must stay below a record's size."""


class JoinedCommands(Generic[E]):
    """Records entries, those that come while others are being recorded together; where that is refused each by itself.

    ``bodies_of`` says what is to be recorded of some entries, in this order, as the control state is just then.
    """

    def __init__(
        self,
        context: PluginContext,
        tasks: Tasks,
        name: str,
        bodies_of: Callable[[ControlState, Sequence[E]], Sequence[Body]],
    ) -> None:
        self._control = context.control
        self._tasks = tasks
        self._name = name
        self._bodies_of = bodies_of
        self._due: list[tuple[E, asyncio.Future[Rejected | None]]] = []
        self._task: asyncio.Task[None] | None = None

    async def record(self, entry: E) -> Rejected | None:
        """Return when it is recorded, or nothing had to be; or why it was refused. Raises BrokerUnavailable."""
        done: asyncio.Future[Rejected | None] = asyncio.get_running_loop().create_future()
        self._due.append((entry, done))
        if self._task is None or self._task.done():
            self._task = self._tasks.start(self._name, self._record_all())
        return await done

    async def _record_all(self) -> None:
        while self._due:
            some, self._due = self._due[:AT_ONCE], self._due[AT_ONCE:]
            try:
                refused = await self._append([entry for entry, _ in some])
                for entry, done in some:
                    why = await self._append([entry]) if refused is not None and len(some) > 1 else refused
                    if not done.done():
                        done.set_result(why)
            except Exception as error:
                for _, done in some:
                    if not done.done():
                        done.set_exception(error)
            finally:
                for _, done in some:
                    done.cancel()  # where this task is

    async def _append(self, entries: Sequence[E]) -> Rejected | None:
        for body in self._bodies_of(self._control.state, entries):
            outcome = await self._control.append(body)
            if isinstance(outcome, Rejected):
                return outcome
        return None
