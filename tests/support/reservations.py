"""The reservation plugin without a proxy: what it sees of its process, and requests to decide about."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Collection
from typing import Any, Final, cast

from isthmus_control import commands as c
from isthmus_control.acls import EVERY_ACL, AclBinding, AclFilter
from isthmus_control.apply import apply
from isthmus_control.concerns import Beyond, Concerns
from isthmus_control.control_state import ControlState
from isthmus_control.model import NamespaceKey, Reason, ResourceType, Role
from isthmus_control.outcome import Accepted
from isthmus_control.truncations import Truncation, TruncationPhase
from isthmus_plugins.api import Ask, Client, Hold, Replace, Request, Verdict
from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused
from isthmus_plugins.process import PluginContext
from isthmus_plugins.reservation import ReservationPlugin
from isthmus_plugins.tasks import Supervision
from isthmus_protocol.bodies import error_code
from isthmus_protocol.error_codes import (
    CLUSTER_AUTHORIZATION_FAILED,
    GROUP_AUTHORIZATION_FAILED,
    TOPIC_AUTHORIZATION_FAILED,
    UNKNOWN_TOPIC_OR_PARTITION,
)
from isthmus_protocol.messages import build_request, build_response, decode_request, encode_request, encode_response
from isthmus_protocol.schema import ApiKey

INTERNAL_ID: Final = uuid.uuid4().bytes
EVERYTHING: Final = ("everything",)
"""What a client may describe where there is no authorizer."""
PRINCIPALS: Final = "principals"


class Process:
    """What the plugin sees of its process: a state that is set, ids that are known or can be read, a lease."""

    def __init__(self) -> None:
        self.state = ControlState("A")
        self.at_ms = 1
        """When commands are made."""
        self.control = self
        self.cluster = self
        self.lease_deadline = time.monotonic() + 3600
        self.supervision = Supervision()
        self.internal_topic_ids = (INTERNAL_ID,)
        self.known_ids: dict[bytes, str] = {}
        self.ids: dict[bytes, str] = {}
        self.existing: dict[str, None] = {}
        self.reachable = True
        self.on_read: Callable[[], None] = lambda: None
        self.groups: set[str] = set()
        self.bindings: frozenset[AclBinding] = frozenset()
        self.refuses: KafkaRefused | None = None
        self._changed: list[Callable[[ControlState], None]] = []

    def subscribe(self, changed: Callable[[ControlState], None]) -> None:
        self._changed.append(changed)

    def do(self, body: c.Body) -> None:
        command = c.Command(str(uuid.uuid4()), self.at_ms, "test", self.state.applied_offset, body)
        self.state, outcome = apply(self.state, self.state.applied_offset + 1, command)
        assert isinstance(outcome, Accepted), outcome
        for changed in self._changed:
            changed(self.state)

    def newer(self, *concerned: NamespaceKey) -> None:
        """A newer proxy has written a record about these namespaces that this version does not know."""
        offset = self.state.applied_offset + 1
        beyond = Beyond(offset, Concerns(concerned), "a newer proxy wrote of it: upgrade this proxy")
        self.state = self.state.evolve(applied_offset=offset, beyond=(beyond,))
        for changed in self._changed:
            changed(self.state)

    def reserve(self, prefix: str, kind: ResourceType = ResourceType.TOPIC) -> None:
        self.do(c.CreateNamespace(kind, prefix, True, "because"))

    def follow(self, kind: ResourceType, prefix: str, link: str = "link") -> None:
        """Attach a namespace as the follower of one of the same name."""
        if link not in self.state.links:
            link_id = str(uuid.uuid4())
            self.do(c.CreateLink(link, link_id, f"cluster-{link}", True, ("127.0.0.1:1",)))
        self.do(c.AttachNamespace(link, kind, prefix, prefix, Role.FOLLOWER, create_missing=True))

    def truncating(self, topic: str) -> None:
        """A topic of a link is being made anew."""
        phase = TruncationPhase.REFILLING
        under_way = Truncation("l", topic, str(uuid.uuid4()), Reason("", ""), (), None, "p", "", 0, phase, 0)
        self.state = self.state.evolve(truncations={topic: under_way})
        for changed in self._changed:
            changed(self.state)

    def known_topic_name(self, topic_id: bytes) -> str | None:
        return self.known_ids.get(topic_id)

    async def topic_names(self, topic_ids: Collection[bytes]) -> dict[bytes, str]:
        await self.topics()
        return {each: self.known_ids[each] for each in topic_ids if each in self.known_ids}

    async def topics(self) -> dict[str, None]:
        await asyncio.sleep(0)
        self.on_read()
        if not self.reachable:
            raise BrokerUnavailable("no broker answers")
        self.known_ids.update(self.ids)
        return self.existing

    async def topics_named(self, names: Collection[str]) -> dict[str, None]:
        return {name: None for name in await self.topics() if name in names}

    async def group_exists(self, group: str) -> bool:
        await self._asked()
        return group in self.groups

    async def acls(self, matching: AclFilter = EVERY_ACL) -> frozenset[AclBinding]:
        await self._asked()
        return frozenset(
            each
            for each in self.bindings
            if matching.resource_name in (None, each.resource_name) and matching.principal in (None, each.principal)
        )

    async def _asked(self) -> None:
        await asyncio.sleep(0)
        self.on_read()
        if not self.reachable:
            raise BrokerUnavailable("no broker answers")
        if self.refuses is not None:
            raise self.refuses


def started(process: Process) -> ReservationPlugin:
    """The plugin, in this process."""
    plugin = ReservationPlugin()
    plugin.isthmus_start(cast(PluginContext, process))
    return plugin


def request_of(api_key: int, version: int, values: dict[str, Any], part: float = 1.0) -> Request:
    frame = encode_request(build_request(api_key, version, values), 7, "client")
    frame = frame[: int(len(frame) * part)]
    return Request(frame, part == 1.0, api_key, version, 7, time.monotonic(), Client(1, "127.0.0.1:5000", 1))


def decide(plugin: ReservationPlugin, request: Request, describes: Collection[str] = EVERYTHING) -> Verdict:
    """The first verdict of the plugin's hooks for a request, waited for; a look at the answer alone is none."""
    for hook in plugin.isthmus_request_hooks():
        if hook.api_key == request.api_key:
            verdict = settled(hook.on_request(request), describes)
            if verdict is not None and not (isinstance(verdict, Replace) and verdict.frame is request.frame):
                return verdict
    return None


def settled(verdict: Verdict, describes: Collection[str] = EVERYTHING) -> Verdict:
    """What a verdict comes to, for a client that may describe topics and groups of these names; principals, where
    PRINCIPALS is among them."""

    async def waited_for() -> Verdict:
        last = verdict
        while isinstance(last, Hold | Ask):
            last = await last.verdict if isinstance(last, Hold) else last.then(last.read(asked(last.frame, describes)))
        return last

    return asyncio.run(waited_for())


def asked(frame: bytes, describes: Collection[str]) -> bytes:
    """How a broker answers whether a client may describe something."""
    head, payload = decode_request(frame)
    question = cast(Any, payload)

    def code(name: str, refused: int) -> int:
        return 0 if describes is EVERYTHING or name in describes else refused

    values: dict[str, Any]
    if head.api_key == ApiKey.METADATA:
        assert not question.allow_auto_topic_creation
        names = [topic.name for topic in question.topics]
        denied = TOPIC_AUTHORIZATION_FAILED
        topics = [{"error_code": code(name, denied) or UNKNOWN_TOPIC_OR_PARTITION, "name": name} for name in names]
        values = {"topics": topics}
    elif head.api_key == ApiKey.DESCRIBE_GROUPS:
        groups = [
            {"error_code": code(group, GROUP_AUTHORIZATION_FAILED), "group_id": group} for group in question.groups
        ]
        values = {"groups": groups}
    else:
        assert head.api_key == ApiKey.DESCRIBE_ACLS
        values = {"error_code": code(PRINCIPALS, CLUSTER_AUTHORIZATION_FAILED)}
    for entry in (values, *values.get("topics", ()), *values.get("groups", ())):
        if "error_code" in entry:
            entry["error_code"] = error_code(entry["error_code"])
    return encode_response(build_response(head.api_key, head.version, values), head.correlation_id)
