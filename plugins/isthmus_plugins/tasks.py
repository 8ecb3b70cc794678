"""Tasks with a name and an owner.

A bare ``asyncio.create_task`` may be garbage collected in mid-flight and loses its exception; the linter bans it. An
owner creates one :class:`Tasks`, starts its work there, and closes it when it goes: every task ends before its owner.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

log = logging.getLogger("isthmus.tasks")


class Tasks:
    """The running tasks of one owner.

    A task that fails is logged with its name at once; ``on_failure`` (called with the name and the exception) lets the
    owner turn the failure into a state. Cancellation is not a failure.
    """

    __slots__ = ("_closing", "_on_failure", "_owner", "_tasks")

    def __init__(self, owner: str, on_failure: Any = None) -> None:
        self._owner = owner
        self._tasks: set[asyncio.Task[Any]] = set()
        self._on_failure = on_failure
        self._closing = False

    def start(self, name: str, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run ``work`` as the task ``owner/name``."""
        if self._closing:
            work.close()
            raise RuntimeError(f"{self._owner} is closing: {name} cannot start")
        task = asyncio.get_running_loop().create_task(work, name=f"{self._owner}/{name}")
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            return
        log.error("task failed", extra={"task": task.get_name(), "error": repr(error)}, exc_info=error)
        if self._on_failure is not None:
            self._on_failure(task.get_name(), error)

    def __len__(self) -> int:
        return len(self._tasks)

    async def close(self) -> None:
        """Cancel what still runs and wait until it has ended."""
        self._closing = True
        current = asyncio.current_task()
        tasks = [task for task in self._tasks if task is not current]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
