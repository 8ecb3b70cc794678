"""What the control log accepts of feature levels (:mod:`isthmus_control.levels`), and where a version does not know
enough to judge (:mod:`isthmus_control.concerns`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from isthmus_control import commands as c
from isthmus_control.concerns import Beyond, concerns_of, touched
from isthmus_control.control_state import ControlState
from isthmus_control.levels import CONSENT, KEY_ROTATION, level_of, plain_version
from isthmus_control.model import ProxyLease
from isthmus_control.outcome import LevelRaised, Refuse, Rejection, require
from isthmus_control.rules.checks import Result
from isthmus_control.rules.grants import grants_begin


def check_level(state: ControlState, needed: int, what: str) -> None:
    """Refuse what the log may not hold yet."""
    require(
        needed <= state.level,
        Rejection.NOT_SUPPORTED,
        f"{what} needs feature level {needed} of the control log, which has {state.level}: once every proxy of the "
        f"cluster knows it, an operator raises it by isthmus control upgrade",
    )


def check_allowed(state: ControlState, body: c.Body) -> None:
    """Refuse a command that the log may not hold yet. One that raises the level may have what that brings."""
    level = body.level if isinstance(body, c.RaiseLevel) else 0
    if level < (needed := level_of(body)):
        check_level(state, needed, body.KIND)


def met(state: ControlState, body: c.Body) -> Beyond | None:
    """What is beyond this version of that which a command touches; None: it can judge the command as all others do."""
    if not state.beyond:
        return None
    if isinstance(body, c.CreateLink | c.AlterLink | c.MergeLink):
        return state.beyond[0]  # they count links and write times, each after the last of all links
    return touched(state.beyond, concerns_of(body), state.links)


def check_known(state: ControlState, body: c.Body) -> None:
    """Refuse what touches something that a newer version wrote of: this one would judge it by half of the state."""
    unknown = met(state, body)
    require(unknown is None, Rejection.NOT_SUPPORTED, unknown.message if unknown is not None else "")


def check_writable(state: ControlState, body: c.Body) -> None:
    """Refuse what must not even stand in the log: older versions stop at it, whatever comes of it."""
    check_allowed(state, body)
    check_known(state, body)
    if isinstance(body, c.RaiseLevel):
        _check_raise(state, body)


def behind(state: ControlState, level: int) -> Iterable[ProxyLease]:
    """The proxies whose lease may run and that do not know ``level``."""
    return [lease for lease in _running(state) if lease.known_level < level]


def without_key(state: ControlState, key_id: str) -> Iterable[ProxyLease]:
    """The proxies whose lease may run and that do not have the control key of this id."""
    return [lease for lease in _running(state) if lease.key_id != key_id]


def _running(state: ControlState) -> list[ProxyLease]:
    leases = (*state.proxies.values(), *state.superseded.values())
    return sorted(leases, key=lambda lease: (lease.name, lease.incarnation))


def _raise_level(state: ControlState, offset: int, command: c.Command, body: c.RaiseLevel) -> Result:
    _check_raise(state, body)
    key_id = body.key_id or state.key_id
    if (body.level, key_id) == (state.level, state.key_id):
        return state, ()
    changes = (LevelRaised(state.level, body.level, key_id),)
    if state.level < CONSENT <= body.level:
        state = grants_begin(state)
    return state.evolve(level=body.level, key_id=key_id), changes


def _check_raise(state: ControlState, body: c.RaiseLevel) -> None:
    # The same on every version that knows the command, whatever levels it knows: nothing here asks for them.
    require(body.level >= 1, Rejection.INVALID, f"{body.level} is no feature level to raise a log to")
    require(
        body.level >= state.level,
        Rejection.CONFLICT,
        f"the control log has feature level {state.level}, and that is never lowered",
    )
    for lease in behind(state, body.level) if body.level > state.level else ():
        raise Refuse(
            Rejection.CONFLICT,
            f"proxy {lease.name!r} (version {plain_version(lease.version)}) knows feature level {lease.known_level} at "
            f"most, not {body.level}: upgrade it, or stop it and wait until its lease has run out",
        )
    _check_key(state, body)


def _check_key(state: ControlState, body: c.RaiseLevel) -> None:
    if body.key_id in ("", state.key_id):
        return
    require(  # below that level in the words of the versions before, which know no other answer
        not state.key_id or body.level >= KEY_ROTATION,
        Rejection.CONFLICT,
        f"the records of the control log are signed with the control key {state.key_id}, and that is not changed",
    )
    for lease in without_key(state, body.key_id):
        has = f"the control key {lease.key_id}, not" if lease.key_id else "no control key, and is to have"
        raise Refuse(
            Rejection.CONFLICT,
            f"proxy {lease.name!r} has {has} {body.key_id}: set cluster.control_key_file to the same "
            f"key on all proxies",
        )


LEVEL_HANDLERS: Mapping[type[c.Body], Callable[[ControlState, int, c.Command, Any], Result]] = {
    c.RaiseLevel: _raise_level,
}
