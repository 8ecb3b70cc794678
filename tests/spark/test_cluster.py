"""The jobs on a standalone cluster of two workers, through spark-submit with the wheel.

Drivers and executors have the site-packages of this environment and not the project: all of it comes from the wheel.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from zipfile import ZipFile

import pyarrow.parquet as pq
import pyspark
import pytest
from support.block_files import write_files

from isthmus_bench.captured import generate

pytestmark = pytest.mark.brokers  # JVMs as well

ROOT = Path(__file__).parents[2]
SPARK_HOME = Path(pyspark.__file__).parent
WORKERS = 2
JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""For processes that live for seconds."""


@dataclass
class Cluster:
    master: str
    env: dict[str, str]
    wheel: Path
    submit: Path
    directory: Path

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        settings = ["spark.executor.memory=512m", "spark.executor.cores=1", "spark.driver.memory=1g"]
        settings += ["spark.driver.host=127.0.0.1", "spark.ui.enabled=false", "spark.sql.shuffle.partitions=2"]
        # To compile each plan, and to plan anew after each stage, takes longer than to run it.
        settings += ["spark.sql.adaptive.enabled=false", "spark.sql.codegen.wholeStage=false"]
        settings += ["spark.sql.codegen.factoryMode=NO_CODEGEN", f"spark.driver.extraJavaOptions={JAVA_OPTIONS}"]
        settings += [f"spark.executor.extraJavaOptions={JAVA_OPTIONS}"]
        command = [SPARK_HOME / "bin" / "spark-submit", "--master", self.master, "--py-files", self.wheel]
        command += [part for each in settings for part in ("--conf", each)]
        done = subprocess.run(
            [*command, self.submit, *arguments],
            env=self.env,
            cwd=self.directory,
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done


@contextmanager
def daemon(name: str, env: dict[str, str], arguments: list[str], until: str) -> Iterator[re.Match[str]]:
    """A process of Spark's, from when its log says something to the end."""
    command = [SPARK_HOME / "bin" / "spark-class", f"org.apache.spark.deploy.{name}", "--host", "127.0.0.1"]
    process = subprocess.Popen(
        [*command, "--port", "0", "--webui-port", "0", *arguments],
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    rest = Thread(target=process.stderr.read)
    try:
        said: list[str] = []
        for line in process.stderr:
            said.append(line)
            if found := re.search(until, line):
                break
        else:
            pytest.fail(f"{name} ended: {''.join(said)}")
        rest.start()
        yield found
    finally:
        process.terminate()
        process.wait()
        if rest.ident is not None:
            rest.join()
        process.stderr.close()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    directory = tmp_path_factory.mktemp("cluster")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(directory)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    [wheel] = directory.glob("*.whl")
    with ZipFile(wheel) as packed:
        submit = Path(packed.extract("isthmus_spark/submit.py", directory))
    submit = submit.rename(directory / "submit.py")
    # Without `site` no .pth file is read, and so the project in this environment is not found.
    python = directory / "python"
    packages = sysconfig.get_path("purelib")
    python.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{packages}" exec "{sys.executable}" -S "$@"\n')
    python.chmod(0o755)
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "SPARK_ENV_LOADED")}
    env |= {"SPARK_HOME": str(SPARK_HOME), "SPARK_LOCAL_IP": "127.0.0.1", "SPARK_DAEMON_MEMORY": "256m"}
    env |= {"SPARK_DAEMON_JAVA_OPTS": JAVA_OPTIONS, "SPARK_LAUNCHER_OPTS": JAVA_OPTIONS}
    env |= {"PYSPARK_PYTHON": str(python), "PYSPARK_DRIVER_PYTHON": str(python), "PYTHONWARNINGS": "default"}
    missing = subprocess.run(
        [python, "-c", "import numpy, pyarrow, isthmus_spark"], env=env, capture_output=True, text=True
    )
    assert "No module named 'isthmus_spark'" in missing.stderr
    with ExitStack() as stack:
        said = stack.enter_context(daemon("master.Master", env, [], r"Starting Spark master at (spark://\S+)"))
        for number in range(WORKERS):
            work = directory / f"worker-{number}"
            arguments = ["--cores", "1", "--memory", "768m", "--work-dir", str(work), said[1]]
            stack.enter_context(daemon("worker.Worker", env, arguments, "Successfully registered with master"))
        yield Cluster(said[1], env, wheel, submit, directory)


@pytest.mark.one_in_ci("stories", of="Spark at work")
def test_all_jobs_of_captured_traffic(cluster: Cluster, tmp_path: Path) -> None:
    capture = tmp_path / "capture"
    planted = {
        each["what"]: each for each in generate(capture, 4000, 1, True, lambda _: None, file_bytes=50_000).planted
    }
    cluster.run("compact", str(capture), "--to", str(tmp_path / "compacted"), "--delete")
    assert not list(capture.rglob("*.capture"))
    assert len(list((tmp_path / "compacted").rglob("*.parquet"))) > 3
    write_files(capture / "topic=pay-", files=1, rows=100)  # and so all jobs read both
    cluster.run("report", str(tmp_path), "--to", str(tmp_path / "reports"))

    reports = {path.stem: pq.read_table(path).to_pylist() for path in (tmp_path / "reports").glob("*.parquet")}
    answered = 100 + sum(
        int(row["part"] == 0 and row["broker_us"] >= 0)
        for path in (tmp_path / "compacted").rglob("*.parquet")
        for row in pq.ParquetFile(path).read(["part", "broker_us"]).to_pylist()
    )
    assert sum(row["requests"] for row in reports["latency"] if row["dimension"] == "api") == answered
    [twice] = reports["exactly-once"]
    assert twice["base_offset"] == planted["duplicate"]["base_offset"]
    [refused] = reports["rejections"]
    assert refused["requests"] == planted["writes to a follower topic"]["requests"]
    assert "<svg" in (tmp_path / "reports" / "latency.html").read_text()
    for number in range(WORKERS):  # each had an executor of each application
        assert len(list((cluster.directory / f"worker-{number}").glob("app-*/*/stderr"))) >= 2
