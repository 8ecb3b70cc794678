"""Real Kafka clusters on this machine: started in seconds, killed and restarted at will, gone without a trace.

A cluster is a directory::

    cluster.json                    what it is, its ports, the processes' ids: enough for another process to take over
    broker-1/server.properties      broker-1/data/          broker-1/broker.log
    tls/                            certificates, where a listener wants them (security.Authority)

A cluster belongs to the process that started it, and ends with it; with ``background=True`` it goes on until it is
stopped, by whoever has its directory. Calls block (from async code: ``asyncio.to_thread``). One owner at a time.
"""

from __future__ import annotations

import json
import secrets
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from isthmus_bench.kafka import ports as port_numbers
from isthmus_bench.kafka.archive import BROKER_MAIN, format_from_template, format_storage, prepare, random_id
from isthmus_bench.kafka.distribution import Distribution, properties_file
from isthmus_bench.kafka.errors import EmbeddedKafkaError
from isthmus_bench.kafka.jars import Say, parse_version, say_on_stderr
from isthmus_bench.kafka.probe import BrokerDied, NotReady, describe_cluster, wait_until_ready
from isthmus_bench.kafka.processes import MARK, Guard, Process, kill_marked, remove
from isthmus_bench.kafka.security import BROKER_USER, Authority, Mechanism, client_jaas
from isthmus_bench.kafka.settings import (
    CONTROLLER,
    ClusterSpec,
    ListenerName,
    broker_properties,
    properties_text,
)
from isthmus_bench.kafka.tools import run_tool

STATE_FILE: Final = "cluster.json"
READY_TIMEOUT_S: Final = 90.0
"""For a busy machine; a second or two are usual."""
STOP_TIMEOUT_S: Final = 60.0


class ClusterState(BaseModel):
    """What ``cluster.json`` holds."""

    model_config = ConfigDict(extra="forbid")

    spec: ClusterSpec
    cluster_id: str
    bootstrap_servers: str
    ports: dict[int, dict[str, int]]
    pids: dict[int, int]
    password: str
    """Of the brokers' own user, where they have one."""
    kept: bool = False
    """Stopped, and its data kept."""


class KafkaCluster:
    """One cluster.

    ``with KafkaCluster(brokers=3) as cluster: ...`` starts it and stops it at the end. Everything raises
    EmbeddedKafkaError, whose message says what to do.
    """

    def __init__(
        self,
        directory: Path | None = None,
        *,
        spec: ClusterSpec | None = None,
        port: int | None = None,
        background: bool = False,
        keep_data: bool = False,
        ready_timeout_s: float = READY_TIMEOUT_S,
        say: Say = say_on_stderr,
        **chosen: Any,
    ) -> None:
        """A cluster that is not started yet.

        ``directory``: must not exist or be empty; without one, a temporary directory. ``port``: broker 1's, broker 2
        has the next one; else free ones are picked. ``chosen``: the fields of ClusterSpec (version, brokers, settings,
        listeners, security, ...), unless ``spec`` is given.
        """
        try:
            self.spec = spec if spec is not None else ClusterSpec(**chosen)
        except ValidationError as error:
            raise EmbeddedKafkaError(_first_error(error)) from error
        if spec is not None and chosen:
            raise TypeError("give a spec, or its fields")
        parse_version(self.spec.version)
        self._chosen_directory = directory
        self._port = port
        self._background = background
        self._keep_data = keep_data
        self._ready_timeout_s = ready_timeout_s
        self._say = say
        self._directory: Path | None = None
        self._state: ClusterState | None = None
        self._distribution: Distribution | None = None
        self._processes: dict[int, Process] = {}

    @classmethod
    def attach(cls, directory: Path, *, say: Say = say_on_stderr) -> Self:
        """The cluster in a directory, started by another process or kept from before."""
        path = directory / STATE_FILE
        try:
            state = ClusterState.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            raise EmbeddedKafkaError(f"there is no cluster in {directory}") from None
        except ValidationError as error:
            raise EmbeddedKafkaError(f"{path} is damaged ({_first_error(error)}): remove {directory}") from error
        cluster = cls(directory, spec=state.spec, background=True, say=say)
        cluster._directory = directory.absolute()
        cluster._state = state
        mark = f"{MARK}{cluster._directory}"
        for broker_id, pid in state.pids.items():
            process = Process.attach(pid, mark)
            if process is not None:
                cluster._processes[broker_id] = process
        return cluster

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    # What it is

    @property
    def directory(self) -> Path:
        if self._directory is None:
            raise EmbeddedKafkaError("the cluster is not started")
        return self._directory

    @property
    def log_directories(self) -> Sequence[Path]:
        """Of all brokers: where the directories of partitions are."""
        return [self._home(broker_id) / "data" for broker_id in self.spec.ids]

    @property
    def state(self) -> ClusterState:
        if self._state is None:
            raise EmbeddedKafkaError("the cluster is not started")
        return self._state

    @property
    def cluster_id(self) -> str:
        return self.state.cluster_id

    @property
    def version(self) -> str:
        return self.spec.version

    @property
    def broker_ids(self) -> list[int]:
        return list(self.spec.ids)

    @property
    def bootstrap_servers(self) -> str:
        """``host:port,...`` of all brokers' main listeners, dead or alive."""
        return self.bootstrap()

    def bootstrap(self, listener: ListenerName | None = None) -> str:
        """The same for one of several listeners."""
        return ",".join(f"{host}:{port}" for host, port in self.addresses(listener).values())

    def addresses(self, listener: ListenerName | None = None) -> dict[int, tuple[str, int]]:
        """Broker id to host and port, as the brokers advertise them."""
        name = listener or self.spec.listeners[0]
        if name not in self.spec.listeners:
            raise EmbeddedKafkaError(f"there is no listener {name}, but {', '.join(self.spec.listeners)}")
        return {
            broker_id: (self.spec.host, self.spec.advertised_port(name, broker_id, self.state.ports[broker_id][name]))
            for broker_id in self.spec.ids
        }

    @property
    def authority(self) -> Authority:
        """Who signed the brokers' certificates; issues others for clients."""
        return Authority(self.directory / "tls")

    def client_properties(
        self,
        *,
        listener: ListenerName | None = None,
        user: str | None = None,
        mechanism: Mechanism = "SCRAM-SHA-512",
        certificate: str | None = None,
    ) -> dict[str, str]:
        """Settings of a Java client; ``certificate``: the common name of a client's certificate, issued if need be."""
        name = listener or self.spec.listeners[0]
        properties = {"bootstrap.servers": self.bootstrap(name), "security.protocol": name}
        if name.startswith("SASL"):
            user, password = self._credentials(user)
            properties |= {"sasl.mechanism": mechanism, "sasl.jaas.config": client_jaas(mechanism, user, password)}
        if name.endswith("SSL"):
            properties |= {"ssl.truststore.type": "PEM", "ssl.truststore.location": str(self.authority.ca_file)}
            if certificate is not None:
                properties |= {
                    "ssl.keystore.type": "PEM",
                    "ssl.keystore.location": str(self._certificate(certificate).with_suffix(".pem")),
                }
        return properties

    def librdkafka_properties(
        self,
        *,
        listener: ListenerName | None = None,
        user: str | None = None,
        mechanism: Mechanism = "SCRAM-SHA-512",
        certificate: str | None = None,
    ) -> dict[str, str]:
        """The same for confluent-kafka."""
        name = listener or self.spec.listeners[0]
        properties = {"bootstrap.servers": self.bootstrap(name), "security.protocol": name}
        if name.startswith("SASL"):
            user, password = self._credentials(user)
            properties |= {"sasl.mechanism": mechanism, "sasl.username": user, "sasl.password": password}
        if name.endswith("SSL"):
            properties["ssl.ca.location"] = str(self.authority.ca_file)
            if certificate is not None:
                pem = self._certificate(certificate)
                properties["ssl.certificate.location"] = str(pem.with_suffix(".crt"))
                properties["ssl.key.location"] = str(pem.with_suffix(".key"))
        return properties

    def _credentials(self, user: str | None) -> tuple[str, str]:
        users = self.spec.security.users
        name = user or next(iter(users))
        if name not in users:
            raise EmbeddedKafkaError(f"there is no user {name}, but {', '.join(users)}")
        return name, users[name]

    def _certificate(self, name: str) -> Path:
        pem = self.authority.directory / f"{name}.pem"
        return pem if pem.is_file() else self.authority.issue(name)

    # The whole cluster

    def start(self) -> None:
        """Start all brokers; returns when every one answers and knows the others. The first time on a machine it
        downloads Kafka."""
        if self._state is not None:
            self._resume()
            return
        self._distribution = prepare(self.spec.version, self._say)
        ports = self._pick_ports()
        try:
            directory = self._make_directory()
        except BaseException:
            self._release_ports(ports)
            raise
        self._directory = directory
        self._state = ClusterState(
            spec=self.spec,
            cluster_id=self.spec.cluster_id or random_id(),
            bootstrap_servers="",
            ports=ports,
            pids={},
            password=secrets.token_urlsafe(16),
        )
        self._state.bootstrap_servers = self.bootstrap()
        # A start that is interrupted leaves nothing either way; one that succeeds may go on without us.
        Guard.shared().add(directory, keep=self._keep_data)
        try:
            self._write_state()
            self._configure()
            self._spawn(self.spec.ids)
            self._wait_ready(self.spec.ids)
        except BaseException:
            self._discard()
            raise
        if self._background:
            Guard.shared().drop(directory)

    def stop(self) -> None:
        """Stop all brokers and remove the directory (or keep it, with all data, if so chosen). May be called twice."""
        if self._state is None:
            return
        if not self._keep_data:
            self._discard()
            return
        for process in self._processes.values():
            process.send(signal.SIGCONT)
            process.send(signal.SIGTERM)
        # Without a majority of controllers a broker waits for them: then in short.
        for process in self._processes.values():
            if not process.wait(20):
                process.kill()
        kill_marked(self.directory)
        self._processes.clear()
        self.state.kept = True
        self._write_state()
        Guard.shared().drop(self.directory)
        self._release_ports(self.state.ports)

    def keep_data(self, keep: bool = True) -> None:
        """Whether ``stop`` leaves the directory."""
        self._keep_data = keep

    def _resume(self) -> None:
        if self._processes and any(process.alive() for process in self._processes.values()):
            raise EmbeddedKafkaError(f"the cluster {self.spec.name} runs already")
        taken = [port for ports in self.state.ports.values() for port in ports.values()]
        if busy := [port for port in taken if not port_numbers.is_free(self.spec.host, port)]:
            raise EmbeddedKafkaError(f"port {', '.join(map(str, busy))} is in use by now: stop what listens there")
        if not self._background:
            Guard.shared().add(self.directory, keep=self._keep_data)
        try:
            self._spawn(self.spec.ids)
            self._wait_ready(self.spec.ids)
        except BaseException:
            kill_marked(self.directory)
            raise
        self.state.kept = False
        self._write_state()

    def _discard(self) -> None:
        for process in self._processes.values():
            process.send(signal.SIGKILL)
        for process in self._processes.values():
            process.wait(30)
        kill_marked(self.directory)
        self._processes.clear()
        if not self._keep_data:
            remove(self.directory)
        Guard.shared().drop(self.directory)
        self._release_ports(self.state.ports)
        self._state = None
        self._directory = None

    # One broker

    def process(self, broker_id: int) -> Process | None:
        """The broker's process if it runs."""
        self._check_id(broker_id)
        process = self._processes.get(broker_id)
        return process if process is not None and process.alive() else None

    def alive(self, broker_id: int) -> bool:
        return self.process(broker_id) is not None

    @property
    def pids(self) -> list[int]:
        """Of the brokers that run."""
        running = (self.process(broker_id) for broker_id in self.broker_ids)
        return [process.pid for process in running if process is not None]

    def kill(self, broker_id: int) -> None:
        """SIGKILL: what the broker had not written is lost. Returns when it is gone."""
        self._running(broker_id).kill()
        self._ended(broker_id)

    def stop_broker(self, broker_id: int, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """SIGTERM: the broker hands over its partitions first. Returns when it is gone.

        A broker waits for the controllers then; where it cannot reach a majority of them, this fails after
        ``timeout_s`` and the broker still runs.
        """
        process = self._running(broker_id)
        process.send(signal.SIGCONT)
        process.send(signal.SIGTERM)
        if not process.wait(timeout_s):
            raise EmbeddedKafkaError(
                f"broker {broker_id} has not stopped after {timeout_s:.0f} s (are the controllers there?): kill it"
            )
        self._ended(broker_id)

    def start_broker(self, broker_id: int) -> None:
        """Start a broker that was stopped or killed, on its old ports and data; returns when it is ready again."""
        self.start_brokers([broker_id])

    def start_brokers(self, broker_ids: Sequence[int]) -> None:
        """Start several at once: none gets ready while most of the controllers are away."""
        for broker_id in broker_ids:
            if self.alive(broker_id):
                raise EmbeddedKafkaError(f"broker {broker_id} runs already")
        self._spawn(broker_ids)
        self._wait_ready(broker_ids)

    def move_broker(self, broker_id: int) -> None:
        """Start a broker that was stopped or killed at other ports for its clients and for other brokers, on its old
        data; returns when it is ready again. Controllers stay where they are: all brokers know their addresses."""
        if self.alive(broker_id):
            raise EmbeddedKafkaError(f"broker {broker_id} runs")
        own = self.state.ports[broker_id]
        moved = [name for name in own if name != CONTROLLER]
        former = [own[name] for name in moved]
        own.update(zip(moved, port_numbers.pick(self.spec.host, len(moved)), strict=True))
        port_numbers.release(former)
        self.state.bootstrap_servers = self.bootstrap()
        home, tls = self._home(broker_id), self.directory / "tls"
        properties = broker_properties(self.spec, broker_id, self.state.ports, home, tls, self.state.password)
        properties_file(home / "server.properties", properties_text(properties))
        self.start_broker(broker_id)

    def restart(self, broker_id: int) -> None:
        self.stop_broker(broker_id)
        self.start_broker(broker_id)

    def pause(self, broker_id: int) -> None:
        """The broker is there and does not answer (SIGSTOP) from when this returns."""
        self._running(broker_id).pause()

    def resume(self, broker_id: int) -> None:
        """Let a broker go on (SIGCONT)."""
        self._running(broker_id).resume()

    def log_path(self, broker_id: int) -> Path:
        self._check_id(broker_id)
        return self._home(broker_id) / "broker.log"

    def log(self, broker_id: int) -> str:
        """What the broker has logged, over all its starts."""
        try:
            return self.log_path(broker_id).read_text(errors="replace")
        except FileNotFoundError:
            return ""

    def resident_bytes(self) -> dict[int, int]:
        """Broker id to resident memory, for those that run."""
        return {i: process.resident_bytes() for i in self.spec.ids if (process := self.process(i)) is not None}

    def live_brokers(self, timeout_s: float = 5.0) -> set[int]:
        """The brokers that the cluster itself counts as alive; empty if none answers."""
        for broker_id in self.spec.ids:
            if self.alive(broker_id):
                try:
                    answer = describe_cluster(self._own_address(broker_id), self._own_credentials(), timeout_s)
                except OSError:
                    continue
                return {int(broker.broker_id) for broker in answer.brokers}
        return set()

    def tool(
        self, name: str, *arguments: str, stdin: str = "", timeout_s: float = 120.0, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run one of Kafka's tools in the cluster's version; see ``tools.run_tool``."""
        return run_tool(self.version, name, *arguments, stdin=stdin, timeout_s=timeout_s, check=check)

    # Inside

    def _check_id(self, broker_id: int) -> None:
        if broker_id not in self.spec.ids:
            raise EmbeddedKafkaError(
                f"there is no broker {broker_id} in {self.spec.name}, but 1 to {self.spec.brokers}"
            )

    def _running(self, broker_id: int) -> Process:
        process = self.process(broker_id)
        if process is None:
            raise EmbeddedKafkaError(f"broker {broker_id} does not run")
        return process

    def _ended(self, broker_id: int) -> None:
        self._processes.pop(broker_id, None)
        self.state.pids.pop(broker_id, None)
        self._write_state()

    def _home(self, broker_id: int) -> Path:
        return self.directory / f"broker-{broker_id}"

    def _pick_ports(self) -> dict[int, dict[str, int]]:
        names = {broker_id: self.spec.port_names(broker_id) for broker_id in self.spec.ids}
        main = port_numbers.take(self.spec.host, self._port, self.spec.brokers) if self._port is not None else []
        others = port_numbers.pick(self.spec.host, sum(map(len, names.values())) - len(main))
        numbers: dict[int, dict[str, int]] = {}
        rest = iter(others)
        for index, broker_id in enumerate(self.spec.ids):
            numbers[broker_id] = {
                name: main[index] if main and name == names[broker_id][0] else next(rest) for name in names[broker_id]
            }
        return numbers

    def _release_ports(self, ports: Mapping[int, Mapping[str, int]]) -> None:
        port_numbers.release([port for own in ports.values() for port in own.values()])

    def _make_directory(self) -> Path:
        chosen = self._chosen_directory
        if chosen is None:
            return Path(tempfile.mkdtemp(prefix=f"isthmus-{self.spec.name}-"))
        directory = chosen.absolute()
        try:
            directory.mkdir(parents=True)
        except FileExistsError:
            if not directory.is_dir() or any(directory.iterdir()):
                raise EmbeddedKafkaError(f"{directory} is not empty: choose another directory") from None
        except OSError as error:
            raise EmbeddedKafkaError(f"{directory} cannot be made: {error.strerror}") from error
        try:  # of two who start there at once, one is first
            (directory / STATE_FILE).touch(exist_ok=False)
        except FileExistsError:
            raise EmbeddedKafkaError(f"another cluster is being started in {directory}") from None
        return directory

    def _configure(self) -> None:
        spec, state = self.spec, self.state
        tls = self.directory / "tls"
        if spec.tls:
            authority = Authority(tls)
            authority.create()
            hosts = tuple(dict.fromkeys(("localhost", "127.0.0.1", "::1", spec.host)))
            for broker_id in spec.ids:
                authority.issue(f"broker-{broker_id}", hosts)
        for broker_id in spec.ids:
            home = self._home(broker_id)
            home.mkdir()
            properties = broker_properties(spec, broker_id, state.ports, home, tls, state.password)
            properties_file(home / "server.properties", properties_text(properties))
        self._format()

    def _format(self) -> None:
        distribution = prepare(self.spec.version, self._say)
        options: list[str] = []
        for feature, level in self.spec.features.items():
            options += ["--feature", f"{feature}={level}"]
        for user, password in self.spec.security.users.items():
            for mechanism in ("SCRAM-SHA-256", "SCRAM-SHA-512"):
                options += ["--add-scram", f"{mechanism}=[name={user},password={password}]"]
        unstable = any(key.startswith("unstable.") for key in self.spec.settings)
        data = {broker_id: self._home(broker_id) / "data" for broker_id in self.spec.ids}
        if not options and not unstable:
            for broker_id, directory in data.items():
                format_from_template(distribution, directory, broker_id, self.cluster_id)
            return
        # Users and features must be the same on every controller: format once, copy.
        format_storage(distribution, self._home(1) / "server.properties", self.cluster_id, tuple(options))
        for broker_id in self.spec.ids[1:]:
            format_from_template(distribution, data[broker_id], broker_id, self.cluster_id)
            shutil.copyfile(data[1] / "bootstrap.checkpoint", data[broker_id] / "bootstrap.checkpoint")

    def _spawn(self, broker_ids: Iterable[int]) -> None:
        distribution = self._distribution or prepare(self.spec.version, self._say)
        self._distribution = distribution
        for broker_id in broker_ids:
            home = self._home(broker_id)
            # Codecs unpack native libraries, and a killed JVM leaves them.
            temporary = home / "tmp"
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            flags = [
                f"{MARK}{self.directory}",
                f"-Djava.io.tmpdir={temporary}",
                f"-XX:ErrorFile={home / 'crash.log'}",
                *self.spec.jvm_flags,
            ]
            command = distribution.command(
                BROKER_MAIN,
                [str(home / "server.properties")],
                heap_mb=self.spec.heap_mb,
                flags=flags,
                log_level="info",
            )
            process = Process.spawn(command, distribution.environment(self.spec.classes), home / "broker.log")
            self._processes[broker_id] = process
            self.state.pids[broker_id] = process.pid
        self._write_state()

    def _own_address(self, broker_id: int) -> tuple[str, int]:
        listener = self.spec.inter_broker
        return self.spec.bind_host(listener), self.state.ports[broker_id][listener]

    def _own_credentials(self) -> tuple[str, str] | None:
        return (BROKER_USER, self.state.password) if self.spec.secured else None

    def _wait_ready(self, broker_ids: Iterable[int]) -> None:
        waiting = list(broker_ids)
        try:
            wait_until_ready(
                {broker_id: self._own_address(broker_id) for broker_id in waiting},
                {broker_id: self._processes[broker_id] for broker_id in waiting},
                self.cluster_id,
                waiting,
                self._own_credentials(),
                self._ready_timeout_s,
            )
        except BrokerDied as error:
            reason = telling_lines(self.log(error.broker_id))
            raise EmbeddedKafkaError(f"broker {error.broker_id} did not start:\n  {reason}") from error
        except NotReady as error:
            reason = telling_lines(self.log(waiting[0]))
            raise EmbeddedKafkaError(f"{error}\n  {reason}") from error

    def _write_state(self) -> None:
        path = self.directory / STATE_FILE
        draft = properties_file(path.with_suffix(".draft"), json.dumps(self.state.model_dump(mode="json"), indent=1))
        draft.replace(path)


def telling_lines(log: str) -> str:
    """Of a broker's log, the lines that say why it failed."""
    lines = [line for line in log.splitlines() if line.strip() and not line.startswith("\tat ")]
    signs = (" ERROR ", " FATAL ", "Exception", "Error:")
    failures = [line for line in lines if any(sign in line for sign in signs)]
    return "\n  ".join((failures or lines)[-8:]) or "its log is empty"


def _first_error(error: ValidationError) -> str:
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"]))
    message = first["msg"].removeprefix("Value error, ")
    return f"{where}: {message}" if where else message
