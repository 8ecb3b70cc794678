"""Reads where a follower's log stands: its limits and its producers, once no lost request can change them any more."""

from __future__ import annotations

import asyncio
from typing import Final

from isthmus_plugins.cluster import BrokerUnavailable
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.follower.stream import FollowerStream

LOST_REQUEST_MARGIN_S: Final = 2.0
"""After its connection broke, a request may still be taken up by the broker. From when the broker answers again, it is
not sent again before this time."""
COMMIT_WAIT_S: Final = 10.0
"""How long the in-sync replicas may take to have a log end that was found."""
COMMIT_POLL_S: Final = 0.05


async def read_position(context: PluginContext, stream: FollowerStream, uncertain: bool) -> None:
    """Have the stream's log go on from its limits and the states of its producers, as the partition's leader has them.

    ``uncertain``: a request of ours may still be on its way into the log. The broker has it by the time that it
    answers anything, and a while later it has either appended or dropped it. Raises BrokerUnavailable, KafkaRefused.
    """
    cluster = context.cluster
    await stream.writers.connect()
    if uncertain:
        await cluster.log_end(stream.topic, stream.partition)
        await asyncio.sleep(LOST_REQUEST_MARGIN_S)
    read_at = context.clock.monotonic()
    log_end = await _committed_end(context, stream)
    if log_end:
        log_start, producers = await asyncio.gather(
            cluster.log_start(stream.topic, stream.partition), cluster.producers(stream.topic, stream.partition)
        )
    else:  # nothing was ever there
        log_start, producers = 0, {}
    stream.follower_log.resume(log_start, log_end, producers)
    stream.read_at = read_at


async def _committed_end(context: PluginContext, stream: FollowerStream) -> int:
    """The log end, once all before it is in the in-sync replicas: a new leader may have more than it can keep."""
    cluster, clock = context.cluster, context.clock
    deadline = clock.monotonic() + COMMIT_WAIT_S
    while True:
        log_end = await cluster.log_end(stream.topic, stream.partition)
        if not log_end or await cluster.high_watermark(stream.topic, stream.partition) >= log_end:
            return log_end
        if clock.monotonic() > deadline:
            raise BrokerUnavailable(
                f"{stream.topic}-{stream.partition} ends at {log_end}, and its in-sync replicas do not get there"
            )
        await asyncio.sleep(COMMIT_POLL_S)
