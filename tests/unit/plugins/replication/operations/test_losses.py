"""What a failover would lose, by what proxies of the source say: sums, and what is not known."""

from __future__ import annotations

from isthmus_plugins.drill_report import LostByFailover
from isthmus_plugins.links import PartitionStatus
from isthmus_plugins.replication.link import calls
from isthmus_plugins.replication.operations import losses


def called(name: str) -> str | None:
    return name.replace("l-", "r-", 1) if name.startswith("l-") else None


def partition(topic: str, number: int, end: int | None, confirmed: int | None, **more: object) -> object:
    return calls.UnconfirmedPartition(topic, number, end, confirmed)._replace(**more)  # type: ignore[arg-type]


def lost(*said: object, topics: dict[str, int] | None = None, groups: tuple[object, ...] = ()) -> LostByFailover:
    one = calls.UnconfirmedAnswer({"l-t": 2} if topics is None else topics, tuple(said), groups)  # type: ignore[arg-type]
    return losses.lost([one], called, called)


def test_what_is_not_confirmed_is_lost_and_the_oldest_of_it_says_how_much_time() -> None:
    found = lost(partition("l-t", 0, 10, 7, age_ms=1500), partition("l-t", 1, 20, 19, age_ms=400))
    assert (found.known, found.records, found.acked_records, found.seconds) == (True, 4, 4, 1.5)
    assert [(each.topic, each.partition, each.records) for each in found.partitions] == [("r-t", 0, 3), ("r-t", 1, 1)]
    assert found.partitions_total == 2


def test_nothing_is_lost_where_all_is_confirmed() -> None:
    found = lost(partition("l-t", 0, 10, 10), partition("l-t", 1, 0, 0))
    assert (found.known, found.records, found.acked_records, found.seconds, found.partitions) == (True, 0, 0, 0.0, [])


def test_what_is_in_sync_is_not_acked_before_it_is_confirmed() -> None:
    found = lost(partition("l-t", 0, 10, 7, age_ms=9, in_sync=True), partition("l-t", 1, 5, 3, age_ms=7))
    assert (found.records, found.acked_records) == (5, 2)


def test_what_nobody_says_is_unknown_and_in_no_sum() -> None:
    found = lost(partition("l-t", 0, 10, 7, age_ms=100))
    assert (found.known, found.reason, found.records) == (False, losses.SOURCE_PARTITIONS_UNKNOWN, 3)
    assert found.message == f"not known of 1 partitions: r-t-1: {losses.NOBODY_SAYS}"
    unheard = lost(partition("l-t", 0, 10, None), partition("l-t", 1, None, 3, message="no leader"))
    assert (unheard.known, unheard.records) == (False, 0)
    assert [(each.records, each.message) for each in unheard.partitions] == [
        (None, losses.NOT_SAID),
        (None, "no leader"),
    ]


def test_a_partition_whose_age_is_unknown_leaves_the_time_unknown() -> None:
    found = lost(partition("l-t", 0, 10, 7), partition("l-t", 1, 5, 5))
    assert (found.known, found.records, found.seconds) == (True, 3, None)


def test_of_a_partition_that_two_proxies_speak_of_the_later_word_counts() -> None:
    first = calls.UnconfirmedAnswer({"l-t": 1}, (calls.UnconfirmedPartition("l-t", 0, 9, 3, 100, True),), ())
    then = calls.UnconfirmedAnswer({"l-t": 1}, (calls.UnconfirmedPartition("l-t", 0, 8, 7, 5, False),), ())
    for answers in ([first, then], [then, first]):
        (found,) = losses.lost(answers, called, called).partitions
        assert (found.source_end, found.confirmed, found.records, found.acked_records) == (9, 7, 2, 2)
    unheard = calls.UnconfirmedAnswer({"l-t": 1}, (calls.UnconfirmedPartition("l-t", 0, 9, None),), ())
    assert losses.lost([unheard, then], called, called).records == 1


def test_other_namespaces_do_not_count() -> None:
    assert lost(partition("x-t", 0, 10, 0), topics={"x-t": 1}).partitions_total == 0


def test_groups_lose_what_the_coordinators_there_lack() -> None:
    groups = (
        calls.UnconfirmedGroup("l-g", 2, 300),
        calls.UnconfirmedGroup("l-h", 0, 0),
        calls.UnconfirmedGroup("x", 5, 9),
    )
    found = lost(topics={}, groups=groups)
    assert (found.positions, found.positions_seconds) == (2, 0.3)
    assert [(each.group, each.positions) for each in found.groups] == [("r-g", 2)]
    unknown = lost(topics={}, groups=(*groups, calls.UnconfirmedGroup("l-i", None, None, "not pushed")))
    assert (unknown.positions, unknown.positions_seconds) == (None, None)


def followed(end: int | None, here: int | None) -> PartitionStatus:
    return PartitionStatus(
        topic="r-t",
        remote_topic="l-t",
        partition=0,
        role="follower",
        state="Disconnected",
        source_end=end,
        follower_end=here,
    )


def test_what_was_told_last_is_said_to_be_of_then() -> None:
    found = losses.last_known([followed(9, 4)], 12.5, "away")
    assert (found.known, found.reason, found.message) == (False, losses.SOURCE_AWAY, "away")
    assert (found.as_of_seconds, found.records, found.acked_records, found.positions) == (12.5, 5, None, None)
    never = losses.last_known([followed(None, None)], None, "never heard")
    assert (never.known, never.as_of_seconds, never.records) == (False, None, None)
