"""Files that CI takes in turns: they are there, each once, and no story is among them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from support.suites import ROOT
from support.turns import SUBJECTS

ALWAYS = ("acceptance/", "unit/", "sim/", "integration/test_links.py", "integration/test_links_exact.py")


def test_files_are_there_and_of_one_subject() -> None:
    files = Counter(file for subject in SUBJECTS.values() for file in subject)
    assert [file for file in files if not Path(ROOT / "tests" / file).is_file()] == []
    assert [file for file, count in files.items() if count > 1] == []
    assert [file for file in files if file.startswith(ALWAYS)] == []
    assert [subject for subject, those in SUBJECTS.items() if len(those) < 2] == []
