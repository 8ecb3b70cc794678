"""Replication: links between clusters, their leader and follower ends.

:mod:`.plugin` has the hooks, :mod:`.assembly` makes the parts and joins them. Everything else stands in wings, each
with its nouns and what it builds on in its ``__init__``; ARCHITECTURE.md has them in one picture, and
``pyproject.toml`` their layers. Leader and follower do not know each other: what both need stands below them.
"""
