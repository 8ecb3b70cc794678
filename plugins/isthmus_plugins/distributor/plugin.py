"""The distribution plugin: its hooks, and the distributors that this proxy runs."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from isthmus_control.control_state import ControlState
from isthmus_control.model import DistributionTree
from isthmus_plugins.api import RequestHook
from isthmus_plugins.distribution.document import TreeDocument
from isthmus_plugins.distribution.tree import TreeError
from isthmus_plugins.distributor.claims import Claims
from isthmus_plugins.distributor.distributor import Distributor
from isthmus_plugins.distributor.fetched_metadata import FetchedMetadata
from isthmus_plugins.distributor.group_offsets import GroupOffsets
from isthmus_plugins.distributor.operations import Operations, document_of
from isthmus_plugins.distributor.produced_flags import ProducedFlags
from isthmus_plugins.hookspecs import hookimpl
from isthmus_plugins.process import PluginContext
from isthmus_plugins.tasks import Tasks
from isthmus_plugins.trees import TreeOperations

log = logging.getLogger("isthmus_plugins.distributor")


class Parts:
    """Of the process that was started."""

    def __init__(self, context: PluginContext) -> None:
        self.context = context
        self.flags = ProducedFlags(context)
        self.metadata = FetchedMetadata()
        self.operations = Operations(context, lambda: self.distributors, lambda: self.group_offsets)
        self.distributors: dict[int, Distributor] = {}
        self.group_offsets: GroupOffsets | None = None
        """Where this proxy has the lowest level, and groups' offsets are distributed."""
        self._running: dict[int, asyncio.Task[None]] = {}
        self._offsets_running: asyncio.Task[None] | None = None
        self._tree: DistributionTree | None = None
        self._document: TreeDocument | None = None
        self._tasks = Tasks("distribution", context.supervision)
        self._claims = Claims(context, self._run_what_is_held)

    def start(self) -> None:
        self._changed(self.context.control.state)
        self.context.control.subscribe(self._changed)
        self._tasks.keep("claims", self._claims.keep)

    async def stop(self) -> None:
        await self._tasks.close()

    def _changed(self, state: ControlState) -> None:
        if state.tree is not self._tree:
            before, self._tree = self._tree, state.tree
            if before is None or state.tree is None or before.version != state.tree.version:
                self._use(state.tree)
            self.flags.distributed(state.tree, "" if self._document is None else self._document.tree.header)
        self._claims.control_changed()

    def _use(self, tree: DistributionTree | None) -> None:
        """Another version: its distributors begin anew."""
        for level in list(self._running):
            self._end(level)
        self._end_offsets()
        try:
            self._document = None if tree is None else document_of(tree)
        except TreeError as error:
            self._document = None
            log.error("tree not understood: nothing is distributed", extra={"error": str(error)})
        self.metadata.active = self._document is not None and bool(self._document.groups)

    def _run_what_is_held(self) -> None:
        held = self._claims.held if self._document is not None else frozenset()
        for level in self._running.keys() - held:
            self._end(level)
        for level in held - self._running.keys():
            assert self._document is not None
            assert self._tree is not None
            distributor = Distributor(self.context, self._document, self._tree.leaf, level, lambda: self._tree)
            self.distributors[level] = distributor
            self._running[level] = self._tasks.keep(f"level-{level}", distributor.run)
        if self._tree is None or self._tree.levels[0] not in held:
            self._end_offsets()
        elif self.group_offsets is None and self._document is not None and self._document.groups:
            self.group_offsets = GroupOffsets(self.context, self._document, self._tree.leaf, lambda: self._tree)
            self._offsets_running = self._tasks.keep("group-offsets", self.group_offsets.run)

    def _end_offsets(self) -> None:
        if self._offsets_running is not None:
            self._offsets_running.cancel()
        self._offsets_running = self.group_offsets = None

    def _end(self, level: int) -> None:
        self._running.pop(level).cancel()
        del self.distributors[level]


class DistributionPlugin:
    """Distributes this cluster's topics over a tree of clusters that all take writes."""

    _parts: Parts | None = None

    @property
    def parts(self) -> Parts:
        """Of the process that was started."""
        assert self._parts is not None
        return self._parts

    @hookimpl
    def isthmus_start(self, context: PluginContext) -> None:
        self._parts = Parts(context)
        self._parts.start()

    @hookimpl
    async def isthmus_stop(self) -> None:
        await self.parts.stop()

    @hookimpl
    def isthmus_request_hooks(self) -> Sequence[RequestHook]:
        return [*self.parts.flags.hooks(), *self.parts.metadata.hooks()]

    @hookimpl
    def isthmus_tree_operations(self) -> TreeOperations | None:
        return self._parts.operations if self._parts is not None else None

    @hookimpl
    def isthmus_metrics(self) -> Iterable[Metric]:
        yield from families(self.parts.distributors, self.parts.flags.taken_off)
        yield from offset_families(self.parts.group_offsets)


def families(distributors: Mapping[int, Distributor], taken_off: int) -> Iterable[Metric]:
    """Of the levels that this proxy distributes for."""
    distributing = GaugeMetricFamily(
        "isthmus_tree_distributing", "Whether the level is distributed now, and waits for nothing", labels=("level",)
    )
    lag = GaugeMetricFamily(
        "isthmus_tree_lag", "Offsets of committed records that the target was not given yet", labels=("level",)
    )
    unsettled = GaugeMetricFamily(
        "isthmus_tree_unsettled",
        "Offsets of what was given and is not known to be on all clusters of the target's side",
        labels=("level",),
    )
    left_out = GaugeMetricFamily(
        "isthmus_tree_partitions_left_out",
        "Partitions that are not distributed, or stand still at a message that the target refuses",
        labels=("level",),
    )
    given = CounterMetricFamily("isthmus_tree_messages_given", "Messages given to targets", labels=("level", "target"))
    refused = CounterMetricFamily(
        "isthmus_tree_messages_refused", "Messages that stay, since their flags cannot be read", labels=("level",)
    )
    lost = CounterMetricFamily(
        "isthmus_tree_offsets_lost", "Offsets that retention took before they were given", labels=("level",)
    )
    fill_left = GaugeMetricFamily(
        "isthmus_tree_fill_left", "Offsets that a target that is new is to get of what was there", labels=("level",)
    )
    for level, each in sorted(distributors.items()):
        name = [str(level)]
        positions, courses = each.positions, each.courses
        distributing.add_metric(name, each.waits is None)
        lag.add_metric(name, sum(max(end - positions.get(place, end), 0) for place, end in each.ends.items()))
        unsettled.add_metric(
            name, sum(position - courses[place].settled for place, position in positions.items() if place in courses)
        )
        left_out.add_metric(name, len(each.left_out))
        fill_left.add_metric(name, each.fill[0])
        for target, count in each.given.items():
            given.add_metric([*name, target], count)
        refused.add_metric(name, each.refused)
        lost.add_metric(name, each.lost)
    taken = CounterMetricFamily(
        "isthmus_tree_flags_taken_off", "Batches that clients produced with copy flags, which were taken off"
    )
    taken.add_metric([], taken_off)
    yield from (distributing, lag, unsettled, left_out, fill_left, given, refused, lost, taken)


def offset_families(offsets: GroupOffsets | None) -> Iterable[Metric]:
    """Of the proxy that distributes groups' committed offsets."""
    distributing = GaugeMetricFamily(
        "isthmus_tree_offsets_distributing", "Whether groups' committed offsets are distributed now"
    )
    lag = GaugeMetricFamily(
        "isthmus_tree_offsets_lag_seconds",
        "How late messages of other clusters may come here, as far as they have said",
    )
    margin = GaugeMetricFamily("isthmus_tree_offsets_margin_seconds", "The least margin of groups' times")
    sent = CounterMetricFamily("isthmus_tree_offsets_sent", "Times of groups that were told to other clusters")
    was_set = CounterMetricFamily(
        "isthmus_tree_offsets_set", "Offsets that were committed for groups of other clusters"
    )
    waiting = GaugeMetricFamily(
        "isthmus_tree_offsets_waiting", "Partitions of groups that are not told, or not set", labels=("reason",)
    )
    if offsets is not None:
        distributing.add_metric([], offsets.waits is None)
        found = offsets.distributor.lag()
        if found is not None:
            lag.add_metric([], found[0] / 1000)
        margin.add_metric([], offsets.margin_ms / 1000)
        sent.add_metric([], offsets.distributor.sent)
        was_set.add_metric([], offsets.committer.set)
        for code, count in Counter(each.code for _, _, each in offsets.waiting).items():
            waiting.add_metric([code], count)
    yield from (distributing, lag, margin, sent, was_set, waiting)


plugin = DistributionPlugin()
