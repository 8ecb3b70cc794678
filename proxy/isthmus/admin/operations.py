"""Work that takes longer than a request should, kept for a while after its end so that its result can be read."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, Final, Literal

from pydantic import BaseModel

from isthmus.admin.models import ErrorSummary, OperationView
from isthmus_plugins.clock import monotonic
from isthmus_plugins.links import OperationError
from isthmus_plugins.tasks import Supervision, Tasks

log = logging.getLogger("isthmus.admin")

KEPT_MAX: Final = 100
"""Operations that ended, before the oldest is forgotten."""

Progress = Callable[[int, int], None]
Work = Callable[[Progress], Awaitable[BaseModel]]


class Operation:
    """One piece of work and what came of it."""

    def __init__(self, kind: str, target: str) -> None:
        self.id = str(uuid.uuid4())
        self.kind = kind
        self.target = target
        self.state: Literal["running", "done", "failed"] = "running"
        self.done = 0
        self.total: int | None = None
        self.result: dict[str, Any] | None = None
        self.error: ErrorSummary | None = None
        self.ended = asyncio.Event()
        self._started = monotonic()
        self._started_ms = int(time.time() * 1000)
        self._seconds = 0.0

    def progress(self, done: int, total: int) -> None:
        self.done, self.total = done, total

    def end(self, result: dict[str, Any] | None, error: ErrorSummary | None) -> None:
        self.state = "done" if error is None else "failed"
        self.result, self.error = result, error
        self._seconds = monotonic() - self._started
        self.ended.set()

    def view(self) -> OperationView:
        return OperationView(
            id=self.id,
            kind=self.kind,
            target=self.target,
            state=self.state,
            done=self.done,
            total=self.total,
            started_ms=self._started_ms,
            seconds=round(self._seconds or monotonic() - self._started, 3),
            result=self.result,
            error=self.error,
        )


class Operations:
    """The operations of one admin listener."""

    def __init__(self, supervision: Supervision) -> None:
        self._tasks = Tasks("operations", supervision)
        self._running: dict[str, asyncio.Task[None]] = {}
        self._known: dict[str, Operation] = {}
        self._closing = False

    def start(self, kind: str, target: str, work: Work) -> Operation:
        """Start ``work``; where the same is running already, that one is returned. Raises OperationError."""
        if self._closing:
            raise OperationError("NOT_READY", "the proxy is stopping", 503)
        for known in self._known.values():
            if known.state == "running" and (known.kind, known.target) == (kind, target):
                return known
        operation = Operation(kind, target)
        self._known[operation.id] = operation
        ended = [known.id for known in self._known.values() if known.state != "running"]
        for forgotten in ended[: max(0, len(ended) - KEPT_MAX)]:
            del self._known[forgotten]
        task = self._tasks.start(f"{kind}-{target}", self._run(operation, work))
        self._running[operation.id] = task
        task.add_done_callback(lambda _: self._running.pop(operation.id, None))
        return operation

    async def _run(self, operation: Operation, work: Work) -> None:
        try:
            result = await work(operation.progress)
        except OperationError as error:
            operation.end(None, ErrorSummary(code=error.code, message=error.message))
        except asyncio.CancelledError:
            operation.end(None, ErrorSummary(code="CANCELLED", message="the operation was cancelled"))
            raise
        except Exception as error:
            log.exception("operation failed", extra={"operation": operation.kind, "target": operation.target})
            message = f"{operation.kind} of {operation.target} failed: {str(error) or type(error).__name__}"
            operation.end(None, ErrorSummary(code="OPERATION_FAILED", message=message))
        else:
            operation.end(result.model_dump(mode="json"), None)

    def newest_first(self) -> list[Operation]:
        return list(reversed(self._known.values()))

    def get(self, operation_id: str) -> Operation:
        """Raises OperationError."""
        operation = self._known.get(operation_id)
        if operation is None:
            message = f"there is no operation {operation_id!r}; results are kept until {KEPT_MAX} newer ones ended"
            raise OperationError("NOT_FOUND", message, 404)
        return operation

    async def cancel(self, operation_id: str) -> None:
        """Stop an operation and wait for its end; one that ended stays as it is. Raises OperationError."""
        operation = self.get(operation_id)
        task = self._running.get(operation_id)
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
            if operation.state == "running":  # it was cancelled before its first step
                operation.end(None, ErrorSummary(code="CANCELLED", message="the operation was cancelled"))

    async def close(self) -> None:
        """Stop everything."""
        self._closing = True
        for operation_id in tuple(self._running):
            await self.cancel(operation_id)
        await self._tasks.close()
