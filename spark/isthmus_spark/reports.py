"""What the jobs' results look like as reports, what they mean, and what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from isthmus_spark.report import Report, Section, bars

_COLUMNS: Final = ("requests", "errors", "p50_us", "p90_us", "p95_us", "p99_us", "p999_us", "max_us")
_HEADS: Final = ("requests", "errors", "p50 ms", "p90 ms", "p95 ms", "p99 ms", "p99.9 ms", "max ms")
_ROWS_MAX: Final = 40
_FINDINGS_MAX: Final = 500
PROXY_SHARE_MAX: Final = 0.2
"""A larger part of the time is worth a word."""
_TITLES: Final = {"api": "By API", "client_id": "By client", "namespace": "By namespace", "proxy": "By proxy"}


def latency_report(rows: Sequence[Mapping[str, Any]], about: Mapping[str, str]) -> Report:
    """Of :func:`isthmus_spark.jobs.latency.latency`."""
    report = Report("Latency", about)
    for dimension, title in _TITLES.items():
        chosen = sorted(
            (row for row in rows if row["dimension"] == dimension), key=lambda row: -float(row["requests"])
        )[:_ROWS_MAX]
        if not chosen:
            continue
        names = [row["api"] if dimension == "api" else f"{row['value'] or '-'} {row['api']}" for row in chosen]
        shares = [tuple(float(row[f"{each}_share"] or 0) for each in ("proxy", "broker", "gate")) for row in chosen]
        parts = [
            (name, [share * float(row["p50_us"]) / 1000 for share in each])
            for name, row, each in zip(names, chosen, shares, strict=True)
        ]
        cells = [
            [name, *(_cell(row, column) for column in _COLUMNS), *(round(100 * share, 1) for share in each)]
            for name, row, each in zip(names, chosen, shares, strict=True)
        ]
        heads = ["", *_HEADS, "proxy %", "broker %", "gate %"]
        report.sections.append(
            Section(title, _meaning(chosen, shares), heads, cells, bars(parts, ("proxy", "broker", "gate"), "ms (p50)"))
        )
    return report


def _cell(row: Mapping[str, Any], column: str) -> int | float:
    value = row[column]
    return round(float(value) / 1000, 3) if column.endswith("_us") else int(value)


def _meaning(rows: Sequence[Mapping[str, Any]], shares: Sequence[Sequence[float]]) -> str:
    gate = max(range(len(rows)), key=lambda at: shares[at][2])
    slowest = max(rows, key=lambda row: float(row["p99_us"]))
    text = (
        f"The slowest one in a hundred is {slowest['api']}"
        f"{' of ' + str(slowest['value']) if slowest['dimension'] != 'api' else ''}: "
        f"{float(slowest['p99_us']) / 1000:,.1f} ms. "
    )
    if shares[gate][2] > 0.2:
        text += (
            f"{rows[gate]['api']} spends {shares[gate][2]:.0%} of its time behind a gate: that is what waiting for the "
            "other cluster costs. It follows the round trip; `isthmus link describe` shows the link."
        )
        return text
    spent = [float(row["requests"]) * float(row["p50_us"]) for row in rows]
    proxy = sum(time * each[0] for time, each in zip(spent, shares, strict=True)) / (sum(spent) or 1)
    if proxy > PROXY_SHARE_MAX:
        text += (
            f"{proxy:.0%} of the time is the proxy's: see how busy its core is (`isthmus_proxy_time_seconds`), what "
            "plugins do, and whether requests wait behind others of their connection."
        )
    else:
        text += "Nearly all of the time is the broker's: see its disks, its request queue, and linger and batch sizes."
    return text


def rejections_report(rows: Sequence[Mapping[str, Any]], about: Mapping[str, str]) -> Report:
    """Of :func:`isthmus_spark.jobs.rejections.rejections`."""
    proxy = sum(row["requests"] for row in rows if row["refused_by"] == "proxy")
    broker = sum(row["requests"] for row in rows if row["refused_by"] == "broker")
    meaning = (
        f"{proxy:,} requests were refused by proxies, {broker:,} by brokers for good. The advice says what to do."
        if rows
        else "Nothing was refused."
    )
    return _findings("Rejections", meaning, rows, about)


def hot_report(rows: Sequence[Mapping[str, Any]], about: Mapping[str, str]) -> Report:
    """Of :func:`isthmus_spark.jobs.hot.hot`."""
    meaning = (
        f"{len(rows)} findings; each has the setting to change. measured and limit are in the finding's own unit."
        if rows
        else "Load is even: no hot partition, no small batches, no churn of connections, hardly any retries."
    )
    return _findings("Hot spots", meaning, rows, about)


def exactly_once_report(rows: Sequence[Mapping[str, Any]], about: Mapping[str, str]) -> Report:
    """Of :func:`isthmus_spark.jobs.exactly_once.exactly_once`."""
    meaning = (
        f"{len(rows)} {'batch is' if len(rows) == 1 else 'batches are'} not there exactly once and in order. base "
        "offset is where the batch stands, other offset where it stands as well, or what is wrong about it. Compare "
        "with the topic's log (kafka-dump-log)."
        if rows
        else "Each acked batch of producers with ids that was captured is there once, and in order."
    )
    return _findings("Exactly once", meaning, rows, about)


def _findings(title: str, meaning: str, rows: Sequence[Mapping[str, Any]], about: Mapping[str, str]) -> Report:
    columns = list(rows[0]) if rows else []
    cells = [[row[column] for column in columns] for row in rows[:_FINDINGS_MAX]]
    if len(rows) > _FINDINGS_MAX:
        meaning += f" The first {_FINDINGS_MAX} are below, all are in the Parquet file."
    heads = [column.replace("_", " ") for column in columns]
    return Report(title, about, [Section("Findings", meaning, heads, cells)])
