"""Takes requests to the hooks of namespaces, and their answers: which hooks are whose, in which order, and what fails.

For each API that some hook wants there is one :class:`ApiHooks`. It finds the names in a request once, looks up whose
they are, and calls what is enabled there. A name of which nobody wants anything costs one look-up of bytes.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final, Protocol, cast

from isthmus_control.lookup import Lookup
from isthmus_control.model import EnabledPlugin, NamespaceKey, ResourceType
from isthmus_plugins.api import (
    NEED_MORE,
    WITHOUT_RECORDS,
    Answer,
    Ask,
    Close,
    Gate,
    Hold,
    Leave,
    Replace,
    Request,
    ResponseHook,
    Verdict,
    passed_on,
)
from isthmus_plugins.aside import found_aside
from isthmus_plugins.chain import Chain
from isthmus_plugins.cluster import BrokerUnavailable
from isthmus_plugins.confirmation import AckGate
from isthmus_plugins.namespace_plugins import (
    Enabled,
    NamespaceHook,
    NamespaceRequest,
    NamespaceResponse,
    Policy,
    Scope,
    Views,
)
from isthmus_protocol import peeks, resources
from isthmus_protocol.elements import TooManyElements, at_most
from isthmus_protocol.schema import ApiKey
from isthmus_protocol.wire import MalformedFrame, NeedMore

log = logging.getLogger("isthmus_plugins.namespaces")

START_S: Final = 10.0
"""How long a request waits for a plugin that is being started."""
FETCHED_AT_ONCE: Final = 1_000
"""Topics and partitions of an answer that the loop goes through."""
CACHED_MAX: Final = 100_000
"""Names of one API whose hooks are remembered."""


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
    hooks: list[Bound] = field(default_factory=list)
    gates: list[AckGate] = field(default_factory=list)

    @property
    def namespace(self) -> NamespaceKey:
        return NamespaceKey(self.scope.type, self.scope.prefix)

    @property
    def title(self) -> str:
        return f"plugin {self.spec.name!r} of the {self.namespace}"


@dataclass(eq=False, slots=True)
class Bound:
    """A hook of one that runs; without a hook it refuses."""

    running: Running
    hook: NamespaceHook
    rank: tuple[int, int] = (0, 0)
    """(Length of the prefix, place in the namespace's order): hooks are called in the order of these."""


class Host(Protocol):
    """What has the plugins that are enabled."""

    def failed(self, running: Running, request: NamespaceRequest | None, why: str) -> Verdict:
        """What becomes of a request of which a hook failed."""

    def context_name(self, topic_id: bytes) -> str | None:
        """A topic's name by its id, if it is known already."""

    async def resolve(self, topic_ids: Iterable[bytes]) -> None:
        """Read the names of topics. Raises BrokerUnavailable."""


class ApiHooks:
    """The hooks of one API, and which of them are for which names."""

    def __init__(self, host: Host, api_key: int, lookup: Lookup, hooks: Iterable[Bound]) -> None:
        self._host = host
        self._api_key = api_key
        self._lookup = lookup
        self._hooks: dict[NamespaceKey, list[Bound]] = {}
        for bound in hooks:
            self._hooks.setdefault(bound.running.namespace, []).append(bound)
        self._known: dict[bytes, tuple[str, tuple[Bound, ...]]] = {}
        """By what requests call a topic: its name, and who wants to see it."""
        self._groups: dict[bytes, tuple[str, tuple[Bound, ...]]] = {}
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
        concerned: dict[Bound, list[str]] = {}
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
        self, known: dict[bytes, tuple[str, tuple[Bound, ...]]], kind: ResourceType, raw: bytes, name: str
    ) -> tuple[Bound, ...]:
        found = known.get(raw)
        if found is None or found[0] != name:
            if len(known) > CACHED_MAX:
                known.clear()
            found = known[raw] = name, tuple(self._of(kind, name))
        return found[1]

    def _of(self, kind: ResourceType, name: str) -> Iterator[Bound]:
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

    def _called(self, request: Request, concerned: Mapping[Bound, Sequence[str]]) -> Verdict:
        views = _LatestViews(self._host)
        ordered = sorted(concerned, key=lambda bound: bound.rank)
        calls: list[Callable[[Request], Verdict]] = [
            partial(self._call, bound, tuple(dict.fromkeys(concerned[bound])), views) for bound in ordered
        ]
        if self._wants_answers:
            calls.insert(0, lambda asked: Replace(asked.frame, partial(self._fetched, request.version)))
        return Chain(tuple(calls))(request)

    def _call(self, bound: Bound, names: tuple[str, ...], latest: _LatestViews, request: Request) -> Verdict:
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
        self, bound: Bound, names: tuple[str, ...], latest: _LatestViews, request: Request
    ) -> Verdict:
        try:
            async with asyncio.timeout(START_S):
                await bound.running.started.wait()
        except TimeoutError:
            asked = NamespaceRequest(request, bound.running.scope, names, latest.of(request))
            why = f"it has not started within {START_S:g} s"
            log.warning("hook failed", extra={"plugin": bound.running.title, "error": why})
            return self._host.failed(bound.running, asked, why)
        return self._call(bound, names, latest, request)

    async def _timed(
        self, bound: Bound, names: tuple[str, ...], views: Views, request: Request, asked: NamespaceRequest
    ) -> Verdict:
        running, hook = bound.running, bound.hook
        assert hook.on_request is not None
        try:
            async with asyncio.timeout(hook.limit_s):
                verdict = await cast(Awaitable[Verdict], hook.on_request(asked))
        except TimeoutError:
            why = f"it took longer than {hook.limit_s:g} s"
            log.warning("hook failed", extra={"plugin": running.title, "error": why})
            verdict = self._host.failed(running, asked, why)
        except Exception as error:
            log.exception("hook failed", extra={"plugin": running.title})
            verdict = self._host.failed(running, asked, f"{type(error).__name__}: {error}")
        return self._with_answer(bound, names, views, request, verdict)

    def _with_answer(
        self, bound: Bound, names: tuple[str, ...], views: Views, request: Request, verdict: Verdict
    ) -> Verdict:
        """Have the hook see the answer, too, where there will be one of the broker's."""
        hook = bound.hook
        if hook.on_response is None or self._wants_answers or isinstance(verdict, (Answer, Close)):
            return verdict
        answered = partial(self._answered, bound, names, views, request.version)
        if verdict is None or verdict is NEED_MORE or verdict is WITHOUT_RECORDS:
            return Replace(request.frame, answered)
        if isinstance(verdict, Hold):
            return Hold(self._behind_hold(verdict, bound, names, views, request))
        if isinstance(verdict, Ask):
            then = verdict.then
            return replace(verdict, then=lambda told: self._with_answer(bound, names, views, request, then(told)))
        return Replace(verdict.frame, _both(verdict.on_response, answered), verdict.cause)

    async def _behind_hold(
        self, hold: Hold, bound: Bound, names: tuple[str, ...], views: Views, request: Request
    ) -> Verdict:
        return self._with_answer(bound, names, views, request, await hold.verdict)

    def _answered(self, bound: Bound, names: tuple[str, ...], views: Views, version: int, frame: bytes) -> bytes | Gate:
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
        """The answer to a Fetch, of whose topics many are looked for in the thread."""
        try:
            with at_most(FETCHED_AT_ONCE):
                topics = peeks.fetched_topics(version, frame)
        except TooManyElements:
            find = partial(peeks.fetched_topics, version)
            return found_aside(find, partial(self._fetched_of, version, frame), frame)
        return self._fetched_of(version, frame, topics)

    def _fetched_of(self, version: int, frame: bytes, topics: Iterable[bytes]) -> bytes | Gate:
        """Each hook sees it that wants a topic in it, the last one first."""
        concerned: dict[Bound, list[str]] = {}
        for raw in topics:
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

    def __init__(self, host: Host) -> None:
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


def _both(first: ResponseHook | None, second: ResponseHook) -> ResponseHook:
    """The plugin's own first: it knows what it has changed."""
    return second if first is None else lambda frame: passed_on(second, first(frame))


_NO_REQUEST: Final = Request(b"", True, ApiKey.FETCH, 0, 0, 0.0, cast(Any, None))
