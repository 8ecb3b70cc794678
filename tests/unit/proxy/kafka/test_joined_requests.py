"""Questions that come while one like them is under way go out together, and each is asked after it came."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from isthmus.errors import ConnectionLost, RequestTimedOut
from isthmus.kafka.joined_requests import JoinedRequests


class Peer:
    """Answers with the questions in capitals, one request at a time, when it is let."""

    def __init__(self) -> None:
        self.requests: list[dict[int, str]] = []
        self.joined: JoinedRequests[int, str, str] = JoinedRequests()
        self.answers = asyncio.Semaphore(0)
        self.fails: Exception | None = None

    async def send(self, asked: Mapping[int, str]) -> Mapping[int, str]:
        self.requests.append(dict(asked))
        await self.answers.acquire()
        if self.fails is not None:
            raise self.fails
        return {key: question.upper() for key, question in asked.items()}

    def let(self, requests: int) -> None:
        """Answer so many more."""
        for _ in range(requests):
            self.answers.release()

    def asks(self, key: int, question: str = "a", at_most: int | None = None, once: bool = False) -> asyncio.Task[str]:
        return asyncio.get_running_loop().create_task(self.ask(key, question, at_most, once))

    async def ask(self, key: int, question: str = "a", at_most: int | None = None, once: bool = False) -> str:
        return (await self.joined.ask({key: question}, self.send, at_most=at_most, once=once))[key]


def test_who_comes_while_one_is_asked_goes_with_the_next() -> None:
    async def test() -> None:
        peer = Peer()
        first = peer.asks(0)
        await asyncio.sleep(0)
        others = [peer.asks(number) for number in range(50)]
        await asyncio.sleep(0)
        assert peer.requests == [{0: "a"}], "who asks alone waits for nobody"
        peer.let(3)
        assert await asyncio.gather(first, *others) == ["A"] * 51
        assert [len(request) for request in peer.requests] == [1, 50], "0 is asked again: it may be another by now"
        assert await peer.ask(7) == "A"
        assert len(peer.requests) == 3

    asyncio.run(test())


def test_other_questions_about_the_same_and_more_than_go_into_one_go_with_later_ones() -> None:
    async def test() -> None:
        peer = Peer()
        first = peer.asks(0)
        await asyncio.sleep(0)
        asked = [peer.asks(number, at_most=20) for number in range(50)]
        asked += [peer.asks(49, "b"), peer.asks(49, "c")]
        await asyncio.sleep(0)
        peer.let(6)
        assert await first == "A"
        assert await asyncio.gather(*asked) == ["A"] * 50 + ["B", "C"]
        assert [len(request) for request in peer.requests] == [1, 20, 20, 10, 1, 1]

    asyncio.run(test())


def test_all_who_asked_are_told_of_an_error() -> None:
    async def test() -> None:
        peer = Peer()
        peer.fails = ConnectionLost("gone")
        asked = [peer.asks(number) for number in range(3)]
        await asyncio.sleep(0)
        peer.let(3)
        assert [type(each) for each in await asyncio.gather(*asked, return_exceptions=True)] == [ConnectionLost] * 3
        peer.fails = None
        assert await peer.ask(1) == "A", "and the next one is asked anew"

    asyncio.run(test())


@pytest.mark.parametrize("once", [False, True])
def test_of_one_whose_sender_is_cancelled_others_hear_all_the_same(once: bool) -> None:
    async def test() -> None:
        peer = Peer()
        first = peer.asks(0, once=once)
        await asyncio.sleep(0)
        sender, other = peer.asks(1, once=once), peer.asks(2, once=once)
        await asyncio.sleep(0)
        peer.let(1)
        assert await first == "A"
        await asyncio.sleep(0)
        assert peer.requests[1:] == [{1: "a", 2: "a"}]
        sender.cancel()
        peer.let(1)
        (told,) = await asyncio.gather(other, return_exceptions=True)
        if once:
            assert isinstance(told, RequestTimedOut), "it may have been carried out: it is not asked twice"
            assert len(peer.requests) == 2
        else:
            assert told == "A"
            assert len(peer.requests) == 3

    asyncio.run(test())
