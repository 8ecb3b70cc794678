"""What operators and plugins are shown of links: states, reasons and lag of each partition and group.

Nouns: status (a picture of one moment), observer (who is notified when a state changes).

Builds on: acls, follower, groups, leader, link, partitions, proof, sync.
"""
