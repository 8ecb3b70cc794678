"""Who changed what: a line in the log for each request that may change something, and what came of it.

``change asked`` comes before it is carried out, so that one that a crash cut short shows; ``change`` after, with what
is another than before of the namespace, link or topic that it is about. Work that goes on behind a request (an
operation) has one more line when it ends. Lines with the same ``change`` belong together.

A line has what was asked without what is secret in it, and is bounded.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final
from urllib.parse import parse_qsl

from isthmus.admin.access import Identity, Peer
from isthmus.admin.audit_subjects import Subject, subject_of
from isthmus.admin.guard import READING, App, Message, Receive, Scope, Send
from isthmus.admin.hiding import shown
from isthmus.admin.operations import Operation, Operations
from isthmus.admin.services import AdminServices
from isthmus_plugins.links import OperationError
from isthmus_plugins.tasks import Tasks

log = logging.getLogger("isthmus.audit")

ASKED_CHARS_MAX: Final = 4_000
"""Of what was asked, and of each of before and after, as JSON."""
ANSWER_BYTES_MAX: Final = 64 * 1024
"""So much of an answer is looked at for its code."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One line."""

    change: str
    """A UUID."""
    at_ms: int
    proxy: str
    who: str
    peer: str
    """The address that it came from."""
    action: str
    """Method and path."""
    asked: Any
    """The query's and the body's fields."""
    outcome: str
    """``done``, ``started`` (an operation), ``refused``, ``failed``; ``unknown``: the proxy stopped meanwhile."""
    code: str | None = None
    """Of the error."""
    before: Mapping[str, Any] | None = None
    after: Mapping[str, Any] | None = None


class Audit:
    """An ASGI application in front of the routes."""

    def __init__(self, app: App, services: AdminServices, operations: Operations) -> None:
        self._app = app
        self._services = services
        self._operations = operations
        self._tasks = Tasks("audit", services.supervision)
        self._following: dict[str, asyncio.Task[None]] = {}
        """Who waits for the end of operations, by their ids."""

    async def close(self) -> None:
        """Say what is left to say of operations, all of which have ended."""
        if self._following:
            await asyncio.wait(self._following.values())
        await self._tasks.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        identity: Identity | None = scope["state"]["identity"]
        if scope["method"] in READING or identity is None:
            await self._app(scope, receive, send)
            return
        first = await receive()
        given = [first]

        async def again() -> Message:
            return given.pop() if given else await receive()

        peer: Peer = scope["state"]["peer"]
        asked = _asked(scope["query_string"], first.get("body", b""))
        action = f"{scope['method']} {scope['path']}"
        change = str(uuid.uuid4())
        log.info(
            "change asked",
            extra={
                "change": change,
                "who": identity.name,
                "peer": peer.address,
                "action": action,
                "asked": bounded(shown(asked)),
            },
        )
        entry = Entry(
            change,
            int(time.time() * 1000),
            self._services.name,
            identity.name,
            peer.address,
            action,
            bounded(shown(asked)),
            outcome="unknown",
        )
        subject = subject_of(scope["path"], asked)
        before = self._seen(subject)
        answer = _Answer(send)
        try:
            await self._app(scope, again, answer)
        finally:
            entry = replace(entry, outcome=answer.outcome(), code=answer.code())
            self._write(entry, before, self._seen(subject))
        if entry.outcome == "started":
            self._follow(entry, answer.operation(), subject, before)

    def _follow(self, entry: Entry, operation_id: str | None, subject: Subject | None, before: Any) -> None:
        """Have a line when an operation has ended, which may have been followed already."""
        if operation_id is None or operation_id in self._following:
            return
        try:
            operation = self._operations.get(operation_id)
        except OperationError:
            return
        following = self._tasks.start(f"operation-{operation_id}", self._ended(entry, operation, subject, before))
        self._following[operation_id] = following
        following.add_done_callback(lambda _: self._following.pop(operation_id, None))

    async def _ended(self, entry: Entry, operation: Operation, subject: Subject | None, before: Any) -> None:
        await operation.ended.wait()
        code = None if operation.error is None else operation.error.code
        ended = replace(entry, at_ms=int(time.time() * 1000), outcome="done" if code is None else "failed", code=code)
        self._write(ended, before, self._seen(subject))

    def _seen(self, subject: Subject | None) -> Mapping[str, Any] | None:
        control = self._services.control
        return None if subject is None or control is None else subject.seen(control.state)

    def _write(self, entry: Entry, before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> None:
        was, now = different(before, after)
        entry = replace(entry, before=bounded(shown(was)), after=bounded(shown(now)))
        line = {name: each for name, each in asdict(entry).items() if each is not None}
        log.info("change", extra=line)
        if self._services.audit is not None:
            self._services.audit.put(line)


class _Answer:
    """Passes an answer on, and keeps what is said of it."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._status = 0
        self._body = bytearray()

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
        elif len(self._body) < ANSWER_BYTES_MAX:
            self._body += message.get("body", b"")
        await self._send(message)

    def outcome(self) -> str:
        if self._status == 202 and self.operation() is not None:
            return "started"
        if not self._status:
            return "unknown"
        if self._status >= 500:
            return "failed"
        return "refused" if self._status >= 400 else "done"

    def code(self) -> str | None:
        return str(self._fields().get("code", self._status)) if self._status >= 400 else None

    def operation(self) -> str | None:
        """The id of the operation that was started."""
        fields = self._fields()
        return str(fields["id"]) if {"id", "kind", "target"} <= fields.keys() else None

    def _fields(self) -> dict[str, Any]:
        try:
            found = json.loads(self._body)
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}


def different(
    before: Mapping[str, Any] | None, after: Mapping[str, Any] | None
) -> tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]:
    """The fields that are others, as they were and as they are."""
    if before is None or after is None or before == after:
        return (None, None) if before == after else (before, after)
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return {name: before.get(name) for name in names}, {name: after.get(name) for name in names}


def bounded(value: Any) -> Any:
    """The value; the beginning of it as text where it is large."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return value if len(text) <= ASKED_CHARS_MAX else f"{text[:ASKED_CHARS_MAX]}..."


def _asked(query: bytes, body: bytes) -> dict[str, Any]:
    """The fields of a request: what its body says, beside what its query does."""
    fields: dict[str, Any] = dict(parse_qsl(query.decode("latin-1"), keep_blank_values=True))
    if body:
        said = json.loads(body)  # the guard has seen that it is JSON
        fields |= said if isinstance(said, dict) else {"body": said}
    return fields
