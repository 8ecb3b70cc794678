"""What a plugin may use: requests and verdicts, and the interfaces of the process it runs in.

A plugin sees this module and :mod:`isthmus_plugins.hookspecs`, the protocol and the control component, and nothing of
the proxy's insides. The proxy's own classes satisfy the interfaces here structurally.

Verdicts of a request hook (see :class:`RequestHook`):

======================  ===============================================================================================
``None``                forward the request as it is
``NEED_MORE``           the frame is only a prefix and not enough: ask again with the whole frame
:class:`Answer`         do not forward; answer the client with this frame, in its turn
:class:`Replace`        forward another frame in place of this one
:class:`Hold`           wait; nothing behind this request on its connection is read until the awaited verdict is there
:class:`Close`          close the connection, for a logged reason
======================  ===============================================================================================
"""

from __future__ import annotations

import enum
import ssl
import struct
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Protocol, TypeAlias

from isthmus_control.acls import EVERY_ACL, AclBinding, AclFilter
from isthmus_control.commands import Body
from isthmus_control.control_state import ControlState
from isthmus_control.model import Link
from isthmus_control.outcome import Outcome
from isthmus_control.sealing import Sealed
from isthmus_protocol.partition_scan import ScannedPartition

if TYPE_CHECKING:
    from isthmus_plugins.observers import LinkObservers


class Gate:
    """An answer that waits. A response hook returns it in the answer's place, another one for each answer; whoever made
    it opens it later, once, with what is to be sent.

    Answers keep their order: whatever comes behind it on its connection waits for it, heartbeats too. Hooks behind the
    one that made it see the frame when it opens.
    """

    __slots__ = ("_frame", "_hooks", "_opened", "dropped")

    def __init__(self) -> None:
        self._frame: bytes | None = None
        self._hooks: tuple[ResponseHook, ...] = ()
        self._opened: Callable[[], None] | None = None
        self.dropped = False
        """Nobody waits for it any more: the client is gone, or its connection was closed."""

    def open(self, frame: bytes) -> None:
        """Send ``frame`` when its turn comes. Only the first call counts, and none if it was dropped.

        It may be opened before the session has taken it.
        """
        if self._frame is None and not self.dropped:
            self._frame = frame
            if self._opened is not None:
                self._opened()

    def then(self, hook: ResponseHook) -> Gate:
        """Have ``hook`` see the frame when the gate has opened, behind those that see it already. Returns itself."""
        self._hooks += (hook,)
        return self

    # The session's side.

    def take(self, opened: Callable[[], None]) -> bool:
        """Call ``opened`` when it opens; True, and it is not called, if it is open. RuntimeError: it was taken."""
        if self._opened is not None:
            raise RuntimeError("a gate stands for one answer")
        self._opened = opened
        return self._frame is not None

    def answer(self) -> bytes | Gate:
        """What the hooks behind an open gate make of its frame: another gate where one of them waits for more.

        Raises what they raise.
        """
        assert self._frame is not None
        answer: bytes | Gate = self._frame
        hooks = self._hooks
        self._let_go()
        for hook in hooks:
            answer = passed_on(hook, answer)
        return answer

    def drop(self) -> None:
        """Nobody waits for it any more."""
        self.dropped = True
        self._let_go()

    def _let_go(self) -> None:
        self._hooks = ()
        self._opened = _nothing


def _nothing() -> None:
    pass


ResponseHook: TypeAlias = Callable[[bytes], bytes | Gate]
"""Takes a whole response frame and returns the frame to send in its place (the same object where nothing changes), or a
gate where that is not to be sent yet."""


AnswerLooks: TypeAlias = Callable[[bytes, float], ResponseHook | None]
"""Takes a whole request frame and when it came, and returns what is to see its answer."""


def passed_on(hook: ResponseHook, answer: bytes | Gate) -> bytes | Gate:
    """``hook`` behind another one that returned ``answer``."""
    return answer.then(hook) if isinstance(answer, Gate) else hook(answer)


def in_turn(first: ResponseHook | None, second: ResponseHook | None) -> ResponseHook | None:
    """What has an answer seen by one hook and then by the other, where there are two."""
    if first is None or second is None:
        return first or second
    return partial(_both, first, second)


def _both(first: ResponseHook, second: ResponseHook, frame: bytes) -> bytes | Gate:
    return passed_on(second, first(frame))


class Request:
    """One request as a hook sees it. It is valid during the call only."""

    __slots__ = ("api_key", "client", "correlation_id", "frame", "leave", "now", "version", "whole")

    def __init__(
        self,
        frame: bytes,
        whole: bool,
        api_key: int,
        version: int,
        correlation_id: int,
        now: float,
        client: Client,
    ) -> None:
        self.frame = frame
        """The frame with its size prefix; a prefix of it while ``whole`` is false."""
        self.whole = whole
        self.api_key = api_key
        self.version = version
        self.correlation_id = correlation_id
        self.now = now
        """When the request's bytes arrived, seconds on the loop's monotonic clock."""
        self.client = client
        self.leave: Leave | None = None
        """Set by a hook that forwards this Produce as it is, and would forward any other to the same single topic."""


class Leave:
    """A hook's leave to forward more Produce requests to one topic without asking again.

    It covers requests of the same connection that have the same bytes up to the end of their only topic: header,
    transactional id, acks, topic. It stands until ``until``, and ends on every connection at once when that is set
    back.
    """

    __slots__ = ("answers", "until")

    def __init__(self, until: float, answers: AnswerLooks | None = None) -> None:
        self.until = until
        """Seconds on the loop's monotonic clock."""
        self.answers = answers
        """For a hook that looks at answers: called with each request that is covered, in the place of the hook. None:
        ask the hook about this one."""


class Client:
    """Who sent a request: one downstream connection."""

    __slots__ = ("address", "broker_id", "listener", "principal", "session_id")

    def __init__(self, session_id: int, address: str, broker_id: int, listener: str = "") -> None:
        self.session_id = session_id
        self.address = address
        self.broker_id = broker_id
        """The broker behind this connection; -1 while it is a bootstrap connection to any of them."""
        self.listener = listener
        """The proxy's own address that it came to, as it is bound (``host:port``)."""
        self.principal: str | None = None
        """Who it is, with its type (``User:app-1``); None: it has not authenticated, or not in a way that is read."""


class _NeedMore(enum.Enum):
    NEED_MORE = enum.auto()


NEED_MORE: Final = _NeedMore.NEED_MORE


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer in the broker's place with this whole response frame."""

    frame: bytes | Gate
    cause: str
    """Counted in the metric of refusals under this name."""


@dataclass(frozen=True, slots=True)
class Replace:
    """Forward ``frame`` instead; ``on_response`` turns the broker's answer into the client's."""

    frame: bytes
    on_response: ResponseHook | None = None
    cause: str = ""
    """Set where part of the request was refused: counted like :attr:`Answer.cause`."""


@dataclass(frozen=True, slots=True)
class Hold:
    """Wait for the verdict. Hooks bound the time themselves."""

    verdict: Awaitable[Verdict]


@dataclass(frozen=True, slots=True)
class Close:
    """Close the client's connection, as a broker does with what it cannot answer."""

    reason: str
    forward: bytes = b""
    """A request without an answer (Produce with acks=0) that is forwarded first: what was not refused of this one."""


Verdict: TypeAlias = Literal[_NeedMore.NEED_MORE] | Answer | Replace | Hold | Close | None


@dataclass(frozen=True, slots=True)
class RequestHook:
    """One plugin's interest in one API, for a range of versions.

    ``on_request`` is called on the fast path, in the order of the connection: it must not block. Several plugins' hooks
    for one API run in the order in which the plugins are configured: what one replaces is what those behind it see, and
    they see the answer first; any other verdict that is not ``None`` ends the matter.
    """

    api_key: int
    on_request: Callable[[Request], Verdict]
    whole: bool = False
    """True if the hook can do nothing with a prefix: it is called once, with the whole frame."""
    versions: tuple[int, int] = (0, 0x7FFF)


# ---- what the process offers ----


class BrokerUnavailable(Exception):
    """A broker did not answer, or not in time. What was asked may have happened."""


class KafkaRefused(Exception):
    """A broker answered with an error that trying again does not mend."""

    def __init__(self, error_code: int, error_name: str, message: str) -> None:
        super().__init__(f"{error_name}: {message}" if message else error_name)
        self.error_code = error_code
        self.error_name = error_name
        self.message = message


class ProduceResult(NamedTuple):
    """A broker's answer for one partition."""

    error_code: int
    error_name: str
    base_offset: int
    message: str


class TransactionMarkers(NamedTuple):
    """The end of a transaction of one producer, to be written to one partition: ``times`` that control record."""

    topic: str
    partition: int
    producer_id: int
    producer_epoch: int
    committed: bool
    coordinator_epoch: int
    times: int = 1


class ProduceConnection(Protocol):
    """A connection of a plugin's own to one broker, for appending whole batches."""

    async def produce(
        self,
        requests: Sequence[Mapping[tuple[str, int], bytes]],
        timeout_ms: int,
        transactional_id: str | None = None,
    ) -> list[dict[tuple[str, int], ProduceResult]]:
        """Append batches, in each request one for each (topic, partition). Raises BrokerUnavailable: fate unknown.

        The requests go out without waiting, and the broker takes them up one after the other, also after it refused
        one. The last has acks=all, those before acks=1: where it stored all, the in-sync replicas have all.

        Transactional batches need a ``transactional_id``, of whatever transaction; one request can hold those of one
        producer id only.
        """

    async def write_markers(
        self, markers: Sequence[TransactionMarkers], timeout_ms: int
    ) -> dict[tuple[str, int], ProduceResult]:
        """Write transaction markers, for each partition those of one producer. Raises BrokerUnavailable: fate unknown.

        Answers have no offset (-1). The broker stamps markers with its own time.
        """

    def close(self) -> None: ...


class FetchPartition(NamedTuple):
    """What to read of one partition. ``topic_id``: 16 bytes."""

    topic_id: bytes
    partition: int
    offset: int
    bytes_max: int
    leader_epoch: int = -1
    """If given, the answer is an error unless this is the broker's own (FENCED_LEADER_EPOCH, UNKNOWN_LEADER_EPOCH)."""


class Fetched(NamedTuple):
    """What was read of one partition."""

    topic_id: bytes
    partition: int
    error_code: int
    high_watermark: int
    log_start: int
    records: memoryview
    last_stable_offset: int = -1
    """All transactions that began before it have ended."""
    aborted: tuple[tuple[int, int], ...] = ()
    """(producer id, first offset) of aborted transactions with records here; only read_committed has them."""


class FetchConnection(Protocol):
    """A connection of a plugin's own to one broker, for reading whole batches."""

    async def fetch(
        self,
        partitions: Sequence[FetchPartition],
        wait_max_ms: int,
        bytes_max: int,
        read_committed: bool = False,
        only_changes: bool = False,
    ) -> list[Fetched]:
        """Read up to the high watermark, or up to the last stable offset. Raises BrokerUnavailable.

        ``only_changes``: partitions in which nothing happened since the last such answer are left out of it.
        """

    def close(self) -> None: ...


class ProducerState(NamedTuple):
    """What a partition's leader knows of a producer (KIP-664)."""

    epoch: int
    last_sequence: int
    """-1: none since the last marker of a newer epoch."""
    coordinator_epoch: int
    """Of the last marker; -1 if there was none."""
    transaction_start: int
    """Offset of the first record of the open transaction, -1 without one."""


class PartitionInfo(NamedTuple):
    leader: int
    """-1: none."""
    leader_epoch: int


class TopicInfo(NamedTuple):
    name: str
    topic_id: bytes
    """16 bytes."""
    partitions: tuple[PartitionInfo, ...]
    replication_factor: int
    internal: bool
    pinned: bool = False
    """Whether it is read from these leaders in these epochs only: each replica is cleaned by itself."""


class CommittedOffset(NamedTuple):
    """A consumer group's position in one partition."""

    offset: int
    metadata: str


class Refused(NamedTuple):
    """A coordinator's error for one partition of a request."""

    error_code: int
    error_name: str


class ClusterApi(Protocol):
    """This proxy's own access to its cluster, under the proxy's identity.

    Every method raises :class:`BrokerUnavailable` and, where the broker refuses for good, :class:`KafkaRefused`.
    """

    async def topics(self) -> Mapping[str, TopicInfo]:
        """All topics, read now."""

    async def topic(self, name: str) -> TopicInfo | None:
        """One topic, read now; None if there is none."""

    async def leader_of(self, topic: str, partition: int) -> int | None:
        """The partition's leader, read now."""

    async def broker_count(self) -> int: ...

    async def log_end(self, topic: str, partition: int) -> int:
        """The leader's log end offset, which may be above the high watermark."""

    async def log_ends(self, partitions: Collection[tuple[str, int]]) -> Mapping[tuple[str, int], int]:
        """The same for many at once; those that cannot be read now are left out."""

    async def high_watermark(self, topic: str, partition: int) -> int: ...

    async def last_stable_offset(self, topic: str, partition: int) -> int:
        """All transactions that began before it have ended."""

    async def high_watermarks(self, partitions: Collection[tuple[str, int]]) -> Mapping[tuple[str, int], int]:
        """The same for many at once; those that cannot be read now are left out."""

    async def offsets_for_times(
        self, asked: Mapping[tuple[str, int], int]
    ) -> Mapping[tuple[str, int], tuple[int, int]]:
        """By (topic, partition) and time (ms; -3: the latest there is): the broker's (offset, time), (-1, -1) for none.

        Those that cannot be read now are left out.
        """

    async def log_start(self, topic: str, partition: int) -> int: ...

    async def epoch_end(self, topic: str, partition: int, epoch: int) -> tuple[int, int]:
        """The leader's largest leader epoch up to ``epoch``, and where it ends: (-1, -1) if it has none.

        The log's end is that of its newest epoch (OffsetForLeaderEpoch, KIP-101).
        """

    async def delete_records(self, topic: str, partition: int, before: int) -> int:
        """Delete the records below an offset; returns where the log starts now."""

    async def producers(self, topic: str, partition: int) -> Mapping[int, ProducerState]:
        """What the partition's leader knows of producers, by their ids."""

    async def completing_transactions(self) -> Sequence[str]:
        """Transactional ids of the transactions that were decided, and whose markers may not all be written yet."""

    async def topic_configs(self, topic: str) -> Mapping[str, tuple[str | None, str | None]]:
        """By setting: (effective value, what it would be without the topic's own setting)."""

    async def effective_configs(
        self, topics: Sequence[str], known: bytes | None = None
    ) -> tuple[bytes, Mapping[str, Mapping[str, str | None]] | None]:
        """The effective settings of many topics, with a digest of all that the broker said.

        None in their place if that is ``known`` still; topics that cannot be described are left out.
        """

    async def create_topic(
        self, topic: str, partitions: int, replication_factor: int, configs: Mapping[str, str]
    ) -> bytes:
        """The new topic's id. KafkaRefused with TOPIC_ALREADY_EXISTS (36) if there is one."""

    async def delete_topic(self, topic: str) -> None: ...

    async def delete_topic_id(self, topic_id: bytes) -> None:
        """Delete the topic that has this id, and never one that was made in its place. Gone already is no error."""

    async def create_partitions(self, topic: str, total: int) -> None: ...

    async def alter_topic_configs(self, topic: str, configs: Mapping[str, str | None]) -> None:
        """Set these (None: back to the default), leave the others."""

    async def broker_configs(self, name: str) -> Mapping[int, str | None]:
        """The effective value of a broker setting at each broker, None where it does not know the setting."""

    async def cluster_config(self, name: str) -> str | None:
        """The cluster-wide dynamic value of a broker setting, None if it is not set."""

    async def alter_cluster_config(self, name: str, value: str | None, validate_only: bool = False) -> None:
        """Set it (None: remove it). ``validate_only`` asks whether the brokers would."""

    async def groups(self) -> Collection[str]:
        """The ids of all consumer groups that some coordinator knows, of whatever kind."""

    async def committed_offsets(
        self, groups: Collection[str]
    ) -> Mapping[str, Mapping[tuple[str, int], CommittedOffset]]:
        """What groups have committed, by (topic, partition). Groups that cannot be asked now are left out."""

    async def commit_offsets(
        self, group: str, offsets: Mapping[tuple[str, int], CommittedOffset], retention_ms: int | None = None
    ) -> Mapping[tuple[str, int], Refused]:
        """Commit in a group's place, also while it has members; what was not committed, and why.

        Needs ``transaction.partition.verification.enable=false`` (COORDINATOR_NOT_AVAILABLE otherwise). With
        ``retention_ms`` the offsets expire after that time and not before, whatever becomes of the group; it must
        have no members then (UNKNOWN_MEMBER_ID otherwise), and the setting does not matter.
        """

    async def delete_offsets(
        self, group: str, partitions: Collection[tuple[str, int]]
    ) -> Mapping[tuple[str, int], Refused]:
        """Delete positions; what was not deleted, and why (GROUP_SUBSCRIBED_TO_TOPIC: members are there)."""

    async def delete_group(self, group: str) -> None:
        """Delete a group without members. KafkaRefused with NON_EMPTY_GROUP (68) or GROUP_ID_NOT_FOUND (69)."""

    async def group_exists(self, group: str) -> bool:
        """Whether there is a group of this name, of whatever type, as its coordinator knows now."""

    async def acls(self, matching: AclFilter = EVERY_ACL) -> frozenset[AclBinding]:
        """The bindings that a filter matches, read now. The same object as before where none has changed.

        KafkaRefused with SECURITY_DISABLED (54) by a cluster without an authorizer.
        """

    async def create_acls(self, bindings: Collection[AclBinding]) -> None:
        """Create bindings; those that exist stay. KafkaRefused: some may have been created."""

    async def delete_acls(self, bindings: Collection[AclBinding]) -> None:
        """Delete exactly these bindings, those that there are. KafkaRefused: some may have been deleted."""

    async def produce_connection(self, broker_id: int, lane: str) -> ProduceConnection:
        """The connection of this ``lane`` to a broker: made if there is none that is open."""

    async def fetch_connection(self, broker_id: int, lane: str) -> FetchConnection: ...


class ControlApi(Protocol):
    """The cluster's control state, and the way to change it."""

    @property
    def state(self) -> ControlState: ...

    async def append(self, body: Body) -> Outcome:
        """Append a command and return what came of it. Retried until it is known."""

    async def enforced(self, offset: int) -> None:
        """Return when every proxy with an unexpired lease enforces the log up to ``offset``."""

    def subscribe(self, changed: Callable[[ControlState], None]) -> None:
        """Call ``changed`` after each applied command that changed the state."""


@dataclass(frozen=True, slots=True)
class LinkListenerSpec:
    """Where peers' connections come in."""

    host: str
    port: int
    server_tls: ssl.SSLContext | None
    enrolment_token: bytes | None = field(repr=False)


TAP_REQUEST, TAP_ANSWER, TAP_OWN_ANSWER, TAP_GATED, TAP_MORE = 1, 2, 3, 9, 11
"""What a tap is told: a request was forwarded, or answered here; an answer: the broker's has come, the proxy gives one
of its own, the broker's waits at a gate, more first bytes of one have come."""
TAP_BYTES: Final = 512
"""So many first bytes of a frame are enough for a tap."""
TAP_PRODUCED_BYTES: Final = 16 * 1024
"""Of the answer to a Produce, which says something of each partition."""


def tap_answer_bytes(key: int) -> int:
    """How many first bytes a tap is told of an answer; ``key``: API key << 16 | version."""
    return TAP_BYTES if key >> 16 else TAP_PRODUCED_BYTES


TapNote: TypeAlias = tuple[int, int, float, float, int, bytes]
"""Kind (:data:`TAP_REQUEST` ...); session; when it came, and when this was noted (monotonic seconds); API key << 16 |
version; the frame's first bytes, from its size on and as far as they were there, eight at least.

Of a request at most :data:`TAP_BYTES`, of an answer :func:`tap_answer_bytes`; where an answer will have more, up to
that many, more is told: behind a head of an answer (:data:`TAP_HEAD`).
"""
TAP_HEAD: Final = struct.Struct(">ii")
"""Size, as a frame has it, and correlation id: how an answer begins."""


class Tap(Protocol):
    """Is told of all traffic, on the traffic path: it must only take notes."""

    note: Callable[[TapNote], object]
    """Best the ``extend`` of a list: what is called on the traffic path comes into cold caches, and so does every
    object that is kept, a tuple for each note too."""

    def wants_parts(self, session: int, at: float, correlation_id: int) -> bool:
        """Whether to look for the partitions of a request, or of its answer. ``at``: when it was forwarded."""

    def parts(self, session: int, key: int, correlation_id: int, found: Sequence[ScannedPartition]) -> None:
        """All partitions of a Produce request that has several, or of the answer to a Fetch.

        Told where it has more bytes than :data:`TAP_BYTES`, and ``wants_parts`` said so. Of an answer: after its first
        bytes, and before the next answer."""

    def sent(self, session: int, correlation_id: int) -> None:
        """An answer that waited at a gate goes out."""


class PluginContext(Protocol):
    """The process, as a plugin sees it."""

    proxy_name: str
    incarnation: str
    cluster_id: str
    cluster: ClusterApi
    control: ControlApi
    link_listener: LinkListenerSpec | None
    link_client_tls: ssl.SSLContext | None
    fronted_brokers: frozenset[int] | None
    """None: every broker of the cluster."""

    data_directory: Path | None
    """Where plugins keep files (``[data] directory``); None: nowhere."""

    offsets_keyring_file: Path | None
    """Keys of groups' offsets (``[replication] offsets_keyring_file``); None: none."""

    link_observers: LinkObservers
    """Whom replication tells."""

    @property
    def internal_topic_ids(self) -> Collection[bytes]:
        """The ids of the proxies' own topics, 16 bytes each. More may come: it is always the same object."""

    def hide_topic(self, topic_id: bytes) -> None:
        """Count a topic among the proxies' own."""

    def fronts(self, broker_id: int) -> bool:
        """Whether this proxy fronts the broker."""

    def link_listening(self, port: int) -> None:
        """The link listener is bound to this port."""

    @property
    def link_address(self) -> str | None:
        """Where peers reach this proxy's link listener."""

    def secret_of(self, link: Link) -> bytes: ...

    def seal(self, secret: bytes, link_id: str) -> Sealed: ...

    async def topic_name(self, topic_id: bytes) -> str | None:
        """The name of a topic by its id; None if the cluster has no such topic."""

    def known_topic_name(self, topic_id: bytes) -> str | None:
        """The same, if it is known already. An id never changes its topic."""

    async def fence(self) -> None:
        """Return when no client's write that was forwarded before the call can still land."""

    def observe(self, tap: Tap | None) -> None:
        """Have this told of all traffic from now on; None: nobody. There is one at most."""

    @property
    def lease_deadline(self) -> float:
        """Until when (monotonic seconds) this proxy may vouch for what it forwards."""
