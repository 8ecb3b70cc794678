"""What a record of the control log concerns, readable by every later version, and what follows where it is not known.

From feature level 1 on an envelope says which namespaces and links its command is about, and whether older proxies may
ignore it. A proxy that does not know the command

- passes over one that may be ignored: such a kind changes nothing in the state, and its id is not remembered;
- keeps one that says what it concerns as *beyond* it (:class:`Beyond`): it refuses writes to what that is about, and
  stops the links. Commands that it knows and that touch what is beyond it are beyond it, too: their answer may be
  another one than it would give. All else goes on. Its state is not whole any more, so it neither writes snapshots nor
  compares any, and keeps it to itself;
- stops for good at one that says neither, as one must that changes what is the cluster's: leases, counters, settings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from isthmus_control.codec import MalformedValue, UnknownField, from_json
from isthmus_control.model import Link, NamespaceKey, ResourceType, overlap

NAMED_MAX: Final = 100
"""A command about more topics than this is said to concern everything."""


@dataclass(frozen=True, slots=True)
class Concerns:
    """Namespaces (a topic is the namespace of its name) and links, each local."""

    namespaces: tuple[NamespaceKey, ...] = ()
    links: tuple[str, ...] = ()

    def reserved(self, links: Mapping[str, Link]) -> tuple[NamespaceKey, ...]:
        """Where no client may write: these namespaces, and those of the links."""
        of_links = (
            NamespaceKey(mapping.type, mapping.local_prefix)
            for name in self.links
            if name in links
            for mapping in links[name].mappings
        )
        return tuple(dict.fromkeys((*self.namespaces, *of_links)))

    def stopped(self, links: Mapping[str, Link]) -> tuple[str, ...]:
        """The links that stop: these, and those that a namespace of these is attached to."""
        attached = (
            link.name
            for link in links.values()
            for mapping in link.mappings
            if any(key.type is mapping.type and overlap(key.prefix, mapping.local_prefix) for key in self.namespaces)
        )
        return tuple(dict.fromkeys((*self.links, *attached)))

    def touches(self, other: Concerns, links: Mapping[str, Link]) -> bool:
        """Whether something is concerned by both."""
        if not set(self.stopped(links)).isdisjoint(other.stopped(links)):
            return True
        return any(
            mine.type is theirs.type and overlap(mine.prefix, theirs.prefix)
            for mine in self.reserved(links)
            for theirs in other.reserved(links)
        )


@dataclass(frozen=True, slots=True)
class Beyond:
    """A record that a proxy does not know, or may not judge, and what it concerns."""

    offset: int
    concerns: Concerns
    message: str


def concerns_of(body: Any) -> Concerns | None:
    """What a command's body is about, by the names of its fields; None: the proxies, the cluster, too much to say."""
    said = {field.name: getattr(body, field.name) for field in dataclasses.fields(body)}
    links = [said["link"]] if "link" in said else []
    if body.KIND.endswith("-link"):
        links.append(said["name"])
    keys = list(said.get("more", ()))
    if "type" in said:
        keys.append(NamespaceKey(said["type"], said["prefix"] if "prefix" in said else said["local_prefix"]))
    topics = {said["topic"]} if "topic" in said else set()
    if not links and not topics:
        topics = {each.topic for name in ("partitions", "epochs", "topics") for each in said.get(name, ())}
    keys += (NamespaceKey(ResourceType.TOPIC, topic) for topic in sorted(topics))
    if len(topics) > NAMED_MAX or not (links or keys):
        return None
    return Concerns(tuple(keys), tuple(links))


def said_in(envelope: Mapping[str, Any]) -> Concerns | None:
    """What an envelope says that its command concerns; None: nothing, or nothing that this version understands."""
    try:
        said = from_json(Concerns, envelope.get("concerns"))
    except (MalformedValue, UnknownField):
        return None
    return said if said.namespaces or said.links else None


def touched(beyond: Iterable[Beyond], concerns: Concerns | None, links: Mapping[str, Link]) -> Beyond | None:
    """What is beyond a proxy of that which a command concerns."""
    if concerns is None:
        return None
    return next((each for each in beyond if concerns.touches(each.concerns, links)), None)
