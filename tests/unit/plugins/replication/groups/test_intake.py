"""What is made of what leader ends tell: which groups follow, what they are to have, what is left as it is."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from isthmus_control.model import ResourceType
from isthmus_plugins.cluster import CommittedOffset, TopicPartition
from isthmus_plugins.replication.groups.followed_group import FollowedGroup
from isthmus_plugins.replication.groups.intake import LOST_REQUEST_MARGIN_S, Intake
from isthmus_plugins.replication.groups.open_losses import OpenLosses
from isthmus_plugins.replication.link import calls
from isthmus_plugins.replication.link.connection import LinkRejected
from isthmus_protocol.offsets_log import partition_of

LINK, PARTITIONS = "link", 2
T, U = ("far-t", 0), ("far-u", 0)


class Connection:
    """One of the link's connections."""

    link_name = LINK


class Scene:
    """An intake; groups and topics that begin with ``far-`` follow over the link."""

    def __init__(self) -> None:
        self.now = 100.0
        self.prefix = "far-"
        self.here: list[str] = []
        self.confirmed: dict[Any, Any] = {}
        self.touched: list[str] = []
        self.woken = 0
        self.control = self.state = self.lookup = self.clock = self.cluster = self
        me: Any = self
        self.connection: Any = Connection()
        self.source_losses: tuple[Any, ...] = ()
        self.losses = OpenLosses(me)
        self.intake = Intake(me, me, self.losses, lambda group: self.touched.append(group.group), self._wake)

    def _wake(self) -> None:
        self.woken += 1

    def take(self, part: calls.OffsetsPart, *, topics: frozenset[str] | None = None, by: Any = None) -> list[str]:
        return [group.group for group in self.intake.take(by or self.connection, PARTITIONS, topics, part)]

    def group(self, name: str = "far-a") -> FollowedGroup:
        group = self.intake.group(LINK, name)
        assert group is not None
        return group

    # ---- what is used ----

    def monotonic(self) -> float:
        return self.now

    def following(self, kind: ResourceType, name: str) -> Any:
        if not name.startswith(self.prefix):
            return None
        mapping = SimpleNamespace(local_prefix=self.prefix)
        return SimpleNamespace(link=SimpleNamespace(name=LINK), mapping=mapping, remote_name=name.removeprefix("far-"))

    async def groups(self) -> list[str]:
        return self.here

    def __contains__(self, key: Any) -> bool:
        return key in self.confirmed

    def begin(self, key: Any, connection: Any, epoch: int, partitions: int) -> None:
        self.confirmed[key] = []

    def end(self, key: Any) -> None:
        self.confirmed.pop(key, None)

    def received(self, key: Any, said: calls.Upto, pending: Any, waited: Any) -> None:
        self.confirmed[key].append((said.upto, [each.group for each in pending], list(waited)))

    def resolve(self, group: FollowedGroup) -> None:
        self.confirmed[group.source].append(group.group)


def at(offset: int | None, place: TopicPartition = T, group: str = "far-a") -> calls.CommittedOffset:
    return calls.CommittedOffset(group, *place, offset, "m", 1500)


BEGIN = calls.WholePart(begin=True)
END = calls.WholePart(begin=False, end=True)
ALL = calls.WholePart(begin=True, end=True)


def part(*positions: calls.CommittedOffset, epoch: int = 1, partition: int = 0, **more: Any) -> calls.OffsetsPart:
    return calls.OffsetsPart(partition, epoch, positions, **more)


def test_what_is_told_is_wanted_since_it_was_read_at_the_source() -> None:
    scene = Scene()
    assert not scene.intake.has_feeds
    assert scene.take(part(at(4), whole=ALL)) == []
    assert scene.intake.has_feeds
    assert scene.take(part(at(5), at(7, U))) == ["far-a"], "something may be begun for it at once"
    assert scene.group().wanted == {T: CommittedOffset(5, "m"), U: CommittedOffset(7, "m")}
    assert scene.group().since[U] == 98.5
    assert set(scene.touched) == {"far-a"}


def test_nothing_is_begun_before_a_partition_was_told_whole() -> None:
    scene = Scene()
    assert scene.take(part(at(4), whole=BEGIN)) == []
    assert not scene.intake.is_whole(scene.group())
    assert scene.take(part(at(4, U))) == []
    assert scene.take(part(whole=END)) == []
    assert scene.intake.is_whole(scene.group())
    assert scene.woken == 3


def test_what_is_not_named_when_a_partition_is_told_again_is_there_no_more() -> None:
    scene = Scene()
    scene.take(part(at(4), at(5, U), at(6, group="far-b"), whole=ALL))
    scene.touched.clear()
    scene.take(part(at(4), whole=BEGIN))
    assert scene.group("far-b").wanted, "there may be more to come"
    scene.take(part(whole=END))
    assert scene.group().wanted == {T: CommittedOffset(4, "m")}
    assert not scene.group().deleting
    assert not scene.group("far-b").wanted
    assert scene.group("far-b").deleting
    assert scene.group("far-b").read_at == scene.intake.strays_at == scene.now
    assert set(scene.touched) == {"far-a", "far-b"}


def test_what_is_not_named_of_a_topic_that_is_held_back_is_not_known_any_more() -> None:
    scene = Scene()
    scene.take(part(at(4), at(5, U), whole=ALL))
    scene.take(part(at(4), whole=calls.WholePart(begin=True, end=True, held_back=(U[0],))))
    group = scene.group()
    assert group.wanted.keys() == {T}
    group.found({T: CommittedOffset(4, "m"), U: CommittedOffset(5, "m")}, False, scene.now, 1000.0)
    scene.intake.note_silence(group)
    assert group.silent[U].code == "SOURCE_TRUNCATING"
    assert not group.differences, "it is left where it is"


def test_committed_offsets_in_topics_that_one_end_alone_has_are_left() -> None:
    scene = Scene()
    scene.take(part(at(4), at(5, ("own-t", 0)), whole=ALL), topics=frozenset({"far-"}))
    scene.intake.note_silence(scene.group())
    assert [(place, why.code) for place, why in scene.group().silent.items()] == [(("own-t", 0), "TOPICS_DIFFER")]
    scene.take(part(at(4), whole=ALL), topics=frozenset({"other-"}))
    scene.intake.note_silence(scene.group())
    assert "the source does not lead it" in scene.group().silent[T].message


def test_a_leader_end_that_was_overtaken_is_not_believed() -> None:
    scene, another = Scene(), Connection()
    scene.take(part(at(4), epoch=7, whole=ALL))
    with pytest.raises(LinkRejected, match="led in epoch 7"):
        scene.take(part(at(5), epoch=6, whole=ALL), by=another)
    with pytest.raises(LinkRejected, match="was not told from its start"):
        scene.take(part(at(5), epoch=8))
    with pytest.raises(LinkRejected, match="was not told from its start"):
        scene.take(part(at(5), epoch=7), by=another)
    with pytest.raises(LinkRejected, match="consumer-group mine does not follow"):
        scene.take(part(at(5, group="mine"), epoch=7))
    assert scene.group().wanted == {T: CommittedOffset(4, "m")}


def test_what_was_asked_for_by_who_was_told_before_may_still_land() -> None:
    scene, another = Scene(), Connection()
    scene.take(part(at(4), whole=ALL))
    assert scene.group().certain_from == scene.now + LOST_REQUEST_MARGIN_S
    scene.now += 10
    scene.take(part(at(4), at(1, group="far-b"), whole=ALL))
    assert scene.group("far-b").certain_from < scene.now, "the same leader end tells it"
    scene.take(part(at(1, group="far-c"), whole=ALL), by=another)
    assert scene.group("far-c").certain_from == scene.now + LOST_REQUEST_MARGIN_S


def test_groups_end_with_who_tells_of_them_and_are_others_when_they_are_told_anew() -> None:
    scene = Scene()
    scene.take(part(at(4), whole=ALL))
    scene.take(part(at(4, group="far-b"), partition=1, whole=ALL))
    before = scene.group()
    another: Any = Connection()
    scene.intake.end(another, None)
    assert [group.group for group in scene.intake.fed_over(scene.connection)] == ["far-a", "far-b"]
    scene.intake.end(scene.connection, {0})
    assert [group.group for group in scene.intake.groups_of(LINK)] == ["far-b"]
    scene.take(part(at(4), whole=ALL))
    assert scene.group() is not before
    scene.intake.end(scene.connection, None)
    assert not scene.intake.has_feeds
    assert list(scene.intake.groups()) == []


def test_a_group_that_is_gone_at_the_source_is_to_be_deleted() -> None:
    scene = Scene()
    scene.take(part(at(4), whole=ALL))
    scene.take(part(gone=("far-a", "far-unknown")))
    assert scene.group().deleting
    assert scene.woken == 2
    scene.take(part(at(1)))
    assert not scene.group().deleting


def test_what_is_told_is_confirmed_where_that_is_asked_for() -> None:
    scene = Scene()
    scene.take(part(at(4), whole=ALL))
    assert scene.confirmed == {}
    pending = calls.Pending(7, 0, "far-b", *T, 3, "m", 9)
    upto = calls.Upto(10, pending=(pending,))
    scene.take(part(at(4), at(None, U), whole=calls.WholePart(begin=True, end=True, confirm=True), upto=upto))
    assert scene.confirmed == {(LINK, 0): [(10, ["far-b"], [("far-a", T)]), "far-a"]}, "what is too many is not missing"
    with pytest.raises(LinkRejected, match="consumer-group mine does not follow"):
        scene.take(part(upto=calls.Upto(11, pending=(pending._replace(group="mine"),))))
    scene.intake.end(scene.connection, None)
    assert scene.confirmed == {}


def test_groups_that_follow_no_more_are_forgotten_and_the_others_are_read_again() -> None:
    scene = Scene()
    scene.take(part(at(4), at(4, group="far-b"), whole=ALL))
    scene.touched.clear()
    scene.prefix = "far-b"
    lookup: Any = scene
    scene.intake.lookup_changed(lookup)
    assert [group.group for group in scene.intake.groups()] == ["far-b"]
    assert scene.group("far-b").read_at == 0.0
    assert scene.touched == ["far-b"]


def test_groups_that_the_source_does_not_have_are_found_once_their_partition_was_told_whole() -> None:
    scene = Scene()
    names = {partition_of(name, PARTITIONS): f"far-{name}" for name in "abcdefgh"}
    scene.here = [*names.values(), "mine"]

    def found() -> list[str]:
        asyncio.run(scene.intake.find_strays())
        return [group.group for group in scene.intake.groups()]

    assert found() == [], "nobody tells"
    scene.take(part(whole=BEGIN))
    scene.take(part(partition=1, whole=ALL))
    assert found() == [names[1]]
    assert scene.group(names[1]).wanted == {}
    assert scene.intake.strays_at > scene.now
    scene.take(part(whole=END))
    assert sorted(found()) == sorted(names.values())
    scene.intake.forget(scene.group(names[1]))
    assert scene.intake.group(LINK, names[1]) is None
