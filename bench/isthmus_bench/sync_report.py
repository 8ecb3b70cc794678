"""The report of ``isthmus bench sync``: tables, and a page of its own with plots."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape
from typing import Final

from isthmus_bench.page import html_table, key, page_of
from isthmus_bench.svg import line_plot
from isthmus_bench.sync_environment import BIG_BUFFER_BYTES
from isthmus_bench.sync_figures import TARGET_RTT_MS, Figure, Report, Verdict
from isthmus_bench.sync_plan import LOADS, SCENARIOS
from isthmus_bench.tables import Table, number

PLACES: Final = ("p50", "p90", "p99", "p99.9", "max")
DEFAULT_BUFFERS: Final = "Kafka's defaults (send and receive 100 KiB, replica 64 KiB)"


def headline(report: Report) -> str:
    """What was measured on what, in one line."""
    host = report.machine
    cores = f"{host['cores']} cores ({host['idle cores']} when idle; each site's: {host['cores of each site']})"
    return (
        f"Kafka {report.version}; {cores}, {host['memory']}, {host['kernel']}, Python {host['Python']}; "
        f"medians of {report.rounds} rounds of {report.seconds:g} s; 1 KB records, one a request, acks=all"
    )


def met(verdict: Verdict) -> str:
    """``yes``, ``NO``, or that it was not measured."""
    return "not measured" if verdict.met is None else "yes" if verdict.met else "NO"


def wan_table(report: Report) -> Table:
    heads = ["WAN: RTT", "measured p50 ms", "p99 ms", "max ms", "packets late under load, p99 us"]
    rows = [
        [
            f"{each.rtt_ms:g} ms",
            number(each.measured.p50_ms, 2),
            number(each.measured.p99_ms, 2),
            number(each.measured.max_ms, 2),
            number(each.late_p99_us, 0),
        ]
        for each in report.wans
    ]
    return "The WAN", heads, rows


def scenario_table() -> Table:
    buffers = f"{BIG_BUFFER_BYTES >> 20} MiB"
    rows = [
        [each.title, each.durability, buffers if each.big_buffers else DEFAULT_BUFFERS]
        for each in SCENARIOS
    ]  # fmt: skip
    return "Scenarios", ["scenario", "an ack means", "brokers' socket buffers"], rows


def figure_row(figure: Figure) -> list[str]:
    """A line of a load's table."""
    latencies = (figure.p50_ms, figure.p90_ms, figure.p99_ms, figure.p999_ms, figure.max_ms)
    shares = (figure.cpu.get(name) for name in ("brokers", "proxies", "load"))
    return [
        title_of(figure.scenario),
        number(figure.per_s, 0),
        *(number(each, 2) for each in latencies),
        number(figure.late_p99_ms, 2),
        *("-" if share is None else f"{share:.0%}" for share in shares),
    ]


FIGURE_HEADS: Final = ["requests/s", "p50 ms", "p90", "p99", "p99.9", "max", "sent late p99"]
CPU_HEADS: Final = ["CPU: brokers", "proxies", "load"]


def title_of(scenario: str) -> str:
    return next(each.title for each in SCENARIOS if each.name == scenario)


def by_load(report: Report) -> Iterator[tuple[float, str, list[Figure]]]:
    """Round trip, title of the load, and what was measured."""
    for wan in report.wans:
        for load in LOADS:
            found = [each for each in report.figures if (each.rtt_ms, each.load) == (wan.rtt_ms, load.name)]
            if found:
                yield wan.rtt_ms, load.title, found


def missing_table(report: Report) -> Table:
    rows = [
        [
            title_of(each.scenario),
            each.load or "all loads",
            "all" if each.rtt_ms is None else f"{each.rtt_ms:g} ms",
            each.reason,
        ]
        for each in report.missing
    ]
    return "Not measured", ["scenario", "load", "RTT", "why"], rows


def verdict_rows(verdicts: Iterable[Verdict]) -> list[list[str]]:
    return [
        [
            each.target,
            "-" if each.limit is None else ("at least " if each.least else "at most ") + number(each.limit, 2),
            number(each.measured, 2),
            met(each),
        ]
        for each in verdicts
    ]


def verdict_table(report: Report) -> Table:
    heads = ["target", "limit", "measured", "met"]
    return f"Targets (RTT {TARGET_RTT_MS:g} ms)", heads, verdict_rows(report.verdicts)


def tables(report: Report) -> Iterator[Table]:
    """The report as tables of text."""
    yield wan_table(report)
    yield scenario_table()
    for rtt_ms, title, figures in by_load(report):
        heads = ["scenario", *FIGURE_HEADS, *CPU_HEADS]
        yield f"RTT {rtt_ms:g} ms: {title}", heads, [figure_row(each) for each in figures]
    if report.missing:
        yield missing_table(report)
    yield verdict_table(report)


# ---- a page ----


def page(report: Report) -> str:
    """An HTML document that needs nothing else."""
    parts = [
        "<h1>What an ack costs that means both sites have it</h1>",
        f"<p>{escape(headline(report))}.</p>",
        "<p>Latencies of open loops (requests/s) count from when a request was due. A Java producer's are whole "
        "milliseconds, from send() to the callback. CPU shares are of one core.</p>",
    ]
    parts += [html_table(*table, words=True) for table in (scenario_table(), missing_table(report)) if table[2]]
    parts.append(html_table(*wan_table(report)))
    machine = [[name, value] for name, value in report.machine.items()]
    parts.append(html_table("The machine", ["", ""], machine, words=True))
    for rtt_ms, title, figures in by_load(report):
        parts += _load(f"RTT {rtt_ms:g} ms: {title}", figures)
    parts.append(html_table(*verdict_table(report)))
    return page_of("isthmus bench sync", parts, len(SCENARIOS))


def _load(title: str, figures: list[Figure]) -> Iterator[str]:
    numbers = {each.name: index for index, each in enumerate(SCENARIOS)}
    yield f"<h3>{escape(title)}</h3>"
    yield "".join(key(numbers[each.scenario], title_of(each.scenario)) for each in figures)
    yield line_plot(
        PLACES,
        {
            title_of(each.scenario): (
                numbers[each.scenario],
                [each.p50_ms, each.p90_ms, each.p99_ms, each.p999_ms, each.max_ms],
            )
            for each in figures
        },
        "ms",
    )
    yield html_table("", ["scenario", *FIGURE_HEADS, *CPU_HEADS], [figure_row(each) for each in figures])
