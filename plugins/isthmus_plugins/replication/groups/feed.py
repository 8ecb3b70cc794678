"""One partition of the offsets topic, as it is pushed over one connection."""

from __future__ import annotations

import asyncio
from typing import Final, NamedTuple

from isthmus_control.directions import pushed
from isthmus_control.model import Link, ResourceType, leads_commits, remote_name
from isthmus_plugins.replication.groups.pushed_partition import PushedPartition
from isthmus_plugins.replication.groups.source import Source
from isthmus_plugins.replication.link import calls
from isthmus_plugins.replication.link.connection import LinkConnection
from isthmus_protocol.offsets_log import OffsetKey

NAMES_MAX: Final = 100_000
"""Whose names at the other end are remembered, for each link."""


class LedGroup(NamedTuple):
    """What a link's status shows of one group that is led."""

    group: str
    remote_group: str
    kind: str | None
    offsets: int
    unmapped_topics: tuple[str, ...]
    """Topics of its committed offsets that no namespace of the link holds: those committed offsets stay here."""
    changed_at: tuple[float, ...] | None
    """When (monotonic seconds) each change of it was read that has not been pushed to the follower end; None: nothing
    of its partition has been."""
    waiting: calls.Waiting | None
    """What the follower's coordinator did not have yet when the follower end was last asked."""
    problem: str | None
    partition: int | None
    """Of the offsets topic; None where the group is gone here."""

    @property
    def pushed(self) -> bool:
        """Whether all of it has been pushed to the follower end."""
        return self.changed_at == ()


class Checked:
    """Whether what a partition's markers have committed may be pushed whole, as far as that is known."""

    __slots__ = ("confirmed", "place", "source", "upto")

    def __init__(self, source: Source, place: PushedPartition, confirmed: int) -> None:
        self.source = source
        self.place = place
        self.confirmed = confirmed
        """The other side has all before this, as it said."""
        self.upto = confirmed
        """The markers before this may be: the other side has the decisions."""


class Feed:
    """What has been pushed to one link's follower end, over one connection."""

    __slots__ = (
        "_remote_names",
        "calls",
        "checked",
        "confirms",
        "connection",
        "fed",
        "held_back",
        "holds_back",
        "idle",
        "link_id",
        "link_name",
        "mappings",
        "pending",
        "pushed",
        "topic_prefixes",
        "wake",
    )

    def __init__(self, link: Link, connection: LinkConnection) -> None:
        self.link_name, self.link_id = link.name, link.link_id
        self.mappings = link.mappings
        led = pushed(link, ResourceType.TOPIC)
        self.topic_prefixes = tuple(sorted(each.remote_prefix for each in led))
        """The other end's topic namespaces whose committed offsets are pushed."""
        self._remote_names: dict[tuple[ResourceType, str], str | None] = {}
        self.connection = connection
        self.confirms = leads_commits(link)
        """Whether the follower end is to say what it has: commits wait for it."""
        self.fed: dict[Source, PushedPartition] = {}
        """Of a link that confirms."""
        self.checked: Checked | None = None
        """Of what is to be pushed whole next."""
        self.calls: set[asyncio.Task[None]] = set()
        """That are not answered."""
        self.pushed: dict[Source, dict[OffsetKey, float]] = {}
        """Partitions that have been pushed whole; what of them changed since then, and when that was read."""
        self.held_back: dict[Source, frozenset[str]] = {}
        """Of partitions that have been pushed but for some topics: those topics. They are pushed whole again later."""
        self.holds_back = False
        """Whether the follower end knows of topics that are not pushed for now; one of before would delete committed
        offsets."""
        self.pending: dict[str, calls.Waiting] = {}
        """By the remote name of the group."""
        self.wake = asyncio.Event()
        self.idle = False
        """Whether all has been pushed that there was when :attr:`wake` was waited for."""

    def remote_group(self, group: str) -> str | None:
        return self._remote_name(ResourceType.CONSUMER_GROUP, group)

    def remote_topic(self, topic: str) -> str | None:
        return self._remote_name(ResourceType.TOPIC, topic)

    def _remote_name(self, kind: ResourceType, name: str) -> str | None:
        try:
            return self._remote_names[kind, name]
        except KeyError:
            if len(self._remote_names) >= NAMES_MAX:
                self._remote_names.clear()
            found = self._remote_names[kind, name] = remote_name(self.mappings, kind, name)
            return found
