"""Distributors over clusters in memory that lose requests and answers, killed and taken over at any time.

Every message gets to every cluster, in the order of its partition; once, where distributors produce in transactions, or
nothing went wrong. A partition that a target takes nothing of for a while keeps no other one waiting. In some of them
clusters call the topic differently, and have others that have no name elsewhere.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import pytest
from support.fake_cluster import FakeContext, FakeControl, run_simulated
from support.fake_transactions import TransactingCluster
from support.seeds import seeds

from isthmus_control.model import DistributionTree
from isthmus_plugins.cluster import BrokerUnavailable, TopicInfo
from isthmus_plugins.distribution import kept as kept_module
from isthmus_plugins.distribution.document import TreeDocument, read_document, written
from isthmus_plugins.distribution.kept import STILL, KeptCourse, courses_group, given_group
from isthmus_plugins.distributor import distributor as distributor_module
from isthmus_plugins.distributor.changes import is_filled
from isthmus_plugins.distributor.distributor import Distributor
from isthmus_plugins.distributor.leaves import Leaves
from isthmus_plugins.distributor.reasons import (
    NAME_DOES_NOT_FIT,
    POSITIONS_CONTRADICT,
    TARGET_REFUSES_RECORDS,
    TARGET_UNREACHABLE,
    TOPIC_MISSING,
    Waits,
)

SEEDS = 20
TOPIC = "t-1"
NAMES = {"a": "t-{kind}-{topic}", "b": "t-{topic}.{kind}", "c": "t-all-{topic}-{kind}"}
TOPICS = {"a": "t-x-1", "b": "t-1.x", "c": "t-all-1-x"}
UNFIT = "t-"
LARGE = 2_000
LIMIT = 1_500


class Grove:
    """Three clusters, or two, with all their distributors."""

    def __init__(self, seed: int, exactly_once: bool | None = None, names: Sequence[str] = ("a", "b")) -> None:
        """``exactly_once``: clusters of these names, and nothing goes wrong by itself."""
        self.random = random.Random(f"distributors {seed}")
        some = ["a", "b", "c"][: self.random.choice((2, 3))]
        self.exactly_once = self.random.random() < 0.6
        self.kills = self.random.random() < 0.7
        self.refuses = self.random.random() < 0.5
        if exactly_once is None:
            names = some
        else:
            self.exactly_once, self.kills, self.refuses = exactly_once, False, False
        self.is_named = exactly_once is None and random.Random(f"names {seed}").random() < 0.4
        self.topics = {name: TOPICS[name] if self.is_named else TOPIC for name in names}
        """What each calls it."""
        self.document = _document(
            ["a", ["b", "c"]] if len(names) == 3 else ["a", "b"], self.exactly_once, self.is_named
        )
        self.clusters = {name: TransactingCluster(f"id-{name}", self.random, (1, 2)) for name in names}
        self.partitions = dict.fromkeys(names, 2)
        if exactly_once is None and self.random.random() < 0.3:
            self.partitions[self.random.choice(some)] = 3
        self.contexts: dict[asyncio.Task[None], Any] = {}
        for name, cluster in self.clusters.items():
            cluster.enforces_limits = True
            cluster.add_topic(self.topics[name], self.partitions[name])
            if self.is_named:
                cluster.add_topic(UNFIT)
            cluster.trouble = 0.05 if self.kills else 0.0
        self.chosen: dict[tuple[str, int], str] = {}
        """By cluster and level, the target that was chosen."""
        self.given_up: tuple[int, ...] = ()
        self.running: dict[tuple[str, int], list[asyncio.Task[None]]] = {}
        self.distributors: dict[tuple[str, int], Distributor] = {}
        self.made: dict[tuple[str, int], list[bytes]] = {}
        """By cluster and partition, what was produced and is not aborted, in its order."""
        self.transactions = 0

    def _context(self, name: str) -> Any:
        context: Any = FakeContext(self.clusters[name], FakeControl(f"id-{name}", self.random))

        async def other_cluster(other: str, bootstrap: object) -> TransactingCluster:
            await asyncio.sleep(self.random.uniform(0.001, 0.01))
            await self.clusters[other].answer()
            return self.clusters[other]

        context.other_cluster = other_cluster
        return context

    def start(self, name: str, level: int) -> None:
        levels = tuple(above.level for above in self.document.tree.above(name))
        version = self.document.tree.version

        def tree() -> DistributionTree:
            chosen = {at: leaf for (each, at), leaf in self.chosen.items() if each == name}
            return DistributionTree(version, name, ("t-",), levels, "", chosen, self.given_up)

        context = self._context(name)
        distributor = Distributor(context, self.document, name, level, tree)
        self.distributors[name, level] = distributor
        task = asyncio.get_running_loop().create_task(distributor.run(), name=f"{name} {level}")
        self.contexts[task] = context
        self.running.setdefault((name, level), []).append(task)

    async def stop(self, tasks: list[asyncio.Task[None]], killed: bool = False) -> None:
        for task in tasks:
            if killed:
                self.contexts[task].lease_deadline = float("-inf")  # nothing more is written
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(outcome, asyncio.CancelledError), outcome
        tasks.clear()

    def produce(self) -> None:
        name = self.random.choice(list(self.clusters))
        partition = self.random.randrange(self.partitions[name])
        made = self.made.setdefault((name, partition), [])
        count = self.random.randint(1, 3)
        key = f"{name}-{partition}".encode()  # of one key: they remain in one partition everywhere
        values = [b"%s %d %d" % (name.encode(), partition, len(made) + number) for number in range(count)]
        log = self.clusters[name].partition(self.topics[name], partition)
        if self.random.random() < 0.1:
            self.transactions += 1
            committed = self.random.random() < 0.5
            log.transact(50_000 + self.transactions, values, committed)
            if not committed:
                return
        else:
            if self.refuses and self.random.random() < 0.1:
                values[-1] += b" " + b"x" * LARGE
            log.write_values(*values, keys=[key] * count)
        made += values

    async def live(self) -> None:
        """Messages come, and distributors go."""
        for _ in range(60):
            await asyncio.sleep(self.random.choice((0.001, 0.01, 0.1, 0.5)))
            for _ in range(self.random.randint(0, 4)):
                self.produce()
            place = self.random.choice(list(self.running))
            chance = self.random.random()
            if self.kills and chance < 0.1:
                await self.stop(self.running[place], killed=self.random.random() < 0.7)
                self.start(*place)
            elif self.kills and chance < 0.15 and len(self.running[place]) == 1:
                self.start(*place)  # another proxy takes it over, and the first one does not know yet
            elif self.refuses and chance > 0.9:
                self.set_limits(self.random.random() < 0.5)

    def set_limits(self, limited: bool) -> None:
        for name, cluster in self.clusters.items():
            cluster.found[self.topics[name]].configs = {"max.message.bytes": str(LIMIT)} if limited else {}

    async def end(self) -> None:
        """Everything works again, until everything is everywhere."""
        self.set_limits(False)
        for name, cluster in self.clusters.items():
            cluster.trouble = 0.0
            for log in cluster.found[self.topics[name]].partitions:
                log.lag = 0
        for place, tasks in self.running.items():
            if len(tasks) > 1:
                await self.stop(tasks)
                self.start(*place)
        wanted = {value for made in self.made.values() for value in made}
        async with asyncio.timeout(200):
            await _until(lambda: not any(wanted - {*chain(*self.read(name))} for name in self.clusters))
        async with asyncio.timeout(200):
            await _until(self.is_settled)
        for tasks in self.running.values():
            await self.stop(tasks)

    def is_settled(self) -> bool:
        for (name, _), distributor in self.distributors.items():
            if not distributor.courses:
                return False  # it has just begun
            for (topic, partition), course in distributor.courses.items():
                if course.settled < self.clusters[name].partition(topic, partition).end:
                    return False
        return True

    def read(self, name: str) -> list[list[bytes]]:
        cluster, topic = self.clusters[name], self.topics[name]
        return [
            [record.value or b"" for record in cluster.partition(topic, partition).records(True).values()]
            for partition in range(self.partitions[name])
        ]

    def check(self) -> None:
        for (name, _), distributor in self.distributors.items():
            assert {topic for topic, _ in distributor.courses} == {self.topics[name]}
            left_out = {place: reason.code for place, reason in distributor.left_out.items()}
            assert left_out == ({(UNFIT, 0): NAME_DOES_NOT_FIT} if self.is_named else {})
        for name in self.clusters:
            found = self.read(name)
            counted = Counter(value for log in found for value in log)
            assert counted.keys() == {value for made in self.made.values() for value in made}
            if self.exactly_once or not (self.kills or self.refuses):
                assert counted.total() == len(counted), (name, counted.most_common(3))
            if len({*self.partitions.values()}) > 1:
                continue
            last: dict[bytes, int] = {}
            for value in chain(*(dict.fromkeys(log) for log in found)):
                origin, partition, number = value.split()[:3]
                assert int(number) > last.get(origin + partition, -1), (name, value)
                last[origin + partition] = int(number)


async def _until(holds: Callable[[], bool], interval_s: float = 0.5) -> None:
    while not holds():  # noqa: ASYNC110 - a simulated clock
        await asyncio.sleep(interval_s)


def _document(tree: Any, exactly_once: bool, is_named: bool) -> TreeDocument:
    clusters = {name: {"cluster_id": f"id-{name}", "bootstrap_servers": "h:1"} for name in "abc"}
    names = "abc" if len(tree[1]) > 1 else "ab"
    clusters = {name: clusters[name] for name in names}
    document = {"version": 1, "topics": ["t-"], "clusters": clusters, "tree": tree, "exactly_once": exactly_once}
    if is_named:
        document["names"] = {name: NAMES[name] for name in names}
    return read_document(json.dumps(document))


@pytest.mark.parametrize("seed", seeds(SEEDS))
def test_every_message_gets_to_every_cluster(seed: int) -> None:
    grove = Grove(seed)

    async def test() -> None:
        for name in grove.clusters:
            for above in grove.document.tree.above(name):
                grove.start(name, above.level)
        await grove.live()
        await grove.end()
        grove.check()

    run_simulated(test())


@pytest.mark.parametrize("exactly_once", [True, False])
def test_what_the_target_refuses_of_a_partition_keeps_no_other_one_waiting(exactly_once: bool) -> None:
    """A message that is too large for the target waits with what is behind it, and nothing that is before."""
    grove = Grove(0, exactly_once)
    a, b = grove.clusters["a"], grove.clusters["b"]
    b.found[TOPIC].configs = {"max.message.bytes": str(LIMIT)}
    refused, other = a.partition(TOPIC, 0), a.partition(TOPIC, 1)
    large = b"large" + b"x" * LARGE

    async def test() -> None:
        refused.write_values(*(b"before %d" % number for number in range(50)), large, b"behind")
        other.write_values(b"other")
        grove.start("a", 4)
        grove.start("b", 4)
        distributor = grove.distributors["a", 4]
        before = [b"before %d" % number for number in range(50)]
        async with asyncio.timeout(20):
            await _until(lambda: [{*log} for log in grove.read("b")] == [{*before}, {b"other"}])
            await _until(lambda: distributor.positions.get((TOPIC, 0)) == 50)
            await _until(lambda: "from offset 50 on" in distributor.left_out[TOPIC, 0].message)
        assert distributor.waits is None
        reason = distributor.left_out[TOPIC, 0]
        assert reason.code == TARGET_REFUSES_RECORDS
        assert "MESSAGE_TOO_LARGE" in reason.message
        watching = asyncio.get_running_loop().create_task(_until(lambda: (TOPIC, 0) not in distributor.left_out, 0.001))
        for number in range(20):
            other.write_values(b"other %d" % number)
            async with asyncio.timeout(0.25):
                await _until(lambda: grove.read("b")[1][-1] == b"other %d" % number, 0.001)  # noqa: B023 - awaited here
            await asyncio.sleep(0.5)
        assert not watching.done(), "it is left out also while it is tried again"
        # What was refused is not given again and again, and what was before it not at all.
        if exactly_once:
            assert grove.read("b")[0] == before
        else:
            assert Counter(grove.read("b")[0]).most_common(1)[0][1] <= 2
        b.found[TOPIC].configs = {}
        async with asyncio.timeout(60):
            await _until(lambda: grove.read("b")[0][-1] == b"behind")
        assert [*dict.fromkeys(grove.read("b")[0])] == [*before, large, b"behind"]
        async with asyncio.timeout(1):
            await watching
        for tasks in grove.running.values():
            await grove.stop(tasks)

    run_simulated(test())


def test_a_partition_that_may_not_be_in_a_transaction_keeps_no_other_one_waiting() -> None:
    grove = Grove(0, True)
    a, b = grove.clusters["a"], grove.clusters["b"]
    b.refuses[TOPIC, 0] = (29, "TOPIC_AUTHORIZATION_FAILED")

    async def test() -> None:
        for partition in range(2):
            a.partition(TOPIC, partition).write_values(b"%d" % partition)
        grove.start("a", 4)
        grove.start("b", 4)
        async with asyncio.timeout(20):
            await _until(lambda: grove.read("b") == [[], [b"1"]])
        assert grove.distributors["a", 4].left_out[TOPIC, 0].code == TARGET_REFUSES_RECORDS
        b.refuses.clear()
        async with asyncio.timeout(60):
            await _until(lambda: grove.read("b") == [[b"0"], [b"1"]])
        for tasks in grove.running.values():
            await grove.stop(tasks)

    run_simulated(test())


def test_a_log_that_lost_its_end_twice_gives_what_came_in_place_of_either() -> None:
    """The second time nothing was given since the first: what came then was taken for what had been given before."""
    grove = Grove(0, True)
    a = grove.clusters["a"]
    log = a.partition(TOPIC, 0)

    async def test() -> None:
        for number in range(10):
            log.write_values(b"%d" % number)
        grove.start("b", 4)
        for new in ([], [b"new", b"newer"]):
            grove.start("a", 4)
            distributor = grove.distributors["a", 4]
            async with asyncio.timeout(20):
                await _until(lambda: distributor.positions.get((TOPIC, 0)) == log.end)  # noqa: B023 - awaited here
            await grove.stop(grove.running["a", 4], killed=True)
            a.lose_ends(log.leader, lambda partition: 2 if partition is log else 0)
            for value in new:
                log.write_values(value)
        grove.start("a", 4)
        async with asyncio.timeout(20):
            await _until(lambda: b"newer" in grove.read("b")[0])
        assert grove.read("b")[0] == [*(b"%d" % number for number in range(10)), b"new", b"newer"]
        for tasks in grove.running.values():
            await grove.stop(tasks)

    run_simulated(test())


def test_a_log_that_lost_its_end_where_the_target_refused_something_gives_what_came_in_its_place() -> None:
    """Also of an epoch between that of what was given and that of what was refused behind it."""
    grove = Grove(0, True)
    a, b = grove.clusters["a"], grove.clusters["b"]
    b.found[TOPIC].configs = {"max.message.bytes": str(LIMIT)}
    log = a.partition(TOPIC, 0)

    async def test() -> None:
        for number in range(4):
            log.write_values(b"%d" % number)
        log.leader_epoch = 2
        log.write_values(b"large" + b"x" * LARGE)
        for name in ("a", "b"):
            grove.start(name, 4)
        async with asyncio.timeout(20):
            await _until(lambda: grove.distributors["a", 4].positions.get((TOPIC, 0)) == 4)
        await grove.stop(grove.running["a", 4])
        log.cut(2)
        log.leader_epoch = 1
        log.write_values(*(b"new %d" % number for number in range(4)))
        log.leader_epoch = 3
        grove.start("a", 4)
        async with asyncio.timeout(20):
            await _until(lambda: b"new 3" in grove.read("b")[0])
        assert grove.read("b")[0] == [b"0", b"1", b"2", b"3", b"new 0", b"new 1", b"new 2", b"new 3"]
        for tasks in grove.running.values():
            await grove.stop(tasks)

    run_simulated(test())


def test_that_a_log_lost_its_end_is_kept_also_while_the_target_is_not_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is longer than before soon, and what came in the place of what was lost would seem to be settled."""
    grove = Grove(0, True)
    a = grove.clusters["a"]
    log = a.partition(TOPIC, 0)

    async def not_reached(leaves: Leaves, name: str) -> Any:
        raise Waits(TARGET_UNREACHABLE, f"cluster {name} is not reached")

    def settled() -> int:
        kept = a.offsets.get(courses_group(4), {}).get((TOPIC, 0))
        return 0 if kept is None else KeptCourse.of(kept.metadata).course.settled

    async def test() -> None:
        for number in range(10):
            log.write_values(b"%d" % number)
        for name in ("a", "b"):
            grove.start(name, 4)
        async with asyncio.timeout(20):
            await _until(lambda: settled() == 10)
        for tasks in grove.running.values():
            await grove.stop(tasks, killed=True)
        a.lose_ends(log.leader, lambda partition: 2 if partition is log else 0)
        assert log.end == 8
        log.write_values(*(b"new %d" % number for number in range(10)))
        monkeypatch.setattr(Leaves, "itself", not_reached)
        grove.start("a", 4)
        async with asyncio.timeout(20):
            await _until(lambda: settled() == 8)
        await grove.stop(grove.running["a", 4])

    run_simulated(test())


def test_brokers_that_tell_of_fewer_partitions_for_a_moment_have_nothing_given_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was given of the others is kept beside what is given meanwhile."""
    grove = Grove(0, True)
    a = grove.clusters["a"]
    a.add_topic(TOPIC, 4)
    topics = a.topics

    async def some() -> dict[str, TopicInfo]:
        return {name: info._replace(partitions=info.partitions[:2]) for name, info in (await topics()).items()}

    async def test() -> None:
        for partition in range(4):
            a.partition(TOPIC, partition).write_values(b"%d" % partition)
        grove.start("a", 4)
        grove.start("b", 4)
        async with asyncio.timeout(20):
            await _until(lambda: sum(map(len, grove.read("b"))) == 4)
        await grove.stop(grove.running["a", 4])
        with monkeypatch.context() as patched:
            patched.setattr(a, "topics", some)
            grove.start("a", 4)
            for partition in range(2):
                a.partition(TOPIC, partition).write_values(b"more %d" % partition)
            async with asyncio.timeout(20):
                await _until(lambda: sum(map(len, grove.read("b"))) == 6)
            await grove.stop(grove.running["a", 4])
        grove.start("a", 4)
        distributor = grove.distributors["a", 4]
        async with asyncio.timeout(20):
            await _until(lambda: distributor.waits is None and len(distributor.positions) == 4)
        await asyncio.sleep(5)
        assert sum(map(len, grove.read("b"))) == 6
        await grove.stop(grove.running["a", 4])
        await grove.stop(grove.running["b", 4])

    run_simulated(test())


def test_until_when_messages_went_by_their_keys_is_kept() -> None:
    """Before any does, and before none does any more; so it is known whoever is killed, and whoever takes over."""
    grove = Grove(0, True)
    a, b = grove.clusters["a"], grove.clusters["b"]
    b.add_topic(TOPIC, 3)

    def kept() -> set[int]:
        return {KeptCourse.of(each.metadata).spread_ms for each in a.offsets[courses_group(4)].values()}

    async def test() -> None:
        for name in ("a", "b"):
            grove.start(name, 4)
        distributor = grove.distributors["a", 4]
        async with asyncio.timeout(20):
            await _until(lambda: distributor.waits is None)
        assert kept() == {STILL}
        await grove.stop(grove.running["a", 4], killed=True)
        await a.create_partitions(TOPIC, 3)
        grove.start("a", 4)
        distributor = grove.distributors["a", 4]
        async with asyncio.timeout(20):
            await _until(lambda: distributor.waits is None and len(distributor.positions) == 3)
        before = kept() - {0}
        assert len(before) == 1
        assert STILL not in before
        await grove.stop(grove.running["a", 4])
        grove.start("a", 4)
        await asyncio.sleep(20)
        assert kept() - {0} == before
        for tasks in grove.running.values():
            await grove.stop(tasks)

    run_simulated(test())


def test_nothing_goes_by_its_key_where_that_cannot_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with many targets that were given what is not settled: nobody would know that it is in other partitions."""
    grove = Grove(0, True)
    a, b = grove.clusters["a"], grove.clusters["b"]

    def kept() -> list[str]:
        return [each.metadata for each in a.offsets.get(courses_group(4), {}).values()]

    async def test() -> None:
        for name in ("a", "b"):
            grove.start(name, 4)
        distributor = grove.distributors["a", 4]
        async with asyncio.timeout(20):
            await _until(lambda: distributor.waits is None)
        monkeypatch.setattr(kept_module, "METADATA_BYTES_MAX", max(map(len, kept())) + len("0"))
        await b.create_partitions(TOPIC, 3)
        await asyncio.sleep(10)
        a.partition(TOPIC, 0).write_values(b"0")
        await asyncio.sleep(10)
        assert not any(grove.read("b"))
        assert {reason.code for reason in distributor.left_out.values()} == {POSITIONS_CONTRADICT}
        monkeypatch.undo()
        await grove.stop(grove.running["a", 4])
        grove.start("a", 4)
        async with asyncio.timeout(20):
            await _until(lambda: any(grove.read("b")))
        assert {KeptCourse.of(each).spread_ms for each in kept()} == {STILL}
        for tasks in grove.running.values():
            await grove.stop(tasks)

    run_simulated(test())


def test_a_new_cluster_does_not_seem_to_have_all_while_it_lacks_a_topic() -> None:
    grove = Grove(0, True)
    a, b = grove.clusters["a"], grove.clusters["b"]
    added = {"b": {"by": "a", "version": 2}}
    grove.document = read_document(json.dumps({**written(grove.document), "version": 2, "added": added}))
    a.add_topic("t-2")

    async def test() -> None:
        a.partition(TOPIC, 0).write_values(b"0")
        a.partition("t-2", 0).write_values(b"1")
        for name in ("a", "b"):
            grove.start(name, 4)
        distributor = grove.distributors["a", 4]
        async with asyncio.timeout(20):
            await _until(lambda: distributor.waits is not None and distributor.waits.code == TOPIC_MISSING)
        await asyncio.sleep(5)
        assert grove.read("b") == [[], []]
        assert not await is_filled(b, grove.document, "b")  # type: ignore[arg-type]
        b.add_topic("t-2")
        async with asyncio.timeout(20):
            await _until(lambda: distributor.waits is None and not any(distributor.fill))
        assert await is_filled(b, grove.document, "b")  # type: ignore[arg-type]
        assert grove.read("b") == [[b"0"], []]
        assert [record.value for record in b.partition("t-2", 0).records(True).values()] == [b"1"]
        for tasks in grove.running.values():
            await grove.stop(tasks)

    run_simulated(test())


def test_a_new_cluster_does_not_seem_to_have_all_when_a_topic_is_deleted_there() -> None:
    """Its brokers forget what it was given of that one, and all other topics are complete."""
    grove = Grove(0, True)
    a, b = grove.clusters["a"], grove.clusters["b"]
    added = {"b": {"by": "a", "version": 2}}
    grove.document = read_document(json.dumps({**written(grove.document), "version": 2, "added": added}))
    for cluster in (a, b):
        cluster.add_topic("t-2")

    async def filled() -> bool:
        return await is_filled(b, grove.document, "b")  # type: ignore[arg-type]

    async def delete(cluster: TransactingCluster) -> None:
        await cluster.delete_topic("t-2")
        for offsets in cluster.offsets.values():
            offsets.pop(("t-2", 0), None)

    async def test() -> None:
        a.partition(TOPIC, 0).write_values(b"0")
        a.partition("t-2", 0).write_values(b"1", b"x" * LARGE)
        b.found["t-2"].configs = {"max.message.bytes": str(LIMIT)}
        for name in ("a", "b"):
            grove.start(name, 4)
        distributor = grove.distributors["a", 4]
        async with asyncio.timeout(20):
            await _until(lambda: distributor.fill[0] == 1)
        assert not await filled()
        await delete(b)
        await asyncio.sleep(8)
        assert distributor.waits is not None
        assert not await filled()
        # Where it is not to have that topic at all, it has all others.
        await delete(a)
        async with asyncio.timeout(20):
            await _until(lambda: distributor.waits is None)
        await asyncio.sleep(2)
        assert await filled()
        assert grove.read("b") == [[b"0"], []]
        for tasks in grove.running.values():
            await grove.stop(tasks)

    run_simulated(test())


def test_a_new_cluster_that_has_all_keeps_that_itself() -> None:
    """Its brokers forget what it was given, if the cluster that fills it is away for a week."""
    grove = Grove(0, True)
    a, b = grove.clusters["a"], grove.clusters["b"]
    added = {"b": {"by": "a", "version": 2}}
    grove.document = read_document(json.dumps({**written(grove.document), "version": 2, "added": added}))

    async def filled(document: TreeDocument) -> bool:
        return await is_filled(b, document, "b")  # type: ignore[arg-type]

    async def test() -> None:
        a.partition(TOPIC, 0).write_values(b"0")
        for name in ("a", "b"):
            grove.start(name, 4)
        async with asyncio.timeout(20):
            await _until(lambda: bool(grove.read("b")[0]))
        await asyncio.sleep(10)
        await grove.stop(grove.running["a", 4])
        del b.offsets[given_group("a", 4)]
        assert await filled(grove.document)
        await grove.stop(grove.running["b", 4])
        grove.start("b", 4)
        await asyncio.sleep(10)
        assert await filled(grove.document)
        # Of a later life of it that says nothing.
        again = {"b": {"by": "a", "version": 3}}
        assert not await filled(read_document(json.dumps({**written(grove.document), "version": 3, "added": again})))
        await grove.stop(grove.running["b", 4])

    run_simulated(test())


def test_a_position_that_is_committed_again_keeps_its_leader_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where this cluster has not kept since how far it was read: else what was given would seem to be lost."""
    monkeypatch.setattr(distributor_module, "KEPT_AGAIN_S", 3.0)
    grove = Grove(0, True)
    log = grove.clusters["a"].partition(TOPIC)
    place = "a", 4

    async def test() -> None:
        log.write_values(b"0", b"1")
        grove.start(*place)
        grove.start("b", 4)
        async with asyncio.timeout(20):
            await _until(lambda: grove.read("b")[0] == [b"0", b"1"])
        await asyncio.sleep(3)  # settled, and kept
        log.move(log.leader)
        await asyncio.sleep(2)  # it reads on in the new epoch
        log.write_values(b"2", b"3")
        async with asyncio.timeout(20):
            await _until(lambda: len(grove.read("b")[0]) == 4, 0.001)
        await grove.stop(grove.running[place], killed=True)
        for seconds in (8, 3):
            grove.start(*place)
            await asyncio.sleep(seconds)
            assert grove.distributors[place].positions[TOPIC, 0] == log.end
            assert not grove.distributors[place].told
            await grove.stop(grove.running[place], killed=True)
        assert grove.read("b")[0] == [b"0", b"1", b"2", b"3"]
        await grove.stop(grove.running["b", 4])

    run_simulated(test())


@pytest.mark.parametrize("exactly_once", [True, False])
def test_a_switch_from_a_target_that_does_not_answer_waits_for_no_request(exactly_once: bool) -> None:
    """What is under way there takes as long as its request may, and it is asked for no longer than it is given up."""
    grove = Grove(0, exactly_once, "abc")
    log = grove.clusters["a"].partition(TOPIC)
    place = "a", 8

    async def test() -> None:
        for name in grove.clusters:
            for above in grove.document.tree.above(name):
                grove.start(name, above.level)
        former = grove.distributors[place].target
        other = "c" if former == "b" else "b"
        log.write_values(b"0")
        async with asyncio.timeout(20):
            await _until(lambda: all(grove.read(name)[0] == [b"0"] for name in "bc"))
        grove.clusters[former].silent = True
        log.write_values(b"1")
        await asyncio.sleep(0.1)  # it is being given
        grove.chosen[place] = other
        await asyncio.sleep(4)  # the one before is being asked
        grove.given_up = (8,)
        async with asyncio.timeout(12):
            await _until(lambda: b"1" in grove.read(other)[0])
        grove.clusters[former].silent = False
        async with asyncio.timeout(60):
            await _until(lambda: b"1" in grove.read(former)[0])
        for tasks in grove.running.values():
            await grove.stop(tasks)

    run_simulated(test())


@pytest.mark.parametrize("exactly_once", [True, False])
def test_a_switch_between_targets_that_answer_gives_nothing_twice(exactly_once: bool) -> None:
    """What is under way ends before."""
    grove = Grove(0, exactly_once, "abc")
    log = grove.clusters["a"].partition(TOPIC)

    async def test() -> None:
        for name in grove.clusters:
            for above in grove.document.tree.above(name):
                grove.start(name, above.level)
        for number in range(200):
            log.write_values(b"%d" % number)
            grove.chosen["a", 8] = "bc"[number // 50 % 2]
            await asyncio.sleep(0.05)
        async with asyncio.timeout(60):
            await _until(lambda: all({*grove.read(name)[0]} == {*grove.read("a")[0]} for name in "bc"))
        for name in "bc":
            assert grove.read(name)[0] == grove.read("a")[0]
        for tasks in grove.running.values():
            await grove.stop(tasks)

    run_simulated(test())


def test_a_target_that_stays_is_given_nothing_twice_where_the_one_before_is_given_up() -> None:
    """An operator says so once more, or no more: what is under way ends before it begins again."""
    grove = Grove(0, False, "abc")
    log = grove.clusters["a"].partition(TOPIC)

    async def test() -> None:
        for name in grove.clusters:
            for above in grove.document.tree.above(name):
                grove.start(name, above.level)
        for number in range(1_000):
            log.write_values(b"%d" % number)
            grove.given_up = (8,) if number >= 200 else ()
            await asyncio.sleep(0.01)
        async with asyncio.timeout(60):
            await _until(lambda: all({*grove.read(name)[0]} == {*grove.read("a")[0]} for name in "bc"))
        for name in "bc":
            assert grove.read(name)[0] == grove.read("a")[0]
        for tasks in grove.running.values():
            await grove.stop(tasks)

    run_simulated(test())


def test_a_target_that_is_given_up_and_answers_has_what_it_was_given_where_this_cluster_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This cluster's brokers are asked for where its log ends, and what they do not say is nothing that others lack."""
    grove = Grove(0, True, "abc")
    a = grove.clusters["a"]
    log, log_end = a.partition(TOPIC), a.log_end
    place = "a", 8
    asked = 0

    async def log_end_fails(topic: str, partition: int) -> int:
        nonlocal asked
        asked += partition == 0
        if asked == 2:  # first of what was read, then of what the target before was given
            raise BrokerUnavailable("no answer")
        return await log_end(topic, partition)

    async def test() -> None:
        for name in grove.clusters:
            grove.start(name, 8)
        former = grove.distributors[place].target
        other = "c" if former == "b" else "b"
        log.write_values(b"0", b"1")
        async with asyncio.timeout(20):
            await _until(lambda: grove.distributors[place].positions.get((TOPIC, 0)) == 2)
        monkeypatch.setattr(a, "log_end", log_end_fails)
        grove.chosen[place], grove.given_up = other, (8,)
        async with asyncio.timeout(20):
            await _until(lambda: grove.distributors[place].courses[TOPIC, 0].current.leaf == other)
        log.write_values(b"2")
        async with asyncio.timeout(20):
            await _until(lambda: b"2" in grove.read(other)[0])
        assert asked > 2
        for name in "bc":
            grove.start(name, 4)
        async with asyncio.timeout(60):
            await _until(grove.is_settled)
        assert all(sorted(grove.read(name)[0]) == [b"0", b"1", b"2"] for name in "bc")
        for tasks in grove.running.values():
            await grove.stop(tasks)

    run_simulated(test())


def test_positions_of_much_that_is_given_at_once_are_kept_at_once() -> None:
    """After an outage all that came meanwhile would be within the last tenth of a second."""
    grove = Grove(0, False)
    log = grove.clusters["a"].partition(TOPIC)
    values = [b"%d" % number for number in range(2_000)]
    place = "a", 4

    async def test() -> None:
        for first in range(0, len(values), 100):
            log.write_values(*values[first : first + 100])
        for name in grove.clusters:
            grove.start(name, 4)
        async with asyncio.timeout(20):
            await _until(lambda: len(grove.read("b")[0]) == len(values), 0.01)
        await asyncio.sleep(0.05)
        await grove.stop(grove.running[place], killed=True)
        grove.start(*place)
        await asyncio.sleep(5)
        assert grove.distributors[place].positions[TOPIC, 0] == log.end
        assert grove.read("b")[0] == values
        for tasks in grove.running.values():
            await grove.stop(tasks)

    run_simulated(test())
