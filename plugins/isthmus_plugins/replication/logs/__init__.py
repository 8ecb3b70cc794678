"""Reads of this cluster's logs, whoever leads their partitions, and the settings of topics.

Nouns: tail (a topic read as it grows), log end (where a partition ends for now).

Builds on: no other wing.
"""
