"""Hybrid logical clocks, and registers that both clusters of a link may write.

Both sides of a link may change its mirrored settings, also while they cannot reach one another (KIP-986 lets operators
diverge on purpose). Each setting is a register; when the sides meet again, the later write wins on both. "Later" is a
hybrid logical clock (Kulkarni et al. 2014): wall time where clocks agree, a counter where they do not, the cluster id
where both tie. Merging is commutative, associative and idempotent, so the sides need no order and no memory of what
they already sent each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True, order=True)
class Hlc:
    """A point of hybrid logical time. ``node`` is the id of the cluster whose log made it."""

    wall_ms: int
    counter: int
    node: str


ZERO = Hlc(0, 0, "")


def tick(last: Hlc, now_ms: int, node: str) -> Hlc:
    """The time of a new write: after ``last``, and at ``now_ms`` where the wall clock is ahead of it."""
    if now_ms > last.wall_ms:
        return Hlc(now_ms, 0, node)
    return Hlc(last.wall_ms, last.counter + 1, node)


@dataclass(frozen=True, slots=True)
class Register(Generic[T]):
    """A value and when it was written."""

    value: T
    written: Hlc


def latest(left: Register[T], right: Register[T]) -> Register[T]:
    """The later write. One clock never stamps two values, so equal times mean equal registers."""
    return right if right.written > left.written else left


def merge_registers(left: Mapping[str, Register[T]], right: Mapping[str, Register[T]]) -> dict[str, Register[T]]:
    """The later write of each name."""
    merged = dict(left)
    for name, register in right.items():
        merged[name] = latest(merged[name], register) if name in merged else register
    return merged
