"""Cuts a follower's log that is not its source's any more: salvage, spool, make anew, refill.

Nouns: run (one truncation, in recorded phases), common log (up to where both are the same), salvage (files), spool (a
topic).

Builds on: comparison, follower, link, logs.
"""
