"""Each hook is documented, with its signature, and has a test on a real proxy."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from isthmus_plugins import hookspecs

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "plugins.md").read_text()
TESTS = (ROOT / "tests" / "integration" / "test_hooks.py").read_text()
HOOKS = [name for name in vars(hookspecs) if name.startswith("isthmus_")]


def test_there_are_hooks() -> None:
    assert len(HOOKS) >= 9


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_is_documented(name: str) -> None:
    hook = getattr(hookspecs, name)
    assert hook.__doc__
    parameters = ", ".join(inspect.signature(hook).parameters)
    assert f"| `{name}({parameters})` |" in PAGE


@pytest.mark.parametrize("name", HOOKS)
def test_a_hook_has_a_test(name: str) -> None:
    assert f"def test_hook_{name.removeprefix('isthmus_')}(" in TESTS


def test_nothing_is_documented_that_is_no_hook() -> None:
    assert sorted(re.findall(r"^\| `(isthmus_\w+)\(", PAGE, re.MULTILINE)) == sorted(HOOKS)
