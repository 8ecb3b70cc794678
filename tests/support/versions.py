"""Versions of the proxy from the git history, installed beside the one that is tested."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from isthmus_bench.proxies import EARLIER_VERSION

ROOT: Final = Path(__file__).parents[2]
INSTALLED: Final = ROOT / ".cache" / "versions"


def environment_of(commit: str) -> dict[str, str]:
    """The environment of a process that runs the version of a commit."""
    return {"PYTHONPATH": str(_installed(commit)), EARLIER_VERSION: commit}


def _installed(commit: str) -> Path:
    """Where that version is installed, with nothing that it depends on: that is what this one depends on."""
    found = INSTALLED / commit
    if found.exists():
        return found
    INSTALLED.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=INSTALLED) as made:
        tree, packages = Path(made) / "tree", Path(made) / "packages"
        tree.mkdir()
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=False)
        if archive.returncode != 0:
            raise AssertionError(
                f"commit {commit} is not in this clone: git fetch --unshallow ({archive.stderr.decode().strip()})"
            )
        subprocess.run(["tar", "-x", "-C", str(tree)], input=archive.stdout, check=True)
        install = [
            "install",
            "--quiet",
            "--no-index",
            "--no-deps",
            "--no-build-isolation",
            "--disable-pip-version-check",
        ]
        subprocess.run(
            [sys.executable, "-m", "pip", *install, "--target", str(packages), str(tree)],
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
            check=True,
        )
        try:
            packages.rename(found)
        except OSError:  # another process was faster
            shutil.rmtree(packages)
    return found
