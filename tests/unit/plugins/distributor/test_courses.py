"""A level's courses as it begins: what is kept goes on, what is of an earlier life does not, and who fills whom."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from support.fake_trees import Member

from isthmus_plugins.cluster import BrokerUnavailable, ProducerFenced
from isthmus_plugins.distribution.document import TreeDocument, following, read_document
from isthmus_plugins.distribution.kept import KeptCourse, courses_group
from isthmus_plugins.distribution.positions import Course, Stretch, Term
from isthmus_plugins.distributor.courses import Courses
from isthmus_plugins.distributor.reasons import LEVELS_AT_ANOTHER_VERSION, Waits


def document(tree: Any, before: TreeDocument | None = None) -> TreeDocument:
    def names(side: Any) -> list[str]:
        return [side] if isinstance(side, str) else [*names(side[0]), *names(side[1])]

    clusters = {name: {"cluster_id": f"id-{name}", "bootstrap_servers": "h:1"} for name in names(tree)}
    version = 1 if before is None else before.tree.version + 1
    text = json.dumps({"version": version, "topics": ["t-"], "clusters": clusters, "tree": tree})
    if before is None:
        return read_document(text)
    return following(before, read_document(text, before.tree))[0]


TWO = document(["a", "b"])
THREE = document(["a", ["b", "c"]], TWO)


def cluster(name: str) -> Member:
    """It has a topic whose two partitions end at 7 and 9."""
    found = Member(name)
    for partition, end in zip(found.add_topic("t-1", 2).partitions, (7, 9), strict=True):
        partition.end = end
    return found


async def begin(own: Member, of: TreeDocument, level: int, target: str) -> Courses:
    courses = Courses(own, of, own.name, level)
    await courses.begin(await own.topics(), target)
    return courses


def test_a_new_cluster_is_filled_up_to_where_logs_end_when_all_other_levels_know_of_it() -> None:
    async def test() -> None:
        own = cluster("b")
        await begin(own, TWO, 4, "a")
        # Of a level with this number that it had once: of another cluster.
        own.keep(2, "t-1", KeptCourse(Course((Stretch(Term(1, 0), "x", 0, 5),)), 1, ""))
        with pytest.raises(Waits, match="t-1-0 at level 4 of this cluster is not at version 2 yet") as waits:
            await begin(own, THREE, 2, "c")
        assert waits.value.reason.code == LEVELS_AT_ANOTHER_VERSION
        assert len(own.offsets[courses_group(2)]) == 1
        four = await begin(own, THREE, 4, "a")
        assert set(four.by_place.values()) == {Course((Stretch(Term(1, 0), "a", 0, 0),))}
        two = await begin(own, THREE, 2, "c")
        filled = {("t-1", n): Course((Stretch(Term(2, 0), "c", 0, 0),), end) for n, end in enumerate((7, 9))}
        assert two.by_place == filled
        # What comes later was never without the new cluster, and what is kept goes on.
        own.partition("t-1").end = 20
        own.add_topic("t-2").partitions[0].end = 3
        again = await begin(own, THREE, 2, "c")
        assert again.by_place == {**filled, ("t-2", 0): Course((Stretch(Term(2, 0), "c", 0, 0),))}
        kept = KeptCourse.of(own.offsets[courses_group(2)]["t-1", 0].metadata)
        assert (kept.version, kept.digest) == (2, THREE.digest)
        two.by_place["t-1", 0] = filled["t-1", 0].settle(Term(2, 0), 3)
        with pytest.raises(ProducerFenced):
            await two.keep([("t-1", 0)])

    asyncio.run(test())


def test_a_cluster_that_comes_back_begins_anew() -> None:
    async def test() -> None:
        own = cluster("c")
        for level in (2, 4):
            own.keep(level, "t-1", KeptCourse(Course((Stretch(Term(1, 3), "x", 0, 5),)), 1, ""))
        for level, target in ((2, "b"), (4, "a")):
            courses = await begin(own, THREE, level, target)
            assert set(courses.by_place.values()) == {Course((Stretch(Term(2, 0), target, 0, 0),))}

    asyncio.run(test())


def test_what_a_cluster_that_is_gone_was_given_is_given_to_another_one() -> None:
    async def test() -> None:
        own = cluster("a")
        courses = await begin(own, THREE, 4, "b")
        courses.by_place["t-1", 0] = courses.by_place["t-1", 0].settle(Term(2, 0), 4)
        await courses.keep([("t-1", 0)])
        after = await begin(own, document(["a", "c"], THREE), 4, "c")
        assert after.by_place["t-1", 0] == Course((Stretch(Term(2, 1), "c", 0, 4),))

    asyncio.run(test())


def test_a_broker_that_tells_of_the_topic_of_before_has_nothing_given_again() -> None:
    """One that is cut off from its controller: the topic that was made since is not another one yet once more."""

    async def test() -> None:
        own = cluster("a")
        before = await own.topics()
        await begin(own, TWO, 4, "b")
        await own.delete_topic("t-1")
        for partition in own.add_topic("t-1", 2).partitions:
            partition.end = 5
        anew = await begin(own, TWO, 4, "b")
        assert anew.by_place["t-1", 0].current.term == Term(1, 1)
        anew.by_place["t-1", 0] = anew.by_place["t-1", 0].settle(Term(1, 1), 5)
        await anew.keep([("t-1", 0)])
        with pytest.raises(BrokerUnavailable, match="brokers do not agree on which topics there are"):
            await Courses(own, TWO, "a", 4).begin(before, "b")
        again = await begin(own, TWO, 4, "b")
        assert again.by_place == anew.by_place

    asyncio.run(test())
