"""What may happen as often as anybody likes has few lines, and none of it is uncounted."""

from __future__ import annotations

import asyncio

from support.loopback import run_on_loopback

from isthmus_plugins.rarely import EACH_S, NAMES_MAX, OTHERS, RarelyEach


def test_each_name_has_a_line_at_once_and_then_one_a_minute() -> None:
    lines: list[tuple[int, str]] = []

    async def main() -> None:
        rarely: RarelyEach[str] = RarelyEach(lambda count, detail: lines.append((count, detail)))
        for number in range(100):
            rarely.one("a", f"a {number}")
            rarely.one("b", f"b {number}")
        assert lines == [(1, "a 0"), (1, "b 0")]
        await asyncio.sleep(EACH_S + 1)
        assert lines[2:] == [(99, "a 99"), (99, "b 99")]
        rarely.one("a", "a 100")
        await asyncio.sleep(EACH_S)
        assert lines[4:] == [(1, "a 100")]
        await asyncio.sleep(2 * EACH_S)
        rarely.one("b", "b 100")
        assert lines[5:] == [(1, "b 100")], "a name that was quiet has a line at once"

    run_on_loopback(main())


def test_names_are_bounded() -> None:
    counts: dict[str, int] = {}

    async def main() -> None:
        def say(count: int, name: str) -> None:
            counts[name] = counts.get(name, 0) + count

        rarely: RarelyEach[str] = RarelyEach(say)
        for number in range(3 * NAMES_MAX):
            rarely.one(str(number), str(number) if number < NAMES_MAX else OTHERS)
        assert len(rarely._waiting) <= NAMES_MAX + 1
        assert len(counts) == NAMES_MAX + 1
        await asyncio.sleep(2 * EACH_S + 1)
        assert sum(counts.values()) == 3 * NAMES_MAX
        assert not rarely._waiting

    run_on_loopback(main())
