"""What was reported of links' partitions, as pieces of time without holes: a state, what was lacking, or unknown.

A proxy reports a state when it changes, and a bad one, or one that lags, once a second. So a bad state counts as long
as it is reported. A good one counts for as long as its proxy is heard of: by what it reports of any link, or by a
request that it captured. What a process says first (NOT_CONNECTED_YET) is no proof of what was before. The rest is
*unknown*.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as f
from pyspark.sql.window import WindowSpec

UNKNOWN: Final = "unknown"
IN_SYNC: Final = "In-Sync"
GOOD: Final = ("Following", IN_SYNC)
BAD: Final = ("Out-Of-Sync", "Disconnected", "Stopped", "Refused", "Diverged")
STATES: Final = (*GOOD, UNKNOWN, "Syncing", "Catching Up", *BAD)
"""Each worse than the one before."""
GONE: Final = "Gone"
"""A proxy has it no more. That counts where no other proxy has reported it since."""
NEW_PROCESS: Final = "NOT_CONNECTED_YET"
REPORTED_EACH_S: Final = 1
SILENCE_S: Final = 5
"""What is reported once a second and is not for so long, is not known. Writers of captures have the lowest priority."""
SLICES: Final = 400
"""Of the whole time, for plots."""
KEY: Final = ("cluster", "link", "role", "topic", "partition")
LINK: Final = ("link", "source_cluster", "target_cluster")

COLUMNS: Final = (
    *("time", "cluster", "proxy", "kind", "link", "role", "remote_cluster", "topic", "partition"),
    *("state", "reason", "lag", "lag_ms"),
)
"""Of link events, all that is needed."""
SEEN: Final = ("time", "cluster", "proxy")
"""Of other events, all that is needed."""

PIECES: Final = (
    "cluster string, link string, role string, topic string, partition int, source_cluster string, "
    "target_cluster string, proxy string, state string, reason string, begun timestamp, ended timestamp, "
    "lag bigint, lag_ms bigint, last boolean"
)
SCHEMA: Final = (
    "cluster string, link string, role string, proxy string, topic string, partition int, state string, "
    "reason string, begun timestamp, ended timestamp, seconds double, lag bigint, lag_ms bigint"
)
SLICE_SCHEMA: Final = (
    "link string, source_cluster string, target_cluster string, role string, slice int, begun timestamp, "
    "ended timestamp, state string, lag bigint, lag_ms bigint"
)


def pieces(links: DataFrame, seen: DataFrame | None = None) -> DataFrame:
    """The columns of :data:`PIECES`. ``seen``: :data:`SEEN` of whatever else was captured.

    ``topic`` is null in what each proxy reports of a link as a whole. ``last``: up to the capture's end.
    """
    signs = _signs(links, seen)
    end = signs.agg(f.max("sign").alias("end"))
    whole = f.col("topic").isNull()
    reported = links.where("kind = 'state'").select(
        *KEY,
        f.when(f.col("role") == "follower", f.col("remote_cluster")).otherwise(f.col("cluster")).alias("source"),
        f.when(f.col("role") == "follower", f.col("cluster")).otherwise(f.col("remote_cluster")).alias("target"),
        *("proxy", "state", "reason", "time"),
        _known("lag").alias("lag"),
        _known("lag_ms").alias("lag_ms"),
        f.when(whole, f.col("proxy")).alias("teller"),
    )
    order = Window.partitionBy(*KEY, "teller").orderBy("time", "state")
    moved = (f.col("state") == GONE) & ~f.lag("proxy").over(order).eqNullSafe(f.col("proxy"))
    following = (
        reported.withColumn("moved", moved)
        .where("not moved")
        .select("*", *(f.lead(name).over(order).alias(f"next_{name}") for name in ("time", "proxy", "reason")))
        .crossJoin(f.broadcast(end))
        .withColumn("until", f.coalesce("next_time", "end"))
        .where(f.col("state") != GONE)
    )
    heard = f.greatest(f.coalesce("heard", "time"), f.col("time"))
    reported_on = (
        f.col("next_time").isNotNull()
        & f.col("next_proxy").eqNullSafe(f.col("proxy"))
        & ~f.coalesce(f.col("next_reason").startswith(NEW_PROCESS), f.lit(False))
    )
    good = whole | f.col("state").isin(*GOOD)
    known_until = (
        f.when(~good, f.when(_silent("time", "until"), f.col("time")).otherwise(f.col("until")))
        .when(reported_on, f.col("until"))
        .otherwise(f.when(_micros("until") - f.unix_micros(heard) > SILENCE_S * 10**6, heard).otherwise(f.col("until")))
    )
    # One that lags is reported each second: where that ends, and its state does not, it lags no more.
    level = f.least(f.col("time") + f.expr(f"interval {REPORTED_EACH_S} second"), f.col("known_until"))
    silent = good & _silent("time", "until") & ((f.col("lag") > 0) | (f.col("lag_ms") > 0))
    parts = f.array(
        _piece("state", "time", f.when(silent, f.col("level")).otherwise(f.col("known_until")), "lag", "lag_ms"),
        f.when(silent, _piece("state", "level", f.col("known_until"), f.lit(0), f.lit(0))),
        f.when(
            f.col("known_until") < f.col("until"),
            _piece(f.lit(UNKNOWN), "known_until", f.col("until"), f.lit(None), f.lit(None)),
        ),
    )
    return (
        _heard(following, signs)
        .withColumn("known_until", known_until)
        .withColumn("level", level)
        .withColumn("part", f.explode(f.filter(parts, lambda each: each.isNotNull())))
        .select(
            *KEY,
            f.coalesce("source", f.lit("")).alias("source_cluster"),
            f.coalesce("target", f.lit("")).alias("target_cluster"),
            "proxy",
            "part.*",
            (f.col("next_time").isNull() & (f.col("part.ended") >= f.col("until"))).alias("last"),
        )
    )


def timeline(of: DataFrame) -> DataFrame:
    """:func:`pieces` with equal neighbours merged: the columns of :data:`SCHEMA`. ``lag``, ``lag_ms``: the most."""
    same = (*KEY, "proxy", "state", "reason")
    order = Window.partitionBy(*KEY, f.when(f.col("topic").isNull(), f.col("proxy"))).orderBy("begun", "ended")
    changed = ~f.coalesce(_same_before(("proxy", "state", "reason"), order), f.lit(False))
    runs = of.withColumn("changed", changed.cast("int")).withColumn("run", f.sum("changed").over(order))
    return (
        runs.groupBy(*same, "run")
        .agg(
            f.min("begun").alias("begun"),
            f.max("ended").alias("ended"),
            f.max("lag").alias("lag"),
            f.max("lag_ms").alias("lag_ms"),
        )
        .select(
            *("cluster", "link", "role", "proxy", "topic", "partition", "state", "reason", "begun", "ended"),
            seconds().alias("seconds"),
            *("lag", "lag_ms"),
        )
    )


def shares(timeline: DataFrame) -> DataFrame:
    """How much of the time of all partitions together was in which state, by end of link."""
    end = ("link", "cluster", "role")
    summed = timeline.where("topic is not null").groupBy(*end, "state").agg(f.sum("seconds").alias("seconds"))
    whole = f.nullif(f.sum("seconds").over(Window.partitionBy(*end)), f.lit(0.0))
    share = f.coalesce(f.col("seconds") / whole, f.lit(0.0))
    return summed.select("*", share.alias("share")).orderBy(*end, badness())


def slices(of: DataFrame) -> DataFrame:
    """For plots, the worst state and the most lag of any partition in each slice: columns :data:`SLICE_SCHEMA`."""
    partitions = of.where("topic is not null")
    bounds = partitions.agg(
        f.min(_micros("begun")).alias("first"),
        f.greatest((f.max(_micros("ended")) - f.min(_micros("begun"))) / SLICES, f.lit(1.0)).alias("wide"),
    )

    def slice_of(at: Column) -> Column:
        return f.least(f.floor((at - f.col("first")) / f.col("wide")), f.lit(SLICES - 1)).cast("int")

    begin = slice_of(_micros("begun"))
    cut = partitions.crossJoin(f.broadcast(bounds)).withColumn(
        "slice", f.explode(f.sequence(begin, f.greatest(begin, slice_of(_micros("ended") - 1))))
    )
    worst = f.max(f.struct(badness().alias("badness"), "state"))
    return (
        cut.groupBy(*LINK, "role", "slice", "first", "wide")
        .agg(worst.alias("worst"), f.max("lag").alias("lag"), f.max("lag_ms").alias("lag_ms"))
        .select(
            *(*LINK, "role", "slice"),
            *(
                f.timestamp_micros((f.col("first") + (f.col("slice") + at) * f.col("wide")).cast("bigint")).alias(name)
                for at, name in enumerate(("begun", "ended"))
            ),
            f.col("worst.state").alias("state"),
            *("lag", "lag_ms"),
        )
    )


def badness() -> Column:
    """Of column ``state``: its place in :data:`STATES`; one that is not known here is the worst."""
    return f.coalesce(f.nullif(f.array_position(f.lit(list(STATES)), f.col("state")), f.lit(0)), f.lit(99))


def seconds(begun: str = "begun", ended: str = "ended") -> Column:
    return (_micros(ended) - _micros(begun)) / 1e6


def _signs(links: DataFrame, seen: DataFrame | None) -> DataFrame:
    """When each proxy was heard of, once a second."""
    each = ("cluster", "proxy", "time")
    heard = links.select(*each) if seen is None else links.select(*each).unionByName(seen.select(*each))
    return heard.groupBy("cluster", "proxy", f.date_trunc("second", "time").alias("second")).agg(
        f.max("time").alias("sign")
    )


def _heard(reported: DataFrame, signs: DataFrame) -> DataFrame:
    """With ``heard``: the last sign of the proxy before ``until``."""
    names = reported.columns
    both = reported.select("*", f.col("until").alias("at"), f.lit(None).cast("timestamp").alias("sign")).unionByName(
        signs.select("cluster", "proxy", "sign", f.col("sign").alias("at")), allowMissingColumns=True
    )
    # Nulls first: what is reported at the same moment is no sign of before.
    before = Window.partitionBy("cluster", "proxy").orderBy("at", f.col("sign").asc_nulls_first())
    return (
        both.withColumn("heard", f.last("sign", ignorenulls=True).over(before))
        .where("until is not null")
        .select(*names, "heard")
    )


def _piece(state: Column | str, begun: str, ended: Column, lag: Column | str, lag_ms: Column | str) -> Column:
    column = f.col(state) if isinstance(state, str) else state
    reason = f.col("reason") if isinstance(state, str) else f.lit(None).cast("string")
    return f.struct(
        column.alias("state"),
        reason.alias("reason"),
        f.col(begun).alias("begun"),
        ended.alias("ended"),
        (f.col(lag) if isinstance(lag, str) else lag).cast("bigint").alias("lag"),
        (f.col(lag_ms) if isinstance(lag_ms, str) else lag_ms).cast("bigint").alias("lag_ms"),
    )


def _same_before(names: tuple[str, ...], order: WindowSpec) -> Column:
    same = f.lag(f.lit(True)).over(order)
    for name in names:
        same = same & f.col(name).eqNullSafe(f.lag(name).over(order))
    return same


def _known(name: str) -> Column:
    return f.when(f.col(name) >= 0, f.col(name))


def _micros(name: str) -> Column:
    return f.unix_micros(f.col(name))


def _silent(begun: str, ended: str) -> Column:
    return _micros(ended) - _micros(begun) > SILENCE_S * 10**6
