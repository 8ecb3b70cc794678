"""What a source lost that it had acked In-Sync, as both sides show it until an operator acknowledges it.

The target's control log has it. Its proxies say it over their connections whenever it changes, and on each new one: a
source whose power failed may remember nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Final

from prometheus_client.core import GaugeMetricFamily, Metric

from isthmus_control.control_state import ControlState
from isthmus_control.model import Link, ResourceType
from isthmus_control.source_losses import LossState, SourceLoss
from isthmus_control.states import PartitionState, ReasonCode
from isthmus_plugins.links import LostGroupOffset, PartitionStatus, SourceLossStatus
from isthmus_plugins.process import PluginContext
from isthmus_plugins.rarely import RarelyEach
from isthmus_plugins.replication.link import calls
from isthmus_plugins.replication.link.call_codec import Answering
from isthmus_plugins.replication.link.connection import LinkConnection, LinkLost, LinkRejected
from isthmus_plugins.replication.link.features import SOURCE_LOSSES
from isthmus_plugins.replication.link.part import Part
from isthmus_plugins.replication.link.peers import LinkPeers
from isthmus_plugins.tasks import Tasks

log = logging.getLogger("isthmus_plugins.replication")

RETRY_S: Final = 1.0


class ToldSourceLosses(Part):
    """Says what this cluster has recorded, and keeps what the other one said."""

    def __init__(self, context: PluginContext, peers: LinkPeers) -> None:
        self._context = context
        self._peers = peers
        self._tasks = Tasks("source-losses", context.supervision)
        self._changed = asyncio.Event()
        self._said: dict[LinkConnection, calls.SourceLosses] = {}
        self._heard: dict[str, calls.SourceLosses] = {}
        self._untold = RarelyEach(_log_untold)
        """By link: over each connection it is said anew."""

    def start(self) -> None:
        self._tasks.keep("say", self._say_for_ever)

    async def stop(self) -> None:
        await self._tasks.close()

    def wake(self) -> None:
        self._changed.set()

    def control_changed(self, state: ControlState) -> None:
        for name in self._heard.keys() - state.links.keys():
            del self._heard[name]
        self.wake()

    def connection_lost(self, connection: LinkConnection) -> None:
        self._said.pop(connection, None)

    def answers(self) -> Sequence[Answering]:
        return (calls.SourceLosses.by(self.on_source_losses),)

    # ---- the target's side ----

    async def _say_for_ever(self) -> None:
        while True:
            self._changed.clear()
            if await self._say():
                await self._changed.wait()
            else:
                await asyncio.sleep(RETRY_S)

    async def _say(self) -> bool:
        """Say what is new over each connection; False if some peer did not answer."""
        answered = True
        state = self._context.control.state
        for link in list(state.links.values()):
            now = _said(state, link)
            for connection in self._peers.connections(link.name):
                # That there is nothing, too: it may have been acknowledged while nobody was connected.
                if SOURCE_LOSSES not in connection.peer_features or self._said.get(connection) == now:
                    continue
                try:
                    await connection.call(now)
                except LinkRejected as error:
                    self._untold.one(link.name, (link.name, str(error)))
                except (LinkLost, TimeoutError):
                    answered = False
                    continue
                self._said[connection] = now
        return answered

    # ---- the source's side ----

    async def on_source_losses(self, connection: LinkConnection, question: calls.SourceLosses) -> calls.Done:
        """The other cluster has recorded what this one lost; all of it that nobody acknowledged."""
        known = {loss.number for loss in self._heard.get(connection.link_name, calls.SourceLosses()).losses}
        for loss in question.losses:
            if loss.number not in known:
                extra = {"link": connection.link_name, "topic": loss.topic, "partition": loss.partition}
                log.error("lost what was acked In-Sync", extra=extra | {"detail": loss.message})
        self._heard[connection.link_name] = question
        return calls.Done()

    # ---- what is shown ----

    def of(self, link: Link) -> list[SourceLossStatus]:
        """What nobody acknowledged of a link: found here, and told by the other cluster."""
        losses = [_status(link, loss) for loss in _told(self._context.control.state, link.name)]
        heard = self._heard.get(link.name, calls.SourceLosses())
        return losses + [SourceLossStatus(**asdict(loss), role="leader") for loss in heard.losses]

    def left_off(self, link_name: str) -> int:
        """So many more there were."""
        own = self._context.control.state.source_losses_left_off.get(link_name, 0)
        return own + self._heard.get(link_name, calls.SourceLosses()).left_off

    def metrics(self) -> Iterable[Metric]:
        family = GaugeMetricFamily(
            "isthmus_source_losses",
            "Losses of what the source had acked In-Sync that nobody has acknowledged",
            labels=("link", "role", "type", "state"),
        )
        for name, link in sorted(self._context.control.state.links.items()):
            counts = Counter((each.role, each.type, each.state) for each in self.of(link))
            for labels, count in sorted(counts.items()):
                family.add_metric((name, *labels), count)
        return (family,)


def _log_untold(times: int, last: tuple[str, str]) -> None:
    link_name, detail = last
    log.warning("source losses not told", extra={"link": link_name, "detail": detail, "times": times})


def _told(state: ControlState, link_name: str) -> list[SourceLoss]:
    return [loss for loss in state.source_losses if loss.link == link_name and not loss.acknowledged]


def _said(state: ControlState, link: Link) -> calls.SourceLosses:
    """What is said to the source, in its names."""
    losses = []
    for status in (_status(link, loss) for loss in _told(state, link.name)):
        said = status.model_dump(exclude={"role", "commits", "topic", "remote_topic"})
        losses.append(calls.SaidLoss(**said, topic=status.remote_topic, remote_topic=status.topic))
    return calls.SourceLosses(tuple(losses), state.source_losses_left_off.get(link.name, 0))


def _status(link: Link, loss: SourceLoss) -> SourceLossStatus:
    return SourceLossStatus(
        number=loss.number,
        role="follower",
        type="topic" if loss.type is ResourceType.TOPIC else "consumer-group",
        topic=loss.topic,
        remote_topic=_at_the_source(link, loss),
        partition=loss.partition,
        from_offset=loss.from_offset,
        to_offset=loss.to_offset,
        count=loss.count,
        groups=loss.groups,
        state=loss.state.value,
        found_ms=loss.found_ms,
        found_by=loss.found_by,
        salvage_proxy=None if loss.salvaged is None else loss.salvaged.proxy,
        salvage_file=None if loss.salvaged is None else loss.salvaged.path,
        message=loss.describe(),
        commits=[
            LostGroupOffset(
                group=each.group,
                topic=each.topic,
                partition=each.partition,
                offset=each.offset,
                source_offset=each.source_offset,
            )
            for each in loss.commits
        ],
    )


def _at_the_source(link: Link, loss: SourceLoss) -> str:
    """What a topic is called there; one that follows no more, or the offsets topic, as here."""
    if loss.type is not ResourceType.TOPIC:
        return loss.topic
    names = (mapping.remote_name(loss.topic) for mapping in link.topic_mappings)
    return next((name for name in names if name is not None), loss.topic)


def note_source_losses(state: ControlState, link_name: str, partitions: list[PartitionStatus]) -> None:
    """Say of the partitions of a link that follow which wait for the operator; add those that have no stream now."""
    known = {(each.topic, each.partition): each for each in partitions if each.role == "follower"}
    for loss in state.source_losses:
        if loss.link != link_name or loss.state is not LossState.HELD or loss.type is not ResourceType.TOPIC:
            continue
        status = known.get((loss.topic, loss.partition))
        if status is None:
            record = state.follower_topics.get(loss.topic)
            status = PartitionStatus(
                topic=loss.topic,
                remote_topic=loss.topic if record is None else record.source_topic,
                partition=loss.partition,
                role="follower",
                state=PartitionState.DIVERGED,
            )
            partitions.append(status)
        status.state, status.reason, status.message = (
            PartitionState.DIVERGED,
            ReasonCode.SOURCE_LOST_RECORDS,
            loss.describe(),
        )
