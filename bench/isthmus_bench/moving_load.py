"""The load generator of ``isthmus bench reverse``: producers that are connected to two clusters, of which one leads.

They write to the one until it takes no more, and then to the other. Each has a request in flight, sends when one is
due, and stays with what it has while that is held. Beside them another producer tries the second cluster all the time,
so that it is known when that one begins to take writes; and, where that is asked for, so does a transactional one,
whose counterpart carries out one transaction after the other at the first cluster.

Runs as a child (:mod:`isthmus_bench.children`): each line of JSON on standard input has it do that once
(:class:`Moving`). It writes a line when it has written for a while, so that the other cluster may be told to lead, and
another one when that has taken writes for a while. Moments are those of CLOCK_MONOTONIC, which all processes of a
machine share.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Final

from isthmus_bench.load import LoadError, RawClient, Target, batch, newest_versions
from isthmus_bench.raw_writes import ADD_PARTITIONS_VERSION, END_TXN_VERSION, Refused, patiently, produce
from isthmus_protocol import peeks
from isthmus_protocol.error_codes import CONCURRENT_TRANSACTIONS
from isthmus_protocol.records import TRANSACTIONAL_BIT, whole_header
from isthmus_protocol.schema import ApiKey

RECORD_BYTES: Final = 100
TRY_S: Final = 0.005
"""How often the second cluster is tried: no pause is known better."""
TRANSACTION_S: Final = 0.02
"""From the end of a transaction to the beginning of the next."""
RETRY_S: Final = 0.005
INIT_PRODUCER_ID_VERSION: Final = 4
TIMEOUT_S: Final = 60.0
"""How long the second cluster may take until it leads."""


@dataclass(frozen=True, slots=True)
class Moving:
    """What to write. ``leader``: None where nobody writes before, and it is waited for ``follower`` alone."""

    leader: Target | None
    follower: Target
    records_per_s: int = 2_000
    batches_per_s: int = 500
    producers: int = 10
    before_s: float = 1.0
    """For so long it is written before the other cluster may be told."""
    after_s: float = 0.5
    """And for so long after that one took its first write."""
    transactional: bool = False
    left_open: bool = False
    """Whether a transaction is open all the time, which nobody ends."""


@dataclass(frozen=True, slots=True)
class Moved:
    """When it happened, in seconds of CLOCK_MONOTONIC. None: that was not asked for."""

    records_per_s: float
    """That were acked before the other cluster was told to lead."""
    held_at: float | None
    """The first write was sent that the leader did not take."""
    accepted_at: float
    """The first write was acked by the other cluster."""
    announced_at: float | None
    """The first transaction was to begin that did not, or that was aborted: a little too early then."""
    transaction_at: float | None
    """The first write in a transaction was acked by the other cluster."""
    after_per_s: float
    """Records that were acked by the other cluster in the time after."""


class _Batches:
    """Batches of one producer, and its connection to one cluster."""

    def __init__(self, target: Target, records: int, stack: ExitStack) -> None:
        self.client = RawClient(target)
        stack.callback(self.client.close)
        newest_versions(self.client)  # as clients begin; behind a proxy the connection is whole then
        self._topic = target.topic
        data = batch(records, RECORD_BYTES)
        self._header = whole_header(data)
        self._payload = data[len(self._header.pack()) :]

    def write(self) -> None:
        """One plain batch. Raises Refused, LoadError."""
        produce(self.client, self._topic, self._header, self._payload, None)

    def write_in(self, transactional_id: str, producer: tuple[int, int], sequence: int) -> None:
        """A batch of a transaction. Raises Refused, LoadError."""
        producer_id, epoch = producer
        header = self._header._replace(
            producer_id=producer_id, producer_epoch=epoch, base_sequence=sequence, attributes=TRANSACTIONAL_BIT
        )
        produce(self.client, self._topic, header, self._payload, transactional_id)


class _Transactions:
    """A transactional producer of one cluster, initialised, whose coordinator its only broker is."""

    def __init__(self, target: Target, stack: ExitStack) -> None:
        self._batches = _Batches(target, 1, stack)
        self._client = self._batches.client
        self._topic = target.topic
        self._id = f"moving-{time.monotonic_ns()}"
        values = {"key_type": 1, "key": self._id, "coordinator_keys": [self._id]}
        version = newest_versions(self._client)[ApiKey.FIND_COORDINATOR]
        patiently(self._client, ApiKey.FIND_COORDINATOR, version, values, RETRY_S)
        who = patiently(self._client, ApiKey.INIT_PRODUCER_ID, INIT_PRODUCER_ID_VERSION, {
            "transactional_id": self._id, "transaction_timeout": 60_000, "producer_id": -1, "producer_epoch": -1,
        }, RETRY_S)[0]  # fmt: skip
        self._producer: tuple[int, int] = (who.producer_id, who.producer_epoch)
        self._sequence = 0

    def begin(self) -> bool:
        """Whether a transaction may touch the topic. Waits where the one before is not over yet."""
        while True:
            frame = self._client.ask_frame(ApiKey.ADD_PARTITIONS_TO_TXN, ADD_PARTITIONS_VERSION, {
                "v3_and_below_transactional_id": self._id, "v3_and_below_producer_id": self._producer[0],
                "v3_and_below_producer_epoch": self._producer[1],
                "v3_and_below_topics": [{"name": self._topic, "partitions": [0]}],
            })  # fmt: skip
            errors = peeks.error_codes(ApiKey.ADD_PARTITIONS_TO_TXN, ADD_PARTITIONS_VERSION, frame) - {0}
            if errors != {CONCURRENT_TRANSACTIONS}:
                return not errors
            time.sleep(RETRY_S)

    def write(self) -> None:
        """Raises Refused, LoadError."""
        self._batches.write_in(self._id, self._producer, self._sequence)
        self._sequence += 1

    def commit(self) -> None:
        """Raises LoadError."""
        patiently(self._client, ApiKey.END_TXN, END_TXN_VERSION, {
            "transactional_id": self._id, "producer_id": self._producer[0], "producer_epoch": self._producer[1],
            "committed": True,
        }, RETRY_S)  # fmt: skip


class _Move:
    """One run. ``stack`` closes connections."""

    def __init__(self, what: Moving, stack: ExitStack) -> None:
        self._what = what
        self._records = max(1, what.records_per_s // what.batches_per_s)
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._held: list[float] = []
        self._acked = [0, 0]
        """Batches, by the first cluster and by the second."""
        self.accepted_at: float | None = None
        self.announced_at: float | None = None
        self.transaction_at: float | None = None
        self._tries = _Batches(what.follower, self._records, stack)
        self._writers: list[tuple[_Batches, _Batches]] = []
        self._transactions: list[_Transactions] = []
        if (leader := what.leader) is None:
            return
        for _ in range(what.producers):
            self._writers.append(
                (_Batches(leader, self._records, stack), _Batches(what.follower, self._records, stack))
            )
        if what.transactional:
            self._transactions = [_Transactions(each, stack) for each in (leader, what.follower)]
        if what.left_open:
            left = _Transactions(leader, stack)
            if not left.begin():
                raise LoadError("no transaction begins there")
            left.write()

    def run(self, ready: Callable[[], None]) -> Moved:
        """``ready`` is called when the other cluster may be told to lead. Raises LoadError."""
        what = self._what
        before = after = 0.0
        with ThreadPoolExecutor(len(self._writers) + 3) as pool:

            def start(*work: Callable[[], None]) -> list[Future[None]]:
                return [pool.submit(self._guarded, each) for each in work]

            try:
                work = start(*(partial(self._write, number) for number in range(len(self._writers))))
                work += start(self._transact) if self._transactions else []
                if self._writers:
                    before = self._rate(0, what.before_s)
                if self._held or self.announced_at is not None:
                    raise LoadError(f"the cluster takes no writes to {what.follower.topic}")
                ready()
                trying = start(self._try, *([self._try_transaction] if self._transactions else []))
                wait(trying, TIMEOUT_S)
                if self._writers:
                    after = self._rate(1, what.after_s)
            finally:
                self._over.set()
        for each in (*work, *trying):
            each.result()
        if self.accepted_at is None or (self._transactions and self.transaction_at is None):
            raise LoadError(f"the other cluster did not take all that it was to take within {TIMEOUT_S:.0f} s")
        held_at = min(self._held, default=None)
        return Moved(before, held_at, self.accepted_at, self.announced_at, self.transaction_at, after)

    def _guarded(self, work: Callable[[], None]) -> None:
        """Where one fails, all end."""
        try:
            work()
        except BaseException:
            self._over.set()
            raise

    def _rate(self, cluster: int, seconds: float) -> float:
        """Records a second that a cluster acks from now on, for so long."""
        began, acked = time.monotonic(), self._acked[cluster]
        self._over.wait(seconds)
        return (self._acked[cluster] - acked) * self._records / (time.monotonic() - began)

    def _write(self, number: int) -> None:
        """One producer, at the one cluster and then at the other. Raises LoadError."""
        interval_s = len(self._writers) / self._what.batches_per_s
        due = time.monotonic() + interval_s * number / len(self._writers)
        first, second = self._writers[number]
        at = first
        while not self._over.wait(max(0.0, due - time.monotonic())):
            sent_at = time.monotonic()
            try:
                at.write()
            except Refused:
                if at is first:
                    with self._lock:
                        self._held.append(sent_at)
                at = second
            else:
                with self._lock:
                    self._acked[at is second] += 1
            due = max(due + interval_s, time.monotonic())

    def _try(self) -> None:
        """Until the other cluster takes a write. Raises LoadError."""
        while not self._over.wait(TRY_S):
            try:
                self._tries.write()
            except Refused:
                continue
            self.accepted_at = time.monotonic()
            return

    def _transact(self) -> None:
        """One transaction after the other, until one does not begin, or end. Raises LoadError."""
        first, _ = self._transactions
        while not self._over.wait(TRANSACTION_S):
            sent_at = time.monotonic()
            begun = first.begin()
            try:
                if begun:
                    first.write()
                    first.commit()
                    continue
            except Refused:  # it took too long, and was aborted
                pass
            self.announced_at = sent_at
            return

    def _try_transaction(self) -> None:
        """Until the other cluster takes a write in a transaction. Raises LoadError."""
        _, second = self._transactions
        while not self._over.wait(TRY_S):
            if second.begin():
                second.write()
                self.transaction_at = time.monotonic()
                second.commit()
                return


def moved(what: Moving, ready: Callable[[], None]) -> Moved:
    """Carry it out once. Raises LoadError."""
    with ExitStack() as stack:
        return _Move(what, stack).run(ready)


def main() -> None:
    print("{}", flush=True)
    for line in sys.stdin:
        command: dict[str, Any] = json.loads(line)
        leader, follower = command.pop("leader"), command.pop("follower")
        what = Moving(None if leader is None else Target(**leader), Target(**follower), **command)
        try:
            said = asdict(moved(what, lambda: print("{}", flush=True)))
        except (OSError, LoadError) as error:
            said = {"error": str(error) or type(error).__name__}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
