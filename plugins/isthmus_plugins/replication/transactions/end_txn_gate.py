"""Answers to EndTxn that commit, until the other side has the decision.

Without I/O. An answer waits until the transaction log was read up to where it ended after the broker had answered, and
then until no decision of its transactional id is outstanding. No longer than :data:`HELD_S`: heartbeats wait behind it.

Many are looked at, let go and refused in steps, between which the loop does other things. Each counts as what it is in
its step: an answer that came later would find the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from isthmus_plugins.api import Gate
from isthmus_protocol.error_answers import Cause, error_answer
from isthmus_protocol.messages import decode_request
from isthmus_protocol.refusals import refuse_all
from isthmus_protocol.schema import ApiKey

HELD_S: Final = 3.0
LOOKED_AT_ONCE: Final = 500
"""Answers of one step, in which none goes: half a millisecond."""
_COSTS_GONE: Final = 5
"""So many of them cost what one does that goes out."""
LATE_AT_ONCE: Final = 20
"""Answers of one step that are refused: each is decoded and encoded."""


@dataclass(slots=True, eq=False)
class HeldTransaction:
    """One answer that waits."""

    transactional_id: str
    request: bytes
    frame: bytes
    deadline: float
    partition: int | None = None
    log_end: int | None = None
    """Of that partition, read after the broker's answer."""
    gate: Gate = field(default_factory=Gate)


class EndTxnGate:
    """All answers to EndTxn that wait."""

    def __init__(
        self,
        reached: Callable[[int], int],
        outstanding: Callable[[str], bool],
        clock: Callable[[], float],
        on_unknown_end: Callable[[], None],
    ) -> None:
        """``reached(partition)``: up to where a partition of the transaction log is read. ``outstanding(transactional
        id)``: whether some decision of it is not known to be on the other side, as far as the log is read.
        ``on_unknown_end``: called when the log's end is wanted."""
        self._reached = reached
        self._outstanding = outstanding
        self._clock = clock
        self._waiting: dict[HeldTransaction, None] = {}
        self._unknown_ends: list[HeldTransaction] = []
        self._on_unknown_end = on_unknown_end
        self._active = True

    def hold(self, transactional_id: str, request: bytes, frame: bytes) -> Gate:
        """The broker has answered a commit without an error."""
        answer = HeldTransaction(transactional_id, request, frame, self._clock() + HELD_S)
        self._waiting[answer] = None
        self._unknown_ends.append(answer)
        self._on_unknown_end()
        return answer.gate

    @property
    def has_few(self) -> bool:
        """Whether :meth:`check` has one step, whatever may go."""
        return len(self._waiting) * (1 + _COSTS_GONE) <= LOOKED_AT_ONCE

    def take_unknown_ends(self) -> list[HeldTransaction]:
        """Answers whose log end is to be read from now on."""
        taken, self._unknown_ends = self._unknown_ends, []
        return [answer for answer in taken if answer in self._waiting]

    def ends_read(self, answers: Iterable[HeldTransaction]) -> None:
        """Their partition and log end were read, or not. Then :meth:`check` is to be called."""
        self._unknown_ends += [answer for answer in answers if answer.log_end is None]

    def follow(self, active: bool) -> None:
        """Whether an answer needs anything. Then :meth:`check` is to be called."""
        self._active = active

    def check(self) -> Iterator[None]:
        """More was read, or is confirmed, or less is needed: let go what may, step by step. To be gone through."""
        left = LOOKED_AT_ONCE
        for answer in list(self._waiting):
            if left <= 0:
                yield
                left = LOOKED_AT_ONCE
            if answer not in self._waiting:  # any more
                continue
            left -= 1
            if not self._active or answer.gate.dropped or self._may_go(answer):
                left -= _COSTS_GONE
                del self._waiting[answer]
                answer.gate.open(answer.frame)

    def _may_go(self, answer: HeldTransaction) -> bool:
        return (
            answer.log_end is not None
            and answer.partition is not None
            and self._reached(answer.partition) >= answer.log_end
            and not self._outstanding(answer.transactional_id)
        )

    def expire(self, now: float) -> Iterator[list[str]]:
        """Answer what has waited for too long, so that its client asks again, step by step; the ids of each step.

        To be gone through.
        """
        late = [answer for answer in self._waiting if answer.deadline <= now]
        for begin in range(0, len(late), LATE_AT_ONCE):
            step = [answer for answer in late[begin : begin + LATE_AT_ONCE] if answer in self._waiting]
            for answer in step:
                del self._waiting[answer]
                answer.gate.open(_not_confirmed(answer.request, answer.transactional_id))
            yield [answer.transactional_id for answer in step]


def _not_confirmed(request: bytes, transactional_id: str) -> bytes:
    """An answer after which its client asks again."""
    head, payload = decode_request(request)
    reason = "a synchronous link has not confirmed it"
    refusal = error_answer(Cause.NOT_CONFIRMED, ApiKey.END_TXN, f"the commit of {transactional_id}", reason)
    refused = refuse_all(head, payload, refusal)
    assert refused is not None
    assert refused.answer is not None
    return refused.answer
