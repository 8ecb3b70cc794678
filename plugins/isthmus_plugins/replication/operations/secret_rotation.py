"""A link's secret is rotated while it runs: both sides count the old and the new one until both have the new one.

The side that is asked records the new secret first, then the one that asks, then the asked one drops the old, then the
asker. Whoever is killed in between, the two logs have one secret in common, which connections are made with. The side
that asked goes on by itself when it is connected, and who sees a peer prove the new one knows that it may drop the old
(:mod:`isthmus_control.rules.link_secrets`). The new secret is agreed on over a connection, as the first was: it is
never sent.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Sequence
from typing import Final

from isthmus_control.commands import AbandonSecretRotation, BeginSecretRotation, FinishSecretRotation
from isthmus_control.model import Link, NextSecret
from isthmus_plugins import links
from isthmus_plugins.links import OperationError
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.link import calls
from isthmus_plugins.replication.link.call_codec import Answering
from isthmus_plugins.replication.link.connection import LinkConnection, LinkLost, LinkRejected
from isthmus_plugins.replication.link.features import ROTATED_SECRETS
from isthmus_plugins.replication.link.peers import LinkPeers
from isthmus_plugins.replication.operations.commands import LinkCommands
from isthmus_plugins.tasks import Tasks

log = logging.getLogger("isthmus_plugins.replication")

CALL_TIMEOUT_S: Final = 60.0
RETRY_S: Final = 2.0
NOT_FOUND: Final = "NOT_FOUND"


class SecretRotations:
    """Rotates at an operator's word, answers the other side, and ends what was left unfinished."""

    def __init__(self, context: PluginContext, commands: LinkCommands, peers: LinkPeers) -> None:
        self._context = context
        self._commands = commands
        self._peers = peers
        self._tasks = Tasks("secret-rotations", context.supervision)
        self._ending: set[str] = set()
        """Ids of new secrets of which somebody here takes care."""

    async def stop(self) -> None:
        await self._tasks.close()

    def answers(self) -> Sequence[Answering]:
        return calls.BeginSecretRotation.by(self._on_begin), calls.FinishSecretRotation.by(self._on_finish)

    # ---- the side that asks ----

    async def rotate(self, link_name: str) -> links.SecretRotated:
        """Give both sides a new secret; go on with a rotation that was left unfinished. Raises OperationError."""
        self._commands.link(link_name)
        self._commands.knows(link_name, ROTATED_SECRETS)
        connection, link = self._commands.connection(link_name), self._commands.link(link_name)
        if link.next_secret is not None:
            if await self._finish(connection, link, link.next_secret.secret_id):
                return links.SecretRotated(link_name=link_name, secret_id=link.next_secret.secret_id)
            link = self._commands.link(link_name)
        secret_id = str(uuid.uuid4())
        self._ending.add(secret_id)
        try:
            await self._rotate(connection, link, secret_id)
        finally:
            self._ending.discard(secret_id)
            self.look()
        return links.SecretRotated(link_name=link_name, secret_id=secret_id)

    async def _rotate(self, connection: LinkConnection, link: Link, secret_id: str) -> None:
        begin = self._begin(connection, link, secret_id, link.secret_id, asked=False)
        self._commands.would_append(begin)
        await self._call(connection, calls.BeginSecretRotation(secret_id, link.secret_id))
        await self._commands.append(begin)
        if not await self._finish(connection, link, secret_id):
            message = f"somebody else rotated the secret of link {link.name!r} at the same time: try again"
            raise OperationError("CONFLICT", message, 409)

    async def _finish(self, connection: LinkConnection, link: Link, secret_id: str) -> bool:
        """Drop the old secret at both sides; False: the other side never had the new one, which is dropped here."""
        try:
            await self._call(connection, calls.FinishSecretRotation(secret_id))
        except OperationError as error:
            if error.code != NOT_FOUND:
                raise
            await self._commands.append(AbandonSecretRotation(link.name, link.link_id, secret_id))
            return False
        await self._commands.append(FinishSecretRotation(link.name, link.link_id, secret_id))
        log.info("link secret rotated", extra={"link": link.name, "secret_id": secret_id})
        return True

    async def _call(
        self, connection: LinkConnection, question: calls.BeginSecretRotation | calls.FinishSecretRotation
    ) -> None:
        try:
            await connection.call(question, CALL_TIMEOUT_S)
        except LinkRejected as error:
            raise OperationError(error.code, f"the other cluster refused: {error.message}", 409) from error
        except (LinkLost, TimeoutError) as error:
            message = f"the other cluster did not answer, the old secret still counts: rotate it again ({error})"
            raise OperationError("UNAVAILABLE", message, 503) from error

    # ---- the side that is asked ----

    async def _on_begin(self, connection: LinkConnection, question: calls.BeginSecretRotation) -> calls.Done:
        link = self._link_of(connection)
        begin = self._begin(connection, link, question.secret_id, question.current, asked=True)
        await self._commands.append_for_peer(begin)
        return calls.Done()

    async def _on_finish(self, connection: LinkConnection, question: calls.FinishSecretRotation) -> calls.Done:
        link = self._link_of(connection)
        await self._commands.append_for_peer(FinishSecretRotation(link.name, link.link_id, question.secret_id))
        return calls.Done()

    # ---- both ----

    def look(self) -> None:
        """A connection or a secret may have come: end what can be ended."""
        for link in self._context.control.state.links.values():
            new = link.next_secret
            if new is not None and new.secret_id not in self._ending and self._may_end(link, new):
                self._ending.add(new.secret_id)
                self._tasks.start(f"end-{link.name}", self._end(link, new))

    def _may_end(self, link: Link, new: NextSecret) -> bool:
        """Whether the other side can be asked, where this one asked before, or has proved that it has the new one."""
        connections = self._peers.connections(link.name)
        return any(not new.asked or connection.secret_id == new.secret_id for connection in connections)

    async def _end(self, link: Link, new: NextSecret) -> None:
        try:
            if new.asked:
                await self._commands.append(FinishSecretRotation(link.name, link.link_id, new.secret_id))
            else:
                await self._finish(self._commands.connection(link.name), link, new.secret_id)
        except OperationError as error:
            log.warning("link secret rotation not ended", extra={"link": link.name, "detail": error.message})
            await asyncio.sleep(RETRY_S)
        finally:
            self._ending.discard(new.secret_id)
        self.look()

    def _begin(
        self, connection: LinkConnection, link: Link, secret_id: str, current: str, *, asked: bool
    ) -> BeginSecretRotation:
        secret = self._context.seal(connection.agreed_secret(f"{link.link_id} {secret_id}"), link.link_id)
        return BeginSecretRotation(link.name, link.link_id, secret_id, current, secret, asked)

    def _link_of(self, connection: LinkConnection) -> Link:
        link = self._context.control.state.links.get(connection.link_name)
        if link is None:
            raise LinkRejected("LINK_NOT_FOUND", "the link was deleted just now")
        return link
