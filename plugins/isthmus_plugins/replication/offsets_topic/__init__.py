"""Copies of the source's offsets topic: what leaves, in which form, and how a copy is read.

Nouns: form (whole, redacted, encrypted), keyring (the keys of a form), view (what a copy says of groups).

Builds on: logs.
"""
