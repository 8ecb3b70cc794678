"""One decision to commit of this cluster's transactions, and how it is sent to the other side of a link."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from isthmus_control.model import Link, ResourceType, Role
from isthmus_plugins.cluster import TopicPartition
from isthmus_plugins.replication.link import calls
from isthmus_plugins.replication.link.connection import LinkConnection
from isthmus_plugins.replication.partitions import LinkPartition, OrderedPlace
from isthmus_protocol.offsets_log import OFFSETS_TOPIC


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
    ends: Mapping[TopicPartition, int] | None = None
    """Where the logs of its partitions ended after it was there: what comes later is another transaction's."""
    confirmed: set[str] = field(default_factory=set)
    """Links whose other side has it."""
    sent_on: set[LinkConnection] = field(default_factory=set)
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
    def producer(self) -> tuple[int, int]:
        """(Producer id, epoch) of its transaction's records."""
        return self.producer_id, self.data_epoch

    @property
    def shares_epoch(self) -> bool:
        """Whether other transactions of the producer have the epoch of its records."""
        return self.producer_epoch == self.data_epoch

    def end_of(self, key: LinkPartition) -> int | None:
        """See :class:`~isthmus_plugins.replication.transactions.marker_order.SentDecision`."""
        return None if self.ends is None else self.ends.get(key.place)

    def ends_after(self, key: LinkPartition, offset: int) -> bool:
        """See :class:`~isthmus_plugins.replication.transactions.marker_order.SentDecision`."""
        return self.ends is None or self.ends.get(key.place, 0) > offset

    def is_sent(self, stream: OrderedPlace) -> bool:
        """See :class:`~isthmus_plugins.replication.transactions.marker_order.SentDecision`."""
        return stream.connection in self.sent_on or self.is_there(stream.key)

    def is_there(self, key: LinkPartition) -> bool:
        """See :class:`~isthmus_plugins.replication.transactions.marker_order.SentDecision`."""
        return key.link in self.confirmed or key in self.free


def said(
    link: Link,
    decision: Decision,
    again: bool,
    earlier: Callable[[LinkPartition, Decision], list[tuple[int, int, int]]],
) -> calls.Decision:
    """A decision as a call carries it: of its partitions those that the link has, by their names at the other end.

    ``again``: it must not replace what was sent of its partitions before.
    """
    assert decision.ends is not None
    places = []
    for place, end in decision.ends.items():
        remote = remote_topic(link, place[0])
        if remote is not None:
            before = tuple(calls.Earlier(*each) for each in earlier(LinkPartition(link.name, *place), decision))
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
