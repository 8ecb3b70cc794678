"""Ports for brokers.

Never from the range that the system hands out to outgoing connections: a client that retries a dead broker's port can
be given that very port as its own, connect to itself, and the broker could not come back.
"""

from __future__ import annotations

import os
import random
import socket
from pathlib import Path
from typing import Final

from isthmus_bench.kafka.errors import EmbeddedKafkaError

_LOWEST: Final = 15000
_claims: Final[dict[int, int]] = {}
"""Port to the descriptor that holds the claim."""


def _range() -> tuple[int, int]:
    try:
        low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    except (OSError, ValueError):
        low, high = 32768, 60999
    return (_LOWEST, low - 1) if low > _LOWEST + 2000 else (min(high + 1, 64000), 65535)


def is_free(host: str, port: int) -> bool:
    """Whether a broker could listen there now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as Java does: TIME_WAIT is no obstacle
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def _claim(port: int) -> bool:
    """Take a port among all processes that use this module, until this process ends or releases it.

    An abstract socket name is taken in one step and freed by the kernel with its owner.
    """
    with socket.socket(socket.AF_UNIX) as claim:
        try:
            claim.bind(f"\0isthmus-port-{port}")
        except OSError:
            return False
        _claims[port] = claim.detach()  # no object that complains when the process ends
    return True


def pick(host: str, count: int) -> list[int]:
    """``count`` free ports, claimed until ``release``: they stay ours while a broker is down."""
    low, high = _range()
    picked: list[int] = []
    for port in random.sample(range(low, high + 1), high - low + 1):
        if len(picked) == count:
            break
        if port not in _claims and is_free(host, port) and _claim(port):
            picked.append(port)
    if len(picked) < count:
        release(picked)
        raise EmbeddedKafkaError(f"no {count} free ports between {low} and {high} on {host}: stop what holds them")
    return picked


def pick_run(host: str, count: int) -> list[int]:
    """``count`` free ports that follow one another, claimed until ``release``."""
    low, high = _range()
    starts = range(low, high + 2 - count)
    for first in random.sample(starts, len(starts)):
        picked: list[int] = []
        for port in range(first, first + count):
            if port in _claims or not is_free(host, port) or not _claim(port):
                break
            picked.append(port)
        else:
            return picked
        release(picked)
    raise EmbeddedKafkaError(f"no {count} free ports in a row between {low} and {high} on {host}: stop what holds them")


def take(host: str, first: int, count: int) -> list[int]:
    """The ports from ``first`` on, which the user chose. Raises EmbeddedKafkaError if one is in use."""
    if not 1 <= first <= 65536 - count:
        raise EmbeddedKafkaError(f"port {first} is out of range: choose one from 1024 to {65536 - count}")
    wanted = list(range(first, first + count))
    taken = [port for port in wanted if not is_free(host, port)]
    if taken:
        raise EmbeddedKafkaError(
            f"port {', '.join(map(str, taken))} on {host} is in use: choose another with --port (broker 1 listens "
            "there, broker 2 on the next one, and so on), or stop what listens there"
        )
    return wanted


def release(ports: list[int]) -> None:
    for port in ports:
        if port in _claims:
            os.close(_claims.pop(port))
