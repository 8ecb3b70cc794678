"""What clients are shown where a link changes topics and producers: hidden, waiting, renumbered, at another offset.

Nouns: view (request hooks that keep clients right about one thing), alias (a former topic id).

Builds on: follower, link, logs.
"""
