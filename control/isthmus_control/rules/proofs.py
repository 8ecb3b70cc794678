"""What the control log accepts of how far partitions that follow were found to be their sources'."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from isthmus_control import commands as c
from isthmus_control.control_state import ControlState
from isthmus_control.model import FollowerTopic, TopicState
from isthmus_control.outcome import Change, FollowerTopicChanged, Rejection, require
from isthmus_control.proofs import Proof
from isthmus_control.rules.checks import ENTRIES_MAX, Result, check_reason


def _record(state: ControlState, offset: int, command: c.Command, body: c.RecordProofs) -> Result:
    for entry in body.partitions:
        proof = entry.proof
        least = min(entry.partition, proof.equal_until, proof.passed_ms, proof.begun_ms, proof.at)
        found = proof.difference
        if found is not None:
            check_reason(found.message)
            least = min(least, found.offset, found.to, found.found_ms)
        require(least >= 0, Rejection.INVALID, f"topic {entry.topic!r} has no such partition, offset or time")

    def recorded(known: Proof | None, entry: c.PartitionProof) -> Proof:
        return entry.proof

    return _changed(state, body.partitions, recorded)


def _acknowledge(state: ControlState, offset: int, command: c.Command, body: c.AcknowledgeDifferences) -> Result:
    def acknowledged(known: Proof | None, entry: c.PartitionOffset) -> Proof | None:
        if known is None or known.difference is None or known.difference.offset != entry.offset:
            return known  # it is another one by now, or none
        return replace(known, difference=None)

    return _changed(state, body.partitions, acknowledged)


def _changed(
    state: ControlState, entries: Sequence[Any], decide: Callable[[Proof | None, Any], Proof | None]
) -> Result:
    """``decide``: what is known of a partition from now on, of what was and an entry."""
    require(0 < len(entries) <= ENTRIES_MAX, Rejection.INVALID, f"a command has 1 to {ENTRIES_MAX} entries")
    topics: dict[str, FollowerTopic] = {}
    for entry in entries:
        record = topics.get(entry.topic) or state.follower_topics.get(entry.topic)
        if record is None or record.state is not TopicState.FOLLOWING or record.topic_id != entry.topic_id:
            continue  # detached, or another topic by now
        proof = decide(record.proofs.get(entry.partition), entry)
        if proof is not None and proof != record.proofs.get(entry.partition):
            topics[entry.topic] = replace(record, proofs={**record.proofs, entry.partition: proof})
    changes: list[Change] = [FollowerTopicChanged(state.follower_topics[name], topics[name]) for name in sorted(topics)]
    if not changes:
        return state, ()
    return state.evolve(follower_topics={**state.follower_topics, **topics}), tuple(changes)


PROOF_HANDLERS: Mapping[type[c.Body], Callable[[ControlState, int, c.Command, Any], Result]] = {
    c.RecordProofs: _record,
    c.AcknowledgeDifferences: _acknowledge,
}
