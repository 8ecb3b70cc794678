"""What a tree's benchmark makes of its figures, on numbers made by hand; and that the header's two ways are one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from isthmus_bench.contestants import TREE, TREE_AT_LEAST_ONCE, TUNED
from isthmus_bench.load import batch
from isthmus_bench.replicate import CatchUp, Lag, Turn
from isthmus_bench.tree import header_cost, rewritten, rewritten_as_objects, verdicts_of
from isthmus_protocol.record_codec import decode_records, encode_batch
from isthmus_protocol.records import PLAIN_HEADER, Compression

CATCH_UP = CatchUp(first_record_s=0.4, records_per_s=1000.0, mb_per_s=1.0, cpu_ms_per_mb=8.0, cpu_share=0.8)
LAG = Lag(records_per_s=500.0, p50_ms=1.0, p99_ms=10.0, max_ms=20.0, ack_p50_ms=0.2, cpu_share=0.05)


def turn(records_per_s: float, p50_ms: float = 1.0) -> Turn:
    catch_up = replace(CATCH_UP, records_per_s=records_per_s, mb_per_s=records_per_s / 1000)
    return Turn(catch_up, {500: replace(LAG, p50_ms=p50_ms)}, 100.0)


@pytest.mark.parametrize(
    ("tree", "mirror_maker", "met"),
    [(50_000.0, 90_000.0, True), (49_000.0, 90_000.0, False), (30_000.0, 15_000.0, True), (30_000.0, None, False)],
)
def test_so_many_records_or_twice_as_many_as_mirror_maker(tree: float, mirror_maker: float | None, met: bool) -> None:
    turns = {TREE: [turn(1000.0)], TREE_AT_LEAST_ONCE: [turn(tree)]}
    if mirror_maker is not None:
        turns[TUNED] = [turn(mirror_maker)]
    speed, lag = verdicts_of(turns)
    assert speed.met is met
    assert lag.met


@pytest.mark.parametrize(("p50_ms", "met"), [(19.9, True), (20.0, False)])
def test_a_lag_that_is_too_long(p50_ms: float, met: bool) -> None:
    """At least once: that of the other way is stated alone."""
    turns = {TREE: [turn(1000.0, 90.0)], TREE_AT_LEAST_ONCE: [turn(60_000.0, p50_ms)]}
    assert [each.met for each in verdicts_of(turns)] == [True, met]


@pytest.mark.parametrize("compression", Compression)
def test_both_ways_to_write_the_header_give_the_same_records(compression: Compression) -> None:
    data = encode_batch(decode_records(batch(7, 100, 1_700_000_000_000)), PLAIN_HEADER, compression=compression)
    assert decode_records(rewritten(data)) == decode_records(rewritten_as_objects(data))


def test_what_the_header_costs_is_a_time() -> None:
    cost = header_cost(Compression.NONE, 16, 0.001)
    assert (cost.compression, cost.records) == ("none", 16)
    assert min(cost.apart_us, cost.objects_us) > 0
