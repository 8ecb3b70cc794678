"""The jars of Spark's Kafka connector, from Maven Central by their coordinates, with the Ivy that comes with PySpark.

The set of the running PySpark's version comes first: the connector with what it depends on. Where that is not whole, a
set of older ones that works with it is taken. The cache (``ISTHMUS_CACHE``, else ``~/.cache/isthmus``)::

    spark-kafka/4.2.0/*.jar     complete as soon as spark-kafka/4.2.0 exists: it is moved into place in one step
    spark-kafka/lock            held while somebody resolves
    spark-kafka/ivy/            what Ivy keeps
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import pyspark

JARS_VARIABLE: Final = "ISTHMUS_SPARK_KAFKA_JARS"
"""Environment: jars by hand, or directories of them, separated as PATH is."""
CONNECTOR: Final = "spark-sql-kafka-0-10_2.13"
TOKENS: Final = "spark-token-provider-kafka-0-10_2.13"
CLIENTS: Final = "kafka-clients"
POOL: Final = "commons-pool2"
DOWNLOAD_TIMEOUT_S: Final = 600

Say = Callable[[str], None]
"""Takes one line of progress."""

# What the connector depends on and PySpark has: two of a kind would do harm, and they are large.
_IN_PYSPARK: Final = (
    *("at.yawk.lz4", "org.lz4", "org.xerial.snappy", "com.github.luben", "org.slf4j", "org.apache.hadoop"),
    *("org.scala-lang", "org.scala-lang.modules", "com.google.code.findbugs"),
)


class ConnectorError(Exception):
    """The jars cannot be had; says what to do."""


class JarSet(NamedTuple):
    """Jars that work together."""

    name: str
    wanted: Sequence[tuple[str, str, str]]
    """(group, artifact, version)."""
    transitive: bool
    """Whether the versions of the other jars come from what the first depends on."""


def jar_sets(version: str) -> tuple[JarSet, JarSet]:
    """What to try for a version of PySpark: the matched set, and one that was tested with it."""
    matched = JarSet(version, [("org.apache.spark", CONNECTOR, version)], transitive=True)
    mixed = [
        ("org.apache.spark", CONNECTOR, "4.2.0"),
        ("org.apache.spark", TOKENS, "4.0.0"),
        ("org.apache.kafka", CLIENTS, "3.9.2"),
        ("org.apache.commons", POOL, "2.13.1"),
    ]
    return matched, JarSet("4.2.0-tokens-4.0.0", mixed, transitive=False)


def say_on_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def connector_jars(say: Say = say_on_stderr, environment: Mapping[str, str] = os.environ) -> list[Path]:
    """The jars, sorted; downloaded if they are not in the cache. Safe when several processes ask at once.

    Raises ConnectorError.
    """
    if given := environment.get(JARS_VARIABLE):
        found = _given(given)
        say(f"Spark's Kafka connector: {len(found)} jars of {JARS_VARIABLE}")
        return found
    chosen = environment.get("ISTHMUS_CACHE")
    cache = (Path(chosen).expanduser().absolute() if chosen else Path.home() / ".cache" / "isthmus") / "spark-kafka"
    cache.mkdir(parents=True, exist_ok=True)
    sets = jar_sets(pyspark.__version__)
    home = _kept(cache, sets)
    if home is None:
        with _locked(cache / "lock"):
            home = _kept(cache, sets) or _download(cache, sets, say, environment)
    say(f"Spark's Kafka connector: jars of {home.name} for PySpark {pyspark.__version__}")
    return sorted(home.glob("*.jar"))


def _kept(cache: Path, sets: Sequence[JarSet]) -> Path | None:
    return next((cache / each.name for each in sets if (cache / each.name).is_dir()), None)


def _given(paths: str) -> list[Path]:
    found: list[Path] = []
    for path in (Path(each).expanduser().absolute() for each in paths.split(os.pathsep) if each):
        jars = sorted(path.glob("*.jar")) if path.is_dir() else [path] if path.is_file() else []
        if not jars:
            raise ConnectorError(f"{JARS_VARIABLE}: {path} is no jar, and no directory with jars")
        found += jars
    return found


def _download(cache: Path, sets: Sequence[JarSet], say: Say, environment: Mapping[str, str]) -> Path:
    ivy = next(iter(sorted(Path(pyspark.__file__).parent.glob("jars/ivy-*.jar"))), None)
    if ivy is None:
        raise ConnectorError(
            f"this PySpark has no Ivy to get the Kafka connector with: put its jars into {JARS_VARIABLE}"
        )
    for abandoned in cache.glob(".get-*"):  # of a process that was killed: we hold the lock
        shutil.rmtree(abandoned, ignore_errors=True)
    failures: list[str] = []
    for each in sets:
        say(f"Spark's Kafka connector: getting {each.name} from Maven Central with Ivy (10 MB, once)")
        work = Path(tempfile.mkdtemp(prefix=".get-", dir=cache))
        try:
            failure = _with_ivy(ivy, each, cache, work, environment)
            missing = [name for name in (CONNECTOR, TOKENS, CLIENTS, POOL) if not any(work.glob(f"{name}-*.jar"))]
            if failure is None and not missing:
                work.chmod(0o755)
                return work.rename(cache / each.name)
            failures.append(f"{each.name}: {failure or 'left out ' + ', '.join(missing)}")
            say(f"Spark's Kafka connector: {each.name} cannot be had as a whole")
        finally:
            shutil.rmtree(work, ignore_errors=True)
    raise ConnectorError(
        f"the jars of Spark's Kafka connector could not be downloaded. If Maven Central cannot be reached: check "
        f"network, proxy and certificates (JAVA_TOOL_OPTIONS), or put jars that you have into {JARS_VARIABLE}.\n"
        + "\n".join(failures)
    )


def ivy_module(jars: JarSet) -> str:
    """What Ivy is asked for. With ``default->runtime`` the named jars themselves would be left out."""
    rest = f'transitive="{"true" if jars.transitive else "false"}" conf="default->default"'
    dependencies = "".join(
        f'<dependency org="{group}" name="{artifact}" rev="{version}" {rest}/>'
        for group, artifact, version in jars.wanted
    )
    excluded = "".join(f'<exclude org="{group}"/>' for group in _IN_PYSPARK)
    excluded += '<exclude org="org.apache.spark" module="spark-tags_2.13"/>'
    return (
        '<ivy-module version="2.0"><info organisation="isthmus" module="spark-kafka"/><configurations>'
        f'<conf name="default"/></configurations><dependencies>{dependencies}{excluded}</dependencies></ivy-module>'
    )


def _with_ivy(ivy: Path, jars: JarSet, cache: Path, work: Path, environment: Mapping[str, str]) -> str | None:
    """None, or what Ivy said when it failed."""
    module = work / "ivy.xml"
    module.write_text(ivy_module(jars))
    home = environment.get("JAVA_HOME")  # as Spark chooses it
    java = str(Path(home, "bin", "java")) if home else "java"
    command = [java, f"-Divy.default.ivy.user.dir={cache / 'ivy'}", "-jar", str(ivy), "-ivy", str(module)]
    command += ["-cache", str(cache / "ivy" / "cache"), "-confs", "default", "-types", "jar", "bundle"]
    command += ["-retrieve", f"{work}/[artifact]-[revision].[ext]"]
    try:
        done = subprocess.run(
            command,
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=DOWNLOAD_TIMEOUT_S,
        )
    except OSError as error:
        raise ConnectorError(f"{java} does not run ({error}): install Java 17 or later, or set JAVA_HOME") from error
    except subprocess.TimeoutExpired:
        return f"not done after {DOWNLOAD_TIMEOUT_S} s"
    module.unlink()
    if done.returncode == 0:
        return None
    said = [line.strip() for line in done.stdout.splitlines()]
    failures = [line for line in said if re.search(r"could not|not found|exception|error", line, re.IGNORECASE)]
    return "\n  ".join(dict.fromkeys((failures or said)[:5]))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock between processes. It ends with its process."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
