"""Tells a link's target which topics of this cluster were deleted for certain, so that it may delete its own.

A topic that is missing in a list may be one that this proxy may not describe any more, or that the broker which was
asked has not heard of. So every broker is asked, by the topic's id, which no other topic ever gets. And a topic that is
truncated, and made anew for that, was not deleted: this stands in the control log before. A proxy with a lease has
applied all that was there when the lease was renewed last, so what was gone a lease ago, and was not truncated as far
as is known now, was not truncated.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

from isthmus_control.commands import is_uuid
from isthmus_control.directions import pushed
from isthmus_control.model import ResourceType
from isthmus_plugins.cluster import BrokerUnavailable, KafkaRefused
from isthmus_plugins.process import PluginContext, check_lease
from isthmus_plugins.replication.link import calls, reasons
from isthmus_plugins.replication.link.call_codec import Answering
from isthmus_plugins.replication.link.connection import INVALID_REQUEST, LinkConnection, LinkRejected
from isthmus_plugins.replication.link.part import Part

FORGOTTEN_S: Final = 30.0


class _Gone(NamedTuple):
    """A topic that is not there. Both are monotonic seconds."""

    since: float
    asked: float
    """When it was asked for last."""


class DeletedTopics(Part):
    """What this proxy has seen to be gone, again and again as targets ask."""

    def __init__(self, context: PluginContext) -> None:
        self._context = context
        self._gone: dict[str, _Gone] = {}
        """By topic id."""

    def answers(self) -> Sequence[Answering]:
        return (calls.DeletedTopics.by(self.on_deleted_topics),)

    async def on_deleted_topics(
        self, connection: LinkConnection, question: calls.DeletedTopics
    ) -> calls.DeletedTopicsAnswer:
        """Say which of these were deleted for certain. Those that are gone for less than a lease are not yet.

        Raises LinkRejected.
        """
        if (odd := next((each for each in question.topic_ids if not is_uuid(each)), None)) is not None:
            raise LinkRejected(INVALID_REQUEST, f"{odd!r} is no topic id")
        deleted = await self.certain(question.topic_ids)
        # As they are now: who deletes a topic that it detached before has a proxy with a lease know of that.
        self._check_led(connection.link_name, question.prefix)
        anchor = self._context.control.anchors.own()
        return calls.DeletedTopicsAnswer(tuple(sorted(deleted)), "" if anchor is None else anchor.log)

    async def certain(self, topic_ids: Collection[str]) -> set[str]:
        """Those of these topics that were deleted for certain, when they are asked for again and again.

        Raises LinkRejected.
        """
        ids = {topic_id: uuid.UUID(topic_id).bytes for topic_id in topic_ids}
        looked_at = self._context.clock.monotonic()
        try:
            check_lease(self._context)
            unknown = await self._context.cluster.unknown_topics(ids.values(), self._context.cluster_id)
            check_lease(self._context)
        except (BrokerUnavailable, KafkaRefused) as error:
            raise LinkRejected(reasons.BROKER_UNAVAILABLE, str(error)) from error
        gone = {name for name, topic_id in ids.items() if topic_id in unknown}
        self._note(ids.keys() - gone, gone, looked_at)
        made_anew, lease_s = self._made_anew(gone), self._lease_s()
        return {name for name in gone - made_anew if looked_at - self._gone[name].since > lease_s}

    def _check_led(self, link_name: str, prefix: str) -> None:
        """Raise LinkRejected where this cluster does not lead these topics over the link."""
        link = self._context.control.state.links.get(link_name)
        led = () if link is None else pushed(link, ResourceType.TOPIC)
        if all(mapping.local_prefix != prefix for mapping in led):
            raise LinkRejected(reasons.NOT_LED, f"this cluster leads no topics {prefix!r} over {link_name!r}")

    def _note(self, there: Collection[str], gone: Collection[str], now: float) -> None:
        """Note what was seen of topics, and forget those for which nobody has asked for long."""
        before = {
            name: each for name, each in self._gone.items() if name not in there and now - each.asked < FORGOTTEN_S
        }
        self._gone = before | {name: _Gone(before[name].since if name in before else now, now) for name in gone}

    def _lease_s(self) -> float:
        """How long this proxy may go on after it was told last that it has a lease. Raises LinkRejected."""
        lease = self._context.control.state.proxies.get(self._context.proxy_name)
        if lease is None or lease.incarnation != self._context.incarnation:
            raise LinkRejected(reasons.NO_LEASE, "this proxy has no lease now")
        return lease.lease_ms / 1000

    def _made_anew(self, topic_ids: Collection[str]) -> set[str]:
        """Those of the topics that are truncated, or were."""
        state = self._context.control.state
        truncated = {each.topic_id for each in (*state.truncations.values(), *state.past_truncations)}
        truncated |= {each.new_topic_id for each in state.truncations.values() if each.new_topic_id is not None}
        truncated |= {each.former for chain in state.successions.values() for each in chain}
        return truncated.intersection(topic_ids)
