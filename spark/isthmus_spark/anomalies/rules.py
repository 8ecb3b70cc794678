"""The rules: pure, no I/O and no clock. State in, observations in their order in, findings and state out.

Windows are slices of one second, of which the last ``window_s`` are judged whenever one gets more. A finding is made
as soon as it is so, once in ``repeat_s`` for a subject. What leaves the window becomes a part of what is usual, which
is forgotten with a half-life. State is what :mod:`json` can write, with texts as keys; what is older than the
watermark is forgotten.

What is found does not depend on the order in which a batch's events came, nor on how they are cut into batches beyond
the moment it is reported: sequences are compared by what was acked, not by when.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from isthmus_spark.anomalies.limits import Limits

SLOW, GATE, ERRORS, REFUSED, SEQUENCES = "slow broker", "gate stall", "error burst", "refused write", "sequences"
DUPLICATE, REORDERED, GAP = "stored twice", "out of order", "sequence gap"
"""Findings of SEQUENCES."""

BASE: Final = 1.1
"""Of the logarithmic buckets that times are counted in: a percentile is at most 5 % off."""
PERCENTILE: Final = 0.9
SEQUENCES_MAX: Final = 2**31
"""After which they begin anew."""

State = dict[str, Any]


class Counted(NamedTuple):
    """So many requests of a subject with the same value in one second."""

    rule: str
    subject: str
    """JSON."""
    member: str
    """A broker of those that are compared; else empty."""
    second: int
    bucket: int
    """Of the time; or the error's code."""
    requests: int
    first_us: int
    last_us: int


class Acked(NamedTuple):
    """A batch of a producer with an id, as it was acked."""

    subject: str
    producer_id: int
    epoch: int
    sequence: int
    records: int
    offset: int
    at_us: int
    client_id: str


class Finding(NamedTuple):
    """What a rule has found."""

    rule: str
    subject: str
    facts: dict[str, Any]
    """What belongs to the subject beside it: the broker, the producer, the code."""
    window_us: tuple[int, int]
    measured: float
    limit: float
    unit: str
    requests: int
    first_us: int
    last_us: int


def bucket(time_us: float) -> int:
    return math.floor(math.log(max(time_us, 1)) / math.log(BASE))


def judge_counts(state: State, rows: Iterable[Counted], limits: Limits) -> Iterator[Finding]:
    """All of one rule and subject, of slow brokers, gates or errors."""
    by_second: dict[int, list[Counted]] = {}
    for row in rows:
        by_second.setdefault(row.second, []).append(row)
    for second, counted in sorted(by_second.items()):
        newest = state["newest"] = max(second, state.get("newest", second))
        members = state.setdefault("members", {})
        for row in sorted(counted):
            member = members.setdefault(row.member, {"slices": {}, "usual": {}, "aged": newest, "alerted": None})
            slice_ = member["slices"].setdefault(str(second), {"counts": {}, "first": row.first_us, "last": 0})
            slice_["counts"][str(row.bucket)] = slice_["counts"].get(str(row.bucket), 0) + row.requests
            slice_["first"] = min(slice_["first"], row.first_us)
            slice_["last"] = max(slice_["last"], row.last_us)
        rule, subject = counted[0].rule, counted[0].subject
        for member in members.values():
            _age(member, newest, limits, rule != ERRORS)
        for name, member in members.items():
            if member["alerted"] is None or newest >= member["alerted"] + limits.repeat_s:
                found = _judged(rule, subject, name, members, newest, limits)
                if found is not None:
                    member["alerted"] = newest
                    yield found


def judge_refused(state: State, rows: Iterable[Counted], limits: Limits) -> Iterator[Finding]:
    """Writes that the proxy refused: the first one at once, then how many there were since."""
    for row in sorted(rows, key=lambda row: (row.first_us, row.last_us)):
        state["newest"] = max(row.second, state.get("newest", row.second))
        state["requests"] = state.get("requests", 0) + row.requests
        state["first"] = min(state.get("first") or row.first_us, row.first_us)
        alerted = state.get("alerted")
        if alerted is None or row.second >= alerted + limits.repeat_s:
            requests, first_us = state["requests"], state["first"]
            state.update(alerted=row.second, requests=0, first=None)
            window = (first_us, max(first_us, row.last_us))
            yield Finding(REFUSED, row.subject, {}, window, requests, 0, "requests", requests, first_us, row.last_us)


def judge_sequences(state: State, rows: Iterable[Acked], limits: Limits) -> Iterator[Finding]:
    """All of one partition. ``state``: by producer id and epoch the last batches, ``[sequence, offset, records, us]``.

    Two acked batches are compared only by what no capture that has holes, and no order of arrival, can make up: two
    places for one sequence, a later sequence at an earlier place, or fewer places between two than records are missing.
    """
    producers = state.setdefault("producers", {})
    for row in sorted(rows):
        state["newest"] = max(row.at_us // 1_000_000, state.get("newest", 0))
        batches = producers.setdefault(f"{row.producer_id} {row.epoch}", [])
        yield from _compared(batches, row)
        # The oldest go: those with the lowest sequences, as far as they have not begun anew.
        del batches[: max(0, len(batches) - limits.batches_kept)]
    if len(producers) > limits.producers_kept:
        newest_last = sorted(producers, key=lambda name: (max(each[3] for each in producers[name]), name))
        for name in newest_last[: len(producers) - limits.producers_kept]:
            del producers[name]


def forget(state: dict[str, State], watermark_s: float) -> None:
    """Subjects that had nothing since the watermark; and producers of partitions that had."""
    for key in [key for key, subject in state.items() if subject["newest"] < watermark_s]:
        del state[key]
    for subject in state.values():
        producers = subject.get("producers", {})
        for name in [name for name in producers if max(each[3] for each in producers[name]) < watermark_s * 1e6]:
            del producers[name]


# ---- windows ----


def _age(member: State, newest: int, limits: Limits, usual: bool) -> None:
    """What has left the window becomes usual, if that is asked for; what was usual counts less."""
    if newest > member["aged"]:
        kept = 0.5 ** ((newest - member["aged"]) / limits.usual_s)
        member["usual"] = {
            key: round(count * kept, 3) for key, count in member["usual"].items() if count * kept >= 0.01
        }
        member["aged"] = newest
    for second in [second for second in member["slices"] if int(second) <= newest - limits.window_s]:
        counts = member["slices"].pop(second)["counts"]
        if usual:
            member["usual"] = _sum((member["usual"], counts))


def _judged(
    rule: str, subject: str, name: str, members: dict[str, State], newest: int, limits: Limits
) -> Finding | None:
    member = members[name]
    counts = _window(member)
    requests = sum(counts.values())
    if not requests:
        return None
    facts: dict[str, Any]
    if rule == ERRORS:
        errors = {code: count for code, count in counts.items() if int(code) > 0}
        failed = sum(errors.values())
        measured, limit, unit = failed / requests, limits.error_share, "share"
        if failed < limits.error_requests or measured < limit:
            return None
        facts = {"error_code": int(max(errors, key=lambda code: (errors[code], code))), "errors": failed}
    else:
        enough, floor, times = (
            (limits.slow_requests, limits.slow_ms, limits.slow_times)
            if rule == SLOW
            else (limits.gate_requests, limits.gate_ms, limits.gate_times)
        )
        if requests < enough:
            return None
        windows = (_window(other) for each, other in members.items() if each != name)
        others = sorted(_percentile_ms(each) for each in windows if sum(each.values()) >= enough)
        if (
            others
        ):  # their median, the higher one of two: a second slow one hides nothing, and an idle one means nothing
            compared, facts = others[len(others) // 2], {"compared_with": "the others"}
        elif sum(member["usual"].values()) >= limits.usual_requests:
            compared, facts = _percentile_ms(member["usual"]), {"compared_with": "its usual"}
        else:
            return None
        measured, unit = _percentile_ms(counts), "ms"
        limit = max(floor, times * compared)
        if measured < limit:
            return None
        if rule == SLOW:
            facts["broker_id"] = int(name)
    first_us = min(slice_["first"] for slice_ in member["slices"].values())
    last_us = max(slice_["last"] for slice_ in member["slices"].values())
    window = ((newest - limits.window_s + 1) * 1_000_000, (newest + 1) * 1_000_000)
    return Finding(rule, subject, facts, window, round(measured, 3), round(limit, 3), unit, requests, first_us, last_us)


def _window(member: State) -> dict[str, int]:
    return _sum(slice_["counts"] for slice_ in member["slices"].values())


def _sum(counts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    total: dict[str, Any] = {}
    for each in counts:
        for key, count in each.items():
            total[key] = total.get(key, 0) + count
    return total


def _percentile_ms(counts: Mapping[str, float]) -> float:
    left = sum(counts.values()) * PERCENTILE
    for each in sorted(counts, key=int):
        left -= counts[each]
        if left <= 1e-9:
            return float(BASE ** (int(each) + 0.5)) / 1000
    raise AssertionError("a percentile of nothing")


# ---- sequences ----


def _compared(batches: list[list[int]], row: Acked) -> Iterator[Finding]:
    """Compare a batch with those before and behind it by sequence, and put it between them."""
    mine = [row.sequence, row.offset, row.records, row.at_us]
    for at, known in enumerate(batches):
        if known[0] == row.sequence:
            if row.offset not in (known[1], *known[4:]):
                yield _found(DUPLICATE, row, known, row.records)
                known.append(max(known[1], row.offset))  # not reported again
                known[1] = min(known[1], row.offset)  # what comes next is compared with this
            known[3] = max(known[3], row.at_us)
            return
        if _later(known[0], row.sequence):
            batches.insert(at, mine)
            break
    else:
        at = len(batches)
        batches.append(mine)
    if at:
        yield from _pair(row, batches[at - 1], mine)
    if at + 1 < len(batches):
        yield from _pair(row, mine, batches[at + 1])


def _later(sequence: int, other: int) -> bool:
    return 0 < (sequence - other) % SEQUENCES_MAX < SEQUENCES_MAX // 2


def _pair(row: Acked, before: list[int], after: list[int]) -> Iterator[Finding]:
    missing = (after[0] - before[0] - before[2]) % SEQUENCES_MAX
    room = after[1] - before[1] - before[2]
    other = before if after[0] == row.sequence else after
    if after[1] < before[1]:
        yield _found(REORDERED, row, other, row.records)
    elif max(0, room) < missing < SEQUENCES_MAX // 2:
        yield _found(GAP, row, other, missing - max(0, room))


def _found(finding: str, row: Acked, other: list[int], records: int) -> Finding:
    facts = {
        "finding": finding,
        "producer_id": row.producer_id,
        "producer_epoch": row.epoch,
        "client_id": row.client_id,
        "base_sequence": row.sequence,
        "base_offset": row.offset,
        "other_sequence": other[0],
        "other_offset": other[1],
    }
    window = (min(row.at_us, other[3]), max(row.at_us, other[3]))
    return Finding(SEQUENCES, row.subject, facts, window, records, 0, "records", 1, window[0], row.at_us)
