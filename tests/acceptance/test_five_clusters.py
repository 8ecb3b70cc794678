"""User story: five clusters that all take writes, from nothing; one is lost and comes back, a group moves, and back."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest
from support import groups
from support.links import Read, Side, until
from support.pasted import Shell, free_ports
from support.runbooks import PastedRunbook, steps

from isthmus_bench import ready_commands
from isthmus_bench.kafka import KafkaCluster

pytestmark = [pytest.mark.brokers, pytest.mark.suite("stories"), pytest.mark.timeout(900)]

PAGE: Final = "five-clusters"
NAMES: Final = ("a", "b", "c", "d", "e")
TOPIC: Final = "orders-eu"
GROUP: Final = "billing-1"
CLIENTS: Final = dict(zip(NAMES, (21192, 22192, 23192, 24192, 25192), strict=True))
"""Ports of the page at which clients bootstrap."""
FIRST: Final = ["one", "two", "three", "four", "five"]
LATER: Final = ["six", "seven"]
MARGIN_S: Final = 10.0
"""Of the page; a time may be a tenth of it earlier."""
BLOCK_S: Final = 240.0


def messages(said: str) -> list[str]:
    """Those of the page that a consumer has printed."""
    return [line for line in said.splitlines() if line in FIRST + LATER]


def told(directory: Path, name: str) -> dict[str, Any]:
    """What ``isthmus tree show`` says at a cluster."""
    done = ready_commands.run(["tree", "show", "-o", "json", "--url", f"unix:{directory / name}.sock"], 60)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def distributing(directory: Path, name: str) -> bool:
    """Whether all levels of a cluster are distributed, and groups' offsets."""
    found = told(directory, name)
    return {each["state"] for each in (*found["distributors"], found["offsets"])} == {"Distributing"}


def level(directory: Path, name: str, number: int) -> dict[str, Any]:
    (found,) = (each for each in told(directory, name)["distributors"] if each["level"] == number)
    return found


def in_order(told: Sequence[str], expected: Sequence[str]) -> bool:
    """Whether messages of one cluster came in the order in which it took them."""
    return [each for each in told if each in expected] == list(expected)


def test_from_nothing_to_a_group_that_came_back(tmp_path: Path) -> None:
    text = "".join(block for step in steps(PAGE) for block in step.blocks)
    environment = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.prefix) / "bin"), os.environ["PATH"]])}
    clusters = [tmp_path / name for name in NAMES]
    with (
        free_ports(text, list(CLIENTS.values())) as chosen,
        Shell(tmp_path, chosen, clusters, environment, BLOCK_S) as shell,
        PastedRunbook(PAGE, shell) as book,
    ):
        book.step("Five clusters")
        book.step("A proxy in front of each")
        book.step("A topic at one of them")
        assert "level 12" in book.step("Write the tree, and see what it comes to")
        assert book.step("Apply it at each cluster").count(f"topic {TOPIC} is made as at a") == 4
        assert "Waiting" not in book.step("See who distributes what")
        until("every level is distributed", lambda: all(distributing(tmp_path, name) for name in NAMES))
        book.step("Produce at two clusters")
        produced = time.monotonic()
        found = messages(book.step("Read at all five"))
        for number in range(len(NAMES)):
            of_cluster = found[number * len(FIRST) : (number + 1) * len(FIRST)]
            assert sorted(of_cluster) == sorted(FIRST)
            assert in_order(of_cluster, FIRST[:3])
            assert in_order(of_cluster, FIRST[3:])

        def settled() -> bool:
            partitions = level(tmp_path, "a", 12)["partitions"] + level(tmp_path, "c", 12)["partitions"]
            return all(each["position"] == each["settled"] and each["lag"] == 0 for each in partitions)

        until("d has passed on what it was given", settled)
        assert "cluster d" in book.step("A cluster is lost")
        until("what is older than the margin is all of the first", lambda: time.monotonic() > produced + 2 * MARGIN_S)
        said = book.step("Have others write to the cluster beside it")
        assert "level 12 would write to e" in said
        assert sorted(messages(said)) == sorted(FIRST + LATER)
        assert sorted(messages(book.step("It comes back"))) == sorted(FIRST + LATER)
        book.step("Have them write to it again")
        for name in ("a", "c"):

            def written(name: str = name) -> bool:
                found = level(tmp_path, name, 12)
                return (found["target"], found["state"]) == ("d", "Distributing")

            until("it writes to d", written)
        sides = {name: Side(KafkaCluster.attach(tmp_path / name), []) for name in NAMES}
        for name, side in sides.items():
            counted = Counter(each.value for each in read(side))
            assert counted == Counter(each.encode() for each in FIRST + LATER), name

        assert sorted(messages(book.step("A group reads at one cluster"))) == sorted(FIRST + LATER)
        until("it is set at c", lambda: is_set(sides["c"]), BLOCK_S)
        check_again(book.step("It goes on at another one"), sides["c"])
        until("it has come further at a", lambda: waits(tmp_path, "a") == {"WENT_ON"})
        check_again(book.step("And back"), sides["a"])
        book.step("End all of it")


def read(side: Side) -> list[Read]:
    return side.read(TOPIC, direct=True, isolation="read_committed")


def unread(side: Side) -> list[str]:
    """What the group reads at a cluster if it goes on there; empty: it is not set there."""
    position, _ = groups.committed(side, GROUP).get((TOPIC, 0), (sys.maxsize, ""))
    return [(each.value or b"").decode() for each in read(side) if each.offset >= position]


def is_set(side: Side) -> bool:
    """Whether it reads again what is within the margin, and one message before that if no marker stands there."""
    left = unread(side)
    return set(LATER) <= {*left} and len({*left} - {*LATER}) <= 1


def check_again(said: str, side: Side) -> None:
    """It has read two messages, of which the first is at most one before what is within the margin."""
    again, values = messages(said), [(each.value or b"").decode() for each in read(side)]
    assert again in (values[-2:], values[-3:-1]), again


def waits(directory: Path, name: str) -> set[str]:
    """Why the group is not set at a cluster."""
    return {each["reason_code"] for each in told(directory, name)["offsets"]["waiting"] if each["group"] == GROUP}
