"""The storm over a synchronous link: what was acked while In-Sync is at the other side, at every moment of a fault."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any, Final

from support.links import until
from support.storm import (
    PARTITIONS,
    Scene,
    Storm,
    cut_in_the_middle,
    kill_both_proxies,
    kill_source_broker,
    kill_source_proxy,
    kill_target_broker,
    kill_target_proxy,
    stall_and_deliver_late,
    stop_a_proxy,
)

CONFIRM_TIMEOUT_S: Final = 3.0
TELLS_WITHIN_S: Final = 2.0
"""After the time-out, until the state says that the other side did not confirm."""
BUSY_S: Final = 5.0
"""More, on a machine that does much else."""
LOOK_S: Final = 0.3


class SynchronousStorm(Storm):
    """A storm whose link is synchronous; its faults look at what was acked while they last."""

    def __init__(self, scene: Scene, seed: int, long: bool = False) -> None:
        super().__init__(scene, seed)
        self.looked = 0
        """How many acked records were looked for at the other side while a fault lasted."""
        pair = scene.pair
        timeout = ("--confirm-timeout-ms", str(int(CONFIRM_TIMEOUT_S * 1000)))
        until("synchronous", lambda: pair.a.proxy.cli("link", "set-mode", pair.name, "synchronous", *timeout))
        until("In-Sync", self.is_well)
        self.faults = {
            self.cut(1.0): 3,
            self.cut(CONFIRM_TIMEOUT_S + 4.0): 3,
            self.cut(30.0): 1 if long else 0,
            self.one_way: 2,
            self.megabit: 2,
            self.resets: 2,
            kill_source_proxy: 2,
            kill_target_proxy: 2,
            kill_both_proxies: 2,
            kill_source_broker: 2,
            kill_target_broker: 2,
            stop_a_proxy: 2,
            stall_and_deliver_late: 2,
            cut_in_the_middle: 2,
        }

    def is_well(self) -> bool:
        return {state for state, _ in self.records().values()} == {"In-Sync"} and len(self.records()) == PARTITIONS

    def records(self) -> dict[int, tuple[str, int]]:
        """By partition: what the source says an ack means, and from which offset on."""
        pair = self.scene.pair
        told: list[dict[str, Any]] = pair.a.partitions(pair.name, self.topic)
        return {
            each["partition"]: (str(each["sync"]["state"]), int(each["sync"]["since_offset"] or 0))
            for each in told
            if each["sync"] is not None
        }

    def look(self) -> dict[int, tuple[str, int]]:
        """Look for what was acked and promised at the other side, while it cannot learn of any more."""
        acked = [place for writer in self.writers for place in list(writer.written.acked)]
        records = self.records()  # read after: whatever was acked under an older one is promised by this one, too
        pair = self.scene.pair
        for partition, (state, since) in records.items():
            promised = [
                offset
                for place, offset in acked
                if place == partition and (state == "In-Sync" or (state == "Out-Of-Sync" and offset < since))
            ]
            end = pair.b.end(self.follower, partition)
            assert max(promised, default=-1) < end, f"{state} since {since}: acked {max(promised)}, B ends at {end}"
            self.looked += len(promised)
        return records

    def watch(self, seconds: float) -> None:
        """Look again and again while a fault keeps the sides from each other; the state gets right in time."""
        began = time.monotonic()
        right_by = CONFIRM_TIMEOUT_S + TELLS_WITHIN_S + BUSY_S
        while (lasted := time.monotonic() - began) < seconds:
            states = {state for state, _ in self.look().values()}
            assert lasted < right_by or "In-Sync" not in states, f"still {states} after {lasted:.1f} s"
            time.sleep(LOOK_S)

    def cut(self, seconds: float) -> Callable[[Scene, random.Random], None]:
        """The link is cut, and cannot be made again for some time."""

        def cut(scene: Scene, rng: random.Random) -> None:
            scene.relay.cut(refuse=True)
            try:
                self.watch(seconds)
            finally:
                scene.relay.mend()

        cut.__name__ = f"cut_for_{seconds:.0f}_s"
        return cut

    def one_way(self, scene: Scene, rng: random.Random) -> None:
        """What the target sends does not arrive, until the connection is taken for dead."""
        before = scene.relay.accepted
        scene.relay.stall(one_way=True)
        try:
            until("the link connects again", lambda: scene.relay.accepted > before, 60)
        finally:
            scene.relay.release()

    def megabit(self, scene: Scene, rng: random.Random) -> None:
        """About 1 Mbit/s, each way."""
        scene.relay.delay_s = 0.033
        time.sleep(rng.uniform(1, 6))
        scene.relay.delay_s = 0.0

    def resets(self, scene: Scene, rng: random.Random) -> None:
        """Connections that last for a few chunks of bytes."""
        ends = time.monotonic() + rng.uniform(1, 6)
        while time.monotonic() < ends:
            scene.relay.cut_after(int(rng.expovariate(1 / (20 * 4096))) + 1)
            time.sleep(0.1)
        scene.relay.cut_after(None)  # the last one must not come when the link is to be well
