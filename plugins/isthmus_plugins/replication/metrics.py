"""What replication shows to Prometheus of the states of links; parts add what is their own (``link.part``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.samples import Sample

from isthmus_control.model import LinkMode, Role
from isthmus_plugins.links import LinkStatus, PartitionStatus
from isthmus_plugins.replication.traffic import Place, Traffic


def link_families(
    statuses: Sequence[LinkStatus], connections: Callable[[str], Sequence[object]], traffic: Traffic
) -> Sequence[Metric]:
    """Families of all links, as their status has them; ``connections``: the live ones of a link."""
    connected = GaugeMetricFamily("isthmus_link_connections", "Live connections to peers", labels=("link",))
    heard = GaugeMetricFamily(
        "isthmus_link_heard_seconds", "Time since the peer cluster was last heard", labels=("link",)
    )
    synchronous = GaugeMetricFamily("isthmus_link_synchronous", "1 of a synchronous link", labels=("link",))
    link_state = GaugeMetricFamily("isthmus_link_state", "1 of the state that a link is in", labels=("link", "state"))
    states = GaugeMetricFamily(
        "isthmus_link_partitions", "Partitions by state", labels=("link", "role", "state", "reason")
    )
    batches = CounterMetricFamily(
        "isthmus_link_batches", "Batches that a link sent (leader) or appended (follower)", labels=("link", "role")
    )
    size = CounterMetricFamily("isthmus_link_bytes", "The bytes of those", labels=("link", "role"))
    verified = GaugeMetricFamily(
        "isthmus_link_verified_seconds",
        "At the follower: age of the oldest pass over both whole logs of a partition, once each had one",
        labels=("link",),
    )
    differing = GaugeMetricFamily(
        "isthmus_link_partitions_differing",
        "At the follower: partitions of which both clusters were found to hold something else",
        labels=("link",),
    )
    for status in statuses:
        synchronous.add_metric((status.link_name,), status.mode == LinkMode.SYNCHRONOUS)
        link_state.add_metric((status.link_name, status.state), 1)
        connected.add_metric((status.link_name,), len(connections(status.link_name)))
        if status.last_heard_seconds is not None:
            heard.add_metric((status.link_name,), status.last_heard_seconds)
        if status.verified_seconds is not None:
            verified.add_metric((status.link_name,), status.verified_seconds)
        if any(each.role == "follower" for each in status.partitions):
            found = sum(each.differs_at is not None for each in status.partitions)
            differing.add_metric((status.link_name,), found)
        counts = Counter((each.role, each.state, each.reason or "") for each in status.partitions)
        for labels, count in sorted(counts.items()):
            states.add_metric((status.link_name, *labels), count)
    traffic.keep({each.link_name for each in statuses}, {place for place, _ in _places(statuses)})
    for (link_name, role), total in sorted(traffic.totals().items()):
        batches.add_metric((link_name, role.value), total.batches)
        size.add_metric((link_name, role.value), total.bytes)
    return connected, heard, link_state, states, synchronous, batches, size, verified, differing


def partition_families(statuses: Sequence[LinkStatus], traffic: Traffic) -> Sequence[Metric]:
    """Families with series for each partition of each link; these are made when somebody reads them first, in whatever
    thread that is: ``statuses`` change no more."""
    place_labels = ("link", "topic", "partition", "role")
    lag = GaugeMetricFamily("isthmus_link_mirror_lag_offsets", "Offsets that the follower lacks", labels=place_labels)
    seconds = GaugeMetricFamily(
        "isthmus_link_mirror_lag_seconds", "Age of the oldest record that the follower lacks", labels=place_labels
    )
    unknown = GaugeMetricFamily(
        "isthmus_link_mirror_lag_unknown_seconds",
        "At the follower: since when the lag is not known",
        labels=place_labels,
    )
    state = GaugeMetricFamily(
        "isthmus_link_partition_state",
        "1 of the state that a partition is in, with the reason",
        labels=(*place_labels, "state", "reason"),
    )
    size = CounterMetricFamily(
        "isthmus_link_partition_bytes", "Bytes that were sent (leader) or appended (follower)", labels=place_labels
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
    equal = GaugeMetricFamily(
        "isthmus_link_equal_until_offset",
        "At the follower: all before it was equal when it was compared last, as both brokers hold it",
        labels=("link", "topic", "partition"),
    )

    def fill() -> None:
        for place, partition in _places(statuses):
            labels = (place.link, place.topic, str(place.partition), partition.role)
            state.add_metric((*labels, partition.state, partition.reason or ""), 1)
            if (counts := traffic.known(place)) is not None:
                size.add_metric(labels, counts.bytes)
            if partition.equal_until is not None:
                equal.add_metric(labels[:3], partition.equal_until)
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

    @cache
    def fault() -> Exception | None:
        """What keeps all of them from being made: half of them are none. They are made once, or not at all."""
        try:
            fill()
        except Exception as error:
            return error
        return None

    return [_Late(each, fault) for each in (lag, seconds, unknown, state, size, since, until, degraded, equal)]


class _Late(Metric):
    """A family whose samples are made when they are read first. ``fault`` makes them, and says what kept it from that,
    which is raised where they are read."""

    def __init__(self, family: Metric, fault: Callable[[], Exception | None]) -> None:
        super().__init__(family.name, family.documentation, family.type, family.unit)
        self._family, self._fault = family, fault

    @property
    def samples(self) -> list[Sample]:
        if (fault := self._fault()) is not None:
            raise fault
        return self._family.samples

    @samples.setter
    def samples(self, made: list[Sample]) -> None:
        """Metric's own are never any."""


def _places(statuses: Iterable[LinkStatus]) -> Iterator[tuple[Place, PartitionStatus]]:
    for status in statuses:
        for each in status.partitions:
            yield Place(status.link_name, Role(each.role), each.topic, each.partition), each
