"""What several rules ask of a command, and the limits of what it may hold."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TypeVar

from isthmus_control import commands as c
from isthmus_control.control_state import ControlState
from isthmus_control.model import (
    INTERNAL_TOPIC_PREFIXES,
    KAFKA_INTERNAL_TOPICS,
    FollowerTopic,
    Link,
    Namespace,
    NamespaceKey,
    ResourceType,
    TopicState,
)
from isthmus_control.outcome import Change, Refuse, Rejection, require

NAMESPACES_MAX = 10_000

ENTRIES_MAX = 10_000
"""Partitions in one command; a record of that many stays below a megabyte or two."""
ADDRESSES_MAX = 64
PREFIX_CHARS_MAX = 249
"""As the longest topic name that brokers take."""
REASON_CHARS_MAX = 1_000

AT_MS_MAX = 2**53
"""Beyond it a wall clock is broken, and the hybrid logical clock would follow it."""


LINK_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}\Z")
TOPIC_PREFIX = re.compile(r"[A-Za-z0-9._-]*\Z")
ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[^\s:\[\]/@]+):([0-9]{1,5})\Z")

Result = tuple[ControlState, tuple[Change, ...]]
K = TypeVar("K")
V = TypeVar("V")


def following(state: ControlState, link: Link, topic: str, topic_id: str) -> FollowerTopic:
    """A topic that follows a link under its id. Raises Refuse where it does not."""
    found = state.follower_topics.get(topic)
    if found is None or found.link != link.name or found.state is not TopicState.FOLLOWING:
        raise Refuse(Rejection.CONFLICT, f"topic {topic!r} does not follow link {link.name!r}")
    require(
        found.topic_id == topic_id, Rejection.CONFLICT, f"topic {topic!r} has the id {found.topic_id}, not {topic_id}"
    )
    return found


def put(table: Mapping[K, V], key: K, value: V) -> dict[K, V]:
    return {**table, key: value}


def drop(table: Mapping[K, V], key: K) -> dict[K, V]:
    return {name: value for name, value in table.items() if name != key}


def check_uuid(text: str, what: str) -> None:
    require(c.is_uuid(text), Rejection.INVALID, f"{what} {text!r} is not a UUID")


def check_addresses(addresses: Iterable[str]) -> None:
    listed = tuple(addresses)
    require(len(listed) <= ADDRESSES_MAX, Rejection.INVALID, f"more than {ADDRESSES_MAX} addresses")
    for address in listed:
        match = ADDRESS.match(address)
        require(
            match and 1 <= int(match[2]) <= 65535,
            Rejection.INVALID,
            f"{address!r} is not an address: host:port, IPv6 hosts in brackets",
        )


def check_reason(text: str | None) -> None:
    require(text is None or len(text) <= REASON_CHARS_MAX, Rejection.INVALID, "the reason is too long")


def link_named(state: ControlState, name: str) -> Link:
    link = state.links.get(name)
    if link is None:
        raise Refuse(Rejection.NOT_FOUND, f"there is no link {name!r}")
    return link


def namespace_at(state: ControlState, kind: ResourceType, prefix: str) -> Namespace:
    namespace = state.namespaces.get(NamespaceKey(kind, prefix))
    if namespace is None:
        raise Refuse(Rejection.NOT_FOUND, f"there is no {NamespaceKey(kind, prefix)}: create it first")
    return namespace


def check_prefix(kind: ResourceType, prefix: str) -> None:
    require(len(prefix) <= PREFIX_CHARS_MAX, Rejection.INVALID, f"the prefix is longer than {PREFIX_CHARS_MAX}")
    if kind is ResourceType.TOPIC:
        require(
            TOPIC_PREFIX.match(prefix),
            Rejection.INVALID,
            f"{prefix!r} is no prefix of topics: letters, digits, '.', '_' and '-' only",
        )
        require(
            not prefix.startswith(INTERNAL_TOPIC_PREFIXES) and prefix not in KAFKA_INTERNAL_TOPICS,
            Rejection.INVALID,
            f"{prefix!r} names internal topics, which are in no namespace",
        )
    if kind is ResourceType.PRINCIPAL:
        require(
            not prefix or re.match("[^:]+:", prefix),
            Rejection.INVALID,
            f"{prefix!r} is no prefix of principals: name their type, as in 'User:app-'",
        )
