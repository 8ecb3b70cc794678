"""What replication shows to Prometheus of the states of links; parts add what is their own (``link.part``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from prometheus_client.core import GaugeMetricFamily, Metric

from isthmus_control.model import LinkMode
from isthmus_plugins.links import LinkStatus


def link_families(statuses: Iterable[LinkStatus], connections: Callable[[str], Sequence[object]]) -> Sequence[Metric]:
    """Families of all links, as their status has them; ``connections``: the live ones of a link."""
    lag = GaugeMetricFamily(
        "isthmus_link_mirror_lag_offsets",
        "Offsets that the follower lacks",
        labels=("link", "topic", "partition", "role"),
    )
    seconds = GaugeMetricFamily(
        "isthmus_link_mirror_lag_seconds",
        "Age of the oldest record that the follower lacks",
        labels=("link", "topic", "partition", "role"),
    )
    unknown = GaugeMetricFamily(
        "isthmus_link_mirror_lag_unknown_seconds",
        "At the follower: since when the lag is not known",
        labels=("link", "topic", "partition", "role"),
    )
    connected = GaugeMetricFamily("isthmus_link_connections", "Live connections to peers", labels=("link",))
    heard = GaugeMetricFamily(
        "isthmus_link_heard_seconds", "Time since the peer cluster was last heard", labels=("link",)
    )
    since = GaugeMetricFamily(
        "isthmus_link_sync_since_timestamp_seconds",
        "Since when a partition of a synchronous link is In-Sync or Out-Of-Sync",
        labels=("link", "topic", "partition", "state"),
    )
    until = GaugeMetricFamily(
        "isthmus_link_sync_until_timestamp_seconds",
        "At the target: until when a partition of a synchronous link is known to be, or to have been, In-Sync",
        labels=("link", "topic", "partition"),
    )
    degraded = GaugeMetricFamily(
        "isthmus_link_sync_degraded_since_timestamp_seconds",
        "Since when transactional and strict producers are acked without a partition's other side",
        labels=("link", "topic", "partition"),
    )
    synchronous = GaugeMetricFamily("isthmus_link_synchronous", "1 of a synchronous link", labels=("link",))
    states = GaugeMetricFamily(
        "isthmus_link_partitions", "Partitions by state", labels=("link", "role", "state", "reason")
    )
    for status in statuses:
        synchronous.add_metric((status.link_name,), status.mode == LinkMode.SYNCHRONOUS)
        connected.add_metric((status.link_name,), len(connections(status.link_name)))
        if status.last_heard_seconds is not None:
            heard.add_metric((status.link_name,), status.last_heard_seconds)
        counts = Counter((each.role, each.state, each.reason or "") for each in status.partitions)
        for labels_, count in sorted(counts.items()):
            states.add_metric((status.link_name, *labels_), count)
        for partition in status.partitions:
            labels = (status.link_name, partition.topic, str(partition.partition), partition.role)
            if partition.partition_mirror_lag is not None:
                lag.add_metric(labels, partition.partition_mirror_lag)
            if partition.lag_seconds is not None:
                seconds.add_metric(labels, partition.lag_seconds)
            if partition.lag_unknown_seconds is not None:
                unknown.add_metric(labels, partition.lag_unknown_seconds)
            if partition.sync is not None and partition.sync.since_ms is not None:
                since.add_metric((*labels[:3], partition.sync.state), partition.sync.since_ms / 1000)
            if partition.sync is not None and partition.sync.degraded_since_ms is not None:
                degraded.add_metric(labels[:3], partition.sync.degraded_since_ms / 1000)
            if partition.sync is not None and partition.sync.until_ms is not None:
                until.add_metric(labels[:3], partition.sync.until_ms / 1000)
    return lag, seconds, unknown, connected, heard, states, synchronous, since, until, degraded
