"""Has the secrets of links in the control log sealed with the control key that the proxies of the cluster have now."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from isthmus.control_log import ControlLog
from isthmus.errors import PeerFault
from isthmus_control.commands import SealSecret
from isthmus_control.levels import SECRET_ROTATION
from isthmus_control.model import Link
from isthmus_control.outcome import Rejected
from isthmus_control.rules.levels import without_key
from isthmus_control.sealing import Sealed, Sealer, SealingError
from isthmus_plugins.tasks import Supervision, Tasks

log = logging.getLogger("isthmus.sealing")

RETRY_S: Final = 5.0


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
            for link, secret_id, sealed in self._due():
                await self._seal(link, secret_id, sealed)
            await self._changed.wait()

    def _due(self) -> list[tuple[Link, str, Sealed]]:
        state = self._control_log.state
        if state.level < SECRET_ROTATION or without_key(state, self._control_log.key_id):
            return []
        return [
            (link, secret_id, sealed)
            for link in state.links.values()
            for secret_id, sealed in link.secrets.items()
            if sealed.key_id != self._sealer.key_id
        ]

    async def _seal(self, link: Link, secret_id: str, sealed: Sealed) -> None:
        extra = {"link": link.name, "key_id": self._sealer.key_id, "before": sealed.key_id or "none"}
        try:
            again = self._sealer.seal(self._sealer.open(sealed, link.link_id), link.link_id)
            outcome = await self._control_log.append(SealSecret(link.name, link.link_id, secret_id, again))
        except (SealingError, PeerFault) as error:
            log.warning("link secret not sealed", extra={**extra, "detail": str(error)})
            await asyncio.sleep(RETRY_S)
            return
        if isinstance(outcome, Rejected):  # the link is gone, say
            log.warning("link secret not sealed", extra={**extra, "detail": outcome.message})
        else:
            log.info("link secret sealed", extra=extra)
