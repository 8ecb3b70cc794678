"""Files that change while a proxy runs: what is new is used, what cannot be is not, and somebody is told."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from isthmus import reloading
from isthmus.errors import ConfigurationError
from isthmus.reloading import Reloads
from isthmus_plugins.tasks import Supervision


class Secrets:
    """A secret in a file, which must not be empty."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.used: list[str] = []
        self.reloads = Reloads(Supervision())
        self.reloads.keep("a secret", [file, None], self.made, self.used.append)

    def made(self) -> str:
        try:
            text = self.file.read_text()
        except OSError as error:
            raise ConfigurationError("secret_file", str(error), "Mend it.") from error
        if not text:
            raise ConfigurationError("secret_file", "an empty file", "Write the secret to it.")
        return text

    async def until(self, what: Callable[[], object]) -> None:
        async with asyncio.timeout(20):
            while not what():  # noqa: ASYNC110
                await asyncio.sleep(0.01)


def watching(file: Path, work: Callable[[Secrets], Awaitable[None]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reloading, "LOOK_S", 0.02)

    async def run() -> None:
        secrets = Secrets(file)
        secrets.reloads.start()
        try:
            await secrets.until(lambda: secrets.used)
            await work(secrets)
        finally:
            await secrets.reloads.stop()

    asyncio.run(run())


def test_what_is_new_is_used_and_what_is_broken_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    file = tmp_path / "secret"
    file.write_text("first")

    async def work(secrets: Secrets) -> None:
        assert secrets.used == ["first"]
        assert not secrets.reloads.counts
        file.write_text("second")
        await secrets.until(lambda: secrets.used[-1] == "second")
        for broken in ("", None):
            if broken is None:
                file.unlink()
            else:
                file.write_text(broken)
            before = secrets.reloads.counts["a secret", "unusable"]
            await secrets.until(lambda before=before: secrets.reloads.counts["a secret", "unusable"] > before)
            (warning,) = secrets.reloads.warnings()
            assert "a secret: the files of before are used" in warning
            assert secrets.used[-1] == "second"
        file.write_text("third")
        await secrets.until(lambda: secrets.used[-1] == "third")
        assert not list(secrets.reloads.warnings())
        assert secrets.reloads.counts["a secret", "reloaded"] >= 2
        told = [each.message for each in caplog.records]
        assert told.count("files not reloaded") <= secrets.reloads.counts["a secret", "unusable"]
        assert told.count("files reloaded") == secrets.reloads.counts["a secret", "reloaded"]

    watching(file, work, monkeypatch)


def test_a_link_in_the_path_is_swapped_as_kubernetes_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("v1", "v2"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "secret").write_text(version)
    (tmp_path / "..data").symlink_to("v1")
    (tmp_path / "secret").symlink_to(Path("..data") / "secret")

    async def work(secrets: Secrets) -> None:
        (tmp_path / "..tmp").symlink_to("v2")
        (tmp_path / "..tmp").rename(tmp_path / "..data")
        await secrets.until(lambda: secrets.used[-1] == "v2")

    watching(tmp_path / "secret", work, monkeypatch)


def test_an_operator_has_all_files_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "secret"
    file.write_text("first")

    async def work(secrets: Secrets) -> None:
        monkeypatch.setattr(reloading, "LOOK_S", 60)
        secrets.reloads.ask()
        await secrets.until(lambda: secrets.used == ["first", "first"])

    watching(file, work, monkeypatch)


def test_nothing_is_watched_where_no_file_is_configured() -> None:
    reloads = Reloads(Supervision())
    reloads.keep("nothing", [None, None], lambda: pytest.fail("made"), lambda made: None)
    assert not list(reloads.warnings())
    assert reloads._kept == []
