"""Incidents of links: when partitions were in trouble, for how long (RTO), and what the other side lacked (RPO).

A partition's *episode* is the time in which it is not Following or In-Sync, or lacks records that are older than a
second, together with what is unknown of it inside. Episodes that reach a limit count; those of a link that overlap are
one incident. The leader end knows the source's end during a cut. The follower's view counts where the leader end
reported nothing: it was not captured, or had fallen silent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as f

from isthmus_spark.jobs.link_states import BAD, GOOD, IN_SYNC, KEY, LINK, STATES, UNKNOWN, badness, seconds

SCHEMA: Final = (
    "link string, source_cluster string, target_cluster string, seen_by string, begun timestamp, ended timestamp, "
    "rto_s double, seconds double, unseen_s double, worst string, reasons string, partitions bigint, topics string, "
    "rpo_offsets bigint, rpo_ms bigint, rpo_is string, at_risk_offsets bigint, at_risk_ms bigint"
)
BEHIND_MS: Final = 1000
"""A partition that lacks records of this age is in trouble already, if something counts before it is level again."""
ALL, AT_LEAST, NOT_KNOWN = "all", "at least", "unknown"
_TOPICS_MAX: Final = 5


@dataclass(frozen=True)
class Limits:
    """What makes an incident of an episode: any of these."""

    bad_s: float = 1.0
    """Disconnected, Out-Of-Sync, Diverged, Refused, Stopped for so long."""
    slow_s: float = 30.0
    """In any trouble for so long, Catching Up and Syncing too."""
    lag_ms: int = 10_000
    """Lacking a record of this age."""
    lag: int | None = None
    """Lacking so many offsets."""


def incidents(pieces: DataFrame, limits: Limits = Limits()) -> DataFrame:
    """The columns of :data:`SCHEMA`, the first one first. ``pieces``: of :func:`isthmus_spark.jobs.link_states.pieces`.

    ``ended``, ``rto_s``: null while it is not over at the capture's end. ``unseen_s``: of so many seconds in it, or
    right before it, nothing is known. ``rpo_offsets``, ``rpo_ms``: what the follower lacked at worst; ``rpo_is`` says
    whether that is all, at least so much, or unknown. ``at_risk_offsets``, ``at_risk_ms``: of that, what may have been
    acked without the follower. While a partition is In-Sync, nothing is.
    """
    partitions = pieces.where("topic is not null")
    found = episodes(partitions, limits)
    leader = f.col("role") != "follower"
    follower = found.where(~leader)
    blind = _blind(partitions).select(*(f.col(name).alias(f"blind_{name}") for name in (*LINK, "begun", "ended")))
    here = [f.col(name) == f.col(f"blind_{name}") for name in LINK]
    meets = (f.col("begun") < f.col("blind_ended")) & (f.col("ended") > f.col("blind_begun"))
    unseen = follower.join(f.broadcast(blind), [*here, meets], "left_semi")
    return _merged(found.where(leader).unionByName(unseen)).orderBy("begun", *LINK)


def episodes(partitions: DataFrame, limits: Limits) -> DataFrame:
    """Of each partition, as each end of the link saw it, what reaches a limit."""
    unknown = f.col("state") == UNKNOWN
    trouble = ~unknown & (~f.col("state").isin(*GOOD) | f.coalesce(f.col("lag_ms") >= BEHIND_MS, f.lit(False)))
    order = Window.partitionBy(*KEY).orderBy("begun", "ended")
    marked = partitions.withColumn("trouble", trouble)
    run = f.sum((~trouble & ~unknown).cast("int")).over(order)
    runs = marked.withColumn("run", run).where(trouble | unknown)
    first = f.min(f.when(f.col("trouble"), f.col("begun"))).over(Window.partitionBy(*KEY, "run"))
    bad = f.col("trouble") & f.col("state").isin(*BAD)
    risk = f.when(f.col("state") == IN_SYNC, f.lit(0))
    # Of an end that hears nothing of the source, what it lacks is what it knew last.
    deaf = (f.col("role") == "follower") & f.col("state").isin(*BAD)

    def total(condition: Column) -> Column:
        return f.coalesce(f.sum(f.when(condition, seconds())), f.lit(0.0))

    grouped = (
        runs.withColumn("first", first)
        .where("first is not null")
        .groupBy(*KEY, *LINK[1:], "run")
        .agg(
            f.min("first").alias("begun"),
            f.max("ended").alias("ended"),
            f.max("last").alias("open"),
            total(f.col("trouble")).alias("slow_s"),
            total(bad).alias("bad_s"),
            f.max(bad).alias("bad"),
            total(~f.col("trouble")).alias("unseen_s"),
            total(~f.col("trouble") & (f.col("begun") >= f.col("first"))).alias("silent_s"),
            f.max(f.when(f.col("trouble"), badness())).alias("worst"),
            f.collect_set(f.when(f.col("trouble"), f.col("reason"))).alias("reasons"),
            *(f.max(name).alias(name) for name in ("lag", "lag_ms")),
            *(f.max(f.coalesce(risk, f.col(name))).alias(f"risk_{name}") for name in ("lag", "lag_ms")),
            f.max(deaf).alias("deaf"),
        )
    )
    counts = (
        # The last word was a bad one, and then there was silence.
        (f.col("bad") & (f.col("bad_s") + f.col("silent_s") >= limits.bad_s))
        | (f.col("slow_s") >= limits.slow_s)
        | f.coalesce(f.col("lag_ms") >= limits.lag_ms, f.lit(False))
    )
    if limits.lag is not None:
        counts = counts | f.coalesce(f.col("lag") >= limits.lag, f.lit(False))
    return grouped.where(counts).drop("run")


def _blind(partitions: DataFrame) -> DataFrame:
    """By link: when the leader end reported nothing of some partition."""
    leader = f.col("role") != "follower"
    ends = partitions.groupBy(*LINK).agg(
        f.min(f.when(leader, f.col("begun"))).alias("first"), f.max("ended").alias("end"), f.min("begun").alias("start")
    )
    before = ends.select(*LINK, f.col("start").alias("begun"), f.coalesce("first", "end").alias("ended"))
    unknown = partitions.where(leader & (f.col("state") == UNKNOWN)).select(*LINK, "begun", "ended")
    return (
        _islands(unknown.unionByName(before))
        .groupBy(*LINK, "island")
        .agg(f.min("begun").alias("begun"), f.max("ended").alias("ended"))
    )


def _islands(found: DataFrame) -> DataFrame:
    """With ``island``: the same number for what overlaps, link by link."""
    order = Window.partitionBy(*LINK).orderBy("begun", "ended")
    before = f.max("ended").over(order.rowsBetween(Window.unboundedPreceding, -1))
    apart = f.coalesce(f.col("begun") > before, f.lit(True)).cast("int")
    return found.withColumn("apart", apart).withColumn("island", f.sum("apart").over(order)).drop("apart")


def _merged(found: DataFrame) -> DataFrame:
    """One row for each incident."""
    leads = f.col("role") != "follower"
    by_partition = (
        _islands(found)
        .groupBy(*LINK, "island", *(name for name in KEY if name != "link"))
        .agg(
            f.min("begun").alias("begun"),
            f.max("ended").alias("ended"),
            *(f.max(name).alias(name) for name in ("open", "deaf", "unseen_s", "worst")),
            f.flatten(f.collect_list("reasons")).alias("reasons"),
            *(f.max(name).alias(name) for name in ("lag", "lag_ms", "risk_lag", "risk_lag_ms")),
        )
    )

    def leader_first(made: Column, other: Column) -> Column:
        """What the leader end knows, else what the follower does."""
        return f.coalesce(made, other)

    def most(name: str) -> Column:
        return leader_first(f.max(f.when(leads, f.col(name))), f.max(f.when(~leads, f.col(name))))

    def sum_of(name: str) -> Column:
        return leader_first(f.sum(f.when(leads, f.col(name))), f.sum(f.when(~leads, f.col(name))))

    name = f.concat_ws("-", "topic", f.col("partition").cast("string"))
    led, followed = f.count(f.when(leads, f.lit(1))), f.count(f.when(~leads, f.lit(1)))
    known = f.when(led > 0, f.count(f.when(leads, f.col("lag")))).otherwise(f.count(f.when(~leads, f.col("lag"))))
    doubt = (f.max("unseen_s") > 0) | ((led == 0) & f.max("deaf")) | (known < f.greatest(led, followed))
    names = f.array_sort(f.collect_set(name))
    states = f.lit(list(STATES))
    return (
        by_partition.groupBy(*LINK, "island")
        .agg(
            f.when((led > 0) & (followed > 0), f.lit("both"))
            .when(led > 0, f.lit("leader"))
            .otherwise(f.lit("follower"))
            .alias("seen_by"),
            f.min("begun").alias("begun"),
            f.max("ended").alias("until"),
            f.max("open").alias("open"),
            f.max("unseen_s").alias("unseen_s"),
            f.max("worst").cast("int").alias("worst"),
            f.array_join(f.array_sort(f.array_distinct(f.flatten(f.collect_list("reasons")))), ", ").alias("reasons"),
            f.greatest(led, followed).alias("partitions"),
            f.array_join(f.slice(names, 1, _TOPICS_MAX), ", ").alias("topics"),
            sum_of("lag").alias("rpo_offsets"),
            most("lag_ms").alias("rpo_ms"),
            f.when(known == 0, f.lit(NOT_KNOWN)).when(doubt, f.lit(AT_LEAST)).otherwise(f.lit(ALL)).alias("rpo_is"),
            sum_of("risk_lag").alias("at_risk_offsets"),
            most("risk_lag_ms").alias("at_risk_ms"),
        )
        .withColumn("ended", f.when(~f.col("open"), f.col("until")))
        .select(
            *(*LINK, "seen_by", "begun", "ended"),
            seconds().alias("rto_s"),
            seconds("begun", "until").alias("seconds"),
            "unseen_s",
            f.coalesce(f.get(states, f.col("worst") - 1), f.lit("?")).alias("worst"),
            *("reasons", "partitions", "topics", "rpo_offsets", "rpo_ms", "rpo_is", "at_risk_offsets", "at_risk_ms"),
        )
    )
