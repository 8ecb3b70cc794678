"""Deals with what sources' offsets topics lost of commits that were confirmed: held, or salvaged and put back.

Until that is recorded in the control log, nothing of it is put back (:mod:`.open_losses`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Final

from isthmus_control.commands import FoundLoss, RecordSourceLosses
from isthmus_control.levels import SOURCE_LOSSES
from isthmus_control.model import NamespaceMapping, OnSourceLoss, ResourceType, Role
from isthmus_control.outcome import Rejected
from isthmus_control.source_losses import COMMITS_MAX, LossState, LostCommit, SourceLoss
from isthmus_control.states import ReasonCode
from isthmus_control.truncations import SalvageFile
from isthmus_plugins.cluster import BrokerUnavailable
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.groups.followed_group import FollowedGroup
from isthmus_plugins.replication.groups.intake import Intake
from isthmus_plugins.replication.groups.open_losses import OpenLosses, SourcePartition
from isthmus_plugins.replication.link import calls
from isthmus_plugins.replication.truncation.salvage import SalvageFailed, write_offsets
from isthmus_protocol.offsets_log import OFFSETS_TOPIC
from isthmus_protocol.offsets_salvage import OffsetsSalvageHead, SalvagedOffset

log = logging.getLogger("isthmus_plugins.replication")

LOOK_S: Final = 1.0
"""How often is looked at what is held: all groups of a partition are."""
RETRY_S: Final = 5.0
NOTHING: Final = -1
MESSAGE: Final = "the source's offsets topic lost its end"


class GroupLosses:
    """Of the partitions that are pushed to this proxy."""

    def __init__(self, context: PluginContext, intake: Intake, losses: OpenLosses) -> None:
        self._context = context
        self._clock = context.clock
        self._intake = intake
        self._losses = losses
        self._look_at = 0.0

    @property
    def due_at(self) -> float | None:
        """When to look at what is lost and not dealt with; None: nothing is."""
        return self._look_at if self._losses.said or self._losses.recorded() else None

    async def settle(self) -> bool:
        """Deal with what can be dealt with now; whether something was."""
        done = False
        self._look_at = self._clock.monotonic() + LOOK_S
        try:
            for key, lost in list(self._losses.said.items()):
                for groups in self._intake.whole((key,)).values():
                    done = await self._settle_said(key, lost, groups) or done
            recorded = {key: each for key, each in self._losses.recorded().items() if key not in self._losses.said}
            whole = self._intake.whole(recorded)
            found = [
                (loss, _put_back((group for group in groups if loss.holds(group.group)), loss.from_offset))
                for key, groups in whole.items()
                for loss in recorded[key]
            ]
            for loss, offsets in found:
                done = await self._settle_recorded(loss, offsets) or done
            self._losses.trouble = None
        except (BrokerUnavailable, SalvageFailed) as error:
            self._losses.trouble = str(error)
            log.warning("lost commits not dealt with", extra={"detail": str(error)})
            self._look_at = self._clock.monotonic() + RETRY_S
        return done

    async def _settle_said(self, key: SourcePartition, lost: calls.LostEnd, groups: Sequence[FollowedGroup]) -> bool:
        """Record what a leader end said is lost; whether it is. Raises BrokerUnavailable, SalvageFailed."""
        link = self._context.control.state.links.get(key[0])
        found = []
        for mapping in () if link is None else link.pairs(Role.FOLLOWER, ResourceType.CONSUMER_GROUP):
            offsets = _put_back((each for each in groups if mapping.holds(each.group)), lost.from_offset)
            if offsets:
                found.append(await self._found(key, mapping, lost, offsets))
        recorded = not found or await self._record(key[0], found)
        if recorded and self._losses.said.get(key) is lost:
            del self._losses.said[key]
        return recorded

    async def _found(
        self, key: SourcePartition, mapping: NamespaceMapping, lost: calls.LostEnd, offsets: Sequence[SalvagedOffset]
    ) -> FoundLoss:
        """What a namespace lost, salvaged if it is put back. Raises SalvageFailed where nothing can be recorded."""
        default = OnSourceLoss.HOLD if mapping.local_prefix in lost.strict else OnSourceLoss.CUT
        is_recorded = self._context.control.state.level >= SOURCE_LOSSES
        held = is_recorded and (mapping.on_source_loss or default) is OnSourceLoss.HOLD
        span = lost.from_offset, lost.to_offset
        salvaged = None
        if not held:
            try:
                salvaged = await self._salvage(key, mapping.local_prefix, lost.epoch, *span, offsets)
            except SalvageFailed as error:
                if not is_recorded:
                    raise
                # It is tried again when it is recorded.
                log.warning("lost commits not salvaged", extra={"link": key[0], "detail": str(error)})
        state = LossState.HELD if held else LossState.CUTTING if salvaged is None else LossState.CUT
        return _loss(mapping.local_prefix, key[1], *span, state, offsets, salvaged)

    async def _settle_recorded(self, loss: SourceLoss, offsets: Sequence[SalvagedOffset]) -> bool:
        """What is held is over when groups have committed again; what the operator released is salvaged.

        ``offsets``: what would be put back now. Raises BrokerUnavailable, SalvageFailed.
        """
        if loss.state is LossState.HELD and offsets:
            return False
        key, span = (loss.link, loss.partition), (loss.from_offset, loss.to_offset)
        if offsets:
            salvaged = await self._salvage(key, loss.namespace, NOTHING, *span, offsets)
            found = _loss(loss.namespace, loss.partition, *span, LossState.CUT, offsets, salvaged)
        else:
            found = FoundLoss(
                loss.type,
                loss.namespace,
                loss.topic,
                loss.topic_id,
                loss.partition,
                *span,
                loss.count,
                LossState.CUT,
                loss.groups,
                loss.commits,
            )
        return await self._record(loss.link, [found])

    async def _salvage(
        self,
        key: SourcePartition,
        namespace: str,
        epoch: int,
        from_offset: int,
        to_offset: int,
        offsets: Sequence[SalvagedOffset],
    ) -> SalvageFile:
        head = OffsetsSalvageHead(
            cluster_id=self._context.cluster_id,
            link=key[0],
            namespace=namespace,
            partition=key[1],
            leader_epoch=epoch,
            from_offset=from_offset,
            to_offset=to_offset,
            code=ReasonCode.SOURCE_LOST_COMMITS.value,
            message=MESSAGE,
            at_ms=int(self._clock.time() * 1000),
            proxy=self._context.proxy_name,
        )
        path = await write_offsets(self._context, head, offsets)
        return SalvageFile(key[1], self._context.proxy_name, str(path), len(offsets))

    async def _record(self, link_name: str, found: Sequence[FoundLoss]) -> bool:
        """Have it in the control log, if that may hold it; False: it follows no more. Raises BrokerUnavailable."""
        state = self._context.control.state
        link = state.links.get(link_name)
        if link is None:
            return False
        if state.level >= SOURCE_LOSSES:
            outcome = await self._context.control.append(RecordSourceLosses(link_name, link.link_id, tuple(found)))
            if isinstance(outcome, Rejected):
                log.warning("lost commits not recorded", extra={"link": link_name, "detail": outcome.message})
                return False
        for loss in found:
            log.error(
                "source lost commits",
                extra={
                    "link": link_name,
                    "namespace": loss.namespace,
                    "partition": loss.partition,
                    "from_offset": loss.from_offset,
                    "to_offset": loss.to_offset,
                    "groups": loss.groups,
                    "offsets": loss.count,
                    "state": loss.state.value,
                    "file": None if loss.salvaged is None else loss.salvaged.path,
                },
            )
        return True


def _put_back(groups: Iterable[FollowedGroup], before: int) -> list[SalvagedOffset]:
    """What coordinators have that the source lost, and what would be put in its place."""
    found = []
    for group in groups:
        for (topic, partition), has in sorted(group.put_back(before).items()):
            wanted = group.wanted.get((topic, partition))
            there = NOTHING if wanted is None else wanted.offset
            found.append(SalvagedOffset(group.group, topic, partition, has.offset, has.metadata, there))
    return found


def _loss(
    namespace: str,
    partition: int,
    from_offset: int,
    to_offset: int,
    state: LossState,
    offsets: Sequence[SalvagedOffset],
    salvaged: SalvageFile | None,
) -> FoundLoss:
    commits = tuple(
        LostCommit(
            each.group,
            each.topic,
            each.partition,
            each.offset,
            None if each.source_offset == NOTHING else each.source_offset,
        )
        for each in offsets[:COMMITS_MAX]
    )
    return FoundLoss(
        ResourceType.CONSUMER_GROUP,
        namespace,
        OFFSETS_TOPIC,
        "",
        partition,
        from_offset,
        to_offset,
        len(offsets),
        state,
        len({each.group for each in offsets}),
        commits,
        salvaged,
    )
