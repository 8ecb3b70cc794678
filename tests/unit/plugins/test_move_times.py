"""For how long clients are told, by clocks of which one may be wrong."""

from __future__ import annotations

from isthmus_control.control_state import ControlState
from isthmus_control.model import ClientMove, NamespaceKey, ResourceType, Reversal, ReversalStep
from isthmus_plugins.move_times import MoveTimes

KEY = NamespaceKey(ResourceType.TOPIC, "a-")
BEGUN_MS, FOR_MS = 1_000_000, 60_000


class SetClock:
    def __init__(self, wall_ms: int = BEGUN_MS, now: float = 500.0) -> None:
        self.wall_ms, self.now = wall_ms, now

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.wall_ms / 1000


def state(*moves: ClientMove, reversals: dict[str, Reversal] | None = None) -> ControlState:
    return ControlState("A", client_moves={each.key: each for each in moves}, reversals=reversals or {})


def move(at_ms: int = BEGUN_MS, *, there: bool = False, offset: int = 5) -> ClientMove:
    return ClientMove("l", *KEY, "b-", there, at_ms, FOR_MS, offset)


def test_it_is_over_after_its_time() -> None:
    clock = SetClock()
    times = MoveTimes(clock)
    assert times.here("a-t", 500.0) is None
    times.control_changed(state(move()))
    assert times.any_here(559.9)
    assert not times.any_here(560.0)
    found = times.here("a-t", 559.9)
    assert found is not None
    assert (found.begun, found.until) == (500.0, 560.0)
    assert times.here("a-t", 560.0) is None
    assert times.here("b-t", 500.0) is None
    assert [times.left_s(KEY, at) for at in (500.0, 559.0, 600.0)] == [60.0, 1.0, 0.0]
    times.control_changed(state())
    assert times.left_s(KEY, 500.0) == 0.0


def test_a_wrong_wall_clock_makes_it_no_longer() -> None:
    for ahead_ms, left_s in ((-3_600_000, 60.0), (0, 60.0), (20_000, 40.0), (3_600_000, 0.0)):
        times = MoveTimes(SetClock(BEGUN_MS + ahead_ms))
        times.control_changed(state(move()))
        assert times.left_s(KEY, 500.0) == left_s


def test_what_is_recorded_anew_began_when_it_was_heard_of_first() -> None:
    clock = SetClock()
    times = MoveTimes(clock)
    times.control_changed(state(move()))
    clock.now, clock.wall_ms = 530.0, BEGUN_MS + 30_000
    times.control_changed(state(move(BEGUN_MS + 30_000, offset=7)))
    found = times.here("a-t", 530.0)
    assert found is not None
    assert (found.begun, found.until) == (500.0, 590.0)
    times.control_changed(state(move(BEGUN_MS + 30_000, there=True, offset=8)))
    assert not times.any_here(530.0)
    assert times.left_s(KEY, 530.0) == 60.0


def test_writers_of_what_was_handed_over_are_to_look_before_anybody_leads() -> None:
    for step, for_ms, leaves in (
        (ReversalStep.HELD, FOR_MS, False),
        (ReversalStep.HANDED_OVER, FOR_MS, True),
        (ReversalStep.HANDED_OVER, 0, False),
    ):
        times = MoveTimes(SetClock())
        reversal = Reversal("r", "l", (KEY,), step, "o", 1, 1, move_clients_ms=for_ms)
        times.control_changed(state(reversals={"r": reversal}))
        assert times.leaves("a-t", 500.0) is leaves
        assert not times.leaves("b-t", 500.0)
        assert not times.any_here(500.0)
    times.control_changed(state(move()))
    assert times.leaves("a-t", 559.0)
    assert not times.leaves("a-t", 560.0)
