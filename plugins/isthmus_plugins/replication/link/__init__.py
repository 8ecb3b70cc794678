"""The connections between proxies: who dials, what is said, what both sides know of a link.

Nouns: connection (handshake, frames), call (a question and its answer), peer (a proxy of the other cluster), reason
(why a partition is where it is).

Builds on: no other wing.
"""
