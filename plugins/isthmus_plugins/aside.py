"""Work on large requests and answers, in one thread beside the loop, so that the others' traffic goes on meanwhile.

Only hooks that say so (``RequestHook.pure``) are asked there. The interpreter lets the loop have its turn after
:data:`SWITCH_S`, and there is one thread, so the loop has more than half of the time.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Final, ParamSpec, TypeVar

from isthmus_plugins.api import Ask, Gate, Hold, Request, ResponseHook, Verdict
from isthmus_protocol.elements import TooManyElements, at_most

P = ParamSpec("P")
T = TypeVar("T")

SWITCH_S: Final = 0.0002
"""How long the loop waits for a thread that computes. Python's default is 5 ms, for each thing that the loop does."""
ANSWER_BYTES_AT_ONCE: Final = 8 * 1024
"""Of an answer that the loop decodes: some hundred elements, as brokers answer."""
ANSWER_ELEMENTS_AT_ONCE: Final = 2_000
"""Of an answer that the loop goes through, and does not decode: less than a millisecond."""
_thread: Final = ThreadPoolExecutor(1, "aside")


class _Here(threading.local):
    """What the thread knows, and no other one."""

    loop: asyncio.AbstractEventLoop | None = None
    """For which it works."""


_here: Final = _Here()


def share_the_interpreter() -> None:
    """Have the loop wait for no thread for long."""
    sys.setswitchinterval(SWITCH_S)


async def aside(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What ``work`` returns, in its turn. Raises what it raises."""
    return await _in_thread(partial(work, *args, **kwargs))


def _in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    loop = asyncio.get_running_loop()

    def called() -> T:
        _here.loop = loop
        return work()

    return loop.run_in_executor(_thread, called)


def on_loop(tell: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
    """Have this called on the loop, wherever a decision is made: at once, or soon if it is made in the thread."""
    if _here.loop is None:
        tell(*args, **kwargs)
    else:
        _here.loop.call_soon_threadsafe(partial(tell, *args, **kwargs))


async def decided_aside(decide: Callable[[], Verdict]) -> Verdict:
    """A hook's verdict from the thread, where all goes on that it leads to."""
    verdict = await aside(decide)
    while isinstance(verdict, Hold):
        verdict = await verdict.verdict
    if isinstance(verdict, Ask):
        then = verdict.then
        return replace(verdict, then=lambda told: Hold(decided_aside(partial(then, told))))
    return verdict


def for_the_thread(request: Request) -> Request:
    """A request that outlives the call of a hook, and is decided there."""
    head = request.api_key, request.version, request.correlation_id
    kept = Request(request.frame, request.whole, *head, request.now, request.client)
    kept.aside = True
    return kept


async def as_asked(request: Request, decide: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Go on with a decision after a wait: aside where it was begun there, else in this step of the loop."""
    return await aside(decide, *args, **kwargs) if request.aside else decide(*args, **kwargs)


def answered_as_asked(request: Request, hook: ResponseHook) -> ResponseHook:
    """A hook of answers that is pure: it sees that to a request that was decided aside there, too, and a large one."""
    return partial(_answered_aside if request.aside else answered_by_size, hook)


def answered_on_loop(hook: ResponseHook) -> ResponseHook:
    """A hook of answers that is not pure: one that the proxy gives in the thread it sees on the loop."""
    return partial(_answered_on_loop, hook)


def _answered_on_loop(hook: ResponseHook, frame: bytes) -> bytes | Gate:
    if _here.loop is None:
        return hook(frame)
    gate = Gate().then(hook)
    on_loop(gate.open, frame)
    return gate


def found_aside(find: Callable[[bytes], T], hook: Callable[[T], bytes | Gate], frame: bytes) -> Gate:
    """What a hook that is not pure makes of what is found in a large answer, in the thread."""
    work = _in_thread(partial(find, frame))
    gate = Gate().then(lambda _: hook(work.result()))  # before the hooks behind this one
    work.add_done_callback(lambda _: gate.open(frame))
    return gate


def answered_by_size(hook: ResponseHook, frame: bytes) -> bytes | Gate:
    """What a pure hook makes of an answer that a small request may have: a large one it sees in the thread."""
    return hook(frame) if len(frame) <= ANSWER_BYTES_AT_ONCE else _answered_aside(hook, frame)


def answered_by_elements(hook: ResponseHook, frame: bytes) -> bytes | Gate:
    """The same of a hook that does not decode: what has many elements, not many bytes, it sees in the thread."""
    if len(frame) <= ANSWER_BYTES_AT_ONCE:
        return hook(frame)
    try:
        with at_most(ANSWER_ELEMENTS_AT_ONCE):
            return hook(frame)
    except TooManyElements:
        return _answered_aside(hook, frame)


def _answered_aside(hook: ResponseHook, frame: bytes) -> bytes | Gate:
    if _here.loop is not None:  # an answer of the proxy's own, which a hook behind gave in the thread
        return hook(frame)
    return found_aside(hook, lambda answer: answer, frame)
