"""What the control log accepts of synchronous links (``docs/adr/0006``): the mode, and records of partitions.

At the source, a partition without a record is Syncing. It is recorded In-Sync when acks are to be held for it, and that
it has *reached* that once the other side has all: only then leases are granted. One that has reached it once gets
Out-Of-Sync, however often it tries to get back; one that has not gets Syncing again: nothing was promised to it. One
that is new is recorded In-Sync before any of its acks goes, and gets Out-Of-Sync, too.
One that has been Out-Of-Sync for as long as its namespaces say is *degraded*, until it is recorded again that it has
reached In-Sync.
Whoever records must have seen what stands: a proxy that fronted the partition's leader once, and was late, changes
nothing that a later one has granted leases for.

At the target, the record of a partition says only that it was In-Sync once: from then on its consumers read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from isthmus_control import commands as c
from isthmus_control.control_state import ControlState
from isthmus_control.demands import NEVER
from isthmus_control.levels import BOTH_WAYS
from isthmus_control.model import Degraded, Link, LinkMode, NamespaceMapping, ResourceType, Role, SyncRecord, SyncState
from isthmus_control.outcome import Change, Refuse, Rejection, SyncChanged, require
from isthmus_control.rules.checks import ENTRIES_MAX, Result
from isthmus_protocol.offsets_log import OFFSETS_TOPIC

REASON_CHARS_MAX = 1_000

_OF_COMMITS = (ResourceType.TOPIC, ResourceType.CONSUMER_GROUP)
"""What a group's committed offset is replicated by."""


Records = Mapping[tuple[str, int], SyncRecord]


def _record(state: ControlState, offset: int, command: c.Command, body: c.RecordSync) -> Result:
    link = _synchronous_link(state, body)
    _check(body)
    before = state.sync_records.get(link.name, {})
    after = dict(before)
    changes: list[Change] = []
    for entry in body.partitions:
        key = entry.topic, entry.partition
        known = before.get(key)
        current = known if known is not None and known.topic_id == entry.topic_id else None
        if current is not None and current.state is body.state and not _is_news(current, body):
            continue
        followed = _followed_since(state, link, entry)
        attached = _led_since(link, entry.topic) if followed is None else followed
        stands = max(link.synchronous_at_offset or 0, attached, known.at_offset if known else 0)
        require(
            command.seen >= stands,
            Rejection.CONFLICT,
            f"{_at(entry)}: the proposer had not seen what changed at offset {stands} of the log",
        )
        if followed is not None:
            require(body.reached, Rejection.CONFLICT, f"{_at(entry)} follows: whether acks are held is the source's")
            after[key] = SyncRecord(entry.topic_id, body.state, entry.offset, command.at_ms, None, offset)
            changes.append(SyncChanged(link.name, entry.topic, entry.partition, known, after[key]))
            continue
        require(
            current is None or not body.from_first,
            Rejection.CONFLICT,
            f"{_at(entry)} has a record on link {link.name!r}: it is not new",
        )
        require(
            current is not None or (body.state is SyncState.IN_SYNC and not body.reached),
            Rejection.CONFLICT,
            f"{_at(entry)} with topic id {entry.topic_id} is Syncing on link {link.name!r}: "
            f"it cannot be {SyncState.OUT_OF_SYNC}, nor have reached {SyncState.IN_SYNC}, before acks were held",
        )
        record = _follows(current, offset, command.at_ms, body, entry)
        if record is None:
            del after[key]
        else:
            after[key] = record
        changes.append(SyncChanged(link.name, entry.topic, entry.partition, known, record))
    return (_with(state, link.name, after), tuple(changes)) if changes else (state, ())


def _is_news(current: SyncRecord, body: c.RecordSync) -> bool:
    """Whether a partition that stays In-Sync has all now, and had not, or acks went without it before."""
    return body.reached and (not current.reached or current.degraded is not None)


def _follows(
    current: SyncRecord | None, offset: int, at_ms: int, body: c.RecordSync, entry: c.PartitionSync
) -> SyncRecord | None:
    """The record that comes after ``current``; None: the partition is Syncing again. Raises Refuse."""
    if body.reached:
        require(
            current is not None and current.state is SyncState.IN_SYNC,
            Rejection.CONFLICT,
            f"{_at(entry)} is {SyncState.OUT_OF_SYNC}: acks are not held for it",
        )
    reached = current is not None and (current.reached or body.reached)
    if body.state is SyncState.OUT_OF_SYNC:
        reached = reached or (current is not None and current.from_first)
        if not reached:
            return None
    degraded = current.degraded if current is not None and not body.reached else None
    return SyncRecord(
        entry.topic_id,
        body.state,
        entry.offset,
        at_ms,
        body.reason,
        offset,
        reached,
        degraded,
        from_first=not reached and (body.from_first or (current is not None and current.from_first)),
    )


def _degrade(state: ControlState, offset: int, command: c.Command, body: c.DegradeSync) -> Result:
    """Only what has been Out-Of-Sync is degraded, and only as its namespaces say."""
    link = _synchronous_link(state, body)
    _check_entries(body.partitions)
    before = state.sync_records.get(link.name, {})
    after = dict(before)
    changes: list[Change] = []
    for entry in body.partitions:
        known = before.get((entry.topic, entry.partition))
        if known is None or known.topic_id != entry.topic_id or known.state is not SyncState.OUT_OF_SYNC:
            raise Refuse(Rejection.CONFLICT, f"{_at(entry)} is not {SyncState.OUT_OF_SYNC} on link {link.name!r}")
        require(
            command.seen >= known.at_offset,
            Rejection.CONFLICT,
            f"{_at(entry)}: the proposer had not seen what changed at offset {known.at_offset} of the log",
        )
        require(
            any(NEVER < each <= body.after_ms for each in _degrade_times(state, link, entry.topic)),
            Rejection.CONFLICT,
            f"{_at(entry)}: its namespaces do not let acks go without a link after {body.after_ms} ms",
        )
        if known.degraded is not None and known.degraded.after_ms >= body.after_ms:
            continue
        degraded = Degraded(body.after_ms, entry.offset, command.at_ms, command.by, offset)
        after[entry.topic, entry.partition] = replace(known, degraded=degraded)
        changes.append(SyncChanged(link.name, entry.topic, entry.partition, known, after[entry.topic, entry.partition]))
    return (_with(state, link.name, after), tuple(changes)) if changes else (state, ())


def _degrade_times(state: ControlState, link: Link, topic: str) -> list[int]:
    """After which times (ms) acks may go without a link; those of the offsets topic are the groups' that it leads."""
    lookup = state.lookup
    if topic != OFFSETS_TOPIC:
        return [lookup.demands(ResourceType.TOPIC, topic).degrade_after_ms]
    groups = lookup.led_groups(link.name)
    return [lookup.demands(ResourceType.CONSUMER_GROUP, each).degrade_after_ms for each in groups]


def _synchronous_link(state: ControlState, body: c.RecordSync | c.DegradeSync) -> Link:
    link = state.links.get(body.link)
    if link is None:
        raise Refuse(Rejection.NOT_FOUND, f"there is no link {body.link!r}")
    require(
        link.link_id == body.link_id,
        Rejection.CONFLICT,
        f"link {body.link!r} has the id {link.link_id}, not {body.link_id}: it was deleted and created again",
    )
    require(
        link.mode is LinkMode.SYNCHRONOUS,
        Rejection.CONFLICT,
        f"link {body.link!r} is asynchronous: its partitions have no state of synchronization",
    )
    return link


def _check(body: c.RecordSync) -> None:
    """Raises Refuse for what would be wrong on any synchronous link."""
    require(
        (body.state is SyncState.OUT_OF_SYNC) == (body.reason is not None),
        Rejection.INVALID,
        f"{SyncState.OUT_OF_SYNC} has a reason, and {SyncState.IN_SYNC} has none",
    )
    require(
        body.state is SyncState.IN_SYNC or not body.reached,
        Rejection.INVALID,
        f"what is {SyncState.OUT_OF_SYNC} has not reached {SyncState.IN_SYNC}",
    )
    require(
        not body.from_first or (body.state is SyncState.IN_SYNC and not body.reached),
        Rejection.INVALID,
        f"what is new is {SyncState.IN_SYNC}, and has yet to reach that",
    )
    require(
        body.reason is None or len(body.reason.message) <= REASON_CHARS_MAX,
        Rejection.INVALID,
        "the reason is too long",
    )
    _check_entries(body.partitions)


def _check_entries(entries: Sequence[c.PartitionSync]) -> None:
    require(0 < len(entries) <= ENTRIES_MAX, Rejection.INVALID, f"a command has 1 to {ENTRIES_MAX} entries")
    for entry in entries:
        require(c.is_uuid(entry.topic_id), Rejection.INVALID, f"the topic id {entry.topic_id!r} is not a UUID")
        require(
            entry.partition >= 0 and entry.offset >= 0,
            Rejection.INVALID,
            f"topic {entry.topic!r} has no offset {entry.offset} of partition {entry.partition}",
        )
    keys = {(entry.topic, entry.partition) for entry in entries}
    require(len(keys) == len(entries), Rejection.INVALID, "a partition is recorded twice")


def _led_since(link: Link, topic: str) -> int:
    """Where in the log a local topic came to be led over the link as it is led now. Raises Refuse.

    The offsets topic is led with the groups whose committed offsets it has, in whatever topics.
    """
    if topic == OFFSETS_TOPIC:
        led = link.mappings if link.leads_groups else ()
        found = [each for each in led if each.role is Role.LEADER and each.type in _OF_COMMITS]
    else:
        led = tuple(each for each in link.mappings if each.type is ResourceType.TOPIC and each.role is Role.LEADER)
        found = [each for each in led if each.remote_name(topic) is not None]
    if not found:
        raise Refuse(Rejection.CONFLICT, f"topic {topic!r} is in no namespace that link {link.name!r} leads")
    return max(each.attached_at_offset for each in found)


def _followed_since(state: ControlState, link: Link, entry: c.PartitionSync) -> int | None:
    """Where in the log a local topic came to follow over the link; None if it does not."""
    topic = state.follower_topics.get(entry.topic)
    if topic is None or topic.link != link.name or topic.topic_id != entry.topic_id:
        return None
    following = [each for each in link.mappings if each.type is ResourceType.TOPIC and each.role is Role.FOLLOWER]
    return next((each.attached_at_offset for each in following if each.holds(entry.topic)), None)


def _at(entry: c.PartitionSync) -> str:
    return f"{entry.topic}-{entry.partition}"


def _with(state: ControlState, link: str, records: Records) -> ControlState:
    """The state with these records of a link; one without any has no entry."""
    others = {name: known for name, known in state.sync_records.items() if name != link}
    return state.evolve(sync_records={**others, link: records} if records else others)


# --- where records end


def check_synchronous(state: ControlState, link: Link, mapping: NamespaceMapping, informational: bool) -> None:
    """Raises Refuse where a mapping cannot be part of a synchronous link. Before :data:`BOTH_WAYS` whoever made it so
    leads all its topics."""
    require(
        not informational,
        Rejection.CONFLICT,
        f"the {mapping.local} is informational: it cannot be part of a synchronous link",
    )
    if state.level >= BOTH_WAYS:
        return
    leads = link.settings.mode.written.node == link.local_cluster_id
    require(
        mapping.type is not ResourceType.TOPIC or mapping.role is (Role.LEADER if leads else Role.FOLLOWER),
        Rejection.CONFLICT,
        f"the {mapping.local} is the {mapping.role}'s end, and a synchronous link goes in one direction before feature "
        f"level {BOTH_WAYS} (isthmus control upgrade): the cluster that makes it synchronous leads all of its topics",
    )


def mode_changed(
    state: ControlState, before: Link, after: Link, offset: int
) -> tuple[ControlState, Link, list[Change]]:
    """What follows from a link's mode, if it is another one now: no record outlives the mode. Raises Refuse."""
    if before.settings.mode == after.settings.mode or before.mode is after.mode is LinkMode.ASYNCHRONOUS:
        return state, after, []
    if before.mode is after.mode:  # it was asynchronous meanwhile at the other side, where all begins anew
        state, changes = records_ended(state, before)
        return state, replace(after, synchronous_at_offset=offset), changes
    if after.mode is LinkMode.SYNCHRONOUS:
        for mapping in after.mappings:
            check_synchronous(state, after, mapping, state.namespaces[mapping.local].informational)
        return state, replace(after, synchronous_at_offset=offset), []
    state, changes = records_ended(state, before)
    return state, replace(after, synchronous_at_offset=None), changes


def records_ended(
    state: ControlState, link: Link, mapping: NamespaceMapping | None = None
) -> tuple[ControlState, list[Change]]:
    """The state without the records of a link, or of what one of its mappings holds (which the link still has)."""
    records = state.sync_records.get(link.name, {})
    kept: dict[tuple[str, int], SyncRecord] = {}
    changes: list[Change] = []
    for (topic, partition), record in sorted(records.items()):
        if mapping is None or _ends_with(topic, mapping, link):
            changes.append(SyncChanged(link.name, topic, partition, record, None))
        else:
            kept[topic, partition] = record
    return (_with(state, link.name, kept), changes) if changes else (state, [])


def _ends_with(topic: str, mapping: NamespaceMapping, link: Link) -> bool:
    """Whether the records of a topic end when a mapping is taken out of its link."""
    if topic == OFFSETS_TOPIC:
        return mapping.leads_groups and not any(each.leads_groups for each in link.mappings if each != mapping)
    return mapping.type is ResourceType.TOPIC and mapping.holds(topic)


SYNC_HANDLERS: Mapping[type[c.Body], Callable[[ControlState, int, c.Command, Any], Result]] = {
    c.RecordSync: _record,
    c.DegradeSync: _degrade,
}
