"""From events to alerts, as data frames: what rules look at, the state they keep, what they found."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from functools import reduce
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

import pandas as pd
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f

from isthmus_spark.anomalies.limits import Limits
from isthmus_spark.anomalies.rules import (
    BASE,
    DUPLICATE,
    ERRORS,
    GAP,
    GATE,
    REFUSED,
    REORDERED,
    SEQUENCES,
    SLOW,
    Acked,
    Counted,
    Finding,
    State,
    forget,
    judge_counts,
    judge_refused,
    judge_sequences,
)
from isthmus_spark.jobs.names import api_name

if TYPE_CHECKING:
    from pyspark.sql.streaming.state import GroupState

SCHEMA: Final = (
    "rule string, subject string, facts string, window_from timestamp, window_to timestamp, measured double, "
    "`limit` double, unit string, requests bigint, first timestamp, last timestamp, advice string"
)
COLUMNS: Final = (
    *(
        "time",
        "cluster",
        "namespace",
        "client_address",
        "client_id",
        "topic",
        "api_key",
        "broker_id",
        "part",
        "partition",
    ),
    *("response_bytes", "acks", "error_code", "records", "producer_id", "producer_epoch", "base_sequence"),
    *("base_offset", "proxy_us", "broker_us", "gate_us"),
)
"""Of events, all that is needed."""
SHARDS: Final = 1
"""What is judged side by side. It cannot change while a checkpoint lives."""
WATERMARK: Final = "10 minutes"
"""How long a subject may have no events before it is forgotten."""

PRODUCE: Final = 0
PROMPT: Final = (0, 2, 3, 8, 9, 10)
"""APIs that brokers answer as soon as they can: Fetch and those of group members wait by intention."""
INVALID_REQUEST: Final = 42
COMMON: Final = (5, 14, 15, 27, 46, 51, 70, 71, 74, 75, 79)
"""Codes that belong to normal traffic: coordinators and leaders that begin, rebalances, new members, retries that the
broker knew, fetch sessions that end, leader epochs that change."""
_API_VERSIONS: Final = 18
"""Clients ask for more than a broker has, and are answered with an error."""

_ADVICE: Final = {
    SLOW: "See its disks, its request queue, and the followers that its topics wait for (acks=all); or move leaders.",
    GATE: "Acks wait for another cluster or a plugin: `isthmus link describe` shows the link and its lag.",
    ERRORS: "See what the code means in Kafka's protocol, the client's log, and the brokers that answer it.",
    REFUSED: "It writes to a topic that follows a link, or is reserved: point it at the source cluster, or promote.",
    DUPLICATE: "The same batch stands at two offsets: compare with kafka-dump-log, and see the broker's restarts.",
    REORDERED: "A later batch stands at an earlier offset: the log was cut or made anew meanwhile, or mixed up.",
    GAP: "Records between two acked batches are not in the log: compare with kafka-dump-log and the producer's log.",
}


def anomalies(
    events: DataFrame, limits: Limits = Limits(), watermark: str = WATERMARK, shards: int = SHARDS
) -> DataFrame:
    """Alerts, the columns of :data:`SCHEMA`; ``subject`` and ``facts`` are JSON objects.

    ``events``: captured traffic, a stream or not. All that a shard has to know is one state, so a stream costs so many
    states a batch, however many clients there are.
    """
    observed = observations(events, shards)
    if not events.isStreaming:
        return observed.groupBy("shard").applyInPandas(_alone(limits), SCHEMA)
    return (
        observed.withWatermark("at", watermark)
        .groupBy("shard")
        .applyInPandasWithState(_with_state(limits), SCHEMA, "state string", "append", "NoTimeout")
    )


def observations(events: DataFrame, shards: int = SHARDS) -> DataFrame:
    """What rules look at: one row for each rule that has to do with an event.

    ``at`` is when a request was over: the slow ones would be late by when they came.
    """
    took = reduce(Column.__add__, (f.greatest(f.col(each), f.lit(0)).cast("bigint") for each in _TIMES))
    events = events.withColumn("at_us", f.unix_micros("time") + took).withColumn("api", api_name(f.col("api_key")))
    answered = f.col("response_bytes") >= 0
    code, whole = f.col("error_code"), f.col("part") == 0
    refused = answered & (f.col("broker_us") < 0) & (code == INVALID_REQUEST) & (f.col("api_key") == PRODUCE)
    common = code.isin(*COMMON) | ((f.col("api_key") == _API_VERSIONS) & (code == 35))
    host = f.regexp_replace("client_address", ":[0-9]+$", "").alias("client_address")
    known = f.col("cluster").isNotNull()
    acked = (
        (f.col("api_key") == PRODUCE)
        & (code == 0)
        & (f.col("producer_id") >= 0)
        & (f.col("base_sequence") >= 0)
        & (f.col("base_offset") >= 0)
        & (f.col("records") > 0)
    )
    rows = (
        _row(
            SLOW,
            known & whole & (f.col("broker_us") >= 0) & (f.col("broker_id") >= 0) & f.col("api_key").isin(*PROMPT),
            f.struct("cluster", "api", "acks"),
            member=f.col("broker_id").cast("string"),
            bucket=_bucket("broker_us"),
        ),
        _row(GATE, whole & (f.col("gate_us") > 0), f.struct("cluster", "namespace", "api"), bucket=_bucket("gate_us")),
        _row(
            ERRORS,
            answered & ~refused,
            f.struct("cluster", "namespace", "api", "client_id"),
            bucket=f.when((code > 0) & ~common, code).otherwise(0).cast("int"),
        ),
        _row(REFUSED, refused, f.struct("cluster", "namespace", "topic", "client_id", host)),
        _row(
            SEQUENCES,
            known & acked,
            f.struct("cluster", "topic", "partition"),
            producer_id=f.col("producer_id"),
            epoch=f.col("producer_epoch").cast("int"),
            sequence=f.col("base_sequence"),
            records=f.col("records"),
            offset=f.col("base_offset"),
            client_id=f.coalesce("client_id", f.lit("")),
        ),
    )
    found = events.select("at_us", f.explode(f.array_compact(f.array(*rows))).alias("row"))
    return found.select(
        *(f.col(f"row.{name}") for name in ("rule", "subject", "member")),
        f.timestamp_micros("at_us").alias("at"),
        "at_us",
        *(f.col(f"row.{name}") for name in ("bucket", "producer_id", "epoch", "sequence", "records", "offset")),
        f.col("row.client_id"),
        f.pmod(f.xxhash64("row.rule", "row.subject"), f.lit(shards)).cast("int").alias("shard"),
    )


_TIMES: Final = ("proxy_us", "broker_us", "gate_us")


def _bucket(name: str) -> Column:
    return f.floor(f.log(f.greatest(f.col(name), f.lit(1))) / f.log(f.lit(BASE))).cast("int")


def _row(rule: str, holds: Column, subject: Column, **more: Column) -> Column:
    defaults = {
        "member": f.lit(""),
        "bucket": f.lit(0),
        "producer_id": f.lit(-1).cast("bigint"),
        "epoch": f.lit(-1),
        "sequence": f.lit(-1),
        "records": f.lit(-1),
        "offset": f.lit(-1).cast("bigint"),
        "client_id": f.lit(""),
    }
    fields = [column.alias(name) for name, column in {**defaults, **more}.items()]
    return f.when(holds, f.struct(f.lit(rule).alias("rule"), f.to_json(subject).alias("subject"), *fields))


# ---- what runs in Python, for each shard ----


def judge(state: State, rows: pd.DataFrame, limits: Limits) -> Iterator[Finding]:
    """All rules on what a shard got. The state is changed."""
    counted = rows[rows["rule"] != SEQUENCES]
    if len(counted):
        keys = ["rule", "subject", "member", "second", "bucket"]
        counted = counted.assign(second=counted["at_us"] // 1_000_000)
        sums = counted.groupby(keys, sort=True)["at_us"].agg(["size", "min", "max"]).reset_index()
        listed = [Counted(*row) for row in sums.itertuples(index=False, name=None)]
        for (rule, subject), group in groupby(listed, key=lambda row: (row.rule, row.subject)):
            judges: Callable[..., Iterator[Finding]] = judge_refused if rule == REFUSED else judge_counts
            yield from judges(state.setdefault(f"{rule} {subject}", {"newest": 0}), group, limits)
    columns = ["subject", "producer_id", "epoch", "sequence", "records", "offset", "at_us", "client_id"]
    batches = rows[rows["rule"] == SEQUENCES][columns].sort_values(columns)
    acked = (Acked(*row) for row in batches.itertuples(index=False, name=None))
    for subject, partition in groupby(acked, key=lambda row: row.subject):
        yield from judge_sequences(state.setdefault(f"{SEQUENCES} {subject}", {"newest": 0}), partition, limits)


def _with_state(limits: Limits) -> Callable[[Any, Iterator[pd.DataFrame], GroupState], Iterator[pd.DataFrame]]:
    def judged(_key: Any, frames: Iterator[pd.DataFrame], kept: GroupState) -> Iterator[pd.DataFrame]:
        # Spark's own code, where a batch has no alerts; it would say so in each batch.
        warnings.filterwarnings("ignore", category=FutureWarning, module="pyspark")
        state: State = json.loads(kept.get[0]) if kept.exists else {}
        # The frames of one batch together: what is found must not depend on how they were cut.
        found = list(judge(state, pd.concat(list(frames), ignore_index=True), limits))
        forget(state, kept.getCurrentWatermarkMs() / 1000)
        kept.update((json.dumps(state, separators=(",", ":")),))
        if found:
            yield _alerts(found)

    return judged


def _alone(limits: Limits) -> Callable[[pd.DataFrame], pd.DataFrame]:
    def judged(rows: pd.DataFrame) -> pd.DataFrame:
        return _alerts(list(judge({}, rows, limits)))

    return judged


def _alerts(found: list[Finding]) -> pd.DataFrame:
    rows = [
        (
            each.rule,
            each.subject,
            json.dumps(each.facts),
            *(_time(us) for us in each.window_us),
            float(each.measured),
            float(each.limit),
            each.unit,
            each.requests,
            _time(each.first_us),
            _time(each.last_us),
            _ADVICE[each.facts.get("finding", each.rule)],
        )
        for each in found
    ]
    return pd.DataFrame(rows, columns=_NAMES)


_NAMES: Final = [each.split()[0].strip("`") for each in SCHEMA.split(", ")]


def _time(us: int) -> pd.Timestamp:
    return pd.Timestamp(us, unit="us", tz="UTC")
