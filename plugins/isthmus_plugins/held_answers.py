"""Answers to Produce, and to commits of offsets, that wait until what they ack is confirmed.

Without I/O. An answer waits for the end of each batch of its request, in each partition, under the leader epoch of the
source in which its broker took the request: what another epoch has at that offset may be something else. That is the
latest one that is known, where the broker has led in it since before the request came. One that leads no more, or
again, and has not heard of it, acks (acks=1) what nobody keeps: its answers are refused. A commit's batch is in the
offsets topic.

What is about many partitions, and many answers that may go at once, go in steps, between which the loop does other
things. Each partition is looked at in one of them, and counts as what it is then: an answer that came later would find
the same.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple, Protocol

from isthmus_plugins.api import Gate
from isthmus_plugins.cluster import TopicPartition
from isthmus_protocol import peeks
from isthmus_protocol.error_answers import Cause, error_answer
from isthmus_protocol.error_codes import DUPLICATE_SEQUENCE_NUMBER
from isthmus_protocol.produce_answers import Place, Writes, refused_in
from isthmus_protocol.refusals import Refusal
from isthmus_protocol.schema import ApiKey

END_NOT_KNOWN: Final = 2**63 - 1
"""Where a batch ends that the broker has, without saying where."""
PLACES_AT_ONCE: Final = 100
"""Partitions of one step: a millisecond."""
ANSWERS_AT_ONCE: Final = 500
"""Answers of one step that are told the end of a log, or taken off the list of those that wait."""
LATE_AT_ONCE: Final = 20
"""The same of those that are refused: each may be an answer of its own, which is encoded again."""
_COSTS_REFUSED: Final = PLACES_AT_ONCE // LATE_AT_ONCE

Results = Sequence[tuple[bytes, Sequence[tuple[int, int, int]]]]
"""Of a Produce answer: ``[(topic, [(partition, error code, base offset)])]``."""
Said = Callable[[bytes, Mapping[Place, Refusal]], "bytes | Gate"]
"""Makes of a frame and what is refused of it the one that goes out."""


class Needs(Protocol):
    """What an ack needs now."""

    def confirmed_end(self, place: TopicPartition, epoch: int, transactional: bool) -> int | None:
        """Up to which offset everybody who must have a partition's records has them, of a leader epoch of the source.

        None: nobody must have any.
        """

    def leader_epoch(self, place: TopicPartition) -> int:
        """The latest leader epoch that is known, -1 for none."""

    def has_led(self, place: TopicPartition, broker_id: int, since: float) -> bool:
        """Whether a broker (-1 for not known which) may have led in that epoch since a time, in monotonic seconds."""


class _Answer(Gate):
    """An answer that waits, and for what."""

    __slots__ = ("_refusals", "_refused", "_sent", "began", "deadline", "places", "transactional")

    def __init__(
        self,
        frame: bytes,
        refused: Callable[[bytes, Mapping[Place, Refusal]], bytes],
        transactional: bool,
        began: float,
        deadline: float,
    ) -> None:
        """``refused`` makes of ``frame`` the one that goes out where something is refused of it."""
        super().__init__()
        self._sent = frame
        self._refused = refused
        self._refusals: dict[Place, Refusal] = {}
        self.transactional = transactional
        self.began = began
        self.deadline = deadline
        self.places: dict[TopicPartition, Place] = {}
        """What it waits for; by partition: what the frame calls it."""

    def let_go(self, place: TopicPartition, refusal: Refusal | None = None) -> None:
        """A partition needs to be waited for no longer."""
        named = self.places.pop(place, None)
        if named is None:
            return
        if refusal is not None:
            self.refuse(named, refusal)
        if not self.places:
            self.open(self.says)

    def refuse(self, named: Place, refusal: Refusal) -> None:
        """Have the answer say so of a partition, as the frame calls it."""
        self._refusals[named] = refusal

    @property
    def is_refused(self) -> bool:
        """Whether something is refused of it."""
        return bool(self._refusals)

    @property
    def says(self) -> bytes:
        """What goes out."""
        return self._refused(self._sent, self._refusals) if self._refusals else self._sent


_NOT_TAKEN: Final[TopicPartition] = "", -1
"""Stands for the partitions of an answer that were not come to yet, so that it does not go out."""


class LargeAnswer(_Answer):
    """One about many partitions, which is taken step by step. What goes out is made behind its gate."""

    __slots__ = ("_error", "_made")

    def __init__(self, frame: bytes, made: Said, transactional: bool, began: float, deadline: float) -> None:
        super().__init__(frame, lambda frame, refusals: frame, transactional, began, deadline)
        self._made = made
        self._error: Exception | None = None
        self.places[_NOT_TAKEN] = b"", -1
        self.then(self._goes_out)

    def taken(self) -> None:
        """All of its partitions are waited for, or need not be."""
        self.let_go(_NOT_TAKEN)

    def fail(self, error: Exception) -> None:
        """It cannot be taken: whoever waits for it has the error raised."""
        self._error = error
        self.places.clear()
        self.open(self._sent)

    def _goes_out(self, frame: bytes) -> bytes | Gate:
        if self._error is not None:
            raise self._error
        return self._made(frame, self._refusals) if self._refusals else frame


NO_EPOCH: Final = -1
"""Of a partition that is not known yet."""
FIRST_EPOCH: Final = 0


class Wait(NamedTuple):
    """One partition that an answer waits for, up to ``end``."""

    end: int
    number: int
    epoch: int
    answer: _Answer


class HeldAnswers:
    """All answers of a proxy that wait for one condition."""

    def __init__(
        self,
        needs: Needs,
        clock: Callable[[], float],
        name: str = "it",
        limit_s: float | None = None,
        lets_go: bool = False,
    ) -> None:
        """``name``: of what must confirm. ``limit_s``: no answer waits longer. ``lets_go``: then it goes as it is."""
        self._needs = needs
        self._clock = clock
        self._name = name
        self._limit_s = float("inf") if limit_s is None else limit_s
        self._lets_go = lets_go
        self.unconfirmed = 0
        """Answers that went out although something of what they ack was not confirmed in time."""
        self._numbers = itertools.count()
        self._waiting: dict[TopicPartition, tuple[list[Wait], list[Wait]]] = {}
        """By partition: heaps of what plain and what transactional producers wait for."""
        self._due: dict[TopicPartition, None] = {}
        """Partitions that may be confirmed further, and have not been looked at since that was said."""
        self._left = PLACES_AT_ONCE
        """So much may be let go before the loop does other things."""
        self._taking = 0
        """Answers of many partitions that come in steps."""
        self._deadlines: list[tuple[float, int, _Answer]] = []
        self._unknown_ends: dict[TopicPartition, list[Wait]] = {}
        self._late: dict[TopicPartition, Wait] = {}
        """What was waited for in vain, the first of it, until it is confirmed or need not be."""

    def hold(
        self, broker_id: int, version: int, written: Writes, names: Mapping[bytes, str], began: float, frame: bytes
    ) -> bytes | Gate:
        """A Produce answer as it goes out: at once, or when it may. Raises MalformedFrame.

        ``broker_id``: who answered, -1 for not known. ``names``: by topic in the frame: its name, for topics on a
        synchronous link. ``began``: when the request came.
        """
        now = self._clock()
        deadline = min(began + written.timeout_ms / 1000, now + self._limit_s)
        answer = _Answer(frame, partial(refused_in, version), written.transactional, now, deadline)
        for topic, results in peeks.produce_response(version, frame):
            name = names.get(topic)
            if name is not None:
                self._take(answer, broker_id, began, written.records, topic, name, results)
        return self._held(answer)

    def hold_many(self, written: Writes, began: float, frame: bytes, made: Said) -> LargeAnswer:
        """The same of an answer about many partitions, which does not go out before :meth:`take` is through.

        ``made``: called on the loop when it goes out, if something is refused of it.
        """
        now = self._clock()
        self._taking += 1
        deadline = min(began + written.timeout_ms / 1000, now + self._limit_s)
        return LargeAnswer(frame, made, written.transactional, now, deadline)

    def take(
        self,
        answer: LargeAnswer,
        broker_id: int,
        written: Writes,
        names: Mapping[bytes, str],
        began: float,
        results: Results,
    ) -> Iterator[None]:
        """Have it wait, step by step, for what :meth:`hold` would have it wait for. To be gone through, or
        :meth:`give_up`, once."""
        left = PLACES_AT_ONCE
        for topic, partitions in results:
            name = names.get(topic)
            if name is None:
                continue
            for begin in range(0, len(partitions), PLACES_AT_ONCE):
                some = partitions[begin : begin + PLACES_AT_ONCE]
                self._take(answer, broker_id, began, written.records, topic, name, some)
                left -= len(some)
                if left <= 0:
                    yield
                    left = PLACES_AT_ONCE
        answer.taken()
        if answer.places:
            self._held(answer)
        self._taking -= 1

    def give_up(self, answer: LargeAnswer, error: Exception) -> None:
        """It is not taken any further: whoever waits for it has the error raised."""
        self._taking -= 1
        answer.fail(error)

    def _take(
        self,
        answer: _Answer,
        broker_id: int,
        began: float,
        records: Mapping[Place, int],
        topic: bytes,
        name: str,
        results: Iterable[tuple[int, int, int]],
    ) -> None:
        """Have it wait for partitions of one topic."""
        for partition, code, base_offset in results:
            if code in (0, DUPLICATE_SEQUENCE_NUMBER):
                known = code == 0 and base_offset >= 0
                end = base_offset + records.get((topic, partition), 1) if known else END_NOT_KNOWN
                place, named = (name, partition), (topic, partition)
                if self._needs.has_led(place, broker_id, began):
                    self._wait(answer, place, named, end)
                elif (
                    self._needs.confirmed_end(place, self._needs.leader_epoch(place), answer.transactional) is not None
                ):
                    answer.refuse(named, _fenced(place))

    def hold_commit(
        self, place: TopicPartition, transactional: bool, wait_s: float, frame: bytes, refused: Callable[[], bytes]
    ) -> bytes | Gate:
        """The answer to a commit whose records the broker has, somewhere in ``place``.

        ``refused`` makes the answer that says: not yet. It goes out after ``wait_s``, and when the leader moves.
        """
        now = self._clock()
        answer = _Answer(frame, lambda frame, refusals: refused(), transactional, now, now + wait_s)
        self._wait(answer, place, (b"", place[1]), END_NOT_KNOWN)
        return self._held(answer)

    def _held(self, answer: _Answer) -> bytes | Gate:
        if not answer.places:
            return answer.says
        heapq.heappush(self._deadlines, (answer.deadline, next(self._numbers), answer))
        return answer

    def _wait(self, answer: _Answer, place: TopicPartition, named: Place, end: int) -> None:
        epoch = self._needs.leader_epoch(place)
        kinds = self._waiting.get(place)
        if kinds is None:
            kinds = self._waiting[place] = ([], [])
        waiting = kinds[answer.transactional]
        # Whatever is confirmed lets go of what waits for it: what ends behind that waits, too.
        if not waiting or waiting[0].end > end or waiting[0].epoch != epoch:
            confirmed = self._needs.confirmed_end(place, epoch, answer.transactional)
            if confirmed is None or confirmed >= end:
                return
        answer.places[place] = named
        wait = Wait(end, next(self._numbers), epoch, answer)
        if end == END_NOT_KNOWN:
            self._unknown_ends.setdefault(place, []).append(wait)
        else:
            heapq.heappush(waiting, wait)

    # ---- what lets answers go ----

    def confirmed(self, place: TopicPartition) -> bool:
        """More of a partition is confirmed, or less must be, or its leader changed.

        Whether :meth:`look_at_some` is to be called, as more may go than goes at once.
        """
        if self._left > 0:
            self._look_at(place)
        else:
            self._due[place] = None
        return bool(self._due)

    def _look_at(self, place: TopicPartition) -> None:
        """Let go what of a partition may go. It remains due while there is more of it than may go now."""
        late = self._late.get(place)
        if late is not None:
            epoch = self._needs.leader_epoch(place)
            confirmed = self._needs.confirmed_end(place, epoch, late.answer.transactional)
            if confirmed is None or confirmed >= late.end or epoch != late.epoch:
                del self._late[place]
        for transactional, waiting in enumerate(self._waiting.get(place, ())):
            if not waiting:
                continue
            newest = self._needs.leader_epoch(place)
            if newest == FIRST_EPOCH and waiting[0].epoch == NO_EPOCH:
                # A partition that was not seen before: it has had no other epoch.
                waiting[:] = [wait._replace(epoch=newest) if wait.epoch == NO_EPOCH else wait for wait in waiting]
            confirmed = self._needs.confirmed_end(place, newest, bool(transactional))
            while waiting and (
                not waiting[0].answer.places
                or waiting[0].epoch != newest
                or confirmed is None
                or confirmed >= waiting[0].end
            ):
                if self._left <= 0:
                    self._due[place] = None
                    return
                wait = heapq.heappop(waiting)
                if not wait.answer.places:
                    self._left -= 1
                    continue
                # Whoever leads now knows: an idempotent producer sends it again, and learns what became of it.
                refusal = None if wait.epoch == newest else _fenced(place)
                self._left -= 1 if refusal is None and not wait.answer.is_refused else _COSTS_REFUSED
                wait.answer.let_go(place, refusal)

    @property
    def is_due(self) -> bool:
        """Whether some partition is to be looked at by :meth:`look_at_some`."""
        return bool(self._due)

    def any_confirmed(self) -> None:
        """Any partition may be confirmed further, or need less: all are to be looked at by :meth:`look_at_some`."""
        self._due.update(dict.fromkeys(self._waiting))  # what is due already keeps its turn

    def look_at_some(self) -> bool:
        """Look at some partitions that may be confirmed further; whether there are more."""
        self._left = PLACES_AT_ONCE
        for place in list(itertools.islice(self._due, PLACES_AT_ONCE)):
            if self._left <= 0:
                break
            self._due.pop(place, None)
            self._look_at(place)
            idle = not any(self._waiting.get(place, ()))
            if idle and place not in self._late and place not in self._unknown_ends:
                self._waiting.pop(place, None)
        return bool(self._due)

    def take_unknown_ends(self) -> dict[TopicPartition, list[Wait]]:
        """What waits for ends that the broker did not report, of batches that it has: the log's end is enough then."""
        taken, self._unknown_ends = self._unknown_ends, {}
        return taken

    def ends_read(self, place: TopicPartition, waits: Sequence[Wait], log_end: int | None) -> Iterator[None]:
        """A look at the log that began after ``waits`` were taken found its end there; None: it failed.

        Step by step. To be gone through; then :meth:`look_at_some` is to be called.
        """
        if log_end is None:
            self._unknown_ends.setdefault(place, []).extend(waits)
            return
        for begin in range(0, len(waits), ANSWERS_AT_ONCE):
            if begin:
                yield
            kinds = self._waiting.setdefault(place, ([], []))
            for wait in waits[begin : begin + ANSWERS_AT_ONCE]:
                known = wait._replace(end=log_end)
                heapq.heappush(kinds[wait.answer.transactional], known)
                if self._late.get(place) is wait:
                    self._late[place] = known
        self._due[place] = None

    def lapse(self) -> Iterator[None]:
        """Refuse all that waits, step by step. To be gone through: none of it is acked from the call on."""
        refusals: dict[TopicPartition, Refusal] = {}
        for _, _, answer in self._deadlines:
            for place, named in answer.places.items():
                if place not in refusals:
                    refusals[place] = self._not_confirmed(place)
                answer.refuse(named, refusals[place])
        return self.expire_some(max((deadline for deadline, _, _ in self._deadlines), default=0.0))

    def expire_some(self, now: float) -> Iterator[None]:
        """Answer what has waited for as long as its producer does, step by step. To be gone through."""
        left, gone = LATE_AT_ONCE, 0
        while self._deadlines and (not self._deadlines[0][2].places or self._deadlines[0][0] <= now):
            _, _, answer = heapq.heappop(self._deadlines)
            if not answer.places:
                gone += 1
                if not gone % ANSWERS_AT_ONCE:
                    yield
            self.unconfirmed += self._lets_go and bool(answer.places)
            for place in list(answer.places):
                self._note_late(place, answer)
                answer.let_go(place, None if self._lets_go else self._not_confirmed(place))
                left -= 1
                if left <= 0:
                    yield
                    left = LATE_AT_ONCE

    def _not_confirmed(self, place: TopicPartition) -> Refusal:
        reason = f"{self._name} has not confirmed it"
        return error_answer(Cause.NOT_CONFIRMED, ApiKey.PRODUCE, f"{place[0]}-{place[1]}", reason)

    def _note_late(self, place: TopicPartition, answer: _Answer) -> None:
        if place in self._late:
            return
        kinds = self._waiting.setdefault(place, ([], []))
        for wait in (*kinds[answer.transactional], *self._unknown_ends.get(place, ())):
            if wait.answer is answer:
                self._late[place] = wait
                return

    # ---- what others ask ----

    @property
    def waits(self) -> bool:
        """Whether some answer may be waiting."""
        return bool(self._deadlines or self._taking)

    @property
    def has_unknown_ends(self) -> bool:
        return bool(self._unknown_ends)

    def oldest(self, place: TopicPartition, beyond: int = -1) -> float | None:
        """Since when the first answer for a partition waits, or waited in vain, for what is at ``beyond`` or later.

        None: none does.
        """
        waiting = self._waiting.get(place)
        if waiting is None:
            return None
        firsts = []
        for heap in waiting:  # what ends first was, as a rule, written first
            if heap and heap[0].end <= beyond:
                firsts += [wait for wait in heap if wait.end > beyond]
            else:
                firsts += heap[:1]
        began = [wait.answer.began for wait in (*firsts, *self._unknown_ends.get(place, ())) if wait.answer.places]
        if place in self._late and self._late[place].end > beyond:
            began.append(self._late[place].answer.began)
        return min(began, default=None)


def _fenced(place: TopicPartition) -> Refusal:
    return error_answer(Cause.FENCED, ApiKey.PRODUCE, f"{place[0]}-{place[1]}", "the partition's leader moved")
