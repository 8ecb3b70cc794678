"""The cleanup policies of topics that follow, as their source has them.

While a topic follows, its policy is the link's business: ``delete``, without retention, until it was filled, then
``compact,delete``. Applications look at the policy of what they keep in a topic before they use it, and end where it is
not ``compact`` alone (Kafka Connect, seen with 4.3; schema registries). So that one setting is shown to clients as it
is at the source, as far as that has sent it. All others are shown as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from isthmus_control.control_state import ControlState
from isthmus_control.model import FollowerTopic, TopicState
from isthmus_plugins.api import Replace, Request, RequestHook, Verdict
from isthmus_plugins.aside import answered_as_asked
from isthmus_plugins.replication.link.part import Part
from isthmus_plugins.replication.logs.topic_settings import CLEANUP_POLICY
from isthmus_protocol import peeks
from isthmus_protocol.refusals import RESOURCE_TYPE_TOPIC
from isthmus_protocol.schema import ApiKey, message_spec
from isthmus_protocol.splicing import edited_frame, encoded_string


class CleanupPolicies(Part):
    """Hooks that do nothing while no topic follows."""

    def __init__(self) -> None:
        self._topics: Mapping[str, FollowerTopic] = {}
        self._read: tuple[Mapping[str, FollowerTopic], dict[bytes, bytes]] = {}, {}
        """Follower topics, and what was read of them: by topic that follows, what its source has."""

    def hooks(self) -> Sequence[RequestHook]:
        return [RequestHook(ApiKey.DESCRIBE_CONFIGS, self.on_describe, whole=True, pure=True)]

    def control_changed(self, state: ControlState) -> None:
        self._topics = state.follower_topics

    def _policies(self) -> Mapping[bytes, bytes]:
        """Read when somebody asks: of thousands of topics the control log has one change after another."""
        if self._read[0] is not self._topics:
            policies = {
                topic.topic.encode(): policy.encode()
                for topic in self._topics.values()
                if topic.state is TopicState.FOLLOWING and (policy := topic.settings.get(CLEANUP_POLICY)) is not None
            }
            self._read = self._topics, policies
        return self._read[1]

    def on_describe(self, request: Request) -> Verdict:
        """Forward the request, and show the source's policy of topics that follow."""
        if not (policies := self._policies()):
            return None
        asked = peeks.described_resources(request.version, request.frame)
        if not any(kind == RESOURCE_TYPE_TOPIC and name in policies for kind, name in asked):
            return None
        return Replace(request.frame, answered_as_asked(request, partial(self._shown, request.version)))

    def _shown(self, version: int, frame: bytes) -> bytes:
        flexible = message_spec(ApiKey.DESCRIBE_CONFIGS, version, "response").flexible
        policies = self._policies()
        edits = [
            (*place, encoded_string(policy, flexible))
            for kind, name, settings in peeks.described_settings(version, frame)
            if kind == RESOURCE_TYPE_TOPIC and (policy := policies.get(name)) is not None
            for setting, place in settings
            if setting == CLEANUP_POLICY.encode()
        ]
        return edited_frame(frame, edits) if edits else frame
