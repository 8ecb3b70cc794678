"""Requests to one registry: who asks, and lists that come in pages."""

from __future__ import annotations

from base64 import b64encode
from contextlib import closing
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

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


@given(
    st.sets(st.integers(0, 40)),
    st.lists(st.sets(st.integers(0, 40), max_size=2), max_size=12),
    st.integers(2, 6),
    st.booleans(),
)
def test_pages_lack_nothing_that_is_there_all_the_time(
    first: set[int], changes: list[set[int]], size: int, backwards: bool
) -> None:
    """Whatever comes and goes between two requests: it is read, or cannot be."""
    there, throughout = set(first), set(first)
    after = iter(changes)

    def page(offset: int) -> dict[int, None]:
        said = dict.fromkeys(sorted(sorted(there)[offset:][:size], reverse=backwards))
        for each in next(after, ()):
            there.symmetric_difference_update({each})
            throughout.discard(each)
        return said

    with closing(Rest("http://registry", Credentials())) as rest:
        try:
            found = rest.pages(page)
        except Unreachable:
            assert any(changes)
        else:
            assert throughout <= found.keys()
