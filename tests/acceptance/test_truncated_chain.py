"""User story: somebody writes to the middle of a chain past its proxy; it is cut, and so is the cluster after it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support import groups
from support.kafka import unique
from support.links import Linked, Side, linked, truncated, until, whole

from isthmus_bench.kafka import KafkaCluster
from isthmus_protocol.record_codec import decode_records
from isthmus_protocol.salvage import read_salvage

pytestmark = [pytest.mark.brokers, pytest.mark.timeout(300)]


GROUPS = "followed-"
"""Groups of this namespace are replicated from B to C."""


class Chain(NamedTuple):
    """``a`` and ``b`` are linked, and ``b``'s topics lead to ``c``'s, whose names begin with ``last``."""

    first: Linked
    c: Side
    second: str
    last: str

    def partition(self, topic: str) -> dict[str, Any]:
        found = self.c.partition(self.second, topic)
        assert found is not None
        return found

    def truncations(self, topic: str) -> list[dict[str, Any]]:
        """What C tells of its truncations of a topic, newest first."""
        items = self.c.proxy.get(f"/v1/links/{self.second}/truncations")["items"]
        return [each for each in items if each["topic"] == topic]


@pytest.fixture
def chain(kafka_pair: tuple[KafkaCluster, KafkaCluster]) -> Iterator[Chain]:
    """C's topics go with B's; one that is made anew was not deleted."""
    with linked(*kafka_pair) as first, KafkaCluster(name="truncated-c") as kafka, whole(kafka) as proxy:
        first.attach()
        proxy.cli("control", "upgrade")
        second, last = unique("b-to-c"), unique("last-") + "-"
        first.b.proxy.cli("link", "create", second, "--remote", proxy.link_address)
        try:
            attach = ("link", "attach", second, "--role", "leader")
            first.b.proxy.cli(*attach, "--local", first.remote, "--remote", last, "--on-source-delete", "delete")
            groups = (*attach, "--type", "consumer-group", "--disable-transaction-verification")
            first.b.proxy.cli(*groups, "--local", GROUPS, "--remote", GROUPS)
            yield Chain(first, Side(kafka, [proxy]), second, last)
        finally:
            first.b.proxy.cli("link", "delete", second, check=False)


def committed(side: Side, group: str, topic: str) -> int | None:
    return groups.offsets(side, group).get((topic, 0))


@pytest.mark.one_in_ci("stories", of="faults of steps")
@pytest.mark.parametrize("killed", [False, True], ids=["running", "killed"])
def test_the_last_of_a_chain_is_cut_with_the_middle(chain: Chain, killed: bool) -> None:
    topic = unique("t")
    source, middle, last = chain.first.local + topic, chain.first.remote + topic, chain.last + topic
    a, b, c = chain.first.a, chain.first.b, chain.c
    a.create_topic(source)
    a.produce(source, [b"%d" % number for number in range(100)], enable_idempotence=True)
    until("C has everything", lambda: last in c.topics() and c.end(last) == 100)
    b.produce(middle, [b"rogue-%d" % number for number in range(5)], direct=True)
    until("C has what the rogue wrote", lambda: c.end(last) == 105)
    kept, moved, followed = unique("kept-"), unique("moved-"), unique(GROUPS)
    groups.commit(b, followed, {(middle, 0): 30}, direct=True)
    until("its position is at C", lambda: committed(c, followed, last) == 30)
    groups.commit(c, kept, {(last, 0): 40}, direct=True)
    groups.commit(c, moved, {(last, 0): 104}, direct=True)

    until("C waits for B", lambda: chain.partition(last)["reason"] == "SOURCE_TRUNCATING")
    seen = set()

    def begun() -> bool:
        position = committed(c, followed, last)
        found = bool(chain.truncations(last))
        seen.update(() if found else (position,))
        return found

    until("C is truncated, too", begun)
    assert seen == {30}  # B's topic was deleted, and its groups' positions with it
    truncated(chain.first, middle)
    if killed:
        c.proxy.kill()
        c.proxy.start()
    a.produce(source, [b"more"] * 10)
    until("C is whole", lambda: chain.truncations(last)[0]["phase"] == "done")
    until("all have the rest", lambda: [b.end(middle), c.end(last)] == [110, 110])
    expected = a.read(source)
    assert b.read(middle) == expected
    assert c.read(last) == expected
    report = b.proxy.cli("verify", chain.second, check=False)
    assert report["equal"], report

    (told,) = chain.truncations(last)
    assert (told["reason"], told["messages_truncated"]) == ("SOURCE_TRUNCATED", 5)
    (cut,) = told["partitions"]
    salvage = read_salvage(Path(cut["salvage_file"]).read_bytes())
    records = [record.value for batch, _ in salvage.batches() for record in decode_records(batch)]
    assert records == [b"rogue-%d" % number for number in range(5)]
    assert (committed(c, kept, last), committed(c, moved, last)) == (40, 100)
    assert (committed(b, followed, middle), committed(c, followed, last)) == (30, 30)
    until("C follows", lambda: chain.partition(last)["state"] == "Following")
