"""The follower end of links: takes batches and appends them at the same offsets.

Nouns: stream (one partition that follows), log (decides what may be appended), writer (the requests to a broker),
follower topic.

Builds on: comparison, link, logs.
"""
