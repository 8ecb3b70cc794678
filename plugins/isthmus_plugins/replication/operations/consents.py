"""What the other cluster of a link may have done here, and what waits for an operator, at either side.

attach ──> ask the other side ── nothing is missing ──> attached at both ends
                │ something is
                └─> recorded at both sides ──> the operator there grants it ──> this side, which asks
                    again and again, attaches it
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final

from isthmus_control.commands import ChangeGrants, CreateToken, DeleteToken, RequestAttach, WithdrawAttach
from isthmus_control.grants import lacks, missing, needed, needed_for, not_granted, parse_grant
from isthmus_control.levels import CONSENT
from isthmus_control.model import (
    AttachRequest,
    Grant,
    Link,
    NamespaceKey,
    ResourceType,
    Role,
)
from isthmus_control.states import ReasonCode
from isthmus_control.tokens import NoToken, Token
from isthmus_plugins import links
from isthmus_plugins.links import OperationError, WaitingMapping
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.link import calls
from isthmus_plugins.replication.link.connection import LinkConnection, LinkRejected
from isthmus_plugins.replication.link.features import CONSENTS
from isthmus_plugins.replication.link.peers import LinkPeers
from isthmus_plugins.replication.operations.commands import LinkCommands
from isthmus_plugins.tasks import Tasks
from isthmus_protocol.offsets_log import OFFSETS_TOPIC

log = logging.getLogger("isthmus_plugins.replication")

AGAIN_S: Final = 2.0
"""So often what waits is asked for again: so long after a grant it may take."""
FAILED_S: Final = 10.0
"""The same of what is granted, and could not be attached."""


class Consents:
    """``attach`` attaches a pair as operators do; it and all else that operators ask for raises OperationError."""

    def __init__(
        self,
        context: PluginContext,
        commands: LinkCommands,
        peers: LinkPeers,
        attach: Callable[[str, links.Attach], Awaitable[links.AttachResult]],
    ) -> None:
        self._context = context
        self._commands = commands
        self._peers = peers
        self._attach = attach
        self._tasks = Tasks("consents", context.supervision)
        self._missing: dict[tuple[str, NamespaceKey], tuple[str, ...]] = {}
        """What the other side said last that it has not granted."""
        self._failed: dict[tuple[str, NamespaceKey], tuple[float, str]] = {}
        """What could not be attached although it was granted: when that was tried, and why not."""

    def start(self) -> None:
        self._tasks.keep("attach", self._attach_for_ever)

    async def stop(self) -> None:
        await self._tasks.close()

    # ---- tokens and grants ----

    async def create_token(self, request: links.CreateToken) -> links.NewToken:
        """Make a token, with which another cluster may make one link with this one."""
        token, now_ms = Token.new(), int(self._context.clock.time() * 1000)
        expires_ms = now_ms + request.expires_seconds * 1000
        grants = grants_of(request.may)
        sealed = self._context.seal(token.acceptor_key, token.token_id)
        await self._commands.append(CreateToken(token.token_id, token.public_key, sealed, grants, expires_ms))
        return links.NewToken(
            token_id=token.token_id,
            may=list(map(str, grants)),
            created_ms=now_ms,
            expires_ms=expires_ms,
            token=token.text,
        )

    def tokens(self) -> list[links.TokenStatus]:
        """Those that nobody has used, and that have not expired."""
        now_ms = self._context.clock.time() * 1000
        return [
            links.TokenStatus(
                token_id=each.token_id,
                may=list(map(str, each.grants)),
                created_ms=each.created_ms,
                expires_ms=each.expires_ms,
            )
            for _, each in sorted(self._context.control.state.link_tokens.items())
            if now_ms < each.expires_ms
        ]

    async def delete_token(self, token_id: str) -> None:
        await self._commands.append(DeleteToken(token_id))

    def grants(self, link_name: str) -> links.GrantsStatus:
        """What the other cluster of a link may have done here."""
        link = self._commands.link(link_name)
        return links.GrantsStatus(
            link_name=link_name,
            enforced=self._enforced,
            may=[str(each) for each in link.grants if not each.attached],
            attached=[str(each) for each in link.grants if each.attached],
            waiting=self.waiting(link),
        )

    async def change(self, link_name: str, given: list[str], taken: list[str]) -> links.GrantsStatus:
        """Grant and revoke; what is attached goes on."""
        self._commands.link(link_name)
        await self._commands.append(ChangeGrants(link_name, grants_of(given), grants_of(taken)))
        return self.grants(link_name)

    # ---- this side asks ----

    async def ask(self, link_name: str, request: links.Attach) -> tuple[str, ...]:
        """What the other side has not granted for an attach; it is shown to its operator, but in a dry run."""
        if not self._commands.all_know(link_name, CONSENTS):
            return ()  # an older version grants all
        leads = Role(request.role) is Role.LEADER
        answer = await self._commands.call(
            link_name,
            calls.AskAttach(
                ResourceType(request.type),
                request.remote,
                request.local,
                Role(request.role).other,
                # What becomes of the follower is the follower's consent.
                truncate_target=leads and (request.truncate_target or request.cut is not None),
                disable_transaction_verification=leads and request.disable_transaction_verification,
                dry_run=request.dry_run,
                on_source_loss=request.loss if leads else None,
                on_source_delete=request.deletion if leads else None,
            ),
        )
        return answer.missing

    async def wait(self, link: Link, request: links.Attach, lacking: tuple[str, ...]) -> links.AttachResult:
        """Have a pair wait that the other side has not granted, unless that is a dry run."""
        if not request.dry_run:
            if not self._enforced:
                raise OperationError(
                    ReasonCode.NOT_GRANTED,
                    f"{_words(link.name, lacking)}; then attach it again (it waits by itself once this cluster's "
                    "control log is upgraded: isthmus control upgrade)",
                )
            asked = request.waiting()
            known = link.waits(asked.type, asked.local_prefix)
            if known is None or not _is_same(known, asked):
                await self._commands.append(RequestAttach(link.name, asked))
            self._missing[link.name, NamespaceKey(asked.type, asked.local_prefix)] = lacking
            await self.ask(link.name, request)  # recorded here, it is said again whatever happens now
        return links.AttachResult(
            link_name=link.name,
            local=request.local,
            remote=request.remote,
            role=request.role,
            dry_run=request.dry_run,
            missing_grants=list(lacking),
        )

    async def withdraw(self, link: Link, request: AttachRequest, local_only: bool) -> None:
        """Have a pair wait no more, at both sides."""
        await self._commands.append(WithdrawAttach(link.name, request.type, request.local_prefix))
        if not local_only:
            await self._commands.call(link.name, calls.Detach(request.type, request.remote_prefix))

    async def _attach_for_ever(self) -> None:
        """What waits is attached once that is granted, by the first of this cluster's proxies."""
        while True:
            proxies = self._context.control.state.proxies
            if self._enforced and self._context.proxy_name == min(proxies, default=None):
                for link in list(self._context.control.state.links.values()):
                    for request in link.waiting:
                        if request.asked_here and self._peers.connections(link.name):
                            await self._try(link, request)
            await asyncio.sleep(AGAIN_S)

    async def _try(self, link: Link, request: AttachRequest) -> None:
        place = link.name, NamespaceKey(request.type, request.local_prefix)
        failed_at, _ = self._failed.get(place, (-FAILED_S, ""))
        now = self._context.clock.monotonic()
        if now - failed_at < FAILED_S:
            return
        try:
            result = await self._attach(link.name, links.Attach.again(request))
        except OperationError as error:
            self._failed[place] = now, error.message
            log.warning("what was granted is not attached", extra={"link": link.name, "detail": error.message})
            return
        self._failed.pop(place, None)
        if not result.missing_grants:
            self._missing.pop(place, None)
            log.info("attached what was granted", extra={"link": link.name, "namespace": str(place[1])})

    # ---- the other side asks ----

    async def on_ask(self, connection: LinkConnection, question: calls.AskAttach) -> calls.AskAttachAnswer:
        """The other side is about to attach a pair."""
        link = self._context.control.state.links.get(connection.link_name)
        if link is None or not self._enforced:
            return calls.AskAttachAnswer()
        asked = _asked(question)
        lacking = lacks(link, asked)
        known = link.waits(asked.type, asked.local_prefix)
        waits = known is not None and (known.asked_here or _is_same(known, asked))
        if lacking and not question.dry_run and not waits:
            await self._commands.append_for_peer(RequestAttach(link.name, asked))
        return calls.AskAttachAnswer(tuple(map(str, lacking)))

    async def on_detach(self, link: Link, question: calls.Detach) -> None:
        """The other side does not want a pair any more, or does not grant it."""
        if link.waits(question.type, question.local) is not None:
            withdraw = WithdrawAttach(link.name, question.type, question.local, for_peer=True)
            await self._commands.append_for_peer(withdraw)

    def check(self, link_name: str, question: calls.PlanAttach | calls.CheckAcls) -> None:
        """Raise LinkRejected where the other side asks about what it may not have attached."""
        link = self._context.control.state.links.get(link_name)
        if link is None or not self._enforced:
            return
        lacking = lacks(link, _asked(question))
        if lacking:
            raise LinkRejected(ReasonCode.NOT_GRANTED, not_granted(link_name, lacking))

    def check_led(self, link_name: str, prefix: str) -> None:
        """Raise LinkRejected where the other side asks for topics that it may not follow."""
        link = self._context.control.state.links.get(link_name)
        if link is None or not self._enforced:
            return
        if prefix == OFFSETS_TOPIC and link.offsets_topic(Role.LEADER) is not None:
            return
        lacking = missing(link, needed(ResourceType.TOPIC, prefix, Role.LEADER))
        if lacking:
            raise LinkRejected(ReasonCode.NOT_GRANTED, not_granted(link_name, lacking))

    def check_to_follow(self, link_name: str, key: NamespaceKey, disable_transaction_verification: bool) -> None:
        """Raise LinkRejected where the other side asks this one to follow what it leads, and may not."""
        link = self._context.control.state.links.get(link_name)
        if link is None or not self._enforced:
            return
        wanted = needed(*key, Role.FOLLOWER, disable_transaction_verification=disable_transaction_verification)
        lacking = missing(link, wanted)
        if lacking:
            raise LinkRejected(ReasonCode.NOT_GRANTED, not_granted(link_name, lacking))

    @property
    def for_peer(self) -> bool:
        """Whether commands say that the other side asked for them."""
        return self._enforced

    @property
    def _enforced(self) -> bool:
        return self._context.control.state.level >= CONSENT

    # ---- status ----

    def waiting(self, link: Link) -> list[WaitingMapping]:
        """What is to be attached, and what it waits for."""
        return [self._waiting(link, each) for each in link.waiting]

    def _waiting(self, link: Link, request: AttachRequest) -> WaitingMapping:
        place = link.name, NamespaceKey(request.type, request.local_prefix)
        if request.asked_here:
            there = _from_there(request)
            lacking = self._missing.get(place) or tuple(map(str, needed_for(there)))
            _, failed = self._failed.get(place, (0.0, ""))
            message = failed or _words(link.name, lacking)
        else:
            lacking = tuple(map(str, lacks(link, request)))
            message = _words(link.name, lacking) if lacking else "it is granted: the other cluster attaches it"
        return WaitingMapping(
            type=request.type.value,
            local=request.local_prefix,
            remote=request.remote_prefix,
            role=request.role.value,
            asked_by="this cluster" if request.asked_here else "the other cluster",
            asked_ms=request.asked_ms,
            missing=list(lacking),
            message=message,
        )


def grants_of(texts: list[str]) -> tuple[Grant, ...]:
    """What operators write. Raises OperationError."""
    try:
        return tuple(dict.fromkeys(map(parse_grant, texts)))
    except ValueError as error:
        raise OperationError("INVALID_REQUEST", str(error), 422) from error


def token_of(text: str) -> Token:
    """The same of a token."""
    try:
        return Token.parse(text)
    except NoToken as error:
        raise OperationError("INVALID_TOKEN", str(error), 422) from error


def _words(link_name: str, lacking: tuple[str, ...]) -> str:
    return not_granted(link_name, map(parse_grant, lacking))


def _asked(question: calls.AskAttach | calls.PlanAttach | calls.CheckAcls) -> AttachRequest:
    """What a peer asks for, as this side records it."""
    request = AttachRequest(question.type, question.local, question.remote, question.role, asked_here=False)
    if isinstance(question, calls.CheckAcls):
        return request
    request = replace(
        request,
        truncate_target=question.truncate_target,
        disable_transaction_verification=question.disable_transaction_verification,
    )
    if isinstance(question, calls.PlanAttach):
        return request
    return replace(request, on_source_loss=question.on_source_loss, on_source_delete=question.on_source_delete)


def _from_there(request: AttachRequest) -> AttachRequest:
    """A request of this side, as the other one sees it."""
    there = AttachRequest(
        request.type, request.remote_prefix, request.local_prefix, request.role.other, asked_here=False
    )
    if request.role is Role.FOLLOWER:
        return there
    return replace(
        there,
        truncate_target=request.truncate_target or request.cut is not None,
        disable_transaction_verification=request.disable_transaction_verification,
        on_source_loss=request.on_source_loss,
        on_source_delete=request.on_source_delete,
    )


def _is_same(known: AttachRequest, asked: AttachRequest) -> bool:
    return replace(known, asked_ms=asked.asked_ms) == asked
