"""Trees and their versions: which leaves part where, and what may change."""

from __future__ import annotations

import pytest

from isthmus_plugins.distribution.tree import Change, Subtree, Tree, TreeError, change

PAIR = Subtree(4, ("a", "b"))
BEFORE = Tree(1, Subtree(8, (PAIR, "c")))


def test_leaves_know_each_other_by_the_level_at_which_they_part() -> None:
    assert BEFORE.leaves == ("a", "b", "c")
    assert [BEFORE.level_between("a", other) for other in BEFORE.leaves] == [0, 4, 8]
    assert [(above.level, above.beside, above.own) for above in BEFORE.above("b")] == [
        (4, ("a",), ("b",)),
        (8, ("c",), ("a", "b")),
    ]


def test_a_leaf_comes_beside_one_that_was_there() -> None:
    after = Tree(2, Subtree(8, (Subtree(4, ("a", Subtree(2, ("b", "x")))), "c")))
    assert change(BEFORE, after) == Change({"x": "b"}, ())
    with pytest.raises(TreeError, match="x is to be filled by b, which is being filled itself: wait until it has all"):
        change(BEFORE, after, filling={"b"})


def test_leaves_go_and_the_others_part_where_they_did() -> None:
    assert change(BEFORE, Tree(2, Subtree(8, ("a", "c")))) == Change({}, ("b",))
    assert change(BEFORE, Tree(2, PAIR)) == Change({}, ("c",))


@pytest.mark.parametrize(
    ("after", "said"),
    [
        (Tree(3, BEFORE.root), "version 3 cannot follow 1: write `version: 2`"),
        (Tree(1, BEFORE.root), "version 1 cannot follow 1: write `version: 2`"),
        (Tree(2, BEFORE.root, "flags"), "the header is 'isthmus-copy-flags' in version 1: it stays"),
        (Tree(2, Subtree(8, (Subtree(2, ("a", "b")), "c"))), "a and b part at level 4 and would part at 2"),
        (Tree(2, Subtree(8, ("a", Subtree(4, ("b", "c"))))), "a and b part at level 4 and would part at 8"),
        (Tree(2, Subtree(9, (PAIR, "c"))), "a and c part at level 8 and would part at 9"),
        (
            Tree(2, Subtree(8, (Subtree(6, (PAIR, "x")), "c"))),
            "x is new: put it beside one cluster that is in version 1",
        ),
        (
            Tree(2, Subtree(8, (PAIR, Subtree(4, ("c", Subtree(2, ("x", "y"))))))),
            "x is new: put it beside one cluster that is in version 1",
        ),
        (Tree(2, Subtree(8, (Subtree(4, ("a", "x")), "c"))), "it adds x and takes out b: do that in two versions"),
    ],
)
def test_what_would_lose_or_double_copies_is_refused(after: Tree, said: str) -> None:
    with pytest.raises(TreeError) as refused:
        change(BEFORE, after)
    assert any(said in problem for problem in refused.value.problems), refused.value.problems
