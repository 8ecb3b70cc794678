"""The demo's second half with ``--reverse``: B leads and A again, under an application that writes on."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from isthmus_bench.demo import clients
from isthmus_bench.demo.clients import Application, Place
from isthmus_bench.demo.telling import Telling
from isthmus_bench.proxies import ProxyFailed, ProxyProcess

WRITTEN_MIN: Final = 500
"""So many records are acked before a reversal, and after it."""
WRITE_TIMEOUT_S: Final = 60.0
HOLD_S: Final = 20
"""A busy machine takes its time."""


class Reversal:
    """There and back. ``proxies``: of A, which leads in the beginning, and of B."""

    def __init__(self, telling: Telling, link: str, namespace: str, proxies: tuple[ProxyProcess, ProxyProcess]) -> None:
        self._telling = telling
        self._link = link
        self._namespace = namespace
        self._proxies = proxies

    def run(self, acked: dict[Place, bytes], starts: Mapping[int, int]) -> dict[str, Any]:
        """Reverse, go back, compare. ``acked``: what was acked from offsets ``starts`` on. Returns what was found."""
        say = self._telling
        say.step(
            "While an application writes, B is to lead, and A again: it goes on at the cluster that takes its writes"
        )
        application = Application([each.bootstrap for each in self._proxies], acked)
        application.start()
        gaps_ms = []
        try:
            for leader in self._proxies:
                self._writes_on(application)
                before = application.acks
                options = (self._link, "--local", self._namespace, "--disable-transaction-verification")
                leader.cli("link", "reverse", *options, "--hold", str(HOLD_S))
                self._writes_on(application)
                gaps_ms.append(application.gap_s(before) * 1000)
                say.line(f"isthmus link reverse {' '.join(options)} --url {leader.url}")
                say.line(f"of {leader.name} it is not led any more; no ack for {gaps_ms[-1]:.0f} ms")
        finally:
            application.stop()

        say.step("Every record that was acked is looked for in both clusters, at the offset of its ack")
        lost, doubled = 0, 0
        for proxy in self._proxies:
            found = asyncio.run(clients.read_from(proxy.bootstrap, starts))
            missing = [place for place, value in acked.items() if found.get(place) != value]
            more = sum(count - 1 for count in Counter(found.values()).values())
            lost, doubled = max(lost, len(missing)), max(doubled, more)
            say.line(f"{proxy.name}: {len(acked):,} acked, {len(missing):,} lost, {more:,} doubled")
        return {
            "acked": len(acked),
            "lost": lost,
            "doubled": doubled,
            "gaps_ms": [round(each, 1) for each in gaps_ms],
        }

    @staticmethod
    def _writes_on(application: Application) -> None:
        """Return when it has written for a while. Raises ProxyFailed."""
        if not application.wait_acked(application.acks + WRITTEN_MIN, WRITE_TIMEOUT_S):
            raise ProxyFailed(f"of the application {WRITTEN_MIN} records were not acked in {WRITE_TIMEOUT_S:.0f} s")
