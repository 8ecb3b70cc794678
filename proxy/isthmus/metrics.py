"""What Prometheus is shown, made from the counters that sessions keep anyway.

Nothing here runs for a request: the hot path adds to plain integers (:class:`~isthmus.session.dispatch.Route`,
:class:`~isthmus.histogram.Histogram`, :class:`~isthmus.session.listener.Gateway`), and a scrape turns them into
families. Names follow Prometheus' rules: base units, ``_total``, ``_seconds``, ``_bytes``. docs list them by the tables
here.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from isthmus.histogram import Histogram
from isthmus_protocol.schema import ApiKey

if TYPE_CHECKING:
    from isthmus.audit_topic import AuditTopic
    from isthmus.data_directory import DataDirectory
    from isthmus.session.dispatch import Route
    from isthmus.session.gated_answers import GateCounts
    from isthmus.session.listener import Gateway
    from isthmus_control.control_state import ControlState
    from isthmus_control.replica import Unsigned
    from isthmus_plugins.confirmation import AckGate
    from isthmus_plugins.tasks import Supervision

log = logging.getLogger("isthmus.metrics")


@dataclass(frozen=True, slots=True)
class LeaseView:
    """Whether this proxy may vouch for writes, as of now."""

    vouching: bool
    remaining_s: float | None = None
    """Until the lease runs out if nothing renews it; None: there is none."""
    reason: str | None = None
    """Why it does not vouch."""


@dataclass(slots=True)
class MetricsSource:
    """Where the numbers come from. Parts that the process does not have yet are None, and their families absent."""

    supervision: Supervision
    gateway: Gateway | None = None
    control_state: Callable[[], ControlState] | None = None
    lease: Callable[[], LeaseView] | None = None
    plugin_metrics: Callable[[], Iterable[Metric]] | None = None
    """All plugins' families (the hook ``isthmus_metrics``)."""
    ack_gates: Callable[[], Sequence[AckGate]] = tuple
    throttled_s: Mapping[tuple[str, int], float] = field(default_factory=dict)
    """By a broker's address and API."""
    data: DataDirectory | None = None
    plugin_failures: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """By plugin and what became of the request, how often a hook of a namespace failed."""
    unsigned: Callable[[], Unsigned] | None = None
    audit: AuditTopic | None = None
    admin_refused: Mapping[str, int] = field(default_factory=dict)
    """Requests of the admin listener that came to no route, by their errors' code."""
    reloads: Mapping[tuple[str, str], int] = field(default_factory=dict)
    """By what is made of files, and what came of it, how often they were read anew."""


class ProxyCollector(Collector):
    """Makes the metric families of one proxy at each scrape."""

    def __init__(self, source: MetricsSource) -> None:
        self._source = source
        self._plugin_failures = 0

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering must not collect before the process has its parts."""
        return ()

    def collect(self) -> Iterator[Metric]:
        source = self._source
        yield from _tasks(source.supervision)
        if source.gateway is not None:
            yield from _connections(source.gateway)
            yield from _requests(source.gateway.routes.values())
            yield from _gates(source.gateway.gates)
            yield _unconfirmed(source.ack_gates())
            yield _failures(source.plugin_failures)
        yield _throttled(source.throttled_s)
        refused = {(code,): count for code, count in source.admin_refused.items()}
        text = "Requests to the admin listener that were refused before anything was looked at, by code"
        yield _counter("isthmus_admin_requests_refused", text, ("code",), refused)
        text = "Certificates, keys and tokens whose files were read anew, by what is made of them, and what came of it"
        yield _counter("isthmus_reloads", text, ("files", "outcome"), source.reloads)
        if source.audit is not None:
            yield from _audit(source.audit)
        if source.data is not None:
            yield from _data(source.data)
        if source.control_state is not None:
            yield from _control(source.control_state())
        if source.unsigned is not None:
            yield CounterMetricFamily(
                "isthmus_control_log_unsigned",
                "Records of the control log that did not count: written without the control key",
                source.unsigned().count,
            )
        if source.lease is not None:
            yield from _lease(source.lease())
        yield from self._plugins()

    def _plugins(self) -> Iterator[Metric]:
        if self._source.plugin_metrics is None:
            return
        failed = cache(self._note_failure)  # once for a scrape
        families: list[Metric] = []
        try:
            families += self._source.plugin_metrics()
        except Exception:  # a plugin's fault must not hide the proxy's own numbers
            failed()
        yield from (_PluginFamily(each, failed) for each in families)
        failures = CounterMetricFamily(
            "isthmus_plugin_metrics_failures", "Scrapes in which the metrics of plugins could not be made"
        )
        failures.add_metric([], self._plugin_failures)
        yield failures

    def _note_failure(self) -> None:
        self._plugin_failures += 1
        log.exception("plugin metrics failed")


class _PluginFamily(Metric):
    """A plugin's family, whose samples may be made when they are read. Where that fails it has none, ``failed`` is
    called, and the next scrape tells it."""

    def __init__(self, family: Metric, failed: Callable[[], None]) -> None:
        super().__init__(family.name, family.documentation, family.type, family.unit)
        self._family, self._failed = family, failed

    @property
    def samples(self) -> list[Sample]:
        try:
            return self._family.samples
        except Exception:
            self._failed()
            return []

    @samples.setter
    def samples(self, made: list[Sample]) -> None:
        """Metric's own are never any."""


def make_registry(source: MetricsSource) -> CollectorRegistry:
    """A registry of the process' own: nothing that a library registers globally is in it."""
    registry = CollectorRegistry()
    registry.register(ProxyCollector(source))
    ProcessCollector(registry=registry)
    return registry


async def exposition(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """A scrape and its content type; OpenMetrics where ``accept`` asks for it.

    Families are made on the loop, and written in a thread of its own: thousands of partitions have megabytes of text.
    """
    encode, content_type = choose_encoder(accept)
    return await asyncio.to_thread(encode, _Collected(list(registry.collect()))), content_type


class _Collected(CollectorRegistry):
    """Families as they were."""

    def __init__(self, families: Sequence[Metric]) -> None:
        super().__init__()
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return iter(self._families)


def _connections(gateway: Gateway) -> Iterator[Metric]:
    opened = CounterMetricFamily("isthmus_connections_opened", "Client connections accepted")
    opened.add_metric([], gateway.connections_opened)
    yield opened
    closed = {(cause,): count for cause, count in gateway.closed_by_cause.items()}
    yield _counter("isthmus_connections_closed", "Client connections ended, by cause", ("cause",), closed)
    open_now = GaugeMetricFamily(
        "isthmus_connections_open",
        "Client connections now, by broker (-1: bootstrap) and state of the session",
        labels=["broker", "state"],
    )
    counts = Counter((session.client.broker_id, session.state.value) for session in gateway.sessions)
    for (broker, state), count in sorted(counts.items()):
        open_now.add_metric([str(broker), state], count)
    yield open_now
    yield _gauge(
        "isthmus_connections_max", "Client connections beyond which new ones are closed", gateway.limits.connections_max
    )
    kept = gateway.queued_bytes.kept + gateway.strangers_bytes.kept
    yield _gauge("isthmus_queued_bytes", "Bytes of clients' requests that are kept until they are whole", kept)
    yield _gauge(
        "isthmus_queued_waiting",
        "Clients that are not read until there is room for one",
        gateway.queued_bytes.waiting + gateway.strangers_bytes.waiting,
    )
    received = CounterMetricFamily(
        "isthmus_received_bytes", "Bytes read from clients and from brokers", labels=["peer"]
    )
    received.add_metric(["client"], gateway.bytes_from_clients)
    received.add_metric(["broker"], gateway.bytes_from_brokers)
    yield received
    text = "Requests that the proxy refused, whole or in part, by cause"
    refused = {(cause,): count for cause, count in gateway.refused_by_cause.items()}
    yield _counter("isthmus_requests_refused", text, ("cause",), refused)


def _requests(routes: Iterable[Route]) -> Iterator[Metric]:
    requests = CounterMetricFamily(
        "isthmus_requests",
        "Requests by API and version; decoded: a plugin looked into it, opaque: it streamed through",
        labels=["api", "version", "handling"],
    )
    # Versions of an API share their histograms, and an API may have more than one pair: each is counted once.
    broker: dict[str, dict[int, Histogram]] = {}
    proxy: dict[str, dict[int, Histogram]] = {}
    for route in routes:
        if route.requests:
            version = str(route.version)
            requests.add_metric([route.api, version, "decoded"], route.decoded)
            requests.add_metric([route.api, version, "opaque"], route.requests - route.decoded)
        broker.setdefault(route.api, {})[id(route.broker_time)] = route.broker_time
        proxy.setdefault(route.api, {})[id(route.proxy_time)] = route.proxy_time
    yield requests
    yield _histogram(
        "isthmus_broker_time_seconds", "From forwarding a request to the first bytes of the broker's answer", broker
    )
    yield _histogram(
        "isthmus_proxy_time_seconds",
        "Spent by the proxy on bytes read at once whose last request or answer is of this API",
        proxy,
    )


def _histogram(name: str, text: str, by_api: dict[str, dict[int, Histogram]]) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, text, labels=["api"])
    for api, histograms in sorted(by_api.items()):
        total = Histogram()
        for histogram in histograms.values():
            total.counts = [left + right for left, right in zip(total.counts, histogram.counts, strict=True)]
            total.seconds_sum += histogram.seconds_sum
        if total.total:
            family.add_metric([api], total.prometheus_buckets(), total.seconds_sum)
    return family


def _gates(gates: GateCounts) -> Iterator[Metric]:
    yield _gauge("isthmus_gated_answers", "Answers that the broker has given and that wait at a gate", gates.waiting)
    family = HistogramMetricFamily("isthmus_gate_time_seconds", "From the broker's answer to the opening of its gate")
    family.add_metric([], gates.time.prometheus_buckets(), gates.time.seconds_sum)
    yield family


def _unconfirmed(gates: Iterable[AckGate]) -> Metric:
    family = CounterMetricFamily(
        "isthmus_acks_unconfirmed", "Acks that went out although not confirmed in time", labels=("confirmer",)
    )
    for gate in gates:
        family.add_metric((gate.confirmer.name,), gate.held.unconfirmed)
    return family


def _failures(failures: Mapping[tuple[str, str], int]) -> Metric:
    text = "Requests of which a namespace's plugin failed; closed: refused, open: they went on"
    return _counter("isthmus_plugin_failures", text, ("plugin", "policy"), failures)


def _tasks(supervision: Supervision) -> Iterator[Metric]:
    text = "Failures of background work, which begins anew after a while"
    failures = {(name,): count for name, count in supervision.failures.items()}
    yield _counter("isthmus_task_failures", text, ("task",), failures)
    yield _gauge(
        "isthmus_tasks_failing", "Background work that fails now: its latest run failed", len(supervision.failing)
    )


def _throttled(throttled_s: Mapping[tuple[str, int], float]) -> Metric:
    text = "For how long quotas of the cluster kept this proxy's own requests waiting, by broker and API"
    seconds = {(address, ApiKey(api_key).name.lower()): each for (address, api_key), each in throttled_s.items()}
    return _counter("isthmus_cluster_throttled_seconds", text, ("broker", "api"), seconds)


def _audit(audit: AuditTopic) -> Iterator[Metric]:
    yield _gauge("isthmus_audit_lines_waiting", "Audit lines that the topic does not have yet", audit.waiting)
    text = "Audit lines that are in the log alone, since too many waited for the topic"
    yield CounterMetricFamily("isthmus_audit_lines_left_out", text, audit.left_out)


def _data(data: DataDirectory) -> Iterator[Metric]:
    sizes = GaugeMetricFamily("isthmus_data_bytes", "Files in the data directory, by its directories", labels=["what"])
    for name, size in sorted(data.sizes.items()):
        sizes.add_metric([name], size)
    yield sizes
    if data.free is not None:
        yield _gauge("isthmus_data_free_bytes", "What the disk of the data directory has left", data.free)


def _control(state: ControlState) -> Iterator[Metric]:
    yield _gauge(
        "isthmus_control_log_offset", "Offset up to which this proxy has applied the control log", state.applied_offset
    )
    yield _gauge("isthmus_control_log_level", "Feature level of the control log", state.level)
    yield _gauge(
        "isthmus_control_log_not_understood",
        "Records of newer proxies for which this one leaves something alone: upgrade it",
        len(state.beyond),
    )
    namespaces = GaugeMetricFamily(
        "isthmus_namespaces",
        "Namespaces of the cluster, by type and whether they are reserved",
        labels=["type", "reserved"],
    )
    counts = Counter((str(each.type), "true" if each.reserved else "false") for each in state.namespaces.values())
    for (kind, reserved), count in sorted(counts.items()):
        namespaces.add_metric([kind, reserved], count)
    yield namespaces
    yield _gauge("isthmus_links", "Links of the cluster", sum(link.drill is None for link in state.links.values()))
    enforced = GaugeMetricFamily(
        "isthmus_proxy_enforced_offset",
        "Offset of the control log up to which each proxy of the cluster says that it acts on it",
        labels=["proxy"],
    )
    for name, lease in sorted(state.proxies.items()):
        enforced.add_metric([name], lease.enforced_offset)
    yield enforced


def _lease(lease: LeaseView) -> Iterator[Metric]:
    yield _gauge("isthmus_vouching", "1 while this proxy has a lease and serves writes", int(lease.vouching))
    if lease.remaining_s is not None:
        yield _gauge(
            "isthmus_lease_remaining_seconds", "Until this proxy's lease runs out if not renewed", lease.remaining_s
        )


def _counter(name: str, text: str, labels: Sequence[str], counts: Mapping[Any, float]) -> CounterMetricFamily:
    """``counts`` by the values of the labels, as tuples of text."""
    family = CounterMetricFamily(name, text, labels=labels)
    for values, count in sorted(counts.items()):
        family.add_metric(values, count)
    return family


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=value)
