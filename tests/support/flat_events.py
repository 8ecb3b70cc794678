"""Captured events as tests look at them: one level of names."""

from __future__ import annotations

from types import SimpleNamespace

from isthmus_plugins.capture.events import Event


def flat(event: Event) -> SimpleNamespace:
    """What differs from others and what does not, beside each other."""
    *own, common = event
    return SimpleNamespace(**dict(zip(Event._fields, own, strict=False)), **common._asdict())
