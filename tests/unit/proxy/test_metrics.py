"""What a scrape says, read back with Prometheus' own parser."""

from __future__ import annotations

import asyncio
import re
import threading
import uuid
from collections.abc import Iterable
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from support.admin import make_gateway

from isthmus.metrics import LeaseView, MetricsSource, exposition, make_registry
from isthmus.session.dispatch import route_key
from isthmus.session.listener import Gateway
from isthmus_control.apply import apply
from isthmus_control.commands import Command, CreateNamespace
from isthmus_control.control_state import ControlState
from isthmus_control.model import ResourceType
from isthmus_plugins.tasks import Supervision
from isthmus_protocol.schema import ApiKey

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(source: MetricsSource) -> Samples:
    return scraped(make_registry(source))


def scraped(registry: CollectorRegistry) -> Samples:
    text, content_type = asyncio.run(exposition(registry, ""))
    assert content_type.startswith("text/plain")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def value(samples: Samples, name: str, **labels: str) -> float | None:
    return samples.get((name, tuple(sorted(labels.items()))))


@pytest.fixture
def gateway() -> Gateway:
    async def make() -> Gateway:
        return make_gateway()

    return asyncio.run(make())


def test_counters_of_sessions_are_told(gateway: Gateway) -> None:
    gateway.connections_opened = 5
    gateway.closed_by_cause["client closed"] = 3
    gateway.bytes_from_clients, gateway.bytes_from_brokers = 1000, 2000
    gateway.refused("reserved")
    samples = scrape(MetricsSource(gateway.supervision, gateway))
    assert value(samples, "isthmus_connections_opened_total") == 5
    assert value(samples, "isthmus_connections_closed_total", cause="client closed") == 3
    assert value(samples, "isthmus_received_bytes_total", peer="client") == 1000
    assert value(samples, "isthmus_received_bytes_total", peer="broker") == 2000
    assert value(samples, "isthmus_requests_refused_total", cause="reserved") == 1
    assert value(samples, "isthmus_connections_max") == gateway.limits.connections_max
    assert value(samples, "process_open_fds") is not None


def test_gates_are_told(gateway: Gateway) -> None:
    gateway.gates.waiting = 3
    gateway.gates.time.observe(0.003)
    samples = scrape(MetricsSource(gateway.supervision, gateway))
    assert value(samples, "isthmus_gated_answers") == 3
    assert value(samples, "isthmus_gate_time_seconds_bucket", le="0.002048") == 0
    assert value(samples, "isthmus_gate_time_seconds_bucket", le="0.004096") == 1
    assert value(samples, "isthmus_gate_time_seconds_count") == 1


def test_requests_are_told_by_api_version_and_handling(gateway: Gateway) -> None:
    produce = gateway.routes[route_key(ApiKey.PRODUCE, 9)]
    produce.requests, produce.decoded = 10, 4
    samples = scrape(MetricsSource(gateway.supervision, gateway))
    assert value(samples, "isthmus_requests_total", api="produce", version="9", handling="decoded") == 4
    assert value(samples, "isthmus_requests_total", api="produce", version="9", handling="opaque") == 6
    assert value(samples, "isthmus_requests_total", api="produce", version="8", handling="opaque") is None


def test_broker_and_proxy_time_are_apart_and_counted_once_for_all_versions(gateway: Gateway) -> None:
    for version in (8, 9):
        route = gateway.routes[route_key(ApiKey.PRODUCE, version)]
        route.broker_time.observe(0.003)
        route.proxy_time.observe(0.00002)
    # A version newer than the proxy's has a route, and so histograms, of its own.
    newest = max(key & 0xFFFF for key in gateway.routes if key >> 16 == ApiKey.API_VERSIONS)
    for key in (newest, newest + 1):
        gateway.routes.setdefault(
            route_key(ApiKey.API_VERSIONS, key), gateway.unknown_route(route_key(ApiKey.API_VERSIONS, newest + 1))
        ).proxy_time.observe(0.001)
    samples = scrape(MetricsSource(gateway.supervision, gateway))
    assert value(samples, "isthmus_broker_time_seconds_count", api="produce") == 2
    assert value(samples, "isthmus_broker_time_seconds_sum", api="produce") == pytest.approx(0.006)
    assert value(samples, "isthmus_proxy_time_seconds_sum", api="produce") == pytest.approx(0.00004)
    assert value(samples, "isthmus_broker_time_seconds_bucket", api="produce", le="0.002048") == 0
    assert value(samples, "isthmus_broker_time_seconds_bucket", api="produce", le="0.004096") == 2
    assert value(samples, "isthmus_proxy_time_seconds_count", api="api_versions") == 2
    assert value(samples, "isthmus_broker_time_seconds_count", api="fetch") is None


def test_control_state_and_lease_are_told() -> None:
    state = ControlState("cluster-a")
    for offset, reserved in enumerate((True, False, False)):
        body = CreateNamespace(ResourceType.TOPIC, f"n{offset}-", reserved)
        state, _ = apply(state, offset, Command(str(uuid.uuid4()), 1, "test", offset - 1, body))
    samples = scrape(MetricsSource(Supervision(), control_state=lambda: state, lease=lambda: LeaseView(True, 12.5)))
    assert value(samples, "isthmus_control_log_offset") == 2
    assert value(samples, "isthmus_control_log_level") == 0
    assert value(samples, "isthmus_control_log_not_understood") == 0
    assert value(samples, "isthmus_namespaces", type="topic", reserved="true") == 1
    assert value(samples, "isthmus_namespaces", type="topic", reserved="false") == 2
    assert value(samples, "isthmus_vouching") == 1
    assert value(samples, "isthmus_lease_remaining_seconds") == 12.5
    lost = scrape(MetricsSource(Supervision(), lease=lambda: LeaseView(False, reason="no lease")))
    assert value(lost, "isthmus_vouching") == 0
    assert value(lost, "isthmus_lease_remaining_seconds") is None


def test_background_work_that_fails_is_counted() -> None:
    supervision = Supervision()
    supervision.failed("a loop", "leader-end/reconcile", RuntimeError("injected"), 0.0)
    supervision.failed("a loop", "leader-end/reconcile", RuntimeError("injected"), 1.0)
    samples = scrape(MetricsSource(supervision))
    assert value(samples, "isthmus_task_failures_total", task="leader-end/reconcile") == 2
    assert value(samples, "isthmus_tasks_failing") == 1
    supervision.well("a loop")
    samples = scrape(MetricsSource(supervision))
    assert value(samples, "isthmus_task_failures_total", task="leader-end/reconcile") == 2
    assert value(samples, "isthmus_tasks_failing") == 0


def test_parts_that_are_not_up_are_absent() -> None:
    names = {name for name, _ in scrape(MetricsSource(Supervision()))}
    assert {name for name in names if name.startswith("isthmus_")} == {"isthmus_tasks_failing"}
    assert "process_cpu_seconds_total" in names


def test_plugins_tell_their_own_and_a_failing_one_hides_nothing(gateway: Gateway) -> None:
    def plugins() -> Iterable[Metric]:
        family = CounterMetricFamily("isthmus_link_batches", "Batches", labels=["link"])
        family.add_metric(["a-to-b"], 7)
        yield family

    assert (
        value(scrape(MetricsSource(Supervision(), plugin_metrics=plugins)), "isthmus_link_batches_total", link="a-to-b")
        == 7
    )

    def failing() -> Iterable[Metric]:
        yield from plugins()
        raise RuntimeError("a plugin's bug")

    samples = scrape(MetricsSource(gateway.supervision, gateway, plugin_metrics=failing))
    assert value(samples, "isthmus_plugin_metrics_failures_total") == 1
    assert value(samples, "isthmus_connections_opened_total") == 0


def test_what_a_plugin_makes_as_it_is_read_hides_nothing_either() -> None:
    """It failed the whole scrape. Of families that are made together it counts once."""

    class Late(CounterMetricFamily):
        @property
        def samples(self) -> list[Sample]:
            raise RuntimeError("a plugin's bug")

        @samples.setter
        def samples(self, _: list[Sample]) -> None: ...

    def plugins() -> Iterable[Metric]:
        return [Late("isthmus_many", "Many"), Late("isthmus_more", "More"), GaugeMetricFamily("isthmus_one", "One", 1)]

    registry = make_registry(MetricsSource(Supervision(), plugin_metrics=plugins))
    for before in (0, 1):
        samples = scraped(registry)
        assert value(samples, "isthmus_one") == 1
        assert value(samples, "isthmus_many_total") is None
        assert value(samples, "isthmus_plugin_metrics_failures_total") == before


def test_series_of_thousands_of_partitions_are_not_made_on_the_loop() -> None:
    """A scrape of 6,000 partitions took 0.3 s of it."""
    made: list[bool] = []

    class Late(CounterMetricFamily):
        @property
        def samples(self) -> list[Sample]:
            made.append(threading.current_thread() is threading.main_thread())
            return [Sample("isthmus_many_total", {}, 7)]

        @samples.setter
        def samples(self, _: list[Sample]) -> None: ...

    samples = scrape(MetricsSource(Supervision(), plugin_metrics=lambda: [Late("isthmus_many", "Many")]))
    assert value(samples, "isthmus_many_total") == 7
    assert made == [False]


def test_names_follow_prometheus_rules(gateway: Gateway) -> None:
    route = gateway.routes[route_key(ApiKey.FETCH, 12)]
    route.requests = 1
    route.broker_time.observe(0.1)
    route.proxy_time.observe(0.1)
    source = MetricsSource(
        gateway.supervision, gateway, lambda: ControlState("a"), lambda: LeaseView(True, 1.0), lambda: ()
    )
    families: list[Any] = list(make_registry(source).collect())
    own = [family for family in families if family.name.startswith("isthmus_")]
    assert len({family.name for family in own}) == len(own) > 15
    for family in own:
        assert re.fullmatch(r"isthmus(_[a-z]+)+", family.name)
        assert family.documentation
        assert not re.search(r"_(ms|millis|us|kb|mb|percent|count|total)(_|$)", family.name)
        assert family.type in ("counter", "gauge", "histogram")
