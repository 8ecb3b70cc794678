"""What operators have done with trees: versions that follow, clusters by their ids, and what is refused and why."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from support.admin import MemoryLog
from support.fake_trees import Member, context, members

from isthmus_control.commands import RaiseLevel
from isthmus_control.levels import TREES
from isthmus_plugins.cluster import BrokerUnavailable, CommittedOffset
from isthmus_plugins.distribution.document import TreeDocument
from isthmus_plugins.distribution.kept import TIMES_TOPIC, KeptCourse, KeptGiven, given_group, given_metadata
from isthmus_plugins.distribution.positions import Course, Given, Stretch, Term
from isthmus_plugins.distributor.changes import is_filled
from isthmus_plugins.distributor.operations import Operations, document_of
from isthmus_plugins.links import OperationError
from isthmus_plugins.trees import AppliedTree, ApplyTreeRequest, ChooseTargetRequest

FOUR = [["c1", "c2"], ["c3", "c4"]]


class Proxy:
    """A proxy of a cluster, as far as operators' requests for trees need it."""

    def __init__(self, own: str = "c1", clusters: dict[str, Member] | None = None) -> None:
        self.log = MemoryLog()
        self.log.apply(RaiseLevel(TREES))
        self.clusters = clusters or members(["c1", "c2", "c3", "c4", "c5", "another"])
        self.operations = Operations(context(self.clusters[own], self.clusters, self.log), dict)

    def apply(
        self, tree: Any = FOUR, version: int = 1, dry_run: bool = False, give_up: bool = False, **more: Any
    ) -> AppliedTree:
        def names(side: Any) -> list[str]:
            return [side] if isinstance(side, str) else [name for each in side for name in names(each)]

        clusters = {name: {"cluster_id": f"id-{name}", "bootstrap_servers": "h:1"} for name in names(tree)}
        document = {"version": version, "topics": ["t-"], "clusters": clusters, "tree": tree, **more}
        return self.apply_text(json.dumps(document), dry_run, give_up)

    def apply_text(
        self, text: str, dry_run: bool = False, give_up: bool = False, own_messages: bool = False
    ) -> AppliedTree:
        request = ApplyTreeRequest(document=text, dry_run=dry_run, give_up=give_up, own_messages=own_messages)
        return asyncio.run(self.operations.apply(request))

    @property
    def document(self) -> TreeDocument:
        assert self.log.state.tree is not None
        return document_of(self.log.state.tree)

    def begin(self, *names: str, settled: int = 0) -> None:
        """Clusters have begun the version that is applied here."""
        for name in names:
            self.clusters[name].begin(self.document, "t-1", settled)

    def refused(self, code: str, words: str, **more: Any) -> None:
        before = self.log.state.tree
        with pytest.raises(OperationError, match=words) as error:
            self.apply(**more)
        assert error.value.code == code
        assert self.log.state.tree is before

    def choose(self, cluster: str, level: int, leaf: str | None, give_up: bool = False) -> Any:
        request = ChooseTargetRequest(leaf=leaf, give_up=give_up)
        return asyncio.run(self.operations.choose_target(cluster, level, request))


def test_a_tree_is_applied_by_versions() -> None:
    proxy = Proxy()
    tried = proxy.apply(dry_run=True)
    assert (tried.before, tried.plan.leaf, tried.plan.topics, proxy.log.state.tree) == (None, "c1", ["t-"], None)
    assert [each.level for each in tried.plan.clusters[0].distributors] == [4, 8]
    assert "level 8" in tried.plan.drawing
    with pytest.raises(OperationError, match="in no tree"):
        proxy.operations.status()
    proxy.apply()
    again = proxy.apply()
    assert (again.before, again.plan.version) == (1, 1)
    tree = proxy.log.state.tree
    assert tree is not None
    assert (tree.leaf, tree.levels, tree.prefixes) == ("c1", (4, 8), ("t-",))
    assert proxy.apply(version=2, exactly_once=False, targets={"c1": {8: "c4"}}).before == 1
    assert [(each.level, each.target, each.state) for each in proxy.operations.status().distributors] == [
        (4, "c2", "Unclaimed"),
        (8, "c4", "Unclaimed"),
    ]
    assert asyncio.run(proxy.operations.leave(dry_run=False, give_up=False)).lacking == []
    assert proxy.log.state.tree is None


def test_what_cannot_be_applied() -> None:
    Proxy("another").refused("INVALID", "this cluster, id-another, is not in the tree, which has c1: id-c1")
    proxy = Proxy()
    left = {"c1": {"cluster_id": "id-c1", "bootstrap_servers": "h:1"}}
    proxy.refused("INVALID", "c2 is unknown", clusters=left)
    proxy.apply()
    proxy.refused("INVALID", "write `version: 2`", version=3)
    proxy.refused("INVALID", "level 8 stands in level 4",
                  version=2, tree=[["c1", "c3"], ["c2", "c4"]])  # fmt: skip
    proxy.refused("INVALID", "the header is", version=2, header="other")


FIVE = [["c1", "c2"], ["c3", ["c4", "c5"]]]


def test_a_cluster_comes_when_all_others_have_begun_the_version_before() -> None:
    proxy = Proxy()
    for name in ("c1", "c2", "c3", "c4"):
        proxy.clusters[name].add_topic("t-1")
    proxy.apply()
    proxy.begin("c1", "c2", "c4")
    tried = proxy.apply(FIVE, version=2, dry_run=True)
    assert (tried.added, tried.removed) == ({"c5": "c4"}, [])
    assert tried.blocked == [
        f"c3 has not begun version 1 at level {level}: apply it there, and see that it can" for level in (4, 8)
    ]
    proxy.refused("CONFLICT", "c3 has not begun version 1 at level 4", tree=FIVE, version=2)
    proxy.clusters["c3"].is_up = False
    (why,) = proxy.apply(FIVE, version=2, dry_run=True).blocked
    assert why == "c3 does not say how far it is: cluster c3 is not reached: no broker answers"
    proxy.clusters["c3"].is_up = True
    proxy.begin("c3")
    assert proxy.apply(FIVE, version=2).blocked == []
    assert [each.target for each in proxy.operations.status().distributors] == ["c2", "c3"]

    # At the new cluster, which has no version before, the document of another one says all.
    new = Proxy("c5", proxy.clusters)
    new.refused("INVALID", "apply what `isthmus tree document` prints", tree=FIVE, version=2)
    applied = new.apply_text(json.dumps(proxy.operations.document()))
    assert (applied.before, applied.added) == (None, {"c5": "c4"})
    assert new.document == proxy.document
    assert [(each.level, each.target) for each in new.operations.status().distributors] == [
        (2, "c4"), (4, "c3"), (8, "c1"),
    ]  # fmt: skip
    assert [each.topic for each in applied.topics] == ["t-1"]
    assert "t-1" in proxy.clusters["c5"].found

    # It is nobody's target, and nobody comes, before it has all.
    with pytest.raises(OperationError, match="c5 came in version 2 of the tree and is not known to have all yet"):
        proxy.choose("c1", 8, "c5")
    proxy.begin("c1", "c2", "c3", "c4", "c5")
    proxy.clusters["c5"].fill(proxy.document, "t-1", 5, 9)
    proxy.refused("INVALID", "c5 is being filled: wait until it has all before another comes",
                  tree=[["c1", ["c2", "another"]], FIVE[1]], version=3)  # fmt: skip
    proxy.clusters["c5"].fill(proxy.document, "t-1", 9, 9)
    assert proxy.choose("c1", 8, "c5").distributors[1].target == "c5"
    assert proxy.apply([["c1", ["c2", "another"]], FIVE[1]], version=3).added == {"another": "c2"}


def test_a_cluster_that_comes_is_to_be_empty() -> None:
    proxy = Proxy()
    for name in ("c1", "c2", "c3", "c4"):
        proxy.clusters[name].add_topic("t-1")
    proxy.apply()
    proxy.begin("c1", "c2", "c3", "c4")
    new = Proxy("c5", proxy.clusters)
    cluster = proxy.clusters["c5"]
    cluster.add_topic("other").partitions[0].end = 9
    empty, left = cluster.add_topic("t-1", 2).partitions
    empty.start = empty.end = 9  # retention, or an operator, took everything
    left.start, left.end = 3, 7
    cluster.add_topic(TIMES_TOPIC).partitions[0].end = 4
    held = ["t-1-1 has offsets 3 to 6"]
    assert proxy.apply(FIVE, version=2, dry_run=True).not_empty == {"c5": held}
    # Others apply it all the same, with those words: nothing goes there, or comes from there, before it does.
    applied = proxy.apply(FIVE, version=2)
    assert (applied.blocked, applied.not_empty) == ([], {"c5": held})
    text = json.dumps(proxy.operations.document())
    tried = new.apply_text(text, dry_run=True)
    assert tried.not_empty == {"c5": held}
    (why,) = tried.blocked
    assert why.startswith("c5 is new, and not empty: t-1-1 has offsets 3 to 6. c4 gives it all messages of the tree")
    with pytest.raises(OperationError, match="--own-messages") as error:
        new.apply_text(text)
    assert (error.value.code, new.log.state.tree) == ("CONFLICT", None)
    left.leader = -1
    with pytest.raises(OperationError, match="whether this cluster is empty is not known: where t-1-1 ends") as error:
        new.apply_text(text)
    assert error.value.code == "NOT_AVAILABLE"
    left.leader = 1
    tried = new.apply_text(text, dry_run=True, own_messages=True)
    assert (tried.blocked, tried.not_empty) == ([], {"c5": held})
    left.start = left.end
    assert new.apply_text(text).not_empty == {}
    left.end = 20
    assert new.apply_text(text).not_empty == {}, "it is one of the tree's clusters now"
    # One that left by mistake goes on where it was.
    new.begin("c5")
    asyncio.run(new.operations.leave(dry_run=False, give_up=True))
    assert new.apply_text(text).not_empty == {}


def test_a_cluster_that_has_begun_before_others_know_it_is_not_asked_to_be_empty() -> None:
    proxy = Proxy()
    for name in ("c1", "c2", "c3", "c4"):
        proxy.clusters[name].add_topic("t-1")
    proxy.apply()
    proxy.begin("c1", "c2", "c3", "c4")
    second = Proxy("c2", proxy.clusters)
    second.apply()
    proxy.apply(FIVE, version=2)
    new = Proxy("c5", proxy.clusters)
    new.apply_text(json.dumps(proxy.operations.document()))
    proxy.clusters["c5"].found["t-1"].partitions[0].end = 5
    assert second.apply(FIVE, version=2, dry_run=True).not_empty == {"c5": ["t-1-0 has offsets 0 to 4"]}
    new.begin("c5")
    assert second.apply(FIVE, version=2).not_empty == {}


def test_times_of_groups_are_messages_too() -> None:
    proxy = Proxy()
    proxy.apply(groups=["g-"])
    for name in ("c1", "c2", "c3", "c4"):
        proxy.clusters[name].add_topic("t-1")
    proxy.begin("c1", "c2", "c3", "c4")
    proxy.clusters["c5"].add_topic(TIMES_TOPIC).partitions[0].end = 4
    held = proxy.apply(FIVE, version=2, dry_run=True, groups=["g-"]).not_empty
    assert held == {"c5": ["__isthmus_tree_times-0 has offsets 0 to 3"]}


def test_a_leaf_has_all_by_what_was_kept_last() -> None:
    """What was kept beside another partition stands there still when the leaf has more of them."""
    proxy = Proxy()
    for name in ("c1", "c2", "c3", "c4"):
        proxy.clusters[name].add_topic("t-1")
    proxy.apply()
    proxy.begin("c1", "c2", "c3", "c4")
    proxy.apply(FIVE, version=2)
    document, cluster = proxy.document, proxy.clusters["c5"]
    group = given_group("c4", document.tree.level_between("c4", "c5"))

    def keep(at: int, positions: dict[int, int], topic: str = "t-1", filled: int = 0) -> None:
        kept = {
            each: KeptGiven(Given(Term(2, 0), end), "", fill_until=9, filled=filled) for each, end in positions.items()
        }
        cluster.offsets.setdefault(group, {})[topic, at] = CommittedOffset(*given_metadata(at, kept))

    def filled() -> bool:
        return asyncio.run(is_filled(cluster, document, "c5"))

    assert not filled()
    keep(0, {0: 9, 1: 3})
    assert not filled()
    keep(1, {1: 9})
    assert filled()  # of how many partitions was not said yet
    for at in (0, 1):
        keep(at, {at: 9}, filled=3)
    assert not filled()
    keep(0, {0: 3}, topic="t-2", filled=3)
    assert not filled()
    keep(0, {0: 9}, topic="t-2", filled=3)
    assert filled()
    # Where it was deleted at the cluster that fills, that one says so, and of the topic nothing new.
    del cluster.offsets[group]["t-1", 1]
    assert not filled()
    keep(0, {0: 9}, filled=2)
    assert filled()


THREE = [["c1", "c2"], "c4"]


def test_a_cluster_is_taken_out_when_nobody_lacks_what_it_has() -> None:
    proxy = Proxy()
    for name in ("c1", "c2", "c3", "c4"):
        proxy.clusters[name].add_topic("t-1").partitions[0].end = 5
    proxy.apply()
    proxy.begin("c1", "c2", "c3", "c4", settled=3)
    tried = proxy.apply(THREE, version=2, dry_run=True)
    assert (tried.added, tried.removed) == ({}, ["c3"])
    assert tried.blocked == [
        "c3: c1 writes to it at level 8: choose another target",
        "c3: t-1-0: its log ends at 5, and is settled up to 3 at level 4",
        "c3: t-1-0: its log ends at 5, and is settled up to 3 at level 8",
    ]
    leaving = Proxy("c3", proxy.clusters)
    leaving.apply()
    with pytest.raises(OperationError, match="others would lack what is here: t-1-0: its log ends at 5"):
        asyncio.run(leaving.operations.leave(dry_run=False, give_up=False))
    assert len(asyncio.run(leaving.operations.leave(dry_run=True, give_up=False)).lacking) == 2
    proxy.choose("c1", 8, "c4")
    proxy.clusters["c1"].keep(8, "t-1", KeptCourse(Course((Stretch(Term(1, 1), "c4", 0, 5),)), 1, ""))
    proxy.begin("c3", settled=5)
    assert proxy.apply(THREE, version=2).removed == ["c3"]
    # Others have begun without it: what it does not settle any more keeps nobody back.
    second = Proxy("c2", proxy.clusters)
    second.apply()
    proxy.begin("c1")
    second.clusters["c3"].begin(second.document, "t-1", 4)
    assert second.apply(THREE, version=2).removed == ["c3"]
    with pytest.raises(OperationError, match="isthmus tree leave"):
        leaving.apply(THREE, version=2)
    assert asyncio.run(leaving.operations.leave(dry_run=False, give_up=True)).lacking


def test_a_cluster_whose_topic_was_made_anew_has_settled_nothing_of_it() -> None:
    """Its levels have not begun with it yet: what they keep is of the topic before."""
    proxy = Proxy()
    for name in ("c1", "c2", "c3", "c4"):
        proxy.clusters[name].add_topic("t-1")
    proxy.apply()
    proxy.begin("c1", "c2", "c3", "c4", settled=5)
    leaving = Proxy("c3", proxy.clusters)
    leaving.apply()

    def lacking() -> list[str]:
        return asyncio.run(leaving.operations.leave(dry_run=True, give_up=False)).lacking

    assert lacking() == []
    proxy.clusters["c3"].add_topic("t-1").partitions[0].end = 3
    assert lacking() == [f"t-1-0: level {level} does not distribute it" for level in (4, 8)]


def test_a_cluster_that_dies_while_it_is_asked_is_none_that_has_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has said what it keeps, and not where its logs end."""
    proxy = Proxy()
    for name in ("c1", "c2", "c3", "c4"):
        proxy.clusters[name].add_topic("t-1")
    proxy.apply()
    proxy.begin("c1", "c2", "c3", "c4")

    async def dies(places: Any) -> Any:
        raise BrokerUnavailable("no broker answers")

    monkeypatch.setattr(proxy.clusters["c3"], "log_ends", dies)
    assert proxy.apply(THREE, version=2, dry_run=True).blocked == [
        "c3: c1 writes to it at level 8: choose another target",
        "c3 does not say how far it is: no broker answers; if it is lost: --give-up, and what it had passed on to "
        "nobody is lost with it",
    ]


def test_a_cluster_that_is_lost_is_given_up() -> None:
    proxy = Proxy()
    for name in ("c1", "c2", "c3", "c4"):
        proxy.clusters[name].add_topic("t-1")
    proxy.apply()
    proxy.begin("c1", "c2", "c4")
    proxy.clusters["c3"].is_up = False
    proxy.refused(
        "CONFLICT", "if it is lost: --give-up, and what it had passed on to nobody is lost", tree=THREE, version=2
    )
    assert proxy.apply(THREE, version=2, give_up=True).removed == ["c3"]
    assert proxy.operations.status().distributors[1].target == "c4"


def test_topics_that_are_missing_are_made_as_others_have_them() -> None:
    proxy = Proxy()
    own, second, third = (proxy.clusters[name] for name in ("c1", "c2", "c3"))
    second.add_topic("t-1", 3, {"retention.ms": "1000", "min.insync.replicas": "2", "max.message.bytes": "1"})
    second.add_topic("other")
    third.add_topic("t-1", 2)
    third.add_topic("t-2", 4)
    own.add_topic("t-2", 4)
    own.policy = lambda topic, name, value: "not so small" if (name, value) == ("max.message.bytes", "1") else None
    proxy.clusters["c4"].is_up = False
    tried = proxy.apply(dry_run=True)
    assert list(own.found) == ["t-2"]
    (topic,) = tried.topics
    assert (topic.topic, topic.partitions, topic.like, topic.elsewhere) == ("t-1", 3, "c2", {"c3": 2})
    assert topic.settings == {"retention.ms": "1000", "min.insync.replicas": "1"}
    assert "not so small" in topic.settings_refused["max.message.bytes"]
    assert tried.not_compared.keys() == {"c4"}
    assert proxy.apply().topics[0].reason is None
    assert (len(own.found["t-1"].partitions), own.found["t-1"].configs) == (3, topic.settings)
    # It is there now, and what others have more of goes by keys.
    (again,) = proxy.apply().topics
    assert (again.like, again.partitions, again.elsewhere) == (None, 3, {"c3": 2})


def test_targets_are_chosen_at_run_time() -> None:
    proxy = Proxy()
    proxy.apply()
    status = proxy.choose("c1", 8, "c4", give_up=True)
    assert [(each.level, each.target, each.other_targets) for each in status.distributors] == [
        (4, "c2", []),
        (8, "c4", ["c3"]),
    ]
    assert proxy.log.state.tree is not None
    assert proxy.log.state.tree.given_up == (8,)
    for cluster, level, leaf, words in (
        ("c2", 8, "c4", "this is cluster c1 of the tree: ask a proxy of c2"),
        ("c1", 8, "c2", "c2 is not on the other side of level 8; choose c3 or c4"),
        ("c1", 5, "c4", "it has no level 5; it has 4, 8"),
        ("c1", 5, None, "has no level 5"),
    ):
        with pytest.raises(OperationError, match=words):
            proxy.choose(cluster, level, leaf)
    assert proxy.choose("c1", 8, None).distributors[1].target == "c3"


NAMED = {"c1": "t-{topic}", "c2": "t-x-{topic}", "c3": "t-{topic}.y", "c4": "t-{topic}", "c5": "t-{topic}-new"}


def names(*leaves: str) -> dict[str, str]:
    return {leaf: NAMED[leaf] for leaf in leaves}


def test_clusters_call_topics_differently() -> None:
    proxy = Proxy()
    own, second, third = (proxy.clusters[name] for name in ("c1", "c2", "c3"))
    own.add_topic("t-2", 4)
    own.add_topic("t-" + "l" * 246)
    second.add_topic("t-x-1", 3, {"retention.ms": "1000"})
    second.add_topic("t-y-1")  # it has no name elsewhere
    third.add_topic("t-2.y", 2)
    tried = proxy.apply(dry_run=True, names=names(*FOUR[0], *FOUR[1]))
    assert [(each.topic, each.like, each.partitions, each.elsewhere) for each in tried.topics] == [
        ("t-1", "c2", 3, {}), ("t-2", None, 4, {"c3": 2}),
    ]  # fmt: skip
    assert (tried.topics[0].settings, tried.names_unfit, tried.plan.names) == (
        {"retention.ms": "1000"}, [], names(*FOUR[0], *FOUR[1]),
    )  # fmt: skip
    proxy.apply(names=names(*FOUR[0], *FOUR[1]))
    assert len(own.found["t-1"].partitions) == 3
    other = Proxy("c2", proxy.clusters)
    applied = other.apply(names=names(*FOUR[0], *FOUR[1]))
    assert applied.names_unfit == ["t-y-1"]
    assert [each.topic for each in applied.topics] == ["t-x-2"]  # the longest of c1 would be too long here
    assert second.found.keys() == {"t-x-1", "t-x-2", "t-y-1"}
    assert proxy.operations.document()["names"] == names(*FOUR[0], *FOUR[1])
    assert proxy.operations.status().plan.names == names(*FOUR[0], *FOUR[1])
    proxy.refused("INVALID", "names.c2: it is 't-x-", version=2, names={**names(*FOUR[0], *FOUR[1]), "c2": "t-{topic}"})
    proxy.refused("INVALID", "names.c2: it is 't-x-", dry_run=True,
                  names={**names(*FOUR[0], *FOUR[1]), "c2": "t-{topic}"})  # fmt: skip


def test_clusters_with_names_of_their_own_come_and_go() -> None:
    """What another cluster keeps and holds is looked for under its names."""
    proxy = Proxy()
    own_names = {"c1": "t-1", "c2": "t-x-1", "c3": "t-1.y", "c4": "t-1", "c5": "t-1-new"}
    four = names(*FOUR[0], *FOUR[1])

    def begin(*leaves: str, settled: int = 0) -> None:
        for leaf in leaves:
            proxy.clusters[leaf].begin(proxy.document, own_names[leaf], settled)

    for name in ("c1", "c2", "c3", "c4"):
        proxy.clusters[name].add_topic(own_names[name]).partitions[0].end = 5
    proxy.apply(names=four)
    begin("c1", "c2", "c4")
    assert {why[:24] for why in proxy.apply(FIVE, version=2, dry_run=True, names=NAMED).blocked} == {
        "c3 has not begun version"
    }
    begin("c1", "c2", "c3", "c4", settled=3)
    tried = proxy.apply(THREE, version=2, dry_run=True, names=names("c1", "c2", "c4"))
    assert tried.blocked == [
        "c3: c1 writes to it at level 8: choose another target",
        "c3: t-1-0: its log ends at 5, and is settled up to 3 at level 4",
        "c3: t-1-0: its log ends at 5, and is settled up to 3 at level 8",
    ]
    proxy.clusters["c5"].add_topic("t-1-new").partitions[0].end = 1
    assert proxy.apply(FIVE, version=2, names=NAMED).not_empty == {"c5": ["t-1-new-0 has offsets 0 to 0"]}
    new = Proxy("c5", proxy.clusters)
    with pytest.raises(OperationError, match="t-1-new-0 has offsets 0 to 0"):
        new.apply_text(json.dumps(proxy.operations.document()))
    del proxy.clusters["c5"].found["t-1-new"]
    new.apply_text(json.dumps(proxy.operations.document()))
    assert "t-1-new" in proxy.clusters["c5"].found
    begin("c1", "c2", "c3", "c4", "c5")
    proxy.clusters["c5"].fill(proxy.document, "t-1-new", 5, 9)
    with pytest.raises(OperationError, match="is not known to have all yet"):
        proxy.choose("c1", 8, "c5")
    proxy.clusters["c5"].fill(proxy.document, "t-1-new", 9, 9)
    assert proxy.choose("c1", 8, "c5").distributors[1].target == "c5"
