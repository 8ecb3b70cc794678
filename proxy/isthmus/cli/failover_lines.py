"""What a failover says, as the command line prints it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from isthmus.cli.left_out_lines import left_out_lines
from isthmus.cli.output import columns, prefix_cell


def moment(at_ms: int) -> str:
    """A time of the wall clock, in UTC."""
    return datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="seconds")


def heard(link: dict[str, Any]) -> str:
    """When the other cluster of a link was heard last."""
    seconds = link["last_heard_seconds"]
    return "never" if seconds is None else f"{seconds:.1f}s ago"


def failed_over(report: dict[str, Any]) -> Iterator[str]:
    """A FailoverReport."""
    yield f"link {report['link_name']} is {report['mode']}, the other cluster was heard {heard(report)}"
    yield ""
    yield from columns(
        ("TYPE", "LOCAL", "REMOTE", "TOPICS", "TRANSACTIONS_OPEN", "DECIDED", "ENDED", "PROMOTED"),
        (
            (
                each["type"],
                prefix_cell(each["local"]),
                prefix_cell(each["remote"]),
                len(each["topics"]),
                each["transactions_open"],
                each["transactions_decided"],
                each["transactions_ended"],
                each["promoted"],
            )
            for each in report["namespaces"]
        ),
    )
    claims = [claim for each in report["namespaces"] for claim in each["claims"]]
    if claims:
        yield ""
        yield "Whatever the source acked before ALL_ACKED_UNTIL is here; of what it acked later nothing is known."
        yield from columns(
            ("TOPIC", "PARTITION", "END", "ALL_ACKED_UNTIL", "AGO", "REASON"),
            (
                (
                    each["topic"],
                    each["partition"],
                    each["end"],
                    *_until(each),
                    each["message"] if each["in_sync_until_ms"] is None or each["degrade_after_ms"] else None,
                )
                for each in claims
            ),
        )
    yield from _group_claims(report["namespaces"])
    missing = [reason for each in report["namespaces"] for reason in each["missing"]]
    if missing:
        yield ""
        yield from missing
    if differ := logs_differ(report):
        yield ""
        yield "not what the source had, as both were compared last; it stays as it is here. Once the source is back,"
        yield "see what it has at these offsets before you have it follow:"
        yield from differ
    yield from of_topics(report)
    yield from left_out_of(report)
    kept = [topic for each in report["namespaces"] for topic in each["settings_kept"]]
    if kept:
        yield ""
        yield f"The source never told its settings of these; they keep a follower's: {', '.join(kept)}"


def logs_differ(report: dict[str, Any]) -> list[str]:
    """Partitions that hold something else than the source's."""
    return [why for each in report["namespaces"] for why in each.get("logs_differ", ())]  # versions before have it not


def of_topics(report: dict[str, Any]) -> Iterator[str]:
    """What the brokers refuse, or would refuse, of what topics had at the source, and which lack replicas."""
    if refused := [setting for each in report["namespaces"] for setting in each["settings_refused"]]:
        yield ""
        yield (
            "the brokers here would refuse:" if report["dry_run"] else "refused by the brokers here, to be set by hand:"
        )
        yield from refused
    if lacking := dict.fromkeys(why for each in report["namespaces"] for why in each["replicas_lacking"]):
        yield ""
        yield "fewer replicas than there are to be:"
        yield from lacking


def left_out_of(report: dict[str, Any]) -> Iterator[str]:
    """What the source's namespaces held that is not here."""
    yield from left_out_lines([name for each in report["namespaces"] for name in each["left_out"]])


def _until(claim: dict[str, Any]) -> tuple[str | None, str | None]:
    """Until when all that was acked is here, and how long ago that was."""
    if claim["in_sync_until_ms"] is None:
        return None, None
    return moment(claim["in_sync_until_ms"]), f"{claim['in_sync_until_seconds_ago']:.0f}s"


def _group_claims(namespaces: list[dict[str, Any]]) -> Iterator[str]:
    for each in namespaces:
        if each["type"] != "consumer-group":
            continue
        until_ms = each["all_groups_until_ms"]
        until = "an unknown moment" if until_ms is None else moment(until_ms)
        yield ""
        yield f"Whatever the source acked to groups of {prefix_cell(each['local'])} before {until} is here; of these:"
        yield from columns(
            ("GROUP", "ALL_ACKED_UNTIL", "AGO", "REASON"),
            (
                (
                    claim["group"],
                    *_until(claim),
                    claim["message"] if claim["in_sync_until_ms"] is None or claim["degrade_after_ms"] else None,
                )
                for claim in each["group_claims"]
            ),
        )
