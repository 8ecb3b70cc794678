"""What a link leaves out although the prefix of a namespace covers it."""

from __future__ import annotations

import pytest

from isthmus_control.left_out import left_out
from isthmus_control.model import NamespaceMapping, ResourceType, Role

TOPIC, GROUP = ResourceType.TOPIC, ResourceType.CONSUMER_GROUP
NAMES = (
    "a-t",
    "a-_t",
    "_schemas",
    "__debezium-heartbeat.a",
    "__consumer_offsets",
    "__remote_log_metadata",
    "__isthmus_x",
)


def led(local: str, remote: str, kind: ResourceType = TOPIC) -> NamespaceMapping:
    return NamespaceMapping(kind, local, remote, Role.LEADER, 0, 0)


@pytest.mark.parametrize(
    ("mappings", "names"),
    [
        ([led("", "")], ["__debezium-heartbeat.a", "_schemas"]),
        ([led("", "a-")], ["__debezium-heartbeat.a", "_schemas"]),
        ([led("", ""), led("_", "_")], []),
        ([led("", ""), led("__", "__")], ["_schemas"]),
        ([led("a-", "")], ["a-_t"]),
        ([led("a-", "b-")], []),
        ([led("_", "x_")], []),
        ([led("_s", "__isthmu")], []),
        ([led("", "", GROUP)], []),
        ([], []),
    ],
)
def test_topics(mappings: list[NamespaceMapping], names: list[str]) -> None:
    assert [each.name for each in left_out(mappings, TOPIC, NAMES)] == names


def test_what_would_be_internal_there_is_left_out() -> None:
    found = left_out([led("a-", "__consumer_")], TOPIC, ["a-offsets", "a-others"])
    assert [each.name for each in found] == ["a-offsets"]
    assert "'__consumer_offsets'" in found[0].reason


def test_groups_and_what_to_do() -> None:
    found = left_out([led("", "", GROUP), led("_", "_")], GROUP, ["_g", "g", "__isthmus_control_x"])
    assert [(each.type, each.name) for each in found] == [(GROUP, "_g")]
    assert "attach a namespace '_'" in found[0].reason
