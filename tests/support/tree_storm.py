"""A tree of three real clusters under random faults: processes are killed and stopped, clusters are away, the ways
between them are cut, stalled and slow, and another target is chosen meanwhile. For ``tests/faults``.

Each round does some harm, of which some lasts until all of it is healed; then every level goes on by itself. When it is
over, every message that was acked is on every cluster, as it was produced: at least once, and in exactly-once mode more
than once only where a target was given up, and only what was not known then to be on both clusters of its side.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from isthmus.kafka.transactional_producer import TIMEOUT_MS
from isthmus_bench.kafka import KafkaCluster, Security
from isthmus_bench.kafka.settings import properties_text
from isthmus_bench.proxies import ProxyProcess
from isthmus_plugins.distribution.kept import courses_group
from isthmus_plugins.distribution.tree import Subtree, Tree
from support import groups
from support.at_work import PARTITIONS, RECOVERY_S, AtWork, Held, Idempotent, Transactions, unmarked
from support.distributing import PLUGINS, Distributing, distributing
from support.equality import describe
from support.kafka import NOW_MS
from support.links import LEASE_S, Read, Side, sidecars, until, whole
from support.raw_log import read_log
from support.relay import Relay
from support.tree_proof import Proof
from support.wire import Wire

NAMES: Final = ("a", "b", "c")
LOW, HIGH = 4, 8
TREE: Final = Tree(1, Subtree(HIGH, (Subtree(LOW, ("a", "b")), "c")))
CHOOSES: Final = "c"
"""The cluster with two clusters on the other side, of which either may be its target."""
FROM_OTHERS: Final = "SASL_PLAINTEXT"
"""The brokers' listener for other clusters, which reach it through relays."""
ONE_BY_ONE: Final = {"max.in.flight": 1}
"""Of producers: of what each has sent, a broker that was killed, and leads again, knows the last batch alone."""
SETTLED_S: Final = 180.0
AFTER_A_LOSS_S: Final = RECOVERY_S + TIMEOUT_MS / 1000 + 15
"""A distributor of a cluster that is away may have left a transaction open, behind which nothing is read until the
target's brokers abort it: they look every ten seconds."""
FAULTY_MAX: Final = 3
"""So many records that are not as they should be are shown with what is around them."""
AROUND: Final = 60
"""Offsets before and behind."""
LACKED_MIN: Final = 50
"""So many offsets at least have not been passed on by a cluster when it is lost."""


def beside(value: bytes) -> dict[str, Any]:
    """What producers give each message beside its value."""
    number = int(value.rpartition(b"-")[2])
    key = None if number % 11 == 0 else b"key-%d" % (number % 7)
    return {"key": key, "headers": [("of", value), ("kept", b""), ("kept", None)], "timestamp": NOW_MS + number}


class Scene:
    """Three clusters of a tree, and the relays through which the others reach each."""

    def __init__(self, clusters: Distributing, relays: dict[str, list[Relay]]) -> None:
        self.clusters = clusters
        self.relays = relays

    @property
    def sides(self) -> dict[str, Side]:
        return self.clusters.sides

    def document(self, tree: Any, **more: Any) -> Path:
        """A version of the tree, of the clusters that are in it now."""
        reached = {
            name: {"cluster_id": side.kafka.cluster_id, "bootstrap_servers": side.kafka.bootstrap(FROM_OTHERS)}
            for name, side in self.sides.items()
        }
        return self.clusters.document(tree, clusters=reached, **more)


@contextmanager
def scene(of_two: str, directory: Path) -> Iterator[Scene]:
    """Clusters of one broker and one proxy, and one, ``of_two``, of two with a proxy each."""
    with ExitStack() as stack:
        clusters: dict[str, KafkaCluster] = {}
        relays: dict[str, list[Relay]] = {}
        for name in NAMES:
            relays[name] = [stack.enter_context(Relay()) for _ in range(2 if name == of_two else 1)]
            clusters[name] = kafka = stack.enter_context(
                KafkaCluster(
                    name=f"storm-{name}",
                    brokers=len(relays[name]),
                    listeners=("PLAINTEXT", FROM_OTHERS),
                    advertised_ports={FROM_OTHERS: tuple(_port(relay.address) for relay in relays[name])},
                    security=Security(users={"tree": "tree-secret"}),
                )
            )
            for relay, broker_id in zip(relays[name], kafka.broker_ids, strict=True):
                relay.target = kafka.spec.host, kafka.state.ports[broker_id][FROM_OTHERS]
            properties = kafka.client_properties(listener=FROM_OTHERS, mechanism="PLAIN")
            (directory / f"{name}.properties").write_text(properties_text(properties))
        settings = {**PLUGINS, "distribution": {"clients_directory": str(directory)}}
        proxies = {
            name: sidecars(kafka, **settings) if name == of_two else [whole(kafka, **settings)]
            for name, kafka in clusters.items()
        }
        yield Scene(stack.enter_context(distributing(clusters, proxies, directory)), relays)


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


class GivenUp(NamedTuple):
    """What a cluster may have given twice, as a target was given up: by partition of its own, from where to where."""

    start: dict[int, int]
    end: dict[int, int]


class TreeStorm(AtWork):
    """Producers at work on one topic at three clusters, and the log of what was done to them."""

    def __init__(self, scene: Scene, seed: int, exactly_once: bool) -> None:
        super().__init__(seed, [proxy for side in scene.sides.values() for proxy in side.proxies])
        self.scene = scene
        self.clusters = scene.clusters
        self.exactly_once = exactly_once
        self.given_up: list[GivenUp] = []
        self.doubled: Counter[str] = Counter()
        """By cluster, and whose they are: messages that it has more than once."""
        self.messages = 0
        self._asleep: set[ProxyProcess] = set()
        self._lost: dict[str, set[bytes]] = {}
        """Clusters that are gone for ever, with what they may have taken."""
        self.topic = self.clusters.create_topic(PARTITIONS)
        self.clusters.apply(scene.document([["a", "b"], "c"], exactly_once=exactly_once))
        self.clusters.wait_distributing()
        self.target = self.clusters.levels(CHOOSES)[HIGH]["target"]
        self.writers = [
            made(f"{name}-{made.__name__.lower()}", self.topic, side.bootstrap, beside, **ONE_BY_ONE)
            for name, side in self.sides.items()
            for made in (Idempotent, Transactions)
        ]

    @property
    def sides(self) -> dict[str, Side]:
        return self.clusters.sides

    def __exit__(self, *raised: Any) -> None:
        try:
            self._mend()
        finally:
            super().__exit__(*raised)

    # ---- what is ----

    def awake(self, name: str) -> list[ProxyProcess]:
        """A cluster's proxies that run, and are not stopped."""
        return [each for each in self.sides[name].proxies if each.running and each not in self._asleep]

    def has_brokers(self, name: str) -> bool:
        kafka = self.sides[name].kafka
        return all(kafka.alive(broker_id) for broker_id in kafka.broker_ids)

    @property
    def other_target(self) -> str:
        """The one that could be chosen in place of the target."""
        return next(each for each in NAMES if each not in (CHOOSES, self.target))

    def chooser(self) -> dict[str, Any]:
        """What is told of the level that may have another target."""
        return next(
            found
            for proxy in self.awake(CHOOSES)
            if (found := self.clusters.levels(CHOOSES, proxy)[HIGH])["state"] != "Elsewhere"
        )

    def positions(self) -> dict[tuple[str, int], int]:
        """By cluster and level: up to where all was given, of all partitions together."""
        return {
            (name, level): sum(each["position"] for each in status["partitions"])
            for name in self.sides
            for level, status in self.clusters.levels(name).items()
        }

    def is_well(self) -> bool:
        """Whether every level is distributed, as far as the proxies know."""
        told = [status for name in self.sides for status in self.clusters.levels(name).values()]
        return all(
            status["state"] == "Distributing"
            and len(status["partitions"]) == PARTITIONS
            and not any(each["left_out"] for each in status["partitions"])
            for status in told
        )

    # ---- rounds ----

    def round(self) -> None:
        """Some harm, one after the other; what lasts of it is healed, and every level goes on by itself."""
        for fault in self.random.choices(list(FAULTS), list(FAULTS.values()), k=self.random.choice((1, 1, 2, 3))):
            self.note(fault.__name__)
            fault(self)
            time.sleep(self.random.uniform(0, 1.5))
        self.recover()

    def recover(self, within_s: float = RECOVERY_S) -> None:
        """Heal all, and see that it is well."""
        self.heal()
        until("the tree is well again", self.is_well, within_s)
        before = until("it says how far it is", self.positions)
        until(
            "every level gives more",
            lambda: all(position > before[level] for level, position in self.positions().items()),
            within_s,
        )
        self.check_clients()
        sent = ", ".join(f"{writer.kind} {writer.written.sent}" for writer in self.writers)
        self.note(f"recovered; {CHOOSES} gives to {self.target}; {sent}")

    def heal(self) -> None:
        """Mend the ways, start what is dead, and let go on what is stopped."""
        self._mend()
        for side in self.sides.values():
            dead = [each for each in side.kafka.broker_ids if not side.kafka.alive(each)]
            if dead:
                side.kafka.start_brokers(dead)
        proxies = [proxy for side in self.sides.values() for proxy in side.proxies]
        for proxy in proxies:
            if not proxy.running:
                proxy.spawn()
        for proxy in proxies:
            proxy.wait_ready()

    def _mend(self) -> None:
        for relay in (relay for relays in self.scene.relays.values() for relay in relays):
            relay.mend()
            relay.cut_after(None)
            relay.release()
            relay.delay_s = 0.0
        for proxy in self._asleep:
            if proxy.running:
                proxy.resume()
        self._asleep.clear()

    # ---- harm ----

    def kill(self, proxy: ProxyProcess) -> None:
        self._asleep.discard(proxy)
        proxy.kill()

    def spawn(self, name: str, proxy: ProxyProcess) -> None:
        """Start a proxy again, if its brokers are there; else it is started when all is healed."""
        if self.has_brokers(name):
            proxy.spawn()

    def stop(self, proxy: ProxyProcess) -> None:
        proxy.pause()
        self._asleep.add(proxy)

    def go_on(self, proxy: ProxyProcess) -> None:
        self._asleep.discard(proxy)
        proxy.resume()

    def take_away(self, name: str) -> None:
        """A cluster with all that it has."""
        side = self.sides[name]
        for proxy in side.proxies:
            self.kill(proxy)
        for broker_id in side.kafka.broker_ids:
            if side.kafka.alive(broker_id):
                side.kafka.kill(broker_id)

    def cut(self, name: str) -> None:
        """Other clusters do not reach this one."""
        for relay in self.scene.relays[name]:
            relay.cut(refuse=True)

    # ---- targets ----

    def choose(self, leaf: str, *more: str) -> None:
        """Have the level that may write to either write to this one."""
        arguments = "tree", "target", CHOOSES, str(HIGH), leaf, *more
        until("it is chosen", lambda: self.awake(CHOOSES)[0].cli(*arguments))
        self.target = leaf
        self.note(f"isthmus {' '.join(arguments)}")

    def gives_to(self, leaf: str) -> None:
        """Wait until the level writes to this one, and has given it something."""

        def position() -> int | None:
            status = self.chooser()
            ready = (status["target"], status["state"]) == (leaf, "Distributing")
            return sum(each["position"] for each in status["partitions"]) if ready else None

        before: int = until(f"it writes to {leaf}", position, RECOVERY_S)
        until(f"{leaf} gets more", lambda: (position() or 0) > before, AFTER_A_LOSS_S)

    @contextmanager
    def giving_up(self) -> Iterator[None]:
        """What is given here to another target, in place of one that is given up, may be given twice."""
        side = self.sides[CHOOSES]
        kept = groups.offsets(side, courses_group(HIGH))
        start = {partition: kept[self.topic, partition] for partition in range(PARTITIONS)}
        yield
        end = {partition: side.end(self.topic, partition) for partition in range(PARTITIONS)}
        self.given_up.append(GivenUp(start, end))

    # ---- the end ----

    def lose_the_target(self) -> None:
        """It is gone for ever, with messages that it has not passed on: its proxies die first. It is taken out of the
        tree, at times after another target was chosen."""
        gone, left = self.target, self.other_target
        self.stop_writers([each for each in self.writers if each.kind.startswith(f"{gone}-")])
        for proxy in self.sides[gone].proxies:
            self.kill(proxy)

        def lacked() -> int:
            """Offsets that the others would not get from it."""
            return sum(each["position"] - each["settled"] for each in self.chooser()["partitions"])

        until("it has what it has not passed on", lambda: lacked() > LACKED_MIN)
        self.sides.pop(gone).kafka.stop()
        self.note(f"{gone} is lost")
        self._lost[gone] = {
            value
            for writer in self.writers
            if writer.kind.startswith(f"{gone}-")
            for value in map(writer.value, range(writer.written.sent))
        } - {
            value
            for writer in self.writers
            if isinstance(writer, Transactions)
            for values in writer.aborted
            for value in values
        }
        with self.giving_up():
            if self.random.random() < 0.5:
                self.choose(left, "--give-up")
                self.gives_to(left)
            file = self.scene.document([left, CHOOSES], version=2, exactly_once=self.exactly_once)
            for name in (CHOOSES, left):
                until(
                    "it is applied", lambda name=name: self.awake(name)[0].cli("tree", "apply", str(file), "--give-up")
                )
            self.note(f"version 2 of the tree, without {gone}")
            self.target = left
            self.gives_to(left)
        self.recover(AFTER_A_LOSS_S)

    def finish(self) -> None:
        """Stop the producers, wait until everything is given and settled, and look at all that is there."""
        self.stop_writers([each for each in self.writers if each.is_alive()])
        self.heal()
        until("the tree is well", self.is_well, RECOVERY_S)
        self.clusters.wait_settled(self.topic, SETTLED_S)
        self.check_clients()
        proof = Proof(TREE, beside)
        for name in self.sides:
            own = [
                proof.read(name, partition, part) for partition, part in enumerate(self._read(name, "read_committed"))
            ]
            held = Held.of(self.sides[name].kafka, self._read(name, "read_uncommitted"), own)
            for writer in self.writers:
                if writer.kind.startswith(f"{name}-"):
                    try:
                        writer.check(held)
                    except AssertionError as error:
                        error.add_note(self._around(name, getattr(writer, "wrong", [])))
                        raise
        self.messages = sum(map(len, proof.own.values()))
        doubled = list(proof.doubled())
        self.doubled.update(f"{cluster}: {value.rpartition(b'-')[0].decode()}" for cluster, value in doubled)
        found = proof.faults([each for each in NAMES if each != CHOOSES], self._lost)
        left = f"without markers: { {name: dict(unmarked(side.kafka)) for name, side in self.sides.items()} }"
        assert not found, "\n".join((*found, left))
        if self.exactly_once:
            wrong = [(cluster, value) for cluster, value in doubled if not self._may_be_doubled(proof, value)]
            assert not wrong, f"{len(wrong)} messages are there twice, such as {wrong[:5]}; {left}"

    def _around(self, name: str, places: Sequence[tuple[int, int]]) -> str:
        """What a cluster's logs have around some partitions and offsets: markers are no records, and say more."""
        said = []
        with Wire(self.sides[name].kafka.bootstrap_servers.split(",")[0]) as wire:
            for partition, offset in places[:FAULTY_MAX]:
                log = read_log(wire, self.topic, partition, committed=True, offset=max(0, offset - AROUND))
                near = tuple(each for each in log.batches if each.header.base_offset < offset + AROUND)
                said.append(f"{name} {partition}:\n{describe(near)}\naborted (producer, first): {log.aborted[-5:]}")
        return "\n".join(said)

    def _read(self, name: str, isolation: str) -> Iterator[list[Read]]:
        """A cluster's partitions, one after the other."""
        for partition in range(PARTITIONS):
            yield self.sides[name].read(self.topic, partition, direct=True, timeout_s=SETTLED_S, isolation=isolation)

    def _may_be_doubled(self, proof: Proof, value: bytes) -> bool:
        place = proof.own[CHOOSES].get(value)
        return place is not None and any(
            each.start[place.partition] <= place.offset < each.end[place.partition] for each in self.given_up
        )


# ---- faults ----

Fault = Callable[[TreeStorm], None]


def _awake(storm: TreeStorm) -> tuple[str, ProxyProcess] | None:
    """Any proxy that runs."""
    found = [(name, proxy) for name in storm.sides for proxy in storm.awake(name)]
    return storm.random.choice(found) if found else None


def kill_a_proxy(storm: TreeStorm) -> None:
    """At times its lease is over before the next one starts."""
    if (found := _awake(storm)) is not None:
        name, proxy = found
        storm.kill(proxy)
        time.sleep(storm.random.choice((0.0, 0.5, LEASE_S + 2)))
        storm.spawn(name, proxy)
        storm.note(f"  of {name}")


def kill_a_proxy_for_long(storm: TreeStorm) -> None:
    if (found := _awake(storm)) is not None:
        storm.kill(found[1])
        storm.note(f"  of {found[0]}")


def kill_all_proxies(storm: TreeStorm) -> None:
    proxies = [(name, proxy) for name in storm.sides for proxy in storm.awake(name)]
    for _, proxy in proxies:
        storm.kill(proxy)
    for name, proxy in proxies:
        storm.spawn(name, proxy)


def stop_a_proxy(storm: TreeStorm) -> None:
    """Beyond its lease or not: another one has its levels meanwhile, if there is one."""
    if (found := _awake(storm)) is not None:
        storm.stop(found[1])
        time.sleep(storm.random.uniform(0.1, 2.5 * LEASE_S))
        storm.note(f"  of {found[0]}")
        if storm.random.random() < 0.7:
            storm.go_on(found[1])


def kill_a_broker(storm: TreeStorm) -> None:
    name = storm.random.choice(NAMES)
    kafka = storm.sides[name].kafka
    if storm.has_brokers(name):
        broker_id = storm.random.choice(kafka.broker_ids)
        kafka.kill(broker_id)
        time.sleep(storm.random.choice((0.0, 1.0)))
        kafka.start_broker(broker_id)
        storm.note(f"  {broker_id} of {name}")


def stop_a_broker(storm: TreeStorm) -> None:
    name = storm.random.choice(NAMES)
    kafka = storm.sides[name].kafka
    if storm.has_brokers(name):
        broker_id = storm.random.choice(kafka.broker_ids)
        kafka.pause(broker_id)
        time.sleep(storm.random.uniform(0.1, 4))
        kafka.resume(broker_id)
        storm.note(f"  {broker_id} of {name}")


def take_a_cluster_away(storm: TreeStorm) -> None:
    name = storm.random.choice(NAMES)
    storm.take_away(name)
    storm.note(f"  {name}")
    time.sleep(storm.random.uniform(0, 6))


def cut_the_way(storm: TreeStorm) -> None:
    name = storm.random.choice(NAMES)
    storm.cut(name)
    storm.note(f"  to {name}")
    time.sleep(storm.random.uniform(0, 6))
    if storm.random.random() < 0.5:
        for relay in storm.scene.relays[name]:
            relay.mend()


def cut_in_the_middle(storm: TreeStorm) -> None:
    name = storm.random.choice(NAMES)
    storm.note(f"  of what goes to {name}")
    for _ in range(storm.random.randint(1, 6)):
        storm.random.choice(storm.scene.relays[name]).cut_after(storm.random.choice((1, 40, 100, 1000, 5000, 20_000)))
        time.sleep(storm.random.choice((0.0, 0.1, 0.7)))


def stall_and_deliver_late(storm: TreeStorm) -> None:
    """What is on its way to a cluster stays there, or its answers do; new connections work."""
    name, one_way = storm.random.choice(NAMES), storm.random.random() < 0.5
    storm.note(f"  {'what comes from' if one_way else 'what goes to and comes from'} {name}")
    for relay in storm.scene.relays[name]:
        relay.stall(one_way)
    time.sleep(storm.random.choice((0.5, 4.0, 12.0)))
    for relay in storm.scene.relays[name]:
        relay.release()


def deliver_late_from_the_dead(storm: TreeStorm) -> None:
    """What proxies had sent when they died arrives when they, or others, distribute again."""
    name = storm.random.choice(NAMES)
    storm.note(f"  to {name}")
    for relay in storm.scene.relays[name]:
        relay.stall()
    time.sleep(storm.random.uniform(0.05, 0.5))
    others = [(each, proxy) for each in storm.sides if each != name for proxy in storm.awake(each)]
    for _, proxy in others:
        storm.kill(proxy)
    for each, proxy in others:
        storm.spawn(each, proxy)
    time.sleep(storm.random.uniform(1, 6))
    for relay in storm.scene.relays[name]:
        relay.release()


def slow_way(storm: TreeStorm) -> None:
    name = storm.random.choice(NAMES)
    storm.note(f"  to {name}")
    for relay in storm.scene.relays[name]:
        relay.delay_s = storm.random.uniform(0.005, 0.1)
    time.sleep(storm.random.uniform(0.5, 3))


def switch_the_target(storm: TreeStorm) -> None:
    """Once or several times, whatever else is going on; whom it has written to may be away."""
    for _ in range(storm.random.choice((1, 1, 2, 3))):
        if storm.has_brokers(CHOOSES) and storm.awake(CHOOSES):
            storm.choose(storm.other_target)
            time.sleep(storm.random.choice((0.0, 0.5, 2.0)))


def switch_from_one_that_is_away(storm: TreeStorm) -> None:
    """It is waited for, or given up; then it is back, and may be chosen before."""
    storm.recover()
    away, other = storm.target, storm.other_target
    storm.random.choice((storm.take_away, storm.cut))(away)
    time.sleep(storm.random.uniform(0, 3))
    if storm.random.random() < 0.5:
        storm.choose(other)
        until("it waits", lambda: storm.chooser()["reason_code"] == "FORMER_TARGET_UNREACHABLE", RECOVERY_S)
    else:
        with storm.giving_up():
            storm.choose(other, "--give-up")
            storm.gives_to(other)
    if storm.random.random() < 0.3:
        storm.choose(away)
        time.sleep(storm.random.uniform(0, 3))


FAULTS: Final[dict[Fault, int]] = {
    kill_a_proxy: 4,
    kill_a_proxy_for_long: 2,
    kill_all_proxies: 2,
    stop_a_proxy: 4,
    kill_a_broker: 3,
    stop_a_broker: 2,
    take_a_cluster_away: 2,
    cut_the_way: 2,
    cut_in_the_middle: 3,
    stall_and_deliver_late: 3,
    deliver_late_from_the_dead: 3,
    slow_way: 1,
    switch_the_target: 4,
    switch_from_one_that_is_away: 3,
}
"""How often each comes, against the others."""
