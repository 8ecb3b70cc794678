"""What the pages say of what was found: it must be so."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any, Final

import pytest
from kio.schema.errors import ErrorCode

from isthmus_spark.jobs.names import ERROR_NAMES
from isthmus_spark.report import Report, Section
from isthmus_spark.reports import latency_report

TIME: Final = datetime(2026, 1, 1, 0, 0, 2, 499_950)


def row(api: str, requests: int, p50_us: float, **shares: float) -> dict[str, Any]:
    times = dict.fromkeys(("p50_us", "p90_us", "p95_us", "p99_us", "p999_us", "max_us"), p50_us)
    known = {"dimension": "api", "value": "all", "api": api, "requests": requests, "errors": 0, **times}
    return {**known, **{f"{each}_share": shares.get(each, 0.0) for each in ("proxy", "broker", "gate")}}


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([row("Produce", 100, 1000, proxy=0.1, broker=0.9)], "Nearly all of the time is the broker's"),
        ([row("Produce", 100, 1000, proxy=0.6, broker=0.4)], "60% of the time is the proxy's"),
        (
            [row("Produce", 100, 1000, broker=1.0), row("CreateTopics", 1, 1000, proxy=1.0)],
            "Nearly all of the time is the broker's",
        ),
        ([row("Produce", 100, 1000, proxy=0.2, broker=0.2, gate=0.6)], "Produce spends 60% of its time behind a gate"),
    ],
    ids=["broker", "proxy", "one that hardly counts", "gate"],
)
def test_where_the_time_goes(rows: list[dict[str, Any]], told: str) -> None:
    (section,) = latency_report(rows, {}).sections
    assert told in section.meaning


def test_numbers_that_name_something_stand_as_in_logs() -> None:
    section = Section("s", "m", ["producer id", "base offset", "records", "time"], [[4001, 6244, 6244, TIME]])
    page = Report("r", {}, [section]).html()
    cells = re.findall(r"<td[^>]*>(.*?)</td>", page)
    assert cells == ["4001", "6244", "6,244", "2026-01-01 00:00:02.499"]


def test_codes_have_the_names_that_kafka_gives_them() -> None:
    assert {code: ErrorCode(code).name.upper() for code in ERROR_NAMES} == ERROR_NAMES
