"""Bytes only: frames, peeks, rewriting, record batches, link messages. No I/O, no clock."""
