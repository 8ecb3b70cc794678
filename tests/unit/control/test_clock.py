"""The laws of mirrored settings."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from isthmus_control.clock import Hlc, Register, tick
from isthmus_control.model import LinkMode, LinkSettings

times = st.builds(Hlc, st.integers(0, 3), st.integers(0, 2), st.sampled_from("AB"))


# A clock stamps one value at a time, so in these the value follows from the time.


def modes() -> st.SearchStrategy[Register[LinkMode]]:
    return times.map(lambda at: Register(list(LinkMode)[at.counter % 2], at))


settings = st.builds(
    LinkSettings,
    modes(),
    st.dictionaries(st.sampled_from("AB"), times.map(lambda at: Register((str(at),), at)), max_size=2),
    st.dictionaries(
        st.sampled_from(["c1", "c2"]), times.map(lambda at: Register(str(at) if at.counter else None, at)), max_size=2
    ),
)


@given(settings, settings)
def test_merging_is_commutative(a: LinkSettings, b: LinkSettings) -> None:
    assert a.merge(b) == b.merge(a)


@given(settings, settings, settings)
def test_merging_is_associative(a: LinkSettings, b: LinkSettings, c: LinkSettings) -> None:
    assert a.merge(b).merge(c) == a.merge(b.merge(c))


@given(settings, settings)
def test_merging_is_idempotent(a: LinkSettings, b: LinkSettings) -> None:
    assert a.merge(a) == a
    assert a.merge(b).merge(b) == a.merge(b)


@given(settings, settings)
def test_merging_moves_time_forward(a: LinkSettings, b: LinkSettings) -> None:
    assert a.merge(b).newest == max(a.newest, b.newest)


@given(times, st.integers(0, 5))
def test_a_tick_is_later(last: Hlc, now_ms: int) -> None:
    new = tick(last, now_ms, "A")
    assert new > last
    assert (new.wall_ms, new.counter) > (last.wall_ms, last.counter)
    assert new.wall_ms >= now_ms
