"""The distribution plugin: its hooks, and the distributors that this proxy runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from isthmus_control.control_state import ControlState
from isthmus_control.model import DistributionTree
from isthmus_plugins.api import RequestHook
from isthmus_plugins.distribution.document import TreeDocument
from isthmus_plugins.distribution.tree import TreeError
from isthmus_plugins.distributor.claims import Claims
from isthmus_plugins.distributor.distributor import Distributor
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
        self.operations = Operations(context, lambda: self.distributors)
        self.distributors: dict[int, Distributor] = {}
        self._running: dict[int, asyncio.Task[None]] = {}
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
        try:
            self._document = None if tree is None else document_of(tree)
        except TreeError as error:
            self._document = None
            log.error("tree not understood: nothing is distributed", extra={"error": str(error)})

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
        return self.parts.flags.hooks()

    @hookimpl
    def isthmus_tree_operations(self) -> TreeOperations | None:
        return self._parts.operations if self._parts is not None else None

    @hookimpl
    def isthmus_metrics(self) -> Iterable[Metric]:
        return families(self.parts.distributors, self.parts.flags.taken_off)


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
        "isthmus_tree_partitions_left_out", "Partitions that are not distributed", labels=("level",)
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


plugin = DistributionPlugin()
