"""What operators have done with the tree, and what they are shown of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from operator import itemgetter
from typing import Final

from isthmus_control.codec import canonical_json
from isthmus_control.commands import ApplyTree, Body, ChooseTarget, LeaveTree
from isthmus_control.model import DistributionTree
from isthmus_control.outcome import Rejected
from isthmus_plugins.cluster import BrokerUnavailable
from isthmus_plugins.distribution.copy_flags import bit, mask
from isthmus_plugins.distribution.document import TreeDocument, read_document, written
from isthmus_plugins.distribution.plan import as_json, as_text, plan
from isthmus_plugins.distribution.targets import target_of, wrong_targets
from isthmus_plugins.distribution.tree import TreeError, change
from isthmus_plugins.distributor.distributor import Distributor
from isthmus_plugins.distributor.group_offsets import GroupOffsets
from isthmus_plugins.links import OperationError
from isthmus_plugins.process import PluginContext
from isthmus_plugins.trees import (
    AppliedTree,
    ApplyTreeRequest,
    ChooseTargetRequest,
    DistributedPartition,
    DistributorStatus,
    OffsetsStatus,
    TreePlan,
    TreeStatus,
    WaitingOffset,
    plan_of,
)

NO_TREE: Final = "this cluster is in no tree: isthmus tree apply FILE"


def document_of(tree: DistributionTree) -> TreeDocument:
    """The document that the control log has. Raises TreeError: a version of before took what this one does not."""
    return read_document(tree.document)


class Operations:
    """``distributors``: those that this proxy runs, by level. ``offsets``: of groups, where it distributes these."""

    def __init__(
        self,
        context: PluginContext,
        distributors: Callable[[], Mapping[int, Distributor]],
        offsets: Callable[[], GroupOffsets | None] = lambda: None,
    ) -> None:
        self._context = context
        self._distributors = distributors
        self._offsets = offsets

    def status(self) -> TreeStatus:
        """The tree of this cluster, and its distributors as this proxy knows them."""
        known = self._known()
        document = document_of(known)
        return TreeStatus(
            plan=self._plan(document, known.leaf),
            distributors=[self._status(known, document, level) for level in known.levels],
            offsets=self._offsets_status(known, document),
        )

    async def apply(self, request: ApplyTreeRequest) -> AppliedTree:
        """Have this cluster be a leaf of the next version of a tree."""
        known = self._context.control.state.tree
        before = None if known is None else document_of(known)
        try:
            document = self._read(request.document, before)
        except TreeError as error:
            raise OperationError("INVALID", "; ".join(error.problems), 422) from error
        leaf = document.leaf_of(self._context.cluster_id)
        if leaf is None:
            has = ", ".join(f"{name}: {each.cluster_id}" for name, each in document.clusters.items())
            raise OperationError(
                "INVALID", f"this cluster, {self._context.cluster_id}, is not in the tree, which has {has}", 422
            )
        if known is not None and leaf != known.leaf:
            raise OperationError("CONFLICT", f"this cluster is called {known.leaf} in its tree: it keeps its name")
        levels = tuple(above.level for above in document.tree.above(leaf))
        text = canonical_json(written(document)).decode()
        body = ApplyTree(document.tree.version, leaf, document.topics, levels, text)
        if not request.dry_run:
            await self._append(body)
        return AppliedTree(
            before=None if known is None else known.version,
            dry_run=request.dry_run,
            plan=self._plan(document, leaf),
        )

    @staticmethod
    def _read(text: str, before: TreeDocument | None) -> TreeDocument:
        """Raises TreeError, OperationError."""
        document = read_document(text, None if before is None else before.tree)
        if before is None or document == before:
            return document
        changed = change(before.tree, document.tree)
        if changed.added or changed.removed:
            names = ", ".join([*changed.added, *changed.removed])
            raise OperationError(
                "NOT_SUPPORTED",
                f"{names}: clusters of a tree stay in this version of the proxies. Make the tree with all of them",
                422,
            )
        for name, cluster in document.clusters.items():
            if cluster.cluster_id != before.clusters[name].cluster_id:
                raise TreeError([f"clusters.{name}: it is cluster {before.clusters[name].cluster_id}, and stays that"])
        return document

    async def choose_target(self, cluster: str, level: int, request: ChooseTargetRequest) -> TreeStatus:
        """Have the distributor of a level write to another leaf. ``cluster``: what this one is called."""
        known = self._known()
        if cluster != known.leaf:
            raise OperationError(
                "CONFLICT", f"this is cluster {known.leaf} of the tree: ask a proxy of {cluster} (--profile)"
            )
        if request.leaf is not None:
            chosen = {(cluster, level): request.leaf}
            for problem in wrong_targets(document_of(known).tree, chosen):
                raise OperationError("INVALID", problem, 422)
        await self._append(ChooseTarget(known.version, level, request.leaf, request.give_up))
        return self.status()

    async def go_back(self, group: str) -> TreeStatus:
        """Have a group go on here where other clusters say, also where it went on by itself."""
        known = self._known()
        document = document_of(known)
        running = self._offsets()
        if running is None:
            status = self._offsets_status(known, document)
            if status is None:
                raise OperationError("INVALID", "no groups' offsets are distributed: `groups` in the tree's file", 422)
            raise OperationError("CONFLICT", f"proxy {status.proxy} distributes groups' offsets: ask that one")
        if not await running.committer.go_back(group):
            raise OperationError("NOT_FOUND", f"no other cluster has said how far group {group} has read", 404)
        return self.status()

    async def leave(self) -> None:
        """Distribute nothing from here any more."""
        await self._append(LeaveTree(self._known().version))

    def _known(self) -> DistributionTree:
        known = self._context.control.state.tree
        if known is None:
            raise OperationError("NOT_FOUND", NO_TREE, 404)
        return known

    async def _append(self, body: Body) -> None:
        try:
            outcome = await self._context.control.append(body)
        except BrokerUnavailable as error:
            raise OperationError(
                "CONTROL_LOG_UNAVAILABLE", f"the control log has not confirmed the change: {error}", 503
            ) from error
        if isinstance(outcome, Rejected):
            raise OperationError(outcome.code.told, outcome.message)

    @staticmethod
    def _plan(document: TreeDocument, leaf: str) -> TreePlan:
        planned = plan(document.tree, document.targets)
        return plan_of(
            as_json(document.tree, planned),
            topics=list(document.topics),
            exactly_once=document.exactly_once,
            leaf=leaf,
            drawing=as_text(document.tree, planned),
        )

    def _offsets_status(self, known: DistributionTree, document: TreeDocument) -> OffsetsStatus | None:
        if not document.groups:
            return None
        proxy = self._proxy(known.levels[0])
        status = OffsetsStatus(
            groups=list(document.groups),
            margin_ms=document.margin_ms,
            proxy=proxy,
            state="Unclaimed" if proxy is None else "Elsewhere",
        )
        running = self._offsets()
        if running is None:
            return status
        waits, lag = running.waits, running.distributor.lag()
        reason = waits or running.warning
        return status.model_copy(
            update={
                "state": "Distributing" if waits is None else "Waiting",
                "reason_code": None if reason is None else reason.code,
                "reason": None if reason is None else reason.message,
                "lag_ms": None if lag is None else lag[0],
                "sent": running.distributor.sent,
                "set": running.committer.set,
                "waiting": [
                    WaitingOffset(
                        group=key.group,
                        topic=key.topic,
                        partition=key.partition,
                        origin=None if said is None else said.origin,
                        time_ms=None if said is None else said.time,
                        reason_code=why.code,
                        reason=why.message,
                    )
                    for key, said, why in sorted(running.waiting, key=itemgetter(0))
                ],
            }
        )

    def _proxy(self, level: int) -> str | None:
        """Which one has a level."""
        state = self._context.control.state
        holder = state.distributors.get(level)
        return next((each.name for each in state.proxies.values() if each.incarnation == holder), None)

    def _status(self, known: DistributionTree, document: TreeDocument, level: int) -> DistributorStatus:
        targets = dict(document.targets)
        if level in known.chosen:
            targets[known.leaf, level] = known.chosen[level]
        target = target_of(document.tree, known.leaf, level, targets)
        assert target is not None  # nothing is unusable
        (above,) = (each for each in document.tree.above(known.leaf) if each.level == level)
        proxy = self._proxy(level)
        status = DistributorStatus(
            level=level,
            bit=bit(level),
            mask=mask(level),
            target=target,
            other_targets=[each for each in above.beside if each != target],
            proxy=proxy,
            state="Unclaimed" if proxy is None else "Elsewhere",
        )
        running = self._distributors().get(level)
        if running is None:
            return status
        waits = running.waits
        return status.model_copy(
            update={
                "state": "Distributing" if waits is None else "Waiting",
                "reason_code": None if waits is None else waits.code,
                "reason": None if waits is None else waits.message,
                "given": running.given.total(),
                "refused": running.refused,
                "lost": running.lost,
                "partitions": list(_partitions(running)),
            }
        )


def _partitions(running: Distributor) -> Iterable[DistributedPartition]:
    for place in sorted({*running.courses, *running.left_out}):
        course, position, end = running.courses.get(place), running.positions.get(place), running.ends.get(place)
        reason = running.left_out.get(place) or running.told.get(place)
        yield DistributedPartition(
            topic=place[0],
            partition=place[1],
            position=position,
            settled=None if course is None else course.settled,
            lag=None if position is None or end is None else max(end - position, 0),
            reason_code=None if reason is None else reason.code,
            reason=None if reason is None else reason.message,
        )
