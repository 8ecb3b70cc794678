"""The audit: two clusters' topics and groups compared through Spark (docs/spark.md).

``admin``    what the clusters say about topics, logs and groups
``plan``     what is asked for, and the pairs of partitions that this is
``reading``  ranges of offsets as data frames
``run``      the passes over records; ``groups`` what groups have committed
``command``  ``isthmus spark audit``; ``page`` its report
"""
