"""What operators have done with the tree, and what they are shown of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from operator import itemgetter
from typing import Any, Final

from isthmus_control.codec import canonical_json
from isthmus_control.commands import ApplyTree, Body, ChooseTarget, LeaveTree
from isthmus_control.model import DistributionTree
from isthmus_control.outcome import Rejected
from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused
from isthmus_plugins.distribution.copy_flags import bit, mask
from isthmus_plugins.distribution.document import TreeDocument, following, names_written, read_document, written
from isthmus_plugins.distribution.plan import as_json, as_text, plan
from isthmus_plugins.distribution.positions import PositionError
from isthmus_plugins.distribution.targets import wrong_targets
from isthmus_plugins.distribution.tree import Change, TreeError
from isthmus_plugins.distributor.changes import Changes, held, lacks
from isthmus_plugins.distributor.distributor import Distributor
from isthmus_plugins.distributor.group_offsets import GroupOffsets
from isthmus_plugins.distributor.leaves import Leaves
from isthmus_plugins.distributor.new_topics import NewTopics
from isthmus_plugins.distributor.reasons import Waits
from isthmus_plugins.links import OperationError
from isthmus_plugins.process import PluginContext
from isthmus_plugins.trees import (
    AppliedTree,
    ApplyTreeRequest,
    ChooseTargetRequest,
    DistributedPartition,
    DistributorStatus,
    LeftTree,
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


def read_next(text: str, before: TreeDocument | None, filling: Collection[str]) -> tuple[TreeDocument, Change]:
    """A document that is to be applied where ``before`` was, and what it changes. Raises TreeError.

    ``filling``: leaves that do not have all yet.
    """
    if before is None:
        return read_document(text), Change({}, ())
    return following(before, read_document(text, before.tree), filling)


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
        return self._status_of(self._known())

    def _status_of(self, known: DistributionTree) -> TreeStatus:
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
        changes = None if known is None or before is None else Changes(self._context, before, known.leaf)
        try:
            filling = frozenset[str]() if changes is None else await changes.filling()
            try:
                document, changed = read_next(request.document, before, filling)
            except TreeError as error:
                raise OperationError("INVALID", "; ".join(error.problems), 422) from error
            leaf = self._leaf(document, known)
            blocked: list[str] = []
            if changes is not None and (changed.added or changed.removed):
                blocked = await changes.blocked(document, changed.removed, request.give_up)
        finally:
            if changes is not None:
                await changes.close()
        not_empty = await self._not_empty(document, leaf, changed.added)
        if before is None and leaf in document.added and (here := await self._held_here(document, leaf)):
            not_empty[leaf] = here
            if not request.own_messages:
                by = document.added[leaf].by
                blocked.append(
                    f"{leaf} is new, and not empty: {'; '.join(here)}. {by} gives it all messages of the tree: what it "
                    "was given before would be there twice, and the rest would go to all clusters as its own. Delete "
                    "these topics here, they are made anew; or, if nothing of that came over a tree: --own-messages"
                )
        if blocked and not request.dry_run:
            raise OperationError("CONFLICT", "; ".join(blocked))
        topics = NewTopics(self._context, document, leaf)
        try:
            compared = await topics.make(request.dry_run)
        except (BrokerUnavailable, KafkaRefused) as error:
            raise OperationError(
                "NOT_AVAILABLE", f"this cluster's topics cannot be read or made: {error}", 503
            ) from error
        finally:
            await topics.close()
        levels = tuple(above.level for above in document.tree.above(leaf))
        text = canonical_json(written(document)).decode()
        if not request.dry_run:
            await self._append(ApplyTree(document.tree.version, leaf, document.topics, levels, text))
        return AppliedTree(
            before=None if known is None else known.version,
            dry_run=request.dry_run,
            added=changed.added if before is not None else {leaf: each.by for leaf, each in document.added.items()},
            removed=list(changed.removed),
            not_empty=not_empty,
            blocked=blocked,
            topics=compared,
            names_unfit=topics.unfit,
            not_compared=topics.not_asked,
            plan=self._plan(document, leaf),
        )

    async def _not_empty(self, document: TreeDocument, own: str, added: Collection[str]) -> dict[str, list[str]]:
        """By other cluster that comes: what it holds. One that does not say is asked by its own proxy in any case."""
        leaves = Leaves(self._context, document, own)
        found: dict[str, list[str]] = {}
        try:
            for leaf in added:
                with suppress(Waits, BrokerUnavailable, KafkaRefused, PositionError):
                    found[leaf] = await held(await leaves.itself(leaf), document, leaf)
        finally:
            await leaves.close()
        return {leaf: each for leaf, each in found.items() if each}

    async def _held_here(self, document: TreeDocument, leaf: str) -> list[str]:
        """The same of this cluster. Raises OperationError."""
        try:
            return await held(self._context.cluster, document, leaf)
        except (BrokerUnavailable, KafkaRefused, PositionError) as error:
            raise OperationError(
                "NOT_AVAILABLE", f"whether this cluster is empty is not known: {error}", 503
            ) from error

    def _leaf(self, document: TreeDocument, known: DistributionTree | None) -> str:
        """What this cluster is called. Raises OperationError."""
        leaf = document.leaf_of(self._context.cluster_id)
        if leaf is None:
            has = ", ".join(f"{name}: {each.cluster_id}" for name, each in document.clusters.items())
            out = "" if known is None else "; one that is taken out leaves by `isthmus tree leave`"
            raise OperationError(
                "INVALID", f"this cluster, {self._context.cluster_id}, is not in the tree, which has {has}{out}", 422
            )
        if known is not None and leaf != known.leaf:
            raise OperationError("CONFLICT", f"this cluster is called {known.leaf} in its tree: it keeps its name")
        return leaf

    def document(self) -> dict[str, Any]:
        """The tree's document, with all that it was applied without."""
        return written(document_of(self._known()))

    async def choose_target(self, cluster: str, level: int, request: ChooseTargetRequest) -> TreeStatus:
        """Have the distributor of a level write to another leaf. ``cluster``: what this one is called."""
        known = self._known()
        if cluster != known.leaf:
            raise OperationError(
                "CONFLICT", f"this is cluster {known.leaf} of the tree: ask a proxy of {cluster} (--profile)"
            )
        if request.leaf is not None:
            chosen = {(cluster, level): request.leaf}
            document = document_of(known)
            for problem in wrong_targets(document.tree, chosen):
                raise OperationError("INVALID", problem, 422)
            await self._check_filled(document, known.leaf, request.leaf)
        if not request.dry_run:
            await self._append(ChooseTarget(known.version, level, request.leaf, request.give_up))
            return self.status()
        if level not in known.levels:
            raise OperationError("NOT_FOUND", f"{cluster} has no level {level} in its tree", 404)
        after = {each: leaf for each, leaf in known.chosen.items() if each != level}
        if request.leaf is not None:
            after[level] = request.leaf
        return self._status_of(replace(known, chosen=after))

    async def _check_filled(self, document: TreeDocument, own: str, leaf: str) -> None:
        """Raises OperationError where a leaf is no target, as it does not have all."""
        added = document.added.get(leaf)
        if added is None or added.by == own:
            return
        changes = Changes(self._context, document, own)
        try:
            if leaf in await changes.filling():
                raise OperationError("CONFLICT", lacks(leaf, added))
        finally:
            await changes.close()

    async def leave(self, dry_run: bool, give_up: bool) -> LeftTree:
        """Distribute nothing from here any more. ``give_up``: also if others lack what is here."""
        known = self._known()
        changes = Changes(self._context, document_of(known), known.leaf)
        try:
            lacking = await changes.leaving()
        except (BrokerUnavailable, KafkaRefused, PositionError) as error:
            lacking = [f"what others lack is not known: {error}"]
        finally:
            await changes.close()
        if not dry_run:
            if lacking and not give_up:
                what = "; ".join(lacking)
                raise OperationError("CONFLICT", f"others would lack what is here: {what}. --give-up leaves it here")
            await self._append(LeaveTree(known.version))
        return LeftTree(dry_run=dry_run, lacking=lacking)

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
        try:
            said = await running.committer.go_back(group)
        except BrokerUnavailable as error:
            raise OperationError("NOT_AVAILABLE", str(error), 503) from error
        if not said:
            raise OperationError("NOT_FOUND", f"no other cluster has said how far group {group} has read", 404)
        return self.status()

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
            names=names_written(document),
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
            margins_ms=dict(document.margins_ms),
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
        target = document.target(known.leaf, level, known.chosen.get(level))
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
        left, total = running.fill
        working = "Filling" if total else "Distributing"
        return status.model_copy(
            update={
                "state": working if waits is None else "Waiting",
                "reason_code": None if waits is None else waits.code,
                "reason": None if waits is None else waits.message,
                "given": running.given.total(),
                "refused": running.refused,
                "lost": running.lost,
                "fill_left": left,
                "fill_total": total,
                "partitions": list(_partitions(running)),
            }
        )


def _partitions(running: Distributor) -> Iterable[DistributedPartition]:
    left_out = running.left_out
    for place in sorted({*running.courses, *left_out}):
        course, position, end = running.courses.get(place), running.positions.get(place), running.ends.get(place)
        reason = left_out.get(place) or running.told.get(place)
        yield DistributedPartition(
            topic=place[0],
            partition=place[1],
            position=position,
            settled=None if course is None else course.settled,
            lag=None if position is None or end is None else max(end - position, 0),
            target_partitions=running.by_key.get(place[0]),
            fill_until=course.fill_until if course is not None and course.fills else None,
            left_out=place in left_out,
            reason_code=None if reason is None else reason.code,
            reason=None if reason is None else reason.message,
        )
