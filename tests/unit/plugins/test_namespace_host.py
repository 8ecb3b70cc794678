"""Plugins of namespaces at work: whose hooks see what, in which order, and what becomes of a request when one fails."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from uuid import UUID

import pytest
from pydantic import Field
from support.api_requests import request
from support.fake_cluster import FakeCluster, FakeContext, FakeControl
from support.loop_time import went_out

from isthmus_control.commands import ConfigurePlugin, CreateNamespace, DeleteNamespace, DisablePlugin, EnablePlugin
from isthmus_control.model import ResourceType
from isthmus_control.outcome import Accepted
from isthmus_plugins.api import NEED_MORE, Answer, Close, Gate, Hold, Replace, Request, Verdict
from isthmus_plugins.cluster import TopicPartition
from isthmus_plugins.confirmation import Acks, Confirmer
from isthmus_plugins.namespace_host import CAUSE, NamespaceHost
from isthmus_plugins.namespace_plugins import (
    Enabled,
    NamespaceHook,
    NamespacePlugin,
    NamespaceRequest,
    NamespaceResponse,
    Policy,
    Scope,
    Settings,
)
from isthmus_protocol import schema
from isthmus_protocol.bodies import build
from isthmus_protocol.messages import decode_request, decode_response, encode_response
from isthmus_protocol.record_codec import Record, encode_batch
from isthmus_protocol.records import BatchHeader
from isthmus_protocol.schema import ApiKey

TOPIC, GROUP = ResourceType.TOPIC, ResourceType.CONSUMER_GROUP
BATCH = encode_batch([Record(0, 1, None, b"v")], BatchHeader(0, 0, 0, 2, 0, 0, 0, 1, 1, -1, -1, -1, 1))


class WordSettings(Settings):
    word: str = ""
    times: int = Field(default=1, ge=1)


class Plugin(NamespacePlugin):
    """Does what the test says."""

    settings = WordSettings
    types = frozenset((TOPIC, GROUP))

    def __init__(self, *hooks: NamespaceHook, policy: Policy = Policy.CLOSED) -> None:
        self.made: list[Work] = []
        self.given = hooks
        self.policy = policy
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.confirmers: tuple[Confirmer, ...] = ()

    def enabled(self, scope: Scope) -> Enabled:
        if scope.settings.word == "never":
            raise ValueError("not with that word")
        return Work(self, scope)


class Work(Enabled):
    def __init__(self, plugin: Plugin, scope: Scope) -> None:
        self.plugin, self.scope = plugin, scope
        self.lacks = "half of it" if scope.settings.word == "half" else None
        self.stopped_now = asyncio.Event()

    @property
    def stopped(self) -> bool:
        return self.stopped_now.is_set()

    def hooks(self) -> Sequence[NamespaceHook]:
        return self.plugin.given

    def confirmers(self) -> Sequence[Confirmer]:
        return self.plugin.confirmers

    async def start(self) -> None:
        self.plugin.made.append(self)
        await self.plugin.may_start.wait()

    async def stop(self) -> None:
        self.stopped_now.set()


class Scene:
    def __init__(self, **plugins: Plugin) -> None:
        rng = random.Random(1)
        self.cluster = FakeCluster(rng, range(1, 2))
        self.control = FakeControl("A", rng)
        self.changes = 0
        context: Any = FakeContext(self.cluster, self.control)
        self.host = NamespaceHost(context, plugins, self._on_hooks)

    def _on_hooks(self) -> None:
        self.changes += 1

    def namespace(self, prefix: str, kind: ResourceType = TOPIC) -> None:
        assert isinstance(self.control.apply(CreateNamespace(kind, prefix)), Accepted)

    def enable(self, name: str, prefix: str, settings: str = "{}", kind: ResourceType = TOPIC, **more: Any) -> None:
        if self.control.state.namespace(kind, prefix) is None:
            self.namespace(prefix, kind)
        version = more.pop("version", 1)
        assert isinstance(self.control.apply(EnablePlugin(kind, prefix, name, settings, version, **more)), Accepted)

    def ask(self, asked: Request) -> Verdict:
        """What the hooks of an API say, one after the other; they are one or none for each API, and those of gates."""
        verdict: Verdict = None
        for hook in self.host.hooks():
            if hook.api_key == asked.api_key:
                verdict = hook.on_request(asked)
                if verdict is not None:
                    return verdict
        return verdict


def on_scene(test: Callable[[Scene], Awaitable[None]], **plugins: Callable[[], Plugin]) -> None:
    async def run() -> None:
        scene = Scene(**{name: make() for name, make in plugins.items()})
        scene.host.start()
        try:
            await test(scene)
        finally:
            await scene.host.stop()

    asyncio.run(run())


def produce(*topics: str, version: int = 9, acks: int = -1) -> Request:
    data = [{"name": topic, "partition_data": [{"index": 0, "records": BATCH}]} for topic in topics]
    return request(ApiKey.PRODUCE, version, {"acks": acks, "timeout": 30_000, "topic_data": data})


def commit(group: str) -> Request:
    return request(ApiKey.OFFSET_COMMIT, 8, {"group_id": group})


def codes(answer: bytes | Gate, api_key: int = ApiKey.PRODUCE, version: int = 9) -> dict[str, int]:
    assert isinstance(answer, bytes)
    _, payload = decode_response(api_key, version, answer)
    found: Any = payload
    return {each.name: int(each.partition_responses[0].error_code) for each in found.responses}


def names_seen(seen: list[Any], name: str = "") -> NamespaceHook:
    def on_request(asked: NamespaceRequest) -> Verdict:
        seen.append((name or asked.scope.prefix, *asked.names))
        return None

    return NamespaceHook(ApiKey.PRODUCE, on_request)


# ---- who sees what ----


def test_a_hook_sees_requests_that_name_something_of_its_namespace_alone() -> None:
    seen: list[Any] = []

    async def test(scene: Scene) -> None:
        assert scene.host.hooks() == []
        scene.enable("p", "pay-")
        await asyncio.sleep(0)
        assert [hook.api_key for hook in scene.host.hooks()] == [ApiKey.PRODUCE]
        for asked in (produce("other"), produce("pay-a", "other", "pay-b", "pay-a"), produce("pay-a")):
            assert scene.ask(asked) is None
        assert seen == [("pay-", "pay-a", "pay-b"), ("pay-", "pay-a")]
        asked = produce("other")
        scene.ask(asked)
        assert asked.leave is not None, "the next one to this topic need not be asked about"
        assert asked.leave.until == float("inf")
        known = asked.leave
        asked = produce("pay-a")
        scene.ask(asked)
        assert asked.leave is None
        scene.control.apply(DisablePlugin(TOPIC, "pay-", "p"))
        assert known.until == float("-inf")
        assert scene.host.hooks() == []

    on_scene(test, p=lambda: Plugin(names_seen(seen)))


def test_hooks_of_wider_namespaces_come_first_and_then_in_the_operators_order() -> None:
    seen: list[Any] = []

    async def test(scene: Scene) -> None:
        for name, prefix, position in (("a", "pay-eu-", None), ("b", "pay-", None), ("c", "pay-", 0), ("a", "", None)):
            scene.enable(name, prefix, position=position)
        await asyncio.sleep(0)
        scene.ask(produce("pay-eu-t"))
        assert [name for name, _ in seen] == ["a", "c", "b", "a"]
        seen.clear()
        scene.control.apply(ConfigurePlugin(TOPIC, "pay-", "b", "{}", 1, 0))
        await asyncio.sleep(0)
        scene.ask(produce("pay-t"))
        assert [name for name, _ in seen] == ["a", "b", "c"]

    plugins = {name: (lambda name=name: Plugin(names_seen(seen, name))) for name in "abc"}
    on_scene(test, **plugins)


def test_groups_are_told_from_topics_of_the_same_name() -> None:
    seen: list[Any] = []

    def on_request(asked: NamespaceRequest) -> Verdict:
        seen.append((asked.scope.type, asked.names))
        return None

    async def test(scene: Scene) -> None:
        scene.enable("p", "pay-", kind=GROUP)
        scene.enable("q", "pay-", kind=TOPIC)
        await asyncio.sleep(0)
        scene.ask(commit("pay-g"))
        scene.ask(commit("other"))
        assert seen == [(GROUP, ("pay-g",))]

    hook = NamespaceHook(ApiKey.OFFSET_COMMIT, on_request)
    on_scene(test, p=lambda: Plugin(hook), q=lambda: Plugin(hook))


def test_topic_ids_are_resolved_before_hooks_are_asked() -> None:
    seen: list[Any] = []

    async def test(scene: Scene) -> None:
        scene.enable("p", "pay-")
        await asyncio.sleep(0)
        topic = scene.cluster.add_topic("pay-t")
        data = [{"topic_id": UUID(bytes=topic.topic_id), "partition_data": [{"index": 0, "records": BATCH}]}]
        asked = request(ApiKey.PRODUCE, 13, {"acks": -1, "topic_data": data})
        assert scene.ask(asked) is None
        assert seen == [("pay-", "pay-t")]
        unknown = request(ApiKey.PRODUCE, 13, {"acks": -1, "topic_data": [{**data[0], "topic_id": UUID(int=99)}]})
        verdict = scene.ask(unknown)
        assert isinstance(verdict, Hold)
        assert await verdict.verdict is None, "the broker knows no such topic, either"

    on_scene(test, p=lambda: Plugin(names_seen(seen)))


def test_a_prefix_without_the_names_is_not_enough() -> None:
    async def test(scene: Scene) -> None:
        scene.enable("p", "pay-")
        await asyncio.sleep(0)
        asked = produce("pay-t")
        part = Request(asked.frame[:30], False, ApiKey.PRODUCE, 9, 5, 0.0, asked.client)
        assert scene.ask(part) is NEED_MORE
        part.frame = asked.frame[:-10]
        assert scene.ask(part) is NEED_MORE, "hooks see whole requests"
        other = produce("other")
        part.frame = other.frame[:-10]
        assert scene.ask(part) is None

    on_scene(test, p=lambda: Plugin(names_seen([])))


# ---- views ----


def test_batches_and_the_payload_of_a_request() -> None:
    seen: list[Any] = []

    def on_request(asked: NamespaceRequest) -> Verdict:
        batches = [(each.topic, each.partition, each.header.record_count, bytes(each.data)) for each in asked.batches]
        payload: Any = asked.payload
        seen.append((batches, len(payload.topic_data)))
        return None

    async def test(scene: Scene) -> None:
        scene.enable("p", "pay-")
        await asyncio.sleep(0)
        scene.ask(produce("other", "pay-t"))
        assert seen == [([("pay-t", 0, 1, BATCH)], 2)]

    on_scene(test, p=lambda: Plugin(NamespaceHook(ApiKey.PRODUCE, on_request)))


def test_what_one_hook_replaces_is_what_the_next_one_sees() -> None:
    seen: list[Any] = []

    def shorten(asked: NamespaceRequest) -> Verdict:
        return Replace(produce("pay-b").frame)

    def look(asked: NamespaceRequest) -> Verdict:
        seen.extend(batch.topic for batch in asked.batches)
        payload: Any = asked.payload
        seen.append(payload.topic_data[0].name)
        return None

    async def test(scene: Scene) -> None:
        scene.enable("p", "pay-")
        scene.enable("q", "pay-")
        await asyncio.sleep(0)
        verdict = scene.ask(produce("pay-b", "pay-c"))
        assert isinstance(verdict, Replace)
        assert decode_request(verdict.frame)[1].topic_data[0].name == "pay-b"  # type: ignore[union-attr]
        assert seen == ["pay-b", "pay-b"]

    on_scene(
        test,
        p=lambda: Plugin(NamespaceHook(ApiKey.PRODUCE, shorten)),
        q=lambda: Plugin(NamespaceHook(ApiKey.PRODUCE, look)),
    )


def answered(*topics: str, version: int = 9) -> bytes:
    said = {"responses": [{"name": topic, "partition_responses": [{"index": 0}]} for topic in topics]}
    return encode_response(build(schema.response_type(ApiKey.PRODUCE, version), said), 5)


def test_answers_are_seen_in_the_reverse_order() -> None:
    seen: list[Any] = []

    def hook(name: str) -> NamespaceHook:
        def on_response(answer: NamespaceResponse) -> bytes:
            payload: Any = answer.payload
            seen.append((name, answer.names, payload.responses[0].name))
            return answer.frame

        return NamespaceHook(ApiKey.PRODUCE, None, on_response)

    async def test(scene: Scene) -> None:
        scene.enable("p", "pay-")
        scene.enable("q", "pay-")
        await asyncio.sleep(0)
        assert scene.ask(produce("other")) is None
        verdict = scene.ask(produce("pay-t"))
        assert isinstance(verdict, Replace)
        assert verdict.on_response is not None
        frame = answered("pay-t")
        assert verdict.on_response(frame) is frame
        assert seen == [("q", ("pay-t",), "pay-t"), ("p", ("pay-t",), "pay-t")]

    on_scene(test, p=lambda: Plugin(hook("p")), q=lambda: Plugin(hook("q")))


def test_fetched_batches_are_seen_whatever_the_request_named() -> None:
    """A request of a fetch session names only what has changed in it."""
    seen: list[Any] = []

    def on_response(answer: NamespaceResponse) -> bytes:
        seen.extend((batch.topic, batch.partition, bytes(batch.data)) for batch in answer.batches)
        return answer.frame

    async def test(scene: Scene) -> None:
        scene.enable("p", "pay-")
        await asyncio.sleep(0)
        topics = [scene.cluster.add_topic(name) for name in ("other", "pay-t")]
        verdict = scene.ask(request(ApiKey.FETCH, 17, {"session_id": 7, "session_epoch": 3}))
        assert isinstance(verdict, Replace)
        assert verdict.on_response is not None
        parts = [
            {"topic_id": UUID(bytes=topic.topic_id), "partitions": [{"partition_index": 0, "records": BATCH}]}
            for topic in topics
        ]
        frame = encode_response(build(schema.response_type(ApiKey.FETCH, 17), {"responses": parts}), 5)
        assert verdict.on_response(frame) is frame
        assert seen == [("pay-t", 0, BATCH)]

    on_scene(test, p=lambda: Plugin(NamespaceHook(ApiKey.FETCH, None, on_response)))


def test_of_an_answer_of_thousands_of_topics_they_are_looked_for_beside_the_loop() -> None:
    seen: list[str] = []

    def on_response(answer: NamespaceResponse) -> bytes:
        seen.extend(answer.names)
        return answer.frame

    async def test(scene: Scene) -> None:
        scene.enable("p", "pay-")
        await asyncio.sleep(0)
        verdict = scene.ask(request(ApiKey.FETCH, 12, {"session_id": 7, "session_epoch": 3}))
        assert isinstance(verdict, Replace)
        assert verdict.on_response is not None
        names = [*(f"other-{each}" for each in range(2_000)), "pay-t"]
        parts = [{"topic": name, "partitions": [{"partition_index": 0, "records": b""}]} for name in names]
        frame = encode_response(build(schema.response_type(ApiKey.FETCH, 12), {"responses": parts}), 5)
        answer = verdict.on_response(frame)
        assert isinstance(answer, Gate)
        assert await went_out(answer) is frame
        assert seen == ["pay-t"]

    on_scene(test, p=lambda: Plugin(NamespaceHook(ApiKey.FETCH, None, on_response)))


# ---- results ----


def test_a_hook_refuses_what_is_asked_of_its_namespace() -> None:
    def on_request(asked: NamespaceRequest) -> Verdict:
        return asked.refuse(44, "not today")

    async def test(scene: Scene) -> None:
        scene.enable("p", "pay-")
        await asyncio.sleep(0)
        verdict = scene.ask(produce("pay-t"))
        assert isinstance(verdict, Answer)
        assert codes(verdict.frame) == {"pay-t": 44}
        verdict = scene.ask(produce("pay-t", "other"))
        assert isinstance(verdict, Replace)
        assert [each.name for each in decode_request(verdict.frame)[1].topic_data] == ["other"]  # type: ignore[union-attr]
        assert verdict.on_response is not None
        assert codes(verdict.on_response(answered("other"))) == {"pay-t": 44, "other": 0}

    on_scene(test, p=lambda: Plugin(NamespaceHook(ApiKey.PRODUCE, on_request)))


def test_an_asynchronous_hook_holds_its_request() -> None:
    async def on_request(asked: NamespaceRequest) -> Verdict:
        await asyncio.sleep(0.01)
        return asked.refuse(44) if "pay-no" in asked.names else None

    async def test(scene: Scene) -> None:
        scene.enable("p", "pay-")
        await asyncio.sleep(0)
        verdict = scene.ask(produce("pay-t"))
        assert isinstance(verdict, Hold)
        assert await verdict.verdict is None
        verdict = scene.ask(produce("pay-no"))
        assert isinstance(verdict, Hold)
        assert isinstance(await verdict.verdict, Answer)

    on_scene(test, p=lambda: Plugin(NamespaceHook(ApiKey.PRODUCE, on_request, limit_s=1.0)))


# ---- failures ----


def raises(asked: NamespaceRequest) -> Verdict:
    raise RuntimeError("broken")


async def is_late(asked: NamespaceRequest) -> Verdict:
    await asyncio.sleep(60)
    return None


@pytest.mark.parametrize("hook", [NamespaceHook(0, raises), NamespaceHook(0, is_late, limit_s=0.01)])
@pytest.mark.parametrize("policy", Policy)
def test_a_hook_that_fails_is_closed_or_open(hook: NamespaceHook, policy: Policy) -> None:
    async def test(scene: Scene) -> None:
        scene.enable("p", "pay-")
        await asyncio.sleep(0)
        verdict = scene.ask(produce("pay-t"))
        if isinstance(verdict, Hold):
            verdict = await verdict.verdict
        if policy is Policy.OPEN:
            assert verdict is None
        else:
            assert isinstance(verdict, Answer)
            assert verdict.cause == CAUSE
            assert codes(verdict.frame) == {"pay-t": 19}, "which producers try again"
        assert scene.host.failures == {("p", policy): 1}
        assert scene.ask(produce("other")) is None

    on_scene(test, p=lambda: Plugin(hook, policy=policy))


def test_an_answer_that_a_hook_cannot_take_ends_the_connection_or_goes_on() -> None:
    def on_response(answer: NamespaceResponse) -> bytes:
        raise RuntimeError("broken")

    async def test(scene: Scene) -> None:
        scene.enable("closed", "pay-")
        scene.enable("open", "log-")
        await asyncio.sleep(0)
        verdict = scene.ask(produce("pay-t"))
        assert isinstance(verdict, Replace)
        assert verdict.on_response is not None
        with pytest.raises(RuntimeError, match="broken"):
            verdict.on_response(answered("pay-t"))
        verdict = scene.ask(produce("log-t"))
        assert isinstance(verdict, Replace)
        assert verdict.on_response is not None
        frame = answered("log-t")
        assert verdict.on_response(frame) is frame

    hook = NamespaceHook(ApiKey.PRODUCE, None, on_response)
    on_scene(test, closed=lambda: Plugin(hook), open=lambda: Plugin(hook, policy=Policy.OPEN))


@pytest.mark.parametrize(
    ("name", "settings", "version", "why"),
    [
        ("absent", "{}", 1, "no such plugin here"),
        ("p", '{"times":0}', 1, "times: Input should be greater than or equal to 1"),
        ("p", '{"wrod":"x"}', 1, "wrod: Extra inputs are not permitted"),
        ("p", "{}", 2, "version 2"),
        ("p", '{"word":"never"}', 1, "not with that word"),
    ],
)
def test_a_plugin_that_cannot_run_here_has_its_namespace_refused(
    name: str, settings: str, version: int, why: str
) -> None:
    async def test(scene: Scene) -> None:
        scene.enable(name, "pay-", settings, version=version)
        scene.enable(name, "pay-", settings, GROUP, version=version)
        await asyncio.sleep(0)
        verdict = scene.ask(produce("pay-t", "other"))
        assert isinstance(verdict, Replace)
        assert verdict.on_response is not None
        assert codes(verdict.on_response(answered("other"))) == {"pay-t": 19, "other": 0}
        asked = {"group_id": "pay-g", "topics": [{"name": "t", "partitions": [{"partition_index": 0}]}]}
        verdict = scene.ask(request(ApiKey.OFFSET_COMMIT, 8, asked))
        assert isinstance(verdict, Answer)
        assert scene.ask(commit("other")) is None
        status = scene.host.statuses()[0]
        assert (status.state, status.plugin, status.prefix) == ("failed", name, "pay-")
        assert status.reason is not None
        assert why in status.reason

    on_scene(test, p=lambda: Plugin(names_seen([]), policy=Policy.OPEN))


# ---- life ----


def test_a_plugin_that_lacks_something_here_cannot_be_enabled_so_and_goes_on_where_it_is() -> None:
    seen: list[Any] = []

    async def test(scene: Scene) -> None:
        settings = '{"word": "half"}'
        assert scene.host.check(TOPIC, "pay-", "p", settings, 1) == "half of it"
        assert scene.host.check(TOPIC, "pay-", "p", "{}", 1) is None
        scene.enable("p", "pay-", settings)
        await asyncio.sleep(0)
        assert scene.ask(produce("pay-a")) is None, "clients are served"
        assert seen == [("pay-", "pay-a")]
        (status,) = scene.host.statuses()
        assert (status.state, status.reason) == ("running", "half of it")

    on_scene(test, p=lambda: Plugin(names_seen(seen)))


def test_requests_wait_while_a_plugin_starts_and_other_settings_make_another() -> None:
    seen: list[Any] = []

    async def test(scene: Scene) -> None:
        plugin: Any = scene.host._plugins["p"]
        plugin.may_start.clear()
        scene.enable("p", "pay-", '{"word":"x"}')
        verdict = scene.ask(produce("pay-t"))
        assert isinstance(verdict, Hold)
        assert (scene.host.statuses()[0].state, seen) == ("starting", [])
        plugin.may_start.set()
        assert await verdict.verdict is None
        assert (scene.host.statuses()[0].state, len(seen)) == ("running", 1)
        scene.control.apply(ConfigurePlugin(TOPIC, "pay-", "p", '{"word":"y"}', 1))
        changes = scene.changes
        scene.namespace("log-")  # nothing of it changes
        await asyncio.sleep(0.01)
        assert scene.changes == changes
        assert [(work.scope.settings.word, work.stopped) for work in plugin.made] == [("x", True), ("y", False)]
        scene.control.apply(DeleteNamespace(TOPIC, "pay-"))
        await asyncio.sleep(0.01)
        assert plugin.made[1].stopped
        assert scene.host.statuses() == []

    on_scene(test, p=lambda: Plugin(names_seen(seen)))


class Later(Confirmer):
    """Confirms when it is told to."""

    name = "later"

    def __init__(self) -> None:
        self.end = 0
        self.acks: Acks | None = None

    def bound(self, acks: Acks) -> None:
        self.acks = acks

    def concerns(self, topic: str) -> bool:
        return True

    def confirmed_end(self, place: TopicPartition, epoch: int, transactional: bool) -> int | None:
        return self.end


def test_acks_of_a_namespace_wait_for_its_confirmer_also_when_it_is_disabled() -> None:
    async def test(scene: Scene) -> None:
        plugin: Any = scene.host._plugins["p"]
        later = Later()
        plugin.confirmers = (later,)
        scene.enable("p", "pay-")
        await asyncio.sleep(0)
        assert scene.ask(produce("other")) is None
        verdict = scene.ask(produce("pay-t"))
        assert isinstance(verdict, Replace)
        assert verdict.on_response is not None
        gate = verdict.on_response(answered("pay-t"))
        assert isinstance(gate, Gate)
        opened = asyncio.Event()
        gate.take(opened.set)
        scene.control.apply(DisablePlugin(TOPIC, "pay-", "p"))
        await asyncio.sleep(0.01)
        assert scene.host.hooks() == []
        assert not opened.is_set()
        assert not plugin.made[0].stopped
        assert not await scene.host.ended(TOPIC, "pay-", "p", 0)
        assert later.acks is not None
        later.end = 1
        later.acks.confirmed(("pay-t", 0))
        await asyncio.wait_for(opened.wait(), 5)
        assert await scene.host.ended(TOPIC, "pay-", "p", 5)
        assert plugin.made[0].stopped

    on_scene(test, p=lambda: Plugin())


def test_what_cannot_be_answered_closes() -> None:
    async def test(scene: Scene) -> None:
        scene.enable("p", "pay-", kind=GROUP)
        await asyncio.sleep(0)
        verdict = scene.ask(request(ApiKey.DESCRIBE_GROUPS, 5, {"groups": ["pay-g"]}))
        assert isinstance(verdict, Close)

    on_scene(test, p=lambda: Plugin(NamespaceHook(ApiKey.DESCRIBE_GROUPS, raises)))
