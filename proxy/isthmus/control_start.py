"""Whether the control log that a proxy finds is the one that was there before: decided before it vouches for anything.

A cluster without a control topic, and without a trace of one, gets a new one. Anything else that is not the log that
its anchors are of is lost, and an operator decides: whether it is restored, or given up (:func:`accept`).
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Final

from isthmus.anchor_places import PlaceUnavailable
from isthmus.control_topic import TOPIC, ControlTopic, Loaded, command_of
from isthmus.errors import PeerFault, RequestTimedOut
from isthmus.kafka.client import Backoff
from isthmus_control import anchors
from isthmus_control import replica as replicas
from isthmus_control.anchors import Anchor
from isthmus_control.commands import AcceptLog
from isthmus_control.replica import Halted
from isthmus_plugins.clock import monotonic

log = logging.getLogger("isthmus.control_log")

LOST: Final = anchors.LOST | {replicas.RECORDS_MISSING}
"""Reasons for not vouching that say that the log is lost, or a part of it."""
ACCEPT_TIMEOUT_S: Final = 60.0


class Lost(Halted):
    """The log does not have what ``anchor`` says."""

    def __init__(self, reason: str, message: str, anchor: Anchor) -> None:
        super().__init__(reason, message)
        self.anchor = anchor


@dataclass(frozen=True, slots=True)
class Known:
    """What the places outside of the log know of it. ``found``: by the place's name."""

    found: tuple[tuple[str, Anchor], ...] = ()
    unavailable: tuple[PlaceUnavailable, ...] = ()

    @property
    def generation(self) -> int:
        return max((anchor.generation for _, anchor in self.found), default=0)


async def loaded(topic: ControlTopic, known: Known) -> Loaded:
    """The log, read up to its end.

    Raises Halted (for a reason of :data:`LOST`, or another), ConfigurationError, PeerFault.
    """
    if not await topic.find():
        await _check_new(topic, known, "there is none")
        await topic.make()
    read = await topic.load()
    if read.end == 0:
        await _check_new(topic, known, "it is empty")
    for place, anchor in known.found:
        facts = await topic.facts(anchor, read.replica.state.generation, read.recent)
        if (lost := anchors.why_lost(anchor, facts, place)) is not None:
            raise Lost(lost.reason, str(lost), anchor)
    if read.forked is not None:
        raise read.forked
    unknown = [each for each in known.unavailable if not each.denied]
    if unknown and not known.found:
        raise Halted(anchors.ANCHORS_UNKNOWN, f"whether {TOPIC} lost its end is not known: {unknown[0]}")
    return read


async def _check_new(topic: ControlTopic, known: Known, what: str) -> None:
    """Raise Halted where this cluster had a control log before."""
    for place, anchor in known.found:
        how_far = f"offset {anchor.offset} of {anchor.topic_id} had been applied, as {place} knows"
        raise Lost(anchors.TOPIC_LOST, f"the control topic {TOPIC} is lost, {what}: {how_far}", anchor)
    for unavailable in known.unavailable:
        raise Halted(anchors.ANCHORS_UNKNOWN, f"whether {TOPIC} was lost, since {what}, is not known: {unavailable}")
    for sibling in await topic.siblings():
        made = f"the cluster has {sibling}, which proxies of such a log made"
        raise Halted(anchors.TOPIC_LOST, f"the control topic {TOPIC} is lost, {what}: {made}")


async def accept(topic: ControlTopic, known: Known, by: str, after: int = 0) -> Loaded:
    """Have the log count as it stands, made if it is not there; read up to its end then. ``by``: who decides.

    ``after``: a generation that is known otherwise.
    Raises Halted where it cannot be read as it is, ConfigurationError, PeerFault.
    """
    if not await topic.find():
        await topic.make()
    deadline, backoff = monotonic() + ACCEPT_TIMEOUT_S, Backoff()
    read = await topic.load()
    # Also more than anchors know of that could not be asked.
    generation = max(after + 1, known.generation + 1, read.replica.state.generation + 1, int(time.time() * 1000))
    error: PeerFault | None = None
    while read.replica.state.generation < generation:
        if monotonic() > deadline:
            raise error or RequestTimedOut(f"{TOPIC} does not take the record")
        state = read.replica.state
        command = command_of(AcceptLog(generation), by, state, read.recent)
        error = await topic.produce([topic.encode(command, state)])
        if error is not None:
            log.warning("control log not writable", extra={"topic": TOPIC, "error": str(error)})
            await topic.look_again(backoff)
        read = await topic.load()
    return read
