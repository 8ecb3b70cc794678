"""A seeded simulation of a control topic that loses its end, is written over, made again, repaired and accepted.

Readers apply it, each as far as it got, and keep anchors. After every event:

- an anchor fits the log if and only if the log has what its maker had applied, or an operator has accepted it since;
- no reader applies a record behind something that it did not apply: the leader tells it by the epoch that it read last;
- an anchor of one reader is the anchor of all that have applied as much, wherever they began to read.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import count

import pytest
from support.seeds import quarters

from isthmus_control import anchors
from isthmus_control.anchors import Anchor, LogFacts, LogRecord, RecentRecords, digest, why_lost, window_start

STEPS = 250
READERS = 3


@dataclass
class Kept:
    """An anchor, and all that its maker had applied by then."""

    anchor: Anchor
    history: tuple[LogRecord, ...]


@dataclass
class Reader:
    """``applied``: everything, which no proxy remembers; ``began``: where it began to read."""

    topic_id: str
    began: int
    applied: list[LogRecord]
    recent: RecentRecords
    lost: bool = False


@dataclass
class World:
    random: random.Random
    topic_id: str = "topic-0"
    log: list[LogRecord] = field(default_factory=list)
    epoch: int = 0
    start: int = 0
    """Where the log begins: what is below was deleted."""
    names: count[int] = field(default_factory=count)
    readers: list[Reader] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)

    # --- the log and its leader

    @property
    def generation(self) -> int:
        """Of the last acceptance in the log, which may be lost as any record."""
        found = (int(each.value[1:]) for each in self.log if each.value is not None and each.value.startswith(b"a"))
        return max(found, default=0)

    def write(self) -> None:
        for _ in range(self.random.randint(1, 6)):
            self.log.append(LogRecord(len(self.log), b"%d" % next(self.names), self.epoch))

    def epoch_end(self, epoch: int) -> int:
        """Where the largest epoch up to this one ends, if it is this one; else 0."""
        found = [record.offset + 1 for record in self.log if record.leader_epoch == epoch]
        return max(found, default=0)

    def fetch(self, offset: int, read_epoch: int) -> list[LogRecord] | None:
        """As a leader answers; None: its log is another one."""
        if read_epoch >= 0 and self.epoch_end(read_epoch) < offset:
            return None
        return self.log[offset : offset + self.random.randint(1, 9)] if offset <= len(self.log) else None

    def facts(self, anchor: Anchor) -> LogFacts:
        first = window_start(anchor.offset)
        known = None
        if self.start <= first and anchor.offset < len(self.log):
            known = digest(self.log[first : anchor.offset + 1])
        return LogFacts(self.topic_id, self.generation, len(self.log), known, self.epoch_end(anchor.leader_epoch))

    # --- proxies

    def begin(self) -> Reader:
        """A proxy starts: it reads from some record on, behind a snapshot."""
        begun = self.random.randint(self.start, len(self.log)) if self.log else 0
        reader = Reader(self.topic_id, begun, list(self.log[:begun]), RecentRecords())
        for record in self.log[max(self.start, window_start(max(begun - 1, 0))) : begun]:
            reader.recent.add(record)
        return reader

    def read(self, reader: Reader) -> None:
        if reader.lost or reader.topic_id != self.topic_id:
            reader.lost = True
            return
        last = reader.recent.last
        found = self.fetch(len(reader.applied), -1 if last is None else last.leader_epoch)
        if found is None:
            reader.lost = True
            self.seen.add("seen by a reader")
            return
        for record in found:
            assert reader.applied == self.log[: len(reader.applied)], "applied behind what it did not apply"
            reader.applied.append(record)
            reader.recent.add(record)

    def keep(self, reader: Reader) -> None:
        found = (int(each.value[1:]) for each in reader.applied if each.value and each.value.startswith(b"a"))
        anchor = reader.recent.anchor("A", reader.topic_id, max(found, default=0))
        if anchor is None or reader.lost or reader.applied != self.log[: len(reader.applied)]:
            return
        for other in self.kept:
            if other.anchor.offset == anchor.offset and other.history == tuple(reader.applied):
                assert anchor.digest == other.anchor.digest
        self.kept.append(Kept(anchor, tuple(reader.applied)))
        self.kept = self.kept[-20:]

    # --- what happens to the topic

    def lose_power(self) -> None:
        cut = self.random.randint(0, min(12, len(self.log) - self.start))
        del self.log[len(self.log) - cut :]
        self.epoch += 1

    def replaced(self) -> None:
        self.topic_id = f"topic-{next(self.names)}"
        self.log.clear()
        self.epoch = self.start = 0

    def repair(self) -> None:
        """From what the reader that got farthest remembers, where nothing was written in its place."""
        best = max(self.readers, key=lambda each: len(each.applied))
        if best.topic_id == self.topic_id and best.applied[: len(self.log)] == self.log:
            for record in best.applied[len(self.log) :]:
                self.log.append(record._replace(leader_epoch=self.epoch))
                self.seen.add("repaired")

    def accept(self) -> None:
        known = max((each.anchor.generation for each in self.kept), default=0)
        generation = 1 + max(known, self.generation)
        self.log.append(LogRecord(len(self.log), b"a%d" % generation, self.epoch))
        self.readers = [each for each in self.readers if not each.lost]
        self.seen.add("accepted")

    def trim(self) -> None:
        self.start = max(self.start, len(self.log) - 3 * anchors.WINDOW)

    def check(self) -> None:
        for kept in self.kept:
            anchor = kept.anchor
            found = why_lost(anchor, self.facts(anchor), "x")
            if anchor.generation < self.generation:
                assert found is None
                continue
            same = [(each.offset, each.value) for each in kept.history] == [
                (each.offset, each.value) for each in self.log[: len(kept.history)]
            ]
            intact = anchor.topic_id == self.topic_id and same and anchor.generation == self.generation
            if found is None:
                assert intact, f"{anchor} fits a log that is another one"
            elif intact:
                # What was repaired and then deleted behind a snapshot can be compared with nothing any more.
                assert self.start > window_start(anchor.offset), f"{found} of {anchor}, which fits"
            if found is not None:
                self.seen.add(found.reason)

    def step(self) -> None:
        while len(self.readers) < READERS:
            self.readers.append(self.begin())
        event = self.random.random()
        reader = self.random.choice(self.readers)
        if event < 0.35:
            self.write()
        elif event < 0.70:
            self.read(reader)
        elif event < 0.85:
            self.keep(reader)
        elif event < 0.88:
            self.lose_power()
        elif event < 0.90:
            self.repair()
        elif event < 0.93:
            self.accept()
        elif event < 0.95:
            self.trim()
        elif event < 0.96:
            self.replaced()
        elif event < 0.98:
            self.epoch += 1
        else:
            self.readers.remove(reader)
        self.check()


def run(seed: int) -> World:
    world = World(random.Random(seed))
    for _ in range(STEPS):
        world.step()
    return world


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(anchors, "WINDOW", 8)


@pytest.mark.parametrize("seed", quarters(range(25)))
def test_anchors_fit_the_log_that_they_are_of_and_no_other(seed: int) -> None:
    run(seed)


def test_the_simulation_reaches_what_it_is_about() -> None:
    seen: set[str] = set()
    for seed in range(20):
        seen |= run(seed).seen
    assert seen >= {
        anchors.LOG_CUT,
        anchors.LOG_REWRITTEN,
        anchors.TOPIC_REPLACED,
        "seen by a reader",
        "repaired",
        "accepted",
    }
