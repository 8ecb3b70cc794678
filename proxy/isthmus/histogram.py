"""Latency histograms cheap enough for every request.

A bucket is a power of two in microseconds, so that observing is one ``bit_length`` and one list item: 0.15 us, where a
``prometheus_client`` histogram takes 1.5. :meth:`Histogram.prometheus_buckets` makes cumulative buckets at scrape time.
"""

from __future__ import annotations

BUCKETS = 26
"""Up to 2**25 us, 33 s; what is slower falls into the last bucket."""


class Histogram:
    """Counts of durations in power-of-two buckets: bucket ``i`` holds those under ``2**i`` microseconds."""

    __slots__ = ("counts", "seconds_sum")

    def __init__(self) -> None:
        self.counts = [0] * BUCKETS
        self.seconds_sum = 0.0

    def observe(self, seconds: float) -> None:
        """Count one duration, in seconds."""
        try:
            self.counts[int(seconds * 1e6).bit_length()] += 1
        except IndexError:
            self.counts[BUCKETS - 1] += 1
        self.seconds_sum += seconds

    @property
    def total(self) -> int:
        return sum(self.counts)

    def prometheus_buckets(self) -> list[tuple[str, float]]:
        """Cumulative ``(upper bound in seconds, count)`` pairs as ``HistogramMetricFamily`` takes them."""
        pairs: list[tuple[str, float]] = []
        running = 0
        for exponent, count in enumerate(self.counts[:-1]):
            running += count
            pairs.append((repr((1 << exponent) / 1e6), float(running)))
        pairs.append(("+Inf", float(running + self.counts[-1])))
        return pairs
