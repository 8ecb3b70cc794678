"""What of a cut the source had acked In-Sync and lost: what it has still is none, nor what somebody else wrote."""

from __future__ import annotations

import random
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from support.fake_cluster import run_simulated
from support.replicas import LINK, LINK_ID, Replicas

from isthmus_control.commands import AlterLink, AttachNamespace, BeginTruncation, PartitionClaim, RecordClaims
from isthmus_control.model import LinkMode, OnSourceLoss, Reason, ResourceType, Role
from isthmus_control.outcome import Accepted
from isthmus_control.states import ReasonCode
from isthmus_control.truncations import PartitionCut, PartitionView

SOURCE, TOPIC = "local-t", "remote-t"
END = 20


class Scene:
    """A partition of twenty records that was In-Sync, in a namespace that holds what its source loses."""

    def __init__(self) -> None:
        self.replicas = Replicas(random.Random(5), brokers=1)

    async def begin(self, mode: LinkMode = LinkMode.SYNCHRONOUS) -> None:
        replicas = self.replicas
        self.source = replicas.a.add_topic(SOURCE).partitions[0]
        for _ in range(END):
            self.source.write_values(b"v")
        replicas.start()
        await replicas.connect()
        await replicas.until("copied", replicas.equal)
        if mode is LinkMode.SYNCHRONOUS:
            self.apply("A", AlterLink(LINK, mode=mode))
            recorded = replicas.controls["B"]
            await replicas.until("In-Sync", lambda: recorded.state.sync_records.get(LINK))
        hold = AttachNamespace(
            LINK, ResourceType.TOPIC, "remote-", "local-", Role.FOLLOWER, on_source_loss=OnSourceLoss.HOLD
        )
        self.apply("B", hold)

    def write_past_the_proxies(self) -> None:
        target = self.replicas.b.partition(TOPIC)
        target.on_append = lambda partition: None  # what must hold does not any more
        target.write_values(b"rogue", producer_id=7)

    def apply(self, name: str, body: Any) -> None:
        outcome = self.replicas.controls[name].apply(body)
        assert isinstance(outcome, Accepted), outcome

    @property
    def topic_id(self) -> str:
        return str(uuid.UUID(bytes=self.replicas.b.found[TOPIC].topic_id))

    async def losses(self, cut_at: int, code: str = ReasonCode.UNEXPECTED_TRUNCATION) -> list[tuple[int, int, int]]:
        """What is found of a cut: from, to, how many; whatever is found is held."""
        end = self.replicas.ends["B"]
        why, views = Reason(code, "why"), (PartitionView(1, 0),)
        owner = end.context.incarnation
        self.apply("B", BeginTruncation(LINK, TOPIC, self.topic_id, why, views, None, "p", owner))
        truncation = self.replicas.controls["B"].state.truncations[TOPIC]
        info = (await self.replicas.b.topics())[TOPIC]
        cut = PartitionCut(0, 0, cut_at, self.replicas.b.partition(TOPIC).end)
        steps: Any = end.parts.truncations._steps
        held = await steps._source_losses.are_held(end.peers.live[0], info, truncation, [cut])
        found = self.replicas.controls["B"].state.source_losses
        assert held is bool(found)
        return [(each.from_offset, each.to_offset, each.count) for each in found]


def on_scene(work: Callable[[Scene], Awaitable[None]]) -> None:
    async def run() -> None:
        scene = Scene()
        await work(scene)
        await scene.replicas.stop()

    run_simulated(run())


def test_what_the_source_has_still_is_not_lost_although_it_is_cut() -> None:
    """A compacted log is cut long before what somebody else wrote to it."""

    async def work(scene: Scene) -> None:
        await scene.begin()
        scene.write_past_the_proxies()
        assert await scene.losses(cut_at=15) == []

    on_scene(work)


def test_what_the_source_lost_is_counted_up_to_what_somebody_else_wrote() -> None:
    async def work(scene: Scene) -> None:
        await scene.begin()
        scene.write_past_the_proxies()
        scene.source.cut(17)
        assert await scene.losses(cut_at=15) == [(17, END, 3)]

    on_scene(work)


def test_of_a_link_that_is_not_synchronous_any_more_what_is_claimed_counts() -> None:
    async def work(scene: Scene) -> None:
        await scene.begin(LinkMode.ASYNCHRONOUS)
        scene.source.cut(15)
        claim = PartitionClaim(TOPIC, scene.topic_id, 0, 1_000, 18)
        scene.apply("B", RecordClaims(LINK, LINK_ID, (claim,)))
        assert await scene.losses(cut_at=15) == [(15, 18, 3)]

    on_scene(work)


def test_what_was_never_in_sync_and_what_is_cut_for_other_reasons_is_no_loss() -> None:
    async def never(scene: Scene) -> None:
        await scene.begin(LinkMode.ASYNCHRONOUS)
        scene.source.cut(15)
        assert await scene.losses(cut_at=15) == []

    async def deletions(scene: Scene) -> None:
        await scene.begin()
        scene.source.cut(15)
        assert await scene.losses(cut_at=15, code=ReasonCode.DELETIONS_MISSED) == []

    on_scene(never)
    on_scene(deletions)
