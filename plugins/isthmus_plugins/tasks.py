"""Tasks with a name and an owner, and what becomes of those that fail.

A bare ``asyncio.create_task`` may be garbage collected in mid-flight and loses its exception; the linter bans it. An
owner creates one :class:`Tasks`, starts its work there, and closes it when it goes: every task ends before its owner.

Work that nobody else looks at is *kept* (:meth:`Tasks.keep`): where it fails it begins anew after a while, and until it
has run well for as long again it is in the process's :class:`Supervision`, which status, metrics and readiness show.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

log = logging.getLogger("isthmus.tasks")

Item = TypeVar("Item")
Result = TypeVar("Result")

RETRY_MIN_S: Final = 0.5
RETRY_MAX_S: Final = 5.0
NAMES_MAX: Final = 1000
"""Names whose failures are counted one by one, since the start; names may say of which topic or group a task is."""
RECOVERED_S: Final = 10.0
"""So long a task that has failed must run without another failure to count as well again; more where it waits more."""


@dataclass(slots=True)
class FailingTask:
    """Work that fails, and is tried again."""

    name: str
    """``owner/name``"""
    error: str
    since: float
    """Seconds of the loop's clock: its first failure since it was well."""
    failures: int
    """Since then."""

    def describe(self, now: float) -> str:
        """One line for an operator."""
        times = "once" if self.failures == 1 else f"{self.failures} times in {now - self.since:.0f} s"
        return f"background work {self.name} fails and is tried again ({times}): {self.error}"


class Supervision:
    """Which background work of a process fails now, and how often each has failed since the start."""

    def __init__(self) -> None:
        self.failures: Counter[str] = Counter()
        self._failing: dict[object, FailingTask] = {}

    @property
    def failing(self) -> list[FailingTask]:
        """By name: what has failed, and has not run well since."""
        return sorted(self._failing.values(), key=lambda each: each.name)

    def count(self, name: str) -> None:
        """Count a failure: under its name, or beyond :data:`NAMES_MAX` of them under its owner's."""
        if name not in self.failures and len(self.failures) >= NAMES_MAX:
            name = f"{name.partition('/')[0]}/others"
        self.failures[name] += 1

    def failed(self, work: object, name: str, error: BaseException, now: float) -> None:
        """Note a failure of ``work`` (whatever stands for it; several may have one name), which is tried again."""
        self.count(name)
        failing = self._failing.get(work)
        if failing is None:
            failing = self._failing[work] = FailingTask(name, "", now, 0)
        failing.error = f"{type(error).__name__}: {error}"
        failing.failures += 1

    def well(self, work: object) -> None:
        """Work has run for long enough, has ended, or is not to be done any more."""
        if (failing := self._failing.pop(work, None)) is not None:
            log.info("task recovered", extra={"task": failing.name, "failures": failing.failures})


class Tasks:
    """The running tasks of one owner. Cancellation is no failure."""

    __slots__ = ("_closing", "_on_failure", "_owner", "_recoveries", "_supervision", "_tasks")

    def __init__(
        self, owner: str, supervision: Supervision, on_failure: Callable[[str, BaseException], None] | None = None
    ) -> None:
        """``on_failure``, called with the name and the exception of a task that was started and failed, lets the owner
        turn that into a state of its own.
        """
        self._owner = owner
        self._supervision = supervision
        self._on_failure = on_failure
        self._tasks: set[asyncio.Task[Any]] = set()
        self._recoveries: dict[str, asyncio.TimerHandle] = {}
        self._closing = False

    def start(self, name: str, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run ``work`` once, as the task ``owner/name``: for what somebody waits for, or starts again."""
        if self._closing:
            work.close()
            raise RuntimeError(f"{self._owner} is closing: {name} cannot start")
        task = asyncio.get_running_loop().create_task(work, name=f"{self._owner}/{name}")
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def keep(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
        """Run ``work`` as the task ``owner/name`` until it returns; where it fails, run it again after a while."""
        return self.start(name, self._kept(f"{self._owner}/{name}", work))

    def failed(self, name: str, error: Exception) -> None:
        """Note a failure of work that got over it by itself and goes on: it shows for a while."""
        loop = asyncio.get_running_loop()
        full_name = f"{self._owner}/{name}"
        work = (id(self), name)
        self._supervision.failed(work, full_name, error, loop.time())
        log.error("task failed", extra={"task": full_name, "error": repr(error)}, exc_info=error)
        if (recovery := self._recoveries.pop(name, None)) is not None:
            recovery.cancel()
        self._recoveries[name] = loop.call_later(RECOVERED_S, self._supervision.well, work)

    async def _kept(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        loop = asyncio.get_running_loop()
        token = object()
        pause = RETRY_MIN_S
        try:
            while True:
                began, well_after = loop.time(), max(RECOVERED_S, pause)
                recovery = loop.call_later(well_after, self._supervision.well, token)
                try:
                    await work()
                except Exception as error:
                    if self._closing:
                        raise
                    if loop.time() - began >= well_after:
                        pause = RETRY_MIN_S
                    self._supervision.failed(token, name, error, loop.time())
                    log.error(
                        "task failed", extra={"task": name, "error": repr(error), "again_s": pause}, exc_info=error
                    )
                else:
                    return
                finally:
                    recovery.cancel()
                await asyncio.sleep(pause)
                pause = min(2 * pause, RETRY_MAX_S)
        finally:
            self._supervision.well(token)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            return
        self._supervision.count(task.get_name())
        log.error("task failed", extra={"task": task.get_name(), "error": repr(error)}, exc_info=error)
        if self._on_failure is not None:
            self._on_failure(task.get_name(), error)

    def __len__(self) -> int:
        return len(self._tasks)

    async def close(self) -> None:
        """Cancel what still runs and wait until it has ended."""
        self._closing = True
        for name, recovery in self._recoveries.items():
            recovery.cancel()
            self._supervision.well((id(self), name))
        current = asyncio.current_task()
        tasks = [task for task in self._tasks if task is not current]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def some_at_once(limit: int, do: Callable[[Item], Awaitable[Result]], items: Iterable[Item]) -> list[Result]:
    """What ``do`` returns for each item, in their order; so many of them are under way at a time.

    The first error ends all that is under way, and is raised.
    """
    given = list(items)
    left, results = iter(enumerate(given)), dict[int, Result]()

    async def work() -> None:
        for number, item in left:
            results[number] = await do(item)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(limit, len(given))):
                group.create_task(work())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [results[number] for number in range(len(given))]
