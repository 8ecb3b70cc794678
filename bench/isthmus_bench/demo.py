"""``isthmus demo``: two real clusters, two proxies, one link; records arrive at equal offsets, before your eyes."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import KafkaError
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from isthmus.cli.output import CliError, Exit, Output, OutputOption, example
from isthmus_bench.kafka import DEFAULT_VERSION, EmbeddedKafkaError, KafkaCluster
from isthmus_bench.kafka.jars import cache_directory
from isthmus_bench.proxies import ProxyFailed, ProxyProcess

NAMESPACE: Final = "orders-"
TOPIC: Final = "orders-clicks"
LINK: Final = "a-to-b"
PARTITIONS: Final = 3
DEFAULT_REPORT: Final = Path("demo-report.html")
REPORT_TIMEOUT_S: Final = 180.0
KEPT: Final = "demo"
"""The folder in the cache where a demo that is kept lives."""

demo_app: Final = typer.Typer(rich_markup_mode=None)


@demo_app.command(epilog=example("isthmus demo", "isthmus demo --keep", "isthmus demo --stop"))
def demo(
    records: Annotated[int, typer.Option("--records", min=1, help="How many records to produce.")] = 100_000,
    brokers: Annotated[int, typer.Option("--brokers", min=1, max=5, help="Brokers of each cluster.")] = 1,
    version: Annotated[str, typer.Option("--version", help="Kafka's version.")] = DEFAULT_VERSION,
    keep: Annotated[bool, typer.Option("--keep", help="Leave clusters and proxies up, to try by hand.")] = False,
    stop: Annotated[bool, typer.Option("--stop", help="Stop what an earlier --keep left up.")] = False,
    report: Annotated[
        Path, typer.Option("--report", help="Where the report of the demo's own traffic goes.")
    ] = DEFAULT_REPORT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Copy a topic from one Kafka cluster to another through two proxies, and prove it equal."""
    home = cache_directory() / KEPT
    if stop:
        stop_kept(home, output)
        return
    if keep and home.exists():
        raise CliError("ALREADY_RUNNING", f"a demo was kept in {home}: isthmus demo --stop ends it", output=output)
    say = _Say(quiet=output is not Output.TABLE)
    try:
        with ExitStack() as stack:
            directory = home if keep else Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="isthmus-demo-")))
            directory.mkdir(parents=True, exist_ok=True)
            result = Demo(stack, say, directory, records, brokers, version, keep, report).run()
            if keep:
                stack.pop_all()
    except (EmbeddedKafkaError, ProxyFailed) as error:
        if keep:
            stop_kept(home, Output.JSON, quiet=True)
        raise CliError("DEMO_FAILED", str(error), output=output) from None
    if output is not Output.TABLE:
        typer.echo(json.dumps(result, indent=2))
    if not result["equal"] or not result["write_refused"]:
        raise typer.Exit(Exit.FAILED)


class _Say:
    """Tells the story on standard output; with ``-o json`` on standard error."""

    def __init__(self, quiet: bool) -> None:
        self._err = quiet
        self._started = time.monotonic()
        self._step = 0

    def step(self, text: str) -> None:
        self._step += 1
        typer.echo(f"\n[{time.monotonic() - self._started:5.1f} s] {self._step}. {text}", err=self._err)

    def line(self, text: str) -> None:
        typer.echo(f"           {text}", err=self._err)

    @contextmanager
    def progress(self, text: str, total: int) -> Iterator[Any]:
        """A bar on standard error, where that is a terminal; yields what advances it."""
        columns = (TextColumn("           {task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        from rich.console import Console

        with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as bar:
            task = bar.add_task(text, total=total)
            yield lambda count: bar.update(task, advance=count)


class Demo:
    """One run. ``stack`` ends what it starts."""

    def __init__(
        self,
        stack: ExitStack,
        say: _Say,
        directory: Path,
        records: int,
        brokers: int,
        version: str,
        keep: bool,
        report: Path,
    ) -> None:
        self._stack = stack
        self._say = say
        self._directory = directory
        self._records = records
        self._brokers = brokers
        self._version = version
        self._keep = keep
        self._report = report
        self._captured = directory / "captured"

    def run(self) -> dict[str, Any]:
        """Tell the whole story. Returns what was found out."""
        say = self._say
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

        say.step(
            f"A namespace {NAMESPACE!r} on A, a link {LINK!r} to B, and the namespace attached: A leads, B follows"
        )
        proxy_a.cli("namespace", "create", NAMESPACE, "--type", "topic")
        proxy_a.cli("link", "create", LINK, "--remote", proxy_b.link_address)
        proxy_a.cli("link", "attach", LINK, "--local", NAMESPACE, "--remote", NAMESPACE, "--role", "leader")
        say.line(
            f"isthmus link attach {LINK} --local {NAMESPACE} --remote {NAMESPACE} --role leader --url {proxy_a.url}"
        )

        for proxy in (proxy_a, proxy_b):
            proxy.cli("plugin", "enable", "capture", "--namespace", NAMESPACE)
        say.line(f"isthmus plugin enable capture --namespace {NAMESPACE}   (on both: what clients do is recorded)")

        say.step(f"A topic {TOPIC!r} on A, and {self._records:,} records produced to it through A's proxy")
        produced_s = asyncio.run(self._produce(proxy_a.bootstrap))
        say.line(f"{self._records:,} acked in {produced_s:.1f} s")

        say.step("The same records read from B, through B's proxy")
        consumed = asyncio.run(self._consume(proxy_b.bootstrap))
        say.line(f"{consumed['records']:,} records; end offsets by partition: {consumed['ends']}")

        say.step("A write to the follower on B is refused")
        refusal = asyncio.run(self._write(proxy_b.bootstrap))
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

        say.step("A report of the traffic that was captured meanwhile, made by Spark")
        latencies = self._make_report((proxy_a, proxy_b))
        for row in latencies:
            if row["dimension"] == "proxy" and row["api"] in ("Produce", "Fetch"):
                say.line(
                    f"{row['value']}: {row['requests']:,} {row['api']} requests, "
                    f"p50 {row['p50_us'] / 1000:.2f} ms, p99 {row['p99_us'] / 1000:.2f} ms"
                )
        say.line(f"{self._report.resolve()}" if latencies else "not made: it needs the extra `spark`")

        say.step("To try by hand" + ("" if self._keep else " (with --keep, which leaves all this up)"))
        say.line(f"isthmus status --url {proxy_a.url}")
        say.line(f"isthmus status --url {proxy_b.url}")
        say.line(f"isthmus verify {LINK} --url {proxy_a.url}")
        say.line(f"bootstrap.servers={proxy_a.bootstrap} (A)   bootstrap.servers={proxy_b.bootstrap} (B)")
        if self._keep:
            say.line("isthmus demo --stop    ends it")
        return {
            "equal": report["equal"],
            "write_refused": refusal is not None,
            "records_produced": self._records,
            "records_consumed": consumed["records"],
            "lag": lags,
            "report": str(self._report.resolve()) if latencies else None,
            "clusters": {each.spec.name: each.bootstrap_servers for each in (a, b)},
            "proxies": {each.name: {"bootstrap": each.bootstrap, "url": each.url} for each in (proxy_a, proxy_b)},
        }

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
                "plugins": {"enabled": ["reservation", "replication", "capture"]},
                "data": {"directory": str(self._captured / name)},
            },
        )
        self._stack.callback(proxy.close)
        return proxy

    def _make_report(self, proxies: Iterable[ProxyProcess]) -> list[dict[str, Any]]:
        """Have the captured files sealed, and the job run over them. Returns its result; nothing without Spark."""
        if find_spec("pyarrow") is None or find_spec("pyspark") is None:
            return []
        for proxy in proxies:
            proxy.cli("plugin", "disable", "capture", "--namespace", NAMESPACE)
        deadline = time.monotonic() + REPORT_TIMEOUT_S
        while list(self._captured.rglob("*.open")) and time.monotonic() < deadline:
            time.sleep(0.05)
        command = [sys.executable, "-m", "isthmus", "spark", "latency", str(self._captured), "-o", "json"]
        done = subprocess.run(
            [*command, "--report", str(self._report)],
            capture_output=True,
            text=True,
            timeout=REPORT_TIMEOUT_S,
            check=False,
        )
        if done.returncode:
            raise ProxyFailed(f"the report was not made: {done.stderr}")
        rows: list[dict[str, Any]] = json.loads(done.stdout)
        return rows

    async def _produce(self, bootstrap: str) -> float:
        admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
        await admin.start()
        try:
            await admin.create_topics([NewTopic(TOPIC, PARTITIONS, min(3, self._brokers))])
        finally:
            await admin.close()
        producer = AIOKafkaProducer(
            bootstrap_servers=bootstrap, acks="all", enable_idempotence=True, linger_ms=5, max_batch_size=64 * 1024
        )
        started = time.monotonic()
        await producer.start()
        try:
            with self._say.progress("producing", self._records) as advance:
                pending = []
                for number in range(self._records):
                    value = b'{"order": %d, "item": "%s"}' % (number, b"abcdefgh"[number % 8 :] * 8)
                    pending.append(await producer.send(TOPIC, value, key=b"%d" % (number % 1000)))
                    if len(pending) == 5_000:
                        await asyncio.gather(*pending)
                        advance(len(pending))
                        pending.clear()
                await asyncio.gather(*pending)
                advance(len(pending))
        finally:
            await producer.stop()
        return time.monotonic() - started

    async def _consume(self, bootstrap: str) -> dict[str, Any]:
        consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, auto_offset_reset="earliest", max_poll_records=5_000)
        await consumer.start()
        try:
            partitions = [TopicPartition(TOPIC, number) for number in range(PARTITIONS)]
            consumer.assign(partitions)
            count, ends = 0, dict.fromkeys(range(PARTITIONS), 0)
            with self._say.progress("consuming", self._records) as advance:
                async with asyncio.timeout(60):
                    while count < self._records:
                        for place, batch in (await consumer.getmany(timeout_ms=1_000)).items():
                            assert batch[0].offset == ends[place.partition], "an offset is missing"
                            ends[place.partition] = batch[-1].offset + 1
                            count += len(batch)
                            advance(len(batch))
        finally:
            await consumer.stop()
        return {"records": count, "ends": ends}

    async def _write(self, bootstrap: str) -> str | None:
        """Try to write to the follower; what the client was told, None if the write was taken."""
        producer = AIOKafkaProducer(bootstrap_servers=bootstrap, acks="all")
        await producer.start()
        try:
            await producer.send_and_wait(TOPIC, b"a write to the wrong side")
        except KafkaError as error:
            return f"{type(error).__name__}: {error}"
        else:
            return None
        finally:
            await producer.stop()


def stop_kept(home: Path, output: Output, quiet: bool = False) -> None:
    """Stop what ``--keep`` left up and remove its files."""
    if not home.exists():
        if not quiet:
            raise CliError("NOT_FOUND", "no demo was kept", output=output)
        return
    proxies = home / "proxies.json"
    for pid in json.loads(proxies.read_text()) if proxies.exists() else ():
        # The number may mean another process by now: only one that runs a proxy out of this folder is ours.
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if os.fsencode(home) in command:
            os.kill(pid, signal.SIGTERM)
    for name in ("a", "b"):
        if (home / name).exists():
            KafkaCluster.attach(home / name).stop()
    shutil.rmtree(home, ignore_errors=True)
    if not quiet:
        typer.echo("stopped")
