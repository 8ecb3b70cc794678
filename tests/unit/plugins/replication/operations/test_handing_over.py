"""What keeps a cluster that leads from following."""

from __future__ import annotations

import pytest

from isthmus_plugins.links import PartitionPlan, TopicPlan
from isthmus_plugins.replication.operations.handing_over import not_to_follow


def plan(*partitions: tuple[int, int, int], unknown: str | None = None) -> TopicPlan:
    """Partitions are (shared, end, source_end)."""
    planned = [
        PartitionPlan(partition=number, shared=shared, end=end, source_end=source_end, unknown=unknown)
        for number, (shared, end, source_end) in enumerate(partitions)
    ]
    return TopicPlan(topic="t", source_topic="s", action="refuse", reason="parted", partitions=planned)


@pytest.mark.parametrize(
    ("planned", "why"),
    [
        (TopicPlan(topic="t", source_topic="s", action="follow"), None),
        (plan((7, 9, 7)), None),  # the other cluster gets the rest
        (plan((7, 9, 7), (5, 5, 6)), None),  # and this one's end was read before it got another record
        (plan((6, 9, 7)), "t: parted"),
        (plan((7, 9, 7), (4, 5, 6)), "t: parted"),
        (plan((7, 9, 7), unknown="nobody knows"), "t: parted"),
        (plan(), "t: parted"),
    ],
)
def test_logs_of_which_one_goes_on_where_the_other_ends_are_the_same(planned: TopicPlan, why: str | None) -> None:
    assert not_to_follow(planned) == why
