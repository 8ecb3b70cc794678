"""No answer tells a client of the proxies' own topics unless it named them: all APIs are looked through."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator
from typing import Any, Final

import pytest
from support.loop_time import LOOP_S_MAX, longest, went_out
from support.reservations import INTERNAL_ID, Process, request_of, started

from isthmus_plugins.api import Gate, Replace, Request
from isthmus_plugins.reservation import ReservationPlugin
from isthmus_plugins.reservation.untold import ASSIGNING, TELLING
from isthmus_protocol.messages import build_response, decode_request, decode_response, encode_response
from isthmus_protocol.schema import ApiKey, EntitySpec, message_spec, supported

OURS: Final = "__isthmus_control"
OURS_ID, SPOOL_ID, THEIRS_ID = uuid.UUID(bytes=INTERNAL_ID), *(uuid.UUID(int=n, version=4) for n in (1, 2))
SPOOL: Final = "__isthmus_spool_00000000-0000-4000-8000-000000000001_2"
PART: Final = {"partition_index": 0}

TOLD: Final[dict[tuple[ApiKey, str], set[str]]] = {
    (ApiKey.METADATA, "topics"): {"name", "topic_id"},
    (ApiKey.DESCRIBE_TOPIC_PARTITIONS, "topics"): {"name", "topic_id"},
    (ApiKey.DESCRIBE_TOPIC_PARTITIONS, "next_cursor"): {"topic_name"},
    (ApiKey.CONSUMER_GROUP_HEARTBEAT, "assignment.topic_partitions"): {"topic_id"},
    (ApiKey.SHARE_GROUP_HEARTBEAT, "assignment.topic_partitions"): {"topic_id"},
    (ApiKey.CONSUMER_GROUP_DESCRIBE, "groups.members.assignment.topic_partitions"): {"topic_id", "topic_name"},
    (ApiKey.CONSUMER_GROUP_DESCRIBE, "groups.members.target_assignment.topic_partitions"): {"topic_id", "topic_name"},
    (ApiKey.SHARE_GROUP_DESCRIBE, "groups.members.assignment.topic_partitions"): {"topic_id", "topic_name"},
    (ApiKey.OFFSET_FETCH, "topics"): {"name"},
    (ApiKey.OFFSET_FETCH, "groups.topics"): {"name", "topic_id"},
    (ApiKey.DESCRIBE_SHARE_GROUP_OFFSETS, "groups.topics"): {"topic_name", "topic_id"},
    (ApiKey.DESCRIBE_LOG_DIRS, "results.topics"): {"name"},
    (ApiKey.ELECT_LEADERS, "replica_election_results"): {"topic"},
    (ApiKey.LIST_PARTITION_REASSIGNMENTS, "topics"): {"name"},
    (ApiKey.LIST_CONFIG_RESOURCES, "config_resources"): {"resource_name"},
    (ApiKey.DESCRIBE_TRANSACTIONS, "transaction_states.topics"): {"topic"},
    (ApiKey.LIST_GROUPS, "groups"): {"group_id"},
}
"""Places of topics and groups that an answer may tell without being asked for them."""

NAMED: Final = {
    # The answer to each topic that the request named.
    *((api, "responses") for api in (ApiKey.PRODUCE, ApiKey.FETCH, ApiKey.SHARE_FETCH, ApiKey.SHARE_ACKNOWLEDGE)),
    *((api, "topics") for api in (ApiKey.LIST_OFFSETS, ApiKey.OFFSET_COMMIT, ApiKey.TXN_OFFSET_COMMIT)),
    *((api, "topics") for api in (ApiKey.OFFSET_DELETE, ApiKey.OFFSET_FOR_LEADER_EPOCH, ApiKey.DESCRIBE_PRODUCERS)),
    *((api, "topics") for api in (ApiKey.CREATE_TOPICS, ApiKey.DELETE_RECORDS, ApiKey.DESCRIBE_QUORUM)),
    *((api, "responses") for api in (ApiKey.DELETE_TOPICS, ApiKey.ALTER_PARTITION_REASSIGNMENTS)),
    *((api, "responses") for api in (ApiKey.ALTER_CONFIGS, ApiKey.INCREMENTAL_ALTER_CONFIGS)),
    *((api, "responses") for api in (ApiKey.ALTER_SHARE_GROUP_OFFSETS, ApiKey.DELETE_SHARE_GROUP_OFFSETS)),
    *((api, "results") for api in (ApiKey.CREATE_PARTITIONS, ApiKey.ALTER_REPLICA_LOG_DIRS, ApiKey.DESCRIBE_CONFIGS)),
    (ApiKey.ADD_PARTITIONS_TO_TXN, "results_by_topic_v3_and_below"),
    (ApiKey.ADD_PARTITIONS_TO_TXN, "results_by_transaction.topic_results"),
    (ApiKey.WRITE_TXN_MARKERS, "markers.topics"),
    # What members of a group have told of themselves.
    (ApiKey.STREAMS_GROUP_DESCRIBE, "groups.topology.subtopologies.state_changelog_topics"),
    (ApiKey.STREAMS_GROUP_DESCRIBE, "groups.topology.subtopologies.repartition_source_topics"),
    (ApiKey.STREAMS_GROUP_HEARTBEAT, "partitions_by_user_endpoint.active_partitions"),
    (ApiKey.STREAMS_GROUP_HEARTBEAT, "partitions_by_user_endpoint.standby_partitions"),
    # What operators have set.
    (ApiKey.DESCRIBE_ACLS, "resources"),
    (ApiKey.DELETE_ACLS, "filter_results.matching_acls"),
    # No topics.
    (ApiKey.DESCRIBE_CONFIGS, "results.configs"),
    (ApiKey.DESCRIBE_CONFIGS, "results.configs.synonyms"),
    (ApiKey.CREATE_TOPICS, "topics.configs"),
    (ApiKey.DESCRIBE_QUORUM, "nodes.listeners"),
    (ApiKey.API_VERSIONS, "supported_features"),
    (ApiKey.API_VERSIONS, "finalized_features"),
}
_GROUPS_NAMED: Final = "group_id"
"""Other answers about groups are about those that were asked for."""


def _names(spec: EntitySpec, path: str = "") -> Iterator[tuple[str, str]]:
    for field in (*spec.fields, *spec.tagged):
        if field.entity is not None:
            yield from _names(field.entity, f"{path}.{field.name}" if path else field.name)
        elif field.name in ("name", "topic", "topic_name", "topic_id", "resource_name"):
            yield path, field.name


def test_every_place_is_known() -> None:
    """Fails when a new API or version tells topics somewhere: then ``untold`` must learn it."""
    found: dict[tuple[int, str], set[str]] = {}
    for api_key, (low, high) in supported().items():
        for version in range(low, high + 1):
            for path, name in _names(message_spec(api_key, version, "response")):
                found.setdefault((api_key, path), set()).add(name)
    told = {place: names for place, names in TOLD.items() if names != {_GROUPS_NAMED}}
    assert {place: names for place, names in found.items() if place not in NAMED} == told
    assert found.keys() >= NAMED


@pytest.fixture
def plugin() -> ReservationPlugin:
    process = Process()
    process.known_ids = {SPOOL_ID.bytes: SPOOL, THEIRS_ID.bytes: "theirs"}
    return started(process)


def _asked(api_key: int, version: int) -> Request:
    """All topics are asked for."""
    values: dict[str, Any] = {}
    if api_key == ApiKey.METADATA:
        values = {"topics": None if version else []}
    elif api_key == ApiKey.OFFSET_FETCH:
        values = {"group_id": "g", "topics": None, "groups": [{"group_id": "g", "topics": None}]}
    elif api_key == ApiKey.ELECT_LEADERS:
        values = {"topic_partitions": None, "timeout": 1000}
    return request_of(api_key, version, values)


def _told(api_key: int, path: str, depth: int, names: set[str]) -> Any:
    """The array at the end of a path with two topics of ours and one of others, in structs around it."""
    steps = path.split(".")
    if depth < len(steps):
        inside = _told(api_key, path, depth + 1, names)
        single = steps[depth] in ("assignment", "target_assignment")
        if depth == len(steps) - 1:
            return {steps[depth]: inside}
        return {steps[depth]: inside if single else [inside]}
    known = {"name": OURS, "topic": OURS, "topic_name": OURS, "group_id": OURS, "resource_name": OURS}
    entries = []
    for name, topic_id in ((OURS, OURS_ID), (SPOOL, SPOOL_ID), ("theirs", THEIRS_ID)):
        entry: dict[str, Any] = {
            each: topic_id if each == "topic_id" else name for each in (*names, *known) if each in names
        }
        if api_key == ApiKey.LIST_CONFIG_RESOURCES:
            entry["resource_type"] = 2
        entries.append(entry)
    return entries


CASES = [
    (api_key, path, version)
    for (api_key, path) in TOLD
    if path != "next_cursor"
    for version in range(supported()[api_key][0], supported()[api_key][1] + 1)
    if not (api_key == ApiKey.LIST_CONFIG_RESOURCES and version == 0)  # of client metrics alone
    and not (api_key == ApiKey.OFFSET_FETCH and (version >= 8) != path.startswith("groups"))
    and not (api_key == ApiKey.OFFSET_FETCH and version < 2)  # which cannot ask for all
]


def _answer_to(plugin: ReservationPlugin, request: Request, frame: bytes) -> bytes | Gate:
    """What the hooks of an API make of an answer."""
    answer: bytes | Gate = frame
    for hook in plugin.isthmus_request_hooks():
        if hook.api_key == request.api_key:
            verdict = hook.on_request(request)
            if isinstance(verdict, Replace) and verdict.on_response is not None:
                assert verdict.frame is request.frame
                assert isinstance(answer, bytes)
                answer = verdict.on_response(answer)
    return answer


@pytest.mark.parametrize(("api_key", "path", "version"), CASES)
def test_ours_are_left_out(plugin: ReservationPlugin, api_key: ApiKey, path: str, version: int) -> None:
    values = _told(api_key, path, 0, TOLD[api_key, path])
    frame = encode_response(build_response(api_key, version, values), 7)
    answer = _answer_to(plugin, _asked(api_key, version), frame)
    assert isinstance(answer, bytes)
    assert b"__isthmus_" in frame or OURS_ID.bytes in frame
    for ours in (b"__isthmus_", OURS_ID.bytes, SPOOL_ID.bytes):
        assert ours not in answer
    assert b"theirs" in answer or THEIRS_ID.bytes in answer
    decode_response(api_key, version, answer)


def test_of_a_large_answer_they_are_left_out_beside_the_loop(plugin: ReservationPlugin) -> None:
    """A small request has it: DescribeLogDirs of thousands of topics kept the loop for 100 ms."""
    names = [*(f"theirs-{each}" for each in range(2_000)), OURS]
    topics = [{"name": name, "partitions": [PART]} for name in names]
    frame = encode_response(build_response(ApiKey.DESCRIBE_LOG_DIRS, 4, {"results": [{"topics": topics}]}), 7)

    async def main() -> None:
        gate = _answer_to(plugin, _asked(ApiKey.DESCRIBE_LOG_DIRS, 4), frame)
        assert isinstance(gate, Gate)
        answer = await went_out(gate)
        (result,) = decode_response(ApiKey.DESCRIBE_LOG_DIRS, 4, answer)[1].results  # type: ignore[attr-defined]
        assert [topic.name for topic in result.topics] == names[:-1]

    asyncio.run(main())


@pytest.mark.parametrize("known", [True, False])
def test_of_a_large_assignment_they_are_too(known: bool) -> None:
    """A pattern matches all of thousands of topics, and ours."""
    theirs = [uuid.UUID(int=each, version=4) for each in range(10, 2_010)]
    process = Process()
    names = {each.bytes: f"theirs-{each}" for each in theirs} | {SPOOL_ID.bytes: SPOOL}
    process.known_ids, process.ids = (names, {}) if known else ({}, names)
    plugin = started(process)
    given = [{"topic_id": each, "partitions": [0]} for each in (*theirs, SPOOL_ID)]
    values = {"member_epoch": 4, "assignment": {"topic_partitions": given}}
    frame = encode_response(build_response(ApiKey.CONSUMER_GROUP_HEARTBEAT, 1, values), 7)

    async def main() -> None:
        gate = _answer_to(plugin, _asked(ApiKey.CONSUMER_GROUP_HEARTBEAT, 1), frame)
        assert isinstance(gate, Gate)
        answer, spent = await longest(went_out(gate))
        told: Any = decode_response(ApiKey.CONSUMER_GROUP_HEARTBEAT, 1, answer)[1]
        assert [each.topic_id for each in told.assignment.topic_partitions] == theirs
        assert spent < LOOP_S_MAX, f"{spent * 1000:.1f} ms"
        await plugin.isthmus_stop()

    asyncio.run(main())


def test_the_apis_of_the_table_are_hooked() -> None:
    spliced = {ApiKey.METADATA, ApiKey.DESCRIBE_TOPIC_PARTITIONS, ApiKey.OFFSET_FETCH, ApiKey.ELECT_LEADERS}
    assert {api for api, _ in TOLD} == {*ASSIGNING, *TELLING} | spliced


def test_kafkas_own_topics_are_told(plugin: ReservationPlugin) -> None:
    frame = encode_response(build_response(ApiKey.METADATA, 12, {"topics": [{"name": "__consumer_offsets"}]}), 7)
    assert _answer_to(plugin, _asked(ApiKey.METADATA, 12), frame) is frame


@pytest.mark.parametrize(("cursor", "shown"), [(OURS, ("__isthmus_", 0)), ("theirs", ("theirs", 5)), (None, None)])
def test_a_page_goes_on_at_no_topic_of_ours(plugin: ReservationPlugin, cursor: str | None, shown: Any) -> None:
    topics = [{"name": "a", "topic_id": THEIRS_ID}, {"name": OURS, "topic_id": OURS_ID}]
    values = {"topics": topics, "next_cursor": cursor and {"topic_name": cursor, "partition_index": 5}}
    frame = encode_response(build_response(ApiKey.DESCRIBE_TOPIC_PARTITIONS, 0, values), 7)
    answer = _answer_to(plugin, _asked(ApiKey.DESCRIBE_TOPIC_PARTITIONS, 0), frame)
    assert isinstance(answer, bytes)
    told: Any = decode_response(ApiKey.DESCRIBE_TOPIC_PARTITIONS, 0, answer)[1]
    assert [topic.name for topic in told.topics] == ["a"]
    assert (told.next_cursor and (told.next_cursor.topic_name, told.next_cursor.partition_index)) == shown


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("reachable", [True, False])
def test_an_assigned_id_that_is_not_known_is_looked_up(version: int, reachable: bool) -> None:
    process = Process()
    process.reachable = reachable
    process.ids = {SPOOL_ID.bytes: SPOOL, THEIRS_ID.bytes: "theirs"}
    plugin = started(process)
    given = [{"topic_id": each, "partitions": [0]} for each in (SPOOL_ID, THEIRS_ID)]
    values = {"member_epoch": 4, "assignment": {"topic_partitions": given}}
    frame = encode_response(build_response(ApiKey.CONSUMER_GROUP_HEARTBEAT, version, values), 7)

    async def waited() -> Any:
        gate = _answer_to(plugin, _asked(ApiKey.CONSUMER_GROUP_HEARTBEAT, version), frame)
        assert isinstance(gate, Gate)
        opened = asyncio.Event()
        if not gate.take(opened.set):
            await opened.wait()
        await plugin.isthmus_stop()
        answer = gate.answer()
        assert isinstance(answer, bytes)
        return decode_response(ApiKey.CONSUMER_GROUP_HEARTBEAT, version, answer)[1]

    told = asyncio.run(waited())
    if reachable:
        assert [each.topic_id for each in told.assignment.topic_partitions] == [THEIRS_ID]
        assert told.member_epoch == 4
    else:
        assert (int(told.error_code), told.assignment) == (14, None)


@pytest.mark.parametrize("version", [0, 1])
def test_a_member_says_again_what_it_owns_while_it_is_not_told_of_all(plugin: ReservationPlugin, version: int) -> None:
    """Or its coordinator would wait until it has given up what it never had."""

    def forwarded(epoch: int, owned: list[uuid.UUID] | None, given: list[uuid.UUID] | None = None) -> Any:
        """What a coordinator is told to be owned by a member; ``given``: what it assigns then."""
        parts = owned if owned is None else [{"topic_id": each, "partitions": [0]} for each in owned]
        values = {"group_id": "g", "member_id": "m", "member_epoch": epoch, "topic_partitions": parts}
        request = request_of(ApiKey.CONSUMER_GROUP_HEARTBEAT, version, values)
        (verdict,) = (
            each
            for hook in plugin.isthmus_request_hooks()
            if hook.api_key == ApiKey.CONSUMER_GROUP_HEARTBEAT and (each := hook.on_request(request)) is not None
        )
        assert isinstance(verdict, Replace)
        assert verdict.on_response is not None
        assigned = given and {"topic_partitions": [{"topic_id": each, "partitions": [0]} for each in given]}
        values = {"member_id": "m", "member_epoch": 4, "assignment": assigned}
        verdict.on_response(encode_response(build_response(ApiKey.CONSUMER_GROUP_HEARTBEAT, version, values), 7))
        asked: Any = decode_request(verdict.frame)[1]
        found = asked.topic_partitions
        return found if found is None else [each.topic_id for each in found]

    assert forwarded(0, [], [THEIRS_ID]) == []
    assert forwarded(4, None) is None, "it is told of all"
    assert forwarded(4, [THEIRS_ID]) == [THEIRS_ID]
    assert forwarded(4, None, [THEIRS_ID, OURS_ID]) is None
    assert forwarded(4, None) == [THEIRS_ID]
    assert forwarded(4, None, [THEIRS_ID]) == [THEIRS_ID], "ours is taken from it"
    assert forwarded(4, []) == []
    assert forwarded(5, None) == []
    assert forwarded(-1, None) is None
    assert forwarded(0, [], [OURS_ID]) == []
    assert forwarded(4, None) == []
