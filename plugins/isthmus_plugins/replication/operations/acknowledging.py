"""Ends the telling of what a source lost, at either side, and of what differs: the target's control log has it."""

from __future__ import annotations

from typing import Final

from isthmus_control.commands import AcknowledgeDifferences, AcknowledgeSourceLosses, PartitionOffset
from isthmus_control.model import Link, TopicState
from isthmus_plugins import links
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.link import calls
from isthmus_plugins.replication.link.connection import LinkConnection
from isthmus_plugins.replication.operations.commands import LinkCommands
from isthmus_plugins.replication.status.source_losses import ToldSourceLosses

DIFFERENCES_AT_ONCE: Final = 100
"""A command about more topics would concern everything."""


class Acknowledging:
    """What was told is acknowledged, and nothing that came since."""

    def __init__(self, context: PluginContext, commands: LinkCommands, told_losses: ToldSourceLosses) -> None:
        self._context = context
        self._commands = commands
        self._told_losses = told_losses

    async def acknowledge(self, link: Link) -> links.Acknowledged:
        """Tell no more what this proxy has told of a link. Raises OperationError."""
        told = self._told_losses.of(link)
        for role in ("follower", "leader"):
            number = max((loss.number for loss in told if loss.role == role), default=None)
            if number is None:
                continue
            if role == "follower":
                await self._commands.append(AcknowledgeSourceLosses(link.name, number))
            else:
                await self._commands.call(link.name, calls.AcknowledgeSourceLosses(number))
        differing = self._differing(link)
        for begin in range(0, len(differing), DIFFERENCES_AT_ONCE):
            await self._commands.append(AcknowledgeDifferences(differing[begin : begin + DIFFERENCES_AT_ONCE]))
        return links.Acknowledged(link_name=link.name, acknowledged=len(told) + len(differing))

    def _differing(self, link: Link) -> tuple[PartitionOffset, ...]:
        """Where partitions that follow over a link differ from their sources."""
        return tuple(
            PartitionOffset(record.topic, record.topic_id, partition, proof.difference.offset)
            for _, record in sorted(self._context.control.state.follower_topics.items())
            if record.link == link.name and record.state is TopicState.FOLLOWING and record.topic_id is not None
            for partition, proof in sorted(record.proofs.items())
            if proof.difference is not None
        )

    async def on_acknowledge(self, connection: LinkConnection, question: calls.AcknowledgeSourceLosses) -> calls.Done:
        """The source's operator knows."""
        await self._commands.append_for_peer(AcknowledgeSourceLosses(connection.link_name, question.number))
        return calls.Done()
