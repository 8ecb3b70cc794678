"""What a tree's logs may not hold is found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from confluent_kafka import TIMESTAMP_CREATE_TIME
from support.distributing import HEADER
from support.links import Read
from support.tree_proof import Place, Proof, ways

from isthmus_plugins.distribution.copy_flags import write_flags
from isthmus_plugins.distribution.tree import Subtree, Tree

TREE = Tree(1, Subtree(8, (Subtree(4, ("a", "b")), "c")))
FOUR, EIGHT, BOTH = 1 << 3, 1 << 7, 1 << 3 | 1 << 7
LOGS: Mapping[str, list[tuple[bytes, int | None]]] = {
    "a": [(b"a-x-0", None), (b"c-x-0", EIGHT), (b"a-x-2", None), (b"b-x-0", FOUR), (b"c-x-2", BOTH)],
    "b": [(b"a-x-0", FOUR), (b"b-x-0", None), (b"c-x-2", EIGHT), (b"c-x-0", BOTH), (b"a-x-2", FOUR)],
    "c": [(b"a-x-0", EIGHT), (b"a-x-2", EIGHT), (b"c-x-0", None), (b"b-x-0", EIGHT), (b"c-x-2", None)],
}
"""Of one partition: values and flags. The target of c was a, then b."""


def beside(value: bytes) -> dict[str, Any]:
    return {"key": value[:1], "headers": [("kept", value), ("kept", None)], "timestamp": 1_000}


def record(offset: int, value: bytes, flags: int | None, **changed: Any) -> Read:
    own = beside(value) | changed
    headers = own["headers"] + ([] if flags is None else [(HEADER, write_flags(flags))])
    return Read(offset, own["key"], value, (TIMESTAMP_CREATE_TIME, own["timestamp"]), tuple(headers))


def proof(logs: Mapping[str, list[tuple[bytes, int | None]]]) -> Proof:
    made = Proof(TREE, beside)
    for cluster, log in logs.items():
        made.read(cluster, 0, [record(offset, *each) for offset, each in enumerate(log)])
    return made


def test_the_ways_of_a_tree() -> None:
    assert ways(TREE) == {
        "a": [{"b": FOUR, "c": EIGHT}],
        "b": [{"a": FOUR, "c": EIGHT}],
        "c": [{"a": EIGHT, "b": BOTH}, {"b": EIGHT, "a": BOTH}],
    }


def test_nothing_is_wrong() -> None:
    made = proof(LOGS)
    assert made.faults("ab") == []
    assert list(made.doubled()) == []
    assert made.own["c"] == {b"c-x-0": Place(0, 2), b"c-x-2": Place(0, 4)}


@pytest.mark.parametrize(
    ("cluster", "at", "put", "fault"),
    [
        ("b", 0, [], "a-x-0 is not at b"),
        ("b", 0, [(b"a-x-0", EIGHT)], "a-x-0 has come by no way"),
        ("b", 3, [(b"c-x-0", EIGHT)], "c-x-0 has come by no way"),
        ("b", 0, [(b"a-x-0", FOUR), (b"a-x-0", EIGHT)], "a-x-0 has copies that came by no way"),
        ("b", 0, [(b"a-x-0", FOUR), (b"a-x-0", None)], "a-x-0 at b, 0-1: has no flags"),
        ("a", 0, [(b"a-x-0", None), (b"a-x-0", FOUR)], "a-x-0 at a, 0-1: came back"),
        ("a", 0, [(b"a-x-0", None), (b"c-x-4", EIGHT)], "c-x-4 at a: no cluster has committed it"),
        ("a", 0, [(b"a-x-0", None), (b"d-x-0", EIGHT)], "d-x-0 at a, 0-1: nobody's"),
        ("a", 0, [(b"a-x-0", None), (b"b-x-1", FOUR)], "b-x-1 at a, 0-1: not as it was produced"),
        ("b", 0, [(b"a-x-2", FOUR), (b"a-x-0", FOUR)], "a-x-0 at b, 0-1: behind number 2"),
    ],
)
def test_a_fault_is_found(cluster: str, at: int, put: list[tuple[bytes, int | None]], fault: str) -> None:
    log = [*LOGS[cluster][:at], *put, *LOGS[cluster][at + 1 :]]
    found = proof({**LOGS, cluster: log}).faults("ab")
    assert len(found) == 1, found
    assert found[0].startswith(fault)


@pytest.mark.parametrize("changed", [{"key": b"z"}, {"headers": [("kept", None)]}, {"timestamp": 1_001}])
def test_a_message_that_was_changed_is_found(changed: dict[str, Any]) -> None:
    made = Proof(TREE, beside)
    assert made.read("a", 0, [record(0, b"b-x-0", FOUR, **changed)]) == []
    (fault,) = made.faults("ab")
    assert "not as it was produced" in fault


def test_a_copy_that_is_there_twice_is_told_and_no_fault() -> None:
    made = proof({**LOGS, "b": [*LOGS["b"], (b"c-x-0", EIGHT), (b"a-x-0", FOUR)]})
    assert made.faults("ab") == []
    assert sorted(made.doubled()) == [("b", b"a-x-0"), ("b", b"c-x-0")]


def test_of_a_cluster_that_is_lost_is_there_what_it_passed_on() -> None:
    logs = {"b": [each for each in LOGS["b"] if each[0] != b"a-x-2"], "c": LOGS["c"]}
    assert proof(logs).faults("ab", {"a": {b"a-x-0", b"a-x-2"}}) == []
    assert proof(logs).faults("ab", {"a": {b"a-x-0"}}) == ["a-x-2 at c: no cluster has committed it"]
    without = {**logs, "b": logs["b"][:-1]}
    assert proof(without).faults("ab", {"a": {b"a-x-0", b"a-x-2"}}) == ["c-x-0 is not at b"]
