"""The demo's second half: the link made synchronous, the source killed, and what is left of it."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Mapping
from typing import Any, Final

from isthmus.cli.failover_lines import moment
from isthmus.cli.output import columns
from isthmus_bench.demo import clients
from isthmus_bench.demo.clients import LastWriter, Place
from isthmus_bench.demo.telling import Telling
from isthmus_bench.kafka import KafkaCluster
from isthmus_bench.percentiles import percentile
from isthmus_bench.proxies import ProxyFailed, ProxyProcess

MEASURED: Final = 500
"""Records whose latencies are measured, in each mode."""
WRITTEN_MIN: Final = 1_000
"""So many records are acked before the source is killed."""
WRITE_TIMEOUT_S: Final = 60.0
NOTICED_S: Final = 30.0
"""How long the target may take to see that its source is gone; a broken connection is seen at once."""


class Modes:
    """Latencies of producers at the source, before and after the link is made synchronous."""

    def __init__(self, telling: Telling, link: str, source: ProxyProcess) -> None:
        self._telling = telling
        self._link = link
        self._source = source
        self.acked: dict[Place, bytes] = {}
        """Every record that was acked meanwhile."""

    def run(self) -> dict[str, Any]:
        """Measure, set the mode, measure. Returns p50 and p99 of each mode, in milliseconds."""
        asynchronous = self._measured("asynchronous")
        self._source.cli("link", "wait", self._link, "Following")
        self._source.cli("link", "set-mode", self._link, "synchronous")
        self._source.cli("link", "wait", self._link, "In-Sync")
        self._telling.line(f"isthmus link set-mode {self._link} synchronous --url {self._source.url}   (In-Sync)")
        synchronous = self._measured("synchronous")
        meanings = {"asynchronous": "A has the record", "synchronous": "A and B have the record"}
        found = {"asynchronous": asynchronous, "synchronous": synchronous}
        rows = [
            (mode, f"{each['p50_ms']:.1f} ms", f"{each['p99_ms']:.1f} ms", meanings[mode])
            for mode, each in found.items()
        ]
        for line in columns(("LINK", "P50", "P99", "AN_ACK_MEANS"), rows):
            self._telling.line(line)
        return found

    def _measured(self, mode: str) -> dict[str, float]:
        with self._telling.progress(f"measuring, {mode}", clients.WARM_UP + MEASURED) as advance:
            took = asyncio.run(clients.latencies(self._source.bootstrap, MEASURED, mode.encode(), self.acked, advance))
        return {"p50_ms": round(percentile(took, 50), 3), "p99_ms": round(percentile(took, 99), 3)}


class Failover:
    """The source is killed while a producer writes to it, and the target takes over."""

    def __init__(
        self, telling: Telling, link: str, source: tuple[KafkaCluster, ProxyProcess], target: ProxyProcess
    ) -> None:
        self._telling = telling
        self._link = link
        self._cluster, self._proxy = source
        self._target = target

    def run(self, acked: dict[Place, bytes], starts: Mapping[int, int]) -> dict[str, Any]:
        """Kill, fail over, compare. ``acked``: what was acked from offsets ``starts`` on. Returns what was found."""
        say = self._telling
        say.step("While a producer writes to A, all of A is killed: kill -9 of its broker(s) and its proxy")
        killed_at = self._kill(acked)

        say.step("Failover: B becomes writable, without A")
        report = self._fail_over()
        took_s = time.monotonic() - killed_at
        say.line(f"isthmus link failover {self._link} --url {self._target.url}")
        for namespace in report["namespaces"]:
            for claim in namespace["claims"]:
                until = claim["in_sync_until_ms"]
                said = f"all that A acked until {moment(until)} is here" if until else claim["message"]
                say.line(f"{claim['topic']}-{claim['partition']}: ends at {claim['end']:,}; {said}")
        say.line(f"{took_s:.1f} s after the kill")

        say.step("Every record that was acked since the comparison is looked for in B, at the offset of its ack")
        found = asyncio.run(clients.read_from(self._target.bootstrap, starts))
        missing = [place for place, value in acked.items() if found.get(place) != value]
        say.line(
            f"{len(acked):,} acked, {len(acked) - len(missing):,} found at their offsets, {len(missing):,} MISSING"
        )
        more = len(found) - (len(acked) - len(missing))
        if more:
            say.line(f"{more:,} more are there: A died before it could ack them")
        for partition, offset in sorted(missing)[:10]:
            say.line(f"MISSING: partition {partition}, offset {offset}: {acked[partition, offset]!r}")
        written, refusal = asyncio.run(clients.write_once(self._target.bootstrap, b"B is the one to write to now"))
        say.line(
            f"a write through B: {refusal}"
            if written is None
            else f"a write through B is acked: partition {written[0]}, offset {written[1]:,}"
        )
        return {
            "acked": len(acked),
            "found": len(acked) - len(missing),
            "missing": len(missing),
            "not_acked_but_there": more,
            "seconds_after_kill": round(took_s, 1),
            "written_at": None if written is None else {"partition": written[0], "offset": written[1]},
        }

    def _kill(self, acked: dict[Place, bytes]) -> float:
        """Kill the source under load. Returns when that was."""
        say = self._telling
        with say.progress("acked", WRITTEN_MIN) as advance:
            writer = LastWriter(self._proxy.bootstrap, acked, WRITTEN_MIN, advance)
            writer.start()
            try:
                if not writer.wait_acked(WRITE_TIMEOUT_S):
                    raise ProxyFailed(f"of {writer.sent} records {writer.acked} were acked in {WRITE_TIMEOUT_S:.0f} s")
                pids = [self._proxy.pid, *self._cluster.pids]
                self._proxy.signal(signal.SIGKILL)
                for broker_id in self._cluster.broker_ids:
                    self._cluster.kill(broker_id)
                killed_at = time.monotonic()
                self._proxy.kill()  # is gone when this returns
            finally:
                writer.stop()
        say.line(f"kill -9 {' '.join(map(str, pids))}")
        say.line(f"the producer had sent {writer.sent:,} records, {writer.acked:,} of them were acked")
        return killed_at

    def _fail_over(self) -> dict[str, Any]:
        """Wait until the target has seen that its source is gone, and fail over. Returns the report."""
        deadline = time.monotonic() + NOTICED_S
        while self._target.get(f"/v1/links/{self._link}")["state"] == "In-Sync" and time.monotonic() < deadline:
            time.sleep(0.05)
        report: dict[str, Any] = self._target.cli("link", "failover", self._link)
        return report
