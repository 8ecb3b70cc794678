"""What has to be done with a topic that is to follow, by what is known of it and of the source's."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import replace

import pytest

from isthmus_control.model import (
    AgreedCut,
    FollowerTopic,
    NamespaceMapping,
    ProvenanceRange,
    ResourceType,
    Role,
    TopicHistory,
    TopicState,
)
from isthmus_control.states import ReasonCode
from isthmus_control.truncations import Succession
from isthmus_plugins.cluster import PartitionInfo, TopicInfo
from isthmus_plugins.links import TopicPlan
from isthmus_plugins.replication.comparison.shared_logs import ComparedPartition, ComparedTopic
from isthmus_plugins.replication.follower.topic_plans import (
    Existing,
    Refusal,
    Step,
    awaits_cut,
    going_on,
    next_step,
    not_opened,
    plan,
    successor,
)
from isthmus_plugins.replication.link.calls import LedTopic, Predecessor
from isthmus_plugins.replication.link.reasons import FORMER_TOPIC_GOES

HERE, OTHER_HERE = str(uuid.UUID(int=1)), str(uuid.UUID(int=2))
SOURCE, FORMER, OLDEST = (str(uuid.UUID(int=number)) for number in (11, 12, 13))
LOCAL = "r-t"


def info(partitions: int = 2, topic_id: str = HERE) -> TopicInfo:
    return TopicInfo(LOCAL, uuid.UUID(topic_id).bytes, (PartitionInfo(1, 0),) * partitions, 1, False)


def source(partitions: int = 2, *predecessors: Predecessor) -> LedTopic:
    return LedTopic("l-t", SOURCE, partitions, predecessors)


def recorded(
    state: TopicState = TopicState.FOLLOWING,
    link: str = "link",
    topic_id: str | None = HERE,
    source_id: str = SOURCE,
) -> FollowerTopic:
    return FollowerTopic(link, LOCAL, "l-t", source_id, state, 0, topic_id)


def came_from(source_id: str, start: int, end: int | None) -> ProvenanceRange:
    return ProvenanceRange("cluster", source_id, start, end, 0)


def history(*partitions: Sequence[ProvenanceRange], topic_id: str = HERE) -> TopicHistory:
    return TopicHistory(LOCAL, topic_id, {number: tuple(ranges) for number, ranges in enumerate(partitions)})


# ---- what comes next ----


@pytest.mark.parametrize(
    ("record", "existing", "step"),
    [
        (None, None, Step.CREATE),
        (None, info(), Step.ADOPT),
        (recorded(), info(), Step.GO_ON),
        (recorded(), None, Step.GO_ON),  # that it is gone is for somebody to decide
        (recorded(), info(topic_id=OTHER_HERE), Step.GO_ON),
        (recorded(link="another"), info(), Step.ADOPT),
        (recorded(link="another"), None, Step.CREATE),
        (recorded(TopicState.REFUSED), info(), Step.ADOPT),
        (recorded(TopicState.REFUSED), None, Step.CREATE),
        (recorded(TopicState.CREATING, topic_id=None), None, Step.CREATE),
        (recorded(TopicState.CREATING, topic_id=None), info(), Step.ADOPT),  # made, and not recorded as following yet
        (recorded(TopicState.CREATING), info(), Step.REPLACE),
        (recorded(TopicState.CREATING), info(topic_id=OTHER_HERE), Step.ADOPT),  # nobody agreed to lose this one
        (recorded(TopicState.CREATING, link="another"), info(), Step.ADOPT),
    ],
)
def test_what_comes_next(record: FollowerTopic | None, existing: TopicInfo | None, step: Step) -> None:
    assert next_step(record, "link", existing) is step


# ---- a topic that follows ----


def test_a_source_that_is_the_one_that_is_followed_has_succeeded_nothing() -> None:
    assert successor(recorded(), source(), info(), False) is None
    assert successor(recorded(), source(), None, False) is None


def test_a_source_that_succeeded_the_one_that_is_followed_is_named_with_what_both_hold() -> None:
    chain = Predecessor(OLDEST, FORMER, (5, 9)), Predecessor(FORMER, SOURCE, (7, 8, 3))
    assert successor(recorded(source_id=FORMER), source(3, *chain), info(), False) == Succession(
        FORMER, SOURCE, (7, 8, 3)
    )
    assert successor(recorded(source_id=OLDEST), source(3, *chain), info(), False) == Succession(OLDEST, SOURCE, (5, 8))


def test_what_is_the_matter_with_the_topic_here_comes_before_a_succession() -> None:
    record, succeeded = recorded(source_id=FORMER), source(2, Predecessor(FORMER, SOURCE, (7, 8)))
    assert successor(record, succeeded, None, False) is None
    assert successor(record, succeeded, info(topic_id=OTHER_HERE), False) is None


@pytest.mark.parametrize("predecessors", [(), (Predecessor(OLDEST, SOURCE, (7, 8)),)])
def test_a_source_that_was_made_again_is_refused(predecessors: tuple[Predecessor, ...]) -> None:
    with pytest.raises(Refusal, match="isthmus topic recreate r-t") as refused:
        successor(recorded(source_id=FORMER), source(2, *predecessors), info(), False)
    assert refused.value.code == ReasonCode.SOURCE_TOPIC_ID_CHANGED
    with pytest.raises(Refusal, match="goes with the old one") as refused:
        successor(recorded(source_id=FORMER), source(2, *predecessors), info(), True)
    assert refused.value.code == FORMER_TOPIC_GOES


@pytest.mark.parametrize(
    ("existing", "code", "said"),
    [
        (None, ReasonCode.TARGET_TOPIC_MAY_BE_DELETED, "deleted here behind the link's back"),
        (info(topic_id=OTHER_HERE), ReasonCode.TARGET_TOPIC_ID_CHANGED, "deleted here behind the link's back"),
        (info(3), ReasonCode.SOURCE_PARTITIONS_DECREASED, "has 3 partitions here, the source's l-t has 2"),
    ],
)
def test_a_topic_that_cannot_go_on(existing: TopicInfo | None, code: ReasonCode, said: str) -> None:
    with pytest.raises(Refusal, match=said) as refused:
        going_on(recorded(), 2, existing)
    assert refused.value.code == code


@pytest.mark.parametrize("partitions", [1, 2])
def test_a_topic_goes_on_with_as_many_partitions_as_its_source_or_fewer(partitions: int) -> None:
    existing = info(partitions)
    assert going_on(recorded(), 2, existing) is existing


def test_provenance_is_opened_where_it_is_not_open_for_this_very_topic() -> None:
    followed, left = came_from(SOURCE, 0, None), came_from(SOURCE, 0, 7)
    known = history([followed], [left], [left, came_from(SOURCE, 7, None)], [])
    assert not_opened(recorded(), known, "cluster", 5) == [1, 3, 4]
    assert not_opened(recorded(), None, "cluster", 2) == [0, 1]
    assert not_opened(recorded(topic_id=OTHER_HERE), known, "cluster", 2) == [0, 1]


def test_provenance_of_another_source_that_nobody_closed_is_not_this_ones() -> None:
    known = history([came_from(FORMER, 0, None)], [came_from(SOURCE, 0, None)])
    assert not_opened(recorded(), known, "cluster", 2) == [0]
    assert not_opened(recorded(), known, "another cluster", 2) == [0, 1]


# ---- a topic that is there and does not follow ----


def mapping(*truncate_topic_ids: str) -> NamespaceMapping:
    return NamespaceMapping(ResourceType.TOPIC, "r-", "l-", Role.FOLLOWER, 0, 0, truncate_topic_ids)


def existing(
    ends: Sequence[int], known: TopicHistory | None = None, starts: Sequence[int] | None = None, topic_id: str = HERE
) -> Existing:
    return Existing(info(len(ends), topic_id), known, [0] * len(ends) if starts is None else starts, ends)


def test_a_topic_that_is_not_there_is_created() -> None:
    assert plan(mapping(), source(), LOCAL, None).action == "create"


@pytest.mark.parametrize("partitions", [1, 2])
def test_an_empty_topic_follows(partitions: int) -> None:
    assert plan(mapping(), source(), LOCAL, existing([0] * partitions)).action == "follow"


FOLLOWED = came_from(SOURCE, 0, 10)


@pytest.mark.parametrize(
    ("known", "action"),
    [
        (None, "refuse"),
        (history([FOLLOWED]), "follow"),
        (history([FOLLOWED], topic_id=OTHER_HERE), "refuse"),
        (history([came_from(SOURCE, 0, None)]), "follow"),
        (history([came_from(SOURCE, 0, 4), came_from(SOURCE, 4, 10)]), "follow"),
        (history([came_from(SOURCE, 0, 9)]), "refuse"),  # somebody wrote after
        (history([came_from(SOURCE, 0, 11)]), "refuse"),  # it was cut
        (history([came_from(FORMER, 0, 10)]), "refuse"),
        (history([came_from(FORMER, 0, 4), came_from(SOURCE, 4, 10)]), "refuse"),
        (history([]), "refuse"),
        (history(), "refuse"),
    ],
)
def test_a_topic_follows_whose_records_are_all_the_sources(known: TopicHistory | None, action: str) -> None:
    assert plan(mapping(), source(1), LOCAL, existing([10], known)).action == action


def test_a_partition_that_was_empty_all_the_time_needs_no_provenance() -> None:
    assert plan(mapping(), source(2), LOCAL, existing([10, 0], history([FOLLOWED]))).action == "follow"
    assert plan(mapping(), source(2), LOCAL, existing([10, 1], history([FOLLOWED]))).action == "refuse"


@pytest.mark.parametrize(
    ("end", "shared", "action"),
    [(10, (10,), "follow"), (10, (9,), "refuse"), (10, (), "refuse"), (None, (10,), "follow"), (None, (9,), "refuse")],
)
def test_what_came_from_a_predecessor_counts_where_the_source_has_it_still(
    end: int | None, shared: tuple[int, ...], action: str
) -> None:
    succeeded = source(1, Predecessor(FORMER, SOURCE, shared))
    known = history([came_from(FORMER, 0, end)])
    assert plan(mapping(), succeeded, LOCAL, existing([10], known)).action == action


def test_a_refusal_says_what_would_be_lost_and_how_to_agree() -> None:
    refused = plan(mapping(), source(), LOCAL, existing([10, 7], starts=[4, 0]))
    assert (refused.topic, refused.source_topic, refused.action) == (LOCAL, "l-t", "refuse")
    assert (refused.topic_id, refused.records_lost) == (HERE, 13)
    assert refused.reason is not None
    assert "holds 13 records that are not known to be the source's" in refused.reason
    assert "`isthmus topic recreate r-t`" in refused.reason


def test_a_topic_with_more_partitions_is_refused_although_it_is_empty() -> None:
    refused = plan(mapping(), source(1), LOCAL, existing([0, 0]))
    assert refused.action == "refuse"
    assert "has 2 partitions, the source's topic 1" in (refused.reason or "")


def test_what_the_operator_agreed_to_lose_is_truncated_and_no_later_topic_of_the_name() -> None:
    agreed = mapping(HERE)
    truncated = plan(agreed, source(1), LOCAL, existing([10], starts=[3]))
    assert (truncated.action, truncated.topic_id, truncated.records_lost) == ("truncate", HERE, 7)
    assert plan(agreed, source(1), LOCAL, existing([0, 0])).action == "truncate"
    assert plan(agreed, source(1), LOCAL, existing([10], topic_id=OTHER_HERE)).action == "refuse"
    assert plan(mapping(), source(1), LOCAL, existing([10]), truncate=True).action == "truncate"
    assert plan(agreed, source(1), LOCAL, existing([10], history([FOLLOWED]))).action == "follow", "nothing is lost"


@pytest.mark.parametrize(("end", "known"), [(0, None), (10, history([FOLLOWED]))])
def test_who_agrees_to_lose_a_topic_into_which_markers_come_loses_it_as_the_plan_says(
    end: int, known: TopicHistory | None
) -> None:
    """All that it holds is its source's, and once it follows it would hold what that has not."""
    open_ = replace(existing([end], known), awaits_markers=True)
    told = plan(mapping(), source(1), LOCAL, open_, truncate=True)
    assert (told.action, told.topic_id, told.records_lost) == ("truncate", HERE, end)
    assert plan(mapping(), source(1), LOCAL, existing([end], known), truncate=True).action == "follow"
    assert plan(mapping(), source(1), LOCAL, open_).action == "follow", "nobody agreed, and what comes is seen then"


# ---- by what both clusters say of who wrote which offsets first ----


def compared(
    *partitions: tuple[int, int, int],
    unknown: str | None = None,
    differs: bool = False,
    related: bool = True,
    start: int = 0,
) -> ComparedTopic:
    """``partitions``: (shared, end here, end at the source)."""
    found = (
        ComparedPartition(number, shared, unknown if shared < end else None, differs, (start, end), (0, there))
        for number, (shared, end, there) in enumerate(partitions)
    )
    return ComparedTopic(HERE, related, tuple(found))


def planned(known: ComparedTopic, agreed: NamespaceMapping | None = None, salvages: bool = True) -> TopicPlan:
    ends = [each.here[1] for each in known.partitions]
    there = Existing(info(len(ends)), history([FOLLOWED]), [0] * len(ends), ends, known, ("g",), salvages)
    return plan(agreed or mapping(), source(len(ends)), LOCAL, there)


def test_a_topic_follows_from_its_end_where_all_of_it_is_the_sources() -> None:
    assert planned(compared((10, 10, 12), (3, 3, 3))).action == "follow"
    assert planned(compared((10, 10, 12), related=False)).action == "follow", "what was shared may have expired"


def test_what_the_source_has_not_is_cut_where_that_was_agreed() -> None:
    known = compared((8, 10, 12), (3, 3, 3))
    refused = planned(known)
    assert (refused.action, refused.records_lost, refused.cut, refused.groups_moved) == (
        "refuse",
        2,
        known.token,
        ["g"],
    )
    assert "partition 0: the same up to 8, ends at 10, the source's at 12" in (refused.reason or "")
    agreed = replace(mapping(), cuts=(AgreedCut(HERE, known.token),))
    cut = planned(known, agreed)
    assert (cut.action, cut.reason, cut.topic_id) == ("cut", None, HERE)
    assert planned(compared((8, 11, 12), (3, 3, 3)), agreed).action == "refuse", "somebody wrote since"
    assert planned(compared((7, 10, 12), (3, 3, 3)), agreed).action == "refuse", "less is shared than was printed"
    assert planned(compared((8, 10, 90), (3, 3, 3)), agreed).action == "cut", "the source goes on"
    assert planned(known, replace(agreed, cuts=(AgreedCut(OTHER_HERE, known.token),))).action == "refuse"


@pytest.mark.parametrize(
    ("known", "salvages", "said"),
    [
        (compared((8, 10, 12), differs=True), True, "nothing is done with it"),
        (compared((10, 10, 12), differs=True), True, "nothing is done with it"),
        (compared((8, 10, 12), related=False), True, "no cluster has written for both"),
        (compared((8, 10, 12), start=9), True, "starts at 9 by now"),
        (compared((8, 10, 12)), False, "[data] directory"),
    ],
)
def test_what_cannot_be_cut_says_why_and_no_word_to_agree_to(known: ComparedTopic, salvages: bool, said: str) -> None:
    refused = planned(known, replace(mapping(), cuts=(AgreedCut(HERE, known.token),)), salvages)
    assert (refused.action, refused.cut) == ("refuse", None)
    assert said in (refused.reason or "")


def test_what_is_not_known_is_what_the_direct_sources_say() -> None:
    unknown = compared((4, 10, 12), unknown="nobody has recorded it")
    assert planned(unknown).action == "follow"
    longer = compared((4, 11, 12), unknown="nobody has recorded it")
    refused = planned(longer)
    assert (refused.action, refused.cut) == ("refuse", None)
    assert "nobody has recorded it" in (refused.reason or "")


def test_a_topic_awaits_its_cut_under_the_id_that_was_agreed_to() -> None:
    agreed = replace(mapping(), cuts=(AgreedCut(HERE, "word"),))
    assert awaits_cut(recorded(), agreed)
    assert not awaits_cut(recorded(topic_id=OTHER_HERE), agreed), "it was cut"
    assert not awaits_cut(recorded(TopicState.REFUSED), agreed)
    assert not awaits_cut(recorded(), mapping())
