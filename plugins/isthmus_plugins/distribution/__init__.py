"""Distribution: many clusters take writes to the same topics, and every message gets to every cluster (docs/adr/0033).

Nouns: tree (its leaves are clusters), level (the number of a subtree; a bit of the copy flags), distributor (reads on
one leaf, for one level above it), target (the leaf on the other side that it writes to), stretch (what of a leaf's log
one target is given), settled (before this offset all leaves on the other side have everything), filling (a new leaf
gets what is there).

Builds on: nothing but ``isthmus_protocol``. It decides, and does no I/O.
"""
