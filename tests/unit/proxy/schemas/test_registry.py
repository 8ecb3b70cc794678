"""Requests to one registry: who asks."""

from __future__ import annotations

from base64 import b64encode
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from isthmus.schemas.registry import Credentials, Rest, Unreachable


def test_what_stands_in_a_file_is_said_as_it_stands_there_now(tmp_path: Path) -> None:
    """Tokens end, and others take their places, while a service runs."""
    token, password = tmp_path / "token", tmp_path / "password"
    said: list[str] = []

    def answered(request: httpx.Request) -> httpx.Response:
        said.append(request.headers["authorization"])
        return httpx.Response(200, json={})

    for credentials in (Credentials(token_file=token), Credentials(user="me", password_file=password)):
        for path in (token, password):
            path.write_text("one\n")
        with closing(Rest("http://registry", credentials, httpx.MockTransport(answered))) as rest:
            rest.get("/mode")
            for path in (token, password):
                path.write_text("two\n")
            rest.get("/mode")
            for path in (token, password):
                path.unlink()
            with pytest.raises(Unreachable, match=r"registry was not asked: the .* cannot be read: No such file"):
                rest.get("/mode")
    basic = [f"Basic {b64encode(f'me:{each}'.encode()).decode()}" for each in ("one", "two")]
    assert said == ["Bearer one", "Bearer two", *basic]
