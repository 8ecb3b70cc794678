"""What a change is about, and how that looks: a namespace, a link, tokens, a topic, the tree, or the control log."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from isthmus_control.codec import to_json
from isthmus_control.control_state import ControlState
from isthmus_control.model import Link, NamespaceMapping, ResourceType

NOT_TOLD: Final = frozenset({"attached_ms", "attached_at_offset", "truncate_topic_ids", "cuts"})
"""Of a pair of namespaces: what is not set of it, and what was agreed to of single topics."""


class Subject(NamedTuple):
    """Something by its kind and name."""

    kind: str
    """``namespaces``, ``links``, ``link-tokens``, ``topics``, ``tree`` or ``control``, as in paths."""
    type: str
    """Of a namespace; else empty."""
    name: str

    def seen(self, state: ControlState) -> Mapping[str, Any] | None:
        """What the control log has of it; None: it has none."""
        if self.kind == "namespaces":
            return _namespace(state, self.type, self.name)
        if self.kind == "links":
            link = state.links.get(self.name)
            return None if link is None else _link(link)
        if self.kind == "topics":
            topic = state.follower_topics.get(self.name)
            if topic is None:
                return None
            reason = None if topic.reason is None else topic.reason.code
            return {"link": topic.link, "state": topic.state.value, "reason": reason, "topic_id": topic.topic_id}
        if self.kind == "link-tokens":
            return {
                token_id: {"may": [str(each) for each in token.grants], "expires_ms": token.expires_ms}
                for token_id, token in sorted(state.link_tokens.items())
            }
        if self.kind == "tree":
            tree = state.tree
            if tree is None:
                return None
            chosen = {str(level): leaf for level, leaf in sorted(tree.chosen.items())}
            return {"version": tree.version, "leaf": tree.leaf, "topics": list(tree.prefixes), "targets": chosen}
        return {"level": state.level, "key_id": state.key_id or None}


def subject_of(path: str, asked: Mapping[str, Any]) -> Subject | None:
    """What a request is about, by its path, and its query's and body's fields; None: nothing of these."""
    version, kind, named = (*path.split("/")[1:4], "", "", "")[:3]
    if version != "v1":
        return None
    if kind == "namespaces":
        type_ = named or str(asked.get("type", ResourceType.TOPIC.value))
        return Subject(kind, type_, str(asked.get("prefix", "")))
    if kind in ("links", "topics"):
        return Subject(kind, "", named or str(asked.get("link_name", "")))
    return Subject(kind, "", "") if kind in ("control", "link-tokens", "tree") else None


def _namespace(state: ControlState, type_: str, prefix: str) -> Mapping[str, Any] | None:
    if type_ not in {each.value for each in ResourceType}:
        return None
    found = state.namespace(ResourceType(type_), prefix)
    if found is None:
        return None
    return {
        "reserved": found.reserved,
        "reserved_reason": found.reserved_reason,
        "consistency": found.demands.consistency.value,
        "visibility": found.demands.visibility.value,
        "degrade_after_ms": found.demands.degrade_after_ms,
        "confirm": str(found.demands.confirm),
        "informational": found.informational,
        "stale_reads": found.stale_reads,
        "plugins": [{"plugin": each.name, "version": each.version} for each in found.plugins],
    }


def _link(link: Link) -> Mapping[str, Any]:
    return {
        "link_id": link.link_id,
        "remote_cluster_id": link.remote_cluster_id,
        "mode": link.mode.value,
        "sealed": [{"id": each or None, "key_id": sealed.key_id or None} for each, sealed in link.secrets.items()],
        "mappings": [_mapping(each) for each in link.mappings],
        "offsets_topics": [_mapping(each) for each in link.offsets_topics],
        "grants": [str(each) for each in link.grants],
        "waiting": [each.local_prefix for each in link.waiting],
        "config": {name: each.value for name, each in sorted(link.settings.config.items()) if each.value is not None},
    }


def _mapping(mapping: NamespaceMapping) -> Mapping[str, Any]:
    """Whatever is set of it."""
    said = {field.name: getattr(mapping, field.name) for field in dataclasses.fields(mapping)}
    named = {"local": said.pop("local_prefix"), "remote": said.pop("remote_prefix"), **said}
    form = None if mapping.offsets is None else mapping.offsets.form
    found = {name: value for name, value in {**named, "offsets": form}.items() if name not in NOT_TOLD}
    return {name: to_json(value) for name, value in found.items() if value or name in ("local", "remote")}
