"""The proxy's own Kafka client: what it asks of its cluster's brokers for itself and for plugins.

Nouns: broker connection (requests over one socket, in order), cluster connections (one for each broker and lane),
client (metadata, topics, logs), results (answers as plain values, errors as exceptions).

Builds on: the protocol component. Clients' sessions are another thing (:mod:`isthmus.session`), of which nothing here
knows.
"""
