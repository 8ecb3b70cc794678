"""What the demo shows, from the first broker to the failover, or the reversal."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from isthmus_bench.demo import clients
from isthmus_bench.demo.clients import TOPIC
from isthmus_bench.demo.disaster import Failover, Modes
from isthmus_bench.demo.report import TrafficReport
from isthmus_bench.demo.reversal import Reversal
from isthmus_bench.demo.telling import Telling
from isthmus_bench.kafka import KafkaCluster
from isthmus_bench.proxies import ProxyProcess

NAMESPACE: Final = "orders-"
LINK: Final = "a-to-b"
LEASE_S: Final = 3.0
"""Of proxies: a failover waits until they have said what they enforce, which they do some times in each lease."""


class Demo:
    """One run. ``stack`` ends what it starts."""

    def __init__(
        self,
        stack: ExitStack,
        telling: Telling,
        directory: Path,
        records: int,
        brokers: int,
        version: str,
        keep: bool,
        reverse: bool,
        report: Path | None,
    ) -> None:
        self._stack = stack
        self._telling = telling
        self._directory = directory
        self._records = records
        self._brokers = brokers
        self._version = version
        self._keep = keep
        self._reverse = reverse
        self._report = report
        self._captured = directory / "captured"

    def run(self) -> dict[str, Any]:
        """Tell the whole story. Returns what was found out."""
        say = self._telling
        say.step(
            f"Two Kafka clusters of version {self._version}, {self._brokers} broker(s) each: real, unmodified brokers"
        )
        with ThreadPoolExecutor(2) as pool:
            a, b = pool.map(self._cluster, ("a", "b"))
        for cluster in (a, b):
            say.line(f"cluster {cluster.spec.name}: {cluster.bootstrap_servers}  id {cluster.cluster_id}")

        say.step("A proxy in front of each: clients only change bootstrap.servers")
        proxy_a, proxy_b = self._proxy("proxy-a", a), self._proxy("proxy-b", b)
        for proxy in (proxy_a, proxy_b):
            proxy.spawn()
        for proxy in (proxy_a, proxy_b):
            proxy.wait_ready()
        for proxy in (proxy_a, proxy_b):
            say.line(f"{proxy.name}: clients {proxy.bootstrap}  links {proxy.link_address}  admin {proxy.url}")
        if self._keep:
            (self._directory / "proxies.json").write_text(json.dumps([proxy_a.pid, proxy_b.pid]))

        say.step("B makes a token: who has it makes one link with B, and has attached there what it grants")
        token = self._directory / "b.token"
        may = ",".join(f"{right}:{NAMESPACE}" for right in (("lead", "follow") if self._reverse else ("lead",)))
        proxy_b.write_token(token, may)
        proxy_a.cli("control", "upgrade")
        say.line(f"isthmus link token create --may {may} --broker-settings --url {proxy_b.url} > {token}")

        say.step(
            f"A namespace {NAMESPACE!r} on A, a link {LINK!r} to B, and the namespace attached: A leads, B follows"
        )
        proxy_a.cli("namespace", "create", NAMESPACE, "--type", "topic")
        proxy_a.cli("link", "create", LINK, "--remote", proxy_b.link_address, "--token-file", str(token))
        proxy_a.cli("link", "attach", LINK, "--local", NAMESPACE, "--remote", NAMESPACE, "--role", "leader")
        say.line(
            f"isthmus link attach {LINK} --local {NAMESPACE} --remote {NAMESPACE} --role leader --url {proxy_a.url}"
        )

        for proxy in (proxy_a, proxy_b):
            proxy.cli("plugin", "enable", "capture", "--namespace", NAMESPACE)
        say.line(f"isthmus plugin enable capture --namespace {NAMESPACE}   (on both: what clients do is recorded)")

        say.step(f"A topic {TOPIC!r} on A, and {self._records:,} records produced to it through A's proxy")
        asyncio.run(clients.create_topic(proxy_a.bootstrap, min(3, self._brokers)))
        with say.progress("producing", self._records) as advance:
            produced_s = asyncio.run(clients.produce(proxy_a.bootstrap, self._records, advance))
        say.line(f"{self._records:,} acked in {produced_s:.1f} s")

        say.step("The same records read from B, through B's proxy")
        with say.progress("consuming", self._records) as advance:
            ends = asyncio.run(clients.consume(proxy_b.bootstrap, self._records, advance))
        say.line(f"{sum(ends.values()):,} records; end offsets by partition: {ends}")

        say.step("A write to the follower on B is refused")
        _, refusal = asyncio.run(clients.write_once(proxy_b.bootstrap, b"a write to the wrong side"))
        say.line(refusal or "NOT REFUSED: the follower took a write")

        say.step("Both sides compared, record by record")
        report = proxy_a.cli("verify", LINK, check=False) or {"equal": False, "partitions": []}
        for each in report["partitions"]:
            verdict = "equal" if each["equal"] else f"DIFFERENT: {each['difference']}"
            say.line(
                f"{each['topic']}-{each['partition']}: {verdict} up to offset {each['compared_to']:,} "
                f"(ends {each['source_end']:,} and {each['follower_end']:,})"
            )
        status = proxy_b.get("/v1/status")
        (link,) = status["links"]
        lags = {f"{each['topic']}-{each['partition']}": each["partition_mirror_lag"] for each in link["partitions"]}
        say.line(
            f"verified {'EQUAL' if report['equal'] else 'NOT EQUAL'}; link {link['state']}; lag in offsets: {lags}"
        )

        say.step("The link is made synchronous: an ack then means that both clusters have the record")
        modes = Modes(say, LINK, proxy_a)
        latencies_by_mode = modes.run()

        traffic = None
        if self._report is not None:
            traffic = TrafficReport(self._captured, self._report)
            self._stack.callback(traffic.close)
            traffic.start((proxy_a, proxy_b), NAMESPACE)  # while a failover waits for leases, a core is idle
        failover = reversal = None
        if self._reverse:
            reversal = Reversal(say, LINK, NAMESPACE, (proxy_a, proxy_b)).run(modes.acked, ends)
        elif not self._keep:
            failover = Failover(say, LINK, (a, proxy_a), proxy_b).run(modes.acked, ends)

        page = None if traffic is None else self._show_traffic(traffic)
        if self._keep:
            self._show_how_to_try(proxy_a, proxy_b)
        return {
            "equal": report["equal"],
            "write_refused": refusal is not None,
            "records_produced": self._records,
            "records_consumed": sum(ends.values()),
            "lag": lags,
            "report": page,
            "latencies": latencies_by_mode,
            "failover": failover,
            "reversal": reversal,
            "clusters": {each.spec.name: each.bootstrap_servers for each in (a, b)},
            "proxies": {each.name: {"bootstrap": each.bootstrap, "url": each.url} for each in (proxy_a, proxy_b)},
        }

    def _show_traffic(self, traffic: TrafficReport) -> str | None:
        """Wait for the report, and show it. Returns where it is; None: Spark is not installed."""
        say = self._telling
        say.step("A report of the traffic that was captured before, made by Spark meanwhile")
        rows = traffic.finish()
        for row in rows:
            if row["dimension"] == "proxy" and row["api"] in ("Produce", "Fetch"):
                say.line(
                    f"{row['value']}: {row['requests']:,} {row['api']} requests, "
                    f"p50 {row['p50_us'] / 1000:.2f} ms, p99 {row['p99_us'] / 1000:.2f} ms"
                )
        page = str(traffic.page.resolve()) if rows else None
        say.line(page or "not made: it needs the extra `spark`")
        return page

    def _show_how_to_try(self, proxy_a: ProxyProcess, proxy_b: ProxyProcess) -> None:
        say = self._telling
        say.step("To try by hand: all of it is left up, and nothing is killed")
        say.line(f"isthmus status --url {proxy_a.url}")
        say.line(f"isthmus status --url {proxy_b.url}")
        say.line(f"isthmus verify {LINK} --url {proxy_a.url}")
        say.line(f"bootstrap.servers={proxy_a.bootstrap} (A)   bootstrap.servers={proxy_b.bootstrap} (B)")
        say.line("to lose A, and go on with B:")
        kills = " && ".join(
            f"isthmus cluster kill --name a --dir {self._directory} --broker {number + 1}"
            for number in range(self._brokers)
        )
        say.line(f"kill -9 {proxy_a.pid} && {kills}")
        say.line(f"isthmus link failover {LINK} --url {proxy_b.url}")
        say.line("isthmus demo --stop    ends it")

    def _cluster(self, name: str) -> KafkaCluster:
        cluster = KafkaCluster(
            self._directory / name if self._keep else None,
            name=name,
            brokers=self._brokers,
            version=self._version,
            background=self._keep,
        )
        cluster.start()
        self._stack.callback(cluster.stop)
        return cluster

    def _proxy(self, name: str, cluster: KafkaCluster) -> ProxyProcess:
        proxy = ProxyProcess(
            cluster.bootstrap_servers,
            name=name,
            directory=self._directory,
            background=self._keep,
            extra={
                "proxy": {"lease_s": LEASE_S},
                "link": {"allow_local_links": False},
                "plugins": {"enabled": ["reservation", "replication", "capture"]},
                "data": {"directory": str(self._captured / name)},
            },
        )
        self._stack.callback(proxy.close)
        return proxy
