"""The reversal benchmark's arithmetic, targets and tables, on numbers made by hand."""

from __future__ import annotations

import pytest

from isthmus_bench.reverse import FAILOVER, FAILOVER_MANY, KINDS, PROMOTE, TOLD, Figure, Move, Plan, Report, verdicts_of
from isthmus_bench.reverse_cli import tables
from isthmus_bench.sync_figures import Verdict

REVERSED = Move(0.5, 0.9, until_held_s=0.3, records_per_s=2_000, after_per_s=1_990)
WITH_TRANSACTIONS = Move(0.5, 0.9, until_held_s=0.3, announced_s=0.8, records_per_s=2_000, after_per_s=1_990)


def figure(kind: str, *moves: Move, rtt_ms: float = 0.0) -> Figure:
    return Figure(rtt_ms, kind, 4, list(moves))


def judged(*figures: Figure) -> dict[str, Verdict]:
    return {each.target: each for each in verdicts_of(figures)}


@pytest.mark.parametrize(
    ("rtt_ms", "pause_s", "met"), [(0.0, 1.0, True), (0.0, 1.01, False), (20.0, 1.08, True), (20.0, 1.09, False)]
)
def test_the_pause_may_be_a_second_and_four_round_trips(rtt_ms: float, pause_s: float, met: bool) -> None:
    (verdict,) = verdicts_of([figure("reverse", Move(0.4, 0.9), Move(pause_s, 1.5), rtt_ms=rtt_ms)])
    assert (verdict.target, verdict.measured, verdict.met) == (f"reverse, RTT {rtt_ms:g} ms: pause, s", pause_s, met)


@pytest.mark.parametrize(("announced_s", "met"), [(2.0, True), (2.01, False)])
def test_open_transactions_may_take_their_second_more(announced_s: float, met: bool) -> None:
    found = judged(figure("reverse, one left open", Move(0.9, 2.2, announced_s=announced_s)))
    assert found["reverse, one left open, RTT 0 ms: pause, s"].met
    assert found["reverse, one left open, RTT 0 ms: since announced, s"].met is met


@pytest.mark.parametrize(("kind", "limit"), [(FAILOVER, 1.0), (FAILOVER_MANY, 5.0)])
def test_what_a_failover_waits_for_is_not_counted(kind: str, limit: float) -> None:
    (verdict,) = judged(figure(kind, Move(4.7, 4.8, waits_s=3.9), Move(4.5, 4.6, waits_s=3.6), rtt_ms=20.0)).values()
    assert (verdict.limit, verdict.met) == (limit, True)
    assert verdict.measured == pytest.approx(0.9)


def test_a_promotion_may_ask_its_source() -> None:
    (verdict,) = judged(figure(PROMOTE, Move(1.05, 1.1), rtt_ms=20.0)).values()
    assert (verdict.limit, verdict.met) == (1.08, True)


def test_producers_are_enough_to_wait_for_acks_over_the_wan() -> None:
    plan = Plan()
    assert (plan.producers(0.0), plan.producers(20.0), plan.producers(100.0)) == (10, 20, 60)


def test_the_report_as_tables() -> None:
    figures = [
        figure("reverse", REVERSED, Move(0.7, 1.1, until_held_s=0.5, records_per_s=1_980, after_per_s=2_000)),
        figure("reverse, transactions", WITH_TRANSACTIONS),
        figure(TOLD, Move(1.5, 0.9, client_s=0.2), Move(0.5, 0.9, client_s=0.4)),
        figure(FAILOVER, Move(4.5, 4.6, waits_s=3.9), rtt_ms=20.0),
    ]
    report = Report({"cores": "2"}, "4.3.0", 2_000, figures, list(verdicts_of(figures)))
    near, far, targets = tables(report)
    assert (near[0], far[0]) == ("RTT 0 ms", "RTT 20 ms")
    assert near[2] == [
        ["reverse", "4", "2", "0.600", "0.700", "0.000", "-", "0.400", "1.000", "1,990", "1,995", "-", "-"],
        [
            "reverse, transactions",
            "4",
            "1",
            "0.500",
            "0.500",
            "0.000",
            "0.800",
            "0.300",
            "0.900",
            "2,000",
            "1,990",
            "-",
            "-",
        ],
        [TOLD, "4", "2", "1.000", "1.500", "0.000", "-", "-", "0.900", "-", "-", "0.300", "0.400"],
    ]
    assert far[2] == [["failover", "4", "1", "4.500", "4.500", "3.900", "-", "-", "4.600", "-", "-", "-", "-"]]
    assert [row[-1] for row in targets[2]] == ["yes"] * 4, "nobody judges what a client takes"
    assert report.as_dict()["verdicts"][0]["met"] is True


def test_clients_that_do_not_know_what_they_are_told_are_left_out() -> None:
    assert [each.name for each in Plan("4.3.0").kinds()] == [each.name for each in KINDS]
    assert TOLD not in [each.name for each in Plan("3.9.2").kinds()]


def test_every_kind_has_a_name_of_its_own() -> None:
    assert len({each.name for each in KINDS} | {PROMOTE, FAILOVER, FAILOVER_MANY}) == len(KINDS) + 3
