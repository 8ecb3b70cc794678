"""Commits that are not confirmed in time, of clients that commit in thousands of partitions at once."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from support.fake_cluster import FakeCluster, FakeContext, FakeControl
from support.loop_time import LOOP_S_MAX, longest, overtaken, went_out
from support.sessions import until

from isthmus_plugins.api import Client, Gate, Replace, Request
from isthmus_plugins.held_answers import LATE_AT_ONCE, PLACES_AT_ONCE
from isthmus_plugins.replication.sync.commit_gate import WAIT_S, CommitGate
from isthmus_plugins.replication.sync.quorums import GroupScope
from isthmus_protocol.error_codes import COORDINATOR_LOAD_IN_PROGRESS
from isthmus_protocol.messages import build_request, build_response, decode_response, encode_request, encode_response
from isthmus_protocol.schema import ApiKey

VERSION = 9
COUNT = 5_000


class NothingConfirmed:
    """A link whose other side has nothing."""

    def confirmed_end(self, *_: Any) -> int:
        return 0

    def leader_epoch(self, place: Any) -> int:
        return 0

    def has_led(self, *_: Any) -> bool:
        return True


@pytest.mark.parametrize(("count", "aside"), [(1, False), (COUNT, True)])
def test_they_are_refused_beside_the_loop(count: int, aside: bool) -> None:
    async def main() -> None:
        rng = random.Random(1)
        context: Any = FakeContext(FakeCluster(rng, [1]), FakeControl("A", rng))
        groups: Any = SimpleNamespace(partitions=50, pushed=asyncio.Event())
        needs: Any = NothingConfirmed()
        gate = CommitGate(context, needs, groups, lambda: 0.0)
        gate.control_changed(["l"])
        gate._scopes["g"] = GroupScope("", ("l",))
        partitions = [{"partition_index": each, "committed_offset": 5} for each in range(count)]
        asked = {"group_id": "g", "topics": [{"name": "t", "partitions": partitions}]}
        frame = encode_request(build_request(ApiKey.OFFSET_COMMIT, VERSION, asked), 7, "client")
        request = Request(frame, True, ApiKey.OFFSET_COMMIT, VERSION, 7, 0.0, Client(3, "1.2.3.4", 1))
        request.aside = aside
        verdict = gate.on_commit(request)
        assert isinstance(verdict, Replace)
        assert verdict.on_response is not None
        told = [{"name": "t", "partitions": [{"partition_index": each, "error_code": 0} for each in range(count)]}]
        answer = verdict.on_response(
            encode_response(build_response(ApiKey.OFFSET_COMMIT, VERSION, {"topics": told}), 7)
        )
        assert isinstance(answer, Gate)

        async def expired() -> bytes:
            for held in gate._held.values():
                for _ in held.expire_some(float("inf")):
                    pass
            return await went_out(answer)

        refused, spent = await longest(expired())
        found: Any = decode_response(ApiKey.OFFSET_COMMIT, VERSION, refused)[1]
        codes = [int(each.error_code) for each in found.topics[0].partitions]
        assert codes == [COORDINATOR_LOAD_IN_PROGRESS] * count
        assert spent < LOOP_S_MAX or not aside, f"{spent * 1000:.1f} ms"
        await gate.stop()

    asyncio.run(main())


def test_what_the_thread_found_of_a_group_is_not_remembered_when_links_are_others_by_then() -> None:
    async def main() -> None:
        rng = random.Random(1)
        context: Any = FakeContext(FakeCluster(rng, [1]), FakeControl("A", rng))
        groups, needs = SimpleNamespace(partitions=50, pushed=asyncio.Event()), NothingConfirmed()
        gate = CommitGate(context, needs, groups, lambda: 0.0)  # type: ignore[arg-type]
        gate.control_changed(["l"])
        await overtaken(lambda: gate.scope_of("g"), lambda: gate.control_changed(["l", "m"]))
        assert not gate._scopes
        gate.scope_of("g")
        assert gate._scopes.keys() == {"g"}

    asyncio.run(main())


class Turns:
    """In which turn of the loop answers go out."""

    def __init__(self) -> None:
        self._now = 0
        self.gone: Counter[int] = Counter()

    async def count(self) -> None:
        while True:
            self._now += 1
            await asyncio.sleep(0)

    def went(self) -> None:
        self.gone[self._now] += 1


@pytest.mark.parametrize("how", ["late", "detached", "confirmed"])
def test_thousands_of_commits_that_are_answered_at_once_are_so_some_at_a_time(how: str) -> None:
    """Of those whose groups are detached none is acked, although nothing has to be confirmed any more."""

    async def main() -> None:
        rng = random.Random(1)
        context: Any = FakeContext(FakeCluster(rng, [1]), FakeControl("A", rng))
        groups: Any = SimpleNamespace(partitions=1, pushed=asyncio.Event())
        needs: Any = NothingConfirmed()
        now = [0.0]
        gate = CommitGate(context, needs, groups, lambda: now[0])
        gate.control_changed(["l"])
        gate._scopes["g"] = GroupScope("", ("l",))
        partition = [{"partition_index": 0, "committed_offset": 5}]
        asked = {"group_id": "g", "topics": [{"name": "t", "partitions": partition}]}
        frame = encode_request(build_request(ApiKey.OFFSET_COMMIT, VERSION, asked), 7, "client")
        request = Request(frame, True, ApiKey.OFFSET_COMMIT, VERSION, 7, 0.0, Client(3, "1.2.3.4", 1))
        verdict = gate.on_commit(request)
        assert isinstance(verdict, Replace)
        assert verdict.on_response is not None
        told = [{"name": "t", "partitions": [{"partition_index": 0, "error_code": 0}]}]
        taken = encode_response(build_response(ApiKey.OFFSET_COMMIT, VERSION, {"topics": told}), 7)
        answers = [verdict.on_response(taken) for _ in range(COUNT)]
        turns = Turns()
        for answer in answers:
            assert isinstance(answer, Gate)
            assert not answer.take(turns.went)
        counting = asyncio.get_running_loop().create_task(turns.count())
        await asyncio.sleep(0)
        (held,) = gate._held.values()
        for place, waits in held.take_unknown_ends().items():
            for _ in held.ends_read(place, waits, 10):
                pass
        held.look_at_some()
        assert not turns.gone
        if how == "late":
            now[0] = WAIT_S + 1
        elif how == "detached":
            gate.detached("l", [], 1)
        if how != "late":
            needs.confirmed_end = lambda *_: None
        gate.start()
        gate.control_changed([])
        await until(lambda: turns.gone.total() == COUNT)
        codes = set()
        for said in {answer.answer() for answer in answers if isinstance(answer, Gate)}:
            assert isinstance(said, bytes)
            found: Any = decode_response(ApiKey.OFFSET_COMMIT, VERSION, said)[1]
            codes.add(int(found.topics[0].partitions[0].error_code))
        assert codes == {0 if how == "confirmed" else COORDINATOR_LOAD_IN_PROGRESS}
        # The tasks that watch and that look may both have a step in a turn.
        assert max(turns.gone.values()) <= (PLACES_AT_ONCE if how == "confirmed" else 2 * LATE_AT_ONCE)
        counting.cancel()
        await gate.stop()

    asyncio.run(main())
