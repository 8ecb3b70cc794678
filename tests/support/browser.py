"""A headless Chromium, driven over its DevTools protocol by a pipe: JSON messages, each with a NUL behind it."""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest

NAMES: Final = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS: Final = (
    *("--headless", "--disable-gpu", "--disable-quic", "--disable-dev-shm-usage", "--hide-scrollbars"),
    # It would ask its maker's hosts for this and that.
    *("--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
WAIT_S: Final = 60.0


def installed() -> str:
    """The browser's path. Fails the test where there is none."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        pytest.fail(f"none of {', '.join(NAMES)} is on the PATH: install Chromium (as root on Debian: make browser)")
    return found


class Browser:
    """``said``: all that it told by itself, in its order."""

    def __init__(self, commands: int, answers: int, log: Path) -> None:
        self._commands = commands
        self._answers = answers
        self._log = log
        self._read = b""
        self._last = 0
        self.said: list[dict[str, Any]] = []

    def ask(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        self._last += 1
        message = {"id": self._last, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + WAIT_S
        while (answer := self._next(deadline)).get("id") != self._last:
            self.said.append(answer)
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def await_said(self, method: str) -> None:
        """Until it says this, from now on."""
        deadline = time.monotonic() + WAIT_S
        while not self.said or self.said[-1]["method"] != method:
            self.said.append(self._next(deadline))

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._read:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"the browser says nothing; its log: {self._log.read_text()}"
            chunk = os.read(self._answers, 1 << 20)
            assert chunk, f"the browser has ended; its log: {self._log.read_text()}"
            self._read += chunk
        first, _, self._read = self._read.partition(b"\0")
        message: dict[str, Any] = json.loads(first)
        return message


@dataclass
class Page:
    """A page that was loaded, as wide as was asked."""

    browser: Browser
    session: str
    requested: list[str] = field(default_factory=list)
    """All URLs that were asked for."""
    errors: list[str] = field(default_factory=list)
    """What the console has of errors and warnings, and of exceptions."""

    def evaluate(self, expression: str) -> Any:
        answer = self.browser.ask("Runtime.evaluate", self.session, expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """``profile``: a directory that is not there yet."""
    sandbox = ("--no-sandbox",) if os.geteuid() == 0 else ()
    (its_commands, commands), (answers, its_answers) = _pipe(), _pipe()
    command = [installed(), *FLAGS, *sandbox, f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"]
    log = profile.with_suffix(".log")
    with ExitStack() as stack:
        for end in (commands, answers):
            stack.callback(os.close, end)
        process = subprocess.Popen(
            [sys.executable, "-c", _AS_THREE_AND_FOUR, str(its_commands), str(its_answers), *command],
            pass_fds=(its_commands, its_answers),
            stdout=stack.enter_context(log.open("wb")),
            stderr=subprocess.STDOUT,
        )
        for end in (its_commands, its_answers):
            os.close(end)
        driven = Browser(commands, answers, log)
        try:
            yield driven
            driven.ask("Browser.close")
            process.wait(WAIT_S)
        finally:
            process.kill()
            process.wait()


def _pipe() -> tuple[int, int]:
    """Its ends have numbers above those that the browser takes."""
    ends = os.pipe()
    reading, writing = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return reading, writing


_AS_THREE_AND_FOUR: Final = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


@contextmanager
def opened(driven: Browser, url: str, width: int) -> Iterator[Page]:
    """A page on a screen of this width; a small one is a phone's, which heeds what the page says of its viewport."""
    target = driven.ask("Target.createTarget", url="about:blank")["targetId"]
    session = driven.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
    for domain in ("Page", "Runtime", "Log", "Network"):
        driven.ask(f"{domain}.enable", session)
    screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    driven.ask("Emulation.setDeviceMetricsOverride", session, **screen)
    driven.said.clear()
    driven.ask("Page.navigate", session, url=url)
    if not any(each["method"] == "Page.loadEventFired" for each in driven.said):
        driven.await_said("Page.loadEventFired")
    page = Page(driven, session)
    page.evaluate("document.fonts.ready.then(() => new Promise(requestAnimationFrame)) && 0")
    for each in driven.said:
        told = each["params"]
        match each["method"]:
            case "Network.requestWillBeSent":
                page.requested.append(told["request"]["url"])
            case "Runtime.exceptionThrown":
                page.errors.append(str(told["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if told["type"] in ("error", "warning", "assert"):
                page.errors.append(str(told["args"]))
            case "Log.entryAdded" if told["entry"]["level"] in ("error", "warning"):
                page.errors.append(told["entry"]["text"])
    try:
        yield page
    finally:
        driven.ask("Target.closeTarget", targetId=target)
