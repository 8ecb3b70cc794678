"""What synchronous mode costs and would cost, as a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from isthmus_spark.report import Report, Section, bars

Rows = Sequence[Mapping[str, Any]]

NO_APPENDS: Final = "What other links would cost is unknown: no appended batches were captured; give --append-ms."
_ROWS_MAX: Final = 60
_TITLES: Final = {"all": "All together", "namespace": "By namespace", "client_id": "By client"}
_LIMITS: Final = (
    ("clients", "Arrivals stay as captured. A client that sends its next request when it has an answer sends less: "
     "its answers take between least and then. in flight is what it would need to keep its rate: where that is more "
     "than its connections times max.in.flight (5), records wait in the producer, in larger batches."),
    ("commits", "Produce alone is modelled. Answers to commits of groups and transactions keep what was measured."),
    ("network", "The round trip is constant; bandwidth and loss cost nothing. Appends take as long as those that "
     "were captured, by chance. then has those of a partition side by side, as small batches are sent; most has each "
     "wait for the one before it, as large ones do. With --append-ms all are alike: p99 is too low."),
    ("time-outs", "Links stay In-Sync: what waits longer than sync.confirm.timeout.ms is shown as if it waited on."),
    ("capture", "What was not captured (sampling, other namespaces on the same connection, what is behind the first "
     "512 bytes of a request) delays nobody here. With a part of the traffic, then is too low."),
    ("gates", "A plugin's confirmations are gates, too: they are in what was measured, and not in what would be."),
)  # fmt: skip


def sync_report(measured: Rows, what_if: Rows | None, calibration: Rows, about: Mapping[str, str]) -> Report:
    """Of :mod:`isthmus_spark.jobs.sync`. ``what_if``: None if nothing is known of appends."""
    report = Report("Synchronous mode", about)
    report.sections.append(_measured(measured))
    if what_if is None:
        report.sections.append(Section("What it would cost", NO_APPENDS))
        return report
    report.sections += [*_what_if(what_if), _calibration(calibration)]
    text = "What the numbers above leave out."
    report.sections.append(Section("What the model does not know", text, ("of", "what"), _LIMITS))
    return report


def _measured(rows: Rows) -> Section:
    if not rows:
        return Section("What it costs", "No answer waited at a gate: no link was synchronous for what was captured.")
    (first, *_) = sorted(rows, key=lambda row: (row["dimension"] != "all", -row["waited"]))
    meaning = (
        f"{first['waited']:,} of {first['requests']:,} answers to {first['api']} waited for another cluster, or for a "
        f"plugin: {first['gate_share'] or 0:.0%} of their time. Percentiles are of those that waited."
    )
    heads = ["", "requests", "waited", "gate %"]
    heads += [f"{name} {each} ms" for name in ("gate", "whole") for each in ("p50", "p90", "p99", "max")]
    cells = [
        [
            _name(row),
            row["requests"],
            row["waited"],
            round(100 * (row["gate_share"] or 0), 1),
            *(_ms(row[f"{name}_{each}_us"]) for name in ("gate", "whole") for each in ("p50", "p90", "p99", "max")),
        ]
        for row in _largest(rows)
    ]
    return Section("What it costs", meaning, heads, cells)


def _what_if(rows: Rows) -> list[Section]:
    if not rows:
        return [Section("What it would cost", "No request was captured that an answer came to.")]
    heads = ["scenario", "", "requests", "added ms"]
    heads += [f"{name} {each} ms" for name in ("now", "then") for each in ("p50", "p90", "p99", "max")]
    heads += ["least p50 ms", "least p99 ms", "most p50 ms", "most p99 ms", "in flight now", "in flight then"]
    sections = []
    for dimension, title in _TITLES.items():
        chosen = _largest([row for row in rows if row["dimension"] == dimension and _matters(row)])
        cells = [
            [
                row["scenario"],
                _name(row),
                row["requests"],
                _ms(row["added_us"]),
                *(_ms(row[f"{name}_{each}_us"]) for name in ("now", "then") for each in ("p50", "p90", "p99", "max")),
                *(_ms(row[f"{name}_{each}_us"]) for name in ("least", "most") for each in ("p50", "p99")),
                *(None if row[name] is None else round(row[name], 2) for name in ("in_flight_now", "in_flight_then")),
            ]
            for row in chosen
        ]
        if not cells:
            continue
        meaning = (
            "Whole times now, and then: with synchronous links of these round trips, acks waiting for as many as the "
            "scenario says. Requests behind a held answer on their connection wait as well, whatever they ask: give "
            "consumers, and producers of other namespaces, connections of their own. least is without that, "
            "most has appends wait for each other."
        )
        lengths: dict[str, float] = {}
        for row in chosen:
            lengths[f"{_name(row)} now"] = _ms(row["now_p50_us"])
            lengths[f"{_name(row)} {row['scenario']}"] = _ms(row["then_p50_us"])
        plot = bars([(name, (length,)) for name, length in lengths.items()], (), "ms (p50)")
        sections.append(Section(f"What it would cost: {title.lower()}", meaning, heads, cells, plot))
    return sections


def _calibration(rows: Rows) -> Section:
    title = "How far the model is off"
    if not rows:
        text = (
            "Unknown: no answer to Produce waited for a link of which confirmations were captured. Capture a "
            "synchronous link, or give --real-rtt-ms, to have the model compared with it."
        )
        return Section(title, text)
    (whole,) = (row for row in rows if row["dimension"] == "all")
    text = (
        f"The model with the link that there was, beside what {whole['requests']:,} answers waited: p50 is "
        f"{whole['error_p50']:+.1%} off, p99 {whole['error_p99']:+.1%}. Steps of 2 % are as fine as it is measured."
    )
    names = [f"{name}_{each}_us" for name in ("measured", "model") for each in ("p50", "p90", "p99", "max")]
    heads = ["", "requests", *(name.replace("_us", " ms").replace("_", " ") for name in names), "p50 %", "p99 %"]
    cells = [
        [
            row["value"] or "-",
            row["requests"],
            *(_ms(row[name]) for name in names),
            *(round(100 * row[f"error_{each}"], 1) for each in ("p50", "p99")),
        ]
        for row in sorted(rows, key=lambda row: -row["requests"])[:_ROWS_MAX]
    ]
    return Section(title, text, heads, cells)


def _matters(row: Mapping[str, Any]) -> bool:
    return bool(row["api"] == "Produce" or row["added_us"] > 0.01 * row["now_p50_us"])


def _largest(rows: Rows) -> Rows:
    return sorted(rows, key=lambda row: -row["requests"])[:_ROWS_MAX]


def _name(row: Mapping[str, Any]) -> str:
    return str(row["api"]) if row["dimension"] == "all" else f"{row['value'] or '-'} {row['api']}"


def _ms(us: float) -> float:
    return round(float(us) / 1000, 3)
