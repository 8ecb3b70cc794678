"""What the control log accepts of links, and of the namespaces attached to them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from isthmus_control import commands as c
from isthmus_control.bounds import (
    SYNC_CONFIRM_TIMEOUT_MS_MAX,
    SYNC_CONFIRM_TIMEOUT_MS_MIN,
    VERIFY_EVERY,
    VERIFY_EVERY_MS_MAX,
    VERIFY_EVERY_MS_MIN,
    VERIFY_OFF,
)
from isthmus_control.clock import ZERO, Hlc, Register, tick
from isthmus_control.control_state import ControlState
from isthmus_control.levels import PROOFS
from isthmus_control.model import (
    DRILL_PREFIX,
    FOLLOWER_IN_SYNC_MIN,
    FOLLOWER_REPLICATION_FACTOR,
    SYNC_CONFIRM_TIMEOUT,
    TRANSACTION_VERIFICATION,
    AgreedCut,
    HeldConfig,
    Link,
    LinkMode,
    LinkSettings,
    Namespace,
    NamespaceKey,
    NamespaceMapping,
    OnSourceLoss,
    ResourceType,
    Role,
    TopicState,
    overlap,
)
from isthmus_control.outcome import (
    Change,
    HeldConfigChanged,
    LinkChanged,
    NamespaceAttached,
    NamespaceChanged,
    NamespaceDetached,
    Refuse,
    Rejection,
    ReversalChanged,
    require,
)
from isthmus_control.rules import grants
from isthmus_control.rules.checks import (
    AT_MS_MAX,
    ENTRIES_MAX,
    LINK_NAME,
    NAMESPACES_MAX,
    PREFIX_CHARS_MAX,
    Result,
    check_addresses,
    check_prefix,
    check_uuid,
    drop,
    link_named,
    put,
)
from isthmus_control.rules.claims import without_claims, without_group_claims
from isthmus_control.rules.client_moves import told_no_more
from isthmus_control.rules.namespaces import reserve
from isthmus_control.rules.offsets_topics import offsets_topic_ended, topics_detached
from isthmus_control.rules.source_deletions import check_none_under_way
from isthmus_control.rules.source_losses import kept, released, without_losses
from isthmus_control.rules.sync import check_synchronous, mode_changed, records_ended
from isthmus_control.rules.trees import check_not_distributed
from isthmus_control.rules.truncations import cancelled

LINKS_MAX = 1_000
CUT_TOKEN_CHARS_MAX = 64
ONLY_THE_FOLLOWERS = "what becomes of what the source lost is set at the follower's side, of topics and groups"
ONLY_OF_TOPICS = "what becomes of topics that the source deletes is set at the follower's side, of topics"


def _positive(value: str) -> str | None:
    return None if re.fullmatch(r"[1-9][0-9]{0,4}", value) else "a number from 1"


def _confirm_timeout(value: str) -> str | None:
    least, most = SYNC_CONFIRM_TIMEOUT_MS_MIN, SYNC_CONFIRM_TIMEOUT_MS_MAX
    right = re.fullmatch(r"[1-9][0-9]{3,6}", value) and least <= int(value) <= most
    return None if right else f"a number of milliseconds from {least} to {most}"


def _verify_every(value: str) -> str | None:
    least, most = VERIFY_EVERY_MS_MIN, VERIFY_EVERY_MS_MAX
    right = value == VERIFY_OFF or (re.fullmatch(r"[1-9][0-9]{3,10}", value) and least <= int(value) <= most)
    return None if right else f"a number of milliseconds from {least} to {most}, or {VERIFY_OFF}"


LINK_CONFIGS: Mapping[str, Callable[[str], str | None]] = {
    FOLLOWER_REPLICATION_FACTOR: _positive,
    FOLLOWER_IN_SYNC_MIN: _positive,
    SYNC_CONFIRM_TIMEOUT: _confirm_timeout,
    VERIFY_EVERY: _verify_every,
}
"""Settings of a link, and for each what a wrong value should have been (None: it is right). The first two say how
follower topics are stored, at whichever end, where that is to be otherwise than at the source."""
CONFIGS_SINCE: Mapping[str, int] = {VERIFY_EVERY: PROOFS}
"""The feature levels that bring settings."""


def _check_config(state: ControlState, config: Mapping[str, str | None]) -> None:
    for name, value in sorted(config.items()):
        check = LINK_CONFIGS.get(name)
        since = CONFIGS_SINCE.get(name, 0)
        if check is None:
            known = ", ".join(sorted(LINK_CONFIGS))
            raise Refuse(Rejection.INVALID, f"a link has no setting {name!r}; there are {known}")
        require(
            state.level >= since,
            Rejection.INVALID,
            f"{name} needs feature level {since} of the control log: isthmus control upgrade",
        )
        wanted = check(value) if value is not None else None
        require(wanted is None, Rejection.INVALID, f"{name} is {wanted}, not {value!r}")


def _create_link(state: ControlState, offset: int, command: c.Command, body: c.CreateLink) -> Result:
    require(
        LINK_NAME.match(body.name),
        Rejection.INVALID,
        f"{body.name!r} is no name of a link: up to 100 letters, digits, '.', '_' and '-'",
    )
    check_uuid(body.link_id, "the link id")
    require(body.remote_cluster_id, Rejection.INVALID, "the remote cluster has no id")
    require(
        body.remote_cluster_id != state.cluster_id,
        Rejection.INVALID,
        f"the remote address leads to this same cluster ({state.cluster_id}): a link joins two",
    )
    check_addresses(body.remote_addresses)
    check_addresses(body.local_addresses)
    require(
        body.remote_addresses or not body.dials, Rejection.INVALID, "a side that dials needs the other side's address"
    )
    require(
        body.mode is LinkMode.ASYNCHRONOUS,
        Rejection.INVALID,
        "new replication links are always in asynchronous mode: make it synchronous when it follows",
    )
    _check_config(state, body.config)
    if body.drill is not None:
        _check_drill(state, body)
    existing = state.links.get(body.name)
    if existing is not None:
        if existing.link_id == body.link_id and existing.remote_cluster_id == body.remote_cluster_id:
            return state, ()  # setting up both sides was retried
        raise Refuse(
            Rejection.ALREADY_EXISTS,
            f"link {body.name!r} exists already, to cluster {existing.remote_cluster_id}",
        )
    twin = next((link.name for link in state.links.values() if link.link_id == body.link_id), None)
    require(twin is None, Rejection.ALREADY_EXISTS, f"this link exists already under the name {twin!r}")
    require(len(state.links) < LINKS_MAX, Rejection.CONFLICT, f"there are {LINKS_MAX} links")
    grants.check_grants(body.grants)
    given = body.grants
    if body.token:
        state, given = grants.use_token(state, command.at_ms, body.token)
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
        grants=given,
        drill=body.drill,
    )
    return (
        state.evolve(links=put(state.links, link.name, link), links_created=link.number + 1, clock=now),
        (LinkChanged(None, link),),
    )


def _check_drill(state: ControlState, body: c.CreateLink) -> None:
    """Refuses a link that would lead nowhere, but for one on which a failover of a link is tried, one at a time."""
    assert body.drill is not None
    tried = link_named(state, body.drill.link)
    check_uuid(body.drill.owner, "the owner")
    require(
        body.name.startswith(DRILL_PREFIX)
        and tried.drill is None
        and tried.remote_cluster_id == body.remote_cluster_id,
        Rejection.INVALID,
        f"{body.name!r} is no copy of link {tried.name!r}",
    )
    require(
        not body.dials and not body.remote_addresses and body.secret is None and not body.token,
        Rejection.INVALID,
        "a link on which a failover is tried leads nowhere",
    )
    other = next((link.name for link in state.links.values() if link.drill and link.drill.link == tried.name), None)
    require(other in (None, body.name), Rejection.CONFLICT, f"a failover of link {tried.name!r} is being tried already")


def _check_copy(link: Link, body: c.AttachNamespace) -> None:
    """Refuses to attach to a link that leads nowhere what is no copy."""
    require(
        body.role is Role.FOLLOWER and body.type is not ResourceType.PRINCIPAL,
        Rejection.INVALID,
        f"on {link.name!r} a failover is tried, of topics and consumer groups that follow",
    )
    require(
        body.local_prefix.startswith(DRILL_PREFIX) and len(body.local_prefix) <= PREFIX_CHARS_MAX,
        Rejection.INVALID,
        f"{body.local_prefix!r} is no prefix of a copy: {DRILL_PREFIX}*",
    )


def _alter_link(state: ControlState, offset: int, command: c.Command, body: c.AlterLink) -> Result:
    before = link_named(state, body.name)
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
            check_addresses(wanted)
            if wanted != current:
                addresses[cluster_id] = Register(wanted, now)
    config = dict(settings.config)
    if body.config is not None:
        _check_config(state, body.config)
        for name, value in body.config.items():
            if before.config.get(name) != value:
                config[name] = Register(value, now)
    after = replace(
        before,
        dials=before.dials if body.dials is None else body.dials,
        secret=before.secret if body.secret is None else body.secret,
        settings=replace(settings, addresses=addresses, config=config),
    )
    require(
        after.remote_addresses or not after.dials, Rejection.INVALID, "a side that dials needs the other side's address"
    )
    if after == before:
        return state, ()
    state, after, more = mode_changed(state, before, after, offset)
    clock = now if after.settings != before.settings else state.clock
    return state.evolve(links=put(state.links, after.name, after), clock=clock), (LinkChanged(before, after), *more)


def _merge_link(state: ControlState, offset: int, command: c.Command, body: c.MergeLink) -> Result:
    before = link_named(state, body.name)
    require(
        before.link_id == body.link_id,
        Rejection.CONFLICT,
        f"link {body.name!r} is another one on the other side: it was deleted and created again",
    )
    require(
        set(body.settings.addresses) <= {before.local_cluster_id, before.remote_cluster_id},
        Rejection.INVALID,
        "the settings have addresses of a third cluster",
    )
    for addresses in body.settings.addresses.values():
        check_addresses(addresses.value)
    _check_config(state, {name: register.value for name, register in body.settings.config.items()})
    newest = body.settings.newest
    require(0 <= newest.wall_ms < AT_MS_MAX, Rejection.INVALID, "the settings carry an impossible time")
    merged = before.settings.merge(body.settings)
    if merged == before.settings:
        return state, ()
    # A link that may not be synchronous here refuses the other side's settings as a whole, so that somebody sees it.
    state, after, more = mode_changed(state, before, replace(before, settings=merged), offset)
    clock: Hlc = max(state.clock, newest)
    return state.evolve(links=put(state.links, after.name, after), clock=clock), (LinkChanged(before, after), *more)


def _detached(state: ControlState, link: Link, mapping: NamespaceMapping, at_ms: int) -> Result:
    """The state without this mapping of the link (which the caller takes out of the link itself)."""
    changes: list[Change] = [NamespaceDetached(link.name, mapping)]
    if mapping.role is Role.LEADER:
        state, ended = records_ended(state, link, mapping)
        return state, (*changes, *ended)
    state, told = kept(state, link.name, mapping)
    changes += told
    if mapping.type is ResourceType.TOPIC:
        check_none_under_way(state, link.name, mapping)
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
    state = state.evolve(namespaces=put(state.namespaces, namespace.key, after))
    if mapping.type is not ResourceType.TOPIC:
        return state, tuple(changes)
    state, detached = topics_detached(state, link, mapping, at_ms)
    return state, (*changes, *detached)


def _delete_link(state: ControlState, offset: int, command: c.Command, body: c.DeleteLink) -> Result:
    link = link_named(state, body.name)
    changes: tuple[Change, ...] = ()
    for mapping in link.mappings:
        state, gone = _not_reversed(state, mapping)
        state, more = _detached(state, link, mapping, command.at_ms)
        changes += (*more, *gone)
    state, ended = records_ended(state, link)
    changes += tuple(ended)
    for mapping in link.offsets_topics:
        state, more = offsets_topic_ended(state, link, mapping, command.at_ms)
        changes += more
    state = without_losses(without_group_claims(state, link.name), link.name)
    return state.evolve(links=drop(state.links, link.name)), (*changes, LinkChanged(link, None))


def _not_reversed(state: ControlState, mapping: NamespaceMapping) -> Result:
    """The state without a reversal of what is detached, which cannot be gone on with. Raises Refuse."""
    reversal = state.reversal_of(mapping.local)
    if reversal is None:
        return state, ()
    require(
        not reversal.at_leader,
        Rejection.CONFLICT,
        f"the {mapping.local} is being reversed: wait for that, or abandon it",
    )
    return state.evolve(reversals=drop(state.reversals, reversal.reversal_id)), (ReversalChanged(reversal, None),)


def turn(
    state: ControlState,
    offset: int,
    command: c.Command,
    link_name: str,
    key: NamespaceKey,
    *,
    disable_transaction_verification: bool = False,
) -> Result:
    """The state in which this side of a pair has the other role. What is granted of it stays. Raises Refuse."""
    before = _attached(link_named(state, link_name), *key)
    body = c.AttachNamespace(
        link_name,
        *key,
        before.remote_prefix,
        before.role.other,
        disable_transaction_verification=disable_transaction_verification,
    )
    return _attach(state, offset, command, body, handed_over=True)


def lead(state: ControlState, offset: int, command: c.Command, link_name: str, key: NamespaceKey, to: str) -> Result:
    """The state in which this cluster leads what it followed, and was handed over to it. Raises Refuse."""
    body = c.AttachNamespace(link_name, *key, to, Role.LEADER, for_peer=True)
    return _attach(state, offset, command, body, handed_over=True)


def _attach(
    state: ControlState, offset: int, command: c.Command, body: c.AttachNamespace, *, handed_over: bool = False
) -> Result:
    """``handed_over``: in a reversal, of which all was checked, and granted, before."""
    link = link_named(state, body.link)
    if link.drill is None:
        check_prefix(body.type, body.local_prefix)
    else:
        _check_copy(link, body)
    check_prefix(body.type, body.remote_prefix)
    require(
        body.role is Role.FOLLOWER or not body.truncate_topic_ids,
        Rejection.INVALID,
        "only the follower's side can agree to truncate its topics",
    )
    require(
        len(body.truncate_topic_ids) <= ENTRIES_MAX, Rejection.INVALID, f"more than {ENTRIES_MAX} topics to truncate"
    )
    for topic_id in body.truncate_topic_ids:
        check_uuid(topic_id, "the topic id")
    require(
        (body.role is Role.FOLLOWER and body.type is ResourceType.TOPIC) or not body.cuts,
        Rejection.INVALID,
        "only the follower's side can agree to have its topics cut",
    )
    require(len(body.cuts) <= ENTRIES_MAX, Rejection.INVALID, f"more than {ENTRIES_MAX} topics to cut")
    for cut in body.cuts:
        check_uuid(cut.topic_id, "the topic id")
        known = cut.token or cut.shared
        require(known and len(cut.token) <= CUT_TOKEN_CHARS_MAX, Rejection.INVALID, "what was agreed to is no token")
        require(
            len(cut.shared) <= ENTRIES_MAX and all(min(each) >= 0 for each in cut.shared),
            Rejection.INVALID,
            "what is said to be shared is no offset",
        )
    require(
        body.role is Role.FOLLOWER or not body.disable_transaction_verification,
        Rejection.INVALID,
        "only the follower's side can agree to settings of its brokers",
    )
    require(
        body.on_source_loss is None or (body.role is Role.FOLLOWER and body.type is not ResourceType.PRINCIPAL),
        Rejection.INVALID,
        ONLY_THE_FOLLOWERS,
    )
    require(
        body.on_source_delete is None or (body.role is Role.FOLLOWER and body.type is ResourceType.TOPIC),
        Rejection.INVALID,
        ONLY_OF_TOPICS,
    )
    key = NamespaceKey(body.type, body.local_prefix)
    namespace = state.namespaces.get(key)
    if namespace is None:
        require(body.create_missing, Rejection.NOT_FOUND, f"there is no {key}: create it first")
        require(len(state.namespaces) < NAMESPACES_MAX, Rejection.CONFLICT, f"there are {NAMESPACES_MAX} namespaces")
        namespace = Namespace(body.type, body.local_prefix, command.at_ms)
    mapping = body.mapping(command.at_ms, offset)
    if link.mode is LinkMode.SYNCHRONOUS and not handed_over:
        check_synchronous(state, link, mapping, namespace.informational)
    require(key not in state.promotions, Rejection.CONFLICT, f"the {key} is being promoted: wait for that")
    reversal = state.reversal_of(key)
    require(
        handed_over or reversal is None or not reversal.at_leader,
        Rejection.CONFLICT,
        f"the {key} is being reversed: wait for that, or abandon it",
    )
    attached = link.mapping(body.type, body.local_prefix)
    changes: list[Change] = []
    if attached is not None and (handed_over or _recovers(body, attached)):
        state, told = _detached(state, link, attached, command.at_ms)
        changes += told
        rest = tuple(other for other in link.mappings if other is not attached)
        link = grants.detached(replace(link, mappings=rest), attached, body.for_peer or handed_over)
        state = state.evolve(links=put(state.links, link.name, link))
        attached = None
    if body.for_peer and not handed_over:
        grants.check_attach(link, body)
    link = grants.attached(state, link, mapping, body.for_peer)
    if attached is not None:
        return _attach_again(state, link, attached, mapping)
    for other_link, other in ((link_, m) for _, link_ in sorted(state.links.items()) for m in link_.mappings):
        _check_pair(link, mapping, other_link, other)
    check_not_distributed(state, mapping)
    after = namespace
    if body.role is Role.FOLLOWER:
        state = without_claims(state, link.name, mapping)
        after = reserve(namespace, offset, f"follows {body.remote_prefix!r} on link {link.name!r}")
        if link.drill is not None:
            after = replace(after, reserved_at_offset=None)  # no client ever writes there: nobody passes a fence for it
    before = state.namespaces.get(key)
    if after != before:
        changes.append(NamespaceChanged(before, after))
    changes.append(NamespaceAttached(link.name, mapping))
    if body.role is Role.LEADER:
        state, over = told_no_more(state, key, there=False)
        changes += over
    return (
        state.evolve(
            namespaces=put(state.namespaces, key, after),
            links=put(state.links, link.name, replace(link, mappings=(*link.mappings, mapping))),
        ),
        tuple(changes),
    )


def _recovers(body: c.AttachNamespace, attached: NamespaceMapping) -> bool:
    """Whether a pair that this cluster led is to follow instead."""
    turned = (attached.role, body.role) == (Role.LEADER, Role.FOLLOWER)
    return body.recovers and turned and attached.remote_prefix == body.remote_prefix


def _attach_again(state: ControlState, link: Link, attached: NamespaceMapping, wanted: NamespaceMapping) -> Result:
    """A repeated attach is accepted, and may give or take back the operator's consents, or set what it names."""
    same = replace(
        wanted,
        attached_ms=attached.attached_ms,
        attached_at_offset=attached.attached_at_offset,
        on_source_loss=wanted.on_source_loss or attached.on_source_loss,
        on_source_delete=wanted.on_source_delete or attached.on_source_delete,
        cuts=(*wanted.cuts, *_still_to_be_cut(state, attached, wanted)),
    )
    require(
        (same.remote_prefix, same.role) == (attached.remote_prefix, attached.role),
        Rejection.CONFLICT,
        f"the {attached.local} is attached to link {link.name!r} already, as {attached.role} "
        f"of {attached.remote_prefix!r}: detach it first",
    )
    return _altered(state, link, attached, same)


def _still_to_be_cut(
    state: ControlState, attached: NamespaceMapping, wanted: NamespaceMapping
) -> tuple[AgreedCut, ...]:
    """What was agreed before, of topics that follow once they are cut: that is not taken back, or they would now."""
    agreed = {each.topic_id for each in wanted.cuts}
    following = {each.topic_id for each in state.follower_topics.values() if each.state is TopicState.FOLLOWING}
    return tuple(each for each in attached.cuts if each.topic_id in following - agreed)


def _alter_mapping(state: ControlState, offset: int, command: c.Command, body: c.AlterMapping) -> Result:
    link = link_named(state, body.link)
    before = _attached(link, body.type, body.local_prefix)
    require(
        before.role is Role.FOLLOWER and before.type is not ResourceType.PRINCIPAL,
        Rejection.INVALID,
        ONLY_THE_FOLLOWERS,
    )
    require(body.on_source_delete is None or before.type is ResourceType.TOPIC, Rejection.INVALID, ONLY_OF_TOPICS)
    if body.for_peer:
        grants.check_altered(link, before, body)
    after = replace(
        before,
        on_source_loss=body.on_source_loss or before.on_source_loss,
        on_source_delete=body.on_source_delete or before.on_source_delete,
    )
    return _altered(state, link, before, after)


def _altered(state: ControlState, link: Link, before: NamespaceMapping, after: NamespaceMapping) -> Result:
    if after == before:
        known = state.links[link.name]
        changed = () if link == known else (LinkChanged(known, link),)
        return state.evolve(links=put(state.links, link.name, link)), changed
    mappings = tuple(after if mapping is before else mapping for mapping in link.mappings)
    state, told = released(state, link.name, after) if after.on_source_loss is OnSourceLoss.CUT else (state, [])
    return (
        state.evolve(links=put(state.links, link.name, replace(link, mappings=mappings))),
        (NamespaceAttached(link.name, after), *told),
    )


def _check_pair(link: Link, new: NamespaceMapping, other_link: Link, other: NamespaceMapping) -> None:
    """Refuses ``new`` on ``link`` where it cannot stand beside ``other`` on ``other_link``."""
    if new.type is not other.type:
        return
    local = overlap(new.local_prefix, other.local_prefix)
    remote = overlap(new.remote_prefix, other.remote_prefix)
    same_peer = link.remote_cluster_id == other_link.remote_cluster_id
    if new.role is other.role is Role.FOLLOWER:
        require(
            not local,
            Rejection.CONFLICT,
            f"the {other.local} follows link {other_link.name!r} already, and {new.local_prefix!r} overlaps it: "
            f"a namespace follows one link at most",
        )
    elif new.role is other.role:
        require(
            not (local and link.name == other_link.name),
            Rejection.CONFLICT,
            f"the {other.local} leads on link {other_link.name!r} already, and {new.local_prefix!r} overlaps it: "
            f"a name would have two counterparts",
        )
        require(
            not (remote and same_peer),
            Rejection.CONFLICT,
            f"{other.local_prefix!r} goes to {other.remote_prefix!r} of the same cluster on link {other_link.name!r} "
            f"already, and {new.remote_prefix!r} overlaps it: two namespaces would meet there",
        )
    else:
        require(
            not (local and (link.name == other_link.name or (same_peer and remote))),
            Rejection.CONFLICT,
            f"{new.local_prefix!r} would {'follow' if new.role is Role.FOLLOWER else 'lead'} cluster "
            f"{link.remote_cluster_id} and the overlapping {other.local_prefix!r} "
            f"{'follows' if other.role is Role.FOLLOWER else 'leads'} it on link {other_link.name!r}: "
            f"what comes from there would go back",
        )


def _attached(link: Link, kind: ResourceType, local_prefix: str) -> NamespaceMapping:
    """The mapping of a local namespace. Raises Refuse."""
    mapping = link.mapping(kind, local_prefix)
    if mapping is None:
        raise Refuse(
            Rejection.NOT_FOUND, f"the {NamespaceKey(kind, local_prefix)} is not attached to link {link.name!r}"
        )
    return mapping


def _detach(state: ControlState, offset: int, command: c.Command, body: c.DetachNamespace) -> Result:
    link = link_named(state, body.link)
    mapping = _attached(link, body.type, body.local_prefix)
    state, gone = _not_reversed(state, mapping)
    state, changes = _detached(state, link, mapping, command.at_ms)
    rest = tuple(other for other in link.mappings if other is not mapping)
    link = grants.detached(replace(link, mappings=rest), mapping, body.for_peer)
    return state.evolve(links=put(state.links, link.name, link)), (*changes, *gone)


def _hold_broker_config(state: ControlState, offset: int, command: c.Command, body: c.HoldBrokerConfig) -> Result:
    require(body.name == TRANSACTION_VERIFICATION, Rejection.INVALID, f"links hold no broker setting {body.name!r}")
    require(
        state.disables_transaction_verification,
        Rejection.CONFLICT,
        f"no mapping stands with the consent to change {body.name}",
    )
    if body.name in state.held_configs:
        return state, ()  # another proxy was faster, and knows the former value better
    held = HeldConfig(body.name, body.value, body.former, command.at_ms)
    return state.evolve(held_configs=put(state.held_configs, body.name, held)), (HeldConfigChanged(None, held),)


def _release_broker_config(state: ControlState, offset: int, command: c.Command, body: c.ReleaseBrokerConfig) -> Result:
    before = state.held_configs.get(body.name)
    if before is None:
        return state, ()
    require(
        not state.disables_transaction_verification, Rejection.CONFLICT, f"a mapping needs {body.name} as it is held"
    )
    return state.evolve(held_configs=drop(state.held_configs, body.name)), (HeldConfigChanged(before, None),)


LINK_HANDLERS: Mapping[type[c.Body], Callable[[ControlState, int, c.Command, Any], Result]] = {
    c.CreateLink: _create_link,
    c.AlterLink: _alter_link,
    c.MergeLink: _merge_link,
    c.DeleteLink: _delete_link,
    c.AttachNamespace: _attach,
    c.AlterMapping: _alter_mapping,
    c.DetachNamespace: _detach,
    c.HoldBrokerConfig: _hold_broker_config,
    c.ReleaseBrokerConfig: _release_broker_config,
}
