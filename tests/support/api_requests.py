"""Requests as hooks get them, and the versions of an API that they come in."""

from __future__ import annotations

from typing import Any

from isthmus_plugins.api import Client, Request
from isthmus_protocol import schema
from isthmus_protocol.messages import build_request, encode_request


def request(api_key: int, version: int, values: dict[str, Any], session_id: int = 1) -> Request:
    """A whole request of a client, with correlation id 5 and client id ``me``."""
    frame = encode_request(build_request(api_key, version, values), 5, "me")
    return Request(frame, True, api_key, version, 5, 0.0, Client(session_id, "a", 1))


def versions(api_key: int, first: int = 0) -> list[int]:
    """All that the proxy knows, from ``first`` on."""
    lowest, highest = schema.supported()[api_key]
    return list(range(max(lowest, first), highest + 1))
