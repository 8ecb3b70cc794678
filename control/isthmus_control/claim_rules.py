"""What the control log accepts of claims: until when a follower's partitions are known to have been In-Sync.

Each proxy of the target has leases in memory. When one has run out it is recorded, once, so that a failover can say
what an ack meant also after proxies were killed. A claim stays true for ever: whatever the source had acked by then is
here, or on so many of the links that it names. So the later of two counts, and one of another topic of that name counts
for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from isthmus_control import commands as c
from isthmus_control.control_state import ControlState
from isthmus_control.demand_rules import LINKS_MAX
from isthmus_control.model import Claim, NamespaceMapping
from isthmus_control.outcome import Change, ClaimsRecorded, Rejection, require

ENTRIES_MAX = 10_000

Result = tuple[ControlState, tuple[Change, ...]]


def _record(state: ControlState, offset: int, command: c.Command, body: c.RecordClaims) -> Result:
    link = state.links.get(body.link)
    require(
        link is not None and link.link_id == body.link_id,
        Rejection.NOT_FOUND,
        f"there is no link {body.link!r} with the id {body.link_id}",
    )
    require(0 < len(body.partitions) <= ENTRIES_MAX, Rejection.INVALID, f"a command has 1 to {ENTRIES_MAX} entries")
    after = dict(state.claims)
    for entry in body.partitions:
        require(c.is_uuid(entry.topic_id), Rejection.INVALID, f"the topic id {entry.topic_id!r} is not a UUID")
        require(
            entry.partition >= 0 and entry.until_ms >= 0 and entry.end >= 0,
            Rejection.INVALID,
            f"topic {entry.topic!r} has no such claim of partition {entry.partition}",
        )
        require(
            0 <= entry.terms.count <= len(entry.terms.links) <= LINKS_MAX and entry.terms.degrade_after_ms >= 0,
            Rejection.INVALID,
            f"acks of topic {entry.topic!r} cannot have meant {entry.terms.count} of {len(entry.terms.links)} links",
        )
        topic = state.follower_topics.get(entry.topic)
        if topic is None or topic.link != body.link or topic.topic_id != entry.topic_id:
            continue  # it was made anew meanwhile
        known = state.claim(entry.topic, entry.topic_id, entry.partition)
        if known is None or known.until_ms < entry.until_ms:
            after[entry.topic, entry.partition] = Claim(entry.topic_id, entry.until_ms, entry.end, entry.terms)
    if after == state.claims:
        return state, ()
    return state.evolve(claims=after), (ClaimsRecorded(body.link, len(body.partitions)),)


def without_claims(state: ControlState, mapping: NamespaceMapping) -> ControlState:
    """The state in which nothing is known of the topics of a mapping, which begin to follow."""
    kept = {place: claim for place, claim in state.claims.items() if not mapping.holds(place[0])}
    return state.evolve(claims=kept) if len(kept) < len(state.claims) else state


CLAIM_HANDLERS: Mapping[type[c.Body], Callable[[ControlState, int, c.Command, Any], Result]] = {
    c.RecordClaims: _record,
}
