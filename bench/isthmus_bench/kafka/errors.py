"""What embedded clusters raise."""

from __future__ import annotations


class EmbeddedKafkaError(Exception):
    """Something the user can act on; the message says what is wrong and what to do about it."""
