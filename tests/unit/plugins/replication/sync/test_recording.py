"""Partitions are recorded many at once, and one that the control log refuses keeps no other one out."""

from __future__ import annotations

import random
import uuid
from dataclasses import replace
from typing import Any

import pytest
from support.fake_cluster import FakeContext, run_simulated
from support.replicas import LINK, Replicas

from isthmus_control.commands import AlterLink, PartitionSync, RecordSync
from isthmus_control.model import LinkMode, Reason, SyncState
from isthmus_control.rules.checks import ENTRIES_MAX
from isthmus_plugins.replication.sync.recording import record

T_ID = str(uuid.UUID(int=1, version=4))
IN, OUT = SyncState.IN_SYNC, SyncState.OUT_OF_SYNC


class Scene:
    """The source's control log, where ``local-`` is led over a synchronous link."""

    def __init__(self) -> None:
        replicas = Replicas(random.Random(1), 1)
        self.control = replicas.controls["A"]
        self.context: Any = FakeContext(replicas.a, self.control)
        self.control.apply(AlterLink(LINK, mode=LinkMode.SYNCHRONOUS))

    def body(self, *topics: str, state: SyncState = IN, **more: Any) -> RecordSync:
        entries = tuple(PartitionSync(topic, T_ID, 0, 0) for topic in topics)
        why = Reason("CODE", "why") if state is OUT else None
        return RecordSync(LINK, self.control.state.links[LINK].link_id, state, entries, why, **more)

    def states(self) -> dict[str, SyncState]:
        return {topic: each.state for (topic, _), each in self.control.state.sync_records.get(LINK, {}).items()}


@pytest.mark.parametrize("more", [{}, {"from_first": True}])
def test_what_is_refused_is_left_out(more: dict[str, bool]) -> None:
    """Nothing says that it is led any more."""

    async def work() -> None:
        scene = Scene()
        await record(scene.context, scene.body("local-a", "gone-b", "local-c", "gone-d", **more))
        assert scene.states() == {"local-a": IN, "local-c": IN}

    run_simulated(work())


def test_acks_of_others_go_where_one_cannot_be_recorded_out_of_sync() -> None:
    async def work() -> None:
        scene = Scene()
        await record(scene.context, scene.body("local-a", "local-b"))
        await record(scene.context, scene.body("local-a", "local-b", reached=True))
        await record(scene.context, scene.body("local-a", "local-syncing", "local-b", state=OUT))
        assert scene.states() == {"local-a": OUT, "local-b": OUT}

    run_simulated(work())


@pytest.mark.parametrize("what", ["all", "the link"])
def test_where_nothing_is_taken_it_ends(what: str) -> None:
    async def work() -> None:
        scene = Scene()
        body = scene.body("gone-a", "gone-b")
        if what == "the link":
            body = replace(scene.body("local-a", "local-b"), link_id=T_ID)
        await record(scene.context, body)
        assert scene.states() == {}

    run_simulated(work())


def test_more_than_a_command_may_have_go_in_several() -> None:
    async def work() -> None:
        scene = Scene()
        names = [f"local-{number}" for number in range(ENTRIES_MAX + 1)]
        await record(scene.context, scene.body(*names))
        assert len(scene.states()) == len(names)

    run_simulated(work())
