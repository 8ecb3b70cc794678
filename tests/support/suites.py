"""Which tests run: CI's, or those of a suite that takes longer. A pytest plugin, used by ``tests/conftest.py``.

Unmarked tests are CI's. ``@pytest.mark.suite("stories")`` has a test run in ``make test-stories`` in place of CI.
``@pytest.mark.one_in_ci("stories")`` is for a parametrized test: CI runs one of its cases, chosen by the hash of the
tree that is tested, so that it is another one for each commit and the same one for the same commit; the suite runs them
all. ``of="random faults"`` makes one group of several tests, ``case="4.1.1"`` one case of several tests of a group.

Of files that :mod:`support.turns` has as one subject, CI runs one, chosen likewise, and ``stories`` runs all.

CI's examples of properties (Hypothesis) are always the same ones, so that what passes here passes there, and a quarter
of what :mod:`support.seeds` says; other suites draw new ones.

``--suite NAME`` chooses (``all``: whatever is collected), ``--slice 2/6`` takes each sixth test from the second on.
What has passed in a slice is written down, and the slice goes on behind it when it is run again on the same tree;
``--again`` forgets that.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import settings

from support import turns
from support.seeds import EXAMPLES, THE_SAME

CI: Final = "ci"
ALL: Final = "all"
ROOT: Final = Path(__file__).parents[2]
SPARK: Final = "tests/spark/"
_SUBJECT_OF: Final = {file: subject for subject, files in turns.SUBJECTS.items() for file in files}
PASSED: Final = ROOT / ".cache" / "passed"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("suites")
    group.addoption(
        "--suite", default=CI, help=f"the suite to run: {CI} (default), {ALL}, or one that tests are marked with"
    )
    group.addoption("--slice", default="1/1", metavar="K/N", help="run the K-th of N parts of what is chosen")
    group.addoption("--again", action="store_true", help="run a slice anew, whatever of it has passed before")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "suite(*names): runs in these suites in place of CI")
    config.addinivalue_line("markers", "one_in_ci(*names): CI runs one of its cases, these suites run all")
    if config.getoption("--suite") == CI:
        # Busy machines keep no deadline.
        settings.register_profile(THE_SAME, derandomize=True, deadline=None, max_examples=EXAMPLES // 4)
        settings.load_profile(THE_SAME)
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Notes(config), "passed-notes")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``--dist loadfile``, all files of Spark's tests are one worker's: each starts a Spark of its own."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return SPARK if nodeid.startswith(SPARK) else super()._split_scope(nodeid)

    return Scheduling(config, log)


def pytest_report_header(config: pytest.Config) -> list[str]:
    suite, part = config.getoption("--suite"), config.getoption("--slice")
    order = os.environ.get("PYTHONHASHSEED", "random")
    return [f"suite {suite}, slice {part}, cases chosen by tree {tree()[:12]}, PYTHONHASHSEED={order}"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    suite, k, n = config.getoption("--suite"), *_slice(config)
    if suite == CI:
        chosen = in_ci(items, tree())
    elif suite == ALL:
        chosen = list(items)
    else:
        chosen = [item for item in items if suite in names(item, "suite") | names(item, "one_in_ci") | _turns(item)]
    chosen = sorted(chosen, key=lambda item: item.nodeid)[k - 1 :: n] if n > 1 else chosen
    before = set() if config.getoption("--again") else _passed_before(config)
    kept = {item for item in chosen if item.nodeid not in before}
    left_out = [item for item in items if item not in kept]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item in kept]


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if exitstatus != pytest.ExitCode.NO_TESTS_COLLECTED:
        return
    if _passed_before(session.config) or _slice(session.config)[1] > 1:  # a slice of a few tests may have none
        session.exitstatus = pytest.ExitCode.OK


def names(item: pytest.Item, mark: str) -> set[str]:
    """The suites that a test's marks of one kind name."""
    return {name for each in item.iter_markers(mark) for name in each.args}


def in_ci(items: list[pytest.Item], by: str) -> list[pytest.Item]:
    """CI's tests: what has no mark, and one case of each group that is marked so, chosen by the text ``by``."""
    groups: dict[str, dict[str, list[pytest.Item]]] = {}
    for item in items:
        for mark in item.iter_markers("one_in_ci"):
            group = groups.setdefault(mark.kwargs.get("of", item.nodeid.partition("[")[0]), {})
            group.setdefault(mark.kwargs.get("case", item.nodeid), []).append(item)
    left_out = {item for item in items if names(item, "suite")}
    for item in items:
        if subject := subject_of(item):
            groups.setdefault(subject, {}).setdefault(file_of(item), []).append(item)
    for name, cases in groups.items():
        chosen = sorted(cases)[int(hashlib.sha256(f"{by} {name}".encode()).hexdigest(), 16) % len(cases)]
        left_out.update(item for case, same in cases.items() if case != chosen for item in same)
    return [item for item in items if item not in left_out]


def file_of(item: pytest.Item) -> str:
    """Below ``tests/``."""
    return item.nodeid.partition("::")[0].removeprefix("tests/")


def subject_of(item: pytest.Item) -> str | None:
    """Whose turn it may be; tests of other suites have none."""
    return None if names(item, "suite") else _SUBJECT_OF.get(file_of(item))


def _turns(item: pytest.Item) -> set[str]:
    return {turns.SUITE} if subject_of(item) else set()


@cache
def tree() -> str:
    """The hash of the tree that is checked out; ISTHMUS_TREE in its place, to choose the same cases again."""
    given = os.environ.get("ISTHMUS_TREE")
    if given:
        return given
    asked = subprocess.run(["git", "rev-parse", "HEAD^{tree}"], cwd=ROOT, capture_output=True, text=True, check=False)
    return asked.stdout.strip() or "no tree"


def _slice(config: pytest.Config) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)/(\d+)", config.getoption("--slice"))
    k, n = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= k <= n:
        raise pytest.UsageError("--slice is K/N, with K from 1 to N, as in 2/6")
    return k, n


# ---- what has passed ----


def _notes(config: pytest.Config) -> Path | None:
    """Where is written down what has passed; None: CI begins anew each time, and so do trees that have changed."""
    if config.getoption("--suite") in (CI, ALL) or _is_changed():
        return None
    k, n = _slice(config)
    return PASSED / f"{config.getoption('--suite')}-{k}-of-{n}-{tree()[:12]}"


@cache
def _is_changed() -> bool:
    asked = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=False)
    return asked.returncode != 0 or bool(asked.stdout.strip())


def _passed_before(config: pytest.Config) -> set[str]:
    if hasattr(config, "workerinput"):
        return set(config.workerinput["passed_before"])
    notes = _notes(config)
    return set(notes.read_text().splitlines()) if notes is not None and notes.exists() else set()


class _Notes:
    """Writes down what passes, in the process that controls the run."""

    def __init__(self, config: pytest.Config) -> None:
        self._before = [] if config.getoption("--again") else sorted(_passed_before(config))
        self._path = _notes(config)
        self._failed: set[str] = set()
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if config.getoption("--again"):
                self._path.unlink(missing_ok=True)

    def pytest_report_header(self) -> list[str]:
        return (
            [f"{len(self._before)} tests of this slice passed before (--again runs them, too)"] if self._before else []
        )

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: object) -> None:
        """Workers of xdist choose as their controller does, whatever passes meanwhile."""
        node.workerinput["passed_before"] = self._before  # type: ignore[attr-defined]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.passed:
            self._failed.add(report.nodeid)
        elif report.when == "teardown" and report.nodeid not in self._failed and self._path is not None:
            with self._path.open("a") as file:
                file.write(f"{report.nodeid}\n")
