"""What the control log accepts of a link's secrets while they are rotated.

A link must never be left with nothing that both sides have. So the old secret stays until a side knows that the other
one has recorded the new one, and each step is judged in the log of the side that takes it, against what stands there by
then: what another proxy decided meanwhile counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from isthmus_control import commands as c
from isthmus_control.control_state import ControlState
from isthmus_control.model import Link, NextSecret
from isthmus_control.outcome import LinkChanged, Rejection, require
from isthmus_control.rules.checks import Result, check_uuid, link_named, put


def _begin(state: ControlState, offset: int, command: c.Command, body: c.BeginSecretRotation) -> Result:
    link = _link(state, body)
    check_uuid(body.secret_id, "the secret's id")
    if body.secret_id in link.secrets:
        return state, ()  # a retry
    after = link
    if link.next_secret is not None:
        if body.asked and link.next_secret.secret_id == body.current:
            after = _finished(link)  # the other side has finished that rotation, so it has the secret
        # One that this side asked for is not given up: the other side may have dropped the old one for it.
        require(
            body.asked and (after is not link or link.next_secret.asked),
            Rejection.CONFLICT,
            f"the secret of link {link.name!r} is being rotated already: rotate it again once that has ended",
        )
    require(
        after.secret_id == body.current,
        Rejection.CONFLICT,
        f"the other side of link {link.name!r} has another secret: it was rotated meanwhile",
    )
    return _changed(state, link, replace(after, next_secret=NextSecret(body.secret_id, body.secret, body.asked)))


def _finish(state: ControlState, offset: int, command: c.Command, body: c.FinishSecretRotation) -> Result:
    link = _link(state, body)
    if link.secret_id == body.secret_id:
        return state, ()  # another proxy was faster
    require(
        link.next_secret is not None and link.next_secret.secret_id == body.secret_id,
        Rejection.NOT_FOUND,
        f"link {link.name!r} has no secret of that id here, and no rotation to it: rotate it again",
    )
    return _changed(state, link, _finished(link))


def _abandon(state: ControlState, offset: int, command: c.Command, body: c.AbandonSecretRotation) -> Result:
    link = _link(state, body)
    if link.next_secret is None or link.next_secret.secret_id != body.secret_id:
        return state, ()
    return _changed(state, link, replace(link, next_secret=None))


def _seal(state: ControlState, offset: int, command: c.Command, body: c.SealSecret) -> Result:
    link = _link(state, body)
    if link.secrets.get(body.secret_id) in (None, body.secret):
        return state, ()  # it was rotated away meanwhile
    if link.secret_id == body.secret_id:
        return _changed(state, link, replace(link, secret=body.secret))
    assert link.next_secret is not None
    return _changed(state, link, replace(link, next_secret=replace(link.next_secret, secret=body.secret)))


def _link(
    state: ControlState,
    body: c.BeginSecretRotation | c.FinishSecretRotation | c.AbandonSecretRotation | c.SealSecret,
) -> Link:
    link = link_named(state, body.link)
    require(link.link_id == body.link_id, Rejection.CONFLICT, f"link {link.name!r} is another one by now")
    return link


def _finished(link: Link) -> Link:
    assert link.next_secret is not None
    return replace(link, secret=link.next_secret.secret, secret_id=link.next_secret.secret_id, next_secret=None)


def _changed(state: ControlState, before: Link, after: Link) -> Result:
    return state.evolve(links=put(state.links, after.name, after)), (LinkChanged(before, after),)


LINK_SECRET_HANDLERS: Mapping[type[c.Body], Callable[[ControlState, int, c.Command, Any], Result]] = {
    c.BeginSecretRotation: _begin,
    c.FinishSecretRotation: _finish,
    c.AbandonSecretRotation: _abandon,
    c.SealSecret: _seal,
}
