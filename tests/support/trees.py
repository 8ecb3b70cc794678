"""Trees of clusters: both pictures of document 000, and any."""

from __future__ import annotations

from hypothesis import strategies as st

from isthmus_plugins.distribution.copy_flags import LEVELS_MAX
from isthmus_plugins.distribution.tree import Node, Subtree, Tree

BALANCED = Tree(1, Subtree(3, (Subtree(1, ("cluster-1", "cluster-2")), Subtree(1, ("cluster-3", "cluster-4")))))
UNBALANCED = Tree(
    1,
    Subtree(
        3,
        (
            Subtree(2, ("cluster-1", Subtree(1, ("cluster-2", "cluster-3")))),
            Subtree(1, ("cluster-4", "cluster-5")),
        ),
    ),
)


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    """Two to eight clusters in any shape, with levels that get lower towards them."""

    def drawn(names: list[str], upper: int) -> Node:
        if len(names) == 1:
            return names[0]
        # Each cluster below needs a level of its own at most.
        level = draw(st.integers(len(names) - 1, upper - 1))
        at = draw(st.integers(1, len(names) - 1))
        return Subtree(level, (drawn(names[:at], level), drawn(names[at:], level)))

    root = drawn([f"cluster-{number}" for number in range(draw(st.integers(2, 8)))], LEVELS_MAX + 1)
    assert isinstance(root, Subtree)
    return Tree(1, root)
