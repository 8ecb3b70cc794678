"""What the control log accepts of grants (:mod:`isthmus_control.grants`), of tokens, and of what waits for a grant."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from isthmus_control import commands as c
from isthmus_control.control_state import ControlState
from isthmus_control.grants import OFFSETS_COPY, covers, lacks, missing, needed_by, not_granted, of_pair, with_pair
from isthmus_control.levels import CONSENT
from isthmus_control.model import (
    AttachRequest,
    Grant,
    Link,
    LinkToken,
    NamespaceKey,
    NamespaceMapping,
    ResourceType,
    Right,
    Role,
)
from isthmus_control.outcome import LinkChanged, Refuse, Rejection, require
from isthmus_control.rules.checks import AT_MS_MAX, Result, check_prefix, drop, link_named, put

GRANTS_MAX: Final = 1_000
TOKENS_MAX: Final = 100
"""Unused tokens of a cluster."""
WAITING_MAX: Final = 100
"""Pairs of one link that wait: the other cluster may ask for as many as it likes."""
_HEX: Final = re.compile(r"[0-9a-f]{16,64}\Z")


# --- tokens


def _create_token(state: ControlState, offset: int, command: c.Command, body: c.CreateToken) -> Result:
    require(_HEX.match(body.token_id), Rejection.INVALID, "the token's id is no hexadecimal number")
    require(_HEX.match(body.public_key), Rejection.INVALID, "the token's public key is no hexadecimal number")
    require(body.token_id not in state.link_tokens, Rejection.ALREADY_EXISTS, f"there is a token {body.token_id}")
    require(
        command.at_ms < body.expires_ms < AT_MS_MAX, Rejection.INVALID, "a token expires some time after it is made"
    )
    check_grants(body.grants)
    tokens = {name: each for name, each in state.link_tokens.items() if command.at_ms < each.expires_ms}
    require(len(tokens) < TOKENS_MAX, Rejection.CONFLICT, f"there are {TOKENS_MAX} tokens that nobody has used")
    token = LinkToken(body.token_id, body.public_key, body.acceptor_key, body.grants, command.at_ms, body.expires_ms)
    return state.evolve(link_tokens=put(tokens, token.token_id, token)), ()


def _delete_token(state: ControlState, offset: int, command: c.Command, body: c.DeleteToken) -> Result:
    require(
        body.token_id in state.link_tokens,
        Rejection.NOT_FOUND,
        f"there is no token {body.token_id}: it was used, or has expired",
    )
    return state.evolve(link_tokens=drop(state.link_tokens, body.token_id)), ()


def _seal_token(state: ControlState, offset: int, command: c.Command, body: c.SealToken) -> Result:
    token = state.link_tokens.get(body.token_id)
    if token is None:
        return state, ()  # it was used meanwhile, or has expired
    sealed = replace(token, acceptor_key=body.acceptor_key)
    return state.evolve(link_tokens=put(state.link_tokens, token.token_id, sealed)), ()


def use_token(state: ControlState, at_ms: int, token_id: str) -> tuple[ControlState, tuple[Grant, ...]]:
    """The state without a token, and what it grants. Raises Refuse."""
    token = state.link_tokens.get(token_id)
    if token is None or at_ms >= token.expires_ms:
        raise Refuse(Rejection.NOT_FOUND, "the token was used meanwhile, or has expired: make another one")
    return state.evolve(link_tokens=drop(state.link_tokens, token_id)), token.grants


# --- grants


def check_grants(grants: tuple[Grant, ...]) -> None:
    """Refuse what nobody can be granted."""
    require(len(grants) <= GRANTS_MAX, Rejection.INVALID, f"more than {GRANTS_MAX} grants")
    for grant in grants:
        require(not grant.attached, Rejection.INVALID, f"{grant} comes with what is attached, and is not given")
        if grant.right is Right.BROKER_SETTINGS:
            require(
                grant == Grant(grant.right), Rejection.INVALID, f"{Right.BROKER_SETTINGS} is a grant of no namespace"
            )
        elif grant != OFFSETS_COPY:
            check_prefix(grant.type, grant.prefix)
        require(
            grant.right is not Right.REPLACE or grant.type is ResourceType.TOPIC,
            Rejection.INVALID,
            f"{grant}: topics alone are replaced",
        )


def _change_grants(state: ControlState, offset: int, command: c.Command, body: c.ChangeGrants) -> Result:
    before = link_named(state, body.link)
    check_grants(body.given)
    grants = before.grants
    for taken in body.taken:
        require(
            any(_same(each, taken) for each in grants),
            Rejection.NOT_FOUND,
            f"link {before.name!r} has no grant {taken}; it has {', '.join(map(str, grants)) or 'none'}",
        )
        grants = tuple(each for each in grants if not _same(each, taken))
    given = tuple(each for each in dict.fromkeys(body.given) if each not in grants)
    after = _with_pairs(replace(before, grants=(*grants, *given)))
    require(len(after.grants) <= GRANTS_MAX, Rejection.CONFLICT, f"link {before.name!r} has {GRANTS_MAX} grants")
    return _changed(state, before, after)


def _same(left: Grant, right: Grant) -> bool:
    return replace(left, attached=False) == replace(right, attached=False)


def _with_pairs(link: Link) -> Link:
    """The link with a grant for all that is attached: it goes on, whatever else is granted."""
    pairs = [*link.mappings, *(each for each in link.offsets_topics if each.role is Role.FOLLOWER)]
    wanted = dict.fromkeys(map(of_pair, pairs))
    more = tuple(each for each in wanted if not any(covers(grant, each) for grant in link.grants))
    return replace(link, grants=(*link.grants, *more))


def grants_begin(state: ControlState) -> ControlState:
    """The state in which links have what was attached before anything was granted, and nothing more."""
    return state.evolve(links={name: _with_pairs(link) for name, link in state.links.items()})


def check_granted(link: Link, wanted: tuple[Grant, ...]) -> None:
    """Refuse what the other cluster asks for and was not granted."""
    lacking = missing(link, wanted)
    require(not lacking, Rejection.NOT_GRANTED, not_granted(link.name, lacking))


def check_attach(link: Link, body: c.AttachNamespace) -> None:
    """Refuse what a peer may not have attached."""
    asked = AttachRequest(
        body.type,
        body.local_prefix,
        body.remote_prefix,
        body.role,
        asked_here=False,
        truncate_target=bool(body.truncate_topic_ids or body.cuts),
        disable_transaction_verification=body.disable_transaction_verification,
        on_source_loss=body.on_source_loss,
        on_source_delete=body.on_source_delete,
    )
    lacking = lacks(link, asked)
    require(not lacking, Rejection.NOT_GRANTED, not_granted(link.name, lacking))


def check_altered(link: Link, attached: NamespaceMapping, body: c.AlterMapping) -> None:
    """Refuse what a peer may not set of a pair that is attached."""
    known = needed_by(attached)
    after = replace(
        attached,
        on_source_loss=body.on_source_loss or attached.on_source_loss,
        on_source_delete=body.on_source_delete or attached.on_source_delete,
    )
    check_granted(link, tuple(each for each in needed_by(after) if each not in known))


def attached(state: ControlState, link: Link, mapping: NamespaceMapping, for_peer: bool) -> Link:
    """The link once a pair is attached: it waits no more, and what this side attached is granted with it."""
    link = replace(link, waiting=_without(link, mapping.type, mapping.local_prefix))
    grant = of_pair(mapping)
    # For the other side it was granted, or this side's operator had asked for the same pair.
    known = any(covers(each, grant) for each in link.grants) if for_peer else grant in link.grants
    if state.level < CONSENT or known:
        return link
    return replace(link, grants=(*link.grants, grant))


def detached(link: Link, mapping: NamespaceMapping, for_peer: bool) -> Link:
    """The link once a pair is detached: what came with it is taken back, unless the other side let it go.

    Also what came with it before it was reversed.
    """
    if for_peer:
        return link
    either = [with_pair(mapping.type, mapping.local_prefix, role) for role in Role]
    return replace(link, grants=tuple(each for each in link.grants if each not in either))


def _without_grant(link: Link, grant: Grant) -> tuple[Grant, ...]:
    return tuple(each for each in link.grants if each != grant)


# --- what waits


def _request_attach(state: ControlState, offset: int, command: c.Command, body: c.RequestAttach) -> Result:
    before, request = link_named(state, body.link), replace(body.request, asked_ms=command.at_ms)
    check_prefix(request.type, request.local_prefix)
    check_prefix(request.type, request.remote_prefix)
    known = before.waits(request.type, request.local_prefix)
    if known is not None and known.asked_here and not request.asked_here:
        return state, ()  # what this side asked for itself stands
    if known is not None and replace(known, asked_ms=request.asked_ms) == request:
        return state, ()
    rest = _without(before, request.type, request.local_prefix)
    require(len(rest) < WAITING_MAX, Rejection.CONFLICT, f"{WAITING_MAX} pairs wait on link {before.name!r}")
    return _changed(state, before, replace(before, waiting=(*rest, request)))


def _withdraw_attach(state: ControlState, offset: int, command: c.Command, body: c.WithdrawAttach) -> Result:
    before = link_named(state, body.link)
    rest = _without(before, body.type, body.local_prefix)
    require(
        len(rest) < len(before.waiting),
        Rejection.NOT_FOUND,
        f"the {NamespaceKey(body.type, body.local_prefix)} does not wait on link {before.name!r}",
    )
    after = replace(before, waiting=rest)
    asked = before.waits(body.type, body.local_prefix)
    if asked is not None and not body.for_peer:
        # This side wants it no more: had it been attached, neither may the other side attach it again.
        grants = _without_grant(after, with_pair(asked.type, asked.local_prefix, asked.role))
        after = replace(after, grants=grants)
    return _changed(state, before, after)


def _without(link: Link, kind: ResourceType, local_prefix: str) -> tuple[AttachRequest, ...]:
    return tuple(each for each in link.waiting if (each.type, each.local_prefix) != (kind, local_prefix))


def _changed(state: ControlState, before: Link, after: Link) -> Result:
    if after == before:
        return state, ()
    return state.evolve(links=put(state.links, after.name, after)), (LinkChanged(before, after),)


GRANT_HANDLERS: Mapping[type[c.Body], Callable[[ControlState, int, c.Command, Any], Result]] = {
    c.CreateToken: _create_token,
    c.DeleteToken: _delete_token,
    c.SealToken: _seal_token,
    c.ChangeGrants: _change_grants,
    c.RequestAttach: _request_attach,
    c.WithdrawAttach: _withdraw_attach,
}
