"""Captured events, made by hand: what tests of Spark jobs begin with."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from crc32c import crc32c
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

from isthmus_spark.blocks import LINK_NUMBERS, LINK_SCHEMA, LINK_TEXTS, NUMBERS, SCHEMA, SOURCES, TEXTS

START = datetime(2026, 1, 1, tzinfo=UTC)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
NOTHING: dict[str, Any] = dict.fromkeys((*SOURCES, *TEXTS)) | {
    name: -1 for name in SCHEMA.names if name not in (*SOURCES, *TEXTS, "time")
}


def event(total_us: int, **known: Any) -> dict[str, Any]:
    """An event that took so long at the broker."""
    base = {"time": START, "cluster": "c", "proxy": "p", "namespace": "pay-"}
    times = {"proxy_us": 0, "broker_us": total_us, "gate_us": 0, "part": 0, "parts": 1, "error_code": 0, "api_key": 0}
    return {**NOTHING, **base, **times, "client_id": "app", **known}


def frame(spark: SparkSession, *events: dict[str, Any]) -> DataFrame:
    rows = [tuple(each[name] for name in SCHEMA.names) for each in events]
    return spark.createDataFrame(rows, from_arrow_schema(SCHEMA))


def produced(sequence: int, offset: int, records: int = 1, at_s: float = 0.0, **known: Any) -> dict[str, Any]:
    """A Produce request of one batch of an idempotent producer, acked."""
    batch = {
        "producer_id": 9,
        "producer_epoch": 0,
        "base_sequence": sequence,
        "base_offset": offset,
        "records": records,
    }
    size = {"batches": 1, "batch_bytes": 100 * records, "topic": "pay-t", "partition": 0, "session": 1}
    return event(1000, **{**batch, **size, "time": START + timedelta(seconds=at_s), **known})


def told(state: str, at_s: float, **known: Any) -> dict[str, Any]:
    """What the leader end of a link tells of a partition."""
    return link_event("state", at_s, **{"state": state, "lag": 0, "lag_ms": 0, **known})


def link_event(kind: str, at_s: float, **known: Any) -> dict[str, Any]:
    """Of a link from cluster a to b, told by a's proxy, or with role="follower" by b's."""
    ends = {"cluster": "a", "proxy": "pa", "remote_cluster": "b", "role": "leader"}
    if known.get("role") == "follower":
        ends = {"cluster": "b", "proxy": "pb", "remote_cluster": "a"}
    base = {"kind": kind, "link": "a-to-b", "topic": "pay-t", "partition": 0, "time": START + timedelta(seconds=at_s)}
    texts: dict[str, Any] = dict.fromkeys(LINK_TEXTS)
    return {**texts, **dict.fromkeys(LINK_NUMBERS, -1), **ends, **base, **known}


def link_frame(spark: SparkSession, *events: dict[str, Any]) -> DataFrame:
    rows = [tuple(each[name] for name in LINK_SCHEMA.names) for each in events]
    return spark.createDataFrame(rows, from_arrow_schema(LINK_SCHEMA))


def links_file(path: Path, *events: dict[str, Any]) -> None:
    """A sealed file of link events."""
    _seal(path, events, ("cluster", "proxy"), LINK_TEXTS, LINK_NUMBERS)


def requests_file(path: Path, *events: dict[str, Any]) -> None:
    """A sealed file of requests."""
    _seal(path, events, SOURCES, TEXTS, NUMBERS)


def _seal(
    path: Path,
    events: Sequence[dict[str, Any]],
    sources: Sequence[str],
    texts: Sequence[str],
    numbers: Mapping[str, pa.DataType],
) -> None:
    """One block for each source."""
    path.parent.mkdir(parents=True, exist_ok=True)
    blocks: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for each in events:
        blocks.setdefault(tuple(each[name] for name in sources), []).append(each)
    fields = [("time_us", ">i8"), *((name, ">i4") for name in texts)]
    fields += [(name, f">i{kind.bit_width // 8}") for name, kind in numbers.items()]
    data = b""
    for source, mine in blocks.items():
        tables = {name: sorted({each[name] for each in mine if each[name] is not None}) for name in texts}
        rows = [
            (
                (each["time"] - EPOCH) // timedelta(microseconds=1),
                *(-1 if each[name] is None else tables[name].index(each[name]) for name in texts),
                *(each[name] for name in numbers),
            )
            for each in mine
        ]
        packed = np.array(rows, np.dtype(fields)).tobytes()
        told = {
            "fields": fields,
            "rows": len(rows),
            "tables": tables,
            "source": dict(zip(sources, source, strict=True)),
        }
        description = json.dumps(told).encode()
        block = b"ISTHMCAP" + struct.pack(">HHII", 1, 0, len(description), len(packed)) + description + packed
        data += block + struct.pack(">I", crc32c(block))
    path.write_bytes(data)


def run(*arguments: str | Path, code: int = 0) -> str:
    """What ``isthmus`` prints."""
    command = [sys.executable, "-m", "isthmus", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == code, done.stderr
    return done.stdout
