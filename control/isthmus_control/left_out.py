"""What a link leaves out although the prefix of one of its namespaces covers it: KIP-986's rule of underscores.

Internal topics and groups, Kafka's own and the proxies', are in no namespace, and not listed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from isthmus_control.model import NamespaceMapping, ResourceType, is_internal


class LeftOut(NamedTuple):
    """A topic or consumer group of the source."""

    type: ResourceType
    name: str
    reason: str


def left_out(mappings: Sequence[NamespaceMapping], kind: ResourceType, names: Iterable[str]) -> list[LeftOut]:
    """Which of the source's ``names`` are left out, and why. ``mappings``: all of a link that this cluster leads."""
    own = [mapping for mapping in mappings if mapping.type is kind]
    found = []
    for name in sorted(names):
        covering = [mapping for mapping in own if name.startswith(mapping.local_prefix)]
        if covering and not is_internal(kind, name) and all(each.remote_name(name) is None for each in covering):
            longest = max(covering, key=lambda mapping: len(mapping.local_prefix))
            found.append(LeftOut(kind, name, _reason(longest, name)))
    return found


def _reason(mapping: NamespaceMapping, name: str) -> str:
    if not mapping.holds(name):
        return "the empty prefix leaves out what begins with an underscore: attach a namespace '_', or a longer one"
    counterpart = mapping.remote_prefix + name[len(mapping.local_prefix) :]
    return f"it would be {counterpart!r} there, which the namespace {mapping.remote_prefix!r} does not hold"
