"""The table of conformance names tests that there are, misses no requirement, and counts right."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "conformance.md").read_text()
STATES = "shown", "partly", "not yet"

ROW = re.compile(r"^\| (\d{3})-(\d+) \|.*$", re.MULTILINE)
COUNTS = re.compile(r"^\| ((\d{3}|all)\b[^|]*) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", re.MULTILINE)
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+(?:::\w+)?)`")


class Row(NamedTuple):
    document: str
    number: int
    line: str

    @property
    def name(self) -> str:
        return f"{self.document}-{self.number}"

    @property
    def cells(self) -> list[str]:
        return [cell.strip() for cell in self.line.rstrip()[1:].removesuffix("|").split("|")]

    @property
    def state(self) -> str:
        match self.cells:
            case [_, _, shown_by, missing] if shown_by:
                return "partly" if missing else "shown"
        return "not yet"


def rows(page: str) -> list[Row]:
    return [Row(found[1], int(found[2]), found[0]) for found in ROW.finditer(page)]


@cache
def names_in(path: str) -> frozenset[str]:
    """The tests in a file, those of a class as ``Class::test``."""
    names = set()
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            functions = [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
            names |= {f"{node.name}::{function.name}" for function in functions}
    return frozenset(name for name in names if name.rpartition("::")[2].startswith("test_"))


def wrong_in(row: Row) -> list[str]:
    """What is wrong with a row, each with its name."""
    if len(row.cells) != 4:
        return [f"{row.name} does not have the columns #, requirement, shown by, not yet"]
    _, requirement, shown_by, missing = row.cells
    wrong = [] if requirement else [f"{row.name} has no requirement"]
    if missing and not re.match(r"not yet(: \S|$)", missing):
        wrong.append(f'{row.name} has a last column that does not begin with "not yet": {missing}')
    if not shown_by and not missing:
        wrong.append(f'{row.name} names no test and does not say "not yet"')
    if rest := TEST.sub("", shown_by).replace(",", "").strip():
        wrong.append(f"{row.name} has what is no `path/to/test_file.py::test_name`: {rest}")
    for path, test in TEST.findall(shown_by):
        if not (ROOT / path).is_file():
            wrong.append(f"{row.name} names {path}::{test}: there is no such file")
        elif test not in names_in(path):
            wrong.append(f"{row.name} names {path}::{test}: that file has no such test")
    return wrong


def wrong_numbers(page: str) -> list[str]:
    """Rows that do not go on from the one before in their document."""
    last: Counter[str] = Counter()
    wrong = []
    for row in rows(page):
        if row.number != last[row.document] + 1:
            wrong.append(f"{row.name} is where {row.document}-{last[row.document] + 1} should be")
        last[row.document] = row.number
    return wrong


def wrong_counts(page: str) -> list[str]:
    """Lines of the table of counts as they should be, of those that are not."""
    states = {document: Counter[str]() for document in [*(row.document for row in rows(page)), "all"]}
    for row in rows(page):
        states[row.document][row.state] += 1
        states["all"][row.state] += 1
    lines = {found[2]: found for found in COUNTS.finditer(page)}
    wrong = [f"{lines[document][1]} is counted and has no rows" for document in lines.keys() - states.keys()]
    for document, counted in states.items():
        name = lines[document][1] if document in lines else document
        right = " | ".join([name, *map(str, (counted.total(), *(counted[state] for state in STATES)))])
        if document not in lines or lines[document][0] != f"| {right} |":
            wrong.append(f"the counts should have: | {right} |")
    return wrong


def test_every_row_names_tests_that_there_are_or_says_not_yet() -> None:
    assert rows(PAGE)
    wrong = [each for row in rows(PAGE) for each in wrong_in(row)]
    assert not wrong, "\n".join(wrong)


def test_rows_are_numbered_one_after_the_other() -> None:
    wrong = wrong_numbers(PAGE)
    assert not wrong, "\n".join(wrong)


def test_the_counts_are_those_of_the_rows() -> None:
    wrong = wrong_counts(PAGE)
    assert not wrong, "\n".join(wrong)


HERE = "tests/unit/test_conformance.py"
SELF = f"`{HERE}::test_rows_are_numbered_one_after_the_other`"


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        (f"it works | {SELF} | |", None),
        (f"it works | {SELF}, {SELF} | not yet: on Mars |", None),
        ("it works | | not yet |", None),
        ("it works | | |", "no test"),
        ("it works | | soon |", "begin with"),
        (f"it works | {SELF} |", "columns"),
        (f" | {SELF} | |", "no requirement"),
        (f"a|b works | {SELF} | |", "columns"),
        (f"it works | `{HERE}:12` | |", f"`{HERE}:12`"),
        (f"it works | `{HERE}::test_nothing` | |", f"{HERE}::test_nothing: that file has no such test"),
        (f"it works | `{HERE}::rows` | |", f"{HERE}::rows: that file has no such test"),
        (
            "it works | `tests/unit/test_none.py::test_it` | |",
            "tests/unit/test_none.py::test_it: there is no such file",
        ),
    ],
)
def test_a_mistake_in_a_row_is_named(cells: str, said: str | None) -> None:
    (row,) = rows(f"| 001-1 | {cells}")
    wrong = wrong_in(row)
    assert bool(wrong) == (said is not None)
    assert all(each.startswith("001-1 ") and said in each for each in wrong if said)


def test_mistakes_in_numbers_and_counts_are_named() -> None:
    page = f"| 001-1 | a | {SELF} | |\n| 001-3 | b | | not yet |\n| 001-3 | c | {SELF} | not yet: d |\n"
    assert wrong_numbers(page) == ["001-3 is where 001-2 should be", "001-3 is where 001-4 should be"]
    counted = "| 001 A document | 3 | 1 | 1 | 1 |\n"
    assert wrong_counts(page + counted + "| all | 3 | 2 | 1 | 0 |\n") == [
        "the counts should have: | all | 3 | 1 | 1 | 1 |"
    ]
    assert wrong_counts(page + "| all | 3 | 1 | 1 | 1 |\n") == ["the counts should have: | 001 | 3 | 1 | 1 | 1 |"]
    more = counted + "| all | 3 | 1 | 1 | 1 |\n| 002 Another | 1 | 1 | 0 | 0 |\n"
    assert wrong_counts(page + more) == ["002 Another is counted and has no rows"]
