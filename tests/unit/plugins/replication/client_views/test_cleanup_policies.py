"""What clients are told of the cleanup policy of a topic that follows."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from support.api_requests import request, versions

from isthmus_control.control_state import ControlState
from isthmus_control.model import FollowerTopic, TopicState
from isthmus_plugins.api import Client, Replace, Request
from isthmus_plugins.replication.client_views.cleanup_policies import CleanupPolicies
from isthmus_protocol.messages import build_response, decode_response, encode_response
from isthmus_protocol.schema import ApiKey

TOPIC, BROKER = 2, 4


def following(**topics: tuple[TopicState, str | None]) -> CleanupPolicies:
    hooks = CleanupPolicies()
    found = {
        name: FollowerTopic(
            "l",
            name,
            name,
            str(uuid.uuid4()),
            state,
            0,
            settings={} if policy is None else {"cleanup.policy": policy, "retention.ms": "7"},
        )
        for name, (state, policy) in topics.items()
    }
    hooks.control_changed(ControlState("B", follower_topics=found))
    return hooks


def described(*resources: tuple[int, str]) -> list[dict[str, Any]]:
    settings = {"retention.ms": "-1", "cleanup.policy": "compact,delete", "compression.type": "producer"}
    configs = [{"name": name, "value": value} for name, value in settings.items()]
    return [{"resource_type": kind, "resource_name": name, "configs": configs} for kind, name in resources]


@pytest.mark.parametrize("version", versions(ApiKey.DESCRIBE_CONFIGS))
def test_it_is_the_sources(version: int) -> None:
    hooks = following(
        t=(TopicState.FOLLOWING, "compact"),
        older=(TopicState.FOLLOWING, None),
        was=(TopicState.DETACHED, "compact"),
    )
    resources = [(TOPIC, "t"), (TOPIC, "u"), (TOPIC, "older"), (TOPIC, "was"), (BROKER, "t")]
    values = {"resources": [{"resource_type": kind, "resource_name": name} for kind, name in resources]}
    verdict = hooks.on_describe(request(ApiKey.DESCRIBE_CONFIGS, version, values))
    assert isinstance(verdict, Replace)
    assert verdict.on_response is not None
    answer = build_response(ApiKey.DESCRIBE_CONFIGS, version, {"results": described(*resources)})
    frame = verdict.on_response(encode_response(answer, 5))
    assert isinstance(frame, bytes)
    told: Any = decode_response(ApiKey.DESCRIBE_CONFIGS, version, frame)[1]
    shown = [{each.name: each.value for each in result.configs} for result in told.results]
    assert [each["cleanup.policy"] for each in shown] == ["compact", *4 * ["compact,delete"]]
    assert {each["retention.ms"] for each in shown} == {"-1"}, "what expires here expires by no setting of the source"
    others = {"resources": [{"resource_type": kind, "resource_name": name} for kind, name in resources[1:]]}
    assert hooks.on_describe(request(ApiKey.DESCRIBE_CONFIGS, version, others)) is None


def test_nothing_is_looked_at_while_nothing_follows() -> None:
    nonsense = Request(b"", True, ApiKey.DESCRIBE_CONFIGS, 4, 5, 0.0, Client(1, "a", 1))
    assert following(was=(TopicState.DETACHED, "compact")).on_describe(nonsense) is None
