"""What lag and states look like as a report, what they mean, and what to do."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from isthmus_spark.plots import lanes, lines
from isthmus_spark.report import Report, Section

Rows = Sequence[Mapping[str, Any]]

TITLE: Final = "Lag and states of links"
NOTHING: Final = "No link events were captured that tell a state."
HOW_TO: Final = (
    "Proxies write them, beside the captured requests, for namespaces with the plugin capture that a link has. "
    "Capture at both clusters: each end knows what the other one does not."
)
COLOURS: Final = {
    "In-Sync": "#2f7d4f",
    "Following": "#7fbf8e",
    "unknown": "#c9ced6",
    "Syncing": "#f0d264",
    "Catching Up": "#e8b04a",
    "Out-Of-Sync": "#e08a3c",
    "Disconnected": "#b0413e",
    "Stopped": "#7b6ba8",
    "Refused": "#59427f",
    "Diverged": "#1d2733",
}
_LANES_MAX: Final = 40
_LINES_MAX: Final = 6
_ROWS_MAX: Final = 300

ADVICE: Final = {
    "AUTHENTICATION_ERROR": "The proxies' link secrets differ: make the link again.",
    "UNRESOLVABLE_BOOTSTRAP_ERROR": "The peer's name is not known here: see DNS and the link's remote address.",
    "BOOTSTRAP_TCP_CONNECTION_FAILED_ERROR": "Nothing listens at the peer's address: is its proxy up?",
    "TIMEOUT_ERROR": "The peer takes too long: see the network between the clusters, and the load of its proxy.",
    "CONNECTION_LOST": "The network broke, or the other proxy ended: compare with its log at this time.",
    "PEER_SILENT": "The connection stands and nothing comes: the other proxy or the network stands still.",
    "NOT_CONNECTED_YET": "A proxy was started, or a partition resumed. If it stays so, the next reason says why.",
    "PEER_VERSION_UNSUPPORTED": "Upgrade the older side.",
    "NOT_ENCRYPTED": "Upgrade the older side, or give both link listeners TLS.",
    "PEER_IS_ANOTHER_CLUSTER": "The remote address leads to another cluster than the link was made with: correct it.",
    "PEER_HAS_NO_SUCH_LINK": "The link was deleted there: delete it here, or create it again.",
    "NO_LOCAL_LEADER": "The partition has no leader in this cluster: see its brokers.",
    "NOT_LEVEL_YET": "Acks wait until the follower is level. If it stays so, it takes less than comes in.",
    "NO_LEASE": "A proxy had no lease of its cluster: see its readiness, and the control log.",
    "LEASE_RAN_OUT": "The follower has not heard the source: what is acked since is known at the source alone.",
    "SOURCE_END_UNKNOWN": "The source's proxy cannot read where its logs end: see its brokers, and quotas.",
    "TARGET_LOST_RECORDS": "The target's brokers lost the end of a log (power, disks); it is copied again by itself.",
    "DECISION_NOT_STORED": "A commit marker waits: see the leaders of the two topics of transactions in the message.",
    "TARGET_WRITTEN_BY_OTHERS": "Somebody wrote to the follower past the proxy: close that way, then see truncations.",
    "UNEXPECTED_TRUNCATION": "The source lost records (unclean leader election): see `isthmus link truncations`.",
    "SOURCE_LOST_RECORDS": "The source lost what was acked In-Sync: `isthmus topic truncate`, or a failover, decides.",
    "TRUNCATING": "The follower is made equal again by itself: see `isthmus link truncations`.",
    "SALVAGE_FAILED": "What would be cut cannot be saved: see the disk of the proxy, and the message.",
    "TARGET_REFUSES_RECORDS": "The target's broker objects: see max.message.bytes, quotas and ACLs.",
    "TRANSACTION_VERIFICATION_ENABLED": "Attach with --disable-transaction-verification (docs/operations.md).",
    "TARGET_TOPIC_NOT_EMPTY": "Attach with --truncate-target, or `isthmus topic recreate`, to lose what it holds.",
    "TARGET_TOPIC_MAY_BE_DELETED": "Somebody deleted the follower's topic: `isthmus topic recreate`.",
    "TARGET_TOPIC_ID_CHANGED": "Somebody made the follower's topic anew: `isthmus topic recreate`.",
    "SOURCE_TOPIC_MAY_BE_DELETED": "The source has no such topic: `isthmus topic forget` once that is meant so.",
    "SOURCE_TOPIC_ID_CHANGED": "The source's topic was made anew: `isthmus topic recreate` follows the new one.",
    "SOURCE_PARTITIONS_DECREASED": "The target has more partitions than the source: `isthmus topic recreate`.",
    "STOPPED_BY_OPERATOR": "Somebody stopped it: see the control log for who and when.",
    "KEYRING_UNUSABLE": "The key file of the offsets topic cannot be read: see its path and permissions.",
    "INTERNAL_ERROR": "A defect of the proxy: its log has more. Please report it.",
}
_OTHER: Final = "See the message in `isthmus link describe`, and docs/operations.md, States."


def links_report(incidents: Rows, shares: Rows, slices: Rows, troubles: Rows, about: Mapping[str, str]) -> Report:
    """Of what :mod:`isthmus_spark.jobs.link_states` and :mod:`isthmus_spark.jobs.incidents` found.

    ``troubles``: the first intervals of the timeline that are not Following or In-Sync.
    """
    report = Report(TITLE, about)
    if not slices:
        report.sections.append(Section("Nothing to show", f"{NOTHING} {HOW_TO}"))
        return report
    report.sections += [
        _timeline(slices),
        *_lag(slices),
        _incidents(incidents),
        *_reasons(incidents, troubles),
        _shares(shares),
    ]
    if troubles:
        text = "When partitions were not Following or In-Sync. All intervals are in the Parquet file of the timeline."
        columns = [name for name in troubles[0] if name != "proxy"]
        cells = [[_cell(row[name]) for name in columns] for row in troubles[:_ROWS_MAX]]
        if len(troubles) > _ROWS_MAX:
            text += f" The first {_ROWS_MAX} are below."
        report.sections.append(Section("Intervals", text, [_head(name) for name in columns], cells))
    return report


def _timeline(slices: Rows) -> Section:
    by_lane: dict[str, list[tuple[datetime, datetime, str]]] = {}
    for row in _in_order(slices):
        by_lane.setdefault(lane(row), []).append((_utc(row["begun"]), _utc(row["ended"]), row["state"]))
    meaning = (
        "One lane for each end of each link, by the worst state of its partitions. Grey is unknown: the proxy that "
        "should have told fell silent, or a new process had just begun. That is neither an incident nor health."
    )
    if len(by_lane) > _LANES_MAX:
        meaning += f" The first {_LANES_MAX} of {len(by_lane)} are shown."
    return Section("Timeline", meaning, plot=lanes(dict(list(by_lane.items())[:_LANES_MAX]), COLOURS))


def _lag(slices: Rows) -> list[Section]:
    sections = []
    for name, unit, scale, title, meaning in (
        ("lag_ms", "s", 1000.0, "Lag in time", "The age of the oldest record that a follower lacks."),
        ("lag", "offsets", 1.0, "Lag in offsets", "What the partition lacks that lacks most."),
    ):
        points: dict[str, list[tuple[datetime, float | None]]] = {}
        for row in _in_order(slices):
            value = None if row[name] is None else row[name] / scale
            points.setdefault(lane(row), []).append((_utc(row["begun"]), value))
        most = sorted(points, key=lambda each: -max((value or 0 for _, value in points[each]), default=0))
        plot = lines({each: points[each] for each in most[:_LINES_MAX]}, unit)
        text = f"{meaning} A hole is where nobody told it. The follower end does not know it during a cut."
        if len(points) > _LINES_MAX:
            text += f" The {_LINES_MAX} worst are shown."
        sections.append(Section(title, text if plot else "No follower was told to lack anything.", plot=plot))
    return sections


def _incidents(incidents: Rows) -> Section:
    if not incidents:
        return Section("Incidents", "There was none: no partition was in trouble for longer than the limits.")
    still = sum(row["ended"] is None for row in incidents)
    risky = sum(bool(row["at_risk_offsets"]) for row in incidents)
    meaning = (
        f"{len(incidents)} incidents, {still} of them not over when the capture ended. RTO is the time until all "
        "partitions were well again; RPO what the follower lacked at worst, each partition at its own worst moment "
        "(rpo is: all of it is known, at least so much, or unknown). At risk is what of it may have been acked: while "
        "a partition is In-Sync, acks wait for the other cluster, and nothing is; from Out-Of-Sync on, and over "
        f"asynchronous links, all that is lacked counts. {risky} incidents had records at risk. Unseen are seconds in, "
        "or right before, the incident of which nobody told: RTO is an upper bound then, or it began earlier."
    )
    columns = list(incidents[0])
    cells = [[_cell(row[name]) for name in columns] for row in incidents[:_ROWS_MAX]]
    return Section("Incidents", meaning, [_head(name) for name in columns], cells)


def _reasons(incidents: Rows, troubles: Rows) -> list[Section]:
    texts = [row["reasons"] for row in incidents] + [row["reason"] for row in troubles]
    codes = sorted({code for text in texts for code in re.findall(r"[A-Z]+(?:_[A-Z]+)+", text or "")})
    if not codes:
        return []
    cells = [[code, ADVICE.get(code, _OTHER)] for code in codes]
    return [Section("What to do", "By the reasons that were told.", ("reason", "what to do"), cells)]


def _shares(shares: Rows) -> Section:
    cells = [
        [row["link"], row["cluster"], row["role"], row["state"], round(row["seconds"], 1), round(100 * row["share"], 2)]
        for row in shares
    ]
    text = "The time of all partitions together, as each end of a link saw them."
    return Section("Time in each state", text, ("link", "seen at", "role", "state", "partition seconds", "%"), cells)


def lane(row: Mapping[str, Any]) -> str:
    """What a link's end is called in plots."""
    there = f"{row['source_cluster'][:8]} → {row['target_cluster'][:8]}"
    return f"{row['link']} {there} ({row['role']})"


def _in_order(slices: Rows) -> Rows:
    return sorted(slices, key=lambda row: (row["link"], row["source_cluster"], row["role"] or "", row["slice"]))


def _utc(moment: datetime) -> datetime:
    return moment.astimezone(UTC)  # Spark hands out local times without a zone


def _cell(value: Any) -> Any:
    return _utc(value).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] if isinstance(value, datetime) else value


def _head(name: str) -> str:
    return name.replace("_ms", " ms").removesuffix("_s").replace("_", " ") + (" s" if name.endswith("_s") else "")
