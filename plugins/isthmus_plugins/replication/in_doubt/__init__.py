"""What the source's transactions have come to, kept at the target for a failover, and how they end there.

Nouns: store (the topic `__isthmus_transactions`), pending offsets (what open transactions have committed), resolution
(commit or abort).

Builds on: link, logs.
"""
