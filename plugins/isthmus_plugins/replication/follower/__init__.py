"""The follower end of links: takes batches and appends them at the same offsets.

Nouns: stream (one partition that follows), log (decides what may be appended), prerequisite (what has to be done before
the next record is written), writer (the requests to a broker), follower topic.

Builds on: comparison, link, logs, traffic.
"""
