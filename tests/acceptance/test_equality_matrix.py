"""Equality, whatever the source's log holds: compression x writers x compaction x timestamps x log start x versions.

Every case is a topic written by real producers, cleaned by a real log cleaner, its head deleted by DeleteRecords. All
are made first, then followed. Raw batches from both sides, what read_committed and read_uncommitted consumers see,
and the logs' limits have to be equal by the definition of docs/operations.md: once when the backlog is copied, and
again when more was written and the open transactions were ended.

``make test`` runs those of a pairwise selection that two versions of brokers have, ``make test-matrix``
(ISTHMUS_MATRIX=full) the full product.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final

import pytest
from support import raw_log
from support.equality import assert_equal, describe, was_cleaned
from support.kafka import Clusters, unique
from support.links import VERIFICATION, Read, Side, read_all, until, whole
from support.pairwise import Row, pairwise, product
from support.raw_log import RawLog
from support.source_topics import SourceTopic
from support.wire import Wire

from isthmus_bench.kafka import DEFAULT_VERSION

FULL: Final = os.environ.get("ISTHMUS_MATRIX") == "full"
VERSIONS: Final = ("3.9.2", "4.1.1", DEFAULT_VERSION)
DIMENSIONS: Final = {
    "compression": ("none", "gzip", "snappy", "lz4", "zstd"),
    "writers": ("plain", "idempotent", "committed", "aborted", "open", "interleaved", "kip890"),
    "cleanup": ("delete", "compact", "compact,delete"),
    "append_time": (False, True),
    "head": (False, True),
    "source": VERSIONS,
    "target": VERSIONS,
}
FOLLOW_S: Final = 600.0 if FULL else 60.0
ENDED: Final = ("Stopped", "Refused", "Diverged")

pytestmark = [pytest.mark.brokers, pytest.mark.timeout(7200 if FULL else 300)]


def possible(row: Row) -> bool:
    """Two clusters of one version are started for the full product only, but for the newest version."""
    return FULL or row["source"] != row["target"] or row["source"] == DEFAULT_VERSION


def name_of(row: Row) -> str:
    words = [row["compression"], row["writers"], row["cleanup"].replace(",", "+")]
    words += [word for word, given in (("append-time", row["append_time"]), ("head", row["head"])) if given]
    return "-".join([*words, row["source"], "to", row["target"]])


ROWS: Final = product(DIMENSIONS) if FULL else pairwise(DIMENSIONS, possible)
GROUPS: Final[dict[str, list[Row]]] = defaultdict(list)
"""Cases that are made, copied and compared together: those of two versions, of a selection in either direction."""
for _row in ROWS:
    _versions = _row["source"], _row["target"]
    GROUPS["-to-".join(_versions) if FULL else " and ".join(sorted(_versions))].append(_row)
CASES: Final = [
    pytest.param(
        group,
        name_of(row),
        id=name_of(row),
        marks=pytest.mark.one_in_ci("matrix", of="versions of the equality matrix", case=group),
    )
    for group, rows in GROUPS.items()
    for row in rows
]


@dataclass
class Seen:
    """One side's topic: its raw log, and what consumers read of it."""

    log: RawLog
    committed: list[Read]
    uncommitted: list[Read]


@dataclass
class Case:
    """One cell of the matrix."""

    topic: SourceTopic
    follower: str
    target: Side
    link: str
    failure: str | None = None
    """Why nothing can be compared."""
    snapshots: list[tuple[Seen, Seen]] = field(default_factory=list)
    """Source and follower, each time that everything was copied."""

    def settled(self, wire: Wire, found: dict[str, Any] | None) -> bool:
        """Whether the follower, of which its proxy tells ``found``, has all of it, or goes no further."""
        if found is None:
            return False
        if found["state"] in ENDED:
            self.failure = f"{found['state']}: {found['reason']}: {found['message']}"
            return True
        end = int(raw_log.fetch(wire, self.topic.name, raw_log.log_start(wire, self.topic.name)).high_watermark)
        return bool(found["state"] == "Following" and found["follower_end"] == end)


class Matrix:
    """The cases of a group: clusters, proxies, links and topics."""

    def __init__(self, stack: ExitStack, clusters: Clusters, rows: Sequence[Row]) -> None:
        self._stack = stack
        self._clusters = clusters
        self._rows = rows
        self.sides: dict[tuple[str, str], Side] = {}
        self.cases: dict[str, Case] = {}
        self.verdicts: dict[str, bool] = {}
        """By source topic: whether ``isthmus verify`` finds the follower equal."""
        self._links: dict[tuple[str, str], tuple[str, str]] = {}

    def build(self) -> None:
        for row in self._rows:
            source, target = self._side("source", row["source"]), self._side("target", row["target"])
            versions = row["source"], row["target"]
            link, prefix = self._links.setdefault(versions, (unique("matrix-"), unique("matrix-") + "-"))
            topic = SourceTopic(
                source,
                prefix + name_of(row).replace("+", "."),
                row["writers"],
                row["compression"],
                row["cleanup"],
                row["append_time"],
                row["head"],
            )
            follower = "of-" + topic.name
            self.cases[name_of(row)] = Case(topic, follower, target, link)
        self._each(lambda case: case.topic.make())
        self._each(lambda case: case.topic.wait_cleaned() if case.topic.compacted else None)
        for (source_version, target_version), (link, prefix) in self._links.items():
            source, target = self._side("source", source_version), self._side("target", target_version)
            source.proxy.cli("link", "create", link, "--remote", target.proxy.link_address)
            source.proxy.cli("link", "attach", link, "--local", prefix, "--remote", "of-" + prefix, "--role", "leader")
        self.snapshot()
        self._each(lambda case: (case.topic.more(), case.topic.end_open(commit="gzip" in case.topic.name)))
        self.snapshot()
        self.verdicts = self._verify()

    def _each(self, work: Any) -> None:
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(work, [case for case in self.cases.values() if case.failure is None]))

    def _side(self, role: str, version: str) -> Side:
        if not FULL and version != DEFAULT_VERSION:
            role = "source"  # one cluster for both, linked with others only
        if (role, version) not in self.sides:
            chosen: dict[str, str] = {} if version == DEFAULT_VERSION else {"version": version}
            side = Side(self._clusters(role=role, **chosen), [])
            side.alter_brokers({"log.cleaner.backoff.ms": "200", VERIFICATION: "false"})
            self._stack.callback(side.alter_brokers, {"log.cleaner.backoff.ms": None, VERIFICATION: None})
            side.proxies.append(self._stack.enter_context(whole(side.kafka, proxy={"drain_timeout_s": 0.5})))
            self.sides[role, version] = side
        return self.sides[role, version]

    def snapshot(self) -> None:
        """Wait until everything is copied, then read both sides."""
        waiting = [case for case in self.cases.values() if case.failure is None]

        wires: dict[Side, Wire] = {}

        def settled() -> bool:
            told = {
                (target, link): {each["topic"]: each for each in target.partitions(link)}
                for target, link in {(case.target, case.link) for case in waiting}
            }
            waiting[:] = [
                case
                for case in waiting
                if not case.settled(wires[case.topic.side], told[case.target, case.link].get(case.follower))
            ]
            return not waiting

        try:
            with ExitStack() as stack:
                for side in {case.topic.side for case in waiting}:
                    wires[side] = stack.enter_context(Wire(side.kafka.bootstrap_servers))
                until("everything is copied", settled, FOLLOW_S, 0.3)
        except AssertionError:
            for case in waiting:
                case.failure = f"not copied: {case.target.partition(case.link, case.follower)}"
        followed = [case for case in self.cases.values() if case.failure is None]
        wanted: dict[Side, list[str]] = defaultdict(list)
        for case in followed:
            wanted[case.topic.side].append(case.topic.name)
            wanted[case.target].append(case.follower)
        seen = {side: look(side, names) for side, names in wanted.items()}
        for case in followed:
            case.snapshots.append((seen[case.topic.side][case.topic.name], seen[case.target][case.follower]))

    def _verify(self) -> dict[str, bool]:
        return {
            each["topic"]: each["equal"]
            for (source_version, _), (link, _) in self._links.items()
            for each in self._side("source", source_version).proxy.cli("verify", link, check=False)["partitions"]
        }

    def delete(self) -> None:
        """Delete the links, and, as the next group comes, the topics."""
        for (source_version, _), (link, _) in self._links.items():
            self._side("source", source_version).proxy.cli("link", "delete", link)
        for side in self.sides.values() if FULL else ():
            names = {case.topic.name for case in self.cases.values() if case.topic.side is side}
            names |= {case.follower for case in self.cases.values() if case.target is side}
            for deleted in side.admin(direct=True).delete_topics(sorted(names & side.topics().keys())).values():
                deleted.result(30)


def look(side: Side, names: Sequence[str]) -> dict[str, Seen]:
    """Topics as the brokers themselves have them."""
    committed = read_all(side.kafka.bootstrap_servers, names, "read_committed")
    uncommitted = read_all(side.kafka.bootstrap_servers, names, "read_uncommitted")
    with Wire(side.kafka.bootstrap_servers) as wire:
        return {name: Seen(raw_log.read_log(wire, name), committed[name], uncommitted[name]) for name in names}


Matrices = Callable[[str], Matrix]


@pytest.fixture(scope="module")
def matrices(shared_kafka: Clusters) -> Iterator[Matrices]:
    """Takes a group's name; one group is there at a time."""
    built: dict[str, Matrix] = {}
    with ExitStack() as stack:

        def matrix(group: str) -> Matrix:
            if group not in built:
                stack.close()
                built.clear()
                built[group] = Matrix(stack, shared_kafka, GROUPS[group])
                built[group].build()
                stack.callback(built[group].delete)
            return built[group]

        yield matrix


def timed(reads: Sequence[Read]) -> list[Read]:
    """Without the timestamps' type: that of a follower is CreateTime, its times are the source's."""
    return [read._replace(timestamp=(0, read.timestamp[1])) for read in reads]


@pytest.mark.parametrize(("group", "name"), CASES)
def test_the_follower_equals_its_source(matrices: Matrices, group: str, name: str) -> None:
    matrix = matrices(group)
    case = matrix.cases[name]
    assert case.failure is None, case.failure
    assert len(case.snapshots) == 2
    for source, follower in case.snapshots:
        try:
            copied = assert_equal(source.log, follower.log, cleaned=case.topic.compacted)
            assert timed(follower.uncommitted) == timed(source.uncommitted)
            assert timed(follower.committed) == timed(source.committed)
        except AssertionError:
            print("source:", describe(source.log.batches), "follower:", describe(follower.log.batches), sep="\n")
            raise
        assert copied.records > 0
        if case.topic.compacted:
            assert was_cleaned(source.log)
        elif not case.topic.append_time:
            assert copied.whole_batches > 1
        assert (source.log.start > 0) is case.topic.head
    assert matrix.verdicts[case.topic.name], "isthmus verify finds a difference"
