"""What has to be done before a stream's next record can be written: done, and tried again until it is.

The follower's log says which step is next; each goes on by itself, beside the other streams.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Final

from isthmus_control.commands import CompactFollowerTopic, PartitionEpoch, RecordSourceEpochs
from isthmus_control.model import TRANSACTION_VERIFICATION, TopicState
from isthmus_control.outcome import Rejected
from isthmus_control.states import ReasonCode
from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused
from isthmus_plugins.process import PluginContext, check_lease
from isthmus_plugins.rarely import rare_lines
from isthmus_plugins.replication.follower.log import LogState, Step, StopReason
from isthmus_plugins.replication.follower.position import LOST_REQUEST_MARGIN_S, read_position
from isthmus_plugins.replication.follower.stream import FollowerStream
from isthmus_plugins.replication.follower.transaction_verification import ASK
from isthmus_plugins.replication.link import calls, reasons
from isthmus_plugins.replication.logs import topic_settings
from isthmus_plugins.replication.logs.topic_settings import (
    CLEANUP_POLICY,
    FROZEN,
    MESSAGE_BYTES_MAX,
    OVERRIDES,
    is_compacted,
)
from isthmus_plugins.tasks import Tasks
from isthmus_protocol.error_codes import NOT_ENOUGH_REPLICAS

log = logging.getLogger("isthmus_plugins.replication")

SETTINGS_SPREAD_S: Final = 0.2
"""A broker hears of a topic's new settings a moment after they were made. One that refuses a batch all the same has not
heard of them yet, as a rule: it gets twice as long each time, six seconds in all."""
RETRY_S: Final = 5.0
"""After a trim, a question about transactions, or the taking apart of a batch, that failed."""
DIVIDING_AT_ONCE: Final = 2
"""Large batches that are taken apart at the same time: each costs a core, a thread and some megabytes."""
EPOCHS_AT_ONCE: Final = 1000
"""In one command of the control log, which must stay below a record's size."""


class Prerequisites:
    """What has to be done for the streams of a follower end."""

    def __init__(
        self,
        context: PluginContext,
        tasks: Tasks,
        proceed: Callable[[FollowerStream], None],
        resumed: Callable[[FollowerStream], None],
        limits_raised: Callable[[str, Mapping[str, str]], None],
    ) -> None:
        """``proceed`` is called when something was done for a stream, or cannot be; ``resumed`` when its position was
        read again; ``limits_raised`` before a topic gets larger limits of batches.
        """
        self._context = context
        self._tasks = tasks
        self._proceed = proceed
        self._resumed = resumed
        self._limits_raised = limits_raised
        self._unknown = rare_lines(log, "ended transactions not known")
        self._dividing = asyncio.Semaphore(DIVIDING_AT_ONCE)
        self._epochs_due: dict[FollowerStream, None] = {}
        self._epoch_task: asyncio.Task[None] | None = None

    def begin(self, stream: FollowerStream, step: Step) -> None:
        """Begin a step other than to write, unless that is under way."""
        match step:
            case Step.RECORD_EPOCH:
                self._epochs_due[stream] = None
                if self._epoch_task is None or self._epoch_task.done():
                    self._epoch_task = self._tasks.keep("epochs", self._record_epochs)
            case Step.RESUME:
                self._start_once(stream, step, self._resume)
            case Step.TAKE_KEYLESS:
                self._start_once(stream, step, self._uncompact)
            case Step.RAISE_LIMITS:
                self._start_once(stream, step, self._raise_limits)
            case Step.DIVIDE:
                self._start_once(stream, step, self._divide)
            case Step.TRIM:
                self._start_once(stream, step, self._trim)
            case Step.ASK_ENDED:
                self._start_once(stream, step, self._ask_ended)

    async def leave(self, stream: FollowerStream) -> None:
        """Return when the topic's settings are not being changed for a stream that has ended."""
        for step in (Step.TAKE_KEYLESS, Step.RAISE_LIMITS):
            if (changing := stream.under_way.get(step)) is not None:
                # Else its settings might come after a promotion's.
                await asyncio.wait([changing])

    def _start_once(
        self, stream: FollowerStream, step: Step, work: Callable[[FollowerStream], Coroutine[Any, Any, None]]
    ) -> None:
        """Have ``work`` done for a stream, unless that is under way, and go on with the stream after."""
        if step in stream.under_way:
            return

        async def once() -> None:
            await work(stream)
            if stream.under_way.get(step) is asyncio.current_task():
                del stream.under_way[step]
            self._proceed(stream)

        def ended(task: asyncio.Task[None]) -> None:
            if stream.under_way.get(step) is task:
                del stream.under_way[step]

        task = self._tasks.keep(f"{step.value}-{stream.topic}-{stream.partition}", once)
        task.add_done_callback(ended)
        stream.under_way[step] = task

    async def _record_epochs(self) -> None:
        """Store leader epochs of the source before their first append: the target's log has only its own.

        Whatever is due at the same time goes into one command, and if that is refused each into its own.
        """
        while self._epochs_due:
            due = [
                (stream, epoch) for stream in self._epochs_due if (epoch := stream.follower_log.due_epoch) is not None
            ]
            self._epochs_due.clear()
            try:
                for start in range(0, len(due), EPOCHS_AT_ONCE):
                    some = due[start : start + EPOCHS_AT_ONCE]
                    if await self._append_epochs(some) is not None:
                        for one in some:
                            await self._append_epochs([one], final=True)
                due = []
            except BrokerUnavailable as error:
                log.warning("source epochs not recorded", extra={"detail": str(error)})
                await asyncio.sleep(LOST_REQUEST_MARGIN_S)
            finally:
                self._epochs_due |= {stream: None for stream, _ in due if not stream.follower_log.ended}

    async def _append_epochs(
        self, due: Sequence[tuple[FollowerStream, tuple[int, int]]], final: bool = False
    ) -> Rejected | None:
        """Record epochs in one command, and go on with their streams. ``final``: stop those that are refused."""
        entries = tuple(
            PartitionEpoch(stream.topic, stream.topic_id, stream.partition, epoch, start)
            for stream, (epoch, start) in due
            if stream.follower_log.epoch < epoch
        )
        outcome = await self._context.control.append(RecordSourceEpochs(entries)) if entries else None
        if isinstance(outcome, Rejected) and not final:
            return outcome
        for stream, (epoch, _) in due:
            if isinstance(outcome, Rejected):
                stream.follower_log.stop(StopReason(ReasonCode.INTERNAL_ERROR, outcome.message))
            else:
                stream.follower_log.epoch = max(stream.follower_log.epoch, epoch)
            self._proceed(stream)
        return None

    async def _ask_ended(self, stream: FollowerStream) -> None:
        """Ask the leader end which transactions have ended without a marker, before a gap is filled."""
        follower_log = stream.follower_log
        while (began := follower_log.doubtful) and not stream.connection.lost:
            try:
                answer = await stream.connection.call(
                    calls.EndedTransactions(
                        stream.stream_id, tuple(calls.Began(*each) for each in began.items()), follower_log.end
                    )
                )
                follower_log.resolve(began, answer.ended)
            except Exception as error:  # also what a peer answers that it should not: nothing goes on before
                where = {"topic": stream.topic, "partition": stream.partition}
                self._unknown.one(stream.connection.link_name, {**where, "detail": str(error)})
                await asyncio.sleep(RETRY_S)

    async def _divide(self, stream: FollowerStream) -> None:
        """Take a large batch apart while the loop does everything else."""
        async with self._dividing:
            while stream.follower_log.next_step() is Step.DIVIDE:
                try:
                    stream.follower_log.divide()
                    await asyncio.sleep(0)
                except OSError as error:
                    why = f"the batch at offset {stream.follower_log.end} cannot be taken apart now: {error}"
                    stream.trouble = StopReason(ReasonCode.INTERNAL_ERROR, why)
                    await asyncio.sleep(RETRY_S)

    async def _trim(self, stream: FollowerStream) -> None:
        """Delete what the source has expired: a follower has no retention of its own."""
        follower_log = stream.follower_log
        while (before := follower_log.trim_to) is not None and not follower_log.ended:
            try:
                check_lease(self._context)
                log_start = await self._context.cluster.delete_records(stream.topic, stream.partition, before)
                follower_log.trimmed(log_start)
                stream.trouble = None
            except (BrokerUnavailable, KafkaRefused) as error:
                stream.trouble = StopReason(reasons.BROKER_UNAVAILABLE, f"not trimmed to {before}: {error}")
                log.warning(
                    "follower not trimmed",
                    extra={"topic": stream.topic, "partition": stream.partition, "detail": str(error)},
                )
                await asyncio.sleep(RETRY_S)

    async def _uncompact(self, stream: FollowerStream) -> None:
        """Have a topic take records without a key, which its source has from before it was compacted.

        That it is not compacted is recorded first: it will be again when it has all that the source had since then.
        """
        cluster, control = self._context.cluster, self._context.control
        while stream.follower_log.next_step() is Step.TAKE_KEYLESS:
            try:
                record = control.state.follower_topics.get(stream.topic)
                if record is None or record.state is not TopicState.FOLLOWING or record.topic_id != stream.topic_id:
                    stream.follower_log.stop(StopReason(reasons.CLOSED, "the topic does not follow any more"))
                    return
                if record.compacts:
                    body = CompactFollowerTopic(stream.topic, stream.topic_id, False, record.compacts_since_offset)
                    outcome = await control.append(body)
                    if isinstance(outcome, Rejected):
                        stream.follower_log.stop(StopReason(ReasonCode.INTERNAL_ERROR, outcome.message))
                        return
                    log.info("follower topic compaction", extra={"topic": stream.topic, "compacts": False})
                    continue
                policy = (await cluster.topic_configs(stream.topic))[CLEANUP_POLICY][0]
                if is_compacted({CLEANUP_POLICY: policy}):
                    check_lease(self._context)
                    if stream.follower_log.ended:  # what a promotion sets stays
                        return
                    await cluster.alter_topic_configs(stream.topic, {CLEANUP_POLICY: OVERRIDES[CLEANUP_POLICY]})
                await asyncio.sleep(SETTINGS_SPREAD_S)
                stream.follower_log.takes_keyless()
            except (BrokerUnavailable, KafkaRefused) as error:
                why = str(error)
                if isinstance(error, KafkaRefused):
                    why = reasons.refused(error, "AlterConfigs", f"topic {stream.topic}")
                stream.trouble = StopReason(
                    ReasonCode.TARGET_REFUSES_SETTINGS,
                    f"offset {stream.follower_log.end} has no key, which a compacted topic does not take, and "
                    f"{CLEANUP_POLICY}={OVERRIDES[CLEANUP_POLICY]} cannot be set: {why}",
                )
                await asyncio.sleep(RETRY_S)

    async def _raise_limits(self, stream: FollowerStream) -> None:
        """Have a topic take a batch that is larger than its source's limits, which were lowered since.

        They stay larger while it follows. One that is frozen for a truncation stays so.
        """
        cluster, follower_log = self._context.cluster, stream.follower_log
        while follower_log.next_step() is Step.RAISE_LIMITS:
            needed: dict[str, str] = {}
            try:
                own = await cluster.topic_configs(stream.topic)
                effective = {name: value for name, (value, _) in own.items()}
                if self._is_frozen(stream) or effective.get(MESSAGE_BYTES_MAX) == FROZEN:
                    follower_log.stop(stream.trouble or StopReason(ReasonCode.TRUNCATING, "it is being truncated"))
                    return
                if needed := topic_settings.lower_than(effective, follower_log.refused_bytes):
                    check_lease(self._context)
                    if follower_log.ended:  # what a promotion sets stays
                        return
                    self._limits_raised(stream.topic, needed)
                    await cluster.alter_topic_configs(stream.topic, needed)
                    log.warning("limits of batches raised", extra={"topic": stream.topic, "settings": needed})
                await asyncio.sleep(SETTINGS_SPREAD_S * 2 ** max(0, stream.refusals - 1))
                follower_log.takes_large()
            except (BrokerUnavailable, KafkaRefused) as error:
                why = str(error)
                if isinstance(error, KafkaRefused):
                    why = reasons.refused(error, "AlterConfigs", f"topic {stream.topic}")
                settings = ", ".join(f"{name}={value}" for name, value in needed.items()) or "its limits"
                stream.trouble = StopReason(
                    ReasonCode.TARGET_REFUSES_SETTINGS,
                    f"the batch at offset {follower_log.end} has {follower_log.refused_bytes} bytes, more than "
                    f"{stream.topic} takes, and {settings} cannot be set: {why}",
                )
                await asyncio.sleep(RETRY_S)

    def _is_frozen(self, stream: FollowerStream) -> bool:
        """Whether nobody may append to a topic now: it is truncated, and the stream does not refill the new one."""
        truncation = self._context.control.state.truncations.get(stream.topic)
        return truncation is not None and not truncation.follows and truncation.new_topic_id != stream.topic_id

    async def _resume(self, stream: FollowerStream) -> None:
        """The fate of a request is unknown: wait until it can no longer land, read the log end, go on from there."""
        follower_log = stream.follower_log
        try:
            while follower_log.state is LogState.RESUMING and not stream.connection.lost:
                try:
                    leader = await self._context.cluster.leader_of(stream.topic, stream.partition)
                    if leader != stream.broker_id:
                        where = "has no leader now" if leader is None else f"is led by broker {leader} now"
                        follower_log.stop(StopReason(reasons.MOVED, f"the partition {where}"))
                        break
                    if stream.unverified is not None and (objection := await self._objection(stream)) is not None:
                        follower_log.stop(objection)
                        break
                    await read_position(self._context, stream, follower_log.uncertain or stream.trouble is not None)
                    if not follower_log.queued:
                        stream.trouble = None
                except BrokerUnavailable as error:
                    stream.trouble = StopReason(reasons.BROKER_UNAVAILABLE, str(error))
                    log.warning(
                        "follower position not read",
                        extra={"topic": stream.topic, "partition": stream.partition, "detail": str(error)},
                    )
                    await asyncio.sleep(LOST_REQUEST_MARGIN_S)
        except KafkaRefused as error:
            follower_log.stop(StopReason(ReasonCode.TARGET_REFUSES_RECORDS, f"its position cannot be read: {error}"))
        if not follower_log.ended:
            self._resumed(stream)

    async def _objection(self, stream: FollowerStream) -> StopReason | None:
        """Why the target refuses transactional batches again and again, None if that passes. Raises BrokerUnavailable.

        NOT_ENOUGH_REPLICAS is what brokers say that cannot verify a transaction, and those that lack replicas.
        """
        assert stream.unverified is not None
        end = stream.follower_log.end
        try:
            verifies = (await self._context.cluster.broker_configs(TRANSACTION_VERIFICATION)).get(stream.broker_id)
        except KafkaRefused as error:
            return StopReason(
                ReasonCode.TARGET_REFUSES_RECORDS,
                f"offset {end} is part of a transaction; the target refuses it, and {TRANSACTION_VERIFICATION} cannot "
                f"be read: {error}",
            )
        if verifies == "true":
            return StopReason(
                ReasonCode.TRANSACTION_VERIFICATION_ENABLED,
                f"offset {end} is part of a transaction, and the target's brokers verify transactions: {ASK}",
            )
        code, stream.unverified, stream.refusals = stream.unverified, None, 0
        if code == NOT_ENOUGH_REPLICAS or stream.trouble is None:
            return None
        return stream.trouble
