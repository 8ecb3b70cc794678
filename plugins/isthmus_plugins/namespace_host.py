"""Runs the plugins that are enabled for namespaces: ``namespace_plugins`` has their contract.

The control log says what is enabled; it is started, asked for its hooks, and stopped here. Requests come to hooks
through ``namespace_dispatch``: one request hook of the process for each API that some hook wants.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from pydantic import ValidationError

from isthmus_control.control_state import ControlState
from isthmus_control.lookup import Lookup
from isthmus_control.model import EnabledPlugin, NamespaceKey, ResourceType
from isthmus_plugins.api import Close, RequestHook, Verdict
from isthmus_plugins.cluster import TopicPartition
from isthmus_plugins.confirmation import AckGate, Acks, Confirmer
from isthmus_plugins.namespace_dispatch import ApiHooks, Bound, Running
from isthmus_plugins.namespace_plugins import (
    NamespaceHook,
    NamespacePlugin,
    NamespaceRequest,
    Policy,
    Scope,
)
from isthmus_plugins.plugin_operations import PluginOffer, PluginStatus
from isthmus_plugins.process import PluginContext
from isthmus_plugins.tasks import Tasks
from isthmus_protocol.error_codes import (
    COORDINATOR_LOAD_IN_PROGRESS,
    KAFKA_STORAGE_ERROR,
    NOT_ENOUGH_REPLICAS,
    UNKNOWN_SERVER_ERROR,
)
from isthmus_protocol.schema import ApiKey

log = logging.getLogger("isthmus_plugins.namespaces")

CAUSE: Final = "plugin_failed"

CODES: Final = {
    ApiKey.PRODUCE: NOT_ENOUGH_REPLICAS,
    ApiKey.FETCH: KAFKA_STORAGE_ERROR,
    ApiKey.OFFSET_COMMIT: COORDINATOR_LOAD_IN_PROGRESS,
    ApiKey.TXN_OFFSET_COMMIT: COORDINATOR_LOAD_IN_PROGRESS,
    ApiKey.ADD_PARTITIONS_TO_TXN: COORDINATOR_LOAD_IN_PROGRESS,
}
"""What is answered where a plugin fails: what clients try again."""
CLIENTS_WORDS: Final = "a plugin of the proxy has failed: ask its operator"
"""What clients are told of it: which one, for which namespace, and why, is told to operators."""
GUARDED: Final = {
    ResourceType.TOPIC: (ApiKey.PRODUCE, ApiKey.FETCH),
    ResourceType.CONSUMER_GROUP: (ApiKey.OFFSET_COMMIT, ApiKey.TXN_OFFSET_COMMIT),
    ResourceType.PRINCIPAL: (),
}
"""What a plugin that cannot run is taken to look at: all that carries data."""

Key = tuple[NamespaceKey, str]
"""A namespace, and the plugin's name."""


class NamespaceHost:
    """All plugins that are enabled for namespaces of this cluster."""

    def __init__(
        self, context: PluginContext, plugins: Mapping[str, NamespacePlugin], on_hooks: Callable[[], None]
    ) -> None:
        """``plugins``: by name, those that this process has. ``on_hooks``: called when :meth:`hooks` are others."""
        self._context = context
        self._plugins = plugins
        self._on_hooks = on_hooks
        self._tasks = Tasks("namespace-plugins", context.supervision)
        self._lookup: Lookup | None = None
        self.running: dict[Key, Running] = {}
        self._ending: dict[Key, set[asyncio.Task[None]]] = {}
        """Those that were enabled, and go on until what waits for them has gone out."""
        self.failures: Counter[tuple[str, str]] = Counter()
        """By plugin and policy: how often a hook failed."""
        self._apis: dict[int, ApiHooks] = {}
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
                reason=each.error if each.enabled is None else each.error or each.enabled.lacks,
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
            self._retire(key)
        for key, spec in wanted.items():
            if key not in self.running:
                self.running[key] = self._run(key[0], spec)
        self._compile(state)

    def check(self, kind: ResourceType, prefix: str, name: str, settings: str, version: int) -> str | None:
        """Why a plugin is not to be enabled for a namespace; None: this process can run all of it."""
        refused = self._refused(kind, prefix, name, settings, version)
        if refused is not None:
            return refused
        plugin = self._plugins[name]
        checked = plugin.settings.model_validate(json.loads(settings))
        return plugin.enabled(Scope(kind, prefix, checked, self._context)).lacks

    def _refused(self, kind: ResourceType, prefix: str, name: str, settings: str, version: int) -> str | None:
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
        running.error = self._refused(*namespace, spec.name, spec.settings, spec.version)
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
                if running.enabled.lacks is not None:
                    log.warning("plugin lacks something", extra={"plugin": running.title, "why": running.enabled.lacks})
                running.hooks = [Bound(running, hook) for hook in hooks]
                running.gates = [AckGate(self._context, _Scoped(each, running.scope)) for each in confirmers]
        if running.error is None:
            self._tasks.start("start", self._start(running))
        else:
            log.error("plugin cannot run, requests are refused", extra={"plugin": running.title, "why": running.error})
            running.hooks = [Bound(running, NamespaceHook(key)) for key in GUARDED[namespace.type]]
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

    def _retire(self, key: Key) -> None:
        task = self._tasks.start("retire", self._end(self.running.pop(key)))
        self._ending.setdefault(key, set()).add(task)
        task.add_done_callback(partial(self._retired, key))

    def _retired(self, key: Key, task: asyncio.Task[None]) -> None:
        self._ending[key].discard(task)
        if not self._ending[key]:
            del self._ending[key]

    async def ended(self, kind: ResourceType, prefix: str, name: str, timeout_s: float) -> bool:
        """Whether a plugin that is enabled for a namespace no more has ended here, within so long: no ack waits for it,
        and it has stopped."""
        ending = self._ending.get((NamespaceKey(kind, prefix), name))
        if not ending:
            return True
        _, left = await asyncio.wait(ending, timeout=timeout_s)
        return not left

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
        by_api: dict[int, list[Bound]] = {}
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
        self._apis = {key: ApiHooks(self, key, state.lookup, hooks) for key, hooks in by_api.items()}
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
            return request.refuse(code, CLIENTS_WORDS, CAUSE)
        except ValueError:  # nothing in the answer could say so
            return Close(f"{running.title} failed: {why}")

    def context_name(self, topic_id: bytes) -> str | None:
        return self._context.known_topic_name(topic_id)

    async def resolve(self, topic_ids: Iterable[bytes]) -> None:
        """Read the names of topics. Raises BrokerUnavailable."""
        await self._context.topic_names(tuple(topic_ids))


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

    def leader_epoch(self, place: TopicPartition) -> int:
        return self._confirmer.leader_epoch(place)

    def has_led(self, place: TopicPartition, broker_id: int, since: float) -> bool:
        return self._confirmer.has_led(place, broker_id, since)

    def confirmed_end(self, place: TopicPartition, epoch: int, transactional: bool) -> int | None:
        return self._confirmer.confirmed_end(place, epoch, transactional)


def _said(error: Any) -> str:
    where = ".".join(map(str, error["loc"]))
    return f"{where}: {error['msg']}" if where else str(error["msg"])
