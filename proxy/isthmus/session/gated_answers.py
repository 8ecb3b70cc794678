"""The answers of one connection that wait: one at a gate, and whatever comes behind it.

No I/O: :class:`isthmus.session.downstream.Downstream` has one of these from the first gate on, until all have gone out.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol

from isthmus.histogram import Histogram
from isthmus_plugins.api import Gate, Tap
from isthmus_plugins.clock import monotonic

if TYPE_CHECKING:
    from isthmus.session.dispatch import Route


class GateCounts:
    """What all gates of the process add up to."""

    __slots__ = ("time", "waiting")

    def __init__(self) -> None:
        self.waiting = 0
        """Gates that sessions wait for."""
        self.time = Histogram()
        """From the broker's answer to the opening; those that were dropped are not in it."""


class _Waiting:
    """An answer that waits at ``gate``, or behind others: then it has its ``frame``, and no gate any more."""

    __slots__ = ("_answers", "frame", "gate", "route", "since")

    def __init__(self, answers: GatedAnswers, route: Route) -> None:
        self._answers = answers
        self.gate: Gate | None = None
        self.frame: bytes | None = None
        self.route = route
        self.since = monotonic()

    def opened(self) -> None:
        assert self.gate is not None
        self._answers.opened(self, self.gate)


class Sender(Protocol):
    """The connection that the answers go out on."""

    def send_answers(self, data: bytes) -> None:
        """Their turn has come."""

    def gate_passed(self, tap: Tap, answer: bytes) -> None:
        """Of this answer the gate has opened, which the tap is to note."""

    def gate_opened(self) -> None:
        """A gate has, and what could go out has."""

    def gate_failed(self, route: Route, error: Exception) -> None:
        """A hook raised this."""


class GatedAnswers:
    """Answers in their order, from the first one that waits at its gate on."""

    __slots__ = ("_counts", "_queue", "_sender", "waiting_bytes")

    def __init__(self, counts: GateCounts, sender: Sender) -> None:
        self._counts = counts
        self._sender = sender
        self._queue: deque[_Waiting | bytes] = deque()
        self.waiting_bytes = 0
        """Of frames that are known."""

    def __len__(self) -> int:
        """How many answers, or parts of them, wait."""
        return len(self._queue)

    def add(self, data: bytes) -> None:
        """What goes out behind all that is here."""
        self._queue.append(data)
        self.waiting_bytes += len(data)

    def add_gate(self, gate: Gate, route: Route) -> None:
        """An answer that goes out behind all that is here, and not before its gate is open."""
        waiting = _Waiting(self, route)
        self._queue.append(waiting)
        self._counts.waiting += 1
        self._wait(waiting, gate)

    def opened(self, waiting: _Waiting, gate: Gate) -> None:
        """A gate that was waited for is open."""
        try:
            answer = gate.answer()
        except Exception as error:
            self._sender.gate_failed(waiting.route, error)
            return
        self._wait(waiting, answer)

    def _wait(self, waiting: _Waiting, answer: bytes | Gate) -> None:
        try:
            while isinstance(answer, Gate):
                if not self._queue:  # a hook has closed the connection
                    answer.drop()
                    return
                if not answer.take(waiting.opened):
                    waiting.gate = answer
                    return
                answer = answer.answer()
        except Exception as error:
            self._sender.gate_failed(waiting.route, error)
            return
        if not self._queue:
            return
        waiting.gate = None
        waiting.frame = answer
        self.waiting_bytes += len(answer)
        self._counts.waiting -= 1
        self._counts.time.observe(monotonic() - waiting.since)
        if waiting.route.tap is not None:
            self._sender.gate_passed(waiting.route.tap, answer)
        if self._queue[0] is waiting:
            self._send_first()
        self._sender.gate_opened()

    def _send_first(self) -> None:
        queue, ready = self._queue, []
        while queue:
            first = queue[0]
            data = first.frame if isinstance(first, _Waiting) else first
            if data is None:
                break
            queue.popleft()
            self.waiting_bytes -= len(data)
            ready.append(data)
        if ready:
            self._sender.send_answers(ready[0] if len(ready) == 1 else b"".join(ready))

    def drop(self) -> None:
        """Nothing of this is sent any more."""
        queue, self._queue = self._queue, deque()
        self.waiting_bytes = 0
        for each in queue:
            if isinstance(each, _Waiting) and each.frame is None:
                self._counts.waiting -= 1
                if each.gate is not None:
                    each.gate.drop()
                    each.gate = None
