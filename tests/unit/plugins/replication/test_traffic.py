"""What links move: counted by partition and link, whatever is opened again and deleted."""

from __future__ import annotations

import pytest

from isthmus_control.model import Role
from isthmus_plugins.links import LinkStatus, PartitionStatus
from isthmus_plugins.replication.metrics import link_families, partition_families
from isthmus_plugins.replication.traffic import Counts, Place, Traffic

T, U = (Place("ab", Role.LEADER, topic, 0) for topic in "tu")


def totals(traffic: Traffic) -> dict[tuple[str, Role], tuple[int, int]]:
    return {key: (counts.batches, counts.bytes) for key, counts in traffic.totals().items()}


def test_what_is_deleted_stays_in_its_links_total_and_counts_anew() -> None:
    traffic = Traffic()
    traffic.add(T, 1, 100)
    traffic.add(U, 2, 50)
    traffic.add(T, 1, 100)
    assert totals(traffic) == {("ab", Role.LEADER): (4, 250)}
    traffic.keep({"ab"}, {U})
    assert totals(traffic) == {("ab", Role.LEADER): (4, 250)}
    assert traffic.known(T) is None
    traffic.add(T, 1, 7)
    assert totals(traffic) == {("ab", Role.LEADER): (5, 257)}
    counts = traffic.known(T)
    assert counts is not None
    assert counts.bytes == 7
    traffic.keep(set(), set())
    assert totals(traffic) == {}


def link_status() -> LinkStatus:
    partition = PartitionStatus(
        topic="t", remote_topic="r", partition=0, role="leader", state="Stopped", reason="X", partition_mirror_lag=4
    )
    return LinkStatus(
        link_name="ab",
        link_id="id",
        local_cluster_id="A",
        remote_cluster_id="B",
        remote=[],
        dials=True,
        mode="asynchronous",
        state="Catching Up",
        partitions=[partition],
    )


def test_metrics_of_links_and_partitions() -> None:
    traffic, link = Traffic(), link_status()
    traffic.add(T, 3, 300)
    families = [*link_families([link], lambda name: (), traffic), *partition_families([link], traffic)]
    found = {(sample.name, tuple(sample.labels.values())): sample.value for each in families for sample in each.samples}
    assert found["isthmus_link_state", ("ab", "Catching Up")] == 1
    assert found["isthmus_link_bytes_total", ("ab", "leader")] == 300
    assert found["isthmus_link_batches_total", ("ab", "leader")] == 3
    place = "ab", "t", "0", "leader"
    assert found["isthmus_link_partition_state", (*place, "Stopped", "X")] == 1
    assert found["isthmus_link_partition_bytes_total", place] == 300
    assert found["isthmus_link_mirror_lag_offsets", place] == 4
    assert {name for name, labels in found if "t" in labels}.isdisjoint(
        {sample.name for each in link_families([link], lambda name: (), traffic) for sample in each.samples}
    ), "off by a setting"


def test_families_of_partitions_are_made_whole_or_not_at_all() -> None:
    """They are made together as the first of them is read, and that is not begun again where it failed."""

    class FailingOnce(Traffic):
        failed = False

        def known(self, place: Place) -> Counts | None:
            if not self.failed:
                self.failed = True
                raise RuntimeError("a bug")
            return super().known(place)

    for each in partition_families([link_status()], FailingOnce()):
        with pytest.raises(RuntimeError, match="a bug"):
            _ = each.samples
