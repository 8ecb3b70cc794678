"""All reports of captured traffic, and a page that leads to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from pyspark.sql import DataFrame, SparkSession

from isthmus_spark import reports
from isthmus_spark.command import Rows, captured, made
from isthmus_spark.jobs import exactly_once, hot, latency, rejections
from isthmus_spark.link_commands import make_lag_and_states, make_sync
from isthmus_spark.report import Link, Report, Section
from isthmus_spark.sync_report import NO_APPENDS


class _Job(NamedTuple):
    run: Callable[[DataFrame], DataFrame]
    columns: Sequence[str]
    page: Callable[[Rows, Mapping[str, str]], Report]


_JOBS: Final = {
    "latency": _Job(latency.latency, latency.COLUMNS, reports.latency_report),
    "rejections": _Job(rejections.rejections, rejections.COLUMNS, reports.rejections_report),
    "hot": _Job(hot.hot, hot.COLUMNS, reports.hot_report),
    "exactly-once": _Job(exactly_once.exactly_once, exactly_once.COLUMNS, reports.exactly_once_report),
}
_ASKS: Final = {
    "latency": "How long requests took, and where the time went.",
    "rejections": "Who was refused what, and what to do.",
    "hot": "Where load is uneven or wasteful, with the setting to change.",
    "exactly-once": "Batches that are stored twice or out of order.",
    "lag-and-states": "What became of each link; RTO and RPO of each incident.",
    "sync": "What waiting for the other cluster took, and would take with other round trips.",
}


def make_all(spark: SparkSession, capture: Path, to: Path) -> Iterator[tuple[Path, str]]:
    """The pages as they are made, each with what was found."""
    found: dict[str, str] = {}
    for name, made_of in _made(spark, capture, to):
        found[name] = made_of
        yield to / f"{name}.html", made_of
    cells = [[Link(f"{name}.html", name), _ASKS[name], made_of] for name, made_of in found.items()]
    section = Section("Of captured traffic", "Each page says what it means, and what to do.", ("", "", "found"), cells)
    index = to / "index.html"
    Report("Reports", {"capture": str(capture), "Spark": spark.version}, [section]).write(index)
    yield index, f"{len(found)} reports"


def _made(spark: SparkSession, capture: Path, to: Path) -> Iterator[tuple[str, str]]:
    for name, job in _JOBS.items():
        rows = made(spark, capture, job.run(captured(spark, capture, job.columns)), job.page, to / f"{name}.html")
        yield name, f"{len(rows)} rows"
    incidents = make_lag_and_states(spark, capture, to / "lag-and-states.html")
    yield (
        "lag-and-states",
        "no link events captured that tell a state" if incidents is None else f"{len(incidents)} incidents",
    )
    what_if = make_sync(spark, capture, to / "sync.html")["what_if"]
    yield "sync", NO_APPENDS if what_if is None else f"{len(what_if)} rows"
