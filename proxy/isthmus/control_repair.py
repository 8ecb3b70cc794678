"""Brings a control topic back that is lost, or its end: written again from an export, or accepted as it is.

An operator's steps, while proxies wait (``isthmus control``). Each may be interrupted and repeated: what it does next
follows from what the topic has. Nothing is written where another one writes, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from isthmus import control_start
from isthmus.anchor_places import AnchorPlace, PlaceUnavailable
from isthmus.control_start import Known
from isthmus.control_topic import TOPIC, ControlTopic, Loaded, command_of
from isthmus.kafka.client import Backoff, ClusterClient
from isthmus_control.anchors import WINDOW
from isthmus_control.exports import Export
from isthmus_control.replica import CONTROL_KEY, RECORDS_MISSING, Halted
from isthmus_control.signing import Signer
from isthmus_plugins.clock import monotonic

BY: Final = "isthmus-control"
"""Who the records of an operator are by."""
FILLERS_AT_ONCE: Final = 10_000
RECORDS_BYTES_AT_ONCE: Final = 1024 * 1024
COMPARED: Final = 2 * WINDOW
"""So many records in front of the topic's end are compared with those that belong there."""
WRITTEN_BY_OTHERS: Final = "WRITTEN_BY_OTHERS"
STALL_TIMEOUT_S: Final = 60.0
DELETE_TIMEOUT_S: Final = 60.0


class RepairRefused(Exception):
    """It would not be what the operator wants. ``code`` is a constant for programs."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Step(StrEnum):
    """What is to be done with the topic."""

    NOTHING = "nothing"
    """It has all of the export."""
    MAKE = "make"
    """There is none, or an empty one."""
    APPEND = "append"
    """It ends before the export does."""
    REPLACE = "replace"
    """It has other records than the export: it is deleted, and made again."""
    ACCEPT = "accept"
    """It stays as it is."""


@dataclass(frozen=True, slots=True)
class Plan:
    """``from_offset``: records from there on are written; ``end_offset``: so far the log goes then. ``given_up``: what
    is lost by that, each a line for people."""

    step: Step
    from_offset: int
    end_offset: int
    given_up: tuple[str, ...] = ()


class ControlRepair:
    """One operator's command on the control topic of a cluster.

    Methods raise PeerFault, ConfigurationError, and Halted where the topic cannot be read as a control log.
    """

    def __init__(self, client: ClusterClient, places: Sequence[AnchorPlace], signer: Signer | None = None) -> None:
        """``client`` is the caller's and stays open. ``places``: where anchors are looked for. ``signer``: has the
        control key, if there is one."""
        self._client = client
        self._places = places
        self._topic = ControlTopic(client, signer)

    # --- What is to be done

    async def known(self) -> Known:
        """What the places know of the log."""
        found, unavailable = [], []
        for place in self._places:
            try:
                anchor = await place.read(self._client.cluster_id or "")
            except PlaceUnavailable as error:
                unavailable.append(error)
            else:
                found += [(place.name, anchor)] if anchor is not None else []
        return Known(tuple(found), tuple(unavailable))

    async def plan(self, export: Export, known: Known) -> Plan:
        """What brings the topic to what the export has. Raises RepairRefused."""
        if export.cluster_id != self._client.cluster_id:
            raise RepairRefused(
                "OTHER_CLUSTER", f"the export is of cluster {export.cluster_id}, this is {self._client.cluster_id}"
            )
        beyond = tuple(
            f"offsets {export.end} to {anchor.offset} of {anchor.topic_id}, as {place} knows"
            for place, anchor in known.found
            if anchor.generation >= export.generation and anchor.offset >= export.end
        )
        end = await self._topic.end() if await self._topic.find() else 0
        if end == 0:
            return Plan(Step.MAKE, 0, export.end, beyond)
        if await self._differs_at(export, min(end, export.end)) is not None:
            topic_id = self._topic.topic_id
            written = f"offsets up to {end - 1} of {topic_id}, which has other records there than the export, or none"
            return Plan(Step.REPLACE, 0, export.end, (written, *beyond))
        if end < export.end:
            return Plan(Step.APPEND, end, export.end, beyond)
        return Plan(Step.NOTHING, end, end)

    async def _differs_at(self, export: Export, end: int) -> int | None:
        """The first of the last offsets before ``end`` at which something else stands than in the export, if any.

        A log that has records of the export is told by these: below, it may have what the export has a snapshot for.
        """
        begin = max(export.first if end > export.first else 0, end - COMPARED)
        try:
            async for record in self._topic.read(begin, end):
                if record.value != export.value(record.offset):
                    return record.offset
        except Halted as halted:
            if halted.reason != RECORDS_MISSING:
                raise
            return begin
        return None

    async def plan_to_accept(self, known: Known) -> Plan:
        """What accepting the topic as it is gives up."""
        end = await self._topic.end() if await self._topic.find() else 0
        given_up = (
            f"what was behind {end} up to offset {each.offset} of {each.topic_id}, as {place} knows"
            for place, each in known.found
            if end == 0 or each.topic_id != str(self._topic.topic_id) or each.offset >= end
        )
        return Plan(Step.ACCEPT, end, end + 1, tuple(given_up))

    # --- Doing it

    async def write(self, plan: Plan, export: Export, known: Known, wrote: Callable[[int], None]) -> int:
        """Carry out a plan; returns the log's end. ``wrote(offset)`` is called as it goes on. Raises RepairRefused.

        Where the records are the very ones that anchors know, of the topic that they know, nothing has to be accepted.
        """
        if plan.step is Step.REPLACE:
            await self._delete()
        if plan.step in (Step.MAKE, Step.REPLACE):
            await self._topic.make()
        await self._append(export, wrote)
        read = await self._readable(export)
        other = str(self._topic.topic_id) != export.topic_id or await self._has_fillers(export)
        if plan.given_up or (other and read.replica.state.generation <= export.generation):
            read = await control_start.accept(self._topic, known, BY, export.generation)
        return read.end

    async def _readable(self, export: Export) -> Loaded:
        """The log, with the snapshot that stands in front of the export's records: without it they lead nowhere."""
        wanted, state = export.snapshot, export.replica(self._topic.signer).state
        deadline, backoff = monotonic() + STALL_TIMEOUT_S, Backoff()
        while True:
            read = await self._topic.load()
            if wanted is None or read.replica.bases()[0].applied_offset >= wanted.as_of:
                return read
            error = await self._topic.produce([self._topic.encode(command_of(wanted, BY, state, read.recent), state)])
            if error is not None:
                if monotonic() > deadline:
                    raise error
                await self._topic.look_again(backoff)

    async def _has_fillers(self, export: Export) -> bool:
        """Whether fillers stand in front of its records: digests of these are others now, in the same topic, too."""
        before = export.first - 1
        return before >= 0 and [record.value async for record in self._topic.read(before, before + 1)] == [None]

    async def accept(self, known: Known) -> int:
        """Have the topic count as it is; returns its end. Raises RepairRefused where it cannot be read."""
        try:
            return (await control_start.accept(self._topic, known, BY)).end
        except Halted as halted:
            if halted.reason == CONTROL_KEY:
                raise RepairRefused("CONTROL_KEY", str(halted)) from None
            raise RepairRefused(
                "UNREADABLE", f"{halted}: delete the topic and import an export, or start with --new-control-log"
            ) from None

    async def _delete(self) -> None:
        await self._client.delete_topics([TOPIC])
        deadline = monotonic() + DELETE_TIMEOUT_S
        while TOPIC in await self._client.refresh([TOPIC]):
            if monotonic() > deadline:
                raise RepairRefused("NOT_DELETED", f"{TOPIC} is deleted and does not go: try again")
            await asyncio.sleep(0.1)

    async def _append(self, export: Export, wrote: Callable[[int], None]) -> None:
        """Write what belongs there from the topic's end on: what was not answered shows in where it ends then."""
        backoff, expected = Backoff(), await self._topic.end()
        since = monotonic()
        while (end := await self._topic.end()) < export.end:
            if end != expected and await self._differs_at(export, end) is not None:
                raise RepairRefused(WRITTEN_BY_OTHERS, f"another process writes to {TOPIC}: stop it, and try again")
            values = self._next(export, end)
            error = await self._topic.produce(values, compress=end < export.first)
            expected = end + len(values)
            if error is None:
                wrote(expected)
                backoff.reset()
                since = monotonic()
            elif monotonic() - since > STALL_TIMEOUT_S:
                raise error
            else:
                await self._topic.look_again(backoff)
        if (at := await self._differs_at(export, export.end)) is not None:
            raise RepairRefused(
                WRITTEN_BY_OTHERS, f"another process wrote to {TOPIC} at offset {at}: stop it, try again"
            )

    def _next(self, export: Export, offset: int) -> list[bytes | None]:
        if offset < export.first:
            return [None] * min(FILLERS_AT_ONCE, export.first - offset)
        values: list[bytes | None] = []
        size = 0
        for record in export.records[offset - export.first :]:
            size += len(record.value or b"")
            if values and size > RECORDS_BYTES_AT_ONCE:
                break
            values.append(record.value)
        return values
