"""Reversal, asked at the cluster that follows: it has the one that leads carry it out, and tells what that says.

What the operator here may have of the other cluster is what that has granted: it is to follow (``lead:PREFIX`` there).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pydantic import ValidationError

from isthmus_control.model import Link, NamespaceKey, NamespaceMapping, ResourceType, Role
from isthmus_control.outcome import Rejection
from isthmus_plugins import links
from isthmus_plugins.links import NamespaceRef, OperationError, ReverseReport
from isthmus_plugins.replication.link import calls
from isthmus_plugins.replication.link.calls import AttachedPair
from isthmus_plugins.replication.link.connection import LinkConnection, LinkLost, LinkRejected
from isthmus_plugins.replication.link.features import REVERSALS
from isthmus_plugins.replication.operations.commands import LinkCommands
from isthmus_plugins.replication.operations.consents import Consents
from isthmus_plugins.replication.operations.handing_over import TOLD_S, HandingOver

MARGIN_S: Final = 30.0
"""What a reversal takes beside its waits at most."""


class AskedReversals:
    """Reversals of what either cluster leads. Operators' requests raise OperationError."""

    def __init__(self, commands: LinkCommands, consents: Consents, handing_over: HandingOver) -> None:
        self._commands = commands
        self._consents = consents
        self._handing_over = handing_over

    async def reverse(self, link_name: str, request: links.Reverse) -> ReverseReport:
        """Have the other cluster lead, or (``here``) this one.

        Which of them is said, so that a command which is given again changes nothing once it is done.
        """
        link = self._commands.link(link_name)
        followed = []
        for each in request.namespaces:
            key = NamespaceKey(ResourceType(each.type), each.local)
            mapping = link.mapping(*key)
            follows = mapping is not None and mapping.role is Role.FOLLOWER
            if follows and not request.here:
                raise OperationError(
                    "NOT_FOUND",
                    f"the {key} is not led over link {link_name!r} here: the other cluster leads it. `--here` asks it "
                    "to have this one lead",
                    404,
                )
            if request.here and not follows:
                raise OperationError("NOT_FOUND", f"the {key} does not follow over link {link_name!r} here", 404)
            if mapping is not None:
                followed.append(mapping)
        return await (
            self._ask(link, followed, request) if request.here else self._handing_over.reverse(link_name, request)
        )

    async def _ask(self, link: Link, followed: Sequence[NamespaceMapping], request: links.Reverse) -> ReverseReport:
        self._commands.knows(link.name, REVERSALS)
        question = calls.AskReverse(
            tuple(AttachedPair(each.type, each.remote_prefix, each.local_prefix, Role.LEADER) for each in followed),
            round(request.transactions_wait_seconds * 1000),
            round(request.hold_seconds * 1000),
            request.disable_transaction_verification,
            round(request.move_clients_seconds * 1000),
            request.dry_run,
        )
        takes_s = request.transactions_wait_seconds + request.hold_seconds + TOLD_S + MARGIN_S
        try:
            answer = await self._commands.connection(link.name).call(question, timeout_s=takes_s)
        except LinkRejected as error:
            raise OperationError(error.code, f"the other cluster, which leads: {error.message}", 409) from error
        except (LinkLost, TimeoutError) as error:
            raise OperationError(
                "UNAVAILABLE",
                f"the other cluster, which leads, did not say what came of it ({error or 'it took too long'}): isthmus "
                f"link describe {link.name} at either cluster tells who leads, and what is being reversed",
                503,
            ) from error
        return ReverseReport(
            link_name=link.name,
            dry_run=request.dry_run,
            namespaces=request.namespaces,
            refused=list(answer.refused),
            missing=list(answer.missing),
            transactions_open=list(answer.transactions_open),
            reversed=answer.reversed,
            led_here=True,
        )

    async def on_ask(self, connection: LinkConnection, question: calls.AskReverse) -> calls.AskReverseAnswer:
        """The other cluster asks to lead. Raises LinkRejected."""
        name, disable = connection.link_name, question.disable_transaction_verification
        for each in question.pairs:
            self._consents.check_to_follow(name, NamespaceKey(each.type, each.local), disable)
        try:
            request = links.Reverse(
                namespaces=[NamespaceRef(type=each.type.value, local=each.local) for each in question.pairs],
                transactions_wait_seconds=question.transactions_wait_ms / 1000,
                hold_seconds=question.hold_ms / 1000,
                disable_transaction_verification=disable,
                move_clients_seconds=question.move_clients_ms / 1000,
                dry_run=question.dry_run,
            )
        except ValidationError as error:
            raise LinkRejected(Rejection.INVALID.told, str(error)) from error
        report = await self._commands.for_peer(self._handing_over.reverse(name, request))
        return calls.AskReverseAnswer(
            tuple(report.refused), tuple(report.missing), tuple(report.transactions_open), report.reversed
        )
