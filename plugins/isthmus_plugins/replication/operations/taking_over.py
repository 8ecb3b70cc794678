"""Reversal, at the cluster that follows: it says when it has all, and leads once it hears that it was handed over.

What it hears counts only as an answer to its own question, from a proxy that has just read the other cluster's control
log to its end. It leads by a promotion that names the reversal, which its own log takes only while it has recorded to
be drained for it: once that is abandoned there, whatever comes late comes too late.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from isthmus_control.commands import AbandonReversal, AcceptReversal
from isthmus_control.model import Link, NamespaceKey, NamespaceMapping, ResourceType, Reversal, Role
from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused, TopicPartition
from isthmus_plugins.links import OperationError
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.link import calls
from isthmus_plugins.replication.link.calls import AttachedPair
from isthmus_plugins.replication.link.connection import LinkConnection, LinkLost, LinkRejected
from isthmus_plugins.replication.operations.commands import LinkCommands
from isthmus_plugins.replication.operations.promotion import NOT_DRAINED, Promotions, other_ends

log = logging.getLogger("isthmus_plugins.replication")

POLL_S: Final = 0.02
"""What is on its way when writes are held is a few milliseconds away."""
ASKED_S: Final = 10.0


class TakingOver:
    """Answers the cluster that leads. Everything here raises LinkRejected."""

    def __init__(self, context: PluginContext, commands: LinkCommands, promotions: Promotions) -> None:
        self._context = context
        self._clock = context.clock
        self._commands = commands
        self._promotions = promotions

    async def on_drain(self, connection: LinkConnection, question: calls.Drain) -> calls.DrainAnswer:
        """Whether this cluster has all, once it has or the time is over; it has recorded that it is to lead then."""
        link = self._link(connection)
        mappings = [self._following(link, pair) for pair in question.pairs]
        body = self._accepts(link, mappings, question)
        try:
            self._commands.would_append(body)
            not_followed, missing = await self._missing(link, mappings, question)
            deadline = self._clock.monotonic() + question.wait_ms / 1000
            while (not_followed or missing) and not question.dry_run and self._clock.monotonic() < deadline:
                await asyncio.sleep(POLL_S)
                not_followed, missing = await self._missing(link, mappings, question)
            if not (not_followed or missing or question.dry_run):
                await self._commands.append(body)
        except OperationError as error:
            raise LinkRejected(error.code, error.message) from error
        except (BrokerUnavailable, KafkaRefused) as error:
            raise LinkRejected("BROKER_UNAVAILABLE", str(error)) from error
        return calls.DrainAnswer((*not_followed, *missing), tuple(not_followed))

    async def _missing(
        self, link: Link, mappings: Sequence[NamespaceMapping], question: calls.Drain
    ) -> tuple[list[str], list[str]]:
        """What no time brings, and what is on its way. Groups are looked at once their topics have all."""
        not_followed, missing = list[str](), list[str]()
        topics = [each for each in mappings if each.type is ResourceType.TOPIC]
        for mapping in topics:
            never, later = await self._promotions.lacking(mapping, question.ends)
            not_followed += never
            missing += later
        if not (not_followed or missing):
            for mapping in mappings:
                if mapping.type is ResourceType.CONSUMER_GROUP:
                    missing += await self._promotions.behind(link, mapping)
        return not_followed, missing

    @staticmethod
    def _accepts(link: Link, mappings: Sequence[NamespaceMapping], question: calls.Drain) -> AcceptReversal:
        keys = [each.local for each in mappings]
        settings = {
            name: dict(values)
            for topic, values in question.settings.items()
            for each in mappings
            if each.type is ResourceType.TOPIC and (name := each.local_name(topic)) is not None
        }
        more, held_at = tuple(keys[1:]), question.held_at
        return AcceptReversal(link.name, *keys[0], more, question.reversal_id, settings, held_at)

    async def on_take_lead(self, connection: LinkConnection, question: calls.TakeLead) -> calls.Done:
        """Lead, if the log of who led says that it was handed over."""
        link, reversal_id = self._link(connection), question.reversal_id
        if self._leads(link, question.pairs):
            return calls.Done()
        state = self._context.control.state
        reversal = state.reversals.get(reversal_id)
        keys = [NamespaceKey(pair.type, pair.local) for pair in question.pairs]
        if reversal is not None and reversal.link == link.name:
            await self._check_handed_over(connection, link, reversal)
            keys = list(reversal.keys)
        elif not any(each.reversal == reversal_id for each in state.promotions.values()):
            raise LinkRejected(
                "NOT_FOUND", "it was never to lead by that reversal here, or that was abandoned, or failed over"
            )
        try:
            await self._promotions.handed_over(link.name, reversal_id, keys)
        except OperationError as error:
            if not self._leads(self._link(connection), question.pairs):
                raise LinkRejected(error.code, error.message) from error
        return calls.Done()

    async def _check_handed_over(self, connection: LinkConnection, link: Link, reversal: Reversal) -> None:
        """Raise LinkRejected unless it was handed over, with the ends that the logs have here."""
        try:
            answer = await connection.call(calls.HandedOver(reversal.reversal_id), timeout_s=ASKED_S)
            handed = {each.topic: each.ends for each in answer.ends}
            ours: dict[TopicPartition, int] = {}
            for topic, ends in handed.items():
                for mapping in link.pairs(Role.FOLLOWER, ResourceType.TOPIC):
                    if (name := mapping.local_name(topic)) is not None:
                        ours |= {(name, partition): end for partition, end in enumerate(ends)}
            here = await self._context.cluster.log_ends(list(ours)) if ours else {}
        except (LinkLost, TimeoutError, BrokerUnavailable) as error:
            raise LinkRejected("UNAVAILABLE", f"it is not known whether it was handed over: {error}") from error
        if differs := other_ends(ours, here):
            raise LinkRejected(
                NOT_DRAINED,
                f"this cluster's logs are not those any more that were handed over: {'; '.join(differs[:5])}. "
                "isthmus link failover here has it lead all the same",
            )

    async def on_abandon(self, connection: LinkConnection, question: calls.AbandonReversal) -> calls.Done:
        """Never lead by a reversal; refused where this cluster does."""
        link = self._link(connection)
        if self._leads(link, question.pairs):
            raise LinkRejected("CONFLICT", "the other cluster leads already")
        await self._commands.append_for_peer(AbandonReversal(link.name, question.reversal_id))
        if self._leads(self._link(connection), question.pairs):
            raise LinkRejected("CONFLICT", "the other cluster leads already")
        return calls.Done()

    def _link(self, connection: LinkConnection) -> Link:
        link = self._context.control.state.links.get(connection.link_name)
        if link is None:
            raise LinkRejected("NOT_FOUND", f"there is no link {connection.link_name!r} here")
        return link

    @staticmethod
    def _following(link: Link, pair: AttachedPair) -> NamespaceMapping:
        mapping = link.mapping(pair.type, pair.local)
        if mapping is None or mapping.role is not Role.FOLLOWER or mapping.remote_prefix != pair.remote:
            raise LinkRejected("NOT_FOUND", f"the {NamespaceKey(pair.type, pair.local)} does not follow there")
        return mapping

    @staticmethod
    def _leads(link: Link, pairs: Sequence[AttachedPair]) -> bool:
        """Whether this cluster leads all of these."""
        found = [link.mapping(each.type, each.local) for each in pairs]
        return bool(found) and all(each is not None and each.role is Role.LEADER for each in found)
