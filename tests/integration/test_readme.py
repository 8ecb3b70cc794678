"""README's steps by hand work as they stand there: block after block, pasted into one shell."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Final

import pytest
from support.pasted import HOST, Shell, blocks_of, free_ports

from isthmus_bench.kafka import ports

pytestmark = pytest.mark.brokers

REPOSITORY: Final = Path(__file__).parents[2]
CLIENT_PORTS: Final = (19192, 29192)
"""Of proxies."""
TIMEOUT_S: Final = 240.0
"""Of one block, for a busy machine; twenty seconds are usual for all."""


def by_hand() -> list[str]:
    """The blocks of the section, each as it is copied."""
    return blocks_of((REPOSITORY / "README.md").read_text().partition("\n## By hand\n")[2].partition("\n## ")[0])


def stand_in(directory: Path) -> None:
    """Make a checkout of a directory, as far as the steps go: its environment is ours, and is not made again."""
    (directory / "Makefile").symlink_to(REPOSITORY / "Makefile")
    (directory / ".venv").mkdir()
    (directory / ".venv" / "bin").symlink_to(Path(sys.prefix) / "bin")
    for name in ("requirements.lock", "pyproject.toml"):
        (directory / name).touch()
        os.utime(directory / name, (1_000_000_000, 1_000_000_000))
    (directory / ".venv" / ".ready").touch()


def environment() -> dict[str, str]:
    """Of somebody who has just come."""
    own = str(Path(sys.prefix) / "bin")
    found = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "ISTHMUS_URL"))}
    return {**found, "PATH": os.pathsep.join(each for each in os.environ["PATH"].split(os.pathsep) if each != own)}


@pytest.mark.one_in_ci("stories", of="the first steps of a user")
def test_what_stands_there_is_what_happens(tmp_path: Path) -> None:
    blocks = by_hand()
    stand_in(tmp_path)
    clusters = [tmp_path / "by-hand" / name for name in ("a", "b")]
    with free_ports("".join(blocks), CLIENT_PORTS) as chosen:
        with Shell(tmp_path, chosen, clusters, environment(), TIMEOUT_S) as shell:
            said = [shell.paste(block) for block in blocks]
        assert not (tmp_path / "by-hand").exists()
        assert all(ports.is_free(HOST, int(port)) for port in chosen.values()), "something still listens"

    def output(command: str) -> str:
        """What the one block with this command printed."""
        (found,) = [text for block, text in zip(blocks, said, strict=True) if command in block]
        return found

    assert output("proxy --config a.toml --check").count("valid, and every bootstrap server answers") == 2
    assert len(re.findall(r"^ready +yes$", output("status --wait-s"), re.MULTILINE)) == 2
    assert "there is nothing to do" in output("link attach")
    assert "Offset:0\tone\nOffset:1\ttwo\nOffset:2\tthree\n" in output("print.offset=true")
    assert "is in the reserved namespace 'orders-'" in output("echo four")
    compared = output("isthmus verify")
    assert "a-to-b: equal, 3 records compared" in compared
    assert re.search(r"^app-1 +orders-clicks +0 +2 +2 ", compared, re.MULTILINE)
    synchronous = output("set-mode a-to-b synchronous")
    assert "link a-to-b is In-Sync" in synchronous
    assert "1000 records sent" in synchronous
    assert re.search(r"^orders-clicks +0 +leader +In-Sync +1003 +1003 +0 ", synchronous, re.MULTILINE)
