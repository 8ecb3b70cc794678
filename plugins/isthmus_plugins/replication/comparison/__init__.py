"""Says whether two logs hold the same: by digest, by record, by the batch that stands last.

Nouns: digest (16 bytes for a range), level (what of the records it covers), last batch.

Builds on: link, logs, offsets_topic.
"""
