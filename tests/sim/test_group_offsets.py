"""A seeded simulation of group offsets over a link under faults.

The plugin's own ends between two model clusters, whose coordinators lose requests, carry them out unanswered, or late.
Connections break, proxies are killed, leaders of the offsets topic move, members come and go at the follower. At every
commit at the follower:

- it is not ahead of the follower's data, unless it was of the source's own, and its group had this committed offset at
  the source at some time.

And when everything works again, the follower's coordinator has what the source's groups have, and nothing else.
"""

from __future__ import annotations

import asyncio
import random

import pytest
from support.fake_cluster import run_simulated
from support.offsets import KeyValue, commit, deleted, group_gone, group_made, marker_batch, offsets_batch
from support.replicas import Replicas
from support.seeds import quarters

from isthmus_plugins.cluster import CommittedOffset, TopicPartition
from isthmus_protocol.offsets_log import OFFSETS_TOPIC, partition_of
from isthmus_protocol.record_codec import Marker

SEEDS = 15
STEPS = 100
OFFSETS_PARTITIONS = 3
GROUPS = ("app-1", "app-2", "app-3", "other-1")
TOPICS = ("local-1", "local-2", "alien")


class Storm:
    """What happens to a pair of replicas, and what the source's groups should have."""

    def __init__(self, replicas: Replicas) -> None:
        self.replicas = replicas
        self.random = replicas.random
        self.has: dict[str, dict[TopicPartition, tuple[int, CommittedOffset]]] = {}
        """By group and partition: where the commit stands in the offsets log, and what it is."""
        self.open: dict[tuple[int, int], list[tuple[str, TopicPartition, int, CommittedOffset]]] = {}
        """Open transactions, by producer id and partition of the offsets topic."""
        self.ever: set[tuple[str, TopicPartition, CommittedOffset]] = set()
        self.beyond: set[tuple[str, TopicPartition, CommittedOffset]] = set()
        """Those that were beyond the end of the source's own log."""
        self.problems: list[str] = []
        replicas.b.on_commit = self.committed

    # -- what the source's clients do

    def _log(self, group: str) -> int:
        return partition_of(group, OFFSETS_PARTITIONS)

    def _append(self, index: int, records: list[KeyValue], producer_id: int = -1) -> int:
        partition = self.replicas.a.partition(OFFSETS_TOPIC, index)
        base_offset = partition.end
        partition.write(offsets_batch(base_offset, records, producer_id))
        return base_offset

    def _choose(self) -> tuple[str, TopicPartition, CommittedOffset]:
        group, topic = self.random.choice(GROUPS), self.random.choice(TOPICS)
        end = self.replicas.a.partition(topic).end
        offset = self.random.randint(0, end + (3 if self.random.random() < 0.2 else 0))
        chosen = group, (topic, 0), CommittedOffset(offset, self.random.choice(("", "m", "ü")))
        if offset > end:
            self.beyond.add(chosen)
        return chosen

    def commit(self) -> None:
        for _ in range(self.random.randint(1, 4)):
            group, place, position = self._choose()
            at = self._append(self._log(group), [group_made(group), commit(group, *_arguments(place, position))])
            self._settle(group, place, at + 1, position)

    def commit_in_transaction(self) -> None:
        group, place, position = self._choose()
        index, producer_id = self._log(group), self.random.randint(1, 2)
        at = self._append(index, [commit(group, *_arguments(place, position))], producer_id)
        self.open.setdefault((producer_id, index), []).append((group, place, at, position))

    def end_transaction(self) -> None:
        if self.open:
            producer_id, index = self.random.choice(sorted(self.open))
            marker = self.random.choice((Marker.COMMIT, Marker.ABORT))
            partition = self.replicas.a.partition(OFFSETS_TOPIC, index)
            partition.write(marker_batch(partition.end, producer_id, marker))
            for group, place, at, position in self.open.pop((producer_id, index)):
                if marker is Marker.COMMIT:
                    self._settle(group, place, at, position)

    def _settle(self, group: str, place: TopicPartition, at: int, position: CommittedOffset) -> None:
        known = self.has.setdefault(group, {}).get(place)
        if known is None or known[0] < at:
            self.has[group][place] = at, position
            self.ever.add((group, place, position))

    def delete_offset(self) -> None:
        group = self.random.choice(GROUPS)
        if self.has.get(group):
            self._delete(group, [self.random.choice(sorted(self.has[group]))], [])

    def delete_group(self) -> None:
        group = self.random.choice(GROUPS)
        if group in self.has:
            self._delete(group, list(self.has.pop(group)), [group_gone(group)])

    def _delete(self, group: str, places: list[TopicPartition], more: list[KeyValue]) -> None:
        for place in places:
            self.has.get(group, {}).pop(place, None)
            for pending in self.open.values():
                pending[:] = [each for each in pending if each[:2] != (group, place)]
        self._append(self._log(group), [*(deleted(group, *place) for place in places), *more])

    def write(self) -> None:
        self.replicas.a.partition(self.random.choice(TOPICS)).write_values(b"a", b"b")

    # -- what goes wrong

    def members_come(self) -> None:
        group = "far-" + self.random.choice(GROUPS)
        self.replicas.b.subscriptions[group] = {"remote-1"}
        self.replicas.b.offsets.setdefault(group, {})

    def members_go(self) -> None:
        self.replicas.b.subscriptions.clear()

    def somebody_else_commits(self) -> None:
        group = "far-" + self.random.choice(GROUPS)
        self.replicas.b.offsets.setdefault(group, {})["remote-1", 0] = CommittedOffset(1000, "rogue")

    def move_leader(self) -> None:
        partition = self.random.choice(self.replicas.a.found[OFFSETS_TOPIC].partitions)
        partition.move(self.random.choice(self.replicas.a.brokers))

    def trouble(self) -> None:
        self.replicas.b.coordinator_trouble = self.random.choice((0.0, 0.1, 0.5))
        self.replicas.a.trouble = self.random.choice((0.0, 0.1))

    async def cut(self) -> None:
        self.replicas.cut()
        await asyncio.sleep(self.random.choice((0.0, 1.0)))
        await self.replicas.connect()

    async def kill(self) -> None:
        which = self.random.choice(("A", "B", "AB"))
        await self.replicas.stop(which)
        self.commit()
        self.delete_group()
        await asyncio.sleep(self.random.choice((0.0, 3.0)))
        self.replicas.start(which)
        await self.replicas.connect()

    async def blow(self) -> None:
        actions = {
            self.commit: 40,
            self.commit_in_transaction: 10,
            self.end_transaction: 8,
            self.delete_offset: 4,
            self.delete_group: 3,
            self.write: 15,
            self.members_come: 3,
            self.members_go: 3,
            self.somebody_else_commits: 2,
            self.move_leader: 3,
            self.trouble: 4,
            self.cut: 4,
            self.kill: 2,
        }
        for _ in range(STEPS):
            await asyncio.sleep(self.random.choice((0.001, 0.01, 0.1, 1.0)))
            done = self.random.choices(list(actions), list(actions.values()))[0]()
            if done is not None:
                await done
            assert not self.problems, self.problems

    # -- what must hold

    def committed(self, group: str, place: TopicPartition, position: CommittedOffset) -> None:
        source = group.removeprefix("far-"), (place[0].replace("remote-", "local-"), place[1]), position
        before = self.replicas.b.offsets.get(group, {}).get(place)
        moved = before is not None and before.metadata == position.metadata and before.offset > position.offset
        if source not in self.ever and not moved:  # one that somebody put ahead of the data is moved into it
            self.problems.append(f"{group} never had {position} in {place}")
        if position.offset > self.replicas.b.partition(*place).high_watermark and source not in self.beyond:
            self.problems.append(f"{group}: {position} is ahead of {place}")

    def expected(self) -> dict[str, dict[TopicPartition, CommittedOffset]]:
        found = {
            "far-" + group: {
                (topic.replace("local-", "remote-"), partition): position
                for (topic, partition), (_, position) in offsets.items()
                if topic.startswith("local-")
            }
            for group, offsets in self.has.items()
            if group.startswith("app-")
        }
        return {group: offsets for group, offsets in found.items() if offsets}

    def equal(self) -> bool:
        there = self.replicas.b.offsets
        return self.expected() == {
            group: offsets for group, offsets in there.items() if group.startswith("far-app-") and offsets
        }


def _arguments(place: TopicPartition, position: CommittedOffset) -> tuple[str, int, int, str]:
    return place[0], position.offset, place[1], position.metadata


async def simulate(seed: int) -> None:
    replicas = Replicas(random.Random(seed))
    replicas.attach_groups()
    for topic in TOPICS:
        replicas.a.add_topic(topic)
    replicas.a.add_topic(OFFSETS_TOPIC, OFFSETS_PARTITIONS)
    storm = Storm(replicas)
    replicas.start()
    await replicas.connect()
    await storm.blow()
    replicas.b.coordinator_trouble = replicas.a.trouble = 0.0
    storm.members_go()
    for topic in TOPICS:
        replicas.a.partition(topic).write_values(*[b"x"] * 10)
    await replicas.connect()
    try:
        await replicas.until("the groups are where the source's are", storm.equal)
        followed = replicas.ends["B"].group_follower
        await replicas.until("nothing is pending", lambda: all(each.idle for each in followed.groups("a-to-b")), 40)
    except AssertionError as error:
        raise AssertionError(f"{error}\nexpected {storm.expected()}\nfound {replicas.b.offsets}") from error
    assert not storm.problems, storm.problems
    await replicas.stop()


@pytest.mark.parametrize("seed", quarters(range(SEEDS)))
def test_groups_are_where_the_sources_are_whatever_happens(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    run_simulated(simulate(seed))
