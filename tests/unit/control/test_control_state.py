"""Where two states' tables differ."""

from __future__ import annotations

from isthmus_control.control_state import changed_keys


def test_what_was_replaced_came_or_went_is_named_and_nothing_else() -> None:
    one, two, three = [1], [2], [3]
    before = {"a": one, "b": two}
    assert changed_keys(before, before) == []
    assert changed_keys(before, dict(before)) == []
    assert changed_keys(before, {**before, "b": three}) == ["b"]
    assert changed_keys(before, {**before, "c": three}) == ["c"]
    assert changed_keys(before, {"b": two}) == ["a"]
    assert sorted(changed_keys(before, {"b": three, "c": one})) == ["a", "b", "c"]
