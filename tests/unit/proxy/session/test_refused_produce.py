"""A Produce that is refused by its head: nothing is kept of its records, and it is answered in its turn."""

from __future__ import annotations

import struct
import uuid

import pytest
from support.reservations import EVERYTHING, Process, asked, started
from support.sessions import answer, fronted, id_of, produce, request, run, settled, stalled, until

from isthmus.session.refused_produce import PARTITIONS_MAX, RefusedProduce, has_few_partitions
from isthmus.session.session import Session
from isthmus_control import commands as c
from isthmus_control.model import ResourceType
from isthmus_protocol import peeks
from isthmus_protocol.elements import TooManyElements
from isthmus_protocol.messages import build_request, decode_request, decode_response, encode_request
from isthmus_protocol.schema import ApiKey
from isthmus_protocol.wire import MalformedFrame

INVALID_REQUEST = 42
RECORDS = b"r" * 3_000_000
TOPIC_ID = uuid.UUID(int=7)


def frame_of(version: int, *partitions: int, size: int = 50_000) -> bytes:
    topic = {"topic_id": TOPIC_ID} if version >= 13 else {"name": "closed-x"}
    data = [{"index": each, "records": b"r" * size} for each in partitions]
    values = {"acks": -1, "timeout": 1, "topic_data": [{**topic, "partition_data": data}]}
    return encode_request(build_request(ApiKey.PRODUCE, version, values), 5, "client")


@pytest.mark.parametrize("version", [3, 8, 9, 12, 13])
@pytest.mark.parametrize("chunk", [7_001, 1_000_000])
def test_what_is_left_is_the_request_without_records(version: int, chunk: int) -> None:
    frame = frame_of(version, 3, 1, 4)
    refused, data, left = RefusedProduce(version, 5, len(frame), 100), frame + b"next", None
    for start in range(0, len(data), chunk):
        left, rest = refused.feed(data[start : start + chunk])
        if left is not None:
            assert (rest + data[start + chunk :]) == b"next"
            break
    assert left is not None
    head, payload = decode_request(left)
    assert (head.version, head.correlation_id) == (version, 5)
    (topic,) = payload.topic_data  # type: ignore[attr-defined]
    assert getattr(topic, "topic_id", TOPIC_ID) == TOPIC_ID
    assert [(part.index, part.records) for part in topic.partition_data] == [(3, None), (1, None), (4, None)]


def test_what_is_no_produce_or_has_too_many_partitions_is_refused() -> None:
    frame = frame_of(9, *range(50), size=0)
    with pytest.raises(TooManyElements):
        RefusedProduce(9, 5, len(frame), 49).feed(frame)
    with pytest.raises(MalformedFrame):
        RefusedProduce(9, 5, len(frame) - 30, 100).feed(frame)


@pytest.mark.parametrize("version", [3, 8, 9, 12, 13])
@pytest.mark.parametrize("partitions", [0, 1, PARTITIONS_MAX, PARTITIONS_MAX + 1, 20_000])
def test_how_many_partitions_come_is_told_by_the_head(version: int, partitions: int) -> None:
    frame = frame_of(version, *range(partitions), size=0)
    ((_, end),) = peeks.peek(ApiKey.PRODUCE, version, "request", (("topic_data", ("name|topic_id@",)),))(frame)
    assert has_few_partitions(version, frame, end) is (partitions <= PARTITIONS_MAX)
    assert not has_few_partitions(version, frame[:end], end), "it is not there yet"


def test_one_of_thousands_of_partitions_is_kept_and_refused_in_the_thread() -> None:
    async def main() -> None:
        process = Process()
        hooks = started(process).isthmus_request_hooks()
        process.reserve("closed-")
        async with fronted(*hooks) as front:
            client, upstream, session = await front.connect()
            frame = frame_of(9, *range(5_000), size=10)
            client.send(frame[:20_000])
            await until(lambda: _kept(session) > 0)
            client.send(frame[20_000:], request(6))
            upstream.send(asked(await upstream.take(), EVERYTHING))
            _, payload = decode_response(ApiKey.PRODUCE, 9, await client.take())
            (topic,) = payload.responses  # type: ignore[attr-defined]
            assert [each.error_code for each in topic.partition_responses] == [INVALID_REQUEST] * 5_000
            assert id_of(await upstream.take()) == 6

    run(main())


def test_it_is_answered_in_its_turn_and_nothing_is_kept() -> None:
    async def main() -> None:
        process = Process()
        hooks = started(process).isthmus_request_hooks()
        process.reserve("closed-")
        async with fronted(*hooks) as front:
            most = front.gateway.queued_bytes.left
            client, upstream, session = await front.connect()
            client.send(request(1), frame := produce(2, topic="closed-x", records=RECORDS), request(3))
            assert id_of(await upstream.take()) == 1
            question = await upstream.take()
            assert _kept(session) == 0
            upstream.send(answer(1), asked(question, EVERYTHING))
            assert id_of(await upstream.take()) == 3
            assert front.gateway.queued_bytes.left == most
            assert _kept(session) == 0
            upstream.send(answer(3))
            assert await client.take() == answer(1)
            answered = await client.take()
            _, payload = decode_response(ApiKey.PRODUCE, 9, answered)
            (topic,) = payload.responses  # type: ignore[attr-defined]
            assert (topic.name, topic.partition_responses[0].error_code) == ("closed-x", INVALID_REQUEST)
            assert id_of(answered, request_frame=False) == 2
            assert await client.take() == answer(3)

            client.send(frame[: len(frame) // 2])
            await stalled(front)
            assert _kept(session) == 0
            client.send(frame[len(frame) // 2 :], request(4))
            upstream.send(asked(await upstream.take(), describes=()))
            assert id_of(await client.take(), request_frame=False) == 2
            assert id_of(await upstream.take()) == 4

    run(main())


def test_acks_0_end_the_connection_as_ever() -> None:
    async def main() -> None:
        process = Process()
        hooks = started(process).isthmus_request_hooks()
        process.reserve("closed-")
        async with fronted(*hooks) as front:
            client, _, _ = await front.connect()
            client.send(produce(2, acks=0, topic="closed-x", records=RECORDS))
            assert await client.closed() == b""
            await settled(front)

    run(main())


def test_what_may_be_written_after_all_is_sent_again_by_the_producer() -> None:
    async def main() -> None:
        process = Process()
        hooks = started(process).isthmus_request_hooks()
        process.reserve("closed-")
        async with fronted(*hooks) as front:
            client, upstream, session = await front.connect()
            frame = produce(2, topic="closed-x", records=RECORDS)
            client.send(frame[: len(frame) // 2])
            await stalled(front)
            process.do(c.AlterNamespace(ResourceType.TOPIC, "closed-", False))
            client.send(frame[len(frame) // 2 :])
            assert await upstream.closed() == b"", "a request without its records is forwarded to nobody"
            assert await client.closed() == b""
            assert session.close_cause == "refused"
            await until(lambda: not front.gateway.sessions)

    run(main())


def test_what_may_be_written_when_the_broker_has_said_who_may_know_is_sent_again_too() -> None:
    async def main() -> None:
        process = Process()
        hooks = started(process).isthmus_request_hooks()
        process.reserve("closed-")
        async with fronted(*hooks) as front:
            client, upstream, session = await front.connect()
            client.send(produce(2, topic="closed-x", records=RECORDS))
            question = await upstream.take()
            process.do(c.AlterNamespace(ResourceType.TOPIC, "closed-", False))
            upstream.send(asked(question, EVERYTHING))
            assert await upstream.closed() == b"", "a request without its records is forwarded to nobody"
            assert await client.closed() == b""
            assert session.close_cause == "refused"

    run(main())


def test_a_client_that_leaves_in_the_middle_leaves_nothing_behind() -> None:
    async def main() -> None:
        process = Process()
        hooks = started(process).isthmus_request_hooks()
        process.reserve("closed-")
        async with fronted(*hooks) as front:
            client, _, _ = await front.connect()
            client.send(struct.pack(">i", 90_000_000) + produce(2, topic="closed-x", records=RECORDS)[4:])
            await stalled(front)
            client.reset()
            await until(lambda: not front.gateway.sessions)

    run(main())


def _kept(session: Session) -> int:
    return len(session.downstream._partial or b"")
