"""The proof of a distribution tree: every message on every cluster once, by the topics themselves (docs/spark.md).

``document``  the tree, and by which levels a copy can come from one cluster to another
``copies``    messages and their copies told apart, counted and compared
``run``       reads the clusters' topics; ``command``  ``isthmus spark tree``; ``page`` its report
"""
