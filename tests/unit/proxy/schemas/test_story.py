"""The story of two registries, as it was had with real ones: CI has the record of it.

``ISTHMUS_RECORD=1 pytest --suite stories`` on this file writes the record anew, with two Apicurio Registries.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import httpx
import pytest
from support.apicurio import registries
from support.conversations import Recording, Replay
from support.schema_story import (
    Story,
    a_version_comes_behind_a_later_one,
    everything_becomes_equal,
    names_and_references_as_they_come,
    passes_that_end_anywhere,
    read_by_the_other_api,
    records_are_read_at_both_sides,
    restored,
    what_is_not_the_primary_s_stays,
)

from isthmus.schemas.distribution import State
from isthmus.schemas.plan import Reason

RECORD = Path(__file__).parent / "apicurio.jsonl.gz"


class Dying(httpx.BaseTransport):
    """Takes so many writes; whoever uses it is gone then, before the next one or when it was ``answered``."""

    def __init__(self, writes: int, answered: bool) -> None:
        self._left = writes
        self._answered = answered
        self._real = httpx.HTTPTransport()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        write = request.method != "GET"
        if self._left < 0 or (write and self._left == 0 and not self._answered):
            self._left = -1
            raise httpx.ConnectError("killed")
        response = self._real.handle_request(request)
        if write:
            response.read()
            self._left -= 1
            if self._left < 0:
                raise httpx.ReadError("killed")
        return response

    def close(self) -> None:
        self._real.close()


CHAPTERS: tuple[Callable[[Story], None], ...] = (
    everything_becomes_equal,
    records_are_read_at_both_sides,
    names_and_references_as_they_come,
    read_by_the_other_api,
    restored,
    a_version_comes_behind_a_later_one,
    what_is_not_the_primary_s_stays,
)


def test_as_it_was_recorded() -> None:
    replay = Replay(RECORD)
    with closing(Story({name: f"http://{name}" for name in ("primary", "target")}, replay.transport)) as story:
        for chapter in CHAPTERS:
            chapter(story)
    replay.end()


@pytest.mark.suite("stories")
@pytest.mark.timeout(600)
def test_with_real_registries() -> None:
    with registries(2) as running:
        urls = dict(zip(("primary", "target"), (each.url for each in running), strict=True))
        recording = Recording()
        # As if they had these names, so that a record is the same wherever it is made.
        named = {name: f"http://{name}" for name in urls}
        with closing(Story(named, lambda name: recording.transport(name, urls[name]))) as story:
            for chapter in CHAPTERS:
                chapter(story)
        if os.environ.get("ISTHMUS_RECORD"):
            recording.save(RECORD)
        with closing(Story(urls, lambda _: None)) as story:
            for permanent in (False, True):  # the id that it wants is not to be had
                story.clients["primary"].delete("t-main-dev-new-value", 1, permanent)
            passes_that_end_anywhere(story, Dying, urls["target"])
            before = story.target.contents()
            running[0].kill()
            lost = story.sync(delete=True)
            assert (lost.state, lost.done) == (State.UNKNOWN, ())
            assert story.clients["target"].latest("t-dev-customer-value") == 3
            running[0].begin()  # with nothing behind it
            running[0].wait()
            empty = story.sync(delete=True)
            assert [each.reason for each in empty.findings] == [Reason.PRIMARY_EMPTY]
            assert story.target.contents() == before
