"""The control state as REST shows it."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Iterable

from isthmus.admin.hiding import settings_for_who_asks
from isthmus.admin.models import (
    BrokerAddress,
    ConnectionCounts,
    EnabledPluginView,
    HeldConfigView,
    LimitsView,
    NamespaceMappingView,
    NamespaceView,
    OriginView,
    ProvenanceView,
    ProxyView,
    SourceEpochView,
    StatusView,
    TopicPartitionView,
    TopicView,
)
from isthmus.admin.services import AdminServices, ControlLogPort
from isthmus_control.control_state import ControlState
from isthmus_control.levels import plain_version
from isthmus_control.model import EnabledPlugin, FollowerTopic, Namespace, ProxyLease, Role, TopicHistory
from isthmus_control.origins import OriginRange, TopicOrigins
from isthmus_plugins.clock import monotonic


def waiting_for(control: ControlLogPort, offset: int) -> list[str]:
    """Names of the proxies that do not enforce the log up to ``offset`` yet, and may still let writes through."""
    return list(control.leases.waiting_for(offset, monotonic()))


def namespace_view(control: ControlLogPort, namespace: Namespace) -> NamespaceView:
    offset = namespace.reserved_at_offset
    waits = waiting_for(control, offset) if namespace.reserved and offset is not None else []
    changed_at = namespace.plugins_at_offset
    plugins_wait = waiting_for(control, changed_at) if namespace.plugins and changed_at is not None else []
    return NamespaceView(
        type=namespace.type,
        prefix=namespace.prefix,
        state="open" if not namespace.reserved else "reserving" if waits else "reserved",
        waiting_for=waits,
        reserved_reason=namespace.reserved_reason,
        informational=namespace.informational,
        consistency=namespace.demands.consistency,
        visibility=namespace.demands.visibility,
        degrade_after_ms=namespace.demands.degrade_after_ms or None,
        confirm=str(namespace.demands.confirm),
        stale_reads=namespace.stale_reads,
        created_ms=namespace.created_ms,
        plugins=[plugin_view(each, plugins_wait) for each in namespace.plugins],
        mappings=[
            NamespaceMappingView(link_name=link.name, role=mapping.role, remote=mapping.remote_prefix)
            for link, mapping in control.state.attachments(namespace.key)
        ],
    )


def namespace_views(control: ControlLogPort) -> list[NamespaceView]:
    return [namespace_view(control, namespace) for _, namespace in sorted(control.state.namespaces.items())]


def plugin_view(plugin: EnabledPlugin, waits: list[str]) -> EnabledPluginView:
    return EnabledPluginView(
        plugin=plugin.name,
        settings=settings_for_who_asks(json.loads(plugin.settings)),
        version=plugin.version,
        waiting_for=waits,
    )


def topic_view(state: ControlState, name: str) -> TopicView | None:
    """A topic that follows, or that the state has a history of: it did, or it is led."""
    follower, history = state.follower_topics.get(name), state.histories.get(name)
    origins = state.origins.get(name)
    if follower is None and history is None and origins is None:
        return None
    reason = follower.reason if follower else None
    return TopicView(
        topic=name,
        link_name=follower.link if follower else None,
        source_topic=follower.source_topic if follower else None,
        state=follower.state.value if follower else "led" if _is_led(state, name) else "independent",
        reason=reason.code if reason else None,
        message=reason.message if reason else None,
        topic_id=_topic_id(follower, history, origins),
        source_topic_id=follower.source_topic_id if follower else None,
        recorded_ms=follower.recorded_ms if follower else None,
        partitions=_partitions(state, history, origins),
    )


def _is_led(state: ControlState, topic: str) -> bool:
    return any(
        mapping.role is Role.LEADER and mapping.remote_name(topic) is not None
        for link in state.links.values()
        for mapping in link.topic_mappings
    )


def _topic_id(follower: FollowerTopic | None, history: TopicHistory | None, origins: TopicOrigins | None) -> str | None:
    if follower is not None and follower.topic_id is not None:
        return follower.topic_id
    known = origins or history
    return known.topic_id if known else None


def _partitions(
    state: ControlState, history: TopicHistory | None, origins: TopicOrigins | None
) -> list[TopicPartitionView]:
    known = origins or history
    if known is None:
        return []
    topic, topic_id = known.topic, known.topic_id
    received = history.partitions if history is not None and history.topic_id == topic_id else {}
    written = origins.partitions if origins is not None else {}
    return [
        TopicPartitionView(
            partition=partition,
            provenance=[
                ProvenanceView(
                    source_cluster_id=each.source_cluster_id,
                    source_topic_id=each.source_topic_id,
                    start_offset=each.start_offset,
                    end_offset=each.end_offset,
                    recorded_ms=each.recorded_ms,
                    epochs=[SourceEpochView(epoch=e.epoch, start_offset=e.start_offset) for e in each.epochs],
                )
                for each in received.get(partition, ())
            ],
            origins=[_origin(each) for each in state.origins_of(topic, topic_id, partition).ranges],
        )
        for partition in sorted({*received, *written})
    ]


def _origin(known: OriginRange) -> OriginView:
    return OriginView(
        cluster_id=known.origin.cluster_id,
        topic_id=known.origin.topic_id,
        term=known.origin.term or None,
        start_offset=known.start_offset,
        end_offset=known.end_offset,
        epochs=[SourceEpochView(epoch=epoch, start_offset=start) for epoch, start in known.epochs],
        epochs_missing_before=known.missing_before or None,
        since_ms=known.since_ms,
        ended=known.ended.value if known.ended else None,
        via_cluster_id=known.via or None,
        assumed=known.assumed,
    )


def topic_views(state: ControlState) -> list[TopicView]:
    names = sorted({*state.follower_topics, *state.histories})
    return [view for name in names if (view := topic_view(state, name)) is not None]


def proxy_views(state: ControlState, this: str) -> list[ProxyView]:
    return [
        *_proxies(sorted(state.proxies.values(), key=lambda lease: lease.name), "active", this),
        *_proxies(sorted(state.superseded.values(), key=lambda lease: lease.name), "superseded", this),
    ]


def _proxies(leases: Iterable[ProxyLease], standing: str, this: str) -> list[ProxyView]:
    return [
        ProxyView(
            name=lease.name,
            this=standing == "active" and lease.name == this,
            state="active" if standing == "active" else "superseded",
            incarnation=lease.incarnation,
            version=plain_version(lease.version),
            known_level=lease.known_level,
            brokers=[
                BrokerAddress(broker_id=claim.broker_id, address=f"{claim.host}:{claim.port}")
                for claim in lease.brokers
            ],
            all_brokers=lease.all_brokers,
            link_address=lease.link_address,
            lease_ms=lease.lease_ms,
            enforced_offset=lease.enforced_offset,
        )
        for lease in leases
    ]


def status_view(services: AdminServices) -> StatusView:
    state = services.control.state if services.control else None
    reasons = services.not_ready()
    gateway = services.gateway
    return StatusView(
        name=services.name,
        version=services.version,
        cluster_id=state.cluster_id if state else None,
        ready=not reasons,
        reasons=reasons,
        started_ms=services.started_ms,
        uptime_seconds=round(monotonic() - services.started, 3),
        process=services.describe(),
        control_log_offset=state.applied_offset if state else None,
        connections=None
        if gateway is None
        else ConnectionCounts(
            open=len(gateway.sessions), opened=gateway.connections_opened, closed=dict(gateway.closed_by_cause)
        ),
        limits=None
        if gateway is None
        else LimitsView(
            connections_max=gateway.limits.connections_max,
            in_flight_max=gateway.limits.in_flight_max,
            frame_bytes_max=gateway.limits.frame_bytes_max,
            file_descriptors_open=len(os.listdir("/proc/self/fd")),
            file_descriptors_max=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        ),
        namespaces=namespace_views(services.control) if services.control else [],
        held_configs=[
            HeldConfigView(name=held.name, value=held.value, former=held.former)
            for _, held in sorted(state.held_configs.items())
        ]
        if state
        else [],
        links=services.links.statuses() if services.links else [],
        proxies=proxy_views(state, services.name) if state else [],
    )
