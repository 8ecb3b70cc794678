"""Records what partitions of synchronous links are: one that the control log refuses keeps no other one out.

A command is accepted whole or refused whole, and partitions are recorded many at once. One whose topic was deleted, or
that another proxy has recorded just now, is left out, and the others are recorded without it.
"""

from __future__ import annotations

import logging
import uuid
from dataclasses import replace

from isthmus_control.apply import apply
from isthmus_control.commands import Command, DegradeSync, PartitionSync, RecordSync
from isthmus_control.outcome import Accepted, Rejected
from isthmus_control.rules.checks import ENTRIES_MAX
from isthmus_plugins.process import PluginContext

log = logging.getLogger("isthmus_plugins.replication")


async def record(context: PluginContext, body: RecordSync | DegradeSync) -> None:
    """Have partitions recorded. Raises BrokerUnavailable, KafkaRefused."""
    for start in range(0, len(body.partitions), ENTRIES_MAX):
        some = body.partitions[start : start + ENTRIES_MAX]
        await _record(context, replace(body, partitions=some))


async def _record(context: PluginContext, body: RecordSync | DegradeSync) -> None:
    """The same of as many as a command may have."""
    while True:
        outcome = await context.control.append(body)
        if isinstance(outcome, Accepted):
            return
        if isinstance(outcome, Rejected):
            log.warning("synchronous state refused", extra={"link": body.link, "detail": outcome.message})
        taken = tuple(entry for entry in body.partitions if _is_taken(context, body, entry))
        if not taken or len(taken) == len(body.partitions):
            return
        body = replace(body, partitions=taken)


def _is_taken(context: PluginContext, body: RecordSync | DegradeSync, entry: PartitionSync) -> bool:
    """Whether the control log would take what is recorded of this partition alone, as it stands here."""
    state, place = context.control.state, (entry.topic, entry.partition)
    found = state.sync_records.get(body.link, {}).get(place)
    # The rules copy all records of a link: it is asked about each of many partitions.
    state = state.evolve(sync_records={body.link: {} if found is None else {place: found}})
    alone = replace(body, partitions=(entry,))
    by, at_ms = context.proxy_name, int(context.clock.time() * 1000)
    command = Command(str(uuid.uuid4()), at_ms, by, state.applied_offset, alone)
    return isinstance(apply(state, state.applied_offset + 1, command)[1], Accepted)
