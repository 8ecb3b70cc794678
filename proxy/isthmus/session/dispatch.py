"""What happens to a request and its answer, looked up in a table that is compiled at start and on each change.

pluggy registers hooks; calling them through pluggy would cost more than the rest of the hot path. So the hooks are
asked once for what they want to see, and :func:`compile_routes` makes one :class:`Route` for each API and version. An
API that nobody asked for has a route with nothing in it: its frames stream through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Final, Protocol

from isthmus.histogram import Histogram
from isthmus_plugins.api import Answer, Request, RequestHook, ResponseHook, Tap, TapNote, Verdict, tap_answer_bytes
from isthmus_plugins.aside import answered_by_elements, answered_by_size
from isthmus_plugins.chain import Chain
from isthmus_protocol import addresses, api_versions, peeks, schema
from isthmus_protocol.addresses import AddressMap
from isthmus_protocol.locate import Locator
from isthmus_protocol.plain_answers import pass_plain_produce
from isthmus_protocol.schema import ApiKey

WRITES: Final = frozenset(
    {
        ApiKey.PRODUCE,
        ApiKey.METADATA,  # it may create topics
        ApiKey.CREATE_TOPICS,
        ApiKey.DELETE_TOPICS,
        ApiKey.CREATE_PARTITIONS,
        ApiKey.DELETE_RECORDS,
        ApiKey.ALTER_CONFIGS,
        ApiKey.INCREMENTAL_ALTER_CONFIGS,
        ApiKey.ADD_PARTITIONS_TO_TXN,
        ApiKey.ADD_OFFSETS_TO_TXN,
        ApiKey.TXN_OFFSET_COMMIT,
        ApiKey.END_TXN,
        ApiKey.WRITE_TXN_MARKERS,
        ApiKey.OFFSET_COMMIT,
        ApiKey.OFFSET_DELETE,
        ApiKey.DELETE_GROUPS,
        ApiKey.CONSUMER_GROUP_HEARTBEAT,  # it may make a group
        ApiKey.SHARE_GROUP_HEARTBEAT,
        ApiKey.STREAMS_GROUP_HEARTBEAT,
        ApiKey.ALTER_SHARE_GROUP_OFFSETS,
        ApiKey.DELETE_SHARE_GROUP_OFFSETS,
        ApiKey.CREATE_ACLS,
        ApiKey.DELETE_ACLS,
        ApiKey.ALTER_USER_SCRAM_CREDENTIALS,
        ApiKey.ALTER_CLIENT_QUOTAS,
        ApiKey.CREATE_DELEGATION_TOKEN,
    }
)
"""Requests that change what a namespace can hold: a fence waits for their answers.

JoinGroup is not among them: a broker makes the group at once, and answers when all members have come, which may take
minutes.
"""


_LISTING: Final = frozenset({ApiKey.FIND_COORDINATOR, ApiKey.DESCRIBE_CONFIGS})
"""Answers of which each element is looked at for addresses: thousands of them, of who asks about as many."""

PROXY_TIME_EACH: Final = 16
"""Of so many requests of an API and version, from the first one on, one has the proxy's own time taken."""


class ResponseStream(Protocol):
    """Rewrites one answer in successive chunks, without changing its length."""

    def feed(self, chunk: bytes) -> bytes:
        """What to send on for the next bytes."""

    def pass_on(self) -> int:
        """How many bytes come next that are to be sent on and not to be fed."""


class Route:
    """What happens to the requests of one API in one version, and how often it did."""

    __slots__ = (
        "acks",
        "api",
        "api_key",
        "broker_time",
        "decoded",
        "head_end",
        "is_write",
        "key",
        "looked_at",
        "note",
        "on_request",
        "on_response",
        "proxy_time",
        "pure",
        "requests",
        "scans_answers",
        "stream_response",
        "tap",
        "tap_bytes",
        "version",
        "whole",
    )

    def __init__(self, api_key: int, version: int, broker_time: Histogram, proxy_time: Histogram) -> None:
        self.api_key = api_key
        self.version = version
        self.key = route_key(api_key, version)
        self.api = ApiKey(api_key).name.lower()
        self.is_write = api_key in WRITES
        self.acks: Locator | None = None
        """Produce: finds its acks in a frame that starts at a position; raises NeedMore where too little is there."""
        self.looked_at = False
        """There is an ``acks`` or an ``on_request``."""
        self.head_end: Callable[[bytes, int], int | None] | None = None
        """Produce: up to where the bytes of a frame (which starts at a position) must be the same as those of another
        one for the same acks and, where there are hooks, the same only topic; None where there are several."""
        self.on_request: Callable[[Request], Verdict] | None = None
        self.whole = False
        """``on_request`` wants whole frames only."""
        self.pure = False
        """``on_request`` may be asked in another thread."""
        self.on_response: ResponseHook | None = None
        self.stream_response: Callable[[int], ResponseStream] | None = None
        self.tap: Tap | None = None
        """Notes each request and answer: see :meth:`tell`."""
        self.note: Callable[[TapNote], object] | None = None
        """The tap's: what is asked of a tap on the traffic path is found in one step."""
        self.scans_answers = False
        """The tap is to know all of an answer: of one to Fetch."""
        self.tap_bytes = tap_answer_bytes(self.key)
        """So many first bytes of an answer."""
        self.requests = 0
        self.decoded = 0
        """Requests that a hook looked into."""
        self.broker_time = broker_time
        """From forwarding to the answer's first bytes; shared by the API's versions."""
        self.proxy_time = proxy_time
        """Spent on a chunk of requests or answers that ends with this API, of one in PROXY_TIME_EACH."""

    def tell(self, tap: Tap | None) -> None:
        """Have this note each request and answer from here on; None: nobody."""
        self.tap = tap
        self.note = None if tap is None else tap.note
        self.scans_answers = tap is not None and self.api_key == ApiKey.FETCH

    def go_on_counting(self, before: Route) -> None:
        """This one takes the place of another."""
        self.requests, self.decoded = before.requests, before.decoded
        self.broker_time, self.proxy_time = before.broker_time, before.proxy_time


def route_key(api_key: int, version: int) -> int:
    """API key and version as they stand in a request's head, read as one unsigned number."""
    return api_key << 16 | version


def compile_routes(hooks: Iterable[RequestHook], address_map: AddressMap) -> dict[int, Route]:
    """The table of routes for the plugins' ``hooks``, in the order in which they were given."""
    hooks = list(hooks)
    routes: dict[int, Route] = {}
    for api_key, (lowest, highest) in api_versions.proxied().items():
        broker_time, proxy_time = Histogram(), Histogram()
        for version in range(lowest, highest + 1):
            route = Route(api_key, version, broker_time, proxy_time)
            _compile(route, [hook for hook in hooks if _wants(hook, route)], address_map)
            routes[route_key(api_key, version)] = route
    return routes


def _wants(hook: RequestHook, route: Route) -> bool:
    return hook.api_key == route.api_key and hook.versions[0] <= route.version <= hook.versions[1]


def _compile(route: Route, hooks: list[RequestHook], address_map: AddressMap) -> None:
    if route.api_key == ApiKey.PRODUCE:
        route.head_end = _only_topic_end(route.version) if hooks else _acks_end(route.version)
        route.acks = peeks.peek(ApiKey.PRODUCE, route.version, "request", ("acks",))
    if len(hooks) == 1:
        route.on_request = hooks[0].on_request
    elif hooks:
        route.on_request = Chain(tuple(hook.on_request for hook in hooks))
    route.whole = any(hook.whole for hook in hooks)
    route.pure = bool(hooks) and all(hook.pure for hook in hooks)
    route.looked_at = route.acks is not None or route.on_request is not None
    if route.api_key == ApiKey.API_VERSIONS:
        route.on_response = partial(api_versions.intersect, route.version)
        return
    rewrite = addresses.rewriter(route.api_key, route.version)
    if rewrite is not None:
        answered = answered_by_size if route.api_key in _LISTING else answered_by_elements
        look: ResponseHook = partial(answered, partial(rewrite, address_map))
        route.on_response = pass_plain_produce(route.version, look) if route.api_key == ApiKey.PRODUCE else look
        stream = addresses.stream_rewriter(route.api_key, route.version)
        if stream is not None:
            route.stream_response = partial(stream, address_map)


def _acks_end(version: int) -> Callable[[bytes, int], int | None]:
    locate = peeks.peek(ApiKey.PRODUCE, version, "request", ("acks@",))

    def end(frame: bytes, start: int) -> int | None:
        _, behind = locate(frame, start)
        return int(behind)

    return end


def _only_topic_end(version: int) -> Callable[[bytes, int], int | None]:
    locate = peeks.peek(ApiKey.PRODUCE, version, "request", (("topic_data", ("name|topic_id@",)),))

    def end(frame: bytes, start: int) -> int | None:
        topics = locate(frame, start)
        return int(topics[0][1]) if len(topics) == 1 else None

    return end


def newer_api_versions_route() -> Route:
    """The route of ApiVersions requests that are newer than the proxy: answered by the proxy (KIP-511)."""
    _, newest = api_versions.proxied()[ApiKey.API_VERSIONS]
    route = Route(ApiKey.API_VERSIONS, newest + 1, Histogram(), Histogram())
    route.whole = True
    route.looked_at = True
    route.on_request = lambda request: Answer(
        api_versions.unsupported_version_answer(request.correlation_id), "unsupported_api_versions"
    )
    return route


def describe_key(key: int) -> str:
    """A route key for a person, known or not."""
    api_key, version = key >> 16, key & 0xFFFF
    known = schema.supported().get(api_key)
    name = ApiKey(api_key).name.lower() if known else f"API key {api_key}"
    return f"{name} version {version}"
