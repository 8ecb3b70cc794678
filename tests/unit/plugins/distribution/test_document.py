"""The tree document: levels that it leaves out, and errors that say what to do."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus_plugins.distribution.copy_flags import LEVELS_MAX
from isthmus_plugins.distribution.document import Began, TreeDocument, following, read_document, written
from isthmus_plugins.distribution.tree import Added, Change, TreeError, change

NAMES = ("a", "b", "c", "d", "e")


def text(tree: Any, names: tuple[str, ...] = NAMES[:3], /, **more: Any) -> str:
    clusters = {name: {"cluster_id": f"id-{name}", "bootstrap_servers": f"{name}-1:9092"} for name in names}
    return yaml.safe_dump({"version": 1, "topics": ["t-"], "clusters": clusters, "tree": tree, **more})


def problems(document: str) -> tuple[str, ...]:
    with pytest.raises(TreeError) as refused:
        read_document(document)
    return refused.value.problems


def test_a_document_as_it_is_written() -> None:
    found = read_document(
        """
        version: 7
        topics: [orders-, bills-]
        header: my-flags
        exactly_once: false
        clusters:
          cluster-1: {cluster_id: id-a, bootstrap_servers: "a-1:9092,a-2:9092"}
          cluster-2: {cluster_id: id-b, bootstrap_servers: "b-1:9092"}
          cluster-3: {cluster_id: id-c, bootstrap_servers: "c-1:9092"}
        tree: {level: 3, sides: [{level: 1, sides: [cluster-1, cluster-2]}, cluster-3]}
        targets:
          cluster-3: {3: cluster-2}
        """
    )
    assert (found.tree.version, found.tree.header) == (7, "my-flags")
    assert found.tree.leaves == ("cluster-1", "cluster-2", "cluster-3")
    assert [above.level for above in found.tree.above("cluster-1")] == [1, 3]
    assert found.targets == {("cluster-3", 3): "cluster-2"}
    assert found.clusters["cluster-1"].servers == ["a-1:9092", "a-2:9092"]
    assert (found.topics, found.exactly_once) == (("orders-", "bills-"), False)
    assert [found.leaf_of(each) for each in ("id-a", "id-c", "id-x")] == ["cluster-1", "cluster-3", None]


def test_offsets_of_groups_in_a_document() -> None:
    found = read_document(text(["a", "b"], NAMES[:2], groups=["bills-", "app."], margin_ms=5))
    assert (found.groups, found.margin_ms) == (("bills-", "app."), 5)
    assert read_document(json.dumps(written(found))) == found
    default = read_document(text(["a", "b"], NAMES[:2]))
    assert (default.groups, default.margin_ms) == ((), 60_000)
    assert (
        not {"groups", "margin_ms", "margins_ms"} & written(default).keys()
    )  # as it was written before there were any
    for more in ({"margin_ms": 0}, {"groups": "x"}):
        assert problems(text(["a", "b"], NAMES[:2], **more))
    assert problems(text(["a", "b"], NAMES[:2], groups=["x", "xy"])) == (
        "groups: 'x' and 'xy' overlap: keep the shorter one",
    )


def test_prefixes_of_groups_may_have_margins_of_their_own() -> None:
    margins = {"bills-": 7, "app.": 600_000}
    found = read_document(text(["a", "b"], NAMES[:2], groups=["bills-", "app.", "x"], margin_ms=50, margins_ms=margins))
    assert read_document(json.dumps(written(found))) == found
    assert [found.margin_of(group) for group in ("bills-1", "app.1", "x1", "another")] == [7, 600_000, 50, 50]
    assert found.least_margin_ms == 7
    of_all = read_document(text(["a", "b"], NAMES[:2], groups=["x"], margin_ms=50, margins_ms={"x": 600_000}))
    assert of_all.least_margin_ms == 600_000
    assert problems(text(["a", "b"], NAMES[:2], groups=["x"], margins_ms={"xy": 1})) == (
        "margins_ms.xy: it is none of `groups` (x): a margin is that of a prefix as it stands there",
    )
    assert problems(text(["a", "b"], NAMES[:2], groups=["x"], margins_ms={"x": 0}))


NAMED = {"a": "t-{topic}", "b": "t-x-{topic}"}


def test_names_in_a_document() -> None:
    found = read_document(text(["a", "b"], NAMES[:2], names=NAMED))
    assert read_document(json.dumps(written(found))) == found
    assert (found.has("a", "t-1"), found.has("b", "t-1"), found.has("b", "t-x-1")) == (True, False, True)
    assert found.own_name("b", found.shared_name("a", "t-1") or "") == "t-x-1"
    plain = read_document(text(["a", "b"], NAMES[:2]))
    assert "names" not in written(plain)
    assert (plain.names, plain.shared_name("a", "t-1"), plain.own_name("b", "t-1")) == (None, "t-1", "t-1")
    assert found.digest != plain.digest
    assert plain.digest == "2a262d7e"  # as it was before there were names: clusters have it in what they keep
    assert problems(text(["a", "b"], NAMES[:2], names={"a": "{topic}"})) == (
        "names has none of b: write what topics are called there, as for the other clusters",
    )
    (why,) = problems(text(["a", "b"], NAMES[:2], topics=["t-x"], names={"a": "t-{topic}", "b": "t-x-{topic}"}))
    assert why.startswith("topics: names that begin so are of other topics at b than at a")


def test_a_cluster_s_names_stay_what_they_are() -> None:
    before = read_document(text(["a", "b"], NAMES[:2], names=NAMED))

    def after(tree: Any, leaves: tuple[str, ...], version: int = 2, **more: Any) -> TreeDocument:
        return following(before, read_document(text(tree, leaves, version=version, **more), before.tree))[0]

    for version in (1, 2):
        with pytest.raises(TreeError, match=r"names\.b: it is 't-x-\{topic\}' in version 1, and stays that"):
            after(["a", "b"], NAMES[:2], version, names={**NAMED, "b": "t-y-{topic}"})
        with pytest.raises(TreeError, match="names: version 1 has names, and so have all that follow"):
            after(["a", "b"], NAMES[:2], version)
    came = after([["a", "c"], "b"], NAMES[:3], names={**NAMED, "c": "t-{topic}-c"})
    assert came.has("c", "t-1-c")
    # One that was taken out may come back with others.
    before = read_document(text(["a", "c"], ("a", "c"), names={"a": "t-{topic}", "c": "t-{topic}"}))
    assert after(["a", ["b", "c"]], NAMES[:3], names={"a": "t-{topic}", "b": "t-y-{topic}", "c": "t-{topic}"})
    before = read_document(text(["a", "b"], NAMES[:2]))
    with pytest.raises(TreeError, match="names: version 1 has no names, and so have all that follow"):
        after(["a", "b"], NAMES[:2], names=NAMED)


def test_levels_have_room_between_them_by_default() -> None:
    tree = read_document(text([[["a", "b"], "c"], ["d", "e"]], NAMES)).tree
    assert {leaf: [above.level for above in tree.above(leaf)] for leaf in NAMES} == {
        "a": [4, 8, 12],
        "b": [4, 8, 12],
        "c": [8, 12],
        "d": [4, 12],
        "e": [4, 12],
    }


@pytest.mark.parametrize(("height", "levels"), [(15, (4, 60)), (16, (3, 48)), (40, (1, 40)), (63, (1, 63))])
def test_less_room_in_deep_trees(height: int, levels: tuple[int, int]) -> None:
    names = tuple(f"c{number}" for number in range(height + 1))
    nested: Any = names[0]
    for name in names[1:]:
        nested = [nested, name]
    above = read_document(text(nested, names)).tree.above("c0")
    assert (above[0].level, above[-1].level) == levels


def test_a_later_version_keeps_the_levels_and_finds_one_below() -> None:
    tree = read_document(text([["a", "b"], "c"])).tree
    for version, sides, expected in (
        (2, [["a", ["b", "d"]], "c"], [2, 4, 8]),
        (3, [["a", [["b", "e"], "d"]], "c"], [1, 2, 4, 8]),
    ):
        names = tuple(sorted(leaves_of(sides)))
        after = read_document(text(sides, names, version=version), tree).tree
        assert not change(tree, after).removed
        assert [above.level for above in after.above("b")] == expected
        tree = after
    with pytest.raises(TreeError, match="there is no level below 1 for another subtree: add the cluster elsewhere"):
        read_document(text([["a", [[["b", "f"], "e"], "d"]], "c"], (*NAMES, "f"), version=4), tree)


def leaves_of(sides: Any) -> list[Any]:
    return [leaf for side in sides for leaf in leaves_of(side)] if isinstance(sides, list) else [sides]


def test_what_is_written_reads_as_the_same() -> None:
    document = read_document(text([[["a", "b"], "c"], ["d", "e"]], NAMES, targets={"a": {12: "e"}}))
    assert read_document(yaml.safe_dump(written(document))) == document
    assert read_document(json.dumps(written(document))) == document


@pytest.mark.parametrize(
    ("document", "said"),
    [
        (text([["a", "b"]]), "tree: a subtree has two sides, this one has 1: write the side itself, without a subtree"),
        (text([]), "tree: a subtree has two sides, this one has 0: name two clusters, or take it out"),
        (text(["a", "b", "c"]), "tree: a subtree has two sides, this one has 3: put two of them into a subtree"),
        (text(["a", ["b", "a"]]), "tree[1][1]: cluster a is a leaf at tree[0] already: take one out"),
        (
            text(["a", ["b", "x"]]),
            "tree[1][1]: cluster x is unknown: correct the name, or add it to `clusters` (a, b, c)",
        ),
        (text(["a", "b"]), "cluster c is not in the tree: put it beside another one, or out of `clusters`"),
        (text(["a", ["b", "c"]], topics=["t-", "u-", "t-x-"]), "topics: 't-' and 't-x-' overlap: keep the shorter one"),
        (text(["a", ["b", "c"]], topics=[]), "topics: List should have at least 1 item"),
        (
            text(["a", ["b", "c"]]).replace("id-c", "id-a"),
            "clusters a and c have one cluster_id: a cluster is a leaf once",
        ),
        (text("a"), "tree: a alone is no tree: name two clusters"),
        (
            text(["a", ["b", 3]]),
            "tree[1][1]: 3 is neither the name of a cluster (in quotes) nor a subtree: [one side, another one]",
        ),
        (text({"level": 64, "sides": ["a", "b"]}), "levels are numbers from 1 to 63"),
        (text({"level": True, "sides": ["a", "b"]}), "levels are numbers from 1 to 63"),
        (text({"level": 3, "side": ["a", "b"]}), "tree: side is not known: a subtree has `level` and `sides`"),
        (
            text(["a", {"level": 9, "sides": ["b", "c"]}]),
            "tree[1]: level 9 stands in level 8: levels get lower towards the clusters; write `level: N` with N bel",
        ),
        (
            text({"level": 3, "sides": ["a", {"level": 3, "sides": ["b", "c"]}]}),
            "tree[1]: level 3 stands in level 3: levels get lower towards the clusters; write `level: N` with N bel",
        ),
        (text(["a", ["b", "c"]], targets={"x": {8: "b"}}), "targets.x: there is no such cluster in the tree"),
        (text(["a", ["b", "c"]], targets={"a": {4: "b"}}), "targets.a: it has no level 4; it has 8"),
        (
            text(["a", ["b", "c"]], targets={"b": {4: "a"}}),
            "targets.b.4: a is not on the other side of level 4; choose c",
        ),
        (text(["a", ["b", "c"]], version=0), "version: Input should be greater than or equal to 1"),
        (text(["a", ["b", "c"]], heather="x"), "heather: Extra inputs are not permitted"),
        (
            "a: &x [*x, b]",
            "line 1, column 8: the alias *x would have a subtree stand twice, or in itself, which is a loop",
        ),
        ("version: 1\nversion: 2", "version stands twice: keep one of them"),
        ("", "the document has no keys: it needs `version`, `clusters` and `tree`"),
        ("version: [", "line 1, column 11: "),
        ("a: 2001-99-99", "month must be in 1..12"),
        ("a: " + "[" * 5000, "the tree is nested too deep: 63 levels have a bit"),
        ("a" * 300_000, "the document is larger than 262144 bytes"),
    ],
)
def test_errors_say_what_to_do(document: str, said: str) -> None:
    found = problems(document)
    assert any(said in problem for problem in found), found


def test_all_problems_of_a_tree_are_shown_at_once() -> None:
    assert len(problems(text([["a", "a"], ["x"]]))) == 2


def test_too_many_levels() -> None:
    names = tuple(f"c{number}" for number in range(LEVELS_MAX + 2))
    nested: Any = names[0]
    for name in names[1:]:
        nested = [nested, name]
    assert any(
        "too many levels: more than 63 above each other; balance the tree more" in each
        for each in problems(text(nested, names))
    )


@settings(deadline=None)
@given(st.recursive(st.sampled_from(NAMES) | st.integers() | st.none(), lambda inner: st.lists(inner, max_size=3)))
def test_any_tree_is_read_or_refused(tree: Any) -> None:
    names = leaves_of(tree)
    try:
        found = read_document(text(tree, NAMES)).tree
    except TreeError:
        assert not is_binary(tree) or sorted(names) != sorted(NAMES)
    else:
        assert list(found.leaves) == names


def is_binary(tree: Any) -> bool:
    return isinstance(tree, str) or (isinstance(tree, list) and len(tree) == 2 and all(map(is_binary, tree)))


@settings(deadline=None)
@given(st.text(max_size=200))
def test_any_text_is_read_or_refused(document: str) -> None:
    with pytest.raises(TreeError):
        read_document(document)


def document(tree: Any, names: tuple[str, ...], version: int = 1, **more: Any) -> str:
    return text(tree, names, version=version, **more)


FIRST = read_document(document([["a", "b"], "c"], NAMES[:3], targets={"c": {8: "b"}}))


def test_a_new_cluster_is_nobodys_target_but_of_the_one_that_fills_it() -> None:
    read = read_document(document([["a", "b"], ["c", "d"]], NAMES[:4], version=2), FIRST.tree)
    after, changed = following(FIRST, read)
    assert changed == Change({"d": "c"}, ())
    assert after.added == {"d": Added("c", 2)}
    assert {(leaf, level): after.target(leaf, level) for leaf, level in after.targets} == {
        ("a", 8): "c", ("b", 8): "c", ("c", 8): "b", ("d", 8): "b",
    }  # fmt: skip
    began = {(leaf, level): after.began(leaf, level) for leaf, level in (("c", 4), ("c", 8), ("d", 4), ("d", 8))}
    assert began == {
        ("c", 4): Began(2, True), ("c", 8): Began(0, False), ("d", 4): Began(2, False), ("d", 8): Began(2, False),
    }  # fmt: skip
    # Whoever is told it all, or a part of it again, has the same.
    assert read_document(yaml.safe_dump(written(after))) == after
    assert following(after, read) == (after, Change({}, ()))
    # A version that changes nothing of who is there says still who came last.
    later = read_document(document([["a", "b"], ["c", "d"]], NAMES[:4], version=3, exactly_once=False), after.tree)
    assert following(after, later)[0].added == {"d": Added("c", 2)}
    assert (after.digest == FIRST.digest, after.digest == later.digest) == (False, True)


def test_what_cannot_follow() -> None:
    def refused(before: TreeDocument, text: str, filling: tuple[str, ...] = ()) -> tuple[str, ...]:
        with pytest.raises(TreeError) as error:
            following(before, read_document(text, before.tree), filling)
        return error.value.problems

    four = document([["a", "b"], ["c", "d"]], NAMES[:4], version=2, targets={"a": {8: "d"}})
    assert refused(FIRST, four) == ("targets.a.8: d does not have all yet: choose it later",)
    second, _ = following(FIRST, read_document(document([["a", "b"], ["c", "d"]], NAMES[:4], version=2), FIRST.tree))
    five = document([["a", ["b", "e"]], ["c", "d"]], NAMES, version=3)
    assert refused(second, five, ("d",)) == ("d is being filled: wait until it has all before e comes",)
    without_c = document([["a", "b"], "d"], ("a", "b", "d"), version=3)
    assert refused(second, without_c, ("d",)) == (
        "d does not have all yet: wait until c has filled it, or take both out",
    )
    third, changed = following(second, read_document(without_c, second.tree))
    assert (third.added, changed, third.target("a", 8)) == ({}, Change({}, ("c",)), "d")
    # Another one may be lost meanwhile.
    without_a = read_document(document(["b", ["c", "d"]], ("b", "c", "d"), version=3), second.tree)
    assert following(second, without_a, ("d",))[0].added == second.added
    moved = yaml.safe_load(document([["a", "b"], "c"], NAMES[:3], version=2))
    moved["clusters"]["c"]["cluster_id"] = "id-x"
    assert refused(FIRST, yaml.safe_dump(moved)) == ("clusters.c: it is cluster id-c, and stays that",)


def test_a_cluster_that_has_no_version_before_is_told_all_levels() -> None:
    (problem,) = problems(document([["a", "b"], {"level": 2, "sides": ["c", "d"]}], NAMES[:4], version=2))
    assert problem.startswith("tree: this cluster has no version of the tree before 2")
    assert "isthmus tree document" in problem
    (problem,) = problems(document(["a", "b"], NAMES[:2], added={"b": {"by": "c", "version": 2}}))
    assert problem == "added.b: c cannot have filled it: leave `added` to `isthmus tree document`"
