"""What the control log accepts of claims: until when a follower's partitions are known to have been In-Sync.

Each proxy of the target has leases in memory. When one has run out it is recorded, once, so that a failover can say
what an ack meant also after proxies were killed. A claim stays true for ever: whatever the source had acked by then is
here, or on so many of the links that it names. So the later of two counts, and one of another topic of that name counts
for nothing. One of groups is about the namespaces that followed then: it ends when the link gets another one.

Its time is that of the clock of the proxy that had the lease. Where it is ahead of the clock of who records another
one, clocks are apart, or were set back: then it says nothing to anybody here, and gives way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from isthmus_control import commands as c
from isthmus_control.control_state import ControlState
from isthmus_control.model import AckTerms, Claim, GroupClaim, NamespaceMapping, ResourceType
from isthmus_control.outcome import ClaimsRecorded, Rejection, require
from isthmus_control.rules.checks import ENTRIES_MAX, Result
from isthmus_control.rules.demands import LINKS_MAX

AHEAD_MS = 5_000
"""A lease that ran out is not so far ahead of any clock that is right."""


def _record(state: ControlState, offset: int, command: c.Command, body: c.RecordClaims) -> Result:
    link = state.links.get(body.link)
    require(
        link is not None and link.link_id == body.link_id,
        Rejection.NOT_FOUND,
        f"there is no link {body.link!r} with the id {body.link_id}",
    )
    entries = len(body.partitions) + len(body.groups)
    require(0 < entries <= ENTRIES_MAX, Rejection.INVALID, f"a command has 1 to {ENTRIES_MAX} entries")
    after = dict(state.claims)
    groups = dict(state.group_claims)
    for entry in body.partitions:
        require(c.is_uuid(entry.topic_id), Rejection.INVALID, f"the topic id {entry.topic_id!r} is not a UUID")
        require(
            entry.partition >= 0 and entry.until_ms >= 0 and entry.end >= 0,
            Rejection.INVALID,
            f"topic {entry.topic!r} has no such claim of partition {entry.partition}",
        )
        _check(entry.terms, f"of topic {entry.topic!r}")
        topic = state.follower_topics.get(entry.topic)
        if topic is None or topic.link != body.link or topic.topic_id != entry.topic_id:
            continue  # it was made anew meanwhile
        known = state.claim(entry.topic, entry.topic_id, entry.partition)
        if supersedes(entry.until_ms, None if known is None else known.until_ms, command.at_ms):
            after[entry.topic, entry.partition] = Claim(entry.topic_id, entry.until_ms, entry.end, entry.terms)
    for each in body.groups:
        require(
            0 <= each.partition < each.partitions and each.until_ms >= 0,
            Rejection.INVALID,
            f"there is no such claim of groups in partition {each.partition} of {each.partitions}",
        )
        for prefix, terms in each.terms.items():
            _check(terms, f"to groups {prefix!r}*")
        recorded = state.group_claim(body.link, body.link_id, each.partition)
        if supersedes(each.until_ms, None if recorded is None else recorded.until_ms, command.at_ms):
            groups[body.link, each.partition] = GroupClaim(
                body.link_id, each.until_ms, each.partitions, each.terms, each.epoch, each.upto
            )
    if after == state.claims and groups == state.group_claims:
        return state, ()
    return state.evolve(claims=after, group_claims=groups), (ClaimsRecorded(body.link, entries),)


def _check(terms: AckTerms, whose: str) -> None:
    """Raises Refuse for what acks cannot have meant."""
    require(
        0 <= terms.count <= len(terms.links) <= LINKS_MAX and terms.degrade_after_ms >= 0,
        Rejection.INVALID,
        f"acks {whose} cannot have meant {terms.count} of {len(terms.links)} links",
    )


def supersedes(until_ms: int, known_ms: int | None, now_ms: int) -> bool:
    """Whether a claim counts from now on, by the clock of whoever asks, where another one may be known."""
    if until_ms > now_ms + AHEAD_MS:
        return False
    return known_ms is None or known_ms < until_ms or known_ms > now_ms + AHEAD_MS


def without_claims(state: ControlState, link_name: str, mapping: NamespaceMapping) -> ControlState:
    """The state in which nothing is claimed of a namespace, which begins to follow over a link."""
    if mapping.type is ResourceType.PRINCIPAL:
        return state
    kept = state.claims
    if mapping.type is ResourceType.TOPIC:
        kept = {place: claim for place, claim in state.claims.items() if not mapping.holds(place[0])}
    return _with_claims(state, kept, link_name)


def without_group_claims(state: ControlState, link_name: str) -> ControlState:
    """The state in which nothing is claimed of the groups of a link."""
    return _with_claims(state, state.claims, link_name)


def _with_claims(state: ControlState, claims: Mapping[tuple[str, int], Claim], link_name: str) -> ControlState:
    groups = {key: claim for key, claim in state.group_claims.items() if key[0] != link_name}
    if len(claims) == len(state.claims) and len(groups) == len(state.group_claims):
        return state
    return state.evolve(claims=claims, group_claims=groups)


CLAIM_HANDLERS: Mapping[type[c.Body], Callable[[ControlState, int, c.Command, Any], Result]] = {
    c.RecordClaims: _record,
}
