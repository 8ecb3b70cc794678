"""For how long clients are told to look for another cluster, as a proxy's own clocks say.

The control log says when that began by its writer's clock, and for how long it is to be. A proxy counts by its
monotonic clock from when it heard of it, and no longer than its wall clock says is left: a clock that is wrong makes it
shorter, or as long as was asked for, and a proxy that was started anew does not begin it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from isthmus_control.control_state import ControlState
from isthmus_control.model import ClientMove, NamespaceKey, ResourceType, Reversal, ReversalStep, contains
from isthmus_plugins.process import Clock


class MoveTime(NamedTuple):
    """When a move goes on, in monotonic seconds."""

    move: ClientMove
    begun: float
    """When this proxy heard of it first; of one that is recorded anew, of the one before."""
    until: float


class MoveTimes:
    """Those of the control state."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seen: tuple[Mapping[NamespaceKey, ClientMove], Mapping[str, Reversal]] = ({}, {})
        self._handed_over: tuple[str, ...] = ()
        """Prefixes of topics whose clients will be told once the other cluster leads them."""
        self._times: Mapping[NamespaceKey, MoveTime] = {}

    def control_changed(self, state: ControlState) -> None:
        """The control state is another one. Costs nothing where its moves are the same."""
        if state.client_moves is self._seen[0] and state.reversals is self._seen[1]:
            return
        self._seen = state.client_moves, state.reversals
        handed_over = (
            each for each in state.reversals.values() if each.step is ReversalStep.HANDED_OVER and each.move_clients_ms
        )
        self._handed_over = tuple(
            key.prefix for each in handed_over for key in each.keys if key.type is ResourceType.TOPIC
        )
        self._times = {key: self._time(key, move) for key, move in state.client_moves.items()}

    def __bool__(self) -> bool:
        """Whether anything of it may go on."""
        return bool(self._times)

    def _time(self, key: NamespaceKey, move: ClientMove) -> MoveTime:
        known = self._times.get(key)
        if known is not None and known.move == move:
            return known
        now = self._clock.monotonic()
        until = now + move.left_ms(int(self._clock.time() * 1000)) / 1000
        goes_on = known is not None and known.move.there == move.there
        return MoveTime(move, known.begun if known is not None and goes_on else now, until)

    def over(self, key: NamespaceKey, now: float) -> bool:
        """Whether the time of a namespace's clients is over, or they are not to be told at all."""
        known = self._times.get(key)
        return known is None or now >= known.until

    def left_s(self, key: NamespaceKey, now: float) -> float:
        """How much of it is left, in seconds."""
        known = self._times.get(key)
        return 0.0 if known is None else max(0.0, known.until - now)

    def here(self, topic: str, now: float) -> MoveTime | None:
        """That by which clients of a topic are told, at this cluster; None: they are not."""
        for each in self._times.values():
            if not each.move.there and now < each.until and contains(ResourceType.TOPIC, each.move.prefix, topic):
                return each
        return None

    def leaves(self, topic: str, now: float) -> bool:
        """Whether writers of a topic here are to look for another cluster, which leads it, or is about to."""
        about_to = any(contains(ResourceType.TOPIC, prefix, topic) for prefix in self._handed_over)
        return about_to or self.here(topic, now) is not None

    def any_here(self, now: float) -> bool:
        """Whether clients of any topic are told at this cluster."""
        return any(not each.move.there and now < each.until for each in self._times.values())
