"""The leader end of links: reads this cluster's topics and pushes what is new.

Nouns: stream (one partition, pushed over one connection), tail (the reads of one broker), target topic, doubt
(deletions may be missing).

Builds on: comparison, link, logs, offsets_topic, partitions, traffic.
"""
