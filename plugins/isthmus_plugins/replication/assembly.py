"""The parts of the replication plugin, made and joined in one place."""

from __future__ import annotations

from typing import Any

from isthmus_plugins.replication.follower.follower_end import FollowerEnd
from isthmus_plugins.replication.groups.follower import GroupFollower
from isthmus_plugins.replication.in_doubt.store import TransactionStore
from isthmus_plugins.replication.leader.leader_end import LeaderEnd
from isthmus_plugins.replication.link.connection import LinkConnection, Receiver
from isthmus_protocol import link


class _Ends(Receiver):
    """Gives what a connection delivers to the end that it is for."""

    def __init__(
        self,
        leader_end: LeaderEnd,
        follower_end: FollowerEnd,
        group_follower: GroupFollower,
        store: TransactionStore,
    ) -> None:
        self._store = store
        self._leader_end = leader_end
        self._follower_end = follower_end
        self._group_follower = group_follower

    def on_append(self, connection: LinkConnection, append: link.Append) -> None:
        self._follower_end.on_append(connection, append)

    def on_call(self, connection: LinkConnection, method: str, params: dict[str, Any]) -> None:
        if method == "decide":
            self._store.announced(connection, params)

    def on_appended(self, connection: LinkConnection, appended: link.Appended) -> None:
        self._leader_end.on_appended(connection, appended)

    def on_stopped(self, connection: LinkConnection, stopped: dict[str, Any]) -> None:
        self._leader_end.on_stopped(connection, stopped)

    def on_writable(self, connection: LinkConnection) -> None:
        self._leader_end.on_writable(connection)

    def on_lost(self, connection: LinkConnection) -> None:
        self._store.connection_lost(connection)
        self._follower_end.connection_lost(connection)
        self._group_follower.connection_lost(connection)
        self._leader_end.connection_lost(connection)
