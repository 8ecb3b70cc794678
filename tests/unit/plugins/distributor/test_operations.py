"""What operators have done with trees: versions that follow, clusters by their ids, and what is refused and why."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from support.admin import MemoryLog

from isthmus_control.commands import RaiseLevel
from isthmus_control.levels import TREES
from isthmus_plugins.distributor.operations import Operations
from isthmus_plugins.links import OperationError
from isthmus_plugins.trees import AppliedTree, ApplyTreeRequest, ChooseTargetRequest

FOUR = [["c1", "c2"], ["c3", "c4"]]


class Proxy:
    """A proxy of a cluster, as far as operators' requests for trees need it."""

    def __init__(self, cluster_id: str = "id-c1") -> None:
        self.log = MemoryLog()
        self.log.apply(RaiseLevel(TREES))
        context: Any = SimpleNamespace(cluster_id=cluster_id, control=self.log)
        self.operations = Operations(context, dict)

    def apply(self, tree: Any = FOUR, version: int = 1, dry_run: bool = False, **more: Any) -> AppliedTree:
        names = ["c1", "c2", "c3", "c4"]
        clusters = {name: {"cluster_id": f"id-{name}", "bootstrap_servers": "h:1"} for name in names}
        document = {"version": version, "topics": ["t-"], "clusters": clusters, "tree": tree, **more}
        request = ApplyTreeRequest(document=json.dumps(document), dry_run=dry_run)
        return asyncio.run(self.operations.apply(request))

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
    asyncio.run(proxy.operations.leave())
    assert proxy.log.state.tree is None


def test_what_cannot_be_applied() -> None:
    Proxy("id-of-another").refused("INVALID", "this cluster, id-of-another, is not in the tree, which has c1: id-c1")
    proxy = Proxy()
    proxy.refused("INVALID", "cluster c4 is not in the tree", tree=["c1", ["c2", "c3"]])
    proxy.apply()
    proxy.refused("INVALID", "write `version: 2`", version=3)
    proxy.refused("INVALID", "level 8 stands in level 4",
                  version=2, tree=[["c1", "c3"], ["c2", "c4"]])  # fmt: skip
    proxy.refused("INVALID", "the header is", version=2, header="other")
    clusters = {name: {"cluster_id": f"id-{name}", "bootstrap_servers": "h:1"} for name in ("c1", "c2", "c3")}
    proxy.refused("NOT_SUPPORTED", "c4: clusters of a tree stay", version=2, clusters=clusters,
                  tree=[["c1", "c2"], "c3"])  # fmt: skip


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
