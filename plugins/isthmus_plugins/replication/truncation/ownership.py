"""What the owner of a truncation records of it in the control log, which says who that is."""

from __future__ import annotations

import logging
from typing import Any

from isthmus_control.commands import AdvanceTruncation, Body, HoldUpTruncation, TakeOverTruncation
from isthmus_control.model import Reason
from isthmus_control.outcome import Rejected
from isthmus_control.truncations import Truncation, TruncationPhase
from isthmus_plugins.process import PluginContext

log = logging.getLogger("isthmus_plugins.replication")


class HeldUp(Exception):
    """A step waits for something that somebody has to do. Shown at once."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class NotOwner(Exception):
    """Another proxy carries the truncation out now."""


class Ownership:
    """Truncations as this process owns them. Whatever it records of one that it does not own raises NotOwner."""

    def __init__(self, context: PluginContext) -> None:
        self._context = context

    def now(self, topic: str, topic_id: str) -> Truncation | None:
        """A topic's truncation as this proxy knows it; None: it is over."""
        found = self._context.control.state.truncations.get(topic)
        return found if found is not None and found.topic_id == topic_id else None

    async def take_over(self, topic: str, topic_id: str) -> None:
        """Become the owner. Raises NotOwner, BrokerUnavailable."""
        await self._append(TakeOverTruncation(topic, topic_id, self._context.proxy_name, self._context.incarnation))

    async def advance(self, truncation: Truncation, phase: TruncationPhase, **found: Any) -> None:
        """Record that the next phase begins; ``found``: fields of AdvanceTruncation. Raises NotOwner,
        BrokerUnavailable."""
        await self._append(
            AdvanceTruncation(truncation.topic, truncation.topic_id, self._context.incarnation, phase, **found)
        )
        log.info("truncation goes on", extra={"topic": truncation.topic, "phase": phase.value})

    async def hold_up(self, truncation: Truncation, trouble: Reason | None) -> None:
        """Record what keeps the present phase; None: nothing. Raises NotOwner, BrokerUnavailable."""
        await self._append(HoldUpTruncation(truncation.topic, truncation.topic_id, self._context.incarnation, trouble))

    async def confirm(self, truncation: Truncation) -> None:
        """Raise NotOwner unless the log itself says that nobody took over before now. Raises BrokerUnavailable."""
        now = self.now(truncation.topic, truncation.topic_id)
        await self.hold_up(truncation, None if now is None else now.trouble)

    async def _append(self, body: Body) -> None:
        outcome = await self._context.control.append(body)
        if isinstance(outcome, Rejected):
            raise NotOwner(outcome.message)
