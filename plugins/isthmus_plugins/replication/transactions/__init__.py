"""Has this cluster's transactions end on the other side as they end here: decisions before markers.

Nouns: decision (a transaction will commit; the other side stores it), marker (stands in a log; never goes before its
decision), gate (holds the answer to EndTxn).

Builds on: leader, link, logs, partitions, sync.
"""
