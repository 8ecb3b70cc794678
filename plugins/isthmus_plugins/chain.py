"""What becomes of a request that several hooks look at, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial, reduce
from itertools import zip_longest
from typing import Any

from isthmus_plugins.api import (
    NEED_MORE,
    WITHOUT_RECORDS,
    Answer,
    Ask,
    Close,
    Hold,
    Leave,
    Replace,
    Request,
    ResponseHook,
    Verdict,
    in_turn,
    passed_on,
)
from isthmus_plugins.aside import as_asked

Hooks = tuple[Callable[[Request], Verdict], ...]


class _JointLeave(Leave):
    """The leave of several hooks, which stands while each of theirs does."""

    __slots__ = ("_looks", "leaves")

    def __init__(self, leaves: tuple[Leave, ...]) -> None:
        self.leaves = leaves
        self._looks = [leave.answers for leave in leaves if leave.answers is not None]
        self.answers = self._looks[0] if len(self._looks) == 1 else self._joint_looks if self._looks else None

    def _joint_looks(self, frame: bytes, now: float) -> ResponseHook | None:
        """The hooks behind see the answer first."""
        hooks = [look(frame, now) for look in self._looks]
        return None if None in hooks else reduce(in_turn, reversed(hooks))

    @property
    def until(self) -> float:  # type: ignore[override]
        return min(leave.until for leave in self.leaves)


class Chain:
    """What becomes of a request that several hooks look at: each sees what those before it made of it."""

    __slots__ = ("_hooks", "_joint")

    def __init__(self, hooks: Hooks) -> None:
        self._hooks = hooks
        self._joint = _JointLeave(())

    def __call__(self, request: Request) -> Verdict:
        need_more = False
        looks: Replace | None = None
        """Of hooks that leave the request as it is, and look at its answer."""
        leaves: list[Leave] = []
        for position, hook in enumerate(self._hooks):
            request.leave = None
            verdict = hook(request)
            if verdict is NEED_MORE:
                need_more = True
                continue
            if verdict is WITHOUT_RECORDS:
                return NEED_MORE if need_more else verdict
            if isinstance(verdict, Replace) and verdict.frame is request.frame:
                looks = verdict if looks is None else _replaced_twice(looks, verdict)
                if request.leave is not None and request.leave.answers is None:  # it would look no more
                    request.leave = None
            elif verdict is not None:
                request.leave = None
                verdict = _then(verdict, self._hooks[position + 1 :], request)
                return verdict if looks is None else _behind(looks, verdict)
            if request.leave is not None:
                leaves.append(request.leave)
        request.leave = self._joint_leave(tuple(leaves)) if len(leaves) == len(self._hooks) else None
        if looks is not None:
            return looks
        return NEED_MORE if need_more else None

    def _joint_leave(self, leaves: tuple[Leave, ...]) -> Leave:
        """The same object for the same leaves: sessions know it by that."""
        if any(one is not other for one, other in zip_longest(leaves, self._joint.leaves)):
            self._joint = _JointLeave(leaves)
        return self._joint


def _then(verdict: Verdict, hooks: Hooks, request: Request) -> Verdict:
    """What becomes of a request of which one hook said ``verdict``, with ``hooks`` behind it."""
    if isinstance(verdict, Replace):
        return _behind(verdict, Chain(hooks)(_with_frame(request, verdict.frame)))
    if isinstance(verdict, Hold):
        # The request is valid during the call only.
        return Hold(_held(verdict, hooks, _with_frame(request, request.frame)))
    if isinstance(verdict, Ask):
        return replace(verdict, then=partial(_asked, verdict, hooks, _with_frame(request, request.frame)))
    return verdict


async def _held(hold: Hold, hooks: Hooks, request: Request) -> Verdict:
    return await as_asked(request, _at_last, await hold.verdict, hooks, request)


def _asked(ask: Ask, hooks: Hooks, request: Request, told: Any) -> Verdict:
    return _at_last(ask.then(told), hooks, request)


def _at_last(verdict: Verdict, hooks: Hooks, request: Request) -> Verdict:
    """What becomes of a request whose hook has come to ``verdict`` after it waited."""
    return Chain(hooks)(request) if verdict is None else _then(verdict, hooks, request)


def _behind(first: Replace, then: Verdict) -> Verdict:
    """What a replaced request becomes where the hooks behind say ``then`` of the replacement."""
    if isinstance(then, Replace):
        return _replaced_twice(first, then)
    if isinstance(then, Answer):
        if first.on_response is None:
            return then
        return Answer(passed_on(first.on_response, then.frame), then.cause)
    if isinstance(then, Hold):
        return Hold(_behind_held(first, then))
    if isinstance(then, Ask):
        return replace(then, then=lambda told: _behind(first, then.then(told)))
    return then if isinstance(then, Close) else first


def _replaced_twice(first: Replace, then: Replace) -> Replace:
    return Replace(then.frame, in_turn(then.on_response, first.on_response), first.cause or then.cause)


async def _behind_held(first: Replace, hold: Hold) -> Verdict:
    return _behind(first, await hold.verdict)


def _with_frame(request: Request, frame: bytes) -> Request:
    head = request.api_key, request.version, request.correlation_id
    other = Request(frame, request.whole, *head, request.now, request.client)
    other.aside = request.aside
    return other
