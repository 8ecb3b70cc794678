"""Links come and go: both ends of one are set up, or taken down, from either side."""

from __future__ import annotations

import asyncio
import logging
import uuid
import zlib
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Final

from isthmus_control.anchors import Anchor, MalformedAnchor
from isthmus_control.commands import CreateLink, DeleteLink, RegisterProducerIds, SetOffsetsTopic
from isthmus_control.grants import EVERYTHING, OFFSETS_COPY, covers, not_granted
from isthmus_control.levels import CONSENT
from isthmus_control.model import Grant, Link, NamespaceMapping, OffsetsCopy, Role
from isthmus_control.states import ReasonCode
from isthmus_plugins import links
from isthmus_plugins.link_policy import remote_address
from isthmus_plugins.links import OperationError
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.link import calls, features
from isthmus_plugins.replication.link.connection import LinkConnection, LinkLost, LinkRejected
from isthmus_plugins.replication.link.peers import PURPOSE_CREATE, LinkPeers
from isthmus_plugins.replication.operations.commands import LinkCommands
from isthmus_plugins.replication.operations.consents import grants_of, token_of
from isthmus_plugins.replication.operations.offsets_topics import OffsetsTopics, choice, chosen_copy, wanted_copy
from isthmus_plugins.tasks import some_at_once
from isthmus_protocol.producer_ids import CLUSTERS_MAX

log = logging.getLogger("isthmus_plugins.replication")

CREATE_TIMEOUT_S: Final = 75.0
"""Three commands of the other side's control log, which may be slow, and more than it takes to give up on them."""
DETACHED_AT_ONCE: Final = 50
"""Pairs of namespaces: for each of them it is waited until every proxy acts on it, and until log ends stay."""
CONNECT_POLLS: Final = 100
CONNECT_POLL_S: Final = 0.05
"""So often, and after so long each time, a new link is looked at until it has connected."""


class LinkCreation:
    """Creates and deletes links, and the other side's half of them."""

    def __init__(
        self,
        context: PluginContext,
        commands: LinkCommands,
        peers: LinkPeers,
        offsets_topics: OffsetsTopics,
        detach_here: Callable[[Link, NamespaceMapping], Awaitable[None]],
    ) -> None:
        self._context = context
        self._commands = commands
        self._peers = peers
        self._offsets_topics = offsets_topics
        self._detach_here = detach_here

    async def create(self, request: links.CreateLink) -> None:
        """Set up both ends of a link."""
        context, name = self._context, request.link_name
        if name in context.control.state.links:
            raise OperationError("ALREADY_EXISTS", f"there is a link {name!r} already", 409)
        address = remote_address(request.remote)
        if address is None:
            raise OperationError("INVALID_REQUEST", f"--remote takes host:port, not {request.remote!r}", 422)
        if not context.link_policy.may_reach(*address):
            raise OperationError(
                "REMOTE_NOT_ALLOWED",
                f"links may not be created to {request.remote} from here: link.remotes_allowed in this proxy's "
                "configuration has the addresses to which they may",
                409,
            )
        token = None if request.token is None else token_of(request.token)
        copy = wanted_copy(request.offsets_topic, request.offsets_groups)
        self._offsets_topics.check(copy)
        link_id = str(uuid.uuid4())
        # Refused by this side, it must not have used up the token.
        grants = self._given(grants_of(request.may), token is None)
        another = "not " + context.cluster_id
        self._commands.would_append(CreateLink(name, link_id, another, True, (request.remote,), grants=grants))
        try:
            connection = await LinkConnection.dial(
                *address,
                clock=context.clock,
                supervision=context.supervision,
                hello={"purpose": PURPOSE_CREATE, "link_id": link_id},
                secret=b"",
                token=token,
                identity={
                    "cluster_id": context.cluster_id,
                    "proxy": context.proxy_name,
                    "features": list(features.FEATURES),
                },
                approve=self._peers.check_protection,
                tls=context.link_client_tls,
            )
        except (OSError, TimeoutError, LinkLost) as error:
            # Whoever asks is not told what is behind which port there; the log has it.
            detail = str(error) or type(error).__name__
            log.warning("link not created", extra={"link": name, "address": request.remote, "detail": detail})
            raise OperationError(
                "BOOTSTRAP_TCP_CONNECTION_FAILED_ERROR",
                f"{request.remote} does not answer as a link listener: --remote is the [link_listener] address of a "
                "proxy of the other cluster; this proxy's log says what happened",
                503,
            ) from error
        except LinkRejected as error:
            raise OperationError(error.code, f"{request.remote} refused: {error.message}", 409) from error
        try:
            await self._create_over(connection, name, link_id, request.remote, copy, grants)
        except LinkRejected as error:
            raise OperationError(error.code, f"the other cluster refused: {error.message}", 409) from error
        except (LinkLost, TimeoutError) as error:
            raise OperationError("UNAVAILABLE", f"the other cluster did not answer: {error}", 503) from error
        finally:
            await connection.stopped()
        await self._connected(name)

    async def _connected(self, name: str) -> None:
        """Give a new link a while to connect, which all that is asked of it next takes. If not, status says why."""
        for _ in range(CONNECT_POLLS):
            if self._peers.connections(name):
                break
            await asyncio.sleep(CONNECT_POLL_S)

    def _given(self, grants: tuple[Grant, ...], local: bool) -> tuple[Grant, ...]:
        """What is granted with a new link. ``local``: no token was shown for it, which is a setting of this machine."""
        context = self._context
        everything = local and context.link_policy.allow_local_links and context.control.state.level >= CONSENT
        return EVERYTHING if everything and not grants else grants

    async def _create_over(
        self,
        connection: LinkConnection,
        name: str,
        link_id: str,
        remote: str,
        copy: OffsetsCopy | None,
        grants: tuple[Grant, ...],
    ) -> None:
        context = self._context
        remote_cluster = str(connection.peer.get("cluster_id"))
        if remote_cluster == context.cluster_id:
            raise OperationError(
                "INVALID_REQUEST",
                f"{remote} is of cluster {remote_cluster!r}, and so is this proxy: a link joins two clusters, each "
                "with an id of its own",
                422,
            )
        address = context.link_address
        question = calls.CreateLink(
            name,
            link_id,
            addresses=() if address is None else (address,),
            producer_id_ranges=context.control.state.producer_id_ranges,
            offsets_topic=choice(copy),
            anchor=self._own_anchor(),
        )
        answer = await connection.call(question, CREATE_TIMEOUT_S)
        secret = context.seal(connection.agreed_secret(link_id), link_id)
        try:
            self._check_unique(name, remote_cluster, answer.anchor)
            await self._register_ranges(answer.producer_id_ranges)
            await self._commands.append(
                CreateLink(
                    name,
                    link_id,
                    remote_cluster,
                    dials=True,
                    remote_addresses=tuple(dict.fromkeys([remote, *answer.addresses])),
                    local_addresses=() if address is None else (address,),
                    secret=secret,
                    grants=grants,
                )
            )
        except OperationError:
            try:
                await connection.call(calls.UndoCreateLink(name, link_id))
            except (LinkRejected, LinkLost, TimeoutError):
                pass  # the other half stays behind; the next attempt replaces it
            raise
        if copy is not None:
            await self._commands.append(SetOffsetsTopic(name, Role.LEADER, copy))

    async def on_create_link(self, connection: LinkConnection, question: calls.CreateLink) -> calls.CreateLinkAnswer:
        """The other side creates a link with this cluster. Raises LinkRejected, OperationError."""
        context = self._context
        name, link_id = question.link_name, question.link_id
        remote_cluster = str(connection.peer.get("cluster_id"))
        token = str(connection.peer.get("token", ""))
        known, copy = context.control.state.links.get(name), chosen_copy(question.offsets_topic)
        if copy is not None:
            self._offsets_topics.check_name(remote_cluster)
        self._check_unique(name, remote_cluster, question.anchor)
        if copy is not None and token:
            self._check_copy(name, token)
        if known is not None:
            # An earlier attempt whose other half was never recorded holds no namespace and never connected.
            if known.remote_cluster_id != remote_cluster or known.mappings or self._peers.connections(name):
                raise LinkRejected("ALREADY_EXISTS", f"it has a link {name!r} with cluster {known.remote_cluster_id}")
            await self._commands.append_for_peer(DeleteLink(name))
        await self._register_ranges_for_peer(question.producer_id_ranges)
        for cluster in (remote_cluster, context.cluster_id):
            await self._register_ranges_for_peer({cluster: self._free_range(cluster)})
        address = context.link_address
        await self._commands.append_for_peer(
            CreateLink(
                name,
                link_id,
                remote_cluster,
                dials=False,
                remote_addresses=question.addresses,
                local_addresses=() if address is None else (address,),
                secret=context.seal(connection.agreed_secret(link_id), link_id),
                token=token,
                grants=self._given((), local=not token),
            )
        )
        if copy is not None:
            for_peer = context.control.state.level >= CONSENT
            await self._commands.append_for_peer(SetOffsetsTopic(name, Role.FOLLOWER, copy, for_peer))
        return calls.CreateLinkAnswer(
            () if address is None else (address,),
            producer_id_ranges=context.control.state.producer_id_ranges,
            anchor=self._own_anchor(),
        )

    def _own_anchor(self) -> str | None:
        own = self._context.control.anchors.own()
        return None if own is None else own.encode()

    def _check_unique(self, name: str, cluster_id: str, anchor: str | None) -> None:
        """Refuse a cluster with the id of another one, to which a link goes already: its control log is another one.

        ``anchor``: of that log, as it says itself. Raises OperationError.
        """
        state, heard = self._context.control.state, self._context.control.anchors.heard_of(cluster_id)
        other = next(
            (each for each in state.links if each != name and state.links[each].remote_cluster_id == cluster_id), None
        )
        if other is None or heard is None or anchor is None:
            return
        try:
            told = Anchor.decode(anchor)
        except MalformedAnchor:
            return  # a newer version's
        if told.generation == heard.generation and told.topic_id != heard.topic_id:
            raise OperationError(
                ReasonCode.PEER_IS_ANOTHER_CLUSTER,
                f"link {other!r} of cluster {self._context.cluster_id!r} goes to another cluster with the id "
                f"{cluster_id!r}: linked clusters need ids of their own; if that one is gone, delete the link first",
                409,
            )

    def _check_copy(self, name: str, token_id: str) -> None:
        """Refuse a copy of the other side's offsets topic that its token does not grant, before that is used up."""
        token = self._context.control.state.link_tokens.get(token_id)
        if token is not None and not any(covers(grant, OFFSETS_COPY) for grant in token.grants):
            message = f"the token does not grant --offsets-topic: {not_granted(name, (OFFSETS_COPY,))}"
            raise LinkRejected(ReasonCode.NOT_GRANTED, message)

    async def on_undo_create_link(self, connection: LinkConnection, question: calls.UndoCreateLink) -> calls.Done:
        """The other side could not record its half."""
        known = self._context.control.state.links.get(question.link_name)
        if known is not None and known.link_id == question.link_id:
            await self._commands.append_for_peer(DeleteLink(known.name))
        return calls.Done()

    def _free_range(self, cluster_id: str) -> int:
        """The producer id range of a cluster, or a free one.

        The search begins at a place of the cluster's own, so that clusters which meet later seldom chose the same.
        """
        taken = self._context.control.state.producer_id_ranges
        if cluster_id in taken:
            return taken[cluster_id]
        index = zlib.crc32(cluster_id.encode()) % CLUSTERS_MAX
        while index in taken.values():
            index = (index + 1) % CLUSTERS_MAX
        return index

    async def _register_ranges(self, ranges: Mapping[str, int]) -> None:
        for cluster_id, index in ranges.items():
            await self._commands.append(RegisterProducerIds(cluster_id, index))

    async def _register_ranges_for_peer(self, ranges: Mapping[str, int]) -> None:
        for cluster_id, index in ranges.items():
            await self._commands.append_for_peer(RegisterProducerIds(cluster_id, index))

    async def delete(self, link_name: str, local_only: bool = False) -> None:
        """Delete both ends."""
        link = self._commands.link(link_name)
        if not local_only:
            await self._commands.call(link_name, calls.DeleteLink())
        await self._delete_here(link)

    async def _delete_here(self, link: Link) -> None:
        await some_at_once(DETACHED_AT_ONCE, partial(self._detach_here, link), link.mappings)
        await self._offsets_topics.end(link)
        await self._commands.append(DeleteLink(link.name))

    async def on_delete_link(self, connection: LinkConnection, question: calls.DeleteLink) -> calls.Done:
        link = self._context.control.state.links.get(connection.link_name)
        if link is not None:
            await self._commands.for_peer(self._delete_here(link))
        return calls.Done()
