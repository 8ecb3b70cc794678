"""Ends the telling of what a source lost, at either side: the target's control log has it."""

from __future__ import annotations

from isthmus_control.commands import AcknowledgeSourceLosses
from isthmus_control.model import Link
from isthmus_plugins import links
from isthmus_plugins.replication.link import calls
from isthmus_plugins.replication.link.connection import LinkConnection
from isthmus_plugins.replication.operations.commands import LinkCommands
from isthmus_plugins.replication.status.source_losses import ToldSourceLosses


class Acknowledging:
    """What was told is acknowledged, and nothing that came since."""

    def __init__(self, commands: LinkCommands, told_losses: ToldSourceLosses) -> None:
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
        return links.Acknowledged(link_name=link.name, acknowledged=len(told))

    async def on_acknowledge(self, connection: LinkConnection, question: calls.AcknowledgeSourceLosses) -> calls.Done:
        """The source's operator knows."""
        await self._commands.append_for_peer(AcknowledgeSourceLosses(connection.link_name, question.number))
        return calls.Done()
