"""What counts as settled, of what other clusters keep."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

from support.fake_trees import Member

from isthmus_plugins.distribution.document import read_document
from isthmus_plugins.distribution.positions import Course, Stretch, Term
from isthmus_plugins.distributor.settling import Settling

CLUSTERS = {name: {"cluster_id": f"id-{name}", "bootstrap_servers": "h:1"} for name in ("a", "b", "c")}
DOCUMENT = read_document(json.dumps({"version": 1, "topics": ["t-"], "clusters": CLUSTERS, "tree": ["a", ["b", "c"]]}))
PLACE = "t-1", 0


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
        courses: Any = SimpleNamespace(by_place={PLACE: course})
        leaves: Any = SimpleNamespace(reached=reached)
        settling = Settling(courses, leaves, DOCUMENT, DOCUMENT.tree.root.level)
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
