"""Why a partition is where it is: the constants that go over the link and into status, and the states they mean.

Most are :class:`isthmus_control.states.ReasonCode`, which wait for somebody. The others below pass by themselves: the
leader end opens the stream again, and the partition shows as Catching Up meanwhile; so do SOURCE_TRUNCATING and
SOURCE_TRUNCATED, of a source that is truncated itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from isthmus_control.model import FollowerTopic, Reason
from isthmus_control.states import PartitionState, ReasonCode
from isthmus_control.truncations import Succession
from isthmus_plugins.cluster import KafkaRefused
from isthmus_protocol.error_codes import (
    CLUSTER_AUTHORIZATION_FAILED,
    GROUP_AUTHORIZATION_FAILED,
    TOPIC_AUTHORIZATION_FAILED,
)

MOVED: Final = "MOVED"
"""The follower partition is led by another broker, or its log was cut: the leader end looks for it again."""
CLOSED: Final = "CLOSED"
"""The stream was closed: the leader end no longer pushes it, or pushes it over another one."""
DISCONNECTED: Final = "DISCONNECTED"
NOT_LEADER: Final = "NOT_LEADER"
NOT_FOLLOWING: Final = "NOT_FOLLOWING"
NOT_LED: Final = "NOT_LED"
NO_LEASE: Final = "NO_LEASE"
"""The proxy has no lease (yet): another one may front its brokers."""
LINK_LOST: Final = "LINK_LOST"
SOURCE_UNAVAILABLE: Final = "SOURCE_UNAVAILABLE"
BROKER_UNAVAILABLE: Final = "BROKER_UNAVAILABLE"
FORMER_TOPIC_GOES: Final = "FORMER_TOPIC_GOES"
"""The follower has the records of a topic that the source has deleted: it goes by itself, and the one that the source
has made under the name is followed then."""

MADE_AGAIN: Final = frozenset({ReasonCode.SOURCE_TOPIC_ID_CHANGED, FORMER_TOPIC_GOES})
"""The source has deleted the topic that is followed, and made another one under its name."""
DIFFER: Final = frozenset({ReasonCode.TARGET_WRITTEN_BY_OTHERS, ReasonCode.UNEXPECTED_TRUNCATION})
"""A follower's log is not its source's any more: its topic is truncated."""
DIVERGED: Final = DIFFER | {ReasonCode.TRUNCATING, ReasonCode.SOURCE_LOST_RECORDS}
REFUSED: Final = frozenset(
    {
        ReasonCode.TARGET_TOPIC_NOT_EMPTY,
        ReasonCode.TARGET_TOPIC_ID_CHANGED,
        ReasonCode.TARGET_TOPIC_MAY_BE_DELETED,
        ReasonCode.TARGET_TOPIC_NOT_CREATED,
        ReasonCode.SOURCE_TOPIC_ID_CHANGED,
        ReasonCode.SOURCE_PARTITIONS_DECREASED,
    }
)
STOPPED: Final = frozenset(
    {
        ReasonCode.TRANSACTION_VERIFICATION_ENABLED,
        ReasonCode.UNSUPPORTED_MESSAGE_FORMAT,
        ReasonCode.TARGET_REFUSES_RECORDS,
        ReasonCode.SOURCE_TOPIC_MAY_BE_DELETED,
        ReasonCode.KEYRING_UNUSABLE,
        ReasonCode.STOPPED_BY_OPERATOR,
        ReasonCode.INTERNAL_ERROR,
    }
)


_NOT_AUTHORIZED: Final = frozenset(
    {TOPIC_AUTHORIZATION_FAILED, GROUP_AUTHORIZATION_FAILED, CLUSTER_AUTHORIZATION_FAILED}
)


def refused(error: KafkaRefused, operation: str, resource: str) -> str:
    """What a broker said, and the access that is missing, if it is that: an ACL operation on a resource."""
    if error.error_code not in _NOT_AUTHORIZED:
        return str(error)
    return f"{error} (the proxy's own identity needs ALLOW {operation} on {resource})"


def settings_refused(topic: str, refused: Mapping[str, KafkaRefused]) -> Reason:
    """Why a topic does not have some settings: what its brokers said, by setting."""
    names = ", ".join(sorted(refused))
    message = f"the target refuses settings of {topic} ({names}): {why_refused(topic, refused)}"
    return Reason(ReasonCode.TARGET_REFUSES_SETTINGS, message)


def why_refused(topic: str, settings: Mapping[str, KafkaRefused]) -> str:
    """What the brokers said of some settings of a topic, each once."""
    whys = (refused(error, "AlterConfigs", f"topic {topic}") for _, error in sorted(settings.items()))
    return "; ".join(dict.fromkeys(whys))


def deleted(source_topic: str, topic: str) -> str:
    """The message of SOURCE_TOPIC_MAY_BE_DELETED."""
    return (
        f"the source has no {source_topic} any more; {topic} keeps its records: `isthmus topic forget {topic}` ends "
        "following, with --delete they are lost"
    )


def deleted_in_another_log(record: FollowerTopic) -> str:
    """The same of one that is not deleted although the source says that its topic was."""
    return (
        f"the source's brokers do not know the {record.source_topic} that {record.topic} follows, but its control log "
        "is not known to be the one that had it: lost with it, say, or made anew, it does not tell what was deleted. "
        f"{record.topic} keeps its records: `isthmus topic forget {record.topic}` ends following, with --delete they "
        "are lost"
    )


def source_truncating(source_topic: str, topic: str) -> str:
    """The message of SOURCE_TRUNCATING."""
    return (
        f"the source's {source_topic} is being truncated to correspond with its own source; {topic} waits until it is "
        "whole again, and is then cut to correspond as well"
    )


def source_truncated(source_topic: str, succession: Succession) -> str:
    """The message of SOURCE_TRUNCATED."""
    return (
        f"the source's {source_topic} was truncated to correspond with its own source, and made anew as "
        f"{succession.successor}"
    )


def decision_not_stored(offset: int) -> Reason:
    """What is shown of a partition that stands still at a commit marker."""
    return Reason(
        ReasonCode.DECISION_NOT_STORED,
        f"the commit marker at offset {offset} waits until the decision that it carries out is stored in the target: "
        "see the leaders of the source's __transaction_state and of the target's __isthmus_transactions",
    )


def doubted(record: FollowerTopic | None, partition: int) -> Reason | None:
    """What is shown of a partition that may have missed deletions, until it was compared."""
    until = None if record is None else record.doubted.get(partition)
    if record is None or until is None:
        return None
    return Reason(
        ReasonCode.DELETIONS_DOUBTED,
        f"the cleaner of the source's {record.source_topic} may have taken tombstones before they were copied: what "
        f"{record.topic} has before offset {until} is compared when it is there",
    )


def waiting_state(code: str) -> PartitionState | None:
    """The state of a partition that waits for somebody because of ``code``; None if it goes on by itself."""
    if code in DIVERGED:
        return PartitionState.DIVERGED
    if code in REFUSED:
        return PartitionState.REFUSED
    return PartitionState.STOPPED if code in STOPPED else None
