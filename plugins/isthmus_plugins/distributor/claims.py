"""Which levels this proxy distributes for: those that it has claimed in the control log.

A level is free where nobody has claimed it, or who did has no lease any more. Proxies that have few levels claim first.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from isthmus_control.commands import ClaimDistributor
from isthmus_control.control_state import ControlState
from isthmus_control.outcome import Rejected
from isthmus_plugins.cluster import BrokerUnavailable
from isthmus_plugins.process import PluginContext

log = logging.getLogger("isthmus_plugins.distributor")

STAND_BACK_S: Final = 0.25
"""For each level that a proxy has already."""
RETRY_S: Final = 1.0


class Claims:
    """Of this process. ``changed`` is called when :attr:`held` may be another."""

    def __init__(self, context: PluginContext, changed: Callable[[], None]) -> None:
        self._context = context
        self._changed = changed
        self._woken = asyncio.Event()

    def control_changed(self) -> None:
        self._woken.set()
        self._changed()

    @property
    def held(self) -> frozenset[int]:
        """The levels that are this process's."""
        state = self._context.control.state
        own = self._context.incarnation
        return frozenset(level for level, holder in state.distributors.items() if holder == own)

    async def keep(self) -> None:
        """Claim what is free, as it gets free, until cancelled."""
        while True:
            self._woken.clear()
            if free(self._context.control.state, self._context.incarnation):
                await asyncio.sleep(STAND_BACK_S * len(self.held))
                await self._claim_one()
            else:
                await self._woken.wait()

    async def _claim_one(self) -> None:
        for level in free(self._context.control.state, self._context.incarnation)[:1]:
            try:
                outcome = await self._context.control.append(ClaimDistributor(level, self._context.incarnation))
            except BrokerUnavailable as error:
                log.warning("level not claimed", extra={"level": level, "error": str(error)})
                await asyncio.sleep(RETRY_S)
                return
            if isinstance(outcome, Rejected):  # another proxy was faster, or this one has no lease
                log.info("level not claimed", extra={"level": level, "error": outcome.message})


def free(state: ControlState, incarnation: str) -> list[int]:
    """The levels that a process may claim: none, where its own lease does not stand in the log."""
    if state.tree is None:
        return []
    holders = {lease.incarnation for lease in state.proxies.values()}
    if incarnation not in holders:
        return []
    return [level for level in state.tree.levels if state.distributors.get(level) not in holders]
