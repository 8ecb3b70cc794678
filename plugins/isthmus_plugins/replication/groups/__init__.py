"""Replicates what consumer groups have committed: from this cluster's offsets topic to the coordinators there.

Nouns: source (a partition of the offsets topic, as read), feed (the same, as pushed to one follower end), intake (what
was pushed to follower ends), followed group (what it wants and has).

Builds on: follower, in_doubt, leader, link, logs, partitions, truncation.
"""
