"""How far what follows was found to be its source's, by what both brokers hold, as it is shown."""

from __future__ import annotations

from collections.abc import Sequence

from isthmus_control.control_state import ControlState
from isthmus_control.levels import PROOFS
from isthmus_control.model import Link, TopicState
from isthmus_control.states import WAITING, PartitionState, ReasonCode
from isthmus_plugins.links import PartitionStatus
from isthmus_plugins.replication.proof.background import BackgroundVerification


def note_proofs(
    state: ControlState, verification: BackgroundVerification, partitions: Sequence[PartitionStatus]
) -> None:
    """Say of partitions that follow how far they are equal; what differs is the reason of those that go on."""
    for status in partitions:
        record = state.follower_topics.get(status.topic) if status.role == "follower" else None
        if record is None or record.state is not TopicState.FOLLOWING:
            continue
        shown = verification.shown(record, status.partition)
        if shown is None:
            continue
        status.equal_until, status.verify_trouble = shown.equal_until, shown.trouble
        status.verified_seconds = None if shown.age_seconds is None else round(shown.age_seconds, 3)
        if shown.difference is not None:
            status.differs_at = shown.difference.offset
            if PartitionState(status.state) not in WAITING:
                status.reason, status.message = ReasonCode.LOGS_DIFFER, shown.difference.message


def differing(partitions: Sequence[PartitionStatus]) -> tuple[str, str] | None:
    """The code and message of partitions of a link that differ; None: none is known to."""
    found = [each for each in partitions if each.differs_at is not None]
    if not found:
        return None
    first = found[0]
    others = f", and of {len(found) - 1} more partitions" if len(found) > 1 else ""
    return (
        ReasonCode.LOGS_DIFFER,
        f"what both clusters hold of {first.topic}-{first.partition}{others} differs: {first.message} "
        f"(isthmus link acknowledge)",
    )


def verified_every(state: ControlState, link: Link) -> float | None:
    """In which time both whole logs are compared again; None: they are not."""
    every_ms = link.verify_every_ms
    return None if every_ms is None or state.level < PROOFS else every_ms / 1000


def verified_seconds(partitions: Sequence[PartitionStatus]) -> float | None:
    """The age of the oldest whole pass; None: some partition has had none, or nothing follows."""
    ages = [each.verified_seconds for each in partitions if each.role == "follower" and each.partition >= 0]
    known = [age for age in ages if age is not None]
    return max(known) if known and len(known) == len(ages) else None
