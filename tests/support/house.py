"""The structure of the code, read from it: imports between modules, wings, and their map in ARCHITECTURE.md.

``python -m support.house`` (from ``tests/``) writes the map anew; a test fails while it is stale.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import grimp

ROOT: Final = Path(__file__).parents[2]
COMPONENTS: Final = {
    "isthmus_protocol": "protocol",
    "isthmus_control": "control",
    "isthmus_plugins": "plugins",
    "isthmus": "proxy",
    "isthmus_bench": "bench",
    "isthmus_spark": "spark",
}
"""By package: its folder."""
REPLICATION: Final = "isthmus_plugins.replication"
BEGIN: Final = "<!-- wings: written by tests/support/house.py from the docstrings -->"
END: Final = "<!-- /wings -->"


class Wing(NamedTuple):
    """A folder of replication, as its docstring has it."""

    name: str
    purpose: str
    nouns: str
    builds_on: frozenset[str]
    modules: tuple[str, ...]


def graph() -> grimp.ImportGraph:
    """Who imports whom in all components."""
    return grimp.build_graph(*COMPONENTS)


def wings() -> list[Wing]:
    """The wings of replication, in the order of their names."""
    found = []
    for path in sorted((ROOT / "plugins" / REPLICATION.replace(".", "/")).glob("*/__init__.py")):
        purpose, nouns, builds_on = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")
        modules = sorted(each.stem for each in path.parent.glob("*.py") if each.stem != "__init__")
        below = _behind("Builds on: ", builds_on)
        names = frozenset(below.split(", ")) if below != "no other wing" else frozenset[str]()
        found.append(Wing(path.parent.name, purpose, _behind("Nouns: ", nouns), names, tuple(modules)))
    return found


def _behind(head: str, paragraph: str) -> str:
    text = " ".join(paragraph.split())
    assert text.startswith(head), f"{text!r} does not begin with {head!r}"
    assert text.endswith("."), f"{text!r} does not end with a full stop"
    return text[len(head) : -1]


def imported_wings(imports: grimp.ImportGraph, wing: str) -> frozenset[str]:
    """What of replication beside itself a wing imports: wings, and modules beside them."""
    own = f"{REPLICATION}.{wing}"
    found = set()
    for module in imports.find_descendants(own) | {own}:
        for imported in imports.find_modules_directly_imported_by(module):
            if imported.startswith(f"{REPLICATION}.") and imported not in imports.find_descendants(own) | {own}:
                found.add(imported.removeprefix(f"{REPLICATION}.").split(".")[0])
    return frozenset(found)


def cycles(imports: grimp.ImportGraph) -> Iterator[frozenset[str]]:
    """Sets of modules that import one another in a circle (Tarjan's strongly connected components)."""
    numbers: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []

    def visit(module: str) -> Iterator[frozenset[str]]:
        numbers[module] = lowest[module] = len(numbers)
        stack.append(module)
        for imported in sorted(imports.find_modules_directly_imported_by(module)):
            if imported not in numbers:
                yield from visit(imported)
                lowest[module] = min(lowest[module], lowest[imported])
            elif imported in stack:
                lowest[module] = min(lowest[module], numbers[imported])
        if lowest[module] == numbers[module]:
            at = stack.index(module)
            component = frozenset(stack[at:])
            del stack[at:]
            if len(component) > 1:
                yield component

    for module in sorted(imports.modules):
        if module not in numbers:
            yield from visit(module)


def wings_map(found: Iterable[Wing]) -> str:
    """The wings as ARCHITECTURE.md has them, markers included."""
    rows = [f"| `{each.name}/` | {each.purpose} | {' '.join(each.modules)} |" for each in found]
    return "\n".join([BEGIN, "| wing | what it is for | modules |", "|---|---|---|", *rows, END])


def with_map(text: str, found: Iterable[Wing]) -> str:
    """ARCHITECTURE.md's text with the map as it should be."""
    before, _, rest = text.partition(BEGIN)
    _, marker, after = rest.partition(END)
    assert marker, f"ARCHITECTURE.md has no place for the map: {BEGIN} ... {END}"
    return before + wings_map(found) + after


if __name__ == "__main__":
    page = ROOT / "ARCHITECTURE.md"
    page.write_text(with_map(page.read_text(), wings()))
