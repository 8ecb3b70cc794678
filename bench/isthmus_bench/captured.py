"""Captured traffic that nobody sent: block files of as many events as a measurement needs, the same for the same seed.

A cluster of three brokers, each behind its proxy, and four namespaces. Each proxy and namespace is a *stream* with
files of its own, as in a capture. A broker leads every third partition, so what a stream has to know of the past (the
next offsets of its partitions, the next sequences of their producers) nobody else changes.

Producers are idempotent and lose nothing; one in a thousand of their batches is answered with an error that they try
again. So jobs find nothing, but for what is *planted*.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from isthmus_plugins.capture.blocks import REQUESTS, sealed_block
from isthmus_protocol.error_codes import INVALID_REQUEST, NOT_LEADER_OR_FOLLOWER
from isthmus_protocol.schema import ApiKey

Say = Callable[[str], None]
Rows = np.ndarray[Any, np.dtype[np.void]]
Numbers = np.ndarray[Any, np.dtype[np.int64]]

KIND: Final = np.dtype([(name, kind) for name, kind in REQUESTS.described])
BLOCK_ROWS: Final = 16_384
FILE_BYTES: Final = 64 * 1024 * 1024
START_US: Final = 1_767_225_600_000_000
"""2026-01-01, UTC."""
EVENTS_PER_S: Final = 20_000
CLUSTER: Final = "generated"
PROXIES: Final = ("proxy-1", "proxy-2", "proxy-3")
NAMESPACES: Final = {"pay-": 0.4, "orders-": 0.4, "log-": 0.18, "": 0.02}
"""By prefix its share of events. The empty one has what names no topic."""
SYNCHRONOUS: Final = "pay-"
"""Acks of Produce wait behind a gate here."""
TOPICS: Final = 4
PARTITIONS: Final = 12
CLIENTS: Final = 20
"""Of each namespace; the first half produce, the others consume."""
PRODUCERS: Final = CLIENTS // 2
RETRIED: Final = 0.001
FOLLOWER_TOPIC: Final = "log-mirrored"
STRAY: Final = "stray-writer"
STRAY_WRITES: Final = 25
SLOW_BROKER: Final = 2
SLOW_TIMES: Final = 20
_TOPIC_APIS: Final = ((ApiKey.PRODUCE, 0.5), (ApiKey.FETCH, 0.44), (ApiKey.OFFSET_COMMIT, 0.06))
_OTHER_APIS: Final = ((ApiKey.METADATA, 0.8), (ApiKey.API_VERSIONS, 0.2))
_BROKER_US: Final = {
    ApiKey.PRODUCE: (900, 0.6),
    ApiKey.FETCH: (2500, 1.1),
    ApiKey.OFFSET_COMMIT: (1500, 0.5),
    ApiKey.METADATA: (600, 0.5),
    ApiKey.API_VERSIONS: (150, 0.3),
}
"""Median and sigma of log-normal times."""


class GeneratorError(Exception):
    """The events cannot be written."""


@dataclass(slots=True)
class Written:
    events: int = 0
    bytes: int = 0
    files: int = 0
    seconds: float = 0.0
    planted: list[dict[str, Any]] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def bytes_of(events: int) -> int:
    """About how much room these events take."""
    return round(events * REQUESTS.row.size * 1.02) + len(PROXIES) * len(NAMESPACES) * 8192


def generate(to: Path, events: int, seed: int, plant: bool, say: Say, *, file_bytes: int = FILE_BYTES) -> Written:
    """Write so many events below ``to``, which must be empty. Progress goes to ``say``. Raises GeneratorError."""
    to.mkdir(parents=True, exist_ok=True)
    if any(to.iterdir()):
        raise GeneratorError(f"{to} is not empty: name a new directory, or delete it")
    needed, free = bytes_of(events), shutil.disk_usage(to).free
    say(f"{events:,} events take {needed / 1e9:.2f} GB of {free / 1e9:.1f} GB that are free")
    if needed > free:
        raise GeneratorError(f"{to} has {free / 1e9:.1f} GB free, {events:,} events take {needed / 1e9:.1f} GB")
    written, began, said = Written(), time.monotonic(), time.monotonic()
    for stream in _streams(events, seed, plant):
        for block in _write(to, stream, file_bytes, written):
            written.events += block
            if time.monotonic() > said + 2:
                said = time.monotonic()
                say(f"{written.events:,} of {events:,} events, {written.bytes / 1e9:.2f} GB")
        written.planted += stream.planted
    written.seconds = round(time.monotonic() - began, 3)
    return written


def _streams(events: int, seed: int, plant: bool) -> Iterator[Stream]:
    left, shares = events, [(prefix, proxy) for prefix in NAMESPACES for proxy in range(len(PROXIES))]
    for number, (prefix, proxy) in enumerate(shares):
        last = number == len(shares) - 1
        rows = left if last else min(left, round(events * NAMESPACES[prefix] / len(PROXIES)))
        left -= rows
        if rows:
            yield Stream(seed, number, prefix, proxy, rows, events / EVENTS_PER_S, plant)


def _write(to: Path, stream: Stream, file_bytes: int, written: Written) -> Iterator[int]:
    """Write a stream's files. Gives the number of events of each block."""
    directory = to / f"topic={stream.prefix}"
    directory.mkdir(exist_ok=True)
    blocks, block = iter(stream.blocks()), None
    while (block := next(blocks, None)) is not None:
        begun_ms = int(block["time_us"][0]) // 1000
        name = f"{begun_ms}-{PROXIES[stream.proxy]}-{stream.random.integers(2**32):08x}"
        path = directory / f"{name}.open"
        with path.open("xb") as file:
            while block is not None:
                file.write(sealed_block(REQUESTS, stream.source, stream.tables, len(block), block.tobytes()))
                yield len(block)
                block = next(blocks, None) if file.tell() < file_bytes else None
            written.bytes += file.tell()
        os.rename(path, path.with_suffix(".capture"))
        written.files += 1


class Stream:
    """The events of one proxy and namespace, block after block."""

    def __init__(self, seed: int, number: int, prefix: str, proxy: int, rows: int, seconds: float, plant: bool) -> None:
        self.prefix = prefix
        self.proxy = proxy
        self.random = np.random.default_rng([seed, number])
        self.planted: list[dict[str, Any]] = []
        self.source = {"proxy": PROXIES[proxy], "cluster": CLUSTER, "namespace": prefix, "namespace_type": "topic"}
        self.tables: dict[str, list[str]] = {name: [] for name, _ in REQUESTS.texts}
        clients = [f"{prefix or 'admin-'}{'writer' if n < PRODUCERS else 'reader'}-{n}" for n in range(CLIENTS)]
        addresses = [f"10.{number}.0.{n + 1}:{40_000 + n}" for n in range(CLIENTS)]
        self.tables |= {"client_id": [*clients, STRAY], "client_address": [*addresses, f"10.{number}.9.9:50000"]}
        self.tables["listener"] = [f"10.0.0.{proxy + 1}:9092"]
        self.tables["software"] = ["apache-kafka-java 4.3.0", "librdkafka 2.6.0"]
        self.tables["group_id"] = [f"{prefix}group-{n}" for n in range(4)]
        self.tables["topic"] = [*(f"{prefix}topic-{n}" for n in range(TOPICS)), FOLLOWER_TOPIC] if prefix else []
        self._rows = rows
        self._us_per_row = seconds * 1e6 / rows
        self._number = number
        self._led = np.arange(proxy, PARTITIONS, len(PROXIES))
        self._plant = plant
        places = TOPICS * PARTITIONS
        self._offsets = np.zeros(places, np.int64)
        self._sequences = np.zeros(PRODUCERS * places, np.int64)
        self._correlation = 0

    def blocks(self) -> Iterator[Rows]:
        for begin in range(0, self._rows, BLOCK_ROWS):
            yield self._block(begin, min(BLOCK_ROWS, self._rows - begin))

    def _block(self, begin: int, count: int) -> Rows:
        rows = np.zeros(count, KIND)
        for name, _ in REQUESTS.described:
            rows[name] = -1
        request = self._requests(rows, begin)
        if self.prefix:
            self._topics(rows, request)
            self._produced(rows)
        self._times(rows, request)
        if self._plant:
            self._plant_some(rows, begin)
        return rows

    def _requests(self, rows: Rows, begin: int) -> Numbers:
        """What is the same for all parts of a request. Gives the number of each row's request."""
        random, count = self.random, len(rows)
        parts = random.choice(3, count, p=(0.8, 0.15, 0.05)) + 1 if self.prefix else np.ones(count, np.int64)
        request = np.repeat(np.arange(count), parts)[:count]
        requests = int(request[-1]) + 1
        first = np.searchsorted(request, np.arange(requests))
        parts = np.diff(np.append(first, count))
        rows["part"], rows["parts"] = np.arange(count) - first[request], parts[request]
        apis = _TOPIC_APIS if self.prefix else _OTHER_APIS
        keys = random.choice([int(api) for api, _ in apis], requests, p=[share for _, share in apis])
        client = random.integers(0, PRODUCERS, requests) + np.where(keys == ApiKey.PRODUCE, 0, PRODUCERS)
        us = START_US + (begin + first + random.random(requests)) * self._us_per_row
        rows["time_us"], rows["api_key"] = us.astype(np.int64)[request], keys[request]
        rows["client_id"] = rows["client_address"] = client[request]
        rows["software"], rows["listener"] = client[request] % 2, 0
        rows["session"] = 1 + self._number * (CLIENTS + 1) + client[request]
        rows["correlation_id"] = (self._correlation + request) % 2**31
        self._correlation += requests
        rows["api_version"], rows["broker_id"], rows["partial"], rows["error_code"] = 9, self.proxy + 1, 0, 0
        rows["request_bytes"] = random.integers(60, 200, requests)[request]
        rows["response_bytes"] = random.integers(40, 400, requests)[request]
        return request

    def _topics(self, rows: Rows, request: Numbers) -> None:
        """Topics and partitions, other ones for each part of a request; and what Fetch got."""
        random, places = self.random, TOPICS * len(self._led)
        place = (random.integers(0, places, len(rows))[request] + rows["part"]) % places
        rows["topic"], rows["partition"] = place // len(self._led), self._led[place % len(self._led)]
        commits = rows["api_key"] == ApiKey.OFFSET_COMMIT
        rows["group_id"] = np.where(commits, rows["client_id"] % 4, -1)
        got = rows["api_key"] == ApiKey.FETCH
        records = random.geometric(1 / 30, len(rows))
        rows["records"][got], rows["batches"][got] = records[got], 1
        rows["batch_bytes"][got] = 61 + 500 * records[got]
        rows["response_bytes"][got] += rows["batch_bytes"][got]

    def _produced(self, rows: Rows) -> None:
        """Batches of producers, with the sequences and offsets that follow from those before."""
        random = self.random
        at = np.flatnonzero(rows["api_key"] == ApiKey.PRODUCE)
        records = 10 + random.geometric(1 / 20, len(at))
        failed = random.random(len(at)) < RETRIED
        stored = np.where(failed, 0, records)
        place = rows["topic"][at].astype(np.int64) * PARTITIONS + rows["partition"][at]
        producer = rows["client_id"][at].astype(np.int64)
        sequence = _running(producer * (TOPICS * PARTITIONS) + place, stored, self._sequences) % 2**31
        offset = _running(place, stored, self._offsets)
        rows["acks"][at], rows["records"][at], rows["batches"][at] = -1, records, 1
        rows["batch_bytes"][at] = 61 + 500 * records
        rows["request_bytes"][at] += rows["batch_bytes"][at]
        rows["compression"][at] = 4 * (producer % 2)
        rows["producer_id"][at], rows["producer_epoch"][at] = 1000 * (self._number + 1) + producer, 0
        rows["base_sequence"][at], rows["base_offset"][at] = sequence, np.where(failed, -1, offset)
        rows["error_code"][at] = np.where(failed, NOT_LEADER_OR_FOLLOWER, 0)

    def _times(self, rows: Rows, request: Numbers) -> None:
        """Where the time went, the same for all parts of a request."""
        requests = int(request[-1]) + 1
        normal = self.random.standard_normal((3, requests))[:, request]
        broker = np.zeros(len(rows))
        for api, (median, sigma) in _BROKER_US.items():
            of = rows["api_key"] == api
            broker[of] = median * np.exp(sigma * normal[0][of])
        rows["broker_us"] = np.maximum(broker, 20)
        rows["proxy_us"] = np.maximum(40 * np.exp(0.4 * normal[1]), 5)
        gated = (rows["api_key"] == ApiKey.PRODUCE) & (self.prefix == SYNCHRONOUS)
        rows["gate_us"] = np.where(gated, 20_000 + 800 * np.exp(0.6 * normal[2]), 0)

    # ---- what is planted ----

    def _plant_some(self, rows: Rows, begin: int) -> None:
        if self.proxy + 1 == SLOW_BROKER:
            self._slow_broker(rows, begin)
        if self.proxy == 0 and begin == 0 and self.prefix == "orders-":
            self._duplicate_and_gap(rows)
        if self.proxy == 0 and begin == 0 and self.prefix == "log-":
            self._strays(rows)

    def _slow_broker(self, rows: Rows, begin: int) -> None:
        """In the second half of the time."""
        if begin == 0:
            since_us = START_US + round(self._rows / 2 * self._us_per_row)
            self.planted.append(
                {"what": "slow broker", "broker": SLOW_BROKER, "namespace": self.prefix, "since_us": since_us}
            )
        slow = np.arange(begin, begin + len(rows)) >= self._rows / 2
        rows["broker_us"][slow] *= SLOW_TIMES

    def _duplicate_and_gap(self, rows: Rows) -> None:
        """A Fetch becomes an acked batch once more, at the end of its partition; and a batch is missing behind it."""
        acked = np.flatnonzero((rows["api_key"] == ApiKey.PRODUCE) & (rows["error_code"] == 0) & (rows["parts"] == 1))
        fetched = np.flatnonzero((rows["api_key"] == ApiKey.FETCH) & (rows["parts"] == 1))
        if not len(acked) or not len(fetched) or fetched[-1] < acked[0]:
            return
        row, again = rows[acked[0]], int(fetched[-1])
        place = int(row["topic"]) * PARTITIONS + int(row["partition"])
        time_us = int(rows["time_us"][again])
        rows[again] = row
        rows["time_us"][again], rows["base_offset"][again] = time_us, self._offsets[place]
        common = {
            "topic": self.tables["topic"][int(row["topic"])],
            "partition": int(row["partition"]),
            "producer_id": int(row["producer_id"]),
        }
        twice = {"base_sequence": int(row["base_sequence"]), "base_offset": int(self._offsets[place])}
        self.planted.append({"what": "duplicate", **common, **twice, "other_offset": int(row["base_offset"])})
        self._offsets[place] += int(row["records"])
        key = int(row["client_id"]) * (TOPICS * PARTITIONS) + place
        self.planted.append({"what": "gap", **common, "base_sequence": int(self._sequences[key]), "records": 10})
        self._sequences[key] += 10

    def _strays(self, rows: Rows) -> None:
        """Fetches become writes to a topic that follows, which the proxy refuses."""
        at = np.flatnonzero((rows["api_key"] == ApiKey.FETCH) & (rows["parts"] == 1))[:STRAY_WRITES]
        said = {"api_key": ApiKey.PRODUCE, "client_id": CLIENTS, "client_address": CLIENTS, "topic": TOPICS}
        refused = {
            "partition": 0,
            "error_code": INVALID_REQUEST,
            "broker_us": -1,
            "gate_us": 0,
            "base_offset": -1,
            "acks": -1,
        }
        sizes = {"request_bytes": 600, "response_bytes": 60, "batch_bytes": 500, "records": 1, "batches": 1}
        for name, value in (said | refused | sizes).items():
            rows[name][at] = value
        rows["session"][at] = 1 + self._number * (CLIENTS + 1) + CLIENTS
        self.planted.append(
            {"what": "writes to a follower topic", "topic": FOLLOWER_TOPIC, "client_id": STRAY, "requests": len(at)}
        )


def _running(keys: Numbers, amounts: Numbers, state: Numbers) -> Numbers:
    """Where each amount begins: all of the same key before it, and what ``state`` has. Brings ``state`` forward."""
    order = np.argsort(keys, kind="stable")
    ordered, upto = keys[order], np.cumsum(amounts[order])
    before = upto - amounts[order]
    first = np.searchsorted(ordered, ordered)
    begins = np.empty(len(keys), np.int64)
    begins[order] = state[ordered] + before - before[first]
    np.add.at(state, keys, amounts)
    return begins
