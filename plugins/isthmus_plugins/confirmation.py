"""Confirmation of acks: who else must have records before their producers are acked.

A :class:`Confirmer` is one condition, of a plugin (``isthmus_confirmers``): synchronous links are one, "the archive has
it" may be another. The process makes an :class:`AckGate` for each, which holds the answers to Produce that the
condition is about.

The contract:

* *Ordering.* A confirmer speaks of logs, not of requests: up to which offset of a partition it has all. An answer goes
  out when that has passed the last record of its request, in every partition that the confirmer is concerned with;
  answers of one connection keep their order, so one that waits holds those behind it. Of several confirmers each must
  agree, in the order of the plugins.
* *Local view.* It is asked for what the broker answered without error. The request was forwarded at once: that an ack
  waits, or is refused in the end, does not say that the record is not there.
* *Time limit.* An answer waits as long as its producer does (the request's timeout), and no longer than ``limit_s``.
* *Failure policy.* Closed by default: after that time it is answered REQUEST_TIMED_OUT, which producers try again, and
  an idempotent one stores nothing twice. With ``lets_go`` the ack goes out, and is counted
  (``isthmus_acks_unconfirmed_total``). A confirmer that raises ends the connection.
* *Fast path.* Its methods are called between two reads of a socket: no I/O, no waiting. A topic that it is not
  concerned with costs one look-up of bytes, nothing while it is not ``active``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Final, Protocol

from isthmus_control.model import TOPIC_NAME_CHARS_MAX
from isthmus_plugins.api import (
    NEED_MORE,
    Close,
    Gate,
    Hold,
    Leave,
    Replace,
    Request,
    RequestHook,
    ResponseHook,
    Verdict,
)
from isthmus_plugins.aside import ANSWER_BYTES_AT_ONCE, ANSWER_ELEMENTS_AT_ONCE, answered_by_size, aside
from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused, TopicPartition
from isthmus_plugins.held_answers import PLACES_AT_ONCE, HeldAnswers, LargeAnswer
from isthmus_plugins.process import PluginContext
from isthmus_plugins.tasks import Tasks
from isthmus_protocol import peeks
from isthmus_protocol.elements import TooManyElements, at_most, carried
from isthmus_protocol.produce_answers import Place, Writes, refused_in, writes
from isthmus_protocol.refusals import Refusal
from isthmus_protocol.schema import ApiKey
from isthmus_protocol.wire import NeedMore

log = logging.getLogger("isthmus_plugins.confirmation")

STEP_S: Final = 0.2
"""How often is looked at what may have waited for too long."""
KNOWN_MAX: Final = 100_000
"""Topics that are remembered, of each kind."""
TOPICS_AT_ONCE: Final = 500
"""Of a request of many, that the confirmer is asked about in one go: a millisecond."""


class Acks(Protocol):
    """What a confirmer reports of its condition, and asks about those who wait. Called on the loop."""

    def confirmed(self, place: TopicPartition) -> None:
        """More of a partition is confirmed, or less must be."""

    def confirmed_all(self) -> None:
        """The same of any partition."""

    def changed(self) -> None:
        """:attr:`Confirmer.active` changed, or the answers of :meth:`Confirmer.concerns`."""

    def oldest(self, place: TopicPartition, beyond: int = -1) -> float | None:
        """Since when (monotonic seconds) the first answer waits that ends behind an offset of a partition, or None."""


class NoAcks:
    """Nobody waits."""

    def confirmed(self, place: TopicPartition) -> None: ...

    def confirmed_all(self) -> None: ...

    def changed(self) -> None: ...

    def oldest(self, place: TopicPartition, beyond: int = -1) -> float | None:
        return None


class Confirmer:
    """One condition for acks of Produce. Override what differs."""

    name = "confirmer"
    """In logs, metrics and error messages."""
    limit_s: float | None = None
    """No answer waits longer, whatever its producer's timeout is."""
    lets_go = False
    """Whether an ack goes out that was not confirmed in time; it is an error otherwise."""
    active = True
    """False: nothing is held, nor looked at."""

    def bound(self, acks: Acks) -> None:
        """The process holds acks for this confirmer: called once, before clients come."""

    def concerns(self, topic: str) -> bool:
        """Whether acks of a topic may have to wait. Asked once for each topic, until :meth:`Acks.changed`."""
        raise NotImplementedError

    def leader_epoch(self, place: TopicPartition) -> int:
        """The partition's latest leader epoch that is known, -1 for none.

        What is confirmed of one epoch says nothing of another: when it changes, what waits is answered
        NOT_LEADER_OR_FOLLOWER. A confirmer that reads what consumers read needs none.
        """
        return -1

    def has_led(self, place: TopicPartition, broker_id: int, since: float) -> bool:
        """Whether a broker (-1 for not known which) may have led in that epoch since a time, in monotonic seconds.

        Else what it acks of requests that came then waits for nothing, and is answered NOT_LEADER_OR_FOLLOWER.
        """
        return True

    def confirmed_end(self, place: TopicPartition, epoch: int, transactional: bool) -> int | None:
        """Up to which offset a partition's records of a leader epoch are confirmed; None: they need not be.

        ``transactional``: those of transactional producers.
        """
        raise NotImplementedError


class AckGate:
    """Answers to Produce that wait for one confirmer."""

    def __init__(self, context: PluginContext, confirmer: Confirmer) -> None:
        self._context = context
        self._clock = context.clock
        self.confirmer = confirmer
        self._tasks = Tasks(f"acks-{confirmer.name}", context.supervision)
        self.held = HeldAnswers(
            confirmer, context.clock.monotonic, confirmer.name, confirmer.limit_s, confirmer.lets_go
        )
        self._concerned: dict[str, bool] = {}
        self._free: set[bytes] = set()
        """Topics, as frames name them, that the confirmer is not concerned with."""
        self._names: dict[bytes, str] = {}
        """Those that it is concerned with, and their names."""
        self._leave = Leave(float("inf"))
        """For requests whose answers need not wait."""
        self._waiting_leaves: dict[int, Leave] = {}
        """For those whose answers may have to, by the broker that they go to."""
        self._waits = asyncio.Event()
        self._due = asyncio.Event()
        """More may be confirmed than was let go at once."""
        self._turn = asyncio.Lock()
        """Whose answer of many partitions is taken."""
        self._idle = asyncio.Event()
        self._idle.set()
        confirmer.bound(self)

    def start(self) -> None:
        self._tasks.keep("watch", self._watch_for_ever)
        self._tasks.keep("look", self._look_for_ever)

    async def stop(self) -> None:
        await self._tasks.close()

    async def idle(self) -> None:
        """Return when no answer waits."""
        await self._idle.wait()

    # ---- for the confirmer ----

    def confirmed(self, place: TopicPartition) -> None:
        if self.held.confirmed(place):
            self._due.set()

    def confirmed_all(self) -> None:
        self.held.any_confirmed()
        if self.held.look_at_some():
            self._due.set()

    def changed(self) -> None:
        self._concerned.clear()
        self._free.clear()
        self._names = {}  # answers that are on their way keep theirs
        for leave in (self._leave, *self._waiting_leaves.values()):
            leave.until = float("-inf")
        self._leave, self._waiting_leaves = Leave(float("inf")), {}
        self.confirmed_all()

    def oldest(self, place: TopicPartition, beyond: int = -1) -> float | None:
        return self.held.oldest(place, beyond)

    # ---- requests ----

    def hook(self) -> RequestHook:
        return RequestHook(ApiKey.PRODUCE, self.on_produce, pure=True)

    def on_produce(self, request: Request) -> Verdict:
        """Have the answer wait, if it acks records that must be confirmed."""
        if not self.confirmer.active:
            request.leave = self._leave
            return None
        try:
            acks, _, topics = peeks.produce_topics(request.version, request.frame)
        except NeedMore:
            return NEED_MORE
        if all(topic in self._free for topic in topics) or acks == 0:
            if len(topics) == 1 and acks != 0:
                request.leave = self._leave
            return None
        if request.aside:
            return Hold(self._looked_closer(request, topics, carried(partial(writes, request.version, request.frame))))
        return self._look_closer(request, topics)

    async def _looked_closer(self, request: Request, topics: Sequence[bytes], written: Callable[[], Writes]) -> Verdict:
        """The same of a request of many topics: the confirmer is asked on the loop, about some of them at a time.

        ``written``: what the request writes, read in the thread.
        """
        names: dict[bytes, str] = {}
        for begin in range(0, len(topics), TOPICS_AT_ONCE):
            some = topics[begin : begin + TOPICS_AT_ONCE]
            found = self._concerned_of(request, some)
            if found is None:
                known = await self._known(topics)
                return known if isinstance(known, Close) else await self._looked_closer(request, known, written)
            names |= found
            await asyncio.sleep(0)
        if not names:
            return None
        return self._has_wait(request, names, await aside(written))

    def _look_closer(self, request: Request, topics: Collection[bytes]) -> Verdict:
        names = self._concerned_of(request, topics)
        if names is None:
            return Hold(self._resolved(request, topics)) if request.whole else NEED_MORE
        if not names:
            return None
        if not request.whole:
            return NEED_MORE
        broker_id = request.client.broker_id
        if len(topics) == 1 and len(self._names) < KNOWN_MAX:
            self._names |= names
            request.leave = self._waiting_leaves.get(broker_id) or self._leave_to_wait(broker_id)
        return self._has_wait(request, names, writes(request.version, request.frame))

    def _concerned_of(self, request: Request, topics: Collection[bytes]) -> dict[bytes, str] | None:
        """The names of those that the confirmer is concerned with; None: a name is not known."""
        by_id = peeks.topics_are_ids(ApiKey.PRODUCE, request.version)
        names: dict[bytes, str] = {}
        for topic in topics:
            name = self._context.known_topic_name(topic) if by_id else peeks.topic_text(topic)
            if name is None:
                return None
            if self._concerns(name):
                names[topic] = name
            elif len(self._free) < KNOWN_MAX and len(topic) <= TOPIC_NAME_CHARS_MAX:
                self._free.add(topic)
        return names

    def _has_wait(self, request: Request, names: Mapping[bytes, str], written: Writes) -> Verdict:
        """Have the answer to what is written wait."""
        hold = partial(self.hold, request.client.broker_id, request.version, written, names, request.now)
        return Replace(request.frame, hold)

    def _leave_to_wait(self, broker_id: int) -> Leave:
        leave = self._waiting_leaves[broker_id] = Leave(float("inf"), partial(self._on_known, broker_id))
        return leave

    def _on_known(self, broker_id: int, frame: bytes, now: float) -> ResponseHook | None:
        """A request that is like one of before: its only topic is known. None: it has many partitions of
        that, so that the hook is asked, in the thread."""
        version = int.from_bytes(frame[6:8], "big")
        if len(frame) <= ANSWER_BYTES_AT_ONCE:  # nearly all: no bound is needed
            return partial(self.hold, broker_id, version, writes(version, frame), self._names, now)
        try:
            with at_most(ANSWER_ELEMENTS_AT_ONCE):
                return partial(self.hold, broker_id, version, writes(version, frame), self._names, now)
        except TooManyElements:
            return None

    def hold(
        self, broker_id: int, version: int, written: Writes, names: Mapping[bytes, str], began: float, frame: bytes
    ) -> bytes | Gate:
        """See :meth:`~isthmus_plugins.held_answers.HeldAnswers.hold`."""
        answer: bytes | Gate
        if len(written.records) > PLACES_AT_ONCE:
            answer = large = self.held.hold_many(written, began, frame, partial(_refused_by_size, version))
            taken = self._taken(large, broker_id, version, written, names, began, frame)
            self._tasks.start("take", taken)
        else:
            answer = self.held.hold(broker_id, version, written, names, began, frame)
        if isinstance(answer, Gate) and self._idle.is_set():
            self._idle.clear()
            self._waits.set()
        return answer

    async def _taken(
        self,
        answer: LargeAnswer,
        broker_id: int,
        version: int,
        written: Writes,
        names: Mapping[bytes, str],
        began: float,
        frame: bytes,
    ) -> None:
        """An answer of many partitions: it is read in the thread, and the confirmer asked about some at a time."""
        try:
            async with self._turn:
                results = await aside(peeks.produce_response, version, frame)
                for _ in self.held.take(answer, broker_id, written, names, began, results):
                    await asyncio.sleep(0)
        except Exception as error:  # the session's, which ends
            self.held.give_up(answer, error)

    async def _resolved(self, request: Request, topics: Collection[bytes]) -> Verdict:
        """Go on when the names of topic ids have been read from the cluster."""
        known = await self._known(topics)
        return known if isinstance(known, Close) else self._look_closer(request, known)

    async def _known(self, topics: Collection[bytes]) -> list[bytes] | Close:
        """Those of some topics that there are, of which the names have been read from the cluster."""
        try:
            found = await self._context.topic_names(topics)
        except BrokerUnavailable as error:
            return Close(f"topic ids cannot be resolved: {error}")
        # The broker does not know the others, either. It appends to those that it knows, whatever else is named.
        return [topic for topic in topics if topic in found]

    def _concerns(self, topic: str) -> bool:
        concerned = self._concerned.get(topic)
        if concerned is None and len(topic) > TOPIC_NAME_CHARS_MAX:
            return self.confirmer.concerns(topic)
        if concerned is None:
            if len(self._concerned) >= KNOWN_MAX:  # clients name topics that there are not, too
                self._concerned.clear()
            concerned = self._concerned[topic] = self.confirmer.concerns(topic)
        return concerned

    # ---- time ----

    async def _watch_for_ever(self) -> None:
        """Whatever waits is looked at again and again, since time alone may let it go."""
        while True:
            while self.held.waits:
                await asyncio.sleep(STEP_S)
                await self.look()
            self._idle.set()
            await self._waits.wait()
            self._waits.clear()

    async def _look_for_ever(self) -> None:
        """Go on with what may be confirmed, some partitions and answers at a time."""
        while True:
            await self._due.wait()
            if not self.held.look_at_some():
                self._due.clear()
            await asyncio.sleep(0)

    async def look(self) -> None:
        """Answer what has waited for too long; let go what needs to wait no longer."""
        for _ in self.held.expire_some(self._clock.monotonic()):
            await asyncio.sleep(0)
        self.confirmed_all()  # leaders may have moved
        if self.held.has_unknown_ends:
            self._tasks.start("unknown-ends", self._look_at_unknown_ends())

    async def _look_at_unknown_ends(self) -> None:
        """Where logs end that have batches of which the broker did not say where they are."""
        taken = self.held.take_unknown_ends()
        ends: Mapping[TopicPartition, int] = {}
        try:
            ends = await self._context.cluster.log_ends(list(taken))
        except (BrokerUnavailable, KafkaRefused) as error:
            log.warning("log ends not read", extra={"detail": str(error)})
        for number, (place, waits) in enumerate(taken.items()):
            for _ in self.held.ends_read(place, waits, ends.get(place)):
                await asyncio.sleep(0)
            if number % PLACES_AT_ONCE == PLACES_AT_ONCE - 1:
                await asyncio.sleep(0)
        if self.held.look_at_some():
            self._due.set()


def _refused_by_size(version: int, frame: bytes, refusals: Mapping[Place, Refusal]) -> bytes | Gate:
    """A Produce answer in which some partitions are refused: a large one is made in the thread."""
    return answered_by_size(lambda sent: refused_in(version, sent, refusals), frame)
