"""Whole messages: frames to kio's payload classes and back.

For everything that is read or written rarely. The hot path reads what it needs with ``peeks`` and ``locate`` and keeps
the frame. A frame always includes its 4-byte size prefix.

Header versions follow the message schemas: request header v1 or (flexible versions) v2, response header v0 or v1;
ApiVersions is answered with response header v0 in every version, so that a client can read the answer of a broker that
does not know its version (KIP-511).
"""

from __future__ import annotations

import io
import struct
from collections.abc import Mapping
from functools import cache
from typing import Any, Final, NamedTuple, cast

from kio.schema.index import api_key_map, schema_name_map
from kio.serial import entity_writer
from kio.static.protocol import RequestPayload, ResponsePayload

from isthmus_protocol import schema
from isthmus_protocol.bodies import UnknownErrorCode, build, decode_body, error_code
from isthmus_protocol.wire import Frame, MalformedFrame, response_body, skip_tags

__all__ = (
    "Frame",
    "MalformedFrame",
    "RequestHead",
    "RequestPayload",
    "ResponsePayload",
    "UnknownErrorCode",
    "build_request",
    "build_response",
    "decode_request",
    "decode_response",
    "encode_request",
    "encode_response",
    "error_code",
    "parse_request_head",
)

_REQUEST_HEAD: Final = struct.Struct(">ihhih")  # size, API key, version, correlation id, length of the client id
_RESPONSE_HEAD: Final = struct.Struct(">ii")  # size, correlation id
_SIZE: Final = struct.Struct(">i")


class RequestHead(NamedTuple):
    """What stands before a request's body."""

    api_key: int
    version: int
    correlation_id: int
    client_id: str | None
    body: int
    """Position of the body's first byte in the frame."""


def parse_request_head(frame: Frame) -> RequestHead:
    """The header of a request frame.

    A version that the schemas do not know is taken to have the header of the nearest one that they know, so that the
    caller can answer UNSUPPORTED_VERSION. Raises MalformedFrame: truncated, a size prefix that does not fit, an API key
    that no schema knows.
    """
    try:
        size, api_key, version, correlation_id, client_id_length = _REQUEST_HEAD.unpack_from(frame)
    except struct.error as error:
        raise MalformedFrame(f"a request of {len(frame)} bytes has no complete header") from error
    if size != len(frame) - 4:
        raise MalformedFrame(f"the size prefix says {size} bytes, the frame has {len(frame) - 4}")
    first_flexible = _first_flexible_version(api_key)
    body = _REQUEST_HEAD.size
    client_id = None
    if client_id_length >= 0:
        body += client_id_length
        if body > len(frame):
            raise MalformedFrame(f"a client id of {client_id_length} bytes, {len(frame)} bytes in the frame")
        # As a broker does: a client id in another encoding is odd, not malformed.
        client_id = str(frame[_REQUEST_HEAD.size : body], "utf-8", "replace")
    elif client_id_length != -1:
        raise MalformedFrame(f"a client id of {client_id_length} bytes")
    if version >= first_flexible:
        try:
            body = skip_tags(frame, body)
        except IndexError:
            body = len(frame) + 1
        if body > len(frame):
            raise MalformedFrame("the tagged fields of a request's header are truncated")
    return RequestHead(api_key, version, correlation_id, client_id, body)


def decode_request(frame: Frame) -> tuple[RequestHead, RequestPayload]:
    """The header and payload of a request frame. Raises MalformedFrame, also for versions that kio does not know.

    Bytes behind the payload are ignored, as brokers do: librdkafka ends AlterUserScramCredentials with one too many.
    """
    head = parse_request_head(frame)
    try:
        request_type = schema.request_type(head.api_key, head.version)
    except LookupError as error:
        raise MalformedFrame(f"request of API {head.api_key}: unknown version {head.version}") from error
    return head, cast(RequestPayload, decode_body(request_type, bytes(frame), head.body, rest_ignored=True))


def decode_response(api_key: int, version: int, frame: Frame) -> tuple[int, ResponsePayload]:
    """Correlation id and payload of a response frame to a request of ``api_key`` and ``version``.

    Raises MalformedFrame; a key or version without schema is the caller's mistake and raises as ``schema`` does.
    """
    response_type = schema.response_type(api_key, version)
    try:
        size, correlation_id = _RESPONSE_HEAD.unpack_from(frame)
    except struct.error as error:
        raise MalformedFrame(f"a response of {len(frame)} bytes has no complete header") from error
    if size != len(frame) - 4:
        raise MalformedFrame(f"the size prefix says {size} bytes, the frame has {len(frame) - 4}")
    body = response_body(frame, schema.response_header_flexible(api_key, version))
    return correlation_id, cast(ResponsePayload, decode_body(response_type, bytes(frame), body))


def build_request(api_key: int, version: int, values: Mapping[str, Any]) -> RequestPayload:
    """A request from plain values: mappings for structs, sequences for arrays, milliseconds for times and durations.

    What is not given takes the schema's default. A field that another version has, and this one does not, is left out;
    a name that no version has raises TypeError.
    """
    return cast(RequestPayload, build(schema.request_type(api_key, version), values))


def build_response(api_key: int, version: int, values: Mapping[str, Any]) -> ResponsePayload:
    """A response from plain values, as :func:`build_request`."""
    return cast(ResponsePayload, build(schema.response_type(api_key, version), values))


def encode_request(payload: RequestPayload, correlation_id: int, client_id: str | None) -> bytes:
    """The whole frame of a request."""
    head = io.BytesIO()
    encoded_id = b"" if client_id is None else client_id.encode()
    head.write(
        _REQUEST_HEAD.pack(
            0,  # the size, filled in last
            payload.__api_key__,
            payload.__version__,
            correlation_id,
            -1 if client_id is None else len(encoded_id),
        )
    )
    # The client id keeps its old format in flexible versions, too (RequestHeader.json).
    head.write(encoded_id)
    return _finish(head, payload)


def encode_response(payload: ResponsePayload, correlation_id: int) -> bytes:
    """The whole frame of a response."""
    head = io.BytesIO()
    head.write(_RESPONSE_HEAD.pack(0, correlation_id))
    return _finish(head, payload)


def _finish(frame: io.BytesIO, payload: RequestPayload | ResponsePayload) -> bytes:
    if payload.__header_schema__.__flexible__:
        frame.write(b"\x00")  # no tagged fields in the header
    cast(Any, entity_writer)(type(payload))(frame, payload)
    encoded = frame.getbuffer()
    _SIZE.pack_into(encoded, 0, len(encoded) - 4)
    del encoded
    return frame.getvalue()


@cache
def _first_flexible_version(api_key: int) -> int:
    """The lowest version with header v2. Raises MalformedFrame for an unknown API."""
    try:
        versions = schema_name_map[api_key_map[api_key]]
    except KeyError:
        raise MalformedFrame(f"unknown API key {api_key}") from None
    flexible = [version for version in versions if schema.request_flexible(api_key, version)]
    return min(flexible, default=max(versions) + 1)
