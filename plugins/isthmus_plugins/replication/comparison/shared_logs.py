"""Up to where a topic that is there and does not follow yet is its source's: asked, and nothing recorded.

Both clusters keep which cluster wrote which offsets first; the walk along both lists
(:mod:`isthmus_control.shared_prefix`) says where the logs part, and digests of the records before that check the
bookkeeping. What is due to be recorded (:mod:`isthmus_plugins.replication.link.histories`) counts as if it were: the
leader epochs up to the end of each log, where it stopped to follow, and that clients have written what no link brought.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from types import MappingProxyType
from typing import Final, NamedTuple

from isthmus_control.apply import apply
from isthmus_control.commands import Body, Command, TermStart, ToldPartition
from isthmus_control.control_state import ControlState
from isthmus_control.levels import ORIGINS
from isthmus_control.model import FollowerTopic, TopicState
from isthmus_control.origins import Ended, PartitionOrigins
from isthmus_control.outcome import Rejected
from isthmus_control.shared_prefix import PartitionLog, SharedPrefix, shared_prefix
from isthmus_control.states import ReasonCode
from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused, TopicInfo
from isthmus_plugins.links import OperationError
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.comparison.digests import CONTENTS, Verification
from isthmus_plugins.replication.link import calls, features, histories
from isthmus_plugins.replication.link.connection import LinkConnection, LinkLost, LinkRejected
from isthmus_plugins.replication.link.own_logs import RECORDED_AT_MOST, Seen, epochs_due, epochs_of
from isthmus_plugins.replication.logs.reading import read_batches
from isthmus_protocol.records import BatchError

CALL_TIMEOUT_S: Final = 60.0
COMPARED_AT_ONCE: Final = 20
"""Topics: of each both logs are read."""
CHECKED: Final = 100
"""Offsets before the end of what is shared whose records are compared."""
NOTHING_SAID: Final[Mapping[int, int]] = MappingProxyType({})
TOKEN_CHARS: Final = 16


@dataclass(frozen=True, slots=True)
class ComparedPartition:
    """``shared``: up to here the logs are the same. ``unknown``: why nobody knows whether they are beyond, None: they
    part there, or one of them ends. ``differs``: records before it are not the same all the same. ``here``, ``there``:
    where the logs start and end; ``times_here``, ``times_there``: of the first and last batch beyond ``shared``."""

    partition: int
    shared: int
    unknown: str | None
    differs: bool
    here: tuple[int, int]
    there: tuple[int, int]
    times_here: calls.Times | None = None
    times_there: calls.Times | None = None

    @property
    def cut(self) -> int:
        """Offsets of this cluster's log that the source has not."""
        return self.here[1] - self.shared


@dataclass(frozen=True, slots=True)
class ComparedTopic:
    """By partition of this cluster's topic. ``related``: some cluster wrote for both logs, in some partition."""

    topic_id: str
    related: bool
    partitions: tuple[ComparedPartition, ...]

    @property
    def unknown(self) -> str | None:
        return next((each.unknown for each in self.partitions if each.unknown is not None and each.cut), None)

    @property
    def records_cut(self) -> int:
        return sum(each.cut for each in self.partitions)

    @property
    def token(self) -> str:
        """What an operator agrees to who has this topic cut: another one as soon as an end is another one."""
        said = "".join(f",{each.partition}:{each.shared}:{each.here[1]}" for each in self.partitions)
        return sha256((self.topic_id + said).encode()).hexdigest()[:TOKEN_CHARS]


class _Log(NamedTuple):
    origins: PartitionOrigins
    start: int
    end: int


class SharedLogs:
    """For both ends."""

    def __init__(self, context: PluginContext) -> None:
        self._context = context
        self._verification = Verification(context)
        self._turns = asyncio.Semaphore(COMPARED_AT_ONCE)

    # ---- the follower's side ----

    async def compare(
        self,
        peer: LinkConnection,
        source_topic: str,
        source_topic_id: str,
        info: TopicInfo,
        said: Mapping[int, int] = NOTHING_SAID,
        logs: Sequence[tuple[int, int]] | None = None,
    ) -> ComparedTopic | None:
        """How much of the source's topic this cluster's one is; None: the log's level, or the peer, is of before that.

        ``said``: what an operator says is shared, by partition, for where nobody knows. ``logs``: where those of this
        cluster start and end, if that was read just now. Raises BrokerUnavailable, KafkaRefused, also for what the peer
        answers.
        """
        if not self._are_told(peer):
            return None
        try:
            async with self._turns:
                answer = await peer.call(calls.LogOrigins(source_topic), CALL_TIMEOUT_S)
                self._check(answer.topic_id, source_topic, source_topic_id)
                return await self._compared(peer, source_topic, answer, info, said, logs)
        except (LinkRejected, LinkLost, TimeoutError) as error:
            raise BrokerUnavailable(f"the source does not say what its {source_topic} has: {error}") from error
        except (OperationError, BatchError) as error:
            raise BrokerUnavailable(f"{info.name} cannot be read: {error}") from error

    async def walked(
        self, peer: LinkConnection, source_topic: str, source_topic_id: str, info: TopicInfo
    ) -> list[SharedPrefix] | None:
        """By partition of a topic that follows: up to where it may be its source's, whatever the records are.

        None: nothing is said, or the source's topic is another one by now. Raises LinkRejected, LinkLost, TimeoutError,
        BrokerUnavailable.
        """
        if not self._are_told(peer):
            return None
        answer = await peer.call(calls.LogOrigins(source_topic), CALL_TIMEOUT_S)
        if answer.topic_id != source_topic_id:
            return None
        return self._walked(await self._logs(info), answer.partitions)

    def _are_told(self, peer: LinkConnection) -> bool:
        return self._context.control.state.level >= ORIGINS and features.SHARED_PREFIX in peer.peer_features

    @staticmethod
    def _walked(logs: Sequence[_Log], said: Sequence[calls.Origins]) -> list[SharedPrefix]:
        return [
            shared_prefix(
                PartitionLog(histories.FOLLOWER, here.origins, here.start, here.end),
                PartitionLog(histories.SOURCE, PartitionOrigins(there.said.ranges), there.log_start, there.log_end),
            )
            for here, there in zip(logs, said, strict=False)
        ]

    async def _compared(
        self,
        peer: LinkConnection,
        source_topic: str,
        answer: calls.LogOriginsAnswer,
        info: TopicInfo,
        operators: Mapping[int, int],
        limits: Sequence[tuple[int, int]] | None,
    ) -> ComparedTopic:
        logs = await self._logs(info, limits)
        walked = [
            _as_said(found, operators.get(partition), min(here.end, there.log_end))
            for partition, (found, here, there) in enumerate(
                zip(self._walked(logs, answer.partitions), logs, answer.partitions, strict=False)
            )
        ]
        related = bool(operators) or any(
            {each.origin[:2] for each in here.origins.ranges} & {each.origin[:2] for each in there.said.ranges}
            for here, there in zip(logs, answer.partitions, strict=False)
        )
        compacts = answer.compacts or await self._verification.compacts(info.name, info.topic_id)
        asked = []
        for partition, (here, said, found) in enumerate(zip(logs, answer.partitions, walked, strict=False)):
            begin = max(here.start, said.log_start, found.offset - CHECKED)
            # Each side's cleaner comes by when it likes.
            asked.append(calls.LogTail(partition, found.offset if compacts else min(begin, found.offset), found.offset))
        question = calls.LogTails(source_topic, answer.topic_id, tuple(asked))
        there = (await peer.call(question, CALL_TIMEOUT_S)).tails
        ours = await self._tails(info, asked, [log.end for log in logs])
        return ComparedTopic(
            info.id_text,
            related,
            tuple(
                ComparedPartition(
                    partition,
                    found.offset,
                    found.unknown,
                    our.digest != their.digest,
                    (here.start, here.end),
                    (said.log_start, said.log_end),
                    our.times,
                    their.times,
                )
                for partition, (here, said, found, our, their) in enumerate(
                    zip(logs, answer.partitions, walked, ours, there, strict=False)
                )
            ),
        )

    @staticmethod
    def _check(topic_id: str, source_topic: str, source_topic_id: str) -> None:
        if topic_id != source_topic_id:
            raise BrokerUnavailable(f"the source's {source_topic} is another topic by now: {topic_id}")

    # ---- the source's side ----

    async def origins_of(self, topic: str) -> calls.LogOriginsAnswer:
        """Where a topic's records come from, all that this cluster knows. Raises LinkRejected."""
        truncation = self._context.control.state.truncations.get(topic)
        if truncation is not None:
            raise LinkRejected(ReasonCode.SOURCE_TRUNCATING, truncation.describe())
        try:
            info = await self._there(topic)
            logs = await self._logs(info)
            compacts = await self._verification.compacts(info.name, info.topic_id)
        except (BrokerUnavailable, KafkaRefused) as error:
            raise LinkRejected("READ_FAILED", str(error)) from error
        said = (_said(partition, log) for partition, log in enumerate(logs))
        return calls.LogOriginsAnswer(info.id_text, tuple(said), compacts)

    async def tails_of(self, question: calls.LogTails) -> calls.LogTailsAnswer:
        """What stands around some offsets. Raises LinkRejected."""
        try:
            info = await self._there(question.topic)
            if info.id_text != question.topic_id:
                raise LinkRejected("UNKNOWN_TOPIC", f"{question.topic} is another topic by now")
            cluster, partitions = self._context.cluster, [each.partition for each in question.tails]
            ends = await asyncio.gather(*(cluster.log_end(info.name, partition) for partition in partitions))
            return calls.LogTailsAnswer(tuple(await self._tails(info, question.tails, ends)))
        except (BrokerUnavailable, KafkaRefused, OperationError, BatchError) as error:
            raise LinkRejected("READ_FAILED", str(error)) from error

    async def _there(self, topic: str) -> TopicInfo:
        info = await self._context.cluster.topic(topic)
        if info is None:
            raise LinkRejected("UNKNOWN_TOPIC", f"{topic} does not exist here")
        return info

    # ---- one cluster's logs ----

    async def _tails(
        self, info: TopicInfo, tails: Sequence[calls.LogTail], ends: Sequence[int]
    ) -> list[calls.LogTailFound]:
        """Raises BrokerUnavailable, OperationError, BatchError."""
        found = []
        for (partition, begin, shared), end in zip(tails, ends, strict=True):
            digest = await self._verification.digest(info, partition, begin, shared, CONTENTS)
            found.append(calls.LogTailFound(digest.digest, await self._times(info, partition, shared, end)))
        return found

    async def _times(self, info: TopicInfo, partition: int, offset: int, end: int) -> calls.Times | None:
        """Of the first and the last batch of ``[offset, end)`` that can be read now; None: there is none."""
        if offset >= end:
            return None
        end = min(end, await self._context.cluster.high_watermark(info.name, partition))
        first = last = None
        async for _, header, _ in read_batches(self._context, info, partition, offset, end):
            first = header.base_timestamp
            break
        async for _, header, _ in read_batches(self._context, info, partition, max(offset, end - 1), end):
            last = header.max_timestamp
        return None if first is None else calls.Times(first, first if last is None else last)

    async def _logs(self, info: TopicInfo, limits: Sequence[tuple[int, int]] | None = None) -> list[_Log]:
        """What is recorded of each partition, and what is due to be. Raises BrokerUnavailable."""
        name = info.name
        topic_id, partitions = info.id_text, range(len(info.partitions))
        starts, ends = zip(*(await log_limits(self._context, info) if limits is None else limits), strict=True)
        state = self._context.control.state
        known = [state.origins_of(name, topic_id, partition) for partition in partitions]
        if not is_followed(state.follower_topics.get(name), topic_id, known):
            state = _not_following(state, name)
            left = {p: ends[p] for p in partitions if histories.is_as_received(state, (name, topic_id), p)}
            state = self._as_if(state, histories.to_close(state, {(name, topic_id): left}, Ended.DETACHED))
            known = [state.origins_of(name, topic_id, partition) for partition in partitions]
            written = [partition for partition in partitions if not _was_left_open(known[partition])]
            starts_of = {p: TermStart(ends[p], info.partitions[p].leader_epoch) for p in written}
            state = self._as_if(state, histories.to_lead(state, {(name, topic_id): starts_of}))
            logs = [(starts[p], ends[p], info.partitions[p].leader_epoch) for p in written]
            seen = await asyncio.gather(
                *(epochs_of(self._context, (name, p), log[:2], log[2]) for p, log in zip(written, logs, strict=True))
            )
            for partition, epochs, log in zip(written, seen, logs, strict=True):
                state = self._with_epochs(state, Seen(name, topic_id, partition, epochs, log[:2], log[2]))
            known = [
                state.origins_of(name, topic_id, p) if p in written else PartitionOrigins(known[p].ranges[:-1])
                for p in partitions
            ]
        return [_Log(*each) for each in zip(known, starts, ends, strict=True)]

    def _with_epochs(self, state: ControlState, seen: Seen) -> ControlState:
        for _ in range(RECORDED_AT_MOST):
            due = epochs_due(state, [seen])
            if not due:
                return state
            state = self._as_if(state, due)
        raise BrokerUnavailable(f"the leader epochs of {seen.topic}-{seen.partition} are not what is recorded of them")

    def _as_if(self, state: ControlState, bodies: Sequence[Body]) -> ControlState:
        """The state once these are recorded. Raises BrokerUnavailable for what would be refused."""
        now_ms = int(self._context.clock.time() * 1000)
        for body in bodies:
            command = Command(str(uuid.uuid4()), now_ms, self._context.proxy_name, state.applied_offset, body)
            state, outcome = apply(state, state.applied_offset + 1, command)
            if isinstance(outcome, Rejected):
                raise BrokerUnavailable(f"where records come from cannot be told: {outcome.message}")
        return state


async def log_limits(context: PluginContext, info: TopicInfo) -> list[tuple[int, int]]:
    """Where the logs of a topic's partitions start and end. Raises BrokerUnavailable, KafkaRefused."""
    cluster, partitions = context.cluster, range(len(info.partitions))
    ends = await asyncio.gather(*(cluster.log_end(info.name, partition) for partition in partitions))
    starts = await asyncio.gather(*(cluster.log_start(info.name, partition) for partition in partitions))
    return list(zip(starts, ends, strict=True))


def _as_said(found: SharedPrefix, said: int | None, end: int) -> SharedPrefix:
    """What is shared, by an operator's word where nobody has recorded it and it may be."""
    if said is None or found.unknown is None:
        return found
    return SharedPrefix(said) if found.offset <= said <= end else found


def is_followed(record: FollowerTopic | None, topic_id: str, known: Sequence[PartitionOrigins]) -> bool:
    """Whether a link brings a topic's records, so that its source says what is to be recorded of it."""
    follows = record is not None and record.state is TopicState.FOLLOWING and record.topic_id == topic_id
    return follows and any(_was_left_open(each) for each in known)


def _was_left_open(known: PartitionOrigins) -> bool:
    """Whether the end of what came over a link is not recorded: somebody else may have written since."""
    return known.open_range is not None and bool(known.open_range.via)


def _not_following(state: ControlState, topic: str) -> ControlState:
    return state.evolve(follower_topics={name: each for name, each in state.follower_topics.items() if name != topic})


def _said(partition: int, log: _Log) -> calls.Origins:
    told = histories.told(log.origins, partition, 0)
    return calls.Origins(told or ToldPartition(partition, 0, ()), log.start, log.end)
