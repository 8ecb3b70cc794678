"""Recovery: what a cluster led until the other one was failed over follows that one from now on, by one command.

Either cluster may be asked. What it comes to says what both have attached: the old source leads pairs that nobody
follows any more. Each is attached the other way round in one command of its log, so it is reserved before it stops to
lead, and a command that was killed is given again: a pair of which one end is attached already is completed.

Clients may still write at the old source. So it takes no more writes from before its logs are looked at for the last
time; where they are not as they were then, nothing is cut, and the operator looks again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Final

from isthmus_control.model import Link, LinkMode, NamespaceKey, ResourceType, Role
from isthmus_control.states import ReasonCode
from isthmus_plugins import links
from isthmus_plugins.links import AttachResult, OperationError, RecoverReport
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.link import calls
from isthmus_plugins.replication.link.calls import AttachedPair
from isthmus_plugins.replication.link.connection import LinkConnection
from isthmus_plugins.replication.link.features import SHARED_PREFIX
from isthmus_plugins.replication.operations.attaching import Attaching
from isthmus_plugins.replication.operations.commands import LinkCommands

log = logging.getLogger("isthmus_plugins.replication")

ORDER = (ResourceType.TOPIC, ResourceType.CONSUMER_GROUP, ResourceType.PRINCIPAL)
"""Committed offsets are compared with the topics that they are about."""
SHOWN: Final = 3
"""Topics in the words of a refusal."""


class Recovering:
    """Carries out what operators ask for. Everything here raises OperationError."""

    def __init__(self, context: PluginContext, commands: LinkCommands, attaching: Attaching) -> None:
        self._context = context
        self._commands = commands
        self._attaching = attaching

    async def recover(self, link_name: str, request: links.Recover) -> RecoverReport:
        """Have the old source follow, cut to what it shares with the new one."""
        link = self._commands.link(link_name)
        self._commands.knows(link_name, SHARED_PREFIX)
        if link.mode is LinkMode.SYNCHRONOUS:
            raise OperationError(
                "CONFLICT",
                f"link {link_name!r} is synchronous, and what is cut and copied again is not in sync: `isthmus link "
                f"set-mode {link_name} asynchronous` first, on either side",
                409,
            )
        there = await self._commands.call(link_name, calls.AttachedPairs())
        wanted = {NamespaceKey(ResourceType(each.type), each.local) for each in request.namespaces}
        pairs = [
            pair for pair in turned(_attached(link), there.pairs) if not wanted or NamespaceKey(*pair[:2]) in wanted
        ]
        missing = wanted - {NamespaceKey(*pair[:2]) for pair in pairs}
        if missing or not pairs:
            what = ", ".join(sorted(f"the {key}" for key in missing)) or "nothing"
            raise OperationError(
                "NOT_FOUND",
                f"{what} of link {link_name!r} is led by one cluster and not followed by the other one, as it is "
                "after a failover: there is nothing to recover",
                404,
            )
        for pair in pairs:
            self._check_written(pair, there.reserved)
        asked = [self._asked(pair, request) for pair in pairs]
        plans = [await self._attaching.attach(link_name, each, recovers=True) for each in asked]
        if not request.dry_run:
            for plan in plans:
                _check(plan)
            held = [await self._attaching.attach(link_name, each, recovers=True, holds=True) for each in asked]
            for plan in held:
                _check(plan)
            _check_same(plans, held)
            plans = [await self._attach(link_name, *each) for each in zip(asked, held, strict=True)]
        return RecoverReport(link_name=link_name, dry_run=request.dry_run, namespaces=plans)

    def _check_written(self, pair: AttachedPair, reserved: Sequence[calls.NamespaceName]) -> None:
        """Refuse where no cluster was failed over: the one that would lead does not let clients write."""
        if pair.role is Role.LEADER:
            namespace = self._context.control.state.namespaces.get(NamespaceKey(pair.type, pair.local))
            is_reserved, prefix = namespace is not None and namespace.reserved, pair.local
        else:
            is_reserved, prefix = calls.NamespaceName(pair.type, pair.remote) in reserved, pair.remote
        if is_reserved:
            raise OperationError(
                "CONFLICT",
                f"the {NamespaceKey(pair.type, prefix)} is still reserved at the cluster that would lead it: fail it "
                "over there first (isthmus link failover), or attach the pair as it was",
                409,
            )

    @staticmethod
    def _asked(pair: AttachedPair, request: links.Recover) -> links.Attach:
        return links.Attach(
            type=pair.type.value,
            local=pair.local,
            remote=pair.remote,
            role=pair.role.value,
            disable_transaction_verification=request.disable_transaction_verification
            and pair.type is not ResourceType.PRINCIPAL,
            dry_run=True,
        )

    async def _attach(self, link_name: str, asked: links.Attach, plan: AttachResult) -> AttachResult:
        """Attach a pair as it was planned: what is to be cut must still be as it was then."""
        log.warning("namespace recovered", extra={"link": link_name, "namespace": asked.local, "role": asked.role})
        agreed = asked.model_copy(update={"dry_run": False, "cut": plan.cut})
        return await self._attaching.attach(link_name, agreed, recovers=True)

    async def on_attached_pairs(
        self, connection: LinkConnection, question: calls.AttachedPairs
    ) -> calls.AttachedPairsAnswer:
        """What the link has attached here."""
        state = self._context.control.state
        link = state.links.get(connection.link_name)
        reserved = (key for key, namespace in state.namespaces.items() if namespace.reserved)
        return calls.AttachedPairsAnswer(
            () if link is None else _attached(link), tuple(calls.NamespaceName(*key) for key in sorted(reserved))
        )


def turned(here: Iterable[AttachedPair], there: Iterable[AttachedPair]) -> list[AttachedPair]:
    """What is to be attached, as this cluster calls it, of what is attached at one end alone: that end follows.

    It led, or it follows already and the other end does not know. What both ends claim to lead is left alone.
    """
    own = set(here)
    seen_here = {AttachedPair(each.type, each.remote, each.local, each.role.other) for each in there}
    follows = {each[:3] for each in own - seen_here}
    leads = {each[:3] for each in seen_here - own}
    found = [AttachedPair(*each, Role.FOLLOWER) for each in follows - leads]
    found += [AttachedPair(*each, Role.LEADER) for each in leads - follows]
    return sorted(found, key=lambda each: (ORDER.index(each.type), each.local))


def _attached(link: Link) -> tuple[AttachedPair, ...]:
    return tuple(AttachedPair(each.type, each.local_prefix, each.remote_prefix, each.role) for each in link.mappings)


def _check(plan: AttachResult) -> None:
    """Refuse before anything is done what would be refused in the middle. Raises OperationError."""
    refused = [each for each in plan.topics if each.action == "refuse" and each.cut is None]
    if refused:
        raise OperationError(
            ReasonCode.TARGET_TOPIC_NOT_EMPTY, "; ".join(each.reason or each.topic for each in refused), 409
        )
    verification = plan.transaction_verification
    if verification is not None and verification.action == "refuse":
        raise OperationError(ReasonCode.TRANSACTION_VERIFICATION_ENABLED, verification.message or "", 409)


def _check_same(seen: Sequence[AttachResult], held: Sequence[AttachResult]) -> None:
    """Refuse where the old source got something since it was looked at first. Raises OperationError."""
    before = {plan.topic: plan.cut for result in seen for plan in result.topics}
    late = sorted(
        plan.topic for result in held for plan in result.topics if plan.cut and before.get(plan.topic) != plan.cut
    )
    if late:
        more = f" and {len(late) - SHOWN} more topics" if len(late) > SHOWN else ""
        raise OperationError(
            ReasonCode.ENDS_CHANGED,
            f"clients still wrote to {', '.join(late[:SHOWN])}{more} at the old source, which takes no writes from now "
            "on (isthmus namespace alter PREFIX --no-reserved there has it take them again): nothing is cut. See what "
            "it holds alone now with --dry-run, and give the command again",
            409,
        )
