"""What the control log accepts of proxies' leases: who fronts which broker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from isthmus_control import commands as c
from isthmus_control.control_state import ControlState
from isthmus_control.levels import known_level, plain_version
from isthmus_control.model import ProxyLease
from isthmus_control.outcome import LeaseChanged, LeaseRenewed, Refuse, Rejection, require
from isthmus_control.rules.checks import LINK_NAME, Result, check_uuid, drop, put

LEASE_MS_MIN, LEASE_MS_MAX = 1_000, 120_000


def _claim_brokers(state: ControlState, offset: int, command: c.Command, body: c.ClaimBrokers) -> Result:
    require(
        LINK_NAME.match(body.name),
        Rejection.INVALID,
        f"{body.name!r} is no name of a proxy: up to 100 letters, digits, '.', '_' and '-'",
    )
    check_uuid(body.incarnation, "the incarnation")
    require(
        LEASE_MS_MIN <= body.lease_ms <= LEASE_MS_MAX,
        Rejection.INVALID,
        f"a lease lasts {LEASE_MS_MIN} to {LEASE_MS_MAX} ms, not {body.lease_ms}",
    )
    require(body.enforced_offset < offset, Rejection.INVALID, "nobody enforces what was not written yet")
    # It stops at the record that raised the level, which it had not read when it wrote this, and vouches for nothing.
    require(
        known_level(body.version) >= state.level,
        Rejection.NOT_SUPPORTED,
        f"proxy {body.name!r} (version {plain_version(body.version)}) knows feature level {known_level(body.version)} "
        f"at most, and the control log has {state.level}: upgrade it",
    )
    ids = [claim.broker_id for claim in body.brokers]
    require(len(set(ids)) == len(ids), Rejection.INVALID, "a broker is claimed twice")
    require(ids or body.all_brokers, Rejection.INVALID, "the claim names no broker")
    require(
        body.incarnation not in state.superseded,
        Rejection.LEASE_LOST,
        f"a newer process took over the name {body.name!r}",
    )
    for other in (state.proxies[name] for name in sorted(state.proxies)):
        if other.name == body.name:
            continue
        require(
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
    require(
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
        superseded = put(superseded, before.incarnation, before)
    return (
        state.evolve(proxies=put(state.proxies, body.name, lease), superseded=superseded),
        (LeaseChanged(before, lease),),
    )


def _own_lease(state: ControlState, name: str, incarnation: str) -> ProxyLease:
    lease = state.proxies.get(name)
    if lease is None:
        raise Refuse(Rejection.LEASE_LOST, f"proxy {name!r} has no lease any more: it was not renewed in time")
    require(lease.incarnation == incarnation, Rejection.LEASE_LOST, f"a newer process took over the name {name!r}")
    return lease


def _renew_lease(state: ControlState, offset: int, command: c.Command, body: c.RenewLease) -> Result:
    before = _own_lease(state, body.name, body.incarnation)
    require(body.enforced_offset < offset, Rejection.INVALID, "nobody enforces what was not written yet")
    # Renewals may overtake one another; what was enforced once stays so.
    after = replace(before, renewed_at_offset=offset, enforced_offset=max(before.enforced_offset, body.enforced_offset))
    return state.evolve(proxies=put(state.proxies, body.name, after)), (LeaseRenewed(after),)


def _release_lease(state: ControlState, offset: int, command: c.Command, body: c.ReleaseLease) -> Result:
    lease = state.proxies.get(body.name)
    if lease is not None and lease.incarnation == body.incarnation:
        return state.evolve(proxies=drop(state.proxies, body.name)), (LeaseChanged(lease, None),)
    old = state.superseded.get(body.incarnation)
    if old is None or old.name != body.name:
        return state, ()  # it is gone already
    return state.evolve(superseded=drop(state.superseded, body.incarnation)), (LeaseChanged(old, None),)


def _expire_lease(state: ControlState, offset: int, command: c.Command, body: c.ExpireLease) -> Result:
    current = state.proxies.get(body.name)
    is_current = current is not None and current.incarnation == body.incarnation
    lease = current if is_current else state.superseded.get(body.incarnation)
    if lease is None or lease.name != body.name:
        return state, ()  # another proxy was faster
    require(
        lease.renewed_at_offset == body.renewed_at_offset,
        Rejection.CONFLICT,
        f"proxy {body.name!r} renewed its lease in the meantime",
    )
    if is_current:
        return state.evolve(proxies=drop(state.proxies, body.name)), (LeaseChanged(lease, None),)
    return state.evolve(superseded=drop(state.superseded, body.incarnation)), (LeaseChanged(lease, None),)


PROXY_HANDLERS: Mapping[type[c.Body], Callable[[ControlState, int, c.Command, Any], Result]] = {
    c.ClaimBrokers: _claim_brokers,
    c.RenewLease: _renew_lease,
    c.ReleaseLease: _release_lease,
    c.ExpireLease: _expire_lease,
}
