"""What is to be done with a control topic, by what it has of an export."""

from __future__ import annotations

import random
import uuid
from typing import Any

from support.control_cluster import Client, ControlCluster
from support.fake_cluster import run_simulated

from isthmus.control_repair import COMPARED, ControlRepair, Step
from isthmus.control_start import Known
from isthmus.control_topic import settings
from isthmus_control.anchors import LogRecord, RecentRecords
from isthmus_control.control_state import ControlState
from isthmus_control.exports import Export, export
from isthmus_control.replica import Replica

RECORDS = 1600


class Scene:
    """A log of more records than a proxy remembers, which are no commands, and the export of a proxy that has all."""

    def __init__(self) -> None:
        self.cluster = ControlCluster(random.Random(1))
        self.cluster.topic_id, self.cluster.configs = uuid.UUID(int=7, version=4), settings(1)
        self.values = [b"%d" % offset for offset in range(RECORDS)]
        self.cluster.log = [(value, 0) for value in self.values]
        replica, recent = Replica(ControlState("A")), RecentRecords()
        for offset, value in enumerate(self.values):
            replica.feed(offset, value)
            recent.add(LogRecord(offset, value, 0))
        found = export(replica, recent, str(self.cluster.topic_id))
        assert found is not None
        self.export: Export = found
        client: Any = Client(self.cluster)
        self.repair = ControlRepair(client, [])

    @property
    def log(self) -> list[bytes | None]:
        return [value for value, _ in self.cluster.log]


def test_a_log_that_lost_its_end_gets_it_again_whatever_stands_below_the_export() -> None:
    async def work() -> None:
        scene = Scene()
        assert 0 < scene.export.first < RECORDS - COMPARED
        for lost in (1, 100, 500, RECORDS - scene.export.first - 1):
            scene.cluster.lose_power(lost)
            plan = await scene.repair.plan(scene.export, Known())
            assert (plan.step, plan.from_offset, plan.given_up) == (Step.APPEND, RECORDS - lost, ())
            await scene.repair.write(plan, scene.export, Known(), lambda offset: None)
            assert scene.log[:RECORDS] == scene.values
            del scene.cluster.log[RECORDS:]  # the snapshot

    run_simulated(work())


def test_a_log_that_is_whole_is_left_as_it_is() -> None:
    async def work() -> None:
        scene = Scene()
        assert (await scene.repair.plan(scene.export, Known())).step is Step.NOTHING
        scene.cluster.log += [(b"more", 0)]
        assert (await scene.repair.plan(scene.export, Known())).step is Step.NOTHING

    run_simulated(work())


def test_a_log_with_other_records_or_none_is_replaced() -> None:
    async def work() -> None:
        scene = Scene()
        scene.cluster.log[-1] = b"another", 0
        assert (await scene.repair.plan(scene.export, Known())).step is Step.REPLACE
        scene = Scene()
        scene.cluster.start = RECORDS  # somebody deleted them
        plan = await scene.repair.plan(scene.export, Known())
        assert plan.step is Step.REPLACE
        assert "or none" in plan.given_up[0]
        await scene.repair.write(plan, scene.export, Known(), lambda offset: None)
        assert scene.log[: scene.export.first] == [None] * scene.export.first
        assert scene.log[scene.export.first : RECORDS] == scene.values[scene.export.first :]

    run_simulated(work())
