"""The synchronous benchmark's load generator: when requests are due, and what is said of their latencies."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest

from isthmus_bench import sync_load
from isthmus_bench.load import LoadError, Target
from isthmus_bench.percentiles import percentile
from isthmus_bench.sync_load import Meter, Schedule, Shape, open_loop, said_of


@pytest.mark.parametrize(
    ("share", "expected"), [(50, 500), (90, 900), (99, 990), (99.9, 999), (100, 1000), (0, 1), (99.95, 1000)]
)
def test_a_percentile_is_a_value_that_was_seen(share: float, expected: int) -> None:
    assert percentile(range(1, 1001), share) == expected


@pytest.mark.parametrize("share", [0, 50, 99.9, 100])
def test_all_percentiles_of_one_value_are_that_value(share: float) -> None:
    assert percentile([7.0], share) == 7.0


def test_requests_are_due_evenly() -> None:
    schedule = Schedule.of(1_000, Shape(rate=500, warmup_s=1.0, seconds=5.0))
    assert (schedule.warmup, schedule.total) == (500, 3_000)
    assert [schedule.due_ns(number) for number in (0, 1, 500)] == [1_000, 2_001_000, 1_000_001_000]


def test_a_rate_that_divides_nothing_does_not_drift() -> None:
    schedule = Schedule.of(0, Shape(rate=3, warmup_s=0, seconds=100.0))
    assert schedule.due_ns(300) == 100_000_000_000
    gaps = {schedule.due_ns(number + 1) - schedule.due_ns(number) for number in range(300)}
    assert gaps == {333_333_333, 333_333_334}


def test_what_is_said_is_in_milliseconds() -> None:
    said = said_of([number * 1_000_000 for number in range(1, 1001)], 2.0, {"load": 0.5}, retries=3)
    assert said == {
        "requests": 1000,
        "per_s": 500.0,
        "p50_ms": 500.0,
        "p90_ms": 900.0,
        "p99_ms": 990.0,
        "p999_ms": 999.0,
        "max_ms": 1000.0,
        "cpu": {"load": 0.5},
        "retries": 3,
    }


def test_a_load_without_an_answer_is_an_error() -> None:
    with pytest.raises(LoadError, match="not one answer"):
        said_of([], 1.0, {})


def test_cpu_is_told_by_what_processes_do() -> None:
    meter = Meter({"brokers": [], "proxies": [os.getpid()]})
    meter.begin()
    shares = meter.end()
    assert shares.keys() == {"brokers", "proxies", "load"}
    assert shares["brokers"] == 0.0


ANSWER = b"\0\0\0\x01x"


class Stalling:
    """A server that answers each request of two bytes, but takes a break before one of them."""

    def __init__(self, stalled: int, seconds: float) -> None:
        self._stalled = stalled
        self._go_on = threading.Event()
        self._seconds = seconds
        self._server = socket.create_server(("127.0.0.1", 0))
        self.target = Target(*self._server.getsockname()[:2], "t")
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        connection, _ = self._server.accept()
        answered = 0
        while received := connection.recv(2, socket.MSG_WAITALL):
            assert len(received) == 2
            if answered == self._stalled:
                self._go_on.wait(self._seconds)
            connection.sendall(ANSWER)
            answered += 1
        connection.close()

    def close(self) -> None:
        self._server.close()


class _Producing(sync_load.Producing):
    """The connections without a topic: only what is due when is looked at."""

    def __init__(self, target: Target, shape: Shape) -> None:
        self.shape = shape
        self.frames = [b"ab"]
        self._poll = sync_load.select.epoll()
        self.connections = [sync_load.Connection(target.connect(), 9, self._poll)]
        self._by_fd = {each.socket.fileno(): each for each in self.connections}


@pytest.fixture
def stalling() -> Iterator[Stalling]:
    server = Stalling(stalled=20, seconds=0.3)
    yield server
    server.close()


def test_a_stall_counts_for_every_request_that_was_due_meanwhile(
    stalling: Stalling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A closed loop would have one slow request; here 30 were due in the 0.3 s of the stall, and all waited."""
    monkeypatch.setattr(sync_load, "Producing", _Producing)
    monkeypatch.setattr(sync_load.peeks, "produce_response", lambda version, frame: [(b"t", [(0, 0, 0)])])
    said = open_loop(stalling.target, Shape(rate=100, warmup_s=0.0, seconds=0.6), {})
    assert said["requests"] == 60
    assert said["max_ms"] >= 295
    assert said["p90_ms"] >= 200
    assert said["late_p99_ms"] < said["max_ms"]  # sent when due, whatever was answered


def test_an_error_code_ends_a_load(stalling: Stalling, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync_load, "Producing", _Producing)
    monkeypatch.setattr(sync_load.peeks, "produce_response", lambda version, frame: [(b"t", [(0, 19, 0)])])
    with pytest.raises(LoadError, match="error code 19"):
        open_loop(stalling.target, Shape(rate=100, warmup_s=0.0, seconds=0.1), {})
