"""Proxies as processes of their own, for the demo, tests and benchmarks."""

from __future__ import annotations

import json
import os
import resource
import signal
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, ClassVar, Final, Self

import httpx

from isthmus_bench import ready_commands
from isthmus_bench.kafka import ports
from isthmus_bench.kafka.processes import wait_stopped
from isthmus_bench.kafka.settings import Reach
from isthmus_control.levels import KNOWN_LEVEL

START_TIMEOUT_S: Final = 40.0
STOP_TIMEOUT_S: Final = 30.0
CLI_TIMEOUT_S: Final = 300
HOST: Final = "127.0.0.1"
BROKER_IDS_MAX: Final = 9
"""In front of a whole cluster, a proxy's ports for the brokers follow its first one by their ids."""
_NO_AUTHORITIES: Final = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Admin listeners here speak plain HTTP. To read the world's authorities takes 25 ms of a core, for each request."""

EARLIER_VERSION: Final = "ISTHMUS_EARLIER_VERSION"
"""In a proxy's environment: it runs one, which does not know :data:`LATER_SETTINGS`."""
LATER_SETTINGS: Final = frozenset(
    {
        ("admin_listener", "loopback_without_authentication"),
        ("link", "allow_local_links"),
        ("link", "remotes_allowed"),
        ("link", "require_encryption"),
    }
)


class ProxyFailed(Exception):
    """A proxy did not start; the message has the end of its log."""


class ProxyProcess:
    """One ``isthmus proxy``, on ports that stay the same when it is started again.

    Whole-cluster mode, or with ``broker_id`` the sidecar of one broker. ``extra`` adds to the tables of the
    configuration: ``{"plugins": {"enabled": []}}``. A proxy in the ``background`` goes on when its starter ends.
    ``environment`` adds variables to the starter's, at each start. ``link_reach``: where links listen, and where they
    are reached; None: it only dials. ``descriptors``: how many file descriptors it may have; None: as many as the
    starter.
    """

    forked: ClassVar[bool] = False
    """Whether proxies that have no environment of their own are forked from a process that has loaded one
    (``ready_commands``). That saves a second of a core or more for each; they share memory with it."""

    def __init__(
        self,
        bootstrap_servers: str,
        *,
        name: str,
        directory: Path | None = None,
        broker_id: int | None = None,
        extra: Mapping[str, Mapping[str, Any]] | None = None,
        background: bool = False,
        environment: Mapping[str, str] | None = None,
        link_reach: Reach | None = Reach(bind=HOST, advertised=HOST),
        descriptors: int | None = None,
    ) -> None:
        self._owned = None if directory is not None else tempfile.TemporaryDirectory(prefix="isthmus-proxy-")
        self.directory = directory or Path(self._owned.name if self._owned else "")
        self.name = name
        self._background = background
        link, admin = self._ports = ports.pick(HOST, 2)
        listening = ports.pick_run(HOST, 2 + BROKER_IDS_MAX if broker_id is None else 1)
        self._ports += listening
        client = listening[0]
        self.bootstrap = f"{HOST}:{client}"
        self.link_address = f"{HOST if link_reach is None else link_reach.advertised}:{link}"
        self.url = f"http://{HOST}:{admin}"
        tables: dict[str, dict[str, Any]] = {
            "proxy": {"name": name, "lease_s": 10.0, "drain_timeout_s": 5.0},
            "cluster": {"bootstrap_servers": bootstrap_servers},
            "client_listener": {"bind": self.bootstrap},
            "link": {"allow_local_links": True, "remotes_allowed": [HOST]},
            "admin_listener": {"bind": f"{HOST}:{admin}", "loopback_without_authentication": True},
            "data": {"directory": str(self.directory / f"{name}-data")},
        }
        if link_reach is not None:
            tables["link_listener"] = {"bind": f"{link_reach.bind}:{link}", "advertised": self.link_address}
        if EARLIER_VERSION not in (environment or {}):
            tables["link"]["require_encryption"] = True
        if broker_id is not None:
            tables["cluster"]["broker_id"] = broker_id
        for table, settings in (extra or {}).items():
            tables.setdefault(table, {}).update(settings)
        self.config_path = self.directory / f"{name}.toml"
        self.log_path = self.directory / f"{name}.log"
        self.tables = tables
        """The configuration, from the next start on."""
        self.environment = dict(environment or {})
        self.options: tuple[str, ...] = ()
        """More arguments of the command, from the next start on."""
        self._descriptors = descriptors
        self._process: subprocess.Popen[bytes] | ready_commands.Process | None = None

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> str:
        return self.log_path.read_text() if self.log_path.exists() else ""

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def extra(self, table: str, **settings: Any) -> None:
        """Add to a table of the configuration, from the next start on."""
        self.tables.setdefault(table, {}).update(settings)

    def spawn(self) -> None:
        """Start the process and return at once. It ends with the calling *thread*, unless in the background; if
        it is forked, with the calling process."""
        log: BinaryIO
        self.config_path.write_text(_toml(self._known_tables()))
        arguments = "proxy", "--config", str(self.config_path), *self.options
        with self.log_path.open("ab") as log:
            if self.forked and not self.environment and not self._background:
                self._process = ready_commands.start(arguments, log, descriptors=self._descriptors)
                return
            self._process = subprocess.Popen(
                [sys.executable, "-m", "isthmus", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self.environment},
                preexec_fn=self._prepare,
            )

    def _known_tables(self) -> dict[str, dict[str, Any]]:
        """The configuration, as far as the version knows it that runs."""
        if EARLIER_VERSION not in self.environment:
            return self.tables
        known = {
            table: {name: value for name, value in settings.items() if (table, name) not in LATER_SETTINGS}
            for table, settings in self.tables.items()
        }
        return {table: settings for table, settings in known.items() if settings}

    def _prepare(self) -> None:
        if self._descriptors is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (self._descriptors, self._descriptors))
        if self._background:
            os.setsid()
        else:
            ready_commands.die_with_parent()

    def start(self) -> Self:
        """Start the process and wait until it serves clients. Raises ProxyFailed."""
        self.spawn()
        self.wait_ready()
        return self

    def wait_ready(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise ProxyFailed(f"proxy {self.name} ended with {self._process.returncode}:\n{self.log[-3000:]}")
            try:
                if self._answer("/health/ready", 5).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.05)
        raise ProxyFailed(f"proxy {self.name} was not ready within {START_TIMEOUT_S} s:\n{self.log[-3000:]}")

    def stop(self) -> int:
        """SIGTERM, and wait. Returns the exit code."""
        return self._end(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self._end(signal.SIGKILL)

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def pause(self) -> None:
        """The proxy is there and does nothing (SIGSTOP) from when this returns."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        wait_stopped(self._process.pid)

    def resume(self) -> None:
        """Let it go on (SIGCONT)."""
        self.signal(signal.SIGCONT)

    def _end(self, number: int) -> int:
        if self._process is None:
            return 0
        process, self._process = self._process, None
        process.send_signal(number)
        try:
            return process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise

    def close(self) -> None:
        """End the process, release the ports, remove what was written."""
        try:
            if self.running:
                self.stop()
        finally:
            self._process = None
            ports.release(self._ports)
            if self._owned is not None:
                self._owned.cleanup()

    # ---- its admin listener ----

    def cli(self, *arguments: str, check: bool = True) -> Any:
        """Run an ``isthmus`` command against this proxy with ``-o json``; returns what it printed, parsed."""
        done = ready_commands.run([*arguments, "--url", self.url, "-o", "json"], CLI_TIMEOUT_S)
        if check and done.returncode != 0:
            raise ProxyFailed(f"isthmus {' '.join(arguments)}: exit {done.returncode}\n{done.stdout}\n{done.stderr}")
        return json.loads(done.stdout) if done.stdout.strip() else None

    def raise_level(self) -> None:
        """Have the control log hold all that proxies know. Raises ProxyFailed."""
        deadline = time.monotonic() + START_TIMEOUT_S
        while self.cli("control", "upgrade")["after"] < KNOWN_LEVEL:
            if time.monotonic() > deadline:
                raise ProxyFailed(f"the control log's level is not raised:\n{self.log[-3000:]}")
            time.sleep(0.25)

    def write_token(self, file: Path, *may: str) -> None:
        """Write a token to ``file`` with which another cluster, on another machine, makes a link with this one.

        ``may``: what it grants, beside settings of brokers.
        """
        self.cli("control", "upgrade")
        granted = [each for grant in may for each in ("--may", grant)]
        token = self.cli("link", "token", "create", "--broker-settings", *granted)["token"]
        file.touch(0o600)
        file.write_text(token)

    def get(self, path: str) -> Any:
        """GET a REST resource of the proxy."""
        answer = self._answer(path, 30)
        answer.raise_for_status()
        return answer.json()

    def _answer(self, path: str, timeout_s: float) -> httpx.Response:
        return httpx.get(self.url + path, timeout=timeout_s, trust_env=False, verify=_NO_AUTHORITIES)


def _toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Text of plain tables: every value is a string, number, boolean or list of strings, as JSON writes them."""
    lines: list[str] = []
    for table, settings in tables.items():
        lines.append(f"[{table}]")
        lines += [f"{name} = {json.dumps(value)}" for name, value in settings.items()]
    return "\n".join(lines) + "\n"
