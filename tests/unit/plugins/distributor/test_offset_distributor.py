"""What the distributor of groups' offsets tells, and what it says nothing of."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final

import pytest
from support.fake_cluster import run_simulated

from isthmus_plugins.cluster import BrokerUnavailable, CommittedOffset, TopicPartition
from isthmus_plugins.distribution.document import read_document
from isthmus_plugins.distribution.group_times import GroupTime, Spread, read_key
from isthmus_plugins.distribution.kept import REACHED_GROUP, STILL, TIMES_TOPIC, KeptCourse, KeptReached
from isthmus_plugins.distribution.positions import Course, Stretch, Term
from isthmus_plugins.distribution.times import LeastTimestamps
from isthmus_plugins.distributor import offset_distributor
from isthmus_plugins.distributor.followed import TimedLog, Times
from isthmus_plugins.distributor.offset_distributor import OffsetDistributor
from isthmus_plugins.distributor.reasons import MESSAGES_LOST, REACHED_UNKNOWN, Waits
from isthmus_protocol.offsets_log import Commit, OffsetKey
from isthmus_protocol.record_codec import decode_records
from isthmus_protocol.records import read_header

CLUSTERS = {name: {"cluster_id": f"id-{name}", "bootstrap_servers": "h:1"} for name in ("c1", "c2")}
DOCUMENT = {"version": 1, "topics": ["t-"], "clusters": CLUSTERS, "tree": ["c1", "c2"]}
DOCUMENT |= {"groups": ["g-1", "g-long-"], "margins_ms": {"g-long-": 600_000}}

PLACES: Final = [("t-1", number) for number in range(2)]
TOPIC_ID: Final = bytes(16)


class World:
    """A cluster of which all is read, with two partitions; it reaches what another cluster says."""

    def __init__(self, **more: Any) -> None:
        """``more``: of the tree's document."""
        self.now = 0.0
        self.topic_id = TOPIC_ID
        self.logs = {place: self.log() for place in PLACES}
        self.told: list[tuple[OffsetKey, GroupTime | None]] = []
        self.batches: list[bytes] = []
        """Of what was told last."""
        self.kept: dict[TopicPartition, KeptReached] = {}
        self.cannot_be_asked: set[str] = set()
        self.on_commit: Callable[[], None] = lambda: None
        self.on_epoch_end: Callable[[], None] = lambda: None
        self.groups: dict[OffsetKey, Commit] = {}
        self.unread: set[OffsetKey] = set()
        """What its brokers have, and was not read."""
        self.settled = 10
        self.spread_ms = self.spread_ms_there = 0
        self.read = 0, -1
        self.epoch_ends = [-1]
        self.epochs_asked = 0
        self.kept_there: dict[TopicPartition, KeptReached] = {}
        """More of the other cluster's."""
        self.version = 1
        """That the other cluster has."""
        self.partitions_there = 2
        self.counted: list[str] = []
        """Clusters that were asked how many partitions topics have."""
        self.is_silent = False
        """Whether the other cluster does not answer that."""
        self.reached_there: dict[TopicPartition, int] = {}
        self.reached_here: dict[TopicPartition, CommittedOffset] = {}
        clock = SimpleNamespace(monotonic=lambda: self.now, time=lambda: self.now)
        context: Any = SimpleNamespace(cluster=self, clock=clock)
        commits: Any = SimpleNamespace(
            loaded=True, own=lambda: self.groups, has=self.groups.__contains__, follows=lambda _: True,
            offsets=lambda group, _: {key[1:]: each.offset for key, each in self.groups.items() if key.group == group},
        )  # fmt: skip
        timestamps: Any = SimpleNamespace(logs=self.logs)
        leaves: Any = SimpleNamespace(reached=self.other)
        document = read_document(json.dumps({**DOCUMENT, **more}))
        self.times = Loaded(context, document, "c1", nothing_lacks)
        self.distributor = OffsetDistributor(context, document, "c1", commits, self.times, timestamps, leaves)

    def log(self) -> TimedLog:
        one = TimedLog(self.topic_id, 0, 0, 0)
        one.least.appended(9, 1_000_000)
        one.position, one.read_at, one.read_at_ms = 10, self.now, 2_000_000
        return one

    def transactions(self, transactional_id: str) -> Any:
        return self

    async def commit(
        self,
        batches: Mapping[TopicPartition, Sequence[bytes]],
        group: str,
        offsets: Mapping[TopicPartition, CommittedOffset],
    ) -> None:
        self.kept |= {place: KeptReached.of(each.metadata) for place, each in offsets.items()}
        self.batches = [batch for some in batches.values() for batch in some]
        for record in (each for batch in self.batches for each in decode_records(batch)):
            self.told.append((read_key(record.key), record.value and GroupTime.of(record.value, 0)))
        self.on_commit()

    async def epoch_end(self, topic: str, partition: int, epoch: int) -> tuple[int, int]:
        assert epoch == self.read[1]
        self.epochs_asked += 1
        self.on_epoch_end()
        return epoch, self.epoch_ends[-1]

    async def begin(self) -> None:
        """A transactional id."""

    async def committed_offsets(
        self, groups: Collection[str], stable: bool = False
    ) -> dict[str, dict[TopicPartition, CommittedOffset]]:
        if REACHED_GROUP in groups:
            return {REACHED_GROUP: self.reached_here}
        course = Course((Stretch(Term(1, 0), "c2", 0, self.settled),))
        kept = KeptCourse(course, 1, self.topic_id.hex(), *self.read, spread_ms=self.spread_ms).metadata()
        settled = dict.fromkeys(PLACES, CommittedOffset(self.settled, kept))
        found = {group: {} if group.startswith("g-") else settled for group in groups}
        for key in self.groups.keys() | self.unread:
            if key.group in found:
                found[key.group][key[1:]] = CommittedOffset(0, "")
        return {group: found[group] for group in groups if group not in self.cannot_be_asked}

    async def other(self, name: str) -> Any:
        async def committed_offsets(groups: Collection[str], stable: bool = False) -> Any:
            kept = {
                place: KeptReached({4: self.reached_there.get(place, 3_000_000)}, self.spread_ms_there, self.version)
                for place in PLACES
            } | self.kept_there
            return {group: {at: CommittedOffset(0, each.metadata()) for at, each in kept.items()} for group in groups}

        async def topics_named(names: Collection[str]) -> Any:
            self.counted.append(name)
            if self.is_silent:
                await asyncio.Event().wait()
            return {each: SimpleNamespace(partitions=range(self.partitions_there)) for each in names}

        return SimpleNamespace(committed_offsets=committed_offsets, topics_named=topics_named)

    async def topics_named(self, names: Collection[str]) -> Any:
        self.counted.append("c1")
        return {name: SimpleNamespace(partitions=PLACES) for name in names if name == "t-1"}


async def nothing_lacks() -> None:
    """The topic of times is there."""


class Loaded(Times):
    loaded = True

    async def take_all(self, batches: Sequence[bytes]) -> None:
        nothing: Any = None
        for batch in batches:
            await self.take((TIMES_TOPIC, 0), nothing, memoryview(batch), read_header(batch))


def hearing(leaf: str, **more: Any) -> Loaded:
    """Another cluster's topic of times."""
    context: Any = SimpleNamespace(cluster=None)
    return Loaded(context, read_document(json.dumps({**DOCUMENT, **more})), leaf, nothing_lacks)


def test_what_a_cluster_has_reached_is_kept_before_it_counts_as_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """One partition in a transaction, and after the first one its logs are read anew."""
    monkeypatch.setattr(offset_distributor, "KEPT_AT_ONCE", 1)
    world = World()
    world.on_commit = world.logs.clear
    asyncio.run(world.distributor.tick())
    assert world.kept == {PLACES[0]: KeptReached({4: 2_000_000}, version=1)}
    world.logs |= {place: world.log() for place in PLACES}
    asyncio.run(world.distributor.tick())
    assert world.kept.keys() == {*PLACES}


def test_what_was_reached_of_a_topic_that_was_made_anew_is_said_at_once() -> None:
    """Brokers have forgotten what was said of the one before, and other clusters wait for it."""
    world = World(margin_ms=3_600_000, margins_ms={})
    asyncio.run(world.distributor.tick())
    assert world.kept.keys() == {*PLACES}
    world.kept.clear()
    asyncio.run(world.distributor.tick())
    assert not world.kept
    world.topic_id = b"another topic id"
    world.logs |= {place: world.log() for place in PLACES}
    asyncio.run(world.distributor.tick())
    assert world.kept.keys() == {*PLACES}


def test_what_is_settled_has_to_be_known_of_all_levels() -> None:
    """Else what was told of one of them would be taken back, and others would wait."""
    world = World()
    world.cannot_be_asked.add("__isthmus_tree_courses_4")
    with pytest.raises(BrokerUnavailable, match="what group __isthmus_tree_courses_4 has committed cannot be read now"):
        asyncio.run(world.distributor.tick())
    assert world.kept == {}


def test_what_was_settled_in_an_earlier_life_of_a_level_is_settled_for_nobody() -> None:
    """Another cluster stood there once. To the one that is there now all of the log is still to come."""
    added = {"c2": {"by": "c1", "version": 2}}
    world = World(version=2, tree={"level": 4, "sides": ["c1", "c2"]}, added=added)
    asyncio.run(world.distributor.tick())
    assert world.kept == dict.fromkeys(PLACES, KeptReached({}, version=2))


def test_what_was_reached_in_an_earlier_life_of_a_level_is_reached_here_by_nobody() -> None:
    """Another cluster stood here once. All that the one that fills this one holds is still to come."""
    added = {"c1": {"by": "c2", "version": 2}}
    world = World(version=2, tree={"level": 4, "sides": ["c1", "c2"]}, added=added)
    key = OffsetKey("g-1", *PLACES[0])
    world.groups[key] = Commit(10, "", 500, 0)
    asyncio.run(world.distributor.ask("c2"))
    asyncio.run(world.distributor.tick())
    assert not world.told
    assert world.distributor.unsaid[key].code == REACHED_UNKNOWN
    world.version = 2
    asyncio.run(world.distributor.ask("c2"))
    asyncio.run(world.distributor.tick())
    assert [each for each, _ in world.told] == [key]


def test_a_log_that_lost_its_end_is_not_settled_up_to_where_it_ended() -> None:
    """What comes in the place of what was lost is given to nobody yet."""
    world = World()
    world.settled = 11
    asyncio.run(world.distributor.tick())
    assert world.kept == {}
    world.settled = 10
    asyncio.run(world.distributor.tick())
    assert world.kept.keys() == {*PLACES}


def test_a_log_that_lost_its_end_and_is_longer_now_is_settled_up_to_where_it_was_cut() -> None:
    """Its distributor has not noticed yet."""
    world = World()
    world.read = 10, 3
    for one in world.logs.values():
        one.least = LeastTimestamps()
        for offset, time in ((7, 600_000), (9, 700_000), (11, 800_000)):
            one.least.appended(offset, time)
        one.position, one.leader_epoch = 12, 5
    for end, least in ((7, 600_000), (8, 700_000), (10, 800_000), (-1, 800_000)):
        world.epoch_ends.append(end)
        world.distributor._epoch_ends.clear()
        asyncio.run(world.distributor.tick())
        assert {each.times[4] for each in world.kept.values()} == {least}
    asked = world.epochs_asked
    asyncio.run(world.distributor.tick())
    assert asked == world.epochs_asked == 2 * 4


def test_what_is_settled_is_of_the_log_that_was_there_when_it_was_asked_for() -> None:
    """Another leader's, which lacks what was settled, may be read to its end meanwhile, and be longer again."""
    world = World()
    place, other = PLACES
    world.read = 10, 3
    world.logs[place].leader_epoch, world.logs[other].leader_epoch = 3, 4
    world.epoch_ends = [10]

    def elected() -> None:
        one = world.logs[place] = world.log()
        one.least = LeastTimestamps()
        for offset, time in ((9, 700_000), (11, 800_000)):
            one.least.appended(offset, time)
        one.position, one.leader_epoch = 12, 5

    world.on_epoch_end = elected
    asyncio.run(world.distributor.tick())
    assert world.kept.keys() == {other}
    world.on_epoch_end = lambda: None
    world.epoch_ends.append(8)
    asyncio.run(world.distributor.tick())
    assert world.kept[place].times == {4: 700_000}


def test_where_epochs_end_is_known_of_no_more_than_is_asked() -> None:
    world = World()
    for epoch in (3, 4, 5):
        world.read = 10, epoch
        for one in world.logs.values():
            one.leader_epoch = 6
        asyncio.run(world.distributor.tick())
    assert world.epochs_asked == 2 * 3
    assert {epoch for _, epoch in world.distributor._epoch_ends} == {5}


def test_a_group_that_has_committed_what_a_log_does_not_have_has_not_read_it_to_its_end() -> None:
    """The log lost its end, or is another topic's by now."""
    world = World()
    key = OffsetKey("g-1", *PLACES[0])

    async def test() -> None:
        world.groups[key] = Commit(11, "", 500, 0)
        await world.distributor.ask("c2")
        await world.distributor.tick()
        assert not world.told
        world.groups[key] = Commit(10, "", 501, 0)
        await world.distributor.tick()
        assert [each for each, _ in world.told] == [key]

    asyncio.run(test())


@pytest.mark.parametrize("by_keys", [False, True])
def test_what_a_group_has_committed_beyond_the_end_of_a_log_is_why_nothing_is_said(by_keys: bool) -> None:
    """Of the topic's other partitions neither, where messages went by their keys. Not while it is only ahead of what
    was read here."""
    world = World()
    world.spread_ms = STILL if by_keys else 0
    beyond, other = (OffsetKey("g-1", *place) for place in PLACES)
    world.groups |= {beyond: Commit(12, "", 500, 0), other: Commit(10, "", 500, 0)}

    async def ticked() -> set[OffsetKey]:
        """Of which it says why it says nothing."""
        world.now += 1
        await world.distributor.ask("c2")
        for one in world.logs.values():
            one.read_at = world.now
        await world.distributor.tick()
        assert {reason.code for reason in world.distributor.unsaid.values()} <= {MESSAGES_LOST}
        return set(world.distributor.unsaid)

    async def test() -> None:
        assert await ticked() == set()
        world.groups[beyond] = Commit(11, "", 501, 0)
        assert await ticked() == set()
        assert await ticked() == ({beyond, other} if by_keys else {beyond})
        assert "offset 11 of t-1-0, which ends at 10 here" in world.distributor.unsaid[beyond].message
        assert {key for key, _ in world.told} == (set() if by_keys else {other})
        world.groups[beyond] = Commit(10, "", 502, 0)
        assert await ticked() == set()
        assert {key for key, _ in world.told} == {beyond, other}

    asyncio.run(test())


def test_a_time_that_does_not_change_is_told_again_every_hour() -> None:
    """Elsewhere it may stand before what another cluster has said before, of which cleaning leaves the last."""
    world = World()
    key = OffsetKey("g-1", *PLACES[0])
    world.groups[key] = Commit(10, "", 500, 0)

    def ticked() -> int:
        asyncio.run(world.distributor.ask("c2"))
        for one in world.logs.values():
            one.read_at = world.now
        asyncio.run(world.distributor.tick())
        return len(world.told)

    assert [ticked() for _ in range(3)] == [1, 1, 1]
    world.now += 3_601
    assert [ticked() for _ in range(3)] == [2, 2, 2]
    assert world.told == [(key, GroupTime(1_000_001 - 60_000, 500, "c1", "", partitions=2))] * 2
    # What comes from another cluster counts where the group has committed later there.
    world.times.hear(key, GroupTime(7, 499, "c2", "", 8))
    assert ticked() == 2
    assert world.times.latest[key].origin == "c1"
    world.times.hear(key, GroupTime(7, 501, "c2", "", 8))
    world.now += 3_601
    assert ticked() == 2
    assert world.times.latest[key].origin == "c2"


def test_no_batch_of_times_is_larger_than_brokers_take() -> None:
    """Applications commit metadata of 4 KB, which as text of JSON is longer."""
    world = World()
    groups = [OffsetKey(f"g-1-{number}", *PLACES[0]) for number in range(300)]
    world.groups |= dict.fromkeys(groups, Commit(10, "é" * 2_048, 500, 0))
    asyncio.run(world.distributor.ask("c2"))
    asyncio.run(world.distributor.tick())
    assert [key for key, _ in world.told] == groups
    assert max(map(len, world.batches)) < 1_000_000


def test_groups_of_a_prefix_go_on_earlier_by_its_margin() -> None:
    world = World()
    groups = [OffsetKey(name, *PLACES[0]) for name in ("g-1", "g-long-1")]
    world.groups |= dict.fromkeys(groups, Commit(10, "", 500, 0))
    asyncio.run(world.distributor.ask("c2"))
    asyncio.run(world.distributor.tick())
    told = {key: 1_000_001 - said.time for key, said in world.told if said is not None}
    assert told == {groups[0]: 60_000, groups[1]: 600_000}


@pytest.mark.parametrize("here", [True, False])
@pytest.mark.parametrize(
    ("spread_ms", "is_floor"), [(0, False), (439_999, False), (440_000, True), (900_000, True), (STILL, True)]
)
def test_what_may_have_gone_by_its_key_holds_back_all_partitions_of_its_topic(
    here: bool, spread_ms: int, is_floor: bool
) -> None:
    """Partitions were added where a topic had fewer: what is unread in one stands in any of them elsewhere."""
    world = World()
    if here:
        world.spread_ms = spread_ms
    else:
        world.spread_ms_there = spread_ms
    world.now = 1_000
    for one in world.logs.values():
        one.read_at = world.now
    world.logs[PLACES[1]].least = LeastTimestamps()
    world.logs[PLACES[1]].least.appended(9, 500_000)
    key = OffsetKey("g-1", *PLACES[0])

    async def said() -> int:
        world.told.clear()
        await world.distributor.ask("c2")
        await world.distributor.tick()
        (time,) = [each for told, each in world.told if told == key]
        assert time is not None
        return time.time + 60_000

    async def test() -> None:
        world.groups[key] = Commit(10, "", 500, 0)
        assert await said() == (500_000 if is_floor else 1_000_001)  # it has read nothing of the other one yet
        world.groups |= {key: Commit(10, "", 501, 0), key._replace(partition=1): Commit(10, "", 501, 0)}
        if is_floor:
            assert await said() == 1_000_001
        assert {each.spread_ms for each in world.kept.values()} == {
            1_020_000 if spread_ms == STILL and not here else spread_ms
        }

    asyncio.run(test())


def test_what_may_have_gone_by_its_key_is_looked_for_once_for_each_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a second, for good: not in all partitions again for each of them."""
    world = World()
    places = [("t-1", number) for number in range(50)]
    world.logs |= {place: world.log() for place in places}
    world.kept_there = dict.fromkeys(places, KeptReached({4: 3_000_000}, 900_000, 1))
    world.groups |= {OffsetKey("g-1", *place): Commit(9, "", 500, 0) for place in places}
    looked: list[TopicPartition] = []
    on_the_way = OffsetDistributor._on_the_way

    def counted(self: OffsetDistributor, place: TopicPartition, read_at: float) -> list[int] | None:
        looked.append(place)
        return on_the_way(self, place, read_at)

    monkeypatch.setattr(OffsetDistributor, "_on_the_way", counted)
    asyncio.run(world.distributor.ask("c2"))
    asyncio.run(world.distributor.tick())
    assert len(world.told) == len(places)
    assert len(looked) <= 2 * len(places)


def test_what_is_on_its_way_to_another_partition_may_have_gone_by_its_key() -> None:
    world = World()
    world.spread_ms_there = 900_000
    world.reached_there[PLACES[1]] = 700_000
    key = OffsetKey("g-1", *PLACES[0])
    world.groups |= {key: Commit(10, "", 500, 0), key._replace(partition=1): Commit(10, "", 500, 0)}
    asyncio.run(world.distributor.ask("c2"))
    asyncio.run(world.distributor.tick())
    assert {said.time for _, said in world.told if said is not None} == {700_000 - 60_000}


def test_who_takes_over_knows_what_was_heard_of_keys() -> None:
    """The cluster whose messages went by their keys may have left."""
    world = World()
    world.reached_here = {PLACES[0]: CommittedOffset(0, KeptReached({4: 1}, 900_000).metadata())}
    asyncio.run(world.distributor.begin())
    asyncio.run(world.distributor.tick())
    assert [each.spread_ms for each in world.kept.values()] == [900_000] * 2


@pytest.mark.parametrize("moved", [True, False])
def test_what_a_cluster_says_is_gone_hides_no_other_one_s_word(moved: bool) -> None:
    """A group moves from c1 to c2, and c1's brokers forget it, which the third cluster hears last."""
    world, elsewhere = World(), hearing("c2")
    key = OffsetKey("g-1", *PLACES[0])

    async def test() -> None:
        world.groups[key] = Commit(10, "", 500, 0)
        await world.distributor.ask("c2")
        await world.distributor.tick()
        await elsewhere.take_all(world.batches)
        assert elsewhere.latest[key].origin == "c1"
        if moved:
            elsewhere.hear(key, GroupTime(7, 501, "c2", "", 8))
        del world.groups[key]
        await world.distributor.tick()
        assert world.told[-1] == (key, None)
        await elsewhere.take_all(world.batches)

    asyncio.run(test())
    assert [each.origin for each in elsewhere.latest.values()] == (["c2"] if moved else [])
    assert not world.times.latest


def test_what_a_group_has_committed_is_not_gone_unless_its_coordinator_says_so() -> None:
    """Brokers tell of fewer partitions of the offsets topic for a moment, and what stands in the others is not read."""
    world = World()
    key = OffsetKey("g-1", *PLACES[0])

    async def test() -> None:
        commit = world.groups[key] = Commit(10, "", 500, 0)
        await world.distributor.ask("c2")
        await world.distributor.tick()
        del world.groups[key]
        world.unread.add(key)
        await world.distributor.tick()
        world.cannot_be_asked.add(key.group)
        await world.distributor.tick()
        world.unread.clear()
        await world.distributor.tick()
        world.groups[key] = commit
        await world.distributor.tick()

    asyncio.run(test())
    assert [told for told, said in world.told if said is None] == []
    assert world.times.latest[key].origin == "c1"


@pytest.mark.parametrize(("theirs", "said"), [(2, True), (1, False), (3, False)])
def test_groups_of_a_topic_with_other_partitions_elsewhere_are_told_of_by_nobody(theirs: int, said: bool) -> None:
    """Messages go there by their keys: of one partition of theirs, unread ones may stand in any of ours."""
    reached = {("t-1", number): 1_000 + number for number in range(theirs)}
    context: Any = SimpleNamespace(
        cluster=SimpleNamespace(transactions=lambda _: SimpleNamespace()), clock=SimpleNamespace(monotonic=lambda: 5.0)
    )
    timestamps: Any = SimpleNamespace(logs={place: TimedLog(TOPIC_ID, 0, 0, 0) for place in PLACES})
    nothing: Any = None
    document = read_document(json.dumps(DOCUMENT))
    distributor = OffsetDistributor(context, document, "c1", nothing, nothing, timestamps, nothing)

    async def asked(other: str) -> tuple[dict[tuple[str, int], int], Mapping[str, int]]:
        return reached, {"t-1": theirs}

    distributor._asked = asked  # type: ignore[method-assign]
    asyncio.run(distributor.ask("c2"))
    distributor.count_partitions({}, asked_at=6.0)
    if said:
        assert distributor._on_the_way(("t-1", 0), read_at=6.0) == [1_000]
    else:
        with pytest.raises(Waits, match=f"something of {theirs} partitions of t-1, of which this cluster has 2"):
            distributor._on_the_way(("t-1", 0), read_at=6.0)


def test_partitions_of_which_a_level_gives_nothing_yet_are_counted() -> None:
    """They were added while the level's target was away; to others their messages go."""
    world = World()
    key = OffsetKey("g-1", *PLACES[0])
    world.groups[key] = Commit(10, "", 500, 0)
    world.kept_there["t-1", 2] = KeptReached({8: 3_000_000}, version=1)
    asyncio.run(world.distributor.ask("c2"))
    asyncio.run(world.distributor.tick())
    assert not world.told
    assert "something of 3 partitions of t-1, of which this cluster has 2" in world.distributor.unsaid[key].message


def test_clusters_that_call_a_topic_differently_understand_each_other() -> None:
    """They write the fields of its name; who has no such topic passes over it."""
    named: dict[str, Any] = {"topics": [""], "names": {"c1": "{kind}-{topic}", "c2": "{topic}.{kind}"}}
    world, elsewhere, without = World(**named), hearing("c2", **named), hearing("c2")
    key = OffsetKey("g-1", *PLACES[1])
    world.groups[key] = Commit(10, "", 500, 0)

    async def test() -> None:
        await world.distributor.ask("c2")
        await world.distributor.tick()
        for gone in (False, True):
            if gone:
                del world.groups[key]
                await world.distributor.tick()
            for times in (elsewhere, without):
                await times.take_all(world.batches)
            assert elsewhere.latest.keys() == (set() if gone else {OffsetKey("g-1", "1.t", 1)})

    asyncio.run(test())
    assert [each.topic for each, _ in world.told] == ["kind=t/topic=1"] * 2
    assert world.times.latest == {}


def test_a_record_of_other_names_is_passed_over() -> None:
    named = {"names": {"c1": "t-{topic}", "c2": "t-x-{topic}"}}
    world, elsewhere = World(**named), hearing("c2", names={"c1": "t-{a}-{topic}", "c2": "t-{topic}-{a}"})
    world.groups[OffsetKey("g-1", *PLACES[0])] = Commit(10, "", 500, 0)

    async def test() -> None:
        await world.distributor.ask("c2")
        await world.distributor.tick()
        await elsewhere.take_all(world.batches)

    asyncio.run(test())
    assert len(world.told) == 1
    assert elsewhere.latest == {}


def test_what_went_by_its_key_is_told_with_each_time() -> None:
    world = World()
    world.groups[OffsetKey("g-1", *PLACES[0])] = Commit(10, "", 500, 0)
    world.spread_ms_there = 700_000

    async def test() -> None:
        await world.distributor.ask("c2")
        await world.distributor.tick()
        await world.distributor.tick()
        world.spread_ms_there = 800_000
        await world.distributor.ask("c2")
        await world.distributor.tick()

    asyncio.run(test())
    assert [(said.partitions, said.spread_ms) for _, said in world.told if said is not None] == [
        (2, 700_000),
        (2, 800_000),
    ]


def test_partitions_are_counted_with_one_request_to_each_cluster() -> None:
    world = World()
    world.partitions_there, world.spread_ms_there = 3, 700_000

    async def test() -> None:
        await world.distributor.ask("c2")
        assert await world.distributor.spreads(["t-1", "t-gone"]) == {"t-1": Spread([2, 3], 700_000)}

    asyncio.run(test())
    assert world.counted == ["c1", "c2"]


def test_of_a_cluster_that_does_not_answer_what_it_has_said_last_counts() -> None:
    world = World()
    world.kept_there["t-1", 2] = KeptReached({8: 3_000_000}, version=1)
    unreadable: Any = SimpleNamespace(metadata=lambda: "nothing that was kept")

    async def test() -> None:
        with pytest.raises(BrokerUnavailable, match="c2 was not asked yet"):
            await world.distributor.spreads(["t-1"])
        await world.distributor.ask("c2")
        world.is_silent = True
        assert await world.distributor.spreads(["t-1"]) == {"t-1": Spread([2, 3], 0)}
        world.counted.clear()
        world.kept_there["t-1", 3] = unreadable
        await world.distributor.ask("c2")
        assert await world.distributor.spreads(["t-1"]) == {"t-1": Spread([2, 3], 0)}
        assert world.counted == ["c1"], "one that is not reached is not waited for each time"

    run_simulated(test())
