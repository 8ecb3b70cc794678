"""What is recorded of how far a partition that follows was found to be its source's, by what both brokers hold."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FoundDifference:
    """The first offset at which both logs were found to differ; what was compared then ended before ``to``."""

    offset: int
    to: int
    found_ms: int
    message: str


@dataclass(frozen=True, slots=True)
class Proof:
    """How far a partition was compared, and when.

    ``equal_until``: all before it was equal when it was compared last. ``passed_ms``: when the last pass over both
    whole logs began; 0: there was none. ``begun_ms``, ``at``: when the present one began, and where it stands; one that
    is whole goes on with what comes. ``difference``: until it is found equal again, or acknowledged.
    """

    equal_until: int = 0
    passed_ms: int = 0
    begun_ms: int = 0
    at: int = 0
    difference: FoundDifference | None = None
