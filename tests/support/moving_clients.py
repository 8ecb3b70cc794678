"""Clients of a topic that moves from cluster to cluster, told so by the proxies of :class:`KilledProxies`, or not.

Each has connections to one proxy, asks for Metadata and commits there, and may look for another cluster when it is told
to. What it asks goes through the proxies' own hooks. What they answer is compared with what the control logs
have accepted, and when:

- told is who asked for nothing else, in the time that began when another cluster was recorded to lead, where nobody
  made this one lead since then; and once in 10 s at most;
- when the time is over, no log has anything of it.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from typing import Any, Final, NamedTuple

from isthmus_control.commands import Body, EndReversal, MoveClients
from isthmus_control.model import NamespaceKey
from isthmus_control.outcome import Accepted
from isthmus_plugins.api import Client, Replace, Request
from isthmus_plugins.move_times import MoveTimes
from isthmus_plugins.reservation.coordinators import Coordinators
from isthmus_protocol.bodies import error_code
from isthmus_protocol.error_codes import REBOOTSTRAP_REQUIRED
from isthmus_protocol.messages import build_request, build_response, decode_response, encode_request, encode_response
from isthmus_protocol.schema import ApiKey
from support.fake_cluster import simulated_now
from support.killed_proxies import KilledProxies
from support.plugins import Proxy

METADATA_VERSION: Final = 13
COMMIT_VERSION: Final = 9
AGAIN_S: Final = 10.0
MOMENT_S: Final = 1.0
TIMES_S: Final = (0, 5, 30, 120)
"""For how long operators have clients told."""
NEVER: Final = -math.inf


class Kind(NamedTuple):
    """``moves``: it looks for another cluster when it is told. ``others``: it is about another topic as well.
    ``every``: it asks for all topics."""

    moves: bool
    others: bool = False
    every: bool = False

    @property
    def may_be_told(self) -> bool:
        return not self.others and not self.every


KINDS: Final = (Kind(True), Kind(True), Kind(False), Kind(False, others=True), Kind(False, every=True))


class Told(NamedTuple):
    """Since when, and until when, clients of a cluster are told, as its control log has it."""

    begun: float
    until: float
    asked: bool
    """By the cluster that leads, which may not know that it does not any more."""


@dataclass(eq=False)
class Connection:
    client: Client
    to: Proxy
    opened: float
    told: dict[ApiKey, float] = field(default_factory=dict)
    """When it was told last."""
    answers: int = 0


@dataclass(eq=False)
class Application:
    """One of ``kind``, at a cluster. Applications of one kind have one host and client id, as clients by default do."""

    kind: Kind
    host: str
    at: str
    connection: Connection | None = None


class MovingClients:
    """``scene``: its clusters, whose logs are watched from now on."""

    def __init__(self, scene: KilledProxies, seed: int, at: str) -> None:
        self._scene = scene
        self._random = random.Random(seed)
        self._name_leads_to = at
        """Where a client gets that asks its bootstrap servers."""
        self._sessions = count(1)
        self._times: dict[Proxy, tuple[MoveTimes, Coordinators]] = {}
        self._led: dict[str, float] = {name: 0.0 if name == at else NEVER for name in scene.names}
        """When clusters began to lead last."""
        self._told: dict[str, Told | None] = dict.fromkeys(scene.names)
        self._told_hosts: dict[tuple[Proxy, str], float] = {}
        self.applications = [
            Application(kind, f"10.0.0.{KINDS.index(kind)}", each)
            for kind in KINDS
            for each in ((at,) if kind.moves else scene.names)
        ]
        self.tasks: list[asyncio.Task[None]] = []
        for name in scene.names:
            self._watch(name)

    # ---- what the control logs say ----

    def _watch(self, name: str) -> None:
        control = self._scene.controls[name]
        apply = control.apply

        def applied(body: Body) -> Any:
            led, before = self._scene.writable(name), control.state
            outcome = apply(body)
            if isinstance(outcome, Accepted):
                self._note(name, body, before)
            if not led and self._scene.writable(name):
                self._led[name], self._told[name] = simulated_now(), None
            return outcome

        control.apply = applied  # type: ignore[method-assign]

    def _note(self, name: str, body: Body, before: Any) -> None:
        now = simulated_now()
        if isinstance(body, EndReversal) and body.reversal_id in before.reversals:
            self._begin(name, Told(now, now + before.reversals[body.reversal_id].move_clients_ms / 1000, asked=False))
        elif isinstance(body, MoveClients):
            self._begin(name, Told(now, now + body.for_ms / 1000, asked=True))

    def _begin(self, name: str, told: Told) -> None:
        before = self._told[name]
        if told.until > told.begun and (before is None or told.until > before.until or not told.asked):
            self._told[name] = told
            self._scene.seen["clients move" + (", asked" if told.asked else "")] += 1

    def _check(self, name: str, application: Application, connection: Connection, api: ApiKey) -> None:
        """What must be so where a connection is told."""
        now, told = simulated_now(), self._told[name]
        assert application.kind.may_be_told, f"told although it asks for others: {application}"
        assert told is not None, f"told at {name}, which leads, or where nobody was to be told"
        skew_s = self._scene.controls[name].state.applied_offset / 1000  # by which records are ahead of clocks
        assert now <= told.until + skew_s, f"told at {name} {now - told.until} s after the time was over"
        if not told.asked:
            assert not self._scene.writable(name), f"told at {name}, where clients may write"
            others = [led for each, led in self._led.items() if each != name]
            assert max(others) > self._led[name], f"told at {name}, and no other cluster has led since it did"
        told_before = now - connection.told.get(api, NEVER)
        if api is ApiKey.METADATA and told_before < MOMENT_S:
            return  # what it asks beside that is answered alike
        assert told_before >= AGAIN_S, "told twice within 10 s"
        connection.told[api] = now
        if api is ApiKey.METADATA:
            key = connection.to, application.host
            came_back = connection.opened > told.begun
            if came_back:  # what it was told over older connections does not count
                assert now - self._told_hosts.get(key, NEVER) >= AGAIN_S, "came back too often"
                self._told_hosts[key] = now

    # ---- clients ----

    def begin(self) -> None:
        loop = asyncio.get_running_loop()
        self.tasks = [loop.create_task(each) for each in (self._rename(), *map(self._go_on, self.applications))]

    async def end(self) -> None:
        """Raises what they saw that must not be."""
        for task in self.tasks:
            task.cancel()
        for found in await asyncio.gather(*self.tasks, return_exceptions=True):
            if isinstance(found, Exception):
                raise found

    async def until(self, what: str, ready: Callable[[], Any], timeout_s: float) -> None:
        """The same, while it is waited for something."""

        def looked() -> Any:
            for task in self.tasks:
                if task.done() and not task.cancelled():
                    task.result()
            return ready()

        await self._scene.until(what, looked, timeout_s)

    async def _rename(self) -> None:
        """Have the name of the bootstrap servers lead to who leads, after a while."""
        while True:
            await asyncio.sleep(self._random.uniform(1, 10))
            lead = [name for name in self._scene.names if self._scene.writable(name)]
            if lead:
                self._name_leads_to = max(lead, key=self._led.__getitem__)

    async def _go_on(self, application: Application) -> None:
        while True:
            await asyncio.sleep(self._random.choice((0.3, 1.0, 4.0)))
            connection = self._connected(application)
            if connection is None:
                continue
            name = application.at
            moves = self._asked(application, connection)
            if moves:
                self._check(name, application, connection, ApiKey.METADATA)
                self._scene.seen["told"] += 1
            if self._commits_elsewhere(application, connection):
                self._check(name, application, connection, ApiKey.OFFSET_COMMIT)
                self._scene.seen["told of the coordinator"] += 1
            if (moves and application.kind.moves) or self._random.random() < 0.02:
                self._close(application)
            if moves and application.kind.moves:
                application.at = self._name_leads_to

    def _connected(self, application: Application) -> Connection | None:
        """Its connection, or another one where that proxy was killed. None: no proxy runs there."""
        running = [
            proxy
            for each, proxy in self._scene.proxies.items()
            if each[0].upper() == application.at and each not in self._scene.dying
        ]
        if application.connection is not None and application.connection.to not in running:
            application.connection = None
        if application.connection is None and running:
            to, session_id = self._random.choice(running), next(self._sessions)
            client = Client(session_id, f"{application.host}:{session_id}", 1)
            assert to.plugin.parts.client_moves.opened(client) is None
            application.connection = Connection(client, to, simulated_now())
        return application.connection

    def _close(self, application: Application) -> None:
        if application.connection is not None:
            application.connection.to.plugin.parts.client_moves.closed(application.connection.client)
            application.connection = None

    def _topics(self, application: Application, connection: Connection) -> tuple[str, ...] | None:
        connection.answers += 1
        moves = (self._scene.prefix(application.at) + "t",)
        if application.kind.every:
            return None
        if application.kind.others and connection.answers % 2:
            return (*moves, "stays")
        return moves

    def _asked(self, application: Application, connection: Connection) -> bool:
        """Whether the answer to Metadata has it look for another cluster."""
        topics = self._topics(application, connection)
        hooks = connection.to.plugin.parts.client_moves.hooks()
        (hook,) = (each for each in hooks if each.api_key is ApiKey.METADATA)
        verdict = hook.on_request(_request(ApiKey.METADATA, METADATA_VERSION, _metadata(topics), connection.client))
        if verdict is None:
            return False
        assert isinstance(verdict, Replace)
        assert verdict.on_response is not None
        answer = verdict.on_response(_answer(topics or ()))
        assert isinstance(answer, bytes)
        decoded: Any = decode_response(ApiKey.METADATA, METADATA_VERSION, answer)[1]
        assert [each.name for each in decoded.topics] == [*(topics or ())], "who does not know the error reads on"
        return int(decoded.error_code) == REBOOTSTRAP_REQUIRED

    def _commits_elsewhere(self, application: Application, connection: Connection) -> bool:
        """Whether a commit has it look for another coordinator."""
        topics = self._topics(application, connection)
        if topics is None or self._random.random() < 0.5:
            return False
        if application.kind.others:
            topics = (self._scene.prefix(application.at) + "t", "stays")
        request = _request(ApiKey.OFFSET_COMMIT, COMMIT_VERSION, _commit(topics), connection.client)
        return self._coordinators(connection.to).elsewhere(request)

    def _coordinators(self, proxy: Proxy) -> Coordinators:
        if proxy not in self._times:
            context: Any = proxy.context
            times = MoveTimes(context.clock)
            times.control_changed(context.control.state)
            context.control.subscribe(times.control_changed)
            self._times[proxy] = times, Coordinators(context, times)
        return self._times[proxy][1]

    # ---- what comes of it ----

    def told_at(self, name: str) -> bool:
        """Whether clients are to be told at a cluster now."""
        told = self._told[name]
        return told is not None and simulated_now() < told.until

    def have_moved(self, name: str) -> bool:
        """Whether nobody that moves is at a cluster any more."""
        return not any(each.kind.moves and each.at == name for each in self.applications)

    def have_told(self, name: str) -> bool:
        """Whether who stays at a cluster although it is told to move has been told over the connection that it has."""
        stays = [each for each in self.applications if each.at == name and each.kind.may_be_told]
        return all(each.connection is not None and each.connection.told for each in stays if not each.kind.moves)

    def known(self) -> list[NamespaceKey]:
        """Whose clients are told, by any log."""
        return [key for name in self._scene.names for key in self._scene.state(name).client_moves]


@lru_cache
def _metadata(topics: tuple[str, ...] | None) -> bytes:
    named = None if topics is None else [{"name": each} for each in topics]
    values = {"topics": named, "allow_auto_topic_creation": False}
    return encode_request(build_request(ApiKey.METADATA, METADATA_VERSION, values), 7, "client")


@lru_cache
def _answer(topics: Sequence[str]) -> bytes:
    found = [{"error_code": error_code(0), "name": each, "partitions": []} for each in topics]
    values = {"brokers": [{"node_id": 1, "host": "h", "port": 9092, "rack": None}], "topics": found}
    return encode_response(build_response(ApiKey.METADATA, METADATA_VERSION, values), 7)


@lru_cache
def _commit(topics: tuple[str, ...]) -> bytes:
    partitions = [{"partition_index": 0, "committed_offset": 0}]
    named = [{"name": each, "partitions": partitions} for each in topics]
    values = {"group_id": "g", "topics": named}
    return encode_request(build_request(ApiKey.OFFSET_COMMIT, COMMIT_VERSION, values), 7, "client")


def _request(api: ApiKey, version: int, frame: bytes, client: Client) -> Request:
    return Request(frame, True, api, version, 7, simulated_now(), client)
