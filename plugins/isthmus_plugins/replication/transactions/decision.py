"""One decision to commit of this cluster's transactions, and how it is sent to the other side of a link."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from isthmus_control.model import Link, ResourceType, Role
from isthmus_plugins.cluster import TopicPartition
from isthmus_plugins.replication.link import calls
from isthmus_plugins.replication.link.connection import LinkConnection
from isthmus_plugins.replication.partitions import LinkPartition, OrderedPlace
from isthmus_protocol.offsets_log import OFFSETS_TOPIC
from isthmus_protocol.records import BatchHeader


@dataclass(slots=True, eq=False)
class Decision:
    """A decision to commit that touches partitions of synchronous links."""

    transactional_id: str
    producer_id: int
    producer_epoch: int
    data_epoch: int
    at: calls.LogPlace
    places: tuple[TopicPartition, ...]
    links: frozenset[str]
    """Over which it has to go, or may have to: where the offsets topic has a state, its groups say whether."""
    seen_at: float
    """Monotonic seconds."""
    started_ms: int = 0
    """When its transaction began, by its coordinator's clock."""
    again: bool = False
    """It was there before this process read the log, and may have been sent: its ends may be those of later ones."""
    ends: dict[TopicPartition, int] = field(default_factory=dict)
    """Where the logs of its partitions ended after it was there: what comes later is another transaction's. A partition
    that is gone has none."""
    unread: set[TopicPartition] = field(default_factory=set)
    """Those whose ends are not read yet."""
    ends_hold: bool = True
    """No record of a later transaction in its epoch may stand below its ends."""
    answered: bool = False
    """Its producer went on in its epoch, and it is not known where it ends: nobody lacks it, EndTxn was answered."""
    goes_open: bool = False
    """These have no leader, say, and it goes to the other side without their ends, and again with them."""
    stored: dict[str, frozenset[TopicPartition]] = field(default_factory=dict)
    """By link whose other side has it: of which partitions it has no end yet, or nothing."""
    left_out: dict[str, frozenset[TopicPartition]] = field(default_factory=dict)
    """Of these partitions the other side has nothing of it: it was sent without them."""
    sent_on: dict[LinkConnection, frozenset[TopicPartition]] = field(default_factory=dict)
    """Both as it was sent last over a connection."""
    held_back: dict[str, frozenset[TopicPartition]] = field(default_factory=dict)
    """By link: where it waits for what is aborted before it, as of the last time that it was to be sent."""
    withheld: set[str] = field(default_factory=set)
    """Links over which it is not sent again before the other side has more of what is Out-Of-Sync there: markers go
    without it."""
    overdue: set[str] = field(default_factory=set)
    """Links over which it is sent again whatever was aborted before it: markers waited for it in vain."""
    groups: dict[TopicPartition, frozenset[str]] = field(default_factory=dict)
    """By partition of the offsets topic: in which groups its transaction has committed offsets there, as far as is
    known."""
    looks_for_groups: bool = False
    """Which these are is not known yet, and may be in a moment."""
    groups_unknown: bool = False
    """Which these are will not be known: any link that leads groups may have to have it."""
    free: set[LinkPartition] = field(default_factory=set)
    """Partitions of the offsets topic that need it not, as it was when the groups were known."""

    @property
    def identity(self) -> tuple[int, int, int]:
        """See :class:`~isthmus_plugins.replication.transactions.marker_order.SentDecision`."""
        return self.at.identity

    @property
    def producer(self) -> tuple[int, int]:
        """(Producer id, epoch) of its transaction's records."""
        return self.producer_id, self.data_epoch

    @property
    def shares_epoch(self) -> bool:
        """Whether other transactions of the producer have the epoch of its records."""
        return self.producer_epoch == self.data_epoch

    @property
    def may_go(self) -> bool:
        """Whether enough is known to send it."""
        return self.ends_hold and (self.goes_open or not self.unread)

    def has_epoch(self, header: BatchHeader) -> bool:
        """See :class:`~isthmus_plugins.replication.transactions.marker_order.SentDecision`."""
        return header.producer_epoch == (self.producer_epoch if header.is_control else self.data_epoch)

    def end_of(self, key: LinkPartition) -> int | None:
        """See :class:`~isthmus_plugins.replication.transactions.marker_order.SentDecision`."""
        if self.answered or key.link in self.withheld:
            return None
        return calls.OPEN_END if key.place in self.unread else self.ends.get(key.place)

    def ends_after(self, key: LinkPartition, offset: int) -> bool:
        """See :class:`~isthmus_plugins.replication.transactions.marker_order.SentDecision`."""
        return (self.end_of(key) or 0) > offset

    def is_sent(self, stream: OrderedPlace) -> bool:
        """See :class:`~isthmus_plugins.replication.transactions.marker_order.SentDecision`."""
        sent_open = self.sent_on.get(stream.connection)
        return (sent_open is not None and stream.key.place not in sent_open) or self.is_there(stream.key)

    def is_there(self, key: LinkPartition) -> bool:
        """See :class:`~isthmus_plugins.replication.transactions.marker_order.SentDecision`."""
        stored_open = self.stored.get(key.link)
        is_stored = stored_open is not None and key.place not in stored_open | self.left_out[key.link]
        return is_stored or key in self.free or key.link in self.withheld or self.answered

    def is_confirmed(self, key: LinkPartition) -> bool:
        """Whether the other side of a link has it of a partition, and with all its ends."""
        has_ends = self.stored.get(key.link) == frozenset()
        return (has_ends and key.place not in self.left_out[key.link]) or self.answered

    def is_to_go(self, connection: LinkConnection, left_out: frozenset[TopicPartition]) -> bool:
        """Whether a connection was not sent it, or without an end that is known by now, or without a partition that
        is to be left out no more."""
        sent_open = self.sent_on.get(connection)
        return sent_open is None or not sent_open <= self.unread | left_out

    def was_stored(
        self, link_name: str, sent_open: frozenset[TopicPartition], left_out: frozenset[TopicPartition]
    ) -> None:
        """The other side has it as it was sent, without the ends of some partitions, and without others; of several
        copies all ends count."""
        self.stored[link_name] = self.stored.get(link_name, sent_open) & sent_open
        self.left_out[link_name] = self.left_out.get(link_name, left_out) & left_out


def said(
    link: Link,
    decision: Decision,
    again: bool,
    left_out: frozenset[TopicPartition],
    earlier: Callable[[LinkPartition, Decision], list[tuple[int, int, int]]],
) -> calls.Decision:
    """A decision as a call carries it: of its partitions those that the link has and that are not left out, by their
    names at the other end.

    ``again``: it must not replace what was sent of its partitions before.
    """
    places = []
    for place in decision.places:
        key, remote = LinkPartition(link.name, *place), remote_topic(link, place[0])
        end = decision.end_of(key)
        if remote is not None and end is not None and place not in left_out:
            before = tuple(calls.Earlier(*each) for each in earlier(key, decision))
            places.append(calls.DecidedPlace(remote, place[1], end, before))
    return calls.Decision(
        decision.transactional_id,
        decision.producer_id,
        decision.producer_epoch,
        decision.data_epoch,
        decision.at,
        tuple(places),
        again,
    )


def remote_topic(link: Link, topic: str) -> str | None:
    """What a topic is called at the other end; None where the link does not lead it.

    The offsets topic is led by links that lead groups: the other end of any other has nothing to do with it.
    """
    if topic == OFFSETS_TOPIC:
        return topic if link.leads_groups else None
    for mapping in link.mappings:
        if mapping.type is ResourceType.TOPIC and mapping.role is Role.LEADER and mapping.offsets is None:
            remote = mapping.remote_name(topic)
            if remote is not None:
                return remote
    return None
