"""What a failover now would lose, of what the source's proxies say: pure.

Each proxy of the source says of the partitions that it pushes up to where the follower has confirmed them, and where
their logs end; and which topics there are. What nobody says is unknown, and in no sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from isthmus_control.states import ReasonCode
from isthmus_plugins.drill_report import GroupLoss, LostByFailover, PartitionLoss
from isthmus_plugins.links import PartitionStatus
from isthmus_plugins.replication.link import calls

SOURCE_AWAY = "SOURCE_AWAY"
SOURCE_PARTITIONS_UNKNOWN = "SOURCE_PARTITIONS_UNKNOWN"
NOBODY_SAYS = "no proxy of the source that is connected pushes it"
NOT_SAID = "the source does not know up to where the follower has it"

Name = Callable[[str], str | None]
"""What a name of the source is called at the cluster that is asked; None: it is not of what is asked about."""


def lost(answers: Sequence[calls.UnconfirmedAnswer], topic: Name, group: Name) -> LostByFailover:
    """What is lost, by what all of the source's proxies say that could be asked."""
    there: dict[str, int] = {}
    for said in answers:
        for name, partitions in said.topics.items():
            there[name] = max(partitions, there.get(name, 0))
    said_of: dict[tuple[str, int], calls.UnconfirmedPartition] = {}
    for each in (each for said in answers for each in said.partitions):
        place = each.topic, each.partition
        said_of[place] = _latest(said_of[place], each) if place in said_of else each
    found = [
        _loss(said_of.get((name, partition)), local, partition)
        for name, partitions in sorted(there.items())
        if (local := topic(name)) is not None
        for partition in range(partitions)
    ]
    groups = [
        GroupLoss(
            group=local,
            positions=each.positions,
            seconds=None if each.age_ms is None else each.age_ms / 1000,
            message=each.message,
        )
        for said in answers
        for each in said.groups
        if (local := group(each.group)) is not None
    ]
    return _sum(found, groups)


def last_known(partitions: Iterable[PartitionStatus], as_of_seconds: float | None, why: str) -> LostByFailover:
    """What was lost as the follower was told last, by its own statuses; the source is away.

    ``as_of_seconds``: how long ago that was; None: never, so nothing is known.
    """
    followed = [each for each in partitions if each.role == "follower" and each.partition >= 0]
    said = (
        _sum([_told_last(each) for each in followed], []) if as_of_seconds is not None else LostByFailover(known=False)
    )
    said.known, said.reason, said.message = False, SOURCE_AWAY, why
    said.as_of_seconds = as_of_seconds
    said.positions = said.positions_seconds = None  # nobody but the source knows
    return said


def not_said(why: str) -> LostByFailover:
    """The source's proxies do not know how to say it."""
    return LostByFailover(known=False, reason=ReasonCode.PEER_VERSION_UNSUPPORTED, message=why, as_of_seconds=None)


def _told_last(status: PartitionStatus) -> PartitionLoss:
    said = calls.UnconfirmedPartition(status.topic, status.partition, status.source_end, status.follower_end)
    found = _loss(said, status.topic, status.partition)
    found.acked_records = None if found.records else found.records  # what acks meant then is not known
    return found


def _latest(one: calls.UnconfirmedPartition, other: calls.UnconfirmedPartition) -> calls.UnconfirmedPartition:
    """Of a partition whose leader has just moved two proxies speak: neither log ends nor confirmations go back."""
    known = [each for each in (one, other) if each.confirmed is not None and each.source_end is not None]
    if len(known) < 2:
        return known[0] if known else one
    best = max(known, key=lambda each: (each.confirmed or 0, each.source_end or 0))
    return best._replace(
        source_end=max(each.source_end or 0 for each in known), in_sync=all(each.in_sync for each in known)
    )


def _loss(said: calls.UnconfirmedPartition | None, topic: str, partition: int) -> PartitionLoss:
    if said is None:
        said = calls.UnconfirmedPartition(topic, partition, None, None, message=NOBODY_SAYS)
    end, confirmed = said.source_end, said.confirmed
    records = None if end is None or confirmed is None else max(0, end - confirmed)
    return PartitionLoss(
        topic=topic,
        partition=partition,
        source_end=end,
        confirmed=confirmed,
        records=records,
        acked_records=0 if said.in_sync and records is not None else records,
        seconds=0.0 if records == 0 else None if said.age_ms is None else said.age_ms / 1000,
        message=said.message or (NOT_SAID if records is None else None),
    )


def _sum(partitions: Sequence[PartitionLoss], groups: Sequence[GroupLoss]) -> LostByFailover:
    unknown = [each for each in partitions if each.records is None]
    losing = [each for each in partitions if each.records]
    pending = [each for each in groups if each.positions != 0]
    found = LostByFailover(
        known=not unknown,
        records=sum(each.records or 0 for each in losing),
        acked_records=_all(each.acked_records for each in losing),
        seconds=_longest(each.seconds for each in losing),
        positions=_all(each.positions for each in pending),
        positions_seconds=_longest(each.seconds for each in pending),
        partitions_total=len(partitions),
        partitions=[each for each in partitions if each.records != 0],
        groups=pending,
    )
    if unknown:
        first = unknown[0]
        found.reason = SOURCE_PARTITIONS_UNKNOWN
        found.message = f"not known of {len(unknown)} partitions: {first.topic}-{first.partition}: {first.message}"
    return found


def _all(values: Iterable[int | None]) -> int | None:
    known = list(values)
    return None if None in known else sum(each or 0 for each in known)


def _longest(values: Iterable[float | None]) -> float | None:
    """None where one of them is not known."""
    known = list(values)
    return None if None in known else max((each or 0.0 for each in known), default=0.0)
