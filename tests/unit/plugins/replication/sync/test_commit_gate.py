"""Commits that are not confirmed in time, of clients that commit in thousands of partitions at once."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace
from typing import Any

import pytest
from support.fake_cluster import FakeCluster, FakeContext, FakeControl
from support.loop_time import LOOP_S_MAX, longest, overtaken, went_out

from isthmus_plugins.api import Client, Gate, Replace, Request
from isthmus_plugins.replication.sync.commit_gate import CommitGate
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
                held.expire(float("inf"))
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
