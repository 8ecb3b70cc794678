"""What operators can have done with links: made, attached, promoted, failed over, verified.

Nouns: operation (a request of an operator, answered when both ends have it), promotion, failover, decision about a
topic.

Builds on: acls, comparison, follower, groups, in_doubt, leader, link, logs, offsets_topic, partitions, proof, status,
sync.
"""
