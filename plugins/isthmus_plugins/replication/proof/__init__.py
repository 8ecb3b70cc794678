"""Compares what both brokers hold of what follows, again and again, and says how far it was found equal.

Nouns: pass (over both whole logs of a partition), piece (what is compared at once), difference, pace.

Builds on: comparison, follower, link, logs, offsets_topic.
"""
