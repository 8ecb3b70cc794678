"""Which links must have something before it is acked, and over which a decision goes."""

from __future__ import annotations

import time
from dataclasses import replace
from time import monotonic
from types import SimpleNamespace
from typing import Any

from isthmus_control.demands import ALL, NEVER, Confirm, Demands
from isthmus_control.model import Degraded, Reason, SyncRecord, SyncState
from isthmus_plugins.cluster import TopicPartition
from isthmus_plugins.replication.partitions import LinkPartition
from isthmus_plugins.replication.sync.links import SynchronousLinks
from isthmus_plugins.replication.sync.new_partitions import UNRECORDED, NewPartitions
from isthmus_plugins.replication.sync.progress import Progress
from isthmus_plugins.replication.sync.quorums import GroupScope, Quorum, Quorums
from isthmus_plugins.replication.sync.requirements import Requirements
from isthmus_protocol.offsets_log import OFFSETS_TOPIC

PLACE = ("t", 0)
B, C = (LinkPartition(name, *PLACE) for name in "bc")
IN, OUT = SyncState.IN_SYNC, SyncState.OUT_OF_SYNC
ANY_1 = Confirm(1, ("b", "c"))
LED_BY = {"of b": ("b",), "of c": ("c",), "of both": ("b", "c")}
"""Groups, and the links that lead them."""


class Links(SynchronousLinks):
    """Synchronous ones with these records, which lead whatever is asked for."""

    def __init__(self, recorded: dict[str, SyncRecord]) -> None:
        context: Any = SimpleNamespace(clock=time, supervision=None)
        super().__init__(context, NewPartitions(context, lambda link_name: False, lambda: 0))
        self.recorded = recorded

    def leading(self, topic: str) -> tuple[str, ...]:
        return tuple(self.recorded)

    def record(self, link_name: str, place: TopicPartition) -> SyncRecord | None:
        return self.recorded.get(link_name)

    def is_synchronous(self, link_name: str) -> bool:
        return True

    def waits_for_record(self, place: TopicPartition) -> bool:
        return False


def requirements(
    confirm: Confirm,
    after_ms: int = NEVER,
    degraded_ms: int = 0,
    epoch: int = 0,
    progress: dict[LinkPartition, Progress] | None = None,
    **states: SyncState,
) -> Requirements:
    """What is needed of links with these records, under a leader epoch of the source."""
    demands = Demands(degrade_after_ms=after_ms, confirm=confirm)
    state: Any = SimpleNamespace(lookup=SimpleNamespace(demands=lambda kind, name: demands))
    degraded = Degraded(degraded_ms, 0, 0, "p", 1) if degraded_ms else None
    records = {
        name: SyncRecord("id", is_in, 0, 0, None if is_in is IN else Reason("c", "m"), 1, True, degraded)
        for name, is_in in states.items()
    }
    return Requirements(
        Quorums(lambda: state),
        Links(records),
        progress or {},
        lambda place: epoch,
        lambda group: GroupScope("", LED_BY.get(group, ())),
        time,
    )


def test_decisions_go_to_those_that_must_have_them_and_to_none_that_transactions_go_without() -> None:
    assert requirements(ALL, b=IN, c=OUT).sent_to(PLACE) == {B, C}
    assert requirements(ANY_1, b=IN, c=IN).sent_to(PLACE) == {B, C}
    assert requirements(ANY_1, b=OUT, c=OUT).sent_to(PLACE) == {B, C}, "none is enough"
    assert requirements(ANY_1, b=IN, c=OUT).sent_to(PLACE) == {B}
    assert requirements(Confirm(2, ("b", "c")), b=IN, c=OUT).sent_to(PLACE) == {B, C}
    assert requirements(ALL, after_ms=1, degraded_ms=1, b=IN, c=OUT).sent_to(PLACE) == {B}


def test_a_decision_about_groups_is_needed_over_the_links_that_lead_them() -> None:
    place = (OFFSETS_TOPIC, 0)
    b, c = (LinkPartition(name, *place) for name in "bc")

    def asked(of: Requirements, *groups: str) -> tuple[set[LinkPartition], set[LinkPartition]]:
        """Whose confirmation is needed, and to whom it goes."""
        needed = {key for quorum in of.commit_needed(place, groups) for key in quorum.keys}
        return needed, of.sent_to(place, groups)

    of = requirements(ALL, b=IN, c=OUT)
    of._expiring.unsure = False
    assert {key for quorum in of.commit_needed(place) for key in quorum.keys} == of.sent_to(place) == {b}, (
        "not known yet"
    )
    assert asked(of, "of nobody") == (set(), set())
    assert asked(of, "of b") == ({b}, {b})
    assert asked(of, "of c", "of nobody") == ({c}, {c}), "it is Out-Of-Sync"
    assert asked(of, "of b", "of c") == asked(of, "of both") == ({b, c}, {b, c})
    degraded = requirements(ALL, after_ms=1, degraded_ms=1, b=IN, c=OUT)
    degraded._expiring.unsure = False
    assert asked(degraded, "of c") == (set(), set())
    assert asked(degraded, "of both") == ({b}, {b})
    chosen = requirements(ANY_1, b=IN, c=OUT)
    chosen._expiring.unsure = False
    assert asked(chosen, "of both") == ({b, c}, {b}), "one of them is enough"


def test_what_follows_from_the_control_log_alone_is_looked_up_once() -> None:
    found = requirements(ALL, b=IN)
    assert found.needed(PLACE, False) is not found.needed(PLACE, False), "leases of before may run"
    found._expiring.unsure = False
    assert found.needed(PLACE, False) is not found.needed(PLACE, False), "looks to come say which topic is meant"
    found._links.new._applied = (1, 1)
    known = found.needed(PLACE, False)
    assert (known, found.needed(PLACE, False)) == ((Quorum(1, (B,)),), known)
    found._links.record = lambda link_name, place: None  # type: ignore[method-assign]
    assert found.needed(PLACE, False) is known
    found.changed()
    assert found.needed(PLACE, False) == ()
    found._expiring.granted_here(B, monotonic())
    assert [*found.needed(PLACE, False)] == [Quorum(1, (B,))], "a lease of before runs for a time"
    chosen = requirements(ANY_1, b=IN, c=IN)
    chosen._expiring.unsure = False
    assert chosen.needed(PLACE, False) is not chosen.needed(PLACE, False), "promises run for a time"


def test_all_that_are_in_sync_are_waited_for_while_what_another_proxy_promised_may_count() -> None:
    long_ago = float("-inf")
    progress = {B: Progress(long_ago, 5), C: Progress(long_ago, 5)}

    def quorums(epoch: int) -> set[Quorum]:
        return set(requirements(ANY_1, epoch=epoch, progress=progress, b=IN, c=IN).needed(PLACE, False))

    each = {Quorum(1, (B,)), Quorum(1, (C,))}
    assert not each & quorums(epoch=5)
    assert each <= quorums(epoch=7), "the leader was away and came back before this proxy looked"
    for known in progress.values():
        known.leader_moved(7, monotonic())
    assert each <= quorums(epoch=7)
    for known in progress.values():
        known.seen_at = long_ago
        known.leader_moved(7, monotonic())
    assert not each & quorums(epoch=7)


def test_records_of_transactions_wait_until_all_proxies_know_enough_links_that_a_partition_is_new_on() -> None:
    def waits(confirm: Confirm, *new: str) -> bool:
        found = requirements(confirm, b=IN, c=IN)
        records: Any = found._links
        records.recorded |= {link: replace(records.recorded[link], reached=False, from_first=True) for link in new}
        unrecorded = Quorum(1, (UNRECORDED,))
        assert unrecorded not in found.needed(PLACE, False)
        return unrecorded in found.needed(PLACE, True)

    assert not waits(ALL)
    assert waits(ALL, "b")
    assert waits(ANY_1, "b", "c")
    assert not waits(ANY_1, "c"), "the other one is enough"
    assert waits(Confirm(2, ("b", "c")), "c")
