"""Has consumers that move look for the coordinator of their group again, which is another one then.

A consumer that is told to move (``replication.client_views.client_moves``) leaves the brokers that it knows from
Metadata. Java's keeps its connection to the group's coordinator all the same, and would read at the cluster that leads
now and commit at this one. So a commit of topics whose clients are told is answered NOT_COORDINATOR now and then. Who
has moved finds the coordinator there, and joins the group there; who has not finds the one here again, and commits.

A consumer that names topics by their ids (KIP-848) names them by those of the other cluster once it has moved. Java's
keeps this connection even when it has found the coordinator there, which has the same id. So while clients of any
topics are told, a commit of ids that are unknown here closes its connection. It is no other one's loss: where this
cluster has such a topic, and this proxy has not heard of it yet, the commit is sent again.
"""

from __future__ import annotations

from typing import Final

from isthmus_plugins.api import Close, Request
from isthmus_plugins.aside import on_loop
from isthmus_plugins.move_times import MoveTimes
from isthmus_plugins.process import PluginContext
from isthmus_plugins.reservation.verdicts import topic_of
from isthmus_protocol.messages import decode_request
from isthmus_protocol.refusals import parts_of

AGAIN_S: Final = 10.0
"""How often a connection is told."""
CONNECTIONS_MAX: Final = 10_000
"""That are remembered. Where more were told within :data:`AGAIN_S`, some are told sooner."""
MESSAGE: Final = "another cluster leads these topics: look for the coordinator there"


class Coordinators:
    """Which commits are answered so."""

    def __init__(self, context: PluginContext, moves: MoveTimes) -> None:
        self._context = context
        self._moves = moves
        self._told: dict[int, float] = {}
        """When connections were told last, by their sessions, the longest ago first."""

    def elsewhere(self, request: Request) -> Close | bool:
        """Whether a commit is to be answered so, which is noted, or its connection closed. While nobody moves, this
        costs a look.
        """
        if not self._moves or not self._moves.any_here(request.now):
            return False
        head, payload = decode_request(request.frame)
        names = {topic_of(self._context, part) for part in parts_of(head, payload)}
        if not names or any(self._moves.here(name, request.now) is None for name in names if name is not None):
            return False
        if None in names:
            return Close("it commits in topics of another cluster, while clients are told to move there")
        if request.now - self._told.get(request.client.session_id, -AGAIN_S) < AGAIN_S:
            return False
        on_loop(self._note, request.client.session_id, request.now)
        return True

    def _note(self, session_id: int, now: float) -> None:
        self._told.pop(session_id, None)
        self._told[session_id] = now
        while len(self._told) > CONNECTIONS_MAX or now - self._told[next(iter(self._told))] >= AGAIN_S:
            del self._told[next(iter(self._told))]
