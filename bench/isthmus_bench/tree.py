"""What distribution over a tree does, measured beside MirrorMaker 2 on the same two clusters, in one run.

The contest is that of :mod:`isthmus_bench.replicate`: a backlog that is caught up, then the lag at several rates. The
contestants are a tree of the two clusters, exactly once (positions and records in one transaction) and at least once,
and MirrorMaker 2 tuned. The proxy that distributes has one core; MirrorMaker has all. Consumers of B read what is
committed.

Then what the header costs that every record is given: batches taken apart as a distributor does it, and the same by way
of objects, in this process alone.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from isthmus_bench import replicate
from isthmus_bench.command import python_build
from isthmus_bench.contestants import TREE, TREE_AT_LEAST_ONCE, TUNED, Say
from isthmus_bench.kafka import DEFAULT_VERSION
from isthmus_bench.load import batch
from isthmus_bench.replicate import Contest, Turn, Verdict, catch_up_figures, lag_figures
from isthmus_plugins.distribution.copies import Copies
from isthmus_plugins.distribution.copy_flags import HEADER_NAME, bit, write_flags
from isthmus_plugins.distribution.positions import Course, Stretch, Term
from isthmus_protocol.record_codec import decode_records, encode_batch
from isthmus_protocol.records import PLAIN_HEADER, Compression, Frame, whole_header

RECORDS_PER_S_MIN: Final = 50_000.0
"""Of 1 KB, at least once, with one core."""
OF_TUNED_MIN: Final = 2.0
"""Or so many times what MirrorMaker does."""
LAG_P50_MAX_MS: Final = 20.0
LEVEL: Final = 1
COURSE: Final = Course((Stretch(Term(1, 0), "b", 0, 0),))


@dataclass(frozen=True, slots=True)
class Plan:
    """How much to measure."""

    contest: replicate.Plan
    header_s: float = 0.5
    """For each figure of what the header costs."""

    @classmethod
    def usual(cls, version: str = DEFAULT_VERSION) -> Plan:
        """About five minutes."""
        contest = replicate.Plan(
            version,
            rounds=3,
            contestants=(TREE, TREE_AT_LEAST_ONCE, TUNED),
            backlog_mb=256,
            idle_partitions=0,
            small_brokers=(),
        )
        return cls(contest)

    @classmethod
    def quick(cls, version: str) -> Plan:
        """To see that it works; the figures mean nothing."""
        contest = replicate.Plan(
            version,
            rounds=1,
            contestants=(TREE, TREE_AT_LEAST_ONCE, TUNED),
            backlog_mb=16,
            rates=(500,),
            settle_s=0.2,
            lag_s=0.5,
            idle_partitions=0,
            small_brokers=(),
        )
        return cls(contest, header_s=0.02)


@dataclass(frozen=True, slots=True)
class HeaderCost:
    """What it takes to give each record of a batch its header: µs of CPU a record."""

    compression: str
    records: int
    """Of 1 KB each, in a batch."""
    apart_us: float
    """As a distributor does it: lengths are read, and the rest is copied."""
    objects_us: float
    """By way of an object for each record."""


@dataclass(frozen=True, slots=True)
class Report(Contest):
    """One run."""

    header: list[HeaderCost]
    verdicts: list[Verdict] = field(default_factory=list)


def run(plan: Plan, say: Say) -> Report:
    """Measure. Progress goes to ``say``. Raises what :func:`isthmus_bench.replicate.run` raises."""
    contest = plan.contest
    turns, _ = replicate.run_contest(contest, say)
    say("what the header costs")
    header = [
        header_cost(compression, records, plan.header_s)
        for compression in Compression
        for records in (replicate.RECORDS, 10 * replicate.RECORDS)
    ]
    catch_up, lags = catch_up_figures(turns), lag_figures(turns, contest.rates)
    return Report(
        f"{os.cpu_count()} cores, Linux {platform.release()}, Python {python_build()}",
        f"Kafka {contest.version}, one broker for each cluster",
        contest.rounds,
        contest.backlog_mb,
        contest.partitions,
        catch_up,
        lags,
        header,
        list(verdicts_of(turns)),
    )


def verdicts_of(turns: Mapping[str, Sequence[Turn]]) -> Iterator[Verdict]:
    """The targets, of what was measured."""
    for figure in catch_up_figures(turns):
        if figure.contestant == TREE_AT_LEAST_ONCE:
            measured, ratio = figure.catch_up.records_per_s, figure.speed_ratio
            enough = measured >= RECORDS_PER_S_MIN or (ratio is not None and ratio >= OF_TUNED_MIN)
            name = f"records/s of 1 KB, at least once, one core (or {OF_TUNED_MIN:.0f} x tuned MirrorMaker's)"
            yield Verdict(name, RECORDS_PER_S_MIN, measured, enough, least=True)
    rates = next(iter(turns.values()))[0].lags
    for lag in lag_figures(turns, tuple(rates)):
        if lag.contestant == TREE_AT_LEAST_ONCE:  # exactly once waits for transactions: that is stated
            p50 = lag.lag.p50_ms
            name = f"{lag.contestant}: lag p50 at {lag.rate}/s, ms"
            yield Verdict(name, LAG_P50_MAX_MS, p50, p50 < LAG_P50_MAX_MS)


# ---- what the header costs ----


def header_cost(compression: Compression, records: int, seconds: float) -> HeaderCost:
    """Of batches of ``records`` records of 1 KB."""
    plain = decode_records(batch(records, replicate.RECORD_BYTES))
    data = encode_batch(plain, PLAIN_HEADER, compression=compression)
    return HeaderCost(
        compression.name.lower(),
        records,
        _cpu_us(lambda: rewritten(data), seconds) / records,
        _cpu_us(lambda: rewritten_as_objects(data), seconds) / records,
    )


def rewritten(data: Frame) -> bytes:
    """A batch with copy flags in each record, as a distributor does it."""
    copies = Copies(HEADER_NAME.encode(), COURSE, LEVEL)
    copies.add(data)
    (found,) = copies.batches()
    return found


def rewritten_as_objects(data: Frame) -> bytes:
    """The same, with an object for each record."""
    flags = (HEADER_NAME, write_flags(bit(LEVEL)))
    changed = [each._replace(headers=(*each.headers, flags)) for each in decode_records(data)]
    return encode_batch(changed, whole_header(data))


def _cpu_us(work: Callable[[], object], seconds: float) -> float:
    """Of one call, the mean over some time."""
    work()
    calls, started = 0, time.process_time()
    while (taken := time.process_time() - started) < seconds or not calls:
        work()
        calls += 1
    return taken / calls * 1e6
