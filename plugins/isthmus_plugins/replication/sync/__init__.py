"""Holds acks over synchronous links until the other side has what they ack, and says what is In-Sync.

Nouns: quorum (which links an ack needs), lease (until when the other side may say In-Sync unheard), gate (holds an
answer), degraded (acks go without a link).

Builds on: client_views, follower, groups, in_doubt, leader, link, partitions.
"""
