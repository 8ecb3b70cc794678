"""The state machine: ``apply(state, offset, command)``.

Every proxy of a cluster applies the same commands in the same order, so this is a pure function of its arguments: no
clock, no I/O, no randomness, no order of a set. A command is accepted with its changes or rejected with a code and a
message, and every proxy comes to the same answer in the same words. The caller of the admin interface gets the answer
that the log gave; for a dry run apply the command to the current state and drop the new one.

Rules of namespaces and links (KIP-986, "User Interface"):

- A namespace follows at most one link, overlap counted: no local name may be in two follower namespaces.
- On one link a local name has one remote name: the local prefixes of its leader mappings do not overlap, nor do the
  remote ones towards one cluster, over all links to it.
- What comes from a cluster does not go back to it: a follower and a leader mapping whose local namespaces overlap are
  refused on one link, and on two links to one cluster where the remote ones overlap too (it would go round for ever).
- Following reserves; detaching and deleting links leaves reserved what was. An attached namespace is not deleted.
- A link is asynchronous until it is altered; one that is synchronous has no informational namespace, and its topics go
  from the cluster that made it synchronous to the other one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from isthmus_control import commands as c
from isthmus_control.acl_rules import ACL_HANDLERS, own_again
from isthmus_control.bounds import SYNC_CONFIRM_TIMEOUT_MS_MAX, SYNC_CONFIRM_TIMEOUT_MS_MIN
from isthmus_control.claim_rules import CLAIM_HANDLERS, without_claims, without_group_claims
from isthmus_control.clock import ZERO, Hlc, Register, tick
from isthmus_control.control_state import ControlState
from isthmus_control.deletion_rules import DELETION_HANDLERS
from isthmus_control.demand_rules import DEMAND_HANDLERS, check_demands, check_links
from isthmus_control.model import (
    INTERNAL_TOPIC_PREFIXES,
    KAFKA_INTERNAL_TOPICS,
    SYNC_CONFIRM_TIMEOUT,
    TRANSACTION_VERIFICATION,
    FollowerTopic,
    HeldConfig,
    Link,
    LinkMode,
    LinkSettings,
    Namespace,
    NamespaceKey,
    NamespaceMapping,
    ProvenanceRange,
    ProxyLease,
    Reason,
    ResourceType,
    Role,
    SourceEpoch,
    TopicHistory,
    TopicState,
    overlap,
)
from isthmus_control.offsets_rules import OFFSETS_HANDLERS, offsets_topic_ended, topics_detached
from isthmus_control.outcome import (
    Accepted,
    Change,
    Duplicate,
    FollowerTopicChanged,
    HeldConfigChanged,
    LeaseChanged,
    LeaseRenewed,
    LinkChanged,
    NamespaceAttached,
    NamespaceChanged,
    NamespaceDetached,
    Outcome,
    ProducerIdsRegistered,
    ProvenanceChanged,
    Refuse,
    Rejected,
    Rejection,
    SnapshotTaken,
)
from isthmus_control.outcome import require as _require
from isthmus_control.plugin_rules import PLUGIN_HANDLERS
from isthmus_control.promotion_rules import PROMOTION_HANDLERS
from isthmus_control.sync_rules import SYNC_HANDLERS, check_synchronous, mode_changed, records_ended
from isthmus_control.truncation_rules import TRUNCATION_HANDLERS, cancelled
from isthmus_protocol.producer_ids import CLUSTERS_MAX

REMEMBERED_COMMANDS = 1024
"""How many command ids are remembered. A retry gives up long before so many others were accepted."""
NAMESPACES_MAX = 10_000
LINKS_MAX = 1_000
ENTRIES_MAX = 10_000
"""Partitions in one command; a record of that many stays below a megabyte or two."""
ADDRESSES_MAX = 64
PREFIX_CHARS_MAX = 249
"""As the longest topic name that brokers take."""
REASON_CHARS_MAX = 1_000
LEASE_MS_MIN, LEASE_MS_MAX = 1_000, 120_000
AT_MS_MAX = 2**53
"""Beyond it a wall clock is broken, and the hybrid logical clock would follow it."""
SNAPSHOT_INTERVAL = 512
"""A snapshot is due at every offset that is one less than a multiple of this."""

LINK_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}\Z")
TOPIC_PREFIX = re.compile(r"[A-Za-z0-9._-]*\Z")
ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[^\s:\[\]/@]+):([0-9]{1,5})\Z")

Result = tuple[ControlState, tuple[Change, ...]]
K = TypeVar("K")
V = TypeVar("V")


def _positive(value: str) -> str | None:
    return None if re.fullmatch(r"[1-9][0-9]{0,4}", value) else "a number from 1"


def _confirm_timeout(value: str) -> str | None:
    least, most = SYNC_CONFIRM_TIMEOUT_MS_MIN, SYNC_CONFIRM_TIMEOUT_MS_MAX
    right = re.fullmatch(r"[1-9][0-9]{3,6}", value) and least <= int(value) <= most
    return None if right else f"a number of milliseconds from {least} to {most}"


LINK_CONFIGS: Mapping[str, Callable[[str], str | None]] = {
    "follower.replication.factor": _positive,
    "follower.min.insync.replicas": _positive,
    SYNC_CONFIRM_TIMEOUT: _confirm_timeout,
}
"""Settings of a link, and for each what a wrong value should have been (None: it is right). The first two say how
follower topics are stored where the cluster is built otherwise than the source's."""


def apply(state: ControlState, offset: int, command: c.Command) -> tuple[ControlState, Outcome]:
    """The state after ``command``, the record at ``offset``, and what came of it.

    The new state's ``applied_offset`` is ``offset`` whatever the outcome. ``offset`` must be beyond the last one.
    """
    if offset <= state.applied_offset:
        raise ValueError(f"offset {offset} was applied already, the state is at {state.applied_offset}")
    body = command.body
    remembered = body.REMEMBERED
    if remembered:
        if command.id in state.recent_ids:
            first = state.recent_offsets[state.recent_ids.index(command.id)]
            return state.evolve(applied_offset=offset), Duplicate(first)
        if command.seen < state.forgotten_offset:
            message = "the command was made too long ago to know whether it counted; make it again"
            return state.evolve(applied_offset=offset), Rejected(Rejection.STALE, message)
    outcome: Outcome
    try:
        if not 0 <= command.at_ms < AT_MS_MAX:
            raise Refuse(Rejection.INVALID, f"the time {command.at_ms} is not one")
        if command.seen >= offset:
            raise Refuse(Rejection.INVALID, "the command says it has seen what comes after it")
        new, changes = _HANDLERS[type(body)](state, offset, command, body)
        outcome = Accepted(changes)
    except Refuse as refused:
        new, outcome = state, Rejected(refused.code, str(refused))
    return _remember(new, offset, command.id if remembered else None), outcome


def reject(state: ControlState, offset: int, message: str) -> tuple[ControlState, Rejected]:
    """The state after a record that is no command at all."""
    return state.evolve(applied_offset=offset), Rejected(Rejection.MALFORMED, message)


def _remember(state: ControlState, offset: int, command_id: str | None) -> ControlState:
    if command_id is None:
        return state.evolve(applied_offset=offset)
    ids, offsets = state.recent_ids, state.recent_offsets
    forgotten = state.forgotten_offset
    if len(ids) >= REMEMBERED_COMMANDS:
        # A command whose maker had applied this offset cannot be the one that stands here.
        forgotten = offsets[0]
        ids, offsets = ids[1:], offsets[1:]
    return state.evolve(
        applied_offset=offset,
        recent_ids=(*ids, command_id),
        recent_offsets=(*offsets, offset),
        forgotten_offset=forgotten,
    )


# --- small things


def _put(table: Mapping[K, V], key: K, value: V) -> dict[K, V]:
    return {**table, key: value}


def _drop(table: Mapping[K, V], key: K) -> dict[K, V]:
    return {name: value for name, value in table.items() if name != key}


def _uuid(text: str, what: str) -> None:
    _require(c.is_uuid(text), Rejection.INVALID, f"{what} {text!r} is not a UUID")


def _addresses(addresses: Iterable[str]) -> None:
    listed = tuple(addresses)
    _require(len(listed) <= ADDRESSES_MAX, Rejection.INVALID, f"more than {ADDRESSES_MAX} addresses")
    for address in listed:
        match = ADDRESS.match(address)
        _require(
            match and 1 <= int(match[2]) <= 65535,
            Rejection.INVALID,
            f"{address!r} is not an address: host:port, IPv6 hosts in brackets",
        )


def _reason(text: str | None) -> None:
    _require(text is None or len(text) <= REASON_CHARS_MAX, Rejection.INVALID, "the reason is too long")


def _link(state: ControlState, name: str) -> Link:
    link = state.links.get(name)
    if link is None:
        raise Refuse(Rejection.NOT_FOUND, f"there is no link {name!r}")
    return link


def _namespace(state: ControlState, kind: ResourceType, prefix: str) -> Namespace:
    namespace = state.namespaces.get(NamespaceKey(kind, prefix))
    if namespace is None:
        raise Refuse(Rejection.NOT_FOUND, f"there is no {NamespaceKey(kind, prefix)}: create it first")
    return namespace


def _check_prefix(kind: ResourceType, prefix: str) -> None:
    _require(len(prefix) <= PREFIX_CHARS_MAX, Rejection.INVALID, f"the prefix is longer than {PREFIX_CHARS_MAX}")
    if kind is ResourceType.TOPIC:
        _require(
            TOPIC_PREFIX.match(prefix),
            Rejection.INVALID,
            f"{prefix!r} is no prefix of topics: letters, digits, '.', '_' and '-' only",
        )
        _require(
            not prefix.startswith(INTERNAL_TOPIC_PREFIXES) and prefix not in KAFKA_INTERNAL_TOPICS,
            Rejection.INVALID,
            f"{prefix!r} names internal topics, which are in no namespace",
        )
    if kind is ResourceType.PRINCIPAL:
        _require(
            not prefix or re.match("[^:]+:", prefix),
            Rejection.INVALID,
            f"{prefix!r} is no prefix of principals: name their type, as in 'User:app-'",
        )


# --- namespaces


def _reserve(namespace: Namespace, offset: int, reason: str) -> Namespace:
    """Reserved; one that is already stays reserved since when it was, so nobody waits for it again."""
    if namespace.reserved:
        return replace(namespace, reserved_reason=reason)
    return replace(namespace, reserved=True, reserved_reason=reason, reserved_at_offset=offset)


BY_OPERATOR = "reserved by the operator"


def _create_namespace(state: ControlState, offset: int, command: c.Command, body: c.CreateNamespace) -> Result:
    _check_prefix(body.type, body.prefix)
    _reason(body.reason)
    key = NamespaceKey(body.type, body.prefix)
    _require(key not in state.namespaces, Rejection.ALREADY_EXISTS, f"the {key} exists already")
    _require(len(state.namespaces) < NAMESPACES_MAX, Rejection.CONFLICT, f"there are {NAMESPACES_MAX} namespaces")
    _require(
        body.reserved or body.reason is None, Rejection.INVALID, "a reason is for a reservation, and there is none"
    )
    check_demands(key, body.informational, body.demands)
    check_links(state, body.demands.confirm)
    namespace = Namespace(body.type, body.prefix, command.at_ms, informational=body.informational, demands=body.demands)
    if body.reserved:
        namespace = _reserve(namespace, offset, body.reason or BY_OPERATOR)
    return state.evolve(namespaces=_put(state.namespaces, key, namespace)), (NamespaceChanged(None, namespace),)


def _alter_namespace(state: ControlState, offset: int, command: c.Command, body: c.AlterNamespace) -> Result:
    _reason(body.reason)
    before = _namespace(state, body.type, body.prefix)
    following = next((link for link, m in state.attachments(before.key) if m.role is Role.FOLLOWER), None)
    if body.reserved:
        if before.reserved and (body.reason is None or following is not None):
            return state, ()
        after = _reserve(before, offset, body.reason or BY_OPERATOR)
    else:
        _require(
            following is None,
            Rejection.CONFLICT,
            f"the {before.key} follows link {following.name!r}, so it stays reserved: detach it first"
            if following
            else "",
        )
        _require(body.reason is None, Rejection.INVALID, "a reason is for a reservation, and this clears it")
        _require(
            before.key not in state.promotions,
            Rejection.CONFLICT,
            f"the {before.key} is being promoted, which clears its reservation when everything else is done",
        )
        after = replace(before, reserved=False, reserved_reason=None, reserved_at_offset=None)
    if after == before:
        return state, ()
    changes: tuple[Change, ...] = ()
    if not after.reserved:
        state, changes = own_again(state, before)
    return (
        state.evolve(namespaces=_put(state.namespaces, before.key, after)),
        (NamespaceChanged(before, after), *changes),
    )


def _delete_namespace(state: ControlState, offset: int, command: c.Command, body: c.DeleteNamespace) -> Result:
    before = _namespace(state, body.type, body.prefix)
    links = [link.name for link, _ in state.attachments(before.key)]
    _require(
        not links,
        Rejection.CONFLICT,
        f"the {before.key} is attached to link {', '.join(repr(name) for name in sorted(links))}: detach it first",
    )
    _require(before.key not in state.promotions, Rejection.CONFLICT, f"the {before.key} is being promoted")
    state, more = own_again(state, before)
    changes: list[Change] = [NamespaceChanged(before, None), *more]
    topics = dict(state.follower_topics)
    if body.type is ResourceType.TOPIC:
        # Only what no remaining namespace shows; the history of the topics stays.
        others = [n for n in state.namespaces.values() if n.type is ResourceType.TOPIC and n.key != before.key]
        for name, topic in sorted(state.follower_topics.items()):
            if name in before and topic.state is TopicState.DETACHED and not any(name in other for other in others):
                del topics[name]
                changes.append(FollowerTopicChanged(topic, None))
    return (
        state.evolve(namespaces=_drop(state.namespaces, before.key), follower_topics=topics),
        tuple(changes),
    )


# --- links


def _check_config(config: Mapping[str, str | None]) -> None:
    for name, value in sorted(config.items()):
        check = LINK_CONFIGS.get(name)
        if check is None:
            known = ", ".join(sorted(LINK_CONFIGS))
            raise Refuse(Rejection.INVALID, f"a link has no setting {name!r}; there are {known}")
        wanted = check(value) if value is not None else None
        _require(wanted is None, Rejection.INVALID, f"{name} is {wanted}, not {value!r}")


def _create_link(state: ControlState, offset: int, command: c.Command, body: c.CreateLink) -> Result:
    _require(
        LINK_NAME.match(body.name),
        Rejection.INVALID,
        f"{body.name!r} is no name of a link: up to 100 letters, digits, '.', '_' and '-'",
    )
    _uuid(body.link_id, "the link id")
    _require(body.remote_cluster_id, Rejection.INVALID, "the remote cluster has no id")
    _require(
        body.remote_cluster_id != state.cluster_id,
        Rejection.INVALID,
        f"the remote address leads to this same cluster ({state.cluster_id}): a link joins two",
    )
    _addresses(body.remote_addresses)
    _addresses(body.local_addresses)
    _require(
        body.remote_addresses or not body.dials, Rejection.INVALID, "a side that dials needs the other side's address"
    )
    _require(
        body.mode is LinkMode.ASYNCHRONOUS,
        Rejection.INVALID,
        "new replication links are always in asynchronous mode: make it synchronous when it follows",
    )
    _check_config(body.config)
    existing = state.links.get(body.name)
    if existing is not None:
        if existing.link_id == body.link_id and existing.remote_cluster_id == body.remote_cluster_id:
            return state, ()  # setting up both sides was retried
        raise Refuse(
            Rejection.ALREADY_EXISTS,
            f"link {body.name!r} exists already, to cluster {existing.remote_cluster_id}",
        )
    twin = next((link.name for link in state.links.values() if link.link_id == body.link_id), None)
    _require(twin is None, Rejection.ALREADY_EXISTS, f"this link exists already under the name {twin!r}")
    _require(len(state.links) < LINKS_MAX, Rejection.CONFLICT, f"there are {LINKS_MAX} links")
    now = tick(state.clock, command.at_ms, state.cluster_id)
    addresses = {}
    if body.remote_addresses:
        addresses[body.remote_cluster_id] = Register(body.remote_addresses, now)
    if body.local_addresses:
        addresses[state.cluster_id] = Register(body.local_addresses, now)
    config: dict[str, Register[str | None]] = {name: Register(value, now) for name, value in body.config.items()}
    link = Link(
        name=body.name,
        link_id=body.link_id,
        number=state.links_created,
        local_cluster_id=state.cluster_id,
        remote_cluster_id=body.remote_cluster_id,
        dials=body.dials,
        settings=LinkSettings(Register(body.mode, ZERO), addresses, config),  # a beginning, which any write wins over
        created_ms=command.at_ms,
        secret=body.secret,
    )
    return (
        state.evolve(links=_put(state.links, link.name, link), links_created=link.number + 1, clock=now),
        (LinkChanged(None, link),),
    )


def _alter_link(state: ControlState, offset: int, command: c.Command, body: c.AlterLink) -> Result:
    before = _link(state, body.name)
    now = tick(state.clock, command.at_ms, state.cluster_id)
    settings = before.settings
    # Writes of equal values are none: they would win over the other side's real changes.
    if body.mode is not None and body.mode is not before.mode:
        settings = replace(settings, mode=Register(body.mode, now))
    addresses = dict(settings.addresses)
    for cluster_id, current, wanted in (
        (before.remote_cluster_id, before.remote_addresses, body.remote_addresses),
        (before.local_cluster_id, before.local_addresses, body.local_addresses),
    ):
        if wanted is not None:
            _addresses(wanted)
            if wanted != current:
                addresses[cluster_id] = Register(wanted, now)
    config = dict(settings.config)
    if body.config is not None:
        _check_config(body.config)
        for name, value in body.config.items():
            if before.config.get(name) != value:
                config[name] = Register(value, now)
    after = replace(
        before,
        dials=before.dials if body.dials is None else body.dials,
        secret=before.secret if body.secret is None else body.secret,
        settings=replace(settings, addresses=addresses, config=config),
    )
    _require(
        after.remote_addresses or not after.dials, Rejection.INVALID, "a side that dials needs the other side's address"
    )
    if after == before:
        return state, ()
    state, after, more = mode_changed(state, before, after, offset)
    clock = now if after.settings != before.settings else state.clock
    return state.evolve(links=_put(state.links, after.name, after), clock=clock), (LinkChanged(before, after), *more)


def _merge_link(state: ControlState, offset: int, command: c.Command, body: c.MergeLink) -> Result:
    before = _link(state, body.name)
    _require(
        before.link_id == body.link_id,
        Rejection.CONFLICT,
        f"link {body.name!r} is another one on the other side: it was deleted and created again",
    )
    _require(
        set(body.settings.addresses) <= {before.local_cluster_id, before.remote_cluster_id},
        Rejection.INVALID,
        "the settings have addresses of a third cluster",
    )
    for addresses in body.settings.addresses.values():
        _addresses(addresses.value)
    _check_config({name: register.value for name, register in body.settings.config.items()})
    newest = body.settings.newest
    _require(0 <= newest.wall_ms < AT_MS_MAX, Rejection.INVALID, "the settings carry an impossible time")
    merged = before.settings.merge(body.settings)
    if merged == before.settings:
        return state, ()
    # A link that may not be synchronous here refuses the other side's settings as a whole, so that somebody sees it.
    state, after, more = mode_changed(state, before, replace(before, settings=merged), offset)
    clock: Hlc = max(state.clock, newest)
    return state.evolve(links=_put(state.links, after.name, after), clock=clock), (LinkChanged(before, after), *more)


def _detached(state: ControlState, link: Link, mapping: NamespaceMapping, at_ms: int) -> Result:
    """The state without this mapping of the link (which the caller takes out of the link itself)."""
    changes: list[Change] = [NamespaceDetached(link.name, mapping)]
    if mapping.role is Role.LEADER:
        state, ended = records_ended(state, link, mapping)
        return state, (*changes, *ended)
    if mapping.type is ResourceType.TOPIC:
        state, stopped = cancelled(state, link.name, mapping, at_ms)
        state, ended = records_ended(state, link, mapping)
        changes += (*stopped, *ended)
    namespace = state.namespaces[mapping.local]
    reason = (
        f"followed {mapping.remote_prefix!r} on link {link.name!r} until it was detached; "
        f"clear the reserved flag to make it writable"
    )
    after = replace(namespace, reserved_reason=reason)
    changes.append(NamespaceChanged(namespace, after))
    state = state.evolve(namespaces=_put(state.namespaces, namespace.key, after))
    if mapping.type is not ResourceType.TOPIC:
        return state, tuple(changes)
    state, detached = topics_detached(state, link, mapping, at_ms)
    return state, (*changes, *detached)


def _delete_link(state: ControlState, offset: int, command: c.Command, body: c.DeleteLink) -> Result:
    link = _link(state, body.name)
    changes: tuple[Change, ...] = ()
    for mapping in link.mappings:
        state, more = _detached(state, link, mapping, command.at_ms)
        changes += more
    state, ended = records_ended(state, link)
    changes += tuple(ended)
    for mapping in link.offsets_topics:
        state, more = offsets_topic_ended(state, link, mapping, command.at_ms)
        changes += more
    state = without_group_claims(state, link.name)
    return state.evolve(links=_drop(state.links, link.name)), (*changes, LinkChanged(link, None))


def _attach(state: ControlState, offset: int, command: c.Command, body: c.AttachNamespace) -> Result:
    link = _link(state, body.link)
    _check_prefix(body.type, body.local_prefix)
    _check_prefix(body.type, body.remote_prefix)
    _require(
        body.role is Role.FOLLOWER or not body.truncate_topic_ids,
        Rejection.INVALID,
        "only the follower's side can agree to truncate its topics",
    )
    _require(
        len(body.truncate_topic_ids) <= ENTRIES_MAX, Rejection.INVALID, f"more than {ENTRIES_MAX} topics to truncate"
    )
    for topic_id in body.truncate_topic_ids:
        _uuid(topic_id, "the topic id")
    _require(
        body.role is Role.FOLLOWER or not body.disable_transaction_verification,
        Rejection.INVALID,
        "only the follower's side can agree to settings of its brokers",
    )
    key = NamespaceKey(body.type, body.local_prefix)
    namespace = state.namespaces.get(key)
    if namespace is None:
        _require(body.create_missing, Rejection.NOT_FOUND, f"there is no {key}: create it first")
        _require(len(state.namespaces) < NAMESPACES_MAX, Rejection.CONFLICT, f"there are {NAMESPACES_MAX} namespaces")
        namespace = Namespace(body.type, body.local_prefix, command.at_ms)
    mapping = NamespaceMapping(
        body.type,
        body.local_prefix,
        body.remote_prefix,
        body.role,
        command.at_ms,
        offset,
        body.truncate_topic_ids,
        body.disable_transaction_verification,
    )
    if link.mode is LinkMode.SYNCHRONOUS:
        check_synchronous(link, mapping, namespace.informational)
    _require(key not in state.promotions, Rejection.CONFLICT, f"the {key} is being promoted: wait for that")
    attached = link.mapping(body.type, body.local_prefix)
    if attached is not None:
        return _attach_again(state, link, attached, mapping)
    for other_link, other in ((link_, m) for _, link_ in sorted(state.links.items()) for m in link_.mappings):
        _check_pair(link, mapping, other_link, other)
    changes: list[Change] = []
    after = namespace
    if body.role is Role.FOLLOWER:
        state = without_claims(state, link.name, mapping)
        after = _reserve(namespace, offset, f"follows {body.remote_prefix!r} on link {link.name!r}")
    before = state.namespaces.get(key)
    if after != before:
        changes.append(NamespaceChanged(before, after))
    changes.append(NamespaceAttached(link.name, mapping))
    return (
        state.evolve(
            namespaces=_put(state.namespaces, key, after),
            links=_put(state.links, link.name, replace(link, mappings=(*link.mappings, mapping))),
        ),
        tuple(changes),
    )


def _attach_again(state: ControlState, link: Link, attached: NamespaceMapping, wanted: NamespaceMapping) -> Result:
    """A repeated attach is accepted, and may give or take back the operator's consents."""
    same = replace(wanted, attached_ms=attached.attached_ms, attached_at_offset=attached.attached_at_offset)
    _require(
        (same.remote_prefix, same.role) == (attached.remote_prefix, attached.role),
        Rejection.CONFLICT,
        f"the {attached.local} is attached to link {link.name!r} already, as {attached.role} "
        f"of {attached.remote_prefix!r}: detach it first",
    )
    if same == attached:
        return state, ()
    mappings = tuple(same if mapping is attached else mapping for mapping in link.mappings)
    return (
        state.evolve(links=_put(state.links, link.name, replace(link, mappings=mappings))),
        (NamespaceAttached(link.name, same),),
    )


def _check_pair(link: Link, new: NamespaceMapping, other_link: Link, other: NamespaceMapping) -> None:
    """Refuses ``new`` on ``link`` where it cannot stand beside ``other`` on ``other_link``."""
    if new.type is not other.type:
        return
    local = overlap(new.local_prefix, other.local_prefix)
    remote = overlap(new.remote_prefix, other.remote_prefix)
    same_peer = link.remote_cluster_id == other_link.remote_cluster_id
    if new.role is other.role is Role.FOLLOWER:
        _require(
            not local,
            Rejection.CONFLICT,
            f"the {other.local} follows link {other_link.name!r} already, and {new.local_prefix!r} overlaps it: "
            f"a namespace follows one link at most",
        )
    elif new.role is other.role:
        _require(
            not (local and link.name == other_link.name),
            Rejection.CONFLICT,
            f"the {other.local} leads on link {other_link.name!r} already, and {new.local_prefix!r} overlaps it: "
            f"a name would have two counterparts",
        )
        _require(
            not (remote and same_peer),
            Rejection.CONFLICT,
            f"{other.local_prefix!r} goes to {other.remote_prefix!r} of the same cluster on link {other_link.name!r} "
            f"already, and {new.remote_prefix!r} overlaps it: two namespaces would meet there",
        )
    else:
        _require(
            not (local and (link.name == other_link.name or (same_peer and remote))),
            Rejection.CONFLICT,
            f"{new.local_prefix!r} would {'follow' if new.role is Role.FOLLOWER else 'lead'} cluster "
            f"{link.remote_cluster_id} and the overlapping {other.local_prefix!r} "
            f"{'follows' if other.role is Role.FOLLOWER else 'leads'} it on link {other_link.name!r}: "
            f"what comes from there would go back",
        )


def _detach(state: ControlState, offset: int, command: c.Command, body: c.DetachNamespace) -> Result:
    link = _link(state, body.link)
    mapping = link.mapping(body.type, body.local_prefix)
    if mapping is None:
        raise Refuse(
            Rejection.NOT_FOUND,
            f"the {NamespaceKey(body.type, body.local_prefix)} is not attached to link {link.name!r}",
        )
    state, changes = _detached(state, link, mapping, command.at_ms)
    rest = tuple(other for other in link.mappings if other is not mapping)
    return state.evolve(links=_put(state.links, link.name, replace(link, mappings=rest))), changes


def _hold_broker_config(state: ControlState, offset: int, command: c.Command, body: c.HoldBrokerConfig) -> Result:
    _require(body.name == TRANSACTION_VERIFICATION, Rejection.INVALID, f"links hold no broker setting {body.name!r}")
    _require(
        state.disables_transaction_verification,
        Rejection.CONFLICT,
        f"no mapping stands with the consent to change {body.name}",
    )
    if body.name in state.held_configs:
        return state, ()  # another proxy was faster, and knows the former value better
    held = HeldConfig(body.name, body.value, body.former, command.at_ms)
    return state.evolve(held_configs=_put(state.held_configs, body.name, held)), (HeldConfigChanged(None, held),)


def _release_broker_config(state: ControlState, offset: int, command: c.Command, body: c.ReleaseBrokerConfig) -> Result:
    before = state.held_configs.get(body.name)
    if before is None:
        return state, ()
    _require(
        not state.disables_transaction_verification, Rejection.CONFLICT, f"a mapping needs {body.name} as it is held"
    )
    return state.evolve(held_configs=_drop(state.held_configs, body.name)), (HeldConfigChanged(before, None),)


# --- follower topics and provenance

TOPIC_TRANSITIONS: Mapping[TopicState | None, frozenset[TopicState]] = {
    None: frozenset((TopicState.CREATING, TopicState.FOLLOWING, TopicState.REFUSED)),
    TopicState.CREATING: frozenset((TopicState.CREATING, TopicState.FOLLOWING, TopicState.REFUSED)),
    TopicState.FOLLOWING: frozenset((TopicState.FOLLOWING, TopicState.REFUSED)),
    TopicState.REFUSED: frozenset((TopicState.CREATING, TopicState.FOLLOWING, TopicState.REFUSED)),
    TopicState.DETACHED: frozenset((TopicState.CREATING, TopicState.FOLLOWING, TopicState.REFUSED)),
}
"""What a follower topic may become by command, from each state. DETACHED comes of detaching alone."""


def _set_follower_topic(state: ControlState, offset: int, command: c.Command, body: c.SetFollowerTopic) -> Result:
    link = _link(state, body.link)
    _uuid(body.source_topic_id, "the source topic id")
    if body.topic_id is not None:
        _uuid(body.topic_id, "the topic id")
    counterpart = state.lookup.following(ResourceType.TOPIC, body.topic)
    _require(
        counterpart is not None and counterpart.link.name == link.name and counterpart.remote_name == body.source_topic,
        Rejection.CONFLICT,
        f"topic {body.topic!r} does not follow {body.source_topic!r} on link {link.name!r}: no mapping says so",
    )
    before = state.follower_topics.get(body.topic)
    _require(
        body.topic not in state.truncations, Rejection.CONFLICT, f"topic {body.topic!r} is being truncated: wait for it"
    )
    _require(
        body.state in TOPIC_TRANSITIONS[before.state if before else None],
        Rejection.CONFLICT,
        f"topic {body.topic!r} cannot become {body.state}, it is {before.state if before else 'new'}",
    )
    _require(
        body.state is not TopicState.FOLLOWING or body.topic_id is not None,
        Rejection.INVALID,
        f"topic {body.topic!r} cannot follow without a topic id",
    )
    _require(
        (body.state is TopicState.REFUSED) == (body.reason is not None),
        Rejection.INVALID,
        f"topic {body.topic!r}: a refusal has a reason, and nothing else has",
    )
    if body.reason is not None:
        _reason(body.reason.message)
    after = FollowerTopic(
        link.name,
        body.topic,
        body.source_topic,
        body.source_topic_id,
        body.state,
        command.at_ms,
        body.topic_id if body.topic_id is not None else _kept_id(before, body),
        Reason(body.reason.code, body.reason.message) if body.reason else None,
        compacts_since_offset=offset,
        settings=dict(body.settings),
    )
    if before is not None and before.topic_id == after.topic_id:
        after = replace(after, cleaned=before.cleaned, doubted=before.doubted)
        if before.state is body.state:
            after = replace(after, compacts=before.compacts, compacts_since_offset=before.compacts_since_offset)
    if before is not None and replace(after, recorded_ms=before.recorded_ms) == before:
        return state, ()
    return (
        state.evolve(follower_topics=_put(state.follower_topics, body.topic, after)),
        (FollowerTopicChanged(before, after),),
    )


def _kept_id(before: FollowerTopic | None, body: c.SetFollowerTopic) -> str | None:
    """A refusal keeps the id of the topic that was there; an intent to create one has none yet."""
    return before.topic_id if before is not None and body.state is TopicState.REFUSED else None


def _compact_follower_topic(
    state: ControlState, offset: int, command: c.Command, body: c.CompactFollowerTopic
) -> Result:
    before = state.follower_topics.get(body.topic)
    if before is None or before.state is not TopicState.FOLLOWING or before.topic_id != body.topic_id:
        raise Refuse(Rejection.NOT_FOUND, f"topic {body.topic!r} with id {body.topic_id} does not follow")
    _require(
        body.topic not in state.truncations, Rejection.CONFLICT, f"topic {body.topic!r} is being truncated: wait for it"
    )
    _require(
        before.compacts_since_offset == body.since_offset,
        Rejection.CONFLICT,
        f"topic {body.topic!r}: whether it is compacted was decided anew meanwhile",
    )
    if before.compacts == body.compacts:
        return state, ()
    after = replace(
        before,
        compacts=body.compacts,
        compacts_since_offset=offset,
        cleaned=before.cleaned or body.compacts,
        recorded_ms=command.at_ms,
    )
    return (
        state.evolve(follower_topics=_put(state.follower_topics, body.topic, after)),
        (FollowerTopicChanged(before, after),),
    )


def _forget_follower_topic(state: ControlState, offset: int, command: c.Command, body: c.ForgetFollowerTopic) -> Result:
    before = state.follower_topics.get(body.topic)
    if before is None:
        return state, ()
    _require(
        before.link == body.link,
        Rejection.CONFLICT,
        f"topic {body.topic!r} belongs to link {before.link!r}, not {body.link!r}",
    )
    _require(
        body.topic not in state.truncations, Rejection.CONFLICT, f"topic {body.topic!r} is being truncated: wait for it"
    )
    return (
        state.evolve(follower_topics=_drop(state.follower_topics, body.topic)),
        (FollowerTopicChanged(before, None),),
    )


def _recreate_follower_topic(
    state: ControlState, offset: int, command: c.Command, body: c.RecreateFollowerTopic
) -> Result:
    link = _link(state, body.link)
    before = state.follower_topics.get(body.topic)
    if before is None or before.link != link.name or before.state is TopicState.DETACHED:
        raise Refuse(Rejection.NOT_FOUND, f"topic {body.topic!r} does not follow over link {link.name!r}")
    if body.topic_id is not None:
        _uuid(body.topic_id, "the topic id")
    _require(
        body.topic not in state.truncations,
        Rejection.CONFLICT,
        f"topic {body.topic!r} is being truncated: wait for that",
    )
    after = replace(
        before,
        state=TopicState.CREATING,
        topic_id=body.topic_id,
        reason=None,
        recorded_ms=command.at_ms,
        compacts=False,
        compacts_since_offset=before.compacts_since_offset if before.state is TopicState.CREATING else offset,
        cleaned=False,
        doubted={},
    )
    if replace(after, recorded_ms=before.recorded_ms) == before:
        return state, ()
    return (
        state.evolve(follower_topics=_put(state.follower_topics, body.topic, after)),
        (FollowerTopicChanged(before, after),),
    )


class _Histories:
    """Edits histories of many partitions and says in the end which changed."""

    def __init__(self, state: ControlState, entries: int) -> None:
        _require(0 < entries <= ENTRIES_MAX, Rejection.INVALID, f"a command has 1 to {ENTRIES_MAX} entries")
        self._state = state
        self._edited: dict[str, tuple[str, dict[int, tuple[ProvenanceRange, ...]]]] = {}
        self._touched: dict[str, set[int]] = {}

    def ranges(self, topic: str, topic_id: str, partition: int, *, new: bool = False) -> tuple[ProvenanceRange, ...]:
        """The ranges of a partition. With ``new`` another topic id begins an empty history, else it is refused."""
        _require(partition >= 0, Rejection.INVALID, f"topic {topic!r} has no partition {partition}")
        _uuid(topic_id, "the topic id")
        if topic not in self._edited:
            history = self._state.histories.get(topic)
            if history is not None and history.topic_id == topic_id:
                self._edited[topic] = (topic_id, dict(history.partitions))
            elif new:
                self._edited[topic] = (topic_id, {})
            else:
                raise Refuse(Rejection.NOT_FOUND, f"topic {topic!r} with id {topic_id} has no provenance")
        known_id, partitions = self._edited[topic]
        _require(known_id == topic_id, Rejection.INVALID, f"topic {topic!r} occurs with two ids")
        return partitions.get(partition, ())

    def set(self, topic: str, partition: int, ranges: tuple[ProvenanceRange, ...]) -> None:
        partitions = self._edited[topic][1]
        if partitions.get(partition, ()) != ranges:
            partitions[partition] = ranges
            self._touched.setdefault(topic, set()).add(partition)

    def result(self) -> Result:
        if not self._touched:
            return self._state, ()
        histories = dict(self._state.histories)
        changes = []
        for topic in sorted(self._touched):
            topic_id, partitions = self._edited[topic]
            histories[topic] = TopicHistory(topic, topic_id, partitions)
            changes.append(ProvenanceChanged(topic, topic_id, tuple(sorted(self._touched[topic]))))
        return self._state.evolve(histories=histories), tuple(changes)


def _open_provenance(state: ControlState, offset: int, command: c.Command, body: c.OpenProvenance) -> Result:
    link = _link(state, body.link)
    histories = _Histories(state, len(body.partitions))
    for entry in body.partitions:
        topic = state.follower_topics.get(entry.topic)
        if topic is None or topic.link != link.name or topic.state is not TopicState.FOLLOWING:
            raise Refuse(Rejection.CONFLICT, f"topic {entry.topic!r} does not follow link {link.name!r}")
        _require(
            topic.topic_id == entry.topic_id,
            Rejection.CONFLICT,
            f"topic {entry.topic!r} has the id {topic.topic_id}, not {entry.topic_id}",
        )
        _require(entry.offset >= 0, Rejection.INVALID, f"{_at(entry)}: the offset is negative")
        ranges = histories.ranges(entry.topic, entry.topic_id, entry.partition, new=True)
        last = ranges[-1] if ranges else None
        if last is not None and last.end_offset is None:
            _require(
                (last.source_cluster_id, last.source_topic_id) == (link.remote_cluster_id, topic.source_topic_id),
                Rejection.CONFLICT,
                f"{_at(entry)} follows cluster {last.source_cluster_id} since offset {last.start_offset}: "
                f"close that range first",
            )
            _require(
                entry.offset >= last.start_offset,
                Rejection.CONFLICT,
                f"{_at(entry)} follows since offset {last.start_offset}, later than {entry.offset}",
            )
            continue  # goes on where it was
        if last is not None and last.end_offset is not None:
            _require(
                entry.offset >= last.end_offset,
                Rejection.CONFLICT,
                f"{_at(entry)} has provenance up to offset {last.end_offset}: truncate it to {entry.offset} first",
            )
        behind = 0 if last is None or last.end_offset is None else last.end_offset
        if last is not None and entry.offset > behind:
            # What stands between was written here while nothing was followed.
            local = ProvenanceRange(state.cluster_id, entry.topic_id, behind, entry.offset, command.at_ms)
            ranges = (*ranges, local)
        opened = ProvenanceRange(link.remote_cluster_id, topic.source_topic_id, entry.offset, None, command.at_ms)
        histories.set(entry.topic, entry.partition, (*ranges, opened))
    return histories.result()


def _at(entry: c.PartitionOffset | c.PartitionEpoch) -> str:
    return f"{entry.topic}-{entry.partition}"


def _close_provenance(state: ControlState, offset: int, command: c.Command, body: c.CloseProvenance) -> Result:
    histories = _Histories(state, len(body.partitions))
    for entry in body.partitions:
        ranges = histories.ranges(entry.topic, entry.topic_id, entry.partition)
        _require(ranges, Rejection.NOT_FOUND, f"{_at(entry)} has no provenance")
        last = ranges[-1]
        if last.end_offset is not None:
            _require(
                last.end_offset == entry.offset,
                Rejection.CONFLICT,
                f"{_at(entry)} was closed at offset {last.end_offset}, not {entry.offset}",
            )
            continue
        floor = max((last.start_offset, *(epoch.start_offset for epoch in last.epochs if epoch != last.epochs[-1])))
        _require(entry.offset >= floor, Rejection.CONFLICT, f"{_at(entry)} is open from offset {floor} on")
        # An epoch is recorded before its first append: one that never came is dropped.
        epochs = tuple(epoch for epoch in last.epochs if epoch.start_offset < entry.offset)
        histories.set(
            entry.topic,
            entry.partition,
            (*ranges[:-1], replace(last, end_offset=entry.offset, epochs=epochs, recorded_ms=command.at_ms)),
        )
    return histories.result()


def _truncate_provenance(state: ControlState, offset: int, command: c.Command, body: c.TruncateProvenance) -> Result:
    histories = _Histories(state, len(body.partitions))
    for entry in body.partitions:
        _require(entry.offset >= 0, Rejection.INVALID, f"{_at(entry)}: the offset is negative")
        kept = []
        for range_ in histories.ranges(entry.topic, entry.topic_id, entry.partition):
            is_open = range_.end_offset is None
            if range_.start_offset >= entry.offset and not is_open:
                continue
            kept.append(
                replace(
                    range_,
                    start_offset=min(range_.start_offset, entry.offset),
                    end_offset=None if range_.end_offset is None else min(range_.end_offset, entry.offset),
                    epochs=tuple(epoch for epoch in range_.epochs if epoch.start_offset < entry.offset),
                )
            )
        histories.set(entry.topic, entry.partition, tuple(kept))
    return histories.result()


def _record_source_epochs(state: ControlState, offset: int, command: c.Command, body: c.RecordSourceEpochs) -> Result:
    histories = _Histories(state, len(body.epochs))
    for entry in body.epochs:
        ranges = histories.ranges(entry.topic, entry.topic_id, entry.partition)
        last = ranges[-1] if ranges else None
        if last is None or last.end_offset is not None:
            raise Refuse(Rejection.CONFLICT, f"{_at(entry)} follows nothing")
        _require(entry.epoch >= 0, Rejection.INVALID, f"{_at(entry)}: epoch {entry.epoch} is none")
        new = SourceEpoch(entry.epoch, entry.start_offset)
        if new in last.epochs:
            continue
        newest = last.epochs[-1] if last.epochs else SourceEpoch(-1, last.start_offset)
        _require(
            entry.epoch > newest.epoch and entry.start_offset >= newest.start_offset,
            Rejection.CONFLICT,
            f"{_at(entry)}: epoch {entry.epoch} from offset {entry.start_offset} does not come after "
            f"epoch {newest.epoch} from offset {newest.start_offset}",
        )
        # An epoch that wrote nothing gives its place to the next one, as in a broker's own epoch cache.
        epochs = last.epochs[:-1] if last.epochs and newest.start_offset == entry.start_offset else last.epochs
        histories.set(entry.topic, entry.partition, (*ranges[:-1], replace(last, epochs=(*epochs, new))))
    return histories.result()


def _register_producer_ids(state: ControlState, offset: int, command: c.Command, body: c.RegisterProducerIds) -> Result:
    _require(body.cluster_id, Rejection.INVALID, "the cluster has no id")
    taken = {index: cluster_id for cluster_id, index in state.producer_id_ranges.items()}
    known = state.producer_id_ranges.get(body.cluster_id)
    if known is not None:
        _require(
            body.index in (None, known),
            Rejection.CONFLICT,
            f"cluster {body.cluster_id} has the producer id range {known} here, not {body.index}",
        )
        return state, ()
    index = body.index
    if index is None:
        index = next(number for number in range(len(taken) + 1) if number not in taken)
    _require(0 <= index < CLUSTERS_MAX, Rejection.INVALID, f"there is no producer id range {index}")
    _require(
        index not in taken,
        Rejection.CONFLICT,
        f"the producer id range {index} belongs to cluster {taken.get(index)} here, not to {body.cluster_id}",
    )
    return (
        state.evolve(producer_id_ranges=_put(state.producer_id_ranges, body.cluster_id, index)),
        (ProducerIdsRegistered(body.cluster_id, index),),
    )


# --- proxies


def _claim_brokers(state: ControlState, offset: int, command: c.Command, body: c.ClaimBrokers) -> Result:
    _require(
        LINK_NAME.match(body.name),
        Rejection.INVALID,
        f"{body.name!r} is no name of a proxy: up to 100 letters, digits, '.', '_' and '-'",
    )
    _uuid(body.incarnation, "the incarnation")
    _require(
        LEASE_MS_MIN <= body.lease_ms <= LEASE_MS_MAX,
        Rejection.INVALID,
        f"a lease lasts {LEASE_MS_MIN} to {LEASE_MS_MAX} ms, not {body.lease_ms}",
    )
    _require(body.enforced_offset < offset, Rejection.INVALID, "nobody enforces what was not written yet")
    ids = [claim.broker_id for claim in body.brokers]
    _require(len(set(ids)) == len(ids), Rejection.INVALID, "a broker is claimed twice")
    _require(ids or body.all_brokers, Rejection.INVALID, "the claim names no broker")
    _require(
        body.incarnation not in state.superseded,
        Rejection.LEASE_LOST,
        f"a newer process took over the name {body.name!r}",
    )
    for other in (state.proxies[name] for name in sorted(state.proxies)):
        if other.name == body.name:
            continue
        _require(
            other.incarnation != body.incarnation,
            Rejection.INVALID,
            f"the incarnation is that of proxy {other.name!r}",
        )
        shared = sorted(other.broker_ids & set(ids))
        if shared or body.all_brokers or other.all_brokers:
            what = f"broker {shared[0]}" if shared else "all brokers"
            holder = "fronts" if shared or other.all_brokers else "fronts some of"
            raise Refuse(
                Rejection.CONFLICT,
                f"proxy {other.name!r} {holder} {what} and its lease runs: one proxy for a broker. Stop that proxy, "
                f"or give both the same name if this one replaces it",
            )
    before = state.proxies.get(body.name)
    same = before if before is not None and before.incarnation == body.incarnation else None
    # Taking over a name is for a process that knows whom it replaces, not for one that slept through its own end.
    _require(
        before is None or same is not None or command.seen >= before.claimed_at_offset,
        Rejection.LEASE_LOST,
        f"a newer process took over the name {body.name!r}",
    )
    lease = ProxyLease(
        name=body.name,
        incarnation=body.incarnation,
        brokers=tuple(sorted(body.brokers, key=lambda claim: claim.broker_id)),
        all_brokers=body.all_brokers,
        link_address=body.link_address,
        lease_ms=body.lease_ms,
        version=body.version,
        claimed_at_offset=offset,
        renewed_at_offset=offset,
        enforced_offset=max(body.enforced_offset, same.enforced_offset if same else -1),
    )
    superseded = state.superseded
    if before is not None and same is None:
        superseded = _put(superseded, before.incarnation, before)
    return (
        state.evolve(proxies=_put(state.proxies, body.name, lease), superseded=superseded),
        (LeaseChanged(before, lease),),
    )


def _own_lease(state: ControlState, name: str, incarnation: str) -> ProxyLease:
    lease = state.proxies.get(name)
    if lease is None:
        raise Refuse(Rejection.LEASE_LOST, f"proxy {name!r} has no lease any more: it was not renewed in time")
    _require(lease.incarnation == incarnation, Rejection.LEASE_LOST, f"a newer process took over the name {name!r}")
    return lease


def _renew_lease(state: ControlState, offset: int, command: c.Command, body: c.RenewLease) -> Result:
    before = _own_lease(state, body.name, body.incarnation)
    _require(body.enforced_offset < offset, Rejection.INVALID, "nobody enforces what was not written yet")
    # Renewals may overtake one another; what was enforced once stays so.
    after = replace(before, renewed_at_offset=offset, enforced_offset=max(before.enforced_offset, body.enforced_offset))
    return state.evolve(proxies=_put(state.proxies, body.name, after)), (LeaseRenewed(after),)


def _release_lease(state: ControlState, offset: int, command: c.Command, body: c.ReleaseLease) -> Result:
    lease = state.proxies.get(body.name)
    if lease is not None and lease.incarnation == body.incarnation:
        return state.evolve(proxies=_drop(state.proxies, body.name)), (LeaseChanged(lease, None),)
    old = state.superseded.get(body.incarnation)
    if old is None or old.name != body.name:
        return state, ()  # it is gone already
    return state.evolve(superseded=_drop(state.superseded, body.incarnation)), (LeaseChanged(old, None),)


def _expire_lease(state: ControlState, offset: int, command: c.Command, body: c.ExpireLease) -> Result:
    current = state.proxies.get(body.name)
    is_current = current is not None and current.incarnation == body.incarnation
    lease = current if is_current else state.superseded.get(body.incarnation)
    if lease is None or lease.name != body.name:
        return state, ()  # another proxy was faster
    _require(
        lease.renewed_at_offset == body.renewed_at_offset,
        Rejection.CONFLICT,
        f"proxy {body.name!r} renewed its lease in the meantime",
    )
    if is_current:
        return state.evolve(proxies=_drop(state.proxies, body.name)), (LeaseChanged(lease, None),)
    return state.evolve(superseded=_drop(state.superseded, body.incarnation)), (LeaseChanged(lease, None),)


def _snapshot(state: ControlState, offset: int, command: c.Command, body: c.Snapshot) -> Result:
    # What is in it is compared by the reader (isthmus_control.replica), which still has the state of that offset.
    _require(
        0 <= body.as_of < offset and (body.as_of + 1) % SNAPSHOT_INTERVAL == 0,
        Rejection.INVALID,
        f"no snapshot is due at offset {body.as_of}",
    )
    if body.as_of <= state.snapshot_offset:
        return state, ()  # another proxy was faster
    return state.evolve(snapshot_offset=body.as_of), (SnapshotTaken(body.as_of),)


_HANDLERS: Mapping[type[c.Body], Callable[[ControlState, int, c.Command, Any], Result]] = {
    c.CreateNamespace: _create_namespace,
    c.AlterNamespace: _alter_namespace,
    c.DeleteNamespace: _delete_namespace,
    c.CreateLink: _create_link,
    c.AlterLink: _alter_link,
    c.MergeLink: _merge_link,
    c.DeleteLink: _delete_link,
    c.AttachNamespace: _attach,
    c.DetachNamespace: _detach,
    c.HoldBrokerConfig: _hold_broker_config,
    c.ReleaseBrokerConfig: _release_broker_config,
    **OFFSETS_HANDLERS,
    c.SetFollowerTopic: _set_follower_topic,
    c.CompactFollowerTopic: _compact_follower_topic,
    c.ForgetFollowerTopic: _forget_follower_topic,
    c.RecreateFollowerTopic: _recreate_follower_topic,
    c.OpenProvenance: _open_provenance,
    c.CloseProvenance: _close_provenance,
    c.TruncateProvenance: _truncate_provenance,
    c.RecordSourceEpochs: _record_source_epochs,
    **DEMAND_HANDLERS,
    **PLUGIN_HANDLERS,
    **DELETION_HANDLERS,
    **TRUNCATION_HANDLERS,
    **PROMOTION_HANDLERS,
    **ACL_HANDLERS,
    **SYNC_HANDLERS,
    **CLAIM_HANDLERS,
    c.RegisterProducerIds: _register_producer_ids,
    c.ClaimBrokers: _claim_brokers,
    c.RenewLease: _renew_lease,
    c.ReleaseLease: _release_lease,
    c.ExpireLease: _expire_lease,
    c.Snapshot: _snapshot,
}
