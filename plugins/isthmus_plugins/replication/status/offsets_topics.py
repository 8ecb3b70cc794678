"""The copies of offsets topics, as operators see them."""

from __future__ import annotations

from isthmus_control.model import NamespaceMapping
from isthmus_plugins.links import OffsetsTopicStatus


def status_of(mapping: NamespaceMapping) -> OffsetsTopicStatus:
    assert mapping.offsets is not None
    return OffsetsTopicStatus(
        role=mapping.role.value,
        form=mapping.offsets.form.value,
        groups=list(mapping.offsets.groups),
        topic=mapping.local_prefix,
        remote_topic=mapping.remote_prefix,
    )
