"""Walls that import contracts do not check: no cycles, wings that say what they are, one map of them."""

from __future__ import annotations

import grimp
import pytest
from support.house import REPLICATION, ROOT, cycles, graph, imported_wings, wings, with_map

SESSION = {
    f"isthmus.session.{name}"
    for name in ("session", "stranger", "downstream", "upstream", "peer", "connecting", "listener")
}
"""One connection's two sides know each other."""


@pytest.fixture(scope="module")
def imports() -> grimp.ImportGraph:
    return graph()


def test_nothing_imports_in_circles_but_a_session(imports: grimp.ImportGraph) -> None:
    assert list(cycles(imports)) == [SESSION]


def test_a_circle_is_found() -> None:
    imports = grimp.ImportGraph()
    for importer, imported in (("a", "b"), ("b", "c"), ("c", "b"), ("c", "d")):
        for module in (importer, imported):
            imports.add_module(module)
        imports.add_import(importer=importer, imported=imported)
    assert list(cycles(imports)) == [{"b", "c"}]


@pytest.mark.parametrize("wing", wings(), ids=lambda wing: wing.name)
def test_a_wing_says_what_it_builds_on(imports: grimp.ImportGraph, wing) -> None:
    assert wing.builds_on == imported_wings(imports, wing.name), f"the docstring of {REPLICATION}.{wing.name}"
    assert wing.purpose.endswith(".")
    assert wing.nouns


def test_the_architecture_has_the_map_of_the_wings() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    assert text == with_map(text, wings()), "stale: run `python -m support.house` in tests/"
