"""What clients are shown of topics that a link changes: hidden, waiting, renumbered, at another offset.

Nouns: view (request hooks that keep clients right about one thing), alias (a former topic id).

Builds on: follower, link.
"""
