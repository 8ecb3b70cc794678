"""The report of ``isthmus bench spark``: tables, and a page with a plot."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from isthmus_bench.page import html_table, key, page_of
from isthmus_bench.spark_scale import Report
from isthmus_bench.svg import line_plot
from isthmus_bench.sync_report import verdict_rows
from isthmus_bench.tables import Table, number


def headline(report: Report) -> str:
    """What was measured on what, in one line."""
    host = report.machine
    return f"latency job, warm, medians; {host['cores']} cores, {host['processor']}, Python {host['Python']}"


def tables(report: Report) -> Iterator[Table]:
    """The report as tables of text."""
    heads = ["rows", "cores", "s", "M events/s", "CPU s", "runs", "load average"]
    rows = [
        [
            f"{each.rows:,}",
            str(each.cores),
            number(each.seconds, 2),
            number(each.per_s / 1e6, 2),
            number(each.cpu_s, 2),
            str(each.runs),
            number(each.load, 1),
        ]
        for each in report.figures
    ]
    yield "Wall time", heads, rows
    heads = ["cores", "time", "begins at s", "s for 10^6 rows", "farthest from it"]
    lines = [
        [str(each.cores), each.time, number(each.begins_s, 2), number(each.per_million_s, 2), f"{each.farthest:.0%}"]
        for each in report.lines
    ]
    yield "The nearest lines", heads, lines
    yield "Targets", ["target", "limit", "measured", "met"], verdict_rows(report.verdicts)


def page(report: Report) -> str:
    """An HTML document that needs nothing else."""
    rows = sorted({each.rows for each in report.figures})
    seconds = {(each.cores, each.rows): each.seconds for each in report.figures}
    titles = {line.cores: f"local[{line.cores}]" for line in report.lines}
    cpu = {(each.cores, each.rows): each.cpu_s for each in report.figures}
    series: dict[str, tuple[int, list[float | None]]] = {}
    for cores, title in titles.items():
        for name, times in (("wall", seconds), ("CPU", cpu)):
            series[f"{title}, {name} time"] = (len(series), [times.get((cores, each)) for each in rows])
    parts = [
        "<h1>Wall time of the latency job by rows and cores</h1>",
        f"<p>{escape(headline(report))}.</p>",
        "<p>Both axes are logarithmic: linear is what grows by the same factor as its rows.</p>",
        "".join(key(colour, title) for title, (colour, _) in series.items()),
        line_plot([f"{each:,}" for each in rows], series, "s"),
        *(html_table(*table) for table in tables(report)),
    ]
    return page_of("isthmus bench spark", parts, len(series))
