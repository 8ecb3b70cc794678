"""What synchronous mode costs, and would cost: captured arrivals, replayed against other round trips and quorums.

    answer of the broker ── link, RTT / 2 ──► append at the follower ── RTT / 2 ──► ack may go ── its turn ──► it goes

A record is pushed when the source's in-sync replicas have it, which is when the broker answers; nothing waits for what
is on its way. A partition is confirmed up to where all is appended: small batches go side by side, others wait for the
append before them. An answer waits for all partitions of its request, and then for the answers before it on its
connection. Arrivals stay as they were captured. All of it is running maxima, so it is a few window functions.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as f

from isthmus_spark.jobs.buckets import bucket, middle_us, percentile, ranked
from isthmus_spark.jobs.names import api_name

PRODUCE: Final = 0
HELD: Final = (PRODUCE, 8, 26, 28)
"""Answers that may wait for another cluster: Produce, OffsetCommit, EndTxn, TxnOffsetCommit."""
TAIL_US: Final = 130
"""From the broker's answer to when the batch leaves (measured, docs/adr/0006)."""
FOLLOWER_US: Final = 130
"""From when the batch has come to when its request goes to the broker there (measured, too)."""
APPENDS: Final = 1000
"""So many equally likely times of an append stand for how they are distributed."""
SHARED_US: Final = 1000
"""Batches of a partition that come together take one append."""
PERCENTILES: Final = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
DIMENSIONS: Final = ("all", "namespace", "client_id")
SESSION: Final = ("cluster", "proxy", "session")

COLUMNS: Final = (
    *("time", "correlation_id", "api_key", "part", "namespace", "client_id", "topic", "partition", "acks"),
    *(*SESSION, "error_code", "response_bytes", "proxy_us", "broker_us", "gate_us"),
)
"""Of events, all that is needed."""
LINK_COLUMNS: Final = ("cluster", "kind", "link", "topic", "took_us")
"""Of link events, all that is needed."""
MEASURED_SCHEMA: Final = (
    "dimension string, value string, api string, requests bigint, waited bigint, gate_share double, "
    "gate_p50_us double, gate_p90_us double, gate_p99_us double, gate_max_us bigint, "
    "whole_p50_us double, whole_p90_us double, whole_p99_us double, whole_max_us bigint"
)
SCHEMA: Final = (
    "scenario string, dimension string, value string, api string, requests bigint, "
    "now_p50_us double, now_p90_us double, now_p99_us double, now_max_us bigint, "
    "then_p50_us double, then_p90_us double, then_p99_us double, then_max_us bigint, "
    "least_p50_us double, least_p99_us double, most_p50_us double, most_p99_us double, "
    "added_us double, in_flight_now double, in_flight_then double"
)
CALIBRATION_SCHEMA: Final = (
    "dimension string, value string, requests bigint, "
    "measured_p50_us double, measured_p90_us double, measured_p99_us double, measured_max_us bigint, "
    "model_p50_us double, model_p90_us double, model_p99_us double, model_max_us bigint, "
    "error_p50 double, error_p99 double"
)


@dataclass(frozen=True)
class Scenario:
    """Synchronous links with these round trips; acks wait for so many of them."""

    name: str
    rtts_us: tuple[int, ...]
    confirm: int

    def __post_init__(self) -> None:
        if not 1 <= self.confirm <= len(self.rtts_us):
            raise ValueError(f"{self.name}: acks cannot wait for {self.confirm} of {len(self.rtts_us)} links")


def measured(events: DataFrame) -> DataFrame:
    """What waiting at gates took: the columns of :data:`MEASURED_SCHEMA`, where any answer waited.

    Percentiles are of the answers that waited (``waited``), ``gate_share`` is of the whole time of all ``requests``.
    """
    whole = (f.col("proxy_us") + f.col("broker_us") + f.col("gate_us")).cast("bigint")
    answered = events.where((f.col("part") == 0) & (f.col("broker_us") >= 0) & f.col("api_key").isin(*HELD))
    waited = f.col("gate_us") > 0
    rows = answered.withColumns(
        {"at": f.unix_micros("time"), "whole": f.when(waited, whole), "gate": f.when(waited, f.col("gate_us"))}
    )
    stats = _stats(rows.withColumn("total", whole), ("total", "whole", "gate"))
    keys = ("dimension", "value", "api")
    wide = stats.groupBy(*keys).agg(
        _of("total", "requests").alias("requests"),
        f.coalesce(_of("gate", "requests"), f.lit(0)).alias("waited"),
        (_of("gate", "sum_us") / f.nullif(_of("total", "sum_us"), f.lit(0))).alias("gate_share"),
        *(_of(name, f"{each}_us").alias(f"{name}_{each}_us") for name in ("gate", "whole") for each in _COLUMNS),
    )
    return wide.where("waited > 0").orderBy(*keys)


def append_times(links: DataFrame) -> DataFrame:
    """How long followers took to append: ``slot`` (0 to :data:`APPENDS`), ``append_us``; empty if none was reported."""
    counted = (
        links.where("kind = 'appended' and took_us >= 0")
        .groupBy(bucket(f.col("took_us")).alias("bucket"))
        .agg(f.count(f.lit(1)).alias("requests"))
        .withColumn("whole", f.lit(0))
    )
    scale = f.lit(float(APPENDS)) / f.col("all")
    # Slot n is for the share (n + 0.5) / APPENDS of all that is not longer.
    first = f.floor((f.col("upto") - f.col("requests")) * scale - 0.5) + 1
    last = f.floor(f.col("upto") * scale - 0.5)
    return (
        ranked(counted, ("whole",))
        .where(last >= first)
        .select(
            f.explode(f.sequence(first.cast("int"), last.cast("int"))).alias("slot"), middle_us().alias("append_us")
        )
    )


def constant_append(spark: SparkSession, append_us: int) -> DataFrame:
    """As :func:`append_times`, if it is always the same."""
    return spark.range(APPENDS).select(
        f.col("id").cast("int").alias("slot"), f.lit(float(append_us)).alias("append_us")
    )


def real_links(links: DataFrame) -> DataFrame:
    """What the way there and back took when this was captured: ``cluster``, ``topic``, ``link_us``.

    That is what confirmations took without the append, of the quickest tenth of each: those waited for nothing else.
    Of several links of a topic the slowest.
    """
    took = links.where("kind in ('appended', 'confirmed') and took_us >= 0").select(
        "link",
        "kind",
        bucket(f.col("took_us")).alias("bucket"),
        "took_us",
        *("cluster", "topic"),
    )
    counted = took.groupBy("link", "kind", "bucket").agg(
        f.count(f.lit(1)).alias("requests"), f.max("took_us").alias("max_us")
    )
    quick = ranked(counted, ("link", "kind")).groupBy("link", "kind").agg(percentile(0.1).alias("us"))
    by_link = quick.groupBy("link").agg(
        (
            f.max(f.when(f.col("kind") == "confirmed", f.col("us")))
            - f.max(f.when(f.col("kind") == "appended", f.col("us")))
        ).alias("us")
    )
    topics = took.where("kind = 'confirmed'").select("cluster", "topic", "link").distinct()
    on_the_way = f.max(f.greatest(f.col("us"), f.lit(0.0)) + TAIL_US)
    return (
        topics.join(f.broadcast(by_link.where("us is not null")), "link")
        .groupBy("cluster", "topic")
        .agg(on_the_way.alias("link_us"))
    )


def replay(events: DataFrame, scenarios: Sequence[Scenario], appends: DataFrame, real: DataFrame | int) -> DataFrame:
    """What :func:`what_if` and :func:`calibration` are made of: percentiles by dimension, API and measure.

    ``appends``: of :func:`append_times`, not empty; ``real``: of :func:`real_links`, or the round trip that there was.
    """
    at = f.unix_micros("time")
    free = at + f.col("proxy_us") + f.greatest(f.col("broker_us"), f.lit(0))
    known = events.where("broker_us >= 0 or response_bytes >= 0").select(
        *SESSION,
        *("correlation_id", "part", "api_key", "namespace", "client_id", "topic", "partition", "error_code"),
        (f.col("broker_us") >= 0).alias("asked"),
        ((f.col("api_key") == PRODUCE) & (f.col("acks") != 0) & (f.col("broker_us") >= 0)).alias("held"),
        at.alias("at"),
        free.alias("free"),
        f.greatest(f.col("gate_us"), f.lit(0)).cast("bigint").alias("gate_us"),
    )
    numbers = range(len(scenarios))
    made = [*(f"{name}_{number}" for number in numbers for name in ("ready", "latest")), "ready_real"]
    request = (*SESSION, "correlation_id", "at")
    same = ("api_key", "namespace", "client_id", "asked", "free", "gate_us")
    answers = (
        _confirmed(known.where("held"), scenarios, appends, real)
        .unionByName(known.where("not held and part = 0"), allowMissingColumns=True)
        .repartition(*SESSION)
        .groupBy(*request)
        .agg(
            *(f.min_by(name, "part").alias(name) for name in same),
            *(f.max(name).cast("bigint").alias(name) for name in made),
        )
    )
    turn = Window.partitionBy(*SESSION).orderBy("at", "correlation_id").rowsBetween(Window.unboundedPreceding, 0)
    out = f.col("free") + f.col("gate_us")
    waited = (f.col("gate_us") > 0) & f.col("ready_real").isNotNull()
    measures: dict[str, Column] = {
        "now": f.max(out).over(turn) - f.col("at"),
        "gate": f.when(waited, f.col("gate_us")),
        "model": f.when(waited, f.col("ready_real") - f.col("free")),
    }
    for number in numbers:
        ready, latest = (f.coalesce(f.col(f"{name}_{number}"), out) for name in ("ready", "latest"))
        measures[f"least_{number}"] = ready - f.col("at")
        measures[f"then_{number}"] = f.max(ready).over(turn) - f.col("at")
        measures[f"most_{number}"] = f.max(latest).over(turn) - f.col("at")
    return _stats(answers.select("*", *(each.alias(name) for name, each in measures.items())).where("asked"), measures)


def quorum(text: str) -> Scenario:
    """As the setting ``confirm`` of namespaces, with round trips in ms: ``ANY 1 (5, 20)``, ``ALL (5, 20)``.

    Raises ValueError.
    """
    found = re.fullmatch(r"(?:ALL|ANY +(\d+)) *\(([\d., ]+)\)", text.strip(), re.IGNORECASE)
    if found is None:
        raise ValueError(f"{text!r} is not like ANY 1 (5, 20) or ALL (5, 20), with round trips in ms")
    rtts = tuple(round(1000 * float(each)) for each in found[2].split(","))
    return Scenario(f"{text.strip()} ms", rtts, int(found[1] or len(rtts)))


def what_if(stats: DataFrame, scenarios: Sequence[Scenario]) -> DataFrame:
    """Whole times as they were and would be: the columns of :data:`SCHEMA`. ``stats``: of :func:`replay`.

    ``then`` has appends of a partition side by side, ``most`` one after the other; ``least`` is without waiting for the
    answers before it: a client that sends its next request when it has an answer is between ``least`` and ``then``.
    ``in_flight``: how many requests are under way on average, at the rate that was captured.
    """
    keys = ("dimension", "value", "api")
    span_s = (_of("now", "last_us") - _of("now", "first_us")) / 1e6

    def in_flight(name: str) -> Column:
        return f.when(span_s >= 1, _of(name, "sum_us") / 1e6 / span_s)

    made = [
        f.struct(
            f.lit(scenario.name).alias("scenario"),
            *(_of(f"then_{number}", f"{each}_us").alias(f"then_{each}_us") for each in _COLUMNS),
            *(
                _of(f"{name}_{number}", f"{each}_us").alias(f"{name}_{each}_us")
                for name in ("least", "most")
                for each in ("p50", "p99")
            ),
            ((_of(f"then_{number}", "sum_us") - _of("now", "sum_us")) / _of("now", "requests")).alias("added_us"),
            in_flight(f"then_{number}").alias("in_flight_then"),
        )
        for number, scenario in enumerate(scenarios)
    ]
    wide = stats.groupBy(*keys).agg(
        _of("now", "requests").alias("requests"),
        *(_of("now", f"{each}_us").alias(f"now_{each}_us") for each in _COLUMNS),
        in_flight("now").alias("in_flight_now"),
        f.array(*made).alias("made"),
    )
    names = [each.split()[0] for each in SCHEMA.split(", ")]
    return wide.withColumn("each", f.explode("made")).select(*keys, "requests", "*", "each.*").select(*names)


def calibration(stats: DataFrame) -> DataFrame:
    """The model beside what was measured, of answers that did wait: the columns of :data:`CALIBRATION_SCHEMA`."""
    wide = stats.groupBy("dimension", "value").agg(
        _of("gate", "requests").alias("requests"),
        *(
            _of(name, f"{each}_us").alias(f"{shown}_{each}_us")
            for name, shown in (("gate", "measured"), ("model", "model"))
            for each in _COLUMNS
        ),
    )
    return wide.where("requests > 0").select(
        "*",
        *(
            (f.col(f"model_{each}_us") / f.col(f"measured_{each}_us") - 1).alias(f"error_{each}")
            for each in ("p50", "p99")
        ),
    )


def _confirmed(held: DataFrame, scenarios: Sequence[Scenario], appends: DataFrame, real: DataFrame | int) -> DataFrame:
    """With ``ready_<scenario>``: when what each partition got would have been confirmed if appends go side by side;
    ``latest_<scenario>``: one after the other; ``ready_real``: over the link that there was, if the answer waited."""
    links = max((len(each.rtts_us) for each in scenarios), default=1)
    together = f.floor(f.col("free") / SHARED_US)
    for link in range(links):
        slot = f.pmod(f.xxhash64("cluster", "topic", "partition", together, f.lit(link)), f.lit(APPENDS)).cast("int")
        drawn = f.broadcast(appends.select(f.col("slot"), f.col("append_us").alias(f"append_{link}")))
        held = held.withColumn("slot", slot).join(drawn, "slot").drop("slot")
    if isinstance(real, int):
        held = held.withColumn("link_us", f.lit(float(real + TAIL_US + FOLLOWER_US)))
    else:
        held = held.join(f.broadcast(real), ["cluster", "topic"], "left")
    order = Window.partitionBy("cluster", "topic", "partition").orderBy("free")
    upto, before = (order.rangeBetween(Window.unboundedPreceding, end) for end in (Window.currentRow, -1))
    taken = f.col("error_code") == 0
    for link in range(links):
        append = f.col(f"append_{link}")
        alone = f.when(taken, f.col("free") + append)
        waiting = f.when(taken, f.greatest("free", f"before_{link}") + append)
        held = held.withColumns({f"early_{link}": f.max(alone).over(upto), f"before_{link}": f.max(alone).over(before)})
        held = held.withColumn(f"late_{link}", f.max(waiting).over(upto))

    def confirmed(name: str, scenario: Scenario) -> Column:
        ways = (rtt + TAIL_US + FOLLOWER_US for rtt in scenario.rtts_us)
        by_link = f.array_sort(f.array(*(f.col(f"{name}_{link}") + way for link, way in enumerate(ways))))
        return by_link[scenario.confirm - 1]

    made = {"ready_real": f.when(f.col("gate_us") > 0, f.col("early_0") + f.col("link_us"))}
    for number, scenario in enumerate(scenarios):
        made |= {f"ready_{number}": confirmed("early", scenario), f"latest_{number}": confirmed("late", scenario)}
    # What was refused waits for nothing.
    return held.select("*", *(f.when(taken, each).alias(name) for name, each in made.items()))


_COLUMNS: Final = (*PERCENTILES, "max")


def _stats(rows: DataFrame, measures: Sequence[str] | dict[str, Column]) -> DataFrame:
    """By dimension, value, API and measure: how many, their sum, percentiles; when the first and the last came."""
    keys = ("namespace", "client_id", "api_key")
    each = f.explode(f.array(*(f.struct(f.lit(name).alias("measure"), f.col(name).alias("us")) for name in measures)))
    counted = (
        rows.select(*keys, "at", each.alias("each"))
        .select(*keys, "at", "each.measure", "each.us")
        .where("us is not null")
        .groupBy(*keys, "measure", bucket(f.col("us")).alias("bucket"))
        .agg(
            f.count(f.lit(1)).alias("requests"),
            f.sum("us").alias("sum_us"),
            f.max("us").alias("max_us"),
            f.min("at").alias("first_us"),
            f.max("at").alias("last_us"),
        )
    )
    dimensions = f.array(
        *(
            f.struct(
                f.lit(name).alias("dimension"),
                (f.lit("all") if name == "all" else f.coalesce(f.col(name), f.lit(""))).alias("value"),
            )
            for name in DIMENSIONS
        )
    )
    group = ("dimension", "value", "api", "measure")
    totals = [f.sum(name).alias(name) for name in ("requests", "sum_us")]
    totals += [f.max(name).alias(name) for name in ("max_us", "last_us")]
    totals.append(f.min("first_us").alias("first_us"))
    summed = (
        counted.select("*", f.explode(dimensions).alias("of"))
        .select(
            "of.*", api_name(f.col("api_key")).alias("api"), *(name for name in counted.columns if name not in keys)
        )
        .groupBy(*group, "bucket")
        .agg(
            *totals,
        )
    )
    return (
        ranked(summed, group)
        .groupBy(*group)
        .agg(
            *totals,
            *(percentile(share).alias(f"{name}_us") for name, share in PERCENTILES.items()),
        )
    )


def _of(measure: str, column: str) -> Column:
    return f.max(f.when(f.col("measure") == measure, f.col(column)))
