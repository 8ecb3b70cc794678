"""Requests of EndTxn that commit: their answers wait in the gate, which learns here where the transaction log ended.

It is read after the broker has answered: the decision that is acked stands below it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from isthmus_plugins.api import Gate, Replace, Request, RequestHook, Verdict
from isthmus_plugins.cluster import TopicPartition
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.logs.log_end_reader import LogEndReader
from isthmus_plugins.replication.transactions.end_txn_gate import EndTxnGate, HeldTransaction
from isthmus_plugins.replication.transactions.state_tail import TransactionTail
from isthmus_plugins.tasks import Tasks
from isthmus_protocol import peeks
from isthmus_protocol.messages import decode_request
from isthmus_protocol.schema import ApiKey
from isthmus_protocol.transaction_log import TRANSACTION_TOPIC

log = logging.getLogger("isthmus_plugins.replication")

RETRY_S: Final = 0.05
NAMED_AT_ONCE: Final = 200
"""Transactional ids of one step of the loop whose partitions are found: a millisecond."""


class EndTxnAnswers:
    """Answers to commits of this proxy's clients, held while some link is synchronous."""

    def __init__(
        self,
        context: PluginContext,
        tail: TransactionTail,
        ends: LogEndReader,
        outstanding: Callable[[str], bool],
    ) -> None:
        """``outstanding``: see :class:`~isthmus_plugins.replication.transactions.end_txn_gate.EndTxnGate`."""
        self._clock = context.clock
        self._tail = tail
        self._ends = ends
        self._tasks = Tasks("end-txn-answers", context.supervision)
        self._held = EndTxnGate(tail.reached, outstanding, context.clock.monotonic, self._ask)
        self._active = False
        self._asking = False
        self._due = asyncio.Event()
        """Something may go that was not looked at since."""

    def start(self) -> None:
        self._tasks.keep("check", self._check_for_ever)

    async def stop(self) -> None:
        await self._tasks.close()

    def follow(self, active: bool) -> None:
        """Whether any answer has to wait. Then :meth:`check` is to be called."""
        self._active = active
        self._held.follow(active)

    # ---- requests ----

    def hooks(self) -> list[RequestHook]:
        return [RequestHook(ApiKey.END_TXN, self.on_end_txn, whole=True)]

    def on_end_txn(self, request: Request) -> Verdict:
        """Have the answer to a commit wait for the other side."""
        if not self._active:
            return None
        _, payload = decode_request(request.frame)
        asked: Any = payload
        if not asked.committed:
            return None
        return Replace(request.frame, partial(self.answered, request.version, asked.transactional_id, request.frame))

    def answered(self, version: int, transactional_id: str, request: bytes, frame: bytes) -> bytes | Gate:
        """A broker's answer to a commit as it goes out: at once where it is an error."""
        if not self._active or peeks.error_codes(ApiKey.END_TXN, version, frame) != {0}:
            return frame
        return self._held.hold(transactional_id, request, frame)

    # ---- what answers wait for ----

    def check(self) -> None:
        """More was read, or is confirmed, or less is needed: what may go goes, at once if few wait."""
        if self._held.has_few:
            for _ in self._held.check():
                pass
        else:
            self._due.set()

    async def _check_for_ever(self) -> None:
        while True:
            await self._due.wait()
            self._due.clear()
            for _ in self._held.check():
                await asyncio.sleep(0)

    async def expire(self) -> None:
        """Answer what has waited for too long, so that its client asks again."""
        for transactional_ids in self._held.expire(self._clock.monotonic()):
            for transactional_id in transactional_ids:
                log.warning("commit not confirmed in time", extra={"transactional_id": transactional_id})
            await asyncio.sleep(0)

    def _ask(self) -> None:
        if not self._asking:
            self._asking = True
            self._tasks.start("ends-of-log", self._read_ends_of_log())

    async def _read_ends_of_log(self) -> None:
        """Read where the transaction log ends, for answers that came before; at once for all that come meanwhile."""
        try:
            while taken := self._held.take_unknown_ends():
                by_partition: dict[int, list[HeldTransaction]] = {}
                for number, answer in enumerate(taken, 1):
                    if not number % NAMED_AT_ONCE:
                        await asyncio.sleep(0)
                    answer.partition = self._tail.partition_of(answer.transactional_id)
                    if answer.partition is not None:
                        by_partition.setdefault(answer.partition, []).append(answer)
                places = [(TRANSACTION_TOPIC, partition) for partition in by_partition]
                await self._ends.read(places, partial(self._log_has_ended, by_partition))
                unknown = [answer for answer in taken if answer.partition is None]
                if unknown:
                    self._held.ends_read(unknown)
                    self._tail.wake()
                    await asyncio.sleep(RETRY_S)
        finally:
            self._asking = False

    def _log_has_ended(
        self, waiting: Mapping[int, Sequence[HeldTransaction]], ends: Mapping[TopicPartition, int | None]
    ) -> None:
        for (_, partition), end in ends.items():
            for answer in waiting[partition]:
                answer.log_end = end
            self._held.ends_read(waiting[partition])
        self.check()
