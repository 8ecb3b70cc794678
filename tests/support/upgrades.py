"""Proxies that are replaced by those of another version, under traffic over a synchronous link."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from isthmus_bench.proxies import ProxyProcess
from support.links import until
from support.storm import scene
from support.sync_storm import SynchronousStorm
from support.versions import environment_of

FROM: Final = (Path(__file__).parents[1] / "upgrade" / "FROM").read_text().strip()
"""The commit of the version before this one."""
FROM_LEVEL: Final = 2
"""The feature level of control logs that it knows."""
TRAFFIC_S: Final = 3.0
"""How long a mix of versions works before the next step."""


class Upgrade:
    """A synchronous storm that begins with the version before on all proxies, and replaces them one by one."""

    def __init__(self, storm: SynchronousStorm, ends: str) -> None:
        """``ends``: how processes end that are replaced, ``stop`` or ``kill``."""
        self.storm = storm
        self.pair = storm.scene.pair
        self._ends = ends

    def replace(self, proxy: ProxyProcess, environment: dict[str, str]) -> None:
        """Have a proxy go on in another version; the link is In-Sync again by itself, and goes on."""
        self._end(proxy)
        proxy.environment = environment
        proxy.start()
        self.storm.note(f"{proxy.name} runs {'the version before' if environment else 'this version'}")
        self.works()

    def to_new(self, proxy: ProxyProcess) -> None:
        self.replace(proxy, {})

    def to_old(self, proxy: ProxyProcess) -> None:
        self.replace(proxy, environment_of(FROM))

    def refuses(self, proxy: ProxyProcess, *words: str) -> None:
        """Have a proxy go on in the version before, which ends by itself and says why."""
        self._end(proxy)
        before = len(proxy.log)
        proxy.environment = environment_of(FROM)
        proxy.spawn()
        until(f"{proxy.name} ends by itself", lambda: not proxy.running)
        said = proxy.log[before:]
        assert all(word in said for word in words), said
        self.storm.note(f"{proxy.name} does not start in the version before")

    def works(self) -> None:
        """The link is In-Sync, records are copied, what was acked is at the other side, both logs are equal."""
        until("the link is In-Sync", self.storm.is_well)
        before = self.storm.looked
        ends = time.monotonic() + TRAFFIC_S
        while time.monotonic() < ends:
            self.storm.look()
            time.sleep(0.3)
        until("records are acked In-Sync", lambda: bool(self.storm.look()) and self.storm.looked > before)
        self.storm.check_now()

    def _end(self, proxy: ProxyProcess) -> None:
        if self._ends == "kill":
            proxy.kill()
        else:
            assert proxy.stop() == 0


@contextmanager
def upgrading(ends: str, a_brokers: int = 1) -> Iterator[Upgrade]:
    """A storm whose proxies all run the version before; when it is over, all that was acked is there, once.

    Several brokers of A have a proxy each.
    """
    with (
        scene(a_brokers, 1, a_sidecars=a_brokers > 1, environment=environment_of(FROM)) as stage,
        SynchronousStorm(stage, 0) as storm,
    ):
        upgrade = Upgrade(storm, ends)
        upgrade.works()
        yield upgrade
        storm.finish()
        assert storm.looked > 0
        print(f"\n{storm.looked} acked records looked for", *storm.log, sep="\n")
