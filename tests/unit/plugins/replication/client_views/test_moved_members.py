"""What members of another cluster's groups are answered where they find their coordinator here (KIP-848)."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from support.loop_time import went_out
from support.reservations import Process, request_of

from isthmus_control import commands as c
from isthmus_control.model import ResourceType
from isthmus_plugins.api import Answer, Client, Gate, Replace
from isthmus_plugins.cluster import KafkaRefused
from isthmus_plugins.process import PluginContext
from isthmus_plugins.replication.client_views.moved_members import MESSAGE, MovedMembers
from isthmus_protocol.bodies import error_code
from isthmus_protocol.error_codes import (
    COORDINATOR_LOAD_IN_PROGRESS,
    GROUP_AUTHORIZATION_FAILED,
    GROUP_ID_NOT_FOUND,
    NOT_COORDINATOR,
    UNKNOWN_MEMBER_ID,
)
from isthmus_protocol.messages import build_response, decode_response, encode_response
from isthmus_protocol.schema import ApiKey

API, GROUP = ApiKey.CONSUMER_GROUP_HEARTBEAT, ResourceType.CONSUMER_GROUP
BROKERS_WORDS = "Group a-g is not a consumer group."
MEMBER_ID = "m"
MEMBER, JOINS, LEAVES, LEAVES_FOR_A_WHILE = 5, 0, -1, -2
"""Member epochs."""


class Case:
    """A cluster with a namespace of groups, ``a-``, in which offsets of the group ``a-g`` were copied."""

    def __init__(self) -> None:
        self.process = Process()
        self.process.groups = {"a-g", "b-g"}
        self.members = MovedMembers(cast(PluginContext, self.process))
        self.hook, self.commits = self.members.hooks()
        self.process.subscribe(self.members.control_changed)

    def known(self) -> Case:
        self.process.do(c.CreateNamespace(GROUP, "a-", False))
        return self

    def answered(
        self, group: str = "a-g", epoch: int = MEMBER, code: int = GROUP_ID_NOT_FOUND, version: int = 1
    ) -> tuple[int, str | None]:
        """The error that a member sees where the broker answers with ``code``, and the words of it."""
        values = {"group_id": group, "member_id": MEMBER_ID, "member_epoch": epoch}
        request = request_of(API, version, values)
        given = {"error_code": error_code(code), "error_message": BROKERS_WORDS if code else None}
        frame = encode_response(build_response(API, version, given), 7)

        async def seen() -> bytes:
            verdict = self.hook.on_request(request)
            if verdict is None:
                return frame
            assert isinstance(verdict, Replace)
            assert verdict.frame is request.frame
            assert verdict.on_response is not None
            answer = verdict.on_response(frame)
            assert isinstance(answer, Gate) or answer is frame, "without a look at the cluster it stays as it is"
            return await went_out(answer)

        correlation_id, payload = decode_response(API, version, asyncio.run(seen()))
        told: Any = payload
        assert correlation_id == 7
        return int(told.error_code), told.error_message

    def commits_as(self, member_id: str, group: str = "a-g") -> int:
        """The error of a commit without an epoch, which the broker would take."""
        partitions = [{"partition_index": 0, "committed_offset": 3}]
        values = {"group_id": group, "member_id": member_id, "topics": [{"name": "t", "partitions": partitions}]}
        verdict = self.commits.on_request(request_of(ApiKey.OFFSET_COMMIT, 9, values))
        if verdict is None:
            return 0
        assert isinstance(verdict, Answer)
        assert isinstance(verdict.frame, bytes)
        answer: Any = decode_response(ApiKey.OFFSET_COMMIT, 9, verdict.frame)[1]
        return int(answer.topics[0].partitions[0].error_code)


@pytest.mark.parametrize("version", [0, 1])
def test_a_member_whose_group_is_here_as_offsets_may_join(version: int) -> None:
    assert Case().known().answered(version=version) == (UNKNOWN_MEMBER_ID, MESSAGE)


def test_a_group_that_follows_is_joined_too() -> None:
    case = Case()
    case.process.follow(GROUP, "a-")
    assert case.answered()[0] == UNKNOWN_MEMBER_ID


@pytest.mark.parametrize("epoch", [JOINS, LEAVES, LEAVES_FOR_A_WHILE])
def test_who_joins_or_leaves_is_answered_by_the_broker(epoch: int) -> None:
    assert Case().known().answered(epoch=epoch) == (GROUP_ID_NOT_FOUND, BROKERS_WORDS)


def test_other_groups_are_answered_by_the_broker() -> None:
    assert Case().known().answered("b-g") == (GROUP_ID_NOT_FOUND, BROKERS_WORDS)
    assert Case().answered() == (GROUP_ID_NOT_FOUND, BROKERS_WORDS), "no namespace of groups is known"
    topics = Case()
    topics.process.do(c.CreateNamespace(ResourceType.TOPIC, "a-", False))
    assert topics.answered() == (GROUP_ID_NOT_FOUND, BROKERS_WORDS)


def test_other_answers_stay() -> None:
    for code in (0, NOT_COORDINATOR, GROUP_AUTHORIZATION_FAILED):
        assert Case().known().answered(code=code)[0] == code


def test_where_nothing_of_the_group_is_here_the_member_does_not_begin_anywhere() -> None:
    case = Case().known()
    case.process.groups = set()
    assert case.answered() == (GROUP_ID_NOT_FOUND, BROKERS_WORDS)


def test_while_that_cannot_be_found_out_the_member_asks_again() -> None:
    case = Case().known()
    case.process.reachable = False
    assert case.answered() == (COORDINATOR_LOAD_IN_PROGRESS, None)
    refused = Case().known()
    refused.process.refuses = KafkaRefused(GROUP_AUTHORIZATION_FAILED, "GROUP_AUTHORIZATION_FAILED", "no")
    assert refused.answered() == (GROUP_ID_NOT_FOUND, BROKERS_WORDS)


def test_a_namespace_that_is_gone_counts_no_more() -> None:
    case = Case().known()
    case.process.do(c.DeleteNamespace(GROUP, "a-"))
    assert case.answered() == (GROUP_ID_NOT_FOUND, BROKERS_WORDS)


def test_until_it_has_joined_a_member_commits_nothing() -> None:
    case = Case().known()
    assert case.commits_as(MEMBER_ID) == 0
    assert case.answered()[0] == UNKNOWN_MEMBER_ID
    assert case.commits_as(MEMBER_ID) == UNKNOWN_MEMBER_ID
    assert [case.commits_as(""), case.commits_as("n"), case.commits_as(MEMBER_ID, "b-g")] == [0, 0, 0]
    assert case.answered(epoch=JOINS, code=NOT_COORDINATOR)[0] == NOT_COORDINATOR
    assert case.commits_as(MEMBER_ID) == UNKNOWN_MEMBER_ID
    assert case.answered(epoch=JOINS, code=0)[0] == 0
    assert case.commits_as(MEMBER_ID) == 0


def test_a_connection_that_is_closed_is_forgotten() -> None:
    case = Case().known()
    assert case.answered()[0] == UNKNOWN_MEMBER_ID
    case.members.closed(Client(1, "127.0.0.1:5000", 1))
    assert case.commits_as(MEMBER_ID) == 0
