"""From what a plugin refused of a request to its verdict."""

from __future__ import annotations

from functools import partial

from isthmus_plugins.api import Answer, Close, Replace, Request, Verdict
from isthmus_plugins.aside import answered_as_asked
from isthmus_protocol.messages import (
    RequestHead,
    ResponsePayload,
    decode_response,
    encode_request,
    encode_response,
)
from isthmus_protocol.refusals import Refused


def verdict_of(request: Request, head: RequestHead, refused: Refused | None, cause: str) -> Verdict:
    """What becomes of a request of which ``refused`` says what was refused."""
    if refused is None:
        return None
    if refused.answer is not None:
        return Answer(refused.answer, cause)
    frame = b""
    if refused.remaining is not None:
        frame = encode_request(refused.remaining, request.correlation_id, head.client_id)
    if refused.close:
        return Close("a write that asks for no answer (acks=0) and is refused", frame)
    merged = partial(_merged, head.api_key, head.version, refused)
    return Replace(frame, answered_as_asked(request, merged), cause)


def _merged(api_key: int, version: int, refused: Refused, frame: bytes) -> bytes:
    correlation_id, response = decode_response(api_key, version, frame)
    merged: ResponsePayload = refused.merge(response)
    return encode_response(merged, correlation_id)
