"""``isthmus demo``: two real clusters, two proxies, one link; what is written to one survives its death in the other.

``command`` is the command line, ``story`` tells it, ``disaster`` is its second half (synchronous, kill, failover), or
``reversal``,
``tree`` is the one with ``--tree``: three clusters that all take writes.
``clients`` are the producers and consumers, ``report`` has Spark look at their traffic, ``telling`` prints.
"""

from isthmus_bench.demo.command import demo_app

__all__ = ("demo_app",)
