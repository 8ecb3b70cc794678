"""A wide-area network on one machine: a TUN device whose packets come back after half a round trip.

The device has two addresses. Who wants to be reached through the WAN listens on the *near* one; who connects to the
*far* one reaches it. A packet to the far address leaves through the device; after the delay it comes back with its two
addresses swapped, so that it is one from the far address to the near one, and so is every answer. Checksums are sums
and stay right. So the kernel's own TCP sees the round trip on either side: handshakes, windows, slow start and buffers
cost what they do on a real WAN, which no relay that ends connections can show. Nothing is lost, and the rate is bounded
by nothing but this process.

Needs CAP_NET_ADMIN and ``/dev/net/tun``; a user without can have a network of one's own (``unshare -rn``), in which the
loopback device must be up.

What this process takes itself is taken off the delay, as far as the quickest of some round trips shows it: no packet is
faster than asked for, and a slow machine has no longer WAN than a fast one.

Runs as a child (:mod:`isthmus_bench.children`). On standard input ``stats`` asks how late packets were, ``delay`` says
what one is delayed by.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import json
import os
import select
import socket
import struct
import sys
import threading
import time
from array import array
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

from isthmus_bench.children import Child
from isthmus_bench.percentiles import percentile

DEVICE_FILE: Final = "/dev/net/tun"
MTU: Final = 1500
QUEUE_PACKETS: Final = 50_000
"""What may wait in the device until this process reads it. A real WAN of low use drops nothing either."""
BURST: Final = 64
"""So many packets are read before those that are due are written."""
PROBE_BYTES: Final = 64
CALIBRATING_PROBES: Final = 50
PROBE_TIMEOUT_S: Final = 10.0

_TUNSETIFF: Final = 0x400454CA
_IFF_TUN: Final = 0x0001
_IFF_NO_PI: Final = 0x1000
_SIOCGIFFLAGS: Final = 0x8913
_SIOCSIFFLAGS: Final = 0x8914
_SIOCSIFADDR: Final = 0x8916
_SIOCSIFDSTADDR: Final = 0x8918
_SIOCSIFMTU: Final = 0x8922
_SIOCSIFTXQLEN: Final = 0x8943
_IFF_UP: Final = 0x1
_IFF_RUNNING: Final = 0x40
_PR_SET_TIMERSLACK: Final = 29
_IPV4: Final = 0x45
"""The first byte of a packet without IP options."""


class WanError(Exception):
    """There can be no WAN here; the message says why, and what to do."""


class Device:
    """A TUN device, which is gone when it is closed. Raises WanError."""

    def __init__(self) -> None:
        try:
            self.fd = os.open(DEVICE_FILE, os.O_RDWR | os.O_NONBLOCK)
        except OSError as error:
            raise WanError(f"a WAN needs {DEVICE_FILE}: {error.strerror}") from error
        try:
            given = fcntl.ioctl(self.fd, _TUNSETIFF, struct.pack("16sH22x", b"isthmus%d", _IFF_TUN | _IFF_NO_PI))
            name = given[:16].rstrip(b"\0")
            number = int(name.removeprefix(b"isthmus"))
            # 198.18.0.0/15 is for benchmarks (RFC 2544)
            self.near, self.far = (f"198.18.{number % 256}.{host}" for host in (1, 2))
            self._configure(name)
        except OSError as error:
            os.close(self.fd)
            raise WanError(
                f"a WAN needs a TUN device ({error.strerror}): run as root, give the process CAP_NET_ADMIN, or run it "
                "in a network of its own: unshare -rn sh -c 'ip link set lo up; exec isthmus bench sync'"
            ) from error

    def _configure(self, name: bytes) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
            for request, address in ((_SIOCSIFADDR, self.near), (_SIOCSIFDSTADDR, self.far)):
                packed = struct.pack("16sHH4s8x", name, socket.AF_INET, 0, socket.inet_aton(address))
                fcntl.ioctl(control, request, packed)
            fcntl.ioctl(control, _SIOCSIFMTU, struct.pack("16si12x", name, MTU))
            with suppress(PermissionError):  # a user's own network has the kernel's 500 packets
                fcntl.ioctl(control, _SIOCSIFTXQLEN, struct.pack("16si12x", name, QUEUE_PACKETS))
            flags = struct.unpack("16sH14x", fcntl.ioctl(control, _SIOCGIFFLAGS, struct.pack("16sH14x", name, 0)))[1]
            fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH14x", name, flags | _IFF_UP | _IFF_RUNNING))

    def close(self) -> None:
        os.close(self.fd)


def swapped(packet: bytes) -> bytes:
    """An IPv4 packet with source and destination exchanged."""
    return b"".join((packet[:12], packet[16:20], packet[12:16], packet[20:]))


class Forwarder:
    """Hands each packet back when its time has come, in order."""

    def __init__(self, device: Device, delay_ns: int) -> None:
        self._fd = device.fd
        self._delay_ns = delay_ns
        self._waiting: deque[tuple[int, bytes]] = deque()
        self.late_ns = array("q")
        """Of each packet: how long after its time it was handed back."""

    def next_due_s(self) -> float | None:
        """Seconds until the next packet is due; None where none waits."""
        return max(0, self._waiting[0][0] - time.monotonic_ns()) / 1e9 if self._waiting else None

    def take(self) -> None:
        """Take packets in that came."""
        for _ in range(BURST):
            try:
                packet = os.read(self._fd, 65536)
            except BlockingIOError:
                return
            if packet[0] == _IPV4:
                self._waiting.append((time.monotonic_ns() + self._delay_ns, swapped(packet)))

    def give(self) -> None:
        """Hand back what is due."""
        waiting = self._waiting
        while waiting and (late := time.monotonic_ns() - waiting[0][0]) >= 0:
            with suppress(BlockingIOError):
                os.write(self._fd, waiting.popleft()[1])
            self.late_ns.append(late)

    def stats(self) -> dict[str, float]:
        """How late packets were since the last time that this was asked."""
        late = sorted(self.late_ns)
        self.late_ns = array("q")
        return {
            "packets": len(late),
            **{f"p{share:g}_late_us": percentile(late, share) / 1000 if late else 0.0 for share in (50, 99)},
        }

    def obey(self, command: dict[str, Any]) -> dict[str, float]:
        """Do what standard input asks for."""
        if command["do"] == "delay":
            self._delay_ns = command["ns"]
            return {}
        return self.stats()

    def run(self) -> None:
        """Forward until standard input ends."""
        commands = sys.stdin.fileno()
        os.set_blocking(commands, False)
        while True:
            # select takes microseconds, where epoll takes milliseconds
            ready, _, _ = select.select((self._fd, commands), (), (), self.next_due_s())
            if self._fd in ready:
                self.take()
            self.give()
            if commands in ready:
                command = os.read(commands, 4096)
                if not command:
                    return
                print(json.dumps(self.obey(json.loads(command))), flush=True)


def be_prompt() -> None:
    """Wake up when a timer is due and not up to 50 us later; go first, where we are allowed to."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("rtt_ms", type=float)
    chosen = parser.parse_args()
    try:
        device = Device()
    except WanError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return
    be_prompt()
    print(json.dumps({"near": device.near, "far": device.far}), flush=True)
    Forwarder(device, round(chosen.rtt_ms * 500_000)).run()


@dataclass(frozen=True, slots=True)
class RoundTrips:
    """What a request and an answer of a few bytes take over the WAN, with nothing else on it."""

    p50_ms: float
    p99_ms: float
    max_ms: float


class Wan:
    """A WAN with a round trip of ``rtt_ms``, while the context lasts. Raises ChildFailed."""

    def __init__(self, rtt_ms: float) -> None:
        self._child = Child("isthmus_bench.wan", str(rtt_ms))
        self.near: str = self._child.said["near"]
        """Listen here..."""
        self.far: str = self._child.said["far"]
        """...and be reached here."""
        self._calibrate(rtt_ms)

    def _calibrate(self, rtt_ms: float) -> None:
        """Have the quickest round trip take ``rtt_ms``."""
        excess_s = min(_pings(self.near, self.far, CALIBRATING_PROBES)) - rtt_ms / 1000
        self._child.ask(do="delay", ns=max(0, round((rtt_ms / 1000 - excess_s) * 1e9 / 2)))

    @property
    def pid(self) -> int:
        return self._child.pid

    def stats(self) -> dict[str, float]:
        """How late packets were since the last time that this was asked, beyond what they shall be."""
        return self._child.ask(do="stats")

    def round_trips(self, count: int) -> RoundTrips:
        """Measure it."""
        taken = sorted(_pings(self.near, self.far, count))
        return RoundTrips(*(percentile(taken, share) * 1000 for share in (50, 99, 100)))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._child.close()


def _pings(near: str, far: str, count: int) -> list[float]:
    """Seconds that each of ``count`` exchanges took."""
    with socket.create_server((near, 0)) as server:
        answering = threading.Thread(target=_echo, args=(server,), daemon=True)
        answering.start()
        with socket.create_connection((far, server.getsockname()[1]), PROBE_TIMEOUT_S) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            taken = []
            for _ in range(count):
                begin = time.perf_counter()
                connection.sendall(bytes(PROBE_BYTES))
                left = PROBE_BYTES
                while left:
                    left -= len(connection.recv(left))
                taken.append(time.perf_counter() - begin)
        answering.join(PROBE_TIMEOUT_S)
    return taken


def _echo(server: socket.socket) -> None:
    connection, _ = server.accept()
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while data := connection.recv(PROBE_BYTES):
            connection.sendall(data)


if __name__ == "__main__":
    main()
