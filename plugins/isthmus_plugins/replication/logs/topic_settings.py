"""The settings of a follower topic: the source's effective ones, but for overrides while it follows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from isthmus_control.model import OffsetsCopy, OffsetsForm

NOT_COPIED: Final = frozenset({"leader.replication.throttled.replicas", "follower.replication.throttled.replicas"})
"""Settings that are about the brokers of one cluster."""
FOREVER: Final = str(2**63 - 1)
TIMESTAMP_DIFFERENCE: Final = "message.timestamp.difference.max.ms"
"""Brokers before 4.0 go by it where the two that came in its place have their defaults."""
OVERRIDES: Final[Mapping[str, str]] = {
    "compression.type": "producer",
    "message.timestamp.type": "CreateTime",
    "message.timestamp.before.max.ms": FOREVER,
    "message.timestamp.after.max.ms": FOREVER,
    TIMESTAMP_DIFFERENCE: FOREVER,
    "retention.ms": "-1",
    "retention.bytes": "-1",
    "cleanup.policy": "delete",
}
"""Settings that a topic has only while it follows: batches are stored as they come, and nothing expires by itself.

Of a compacted source, ``cleanup.policy`` is :data:`COMPACTED` once the topic was filled.
"""

IN_SYNC_MIN: Final = "min.insync.replicas"
MESSAGE_BYTES_MAX: Final = "max.message.bytes"
LIMITS: Final = (MESSAGE_BYTES_MAX, "segment.bytes")
"""Settings that say how large a batch may be. A source's log may hold larger ones, from before they were lowered: while
a topic follows they are raised where it has to take one."""
LIMIT_MAX: Final = 2**31 - 1
FROZEN: Final = "0"
"""As ``max.message.bytes``, it keeps everybody from appending to a topic: clients, transaction coordinators, us."""

CLEANUP_POLICY: Final = "cleanup.policy"
COMPACTED: Final = "compact,delete"
"""The policy of a follower whose own cleaner compacts it.

"delete" stays, without any retention: brokers delete the records below an offset only where it is set.
"""
ENCRYPTED_GROWTH: Final = 4
"""How much larger a batch of small records may become when they are encrypted one by one."""


def limit_for(size: int) -> int:
    """What a limit is raised to for a batch of ``size`` bytes: a power of two, so that it is not raised for each."""
    return min(1 << (size - 1).bit_length(), LIMIT_MAX)


def lower_than(effective: Mapping[str, str | None], size: int) -> dict[str, str]:
    """The limits that keep a topic with these effective settings from a batch of ``size`` bytes, and what they need."""
    found = {name: effective.get(name) for name in LIMITS}
    return {name: str(limit_for(size)) for name, value in found.items() if value is not None and int(value) < size}


def is_compacted(configs: Mapping[str, str | None]) -> bool:
    """Whether a topic with these effective settings is compacted."""
    return "compact" in (configs.get(CLEANUP_POLICY) or "").split(",")


def overrides(compacts: bool) -> Mapping[str, str]:
    """What a topic has instead of its source's settings while it follows. ``compacts``: and is compacted here."""
    return {**OVERRIDES, CLEANUP_POLICY: COMPACTED} if compacts else OVERRIDES


def offsets_overrides(copy: OffsetsCopy, source: Mapping[str, str]) -> Mapping[str, str]:
    """The overrides of a copy of an offsets topic, which is compacted from its beginning."""
    chosen = dict(overrides(compacts=True))
    largest = source.get("max.message.bytes")
    if copy.form is OffsetsForm.ENCRYPTED and largest is not None:
        chosen["max.message.bytes"] = str(min(ENCRYPTED_GROWTH * int(largest), 2**31 - 1))
    return chosen


DESCRIBED_AT_ONCE: Final = 100
"""Topics whose settings are read in one request."""

Described = Mapping[str, tuple[str | None, str | None]]
"""A topic's settings: (effective value, what it would be without the topic's own)."""


def copied(effective: Mapping[str, str | None]) -> dict[str, str]:
    """What a source sends of its topic's settings: the effective values."""
    return {name: value for name, value in effective.items() if value is not None and name not in NOT_COPIED}


def overridden(source: Mapping[str, str]) -> dict[str, str]:
    """What a source has for those settings that are, or may be, overridden while its topic is followed."""
    return {name: source[name] for name in (*OVERRIDES, *LIMITS) if name in source}


def given_back(source: Mapping[str, str], own: Described) -> dict[str, str | None]:
    """How a topic that follows no more comes to have what its source had in place of overrides; None removes one.

    ``source``: that, or nothing, for the target's defaults. ``own``: what the topic has.
    """
    if source and TIMESTAMP_DIFFERENCE not in source:  # its brokers do not know that limit
        source = {**source, TIMESTAMP_DIFFERENCE: FOREVER}
    found: dict[str, str | None] = {}
    for name in OVERRIDES.keys() & own.keys():
        effective, inherited = own[name]
        value = source.get(name, inherited)
        if effective != value:
            found[name] = None if inherited == value else value
    for name in LIMITS:
        (effective, inherited), value = own.get(name, (None, None)), source.get(name)
        if value is not None and effective is not None and int(effective) > int(value):
            found[name] = None if inherited == value else value
    return found


def kept(effective: Mapping[str, str | None], source: Mapping[str, str], compacts: bool) -> dict[str, str]:
    """The overrides that a topic with these effective settings still has, where its source had something else."""
    return {
        name: value
        for name, value in overrides(compacts).items()
        if name in source and _same(name, effective.get(name), value) and not _same(name, source[name], value)
    }


def follows(
    effective: Mapping[str, str | None],
    source: Mapping[str, str],
    replication_factor: int,
    overrides: Mapping[str, str] = OVERRIDES,
) -> bool:
    """Whether a topic with these effective settings has the source's, with ``overrides``."""
    expected = {**source, **overrides, **_in_sync_min(source, replication_factor)}
    return all(_same(name, effective[name], value) for name, value in expected.items() if name in effective)


def _same(name: str, one: str | None, other: str) -> bool:
    """Whether two values of a setting mean the same: policies come in any order."""
    return one == other or (name == CLEANUP_POLICY and set((one or "").split(",")) == set(other.split(",")))


def wanted(
    source: Mapping[str, str], defaults: Described, replication_factor: int, overrides: Mapping[str, str] = OVERRIDES
) -> dict[str, str]:
    """The settings of its own that a topic needs to have the source's effective ``source``, with ``overrides``.

    ``defaults``: any topic of the target. What the target's version does not know is left out; more in-sync replicas
    than ``replication_factor`` would keep it from being written at all.
    """
    chosen = {name: value for name, value in source.items() if name in defaults and defaults[name][1] != value}
    chosen |= {name: value for name, value in overrides.items() if name in defaults}
    return chosen | _in_sync_min(source, replication_factor)


def _in_sync_min(source: Mapping[str, str], replication_factor: int) -> dict[str, str]:
    in_sync_min = int(source.get(IN_SYNC_MIN) or 1)
    return {IN_SYNC_MIN: str(min(in_sync_min, replication_factor))}


def changes(own: Described, chosen: Mapping[str, str]) -> dict[str, str | None]:
    """How a topic comes to have exactly ``chosen`` as settings of its own; None removes one."""
    differing: dict[str, str | None] = {
        name: value for name, value in chosen.items() if name not in own or not _same(name, own[name][0], value)
    }
    removed = {
        name: None
        for name, (value, inherited) in own.items()
        if value != inherited and name not in chosen and name not in NOT_COPIED
    }
    return {**differing, **removed}
