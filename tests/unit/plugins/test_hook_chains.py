"""Several hooks for one API: what each makes of a request is what the next one sees."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from isthmus_plugins.api import (
    NEED_MORE,
    WITHOUT_RECORDS,
    Answer,
    Ask,
    Client,
    Close,
    Gate,
    Hold,
    Leave,
    Replace,
    Request,
    ResponseHook,
    Verdict,
)
from isthmus_plugins.chain import Chain

Hook = Callable[[Request], Verdict]


def request(frame: bytes = b"0") -> Request:
    return Request(frame, True, 3, 1, 5, 0.0, Client(1, "a", 1))


def appending(text: bytes) -> Hook:
    """Replaces a request by one with ``text`` behind it, and puts it behind the answer, too."""
    return lambda asked: Replace(asked.frame + text, lambda frame: frame + text, text.decode())


async def held(verdict: Verdict) -> Verdict:
    return verdict


def holding(verdict: Verdict) -> Hook:
    return lambda asked: Hold(held(verdict))


def asking(verdict: Verdict) -> Hook:
    """Asks the broker first, and goes by what it is told."""

    def then(answer: bytes) -> Verdict:
        assert answer == b"told"
        return verdict

    return lambda asked: Ask(b"question", then)


def nothing(asked: Request) -> Verdict:
    return None


def decided(*hooks: Hook) -> Verdict:
    async def run() -> Verdict:
        verdict = Chain(hooks)(request())
        while isinstance(verdict, Hold | Ask):
            verdict = await verdict.verdict if isinstance(verdict, Hold) else verdict.then(b"told")
        return verdict

    return asyncio.run(run())


def test_a_replacement_is_what_the_hooks_behind_see_and_they_see_the_answer_first() -> None:
    for hooks in (
        (appending(b"a"), nothing, appending(b"b")),
        (holding(Replace(b"0a", lambda frame: frame + b"a", "a")), appending(b"b")),
        (appending(b"a"), holding(Replace(b"0ab", lambda frame: frame + b"b", "b"))),
        (asking(Replace(b"0a", lambda frame: frame + b"a", "a")), appending(b"b")),
        (appending(b"a"), asking(Replace(b"0ab", lambda frame: frame + b"b", "b"))),
    ):
        verdict = decided(*hooks)
        assert isinstance(verdict, Replace)
        assert (verdict.frame, verdict.cause) == (b"0ab", "a")
        assert verdict.on_response is not None
        assert verdict.on_response(b"x") == b"xba"


def test_hooks_see_an_answer_behind_the_gate_of_another_one_when_that_opens() -> None:
    gate = Gate()
    verdict = decided(appending(b"a"), lambda asked: Replace(asked.frame, lambda frame: gate), appending(b"b"))
    assert isinstance(verdict, Replace)
    assert verdict.on_response is not None
    assert verdict.on_response(b"x") is gate
    gate.open(b"y")
    assert gate.answer() == b"ya"
    gated = decided(lambda asked: Replace(b"1", lambda frame: gate), lambda asked: Answer(b"mine", "cause"))
    assert gated == Answer(gate, "cause")


def test_an_answer_goes_through_those_that_replaced_the_request() -> None:
    verdict = decided(appending(b"a"), lambda asked: Answer(b"mine", "cause"), appending(b"b"))
    assert verdict == Answer(b"minea", "cause")
    assert decided(lambda asked: Replace(b"1"), lambda asked: Answer(b"mine", "c")) == Answer(b"mine", "c")


def test_other_verdicts_end_the_matter() -> None:
    close = Close("why")
    assert decided(lambda asked: close, appending(b"a")) is close
    assert decided(appending(b"a"), lambda asked: close) is close
    assert decided(holding(close), appending(b"a")) is close
    assert decided(holding(None), lambda asked: close) is close
    assert decided(asking(close), appending(b"a")) is close
    assert decided(asking(None), lambda asked: close) is close
    assert decided(appending(b"a"), asking(close)) is close
    assert decided(holding(asking(close)(request())), appending(b"a")) is close
    assert decided(nothing, nothing) is None
    assert decided(nothing, lambda asked: NEED_MORE) is NEED_MORE


def test_replacements_without_an_eye_on_the_answer() -> None:
    verdict = decided(lambda asked: Replace(b"1"), lambda asked: Replace(asked.frame + b"2"))
    assert verdict == Replace(b"12")
    one_eye = decided(appending(b"a"), lambda asked: Replace(asked.frame))
    assert isinstance(one_eye, Replace)
    assert one_eye.on_response is not None
    assert one_eye.on_response(b"x") == b"xa"


def looking(text: bytes, leave: bool = True) -> Hook:
    """Leaves requests as they are, puts ``text`` behind their answers, and what came of the request."""

    def look(frame: bytes, now: float) -> ResponseHook | None:
        return None if frame == b"unknown" else lambda answer: answer + text + frame

    def hook(asked: Request) -> Verdict:
        asked.leave = Leave(float("inf"), look if leave else None)
        return Replace(asked.frame, look(asked.frame, 0.0))

    return hook


def leaving(asked: Request) -> Verdict:
    asked.leave = Leave(float("inf"))
    return None


def test_leave_of_several_hooks_that_look_at_answers_has_each_see_them_in_its_turn() -> None:
    for hooks, expected in (
        ((looking(b"a"), leaving, looking(b"b")), b"xb1a1"),
        ((leaving, looking(b"a")), b"xa1"),
    ):
        asked = request(b"1")
        verdict = Chain(hooks)(asked)
        assert isinstance(verdict, Replace)
        assert verdict.on_response is not None
        assert verdict.on_response(b"x") == expected
        assert asked.leave is not None
        assert asked.leave.answers is not None
        looks = asked.leave.answers(b"1", 0.0)
        assert looks is not None
        assert looks(b"x") == expected
        assert asked.leave.answers(b"unknown", 0.0) is None


def test_there_is_no_leave_where_one_hook_gives_none_for_its_look_at_the_answer() -> None:
    for hooks in (
        (leaving, looking(b"a", leave=False)),
        (looking(b"a"), nothing),
        (looking(b"a"), appending(b"b"), leaving),
    ):
        asked = request()
        assert isinstance(Chain(hooks)(asked), Replace)
        assert asked.leave is None
    plain = request()
    assert Chain((leaving, leaving))(plain) is None
    assert plain.leave is not None
    assert plain.leave.answers is None


def test_what_is_refused_without_its_records_is_so_unless_a_hook_before_wants_to_see_them() -> None:
    def refusing(asked: Request) -> Verdict:
        return WITHOUT_RECORDS

    def wanting(asked: Request) -> Verdict:
        return NEED_MORE

    assert decided(nothing, refusing, wanting) is WITHOUT_RECORDS
    assert decided(wanting, refusing) is NEED_MORE
