"""What becomes of a Fetch of which some partitions are refused.

These are answered, and the rest goes on without a fetch session (KIP-227): a session would leave them out of the
client's next requests, and the client without an answer about them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from isthmus_plugins.api import Answer, Hold, Request, Verdict
from isthmus_plugins.verdicts import verdict_of
from isthmus_protocol.messages import decode_request
from isthmus_protocol.refusals import Part, Refusal, refuse

NO_SESSION: Final = 0
NO_SESSION_EPOCH: Final = -1
WAIT_S_MAX: Final = 0.5


def refused_in_part(
    request: Request, decide: Callable[[Part], Refusal | None], wait_ms: int, released: asyncio.Event, cause: str
) -> Verdict:
    """What becomes of a Fetch, by what ``decide`` says of its partitions.

    Where all are refused, the answer comes after ``wait_ms``, half a second at most, or when they are ``released``.
    """
    head, payload = decode_request(request.frame)
    refused = refuse(head, payload, decide)
    if refused is None:
        return None
    if refused.answer is not None:
        return Hold(_answered_later(refused.answer, wait_ms / 1000, released, cause))
    return verdict_of(request, head, replace(refused, remaining=without_session(refused.remaining)), cause)


async def _answered_later(frame: bytes, wait_s: float, released: asyncio.Event, cause: str) -> Answer:
    """An answer with errors alone, after a while, as if the broker had waited for records: clients ask at once."""
    try:
        async with asyncio.timeout(min(wait_s, WAIT_S_MAX)):
            await released.wait()
    except TimeoutError:
        pass
    return Answer(frame, cause)


def without_session(payload: Any) -> Any:
    """A Fetch request that neither is part of a session nor begins one."""
    if not hasattr(payload, "session_epoch"):
        return payload
    return replace(payload, session_id=NO_SESSION, session_epoch=NO_SESSION_EPOCH)
