"""What has to be done with a topic of this cluster for it to follow, or why it cannot: decided, and nothing done.

A topic that exists and holds other records is never written: it is refused, with the reason, until provenance shows
that its records are the source's, or the operator has agreed to lose them, or to lose those that the source has not.
Topic ids are UUIDs as text but in ``TopicInfo``, which has 16 bytes.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, TypeAlias

from isthmus_control.commands import SetFollowerTopic
from isthmus_control.model import FollowerTopic, NamespaceMapping, ProvenanceRange, TopicHistory, TopicState
from isthmus_control.states import ReasonCode
from isthmus_control.truncations import Succession, succession
from isthmus_plugins.cluster import TopicInfo
from isthmus_plugins.links import PartitionPlan, TopicPlan
from isthmus_plugins.replication.comparison.shared_logs import ComparedPartition, ComparedTopic
from isthmus_plugins.replication.link import calls, reasons

SourceTopic: TypeAlias = calls.LedTopic | calls.WantedTopic
"""A topic of the source, as it says itself."""


class Refusal(Exception):
    """A topic cannot follow (yet). ``code`` is a constant, the message says what to do."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Step(enum.Enum):
    """What comes next for a topic that is to follow over a link."""

    GO_ON = "go on"
    """The topic follows: see whether it still can."""
    CREATE = "create"
    REPLACE = "replace"
    """The operator has agreed to lose this very topic for one that follows."""
    ADOPT = "adopt"
    """The topic exists, and does not follow (yet): see :func:`plan`."""


def next_step(record: FollowerTopic | None, link_name: str, existing: TopicInfo | None) -> Step:
    """``record``: what the control log has of the name; ``existing``: what the cluster has."""
    if record is not None and record.state is TopicState.FOLLOWING and record.link == link_name:
        return Step.GO_ON
    if existing is None:
        return Step.CREATE
    to_be_lost = record is not None and record.state is TopicState.CREATING and record.link == link_name
    return Step.REPLACE if to_be_lost and is_recorded(record, existing) else Step.ADOPT


def is_recorded(record: FollowerTopic | None, existing: TopicInfo | None) -> bool:
    """Whether a topic is the one that was recorded, and no other of its name."""
    return record is not None and existing is not None and existing.id_text == record.topic_id


def is_intent(record: FollowerTopic, wanted: SetFollowerTopic) -> bool:
    """Whether it is recorded already that this topic is about to be made."""
    return not record.deleting and (
        record.link,
        record.source_topic,
        record.source_topic_id,
        record.state,
        record.topic_id,
        record.settings,
    ) == (wanted.link, wanted.source_topic, wanted.source_topic_id, wanted.state, wanted.topic_id, wanted.settings)


# ---- a topic that follows ----


def successor(record: FollowerTopic, source: SourceTopic, existing: TopicInfo | None, goes: bool) -> Succession | None:
    """How the source's topic succeeded the one that is followed; None: it is that one, or the topic here is another.

    ``goes``: whether the topic here goes with the one that is followed. Raises Refusal for a topic of the source that
    is another one.
    """
    if record.source_topic_id == source.topic_id:
        return None
    found = succession(_chain(source), record.source_topic_id, source.topic_id)
    if found is None:
        raise another_source(record, goes)
    return found if is_recorded(record, existing) else None


def another_source(record: FollowerTopic, goes: bool) -> Refusal:
    """Why a topic does not follow one of the source that is another one than it has the records of."""
    made_again = f"the source's {record.source_topic} was deleted and created again; {record.topic} "
    if goes:
        said = "goes with the old one as soon as that is certain, and follows the new one then"
        return Refusal(reasons.FORMER_TOPIC_GOES, made_again + said)
    said = f"keeps the old one's records: `isthmus topic recreate {record.topic}` loses them and follows the new one"
    return Refusal(ReasonCode.SOURCE_TOPIC_ID_CHANGED, made_again + said)


def going_on(record: FollowerTopic, partitions: int, existing: TopicInfo | None) -> TopicInfo:
    """The topic that follows a source of so many partitions. Raises Refusal where it is gone, or has more."""
    if existing is None or not is_recorded(record, existing):
        raise Refusal(
            ReasonCode.TARGET_TOPIC_MAY_BE_DELETED if existing is None else ReasonCode.TARGET_TOPIC_ID_CHANGED,
            f"{record.topic} was deleted here behind the link's back: `isthmus topic recreate {record.topic}` "
            "follows the source's from its start",
        )
    there = len(existing.partitions)
    if there > partitions:
        raise Refusal(
            ReasonCode.SOURCE_PARTITIONS_DECREASED,
            f"{record.topic} has {there} partitions here, the source's {record.source_topic} has {partitions}",
        )
    return existing


def not_opened(record: FollowerTopic, history: TopicHistory | None, cluster_id: str, partitions: int) -> list[int]:
    """Partitions of a topic that follows whose provenance is not open, or of another source than its one.

    ``cluster_id``: the source's.
    """
    if history is None or history.topic_id != record.topic_id:
        return list(range(partitions))
    source = cluster_id, record.source_topic_id
    return [
        each
        for each in range(partitions)
        if (found := history.open_range(each)) is None or (found.source_cluster_id, found.source_topic_id) != source
    ]


def awaits_cut(record: FollowerTopic, mapping: NamespaceMapping) -> bool:
    """Whether the operator agreed to have a topic cut before it follows, and it is not yet: it is another one then."""
    following = record.state is TopicState.FOLLOWING
    return following and record.topic_id is not None and mapping.agreed_cut(record.topic_id) is not None


# ---- a topic that is there and does not follow ----


@dataclass(frozen=True, slots=True)
class Existing:
    """A topic of this cluster under a name that is to follow. ``starts``, ``ends``: of its partitions' logs.

    ``compared``: how much of the source's topic it is; None: nobody can tell. ``groups_moved``: groups with committed
    offsets beyond that. ``salvages``: this proxy has somewhere to put what is cut. ``awaits_markers``: transactions of
    this cluster are under way in it, whose markers come before it follows, and which its source has not.
    """

    info: TopicInfo
    history: TopicHistory | None
    starts: Sequence[int]
    ends: Sequence[int]
    compared: ComparedTopic | None = None
    groups_moved: Sequence[str] = ()
    salvages: bool = True
    awaits_markers: bool = False


def plan(
    mapping: NamespaceMapping, source: SourceTopic, local: str, existing: Existing | None, truncate: bool = False
) -> TopicPlan:
    """What attaching ``mapping`` does with one topic.

    ``truncate``: as if the operator had agreed to lose what the topic holds.
    """
    if existing is None:
        return TopicPlan(topic=local, source_topic=source.topic, action="create")
    topic_id, partitions = existing.info.id_text, len(existing.info.partitions)
    records = sum(existing.ends) - sum(existing.starts)
    too_many = partitions > source.partitions
    is_apart = any(existing.ends) and not _is_the_sources(source, existing)
    if not (too_many or is_apart or (truncate and existing.awaits_markers)):
        return TopicPlan(topic=local, source_topic=source.topic, action="follow", topic_id=topic_id)
    if truncate or topic_id in mapping.truncate_topic_ids:
        return TopicPlan(
            topic=local, source_topic=source.topic, action="truncate", topic_id=topic_id, records_lost=records
        )
    lose_them = f"attach again with --truncate-target, or `isthmus topic recreate {local}`, to lose them"
    what = f"holds {records} records that are not known to be the source's"
    compared = existing.compared
    if too_many or compared is None:
        if too_many:
            what = f"has {partitions} partitions, the source's topic {source.partitions}"
        return TopicPlan(
            topic=local,
            source_topic=source.topic,
            action="refuse",
            topic_id=topic_id,
            records_lost=records,
            reason=f"{local} exists and {what}: {lose_them}",
        )
    refused = _not_cut(compared, existing.salvages)
    token = compared.token if refused is None else None
    cuts = token is not None and mapping.agreed_cut(topic_id) == token
    if refused is None:
        refused = (
            f"has {compared.records_cut} records that the source's has not ({'; '.join(_parted(compared))}): `isthmus "
            "link attach` with --dry-run prints with which --cut they are salvaged and cut"
        )
    elif refused == UNRELATED:
        refused = f"{what} ({UNRELATED})"
    return TopicPlan(
        topic=local,
        source_topic=source.topic,
        action="cut" if cuts else "refuse",
        topic_id=topic_id,
        records_lost=records if token is None else compared.records_cut,
        reason=None if cuts else f"{local} exists and {refused}; {lose_them}",
        partitions=[planned(each) for each in compared.partitions],
        groups_moved=list(existing.groups_moved),
        cut=token,
    )


UNRELATED: Final = "no cluster has written for both"
SHOWN: Final = 3
"""Partitions in the words of a refusal."""


def _is_the_sources(source: SourceTopic, existing: Existing) -> bool:
    """Whether all that a topic holds is its source's: where it came from says so, or once it was followed."""
    compared = existing.compared
    if compared is not None and (compared.unknown is None or any(each.differs for each in compared.partitions)):
        return not compared.records_cut and not any(each.differs for each in compared.partitions)
    return _came_from(source, existing)


def _not_cut(compared: ComparedTopic, salvages: bool) -> str | None:
    """Why a topic is not cut to what it shares with its source's, whoever agrees; None: it can be."""
    differing = next((each for each in compared.partitions if each.differs), None)
    if differing is not None:
        return (
            f"is recorded to be the source's before offset {differing.shared} of partition {differing.partition}, and "
            "its records there are others: nothing is done with it"
        )
    if compared.unknown is not None:
        return f"is not known to be the source's: {compared.unknown}"
    if not compared.related:
        return UNRELATED
    expired = next((each for each in compared.partitions if each.cut and each.shared < each.here[0]), None)
    if expired is not None:
        return (
            f"is the source's before offset {expired.shared} of partition {expired.partition}, and starts at "
            f"{expired.here[0]} by now: nothing of it is left to go on from"
        )
    if not salvages:
        return (
            f"has {compared.records_cut} records that the source's has not, and there is nowhere to keep them: "
            "set [data] directory in this proxy's configuration and start it again"
        )
    return None


def planned(compared: ComparedPartition) -> PartitionPlan:
    """The same for people."""
    here, there = compared.times_here, compared.times_there
    return PartitionPlan(
        partition=compared.partition,
        shared=compared.shared,
        end=compared.here[1],
        source_end=compared.there[1],
        unknown=compared.unknown,
        first_ms=None if here is None else here.first_ms,
        last_ms=None if here is None else here.last_ms,
        source_first_ms=None if there is None else there.first_ms,
        source_last_ms=None if there is None else there.last_ms,
    )


def _parted(compared: ComparedTopic) -> Iterator[str]:
    parted = [each for each in compared.partitions if each.cut]
    for each in parted[:SHOWN]:
        times = "" if each.times_here is None else f", {_moment(each.times_here[0])} to {_moment(each.times_here[1])}"
        yield (
            f"partition {each.partition}: the same up to {each.shared}, ends at {each.here[1]}, the source's at "
            f"{each.there[1]}{times}"
        )
    if len(parted) > SHOWN:
        yield f"and {len(parted) - SHOWN} more partitions"


def _moment(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _came_from(source: SourceTopic, existing: Existing) -> bool:
    """Whether all that a topic holds came from the same topic of the source, and nothing was written since.

    What came from a topic that the source's one succeeded counts where the source has it still.
    """
    history = existing.history
    if history is None or history.topic_id != existing.info.id_text:
        return False
    for partition, end in enumerate(existing.ends):
        ranges = history.partitions.get(partition, ())
        if not ranges and not end:
            continue
        if not ranges or not all(_has(source, partition, known, end) for known in ranges):
            return False
        if ranges[-1].end_offset is not None and ranges[-1].end_offset != end:
            return False
    return True


def _has(source: SourceTopic, partition: int, known: ProvenanceRange, end: int) -> bool:
    """Whether the source's topic has what a range of a follower's partition came from."""
    if known.source_topic_id == source.topic_id:
        return True
    found = succession(_chain(source), known.source_topic_id, source.topic_id)
    to = end if known.end_offset is None else known.end_offset
    return found is not None and partition < len(found.offsets) and to <= found.offsets[partition]


def _chain(source: SourceTopic) -> list[Succession]:
    """Which topics the source's one succeeded, oldest first, as the source states it; a peer of before does not."""
    return [Succession(*each) for each in source.predecessors or ()]
