"""Has secrets of links and tokens in the control log sealed with the control key that the proxies have now."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

from isthmus.control_log import ControlLog
from isthmus.errors import PeerFault
from isthmus_control.commands import Body, SealSecret, SealToken
from isthmus_control.levels import SECRET_ROTATION
from isthmus_control.outcome import Rejected
from isthmus_control.rules.levels import without_key
from isthmus_control.sealing import Sealed, Sealer, SealingError
from isthmus_plugins.tasks import Supervision, Tasks

log = logging.getLogger("isthmus.sealing")

RETRY_S: Final = 5.0


class _Due(NamedTuple):
    """A secret that is sealed with another key, or with none."""

    of: str
    """Whose it is, for people."""
    purpose: str
    sealed: Sealed
    again: Callable[[Sealed], Body]
    """The command that records it as it is sealed now."""


class Sealing:
    """Seals what was sealed with another key, or with none, once every proxy with a lease has this one first."""

    def __init__(self, control_log: ControlLog, sealer: Sealer, supervision: Supervision) -> None:
        self._control_log = control_log
        self._sealer = sealer
        self._changed = asyncio.Event()
        self._tasks = Tasks("sealing", supervision)

    def start(self) -> None:
        if self._sealer.key_id:
            self._control_log.subscribe(lambda state: self._changed.set())
            self._tasks.keep("seal", self._seal_for_ever)

    async def stop(self) -> None:
        await self._tasks.close()

    async def _seal_for_ever(self) -> None:
        while True:
            self._changed.clear()
            for due in self._due():
                await self._seal(due)
            await self._changed.wait()

    def _due(self) -> list[_Due]:
        state = self._control_log.state
        if state.level < SECRET_ROTATION or without_key(state, self._control_log.key_id):
            return []
        of_links = [
            _Due(f"link {link.name}", link.link_id, sealed, partial(SealSecret, link.name, link.link_id, secret_id))
            for link in state.links.values()
            for secret_id, sealed in link.secrets.items()
        ]
        of_tokens = [
            _Due(f"token {each.token_id}", each.token_id, each.acceptor_key, partial(SealToken, each.token_id))
            for each in state.link_tokens.values()
        ]
        return [each for each in (*of_links, *of_tokens) if each.sealed.key_id != self._sealer.key_id]

    async def _seal(self, due: _Due) -> None:
        extra = {"of": due.of, "key_id": self._sealer.key_id, "before": due.sealed.key_id or "none"}
        try:
            again = self._sealer.seal(self._sealer.open(due.sealed, due.purpose), due.purpose)
            outcome = await self._control_log.append(due.again(again))
        except (SealingError, PeerFault) as error:
            log.warning("secret not sealed", extra={**extra, "detail": str(error)})
            await asyncio.sleep(RETRY_S)
            return
        if isinstance(outcome, Rejected):  # the link is gone, say
            log.warning("secret not sealed", extra={**extra, "detail": outcome.message})
        else:
            log.info("secret sealed", extra=extra)
