"""What counts as settled, of what other clusters keep."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from support.fake_trees import Member

from isthmus_plugins.distribution.document import read_document
from isthmus_plugins.distribution.kept import STILL, KeptCourse, courses_group
from isthmus_plugins.distribution.positions import Course, Stretch, Term
from isthmus_plugins.distributor.courses import Courses
from isthmus_plugins.distributor.settling import Settling

CLUSTERS = {name: {"cluster_id": f"id-{name}", "bootstrap_servers": "h:1"} for name in ("a", "b", "c")}
DOCUMENT = read_document(json.dumps({"version": 1, "topics": ["t-"], "clusters": CLUSTERS, "tree": ["a", ["b", "c"]]}))
PLACE = "t-1", 0
CLOCK: Any = SimpleNamespace(time=lambda: 1_000.0)


def test_what_a_target_has_settled_of_a_topic_that_was_made_anew_was_of_the_one_before() -> None:
    target = Member("b")

    def made(end: int) -> None:
        target.add_topic("t-1").partitions[0].end = end

    async def reached(leaf: str) -> Member:
        assert leaf == "b"
        return target

    async def test() -> None:
        made(9)
        target.begin(DOCUMENT, "t-1", settled=9)
        course = Course((Stretch(Term(1, 0), "b", 0, 0),))
        courses: Any = SimpleNamespace(by_place={PLACE: course}, hear_of_keys=lambda *_: None)
        leaves: Any = SimpleNamespace(reached=reached)
        settling = Settling(courses, leaves, DOCUMENT, DOCUMENT.tree.root.level, CLOCK)
        settling.mark(PLACE, 5, {0: 9})
        assert await settling.settle() == [PLACE]
        assert courses.by_place[PLACE].settled == 5
        made(3)
        settling.mark(PLACE, 7, {0: 3})
        assert await settling.settle() == []
        target.begin(DOCUMENT, "t-1", settled=3)
        assert await settling.settle() == [PLACE]
        assert courses.by_place[PLACE].settled == 7

    asyncio.run(test())


@pytest.mark.parametrize(("there_ms", "kept_ms"), [(0, 0), (990_000, 990_000), (STILL, 1_020_000)])
def test_what_is_settled_is_kept_with_until_when_it_went_by_its_key_on_its_way(there_ms: int, kept_ms: int) -> None:
    """Who hears that it came may not have heard of the cluster that passed it on."""
    source, target = Member("a"), Member("b")
    lower, upper = (above.level for above in DOCUMENT.tree.above("b"))

    async def reached(leaf: str) -> Member:
        assert leaf == "b"
        return target

    async def test() -> KeptCourse:
        for cluster in (source, target):
            cluster.add_topic("t-1").partitions[0].end = 9
        target.begin(DOCUMENT, "t-1", settled=9)
        given = Course((Stretch(Term(1, 0), "c", 0, 9),))
        topic_id = target.found["t-1"].topic_id.hex()
        target.keep(lower, "t-1", KeptCourse(given, 1, topic_id, digest=DOCUMENT.digest, spread_ms=there_ms))
        courses = Courses(source, DOCUMENT, "a", upper)  # type: ignore[arg-type]
        await courses.begin(await source.topics(), "b")
        leaves: Any = SimpleNamespace(reached=reached)
        settling = Settling(courses, leaves, DOCUMENT, upper, CLOCK)
        settling.mark(PLACE, 5, {0: 9})
        await courses.keep(await settling.settle())
        (kept,) = source.offsets[courses_group(upper)].values()
        return KeptCourse.of(kept.metadata)

    kept = asyncio.run(test())
    assert (kept.course.settled, kept.spread_ms) == (5, kept_ms)
