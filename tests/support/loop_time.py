"""How long answers that are made beside the loop keep it, and what they are in the end; and what changes meanwhile."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from isthmus_plugins.api import Gate
from isthmus_plugins.aside import aside

T = TypeVar("T")

LOOP_S_MAX: Final = 0.025
"""Of CPU, in one go: five times what is meant, since machines differ."""
WAIT_S: Final = 60


async def went_out(answer: bytes | Gate) -> bytes:
    """What goes out to the client, when all gates on the way have opened."""
    while isinstance(answer, Gate):
        opened = asyncio.Event()
        if not answer.take(opened.set):
            async with asyncio.timeout(WAIT_S):
                await opened.wait()
        answer = answer.answer()
    return answer


async def longest(work: Awaitable[bytes]) -> tuple[bytes, float]:
    """What work comes to, and the longest CPU time of the loop in one go, in seconds.

    Without Python's collector, which goes through all that the tests have left: a proxy does not have that.
    """
    found, done = 0.0, False

    async def watch() -> None:
        nonlocal found
        while not done:
            began = time.thread_time()
            await asyncio.sleep(0)
            found = max(found, time.thread_time() - began)

    gc.disable()
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(watch())
            await asyncio.sleep(0)
            answer = await work
            done = True
    finally:
        gc.enable()
    return answer, found


async def overtaken(decide: Callable[[], T], change: Callable[[], object]) -> T:
    """What is decided in the thread, of which the loop hears behind a change that it makes itself."""
    decided = threading.Event()

    def work() -> T:
        try:
            return decide()
        finally:
            decided.set()

    async with asyncio.TaskGroup() as group:
        deciding = group.create_task(aside(work))
        await asyncio.sleep(0)
        assert decided.wait(WAIT_S)
        change()
    await asyncio.sleep(0)  # what the thread told the loop
    return deciding.result()
