"""Which tests run: one case of many in CI, all in their suite, in slices that go on where they ended."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
from support import seeds, suites

TESTS: Final = """
import os
import pytest

@pytest.mark.parametrize("case", range(6))
@pytest.mark.one_in_ci("stories")
def test_story(case):
    assert case != int(os.environ.get("BROKEN", "-1"))

@pytest.mark.suite("stories")
def test_long():
    pass

@pytest.mark.suite("fuzz")
def test_fuzz():
    pass

def test_short():
    pass
"""


TURNS: Final = """
SUBJECTS = {"either": ("test_one.py", "test_other.py")}
SUITE = "stories"
"""
IN_TURNS: Final = ("test_one", "test_other")


class Checkout:
    """A repository with tests of its own, and this project's suites."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "tests" / "support").mkdir(parents=True)
        for module in (suites, seeds):
            source = Path(module.__file__)
            (path / "tests" / "support" / source.name).write_text(source.read_text())
        (path / "tests" / "support" / "turns.py").write_text(TURNS)
        for name in IN_TURNS:
            (path / "tests" / f"{name}.py").write_text(f"def {name}(): pass\ndef {name}_again(): pass\n")
        (path / "tests" / "conftest.py").write_text('pytest_plugins = ("support.suites",)\n')
        (path / "tests" / "test_it.py").write_text(TESTS)
        (path / "pyproject.toml").write_text('[tool.pytest.ini_options]\npythonpath = ["tests"]\n')
        (path / ".gitignore").write_text(".cache/\n__pycache__/\n.pytest_cache/\n")
        self.git("init", "-q")
        self.commit()

    def git(self, *arguments: str) -> None:
        subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@t", *arguments], cwd=self.path, check=True)

    def commit(self) -> None:
        self.git("add", "-A")
        self.git("commit", "-qm", "a tree")

    def run(self, *arguments: str, **environment: str) -> tuple[int, set[str]]:
        """Pytest's exit code, and what ran."""
        without = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "ISTHMUS"))}
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *arguments, "tests"],
            cwd=self.path,
            env=without | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"} | environment,
            capture_output=True,
            text=True,
            check=False,
        )
        lines = [line for line in done.stdout.splitlines() if line.startswith("tests/") and "::" in line]
        return done.returncode, {line.split()[0].partition("::")[2] for line in lines}


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


OF_FILES: Final = {name: {name, f"{name}_again"} for name in IN_TURNS}
STORIES: Final = {f"test_story[{case}]" for case in range(6)} | {"test_long"} | set().union(*OF_FILES.values())


def test_ci_runs_one_case_by_the_tree_and_a_suite_all(checkout: Checkout) -> None:
    code, ran = checkout.run()
    assert code == 0
    assert "test_short" in ran
    (file,) = [name for name in IN_TURNS if name in ran]
    assert ran >= OF_FILES[file]
    (chosen,) = ran - {"test_short"} - OF_FILES[file]
    assert checkout.run()[1] == ran
    assert chosen in STORIES
    for taken, what in ((chosen, "another tree, another case"), (file, "and another file")):
        assert any(taken not in checkout.run(ISTHMUS_TREE=str(tree))[1] for tree in range(20)), what
    assert checkout.run("--suite", "stories")[1] == STORIES
    assert checkout.run("--suite", "all")[1] == {*STORIES, "test_fuzz", "test_short"}


def test_slices_are_all_there_is_and_go_on_where_they_ended(checkout: Checkout) -> None:
    slices = [checkout.run("--suite", "stories", "--slice", f"{k}/3", "--again")[1] for k in (1, 2, 3)]
    assert set().union(*slices) == STORIES
    assert sum(map(len, slices)) == len(STORIES)
    code, first = checkout.run("--suite", "stories", BROKEN="2")
    assert (code, first) == (1, STORIES)
    assert checkout.run("--suite", "stories", BROKEN="2") == (1, {"test_story[2]"})
    assert checkout.run("--suite", "stories") == (0, {"test_story[2]"})
    assert checkout.run("--suite", "stories") == (0, set())
    assert checkout.run("--suite", "stories", "--again")[1] == STORIES
    (checkout.path / "tests" / "test_it.py").write_text(TESTS + "\n")
    assert checkout.run("--suite", "stories")[1] == STORIES, "what passed was another tree"
    assert checkout.run("--suite", "stories", "--slice", "4/3")[0] == pytest.ExitCode.USAGE_ERROR
