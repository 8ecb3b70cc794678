"""README's steps by hand work as they stand there: block after block, pasted into one shell."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import pytest

from isthmus_bench.kafka import ports
from isthmus_bench.kafka.processes import kill_marked, marked

pytestmark = pytest.mark.brokers

REPOSITORY: Final = Path(__file__).parents[2]
HOST: Final = "127.0.0.1"
CLIENT_PORTS: Final = ("19192", "29192")
"""Of proxies: two more behind each are those of the brokers."""
EPHEMERAL_FROM: Final = 32768
TIMEOUT_S: Final = 240.0
"""For a busy machine; twenty seconds are usual."""


def by_hand() -> list[str]:
    """The blocks of the section, each as it is copied."""
    section = (REPOSITORY / "README.md").read_text().partition("\n## By hand\n")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```bash\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    assert section.count("```") == 2 * len(blocks), "a block is not marked as bash, and would not be tried"
    return blocks


def stand_in(directory: Path) -> None:
    """Make a checkout of a directory, as far as the steps go: its environment is ours, and is not made again."""
    (directory / "Makefile").symlink_to(REPOSITORY / "Makefile")
    (directory / ".venv").mkdir()
    (directory / ".venv" / "bin").symlink_to(Path(sys.prefix) / "bin")
    for name in ("requirements.lock", "pyproject.toml"):
        (directory / name).touch()
        os.utime(directory / name, (1_000_000_000, 1_000_000_000))
    (directory / ".venv" / ".ready").touch()


@contextmanager
def free_ports(blocks: list[str]) -> Iterator[dict[str, str]]:
    """Ports that nobody has, for those that the blocks name."""
    named = sorted(set(re.findall(r"\b[12]\d{4}\b", "".join(blocks))))
    named.remove("19193")  # in a comment: where brokers' ports begin
    picked = {name: ports.pick_run(HOST, 3 if name in CLIENT_PORTS else 1) for name in named}
    try:
        yield {name: str(run[0]) for name, run in picked.items()}
    finally:
        ports.release([port for run in picked.values() for port in run])


def pasted(blocks: list[str], directory: Path) -> list[str]:
    """What the blocks print, one by one, when they are run in one shell that ends at the first failure."""
    script = directory / "pasted.sh"
    script.write_text("set -e\n" + "".join(f"{block}echo '=== end of block'\n" for block in blocks))
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "ISTHMUS_URL"))}
    own = str(Path(sys.prefix) / "bin")
    environment["PATH"] = os.pathsep.join(each for each in os.environ["PATH"].split(os.pathsep) if each != own)
    shell = subprocess.Popen(
        ["bash", str(script)],
        cwd=directory,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = shell.communicate(timeout=TIMEOUT_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)  # proxies that a failure left
        clusters = [directory / "by-hand" / name for name in ("a", "b")]
        left = [process.pid for cluster in clusters for process in marked(cluster)]
        for cluster in clusters:
            kill_marked(cluster)
    assert shell.returncode == 0, said
    assert not left, "brokers go on"
    return said.split("=== end of block\n")


@pytest.mark.one_in_ci("stories", of="the first steps of a user")
def test_what_stands_there_is_what_happens(tmp_path: Path) -> None:
    blocks = by_hand()
    stand_in(tmp_path)
    with free_ports(blocks) as chosen:
        assert all(int(name) < EPHEMERAL_FROM for name in chosen)
        numbers = re.compile("|".join(chosen))
        said = pasted([numbers.sub(lambda found: chosen[found[0]], block) for block in blocks], tmp_path)
        assert not (tmp_path / "by-hand").exists()
        assert all(ports.is_free(HOST, int(port)) for port in chosen.values()), "something still listens"

    def output(command: str) -> str:
        """What the one block with this command printed."""
        (found,) = [text for block, text in zip(blocks, said, strict=False) if command in block]
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
