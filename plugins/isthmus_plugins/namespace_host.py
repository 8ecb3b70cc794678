"""Runs the plugins that are enabled for namespaces: ``namespace_plugins`` has their contract.

The control log says what is enabled. For each API that some hook wants there is one request hook of the process; it
finds the names in a request once, looks up whose they are, and calls what is enabled there. A name of which nobody
wants anything costs one look-up of bytes, an API that nobody wants nothing.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, cast

from pydantic import ValidationError

from isthmus_control.control_state import ControlState
from isthmus_control.lookup import Lookup
from isthmus_control.model import EnabledPlugin, NamespaceKey, ResourceType
from isthmus_plugins.api import (
    NEED_MORE,
    Answer,
    BrokerUnavailable,
    Close,
    Gate,
    Hold,
    Leave,
    PluginContext,
    Replace,
    Request,
    RequestHook,
    ResponseHook,
    Verdict,
    passed_on,
)
from isthmus_plugins.chain import Chain
from isthmus_plugins.confirmation import AckGate, Acks, Confirmer
from isthmus_plugins.held_answers import Partition
from isthmus_plugins.namespace_plugins import (
    Enabled,
    NamespaceHook,
    NamespacePlugin,
    NamespaceRequest,
    NamespaceResponse,
    Policy,
    Scope,
    Views,
)
from isthmus_plugins.plugin_operations import PluginOffer, PluginStatus
from isthmus_plugins.tasks import Tasks
from isthmus_protocol import peeks, resources
from isthmus_protocol.schema import ApiKey
from isthmus_protocol.wire import MalformedFrame, NeedMore

log = logging.getLogger("isthmus_plugins.namespaces")

START_S: Final = 10.0
"""How long a request waits for a plugin that is being started."""
CACHED_MAX: Final = 100_000
"""Names of one API whose hooks are remembered."""
CAUSE: Final = "plugin_failed"

NOT_ENOUGH_REPLICAS, COORDINATOR_LOAD_IN_PROGRESS, KAFKA_STORAGE_ERROR, UNKNOWN_SERVER_ERROR = 19, 14, 56, -1
CODES: Final = {
    ApiKey.PRODUCE: NOT_ENOUGH_REPLICAS,
    ApiKey.FETCH: KAFKA_STORAGE_ERROR,
    ApiKey.OFFSET_COMMIT: COORDINATOR_LOAD_IN_PROGRESS,
    ApiKey.TXN_OFFSET_COMMIT: COORDINATOR_LOAD_IN_PROGRESS,
    ApiKey.ADD_PARTITIONS_TO_TXN: COORDINATOR_LOAD_IN_PROGRESS,
}
"""What is answered where a plugin fails: what clients try again."""
GUARDED: Final = {
    ResourceType.TOPIC: (ApiKey.PRODUCE, ApiKey.FETCH),
    ResourceType.CONSUMER_GROUP: (ApiKey.OFFSET_COMMIT, ApiKey.TXN_OFFSET_COMMIT),
    ResourceType.PRINCIPAL: (),
}
"""What a plugin that cannot run is taken to look at: all that carries data."""

Key = tuple[NamespaceKey, str]
"""A namespace, and the plugin's name."""


@dataclass(eq=False, slots=True)
class Running:
    """One plugin at work for one namespace, or not able to be."""

    scope: Scope
    spec: EnabledPlugin
    policy: Policy = Policy.CLOSED
    enabled: Enabled | None = None
    error: str | None = None
    """Why it cannot run."""
    started: asyncio.Event = field(default_factory=asyncio.Event)
    place: int = 0
    """In the namespace's order."""
    hooks: list[_Bound] = field(default_factory=list)
    gates: list[AckGate] = field(default_factory=list)

    @property
    def namespace(self) -> NamespaceKey:
        return NamespaceKey(self.scope.type, self.scope.prefix)

    @property
    def title(self) -> str:
        return f"plugin {self.spec.name!r} of the {self.namespace}"


@dataclass(eq=False, slots=True)
class _Bound:
    """A hook of one that runs; without a hook it refuses."""

    running: Running
    hook: NamespaceHook
    rank: tuple[int, int] = (0, 0)
    """(Length of the prefix, place in the namespace's order): hooks are called in the order of these."""


class NamespaceHost:
    """All plugins that are enabled for namespaces of this cluster."""

    def __init__(
        self, context: PluginContext, plugins: Mapping[str, NamespacePlugin], on_hooks: Callable[[], None]
    ) -> None:
        """``plugins``: by name, those that this process has. ``on_hooks``: called when :meth:`hooks` are others."""
        self._context = context
        self._plugins = plugins
        self._on_hooks = on_hooks
        self._tasks = Tasks("namespace-plugins")
        self._lookup: Lookup | None = None
        self.running: dict[Key, Running] = {}
        self.failures: Counter[tuple[str, str]] = Counter()
        """By plugin and policy: how often a hook failed."""
        self._apis: dict[int, _Api] = {}
        self._gates: list[AckGate] = []
        self._compiled: dict[Key, tuple[EnabledPlugin, tuple[int, int]]] = {}
        """What these were made for."""

    def start(self) -> None:
        self._changed(self._context.control.state)
        self._context.control.subscribe(self._changed)

    async def stop(self) -> None:
        await self._tasks.close()
        for running in self.running.values():
            await self._close(running)

    @property
    def gates(self) -> Sequence[AckGate]:
        """Of all confirmers that are enabled now."""
        return self._gates

    def statuses(self) -> list[PluginStatus]:
        """What is enabled, as it runs here: by namespace, in its order."""
        ordered = sorted(self.running.values(), key=lambda each: (each.namespace, each.place))
        return [
            PluginStatus(
                plugin=each.spec.name,
                type=each.namespace.type,
                prefix=each.namespace.prefix,
                settings=json.loads(each.spec.settings),
                version=each.spec.version,
                policy=each.policy.value,
                state="failed" if each.error is not None else "running" if each.started.is_set() else "starting",
                reason=each.error,
                failures=sum(count for (name, _), count in self.failures.items() if name == each.spec.name),
            )
            for each in ordered
        ]

    def offers(self) -> list[PluginOffer]:
        """What namespaces can have here."""
        return [
            PluginOffer(
                plugin=name,
                about=plugin.about,
                types=sorted(plugin.types),
                version=plugin.version,
                policy=plugin.policy.value,
                settings_schema=plugin.settings.model_json_schema(),
            )
            for name, plugin in sorted(self._plugins.items())
        ]

    def schema_version(self, name: str) -> int:
        """Of the settings of a plugin that this process has; 1 for one that it has not."""
        plugin = self._plugins.get(name)
        return 1 if plugin is None else plugin.version

    def hooks(self) -> list[RequestHook]:
        """What the process has to have called for all that is enabled now, in this order."""
        return [
            *(RequestHook(key, api.on_request, whole=key != ApiKey.PRODUCE) for key, api in self._apis.items()),
            *(gate.hook() for gate in self._gates),
        ]

    # ---- what is enabled ----

    def _changed(self, state: ControlState) -> None:
        if state.lookup is self._lookup:
            return
        self._lookup = state.lookup
        wanted = {
            (namespace.key, spec.name): spec for namespace in state.namespaces.values() for spec in namespace.plugins
        }
        for key in [key for key, running in self.running.items() if wanted.get(key) != running.spec]:
            self._tasks.start("retire", self._end(self.running.pop(key)))
        for key, spec in wanted.items():
            if key not in self.running:
                self.running[key] = self._run(key[0], spec)
        self._compile(state)

    def check(self, kind: ResourceType, prefix: str, name: str, settings: str, version: int) -> str | None:
        """Why this process cannot run a plugin for a namespace; None: it can, unless it fails to start."""
        plugin = self._plugins.get(name)
        if plugin is None:
            known = ", ".join(sorted(self._plugins)) or "none"
            return f"there is no such plugin here: [plugins] enabled has {known} that namespaces can have"
        if kind not in plugin.types:
            return f"it is for namespaces of {' or '.join(sorted(each.value for each in plugin.types))}"
        if version != plugin.version:
            return f"its settings have version {version}, this proxy's plugin knows version {plugin.version}"
        try:
            checked = plugin.settings.model_validate(json.loads(settings))
        except ValidationError as error:
            return "; ".join(_said(each) for each in error.errors())
        try:
            plugin.enabled(Scope(kind, prefix, checked, self._context))
        except Exception as error:  # of a third party
            return f"{type(error).__name__}: {error}"
        return None

    def _run(self, namespace: NamespaceKey, spec: EnabledPlugin) -> Running:
        running = Running(Scope(*namespace, None, self._context), spec)
        running.error = self.check(*namespace, spec.name, spec.settings, spec.version)
        if running.error is None:
            plugin = self._plugins[spec.name]
            settings = plugin.settings.model_validate(json.loads(spec.settings))
            running.policy = plugin.policy
            running.scope = Scope(*namespace, settings, self._context)
            try:
                running.enabled = plugin.enabled(running.scope)
                hooks, confirmers = running.enabled.hooks(), running.enabled.confirmers()
            except Exception as error:  # of a third party: it fails closed, the others run
                log.exception("plugin cannot be enabled", extra={"plugin": running.title})
                running.error = f"{type(error).__name__}: {error}"
            else:
                running.hooks = [_Bound(running, hook) for hook in hooks]
                running.gates = [AckGate(self._context, _Scoped(each, running.scope)) for each in confirmers]
        if running.error is None:
            self._tasks.start("start", self._start(running))
        else:
            log.error("plugin cannot run, requests are refused", extra={"plugin": running.title, "why": running.error})
            running.hooks = [_Bound(running, NamespaceHook(key)) for key in GUARDED[namespace.type]]
            running.started.set()
        return running

    async def _start(self, running: Running) -> None:
        assert running.enabled is not None
        try:
            await running.enabled.start()
        except Exception as error:
            log.exception("plugin cannot be started", extra={"plugin": running.title})
            running.error = f"{type(error).__name__}: {error}"
        for gate in running.gates:
            gate.start()
        running.started.set()

    async def _end(self, running: Running) -> None:
        """Nothing new is asked of it; what waits for its confirmers goes on waiting."""
        await running.started.wait()
        for gate in running.gates:
            await gate.idle()
        await self._close(running)

    @staticmethod
    async def _close(running: Running) -> None:
        for gate in running.gates:
            await gate.stop()
        if running.enabled is not None:
            try:
                await running.enabled.stop()
            except Exception:
                log.exception("plugin not stopped", extra={"plugin": running.title})

    def _compile(self, state: ControlState) -> None:
        ranks = {
            (namespace.key, spec.name): (len(namespace.prefix), place)
            for namespace in state.namespaces.values()
            for place, spec in enumerate(namespace.plugins)
        }
        wanted = {key: (running.spec, ranks[key]) for key, running in self.running.items()}
        if wanted == self._compiled:
            return
        self._compiled = wanted
        ordered = sorted(self.running.items(), key=lambda each: (ranks[each[0]], each[0]))
        by_api: dict[int, list[_Bound]] = {}
        gates: list[AckGate] = []
        for key, running in ordered:
            running.place = ranks[key][1]
            gates += running.gates
            for bound in running.hooks:
                bound.rank = ranks[key]
                by_api.setdefault(bound.hook.api_key, []).append(bound)
        for api in self._apis.values():
            api.end()
        before, gates_before = self._apis.keys(), self._gates
        self._apis = {key: _Api(self, key, state.lookup, hooks) for key, hooks in by_api.items()}
        self._gates = gates
        if self._apis or before or gates != gates_before:
            self._on_hooks()

    # ---- calls ----

    def failed(self, running: Running, request: NamespaceRequest | None, why: str) -> Verdict:
        """What becomes of a request of which a hook failed."""
        self.failures[running.spec.name, running.policy] += 1
        if running.policy is Policy.OPEN and running.error is None:
            return None
        if request is None:
            return Close(f"{running.title} failed: {why}")
        code = CODES.get(ApiKey(request.api_key), UNKNOWN_SERVER_ERROR)
        try:
            return request.refuse(code, f"{running.title} failed: {why}", CAUSE)
        except ValueError:  # nothing in the answer could say so
            return Close(f"{running.title} failed: {why}")

    def context_name(self, topic_id: bytes) -> str | None:
        return self._context.known_topic_name(topic_id)

    async def resolve(self, topic_ids: Iterable[bytes]) -> None:
        """Read the names of topics. Raises BrokerUnavailable."""
        for topic_id in topic_ids:
            await self._context.topic_name(topic_id)


class _Api:
    """The hooks of one API, and which of them are for which names."""

    def __init__(self, host: NamespaceHost, api_key: int, lookup: Lookup, hooks: Iterable[_Bound]) -> None:
        self._host = host
        self._api_key = api_key
        self._lookup = lookup
        self._hooks: dict[NamespaceKey, list[_Bound]] = {}
        for bound in hooks:
            self._hooks.setdefault(bound.running.namespace, []).append(bound)
        self._known: dict[bytes, tuple[str, tuple[_Bound, ...]]] = {}
        """By what requests call a topic: its name, and who wants to see it."""
        self._groups: dict[bytes, tuple[str, tuple[_Bound, ...]]] = {}
        self._leave = Leave(float("inf"))
        self._wants_answers = api_key == ApiKey.FETCH and any(
            each.hook.on_response for bounds in self._hooks.values() for each in bounds
        )
        """Requests of a fetch session need not name its topics: what is in an answer counts."""

    def end(self) -> None:
        """Other hooks take the place of these."""
        self._leave.until = float("-inf")

    # ---- which hooks ----

    def on_request(self, request: Request) -> Verdict:
        """Call the hooks for the names in a request."""
        concerned: dict[_Bound, list[str]] = {}
        unknown: list[bytes] = []
        try:
            topics = self._topics(request)
            for raw, name in topics:
                if name is None:
                    unknown.append(raw)
                    continue
                for bound in self._wanted(self._known, ResourceType.TOPIC, raw, name):
                    concerned.setdefault(bound, []).append(name)
            find = resources.groups_in(request.api_key, request.version)
            for raw in () if find is None else find(request.frame):
                group = raw.decode("utf-8", "replace")
                for bound in self._wanted(self._groups, ResourceType.CONSUMER_GROUP, raw, group):
                    concerned.setdefault(bound, []).append(group)
        except NeedMore:
            return NEED_MORE
        if unknown:
            return Hold(self._resolved(request, unknown)) if request.whole else NEED_MORE
        if not concerned and not self._wants_answers:
            if len(topics) == 1:
                request.leave = self._leave
            return None
        if not request.whole:
            return NEED_MORE
        return self._called(request, concerned)

    def _topics(self, request: Request) -> list[tuple[bytes, str | None]]:
        """What a request calls its topics, and their names as far as they are known."""
        find = resources.topics_in(request.api_key, request.version)
        names, ids = ([], []) if find is None else find(request.frame)
        found: list[tuple[bytes, str | None]] = [(name, name.decode("utf-8", "replace")) for name in names]
        return found + [(topic_id, self._host.context_name(topic_id)) for topic_id in ids]

    def _wanted(
        self, known: dict[bytes, tuple[str, tuple[_Bound, ...]]], kind: ResourceType, raw: bytes, name: str
    ) -> tuple[_Bound, ...]:
        found = known.get(raw)
        if found is None or found[0] != name:
            if len(known) > CACHED_MAX:
                known.clear()
            found = known[raw] = name, tuple(self._of(kind, name))
        return found[1]

    def _of(self, kind: ResourceType, name: str) -> Iterator[_Bound]:
        for namespace in self._lookup.plugged(kind, name):
            yield from self._hooks.get(namespace.key, ())

    async def _resolved(self, request: Request, unknown: Iterable[bytes]) -> Verdict:
        try:
            await self._host.resolve(unknown)
        except BrokerUnavailable as error:
            return Close(f"topic ids cannot be resolved: {error}")
        if any(self._host.context_name(topic_id) is None for topic_id in unknown):
            return None  # the broker knows no such topic, either
        return self.on_request(request)

    # ---- calls ----

    def _called(self, request: Request, concerned: Mapping[_Bound, Sequence[str]]) -> Verdict:
        views = _LatestViews(self._host)
        ordered = sorted(concerned, key=lambda bound: bound.rank)
        calls: list[Callable[[Request], Verdict]] = [
            partial(self._call, bound, tuple(dict.fromkeys(concerned[bound])), views) for bound in ordered
        ]
        if self._wants_answers:
            calls.insert(0, lambda asked: Replace(asked.frame, partial(self._fetched, request.version)))
        return Chain(tuple(calls))(request)

    def _call(self, bound: _Bound, names: tuple[str, ...], latest: _LatestViews, request: Request) -> Verdict:
        running, hook = bound.running, bound.hook
        if not hook.versions[0] <= request.version <= hook.versions[1]:
            return None
        views = latest.of(request)
        if not running.started.is_set():
            return Hold(self._when_started(bound, names, latest, request))
        asked = NamespaceRequest(request, running.scope, names, views)
        if running.error is not None:
            return self._host.failed(running, asked, running.error)
        if hook.on_request is None:
            return self._with_answer(bound, names, views, request, None)
        if hook.limit_s is not None:
            return Hold(self._timed(bound, names, views, request, asked))
        try:
            verdict = cast(Verdict, hook.on_request(asked))
        except MalformedFrame:
            raise
        except Exception as error:
            log.exception("hook failed", extra={"plugin": running.title})
            verdict = self._host.failed(running, asked, f"{type(error).__name__}: {error}")
        return self._with_answer(bound, names, views, request, verdict)

    async def _when_started(
        self, bound: _Bound, names: tuple[str, ...], latest: _LatestViews, request: Request
    ) -> Verdict:
        try:
            async with asyncio.timeout(START_S):
                await bound.running.started.wait()
        except TimeoutError:
            asked = NamespaceRequest(request, bound.running.scope, names, latest.of(request))
            return self._host.failed(bound.running, asked, f"it has not started within {START_S:g} s")
        return self._call(bound, names, latest, request)

    async def _timed(
        self, bound: _Bound, names: tuple[str, ...], views: Views, request: Request, asked: NamespaceRequest
    ) -> Verdict:
        running, hook = bound.running, bound.hook
        assert hook.on_request is not None
        try:
            async with asyncio.timeout(hook.limit_s):
                verdict = await cast(Awaitable[Verdict], hook.on_request(asked))
        except TimeoutError:
            verdict = self._host.failed(running, asked, f"it took longer than {hook.limit_s:g} s")
        except Exception as error:
            log.exception("hook failed", extra={"plugin": running.title})
            verdict = self._host.failed(running, asked, f"{type(error).__name__}: {error}")
        return self._with_answer(bound, names, views, request, verdict)

    def _with_answer(
        self, bound: _Bound, names: tuple[str, ...], views: Views, request: Request, verdict: Verdict
    ) -> Verdict:
        """Have the hook see the answer, too, where there will be one of the broker's."""
        hook = bound.hook
        if hook.on_response is None or self._wants_answers or isinstance(verdict, (Answer, Close)):
            return verdict
        answered = partial(self._answered, bound, names, views, request.version)
        if verdict is None or verdict is NEED_MORE:
            return Replace(request.frame, answered)
        if isinstance(verdict, Hold):
            return Hold(self._behind_hold(verdict, bound, names, views, request))
        return Replace(verdict.frame, _both(verdict.on_response, answered), verdict.cause)

    async def _behind_hold(
        self, hold: Hold, bound: _Bound, names: tuple[str, ...], views: Views, request: Request
    ) -> Verdict:
        return self._with_answer(bound, names, views, request, await hold.verdict)

    def _answered(
        self, bound: _Bound, names: tuple[str, ...], views: Views, version: int, frame: bytes
    ) -> bytes | Gate:
        """Raises where the plugin fails closed: the connection ends, since the broker has done what was asked."""
        running, hook = bound.running, bound.hook
        assert hook.on_response is not None
        try:
            return hook.on_response(NamespaceResponse(self._api_key, version, names, frame, views))
        except MalformedFrame:
            raise
        except Exception as error:
            log.exception("hook failed", extra={"plugin": running.title})
            verdict = self._host.failed(running, None, f"{type(error).__name__}: {error}")
            if verdict is None:
                return frame
            raise

    def _fetched(self, version: int, frame: bytes) -> bytes | Gate:
        """The answer to a Fetch: each hook sees it that wants a topic in it, the last one first."""
        concerned: dict[_Bound, list[str]] = {}
        for raw, _ in peeks.fetch_response(version, frame)[-1]:
            name = self._host.context_name(raw) if peeks.topics_are_ids(ApiKey.FETCH, version) else raw.decode()
            if name is not None:
                for bound in self._wanted(self._known, ResourceType.TOPIC, raw, name):
                    if bound.hook.on_response is not None and bound.running.error is None:
                        concerned.setdefault(bound, []).append(name)
        answer: bytes | Gate = frame
        views = Views(_NO_REQUEST, lambda raw: self._host.context_name(raw) or raw.decode("utf-8", "replace"))
        for bound in sorted(concerned, key=lambda bound: bound.rank, reverse=True):
            answer = passed_on(partial(self._answered, bound, tuple(concerned[bound]), views, version), answer)
        return answer


class _LatestViews:
    """The views of a request, made anew where a hook has replaced it."""

    __slots__ = ("_frame", "_host", "_views")

    def __init__(self, host: NamespaceHost) -> None:
        self._host = host
        self._frame = b""
        self._views: Views | None = None

    def of(self, request: Request) -> Views:
        if self._views is None or self._frame is not request.frame:
            self._frame, self._views = request.frame, Views(request, partial(self._name, request))
        return self._views

    def _name(self, request: Request, raw: bytes) -> str:
        if peeks.topics_are_ids(request.api_key, request.version):
            return self._host.context_name(raw) or ""
        return raw.decode("utf-8", "replace")


class _Scoped(Confirmer):
    """A plugin's confirmer, for the topics of a namespace alone."""

    def __init__(self, confirmer: Confirmer, scope: Scope) -> None:
        self._confirmer = confirmer
        self._scope = scope
        self.name = confirmer.name
        self.limit_s = confirmer.limit_s
        self.lets_go = confirmer.lets_go

    @property
    def active(self) -> bool:  # type: ignore[override]
        return self._confirmer.active

    def bound(self, acks: Acks) -> None:
        self._confirmer.bound(acks)

    def concerns(self, topic: str) -> bool:
        return topic in self._scope and self._confirmer.concerns(topic)

    def leader_epoch(self, place: Partition) -> int:
        return self._confirmer.leader_epoch(place)

    def confirmed_end(self, place: Partition, epoch: int, transactional: bool) -> int | None:
        return self._confirmer.confirmed_end(place, epoch, transactional)


def _both(first: ResponseHook | None, second: ResponseHook) -> ResponseHook:
    """The plugin's own first: it knows what it has changed."""
    return second if first is None else lambda frame: passed_on(second, first(frame))


def _said(error: Any) -> str:
    where = ".".join(map(str, error["loc"]))
    return f"{where}: {error['msg']}" if where else str(error["msg"])


_NO_REQUEST: Final = Request(b"", True, ApiKey.FETCH, 0, 0, 0.0, cast(Any, None))
