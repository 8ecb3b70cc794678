"""Has clients of what another cluster leads now ask their bootstrap servers again (REBOOTSTRAP_REQUIRED, KIP-1102).

So it is for a time that an operator has given (``--move-clients``), at the cluster that led. What a broker answers to
Metadata goes on as it is, with that error in front of all: a client that does not know it, or is configured otherwise,
reads the rest. It stands in Metadata from v13 on; older versions are left as they are.

Who is told: ``told_clients``. The broker is asked first, with the client's rights: who may describe none of the topics
is told nothing of them.

Java's client knows its connections by the ids of brokers, which both clusters may have. A consumer that was told goes
on reading where it did until it has heard from the other cluster: it connects here again meanwhile, and then takes that
connection for one to the other cluster's broker of the same id. It would be a member of its group there by then, read
here, and commit there how far it has come here. What it asks for first is the topic by its id at the other cluster:
then the connection is closed, and the client opens the one that it means.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, Metric

from isthmus_control.control_state import ControlState
from isthmus_control.model import TOPIC_NAME_CHARS_MAX, NamespaceKey
from isthmus_plugins.api import Client, Close, Gate, Replace, Request, RequestHook, Verdict
from isthmus_plugins.aside import ANSWER_BYTES_AT_ONCE, answered_on_loop, found_aside, on_loop
from isthmus_plugins.move_times import MoveTimes
from isthmus_plugins.process import PluginContext
from isthmus_plugins.rarely import Rarely
from isthmus_plugins.replication.client_views.told_clients import ToldClients, beginnings
from isthmus_plugins.replication.link.part import Part
from isthmus_protocol import peeks
from isthmus_protocol.bodies import error_code
from isthmus_protocol.error_codes import REBOOTSTRAP_REQUIRED
from isthmus_protocol.messages import decode_response, encode_response, parse_request_head
from isthmus_protocol.schema import ApiKey

log = logging.getLogger("isthmus_plugins.replication")

FIRST_VERSION: Final = 13
"""Of Metadata, in which an answer has an error of its own."""
FETCHED_BY_ID_SINCE: Final = 13
"""The first version of Fetch that names topics by id."""
CLIENT_ID_CHARS_MAX: Final = 100
"""Of a client id, which may have thousands, so many tell clients apart."""


class ClientMoves(Part):
    """A hook that does nothing while the cluster has no link, and an observer of connections."""

    def __init__(self, context: PluginContext) -> None:
        self._context = context
        self._clock = context.clock
        self._times = MoveTimes(context.clock)
        self._clients = ToldClients()
        self._links = False
        self._count: Counter[NamespaceKey] = Counter()
        """How often clients were told, by the namespace."""
        self._told = Rarely(_say_told)

    def hooks(self) -> Sequence[RequestHook]:
        return [
            RequestHook(ApiKey.METADATA, self.on_metadata, whole=True, versions=(FIRST_VERSION, 0x7FFF), pure=True),
            RequestHook(ApiKey.FETCH, self.on_fetch, whole=True, versions=(FETCHED_BY_ID_SINCE, 0x7FFF), pure=True),
        ]

    def control_changed(self, state: ControlState) -> None:
        self._times.control_changed(state)
        self._links = bool(state.links)

    def metrics(self) -> Iterable[Metric]:
        """How often clients were told."""
        told = CounterMetricFamily(
            "isthmus_clients_told_to_move",
            "How often clients were told to ask their bootstrap servers again, since another cluster leads the topics",
            labels=("namespace",),
        )
        for key, count in self._count.items():
            told.add_metric((key.prefix,), count)
        return (told,)

    def told(self, key: NamespaceKey) -> int:
        """How often this proxy has told clients of a namespace, since it was started."""
        return self._count[key]

    # ---- connections ----

    def opened(self, client: Client) -> Close | None:
        """A client has connected."""
        self._clients.opened(client.session_id, client.address.rpartition(":")[0], self._clock.monotonic())
        return None

    def authenticated(self, client: Client) -> None:
        """It is known who a client is: that makes no difference."""

    def closed(self, client: Client) -> None:
        """The connection is gone."""
        self._clients.closed(client.session_id)

    # ---- Fetch ----

    def on_fetch(self, request: Request) -> Verdict:
        """Close a connection that its client takes for one to the other cluster: it asks for a topic of that."""
        if not self._times or not self._times.any_here(request.now):
            return None
        if not self._clients.was_told(request.client.session_id, _client_id(request), request.now):
            return None
        ids = peeks.topics(ApiKey.FETCH, request.version, "request", request.frame)
        if all(each is None or self._context.known_topic_name(each) is not None for each in ids):
            return None
        return Close("its client was told to move, and asks for a topic of another cluster")

    # ---- Metadata ----

    def on_metadata(self, request: Request) -> Verdict:
        """Remember what a connection asks for, and look at the answer where all of that has moved."""
        if not self._links:
            return None
        asked, _ = peeks.metadata(request.version, request.frame)
        if not asked:
            return None  # all topics, or none
        names = [self._name(*each) for each in asked]
        known = [name for name in names if name is not None]
        if len(known) < len(names):
            return None
        named, session_id = beginnings(known), request.client.session_id
        on_loop(self._clients.asked, session_id, named)
        now = self._clock.monotonic()
        if not self._times.any_here(now) or any(self._times.here(name, now) is None for name in named):
            return None
        looks = partial(self._answered, session_id, _client_id(request), request.now, named[0], request.version)
        return Replace(request.frame, answered_on_loop(looks))

    def _name(self, name: bytes | None, topic_id: bytes | None) -> str | None:
        """A topic's name; None of an id that is not known, and of what is longer than names are."""
        if name is not None:
            return name.decode("utf-8", "replace") if len(name) <= TOPIC_NAME_CHARS_MAX else None
        return self._context.known_topic_name(topic_id) if topic_id is not None else None

    def _answered(
        self, session_id: int, client_id: str, asked: float, topic: str, version: int, frame: bytes
    ) -> bytes | Gate:
        """The answer, as the connection is to see it."""
        if not self._may_be_told(session_id, client_id, asked):
            return frame
        tell = partial(self._tell, session_id, client_id, asked, topic, frame)
        find = partial(_moved, version)
        return tell(find(frame)) if len(frame) <= ANSWER_BYTES_AT_ONCE else found_aside(find, tell, frame)

    def _may_be_told(self, session_id: int, client_id: str, asked: float) -> bool:
        now = self._clock.monotonic()
        if now > self._context.lease_deadline:
            return False  # this cluster may lead again
        return self._clients.is_being_told(session_id, asked) or self._is_due(session_id, client_id, now)

    def _is_due(self, session_id: int, client_id: str, now: float) -> bool:
        def begun(topic: str) -> float | None:
            time = self._times.here(topic, now)
            return None if time is None else time.begun

        return self._clients.may_be_told(session_id, client_id, begun, now)

    def _tell(
        self, session_id: int, client_id: str, asked: float, topic: str, frame: bytes, moved: bytes | None
    ) -> bytes:
        now = self._clock.monotonic()
        time = self._times.here(topic, now)
        if moved is None or time is None or now > self._context.lease_deadline:
            return frame
        if self._clients.is_being_told(session_id, asked):
            return moved
        if not self._is_due(session_id, client_id, now):
            return frame  # it was told while a large answer was read
        self._clients.told(session_id, client_id, time.begun, now)
        self._count[time.move.key] += 1
        self._told.one(f"{time.move.prefix}, over link {time.move.link}, the last {client_id}")
        return moved


def _client_id(request: Request) -> str:
    return (parse_request_head(request.frame).client_id or "")[:CLIENT_ID_CHARS_MAX]


def _moved(version: int, frame: bytes) -> bytes | None:
    """The answer with the error in front; None where the client may describe no topic of it, or it is an error."""
    correlation_id, payload = decode_response(ApiKey.METADATA, version, frame)
    answered: Any = payload
    if int(answered.error_code) or all(int(topic.error_code) for topic in answered.topics):
        return None
    return encode_response(replace(answered, error_code=error_code(REBOOTSTRAP_REQUIRED)), correlation_id)


def _say_told(count: int, detail: str) -> None:
    log.info("clients told to ask their bootstrap servers again", extra={"times": count, "of": detail})
